// Compares matrix products with float64, at even and odd shapes, with every epilogue. Tests the choices of a tuning
// (kernel_test.cuh).
#include "kernel_test.cuh"

#include "cuda/matmul.cuh"

static Matmul *mm;

// If set, cuBLASLt's functions, which the Makefile wraps, answer as on other GPUs.
static bool no_epilogues, no_algorithm_fits;
static int asked;
#define LAYOUTS                                                                                                        \
    cublasLtHandle_t h, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,                 \
        cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d
extern "C" {
decltype(cublasLtMatmulAlgoGetHeuristic) __real_cublasLtMatmulAlgoGetHeuristic;
decltype(cublasLtMatmulAlgoCheck) __real_cublasLtMatmulAlgoCheck;
cublasStatus_t __wrap_cublasLtMatmulAlgoGetHeuristic(LAYOUTS, cublasLtMatmulPreference_t preference, int most,
                                                     cublasLtMatmulHeuristicResult_t *found, int *count) {
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    size_t bytes;
    cublasLtMatmulDescGetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue, &bytes);
    asked++;
    const cublasStatus_t status =
        __real_cublasLtMatmulAlgoGetHeuristic(h, desc, a, b, c, d, preference, most, found, count);
    if (no_epilogues && epilogue != CUBLASLT_EPILOGUE_DEFAULT) *count = 0;
    return status;
}
cublasStatus_t __wrap_cublasLtMatmulAlgoCheck(LAYOUTS, const cublasLtMatmulAlgo_t *x,
                                              cublasLtMatmulHeuristicResult_t *needs) {
    const cublasStatus_t status = __real_cublasLtMatmulAlgoCheck(h, desc, a, b, c, d, x, needs);
    if (no_algorithm_fits) needs->workspaceSize = (size_t)MATMUL_WORKSPACE_BYTES + 1;
    return status;
}
}

struct Operand {
    std::vector<real> host;
    real *device;
};
static Operand operand_new(size_t n) {
    Operand o = {random_vector<real>(n), NULL};
    o.device = device_from(o.host);
    return o;
}

static std::vector<double> product_reference(const MatmulShape &s, const Operand &a, const Operand &b,
                                             const Operand &extra, double before) {
    std::vector<double> out((size_t)s.m * s.n);
    for (int i = 0; i < s.m; i++)
        for (int j = 0; j < s.n; j++) {
            double sum = before;
            for (int k = 0; k < s.k; k++)
                sum += value(a.host[s.transpose_a ? (size_t)k * s.m + i : (size_t)i * s.k + k]) *
                       value(b.host[s.transpose_b ? (size_t)j * s.k + k : (size_t)k * s.n + j]);
            if (s.bias) sum += value(extra.host[j]);
            out[(size_t)i * s.n + j] = sum;
        }
    return out;
}

// Checks that two runs have equal bits and are near the reference. addend: out = a b + bias + c.
template <typename X> static void product_case(const MatmulShape &s, bool addend = false) {
    const size_t n = (size_t)s.m * s.n;
    const float before = s.accumulate && !addend ? 0.5f : 0.0f;
    const Operand a = operand_new((size_t)s.m * s.k), b = operand_new((size_t)s.k * s.n);
    const Operand extra = operand_new(s.n), c = addend ? operand_new(n) : Operand{};
    X *out = device_new<X>(n);
    run_twice(
        "product",
        [&] {
            if (before != 0) device_set(out, std::vector<X>(n, (X)before));
            else CUDA_OK(cudaMemset(out, POISON, n * sizeof(X)));
        },
        [&] {
            CALL_OK(matmul_run(mm, s, {out, a.device, b.device, extra.device, 1, 1, c.device}, &e));
        },
        {{out, n * sizeof(X)}});
    std::vector<double> want = product_reference(s, a, b, extra, before);
    for (size_t i = 0; i < n && addend; i++) want[i] += value(c.host[i]);
    check_close("out", host_from(out, n), want, sizeof(X) == 2 ? 2 * ROUNDING : 1e-5, sizeof(X) == 2 ? 5e-3 : 1e-5);
    case_end();
}

static MatmulShape random_shape(int i) {
    MatmulShape s = {};
    const int unit = i % 3 ? 8 : 1; // rows of a multiple of 16 bytes, or of any length
    s.m = unit * random_int(1, 20), s.n = 8 * random_int(1, 20), s.k = unit * random_int(1, 20);
    if (i % 3 == 0) s.n = random_int(1, 100);
    return s;
}

static void test_products(void) {
    for (int i = 0; i < 24; i++) {
        MatmulShape s = random_shape(i);
        if (i % 4 == 1) s.bias = 1;
        if (i % 4 == 2) s.transpose_b = true;
        product_case<real>(s);
        s.bias = 0;
        s.transpose_a = true, s.transpose_b = false, s.out_float = true, s.accumulate = i % 2;
        product_case<float>(s);
    }
}

static void test_addend(void) {
    for (int i = 0; i < 8; i++) {
        MatmulShape s = random_shape(i);
        s.accumulate = true, s.bias = 1;
        product_case<real>(s, true);
    }
}

// Simulates GPUs: one without cuBLASLt's epilogues, one whose algorithm for 24 products does not fit a single product.
static void test_other_answers(void) {
    no_epilogues = true;
    matmul_tune(mm, false); // forgets the plans
    test_products();
    test_addend();
    CHECK(mm->plan[mm->count - 1].apart, "test_addend's products have their epilogue");
    no_epilogues = false;
    no_algorithm_fits = true, asked = 0;
    product_case<real>({.m = 64,
                        .n = 64,
                        .k = 64,
                        .batch = 1,
                        .stride_a = 4096,
                        .stride_b = 4096,
                        .stride_out = 4096,
                        .like_batch = 24});
    CHECK(asked == 2, "%d questions, though the answer for 24 products does not fit one", asked);
    no_algorithm_fits = false;
    matmul_tune(mm, false);
}

static int choices(void) {
    int count = 0;
    for (const char *c = mm->choices; *c; c++) count += *c == '=';
    return count;
}

// A tuning's choice is stored and read back; a choice that does not fit into the text is dropped.
static void test_tuning(void) {
    Error e = {};
    static char text[MATMUL_CHOICES_BYTES];
    const MatmulShape first = {.m = 256, .n = 192, .k = 128}, second = {.m = 128, .n = 192, .k = 256};
    CHECK(choices() == 0, "%s", mm->choices);
    matmul_tune(mm, true);
    product_case<real>(first);
    CHECK(choices() == 1 && strstr(mm->choices, " 256,192,128,"), "%s", mm->choices);
    memset(mm->choices + strlen(mm->choices), ' ', sizeof mm->choices - strlen(mm->choices) - 20);
    mm->choices[sizeof mm->choices - 20] = 0;
    product_case<real>(second);
    matmul_tune(mm, false);
    CHECK(choices() == 1 && strlen(mm->choices) == sizeof mm->choices - 20, "%s", mm->choices);
    strcpy(text, mm->choices);
    CALL_OK(matmul_choices_load(mm, text, &e));
    product_case<real>(first);
    product_case<real>(second);
    char *sums = strstr(text, " with fp32 sums"); // missing in choices of older builds, which may add in 16 bits
    CHECK((sums != NULL) == (sizeof(real) == 2), "%s", text);
    if (sums) {
        memmove(sums, sums + strlen(" with fp32 sums"), strlen(sums + strlen(" with fp32 sums")) + 1);
        CHECK_ERROR(matmul_choices_load(mm, text, &e), &e, ERR_INPUT, "were tuned for");
    }
    CALL_OK(matmul_choices_load(mm, "", &e));
    CHECK(choices() == 0, "%s", mm->choices);
}

int main(int argc, char **argv) {
    void *workspace;
    kernel_test_begin("test_matmul_cuda", argc, argv);
    CALL_OK(memory_alloc_zero((void **)&mm, sizeof *mm, "matmul plans", &e));
    CUDA_OK(cudaMalloc(&workspace, MATMUL_WORKSPACE_BYTES));
    CALL_OK(matmul_create(mm, workspace, 0, &e));
    RUN(test_products, test_addend, test_other_answers);
    if (!small_shapes_only) RUN(test_tuning);
    matmul_destroy(mm);
    memory_free(mm);
    CUDA_OK(cudaFree(workspace));
    return test_summary();
}
