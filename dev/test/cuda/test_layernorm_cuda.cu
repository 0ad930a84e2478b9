// Tests LayerNorm, forward and backward, with per-example norms and e4m3 copies (kernel_test.cuh).
#include "kernel_test.cuh"

#include "cuda/layernorm.cuh"
#include "cuda/sm90.cuh"

static bool copies(int C) { return FP8_BUILT && sm90_runs() && C % 64 == 0; } // true: LayerNorm also writes e4m3

// ---- Forward --------------------------------------------------------------------------------------------------------

struct Normalised {
    std::vector<double> out, mean, rstd;
};

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

static RowDropout random_dropout(Shape s, bool drops) {
    Dropout d = dropout_of(drops ? 0.05 + 0.9 * random_uniform() : 0, random_u64());
    const DropoutPlace place = random_int(0, 1) ? DROPOUT_MLP : DROPOUT_ATTENTION;
    return row_dropout(dropout_at(d, random_u64() >> 2, random_int(0, 1000)), place, s.T);
}

// Returns dropout's factor of element i of a (B, T, C) tensor.
static double factor_at(const RowDropout &r, size_t i, int C) {
    if (!r.dropout.below) return 1.0;
    const size_t n = i / C;
    const Dropout d = dropout_at(r.dropout, r.dropout.example + n / r.T, r.dropout.layer);
    return dropout_factor(d, r.place, 0, (uint32_t)(n % r.T), (uint32_t)(i % C));
}

static void layernorm_forward_case(Shape s, bool residual, bool drops = false) {
    const RowDropout drop = random_dropout(s, drops);
    const int N = s.B * s.T, C = s.C;
    const size_t n = (size_t)N * C;
    const std::vector<real> a = random_vector<real>(n, 0.3), b = random_vector<real>(n);
    const std::vector<real> gamma = random_vector<real>(C, 1.0, 0.3), beta = random_vector<real>(C);
    real *d_a = device_from(a), *d_b = device_from(b), *d_gamma = device_from(gamma), *d_beta = device_from(beta);
    real *out = device_new<real>(n), *sum = device_new<real>(n);
    float *mean = device_new<float>(N), *rstd = device_new<float>(N);
    const real *second = residual ? d_b : NULL;
    LayerNorm k = {sum, out, mean, rstd, d_a, second, d_gamma, d_beta, drop, N, C};
    if (copies(C)) k.copy = copy_new(n, random_int(-3, 9)), low_new(&k.copy, N, C, FP8_LN1_GROUP);
    run_twice(
        "layernorm forward",
        [&] {
            CUDA_OK(cudaMemset(out, POISON, n * sizeof(real)));
            CUDA_OK(cudaMemset(sum, POISON, n * sizeof(real)));
        },
        [&] { CALL_OK(layernorm_forward(k, 0, &e)); },
        {{out, n * sizeof(real)}, {mean, N * sizeof(float)}, {rstd, N * sizeof(float)}});
    std::vector<real> x = a;
    if (residual) {
        std::vector<double> want(n);
        for (size_t i = 0; i < n; i++)
            want[i] = value((real)(float)(value(a[i]) + factor_at(drop, i, C) * value(b[i])));
        x = host_from(sum, n);
        check_close("sum", x, want, drops ? ROUNDING + 1e-6 : 0.0, drops ? 1e-6 : 0.0);
    }
    const Normalised want = layernorm_reference(x, gamma, beta, N, C);
    check_close("out", host_from(out, n), want.out, REAL_RELATIVE, C == 1 ? 1e-3 : REAL_ABSOLUTE);
    check_close("mean", host_from(mean, N), want.mean, 1e-5, 1e-5);
    check_close("rstd", host_from(rstd, N), want.rstd, 1e-5, 1e-5);
    if (copies(C)) check_copy("copy", k.copy, host_from(out, n)), check_low("low parts", k.copy, host_from(out, n));
    if (copies(C) && C <= LAYERNORM_WARP_COLUMNS) { // a copy alone, in the memory of `out`
        std::vector<uint8_t> codes = host_from(k.copy.codes, n);
        k.out = device_new<real>(n), k.copy.codes = (uint8_t *)k.out, k.copy.alone = true;
        CALL_OK(layernorm_forward(k, 0, &e));
        codes.resize(n * sizeof(real), (uint8_t)POISON);
        check_codes("a copy alone", host_from(k.copy.codes, n * sizeof(real)), codes);
    }
    case_end();
}

static void test_layernorm_forward(void) {
    for (Shape s : random_shapes()) {
        layernorm_forward_case(s, false);
        layernorm_forward_case(s, true);
        layernorm_forward_case(s, true, true);
    }
    for (int C : {320, 2048, 2112, 4160}) layernorm_forward_case({2, 9, C}, true, C % 128);
    for (int packs = 1; packs <= 9; packs++)
        layernorm_forward_case({1, 9, 256 * packs - 8 * random_int(0, 20)}, true, packs % 2);
}

// ---- Backward -------------------------------------------------------------------------------------------------------

struct BackwardInputs {
    int N, C;
    std::vector<real> x, dy, gamma;
    std::vector<float> mean, rstd;
    std::vector<real> before; // old content of dresidual if the kernel adds to it; else empty
};

static BackwardInputs backward_inputs(int N, int C, bool accumulate, double mean) {
    const size_t n = (size_t)N * C;
    BackwardInputs in = {N, C, random_vector<real>(n, mean, 1.5), random_vector<real>(n), {}, {}, {}, {}};
    in.gamma = random_vector<real>(C, 1.0, 0.3);
    if (accumulate) in.before = random_vector<real>(n);
    const Normalised statistics = layernorm_reference(in.x, in.gamma, in.gamma, N, C);
    in.mean.assign(statistics.mean.begin(), statistics.mean.end());
    in.rstd.assign(statistics.rstd.begin(), statistics.rstd.end());
    return in;
}

struct BackwardReference {
    std::vector<double> dresidual, dgamma_rows, dbeta_rows; // (N, C); *_rows: each row's term of dgamma, dbeta
    double cancellation; // rms of dx's terms over rms of dresidual: at small C these terms cancel
};

// Row i: dx = rstd (g - mean(g) - xhat mean(g xhat)), g = dy gamma.
static void backward_reference_row(BackwardReference *r, const BackwardInputs &in, int i, double *terms) {
    const size_t start = (size_t)i * in.C;
    const double rstd = in.rstd[i];
    double m1 = 0.0, m2 = 0.0;
    auto xhat = [&](int c) { return (value(in.x[start + c]) - in.mean[i]) * rstd; };
    auto g = [&](int c) { return value(in.dy[start + c]) * value(in.gamma[c]); };
    for (int c = 0; c < in.C; c++) m1 += g(c) / in.C, m2 += g(c) * xhat(c) / in.C;
    for (int c = 0; c < in.C; c++) {
        const double before = in.before.empty() ? 0.0 : value(in.before[start + c]);
        r->dresidual.push_back(before + rstd * (g(c) - m1 - xhat(c) * m2));
        r->dgamma_rows.push_back(value(in.dy[start + c]) * xhat(c));
        r->dbeta_rows.push_back(value(in.dy[start + c]));
        *terms += pow(rstd * (fabs(g(c)) + fabs(m1) + fabs(xhat(c) * m2)), 2);
    }
}

static BackwardReference backward_reference(const BackwardInputs &in) {
    BackwardReference r;
    double terms = 0.0, square = 0.0;
    for (int i = 0; i < in.N; i++) backward_reference_row(&r, in, i, &terms);
    for (double d : r.dresidual) square += d * d;
    r.cancellation = sqrt(fmax(terms / square, 1.0));
    return r;
}

// Checks rows (B, 2 C): each example's sums of dgamma, then of dbeta. dgamma, dbeta (B T, C): each token's terms.
static void rows_check(const float *rows, const std::vector<double> &dgamma, const std::vector<double> &dbeta, int T,
                       int C) {
    std::vector<double> want(dgamma.size() / T * 2);
    for (size_t i = 0; i < dgamma.size(); i++) {
        double *to = &want[i / C / T * 2 * C + i % C];
        to[0] += dgamma[i], to[C] += dbeta[i];
    }
    check_close("rows", host_from(rows, want.size()), want, SUM_RELATIVE, 1e-4);
}

// in_place: dy's buffer also holds dbranch if `drops`, else dresidual. Without `drops`, in_place excludes `accumulate`.
static void layernorm_backward_case(Shape s, bool accumulate, bool bias, bool in_place, bool drops = false,
                                    double mean = 0.5) {
    const RowDropout drop = random_dropout(s, drops);
    const int B = s.B, T = s.T, C = s.C;
    const BackwardInputs in = backward_inputs(B * T, C, accumulate, mean);
    const size_t n = in.x.size();
    real *d_dy = device_from(in.dy), *d_x = device_from(in.x), *d_gamma = device_from(in.gamma);
    real *dr = device_new<real>(n), *d_branch = in_place ? d_dy : device_new<real>(n);
    float *d_mean = device_from(in.mean), *d_rstd = device_from(in.rstd);
    Columns dgamma = columns_new(B, C), dbeta = columns_new(B, C), dbias = columns_new(B, C);
    ColumnJobs jobs = jobs_new(layernorm_backward_bytes(B, T, C));
    float *rows = device_new<float>((size_t)B * 2 * C);
    const bool keeps = random_int(0, 1);
    if (keeps) dgamma.device.rows = rows, dbeta.device.rows = rows + C;
    dgamma.device.stride = dbeta.device.stride = 2 * (size_t)C;
    const ColumnGradient none = {};
    const Fp8Copy copy = bias && copies(C) ? copy_new(n, random_int(-3, 9)) : Fp8Copy{};
    std::vector<Output> outputs = {{dr, n * sizeof(real)}, {rows, (size_t)B * 2 * C * sizeof(float)}};
    if (drops) outputs.push_back({d_branch, n * sizeof(real)});
    columns_outputs(outputs, dgamma);
    columns_outputs(outputs, dbeta);
    if (bias) columns_outputs(outputs, dbias);
    run_twice(
        "layernorm backward",
        [&] {
            if (accumulate) device_set(dr, in.before);
            else if (in_place && !drops) device_set(dr, in.dy);
            else CUDA_OK(cudaMemset(dr, POISON, n * sizeof(real)));
            if (drops && in_place) device_set(d_dy, in.dy);
            columns_reset(dgamma), columns_reset(dbeta), columns_reset(dbias);
            CUDA_OK(cudaMemset(rows, POISON, (size_t)B * 2 * C * sizeof(float)));
        },
        [&] {
            const ColumnGradient gradients[] = {dgamma.device, dbeta.device, bias ? dbias.device : none};
            LayerNormBackward k = {dr, in_place && !drops ? dr : d_dy, d_x, d_mean, d_rstd, d_gamma};
            k.C = C, k.accumulate = accumulate, k.dbranch = d_branch, k.drop = drop, k.copy = copy;
            CALL_OK(layernorm_backward(k, gradients, B, &jobs, 0, &e));
            CALL_OK(column_finish(&jobs, 0, &e));
        },
        outputs);
    const BackwardReference want = backward_reference(in);
    const std::vector<real> written = host_from(dr, n);
    check_close("dresidual", written, want.dresidual, REAL_RELATIVE, REAL_ABSOLUTE * want.cancellation);
    columns_check("dgamma", dgamma, want.dgamma_rows, T);
    columns_check("dbeta", dbeta, want.dbeta_rows, T);
    if (keeps) rows_check(rows, want.dgamma_rows, want.dbeta_rows, T, C);
    std::vector<real> branch = written;
    if (drops) {
        std::vector<double> kept = as_doubles(written);
        for (size_t i = 0; i < n; i++) kept[i] *= factor_at(drop, i, C);
        branch = host_from(d_branch, n);
        check_close("dbranch", branch, kept, ROUNDING + 1e-6, 0.0);
        for (size_t i = 0; i < n; i++)
            CHECK((value(branch[i]) == 0) == (kept[i] == 0), "element %zu of B %d T %d C %d", i, B, T, C);
    }
    if (copy.codes) check_copy("copy", copy, branch);
    if (bias) columns_check("dbias", dbias, as_doubles(branch), T); // dbias sums rounded results
    case_end();
}

static void test_layernorm_backward(void) {
    for (int T : {9, 12}) // at T = 12, blocks share an example
        for (int C : {320, 2048, 2112, 4160}) layernorm_backward_case({2, T, C}, true, true, false, C % 128);
    for (Shape s : random_shapes()) {
        if (s.C == 1) s.C = 2; // one column has no gradient
        layernorm_backward_case(s, true, true, false);
        layernorm_backward_case(s, random_int(0, 1), random_int(0, 1), false);
        layernorm_backward_case(s, false, random_int(0, 1), true);
        layernorm_backward_case(s, true, true, true, true);
        layernorm_backward_case(s, random_int(0, 1), true, false, false, 1500.0); // the mean is 1,000 times the spread
        layernorm_backward_case(s, random_int(0, 1), random_int(0, 1), random_int(0, 1), true);
    }
}

int main(int argc, char **argv) {
    kernel_test_begin("test_layernorm_cuda", argc, argv);
    RUN(test_layernorm_forward, test_layernorm_backward);
    return test_summary();
}
