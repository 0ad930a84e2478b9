// Compares e4m3 copies on the GPU bit for bit with math/fp8.h (kernel_test.cuh).
#include "kernel_test.cuh"

#include "cuda/fp8.cuh"
#include "cuda/sm90.cuh"
#include "model/engine.h"

static const int exponents[] = {-63, -9, 0, 6, 60, 63};

// Tests fp8_cast on x: first copying and measuring, then only measuring.
static void cast_case(const std::vector<real> &x, int k) {
    const real *d_x = device_from(x);
    Fp8Copy copy = copy_new(x.size(), k);
    run_twice(
        "cast", [&] { CUDA_OK(cudaMemset(copy.codes, POISON, x.size())); },
        [&] { CALL_OK(fp8_cast(copy, d_x, x.size(), 0, &e)); }, {{copy.codes, x.size()}, {copy.amax, sizeof(float)}});
    check_copy("cast", copy, x);
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

static void low_case(int rows, int group, int groups, int out) {
    const int columns = group * groups + 8 * random_int(0, 3), n = rows * columns;
    const std::vector<real> x = random_vector<real>(n, 0, 3), w = random_vector<real>((size_t)out * columns);
    const std::vector<uint8_t> codes = codes_of(w, 4);
    Fp8Copy copy = copy_new(n, random_int(-3, 6));
    uint8_t *weight = device_new<uint8_t>((size_t)out * FP8_GROUPS);
    low_new(&copy, rows, columns, group);
    CALL_OK(fp8_cast(copy, device_from(x), n, 0, &e));
    CALL_OK(fp8_low_columns(weight, copy, device_from(codes), out, 0, &e));
    check_copy("copy beside low parts", copy, x), check_low("low parts", copy, x);
    const std::vector<uint8_t> got = host_from(weight, (size_t)out * FP8_GROUPS);
    const std::vector<int8_t> channels = host_from(copy.channels, copy.groups);
    for (int i = 0; i < out * copy.groups; i++) {
        const int o = i / copy.groups, g = i % copy.groups, c = g * group + fp8_channel(channels[g], group);
        CHECK(got[o * FP8_GROUPS + g] == codes[(size_t)o * columns + c], "column %d of row %d", g, o);
    }
    case_end();
}

static void test_low(void) {
    for (int group : {FP8_LN1_GROUP, FP8_GELU_GROUP})
        for (int groups : {1, 48, 256, 300}) low_case(random_int(1, 300), group, groups, random_int(1, 300));
}

enum Wanted { ALL, MEASURED, TRANSPOSED };

// Outputs of a case. ALL: amax and column sums of y, its codes (B, T, C) and (B, C, T). MEASURED: all but codes
// (B, T, C). TRANSPOSED: only codes (B, C, T). A weight (in, out) is copied as (1, in, out).
static void transpose_case(int B, int T, int C, Wanted wanted) {
    const size_t n = (size_t)B * T * C;
    const int k = random_int(-3, 9);
    const std::vector<real> y = random_vector<real>(n, 0.1, 2);
    const real *d_y = device_from(y);
    Fp8Copy copy = copy_new(n, k);
    uint8_t *transposed = device_new<uint8_t>(n), *again = device_new<uint8_t>(n);
    const std::vector<uint8_t> codes = codes_of(y, copy.scale);
    const uint8_t *d_codes = device_from(codes);
    const Columns columns = columns_new(B, C);
    ColumnJobs jobs = jobs_new(fp8_column_bytes(B, T, C));
    std::vector<Output> outputs = {{transposed, n}, {again, n}};
    if (wanted == TRANSPOSED) copy.amax = NULL;
    else columns_outputs(outputs, columns);
    if (wanted != ALL) copy.codes = NULL;
    else outputs.push_back({copy.codes, n});
    run_twice(
        "transpose",
        [&] {
            for (uint8_t *codes : {transposed, again, copy.codes})
                if (codes) CUDA_OK(cudaMemset(codes, POISON, n));
            columns_reset(columns);
        },
        [&] {
            const ColumnGradient none = {};
            CALL_OK(fp8_cast_transposed(transposed, copy, d_y, B, T, C,
                                        wanted == TRANSPOSED ? none : columns.device, &jobs, 0, &e));
            CALL_OK(fp8_transpose(again, d_codes, B, T, C, 0, &e));
            CALL_OK(column_finish(&jobs, 0, &e));
        },
        outputs);
    std::vector<uint8_t> want(n);
    for (size_t i = 0; i < n; i++) want[(i / C / T * C + i % C) * T + i / C % T] = codes[i];
    check_codes("transposed", host_from(transposed, n), want);
    check_codes("transposed codes", host_from(again, n), want);
    if (wanted == ALL) check_copy("transposed", copy, y);
    if (wanted == MEASURED) CHECK(host_from(copy.amax, 1)[0] == amax_of(y), "amax without codes");
    if (wanted != TRANSPOSED) columns_check("columns", columns, as_doubles(y), T);
    case_end();
}

static void test_transpose(void) {
    for (int T : {16, 48, 64, 144, 128, 640})
        for (int C : {64, 128, 320})
            transpose_case(random_int(1, 4), T, C, T == 48 ? TRANSPOSED : T == 64 ? MEASURED : ALL);
    for (int i = 0; i < 4; i++) transpose_case(random_int(1, 4), 16 * random_int(1, 20), 64 * random_int(1, 9), ALL);
    if (small_shapes_only) return;
    transpose_case(3, 1024, 4800, ALL);
    transpose_case(1, 1600, 1600, ALL);
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
    kernel_test_begin("test_fp8_cuda", argc, argv);
    Error e = {};
    if (cuda_engine.check_dtype(DTYPE_FP8, &e) || !sm90_runs())
        skip_program("test_fp8_cuda", "only Hopper, and only in bf16");
    RUN(test_cast, test_low, test_transpose, test_check);
    return test_summary();
}
