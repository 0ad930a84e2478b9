// bench_weight_gradient: times the weight gradients of a training step, computed by weight_gradient and by cuBLASLt's
// fastest algorithm. For a matrix with a bias cuBLASLt's time includes the pass that sums the bias. Candidates take
// turns without pause, so that the card reaches its power limit. Each turn's first third is not timed. In bf16 builds
// also times e4m3 factors, without the bias.
//
//     bench_weight_gradient [seconds per turn (0.06) [turns (5) [words in a shape's name ...]]]
//
// With 0 turns each candidate runs once, for a profiler.
#include "cuda/fp8.cuh"
#include "cuda/gelu.cuh"
#include "cuda/matmul.cuh"
#include "cuda/weight_gradient.cuh"
#include "math/rng.h"

#include <algorithm>
#include <cuda_profiler_api.h>
#include <functional>
#include <memory>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <vector>

static void must(int code, const Error *e) {
    if (!code) return;
    error_print(e);
    exit(code);
}
#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        Error must_ = {};                                                                                              \
        must(CUDA_CALL(call, &must_), &must_);                                                                         \
    } while (0)

// Normal numbers, by Box and Muller.
__global__ static void fill_kernel(real *x, size_t n, uint64_t stream, float scale) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        const float u = (float)rng_uniform(1, stream, 2 * i), v = (float)rng_uniform(1, stream, 2 * i + 1);
        x[i] = (real)(scale * sqrtf(-2.0f * logf(fmaxf(u, 1e-30f))) * cospif(2.0f * v));
    }
}

// Writes the e4m3 codes of scale x, in x's order. weight_gradient reads them as a transposed matrix of other random
// numbers, which takes the same time.
__global__ static void encode_kernel(uint8_t *codes, const real *x, size_t n, float scale) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        codes[i] = (uint8_t)fp8_pack((float)x[i] * scale, 0);
}

template <typename X> static X *device_new(size_t n) {
    X *x;
    MUST(cudaMalloc(&x, n * sizeof *x));
    MUST(cudaMemset(x, 0, n * sizeof *x));
    return x;
}

struct Problem {
    const char *name;
    WeightGradientShape s;
    bool bias; // also sum the bias gradient, because no other kernel of a step does
};

static const Problem problems[] = {
    {"d12 proj", {64, 1024, 768, 768}, false},     {"d12 qkv", {64, 1024, 768, 2304}, true},
    {"d12 fc", {64, 1024, 768, 3072}, false},      {"d12 fcproj", {64, 1024, 3072, 768}, false},
    {"d12 head", {8, 1024, 50304, 768}, false},    {"d24 proj", {32, 1024, 1024, 1024}, false},
    {"d24 qkv", {32, 1024, 1024, 3072}, true},     {"d24 fc", {32, 1024, 1024, 4096}, false},
    {"d24 fcproj", {32, 1024, 4096, 1024}, false}, {"d48 proj", {16, 1024, 1600, 1600}, false},
    {"d48 qkv", {16, 1024, 1600, 4800}, true},     {"d48 fc", {16, 1024, 1600, 6400}, false},
    {"d48 fcproj", {16, 1024, 6400, 1600}, false}, {"d48 head", {8, 1024, 50304, 1600}, false},
};

struct Candidate {
    const char *name;
    bool against; // the candidates after it are compared with it
    std::function<void()> run;
    std::vector<float> us;
};

static void time_all(std::vector<Candidate> &all, double seconds, int turns) {
    cudaEvent_t start, stop;
    MUST(cudaEventCreate(&start));
    MUST(cudaEventCreate(&stop));
    auto timed = [&](Candidate &c, int warm, int count) {
        float ms;
        for (int i = 0; i < warm; i++) c.run();
        MUST(cudaEventRecord(start));
        for (int i = 0; i < count; i++) c.run();
        MUST(cudaEventRecord(stop));
        MUST(cudaEventSynchronize(stop));
        MUST(cudaEventElapsedTime(&ms, start, stop));
        return ms * 1000 / count;
    };
    for (int turn = 0; turn < turns; turn++)
        for (Candidate &c : all) {
            const float once = timed(c, 1, 2);
            const int count = std::max(6, (int)(seconds * 1e6 / once));
            c.us.push_back(timed(c, count / 3, count - count / 3));
        }
    for (Candidate &c : all) std::sort(c.us.begin(), c.us.end());
}

static float middle(const Candidate &c) { return c.us[c.us.size() / 2]; }

static void bench(Matmul *mm, const Problem &p, const WeightGradientPairs &pairs, double seconds, int turns) {
    const WeightGradientShape s = p.s;
    const size_t rows = (size_t)s.B * s.T;
    real *x = device_new<real>(rows * s.in), *dy = device_new<real>(rows * s.out);
    float *dw = device_new<float>((size_t)s.in * s.out), *dbias = device_new<float>(s.out);
    double *squares = device_new<double>(2);
    fill_kernel<<<1056, 256>>>(x, rows * s.in, 1, 1.0f);
    fill_kernel<<<1056, 256>>>(dy, rows * s.out, 2, 0.02f);
    uint8_t *x8 = device_new<uint8_t>(rows * s.in), *dy8 = device_new<uint8_t>(rows * s.out);
    encode_kernel<<<1056, 256>>>(x8, x, rows * s.in, 4);
    encode_kernel<<<1056, 256>>>(dy8, dy, rows * s.out, 4 / 0.02f);
    WeightGradientShape s8 = s;
    s8.e4m3 = true;
    size_t bytes = bias_backward_bytes(s.B, s.T, s.out);
    for (const WeightGradientShape &of : {s, s8})
        bytes = size_max(bytes, weight_gradient_workspace_bytes(of, pairs.count));
    void *workspace = device_new<char>(bytes), *columns = device_new<char>(weight_gradient_column_bytes(s));
    auto library = [=](bool add, bool exact) {
        Error e = {};
        MatmulShape shape = {
            .m = s.in, .n = s.out, .k = (int)rows, .transpose_a = true, .out_float = true, .accumulate = add};
        must(matmul_run(mm, shape, {dw, x, dy}, &e), &e);
        if (!p.bias) return;
        ColumnJobs jobs = {workspace};
        must(bias_backward({dbias, exact ? squares + 1 : NULL, !add}, dy, NULL, s.B, s.T, s.out, &jobs, 0, &e), &e);
        must(column_finish(&jobs, 0, &e), &e);
    };
    auto ours = [=](bool add, bool exact) {
        Error e = {};
        WeightGradient g = {};
        g.dw = dw, g.first = !add, g.squares = exact ? squares : NULL;
        ColumnJobs jobs = {columns};
        if (p.bias) g.bias = {dbias, exact ? squares + 1 : NULL, !add}, g.jobs = &jobs;
        must(weight_gradient(g, x, dy, s, pairs, workspace, 0, &e), &e);
        must(column_finish(&jobs, 0, &e), &e);
    };
    auto e4m3 = [=](bool add, bool exact) {
        Error e = {};
        WeightGradient g = {};
        g.dw = dw, g.first = !add, g.scale = 0x1p-8f, g.squares = exact ? squares : NULL;
        must(weight_gradient(g, x8, dy8, s8, pairs, workspace, 0, &e), &e);
    };
    std::vector<Candidate> all = {{"cuBLASLt", true, [=] { library(false, false); }, {}},
                                  {"ours, no norms", false, [=] { ours(false, false); }, {}},
                                  {"ours, norms", false, [=] { ours(false, true); }, {}},
                                  {"e4m3, no norms", false, [=] { e4m3(false, false); }, {}},
                                  {"e4m3, norms", false, [=] { e4m3(false, true); }, {}},
                                  {"cuBLASLt, added", true, [=] { library(true, false); }, {}},
                                  {"ours, no norms, added", false, [=] { ours(true, false); }, {}},
                                  {"ours, norms, added", false, [=] { ours(true, true); }, {}},
                                  {"e4m3, norms, added", false, [=] { e4m3(true, true); }, {}}};
    std::erase_if(all, [](const Candidate &c) { return !FP8_BUILT && strstr(c.name, "e4m3"); });
    matmul_tune(mm, true);
    for (Candidate &c : all) c.run();
    matmul_tune(mm, false);
    MUST(cudaDeviceSynchronize());
    if (turns == 0) { // ncu --profile-from-start off
        MUST(cudaProfilerStart());
        for (Candidate &c : all) c.run();
        MUST(cudaDeviceSynchronize());
        MUST(cudaProfilerStop());
    } else time_all(all, seconds, turns);
    const Candidate *against = NULL;
    for (const Candidate &c : all) {
        if (turns == 0) break;
        if (c.against) against = &c;
        printf("%-11s %5d x %-5d B %-2d %-22s %8.1f us (%.1f to %.1f) %5.0f TFLOP/s  %.3fx\n", p.name, s.in, s.out, s.B,
               c.name, middle(c), c.us.front(), c.us.back(), 2e-6 * rows * s.in * s.out / middle(c),
               middle(*against) / middle(c));
    }
    for (void *q : {(void *)x, (void *)dy, (void *)x8, (void *)dy8, (void *)dw, (void *)dbias, (void *)squares,
                    workspace, columns})
        MUST(cudaFree(q));
}

int main(int argc, char **argv) {
    const double seconds = argc > 1 ? atof(argv[1]) : 0.06;
    const int turns = argc > 2 ? atoi(argv[2]) : 5;
    Error e = {};
    WeightGradientPairs pairs;
    setvbuf(stdout, NULL, _IOLBF, 0);
    must(weight_gradient_pairs(&pairs, &e), &e);
    if (!pairs.count) return printf("SKIP bench_weight_gradient: not in this build, or not on this GPU\n"), ERR_SKIPPED;
    auto mm = std::make_unique<Matmul>();
    must(matmul_create(mm.get(), device_new<char>(MATMUL_WORKSPACE_BYTES), 0, &e), &e);
    for (const Problem &p : problems) {
        bool wanted = argc <= 3;
        for (int i = 3; i < argc; i++) wanted |= strstr(p.name, argv[i]) != NULL;
        if (wanted) bench(mm.get(), p, pairs, seconds, turns);
    }
    matmul_destroy(mm.get());
    return 0;
}
