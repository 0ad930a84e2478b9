// Tests the embedding: forward, sort, backward, per-example norms (kernel_test.cuh).
#include "kernel_test.cuh"

#include "cuda/embedding.cuh"
#include "model/model.h"

struct Case {
    int B, T, C, V;
    std::vector<uint16_t> tokens; // (B, T + 1)
    std::vector<real> dx;         // (B, T, C)
    uint16_t *d_tokens;           // tokens on the device
    real *d_dx;
    EmbeddingOrder order, by_example;

    int rows() const { return B * T; }
    size_t count() const { return (size_t)rows() * C; } // elements of dx
    uint16_t token(int row) const { return tokens[(size_t)(row / T) * (T + 1) + row % T]; }
};

// If d_first is NULL, there are no documents and no dropout, and the result must be exact.
static void check_forward(const Case &k, const uint16_t *d_first, const std::vector<uint16_t> &first) {
    const bool masked = d_first != NULL;
    const std::vector<real> wte = random_vector<real>((size_t)k.V * k.C), wpe = random_vector<real>((size_t)k.T * k.C);
    const Dropout d = dropout_at(dropout_of(masked ? 0.9 * random_uniform() : 0, random_u64()), random_u64() >> 2, 3);
    real *out = device_new<real>(k.count());
    CALL_OK(embedding_forward(out, k.d_tokens, d_first, device_from(wte), device_from(wpe),
                              row_dropout(d, DROPOUT_EMBEDDING, k.T), k.B, k.C, 0, &e));
    std::vector<double> want(k.count());
    for (size_t i = 0; i < want.size(); i++) {
        const size_t row = i / k.C, c = i % k.C, t = row % k.T;
        const double sum =
            value(wte[k.token(row) * (size_t)k.C + c]) + value(wpe[(t - (masked ? first[row] : 0)) * k.C + c]);
        const Dropout of_row = dropout_at(d, d.example + row / k.T, d.layer);
        want[i] = masked ? sum * dropout_factor(of_row, DROPOUT_EMBEDDING, 0, (uint32_t)t, (uint32_t)c)
                         : value((real)(float)sum);
    }
    check_close("embedding", host_from(out, want.size()), want, masked ? ROUNDING + 1e-6 : 0.0, masked ? 1e-6 : 0.0);
}

// Checks the order of rows by token, and the order by example and token. Stores both orders in k.
static void check_sort(Case *k) {
    const int N = k->rows();
    std::vector<uint32_t> sorted(4 * (size_t)N), want(N), keys;
    const auto part = [&](int i) {
        return std::vector<uint32_t>(sorted.begin() + (size_t)i * N, sorted.begin() + (size_t)(i + 1) * N);
    };
    embedding_sort(sorted.data(), k->tokens.data(), NULL, k->B, k->T);
    std::iota(want.begin(), want.end(), 0);
    std::stable_sort(want.begin(), want.end(), [&](uint32_t a, uint32_t b) { return k->token(a) < k->token(b); });
    for (uint32_t row : want) keys.push_back(k->token(row));
    CHECK(part(1) == want, "the sort by token is wrong");
    CHECK(part(0) == keys, "the sorted keys are wrong");
    std::stable_sort(want.begin(), want.end(), [&](uint32_t a, uint32_t b) { return a / k->T < b / k->T; });
    CHECK(part(3) == want, "the sort by example and token is wrong");
    uint32_t *d_sorted = device_from(sorted);
    k->order = embedding_order(d_sorted, false, N), k->by_example = embedding_order(d_sorted, true, N);
}

static void check_backward(const Case &k) {
    const size_t C = k.C;
    const std::vector<float> dwte = random_vector<float>(k.V * C);
    float *d_dwte = device_new<float>(dwte.size());
    void *workspace = workspace_new(embedding_workspace_bytes(k.B, k.T, k.C));
    run_twice(
        "embedding backward", [&] { device_set(d_dwte, dwte); },
        [&] { CALL_OK(embedding_backward(d_dwte, k.d_dx, k.order, k.B, k.T, k.C, workspace, 0, &e)); },
        {{d_dwte, dwte.size() * sizeof(float)}});
    std::vector<double> want(dwte.begin(), dwte.end());
    for (size_t i = 0; i < k.count(); i++) want[k.token(i / C) * C + i % C] += value(k.dx[i]);
    check_close("dwte", host_from(d_dwte, dwte.size()), want, SUM_RELATIVE, SUM_ABSOLUTE);
}

// Sets squares = {|E_b|^2, <E_b, U_b>} of one example; U_b: (V, C). Returns sum |E U|, to scale <E, U>'s tolerance.
static double squares_reference(double squares[2], const Case &k, int b, const float *U) {
    std::vector<double> E((size_t)k.V * k.C, 0.0);
    double magnitude = 0.0;
    squares[0] = squares[1] = 0.0;
    for (int t = 0; t < k.T; t++)
        for (int c = 0; c < k.C; c++)
            E[(size_t)k.token(b * k.T + t) * k.C + c] += value(k.dx[((size_t)b * k.T + t) * k.C + c]);
    for (size_t i = 0; i < E.size(); i++) {
        squares[0] += E[i] * E[i];
        squares[1] += E[i] * U[i];
        magnitude += fabs(E[i] * U[i]);
    }
    return magnitude;
}

// Checks row_at: 1 + a token's last position in an example; 0 if it does not occur. Returns UG, the rows of U that
// row_at selects.
static float *gathered(const Case &k, const float *U) {
    const size_t VC = (size_t)k.V * k.C, TC = (size_t)k.T * k.C;
    float *UG = device_new<float>(k.count());
    std::vector<int> want((size_t)k.B * k.V, 0);
    int *row_at = device_new<int>(want.size());
    CALL_OK(embedding_rows(row_at, k.d_tokens, k.B, k.T, k.V, 0, &e));
    for (int n = 0; n < k.rows(); n++) want[(size_t)(n / k.T) * k.V + k.token(n)] = n % k.T + 1;
    CHECK(host_from(row_at, want.size()) == want, "rows of B %d T %d V %d", k.B, k.T, k.V);
    for (int b = 0; b < k.B; b++)
        CALL_OK(embedding_gather(UG + b * TC, U + b * VC, row_at + (size_t)b * k.V, k.V, k.C, 0, &e));
    return UG;
}

static void check_example_squares(const Case &k) {
    const std::vector<float> U = random_vector<float>((size_t)k.B * k.V * k.C);
    float *UG = gathered(k, device_from(U));
    double *sums = device_new<double>(2), magnitude = 0.0;
    void *workspace = workspace_new(embedding_workspace_bytes(k.B, k.T, k.C));
    run_twice(
        "embedding squares", [&] { device_set(sums, std::vector<double>(2, SQUARES_BEFORE)); },
        [&] {
            CALL_OK(embedding_example_squares(sums, sums + 1, k.d_dx, UG, k.by_example, k.B, k.T, k.C, workspace, 0,
                                              &e));
        },
        {{sums, 2 * sizeof(double)}});
    std::vector<double> want(2, 0.0);
    for (int b = 0; b < k.B; b++) {
        double squares[2];
        magnitude += squares_reference(squares, k, b, U.data() + (size_t)b * k.V * k.C);
        for (int i = 0; i < 2; i++) want[i] += squares[i];
    }
    const std::vector<double> got = host_from(sums, 2);
    for (int i = 0; i < 2; i++) CHECK_CLOSE(got[i] - SQUARES_BEFORE, want[i], 1e-5, i == 1 ? magnitude : 0.0);
}

// ---- Documents and dropout ------------------------------------------------------------------------------------------

// Checks where documents begin and end; `separator` opens a document.
static std::vector<uint16_t> check_documents(const Case &k, int separator) {
    std::vector<uint16_t> first(k.rows()), last(k.rows()), got_first(k.rows()), got_last(k.rows());
    for (int n = 0; n < k.rows(); n++) first[n] = n % k.T == 0 || k.token(n) == separator ? n % k.T : first[n - 1];
    for (int n = k.rows() - 1; n >= 0; n--)
        last[n] = n % k.T == k.T - 1 || first[n + 1] != first[n] ? n % k.T : last[n + 1];
    embedding_documents(got_first.data(), got_last.data(), k.tokens.data(), separator, k.B, k.T);
    CHECK(got_first == first, "first of B %d T %d", k.B, k.T);
    CHECK(got_last == last, "last of B %d T %d", k.B, k.T);
    return first;
}

// Checks wpe's gradient and its per-example squares. Positions count from the document's start or, if `first` is empty,
// from the example's start.
static void check_positions(const Case &k, const std::vector<uint16_t> &first) {
    const size_t C = k.C;
    const std::vector<float> before = random_vector<float>(k.T * C);
    float *dwpe = device_from(before);
    double *sum = device_from(std::vector<double>(1, SQUARES_BEFORE)), squares = 0.0;
    void *workspace = workspace_new(embedding_workspace_bytes(k.B, k.T, k.C));
    std::vector<uint32_t> sorted(4 * (size_t)k.rows());
    embedding_sort(sorted.data(), NULL, first.empty() ? NULL : first.data(), k.B, k.T);
    uint32_t *d_sorted = device_from(sorted);
    const EmbeddingOrder order = embedding_order(d_sorted, false, k.rows());
    const EmbeddingOrder by_example = embedding_order(d_sorted, true, k.rows());
    CALL_OK(embedding_backward(dwpe, k.d_dx, order, k.B, k.T, k.C, workspace, 0, &e));
    CALL_OK(embedding_example_squares(sum, NULL, k.d_dx, NULL, by_example, k.B, k.T, k.C, workspace, 0, &e));
    std::vector<double> want(before.begin(), before.end());
    for (int b = 0; b < k.B; b++) {
        std::vector<double> own(k.T * C, 0.0);
        for (size_t i = b * k.T * C; i < (b + 1) * k.T * C; i++)
            own[(i / C % k.T - (first.empty() ? 0 : first[i / C])) * C + i % C] += value(k.dx[i]);
        for (size_t i = 0; i < own.size(); i++) squares += own[i] * own[i], want[i] += own[i];
    }
    check_close("dwpe", host_from(dwpe, want.size()), want, SUM_RELATIVE, SUM_ABSOLUTE);
    CHECK_CLOSE(host_from(sum, 1)[0] - SQUARES_BEFORE, squares, 1e-5, 0.0);
}

static void check_masks(const Case &k) {
    const int separator = k.token(random_int(0, k.rows() - 1)); // occurs at least once
    const std::vector<uint16_t> first = check_documents(k, separator);
    check_forward(k, device_from(first), first);
    check_positions(k, first);
    check_documents(k, 65535);
}

static void embedding_case(Shape s, int V) {
    Case k = {s.B, s.T, s.C, V, random_tokens(s.B, s.T, V), {}, NULL, NULL, {}, {}};
    k.dx = random_vector<real>(k.count());
    k.d_tokens = device_from(k.tokens);
    k.d_dx = device_from(k.dx);
    check_forward(k, NULL, {});
    check_sort(&k);
    check_backward(k);
    check_example_squares(k);
    check_positions(k, {});
    check_masks(k);
    case_end();
}

static void test_embedding(void) {
    for (Shape s : random_shapes()) embedding_case(s, random_int(1, 90));
    embedding_case({3, 500, 24}, 5000);
    embedding_case({2, 700, 9}, 1); // equal tokens: one run across all tiles
    embedding_case({2, 40, 3}, 65536);
    if (!small_shapes_only) embedding_case({MICRO_BATCH_MAX, 1, 3}, 5);
}

// An element's index may exceed an int. Checks the first row, the row with element 2^31, and the last row.
static void test_many_elements(void) {
    const int B = 257, T = 128, C = 65535, V = 2, N = B * T;
    if (small_shapes_only) SKIP("small shapes only");
    const std::vector<uint16_t> tokens = random_tokens(B, T, V);
    const std::vector<real> wte = random_vector<real>((size_t)V * C), wpe = random_vector<real>((size_t)T * C);
    real *out = device_new<real>((size_t)N * C);
    CALL_OK(embedding_forward(out, device_from(tokens), NULL, device_from(wte), device_from(wpe),
                              row_dropout({}, DROPOUT_EMBEDDING, T), B, C, 0, &e));
    for (int row : {0, (int)(((size_t)1 << 31) / C), N - 1}) {
        const size_t token = tokens[(size_t)(row / T) * (T + 1) + row % T];
        std::vector<double> want;
        for (int c = 0; c < C; c++)
            want.push_back(value((real)(float)(value(wte[token * C + c]) + value(wpe[(size_t)(row % T) * C + c]))));
        check_close("embedding", host_from(out + (size_t)row * C, C), want, 0.0, 0.0);
    }
    case_end();
}

int main(int argc, char **argv) {
    kernel_test_begin("test_embedding_cuda", argc, argv);
    RUN(test_embedding, test_many_elements);
    return test_summary();
}
