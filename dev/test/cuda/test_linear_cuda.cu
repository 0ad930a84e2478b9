// Products with fused epilogues on Hopper (kernel_test.cuh): against float64 on the host in some rows, against cuBLASLt
// and the kernels that they replace in all.
#include "kernel_test.cuh"

#include "cuda/gelu.cuh"
#include "cuda/layernorm.cuh"
#include "cuda/linear_sm90.cuh"
#include "cuda/matmul.cuh"

static Matmul *library;
static unsigned *tickets;

struct Size {
    int m, n, k;
};

// Everything in one place: a (m, k), b (k, n) or stored (n, k), bias (n), extra (m, n).
struct Case {
    Linear l;
    std::vector<real> a, b, bias, extra;
};

static Case case_new(Size s, LinearEpilogue epilogue, bool transpose_b) {
    const bool biased = epilogue == LINEAR_BIAS || epilogue == LINEAR_GELU || epilogue == LINEAR_RESIDUAL;
    Case c = {};
    c.a = random_vector<real>((size_t)s.m * s.k);
    c.b = random_vector<real>((size_t)s.k * s.n, 0.0, 1.0 / sqrt(s.k));
    c.bias = random_vector<real>(s.n);
    c.extra = random_vector<real>((size_t)s.m * s.n);
    c.l = {s.m, s.n, s.k, transpose_b, epilogue};
    c.l.out = device_new<real>((size_t)s.m * s.n);
    c.l.second = epilogue == LINEAR_GELU ? device_new<real>((size_t)s.m * s.n) : NULL;
    c.l.a = device_from(c.a);
    c.l.b = device_from(c.b);
    c.l.bias = biased ? device_from(c.bias) : NULL;
    c.l.extra = device_from(c.extra);
    c.l.tickets = tickets;
    return c;
}

static double gelu_slope(double x) {
    const double k = sqrt(2.0 / M_PI), t = tanh(k * (x + 0.044715 * x * x * x));
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * k * (1.0 + 3.0 * 0.044715 * x * x);
}

// A row's sums, and what is made of them, in float64.
static void check_row(const Case &c, const std::vector<real> &out, int row) {
    const Linear &l = c.l;
    std::vector<double> want(l.n), tolerance(l.n);
    for (int j = 0; j < l.n; j++) {
        double sum = l.bias ? value(c.bias[j]) : 0.0;
        for (int k = 0; k < l.k; k++)
            sum += value(c.a[(size_t)row * l.k + k]) *
                   value(c.b[l.transpose_b ? (size_t)j * l.k + k : (size_t)k * l.n + j]);
        const double x = value(c.extra[(size_t)row * l.n + j]), once = ROUNDING * fabs(sum) + 2e-5;
        want[j] = sum, tolerance[j] = once;
        if (l.epilogue == LINEAR_RESIDUAL) want[j] += x, tolerance[j] += ROUNDING * fabs(want[j]);
        if (l.epilogue == LINEAR_DGELU) want[j] *= gelu_slope(x), tolerance[j] = 2 * ROUNDING * fabs(want[j]) + 1e-4;
    }
    const std::vector<real> got(out.begin() + (size_t)row * l.n, out.begin() + (size_t)(row + 1) * l.n);
    check_within("row", got, want, tolerance);
}

// The whole of it against cuBLASLt, one rounding apart.
static void check_library(const Case &c, const std::vector<real> &out) {
    Error e = {};
    const Linear &l = c.l;
    const bool dgelu = l.epilogue == LINEAR_DGELU;
    const MatmulEpilogue epilogue = dgelu ? MATMUL_DGELU : l.bias ? MATMUL_BIAS : MATMUL_PLAIN;
    real *product = device_new<real>((size_t)l.m * l.n);
    CHECK_OK(matmul_run(library, {.m = l.m, .n = l.n, .k = l.k, .transpose_b = l.transpose_b, .epilogue = epilogue},
                        product, l.a, l.b, dgelu ? l.extra : l.bias, &e),
             &e);
    std::vector<double> want = as_doubles(host_from(product, (size_t)l.m * l.n)), tolerance;
    for (size_t i = 0; i < want.size(); i++) {
        double bound = 2.5 * ROUNDING * fabs(want[i]) + 1e-3;
        if (l.epilogue == LINEAR_RESIDUAL) want[i] += value(c.extra[i]), bound += ROUNDING * fabs(want[i]);
        tolerance.push_back(bound);
    }
    check_within("all rows", out, want, tolerance);
}

// Bits: GELU is gelu_forward's of what is stored; the residual sum is LayerNorm's of the biased product.
static void check_bits(const Case &c, const std::vector<real> &out) {
    Error e = {};
    const size_t n = (size_t)c.l.m * c.l.n;
    real *expected = device_new<real>(n), *unused = device_new<real>(n);
    float *mean = device_new<float>(c.l.m), *rstd = device_new<float>(c.l.m);
    if (c.l.epilogue == LINEAR_GELU) {
        CHECK_OK(gelu_forward(expected, c.l.out, n, 0, &e), &e);
        CHECK(as_doubles(host_from(expected, n)) == as_doubles(host_from(c.l.second, n)), "GELU's bits differ");
    }
    if (c.l.epilogue == LINEAR_RESIDUAL) {
        Linear biased = c.l;
        biased.epilogue = LINEAR_BIAS, biased.out = unused;
        CHECK_OK(linear_sm90(biased, 0, &e), &e);
        CHECK_OK(
            layernorm_forward(expected, unused, mean, rstd, c.l.extra, unused, c.l.bias, c.l.bias, c.l.m, c.l.n, 0, &e),
            &e);
        CHECK(as_doubles(host_from(expected, n)) == as_doubles(out), "the residual sum's bits differ");
    }
}

// The first rows alone are the same, and no row after them is written.
static void check_fewer_rows(const Case &c, const std::vector<real> &out) {
    Error e = {};
    Linear fewer = c.l;
    fewer.m = random_int(1, c.l.m);
    const size_t n = (size_t)fewer.m * c.l.n;
    fewer.out = device_new<real>(n);
    if (c.l.second) fewer.second = device_new<real>(n);
    CHECK_OK(linear_sm90(fewer, 0, &e), &e);
    CHECK(as_doubles(host_from(fewer.out, n)) == as_doubles(std::vector<real>(out.begin(), out.begin() + n)),
          "%d of %d rows give other bits", fewer.m, c.l.m);
}

static void linear_case(Size s, LinearEpilogue epilogue, bool transpose_b) {
    Error e = {};
    const Case c = case_new(s, epilogue, transpose_b);
    const size_t n = (size_t)s.m * s.n;
    bool usable = false;
    CHECK_OK(linear_sm90_usable(&usable, s.n, s.k, &e), &e);
    CHECK(usable, "%d x %d x %d is not usable", s.m, s.n, s.k);
    std::vector<Output> outputs = {{c.l.out, n * sizeof(real)}};
    if (c.l.second) outputs.push_back({c.l.second, n * sizeof(real)});
    run_twice(
        "linear",
        [&] {
            for (const Output &o : outputs) CUDA_OK(cudaMemset((void *)o.p, POISON, o.bytes));
        },
        [&] { CHECK_OK(linear_sm90(c.l, 0, &e), &e); }, outputs);
    const std::vector<real> out = host_from(c.l.out, n);
    for (int row : {0, std::min(63, s.m - 1), std::min(128, s.m - 1), random_int(0, s.m - 1), s.m - 1})
        check_row(c, out, row);
    check_library(c, out);
    check_bits(c, out);
    check_fewer_rows(c, out);
    CHECK(host_from(tickets, 1)[0] == 0, "tickets remain");
    case_end();
}

static void test_linear(void) {
    std::vector<Size> sizes = {{1, 64, 256}, {127, 192, 320}, {300, 320, 256}, {513, 768, 768}, {70, 1600, 448}};
    for (int i = 0; i < 3; i++) sizes.push_back({random_int(1, 2000), 64 * random_int(1, 12), 64 * random_int(4, 12)});
    if (!small_shapes_only) sizes.push_back({random_int(16000, 20000), 1600, 256}); // many tiles a block
    for (Size s : sizes) {
        for (LinearEpilogue epilogue : {LINEAR_BIAS, LINEAR_GELU, LINEAR_RESIDUAL}) linear_case(s, epilogue, false);
        linear_case(s, LINEAR_PLAIN, true);
        linear_case(s, LINEAR_DGELU, true);
    }
}

static void test_unusable_shapes(void) {
    Error e = {};
    for (Size s : {Size{64, 100, 256}, {64, 64, 200}, {64, 64, 192}}) {
        bool usable = true;
        CHECK_OK(linear_sm90_usable(&usable, s.n, s.k, &e), &e);
        CHECK(!usable, "%d x %d x %d is usable", s.m, s.n, s.k);
    }
}

int main(int argc, char **argv) {
    int code = kernel_test_begin("test_linear_cuda", argc, argv);
    Error e = {};
    bool usable = false;
    if (!code) CHECK_OK(linear_sm90_usable(&usable, 64, 256, &e), &e);
    if (!code && !usable) {
        printf("SKIP test_linear_cuda: not for this GPU or precision\n");
        code = ERR_SKIPPED;
    }
    if (code) return code;
    void *workspace;
    CUDA_OK(cudaMalloc(&workspace, MATMUL_WORKSPACE_BYTES));
    CUDA_OK(cudaMalloc(&tickets, sizeof *tickets));
    CUDA_OK(cudaMemset(tickets, 0, sizeof *tickets));
    library = (Matmul *)calloc(1, sizeof *library);
    CHECK_OK(matmul_create(library, workspace, 0, &e), &e);
    RUN(test_linear);
    RUN(test_unusable_shapes);
    matmul_destroy(library);
    free(library);
    return test_summary();
}
