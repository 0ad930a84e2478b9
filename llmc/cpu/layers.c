#include "cpu/layers.h"

#include "cpu/value.h"
#include "math/fp8.h"
#include "math/layernorm.h"
#include "math/loss.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>
#ifdef __aarch64__
#    include <arm_neon.h>
#endif

// ---- Embedding ------------------------------------------------------------------------------------------------------

void embedding_forward(void *x, const uint16_t *tokens, size_t stride, const uint16_t *position, const void *wte,
                       const void *wpe, int B, int T, int C, Dtype type) {
#pragma omp parallel for collapse(2) if ((size_t)B * T * C > PARALLEL_FLOATS)
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) {
            size_t row = (size_t)b * T + t;
            void *out = value_at(x, row * C, type);
            const void *te = value_at(wte, (size_t)tokens[b * stride + t] * C, type);
            const void *pe = value_at(wpe, (size_t)(position ? position[row] : t) * C, type);
            BY_TYPE(type, for (int c = 0; c < C; c++)
                              value_set(out, c, value_get(te, c, TYPE) + value_get(pe, c, TYPE), TYPE));
        }
}

// Threads divide the channels, so the order in which rows are added does not depend on the number of threads.
void embedding_backward(float *dwte, float *dwpe, const void *dx, const uint16_t *tokens, size_t stride,
                        const uint16_t *position, int B, int T, int C, Dtype type) {
    const int block = 32; // channels
#pragma omp parallel for schedule(static) if ((size_t)B * T * C > PARALLEL_FLOATS)
    for (int c0 = 0; c0 < C; c0 += block) {
        int c1 = c0 + block < C ? c0 + block : C;
        for (int b = 0; b < B; b++)
            for (int t = 0; t < T; t++) {
                size_t row = (size_t)b * T + t;
                const void *d = value_at(dx, row * C, type);
                float *te = dwte + (size_t)tokens[b * stride + t] * C;
                float *pe = dwpe + (size_t)(position ? position[row] : t) * C;
                BY_TYPE(
                    type, for (int c = c0; c < c1; c++) {
                        te[c] += value_get(d, c, TYPE);
                        pe[c] += value_get(d, c, TYPE);
                    });
            }
    }
}

double dot(const float *a, const float *b, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)a[i] * b[i];
    return sum;
}

// Returns the sum of |S[k]|^2 over the keys k that occur. S[k] is the sum of dx[t] over all t with key k. key NULL: the
// key of t is t.
static double gathered_squares(const void *dx, const uint16_t *key, int T, int C, float *scratch, Dtype type) {
    double squares = 0;
    for (int t = 0; t < T; t++) {
        bool seen = false;
        for (int s = 0; s < t && key && !seen; s++) seen = key[s] == key[t];
        if (seen) continue;
        memset(scratch, 0, sizeof(float) * (size_t)C);
        for (int s = t; s < (key ? T : t + 1); s++)
            if (!key || key[s] == key[t])
                for (int c = 0; c < C; c++) scratch[c] += value_get(dx, (size_t)s * C + c, type);
        squares += dot(scratch, scratch, C);
    }
    return squares;
}

void embedding_example_norms(double *wte_sq, double *wpe_sq, const void *dx, const float *head_rows,
                             const uint16_t *tokens, const uint16_t *position, int T, int C, float *scratch,
                             Dtype type) {
    double cross = 0;
    for (int t = 0; t < T; t++) {
        double sum = 0;
        for (int c = 0; c < C; c++)
            sum += (double)value_get(dx, (size_t)t * C + c, type) * head_rows[(size_t)t * C + c];
        cross += sum;
    }
    *wte_sq += gathered_squares(dx, tokens, T, C, scratch, type) + 2 * cross;
    *wpe_sq += gathered_squares(dx, position, T, C, scratch, type);
}

// ---- LayerNorm ------------------------------------------------------------------------------------------------------

// A row is summed in LANES partial sums, which vectorise and fix the order of the sum.
enum { LANES = 16 };

static float lanes_sum(const float *lane) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += lane[i];
    return sum;
}

VECTOR_INLINE float add_term(float sum, float x, const bool squares) { return squares ? add_square(sum, x) : sum + x; }

// Returns the sum over a row of (x - mean)^2 if `squares`, else of x - mean.
VECTOR_INLINE float row_sum(const void *x, float mean, const bool squares, int C, const Dtype type) {
    float lane[LANES] = {0};
    int c = 0;
    for (; c + LANES <= C; c += LANES)
        for (int i = 0; i < LANES; i++) lane[i] = add_term(lane[i], value_get(x, c + i, type) - mean, squares);
    for (; c < C; c++) lane[0] = add_term(lane[0], value_get(x, c, type) - mean, squares);
    return lanes_sum(lane);
}

// Computes one row of layernorm_forward; residual may be NULL.
VECTOR_INLINE void layernorm_row(void *y, float *mean, float *rstd, void *x, const void *residual, const void *gamma,
                                 const void *beta, int C, const Dtype type) {
    if (residual)
        for (int c = 0; c < C; c++) value_set(x, c, value_get(x, c, type) + value_get(residual, c, type), type);
    float m = row_sum(x, 0, false, C, type) / (float)C;
    float s = layernorm_rstd(row_sum(x, m, true, C, type), C);
    for (int c = 0; c < C; c++) {
        float xhat = layernorm_xhat(value_get(x, c, type), m, s);
        value_set(y, c, layernorm_y(xhat, value_get(gamma, c, type), value_get(beta, c, type)), type);
    }
    *mean = m;
    *rstd = s;
}

void layernorm_forward(void *y, float *mean, float *rstd, void *x, const void *residual, const void *gamma,
                       const void *beta, int N, int C, Dtype type) {
#pragma omp parallel for schedule(static) if ((size_t)N * C > PARALLEL_FLOATS)
    for (int i = 0; i < N; i++) {
        size_t at = (size_t)i * C;
        void *xi = value_at(x, at, type), *yi = value_at(y, at, type);
        const void *ri = residual ? value_at(residual, at, type) : NULL;
        BY_TYPE(type, layernorm_row(yi, &mean[i], &rstd[i], xi, ri, gamma, beta, C, TYPE));
    }
}

enum { LN_ROWS = 64 }; // rows of a block; one thread sums a block's dgamma and dbeta

static int row_blocks(int T) { return (T + LN_ROWS - 1) / LN_ROWS; }

size_t layernorm_scratch(int B, int T, int C) { return (size_t)B * row_blocks(T) * 2 * C; }

// Adds one row's gradients to dx, dgamma and dbeta.
VECTOR_INLINE void layernorm_backward_row(void *dx, float *dgamma, float *dbeta, const void *dy, const void *x,
                                          float mean, float rstd, const void *gamma, int C, const Dtype type) {
    float lane_g[LANES] = {0}, lane_gx[LANES] = {0};
    int c = 0;
    for (; c + LANES <= C; c += LANES)
        for (int i = 0; i < LANES; i++) {
            float xhat = layernorm_xhat(value_get(x, c + i, type), mean, rstd);
            float d = value_get(dy, c + i, type), g = value_get(gamma, c + i, type);
            lane_g[i] += d * g;
            layernorm_add(&lane_gx[i], &dgamma[c + i], &dbeta[c + i], d, g, xhat);
        }
    for (; c < C; c++) {
        float xhat = layernorm_xhat(value_get(x, c, type), mean, rstd);
        float d = value_get(dy, c, type), g = value_get(gamma, c, type);
        lane_g[0] += d * g;
        layernorm_add(&lane_gx[0], &dgamma[c], &dbeta[c], d, g, xhat);
    }
    float mean_g = lanes_sum(lane_g) / (float)C, mean_gx = lanes_sum(lane_gx) / (float)C;
    for (c = 0; c < C; c++) {
        float xhat = layernorm_xhat(value_get(x, c, type), mean, rstd);
        float d = layernorm_dx(value_get(dy, c, type), value_get(gamma, c, type), xhat, rstd, mean_g, mean_gx);
        value_set(dx, c, value_get(dx, c, type) + d, type);
    }
}

void layernorm_backward(void *dx, float *dgamma, float *dbeta, double *gamma_sq, double *beta_sq, const void *dy,
                        const void *x, const float *mean, const float *rstd, const void *gamma, int B, int T, int C,
                        float *scratch, Dtype type) {
    int blocks = row_blocks(T);
#pragma omp parallel if ((size_t)B * T * C > PARALLEL_FLOATS)
    {
        // 1: write the sums of each block of rows to scratch (B, blocks, 2, C)
#pragma omp for schedule(static)
        for (int i = 0; i < B * blocks; i++) {
            float *part = scratch + (size_t)i * 2 * C;
            memset(part, 0, sizeof(float) * 2 * (size_t)C);
            int first = i % blocks * LN_ROWS, end = first + LN_ROWS < T ? first + LN_ROWS : T;
            for (int t = first; t < end; t++) {
                size_t row = (size_t)(i / blocks) * T + t, at = row * C;
                void *dxi = value_at(dx, at, type);
                const void *dyi = value_at(dy, at, type), *xi = value_at(x, at, type);
                BY_TYPE(type,
                        layernorm_backward_row(dxi, part, part + C, dyi, xi, mean[row], rstd[row], gamma, C, TYPE));
            }
        }
        // 2: add an example's later blocks to its first, in order. The first block then holds the example's gradient.
        // Compute both squared norms of this gradient.
#pragma omp for schedule(static)
        for (int b = 0; b < B; b++) {
            float *sum = scratch + (size_t)b * blocks * 2 * C;
            for (int k = 1; k < blocks; k++)
                for (int c = 0; c < 2 * C; c++) sum[c] += sum[(size_t)k * 2 * C + c];
            gamma_sq[b] = dot(sum, sum, C);
            beta_sq[b] = dot(sum + C, sum + C, C);
        }
        // 3: add up the examples, in order; threads divide the channels
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

void gelu_forward(void *y, const void *x, size_t n, Dtype type) {
    const size_t whole = n / VEC * VEC;
#pragma omp parallel for schedule(static) if (n > PARALLEL_FLOATS)
    for (size_t i = 0; i < whole; i += VEC) BY_TYPE(type, value_store(y, i, vec_gelu(value_load(x, i, TYPE)), TYPE));
    for (size_t i = whole; i < n; i++) value_set(y, i, vec_gelu(vec_set(value_get(x, i, type)))[0], type);
}

void gelu_backward(void *dx, const void *dy, const void *x, size_t n, Dtype type) {
    const size_t whole = n / VEC * VEC;
#pragma omp parallel for schedule(static) if (n > PARALLEL_FLOATS)
    for (size_t i = 0; i < whole; i += VEC)
        BY_TYPE(type, value_store(dx, i, value_load(dy, i, TYPE) * vec_gelu_derivative(value_load(x, i, TYPE)), TYPE));
    for (size_t i = whole; i < n; i++)
        value_set(dx, i, value_get(dy, i, type) * vec_gelu_derivative(vec_set(value_get(x, i, type)))[0], type);
}

// ---- Cross-entropy --------------------------------------------------------------------------------------------------

// Replaces a row by exp(row - max). Returns the sum.
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

static void cross_entropy_row(float *nll, float *loss, float *row, int target, int V, float smoothing, float gradient,
                              Dtype type) {
    float max = largest(row, (size_t)V), at_target = row[target];
    float mean = loss ? row_sum(row, 0, false, V, DTYPE_FP32) / (float)V : 0;
    float sum = row_exp(row, max, V);
    *nll = loss_logsumexp(max, sum) - at_target;
    if (loss) *loss = loss_smoothed(*nll, at_target, mean, smoothing);
    if (gradient == 0) return;
    float scale = gradient / sum, less = loss ? gradient * smoothing / (float)V : 0;
    float p = (type == DTYPE_FP32 ? row[target] : expf(at_target - max)) * scale;
    for (int v = 0; v < V; v++) row[v] = row[v] * scale - less;
    row[target] = p - gradient * (1 - smoothing) - less;
}

void cross_entropy(float *nll, float *loss, void *logits, const uint16_t *target, int N, int V, int stride,
                   float smoothing, float gradient, Dtype type) {
    const bool widens = type == DTYPE_BF16; // to fp32, so that only the result is rounded
#pragma omp parallel for schedule(static) if ((size_t)N * V > PARALLEL_FLOATS)
    for (int i = 0; i < N; i++) {
        void *values = value_at(logits, (size_t)i * stride, type);
        float wide[widens ? V : 1], *row = widens ? wide : values;
        if (widens) scale_values(wide, 0, DTYPE_FP32, values, 0, DTYPE_BF16, V, 1);
        cross_entropy_row(&nll[i], loss ? &loss[i] : NULL, row, target[i], V, smoothing, gradient, type);
        if (gradient == 0) continue;
        if (widens) scale_values(values, 0, DTYPE_BF16, wide, 0, DTYPE_FP32, V, 1);
        memset(value_at(values, V, type), 0, value_bytes(type) * (size_t)(stride - V));
    }
}

// ---- Dropout (math/dropout.h), a span of a row at a time ------------------------------------------------------------

// VEC / 2 products of 64 bits, or words of 32 bits whose upper halves are ignored.
typedef uint64_t Wide __attribute__((vector_size(VEC * 4), may_alias));

// Multiplies the lower halves, 32 x 32 -> 64 bits. Intrinsics, since GCC compiles no plain C to this instruction.
VECTOR_INLINE Wide multiply_low(Wide x, uint32_t by) {
    Wide factor = (Wide){0} + by;
#if defined(__AVX512F__)
    return (Wide)_mm512_mul_epu32((__m512i)x, (__m512i)factor);
#elif defined(__AVX2__)
    return (Wide)_mm256_mul_epu32((__m256i)x, (__m256i)factor);
#elif defined(__SSE2__) && !defined(__AVX__)
    return (Wide)_mm_mul_epu32((__m128i)x, (__m128i)factor);
#elif defined(__aarch64__)
    return (Wide)vmull_u32(vmovn_u64((uint64x2_t)x), vmovn_u64((uint64x2_t)factor));
#else
    return (x & 0xffffffff) * factor;
#endif
}

// Writes Philox's four words for LANES blocks of math/dropout.h: (r, k), (r, k + 1), ... Computes rng_rounds
// (math/rng.h) of VEC / 2 counters at once.
static void blocks_of(uint32_t words[4][LANES], Dropout d, DropoutPlace place, uint32_t head, uint32_t r, uint32_t k) {
    const RngBlock counter = dropout_counter(d, place, head, r, k);
#pragma GCC unroll 4 // independent chains, which hide latency
    for (uint32_t first = 0; first < LANES; first += VEC / 2) {
        uint32_t key0 = (uint32_t)d.seed, key1 = (uint32_t)(d.seed >> 32);
        Wide word[4], block = {0};
        for (uint32_t i = 0; i < VEC / 2; i++) block[i] = first + i;
        for (int w = 0; w < 4; w++) word[w] = (w == 0 ? block : (Wide){0}) + counter.word[w];
        for (int round = 0; round < DROPOUT_ROUNDS; round++) {
            Wide p0 = multiply_low(word[0], 0xD2511F53u), p1 = multiply_low(word[2], 0xCD9E8D57u);
            word[0] = p1 >> 32 ^ word[1] ^ key0;
            word[1] = p1;
            word[2] = p0 >> 32 ^ word[3] ^ key1;
            word[3] = p0;
            key0 += 0x9E3779B9u;
            key1 += 0xBB67AE85u;
        }
        for (int w = 0; w < 4; w++)
            for (uint32_t i = 0; i < VEC / 2; i++) words[w][first + i] = (uint32_t)word[w][i];
    }
}

void dropout_factors(float *factor, Dropout d, DropoutPlace place, size_t head, size_t row, size_t first) {
    const float scale = dropout_scale(d);
    uint32_t words[4][LANES], pairs[DROPOUT_SPAN / 2]; // pairs[i]: bits of columns 2i and 2i + 1
    if (place == DROPOUT_PROBABILITY) {
        for (size_t part = 0; part < 2; part++) { // part: 4 tiles of 16 columns; i: a half tile
            blocks_of(words, d, place, (uint32_t)head, (uint32_t)(row / 16 * 8 + row % 8),
                      (uint32_t)(first / 4 + part * LANES));
            for (size_t i = 0; i < 8; i++)
                memcpy(pairs + part * 32 + 4 * i, words[i % 2 * 2 + row / 8 % 2] + i / 2 * 4, 4 * sizeof *pairs);
        }
    } else {
        blocks_of(words, d, place, (uint32_t)head, (uint32_t)row, (uint32_t)(first / 8));
        for (size_t i = 0; i < DROPOUT_SPAN / 2; i++) pairs[i] = words[i % 4][i / 4];
    }
    for (size_t i = 0; i < DROPOUT_SPAN / 2; i++) {
        factor[2 * i] = (pairs[i] & DROPOUT_BITS) < d.below ? 0 : scale;
        factor[2 * i + 1] = (pairs[i] >> 16 & DROPOUT_BITS) < d.below ? 0 : scale;
    }
}

VECTOR_INLINE void multiply_row(void *to, const void *x, size_t at, const float *factor, size_t n, const Dtype type) {
#pragma omp simd
    for (size_t i = 0; i < n; i++) value_set(to, at + i, value_get(x, at + i, type) * factor[i], type);
}

void dropout_apply(void *to, const void *x, Dropout d, DropoutPlace place, int B, int T, int C, Dtype type) {
#pragma omp parallel for schedule(static) if ((size_t)B * T * C > PARALLEL_FLOATS)
    for (int i = 0; i < B * T; i++) {
        const Dropout of_row = dropout_at(d, d.example + (uint64_t)(i / T), d.layer);
        float factor[DROPOUT_SPAN];
        for (size_t c = 0, n = (size_t)C; c < n; c += DROPOUT_SPAN) {
            dropout_factors(factor, of_row, place, 0, (size_t)(i % T), c);
            size_t at = (size_t)i * n + c, columns = n - c < DROPOUT_SPAN ? n - c : DROPOUT_SPAN;
            BY_TYPE(type, multiply_row(to, x, at, factor, columns, TYPE));
        }
    }
}

// ---- AdamW ----------------------------------------------------------------------------------------------------------

enum { ADAMW_RUN = 64, ADAMW_AHEAD = 512, LINE_FLOATS = 16 }; // floats in a run; prefetched ahead; in a cache line

VECTOR_INLINE void adamw_run(float *param, uint16_t *rounded, const float *grad, float *moment1, float *moment2,
                             size_t n, const AdamWStep *step, bool decay) {
#pragma omp simd
    for (size_t i = 0; i < n; i++) param[i] = adamw_update(param[i], grad[i], &moment1[i], &moment2[i], step, decay);
    if (!rounded) return;
#pragma omp simd
    for (size_t i = 0; i < n; i++) rounded[i] = f32_to_bf16(param[i]);
}

void adamw(float *param, uint16_t *rounded, const float *grad, float *moment1, float *moment2, size_t n,
           const AdamWStep *step, bool decay) {
#pragma omp parallel for schedule(static) if (n > PARALLEL_FLOATS)
    for (size_t i = 0; i < n; i += ADAMW_RUN) {
        for (size_t k = i + ADAMW_AHEAD; k < i + ADAMW_AHEAD + ADAMW_RUN; k += LINE_FLOATS) {
            __builtin_prefetch(param + k, 1), __builtin_prefetch(grad + k);
            __builtin_prefetch(moment1 + k, 1), __builtin_prefetch(moment2 + k, 1);
        }
        uint16_t *to = rounded ? rounded + i : NULL;
        if (i + ADAMW_RUN <= n) adamw_run(param + i, to, grad + i, moment1 + i, moment2 + i, ADAMW_RUN, step, decay);
        else adamw_run(param + i, to, grad + i, moment1 + i, moment2 + i, n - i, step, decay);
    }
}

// ---- Rounding to e4m3 (math/fp8.h) ----------------------------------------------------------------------------------

void raise_amax(float *amax, const float *x, size_t n) {
    uint32_t most; // bits of |x|, which as integers have the order of |x|
    memcpy(&most, amax, sizeof most);
#pragma omp parallel for simd schedule(static) reduction(max : most) if (n > PARALLEL_FLOATS)
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= INT32_MAX;
        most = bits > most ? bits : most;
    }
    memcpy(amax, &most, sizeof most);
}

void fp8_round_values(float *to, const float *x, size_t n, int k) {
    const float scale = ldexpf(1, k), unscale = ldexpf(1, -k);
#pragma omp parallel for simd schedule(static) if (n > PARALLEL_FLOATS)
    for (size_t i = 0; i < n; i++) to[i] = fp8_round(x[i] * scale) * unscale;
}

void fp8_add_low(float *to, const float *x, size_t rows, size_t in, int group, int k, const int8_t *channels,
                 float *amax) {
    const float scale = ldexpf(1, k), unscale = ldexpf(1, -k);
#pragma omp parallel for schedule(static) if (rows * in > PARALLEL_FLOATS)
    for (int g = 0; g < fp8_group_count(group, (int)in); g++) {
        const size_t first = (size_t)(g * group), channel = first + (size_t)fp8_channel(channels[g], group);
        uint32_t most;
        memcpy(&most, amax + g, sizeof most);
        for (size_t i = channel; i < rows * in; i += in) to[i] += fp8_round((x[i] - to[i]) * scale) * unscale;
        for (size_t r = 0; r < rows; r += FP8_LOW_ROWS)
            for (int c = 0; c < group; c++) {
                const uint32_t candidate = fp8_candidate(x[r * in + first + (size_t)c], c);
                most = candidate > most ? candidate : most;
            }
        memcpy(amax + g, &most, sizeof most);
    }
}

// ---- Sums -----------------------------------------------------------------------------------------------------------

void sum_columns(float *sums, const float *x, size_t rows, size_t columns, bool add) {
    if (!add) memset(sums, 0, sizeof *sums * columns);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++) sums[c] += x[r * columns + c];
}

enum { SUM_CHUNK = 1 << 12 }; // floats: long enough to vectorise, short enough to sum in fp32
enum { SUM_AHEAD = 1024 };    // floats prefetched ahead

static double chunk_squares(const float *x, size_t n) {
    float lane[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __builtin_prefetch(x + i + SUM_AHEAD);
        for (int k = 0; k < LANES; k++) lane[k] = add_square(lane[k], x[i + k]);
    }
    double sum = 0;
    for (; i < n; i++) sum += (double)x[i] * x[i];
    for (int k = 0; k < LANES; k++) sum += lane[k];
    return sum;
}

enum { BLOCK_CHUNKS = 512 }; // chunks summed in parallel; their sums are then added in order

double add_and_sum_squares(float *y, const float *x, size_t n) {
    double partial[BLOCK_CHUNKS], total = 0;
    for (size_t begin = 0; begin < n; begin += (size_t)BLOCK_CHUNKS * SUM_CHUNK) {
        size_t chunks = size_min((n - begin + SUM_CHUNK - 1) / SUM_CHUNK, BLOCK_CHUNKS);
#pragma omp parallel for schedule(static) if (chunks > 4)
        for (size_t k = 0; k < chunks; k++) {
            size_t first = begin + k * SUM_CHUNK, count = size_min(n - first, SUM_CHUNK);
            for (size_t i = first; i < first + count && y; i++) y[i] += x[i];
            partial[k] = chunk_squares(x + first, count);
        }
        for (size_t k = 0; k < chunks; k++) total += partial[k];
    }
    return total;
}

double sum_squares(const float *x, size_t n) { return add_and_sum_squares(NULL, x, n); }
