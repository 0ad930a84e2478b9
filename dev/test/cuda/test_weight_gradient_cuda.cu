// Compares weight gradients and per-example squared norms with float64 (kernel_test.cuh). Tensor cores sum products of
// e4m3 in 14 bits. So tests of e4m3 use small integers, whose sums are exact, or numbers as in training, with a
// tolerance for 14 bits.
#include "kernel_test.cuh"

#include "cuda/fp8.cuh"
#include "cuda/weight_gradient.cuh"

static WeightGradientPairs placed;
static int pairs_here; // number of pairs on this GPU; a schedule of fewer pairs uses the first ones

// A product on the device: operands, all possible results, a workspace.
struct Product {
    WeightGradientShape s;
    int clusters;
    std::vector<real> x, dy;
    std::vector<float> before; // dW / g.scale before the call
    std::vector<int> row_at;   // (B, in)
    void *d_x, *d_dy;
    WeightGradient g;
    Columns bias;
    void *workspace;
    size_t workspace_bytes;

    size_t count() const { return (size_t)s.in * s.out; }
    size_t rows_count() const { return (size_t)s.B * s.T * s.out; }
};

enum Wanted { SQUARES = 1, BIAS = 2, ROWS_OF_EXAMPLES = 4, E4M3 = 8, INTEGERS = 16, ONE_SIGN = 32 };

// Returns e4m3 codes (B, columns, T) of x (B, T, columns); rounds x to them.
static std::vector<uint8_t> codes_of(std::vector<real> &x, int B, int T, int columns) {
    std::vector<uint8_t> codes(x.size());
    for (size_t row = 0; row < (size_t)B * T; row++)
        for (int c = 0; c < columns; c++) {
            const uint8_t code = e4m3_code((float)x[row * columns + c]);
            x[row * columns + c] = (real)e4m3_value(code);
            codes[(row / T * columns + c) * T + row % T] = code;
        }
    return codes;
}

static Product product_new(WeightGradientShape s, int clusters, int wanted) {
    if (wanted & ROWS_OF_EXAMPLES) wanted |= SQUARES;
    Product p = {};
    p.s = s, p.clusters = clusters;
    const double deviation = wanted & E4M3 && !(wanted & INTEGERS) ? 4 : 1;
    for (auto *v : {&p.x, &p.dy}) {
        *v = random_vector<real>((size_t)s.B * s.T * (v == &p.x ? s.in : s.out), 0, deviation);
        for (real &x : *v) {
            if (wanted & INTEGERS) x = (real)rintf((float)x);
            if (wanted & ONE_SIGN) x = (real)fabsf((float)x);
        }
    }
    p.s.e4m3 = wanted & E4M3;
    if (p.s.e4m3) {
        p.d_x = device_from(codes_of(p.x, s.B, s.T, s.in));
        p.d_dy = device_from(codes_of(p.dy, s.B, s.T, s.out));
        p.g.scale = ldexpf(1, random_int(-80, 40)); // 2^-80 has no square in fp32
    } else p.d_x = device_from(p.x), p.d_dy = device_from(p.dy);
    p.g.dw = device_new<float>(p.count());
    p.g.first = random_uniform() < 0.5;
    p.before = random_vector<float>(p.count());
    if (p.g.first) std::fill(p.before.begin(), p.before.end(), NAN);
    if (wanted & SQUARES) p.g.squares = device_new<double>(1), p.g.norms = device_new<double>(s.B);
    if (wanted & BIAS) {
        p.bias = columns_new(s.B, s.out), p.g.bias = p.bias.device;
        p.g.jobs = new ColumnJobs(jobs_new(weight_gradient_column_bytes(s)));
    }
    if (wanted & ROWS_OF_EXAMPLES) {
        p.row_at.assign((size_t)s.B * s.in, 0);
        for (int b = 0; b < s.B; b++)
            for (int t = 0; t < s.T; t++) // a later t may overwrite row_at
                p.row_at[(size_t)b * s.in + random_int(0, s.in - 1)] = t + 1;
        p.g.row_at = device_from(p.row_at);
        p.g.rows = device_new<float>(p.rows_count());
    }
    p.workspace_bytes = weight_gradient_workspace_bytes(p.s, clusters);
    p.workspace = workspace_new(p.workspace_bytes);
    return p;
}

template <typename X> static std::vector<X> times(std::vector<X> v, double factor) {
    for (X &x : v) x *= factor;
    return v;
}

static void product_reset(const Product &p) {
    CUDA_OK(cudaMemset(p.workspace, POISON, p.workspace_bytes));
    device_set(p.g.dw, times(p.before, p.g.scale));
    if (p.g.squares) {
        device_set(p.g.squares, std::vector<double>(1, SQUARES_BEFORE * p.g.scale * p.g.scale));
        CUDA_OK(cudaMemset(p.g.norms, POISON, p.s.B * sizeof(double)));
    }
    if (p.g.bias.sum) columns_reset(p.bias);
}

static void product_run(const Product &p) {
    WeightGradientPairs pairs = placed;
    for (int i = 0; p.clusters < pairs_here && i < p.clusters; i++) pairs.place[i] = (unsigned char)i;
    pairs.count = p.clusters;
    CALL_OK(weight_gradient(p.g, p.d_x, p.d_dy, p.s, pairs, p.workspace, 0, &e));
    if (p.g.jobs) CALL_OK(column_finish(p.g.jobs, 0, &e));
}

static std::vector<Output> product_outputs(const Product &p) {
    std::vector<Output> outputs = {{p.g.dw, p.count() * sizeof(float)}};
    if (p.g.squares)
        outputs.push_back({p.g.squares, sizeof(double)}), outputs.push_back({p.g.norms, p.s.B * sizeof(double)});
    if (p.g.bias.sum) columns_outputs(outputs, p.bias);
    return outputs;
}

// Return results divided by scale or scale^2.
static std::vector<float> product_dw(const Product &p) { return times(host_from(p.g.dw, p.count()), 1 / p.g.scale); }
static std::vector<double> product_norms(const Product &p) {
    return times(host_from(p.g.norms, p.s.B), pow(p.g.scale, -2));
}
static double product_squares(const Product &p) {
    return host_from(p.g.squares, 1)[0] / pow(p.g.scale, 2) - SQUARES_BEFORE;
}

// Returns g_b / scale of one example in float64, (in, out).
static std::vector<double> example_reference(const Product &p, int b) {
    const size_t in = p.s.in, out = p.s.out;
    std::vector<double> g(in * out, 0.0), dy(out);
    for (size_t t = 0; t < (size_t)p.s.T; t++) {
        const size_t row = (size_t)b * p.s.T + t;
        for (size_t j = 0; j < out; j++) dy[j] = value(p.dy[row * out + j]);
        for (size_t i = 0; i < in; i++) {
            const double x = value(p.x[row * in + i]);
            for (size_t j = 0; j < out; j++) g[i * out + j] += x * dy[j];
        }
    }
    return g;
}

// Checks rows of example b: wanted rows equal g_b's up to fp32's rounding; other rows are unchanged.
static void check_rows(const Product &p, int b, const std::vector<double> &g, const std::vector<float> &rows) {
    std::vector<char> wanted(p.s.T, 0);
    for (int i = 0; i < p.s.in; i++) {
        const int t = p.row_at[(size_t)b * p.s.in + i] - 1;
        if (t < 0) continue;
        wanted[t] = 1;
        const float *row = rows.data() + ((size_t)b * p.s.T + t) * p.s.out;
        check_close("row of an example", std::vector<float>(row, row + p.s.out),
                    std::vector<double>(g.begin() + (size_t)i * p.s.out, g.begin() + (size_t)(i + 1) * p.s.out),
                    SUM_RELATIVE, SUM_ABSOLUTE);
    }
    for (int t = 0; t < p.s.T; t++)
        for (int j = 0; j < p.s.out && !wanted[t]; j++)
            CHECK(isnan(rows[((size_t)b * p.s.T + t) * p.s.out + j]), "row %d of example %d was written", t, b);
}

static void check_product(const Product &p) {
    std::vector<double> sum(p.count(), 0.0), norms;
    std::vector<float> rows = p.g.rows ? host_from(p.g.rows, p.rows_count()) : std::vector<float>();
    double squares = 0.0;
    if (!p.g.first) sum.assign(p.before.begin(), p.before.end());
    for (int b = 0; b < p.s.B; b++) {
        const std::vector<double> g = example_reference(p, b);
        double norm = 0.0;
        for (size_t i = 0; i < g.size(); i++) sum[i] += g[i], norm += g[i] * g[i];
        norms.push_back(norm);
        squares += norm;
        if (p.g.rows) check_rows(p, b, g, rows);
    }
    check_close("dW", product_dw(p), sum, SUM_RELATIVE, SUM_ABSOLUTE);
    if (p.g.squares) {
        check_close("norms", product_norms(p), norms, 1e-5, 0.0);
        CHECK_CLOSE(product_squares(p), squares, 1e-5, 0);
    }
    if (p.g.bias.sum) columns_check("bias", p.bias, as_doubles(p.dy), p.s.T);
}

static void product_case(WeightGradientShape s, int clusters, int wanted) {
    Product p = product_new(s, clusters, wanted);
    char name[128];
    snprintf(name, sizeof name, "B %d T %d, %d x %d, %d pairs, wanted %d", s.B, s.T, s.in, s.out, clusters, wanted);
    int failures = test_state.failures;
    run_twice(
        name, [&] { product_reset(p); }, [&] { product_run(p); }, product_outputs(p));
    check_product(p);
    case_end();
    if (test_state.failures != failures) printf("  in: %s\n", name);
}

// Few pairs get several tiles each; many pairs share tiles. T and columns are multiples of a tile's sizes, or not.
static void test_shapes(void) {
    const WeightGradientShape shapes[] = {{1, 1, 8, 8},      {1, 64, 128, 192}, {2, 65, 136, 200}, {3, 40, 264, 160},
                                          {5, 7, 64, 392},   {4, 130, 320, 72}, {9, 64, 256, 192}, {7, 20, 8, 640},
                                          {2, 448, 136, 40}, {6, 33, 1032, 168}};
    for (const WeightGradientShape &s : shapes)
        for (int clusters : small_shapes_only ? std::vector<int>{1, 5} : std::vector<int>{1, 2, 3, 5, pairs_here})
            product_case(s, clusters, (clusters == 1 ? 7 : random_int(0, 7)) & (random_uniform() < 0.8 ? 7 : 3));
    for (const WeightGradientShape &s :
         {WeightGradientShape{3, 130, 264, 408}, {2, 65, 136, 200}}) // tiles of 208 columns
        for (int clusters : {1, 3, pairs_here}) product_case(s, clusters, SQUARES | ROWS_OF_EXAMPLES);
    for (int i = 0; i < (small_shapes_only ? 4 : 24); i++)
        product_case({random_int(1, 12), random_int(1, 200), 8 * random_int(1, 80), 8 * random_int(1, 80)},
                     random_int(1, pairs_here), i % 3 == 0 ? 7 : random_int(0, 3));
    if (!small_shapes_only) product_case({2, 1024, 768, 768}, pairs_here, SQUARES | BIAS);
}

// An infinity or NaN in one row of X stays in that example's norm and in one row of dW.
static void test_not_finite(void) {
    for (float bad : {INFINITY, NAN})
        for (int clusters : {1, 2, pairs_here}) {
            Product p = product_new({4, 70, 264, 400}, clusters, SQUARES);
            const int b = random_int(0, 3), t = random_int(0, 69), i = random_int(0, 263);
            p.x[((size_t)b * p.s.T + t) * p.s.in + i] = (real)bad;
            device_set((real *)p.d_x, p.x);
            product_reset(p);
            product_run(p);
            const std::vector<double> norms = host_from(p.g.norms, p.s.B);
            for (int k = 0; k < p.s.B; k++)
                CHECK(isfinite(norms[k]) == (k != b), "%d pairs: norm %d is %g, the %g is in example %d", clusters, k,
                      norms[k], bad, b);
            const std::vector<float> dw = host_from(p.g.dw, p.count());
            size_t wrong = 0;
            for (size_t k = 0; k < dw.size(); k++) wrong += isfinite(dw[k]) == (k / p.s.out == (size_t)i);
            CHECK(wrong == 0, "%d pairs: %zu elements of dW", clusters, wrong);
            case_end();
        }
}

// ---- e4m3 -----------------------------------------------------------------------------------------------------------

static void test_e4m3_shapes(void) {
    const WeightGradientShape shapes[] = {
        {1, 16, 8, 8},      {1, 128, 128, 192}, {2, 144, 136, 200}, {3, 48, 264, 160}, {5, 16, 64, 392},
        {4, 272, 320, 64},  {9, 128, 256, 192}, {7, 32, 8, 640},    {2, 448, 136, 40}, {6, 48, 1032, 168},
        {3, 144, 264, 408}, {2, 1024, 192, 64}, {5, 128, 264, 1216}};
    for (const WeightGradientShape &s : shapes)
        for (int clusters : small_shapes_only ? std::vector<int>{1, 5} : std::vector<int>{1, 2, 3, 5, pairs_here})
            product_case(s, clusters, E4M3 | INTEGERS | random_int(0, SQUARES));
    for (int i = 0; i < (small_shapes_only ? 4 : 24); i++)
        product_case({random_int(1, 12), 16 * random_int(1, 12), 8 * random_int(1, 80), 8 * random_int(1, 80)},
                     random_int(1, pairs_here), E4M3 | INTEGERS | random_int(0, SQUARES));
}

// NaN in all codes of one example does not change other examples' norms. The last stage is not full.
static void test_e4m3_nan(void) {
    for (int clusters : {1, 2, pairs_here}) {
        Product p = product_new({4, 144, 264, 400}, clusters, E4M3 | INTEGERS | SQUARES);
        const int bad = random_int(0, p.s.B - 1);
        CUDA_OK(cudaMemset((uint8_t *)p.d_x + (size_t)bad * p.s.T * p.s.in, 0x7f, (size_t)p.s.T * p.s.in));
        CUDA_OK(cudaMemset((uint8_t *)p.d_dy + (size_t)bad * p.s.T * p.s.out, 0x7f, (size_t)p.s.T * p.s.out));
        product_reset(p);
        product_run(p);
        const std::vector<double> norms = product_norms(p);
        for (int b = 0; b < p.s.B; b++) {
            double want = 0;
            for (double g : example_reference(p, b)) want += g * g;
            if (b == bad) CHECK(isnan(norms[b]), "%d pairs: norm %d is %g", clusters, b, norms[b]);
            else CHECK_CLOSE(norms[b], want, 1e-5, 0);
        }
        for (float g : product_dw(p)) CHECK(isnan(g), "%d pairs: dW has %g", clusters, g);
        case_end();
    }
}

// Bounds errors of dW and of norms. Hopper cuts less than 2^-13 of the current sum off each product, on average half.
// If all T products have the same sign, their sum loses at most about T 2^-15 of itself.
static void e4m3_accuracy_case(WeightGradientShape s, int wanted) {
    const double tolerance = wanted & ONE_SIGN ? 0.01 + s.T * 0x1p-15 : 0.01;
    Product p = product_new(s, pairs_here, E4M3 | SQUARES | wanted);
    p.g.first = true;
    product_reset(p);
    product_run(p);
    std::vector<double> sum(p.count(), 0.0);
    const std::vector<double> norms = product_norms(p);
    double worst_norm = 0, off = 0, square = 0, signs = 0, all = 0;
    for (int b = 0; b < s.B; b++) {
        const std::vector<double> g = example_reference(p, b);
        double norm = 0;
        for (size_t i = 0; i < g.size(); i++) sum[i] += g[i], norm += g[i] * g[i];
        worst_norm = worse(worst_norm, fabs(norms[b] / norm - 1));
    }
    const std::vector<float> dw = product_dw(p);
    for (size_t i = 0; i < dw.size(); i++) {
        const double error = dw[i] - sum[i];
        off += error * error, square += sum[i] * sum[i];
        signs += sum[i] < 0 ? -error : error, all += fabs(sum[i]);
    }
    printf("  e4m3: B %d T %d, %d x %d%s: dW is off by %.2e, signed mean %+.2e, a norm by %.2e at most\n", s.B, s.T,
           s.in, s.out, wanted & ONE_SIGN ? ", one sign" : "", sqrt(off / square), signs / all, worst_norm);
    CHECK(sqrt(off / square) <= tolerance && fabs(signs / all) <= (wanted & ONE_SIGN ? tolerance : 0.002), "dW");
    CHECK(worst_norm <= (wanted & ONE_SIGN ? 2 * tolerance : 0.001), "norms");
    case_end();
}

static void test_e4m3_accuracy(void) {
    for (int wanted : {0, (int)ONE_SIGN}) {
        e4m3_accuracy_case({4, 256, 128, 192}, wanted);
        if (small_shapes_only) continue;
        e4m3_accuracy_case({2, 1024, 384, 192}, wanted);
        e4m3_accuracy_case({2, 2048, 128, 192}, wanted);
    }
}

int main(int argc, char **argv) {
    kernel_test_begin("test_weight_gradient_cuda", argc, argv);
    pairs_here = weight_gradient_clusters();
    CALL_OK(weight_gradient_pairs(&placed, &e));
    if (pairs_here == 0) skip_program("test_weight_gradient_cuda", "not in this build, or not on this GPU");
    RUN(test_shapes, test_not_finite);
    if (FP8_BUILT) {
        RUN(test_e4m3_shapes, test_e4m3_nan, test_e4m3_accuracy);
    }
    return test_summary();
}
