// layers: the CPU kernels other than matmul and attention, with OpenMP. The order of every sum depends on the shapes
// alone, so any number of threads gives the same bits. `void` arrays hold values of the given type (cpu/value.h).
#pragma once

#include "math/adamw.h"
#include "math/dropout.h"
#include "model/modes.h"

#include <stddef.h>
#include <stdint.h>

enum { PARALLEL_FLOATS = 1 << 13 }; // shorter loops run on one thread, since a parallel region costs microseconds

// x[b][t] = wte[token] + wpe[position]. tokens: (B, stride), but only the first T columns are read. position: (B, T);
// NULL: the position is t.
void embedding_forward(void *x /* (B, T, C) */, const uint16_t *tokens, size_t stride, const uint16_t *position,
                       const void *wte /* (V, C) */, const void *wpe /* (P, C) */, int B, int T, int C, Dtype type);

// dwte[token] += dx, dwpe[position] += dx.
void embedding_backward(float *dwte /* (V, C) */, float *dwpe /* (P, C) */, const void *dx /* (B, T, C) */,
                        const uint16_t *tokens, size_t stride, const uint16_t *position, int B, int T, int C,
                        Dtype type);

// Adds squared norms of one example's embedding gradients. wte serves twice, so an example has two gradients of it: U
// from the output layer, E from the embedding. E[v] is the sum of dx[t] over the t with token v. head_rows[t] =
// U[tokens[t]]. Adds |E|^2 + 2 <E, U> to *wte_sq, where <E, U> is the sum over t of dx[t] . head_rows[t]. Adds |the
// gradient of wpe|^2 to *wpe_sq.
void embedding_example_norms(double *wte_sq, double *wpe_sq, const void *dx /* (T, C) */,
                             const float *head_rows /* (T, C) */, const uint16_t *tokens /* (T) */,
                             const uint16_t *position /* (T) or NULL */, int T, int C, float *scratch /* (C) */,
                             Dtype type);

// y = LayerNorm of N rows of C values (math/layernorm.h). Writes mean and rstd (N) for the backward pass. First adds
// residual (N, C), unless NULL, to x in place.
void layernorm_forward(void *y, float *mean, float *rstd, void *x /* (N, C) */, const void *residual, const void *gamma,
                       const void *beta, int N, int C, Dtype type);

// Backward of y = LN(x) for B examples of T tokens. Adds to dx (B, T, C), dgamma and dbeta (C). Writes each example's
// squared norms, gamma_sq[b] = |dgamma_b|^2 and beta_sq[b] = |dbeta_b|^2. scratch: layernorm_scratch floats; on return
// dgamma_b, then dbeta_b, lie at scratch + b * layernorm_scratch(1, T, C).
void layernorm_backward(void *dx, float *dgamma, float *dbeta, double *gamma_sq, double *beta_sq, const void *dy,
                        const void *x, const float *mean, const float *rstd, const void *gamma, int B, int T, int C,
                        float *scratch, Dtype type);
size_t layernorm_scratch(int B, int T, int C);

// y (n) = gelu(x); y may be x.
void gelu_forward(void *y, const void *x, size_t n, Dtype type);

// dx (n) = dy gelu'(x); dx may be dy.
void gelu_backward(void *dx, const void *dy, const void *x, size_t n, Dtype type);

// Cross-entropy of each row of logits, in nats: nll[i] = -log softmax(logits[i])[target[i]]. Columns from V on are
// padding. loss[i]: cross-entropy with label smoothing (math/loss.h); loss NULL: no smoothing. If gradient is not 0,
// replaces the logits by `gradient` times the loss's gradient, and the padding by 0.
void cross_entropy(float *nll /* (N) */, float *loss /* (N) */, void *logits /* (N, stride) */,
                   const uint16_t *target /* (N) */, int N, int V, int stride, float smoothing, float gradient,
                   Dtype type);

// `to` (B, T, C) = x times dropout's factors, element by element; `to` may be x. d: the dropout of the first example.
void dropout_apply(void *to, const void *x, Dropout d, DropoutPlace place, int B, int T, int C, Dtype type);

enum { DROPOUT_SPAN = 128 }; // columns

// factor (DROPOUT_SPAN) = the factors of columns [first, first + DROPOUT_SPAN). first: a multiple of DROPOUT_SPAN.
void dropout_factors(float *factor, Dropout d, DropoutPlace place, size_t head, size_t row, size_t first);

// Updates n parameters by AdamW (math/adamw.h). rounded: receives the parameters in bf16; may be NULL.
void adamw(float *param, uint16_t *rounded, const float *grad, float *moment1, float *moment2, size_t n,
           const AdamWStep *step, bool decay);

// Raises *amax to the largest |x| of x (n). NaN ranks above all numbers.
void raise_amax(float *amax, const float *x, size_t n);

// Rounds n values to e4m3 with exponent k (math/fp8.h).
void fp8_round_values(float *to, const float *x, size_t n, int k);

// to += low parts of x (rows, in) with exponent k (math/fp8.h); raises amax. channels, amax: of the groups.
void fp8_add_low(float *to, const float *x, size_t rows, size_t in, int group, int k, const int8_t *channels,
                 float *amax);

// sums (columns) = the column sums of x (rows, columns); add: adds them to `sums`.
void sum_columns(float *sums, const float *x, size_t rows, size_t columns, bool add);

// Returns the sum of squares, added up in fp32 within chunks of a fixed size, and in double over the chunks.
double sum_squares(const float *x, size_t n);

// Returns the sum of a[i] b[i], in double.
double dot(const float *a, const float *b, size_t n);

// y += x unless y is NULL; returns |x|^2.
double add_and_sum_squares(float *y, const float *x, size_t n);
