// Times attention forward and backward at training shapes, on random data. Prints microseconds (median), TFLOP/s, and
// how many times as long they take while another kernel occupies 24 multiprocessors, as NCCL does.
//
// FLOPs are counted as usual: the half of the T x T matrix under the causal mask, 2 products forward and 5 backward
// (whatever the kernels do), 2 FLOP a multiply-add. test_attention_cuda checks the results.
#include "cuda/attention_paths.cuh"
#include "../test/cuda/hold.cuh"
#include <algorithm>
#include <stdlib.h>

enum { WARM_UP = 3, REPEATS = 15, HELD = 24 };

// Uniform in [-1.7, 1.7), deviation 1; a hash of the index.
__global__ static void fill(real *x, size_t n, unsigned seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        unsigned h = (unsigned)i * 0x9e3779b1u + seed;
        h = (h ^ (h >> 15)) * 0x85ebca6bu;
        h = (h ^ (h >> 13)) * 0xc2b2ae35u;
        x[i] = (real)(((h ^ (h >> 16)) * 0x1p-32f - 0.5f) * 3.46f);
    }
}

struct Bench {
    Hold hold;
    AttentionShape s;
    real *qkv, *dout, *out, *dqkv;
    float *lse;
    void *workspace;
};

typedef int (*Launch)(Bench *b, Error *e);

static int public_forward(Bench *b, Error *e) {
    return attention_forward(b->out, b->lse, b->qkv, b->s, 0, e);
}

static int public_backward(Bench *b, Error *e) {
    return attention_backward(b->dqkv, b->dout, b->qkv, b->out, b->lse, b->workspace, b->s, 0, e);
}

static int rows_only(Bench *b, Error *e) {
    AttentionRows rows;
    return attention_rows_fill(&rows, b->workspace, b->lse, b->dout, b->out, b->s, 0, e);
}

#ifndef GNS_FP32
static int tiled_forward(Bench *b, Error *e) { return attention_tiled_forward(b->out, b->lse, b->qkv, b->s, 0, e); }

static int tiled_backward(Bench *b, Error *e) {
    AttentionRows rows;
    TRY(attention_rows_fill(&rows, b->workspace, b->lse, b->dout, b->out, b->s, 0, e));
    return attention_tiled_backward(b->dqkv, b->dout, b->qkv, rows, b->s, 0, e);
}
#endif

// Milliseconds: the median, and in *best the least. Meanwhile HELD multiprocessors are held for `hold` milliseconds.
static int time_repeats(Bench *b, Launch launch, double hold, float *median, float *best, Error *e) {
    cudaEvent_t start, stop;
    CUDA_TRY(cudaEventCreate(&start), e);
    CUDA_TRY(cudaEventCreate(&stop), e);
    float ms[REPEATS];
    for (int i = -WARM_UP; i < REPEATS; i++) {
        if (hold > 0) TRY(hold_begin(&b->hold, HELD, hold, e));
        CUDA_TRY(cudaEventRecord(start), e);
        TRY(launch(b, e));
        CUDA_TRY(cudaEventRecord(stop), e);
        CUDA_TRY(cudaEventSynchronize(stop), e);
        TRY(hold_end(&b->hold, e));
        if (i >= 0) CUDA_TRY(cudaEventElapsedTime(&ms[i], start, stop), e);
    }
    std::sort(ms, ms + REPEATS);
    *median = ms[REPEATS / 2];
    *best = ms[0];
    CUDA_TRY(cudaEventDestroy(start), e);
    return CUDA_CALL(cudaEventDestroy(stop), e);
}

static int time_launch(Bench *b, const char *name, Launch launch, double products, Error *e) {
    float median, best, beside, beside_best;
    TRY(time_repeats(b, launch, 0, &median, &best, e));
    TRY(time_repeats(b, launch, 3.0 * median + 0.1, &beside, &beside_best, e));
    double pairs = 0.5 * b->s.T * b->s.T * b->s.heads(), flop = products * 2 * pairs * b->s.D;
    printf("%-16s B %2d NH %2d T %4d D %3d  %9.1f us (best %9.1f)", name, b->s.B, b->s.NH, b->s.T, b->s.D, median * 1e3,
           best * 1e3);
    if (products > 0)
        printf("  %6.1f TFLOP/s; with %d multiprocessors held %.2f times that", flop / median * 1e-9, HELD,
               beside / median);
    printf("\n");
    return 0;
}

static int bench_shape(AttentionShape s, Hold hold, bool simple_too, Error *e) {
    Bench b = {};
    b.s = s;
    b.hold = hold;
    size_t n = (size_t)s.B * s.T * s.C();
    CUDA_TRY(cudaMalloc((void **)&b.qkv, 3 * n * sizeof(real)), e);
    CUDA_TRY(cudaMalloc((void **)&b.dqkv, 3 * n * sizeof(real)), e);
    CUDA_TRY(cudaMalloc((void **)&b.out, n * sizeof(real)), e);
    CUDA_TRY(cudaMalloc((void **)&b.dout, n * sizeof(real)), e);
    CUDA_TRY(cudaMalloc((void **)&b.lse, (size_t)s.heads() * s.T * sizeof(float)), e);
    CUDA_TRY(cudaMalloc(&b.workspace, attention_workspace_bytes(s)), e);
    fill<<<1024, 256>>>(b.qkv, 3 * n, 1u);
    fill<<<1024, 256>>>(b.dout, n, 2u);
    TRY(time_launch(&b, "forward", public_forward, 2, e));
    TRY(time_launch(&b, "backward", public_backward, 5, e));
    TRY(time_launch(&b, "  of it delta", rows_only, 0, e));
#ifndef GNS_FP32
    if (simple_too) {
        TRY(time_launch(&b, "forward tiled", tiled_forward, 2, e));
        TRY(time_launch(&b, "backward tiled", tiled_backward, 5, e));
    }
#endif
    (void)simple_too;
    void *all[] = {b.qkv, b.dqkv, b.out, b.dout, b.lse, b.workspace};
    for (void *p : all) CUDA_TRY(cudaFree(p), e);
    return 0;
}

static int bench(Error *e) {
    static const AttentionShape shapes[] = {
        {64, 1024, 12, 64}, {32, 1024, 16, 64}, {16, 1024, 25, 64}, {32, 1024, 12, 128}};
    Hold hold = {};
    TRY(hold_create(&hold, e));
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        TRY(bench_shape(shapes[i], hold, i == 0 || shapes[i].D == 128, e));
    hold_destroy(&hold);
    return 0;
}

int main(void) {
    Error e = {};
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (bench(&e) == 0) return 0;
    error_print(&e, 0, 1);
    return e.code;
}
