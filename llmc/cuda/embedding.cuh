// embedding: token plus position embedding; its backward, deterministic because tokens are sorted; norms by example.
//
// tokens (B, T+1) uint16: example b has the inputs tokens[b][0..T-1] and the targets tokens[b][1..T].
#pragma once

#include "cuda/cuda_common.cuh"
#include "cuda/dropout.cuh"

// out (B, T, C) = dropout(wte[token] + wpe[position]); T is drop.T. wte (V, C), wpe (T or more, C).
// first: from embedding_documents, for positions within documents; NULL: positions within examples.
int embedding_forward(real *out, const uint16_t *tokens, const uint16_t *first, const real *wte, const real *wpe,
                      const RowDropout &drop, int B, int C, cudaStream_t stream, Error *e);

// On the host. first[b][t], last[b][t]: where in example b the document of token t begins and ends (inclusive). A
// document begins at a separator and at an example's first token.
void embedding_documents(uint16_t *first, uint16_t *last, const uint16_t *tokens, int separator, int B, int T);

// Flat positions sorted by token, or by position in the document.
typedef struct {
    uint32_t *key; // (B T) token or position, ascending; if by_example, ascending within each example
    uint32_t *row; // (B T) b T + t, ascending among equal keys
} EmbeddingOrder;
static inline EmbeddingOrder embedding_order(uint32_t *sorted, bool by_example, int N) {
    uint32_t *key = sorted + (by_example ? 2 * (size_t)N : 0);
    return {key, key + N};
}

// On the host. sorted (4, B T) = two orders, over all positions and by example. Keys are tokens or, if `tokens` is
// NULL, positions in the document. first NULL: an example is one document. B at most 65536.
void embedding_sort(uint32_t *sorted, const uint16_t *tokens, const uint16_t *first, int B, int T);

// dw[key] (C) fp32 += each row of dx (B, T, C) with this key: wte's gradient if keys are tokens, wpe's if positions.
// order: over all positions, not by example.
int embedding_backward(float *dw, const real *dx, EmbeddingOrder order, int B, int T, int C, void *workspace,
                       cudaStream_t stream, Error *e);

// Per-example norms. wte serves as embedding, with gradient E_b[v] = sum over t with token v of dx_bt, and as head,
// with gradient U_b (V, C): |E_b + U_b|^2 = |E_b|^2 + |U_b|^2 + 2 <E_b, U_b>. This call adds
//   squares += sum over b of |E_b|^2
//   cross   += sum over b of <E_b, U_b>     (not yet doubled)
// UG (B, T, C) fp32: rows of U_b at the example's tokens (embedding_gather, WeightGradient.rows). Only a token's last
// occurrence is read. NULL: no cross term. order: by example. If its keys are positions, `squares` gets wpe's norms.
int embedding_example_squares(double *squares, double *cross, const real *dx, const float *UG, EmbeddingOrder order,
                              int B, int T, int C, void *workspace, cudaStream_t stream, Error *e);

// Bytes of the workspace of embedding_backward and of embedding_example_squares.
size_t embedding_workspace_bytes(int B, int T, int C);

// For one example: UG[t] = U[v] where row_at[v] = t + 1. U (V, C), the head's gradient, and UG (T, C) are fp32.
int embedding_gather(float *UG, const float *U, const int *row_at, int V, int C, cudaStream_t stream, Error *e);

// row_at (E, V) = 1 + a token's last position in the example; 0 if it does not occur.
int embedding_rows(int *row_at, const uint16_t *tokens, int E, int T, int V, cudaStream_t stream, Error *e);
