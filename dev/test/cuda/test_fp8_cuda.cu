// e4m3 copies on the GPU, to the bit against math/fp8.h (kernel_test.cuh).
#include "kernel_test.cuh"

#include "cuda/fp8.cuh"
#include "cuda/layernorm.cuh"
#include "cuda/sm90.cuh"
#include "model/engine.h"

static const int exponents[] = {-63, -9, 0, 6, 60, 63};

static std::vector<uint8_t> codes_of(const std::vector<real> &x, int k) {
    std::vector<uint8_t> codes;
    for (real v : x) codes.push_back(e4m3_code((float)v * ldexpf(1, k)));
    return codes;
}

static float amax_of(const std::vector<real> &x) {
    float most = 0;
    for (real v : x) most = isnan((float)v) || isnan(most) ? NAN : fmaxf(most, fabsf((float)v));
    return most;
}

static void check_codes(const char *name, const std::vector<uint8_t> &got, const std::vector<uint8_t> &want) {
    size_t wrong = 0, at = 0;
    for (size_t i = want.size(); i-- > 0;)
        if (got[i] != want[i]) wrong++, at = i;
    CHECK(got.size() == want.size() && wrong == 0, "%s: %zu codes of %zu differ, the first at %zu: %02x, want %02x",
          name, wrong, want.size(), at, got[at], want[at]);
}

// Compares a copy with y, which the device has written or read.
static void check_copy(const char *name, const Fp8Copy &copy, const std::vector<real> &y, int k) {
    const float amax = host_from(copy.amax, 1)[0], want = amax_of(y);
    check_codes(name, host_from(copy.codes, y.size()), codes_of(y, k));
    CHECK(amax == want || (isnan(amax) && isnan(want)), "%s: amax %g, want %g", name, amax, want);
}

static Fp8Copy copy_new(size_t n, int k) {
    Fp8Copy copy = {device_new<uint8_t>(n), ldexpf(1, k), device_new<float>(1)};
    CUDA_OK(cudaMemset(copy.amax, 0, sizeof(float)));
    return copy;
}

// Copies x, then only measures it.
static void cast_case(const std::vector<real> &x, int k) {
    const real *d_x = device_from(x);
    Fp8Copy copy = copy_new(x.size(), k);
    run_twice(
        "cast", [&] { CUDA_OK(cudaMemset(copy.codes, POISON, x.size())); },
        [&] { CALL_OK(fp8_cast(copy, d_x, x.size(), 0, &e)); }, {{copy.codes, x.size()}, {copy.amax, sizeof(float)}});
    check_copy("cast", copy, x, k);
    const Fp8Copy measured = {NULL, 1, device_from(std::vector<float>(1, 1e-3f))};
    CALL_OK(fp8_cast(measured, d_x, x.size(), 0, &e));
    const float want = amax_of(x), amax = host_from(measured.amax, 1)[0];
    CHECK(amax == (want < 1e-3f ? 1e-3f : want) || (isnan(amax) && isnan(want)), "amax %g, want %g", amax, want);
    case_end();
}

static void test_cast(void) {
    std::vector<real> all;
    for (unsigned bits = 0; bits < 65536; bits++) {
        real x = (real)0.0f;
        memcpy((void *)&x, &bits, 2);
        all.push_back(x);
    }
    for (int k : exponents) cast_case(all, k);
    for (int i = 0; i < 8; i++) {
        std::vector<real> x = random_vector<real>(8 * random_int(1, 3000), 0, exp2(random_int(-8, 8)));
        if (i % 4 == 1) x[random_int(0, (int)x.size() - 1)] = (real)-INFINITY;
        if (i % 4 == 2) x[random_int(0, (int)x.size() - 1)] = (real)-NAN;
        if (i % 4 == 3) x.assign(x.size(), (real)-0.0f);
        cast_case(x, random_int(-8, 8));
    }
}

// A block's four weights; `without`: index of one that is only measured.
static void weights_case(int C, int without) {
    const int rows[] = {C, C, C, 4 * C}, columns[] = {3 * C, C, 4 * C, C};
    std::vector<real> w[4];
    Fp8Weights weights;
    std::vector<Output> outputs;
    for (int i = 0; i < 4; i++) {
        w[i] = random_vector<real>((size_t)rows[i] * columns[i], 0, 0.02);
        weights.of[i] = {device_from(w[i]), rows[i], columns[i], copy_new(w[i].size(), 9 + i),
                         device_new<uint8_t>(w[i].size())};
        if (i == without) weights.of[i].copy.codes = NULL;
        else outputs.push_back({weights.of[i].copy.codes, w[i].size()});
        outputs.push_back({weights.of[i].transposed, w[i].size()});
        outputs.push_back({weights.of[i].copy.amax, sizeof(float)});
    }
    run_twice(
        "weights", [] {}, [&] { CALL_OK(fp8_weights(weights, 0, &e)); }, outputs);
    for (int i = 0; i < 4; i++) {
        const std::vector<uint8_t> transposed = host_from(weights.of[i].transposed, w[i].size());
        if (i == without) {
            CHECK(host_from(weights.of[i].copy.amax, 1)[0] == amax_of(w[i]), "amax of weight %d", i);
            check_codes("not transposed", transposed, std::vector<uint8_t>(w[i].size(), (uint8_t)POISON));
            continue;
        }
        check_copy("weight", weights.of[i].copy, w[i], 9 + i);
        const std::vector<uint8_t> codes = host_from(weights.of[i].copy.codes, w[i].size());
        std::vector<uint8_t> want(w[i].size());
        for (int r = 0; r < rows[i]; r++)
            for (int c = 0; c < columns[i]; c++) want[(size_t)c * rows[i] + r] = codes[(size_t)r * columns[i] + c];
        check_codes("transposed", transposed, want);
    }
    case_end();
}

static void test_weights(void) {
    for (int C : {64, 128, 192, 768}) weights_case(C, random_int(-1, 3));
    if (!small_shapes_only) weights_case(1600, -1);
}

// Copies of y (B, T, C) and (B, C, T), with column sums; and the transposed copy from codes. without: only the latter.
static void transpose_case(int B, int T, int C, bool without) {
    const size_t n = (size_t)B * T * C;
    const int k = random_int(-3, 9);
    const std::vector<real> y = random_vector<real>(n, 0.1, 2);
    const real *d_y = device_from(y);
    Fp8Copy copy = copy_new(n, k);
    uint8_t *transposed = device_new<uint8_t>(n), *again = device_new<uint8_t>(n);
    const std::vector<uint8_t> codes = codes_of(y, k);
    const uint8_t *d_codes = device_from(codes);
    const Columns columns = columns_new(B, C);
    ColumnJobs jobs = jobs_new(fp8_column_bytes(B, T, C));
    std::vector<Output> outputs = {{transposed, n}, {again, n}};
    if (without) copy.codes = NULL, copy.amax = NULL;
    else outputs.push_back({copy.codes, n}), columns_outputs(outputs, columns);
    run_twice(
        "transpose",
        [&] {
            for (uint8_t *codes : {transposed, again, copy.codes})
                if (codes) CUDA_OK(cudaMemset(codes, POISON, n));
            columns_reset(columns);
        },
        [&] {
            const ColumnGradient none = {};
            CALL_OK(fp8_cast_transposed(transposed, copy, d_y, B, T, C, without ? none : columns.device, &jobs, 0, &e));
            CALL_OK(fp8_transpose(again, d_codes, B, T, C, 0, &e));
            CALL_OK(column_finish(&jobs, 0, &e));
        },
        outputs);
    std::vector<uint8_t> want(n);
    for (size_t i = 0; i < n; i++) want[(i / C / T * C + i % C) * T + i / C % T] = codes[i];
    check_codes("transposed", host_from(transposed, n), want);
    check_codes("transposed codes", host_from(again, n), want);
    if (!without) check_copy("transposed", copy, y, k);
    if (!without) columns_check("columns", columns, as_doubles(y), T);
    case_end();
}

static void test_transpose(void) {
    for (int T : {16, 48, 64, 144, 128, 640})
        for (int C : {64, 128, 320}) transpose_case(random_int(1, 4), T, C, T == 48);
    for (int i = 0; i < 4; i++) transpose_case(random_int(1, 4), 16 * random_int(1, 20), 64 * random_int(1, 9), false);
    if (!small_shapes_only) transpose_case(3, 1024, 4800, false);
}

// LayerNorm's copies are of what it stores, and it stores the same as without.
static void layernorm_case(int B, int T, int C, bool drops) {
    const int N = B * T, k = random_int(-3, 9);
    const size_t n = (size_t)N * C;
    const RowDropout drop = row_dropout(dropout_of(drops ? 0.3 : 0, random_u64()), DROPOUT_MLP, T);
    real *a = device_from(random_vector<real>(n)), *b = device_from(random_vector<real>(n));
    real *gamma = device_from(random_vector<real>(C, 1, 0.3)), *sum = device_new<real>(n);
    float *mean = device_new<float>(N), *rstd = device_new<float>(N);
    real *out[2], *dx[2], *branch[2];
    const std::vector<real> before = random_vector<real>(n);
    const Fp8Copy copy[2] = {copy_new(n, k), copy_new(n, k)}; // forward, backward
    ColumnGradient gradients[3];
    for (int i = 0; i < 3; i++) gradients[i] = {device_new<float>(C), NULL, true};
    ColumnJobs jobs = jobs_new(layernorm_backward_bytes(B, T, C));
    for (int i = 0; i < 2; i++) {
        out[i] = device_new<real>(n), dx[i] = device_from(before), branch[i] = device_new<real>(n);
        CALL_OK(layernorm_forward({sum, out[i], mean, rstd, a, b, gamma, gamma, drop, N, C, i ? copy[0] : Fp8Copy{}}, 0,
                                  &e));
        LayerNormBackward d = {dx[i], b, sum, mean, rstd, gamma};
        d.C = C, d.accumulate = true, d.dbranch = branch[i], d.drop = drop;
        if (i) d.copy = copy[1];
        CALL_OK(layernorm_backward(d, gradients, B, &jobs, 0, &e));
        CALL_OK(column_finish(&jobs, 0, &e));
    }
    CUDA_OK(cudaDeviceSynchronize());
    for (real **x : {out, dx, branch}) {
        const std::vector<real> plain = host_from(x[0], n), copied = host_from(x[1], n);
        CHECK(memcmp(plain.data(), copied.data(), n * sizeof(real)) == 0, "B %d T %d C %d: other bits", B, T, C);
    }
    check_copy("LayerNorm", copy[0], host_from(out[1], n), k);
    if (C <= LAYERNORM_WARP_COLUMNS) { // a copy alone, in the memory of `out`
        Fp8Copy alone = copy[0];
        alone.codes = (uint8_t *)device_new<real>(n), alone.alone = true;
        CALL_OK(
            layernorm_forward({sum, (real *)alone.codes, mean, rstd, a, b, gamma, gamma, drop, N, C, alone}, 0, &e));
        std::vector<uint8_t> want = host_from(copy[0].codes, n);
        want.resize(2 * n, (uint8_t)POISON);
        check_codes("LayerNorm, alone", host_from(alone.codes, 2 * n), want);
    }
    check_copy("LayerNorm backward", copy[1], host_from(drops ? branch[1] : dx[1], n), k);
    case_end();
}

static void test_layernorm(void) {
    for (int C : {64, 320, 768, 1600, 2048, 2112, 4160})
        for (bool drops : {false, true}) layernorm_case(random_int(1, 4), random_int(1, 40), C, drops);
    if (!small_shapes_only) layernorm_case(3, 1024, 768, false);
}

static void test_check(void) {
    const std::vector<int8_t> k = {FP8_UNSET, 0, 8};
    struct Check {
        std::vector<float> amax;
        bool saturates;
    };
    for (const Check &c : {Check{{1e30f, 448, 1.75f}, false},
                           {{NAN, 450, 0}, true},
                           {{0, 0, 1.76f}, true},
                           {{0, NAN, 0}, true},
                           {{0, 0, INFINITY}, true},
                           {{INFINITY, 0, 0}, false}}) {
        double *norm = device_from(std::vector<double>{2.5, 1});
        CALL_OK(fp8_veto(norm, device_from(k), device_from(c.amax), 3, 0, &e));
        CHECK(host_from(norm, 1)[0] == (c.saturates ? INFINITY : 2.5), "amax %g %g %g: %g", c.amax[0], c.amax[1],
              c.amax[2], host_from(norm, 1)[0]);
        case_end();
    }
}

int main(int argc, char **argv) {
    int code = kernel_test_begin("test_fp8_cuda", argc, argv);
    if (code) return code;
    Error e = {};
    if (cuda_engine.check_dtype(DTYPE_FP8, &e) || !sm90_runs()) {
        printf("SKIP test_fp8_cuda: only Hopper, and only in bf16\n");
        return ERR_SKIPPED;
    }
    RUN(test_cast);
    RUN(test_weights);
    RUN(test_transpose);
    RUN(test_layernorm);
    RUN(test_check);
    return test_summary();
}
