#include "cpu/layers.h"

#include "cpu/vector_math.h"
#include "math/layernorm.h"
#include "math/loss.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

// ---- Embedding ------------------------------------------------------------------------------------------------------

void embedding_forward(float *x, const uint16_t *tokens, size_t stride, const float *wte, const float *wpe, int B,
                       int T, int C) {
#pragma omp parallel for collapse(2) if ((size_t)B * T * C > PARALLEL_FLOATS)
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) {
            float *out = x + ((size_t)b * T + t) * C;
            const float *te = wte + (size_t)tokens[b * stride + t] * C, *pe = wpe + (size_t)t * C;
            for (int c = 0; c < C; c++) out[c] = te[c] + pe[c];
        }
}

// Threads share the channels, not the rows: so the rows of a token are added in the same order on any number of threads.
void embedding_backward(float *dwte, float *dwpe, const float *dx, const uint16_t *tokens, size_t stride, int B, int T,
                        int C) {
    const int block = 32; // channels
#pragma omp parallel for schedule(static) if ((size_t)B * T * C > PARALLEL_FLOATS)
    for (int c0 = 0; c0 < C; c0 += block) {
        int c1 = c0 + block < C ? c0 + block : C;
        for (int b = 0; b < B; b++)
            for (int t = 0; t < T; t++) {
                const float *d = dx + ((size_t)b * T + t) * C;
                float *te = dwte + (size_t)tokens[b * stride + t] * C, *pe = dwpe + (size_t)t * C;
                for (int c = c0; c < c1; c++) te[c] += d[c], pe[c] += d[c];
            }
    }
}

static double dot(const float *a, const float *b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)a[i] * b[i];
    return sum;
}

EmbeddingNorms embedding_example_norms(const float *dx, const float *head_rows, const uint16_t *tokens, int T, int C,
                                       float *scratch) {
    EmbeddingNorms norms = {0, 0, 0};
    for (int t = 0; t < T; t++) {
        const float *d = dx + (size_t)t * C;
        norms.position_sq += dot(d, d, C);
        norms.cross += dot(d, head_rows + (size_t)t * C, C);
        // where a token v first occurs, add |E[v]|^2, E[v] over all its occurrences
        bool seen = false;
        for (int s = 0; s < t && !seen; s++) seen = tokens[s] == tokens[t];
        if (seen) continue;
        memset(scratch, 0, sizeof(float) * (size_t)C);
        for (int s = t; s < T; s++)
            if (tokens[s] == tokens[t])
                for (int c = 0; c < C; c++) scratch[c] += dx[(size_t)s * C + c];
        norms.embedding_sq += dot(scratch, scratch, C);
    }
    return norms;
}

// ---- LayerNorm ------------------------------------------------------------------------------------------------------

// Sums over a row with 16 running sums, so that they vectorise in a fixed order.
enum { LANES = 16 };

static float lanes_sum(const float *lane) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += lane[i];
    return sum;
}

static float row_sum(const float *x, int C) {
    float lane[LANES] = {0};
    int c = 0;
    for (; c + LANES <= C; c += LANES)
        for (int i = 0; i < LANES; i++) lane[i] += x[c + i];
    for (; c < C; c++) lane[0] += x[c];
    return lanes_sum(lane);
}

static float row_variance_sum(const float *x, float mean, int C) {
    float lane[LANES] = {0};
    int c = 0;
    for (; c + LANES <= C; c += LANES)
        for (int i = 0; i < LANES; i++) lane[i] = add_square(lane[i], x[c + i] - mean);
    for (; c < C; c++) lane[0] = add_square(lane[0], x[c] - mean);
    return lanes_sum(lane);
}

void layernorm_forward(float *y, float *mean, float *rstd, float *x, const float *residual, const float *gamma,
                       const float *beta, int N, int C) {
#pragma omp parallel for schedule(static) if ((size_t)N * C > PARALLEL_FLOATS)
    for (int i = 0; i < N; i++) {
        float *xi = x + (size_t)i * C, *yi = y + (size_t)i * C;
        if (residual)
            for (int c = 0; c < C; c++) xi[c] += residual[(size_t)i * C + c];
        float m = row_sum(xi, C) / (float)C;
        float s = layernorm_rstd(row_variance_sum(xi, m, C), C);
        for (int c = 0; c < C; c++) yi[c] = layernorm_y(layernorm_xhat(xi[c], m, s), gamma[c], beta[c]);
        mean[i] = m;
        rstd[i] = s;
    }
}

enum { LN_ROWS = 64 }; // rows whose dgamma and dbeta one thread sums before the ordered second stage

static int row_blocks(int T) { return (T + LN_ROWS - 1) / LN_ROWS; }

size_t layernorm_scratch(int B, int T, int C) { return (size_t)B * row_blocks(T) * 2 * C; }

// One row: adds to dx, dgamma and dbeta.
static void layernorm_backward_row(float *dx, float *dgamma, float *dbeta, const float *dy, const float *x, float mean,
                                   float rstd, const float *gamma, int C) {
    float lane_g[LANES] = {0}, lane_gx[LANES] = {0};
    int c = 0;
    for (; c + LANES <= C; c += LANES)
        for (int i = 0; i < LANES; i++) {
            float xhat = layernorm_xhat(x[c + i], mean, rstd);
            lane_g[i] += dy[c + i] * gamma[c + i];
            layernorm_add(&lane_gx[i], &dgamma[c + i], &dbeta[c + i], dy[c + i], gamma[c + i], xhat);
        }
    for (; c < C; c++) {
        float xhat = layernorm_xhat(x[c], mean, rstd);
        lane_g[0] += dy[c] * gamma[c];
        layernorm_add(&lane_gx[0], &dgamma[c], &dbeta[c], dy[c], gamma[c], xhat);
    }
    float mean_g = lanes_sum(lane_g) / (float)C, mean_gx = lanes_sum(lane_gx) / (float)C;
    for (c = 0; c < C; c++)
        dx[c] += layernorm_dx(dy[c], gamma[c], layernorm_xhat(x[c], mean, rstd), rstd, mean_g, mean_gx);
}

void layernorm_backward(float *dx, float *dgamma, float *dbeta, double *gamma_sq, double *beta_sq, const float *dy,
                        const float *x, const float *mean, const float *rstd, const float *gamma, int B, int T, int C,
                        float *scratch) {
    int blocks = row_blocks(T);
#pragma omp parallel if ((size_t)B * T * C > PARALLEL_FLOATS)
    {
        // 1: sums of every block of rows -> scratch (B, blocks, 2, C)
#pragma omp for schedule(static)
        for (int i = 0; i < B * blocks; i++) {
            float *part = scratch + (size_t)i * 2 * C;
            memset(part, 0, sizeof(float) * 2 * (size_t)C);
            int first = i % blocks * LN_ROWS, end = first + LN_ROWS < T ? first + LN_ROWS : T;
            for (int t = first; t < end; t++) {
                size_t row = (size_t)(i / blocks) * T + t;
                layernorm_backward_row(dx + row * C, part, part + C, dy + row * C, x + row * C, mean[row], rstd[row],
                                       gamma, C);
            }
        }
        // 2: adds an example's blocks to its first, in order: the example's gradient, and its norm
#pragma omp for schedule(static)
        for (int b = 0; b < B; b++) {
            float *sum = scratch + (size_t)b * blocks * 2 * C;
            for (int k = 1; k < blocks; k++)
                for (int c = 0; c < 2 * C; c++) sum[c] += sum[(size_t)k * 2 * C + c];
            gamma_sq[b] = dot(sum, sum, C);
            beta_sq[b] = dot(sum + C, sum + C, C);
        }
        // 3: the examples, in order; threads share the channels
#pragma omp for schedule(static)
        for (int c = 0; c < C; c++)
            for (int b = 0; b < B; b++) {
                const float *sum = scratch + (size_t)b * blocks * 2 * C;
                dgamma[c] += sum[c];
                dbeta[c] += sum[C + c];
            }
    }
}

// ---- GELU -----------------------------------------------------------------------------------------------------------

enum { GELU_PARALLEL = 1 << 14 }; // floats that are worth a second thread

void gelu_forward(float *y, const float *x, size_t n) {
    size_t whole = n / VEC * VEC;
#pragma omp parallel for schedule(static) if (n >= GELU_PARALLEL)
    for (size_t i = 0; i < whole; i += VEC) vec_store(y + i, vec_gelu(vec_load(x + i)));
    vec_store_part(y + whole, vec_gelu(vec_load_part(x + whole, n - whole)), n - whole);
}

void gelu_backward(float *dx, const float *dy, const float *x, size_t n) {
    size_t whole = n / VEC * VEC, rest = n - whole;
#pragma omp parallel for schedule(static) if (n >= GELU_PARALLEL)
    for (size_t i = 0; i < whole; i += VEC) vec_store(dx + i, vec_load(dy + i) * vec_gelu_derivative(vec_load(x + i)));
    Vec dy_rest = vec_load_part(dy + whole, rest), x_rest = vec_load_part(x + whole, rest);
    vec_store_part(dx + whole, dy_rest * vec_gelu_derivative(x_rest), rest);
}

// ---- Cross-entropy --------------------------------------------------------------------------------------------------

static float row_max(const float *x, int n) {
    Vec v = vec_set(x[0]);
    int c = 0;
    for (; c + VEC <= n; c += VEC) v = vec_max(vec_load(x + c), v);
    float max = vec_largest(v);
    for (; c < n; c++) max = x[c] > max ? x[c] : max;
    return max;
}

// Turns a row into exp(row - max); returns the sum.
static float row_exp(float *row, float max, int n) {
    Vec sum = {0};
    int c = 0;
    for (; c + VEC <= n; c += VEC) {
        Vec y = vec_exp(vec_load(row + c) - max);
        vec_store(row + c, y);
        sum += y;
    }
    float total = 0;
    for (; c < n; c++) total += row[c] = expf(row[c] - max);
    for (int i = 0; i < VEC; i++) total += sum[i];
    return total;
}

void cross_entropy(float *loss, float *logits, const uint16_t *target, int N, int V, int stride, float gradient) {
#pragma omp parallel for schedule(static) if ((size_t)N * V > PARALLEL_FLOATS)
    for (int i = 0; i < N; i++) {
        float *row = logits + (size_t)i * stride;
        float max = row_max(row, V), at_target = row[target[i]];
        float sum = row_exp(row, max, V);
        loss[i] = loss_at(loss_logsumexp(max, sum), at_target);
        if (gradient == 0) continue;
        float scale = gradient / sum;
        for (int v = 0; v < V; v++) row[v] *= scale;
        row[target[i]] = loss_gradient_at_target(row[target[i]], gradient);
        memset(row + V, 0, sizeof(float) * (size_t)(stride - V));
    }
}

// ---- Sums -----------------------------------------------------------------------------------------------------------

enum { SUM_CHUNK = 1 << 12 }; // floats: long enough to vectorise, short enough that fp32 lanes lose nothing

static double chunk_squares(const float *x, size_t n) {
    float lane[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++) lane[k] = add_square(lane[k], x[i + k]);
    double sum = 0;
    for (; i < n; i++) sum += (double)x[i] * x[i];
    for (int k = 0; k < LANES; k++) sum += lane[k];
    return sum;
}

enum { BLOCK_CHUNKS = 512 }; // whose sums are kept, to be added in order

// Adds x to y unless y is NULL; returns |x|^2.
static double add_and_sum_blocks(float *y, const float *x, size_t n) {
    double partial[BLOCK_CHUNKS], total = 0;
    for (size_t begin = 0; begin < n; begin += (size_t)BLOCK_CHUNKS * SUM_CHUNK) {
        size_t left = n - begin, chunks = (left + SUM_CHUNK - 1) / SUM_CHUNK;
        if (chunks > BLOCK_CHUNKS) chunks = BLOCK_CHUNKS;
#pragma omp parallel for schedule(static) if (chunks > 4)
        for (size_t k = 0; k < chunks; k++) {
            size_t first = begin + k * SUM_CHUNK, count = n - first < SUM_CHUNK ? n - first : SUM_CHUNK;
            if (y)
                for (size_t i = first; i < first + count; i++) y[i] += x[i];
            partial[k] = chunk_squares(x + first, count);
        }
        for (size_t k = 0; k < chunks; k++) total += partial[k];
    }
    return total;
}

double sum_squares(const float *x, size_t n) { return add_and_sum_blocks(NULL, x, n); }

double add_and_sum_squares(float *y, const float *x, size_t n) { return add_and_sum_blocks(y, x, n); }
