// Compares Hopper's fused products (kernel_test.cuh): some rows with float64 on the host, all rows with cuBLASLt, and
// LINEAR_GELU bit for bit with the kernels that it replaces.
#include "kernel_test.cuh"

#include "cuda/crossentropy.cuh"
#include "cuda/gelu.cuh"
#include "cuda/linear_sm90.cuh"
#include "cuda/matmul.cuh"
#include "cuda/sm90.cuh"

static Matmul *library;
static unsigned *ticket;

static double e4m3_worst_norm, e4m3_mean; // maximum; sum over all checked rows
static int e4m3_rows;

struct Widths {
    int rows, in, out;
};

struct Case {
    Linear l;
    std::vector<real> x, weight, bias, extra;
    std::vector<GeluSlope> slope;
};

static bool takes_bias(LinearEpilogue e) { return e == LINEAR_GELU || e == LINEAR_RESIDUAL || e == LINEAR_BIAS; }
static bool is_across(const Linear &l) { return l.x8 || l.epilogue == LINEAR_DGELU; }

// Rounds v to e4m3 with fp8_next's exponent; divides *scale by 2^exponent. Returns the codes, then a row of NaN codes.
static uint8_t *e4m3_of(std::vector<real> &v, int row, float *scale) {
    float amax = 0;
    for (real x : v) amax = fmaxf(amax, fabsf((float)x));
    const int k = fp8_next(FP8_UNSET, amax);
    std::vector<uint8_t> codes;
    for (real &x : v) {
        codes.push_back(e4m3_code(ldexpf((float)x, k)));
        x = (real)ldexpf(e4m3_value(codes.back()), -k);
    }
    codes.insert(codes.end(), row, 0x7f);
    *scale = ldexpf(*scale, -k);
    return device_from(codes);
}

// e4m3: x and weight hold the values of their codes, and weight is (out, in).
static Case case_new(Widths s, LinearEpilogue epilogue, bool e4m3 = false) {
    const size_t n = (size_t)s.rows * s.out;
    Case c = {{},
              random_vector<real>((size_t)s.rows * s.in),
              random_vector<real>((size_t)s.in * s.out, 0.0, 1.0 / sqrt(s.in)),
              random_vector<real>(s.out),
              random_vector<real>(n),
              {}};
    for (size_t i = 0; i < n; i++) c.slope.push_back((GeluSlope)random_int(0, GELU_CODE_NAN - 1));
    c.l.epilogue = epilogue;
    c.l.rows = s.rows, c.l.in = s.in, c.l.out = s.out;
    if (e4m3) c.l.x8 = e4m3_of(c.x, s.in, &c.l.scale), c.l.weight8 = e4m3_of(c.weight, s.in, &c.l.scale);
    if (e4m3 && (epilogue == LINEAR_GELU || epilogue == LINEAR_DGELU)) // some exponents saturate
        c.l.copy = {device_new<uint8_t>(n), ldexpf(1.0f, random_int(-2, 8)), device_from(std::vector<float>{0})};
    c.l.x = device_from(c.x), c.l.weight = device_from(c.weight);
    c.l.bias = takes_bias(epilogue) ? device_from(c.bias) : NULL;
    c.l.extra = epilogue == LINEAR_RESIDUAL ? device_from(c.extra) : NULL;
    c.l.y = device_new<real>(n);
    c.l.slope = epilogue == LINEAR_DGELU ? device_from(c.slope) : device_new<GeluSlope>(n);
    c.l.ticket = ticket;
    return c;
}

static double slope_of_code(GeluSlope code) { return (code - int{GELU_CODE_ZERO}) / 202.0; }

// Returns GELU of x. Turns *tolerance, the error of x, into the error of rounded GELU, whose slope is at most 1.13.
static double gelu_of_rounded(double x, double *tolerance) {
    *tolerance = 1.13 * *tolerance + ROUNDING * fabs(gelu_tanh(x));
    return gelu_tanh(x);
}

// Bounds the error by 1% of the row's norm, and the mean error towards or away from zero by 0.2%, because tensor cores
// add products of e4m3 with about 14 bits.
static void check_e4m3_row(const std::vector<real> &y, const std::vector<double> &want) {
    double squares = 0, all = 0, sign = 0, sum = 0;
    for (size_t j = 0; j < y.size(); j++) {
        const double error = value(y[j]) - want[j];
        squares += error * error, all += want[j] * want[j];
        sign += want[j] < 0 ? -error : error, sum += fabs(want[j]);
    }
    const double norm = sqrt(squares / all), mean = sign / sum;
    CHECK(norm <= 0.01, "error of a row: %g", norm);
    CHECK(fabs(mean) <= 0.002 + 0.02 / y.size(), "mean signed error of a row: %g", mean);
    e4m3_worst_norm = std::max(e4m3_worst_norm, norm);
    e4m3_mean += mean, e4m3_rows++;
}

// Compares a row with its sums in float64, up to one rounding.
static void check_row(const Case &c, const std::vector<real> &y, int row) {
    const Linear &l = c.l;
    const double fp32 = 2e-5;
    const bool across = is_across(l);
    std::vector<double> want(l.out), tolerance(l.out);
    for (int j = 0; j < l.out; j++) {
        const double extra = value(c.extra[(size_t)row * l.out + j]);
        double sum = takes_bias(l.epilogue) ? value(c.bias[j]) : 0.0;
        for (int k = 0; k < l.in; k++)
            sum += value(c.x[(size_t)row * l.in + k]) *
                   value(c.weight[across ? (size_t)j * l.in + k : (size_t)k * l.out + j]);
        if (l.epilogue == LINEAR_DGELU) sum *= slope_of_code(c.slope[(size_t)row * l.out + j]);
        if (l.epilogue == LINEAR_RESIDUAL) sum += extra;
        tolerance[j] = ROUNDING * fabs(sum) + fp32;
        want[j] = l.epilogue == LINEAR_GELU ? gelu_of_rounded(sum, &tolerance[j]) : sum;
    }
    const std::vector<real> got(y.begin() + (size_t)row * l.out, y.begin() + (size_t)(row + 1) * l.out);
    if (l.x8) check_e4m3_row(got, want);
    else check_within("row", got, want, tolerance);
}

// Compares all rows with cuBLASLt's product. Both are one rounding away from the sum.
static void check_library(const Case &c, const std::vector<real> &y) {
    const Linear &l = c.l;
    const double fp32 = l.x8 ? 0.02 : 1e-4; // sums are about 1
    real *product = device_new<real>(y.size());
    MatmulShape shape = {.m = l.rows, .n = l.out, .k = l.in, .transpose_b = is_across(l)};
    shape.bias = takes_bias(l.epilogue);
    CALL_OK(matmul_run(library, shape, {product, l.x, l.weight, l.bias}, &e));
    std::vector<double> want = as_doubles(host_from(product, y.size())), tolerance;
    for (size_t i = 0; i < want.size(); i++) {
        if (l.epilogue == LINEAR_DGELU) want[i] *= slope_of_code(c.slope[i]);
        double bound = 2.0 * ROUNDING * fabs(want[i]) + fp32;
        if (l.epilogue == LINEAR_RESIDUAL) want[i] += value(c.extra[i]), bound += 2.0 * ROUNDING * fabs(want[i]);
        if (l.epilogue == LINEAR_GELU) want[i] = gelu_of_rounded(want[i], &bound);
        tolerance.push_back(bound);
    }
    check_within("all rows", y, want, tolerance);
}

// Checks that LINEAR_GELU's results equal LINEAR_BIAS followed by gelu_forward.
static void check_bits(const Case &c, const std::vector<real> &y) {
    if (c.l.epilogue != LINEAR_GELU) return;
    const size_t n = y.size();
    Linear l = c.l;
    l.epilogue = LINEAR_BIAS, l.y = device_new<real>(n), l.slope = device_new<GeluSlope>(n);
    CALL_OK(linear_sm90(l, 0, &e));
    CALL_OK(gelu_forward(l.y, l.slope, l.y, n, 0, &e));
    CHECK(as_doubles(host_from(l.y, n)) == as_doubles(y), "GELU's bits");
    CHECK(host_from(l.slope, n) == host_from(c.l.slope, n), "bits of the slopes");
}

// Checks that y has the same bits without a copy.
static void check_no_copy(const Case &c, const std::vector<real> &y) {
    Linear l = c.l;
    l.copy = {}, l.y = device_new<real>(y.size());
    CALL_OK(linear_sm90(l, 0, &e));
    CHECK(as_doubles(host_from(l.y, y.size())) == as_doubles(y), "without a copy y has other bits");
}

// Stores no y, only codes in y's memory (Fp8Copy.alone). Checks that they equal the codes stored beside y, and that
// nothing is written after them. If rows are whole examples of 16 tokens, checks the transposed codes, too.
static void check_alone(const Case &c) {
    const size_t n = (size_t)c.l.rows * c.l.out;
    Linear l = c.l;
    if (!l.copy.codes) return;
    if (l.rows % 16 == 0) {
        l.copy.T = l.rows % 48 ? l.rows % 128 ? 16 : 128 : 48;
        l.copy.transposed = device_new<uint8_t>(n);
    }
    l.y = device_new<real>(n);
    l.copy.codes = (uint8_t *)l.y, l.copy.alone = true;
    CALL_OK(linear_sm90(l, 0, &e));
    std::vector<uint8_t> want = host_from(c.l.copy.codes, n);
    want.resize(2 * n, (uint8_t)POISON);
    CHECK(host_from(l.copy.codes, 2 * n) == want, "a copy alone");
    if (!l.copy.transposed) return;
    const std::vector<uint8_t> transposed = host_from(l.copy.transposed, n);
    const int T = l.copy.T;
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++)
        wrong += transposed[(i / l.out / T * l.out + i % l.out) * T + i / l.out % T] != want[i];
    CHECK(wrong == 0, "%zu of %zu transposed codes, T %d", wrong, n, T);
}

// Checks that a NaN slope makes only its own value NaN.
static void check_nan(const Case &c, const std::vector<real> &y) {
    if (c.l.epilogue != LINEAR_DGELU) return;
    std::vector<GeluSlope> slope = c.slope;
    const size_t at = random_int(0, (int)y.size() - 1);
    slope[at] = GELU_CODE_NAN;
    Linear l = c.l;
    l.slope = device_from(slope), l.y = device_new<real>(y.size());
    CALL_OK(linear_sm90(l, 0, &e));
    const std::vector<real> got = host_from(l.y, y.size());
    for (size_t i = 0; i < y.size(); i++)
        CHECK(i == at ? isnan(value(got[i])) : value(got[i]) == value(y[i]), "%zu, NaN at %zu", i, at);
    if (!l.copy.codes) return;
    CHECK(host_from(l.copy.codes, y.size())[at] == 0x7f, "the code of NaN");
    CHECK(isnan(host_from(l.copy.amax, 1)[0]), "the largest |y| is not NaN");
}

// Checks that fewer rows give the same bits; guards see writes to later rows.
static void check_fewer_rows(const Case &c, const std::vector<real> &y) {
    Linear l = c.l;
    l.rows = random_int(1, c.l.rows);
    const size_t n = (size_t)l.rows * l.out;
    l.y = device_new<real>(n);
    if (l.epilogue == LINEAR_GELU) l.slope = device_new<GeluSlope>(n);
    if (l.copy.codes) l.copy.codes = device_new<uint8_t>(n), l.copy.amax = device_from(std::vector<float>{0});
    if (l.copy.codes && l.epilogue == LINEAR_GELU) low_new(&l.copy, l.rows, l.out, FP8_GELU_GROUP);
    CALL_OK(linear_sm90(l, 0, &e));
    const std::vector<real> fewer(y.begin(), y.begin() + n);
    CHECK(as_doubles(host_from(l.y, n)) == as_doubles(fewer), "%d of %d rows give other bits", l.rows, c.l.rows);
    if (l.copy.codes) check_copy("fewer rows", l.copy, fewer);
    if (l.copy.groups) check_low("low parts of fewer rows", l.copy, fewer);
}

// Checks low parts of x: they give the bits of a product whose factors also hold these columns, where a stage begins.
static void check_x_low(const Case &c) {
    const int in = c.l.in, stages = (int)round_up(in, 128), groups = random_int(1, FP8_GROUPS);
    const size_t n = (size_t)c.l.rows * c.l.out;
    if (!c.l.x8) return;
    Linear apart = c.l, joined = c.l;
    const auto join = [&](const uint8_t *codes, int rows, const uint8_t **low) {
        const std::vector<uint8_t> of = host_from(codes, (size_t)rows * in);
        std::vector<uint8_t> both, rest((size_t)rows * FP8_GROUPS, 0x7f); // NaN beyond the groups
        for (int r = 0; r < rows; r++) {
            both.insert(both.end(), of.begin() + (size_t)r * in, of.begin() + (size_t)(r + 1) * in);
            both.insert(both.end(), stages - in, 0);
            for (int g = 0; g < groups; g++) rest[r * FP8_GROUPS + g] = (uint8_t)random_int(0, 0x40);
            both.insert(both.end(), rest.begin() + r * FP8_GROUPS, rest.begin() + r * FP8_GROUPS + groups);
            both.insert(both.end(), FP8_GROUPS - groups, 0);
        }
        *low = device_from(rest);
        return device_from(both);
    };
    joined.x8 = join(c.l.x8, c.l.rows, &apart.x_low), joined.weight8 = join(c.l.weight8, c.l.out, &apart.weight_low);
    joined.in = stages + FP8_GROUPS, apart.groups = groups, apart.copy = joined.copy = {};
    apart.y = device_new<real>(n), joined.y = device_new<real>(n);
    CALL_OK(linear_sm90(apart, 0, &e));
    CALL_OK(linear_sm90(joined, 0, &e));
    CHECK(as_doubles(host_from(apart.y, n)) == as_doubles(host_from(joined.y, n)), "low parts of x: other bits");
}

// Checks the low parts that LINEAR_GELU writes, and that y and its copy stay the same.
static void check_y_low(const Case &c, const std::vector<real> &y) {
    Linear l = c.l;
    if (!l.copy.codes || l.epilogue != LINEAR_GELU) return;
    low_new(&l.copy, l.rows, l.out, FP8_GELU_GROUP);
    l.y = device_new<real>(y.size()), l.slope = device_new<GeluSlope>(y.size());
    l.copy.codes = device_new<uint8_t>(y.size()), l.copy.amax = device_from(std::vector<float>{0});
    CALL_OK(linear_sm90(l, 0, &e));
    CHECK(as_doubles(host_from(l.y, y.size())) == as_doubles(y), "with low parts y has other bits");
    CHECK(host_from(l.slope, y.size()) == host_from(c.l.slope, y.size()), "with low parts other slopes");
    check_copy("copy beside low parts", l.copy, y), check_low("low parts of y", l.copy, y);
}

static void linear_case(Widths s, LinearEpilogue epilogue, bool e4m3 = false) {
    const Case c = case_new(s, epilogue, e4m3);
    const size_t n = (size_t)s.rows * s.out;
    std::vector<Output> outputs = {{c.l.y, n * sizeof(real)}};
    if (epilogue == LINEAR_GELU) outputs.push_back({c.l.slope, n * sizeof(GeluSlope)});
    if (c.l.copy.codes) outputs.push_back({c.l.copy.codes, n});
    const auto poison = [&] {
        for (const Output &o : outputs) CUDA_OK(cudaMemset((void *)o.p, POISON, o.bytes));
    };
    run_twice(
        "linear", poison, [&] { CALL_OK(linear_sm90(c.l, 0, &e)); }, outputs);
    const std::vector<real> y = host_from(c.l.y, n);
    for (int row : {0, std::min(63, s.rows - 1), std::min(128, s.rows - 1), random_int(0, s.rows - 1), s.rows - 1})
        check_row(c, y, row);
    check_library(c, y);
    check_bits(c, y);
    if (c.l.copy.codes) check_copy("copy", c.l.copy, y);
    if (e4m3) check_no_copy(c, y);
    check_alone(c);
    check_nan(c, y);
    check_y_low(c, y);
    check_x_low(c); // overwrites c.l.slope
    check_fewer_rows(c, y);
    CHECK(host_from(ticket, 1)[0] == 0, "tickets remain");
    case_end();
}

static void test_linear(void) {
    std::vector<Widths> widths = {{1, 256, 64}, {127, 320, 192}, {300, 64, 320}, {513, 768, 768}, {70, 448, 1600}};
    for (int i = 0; i < 4; i++) widths.push_back({random_int(1, 2000), 64 * random_int(1, 12), 64 * random_int(1, 12)});
    for (Widths s : widths)
        for (LinearEpilogue epilogue : {LINEAR_GELU, LINEAR_RESIDUAL, LINEAR_DGELU, LINEAR_BIAS})
            linear_case(s, epilogue);
    if (small_shapes_only) return;
    // Many tiles per block; the last tile of a row is 64 columns wide.
    const Widths other = {random_int(8000, 20000), 64 * random_int(1, 5), 64 + 192 * random_int(2, 8)};
    for (LinearEpilogue epilogue : {LINEAR_GELU, LINEAR_RESIDUAL, LINEAR_DGELU})
        linear_case({16801, 256, 1600}, epilogue);
    for (LinearEpilogue epilogue : {LINEAR_RESIDUAL, LINEAR_BIAS}) linear_case(other, epilogue);
}

static void test_e4m3(void) {
    std::vector<Widths> widths = {{1, 64, 64},     {127, 128, 192},  {300, 192, 320}, {513, 768, 768},
                                  {70, 1600, 448}, {256, 448, 1600}, {384, 1600, 64}, {24, 6400, 1600}};
    for (int i = 0; i < 3; i++) widths.push_back({random_int(1, 2000), 64 * random_int(1, 12), 64 * random_int(1, 12)});
    for (Widths s : widths)
        for (LinearEpilogue epilogue : {LINEAR_GELU, LINEAR_RESIDUAL, LINEAR_DGELU, LINEAR_BIAS})
            linear_case(s, epilogue, true);
    for (LinearEpilogue epilogue : {LINEAR_GELU, LINEAR_DGELU, LINEAR_BIAS})
        if (!small_shapes_only) linear_case({16801, 320, 1600}, epilogue, true);
    printf("e4m3: error of a row at most %.2f%%, mean signed error %.4f%%\n", 100 * e4m3_worst_norm,
           100 * e4m3_mean / e4m3_rows);
}

// Checks the column sums of the stored y over all rows, and the sum of squares of each example's column sums.
static void columns_case(int B, int T, int in, int out, bool e4m3 = false) {
    const Case c = case_new({B * T, in, out}, LINEAR_DGELU, e4m3);
    const Columns columns = columns_new(B, out);
    Linear l = c.l;
    l.columns = columns.device, l.T = T;
    ColumnJobs jobs = jobs_new(linear_sm90_column_bytes(B * T, T, out));
    l.jobs = &jobs;
    std::vector<Output> outputs;
    columns_outputs(outputs, columns);
    run_twice(
        "columns", [&] { columns_reset(columns); },
        [&] {
            CALL_OK(linear_sm90(l, 0, &e));
            CALL_OK(column_finish(&jobs, 0, &e));
        },
        outputs);
    columns_check("columns", columns, as_doubles(host_from(c.l.y, (size_t)B * T * out)), T);
    CHECK(host_from(ticket, 1)[0] == 0, "tickets remain");
    case_end();
}

static void test_columns(void) {
    CHECK(linear_sm90_sums(1024) && linear_sm90_sums(128) && !linear_sm90_sums(64) && !linear_sm90_sums(1000), "T");
    columns_case(1, 128, 64, 64);
    columns_case(3, 256, 128, 320);
    columns_case(5, 256, 192, 448, true);
    for (int i = 0; i < 3; i++)
        columns_case(random_int(1, 5), 128 * random_int(1, 8), 64 * random_int(1, 8), 64 * random_int(1, 12));
    if (!small_shapes_only) columns_case(16, 1024, 256, 1600);
    if (!small_shapes_only) columns_case(16, 1024, 320, 1600, true);
}

// Operands of the head: x (rows, C), and weight (V, C), stored as (Vp, C). Their logits spread over some nats, around 0
// or, if `large`, around 16. The padding of weight, which must not count, is random, too.
struct Head {
    int B, T, V, Vp, C, row0, rows;
    std::vector<real> x, weight;
    std::vector<uint16_t> tokens;

    int target(int r) const { return tokens[(size_t)((row0 + r) / T) * (T + 1) + (row0 + r) % T + 1]; }
    double logit(int r, int v) const {
        double sum = 0.0;
        for (int k = 0; k < C; k++) sum += value(x[(size_t)r * C + k]) * value(weight[(size_t)v * C + k]);
        return sum;
    }
};

static Head head_new(int B, int T, int V, int C, bool large) {
    Head h = {B, T, V, (int)round_up(V, 128), C, 0, 0, {}, {}, random_tokens(B, T, V)};
    h.row0 = random_int(0, B * T - 1), h.rows = random_int(1, B * T - h.row0);
    h.x = random_vector<real>((size_t)h.rows * C, large ? 0.5 : 0.0);
    h.weight = random_vector<real>((size_t)h.Vp * C, large ? 32.0 / C : 0.0, 2.0 / sqrt(C));
    for (int i = 0; large && i < h.rows * C; i++) // odd rows almost predict their target
        if (i / C % 2) h.x[i] = (real)(3 * value(h.weight[(size_t)h.target(i / C) * C + i % C]));
    return h;
}

// Compares the whole head, as the engine runs it, with float64: LINEAR_SOFTMAX for the exponentials, cross-entropy,
// LINEAR_SCALED for the gradient of x, and a product of x and the exponentials for the weight's gradient. e4m3: the
// logits' factors are rounded. The product then truncates large logits, all by about the same share.
static void head_case(int B, int T, int V, int C, bool e4m3 = false) {
    const Head h = head_new(B, T, V, C, e4m3);
    Head factors8 = h;
    const int R = h.rows, Vp = h.Vp, tiles = linear_sm90_tiles(Vp);
    const float scale = (float)(1 << random_int(0, 10));
    const size_t n = (size_t)R * Vp;
    uint16_t *tokens = device_from(h.tokens);
    real *x = device_from(h.x), *weight = device_from(h.weight), *y = device_new<real>(n);
    real *dx = device_new<real>((size_t)R * C);
    float *shift = device_new<float>(R), *factors = device_new<float>(R), *losses = device_new<float>(R);
    float *sums = device_new<float>((size_t)tiles * R);
    Linear l = {.epilogue = LINEAR_SOFTMAX, .rows = R, .in = C, .out = Vp, .x = x, .weight = weight};
    l.y = y, l.row_values = shift, l.row_sums = sums, l.counted = V, l.ticket = ticket;
    if (e4m3) l.x8 = e4m3_of(factors8.x, C, &l.scale), l.weight8 = e4m3_of(factors8.weight, C, &l.scale);
    Linear d = {.epilogue = LINEAR_SCALED, .rows = R, .in = Vp, .out = C, .x = y, .weight = weight};
    d.y = dx, d.row_values = factors, d.ticket = ticket;
    std::vector<Output> outputs = {{y, n * sizeof(real)},        {x, (size_t)R * C * sizeof(real)},
                                   {dx, R * C * sizeof(real)},   {losses, R * sizeof(float)},
                                   {factors, R * sizeof(float)}, {sums, (size_t)tiles * R * sizeof(float)}};
    run_twice(
        "head",
        [&] {
            for (const Output &o : outputs) CUDA_OK(cudaMemset((void *)o.p, POISON, o.bytes));
            device_set(x, h.x);
        },
        [&] {
            const LogitRows k = {losses, NULL, 0, 0, 0, y, tokens, R, h.row0, T, V, Vp, scale};
            CALL_OK(crossentropy_targets(shift, x, weight, k, C, 0, &e));
            CALL_OK(linear_sm90(l, 0, &e));
            CALL_OK(crossentropy_finish({k, factors, x, sums, tiles, C}, 0, &e));
            CALL_OK(linear_sm90(d, 0, &e));
        },
        outputs);
    const std::vector<real> got = host_from(y, n), scaled = host_from(x, (size_t)R * C), got_dx = host_from(dx, R * C);
    const std::vector<float> factor = host_from(factors, R), loss = host_from(losses, R);
    // Error of a logit (up to about 30), so exp(logit)'s relative error; rounding of the target's exponential.
    const double arithmetic = e4m3 ? 0.2 : 1e-4, rounded = e4m3 ? ROUNDING : 0;
    for (int i = 0; i < 6; i++) {
        const int r = i == 0 ? 0 : i == 1 ? R - 1 : random_int(0, R - 1), target = h.target(r);
        std::vector<double> logits(V), want(Vp, 0.0), tolerance(Vp, 0.0), want_x(C), want_dx(C, 0.0), of_x(C), of_dx(C);
        double sum = 0.0, total = 0.0;
        for (int v = 0; v < V; v++) logits[v] = factors8.logit(r, v);
        const double shifted = h.logit(r, target), at_target = exp(logits[target] - shifted);
        for (int v = 0; v < V; v++) sum += exp(logits[v] - shifted);
        const double f = scale / T / sum;
        for (int v = 0; v < V; v++) {
            const double p = exp(logits[v] - shifted);
            want[v] = p - (v == target) * sum;
            tolerance[v] = ROUNDING * fabs(want[v]) + rounded * p + arithmetic * (v == target ? sum : p);
        }
        for (int k = 0; k < C; k++) {
            double terms = 0.0;
            for (int v = 0; v < Vp; v++) {
                const double term = f * value(got[(size_t)r * Vp + v]) * value(h.weight[(size_t)v * C + k]);
                want_dx[k] += term, terms += fabs(term);
            }
            of_dx[k] = ROUNDING * fabs(want_dx[k]) + arithmetic * terms;
            want_x[k] = f * value(h.x[(size_t)r * C + k]);
            of_x[k] = (ROUNDING + arithmetic) * fabs(want_x[k]);
        }
        const auto row = [](const std::vector<real> &all, int r, int width) {
            return std::vector<real>(all.begin() + (size_t)r * width, all.begin() + (size_t)(r + 1) * width);
        };
        for (int v = 0; v < Vp && e4m3; v++) total += value(got[(size_t)r * Vp + v]);
        const double error = ROUNDING * fabs(value(got[(size_t)r * Vp + target])) + 1e-5 * scale / T / factor[r];
        CHECK(fabs(total) <= error, "row %d: its gradients sum to %g, above %g", r, total, error);
        check_within("exponentials", row(got, r, Vp), want, tolerance);
        check_within("x", row(scaled, r, C), want_x, of_x);
        check_within("dx", row(got_dx, r, C), want_dx, of_dx);
        check_within("loss", std::vector<float>{loss[r]}, {log(sum / at_target)}, {e4m3 ? 0.03 : arithmetic});
        check_within("factor", std::vector<float>{factor[r]}, {f}, {arithmetic * f});
    }
    CHECK(host_from(ticket, 1)[0] == 0, "tickets remain");
    case_end();
}

static void test_head(void) {
    head_case(1, 1, 2, 64);
    head_case(2, 70, 300, 128);
    head_case(3, 100, 1000, 320);
    head_case(3, 100, 1000, 320, true);
    for (int i = 0; i < 4; i++)
        head_case(random_int(1, 5), random_int(1, 200), random_int(2, 4000), 64 * random_int(1, 4), i % 2);
    if (!small_shapes_only) head_case(8, 1024, 5000, 128);
}

// If the target lies far below another logit, exponentials are bounded, so the row's sum is finite. NaN stays NaN.
static void test_exponential_bounds(void) {
    const int rows = 5, C = 64, V = 200, Vp = 256, tiles = linear_sm90_tiles(Vp);
    std::vector<real> values = random_vector<real>(rows * C);
    std::vector<float> shifts = {0.0f, -1e4f, 0.0f, 1e4f, NAN};
    values[2 * C + 3] = (real)NAN;
    Linear l = {.epilogue = LINEAR_SOFTMAX, .rows = rows, .in = C, .out = Vp, .x = device_from(values)};
    l.weight = device_from(random_vector<real>(Vp * C)), l.y = device_new<real>(rows * Vp);
    l.row_values = device_from(shifts), l.row_sums = device_new<float>(tiles * rows), l.counted = V, l.ticket = ticket;
    CALL_OK(linear_sm90(l, 0, &e));
    const std::vector<double> y = as_doubles(host_from(l.y, rows * Vp));
    const std::vector<float> sums = host_from(l.row_sums, tiles * rows);
    for (int v = 0; v < Vp; v++) {
        const bool counts = v < V;
        CHECK(isfinite(y[v]) && (y[v] > 0) == counts, "column %d: %g", v, y[v]);
        CHECK(y[Vp + v] == (counts ? exp2((double)LINEAR_EXPONENT_MAX) : 0), "bound, column %d: %g", v, y[Vp + v]);
        CHECK(y[3 * Vp + v] == 0, "far below, column %d: %g", v, y[3 * Vp + v]);
        CHECK(isnan(y[2 * Vp + v]) == counts && isnan(y[4 * Vp + v]) == counts, "NaN, column %d", v);
    }
    for (int t = 0; t < tiles; t++)
        CHECK(isfinite(sums[t * rows + 1]) && isnan(sums[t * rows + 2]), "sums of tile %d", t);
    case_end();
}

int main(int argc, char **argv) {
    kernel_test_begin("test_linear_cuda", argc, argv);
    if (!sm90_runs()) skip_program("test_linear_cuda", "not for this GPU or precision");
    void *workspace;
    CUDA_OK(cudaMalloc(&workspace, MATMUL_WORKSPACE_BYTES));
    CUDA_OK(cudaMalloc(&ticket, sizeof *ticket));
    CUDA_OK(cudaMemset(ticket, 0, sizeof *ticket));
    library = (Matmul *)calloc(1, sizeof *library);
    CALL_OK(matmul_create(library, workspace, 0, &e));
    RUN(test_e4m3, test_linear, test_columns);
    if (!FP16) RUN(test_head); // fp16's range is too small
    if (!FP16) RUN(test_exponential_bounds);
    matmul_destroy(library);
    free(library);
    return test_summary();
}
