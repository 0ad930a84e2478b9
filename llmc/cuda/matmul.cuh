// matmul: every matrix product of the CUDA engine, by cuBLASLt. All matrices are row-major; bf16 in the BF16 build,
// plain fp32 (no TF32) in the FP32 build; sums are fp32 in both.
//
// The algorithm of a product is a function of its shape and types on a given GPU and library: the first answer of
// cuBLASLt's heuristic, asked once and kept, or the one of its answers that a tuning found to be the fastest. Split sums
// go through the workspace in a fixed order, so that two runs give the same bits.
#ifndef GNS_MATMUL_CUH
#define GNS_MATMUL_CUH

#include "cuda/cuda_common.cuh"
#include "model/cuda_sizes.h"

#include <cublasLt.h>

// What happens to a product on its way to memory. Of cuBLASLt's other epilogues, GELU takes the sum before it is
// rounded, so recomputing it from what was stored would give other bits; and those that sum up bias gradients take
// longer than a kernel of their own (bench: 1.68 ms with against 0.43 + 0.30 without, fcproj at d12).
typedef enum {
    MATMUL_PLAIN,
    MATMUL_BIAS, // + extra (n), a row added to every row of out
    MATMUL_DGELU // x gelu'(extra), extra (m, n), n a multiple of 8
} MatmulEpilogue;

// out (m, n) = op(a) op(b), op(a) (m, k), op(b) (k, n).
typedef struct {
    int m, n, k;
    bool transpose_a; // a is stored (k, m)
    bool transpose_b; // b is stored (n, k)
    bool out_float;   // out is fp32, otherwise real
    bool accumulate;  // out += instead of out =
    MatmulEpilogue epilogue;
    int batch;                              // independent products, one after the other in memory; 0 or 1: a single one
    int64_t stride_a, stride_b, stride_out; // elements from one product to the next
} MatmulShape;

typedef struct {
    MatmulShape shape;
    int align; // bytes that the address of every row is a multiple of: 16, or less
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, out;
    cublasLtMatmulAlgo_t algorithm;
} MatmulPlan;

enum { MATMUL_PLANS_MAX = 512 }; // shapes remembered; a run needs some 20 a row count
enum { MATMUL_ANSWERS_MAX = 16, MATMUL_CHOICES_BYTES = 1 << 14 };

typedef struct {
    cublasLtHandle_t handle;
    void *workspace; // MATMUL_WORKSPACE_BYTES on the device, the caller's
    int count;       // plans in use
    int oldest;      // plan to give up next when all are in use
    MatmulPlan plan[MATMUL_PLANS_MAX];
    bool tuning;                        // time the answers for every new shape
    char identity[320];                 // GPU, precision and library, for which alone a choice holds
    char choices[MATMUL_CHOICES_BYTES]; // what tuning chose: "" or "IDENTITY: SHAPE=ALGORITHM SHAPE=ALGORITHM ..."
} Matmul;

int matmul_create(Matmul *mm, void *workspace, Error *e);
void matmul_destroy(Matmul *mm);

// extra as the epilogue says, NULL otherwise.
int matmul_run(Matmul *mm, const MatmulShape *shape, void *out, const void *a, const void *b, const void *extra,
               cudaStream_t stream, Error *e);

// Forgets all plans. While tuning is on, a shape that has no choice yet is run with each of the heuristic's answers, on
// its own operands (out is written several times), and the fastest is kept.
void matmul_tune(Matmul *mm, bool on);

// Takes over the choices of an earlier tuning, a text from Matmul.choices. ERR_INPUT where they were made on another GPU
// or with another library: then there are none.
int matmul_choices_load(Matmul *mm, const char *choices, Error *e);

#define CUBLAS_TRY(call, e)                                                                                            \
    do {                                                                                                               \
        cublasStatus_t cublas_try_ = (call);                                                                           \
        if (cublas_try_ != CUBLAS_STATUS_SUCCESS)                                                                      \
            return FAIL((e), cublas_try_ == CUBLAS_STATUS_ALLOC_FAILED ? ERR_MEMORY : ERR_INTERNAL, NULL, "%s: %s",    \
                        #call, cublasLtGetStatusString(cublas_try_));                                                  \
    } while (0)

#endif
