// matmul: the fp32 matrix products of GPT-2, blocked and packed, on all threads of a workspace.
//
// Every product is one general product C (M,N) = A (M,K) B (K,N) on strided operands (matmul_general). The six products
// below it name what the model needs: forward, dinput and dweight, once for a Conv1D weight (in, out) and once for the
// tied head, whose weight is wte (V, C). All matrices are dense and row-major; none may overlap.
//
// Determinism: an element's sum runs over k in ascending order in blocks whose length depends on K alone; so the bits
// of a result depend neither on the thread count nor on M and N.
#ifndef GNS_CPU_MATMUL_H
#define GNS_CPU_MATMUL_H

#include "base/common.h"

// Packing buffers, made once. A workspace serves one product at a time.
typedef struct Matmul Matmul;

int matmul_create(Matmul **out, int threads, Error *e);
void matmul_free(Matmul *mm);     // NULL is fine
size_t matmul_bytes(int threads); // what matmul_create allocates

// Conv1D: weight (K, N) = (in, out).
// y (M,N) = x (M,K) w (K,N) + bias (N), which may be NULL
void matmul_forward(Matmul *mm, float *y, const float *x, const float *w, const float *bias, size_t M, size_t K,
                    size_t N);
// dx (M,K) = dy (M,N) w^T, or += with accumulate
void matmul_dinput(Matmul *mm, float *dx, const float *dy, const float *w, size_t M, size_t K, size_t N,
                   bool accumulate);
// dw (K,N) = x^T dy and dbias (N) = column sums of dy, or += with accumulate; dbias may be NULL
void matmul_dweight(Matmul *mm, float *dw, float *dbias, const float *x, const float *dy, size_t M, size_t K, size_t N,
                    bool accumulate);

// The tied head: weight wte (V, C).
// logits (M,V) = x (M,C) wte^T
void matmul_head_forward(Matmul *mm, float *logits, const float *x, const float *wte, size_t M, size_t C, size_t V);
// dx (M,C) = dlogits (M,V) wte, or +=
void matmul_head_dinput(Matmul *mm, float *dx, const float *dlogits, const float *wte, size_t M, size_t C, size_t V,
                        bool accumulate);
// dwte (V,C) = dlogits^T x, or +=
void matmul_head_dweight(Matmul *mm, float *dwte, const float *dlogits, const float *x, size_t M, size_t C, size_t V,
                         bool accumulate);

// An operand: element (i, j) lies at data[i * row + j * column]; one of the two strides is 1.
typedef struct {
    const float *data;
    size_t row, column; // strides in floats
} MatmulOperand;

// What becomes of C (M,N), rows c_row floats apart.
typedef struct {
    float *data;
    size_t row;
    const float *bias;  // (N), added to every row; or NULL
    bool accumulate;    // C += A B instead of C = A B; the same for column_sums
    float *column_sums; // (N), of B over k; or NULL. B's column stride must then be 1
} MatmulResult;

void matmul_general(Matmul *mm, MatmulResult c, MatmulOperand a, MatmulOperand b, size_t M, size_t N, size_t K);

// The same, plainly, summed in double: what the tests compare with.
void matmul_reference(MatmulResult c, MatmulOperand a, MatmulOperand b, size_t M, size_t N, size_t K);

#endif
