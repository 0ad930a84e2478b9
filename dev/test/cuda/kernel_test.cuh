// kernel_test: helpers of the tests of single CUDA kernels. Inputs are random in every run (the seed is printed).
// Outputs begin as NaN; guards surround every buffer. Every call is made twice and must give the same bits. References
// are plain loops in float64 on the same rounded inputs.
//
// Structs have names, because nvcc 13.0 fails with an internal error on vectors of unnamed types in C++20.
//
// Arguments of each test: [seed [small]]. A seed repeats a run (0: from the clock). `small` leaves out large shapes,
// for slow tools.
#pragma once

#include "../e4m3.h"
#include "cuda_test.cuh"

#include "cuda/fp8.cuh"
#include "cuda/reduce.cuh"

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

// ---- Random numbers -------------------------------------------------------------------------------------------------

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

// ---- Buffers on the device ------------------------------------------------------------------------------------------

#define CUDA_OK(call)                                                                                                  \
    do {                                                                                                               \
        cudaError_t ok_ = (call);                                                                                      \
        CHECK(ok_ == cudaSuccess, "%s", cudaGetErrorString(ok_));                                                      \
    } while (0)

enum { GUARD_BYTES = 1024 };
static const int GUARD_FILL = 0xa5, POISON = 0xff; // all ones is a NaN in bf16, fp32 and fp64

struct Allocation {
    char *base;
    size_t bytes;
};
static std::vector<Allocation> allocations; // buffers of the current case

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

// Ends a case: checks guards and frees memory.
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

template <typename X> static std::vector<double> as_doubles(const std::vector<X> &v) {
    std::vector<double> out;
    for (X x : v) out.push_back(value(x));
    return out;
}

template <typename X> static std::vector<X> random_vector(size_t n, double mean = 0.0, double deviation = 1.0) {
    std::vector<X> v(n);
    for (X &x : v) x = (X)(float)(mean + deviation * random_normal());
    return v;
}

inline double gelu_tanh(double x) { return 0.5 * x * (1.0 + tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x))); }

// ---- Comparing ------------------------------------------------------------------------------------------------------

// Checks |got - want| <= tolerance, element by element. NaN fails.
template <typename X>
static void check_within(const char *name, const std::vector<X> &got, const std::vector<double> &want,
                         const std::vector<double> &tolerance) {
    const double smallest = std::is_same_v<X, __half> ? 0x1p-25 : 0; // half the distance between fp16's subnormals
    double worst = 0.0;
    size_t at = 0;
    for (size_t i = 0; i < want.size(); i++) {
        double error = fabs(value(got[i]) - want[i]), ratio = error == 0 ? 0 : error / (tolerance[i] + smallest);
        if (!(ratio <= worst)) worst = isnan(ratio) ? INFINITY : ratio, at = i;
    }
    CHECK(got.size() == want.size() && worst <= 1.0, "%s[%zu of %zu] = %.9g, want %.9g (%.3f of the tolerance)", name,
          at, want.size(), value(got[at]), want[at], worst);
}

// Runs check_within with the tolerance relative * |want| + absolute * rms(want).
template <typename X>
static void check_close(const char *name, const std::vector<X> &got, const std::vector<double> &want, double relative,
                        double absolute) {
    const double floor = 1e-30;
    double rms = 0.0;
    for (double w : want) rms += w * w / want.size();
    std::vector<double> tolerance;
    for (double w : want) tolerance.push_back(relative * fabs(w) + absolute * sqrt(rms) + floor);
    check_within(name, got, want, tolerance);
}

// ROUNDING is 2^-8 in bf16 (8 significant bits). Rounding to bf16 changes a number x by at most 2^-8 / (1 + 2^-8) |x|.
// The excess of 2^-8 over this bound, and REAL_ABSOLUTE, allow for errors of the fp32 arithmetic before rounding. In
// fp16 (11 bits) the excess is too small, so REAL_RELATIVE adds 1e-5. In fp32 only the arithmetic errs.
static const double ROUNDING = by_type(0, 1.0 / 2048, 1.0 / 256);
static const double REAL_RELATIVE = by_type(2e-5, ROUNDING + 1e-5, ROUNDING), REAL_ABSOLUTE = FP32 ? 1e-5 : 2e-5;
static const double SUM_RELATIVE = 2e-5, SUM_ABSOLUTE = 2e-5; // sums in fp32

static inline void *workspace_new(size_t bytes) { return device_new<char>(bytes); }

struct Output {
    const void *p;
    size_t bytes;
};
// Runs `reset` and `call` twice and compares the outputs bit for bit.
[[maybe_unused]] static void run_twice(const char *name, const std::function<void()> &reset,
                                       const std::function<void()> &call, const std::vector<Output> &outputs) {
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

// ---- Shapes ---------------------------------------------------------------------------------------------------------

static bool small_shapes_only;

struct Shape {
    int B, T, C;
};

static inline std::vector<Shape> random_shapes(void) {
    std::vector<Shape> s = {{1, 1, 1},    {1, 1, 8},    {2, 3, 7},    {3, 5, 48},   {1, 67, 768}, {5, 33, 64},
                            {2, 130, 33}, {3, 17, 264}, {2, 9, 1600}, {2, 5, 2056}, {1, 4, 4104}, {70, 6, 40}};
    for (int i = 0; i < 6; i++)
        s.push_back({random_int(1, 6), random_int(1, 80), i % 2 ? 8 * random_int(1, 160) : random_int(1, 700)});
    if (small_shapes_only) return s;
    s.push_back({4, 1024, 32}); // many blocks in an example
    s.push_back({1, 2600, 16});
    return s;
}

// Returns tokens (B, T + 1) of a Zipf-like distribution: some tokens are frequent, some rare, some absent.
static inline std::vector<uint16_t> random_tokens(int B, int T, int V) {
    std::vector<uint16_t> tokens((size_t)B * (T + 1));
    for (uint16_t &t : tokens) t = (uint16_t)std::min(V - 1, (int)(pow((double)V + 1, random_uniform()) - 1.0));
    return tokens;
}

// ---- Column gradients on the device, and their expected values ------------------------------------------------------

struct Columns {
    ColumnGradient device;
    std::vector<float> before; // old content of device.sum; NaN if device.first
    int B, C;
};

static const double SQUARES_BEFORE = 2.5;

static inline ColumnJobs jobs_new(size_t bytes) { return {workspace_new(bytes)}; }
static inline Columns columns_new(int B, int C) {
    bool first = random_uniform() < 0.5;
    Columns c = {{device_new<float>(C), device_new<double>(1), first}, random_vector<float>(C), B, C};
    if (first) std::fill(c.before.begin(), c.before.end(), NAN);
    return c;
}
static inline void columns_reset(const Columns &c) {
    device_set(c.device.sum, c.before);
    device_set(c.device.squares, std::vector<double>(1, SQUARES_BEFORE));
}
static inline void columns_outputs(std::vector<Output> &r, const Columns &c) {
    r.push_back({c.device.sum, c.C * sizeof(float)});
    r.push_back({c.device.squares, sizeof(double)});
}
// rows (B T, C): the terms of the column sums.
static inline void columns_check(const char *name, const Columns &c, const std::vector<double> &rows, int T) {
    std::vector<double> sum(c.C, 0.0);
    if (!c.device.first) sum.assign(c.before.begin(), c.before.end());
    double squares = 0.0;
    for (int b = 0; b < c.B; b++) {
        std::vector<double> g(c.C, 0.0);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < c.C; i++) g[i] += rows[((size_t)b * T + t) * c.C + i];
        for (int i = 0; i < c.C; i++) sum[i] += g[i], squares += g[i] * g[i];
    }
    check_close(name, host_from(c.device.sum, c.C), sum, SUM_RELATIVE, 1e-4);
    CHECK_CLOSE(host_from(c.device.squares, 1)[0] - SQUARES_BEFORE, squares, 1e-4, 1e-6);
}

// ---- e4m3 copies on the device --------------------------------------------------------------------------------------

static inline std::vector<uint8_t> codes_of(const std::vector<real> &x, float scale) {
    std::vector<uint8_t> codes;
    for (real v : x) codes.push_back(e4m3_code((float)v * scale));
    return codes;
}

static inline float amax_of(const std::vector<real> &x) {
    float most = 0;
    for (real v : x) most = isnan((float)v) || isnan(most) ? NAN : fmaxf(most, fabsf((float)v));
    return most;
}

static inline void check_codes(const char *name, const std::vector<uint8_t> &got, const std::vector<uint8_t> &want) {
    size_t wrong = 0, at = 0;
    for (size_t i = want.size(); i-- > 0;)
        if (got[i] != want[i]) wrong++, at = i;
    CHECK(got.size() == want.size() && wrong == 0, "%s: %zu codes of %zu differ, the first at %zu: %02x, want %02x",
          name, wrong, want.size(), at, got[at], want[at]);
}

// Compares a copy's codes and amax with those of y by math/fp8.h. copy: in device memory.
static inline void check_copy(const char *name, const Fp8Copy &copy, const std::vector<real> &y) {
    const float amax = host_from(copy.amax, 1)[0], want = amax_of(y);
    check_codes(name, host_from(copy.codes, y.size()), codes_of(y, copy.scale));
    CHECK(amax == want || (isnan(amax) && isnan(want)), "%s: amax %g, want %g", name, amax, want);
}

static inline Fp8Copy copy_new(size_t n, int k) {
    Fp8Copy copy = {device_new<uint8_t>(n), ldexpf(1, k), device_new<float>(1)};
    CUDA_OK(cudaMemset(copy.amax, 0, sizeof(float)));
    return copy;
}

// Adds low parts of random channels to a copy of y (rows, columns).
static inline void low_new(Fp8Copy *copy, int rows, int columns, int group) {
    std::vector<int8_t> channels;
    copy->group = group, copy->groups = fp8_group_count(group, columns), copy->columns = columns;
    for (int g = 0; g < copy->groups; g++) channels.push_back((int8_t)(FP8_UNSET + 1 + random_int(0, group - 1)));
    copy->low = device_new<uint8_t>((size_t)rows * FP8_GROUPS), copy->channels = device_from(channels);
    copy->candidates = device_from(std::vector<float>(copy->groups, 0));
}

// Checks a copy's low parts and its groups' amax. math/fp8.h computes them from y.
static inline void check_low(const char *name, const Fp8Copy &copy, const std::vector<real> &y) {
    const int rows = (int)(y.size() / copy.columns), group = copy.group;
    const std::vector<int8_t> channels = host_from(copy.channels, copy.groups);
    const std::vector<uint8_t> low = host_from(copy.low, (size_t)rows * FP8_GROUPS);
    std::vector<uint8_t> got, want;
    std::vector<uint32_t> most(copy.groups, 0);
    for (int i = 0; i < rows * copy.groups; i++) {
        const int r = i / copy.groups, g = i % copy.groups;
        const real *values = &y[(size_t)r * copy.columns + g * group];
        got.push_back(low[(size_t)r * FP8_GROUPS + g]);
        const float v = (float)values[fp8_channel(channels[g], group)] * copy.scale;
        want.push_back(e4m3_code(v - fp8_round(v)));
        for (int c = 0; c < group && r % FP8_LOW_ROWS == 0; c++)
            most[g] = std::max(most[g], fp8_candidate((float)values[c], c));
    }
    check_codes(name, got, want);
    CHECK(memcmp(host_from(copy.candidates, most.size()).data(), most.data(), most.size() * sizeof(float)) == 0,
          "%s: channels", name);
}

[[noreturn]] static inline void skip_program(const char *name, const char *why) {
    printf("SKIP %s: %s\n", name, why);
    exit(ERR_SKIPPED);
}

// main calls this first. Exits if there is no GPU.
static inline void kernel_test_begin(const char *name, int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) skip_program(name, "no GPU here");
    random_state = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
    if (!random_state) random_state = (uint64_t)(clock_seconds() * 1e6);
    small_shapes_only = argc > 2 && strcmp(argv[2], "small") == 0;
    printf("%s %s, seed %llu%s\n", name, REAL_NAME, (unsigned long long)random_state,
           small_shapes_only ? ", small shapes" : "");
}
