// bench_matmul: every matrix product of a training step at GPT-2's shapes: checked against float64 on the host at
// random places, run twice for equal bits, then timed. Share is of an 8192^3 product timed in the same run.
//
//     bench_matmul [channels (768) [rows (65536)]]
#include "cuda/matmul.cuh"
#include "math/rng.h"

#include <algorithm>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

static void must(int code, const Error *e) {
    if (!code) return;
    error_print(e, 0, 1);
    exit(code);
}
#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t must_ = (call);                                                                                    \
        if (must_ != cudaSuccess) {                                                                                    \
            fprintf(stderr, "error: %s: %s\n", #call, cudaGetErrorString(must_));                                      \
            exit(ERR_INTERNAL);                                                                                        \
        }                                                                                                              \
    } while (0)

__global__ static void fill_kernel(real *x, size_t n, uint64_t stream, float scale) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        x[i] = (real)((rng_uniform(1, stream, i) - 0.5) * scale);
}

static real *random_real(size_t n, uint64_t stream, float scale) {
    real *x;
    MUST(cudaMalloc(&x, n * sizeof *x));
    fill_kernel<<<1024, 256>>>(x, n, stream, scale);
    MUST(cudaGetLastError());
    return x;
}

static double value_at(const real *device, size_t i) {
    real x;
    MUST(cudaMemcpy(&x, device + i, sizeof x, cudaMemcpyDeviceToHost));
    return (double)(float)x;
}

static double gelu_slope(double x) {
    double k = sqrt(2 / M_PI), t = tanh(k * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x);
}

typedef struct {
    const MatmulShape *shape;
    void *out;
    real *a, *b, *extra; // extra: bias or pre-activation, as the epilogue says
    size_t out_bytes;
} Case;

// One element of the product in float64.
static double element(const Case *c, int i, int j) {
    const MatmulShape *s = c->shape;
    std::vector<real> row(s->k), column(s->k);
    size_t wa = s->transpose_a ? s->m * sizeof(real) : sizeof(real), oa = s->transpose_a ? i : (size_t)i * s->k;
    size_t wb = s->transpose_b ? sizeof(real) : s->n * sizeof(real), ob = s->transpose_b ? (size_t)j * s->k : j;
    MUST(cudaMemcpy2D(row.data(), sizeof(real), c->a + oa, wa, sizeof(real), s->k, cudaMemcpyDeviceToHost));
    MUST(cudaMemcpy2D(column.data(), sizeof(real), c->b + ob, wb, sizeof(real), s->k, cudaMemcpyDeviceToHost));
    double sum = 0;
    for (int k = 0; k < s->k; k++) sum += (double)(float)row[k] * (double)(float)column[k];
    if (s->epilogue == MATMUL_BIAS) sum += value_at(c->extra, j);
    if (s->epilogue == MATMUL_DGELU) sum *= gelu_slope(value_at(c->extra, (size_t)i * s->n + j));
    return sum;
}

// Largest difference over a few places, as a share of the root mean square there.
static double check(const Case *c) {
    const MatmulShape *s = c->shape;
    const int places = 24;
    double worst = 0, square = 0;
    for (int p = 0; p < places; p++) {
        int i = (int)(rng_u32(7, 0, p) % (unsigned)s->m), j = (int)(rng_u32(7, 1, p) % (unsigned)s->n);
        double want = element(c, i, j), got;
        if (s->out_float) {
            float x;
            MUST(cudaMemcpy(&x, (float *)c->out + (size_t)i * s->n + j, sizeof x, cudaMemcpyDeviceToHost));
            got = x;
        } else got = value_at((real *)c->out, (size_t)i * s->n + j);
        if (!(fabs(got - want) <= worst)) worst = fabs(got - want);
        square += want * want;
    }
    return worst / sqrt(square / places);
}

static std::vector<char> snapshot(const void *device, size_t bytes) {
    std::vector<char> host(bytes);
    MUST(cudaMemcpy(host.data(), device, bytes, cudaMemcpyDeviceToHost));
    return host;
}

static double median_ms(Matmul *mm, const Case *c) {
    const int rounds = 15;
    cudaEvent_t start, stop;
    MUST(cudaEventCreate(&start));
    MUST(cudaEventCreate(&stop));
    std::vector<float> ms(rounds);
    Error e = {};
    for (int r = -3; r < rounds; r++) {
        MUST(cudaEventRecord(start));
        must(matmul_run(mm, *c->shape, c->out, c->a, c->b, c->extra, &e), &e);
        MUST(cudaEventRecord(stop));
        MUST(cudaEventSynchronize(stop));
        if (r >= 0) MUST(cudaEventElapsedTime(&ms[r], start, stop));
    }
    MUST(cudaEventDestroy(start));
    MUST(cudaEventDestroy(stop));
    std::sort(ms.begin(), ms.end());
    return ms[rounds / 2];
}

static double ceiling; // TFLOP/s of the 8192^3 product
static int failures;

static void bench(Matmul *mm, const char *name, MatmulShape s) {
    size_t out_count = (size_t)s.m * s.n;
    Case c = {&s, NULL, NULL, NULL, NULL, out_count * (s.out_float ? sizeof(float) : sizeof(real))};
    Error e = {};
    c.a = random_real((size_t)s.m * s.k, 1, 2.0f);
    c.b = random_real((size_t)s.k * s.n, 2, 2.0f);
    MUST(cudaMalloc(&c.out, c.out_bytes));
    MUST(cudaMemset(c.out, s.accumulate ? 0 : 0xff, c.out_bytes)); // 0xff: NaN
    if (s.epilogue == MATMUL_BIAS) c.extra = random_real(s.n, 3, 2.0f);
    if (s.epilogue == MATMUL_DGELU) c.extra = random_real(out_count, 4, 4.0f);
    int code = matmul_run(mm, s, c.out, c.a, c.b, c.extra, &e);
    if (code) printf("%-28s %s\n", name, e.what);
    else {
        MUST(cudaDeviceSynchronize());
        double error = check(&c);
        std::vector<char> first = snapshot(c.out, c.out_bytes);
        if (s.accumulate) MUST(cudaMemset(c.out, 0, c.out_bytes));
        must(matmul_run(mm, s, c.out, c.a, c.b, c.extra, &e), &e);
        bool same = first == snapshot(c.out, c.out_bytes);
        double ms = median_ms(mm, &c), tflops = 2e-9 * s.m * s.n * (double)s.k / ms;
        if (ceiling == 0) ceiling = tflops;
        bool ok = error < (sizeof(real) == 2 && !s.out_float ? 2e-2 : 1e-3) && same;
        failures += !ok;
        printf("%-28s %6d %6d %6d %8.3f ms %6.0f TFLOP/s %4.0f%%  error %.1e  %s  %s\n", name, s.m, s.n, s.k, ms,
               tflops, 100 * tflops / ceiling, error, same ? "repeats" : "MOVES", ok ? "ok" : "FAIL");
    }
    MUST(cudaFree(c.a));
    MUST(cudaFree(c.b));
    MUST(cudaFree(c.out));
    if (c.extra) MUST(cudaFree(c.extra));
}

static MatmulShape forward(int rows, int in, int out, MatmulEpilogue epilogue) {
    return {.m = rows, .n = out, .k = in, .epilogue = epilogue};
}
static MatmulShape dinput(int rows, int in, int out, MatmulEpilogue epilogue) {
    return {.m = rows, .n = in, .k = out, .transpose_b = true, .epilogue = epilogue};
}
static MatmulShape dweight(int rows, int in, int out) {
    return {.m = in, .n = out, .k = rows, .transpose_a = true, .out_float = true, .accumulate = true};
}

int main(int argc, char **argv) {
    int C = argc > 1 ? atoi(argv[1]) : 768, rows = argc > 2 ? atoi(argv[2]) : 65536, Vp = 50304;
    Error e = {};
    void *workspace;
    MUST(cudaMalloc(&workspace, MATMUL_WORKSPACE_BYTES));
    Matmul *mm = (Matmul *)malloc(sizeof *mm);
    must(matmul_create(mm, workspace, 0, &e), &e);
    bench(mm, "8192^3", forward(8192, 8192, 8192, MATMUL_PLAIN));
    bench(mm, "qkv forward", forward(rows, C, 3 * C, MATMUL_BIAS));
    bench(mm, "proj forward", forward(rows, C, C, MATMUL_BIAS));
    bench(mm, "fc forward", forward(rows, C, 4 * C, MATMUL_BIAS));
    bench(mm, "fcproj forward", forward(rows, 4 * C, C, MATMUL_BIAS));
    bench(mm, "qkv dinput", dinput(rows, C, 3 * C, MATMUL_PLAIN));
    bench(mm, "proj dinput", dinput(rows, C, C, MATMUL_PLAIN));
    bench(mm, "fc dinput", dinput(rows, C, 4 * C, MATMUL_PLAIN));
    bench(mm, "fcproj dinput", dinput(rows, 4 * C, C, MATMUL_PLAIN));
    bench(mm, "fcproj dinput dgelu", dinput(rows, 4 * C, C, MATMUL_DGELU));
    bench(mm, "qkv dweight", dweight(rows, C, 3 * C));
    bench(mm, "proj dweight", dweight(rows, C, C));
    bench(mm, "fc dweight", dweight(rows, C, 4 * C));
    bench(mm, "fcproj dweight", dweight(rows, 4 * C, C));
    for (int chunk = 8192; chunk <= 16384 && chunk <= rows; chunk *= 2) {
        printf("head, %d rows a chunk\n", chunk);
        MatmulShape head = dinput(chunk, Vp, C, MATMUL_PLAIN); // logits = x wte^T
        bench(mm, "head forward", head);
        bench(mm, "head dinput", forward(chunk, Vp, C, MATMUL_PLAIN));
        bench(mm, "head dweight", dweight(chunk, Vp, C));
    }
    matmul_destroy(mm);
    free(mm);
    return failures ? 1 : 0;
}
