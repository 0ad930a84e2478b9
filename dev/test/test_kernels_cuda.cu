// The memory-bound CUDA kernels against plain float64 references on the same (rounded) inputs. Fresh random inputs each
// run (the seed is printed; give it as the argument to repeat one), outputs poisoned with NaN, guard zones around every
// buffer, and every call made twice: the second must give the same bits.
#include "test.h"

#include "../../llmc/cuda/crossentropy.cuh"
#include "../../llmc/cuda/embedding.cuh"
#include "../../llmc/cuda/gelu.cuh"
#include "../../llmc/cuda/layernorm.cuh"
#include "../../llmc/cuda/reduce.cuh"

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

// ---------------------------------------------------------------------------------------------------------------------
// Harness

#define CUDA_OK(call)                                                                                                  \
    do {                                                                                                               \
        cudaError_t ok_ = (call);                                                                                      \
        CHECK(ok_ == cudaSuccess, "%s", cudaGetErrorString(ok_));                                                      \
    } while (0)

static uint64_t random_state = 1;

static uint64_t random_u64(void) { // splitmix64
    uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
static double random_uniform(void) { return (double)(random_u64() >> 11) / 9007199254740992.0; }
static int random_int(int low, int high) { return low + (int)(random_uniform() * (high - low + 1)); }
static double random_normal(void) {
    return sqrt(-2.0 * log(1.0 - random_uniform())) * cos(6.283185307179586 * random_uniform());
}

enum { GUARD_BYTES = 1024 };
static const int GUARD_FILL = 0xa5, POISON = 0xff; // all ones is a NaN in bf16, fp32 and fp64

typedef struct {
    char *base;
    size_t bytes;
} Allocation;
static std::vector<Allocation> allocations; // of the case under way

template <typename X> static X *device_new(size_t n) {
    Allocation a = {NULL, n * sizeof(X)};
    CUDA_OK(cudaMalloc(&a.base, a.bytes + 2 * GUARD_BYTES));
    CUDA_OK(cudaMemset(a.base, GUARD_FILL, a.bytes + 2 * GUARD_BYTES));
    CUDA_OK(cudaMemset(a.base + GUARD_BYTES, POISON, a.bytes));
    allocations.push_back(a);
    return (X *)(a.base + GUARD_BYTES);
}

template <typename X> static void device_set(X *p, const std::vector<X> &v) {
    CUDA_OK(cudaMemcpy(p, v.data(), v.size() * sizeof(X), cudaMemcpyHostToDevice));
}

template <typename X> static X *device_from(const std::vector<X> &v) {
    X *p = device_new<X>(v.size());
    device_set(p, v);
    return p;
}

template <typename X> static std::vector<X> host_from(const X *p, size_t n) {
    std::vector<X> v(n);
    CUDA_OK(cudaMemcpy(v.data(), p, n * sizeof(X), cudaMemcpyDeviceToHost));
    return v;
}

// Ends a case: guards intact, memory freed.
static void case_end(void) {
    CUDA_OK(cudaDeviceSynchronize());
    for (const Allocation &a : allocations) {
        std::vector<char> all(a.bytes + 2 * GUARD_BYTES);
        CUDA_OK(cudaMemcpy(all.data(), a.base, all.size(), cudaMemcpyDeviceToHost));
        size_t touched = 0;
        for (size_t i = 0; i < GUARD_BYTES; i++)
            touched += all[i] != (char)GUARD_FILL || all[GUARD_BYTES + a.bytes + i] != (char)GUARD_FILL;
        CHECK(touched == 0, "%zu guard bytes of a buffer of %zu were written", touched, a.bytes);
        CUDA_OK(cudaFree(a.base));
    }
    allocations.clear();
}

static inline double value(double x) { return x; }
template <typename X> static inline double value(X x) { return (float)x; }

template <typename X> static std::vector<X> random_vector(size_t n, double mean = 0.0, double deviation = 1.0) {
    std::vector<X> v(n);
    for (X &x : v) x = (X)(float)(mean + deviation * random_normal());
    return v;
}

// |got - want| <= relative |want| + absolute rms(want) + floor, everywhere. NaN fails.
template <typename X>
static void check_close(const char *name, const std::vector<X> &got, const std::vector<double> &want, double relative,
                        double absolute, double floor = 1e-30) {
    double rms = 0.0, worst = 0.0;
    size_t at = 0;
    for (double w : want) rms += w * w / want.size();
    rms = sqrt(rms);
    for (size_t i = 0; i < want.size(); i++) {
        double ratio = fabs(value(got[i]) - want[i]) / (relative * fabs(want[i]) + absolute * rms + floor);
        if (!(ratio <= worst)) worst = isnan(ratio) ? INFINITY : ratio, at = i;
    }
    CHECK(got.size() == want.size() && worst <= 1.0, "%s[%zu of %zu] = %.9g, want %.9g (%.2f of the tolerance)", name,
          at, want.size(), value(got[at]), want[at], worst);
}

// What a stored real may be off: one unit in the last place of bf16, or fp32 arithmetic.
static const double REAL_RELATIVE = sizeof(real) == 2 ? 1.0 / 256 : 2e-5,
                    REAL_ABSOLUTE = sizeof(real) == 2 ? 2e-5 : 1e-5;
static const double SUM_RELATIVE = 2e-5, SUM_ABSOLUTE = 2e-5; // sums in fp32

static void *workspace_new(size_t bytes) { return device_new<char>(bytes); }

// Runs `reset` and `call` twice and compares what the buffers hold, to the bit.
typedef struct {
    const void *p;
    size_t bytes;
} Range;
static void run_twice(const char *name, const std::function<void()> &reset, const std::function<void()> &call,
                      const std::vector<Range> &outputs) {
    std::vector<std::vector<char>> first;
    for (int run = 0; run < 2; run++) {
        reset();
        call();
        CUDA_OK(cudaDeviceSynchronize());
        for (size_t i = 0; i < outputs.size(); i++) {
            std::vector<char> bytes(outputs[i].bytes);
            CUDA_OK(cudaMemcpy(bytes.data(), outputs[i].p, bytes.size(), cudaMemcpyDeviceToHost));
            if (run == 0) first.push_back(bytes);
            else CHECK(bytes == first[i], "%s: output %zu differs between two runs", name, i);
        }
    }
}

typedef struct {
    int B, T, C;
} Shape;

static std::vector<Shape> random_shapes(void) {
    std::vector<Shape> s = {{1, 1, 1},    {1, 1, 8},    {2, 3, 7},    {3, 5, 48},   {1, 67, 768}, {5, 33, 64},
                            {2, 130, 33}, {3, 17, 264}, {2, 9, 1600}, {2, 5, 2056}, {1, 4, 4104}, {70, 6, 40}};
    for (int i = 0; i < 6; i++)
        s.push_back({random_int(1, 6), random_int(1, 80), i % 2 ? 8 * random_int(1, 160) : random_int(1, 700)});
    s.push_back({4, 1024, 32}); // every kind of run: many blocks in an example
    s.push_back({1, 2600, 16});
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// Column gradients on the device, and what they should hold

typedef struct {
    ColumnGradient device;
    std::vector<float> before;
    int B, C;
} Columns;

static const double SQUARES_BEFORE = 2.5;

static Columns columns_new(int B, int C) {
    Columns c = {{device_new<float>(C), device_new<double>(1), device_new<float>(B)}, random_vector<float>(C), B, C};
    return c;
}
static void columns_reset(const Columns &c) {
    device_set(c.device.sum, c.before);
    device_set(c.device.squares, std::vector<double>(1, SQUARES_BEFORE));
    CUDA_OK(cudaMemset(c.device.example_squares, POISON, c.B * sizeof(float)));
}
static void columns_ranges(std::vector<Range> &r, const Columns &c) {
    r.push_back({c.device.sum, c.C * sizeof(float)});
    r.push_back({c.device.squares, sizeof(double)});
    r.push_back({c.device.example_squares, c.B * sizeof(float)});
}
// rows (B T, C): what the columns sum over.
static void columns_check(const char *name, const Columns &c, const std::vector<double> &rows, int T) {
    std::vector<double> sum(c.before.begin(), c.before.end()), example_squares, magnitude(c.C, 1.0);
    double squares = 0.0;
    for (int b = 0; b < c.B; b++) {
        std::vector<double> g(c.C, 0.0);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < c.C; i++) g[i] += rows[((size_t)b * T + t) * c.C + i];
        double square = 0.0;
        for (int i = 0; i < c.C; i++) sum[i] += g[i], square += g[i] * g[i];
        example_squares.push_back(square);
        squares += square;
    }
    check_close(name, host_from(c.device.sum, c.C), sum, SUM_RELATIVE, 1e-4);
    check_close(name, host_from(c.device.example_squares, c.B), example_squares, 1e-4, 1e-6);
    CHECK_CLOSE(host_from(c.device.squares, 1)[0] - SQUARES_BEFORE, squares, 1e-4, 1e-6);
}

// ---------------------------------------------------------------------------------------------------------------------
// LayerNorm

typedef struct {
    std::vector<double> out, mean, rstd;
} Normalised;

static Normalised layernorm_reference(const std::vector<real> &x, const std::vector<real> &gamma,
                                      const std::vector<real> &beta, int N, int C) {
    Normalised r;
    for (int n = 0; n < N; n++) {
        double mean = 0.0, variance = 0.0;
        for (int c = 0; c < C; c++) mean += value(x[(size_t)n * C + c]) / C;
        for (int c = 0; c < C; c++) variance += pow(value(x[(size_t)n * C + c]) - mean, 2) / C;
        const double rstd = 1.0 / sqrt(variance + 1e-5);
        for (int c = 0; c < C; c++)
            r.out.push_back((value(x[(size_t)n * C + c]) - mean) * rstd * value(gamma[c]) + value(beta[c]));
        r.mean.push_back(mean);
        r.rstd.push_back(rstd);
    }
    return r;
}

static void layernorm_forward_case(Shape s, bool residual) {
    Error e = {};
    const int N = s.B * s.T, C = s.C;
    const size_t n = (size_t)N * C;
    const std::vector<real> a = random_vector<real>(n, 0.3), b = random_vector<real>(n);
    const std::vector<real> gamma = random_vector<real>(C, 1.0, 0.3), beta = random_vector<real>(C);
    real *d_a = device_from(a), *d_b = device_from(b), *d_gamma = device_from(gamma), *d_beta = device_from(beta);
    real *out = device_new<real>(n), *sum = device_new<real>(n);
    float *mean = device_new<float>(N), *rstd = device_new<float>(N);
    run_twice(
        "layernorm forward",
        [&] {
            CUDA_OK(cudaMemset(out, POISON, n * sizeof(real)));
            CUDA_OK(cudaMemset(sum, POISON, n * sizeof(real)));
        },
        [&] {
            if (residual)
                CHECK_OK(residual_layernorm_forward(sum, out, mean, rstd, d_a, d_b, d_gamma, d_beta, N, C, 0, &e), &e);
            else CHECK_OK(layernorm_forward(out, mean, rstd, d_a, d_gamma, d_beta, N, C, 0, &e), &e);
        },
        {{out, n * sizeof(real)}, {mean, N * sizeof(float)}, {rstd, N * sizeof(float)}});
    std::vector<real> x = a;
    if (residual) {
        std::vector<double> want(n);
        for (size_t i = 0; i < n; i++) want[i] = value((real)(float)(value(a[i]) + value(b[i])));
        x = host_from(sum, n);
        check_close("residual_out", x, want, 0.0, 0.0);
    }
    const Normalised want = layernorm_reference(x, gamma, beta, N, C);
    check_close("out", host_from(out, n), want.out, REAL_RELATIVE, C == 1 ? 1e-3 : REAL_ABSOLUTE);
    check_close("mean", host_from(mean, N), want.mean, 1e-5, 1e-5);
    check_close("rstd", host_from(rstd, N), want.rstd, 1e-5, 1e-5);
    case_end();
}

static void test_layernorm_forward(void) {
    for (Shape s : random_shapes()) {
        layernorm_forward_case(s, false);
        layernorm_forward_case(s, true);
    }
    for (int packs = 1; packs <= 9; packs++) layernorm_forward_case({1, 9, 256 * packs - 8 * random_int(0, 20)}, true);
}

// in_place: dresidual is dy's buffer (without accumulate).
static void layernorm_backward_case(Shape s, bool accumulate, bool bias, bool in_place) {
    Error e = {};
    const int B = s.B, T = s.T, C = s.C, N = B * T;
    const size_t n = (size_t)N * C;
    const std::vector<real> dy = random_vector<real>(n), x = random_vector<real>(n, 0.5, 1.5);
    const std::vector<real> gamma = random_vector<real>(C, 1.0, 0.3), before = random_vector<real>(n);
    std::vector<float> mean(N), rstd(N);
    for (int i = 0; i < N; i++) {
        double m = 0.0, v = 0.0;
        for (int c = 0; c < C; c++) m += value(x[(size_t)i * C + c]) / C;
        for (int c = 0; c < C; c++) v += pow(value(x[(size_t)i * C + c]) - m, 2) / C;
        mean[i] = (float)m;
        rstd[i] = (float)(1.0 / sqrt(v + 1e-5));
    }
    real *d_dy = device_from(dy), *d_x = device_from(x), *d_gamma = device_from(gamma), *dr = device_new<real>(n);
    float *d_mean = device_from(mean), *d_rstd = device_from(rstd);
    Columns dgamma = columns_new(B, C), dbeta = columns_new(B, C), dbias = columns_new(B, C);
    void *workspace = workspace_new(layernorm_backward_workspace_bytes(B, T, C));
    const ColumnGradient none = {NULL, NULL, NULL};
    std::vector<Range> outputs = {{dr, n * sizeof(real)}};
    columns_ranges(outputs, dgamma);
    columns_ranges(outputs, dbeta);
    if (bias) columns_ranges(outputs, dbias);
    run_twice(
        "layernorm backward",
        [&] {
            if (accumulate) device_set(dr, before);
            else if (in_place) device_set(dr, dy);
            else CUDA_OK(cudaMemset(dr, POISON, n * sizeof(real)));
            columns_reset(dgamma), columns_reset(dbeta), columns_reset(dbias);
        },
        [&] {
            CHECK_OK(layernorm_backward(dr, accumulate, dgamma.device, dbeta.device, bias ? dbias.device : none,
                                        in_place ? dr : d_dy, d_x, d_mean, d_rstd, d_gamma, B, T, C, workspace, 0, &e),
                     &e);
        },
        outputs);

    std::vector<double> dx(n), gamma_rows(n), beta_rows(n), bias_rows(n);
    double terms = 0.0, square = 0.0; // mean squares of dx's terms, which cancel where C is small, and of dx
    for (int i = 0; i < N; i++) {
        double m1 = 0.0, m2 = 0.0;
        const size_t start = (size_t)i * C;
        for (int c = 0; c < C; c++) {
            const double xhat = (value(x[start + c]) - mean[i]) * rstd[i], g = value(dy[start + c]) * value(gamma[c]);
            m1 += g / C;
            m2 += g * xhat / C;
            gamma_rows[start + c] = value(dy[start + c]) * xhat;
            beta_rows[start + c] = value(dy[start + c]);
        }
        for (int c = 0; c < C; c++) {
            const double xhat = (value(x[start + c]) - mean[i]) * rstd[i], g = value(dy[start + c]) * value(gamma[c]);
            dx[start + c] = (accumulate ? value(before[start + c]) : 0.0) + rstd[i] * (g - m1 - xhat * m2);
            terms += pow(rstd[i] * (fabs(g) + fabs(m1) + fabs(xhat * m2)), 2) / n;
            square += dx[start + c] * dx[start + c] / n;
        }
    }
    const std::vector<real> written = host_from(dr, n);
    check_close("dresidual", written, dx, REAL_RELATIVE, REAL_ABSOLUTE * sqrt(fmax(terms / square, 1.0)));
    columns_check("dgamma", dgamma, gamma_rows, T);
    columns_check("dbeta", dbeta, beta_rows, T);
    if (bias) {
        for (size_t i = 0; i < n; i++) bias_rows[i] = value(written[i]);
        columns_check("dbias", dbias, bias_rows, T);
    }
    case_end();
}

static void test_layernorm_backward(void) {
    for (Shape s : random_shapes()) {
        if (s.C == 1) s.C = 2; // one column has no gradient at all
        layernorm_backward_case(s, true, true, false);
        layernorm_backward_case(s, random_int(0, 1), random_int(0, 1), false);
        layernorm_backward_case(s, false, random_int(0, 1), true);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// GELU and biases

static double gelu_tanh(double x) { return 0.5 * x * (1.0 + tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x))); }
static double gelu_slope(double x) { // by a central difference: independent of the derivative's formula
    const double h = 1e-5;
    return (gelu_tanh(x + h) - gelu_tanh(x - h)) / (2.0 * h);
}

static void test_gelu(void) {
    Error e = {};
    for (size_t n : {(size_t)1, (size_t)7, (size_t)8, (size_t)5003, (size_t)random_int(1, 100000)}) {
        std::vector<real> x = random_vector<real>(n, 0.0, 2.0), dy = random_vector<real>(n);
        const float extremes[] = {0.0f, -0.0f, 60.0f, -60.0f, 3e4f, -3e4f, -6.0f};
        for (size_t i = 0; i < n && i < 7; i++) x[i] = (real)extremes[i];
        real *d_x = device_from(x), *d_dy = device_new<real>(n), *y = device_new<real>(n);
        run_twice(
            "gelu", [&] { device_set(d_dy, dy); },
            [&] {
                CHECK_OK(gelu_forward(y, d_x, n, 0, &e), &e);
                CHECK_OK(gelu_backward(d_dy, d_dy, d_x, n, 0, &e), &e); // in place
            },
            {{y, n * sizeof(real)}, {d_dy, n * sizeof(real)}});
        std::vector<double> want(n), want_dx(n);
        for (size_t i = 0; i < n; i++) {
            want[i] = gelu_tanh(value(x[i]));
            want_dx[i] = value(dy[i]) * (fabs(value(x[i])) > 50 ? value(x[i]) > 0 : gelu_slope(value(x[i])));
        }
        std::vector<real> got = host_from(y, n);
        std::vector<double> scaled(n);
        for (size_t i = 0; i < n; i++) { // large values would raise the rms, and the tolerance of all others with it
            const double scale = fabs(value(x[i])) > 50 ? 1e-4 : 1.0;
            scaled[i] = scale * value(got[i]);
            want[i] *= scale;
        }
        check_close("gelu", scaled, want, REAL_RELATIVE, REAL_ABSOLUTE);
        check_close("dgelu", host_from(d_dy, n), want_dx, REAL_RELATIVE, REAL_ABSOLUTE);
        case_end();
    }
}

static void bias_case(Shape s, bool gelu) {
    Error e = {};
    const int B = s.B, T = s.T, C = s.C;
    const size_t n = (size_t)B * T * C;
    const std::vector<real> dy = random_vector<real>(n), x = random_vector<real>(n, 0.0, 1.5);
    real *d_dy = device_from(dy), *d_x = device_from(x), *dx = device_new<real>(n);
    Columns dbias = columns_new(B, C);
    void *workspace = workspace_new(bias_backward_workspace_bytes(B, T, C));
    std::vector<Range> outputs;
    columns_ranges(outputs, dbias);
    run_twice(
        "bias", [&] { columns_reset(dbias); },
        [&] {
            if (gelu) CHECK_OK(gelu_backward_bias(dx, dbias.device, d_dy, d_x, B, T, C, workspace, 0, &e), &e);
            else CHECK_OK(bias_backward(dbias.device, d_dy, B, T, C, workspace, 0, &e), &e);
        },
        outputs);
    std::vector<double> rows(n);
    for (size_t i = 0; i < n; i++) rows[i] = value(dy[i]) * (gelu ? gelu_slope(value(x[i])) : 1.0);
    if (gelu) {
        const std::vector<real> written = host_from(dx, n);
        check_close("dx", written, rows, REAL_RELATIVE, REAL_ABSOLUTE);
        for (size_t i = 0; i < n; i++) rows[i] = value(written[i]);
    }
    columns_check("dbias", dbias, rows, T);
    case_end();
}

static void test_bias_backward(void) {
    for (Shape s : random_shapes()) {
        bias_case(s, false);
        bias_case(s, true);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Embedding

// Zipf-like, so that there are long runs, short ones and absent tokens.
static std::vector<uint16_t> random_tokens(int B, int T, int V) {
    std::vector<uint16_t> tokens((size_t)B * (T + 1));
    for (uint16_t &t : tokens) t = (uint16_t)std::min(V - 1, (int)(pow((double)V + 1, random_uniform()) - 1.0));
    return tokens;
}

static void embedding_case(Shape s, int V) {
    Error e = {};
    const int B = s.B, T = s.T, C = s.C, N = B * T;
    const size_t n = (size_t)N * C;
    const std::vector<uint16_t> tokens = random_tokens(B, T, V);
    auto token = [&](int i) { return tokens[(size_t)(i / T) * (T + 1) + i % T]; };
    uint16_t *d_tokens = device_from(tokens);

    const std::vector<real> wte = random_vector<real>((size_t)V * C), wpe = random_vector<real>((size_t)T * C);
    real *out = device_new<real>(n);
    CHECK_OK(embedding_forward(out, d_tokens, device_from(wte), device_from(wpe), B, T, C, 0, &e), &e);
    std::vector<double> want(n);
    for (size_t i = 0; i < n; i++) {
        const int row = (int)(i / C), c = (int)(i % C);
        want[i] = value((real)(float)(value(wte[(size_t)token(row) * C + c]) + value(wpe[(size_t)(row % T) * C + c])));
    }
    check_close("embedding", host_from(out, n), want, 0.0, 0.0);

    EmbeddingOrder order, by_example;
    const size_t sort_bytes = embedding_sort_workspace_bytes(B, T);
    CHECK_OK(embedding_sort(&order, d_tokens, false, B, T, workspace_new(sort_bytes), 0, &e), &e);
    CHECK_OK(embedding_sort(&by_example, d_tokens, true, B, T, workspace_new(sort_bytes), 0, &e), &e);
    std::vector<uint32_t> rows(N), got_rows = host_from(order.row, N), got_keys = host_from(order.key, N);
    std::iota(rows.begin(), rows.end(), 0);
    std::stable_sort(rows.begin(), rows.end(), [&](uint32_t a, uint32_t b) { return token(a) < token(b); });
    CHECK(rows == got_rows, "the sort by token is wrong");
    bool keys_right = true;
    for (int i = 0; i < N; i++) keys_right = keys_right && got_keys[i] == token(rows[i]);
    CHECK(keys_right, "the sorted keys are wrong");
    std::stable_sort(rows.begin(), rows.end(), [&](uint32_t a, uint32_t b) { return a / T < b / T; });
    CHECK(rows == host_from(by_example.row, N), "the sort by example and token is wrong");

    const std::vector<real> dx = random_vector<real>(n);
    const std::vector<float> dwte = random_vector<float>((size_t)V * C), dwpe = random_vector<float>((size_t)T * C);
    real *d_dx = device_from(dx);
    float *d_dwte = device_new<float>(dwte.size()), *d_dwpe = device_new<float>(dwpe.size());
    void *workspace = workspace_new(embedding_backward_workspace_bytes(B, T, C));
    run_twice(
        "embedding backward", [&] { device_set(d_dwte, dwte), device_set(d_dwpe, dwpe); },
        [&] { CHECK_OK(embedding_backward(d_dwte, d_dwpe, d_dx, order, B, T, C, workspace, 0, &e), &e); },
        {{d_dwte, dwte.size() * sizeof(float)}, {d_dwpe, dwpe.size() * sizeof(float)}});
    std::vector<double> want_wte(dwte.begin(), dwte.end()), want_wpe(dwpe.begin(), dwpe.end());
    for (size_t i = 0; i < n; i++) {
        const int row = (int)(i / C), c = (int)(i % C);
        want_wte[(size_t)token(row) * C + c] += value(dx[i]);
        want_wpe[(size_t)(row % T) * C + c] += value(dx[i]);
    }
    check_close("dwte", host_from(d_dwte, dwte.size()), want_wte, SUM_RELATIVE, SUM_ABSOLUTE);
    check_close("dwpe", host_from(d_dwpe, dwpe.size()), want_wpe, SUM_RELATIVE, SUM_ABSOLUTE);

    // Per-example norms, with the head's rows gathered two examples at a time.
    const std::vector<float> U = random_vector<float>((size_t)B * V * C);
    float *d_U = device_from(U), *UG = device_new<float>(n), *examples = device_new<float>(3 * B);
    double *sums = device_new<double>(3);
    for (int b = 0; b < B; b += 2)
        CHECK_OK(embedding_gather(UG + (size_t)b * T * C, d_U + (size_t)b * V * C, d_tokens + (size_t)b * (T + 1),
                                  std::min(2, B - b), T, V, C, 0, &e),
                 &e);
    void *square_workspace = workspace_new(embedding_example_squares_workspace_bytes(B, T, C));
    run_twice(
        "embedding squares", [&] { device_set(sums, std::vector<double>(3, SQUARES_BEFORE)); },
        [&] {
            CHECK_OK(embedding_example_squares(sums, sums + 1, sums + 2, examples, d_dx, UG, by_example, B, T, C,
                                               square_workspace, 0, &e),
                     &e);
        },
        {{sums, 3 * sizeof(double)}, {examples, 3 * B * sizeof(float)}});
    std::vector<double> want_examples, want_sums(3, 0.0);
    double cross_scale = 0.0;
    for (int b = 0; b < B; b++) {
        std::vector<double> E((size_t)V * C, 0.0);
        double squares[3] = {};
        for (int t = 0; t < T; t++)
            for (int c = 0; c < C; c++) {
                const double d = value(dx[((size_t)b * T + t) * C + c]);
                E[(size_t)token(b * T + t) * C + c] += d;
                squares[2] += d * d;
            }
        for (size_t i = 0; i < E.size(); i++) {
            squares[0] += E[i] * E[i];
            squares[1] += E[i] * U[(size_t)b * V * C + i];
            cross_scale += fabs(E[i] * U[(size_t)b * V * C + i]);
        }
        for (int i = 0; i < 3; i++) want_sums[i] += squares[i], want_examples.push_back(squares[i]);
    }
    check_close("examples", host_from(examples, 3 * B), want_examples, 1e-5, 1e-5);
    const std::vector<double> got = host_from(sums, 3);
    for (int i = 0; i < 3; i++) CHECK_CLOSE(got[i] - SQUARES_BEFORE, want_sums[i], 1e-5, cross_scale);
    CHECK_CLOSE(got[0] - SQUARES_BEFORE, want_sums[0], 1e-5, 0.0);
    CHECK_CLOSE(got[2] - SQUARES_BEFORE, want_sums[2], 1e-5, 0.0);
    case_end();
}

static void test_embedding(void) {
    for (Shape s : random_shapes()) embedding_case(s, random_int(1, 90));
    embedding_case({3, 500, 24}, 5000);
    embedding_case({2, 700, 9}, 1); // one run through everything
    embedding_case({2, 40, 3}, 65536);
}

// ---------------------------------------------------------------------------------------------------------------------
// Cross-entropy

static void crossentropy_case(int B, int T, int V, int Vp) {
    Error e = {};
    const int N = B * T, row0 = random_int(0, N - 1), R = random_int(1, N - row0); // a chunk of the positions
    const size_t n = (size_t)R * Vp;
    const std::vector<uint16_t> tokens = random_tokens(B, T, V);
    std::vector<real> logits = random_vector<real>(n, -1.0, 4.0);
    for (int r = 0; r < R; r++) {
        for (int v = V; v < Vp; v++) logits[(size_t)r * Vp + v] = (real)NAN;
        if (random_int(0, 3) == 0) logits[(size_t)r * Vp + random_int(0, V - 1)] = (real)60.0f; // a sharp softmax
    }
    uint16_t *d_tokens = device_from(tokens);
    real *d_logits = device_from(logits);
    float *losses = device_new<float>(R), *losses_only = device_new<float>(R);
    CHECK_OK(crossentropy_loss(losses_only, d_logits, d_tokens, row0, R, T, V, Vp, 0, &e), &e);
    CHECK(memcmp(host_from(d_logits, n).data(), logits.data(), n * sizeof(real)) == 0, "the loss changed the logits");
    run_twice(
        "crossentropy", [&] { device_set(d_logits, logits); },
        [&] { CHECK_OK(crossentropy_gradient(losses, d_logits, d_tokens, row0, R, T, V, Vp, 0, &e), &e); },
        {{d_logits, n * sizeof(real)}, {losses, R * sizeof(float)}});
    std::vector<double> want_losses(R), want(n, 0.0);
    for (int r = 0; r < R; r++) {
        const int target = tokens[(size_t)((row0 + r) / T) * (T + 1) + (row0 + r) % T + 1];
        double max = -INFINITY, sum = 0.0;
        for (int v = 0; v < V; v++) max = fmax(max, value(logits[(size_t)r * Vp + v]));
        for (int v = 0; v < V; v++) sum += exp(value(logits[(size_t)r * Vp + v]) - max);
        want_losses[r] = max + log(sum) - value(logits[(size_t)r * Vp + target]);
        for (int v = 0; v < V; v++)
            want[(size_t)r * Vp + v] = (exp(value(logits[(size_t)r * Vp + v]) - max) / sum - (v == target)) / T;
    }
    // The errors are those of fp32 at the size of the logits (60), not of the loss or of 1 - p.
    check_close("losses", host_from(losses, R), want_losses, 2e-6, 0.0, 2e-5);
    check_close("losses only", host_from(losses_only, R), want_losses, 2e-6, 0.0, 2e-5);
    check_close("dlogits", host_from(d_logits, n), want, sizeof(real) == 2 ? 1.0 / 256 : 2e-5, 1e-6, 2e-5 / T);
    case_end();
}

static void test_crossentropy(void) {
    crossentropy_case(1, 1, 1, 1);
    crossentropy_case(2, 3, 7, 8);
    crossentropy_case(3, 4, 63, 63);
    crossentropy_case(2, 5, 1000, 1003);
    crossentropy_case(1, 3, 50257, 50304);
    crossentropy_case(1, 2, 65535, 65536); // does not fit into shared memory
    for (int i = 0; i < 6; i++) {
        const int V = random_int(2, 9000);
        crossentropy_case(random_int(1, 3), random_int(1, 9), V, i % 2 ? V : (int)round_up(V, 8));
    }
}

static void test_crossentropy_nan(void) {
    Error e = {};
    const int V = 4001, Vp = 4008;
    std::vector<real> logits = random_vector<real>((size_t)4 * Vp);
    logits[1234] = (real)NAN;
    logits[Vp + 77] = (real)INFINITY;
    for (int v = 0; v < V; v++) logits[2 * (size_t)Vp + v] = (real)NAN;
    float *losses = device_new<float>(4);
    CHECK_OK(crossentropy_loss(losses, device_from(logits), device_from(random_tokens(1, 4, V)), 0, 4, 4, V, Vp, 0, &e),
             &e);
    const std::vector<float> got = host_from(losses, 4);
    for (int i = 0; i < 3; i++) CHECK(!isfinite(got[i]), "loss %d is %g, though a logit is not finite", i, got[i]);
    CHECK(isfinite(got[3]), "the clean row's loss is %g", got[3]);
    case_end();
}

// ---------------------------------------------------------------------------------------------------------------------
// Reductions

static void test_reduce_squares(void) {
    Error e = {};
    for (int repeat = 0; repeat < 6; repeat++) {
        const int S = repeat == 0 ? 1 : random_int(2, 300);
        std::vector<ReduceSegment> segments(S);
        size_t n = 0;
        for (ReduceSegment &s : segments) {
            n += random_int(0, 5);
            s.offset = n;
            s.count = S > 1 && &s != &segments[0] && random_int(0, 9) == 0
                          ? 0
                          : random_int(1, random_int(0, 4) ? 600 : 60000);
            n += s.count;
        }
        n += 3;
        std::vector<float> x(n, NAN); // in the gaps
        std::vector<double> want(S, 0.0);
        for (int s = 0; s < S; s++)
            for (size_t i = 0; i < segments[s].count; i++) {
                const float v = (float)random_normal();
                x[segments[s].offset + i] = v;
                want[s] += (double)v * v;
            }
        double *squares = device_new<double>(S);
        float *d_x = device_from(x);
        ReduceSegment *d_segments = device_from(segments);
        void *workspace = workspace_new(reduce_squares_workspace_bytes(S));
        run_twice(
            "squares", [&] { CUDA_OK(cudaMemset(squares, POISON, S * sizeof(double))); },
            [&] { CHECK_OK(reduce_squares(squares, d_x, n, d_segments, S, workspace, 0, &e), &e); },
            {{squares, S * sizeof(double)}});
        check_close("squares", host_from(squares, S), want, 2e-6, 0.0);

        int bad = random_int(0, S - 1); // one value that is not finite must show, in its tensor only
        while (segments[bad].count == 0) bad = (bad + 1) % S;
        x[segments[bad].offset + segments[bad].count - 1] = repeat % 2 ? NAN : INFINITY;
        device_set(d_x, x);
        CHECK_OK(reduce_squares(squares, d_x, n, d_segments, S, workspace, 0, &e), &e);
        const std::vector<double> got = host_from(squares, S);
        for (int s = 0; s < S; s++) CHECK(isfinite(got[s]) == (s != bad), "segment %d: %g", s, got[s]);
        case_end();
    }
}

static void test_reduce_examples(void) {
    Error e = {};
    const size_t sizes[] = {1, 5, 768, 4097, 300000, (size_t)random_int(1, 50000)};
    for (size_t n : sizes) {
        const int E = random_int(1, 19);
        const std::vector<float> x = random_vector<float>(E * n), before = random_vector<float>(n);
        float *d_x = device_from(x), *gradient = device_new<float>(n), *examples = device_new<float>(E);
        double *squares = device_new<double>(1);
        void *workspace = workspace_new(reduce_examples_workspace_bytes(E));
        run_twice(
            "examples",
            [&] { device_set(gradient, before), device_set(squares, std::vector<double>(1, SQUARES_BEFORE)); },
            [&] { CHECK_OK(reduce_examples(gradient, squares, examples, d_x, E, n, workspace, 0, &e), &e); },
            {{gradient, n * sizeof(float)}, {squares, sizeof(double)}, {examples, E * sizeof(float)}});
        std::vector<double> sum(before.begin(), before.end()), want(E, 0.0);
        for (int b = 0; b < E; b++)
            for (size_t i = 0; i < n; i++) {
                const double v = x[b * n + i];
                sum[i] += v;
                want[b] += v * v;
            }
        check_close("gradient", host_from(gradient, n), sum, SUM_RELATIVE, SUM_ABSOLUTE);
        check_close("examples", host_from(examples, E), want, 2e-6, 0.0);
        CHECK_CLOSE(host_from(squares, 1)[0] - SQUARES_BEFORE, std::accumulate(want.begin(), want.end(), 0.0), 2e-6,
                    0.0);
        CHECK_OK(reduce_examples(NULL, squares, NULL, d_x, E, n, workspace, 0, &e), &e);
        CHECK_CLOSE(host_from(squares, 1)[0] - SQUARES_BEFORE, 2.0 * std::accumulate(want.begin(), want.end(), 0.0),
                    2e-6, 0.0);
        CHECK(host_from(gradient, n).size() == n, "gradient");
        case_end();
    }
}

static void test_reduce_sum(void) {
    Error e = {};
    for (size_t n : {(size_t)1, (size_t)1000, (size_t)random_int(1, 70000)}) {
        const std::vector<float> x = random_vector<float>(n, 3.0);
        double *sum = device_from(std::vector<double>(1, SQUARES_BEFORE));
        CHECK_OK(reduce_sum(sum, device_from(x), n, 0, &e), &e);
        CHECK_CLOSE(host_from(sum, 1)[0] - SQUARES_BEFORE, std::accumulate(x.begin(), x.end(), 0.0), 1e-9, 1.0);
        case_end();
    }
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("SKIP test_kernels_cuda: no GPU here\n");
        return ERR_SKIPPED;
    }
    random_state = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)(clock_seconds() * 1e6);
    printf("test_kernels_cuda %s seed %llu\n", sizeof(real) == 2 ? "bf16" : "fp32", (unsigned long long)random_state);
    RUN(test_layernorm_forward);
    RUN(test_layernorm_backward);
    RUN(test_gelu);
    RUN(test_bias_backward);
    RUN(test_embedding);
    RUN(test_crossentropy);
    RUN(test_crossentropy_nan);
    RUN(test_reduce_squares);
    RUN(test_reduce_examples);
    RUN(test_reduce_sum);
    return test_summary();
}
