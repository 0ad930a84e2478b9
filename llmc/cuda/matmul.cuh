// matmul: matrix products by cuBLASLt. Matrices are row-major, in 16 bits, or plain fp32 (no TF32) in the FP32 build;
// sums are fp32.
//
// GPU, library, shape and types determine a product's algorithm: the first answer of cuBLASLt's heuristic or, after
// tuning, the fastest answer. Split-K sums go through the workspace in a fixed order, so two runs give the same bits.
#pragma once

#include "cuda/cuda_common.cuh"
#include "model/cuda_sizes.h"

#include <cublasLt.h>

// out (m, n) = op(a) op(b), op(a) (m, k), op(b) (k, n).
struct MatmulShape {
    int m = 0, n = 0, k = 0;
    bool transpose_a = false;                           // a is stored (k, m)
    bool transpose_b = false;                           // b is stored (n, k)
    bool out_float = false;                             // out is fp32, otherwise real
    bool accumulate = false;                            // adds c (MatmulOperands), by default the old out
    int bias = 0;                                       // 1: adds MatmulOperands.bias (n) to every row of out
    int batch = 0;                                      // number of products; 0: a single one
    int64_t stride_a = 0, stride_b = 0, stride_out = 0; // elements from one product to the next
    // Use the algorithm for a batch of this size, so that a product has the same bits in any batch. 0: use `batch`.
    int64_t like_batch = 0;
};

typedef struct {
    MatmulShape shape;
    int align; // alignment of every row's address in bytes, at most 16
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t a, b, out;
    cublasLtMatmulAlgo_t algorithm;
    bool apart; // bias_kernel adds the bias, because cuBLASLt has no algorithm that does
} MatmulPlan;

// Limits: plans in Matmul (a run needs about 20 per number of rows), answers to time, bytes of Matmul.choices.
enum { MATMUL_PLANS_MAX = 512, MATMUL_ANSWERS_MAX = 16, MATMUL_CHOICES_BYTES = 1 << 14 };

typedef struct {
    cublasLtHandle_t handle;
    cudaStream_t stream; // runs all products
    void *workspace;     // MATMUL_WORKSPACE_BYTES on the device, owned by the caller
    int count;           // number of plans
    MatmulPlan plan[MATMUL_PLANS_MAX];
    cudaEvent_t start, stop;            // around a timed product
    bool tuning;                        // time the answers for every new shape
    bool heated;                        // timing has heated the card
    char identity[320];                 // GPU, precision and library for which `choices` holds
    char choices[MATMUL_CHOICES_BYTES]; // text of a tuning: "" or "IDENTITY: SHAPE=ALGORITHM SHAPE=ALGORITHM ..."
} Matmul;

int matmul_create(Matmul *mm, void *workspace, cudaStream_t stream, Error *e);
void matmul_destroy(Matmul *mm);

// out = alpha op(a) op(b) + beta c + bias
struct MatmulOperands {
    void *out;
    const void *a, *b;
    const void *bias = NULL; // read if shape.bias
    float alpha = 1, beta = 1;
    const void *c = NULL; // (m, n) in out's type; NULL: out itself. Read if shape.accumulate
};
int matmul_run(Matmul *mm, const MatmulShape &shape, const MatmulOperands &operands, Error *e);

// Turns tuning on or off and forgets all plans. Tuning times the heuristic's answers for a new shape, on the product's
// own operands, and keeps the fastest: about a second per shape. Once the text of choices is full, further shapes keep
// the heuristic's first answer.
void matmul_tune(Matmul *mm, bool on);

// Restores a tuning from the text of Matmul.choices. If another GPU or library made the text: ERR_INPUT, no choices.
int matmul_choices_load(Matmul *mm, const char *choices, Error *e);

static inline int cublas_status(cublasStatus_t status, const char *call, const char *file, int line, Error *e) {
    if (status == CUBLAS_STATUS_SUCCESS) return 0;
    return error_set(e, file, line, status == CUBLAS_STATUS_ALLOC_FAILED ? ERR_MEMORY : ERR_INTERNAL, NULL, "%s: %s",
                     call, cublasLtGetStatusString(status));
}
#define CUBLAS_CALL(call, e) cublas_status((call), #call, __FILE__, __LINE__, (e))
