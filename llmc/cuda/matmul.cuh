// matmul: every matrix product of the CUDA engine, by cuBLASLt. All matrices are row-major; of 16 bits, or
// plain fp32 (no TF32) in the FP32 build; sums are fp32 in all.
//
// The algorithm of a product is a function of its shape and types on a given GPU and library: the first answer of
// cuBLASLt's heuristic, or, after tuning, the fastest of its answers. Split-K sums go through the workspace in a
// fixed order: two runs give the same bits.
#pragma once

#include "cuda/cuda_common.cuh"
#include "model/cuda_sizes.h"

#include <cublasLt.h>

// What is done to a product before it is stored. cuBLASLt's other epilogues are not used: GELU takes the sum before
// rounding, so that recomputing it from the stored value would give other bits; those that sum bias gradients take longer
// than a separate kernel (fcproj at d12: 1.68 ms with, 0.43 + 0.30 without).
typedef enum {
    MATMUL_PLAIN,
    MATMUL_BIAS, // + extra (n), a row added to every row of out
    MATMUL_DGELU // x gelu'(extra), extra (m, n), n a multiple of 8
} MatmulEpilogue;

// out (m, n) = op(a) op(b), op(a) (m, k), op(b) (k, n).
struct MatmulShape {
    int m = 0, n = 0, k = 0;
    bool transpose_a = false; // a is stored (k, m)
    bool transpose_b = false; // b is stored (n, k)
    bool out_float = false;   // out is fp32, otherwise real
    bool accumulate = false;  // out += instead of out =
    MatmulEpilogue epilogue = MATMUL_PLAIN;
    int batch = 0;                                      // products, one after the other in memory; 0: a single one
    int64_t stride_a = 0, stride_b = 0, stride_out = 0; // elements from one product to the next
    // Take the algorithm for a batch of this many, so that a product has the same bits in any batch; 0: for `batch`.
    int64_t like_batch = 0;
};

typedef struct {
    MatmulShape shape;
    int align; // bytes that the address of every row is a multiple of: 16, or less
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, out;
    cublasLtMatmulAlgo_t algorithm;
    bool apart; // cuBLASLt has no algorithm with this epilogue here: a kernel of its own follows
} MatmulPlan;

// Plans kept (a run needs about 20 for each number of rows); answers of the heuristic that tuning times.
enum { MATMUL_PLANS_MAX = 512, MATMUL_ANSWERS_MAX = 16, MATMUL_CHOICES_BYTES = 1 << 14 };

typedef struct {
    cublasLtHandle_t handle;
    cudaStream_t stream; // of all products
    void *workspace;     // MATMUL_WORKSPACE_BYTES on the device, the caller's
    int count;           // plans in use
    MatmulPlan plan[MATMUL_PLANS_MAX];
    cudaEvent_t start, stop;            // of a timed product
    bool tuning;                        // time the answers for every new shape
    bool heated;                        // the card is hot from timing
    char identity[320];                 // GPU, precision, sums and library for which choices hold
    char choices[MATMUL_CHOICES_BYTES]; // what tuning chose: "" or "IDENTITY: SHAPE=ALGORITHM SHAPE=ALGORITHM ..."
} Matmul;

int matmul_create(Matmul *mm, void *workspace, cudaStream_t stream, Error *e);
void matmul_destroy(Matmul *mm);

// extra: see the epilogue; NULL where that has none.
int matmul_run(Matmul *mm, const MatmulShape &shape, void *out, const void *a, const void *b, const void *extra,
               Error *e);

// out = alpha op(a) op(b) + beta c, with c like out, which it may be, and extra. shape: accumulate, no DGELU.
typedef struct {
    float beta;
    const void *c;
} MatmulAddend;
int matmul_add(Matmul *mm, const MatmulShape &shape, void *out, MatmulAddend addend, float alpha, const void *a,
               const void *b, const void *extra, Error *e);

// Forgets all plans. While tuning is on, a shape without a choice is run with each of the heuristic's answers, on its own
// operands (out is written many times), and the fastest on a hot card is kept: about a second a shape. Where the text of
// choices is full, the heuristic's first is kept.
void matmul_tune(Matmul *mm, bool on);

// Restores the choices of an earlier tuning, a text from Matmul.choices. ERR_INPUT where they were made on another GPU
// or with another library: then there are none.
int matmul_choices_load(Matmul *mm, const char *choices, Error *e);

// A cuBLASLt call's status as an error code.
static inline int cublas_status(cublasStatus_t status, const char *call, const char *file, int line, Error *e) {
    if (status == CUBLAS_STATUS_SUCCESS) return 0;
    return error_set(e, file, line, status == CUBLAS_STATUS_ALLOC_FAILED ? ERR_MEMORY : ERR_INTERNAL, NULL, "%s: %s",
                     call, cublasLtGetStatusString(status));
}
#define CUBLAS_CALL(call, e) cublas_status((call), #call, __FILE__, __LINE__, (e))
