// embedding: token plus position embedding, its deterministic backward through a sort of the tokens on the device, and
// per-example norms of its gradient.
//
// tokens (B, T+1) uint16: row b holds the inputs tokens[b][0..T-1] and the targets tokens[b][1..T].
#pragma once

#include "cuda/cuda_common.cuh"
#include "cuda/dropout.cuh"

// out (B, T, C) = dropout(wte[token] + wpe[position]); T is drop.T. wte (V, C), wpe (T or more, C).
// first: from embedding_documents; NULL: the position is t.
int embedding_forward(real *out, const uint16_t *tokens, const uint16_t *first, const real *wte, const real *wpe,
                      const RowDropout &drop, int B, int C, cudaStream_t stream, Error *e);

// first, last (B, T): the first and the last token of each token's document in its row. The separator opens a document, and
// so does a row.
int embedding_documents(uint16_t *first, uint16_t *last, const uint16_t *tokens, int separator, int B, int T,
                        cudaStream_t stream, Error *e);

// Flat positions in the order of their token, or of their position in the document.
typedef struct {
    uint32_t *key; // (B T) ascending: the token or position, or example << 16 | it
    uint32_t *row; // (B T) b T + t; ascending among equal keys
} EmbeddingOrder;

// Sorts on the device, by position where first is not NULL. *order points into workspace. by_example: for
// embedding_example_squares.
size_t embedding_sort_workspace_bytes(int B, int T);
int embedding_sort(EmbeddingOrder *order, const uint16_t *tokens, const uint16_t *first, bool by_example, int B, int T,
                   void *workspace, cudaStream_t stream, Error *e);

// dwte (V, C) fp32 += rows of dx by token; dwpe (T, C) fp32 += sum over b of dx. dx (B, T, C).
// order: by_example false. With documents there are two calls, both with dwpe NULL: for wte, and for wpe, whose gradient
// is then passed as dwte, in the order of positions.
size_t embedding_backward_workspace_bytes(int B, int T, int C);
int embedding_backward(float *dwte, float *dwpe, const real *dx, EmbeddingOrder order, int B, int T, int C,
                       void *workspace, cudaStream_t stream, Error *e);

// Per-example norms for the exact noise scale. wte is tied to the head, whose gradient is U_b (V, C), so
// |E_b + U_b|^2 = |E_b|^2 + |U_b|^2 + 2 <E_b, U_b>, E_b[v] the sum over t with token v of dx_bt. This gives
//   token    += sum over b of |E_b|^2
//   cross    += sum over b of <E_b, U_b>     (not yet doubled)
//   position += sum over b of |dwpe_b|^2 = sum over b, t of |dx_bt|^2
// UG (B, T, C) fp32: U_b's rows at the example's tokens (embedding_gather), read where a token occurs for the last time;
// NULL: no cross term. Sums that are NULL are skipped.
// order: by_example true. With documents there are two calls: for wte, and for wpe, whose sum is then passed as `token`, in
// the order of positions.
size_t embedding_example_squares_workspace_bytes(int B, int C);
int embedding_example_squares(double *token, double *cross, double *position, const real *dx, const float *UG,
                              EmbeddingOrder order, int B, int T, int C, void *workspace, cudaStream_t stream,
                              Error *e);

// UG (E, T, C) fp32 = U[e][token(e, t)], U (E, V, C) fp32 the head's per-example gradients, tokens (E, T+1).
int embedding_gather(float *UG, const float *U, const uint16_t *tokens, int E, int T, int V, int C, cudaStream_t stream,
                     Error *e);

// row_at (E, V) = t + 1, t the last position of a token in the example; 0 for the tokens that do not occur.
int embedding_rows(int *row_at, const uint16_t *tokens, int E, int T, int V, cudaStream_t stream, Error *e);
