// Compares attention on the GPU with a float64 twin on the CPU, the paths with each other, and two runs bit for bit
// (kernel_test.cuh).
#include "kernel_test.cuh"

#include "cuda/attention_paths.cuh"
#include "cuda/sm90.cuh"
#include "hold.cuh"

// ---- The twin: attention.cuh's formulas in float64, head by head, with the whole T x T matrix -----------------------

static double dot(const double *a, const double *b, int n) { return std::inner_product(a, a + n, b, 0.0); }

// A head's masks besides the causal one. first NULL: an example is one document.
struct HeadMasks {
    const uint16_t *first;
    Dropout dropout;
    int head;

    int begin(int t) const { return first ? first[t] : 0; }
    double factor(int t, int u) const {
        return dropout.below ? (double)dropout_factor(dropout, DROPOUT_PROBABILITY, head, t, u) : 1.0;
    }
};

static void head_twin(double *out, double *lse, double *dq, double *dk, double *dv, const double *q, const double *k,
                      const double *v, const double *dout, HeadMasks masks, int T, int D) {
    double scale = 1 / sqrt((double)D);
    std::vector<double> p(T), m(T);
    memset(out, 0, T * D * sizeof(double));
    memset(dq, 0, T * D * sizeof(double));
    memset(dk, 0, T * D * sizeof(double));
    memset(dv, 0, T * D * sizeof(double));
    for (int t = 0; t < T; t++) {
        double top = -INFINITY, sum = 0;
        int first = masks.begin(t);
        for (int u = first; u <= t; u++) top = fmax(top, p[u] = scale * dot(q + t * D, k + u * D, D));
        for (int u = first; u <= t; u++) sum += exp(p[u] - top);
        lse[t] = top + log(sum);
        for (int u = first; u <= t; u++) {
            p[u] = exp(p[u] - lse[t]);
            m[u] = masks.factor(t, u);
            for (int d = 0; d < D; d++) out[t * D + d] += p[u] * m[u] * v[u * D + d];
        }
        double delta = dot(out + t * D, dout + t * D, D);
        for (int u = first; u <= t; u++) {
            double ds = p[u] * (m[u] * dot(dout + t * D, v + u * D, D) - delta) * scale;
            for (int d = 0; d < D; d++) {
                dv[u * D + d] += p[u] * m[u] * dout[t * D + d];
                dq[t * D + d] += ds * k[u * D + d];
                dk[u * D + d] += ds * q[t * D + d];
            }
        }
    }
}

// Returns the index of element (t, d) of head h in part `part` of a (B, T, parts, NH, D) tensor.
static size_t index_of(AttentionShape s, int b, int h, int parts, int part, int t, int d) {
    return ((size_t)b * s.T + t) * parts * s.C() + part * s.C() + h * s.D + d;
}

// A path's results: out (B, T, C), dqkv (B, T, 3C), lse (B, NH, T).
template <typename X, typename F> struct Results {
    std::vector<X> out, dqkv;
    std::vector<F> lse;
};

static Results<double, double> twin(const std::vector<real> &qkv, const std::vector<real> &dout,
                                    const std::vector<uint16_t> &first, Dropout dropout, AttentionShape s) {
    const size_t n = (size_t)s.T * s.D;
    Results<double, double> r = {std::vector<double>(dout.size()), std::vector<double>(qkv.size()),
                                 std::vector<double>((size_t)s.heads() * s.T)};
    std::vector<double> in[4], out[4]; // q, k, v, dout; dq, dk, dv, out
    for (int i = 0; i < 4; i++) in[i].resize(n), out[i].resize(n);
    for (int b = 0; b < s.B; b++)
        for (int h = 0; h < s.NH; h++) {
            HeadMasks masks = {first.empty() ? NULL : first.data() + (size_t)b * s.T, dropout, h};
            masks.dropout.example += b;
            const auto each = [&](auto f) { // f(part, index in the head, index in the tensor)
                for (int part = 0; part < 4; part++)
                    for (int t = 0; t < s.T; t++)
                        for (int d = 0; d < s.D; d++)
                            f(part, t * s.D + d, index_of(s, b, h, part < 3 ? 3 : 1, part % 3, t, d));
            };
            each([&](int part, size_t i, size_t at) { in[part][i] = value(part < 3 ? qkv[at] : dout[at]); });
            head_twin(out[3].data(), r.lse.data() + (size_t)(b * s.NH + h) * s.T, out[0].data(), out[1].data(),
                      out[2].data(), in[0].data(), in[1].data(), in[2].data(), in[3].data(), masks, s.T, s.D);
            each([&](int part, size_t i, size_t at) { (part < 3 ? r.dqkv : r.out)[at] = out[part][i]; });
        }
    return r;
}

// ---- Comparing ------------------------------------------------------------------------------------------------------

// Returns the largest relative error of the D-vectors of part `part` of (B, T, parts, NH, D). A vector's error is
// divided by its norm + the root mean square of all vectors' norms + floor_. (All vectors of dq and dk are 0 at T = 1;
// dropped rows of out are 0.) NaN gives infinity.
static double worst_vector(const std::vector<real> &got, const std::vector<double> &want, AttentionShape s, int parts,
                           int part, double floor_) {
    size_t vectors = (size_t)s.B * s.T * s.NH;
    double mean_square = 0, worst = 0;
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < vectors; i++) {
            size_t at = (i / s.NH * parts + part) * s.C() + i % s.NH * s.D;
            double error = 0, norm = 0;
            for (int d = 0; d < s.D; d++) {
                double difference = value(got[at + d]) - want[at + d];
                error += difference * difference;
                norm += want[at + d] * want[at + d];
            }
            if (pass == 0) mean_square += norm / vectors;
            else worst = worse(worst, sqrt(error) / (sqrt(norm) + sqrt(mean_square) + floor_));
        }
    return worst;
}

// Rounding errs by at most 2^-12 in fp16, 2^-9 in bf16. P, dS, out (which enters delta) and the result are rounded.
static const double OUT_TOLERANCE = by_type(1e-5, 8e-4, 6e-3), GRADIENT_TOLERANCE = by_type(2e-5, 1.6e-3, 1.2e-2);
static const double LSE_TOLERANCE = by_type(4e-6, 2e-5, 2e-5);

// ---- Running a path -------------------------------------------------------------------------------------------------

enum Path { PUBLIC, TILED };

// A problem's masks: documents of mean length `length` (0: none), and dropout.
struct Kind {
    int length;
    double p;
};

template <typename X> static void poison(X *p, size_t n, int byte = POISON) {
    CUDA_OK(cudaMemset(p, byte, n * sizeof(X)));
}
template <typename X> static bool same_bits(const std::vector<X> &a, const std::vector<X> &b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(X)) == 0;
}

struct Problem : Attention {
    AttentionShape s;
    size_t n, rows, workspace_bytes; // n: elements of out
    std::vector<real> host_qkv, host_dout;
    std::vector<uint16_t> first; // empty: no documents

    Problem(AttentionShape s_, double deviation, Kind kind = {})
        : Attention{s_}, s(s_), n((size_t)s.B * s.T * s.C()), rows((size_t)s.heads() * s.T),
          workspace_bytes(attention_workspace_bytes(s)), host_qkv(random_vector<real>(3 * n, 0.0, deviation)),
          host_dout(random_vector<real>(n)) {
        qkv = device_from(host_qkv), dout = device_from(host_dout), out = device_new<real>(n);
        dqkv = device_new<real>(3 * n), lse = device_new<float>(rows);
        workspace = device_new<char>(workspace_bytes), ticket = device_new<unsigned>(1);
        masks.dropout = dropout_at(dropout_of(kind.p, random_u64() >> 1), random_u64() >> 24, random_int(0, 99));
        masks.constants = dropout_constants(masks.dropout);
        if (kind.length) draw_documents(kind.length);
    }
    void draw_documents(int length) {
        std::vector<uint16_t> last;
        for (size_t b = 0, t = 0; b < (size_t)s.B; b++, t = 0)
            while (t < (size_t)s.T) {
                const size_t begin = t, end = size_min(s.T, t + 1 + (size_t)(-length * log(1.0 - random_uniform())));
                for (; t < end; t++) first.push_back(begin), last.push_back(end - 1);
            }
        masks.first = device_from(first), masks.last = device_from(last);
    }
    void reset() {
        poison(out, n), poison(dqkv, 3 * n), poison(lse, rows);
        poison((char *)workspace, workspace_bytes), poison(ticket, 1, 0);
    }
    void queue(Path path, cudaStream_t stream) {
        CALL_OK((path == TILED ? attention_tiled_forward : attention_forward)(*this, stream, &e));
        float *lse2 = (float *)workspace;
        if (path == PUBLIC) CALL_OK(attention_backward(*this, stream, &e));
        else CALL_OK(attention_tiled_backward(*this, {lse2, lse2 + (size_t)s.heads() * s.padded_T()}, stream, &e));
    }
    void check() {
        cudaError_t status = cudaDeviceSynchronize();
        CHECK(status == cudaSuccess, "B %d T %d NH %d D %d: %s", s.B, s.T, s.NH, s.D, cudaGetErrorString(status));
        if (status != cudaSuccess) exit(1); // after a device fault every call fails
        CHECK(host_from(ticket, 1)[0] == 0, "%u tickets are left", host_from(ticket, 1)[0]);
    }
    Results<real, float> results() { return {host_from(out, n), host_from(dqkv, 3 * n), host_from(lse, rows)}; }
    Results<real, float> run(Path path) {
        reset();
        queue(path, 0);
        check();
        return results();
    }
};

struct Worst {
    double out, lse, dq, dk, dv;
};

static void note(double *worst, double x) {
    *worst = worse(*worst, x);
}

// slack: factor of the tolerance of dq and dk. In sharp rows dS is a difference of nearly equal numbers.
static void compare(Worst *worst, AttentionShape s, const char *name, const Results<real, float> &got,
                    const Results<double, double> &want, double slack) {
    double error_lse = 0, error_out = worst_vector(got.out, want.out, s, 1, 0, 1e-30), error[3];
    for (size_t i = 0; i < want.lse.size(); i++)
        note(&error_lse, fabs((double)got.lse[i] - want.lse[i]) / (1 + fabs(want.lse[i])));
    for (int part = 0; part < 3; part++) error[part] = worst_vector(got.dqkv, want.dqkv, s, 3, part, sqrt((double)s.D));
    bool good = error_out <= OUT_TOLERANCE && error_lse <= LSE_TOLERANCE && error[0] <= slack * GRADIENT_TOLERANCE &&
                error[1] <= slack * GRADIENT_TOLERANCE && error[2] <= GRADIENT_TOLERANCE;
    CHECK(good, "%s B %d T %d NH %d D %d: out %.2g lse %.2g dq %.2g dk %.2g dv %.2g", name, s.B, s.T, s.NH, s.D,
          error_out, error_lse, error[0], error[1], error[2]);
    note(&worst->out, error_out), note(&worst->lse, error_lse);
    note(&worst->dq, error[0]), note(&worst->dk, error[1]), note(&worst->dv, error[2]);
}

static void print_worst(const char *name, const Worst *w) {
    if (w->out > 0)
        printf("  %s: worst vector out %.2g dq %.2g dk %.2g dv %.2g, lse %.2g\n", name, w->out, w->dq, w->dk, w->dv,
               w->lse);
}

// ---- Tests ----------------------------------------------------------------------------------------------------------

static const char *const path_names[] = {"public", "tiled"};

static void check_against_twin(AttentionShape s, double deviation, Worst worst[2], Kind kind = {}) {
    Problem problem(s, deviation, kind);
    const Results<double, double> want =
        twin(problem.host_qkv, problem.host_dout, problem.first, problem.masks.dropout, s);
    // Dropout multiplies kept elements, rounding errors included, by 1 / (1 - p). Over few channels the errors do not
    // average out: in 400 draws emulated bf16 erred by 1.26 tolerances with 5 channels, 0.8 with 16, 0.44 with 64.
    const double slack = fmax(1, deviation) / (1 - kind.p) * (kind.p > 0 && s.D < 16 ? 1.6 : 1);
    for (int path = PUBLIC; path <= (sizeof(real) == 2 ? TILED : PUBLIC); path++) // fp32 has one path
        compare(&worst[path], s, path_names[path], problem.run((Path)path), want, slack);
    case_end();
}

static void test_twin_small_shapes(void) {
    static const int lengths[] = {1, 2, 7, 31, 32, 33, 64, 48, 65, 127, 128, 129, 192, 193, 256, 257, 300};
    static const int sizes[] = {64, 128, 16, 32, 80, 5, 120};
    Worst worst[2] = {};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i += small_shapes_only ? 3 : 1)
        for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++) {
            if (j >= 2 && (i + j) % 3) continue; // padded head sizes: test a third of the lengths
            AttentionShape s = {1 + (int)((i + j) % 3), lengths[i], 1 + (int)((2 * i + j) % 5), sizes[j]};
            if (s.T > 200) s.B = 1, s.NH = 2;
            check_against_twin(s, 1.0, worst);
        }
    for (int path : {PUBLIC, TILED}) print_worst(path_names[path], &worst[path]);
}

static const Kind kinds[] = {{60, 0}, {0, 0.3}, {40, 0.1}, {3, 0.6}, {300, 0}, {0, 0.02}};
enum { KINDS = sizeof kinds / sizeof *kinds };

static void test_twin_masks(void) {
    static const int lengths[] = {1, 15, 33, 64, 65, 127, 129, 192, 257, 300, 450}, sizes[] = {64, 128, 80, 16, 5};
    Worst worst[2] = {};
    for (int i = 0; i < 11; i += small_shapes_only ? 2 : 1)
        for (int j = 0; j < 5; j++)
            for (int k = 0; k < KINDS; k++) {
                if (j >= 2 && (i + k) % 4) continue;
                AttentionShape s = {1 + (i + k) % 2, lengths[i], 1 + (i + j + k) % 3, sizes[j]};
                if (s.T > 200) s.NH = 2, s.B = 1;
                check_against_twin(s, k % 2 ? 1.0 : 0.5, worst, kinds[k]);
            }
    for (int path : {PUBLIC, TILED}) print_worst(path_names[path], &worst[path]);
}

// With more heads than an H100 has multiprocessors (132), blocks draw heads in lots of 67 and 66, or 89, 89 and 87.
static void test_twin_unequal_lots(void) {
    static const AttentionShape shapes[] = {{7, 150, 19, 64}, {5, 70, 53, 64}, {19, 70, 7, 128}, {53, 35, 5, 128}};
    Worst worst[2] = {};
    for (AttentionShape s : shapes) check_against_twin(s, 1.0, worst);
    print_worst("public", &worst[PUBLIC]);
}

// Scores have a standard deviation of 9 (nearly one-hot rows) or of 0.01 (nearly uniform rows).
static void test_twin_sharp_and_flat(void) {
    Worst worst[2] = {};
    check_against_twin({1, 210, 2, 64}, 3.0, worst);
    check_against_twin({1, 150, 2, 128}, 3.0, worst);
    check_against_twin({1, 210, 2, 64}, 0.1, worst);
    print_worst("public", &worst[PUBLIC]);
}

// Compares the fast path with the simple path at training's shapes, which are too large for the twin.
static void test_fast_path_at_large_shapes(void) {
    if (FP32) SKIP("fp32 has one path");
    static const struct {
        AttentionShape s;
        Kind kind;
    } cases[] = {{{8, 1024, 12, 64}, {}},         {{2, 1024, 25, 64}, {}},        {{3, 999, 5, 64}, {}},
                 {{1, 4096, 3, 64}, {}},          {{4, 1024, 6, 128}, {}},        {{1, 1999, 5, 128}, {}},
                 {{64, 130, 12, 64}, {}},         {{2, 1024, 25, 64}, {0, 0.1}},  {{3, 1024, 12, 64}, {300, 0}},
                 {{1, 4096, 3, 64}, {700, 0.1}},  {{2, 1024, 6, 128}, {0, 0.1}},  {{1, 1999, 5, 128}, {300, 0}},
                 {{3, 999, 5, 128}, {300, 0.05}}, {{3, 1024, 5, 64}, {5000, 0.2}}};
    Worst worst = {};
    for (const auto &c : cases) {
        Problem problem(c.s, 1.0, c.kind);
        const Results<real, float> tiled = problem.run(TILED);
        compare(&worst, problem.s, "large", problem.run(PUBLIC),
                {as_doubles(tiled.out), as_doubles(tiled.dqkv), as_doubles(tiled.lse)}, 1);
        case_end();
    }
    print_worst("fast against tiled", &worst);
}

// Two runs give the same bits, even if some blocks begin late because their multiprocessors are held.
static void test_repeats_bit_for_bit(void) {
    Hold hold = {};
    CALL_OK(hold_create(&hold, &e));
    static const AttentionShape shapes[] = {{16, 1024, 12, 64}, {4, 777, 7, 128}, {2, 300, 3, 80}};
    for (size_t i = 0; i < 2 * sizeof shapes / sizeof *shapes; i++) {
        Problem problem(shapes[i / 2], 1.0, i % 2 ? Kind{200, 0.1} : Kind{});
        const Results<real, float> want = problem.run(PUBLIC);
        for (int repeat = 0; repeat < 5; repeat++) {
            if (repeat % 2) CALL_OK(hold_begin(&hold, 24, 2.0, &e));
            const Results<real, float> got = problem.run(PUBLIC);
            CALL_OK(hold_end(&hold, &e));
            CHECK(same_bits(got.out, want.out), "out, shape %zu repeat %d", i, repeat);
            CHECK(same_bits(got.dqkv, want.dqkv), "dqkv, shape %zu repeat %d", i, repeat);
            CHECK(same_bits(got.lse, want.lse), "lse, shape %zu repeat %d", i, repeat);
        }
        case_end();
    }
    hold_destroy(&hold);
}

// Calls with separate tickets may overlap: a call begins while another runs on half of the multiprocessors.
static void test_overlapping_calls(void) {
    Hold hold = {};
    cudaStream_t stream[2];
    CALL_OK(hold_create(&hold, &e));
    for (cudaStream_t &each : stream) CUDA_OK(cudaStreamCreateWithFlags(&each, cudaStreamNonBlocking));
    Problem both[] = {Problem({8, 1024, 12, 64}, 1.0), Problem({3, 700, 6, 64}, 1.0)};
    const std::vector<real> want[] = {both[0].run(PUBLIC).dqkv, both[1].run(PUBLIC).dqkv};
    for (int repeat = 0; repeat < 5; repeat++) {
        for (Problem &p : both) p.reset();
        CUDA_OK(cudaDeviceSynchronize()); // the two streams do not wait for the default stream
        CALL_OK(hold_begin(&hold, 66, 1.0, &e));
        for (int i = 0; i < 2; i++) both[i].queue(PUBLIC, stream[i]);
        CALL_OK(hold_end(&hold, &e));
        for (int i = 0; i < 2; i++) {
            both[i].check();
            CHECK(same_bits(both[i].results().dqkv, want[i]), "dqkv of call %d, repeat %d", i, repeat);
        }
    }
    for (cudaStream_t each : stream) cudaStreamDestroy(each);
    hold_destroy(&hold);
    case_end();
}

int main(int argc, char **argv) {
    kernel_test_begin("test_attention_cuda", argc, argv);
    RUN(test_twin_small_shapes, test_twin_sharp_and_flat, test_twin_masks);
    if (!small_shapes_only)
        RUN(test_twin_unequal_lots, test_fast_path_at_large_shapes, test_repeats_bit_for_bit, test_overlapping_calls);
    return test_summary();
}
