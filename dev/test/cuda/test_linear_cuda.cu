// A layer's product with what follows it on Hopper (kernel_test.cuh): against float64 on the host in some rows, against
// cuBLASLt in all, and to the bit against the kernels that it replaces.
#include "kernel_test.cuh"

#include "cuda/gelu.cuh"
#include "cuda/layernorm.cuh"
#include "cuda/linear_sm90.cuh"
#include "cuda/matmul.cuh"

static Matmul *library;
static unsigned *ticket;

struct Widths {
    int rows, in, out;
};

struct Case {
    Linear l;
    std::vector<real> x, weight, bias, extra;
};

static Case case_new(Widths s, LinearEpilogue epilogue) {
    const size_t n = (size_t)s.rows * s.out;
    Case c = {{},
              random_vector<real>((size_t)s.rows * s.in),
              random_vector<real>((size_t)s.in * s.out, 0.0, 1.0 / sqrt(s.in)),
              random_vector<real>(s.out),
              random_vector<real>(n)};
    if (epilogue == LINEAR_DGELU)
        for (int i = 0; i < 7; i++) c.extra[i] = (real)(float[]){0.0f, -0.0f, 60.0f, -60.0f, 3e4f, -3e4f, -6.0f}[i];
    c.l.epilogue = epilogue;
    c.l.rows = s.rows, c.l.in = s.in, c.l.out = s.out;
    c.l.x = device_from(c.x), c.l.weight = device_from(c.weight);
    c.l.bias = epilogue != LINEAR_DGELU ? device_from(c.bias) : NULL;
    c.l.extra = epilogue != LINEAR_GELU ? device_from(c.extra) : NULL;
    c.l.y = device_new<real>(n), c.l.gelu = epilogue == LINEAR_GELU ? device_new<real>(n) : NULL;
    c.l.ticket = ticket;
    return c;
}

static double derivative_of_gelu(double x) {
    const double scale = sqrt(2.0 / M_PI), cubic = 0.044715, t = tanh(scale * (x + cubic * x * x * x));
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * scale * (1.0 + 3.0 * cubic * x * x);
}

// A row's sums in float64; y is one rounding away, with a residual two.
static void check_row(const Case &c, const std::vector<real> &y, int row) {
    const Linear &l = c.l;
    const double fp32 = 2e-5;
    const bool across = l.epilogue == LINEAR_DGELU;
    std::vector<double> want(l.out), tolerance(l.out);
    for (int j = 0; j < l.out; j++) {
        const double extra = value(c.extra[(size_t)row * l.out + j]);
        double sum = across ? 0.0 : value(c.bias[j]);
        for (int k = 0; k < l.in; k++)
            sum += value(c.x[(size_t)row * l.in + k]) *
                   value(c.weight[across ? (size_t)j * l.in + k : (size_t)k * l.out + j]);
        if (across) sum *= derivative_of_gelu(extra);
        want[j] = sum, tolerance[j] = ROUNDING * fabs(sum) + fp32;
        if (l.epilogue != LINEAR_RESIDUAL) continue;
        want[j] += extra;
        tolerance[j] += ROUNDING * fabs(want[j]);
    }
    const auto first = y.begin() + (size_t)row * l.out;
    check_within("row", std::vector<real>(first, first + l.out), want, tolerance);
}

// All rows against cuBLASLt's product: each is one rounding away from the sum. Its dGELU is no oracle: not known how exact.
static void check_library(const Case &c, const std::vector<real> &y) {
    Error e = {};
    const Linear &l = c.l;
    const double fp32 = 1e-4;
    real *product = device_new<real>(y.size());
    MatmulShape shape = {.m = l.rows, .n = l.out, .k = l.in, .epilogue = MATMUL_BIAS};
    if (l.epilogue == LINEAR_DGELU) shape.transpose_b = true, shape.epilogue = MATMUL_PLAIN;
    CHECK_OK(matmul_run(library, shape, product, l.x, l.weight, l.bias, &e), &e);
    std::vector<double> want = as_doubles(host_from(product, y.size())), tolerance;
    for (size_t i = 0; i < want.size(); i++) {
        if (l.epilogue == LINEAR_DGELU) want[i] *= derivative_of_gelu(value(c.extra[i]));
        double bound = 2.0 * ROUNDING * fabs(want[i]) + fp32;
        if (l.epilogue == LINEAR_RESIDUAL) want[i] += value(c.extra[i]), bound += 2.0 * ROUNDING * fabs(want[i]);
        tolerance.push_back(bound);
    }
    check_within("all rows", y, want, tolerance);
}

// GELU is gelu_forward's of what is stored; the sum is that of LayerNorm, of the same product without a residual.
static void check_bits(const Case &c, const std::vector<real> &y) {
    Error e = {};
    if (c.l.epilogue == LINEAR_DGELU) return;
    real *expected = device_new<real>(y.size()), *product = device_new<real>(y.size());
    if (c.l.epilogue == LINEAR_GELU) {
        CHECK_OK(gelu_forward(expected, c.l.y, y.size(), 0, &e), &e);
        CHECK(as_doubles(host_from(expected, y.size())) == as_doubles(host_from(c.l.gelu, y.size())), "GELU's bits");
        return;
    }
    float *mean = device_new<float>(c.l.rows), *rstd = device_new<float>(c.l.rows);
    real *unused = device_new<real>(y.size());
    Linear l = c.l;
    l.epilogue = LINEAR_GELU, l.y = product, l.gelu = unused;
    CHECK_OK(linear_sm90(l, 0, &e), &e);
    CHECK_OK(
        layernorm_forward(expected, unused, mean, rstd, l.extra, product, l.bias, l.bias, {}, l.rows, l.out, 0, &e),
        &e);
    CHECK(as_doubles(host_from(expected, y.size())) == as_doubles(y), "the residual sum's bits");
}

// Fewer rows give the same bits, and none after them is written (the guards see it).
static void check_fewer_rows(const Case &c, const std::vector<real> &y) {
    Error e = {};
    Linear l = c.l;
    l.rows = random_int(1, c.l.rows);
    const size_t n = (size_t)l.rows * l.out;
    l.y = device_new<real>(n), l.gelu = device_new<real>(n);
    CHECK_OK(linear_sm90(l, 0, &e), &e);
    CHECK(as_doubles(host_from(l.y, n)) == as_doubles(std::vector<real>(y.begin(), y.begin() + n)),
          "%d of %d rows give other bits", l.rows, c.l.rows);
}

static void linear_case(Widths s, LinearEpilogue epilogue) {
    Error e = {};
    const Case c = case_new(s, epilogue);
    const size_t n = (size_t)s.rows * s.out;
    bool usable = false;
    CHECK_OK(linear_sm90_usable(&usable, s.in, s.out, &e), &e);
    CHECK(usable, "%d to %d is not usable", s.in, s.out);
    std::vector<Output> outputs = {{c.l.y, n * sizeof(real)}};
    if (c.l.gelu) outputs.push_back({c.l.gelu, n * sizeof(real)});
    const auto poison = [&] {
        for (const Output &o : outputs) CUDA_OK(cudaMemset((void *)o.p, POISON, o.bytes));
    };
    run_twice(
        "linear", poison, [&] { CHECK_OK(linear_sm90(c.l, 0, &e), &e); }, outputs);
    const std::vector<real> y = host_from(c.l.y, n);
    for (int row : {0, std::min(63, s.rows - 1), std::min(128, s.rows - 1), random_int(0, s.rows - 1), s.rows - 1})
        check_row(c, y, row);
    check_library(c, y);
    check_bits(c, y);
    check_fewer_rows(c, y);
    CHECK(host_from(ticket, 1)[0] == 0, "tickets remain");
    case_end();
}

static void test_linear(void) {
    std::vector<Widths> widths = {{1, 256, 64}, {127, 320, 192}, {300, 64, 320}, {513, 768, 768}, {70, 448, 1600}};
    for (int i = 0; i < 4; i++) widths.push_back({random_int(1, 2000), 64 * random_int(1, 12), 64 * random_int(1, 12)});
    if (!small_shapes_only) { // many tiles a block, the last of a row 64 columns wide
        widths.push_back({16801, 256, 1600});
        widths.push_back({random_int(8000, 20000), 64 * random_int(1, 5), 64 + 192 * random_int(2, 8)});
    }
    for (Widths s : widths)
        for (LinearEpilogue epilogue : {LINEAR_GELU, LINEAR_RESIDUAL, LINEAR_DGELU}) linear_case(s, epilogue);
}

// The column sums of y as stored, and their squares by example.
static void columns_case(int B, int T, int in, int out) {
    Error e = {};
    const Case c = case_new({B * T, in, out}, LINEAR_DGELU);
    const Columns columns = columns_new(B, out);
    Linear l = c.l;
    l.columns = columns.device, l.T = T;
    l.workspace = workspace_new(linear_sm90_workspace_bytes(B * T, T, out));
    std::vector<Output> outputs;
    columns_outputs(outputs, columns);
    run_twice(
        "columns", [&] { columns_reset(columns); }, [&] { CHECK_OK(linear_sm90(l, 0, &e), &e); }, outputs);
    columns_check("columns", columns, as_doubles(host_from(c.l.y, (size_t)B * T * out)), T);
    CHECK(host_from(ticket, 1)[0] == 0, "tickets remain");
    case_end();
}

static void test_columns(void) {
    CHECK(linear_sm90_sums(1024) && linear_sm90_sums(128) && !linear_sm90_sums(64) && !linear_sm90_sums(1000), "T");
    columns_case(1, 128, 64, 64);
    columns_case(3, 256, 128, 320);
    for (int i = 0; i < 3; i++)
        columns_case(random_int(1, 5), 128 * random_int(1, 8), 64 * random_int(1, 8), 64 * random_int(1, 12));
    if (!small_shapes_only) columns_case(16, 1024, 256, 1600);
}

static void test_unusable_widths(void) {
    Error e = {};
    for (Widths s : {Widths{64, 256, 100}, {64, 200, 64}, {64, 32, 64}}) {
        bool usable = true;
        CHECK_OK(linear_sm90_usable(&usable, s.in, s.out, &e), &e);
        CHECK(!usable, "%d to %d is usable", s.in, s.out);
    }
}

int main(int argc, char **argv) {
    int code = kernel_test_begin("test_linear_cuda", argc, argv);
    Error e = {};
    bool usable = false;
    if (code) return code;
    CHECK_OK(linear_sm90_usable(&usable, 256, 64, &e), &e);
    if (!usable) {
        printf("SKIP test_linear_cuda: not for this GPU or precision\n");
        return ERR_SKIPPED;
    }
    void *workspace;
    CUDA_OK(cudaMalloc(&workspace, MATMUL_WORKSPACE_BYTES));
    CUDA_OK(cudaMalloc(&ticket, sizeof *ticket));
    CUDA_OK(cudaMemset(ticket, 0, sizeof *ticket));
    library = (Matmul *)calloc(1, sizeof *library);
    CHECK_OK(matmul_create(library, workspace, 0, &e), &e);
    RUN(test_linear);
    RUN(test_columns);
    RUN(test_unusable_widths);
    matmul_destroy(library);
    free(library);
    return test_summary();
}
