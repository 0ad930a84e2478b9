// matmul: see matmul.cuh.
#include "cuda/matmul.cuh"

#include "cuda/vec.cuh"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <type_traits>

int matmul_create(Matmul *mm, void *workspace, cudaStream_t stream, Error *e) {
    cudaDeviceProp properties;
    int device;
    *mm = {};
    mm->workspace = workspace;
    mm->stream = stream;
    CUDA_TRY(cudaGetDevice(&device), e);
    CUDA_TRY(cudaGetDeviceProperties(&properties, device), e);
    // "with fp32 sums" rejects the choices of older builds, whose split-K sums could be in 16 bits.
    const char *sums = sizeof(real) == 2 ? " with fp32 sums" : "";
    snprintf(mm->identity, sizeof mm->identity, "%s with %d multiprocessors, %s%s, cuBLASLt %zu", properties.name,
             properties.multiProcessorCount, REAL_NAME, sums, cublasLtGetVersion());
    CUDA_TRY(cudaEventCreate(&mm->start), e);
    CUDA_TRY(cudaEventCreate(&mm->stop), e);
    return CUBLAS_CALL(cublasLtCreate(&mm->handle), e);
}

void matmul_destroy(Matmul *mm) {
    if (mm->handle) cublasLtDestroy(mm->handle);
    if (mm->stop) cudaEventDestroy(mm->stop);
    if (mm->start) cudaEventDestroy(mm->start);
}

static int layout_count(cublasLtMatrixLayoutOpaque_t *layout, int batch, Error *e) {
    const auto count = CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
    return CUBLAS_CALL(cublasLtMatrixLayoutSetAttribute(layout, count, &batch, sizeof batch), e);
}

// Describes a row-major matrix (rows, columns), which cuBLAS reads as its column-major transpose.
static int matrix_layout(cublasLtMatrixLayoutOpaque_t *out, bool is_float, int rows, int columns, int batch,
                         int64_t stride, Error *e) {
    const auto offset = CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
    const cudaDataType_t type = is_float ? CUDA_R_32F : REAL_LIBRARY;
    TRY(CUBLAS_CALL(cublasLtMatrixLayoutInit(out, type, columns, rows, columns), e));
    if (batch <= 1) return 0;
    TRY(layout_count(out, batch, e));
    return CUBLAS_CALL(cublasLtMatrixLayoutSetAttribute(out, offset, &stride, sizeof stride), e);
}

template <typename X>
static int operation_set(MatmulPlan *plan, cublasLtMatmulDescAttributes_t attribute, X value, Error *e) {
    return CUBLAS_CALL(cublasLtMatmulDescSetAttribute(&plan->operation, attribute, &value, sizeof value), e);
}

// out^T = op(b)^T op(a)^T: cuBLAS's column-major A is our b, its B our a.
static int operation_create(MatmulPlan *plan, Error *e) {
    const MatmulShape *s = &plan->shape;
    const cublasOperation_t op_a = s->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_b = s->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    TRY(CUBLAS_CALL(cublasLtMatmulDescInit(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), e));
    TRY(operation_set(plan, CUBLASLT_MATMUL_DESC_TRANSA, op_a, e));
    TRY(operation_set(plan, CUBLASLT_MATMUL_DESC_TRANSB, op_b, e));
    const bool bias = s->bias && !plan->apart;
    return operation_set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT,
                         e);
}

static int plan_point(MatmulPlan *plan, const void *bias, Error *e) {
    if (plan->apart || !plan->shape.bias) return 0;
    return operation_set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias, e);
}

// Asks cuBLASLt for at most `most` algorithms, best first by its estimate.
static int plan_ask(Matmul *mm, MatmulPlan *plan, int most, cublasLtMatmulHeuristicResult_t *found, int *count,
                    Error *e) {
    const MatmulShape *s = &plan->shape;
    const size_t workspace_bytes = MATMUL_WORKSPACE_BYTES;
    const bool wide = s->out_float || sizeof(real) == 4; // unless wide, demand split-K sums in fp32
    const uint32_t sums = wide ? CUBLASLT_REDUCTION_SCHEME_MASK : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasLtMatmulPreferenceOpaque_t preference;
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, auto value) {
        return CUBLAS_CALL(cublasLtMatmulPreferenceSetAttribute(&preference, name, &value, sizeof value), e);
    };
    TRY(CUBLAS_CALL(cublasLtMatmulPreferenceInit(&preference), e));
    TRY(prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes));
    TRY(prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, sums));
    for (auto side : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        TRY(prefer(side, (uint32_t)plan->align));
    *count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        mm->handle, &plan->operation, &plan->a, &plan->b, &plan->out, &plan->out, &preference, most, found, count);
    if (status != CUBLAS_STATUS_SUCCESS || *count < 1)
        return FAIL(e, ERR_INTERNAL, NULL, "cuBLASLt has no algorithm for a (%d, %d, %d) product, bias %d: %s", s->m,
                    s->n, s->k, s->bias, cublasLtGetStatusString(status));
    return 0;
}

static cublasStatus_t plan_launch(Matmul *mm, MatmulPlan *plan, const cublasLtMatmulAlgo_t *algorithm,
                                  const MatmulOperands *o) {
    return cublasLtMatmul(mm->handle, &plan->operation, &o->alpha, o->b, &plan->a, o->a, &plan->b, &o->beta, o->c,
                          &plan->out, o->out, &plan->out, algorithm, mm->workspace, MATMUL_WORKSPACE_BYTES, mm->stream);
}

// ---- Tuning ---------------------------------------------------------------------------------------------------------
//
// Training runs at the card's power limit, where a product that needs less energy gets a higher clock after 50 to
// 100 ms. A first look picks finalists. They then run in turn on a hot card, each long enough to reach its own clock.

enum { TUNE_FINALISTS = 4, TUNE_ROUNDS = 2, TUNE_RUNS_MAX = 1000 };
static const float TUNE_HEAT_MS = 200, TUNE_SETTLE_MS = 80, TUNE_TIMED_MS = 70;
static const float TUNE_SLOW = 1.1f;  // on a cool card: drop answers slower than the fastest by this factor
static const float TUNE_TIE = 0.995f; // on a hot card: an answer in less than this share of answer 0's time wins

// *out = mean milliseconds per run, timed for about `ms` milliseconds, after untimed runs for `settle` milliseconds;
// infinite if the algorithm does not run. each: estimated milliseconds per run.
static int plan_time(Matmul *mm, MatmulPlan *plan, const cublasLtMatmulAlgo_t *algorithm, const MatmulOperands *o,
                     float each, float settle, float ms, float *out, Error *e) {
    const int before = (int)fminf(ceilf(settle / each), TUNE_RUNS_MAX);
    const int timed = (int)fminf(ceilf(ms / each), TUNE_RUNS_MAX);
    *out = INFINITY;
    for (int i = 0; i < before + timed; i++) {
        if (i == before) CUDA_TRY(cudaEventRecord(mm->start, mm->stream), e);
        if (plan_launch(mm, plan, algorithm, o) != CUBLAS_STATUS_SUCCESS) return 0;
    }
    CUDA_TRY(cudaEventRecord(mm->stop, mm->stream), e);
    CUDA_TRY(cudaEventSynchronize(mm->stop), e);
    CUDA_TRY(cudaEventElapsedTime(out, mm->start, mm->stop), e);
    *out /= timed;
    return 0;
}

// *fastest = index of the answer to keep: 0, the heuristic's first, unless another is faster by more than noise.
// Finalists: at most TUNE_FINALISTS answers within TUNE_SLOW of the fastest on a cool card, answer 0 before others.
static int plan_fastest(Matmul *mm, MatmulPlan *plan, const cublasLtMatmulHeuristicResult_t *found, int count,
                        const MatmulOperands *o, int *fastest, Error *e) {
    float cool[MATMUL_ANSWERS_MAX], hot[MATMUL_ANSWERS_MAX] = {}, best = INFINITY, ms; // INFINITY: dropped
    int finalists = 0;
    *fastest = 0;
    for (int i = 0; i < count; i++) {
        TRY(plan_time(mm, plan, &found[i].algo, o, 1, 1, 1, &cool[i], e)); // one run to warm up, one timed
        if (!isinf(cool[i])) TRY(plan_time(mm, plan, &found[i].algo, o, 1, 0, 4, &cool[i], e));
        best = fminf(best, cool[i]);
    }
    for (int i = 0; i < count && !isinf(best); i++) {
        int faster = 0; // number of faster answers, except answer 0, whose place is reserved
        for (int k = 1; k < count; k++) faster += cool[k] < cool[i] || (cool[k] == cool[i] && k < i);
        if (cool[i] > TUNE_SLOW * best || (i > 0 && faster >= TUNE_FINALISTS - (cool[0] <= TUNE_SLOW * best)))
            hot[i] = INFINITY;
        finalists += !isinf(hot[i]);
    }
    for (int turn = 0; finalists > 1 && turn < TUNE_ROUNDS * count; turn++) {
        const int i = turn % count;
        if (isinf(hot[i])) continue;
        TRY(plan_time(mm, plan, &found[i].algo, o, cool[i], mm->heated ? TUNE_SETTLE_MS : TUNE_HEAT_MS, TUNE_TIMED_MS,
                      &ms, e));
        mm->heated = true;
        hot[i] += ms;
    }
    for (int i = 1; i < count; i++)
        if (hot[i] < hot[*fastest] * (*fastest == 0 ? TUNE_TIE : 1.0f)) *fastest = i;
    return 0;
}

// ---- Choices as text ------------------------------------------------------------------------------------------------

enum { SHAPE_KEY_BYTES = 128, ALGORITHM_WORDS = sizeof(cublasLtMatmulAlgo_t) / sizeof(uint64_t) };

// Appends a choice: the algorithm's words in hexadecimal, separated by dots. Returns false if the text is full.
static bool choice_write(Matmul *mm, const char *key, const cublasLtMatmulAlgo_t *algorithm) {
    char text[SHAPE_KEY_BYTES + 17 * ALGORITHM_WORDS];
    size_t n = (size_t)snprintf(text, sizeof text, "%s", key), used = strlen(mm->choices);
    for (int i = 0; i < ALGORITHM_WORDS; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, i ? ".%llx" : "%llx", (unsigned long long)algorithm->data[i]);
    if (!used) used = (size_t)snprintf(mm->choices, sizeof mm->choices, "%s:", mm->identity);
    if (used + n >= sizeof mm->choices) return false;
    strcpy(mm->choices + used, text);
    return true;
}

// True if cuBLASLt can run the plan with this algorithm.
static bool plan_runs(Matmul *mm, MatmulPlan *plan, const cublasLtMatmulAlgo_t *algorithm) {
    cublasLtMatmulHeuristicResult_t needs;
    return cublasLtMatmulAlgoCheck(mm->handle, &plan->operation, &plan->a, &plan->b, &plan->out, &plan->out, algorithm,
                                   &needs) == CUBLAS_STATUS_SUCCESS &&
           needs.workspaceSize <= MATMUL_WORKSPACE_BYTES;
}

// Reads the algorithm that follows a key. Fails unless cuBLASLt accepts it for the plan.
static int choice_read(Matmul *mm, MatmulPlan *plan, const char *text, cublasLtMatmulAlgo_t *algorithm, Error *e) {
    const char *bad = NULL;
    for (int i = 0; i < ALGORITHM_WORDS && !bad; i++) {
        char *end;
        algorithm->data[i] = strtoull(text, &end, 16);
        if (end == text || (i + 1 < ALGORITHM_WORDS && *end != '.')) bad = text;
        text = end + 1;
    }
    if (!bad && plan_runs(mm, plan, algorithm)) return 0;
    return FAIL(e, ERR_INPUT, "resume from another checkpoint",
                "the record of tuned matrix products is damaged: no algorithm for a (%d, %d, %d) product",
                plan->shape.m, plan->shape.n, plan->shape.k);
}

// Sets the plan's algorithm: from mm->choices, else by tuning if mm->tuning, else the heuristic's first answer.
static int plan_choose(Matmul *mm, MatmulPlan *plan, const MatmulOperands *o, Error *e) {
    const MatmulShape *s = &plan->shape;
    char key[SHAPE_KEY_BYTES]; // " m,n,k,flags,bias,batch,alignment="
    cublasLtMatmulHeuristicResult_t found[MATMUL_ANSWERS_MAX];
    int count, fastest = 0;
    snprintf(key, sizeof key, " %d,%d,%d,%d%d%d%d,%d,%d,%d=", s->m, s->n, s->k, s->transpose_a, s->transpose_b,
             s->out_float, s->accumulate, s->bias, s->batch, plan->align);
    const char *chosen = strstr(mm->choices, key);
    if (chosen) return choice_read(mm, plan, chosen + strlen(key), &plan->algorithm, e);
    TRY(plan_ask(mm, plan, mm->tuning ? (int)MATMUL_ANSWERS_MAX : 1, found, &count, e));
    if (mm->tuning) {
        TRY(plan_fastest(mm, plan, found, count, o, &fastest, e));
        if (!choice_write(mm, key, &found[fastest].algo)) fastest = 0; // not stored, so a resumed run uses answer 0
    }
    plan->algorithm = found[fastest].algo;
    return 0;
}

static int plan_create(Matmul *mm, MatmulPlan *plan, const MatmulOperands *o, Error *e) {
    const MatmulShape *s = &plan->shape;
    TRY(operation_create(plan, e));
    int a_rows = s->transpose_a ? s->k : s->m, b_rows = s->transpose_b ? s->n : s->k;
    int batch = s->like_batch ? (int)s->like_batch : s->batch;
    TRY(matrix_layout(&plan->a, false, b_rows, s->transpose_b ? s->k : s->n, batch, s->stride_b, e));
    TRY(matrix_layout(&plan->b, false, a_rows, s->transpose_a ? s->m : s->k, batch, s->stride_a, e));
    TRY(matrix_layout(&plan->out, s->out_float, s->m, s->n, batch, s->stride_out, e));
    TRY(plan_point(plan, o->bias, e));
    cublasLtMatmulHeuristicResult_t found;
    Error none;
    int count;
    plan->apart = s->bias && plan_ask(mm, plan, 1, &found, &count, &none);
    if (plan->apart) TRY(operation_create(plan, e)); // changing only the epilogue makes launches fail
    TRY(plan_choose(mm, plan, o, e));
    if (!s->like_batch) return 0;
    for (auto *layout : {&plan->a, &plan->b, &plan->out}) TRY(layout_count(layout, s->batch, e));
    if (plan_runs(mm, plan, &plan->algorithm)) return 0;
    TRY(plan_ask(mm, plan, 1, &found, &count, e)); // for this batch: bits may differ from those of like_batch
    plan->algorithm = found.algo;
    return 0;
}

// Adds a bias (n) to a stored product. Grid: any.
__global__ static void bias_kernel(real *out, const real *bias, size_t count, int n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        out[i] = (real)((float)out[i] + (float)bias[i % n]);
}

static_assert(std::has_unique_object_representations_v<MatmulShape>, "shapes are compared byte by byte");
// Finds or creates the plan of a shape. A full table is emptied first.
static int plan_get(Matmul *mm, MatmulPlan **out, const MatmulShape *shape, int align, const MatmulOperands *o,
                    Error *e) {
    for (int i = 0; i < mm->count; i++)
        if (mm->plan[i].align == align && memcmp(&mm->plan[i].shape, shape, sizeof *shape) == 0) {
            *out = &mm->plan[i];
            return 0;
        }
    if (mm->count == MATMUL_PLANS_MAX) mm->count = 0;
    *out = &mm->plan[mm->count];
    **out = {*shape, align};
    TRY(plan_create(mm, *out, o, e));
    mm->count++;
    return 0;
}

int matmul_run(Matmul *mm, const MatmulShape &s, const MatmulOperands &operands, Error *e) {
    MatmulOperands o = operands;
    if (!o.c) o.c = o.out;
    if (!s.accumulate) o.beta = 0;
    const size_t out_bytes = s.out_float ? sizeof(float) : sizeof(real);
    // Alignment: the largest power of two, at most 16 (fast kernels need no more), that divides every row's address.
    uintptr_t bits = (uintptr_t)o.out | (uintptr_t)o.c | (uintptr_t)o.a | (uintptr_t)o.b | 16;
    bits |= (uintptr_t)(s.n * out_bytes) | (uintptr_t)((s.transpose_a ? s.m : s.k) * sizeof(real)) |
            (uintptr_t)((s.transpose_b ? s.k : s.n) * sizeof(real));
    bits |= (uintptr_t)(s.stride_out * out_bytes) | (uintptr_t)((s.stride_a | s.stride_b) * sizeof(real));
    MatmulPlan *plan;
    TRY(plan_get(mm, &plan, &s, (int)(bits & (~bits + 1)), &o, e));
    TRY(plan_point(plan, o.bias, e));
    TRY(CUBLAS_CALL(plan_launch(mm, plan, &plan->algorithm, &o), e));
    if (!plan->apart) return 0;
    return launch({1024, 256, mm->stream}, e, bias_kernel, (real *)o.out, (const real *)o.bias, (size_t)s.m * s.n, s.n);
}

void matmul_tune(Matmul *mm, bool on) {
    mm->count = 0;
    mm->tuning = on;
    mm->heated = false;
}

int matmul_choices_load(Matmul *mm, const char *choices, Error *e) {
    size_t identity = strlen(mm->identity);
    mm->count = 0;
    mm->choices[0] = 0;
    if (!*choices) return 0;
    if (strncmp(choices, mm->identity, identity) != 0 || choices[identity] != ':')
        return FAIL(e, ERR_INPUT, NULL, "matrix products were tuned for %.*s, and this is %s",
                    (int)strcspn(choices, ":"), choices, mm->identity);
    if (strlen(choices) >= sizeof mm->choices)
        return FAIL(e, ERR_INPUT, NULL, "the record of tuned matrix products is too long");
    strcpy(mm->choices, choices);
    return 0;
}
