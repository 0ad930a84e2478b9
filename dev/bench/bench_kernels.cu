// Benchmark of the memory-bound CUDA kernels: first each against a plain float64 twin on a small shape, then time,
// bytes that must move (inputs once, outputs once), GB/s, and the share of the device's copy bandwidth measured in the
// same run. Inputs rotate among SETS sets, each larger than the L2 cache.
//
//     bench_kernels [B [FAMILY]]      micro-batch at T = 1024 (default 64); layernorm, gelu, embedding, crossentropy
//                                     or reduce alone
#include "cuda/crossentropy.cuh"
#include "cuda/embedding.cuh"
#include "cuda/gelu.cuh"
#include "cuda/layernorm.cuh"
#include "cuda/reduce.cuh"

#include <functional>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

enum { SETS = 3, REPEATS = 5, CALLS = 12 };

static void cuda_check(cudaError_t code) {
    if (code == cudaSuccess) return;
    fprintf(stderr, "error: %s\n", cudaGetErrorString(code));
    exit(ERR_INTERNAL);
}
static void call_check(int code, const Error *e) {
    if (code == 0) return;
    error_print(e, 0, 1);
    exit(code);
}

// ---- Data -----------------------------------------------------------------------------------------------------------

static inline __host__ __device__ uint32_t hash(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}
static inline __host__ __device__ float uniform(uint32_t seed, size_t i) { // -1.7..1.7: variance 1
    return (hash(hash(seed) + (uint32_t)i) / 4294967296.0f - 0.5f) * 3.4641016f;
}

template <typename X> __global__ void fill_kernel(X *p, size_t n, uint32_t seed, float mean, float scale) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        p[i] = (X)(mean + scale * uniform(seed, i));
}

static std::vector<void *> allocations;

template <typename X> static X *device_new(size_t n) {
    X *p = NULL;
    cuda_check(cudaMalloc(&p, n * sizeof(X)));
    cuda_check(cudaMemset(p, 0, n * sizeof(X)));
    allocations.push_back(p);
    return p;
}
template <typename X> static X *device_random(size_t n, uint32_t seed, float mean = 0.0f, float scale = 1.0f) {
    X *p = device_new<X>(n);
    fill_kernel<<<1024, 256>>>(p, n, seed, mean, scale);
    cuda_check(cudaGetLastError());
    return p;
}
template <typename X> static X *device_from(const std::vector<X> &v) {
    X *p = device_new<X>(v.size());
    cuda_check(cudaMemcpy(p, v.data(), v.size() * sizeof(X), cudaMemcpyHostToDevice));
    return p;
}
static void free_all(void) {
    cuda_check(cudaDeviceSynchronize());
    for (void *p : allocations) cuda_check(cudaFree(p));
    allocations.clear();
}

static inline double value(double x) { return x; }
template <typename X> static inline double value(X x) { return (float)x; }
template <typename X> static std::vector<double> host_from(const X *p, size_t n) {
    std::vector<X> v(n);
    cuda_check(cudaMemcpy(v.data(), p, n * sizeof(X), cudaMemcpyDeviceToHost));
    std::vector<double> d(n);
    for (size_t i = 0; i < n; i++) d[i] = value(v[i]);
    return d;
}

// Zipf: token k with a chance like 1 / (k + 1).
static std::vector<uint16_t> zipf_tokens(int B, int T, int V, uint32_t seed) {
    std::vector<uint16_t> tokens((size_t)B * (T + 1));
    for (size_t i = 0; i < tokens.size(); i++) {
        const int t = (int)(pow(V + 1.0, hash(seed + (uint32_t)i * 31) / 4294967296.0) - 1.0);
        tokens[i] = (uint16_t)(t < V ? t : V - 1);
    }
    return tokens;
}

// ---- Twins ----------------------------------------------------------------------------------------------------------

static int failures = 0;

// |got - want| / |want|; a NaN fails.
static void twin_check(const char *name, const std::vector<double> &got, const std::vector<double> &want, double most) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < want.size(); i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    const double error = sqrt(difference / norm);
    const bool good = error <= most;
    if (!good) failures++;
    printf("%s %-34s relative error %.1e (at most %.0e)\n", good ? "ok  " : "FAIL", name, error, most);
}

static const double STORED = sizeof(real) == 2 ? 3e-3 : 3e-6, SUMMED = 1e-5;

static void twin_layernorm(void) {
    Error e = {};
    const int B = 3, T = 50, C = 768, N = B * T;
    const size_t n = (size_t)N * C;
    real *x = device_random<real>(n, 1), *dy = device_random<real>(n, 2),
         *gamma = device_random<real>(C, 3, 1.0f, 0.2f);
    real *beta = device_random<real>(C, 4), *out = device_new<real>(n), *dr = device_random<real>(n, 5);
    float *mean = device_new<float>(N), *rstd = device_new<float>(N), *sums = device_new<float>(3 * C);
    double *squares = device_new<double>(3);
    const std::vector<double> before = host_from(dr, n), h_x = host_from(x, n), h_dy = host_from(dy, n);
    const std::vector<double> h_gamma = host_from(gamma, C), h_beta = host_from(beta, C);
    call_check(layernorm_forward(NULL, out, mean, rstd, x, NULL, gamma, beta, N, C, 0, &e), &e);
    void *workspace = device_new<char>(layernorm_backward_workspace_bytes(B, T, C));
    call_check(layernorm_backward(dr, true, {sums, squares, false}, {sums + C, squares + 1, false},
                                  {sums + 2 * C, squares + 2, false}, dy, x, mean, rstd, gamma, B, T, C, workspace, 0,
                                  &e),
               &e);
    std::vector<double> y(n), dx(n), want(3 * C), example(2 * C), norms(2);
    for (int i = 0; i < N; i++) {
        double m = 0.0, v = 0.0, m1 = 0.0, m2 = 0.0;
        const double *xi = &h_x[(size_t)i * C], *di = &h_dy[(size_t)i * C];
        for (int c = 0; c < C; c++) m += xi[c] / C;
        for (int c = 0; c < C; c++) v += (xi[c] - m) * (xi[c] - m) / C;
        const double r = 1.0 / sqrt(v + 1e-5);
        for (int c = 0; c < C; c++) {
            m1 += di[c] * h_gamma[c] / C;
            m2 += di[c] * h_gamma[c] * (xi[c] - m) * r / C;
        }
        if (i % T == 0) example.assign(2 * C, 0.0);
        for (int c = 0; c < C; c++) {
            const double xhat = (xi[c] - m) * r;
            y[(size_t)i * C + c] = xhat * h_gamma[c] + h_beta[c];
            dx[(size_t)i * C + c] = before[(size_t)i * C + c] + r * (di[c] * h_gamma[c] - m1 - xhat * m2);
            example[c] += di[c] * xhat;
            example[C + c] += di[c];
        }
        for (int c = 0; i % T == T - 1 && c < 2 * C; c++) {
            want[c] += example[c];
            norms[c / C] += example[c] * example[c];
        }
    }
    const std::vector<double> written = host_from(dr, n);
    for (size_t i = 0; i < n; i++) want[2 * C + i % C] += written[i];
    twin_check("layernorm forward", host_from(out, n), y, STORED);
    twin_check("layernorm backward dresidual", written, dx, STORED);
    twin_check("layernorm backward sums", host_from(sums, 3 * C), want, SUMMED);
    twin_check("layernorm per-example squares", host_from(squares, 2), norms, SUMMED);
    free_all();
}

static double gelu_twin(double x) { return 0.5 * x * (1.0 + tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x))); }

static void twin_gelu(void) {
    Error e = {};
    const int B = 2, T = 70, C = 264;
    const size_t n = (size_t)B * T * C;
    real *x = device_random<real>(n, 1, 0.0f, 1.5f), *dy = device_random<real>(n, 2), *y = device_new<real>(n);
    float *sum = device_new<float>(C);
    const std::vector<double> h_x = host_from(x, n), h_dy = host_from(dy, n);
    void *workspace = device_new<char>(bias_backward_workspace_bytes(B, T, C));
    call_check(gelu_forward(y, x, n, 0, &e), &e);
    call_check(bias_backward(dy, {sum, NULL, false}, dy, x, B, T, C, workspace, 0, &e), &e);
    std::vector<double> want(n), dx(n), bias(C), written = host_from(dy, n);
    for (size_t i = 0; i < n; i++) {
        want[i] = gelu_twin(h_x[i]);
        dx[i] = h_dy[i] * (gelu_twin(h_x[i] + 1e-5) - gelu_twin(h_x[i] - 1e-5)) / 2e-5;
        bias[i % C] += written[i];
    }
    twin_check("gelu forward", host_from(y, n), want, STORED);
    twin_check("gelu backward", written, dx, STORED);
    twin_check("gelu backward bias", host_from(sum, C), bias, SUMMED);
    free_all();
}

static void twin_embedding(void) {
    Error e = {};
    const int B = 4, T = 200, C = 64, V = 900;
    const size_t n = (size_t)B * T * C;
    const std::vector<uint16_t> tokens = zipf_tokens(B, T, V, 1);
    uint16_t *d_tokens = device_from(tokens);
    real *dx = device_random<real>(n, 2);
    float *dwte = device_new<float>((size_t)V * C), *dwpe = device_new<float>((size_t)T * C);
    EmbeddingOrder order;
    call_check(
        embedding_sort(&order, d_tokens, false, B, T, device_new<char>(embedding_sort_workspace_bytes(B, T)), 0, &e),
        &e);
    void *workspace = device_new<char>(embedding_backward_workspace_bytes(B, T, C));
    call_check(embedding_backward(dwte, dwpe, dx, order, B, T, C, workspace, 0, &e), &e);
    const std::vector<double> h_dx = host_from(dx, n);
    std::vector<double> want_wte((size_t)V * C), want_wpe((size_t)T * C);
    for (int i = 0; i < B * T; i++)
        for (int c = 0; c < C; c++) {
            want_wte[(size_t)tokens[(size_t)(i / T) * (T + 1) + i % T] * C + c] += h_dx[(size_t)i * C + c];
            want_wpe[(size_t)(i % T) * C + c] += h_dx[(size_t)i * C + c];
        }
    twin_check("embedding backward dwte", host_from(dwte, want_wte.size()), want_wte, SUMMED);
    twin_check("embedding backward dwpe", host_from(dwpe, want_wpe.size()), want_wpe, SUMMED);
    free_all();
}

static void twin_crossentropy(void) {
    Error e = {};
    const int T = 12, V = 50257, Vp = 50304;
    const size_t n = (size_t)T * Vp;
    const std::vector<uint16_t> tokens = zipf_tokens(1, T, V, 1);
    real *logits = device_random<real>(n, 2, 0.0f, 3.0f);
    float *losses = device_new<float>(T);
    const std::vector<double> x = host_from(logits, n);
    call_check(crossentropy(losses, logits, true, device_from(tokens), 0, T, T, V, Vp, 0, &e), &e);
    std::vector<double> want(n), want_losses(T);
    for (int t = 0; t < T; t++) {
        double sum = 0.0;
        for (int v = 0; v < V; v++) sum += exp(x[(size_t)t * Vp + v]);
        want_losses[t] = log(sum) - x[(size_t)t * Vp + tokens[t + 1]];
        for (int v = 0; v < V; v++)
            want[(size_t)t * Vp + v] = (exp(x[(size_t)t * Vp + v]) / sum - (v == tokens[t + 1])) / T;
    }
    twin_check("crossentropy losses", host_from(losses, T), want_losses, SUMMED);
    twin_check("crossentropy dlogits", host_from(logits, n), want, STORED);
    free_all();
}

static void twin_reduce(void) {
    Error e = {};
    const size_t n = 100000, E = 5;
    float *x = device_random<float>(E * n, 1), *gradient = device_new<float>(n);
    const std::vector<ReduceSegment> segments = {{0, 3 * n}, {3 * n + 1, 7}, {4 * n, n}};
    double *squares = device_new<double>(3), *example_squares = device_new<double>(1);
    call_check(reduce_squares(squares, x, E * n, device_from(segments), 3,
                              device_new<char>(reduce_squares_workspace_bytes(3)), 0, &e),
               &e);
    call_check(reduce_examples(gradient, example_squares, x, E, n, device_new<char>(reduce_examples_workspace_bytes(E)),
                               0, &e),
               &e);
    const std::vector<double> h = host_from(x, E * n);
    std::vector<double> want(3), sum(n), want_examples(1);
    for (size_t s = 0; s < 3; s++)
        for (size_t i = 0; i < segments[s].count; i++) want[s] += h[segments[s].offset + i] * h[segments[s].offset + i];
    for (size_t i = 0; i < E * n; i++) {
        sum[i % n] += h[i];
        want_examples[0] += h[i] * h[i];
    }
    twin_check("reduce squares", host_from(squares, 3), want, SUMMED);
    twin_check("reduce examples, gradient", host_from(gradient, n), sum, SUMMED);
    twin_check("reduce examples, squares", host_from(example_squares, 1), want_examples, SUMMED);
    free_all();
}

// ---- Timing ---------------------------------------------------------------------------------------------------------

static double copy_bandwidth; // bytes/s, read plus written

// Best over REPEATS of the mean over CALLS calls, in seconds. call(set).
static double time_of(const std::function<void(int)> &call) {
    cudaEvent_t start, stop;
    cuda_check(cudaEventCreate(&start));
    cuda_check(cudaEventCreate(&stop));
    for (int i = 0; i < SETS; i++) call(i);
    double best = INFINITY;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        cuda_check(cudaEventRecord(start));
        for (int i = 0; i < CALLS; i++) call(i % SETS);
        cuda_check(cudaEventRecord(stop));
        cuda_check(cudaEventSynchronize(stop));
        float ms = 0.0f;
        cuda_check(cudaEventElapsedTime(&ms, start, stop));
        best = fmin(best, ms * 1e-3 / (int)CALLS);
    }
    cuda_check(cudaEventDestroy(start));
    cuda_check(cudaEventDestroy(stop));
    return best;
}

static void report(const char *name, double bytes, const std::function<void(int)> &call) {
    const double seconds = time_of(call);
    printf("%-44s %9.1f us %8.1f MB %7.0f GB/s %6.1f%%\n", name, seconds * 1e6, bytes * 1e-6, bytes / seconds * 1e-9,
           100.0 * bytes / seconds / copy_bandwidth);
    fflush(stdout);
}

static void measure_copy(void) {
    const size_t bytes = (size_t)1 << 30;
    char *from[SETS], *to = (char *)device_random<float>(bytes / 4, 1);
    for (int s = 0; s < SETS; s++) from[s] = (char *)device_random<float>(bytes / 4, s);
    const double seconds =
        time_of([&](int s) { cuda_check(cudaMemcpyAsync(to, from[s], bytes, cudaMemcpyDeviceToDevice)); });
    copy_bandwidth = 2.0 * bytes / seconds;
    printf("device copy, read + written: %.0f GB/s\n", copy_bandwidth * 1e-9);
    free_all();
}

static void bench_layernorm(int B, int T, int C) {
    Error e = {};
    const int N = B * T;
    const size_t n = (size_t)N * C;
    const double tensor = (double)n * sizeof(real);
    real *x[SETS], *y[SETS], *dr[SETS], *out[SETS];
    for (int s = 0; s < SETS; s++) {
        x[s] = device_random<real>(n, 4 * s);
        y[s] = device_random<real>(n, 4 * s + 1);
        dr[s] = device_random<real>(n, 4 * s + 2);
        out[s] = device_new<real>(n);
    }
    real *gamma = device_random<real>(C, 77, 1.0f, 0.2f), *beta = device_random<real>(C, 78);
    float *mean = device_new<float>(N), *rstd = device_new<float>(N), *sums = device_new<float>(3 * C);
    double *squares = device_new<double>(3);
    void *workspace = device_new<char>(layernorm_backward_workspace_bytes(B, T, C));
    const ColumnGradient dgamma = {sums, squares, false}, dbeta = {sums + C, squares + 1, false};
    const ColumnGradient dbias = {sums + 2 * C, squares + 2, false}, none = {};
    const ColumnGradient dgamma_only = {sums, NULL, false}, dbeta_only = {sums + C, NULL, false};
    char name[96];
#define NAME(what) (snprintf(name, sizeof(name), "%s %dx%d", what, N, C), name)
    report(NAME("layernorm forward"), 2 * tensor, [&](int s) {
        call_check(layernorm_forward(NULL, out[s], mean, rstd, x[s], NULL, gamma, beta, N, C, 0, &e), &e);
    });
    report(NAME("residual + layernorm forward"), 4 * tensor, [&](int s) {
        call_check(layernorm_forward(dr[s], out[s], mean, rstd, x[s], y[s], gamma, beta, N, C, 0, &e), &e);
    });
    call_check(layernorm_forward(NULL, out[0], mean, rstd, x[0], NULL, gamma, beta, N, C, 0, &e), &e);
    report(NAME("layernorm backward, no norms"), 4 * tensor, [&](int s) {
        call_check(layernorm_backward(dr[s], true, dgamma_only, dbeta_only, none, y[s], x[s], mean, rstd, gamma, B, T,
                                      C, workspace, 0, &e),
                   &e);
    });
    report(NAME("layernorm backward, norms"), 4 * tensor, [&](int s) {
        call_check(layernorm_backward(dr[s], true, dgamma, dbeta, none, y[s], x[s], mean, rstd, gamma, B, T, C,
                                      workspace, 0, &e),
                   &e);
    });
    report(NAME("layernorm backward, norms, bias"), 4 * tensor, [&](int s) {
        call_check(layernorm_backward(dr[s], true, dgamma, dbeta, dbias, y[s], x[s], mean, rstd, gamma, B, T, C,
                                      workspace, 0, &e),
                   &e);
    });
    report(NAME("layernorm backward, norms, overwrite"), 3 * tensor, [&](int s) {
        call_check(layernorm_backward(dr[s], false, dgamma, dbeta, none, y[s], x[s], mean, rstd, gamma, B, T, C,
                                      workspace, 0, &e),
                   &e);
    });
    free_all();
}

static void bench_gelu(int B, int T, int C) {
    Error e = {};
    const int N = B * T;
    const size_t n = (size_t)N * C;
    const double tensor = (double)n * sizeof(real);
    real *x[SETS], *dy[SETS];
    for (int s = 0; s < SETS; s++) x[s] = device_random<real>(n, s), dy[s] = device_random<real>(n, s + 9);
    real *out = device_new<real>(n);
    float *sum = device_new<float>(C);
    double *square = device_new<double>(1);
    void *workspace = device_new<char>(bias_backward_workspace_bytes(B, T, C));
    const ColumnGradient dbias = {sum, square, false};
    char name[96];
    report(NAME("gelu forward"), 2 * tensor, [&](int s) { call_check(gelu_forward(out, x[s], n, 0, &e), &e); });
    report(NAME("gelu backward, bias and norms"), 3 * tensor,
           [&](int s) { call_check(bias_backward(out, dbias, dy[s], x[s], B, T, C, workspace, 0, &e), &e); });
    report(NAME("bias backward, norms"), tensor,
           [&](int s) { call_check(bias_backward(NULL, dbias, dy[s], NULL, B, T, C, workspace, 0, &e), &e); });
    free_all();
}

static void bench_embedding(int B, int T, int C, int V) {
    Error e = {};
    const int N = B * T;
    const size_t n = (size_t)N * C;
    const double tensor = (double)n * sizeof(real);
    std::vector<uint16_t> h_tokens[SETS];
    uint16_t *tokens[SETS];
    real *dx[SETS];
    EmbeddingOrder order[SETS], by_example[SETS];
    void *sort_workspace[SETS], *example_workspace[SETS];
    for (int s = 0; s < SETS; s++) {
        h_tokens[s] = zipf_tokens(B, T, V, 1000u * s);
        tokens[s] = device_from(h_tokens[s]);
        dx[s] = device_random<real>(n, s);
        sort_workspace[s] = device_new<char>(embedding_sort_workspace_bytes(B, T));
        example_workspace[s] = device_new<char>(embedding_sort_workspace_bytes(B, T));
        call_check(embedding_sort(&by_example[s], tokens[s], true, B, T, example_workspace[s], 0, &e), &e);
    }
    std::vector<bool> seen(V);
    int distinct = 0;
    for (int i = 0; i < N; i++) {
        const int token = h_tokens[0][(size_t)(i / T) * (T + 1) + i % T];
        distinct += !seen[token];
        seen[token] = true;
    }
    real *wte = device_random<real>((size_t)V * C, 5), *wpe = device_random<real>((size_t)T * C, 6);
    real *out = device_new<real>(n);
    float *dwte = device_new<float>((size_t)V * C), *dwpe = device_new<float>((size_t)T * C);
    float *UG = device_random<float>(n, 7);
    double *sums = device_new<double>(3);
    void *workspace = device_new<char>(embedding_backward_workspace_bytes(B, T, C));
    void *square_workspace = device_new<char>(embedding_example_squares_workspace_bytes(B, C));
    char name[96];
    report(NAME("embedding forward"), tensor + (double)distinct * C * sizeof(real),
           [&](int s) { call_check(embedding_forward(out, tokens[s], wte, wpe, B, T, C, 0, &e), &e); });
    report(NAME("embedding sort"), 10.0 * N,
           [&](int s) { call_check(embedding_sort(&order[s], tokens[s], false, B, T, sort_workspace[s], 0, &e), &e); });
    report(NAME("embedding backward"), 2 * tensor + 8.0 * C * (distinct + T),
           [&](int s) { call_check(embedding_backward(dwte, dwpe, dx[s], order[s], B, T, C, workspace, 0, &e), &e); });
    report(NAME("embedding per-example norms"), tensor + 4.0 * n, [&](int s) {
        call_check(embedding_example_squares(sums, sums + 1, sums + 2, dx[s], UG, by_example[s], B, T, C,
                                             square_workspace, 0, &e),
                   &e);
    });
    free_all();
}

static void bench_crossentropy(int R, int T, int V, int Vp) {
    Error e = {};
    const size_t n = (size_t)R * Vp;
    const double tensor = (double)n * sizeof(real);
    real *logits[SETS];
    for (int s = 0; s < SETS; s++) logits[s] = device_random<real>(n, s, 0.0f, 2.0f);
    uint16_t *tokens = device_from(zipf_tokens(ceil(R / (double)T), T, V, 3));
    float *losses = device_new<float>(R);
    char name[96];
    snprintf(name, sizeof(name), "crossentropy loss %dx%d", R, Vp);
    report(name, tensor,
           [&](int s) { call_check(crossentropy(losses, logits[s], false, tokens, 0, R, T, V, Vp, 0, &e), &e); });
    // In place: after the first call the logits are gradients, which are as good a set of numbers to time.
    snprintf(name, sizeof(name), "crossentropy gradient %dx%d", R, Vp);
    report(name, 2 * tensor,
           [&](int s) { call_check(crossentropy(losses, logits[s], true, tokens, 0, R, T, V, Vp, 0, &e), &e); });
    free_all();
}

static void bench_reduce(void) {
    Error e = {};
    // A GPT-2 124M: two embeddings and 146 tensors of the layers' sizes.
    std::vector<ReduceSegment> segments;
    size_t n = 0;
    auto add = [&](size_t count) {
        segments.push_back({n, count});
        n += round_up(count, 64);
    };
    const size_t C = 768;
    add(50304 * C);
    add(1024 * C);
    for (int l = 0; l < 12; l++)
        for (size_t count : {C, C, 3 * C * C, 3 * C, C * C, C, C, C, 4 * C * C, 4 * C, 4 * C * C, C}) add(count);
    add(C);
    add(C);
    const int S = (int)segments.size();
    float *x[SETS];
    for (int s = 0; s < SETS; s++) x[s] = device_random<float>(n, s);
    ReduceSegment *d_segments = device_from(segments);
    double *squares = device_new<double>(S);
    void *workspace = device_new<char>(reduce_squares_workspace_bytes(S));
    report("reduce squares, 148 tensors of 124M", 4.0 * n,
           [&](int s) { call_check(reduce_squares(squares, x[s], n, d_segments, S, workspace, 0, &e), &e); });
    const int E = 8;
    const size_t m = 4 * C * C;
    float *gradient = device_new<float>(m);
    void *example_workspace = device_new<char>(reduce_examples_workspace_bytes(E));
    report("reduce examples, 8 of 768x3072", 4.0 * m * (E + 2),
           [&](int s) { call_check(reduce_examples(gradient, squares, x[s], E, m, example_workspace, 0, &e), &e); });
    float *losses = device_random<float>(65536, 1);
    report("reduce sum of 65536", 4.0 * 65536, [&](int) { call_check(reduce_sum(squares, losses, 65536, 0, &e), &e); });
    free_all();
}

int main(int argc, char **argv) {
    const int B = argc > 1 ? atoi(argv[1]) : 64, T = 1024;
    cudaDeviceProp device;
    if (B < 1) {
        fprintf(stderr, "error: the micro-batch is a positive number\n");
        return ERR_USAGE;
    }
    if (cudaGetDeviceProperties(&device, 0) != cudaSuccess) {
        fprintf(stderr, "error: no usable GPU\n");
        return ERR_NO_GPU;
    }
    printf("%s, %d multiprocessors, %s\n", device.name, device.multiProcessorCount,
           sizeof(real) == 2 ? "bf16" : "fp32");
    const char *only = argc > 2 ? argv[2] : NULL;
    auto wanted = [&](const char *family) { return !only || strcmp(only, family) == 0; };
    if (wanted("layernorm")) twin_layernorm();
    if (wanted("gelu")) twin_gelu();
    if (wanted("embedding")) twin_embedding();
    if (wanted("crossentropy")) twin_crossentropy();
    if (wanted("reduce")) twin_reduce();
    measure_copy();
    printf("%-44s %12s %11s %12s %7s\n", "kernel", "time", "bytes", "bandwidth", "of copy");
    if (wanted("layernorm")) {
        bench_layernorm(B, T, 768);
        bench_layernorm((B + 1) / 2, T, 1024);
        bench_layernorm((B + 3) / 4, T, 1600);
    }
    if (wanted("gelu")) {
        bench_gelu(B, T, 3072);
        bench_gelu(B, T, 2304);
    }
    if (wanted("embedding")) bench_embedding(B, T, 768, 50257);
    if (wanted("crossentropy")) bench_crossentropy(8192, T, 50257, 50304);
    if (wanted("reduce")) bench_reduce();
    return failures ? 1 : 0;
}
