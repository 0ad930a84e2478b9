// Tests the sums of cuda/reduce.cuh (kernel_test.cuh).
#include "kernel_test.cuh"

// Returns segments of all sizes, some empty, with gaps between them. *n = number of elements, with the gaps.
static std::vector<Range> random_segments(int S, size_t *n) {
    std::vector<Range> segments(S);
    *n = 0;
    for (int s = 0; s < S; s++) {
        *n += random_int(0, 5);
        segments[s] = {*n, *n + (s > 0 && random_int(0, 9) == 0 ? 0 : random_int(1, random_int(0, 4) ? 600 : 60000))};
        *n = segments[s].end;
    }
    *n += 3;
    return segments;
}

// Sums the whole buffer or, if `part`, a range with random ends, mostly within segments.
static void reduce_squares_case(int S, bool part) {
    size_t n;
    const std::vector<Range> segments = random_segments(S, &n);
    Range range = {0, n};
    if (part) range.begin = random_u64() % n / 4 * 4, range.end = range.begin + 1 + random_u64() % (n - range.begin);
    std::vector<float> x(n, NAN); // the gaps stay NaN
    std::vector<double> want(S, SQUARES_BEFORE);
    for (int s = 0; s < S; s++) {
        const Range in = range_overlap(segments[s], range);
        if (range_length(in)) want[s] = 0.0;
        for (size_t i = segments[s].begin; i < segments[s].end; i++) {
            x[i] = (float)random_normal();
            if (i >= in.begin && i < in.end) want[s] += (double)x[i] * x[i];
        }
    }
    double *squares = device_new<double>(S);
    float *d_x = device_from(x);
    Range *d_segments = device_from(segments);
    void *workspace = workspace_new(reduce_squares_workspace_bytes(S));
    run_twice(
        "squares", [&] { device_set(squares, std::vector<double>(S, SQUARES_BEFORE)); },
        [&] { CALL_OK(reduce_squares(squares, d_x + range.begin, range, d_segments, S, workspace, 0, &e)); },
        {{squares, S * sizeof(double)}});
    check_close("squares", host_from(squares, S), want, 2e-6, 0.0);

    int bad = random_int(0, S - 1); // a value that is not finite spoils only its own segment's sum
    while (range_length(segments[bad]) == 0) bad = (bad + 1) % S;
    x[segments[bad].end - 1] = S % 2 ? NAN : INFINITY;
    device_set(d_x, x);
    CALL_OK(reduce_squares(squares, d_x, {0, n}, d_segments, S, workspace, 0, &e));
    const std::vector<double> got = host_from(squares, S);
    for (int s = 0; s < S; s++) CHECK(isfinite(got[s]) == (s != bad), "segment %d: %g", s, got[s]);
    case_end();
}

static void test_reduce_squares(void) {
    reduce_squares_case(1, false);
    for (int i = 0; i < 8; i++) reduce_squares_case(random_int(2, small_shapes_only ? 40 : 300), i % 2);
}

static void test_reduce_examples(void) {
    const size_t large = small_shapes_only ? 30000 : 300000;
    const size_t sizes[] = {1, 5, 768, 4097, large, (size_t)random_int(1, 50000)};
    for (size_t n : sizes) {
        const int E = random_int(1, 19);
        const std::vector<float> x = random_vector<float>(E * n), before = random_vector<float>(n);
        float *d_x = device_from(x), *gradient = device_new<float>(n);
        double *squares = device_new<double>(1);
        void *workspace = workspace_new(reduce_examples_workspace_bytes(E));
        run_twice(
            "examples",
            [&] { device_set(gradient, before), device_set(squares, std::vector<double>(1, SQUARES_BEFORE)); },
            [&] { CALL_OK(reduce_examples(gradient, squares, d_x, E, n, workspace, 0, &e)); },
            {{gradient, n * sizeof(float)}, {squares, sizeof(double)}});
        std::vector<double> sum(before.begin(), before.end());
        double want = 0.0;
        for (int b = 0; b < E; b++)
            for (size_t i = 0; i < n; i++) {
                const double v = x[b * n + i];
                sum[i] += v;
                want += v * v;
            }
        check_close("gradient", host_from(gradient, n), sum, SUM_RELATIVE, SUM_ABSOLUTE);
        CHECK_CLOSE(host_from(squares, 1)[0] - SQUARES_BEFORE, want, 2e-6, 0.0);
        case_end();
    }
}

static void test_reduce_sum(void) {
    for (size_t n : {(size_t)1, (size_t)1000, (size_t)random_int(1, 70000)}) {
        const std::vector<float> x = random_vector<float>(n, 3.0);
        double *sum = device_from(std::vector<double>(1, SQUARES_BEFORE));
        CALL_OK(reduce_sum(sum, device_from(x), 1, n, 0, &e));
        CHECK_CLOSE(host_from(sum, 1)[0] - SQUARES_BEFORE, std::accumulate(x.begin(), x.end(), 0.0), 1e-9, 1.0);
        case_end();
    }
}

// Tests reduce_add (sum[of[b]] += row b), and reduce_products of all pairs of rows and of each row with itself.
static void test_reduce_rows(void) {
    for (size_t n : {(size_t)1, (size_t)1000, (size_t)random_int(1, 70000)}) {
        const int rows = random_int(1, 9), sums = random_int(2, 5); // some sums have no row
        const std::vector<float> x = random_vector<float>(rows * n), before = random_vector<float>(sums * n);
        std::vector<uint16_t> of(rows);
        std::vector<double> want(before.begin(), before.end()), products(rows * rows), squares(rows);
        for (int b = 0; b < rows; b++) of[b] = (uint16_t)random_int(0, sums - 1);
        for (int b = 0; b < rows; b++)
            for (size_t i = 0; i < n; i++) {
                want[of[b] * n + i] += x[b * n + i];
                for (int a = 0; a < rows; a++) products[b * rows + a] += (double)x[b * n + i] * x[a * n + i];
            }
        for (int b = 0; b < rows; b++) squares[b] = products[b * rows + b];
        float *d_x = device_from(x), *sum = device_from(before);
        double *d_products = device_new<double>(rows * rows), *d_squares = device_new<double>(rows);
        CALL_OK(reduce_add(sum, d_x, n, false, 0, &e, rows, device_from(of)));
        CALL_OK(reduce_products(d_products, d_x, rows, rows, n, 0, &e));
        CALL_OK(reduce_products(d_squares, d_x, rows, 1, n, 0, &e));
        check_close("sums of rows", host_from(sum, want.size()), want, SUM_RELATIVE, SUM_ABSOLUTE);
        check_close("products", host_from(d_products, products.size()), products, 1e-9, 1e-6 * (double)n);
        check_close("squares", host_from(d_squares, squares.size()), squares, 1e-9, 0.0);
        case_end();
    }
}

int main(int argc, char **argv) {
    kernel_test_begin("test_reduce_cuda", argc, argv);
    RUN(test_reduce_squares, test_reduce_examples, test_reduce_sum, test_reduce_rows);
    return test_summary();
}
