// bench_kernels: times every matrix product and kernel of a training step, one by one on a hot card (timing.cuh).
// Prints time, energy, clock, and the least possible time as a share of the time. The least possible time is the longer
// of two: the bytes (inputs once, outputs once) at the card's copy bandwidth, and the FLOPs at the rate of an 8192^3
// product. Both rates are measured in the same run. Last comes the sum over a step with one micro-step.
//
//     bench_kernels [MODEL...] [quick] [tune] [held] [only=NAME...]
//
//     MODEL   d12, d24, d36, d48, at micro-batches of 64, 32, 32, 16 rows of 1024 (default: d12 d48)
//     quick   0.33 s per kernel instead of 1 s, and only kernels of a step, without masks; d12 and d48 take 30 s in all
//     tune    products use the algorithms that --tune chooses
//     held    also prints (time while 24 multiprocessors are held, as NCCL holds them) / (time)
//     only    only products and kernels whose names contain NAME; e4m3 selects the kernels of --dtype fp8
#include "timing.cuh"
#include "../test/cuda/hold.cuh"
#include "cuda/attention.cuh"
#include "cuda/crossentropy.cuh"
#include "cuda/embedding.cuh"
#include "cuda/fp8.cuh"
#include "cuda/gelu.cuh"
#include "cuda/layernorm.cuh"
#include "cuda/linear_sm90.cuh"
#include "cuda/matmul.cuh"
#include "cuda/optimizer.cuh"
#include "cuda/reduce.cuh"
#include "cuda/sm90.cuh"
#include "cuda/weight_gradient.cuh"
#include "math/rng.h"
#include "model/model.h"

#include <string.h>
#include <string>
#include <vector>

enum { T = 1024, SETS = 3, HELD = 24 }; // calls use SETS sets of inputs in turn, so inputs are not in the L2 cache

typedef struct {
    Nvml nvml;
    Hold hold;
    Matmul *mm;
    double seconds;          // per kernel
    double bandwidth, flops; // bytes and FLOPs per second, as measured
    bool held;
    bool fused; // linear_sm90 computes the model's products; products that it replaces are printed, but not summed
    WeightGradientPairs pairs;
    std::vector<std::string> only;
    double step_seconds, step_joules; // sums over the model's kernels so far
} Bench;

// ---- Memory of one case ---------------------------------------------------------------------------------------------

static std::vector<void *> allocations;

template <typename X> static X *zeros(size_t n) {
    X *p = NULL;
    cuda_check(cudaMalloc(&p, n * sizeof(X)));
    cuda_check(cudaMemset(p, 0, n * sizeof(X)));
    allocations.push_back(p);
    return p;
}

template <typename X> __global__ static void fill_kernel(X *x, size_t n, uint64_t stream, float mean, float scale) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        x[i] = (X)(float)(mean + scale * 3.46 * (rng_uniform(1, stream, i) - 0.5)); // standard deviation: scale
}

template <typename X> static X *randoms(size_t n, float mean = 0.0f, float scale = 1.0f) {
    X *x = zeros<X>(n);
    fill_kernel<<<1024, 256>>>(x, n, allocations.size(), mean, scale);
    cuda_check(cudaGetLastError());
    return x;
}

static void free_all(void) {
    cuda_check(cudaDeviceSynchronize());
    for (void *p : allocations) cuda_check(cudaFree(p));
    allocations.clear();
}

// Tokens (B, T + 1) by Zipf's law: token k with a probability in proportion to 1 / (k + 1).
static uint16_t *zipf_tokens(int B, int V, uint64_t stream, std::vector<uint16_t> *host = NULL) {
    std::vector<uint16_t> tokens((size_t)B * (T + 1));
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = (uint16_t)(pow((double)V, rng_uniform(1, stream, i)) - 1);
    uint16_t *device = zeros<uint16_t>(tokens.size());
    cuda_check(cudaMemcpy(device, tokens.data(), tokens.size() * sizeof(uint16_t), cudaMemcpyHostToDevice));
    if (host) *host = tokens;
    return device;
}

// ---- One case -------------------------------------------------------------------------------------------------------

static bool wanted(const Bench *b, const char *name) {
    for (const std::string &word : b->only)
        if (strstr(name, word.c_str())) return true;
    return b->only.empty();
}

// True if a quick run skips this case, because no step calls it and no `only` is given.
static bool left_out(const Bench *b, int times) { return b->seconds < 1 && times == 0 && b->only.empty(); }

// Times the call while another kernel holds HELD multiprocessors. Returns its time / seconds.
static double time_held(Bench *b, const BenchCall &call, double seconds) {
    Error e = {};
    const int calls = (int)fmax(5e-3 / seconds, 2.0);
    cudaEvent_t from, to;
    cuda_check(cudaEventCreate(&from));
    cuda_check(cudaEventCreate(&to));
    bench_check(hold_begin(&b->hold, HELD, 4e3 * calls * seconds + 0.1, &e), &e);
    cuda_check(cudaEventRecord(from));
    for (int i = 0; i < calls; i++) call(i);
    cuda_check(cudaEventRecord(to));
    const double ms = batch_ms(from, to);
    bench_check(hold_end(&b->hold, &e), &e);
    cuda_check(cudaEventDestroy(from));
    cuda_check(cudaEventDestroy(to));
    return ms * 1e-3 / calls / seconds;
}

// times: calls in a step.
static Timing run_case(Bench *b, const char *name, int times, double flops, double bytes, const BenchCall &call) {
    const Timing t = time_hot(&b->nvml, b->seconds, call);
    const double floor = fmax(b->flops > 0 ? flops / b->flops : 0, b->bandwidth > 0 ? bytes / b->bandwidth : 0);
    b->step_seconds += times * t.seconds;
    b->step_joules += times * timing_joules(t);
    printf("%-34s %4d %9.1f us %8.2f mJ %4.0f W %4u MHz %8.1f MB %5.0f GB/s", name, times, t.seconds * 1e6,
           1e3 * timing_joules(t), t.watts, t.mhz, bytes * 1e-6, bytes / t.seconds * 1e-9);
    if (flops > 0)
        printf(" %8.1f GFLOP %4.0f TFLOP/s %5.2f pJ/FLOP", flops * 1e-9, flops / t.seconds * 1e-12,
               1e12 * timing_joules(t) / flops);
    if (floor > 0) printf(" %5.1f%%", 100 * floor / t.seconds);
    if (b->held) printf(" held %.2fx", time_held(b, call, t.seconds));
    printf("\n");
    free_all();
    return t;
}

// ---- Matrix products ------------------------------------------------------------------------------------------------

// Returns a new e4m3 copy of x (n).
static uint8_t *codes_of(const real *x, size_t n, float scale) {
    Error e = {};
    const Fp8Copy copy = {zeros<uint8_t>(n), scale, zeros<float>(1)};
    bench_check(fp8_cast(copy, x, n, 0, &e), &e);
    return copy.codes;
}

static void product(Bench *b, const char *name, int times, MatmulShape s) {
    if (!wanted(b, name) || left_out(b, times)) return;
    const size_t out_count = (size_t)s.m * s.n, out_bytes = out_count * (s.out_float ? sizeof(float) : sizeof(real));
    const size_t a = (size_t)s.m * s.k, w = (size_t)s.k * s.n;
    const size_t extra = s.bias ? s.n : 0;
    const double bytes = (double)(a + w + extra) * sizeof(real) + (double)out_bytes * (s.accumulate ? 2 : 1);
    real *left = randoms<real>(SETS * a), *right = randoms<real>(w, 0, 0.05f);
    real *more = extra ? randoms<real>(extra) : NULL;
    void *out = zeros<char>(out_bytes);
    Error e = {};
    run_case(b, name, times, 2.0 * s.m * s.n * s.k, bytes, [&](int i) {
        bench_check(matmul_run(b->mm, s, {out, left + i % SETS * a, right, more}, &e), &e);
    });
}

// counted: the vocabulary, for LINEAR_SOFTMAX.
static void fused_product(Bench *b, const char *name, int times, LinearEpilogue epilogue, int rows, int in, int out,
                          int counted = 0, bool e4m3 = false) {
    if (!b->fused || !wanted(b, name) || left_out(b, times)) return;
    const size_t n = (size_t)rows * out, x = (size_t)rows * in, w = (size_t)in * out;
    const bool residual = epilogue == LINEAR_RESIDUAL, slope = epilogue == LINEAR_GELU || epilogue == LINEAR_DGELU;
    const double bytes = (x + w) * (e4m3 ? 1.0 : sizeof(real)) + (residual ? 2.0 : 1.0) * n * sizeof(real) +
                         (slope ? n : 0) * (sizeof(GeluSlope) + (e4m3 ? 1.0 : 0.0));
    real *left = randoms<real>(SETS * x);
    Linear l;
    l.epilogue = epilogue;
    l.rows = rows, l.in = in, l.out = out;
    l.weight = randoms<real>(w, 0, 0.05f), l.bias = randoms<real>(out);
    l.extra = residual ? randoms<real>(n) : NULL, l.slope = slope ? randoms<GeluSlope>(n, 127, 30) : NULL;
    l.y = zeros<real>(n), l.ticket = zeros<unsigned>(1);
    l.row_values = randoms<float>(rows), l.row_sums = zeros<float>((size_t)linear_sm90_tiles(out) * rows);
    l.counted = counted;
    const uint8_t *left8 = e4m3 ? codes_of(left, SETS * x, 4) : NULL;
    if (e4m3) l.weight8 = codes_of(l.weight, w, 256), l.scale = 0x1p-10f;
    if (e4m3 && slope) l.copy = {zeros<uint8_t>(n), 16, zeros<float>(1)};
    const bool sums = epilogue == LINEAR_DGELU; // of columns, the gradient of fc's bias
    ColumnJobs jobs = {sums ? zeros<char>(linear_sm90_column_bytes(rows, T, out)) : NULL};
    if (sums) l.columns = {zeros<float>(out), NULL, true}, l.T = T, l.jobs = &jobs;
    Error e = {};
    run_case(b, name, times, 2.0 * rows * in * out, bytes, [&](int i) {
        l.x = left + i % SETS * x;
        if (e4m3) l.x8 = left8 + i % SETS * x;
        bench_check(linear_sm90(l, 0, &e), &e);
        if (sums) bench_check(column_finish(&jobs, 0, &e), &e);
    });
}

// norms: also compute per-example norms, for --gns exact. bias: also compute the bias gradient.
static void fused_dweight(Bench *b, const char *name, int times, bool norms, bool bias, int B, int in, int out) {
    if (!b->pairs.count || !wanted(b, name) || (!norms && left_out(b, times))) return;
    const WeightGradientShape s = {B, T, in, out};
    const size_t x = (size_t)B * T * in, y = (size_t)B * T * out, n = (size_t)in * out;
    real *left = randoms<real>(SETS * x), *dy = randoms<real>(y);
    WeightGradient g = {};
    g.dw = zeros<float>(n), g.first = true;
    if (norms) g.squares = zeros<double>(1);
    if (bias) g.bias = {zeros<float>(out), norms ? zeros<double>(1) : NULL, true};
    void *workspace = zeros<char>(weight_gradient_workspace_bytes(s, b->pairs.count));
    ColumnJobs jobs = {zeros<char>(weight_gradient_column_bytes(s))};
    g.jobs = &jobs;
    Error e = {};
    run_case(b, name, times, 2.0 * (B * T) * in * out, (double)(x + y) * sizeof(real) + n * sizeof(float), [&](int i) {
        bench_check(weight_gradient(g, left + i % SETS * x, dy, s, b->pairs, workspace, 0, &e), &e);
        bench_check(column_finish(&jobs, 0, &e), &e);
    });
}

// x (rows, in), W (in, out)
static MatmulShape forward(int rows, int in, int out, bool bias = false) {
    return {.m = rows, .n = out, .k = in, .bias = bias};
}
static MatmulShape dinput(int rows, int in, int out) { return {.m = rows, .n = in, .k = out, .transpose_b = true}; }
static MatmulShape dweight(int rows, int in, int out) {
    return {.m = in, .n = out, .k = rows, .transpose_a = true, .out_float = true};
}

// Weight gradients for `--gns ln`, then with exact norms.
static void dweights(Bench *b, int B, int C, int L) {
    const int N = B * T;
    const bool bias = b->pairs.count && C % WEIGHT_GRADIENT_TILE == 0;
    product(b, "qkv dweight", bias ? 0 : L, dweight(N, C, 3 * C));
    fused_dweight(b, "qkv dweight and bias, ours", bias ? L : 0, false, true, B, C, 3 * C);
    product(b, "proj dweight", L, dweight(N, C, C));
    product(b, "fc dweight", L, dweight(N, C, 4 * C));
    product(b, "fcproj dweight", L, dweight(N, 4 * C, C));
    fused_dweight(b, "qkv dweight, bias and norms", 0, true, true, B, C, 3 * C);
    fused_dweight(b, "proj dweight and norms", 0, true, false, B, C, C);
    fused_dweight(b, "fc dweight and norms", 0, true, false, B, C, 4 * C);
    fused_dweight(b, "fcproj dweight and norms", 0, true, false, B, 4 * C, C);
}

static void products(Bench *b, const ModelConfig *m, int B) {
    const int C = m->channels, L = m->layers, N = B * T, alone = b->fused ? 0 : L;
    product(b, "qkv forward", alone, forward(N, C, 3 * C, true));
    product(b, "proj forward", alone, forward(N, C, C, true));
    product(b, "fc forward", alone, forward(N, C, 4 * C, true));
    product(b, "fcproj forward", alone, forward(N, 4 * C, C, true));
    fused_product(b, "qkv forward, ours", L, LINEAR_BIAS, N, C, 3 * C);
    fused_product(b, "proj forward and residual", L, LINEAR_RESIDUAL, N, C, C);
    fused_product(b, "fc forward and gelu", L, LINEAR_GELU, N, C, 4 * C);
    MatmulShape fcproj = forward(N, 4 * C, C, true);
    fcproj.accumulate = true;
    product(b, "fcproj forward and residual", L - alone, fcproj);
    product(b, "qkv dinput", L, dinput(N, C, 3 * C));
    product(b, "proj dinput", L, dinput(N, C, C));
    product(b, "fc dinput", L, dinput(N, C, 4 * C));
    product(b, "fcproj dinput", alone, dinput(N, 4 * C, C));
    fused_product(b, "fcproj dinput and dgelu, ours", L, LINEAR_DGELU, N, C, 4 * C);
    dweights(b, B, C, L);
}

// Products of e4m3 factors, and the kernels that copy these factors.
static void e4m3_products(Bench *b, const ModelConfig *m, int B) {
    const int C = m->channels, N = B * T;
    const struct {
        const char *name;
        int in, out;
        LinearEpilogue ours;
    } layers[] = {{"qkv", C, 3 * C, LINEAR_BIAS},
                  {"proj", C, C, LINEAR_RESIDUAL},
                  {"fc", C, 4 * C, LINEAR_GELU},
                  {"fcproj", 4 * C, C, LINEAR_RESIDUAL}};
    for (const auto &l : layers) {
        const std::string name = l.name;
        const LinearEpilogue backward = l.in > l.out ? LINEAR_DGELU : LINEAR_BIAS;
        fused_product(b, (name + " forward, e4m3").c_str(), 0, l.ours, N, l.in, l.out, 0, true);
        fused_product(b, (name + " dinput, e4m3").c_str(), 0, backward, N, l.out, l.in, 0, true);
    }
    if (wanted(b, "copy of attention, e4m3") && !left_out(b, 0)) {
        const size_t n = (size_t)N * C;
        const real *x = randoms<real>(SETS * n);
        const Fp8Copy copy = {zeros<uint8_t>(n), 16, zeros<float>(1)};
        Error e = {};
        run_case(b, "copy of attention, e4m3", 0, 0, 3.0 * n,
                 [&](int i) { bench_check(fp8_cast(copy, x + i % SETS * n, n, 0, &e), &e); });
    }
    for (const char *name : {"transposed copies of dqkv, e4m3", "transposed gelu, e4m3"}) {
        if (!wanted(b, name) || left_out(b, 0)) continue;
        const bool cast = strstr(name, "dqkv");
        const size_t n = (size_t)N * C * (cast ? 3 : 4);
        const real *x = randoms<real>(SETS * n);
        const uint8_t *codes = cast ? NULL : codes_of(x, SETS * n, 16);
        const Fp8Copy copy = {zeros<uint8_t>(n), 16, zeros<float>(1)};
        uint8_t *to = zeros<uint8_t>(n);
        Error e = {};
        run_case(b, name, 0, 0, (cast ? 4.0 : 2.0) * n, [&](int i) {
            const size_t at = i % SETS * n;
            bench_check(cast ? fp8_cast_transposed(to, copy, x + at, B, T, 3 * C, {}, NULL, 0, &e)
                             : fp8_transpose(to, codes + at, B, T, 4 * C, 0, &e),
                        &e);
        });
    }
    if (wanted(b, "copies of weights, e4m3") && !left_out(b, 0)) {
        const real *w = randoms<real>(4 * (size_t)C * C);
        const Fp8Copy copy = {zeros<uint8_t>(4 * (size_t)C * C), 16, zeros<float>(1)};
        uint8_t *transposed = zeros<uint8_t>(4 * (size_t)C * C);
        Error e = {};
        run_case(b, "copies of weights, e4m3", 0, 0, 4.0 * 12 * C * C, [&](int) {
            for (int i = 0; i < 4; i++)
                bench_check(fp8_cast_transposed(transposed, copy, w, 1, layers[i].in, layers[i].out, {}, NULL, 0, &e),
                            &e);
        });
    }
}

// logits = x wte^T
static void head_products(Bench *b, int rows, int C, int V, int Vp, int chunks) {
    const int alone = b->fused ? 0 : chunks;
    product(b, "head forward", alone, dinput(rows, Vp, C));
    fused_product(b, "head forward, exponentials", chunks, LINEAR_SOFTMAX, rows, C, Vp, V);
    if (FP8_BUILT) fused_product(b, "head forward, e4m3", 0, LINEAR_SOFTMAX, rows, C, Vp, V, true);
    product(b, "head dinput", alone, forward(rows, Vp, C));
    fused_product(b, "head dinput, by row", chunks, LINEAR_SCALED, rows, Vp, C);
    product(b, "head dweight", chunks, dweight(rows, Vp, C));
    fused_dweight(b, "head dweight and norms", 0, true, false, rows / T, Vp, C);
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

static void layernorms(Bench *b, int B, int C, int L) {
    Error e = {};
    const int N = B * T;
    const size_t n = (size_t)N * C;
    const double tensor = (double)n * sizeof(real);
    for (const char *name : {"layernorm forward, of a sum", "layernorm forward", "layernorm backward",
                             "layernorm forward, e4m3", "layernorm backward, e4m3"}) {
        const bool e4m3 = strstr(name, "e4m3"), sum = strstr(name, "sum"), backward = strstr(name, "backward");
        const int times = e4m3 ? 0 : backward || sum != b->fused ? 2 * L + !sum : !sum; // ln_f adds no residual
        if (!wanted(b, name) || left_out(b, times)) continue;
        const Fp8Copy copy = e4m3 ? Fp8Copy{zeros<uint8_t>(n), 16, zeros<float>(1)} : Fp8Copy{};
        const double copy_bytes = e4m3 ? n : 0;
        real *x = randoms<real>(SETS * n), *y = randoms<real>(SETS * n), *dr = randoms<real>(SETS * n);
        real *out = zeros<real>(n), *gamma = randoms<real>(C, 1.0f, 0.2f), *beta = randoms<real>(C);
        float *mean = zeros<float>(N), *rstd = randoms<float>(N, 1.0f, 0.0f), *sums = zeros<float>(3 * C);
        double *squares = zeros<double>(3);
        ColumnJobs jobs = {zeros<char>(2 * layernorm_backward_bytes(B, T, C))};
        const ColumnGradient gradients[] = {
            {sums, squares, true}, {sums + C, squares + 1, true}, {sums + 2 * C, squares + 2, true}};
        if (!backward)
            run_case(b, name, times, 0, (sum ? 4 : 2) * tensor + copy_bytes, [&](int i) {
                const size_t s = i % SETS * n;
                const real *other = sum ? y + s : NULL;
                const LayerNorm k = {dr + s, out, mean, rstd, x + s, other, gamma, beta, {}, N, C, copy};
                bench_check(layernorm_forward(k, 0, &e), &e);
            });
        else
            run_case(b, name, times, 0, 4 * tensor + copy_bytes, [&](int i) {
                const size_t s = i % SETS * n;
                LayerNormBackward k = {dr + s, y + s, x + s, mean, rstd, gamma};
                k.C = C, k.accumulate = true, k.drop = row_dropout({}, DROPOUT_MLP, T), k.copy = copy;
                bench_check(layernorm_backward(k, gradients, B, &jobs, 0, &e), &e);
                if (i % 2) bench_check(column_finish(&jobs, 0, &e), &e); // once per two LayerNorms, as in a block
            });
    }
}

static void gelu_and_biases(Bench *b, int B, int C, int L) {
    Error e = {};
    const size_t n = (size_t)B * T * 4 * C;
    if (wanted(b, "gelu forward") && !left_out(b, !b->fused)) {
        real *x = randoms<real>(SETS * n), *y = zeros<real>(n);
        GeluSlope *slope = zeros<GeluSlope>(n);
        run_case(b, "gelu forward", b->fused ? 0 : L, 0, n * (2.0 * sizeof(real) + sizeof(GeluSlope)),
                 [&](int i) { bench_check(gelu_forward(y, slope, x + i % SETS * n, n, 0, &e), &e); });
    }
    for (int columns : {4 * C, 3 * C}) {
        const char *name = columns == 4 * C ? "bias gradient, fc, and dgelu" : "bias gradient, qkv";
        const bool alone = !b->fused || (columns == 3 * C && C % WEIGHT_GRADIENT_TILE != 0);
        if (!wanted(b, name) || left_out(b, alone)) continue;
        const size_t count = (size_t)B * T * columns;
        const bool slope = columns == 4 * C;    // for fc the kernel multiplies by the slope, too
        real *dy = randoms<real>(SETS * count); // slopes below 1 shrink dy from call to call
        const GeluSlope *slopes = slope ? randoms<GeluSlope>(count, 127, 30) : NULL;
        const double bytes = count * (sizeof(real) * (slope ? 2.0 : 1.0) + (slope ? sizeof(GeluSlope) : 0));
        const ColumnGradient dbias = {zeros<float>(columns), NULL, true};
        ColumnJobs jobs = {zeros<char>(bias_backward_bytes(B, T, columns))};
        run_case(b, name, alone ? L : 0, 0, bytes, [&](int i) {
            bench_check(bias_backward(dbias, dy + i % SETS * count, slopes, B, T, columns, &jobs, 0, &e), &e);
            bench_check(column_finish(&jobs, 0, &e), &e);
        });
    }
}

static void attention_case(Bench *b, AttentionShape s, int times, const char *what, const AttentionMasks &masks = {}) {
    Error e = {};
    const size_t n = (size_t)s.B * T * s.C();
    const double pairs = 0.5 * s.T * s.T * s.heads(), product_flops = 2 * pairs * s.D; // 0.5: the causal mask
    for (int backward = 0; backward < 2; backward++) {
        char name[64];
        snprintf(name, sizeof name, "attention %s%s", backward ? "backward" : "forward", what);
        if (!wanted(b, name)) continue;
        const real *qkv = randoms<real>(SETS * 3 * n);
        Attention a = {s, masks, zeros<unsigned>(1), qkv, randoms<real>(n)};
        a.lse = randoms<float>((size_t)s.heads() * T, 6.0f, 0.1f), a.dout = randoms<real>(n);
        a.dqkv = zeros<real>(3 * n), a.workspace = zeros<char>(attention_workspace_bytes(s));
        const double bytes = (backward ? 8.0 : 4.0) * n * sizeof(real);
        run_case(b, name, times, (backward ? 5 : 2) * product_flops, bytes, [&](int i) {
            a.qkv = qkv + i % SETS * 3 * n;
            bench_check(backward ? attention_backward(a, 0, &e) : attention_forward(a, 0, &e), &e);
        });
    }
}

// Times attention with documents of this mean length, then with dropout.
static void masked_attention(Bench *b, AttentionShape s, int length, const char *suffix) {
    Error e = {};
    const size_t n = (size_t)s.B * s.T;
    AttentionMasks masks = {zeros<uint16_t>(n), zeros<uint16_t>(n), {}, {}};
    std::vector<uint16_t> tokens(n + s.B);
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = rng_uniform(1, 2, i) * length < 1;
    std::vector<uint16_t> first(n), last(n);
    embedding_documents(first.data(), last.data(), tokens.data(), 1, s.B, s.T);
    cudaMemcpy((void *)masks.first, first.data(), n * sizeof(uint16_t), cudaMemcpyHostToDevice);
    cudaMemcpy((void *)masks.last, last.data(), n * sizeof(uint16_t), cudaMemcpyHostToDevice);
    attention_case(b, s, 0, (std::string(", documents") + suffix).c_str(), masks);
    attention_case(b, s, 0, (std::string(", dropout") + suffix).c_str(),
                   {NULL, NULL, dropout_of(0.1, 1), dropout_constants(dropout_of(0.1, 1))});
}

static void embeddings(Bench *b, int B, int C, int V, int Vp) {
    if (!wanted(b, "embedding forward") && !wanted(b, "embedding backward")) return;
    Error e = {};
    const int N = B * T;
    const size_t n = (size_t)N * C;
    const double tensor = (double)n * sizeof(real);
    for (int backward = 0; backward < 2; backward++) {
        std::vector<uint16_t> host;
        std::vector<bool> seen(V);
        uint16_t *tokens = zipf_tokens(B, V, 1, &host);
        int distinct = 0;
        for (uint16_t token : host) distinct += !seen[token], seen[token] = true;
        real *dx = randoms<real>(SETS * n), *wte = randoms<real>((size_t)Vp * C), *wpe = randoms<real>((size_t)T * C);
        float *dwte = zeros<float>((size_t)Vp * C), *dwpe = zeros<float>((size_t)T * C);
        std::vector<uint32_t> sorted(4 * (size_t)B * T);
        uint32_t *d_sorted[2]; // by token, by position
        for (uint32_t *&to : d_sorted) {
            embedding_sort(sorted.data(), &to == d_sorted ? host.data() : NULL, NULL, B, T);
            to = zeros<uint32_t>(sorted.size());
            cudaMemcpy(to, sorted.data(), sorted.size() * sizeof(uint32_t), cudaMemcpyHostToDevice);
        }
        void *workspace = zeros<char>(embedding_workspace_bytes(B, T, C));
        if (!backward)
            run_case(b, "embedding forward", 1, 0, tensor + (double)distinct * C * sizeof(real), [&](int i) {
                bench_check(embedding_forward(dx + i % SETS * n, tokens, NULL, wte, wpe,
                                              row_dropout({}, DROPOUT_EMBEDDING, T), B, C, 0, &e),
                            &e);
            });
        else
            run_case(b, "embedding backward", 1, 0, tensor + 8.0 * C * (distinct + T), [&](int i) {
                for (int w = 0; w < 2; w++)
                    bench_check(embedding_backward(w ? dwpe : dwte, dx + i % SETS * n,
                                                   embedding_order(d_sorted[w], false, N), B, T, C, workspace, 0, &e),
                                &e);
            });
    }
}

// crossentropy works in place, so later calls read gradients instead of logits. This takes the same time.
static void crossentropies(Bench *b, int rows, int C, int chunks, int V, int Vp) {
    Error e = {};
    const size_t n = (size_t)rows * Vp, in = (size_t)rows * C;
    uint16_t *tokens = zipf_tokens(rows / T, V, 3);
    float *losses = zeros<float>(rows), *smoothed = zeros<float>(rows);
    real *logits = randoms<real>(n, 0.0f, 2.0f), *x = randoms<real>(in), *weight = randoms<real>((size_t)Vp * C);
    float *sums = randoms<float>((size_t)linear_sm90_tiles(Vp) * rows, 1.0f, 0.1f);
    const double read = 2.0 * in * sizeof(real), tiles = 4.0 * linear_sm90_tiles(Vp) * rows;
    const std::vector<void *> all = allocations;
    const auto time = [&](const char *name, int times, double bytes, const BenchCall &call) {
        allocations.clear(); // keep the arrays for the next case
        if (wanted(b, name) && !left_out(b, times)) run_case(b, name, times, 0, bytes, call);
    };
    for (float *to : {(float *)NULL, smoothed})
        time(to ? "cross-entropy, smoothing" : "cross-entropy", to || b->fused ? 0 : chunks, 2.0 * n * sizeof(real),
             [&](int) {
                 bench_check(crossentropy({losses, to, 0.1f, 0, 0, logits, tokens, rows, 0, T, V, Vp, 1}, 0, &e), &e);
             });
    const LogitRows k = {losses, NULL, 0, 0, 0, logits, tokens, rows, 0, T, V, Vp, 1};
    time("cross-entropy, targets", b->fused ? chunks : 0, read,
         [&](int) { bench_check(crossentropy_targets(losses, x, weight, k, C, 0, &e), &e); });
    time("cross-entropy, after exponentials", b->fused ? chunks : 0, read + tiles, [&](int) {
        bench_check(crossentropy_finish({k, smoothed, x, sums, linear_sm90_tiles(Vp), C}, 0, &e), &e);
    });
    allocations = all;
    free_all();
}

static void updates(Bench *b, const Model *model) {
    Error e = {};
    const size_t n = model->flat_count;
    if (wanted(b, "squared norms")) {
        std::vector<Range> host;
        for (int i = 0; i < model->tensor_count; i++) host.push_back(tensor_range(&model->tensors[i]));
        const int S = (int)host.size();
        Range *segments = zeros<Range>(S);
        cuda_check(cudaMemcpy(segments, host.data(), S * sizeof *segments, cudaMemcpyHostToDevice));
        float *x = randoms<float>(n);
        double *squares = zeros<double>(S);
        void *workspace = zeros<char>(reduce_squares_workspace_bytes(S));
        run_case(b, "squared norms", 1, 0, 4.0 * n, [&](int) {
            bench_check(reduce_squares(squares, x, {0, n}, segments, S, workspace, 0, &e), &e);
        });
    }
    if (!wanted(b, "adamw")) return;
    const OptimizerArrays a = {randoms<float>(n),
                               zeros<real>(n),
                               randoms<float>(n),
                               randoms<float>(n, 1, 0.01f),
                               randoms<float>(n),
                               zeros<UpdateRule>(n / DECAY_GRANULE),
                               NULL,
                               NULL};
    const AdamWStep step = adamw_step(1e-4, 0.9, 0.95, 1e-8, 0.1, 100, 1.0);
    float *scale = randoms<float>(1, 1.0f, 0.0f);
    run_case(b, "adamw", 1, 0, (sizeof(real) == 2 ? 30.0 : 28.0) * n,
             [&](int) { bench_check(optimizer_update(&a, n, step, scale, 0, &e), &e); });
}

// ---- Models ---------------------------------------------------------------------------------------------------------

// Returns engine_head_examples for B rows.
static int head_examples(int B, int Vp) {
    const int most = (int)size_max(CUDA_HEAD_BYTES / ((size_t)T * Vp * sizeof(real)), 1);
    const int chunks = (B + most - 1) / most;
    return (B + chunks - 1) / chunks;
}

static void bench_model(Bench *b, const char *name) {
    const int B = strcmp(name, "d12") == 0 ? 64 : strcmp(name, "d48") == 0 ? 16 : 32;
    Error e = {};
    ModelConfig m = {};
    Model model;
    m.vocab = 50257;
    m.context = T;
    if (!model_preset(&m, name))
        bench_check(FAIL(&e, ERR_USAGE, "bench_kernels [MODEL...] [quick] [tune] [held] [only=NAME...]",
                         "no model or word is called %s", name),
                    &e);
    bench_check(model_create(&model, &m, &e), &e);
    const int examples = head_examples(B, model.vocab_padded), chunks = (B + examples - 1) / examples;
    const AttentionShape s = {B, T, m.heads, m.channels / m.heads};
    b->step_seconds = b->step_joules = 0;
    b->fused = sm90_runs() && m.channels % LINEAR_SM90_MULTIPLE == 0;
    bench_check(weight_gradient_pairs(&b->pairs, &e), &e);
    printf("%s, micro-batch %d x %d\n", name, B, T);
    products(b, &m, B);
    if (FP8_BUILT && b->fused) e4m3_products(b, &m, B);
    head_products(b, examples * T, m.channels, m.vocab, model.vocab_padded, chunks);
    attention_case(b, s, m.layers, "");
    if (b->seconds >= 1) {
        attention_case(b, {s.B / 2, T, s.NH, 128}, 0, ", heads of 128");
        masked_attention(b, s, 300, "");
        masked_attention(b, {s.B / 2, T, s.NH, 128}, 300, ", heads of 128");
    }
    layernorms(b, B, m.channels, m.layers);
    gelu_and_biases(b, B, m.channels, m.layers);
    crossentropies(b, examples * T, m.channels, chunks, m.vocab, model.vocab_padded);
    embeddings(b, B, m.channels, m.vocab, model.vocab_padded);
    updates(b, &model);
    printf("%s, sum over a step: %.2f ms, %.2f J\n", name, 1e3 * b->step_seconds, b->step_joules);
    model_destroy(&model);
}

static void measure_ceilings(Bench *b) {
    const size_t bytes = (size_t)1 << 30;
    const int n = 8192;
    const std::vector<std::string> only = b->only;
    b->only.clear();
    MatmulShape s = forward(n, n, n);
    real *left = randoms<real>((size_t)n * n), *right = randoms<real>((size_t)n * n), *out = zeros<real>((size_t)n * n);
    Error e = {};
    const BenchCall multiply = [&](int) { bench_check(matmul_run(b->mm, s, {out, left, right}, &e), &e); };
    time_hot(&b->nvml, 0.5, multiply); // warms the card up
    const double flops = 2.0 * n * n * n, product_bytes = 3.0 * n * n * sizeof(real);
    const Timing t = run_case(b, "8192^3", 0, flops, product_bytes, multiply);
    char *from = (char *)randoms<float>(bytes / 4), *to = zeros<char>(bytes);
    const Timing copy = run_case(b, "copy, read and written", 0, 0, 2.0 * bytes,
                                 [&](int) { cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice)); });
    b->flops = flops / t.seconds;
    b->bandwidth = 2.0 * bytes / copy.seconds;
    b->only = only;
}

static void bench_create(Bench *b) {
    Error e = {};
    void *workspace;
    cudaDeviceProp device;
    cuda_check(cudaGetDeviceProperties(&device, 0));
    cuda_check(cudaMalloc(&workspace, MATMUL_WORKSPACE_BYTES));
    bench_check(memory_alloc_zero((void **)&b->mm, sizeof *b->mm, "matmul plans", &e), &e);
    bench_check(matmul_create(b->mm, workspace, 0, &e), &e);
    bench_check(hold_create(&b->hold, &e), &e);
    b->nvml = nvml_open();
    b->seconds = 1.0;
    printf("%s, %d multiprocessors, %s%s\n", device.name, device.multiProcessorCount, REAL_NAME,
           b->nvml.device ? "" : "; no NVML: energy is not measured");
}

int main(int argc, char **argv) {
    std::vector<const char *> models;
    Bench b = {};
    setvbuf(stdout, NULL, _IOLBF, 0);
    bench_create(&b);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "quick") == 0) b.seconds = 0.33;
        else if (strcmp(argv[i], "tune") == 0) matmul_tune(b.mm, true);
        else if (strcmp(argv[i], "held") == 0) b.held = true;
        else if (strncmp(argv[i], "only=", 5) == 0) b.only.push_back(argv[i] + 5);
        else models.push_back(argv[i]);
    }
    if (models.empty()) models = {"d12", "d48"};
    measure_ceilings(&b);
    for (const char *name : models) bench_model(&b, name);
    return 0;
}
