// bench_cpu: compares the CPU kernels with the machine's fused-multiply-add peak, measured in the same run.
//
//     bench_cpu [threads (all) [rounds (5) [name [type (fp32)]]]]   name: only cases whose names contain it;
//                                                                   type: fp32 or bf16
//
// The bf16 peak is measured with products of panels in the first-level cache. Every figure is the best of its rounds. A
// round runs every case once, so a busy moment of the machine does not slow all measurements of one kernel. A kernel's
// roofline (Williams et al. 2009) is the longer of two times: its operations at the peak, and its bytes at a copy's
// speed. Each operand's bytes count once. The last table adds up a step of GPT-2 124M, B 4, T 64. With -DHAVE_OPENBLAS
// (and -lopenblas) OpenBLAS also runs each product. A pause lets idle threads end their spinning, which would slow the
// products of OpenBLAS or of this program.
#include "base/common.h"
#include "cpu/attention.h"
#include "cpu/calibrate.h"
#include "cpu/layers.h"
#include "cpu/matmul_kernel.h"
#include "cpu/value.h"
#include "math/adamw.h"
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#ifdef HAVE_OPENBLAS
#    include <cblas.h>
void openblas_set_num_threads(int threads);
char *openblas_get_corename(void);
#endif

enum { EXAMPLES = 4, PASS_FLOATS = 50304 * 768 / 4 }; // LayerNorm's examples; floats in a pass over parameters
enum { ROUNDS = 5, MAX_ROWS = 64, PAUSE_NANOSECONDS = 200 * 1000 * 1000 };
static const double MIN_SECONDS = 0.02; // a measurement repeats its work for at least this long

typedef struct {
    int threads;
    Matmul matmul;
    Attention attention;
    Dtype type;
    float *x, *y, *w, *g; // operands, each large enough for every case; in the run's type, but gradients in fp32
    float *rows;          // the layers' statistics, gradients of weights, and scratch
    uint16_t *targets;
    double sum;
    double peak, copy; // GFLOP/s and GB/s of all threads
} Bench;

// s = {M, N, K} of the forward product y (M,N) = x (M,K) w (K,N); the head's w is wte (N,K).
static void run_forward(Bench *b, size_t s[3]) { matmul_nn(b->matmul, b->y, b->x, b->w, b->g, s[0], s[1], s[2]); }
static void run_dinput(Bench *b, size_t s[3]) { matmul_nt(b->matmul, b->x, b->y, b->w, s[0], s[2], s[1]); }
static void run_dweight(Bench *b, size_t s[3]) { matmul_tn(b->matmul, b->w, b->g, b->x, b->y, s[2], s[1], s[0], true); }
static void run_head_forward(Bench *b, size_t s[3]) { matmul_nt(b->matmul, b->y, b->x, b->w, s[0], s[1], s[2]); }
static void run_head_dinput(Bench *b, size_t s[3]) { matmul_nn(b->matmul, b->x, b->y, b->w, NULL, s[0], s[2], s[1]); }
static void run_head_dweight(Bench *b, size_t s[3]) {
    matmul_tn(b->matmul, b->w, NULL, b->y, b->x, s[1], s[2], s[0], true);
}

// Attention cases: {B, T, NH * 1000 + D}.
static void run_attention_forward(Bench *b, size_t s[3]) {
    attention_forward(&b->attention, b->y, b->g, b->x, s[0], s[1], 0, s[2] / 1000, s[2] % 1000);
}
static void run_attention_backward(Bench *b, size_t s[3]) {
    attention_backward(&b->attention, b->w, b->y, b->x, b->y, b->g, s[0], s[1], s[2] / 1000, s[2] % 1000);
}

static void run_gelu_forward(Bench *b, size_t s[3]) { gelu_forward(b->y, b->x, s[0] * s[1], b->type); }
static void run_gelu_backward(Bench *b, size_t s[3]) { gelu_backward(b->w, b->y, b->x, s[0] * s[1], b->type); }

// Layers' cases: {rows, columns}.
static void run_layernorm_forward(Bench *b, size_t s[3]) {
    layernorm_forward(b->y, b->rows, b->rows + s[0], b->x, NULL, b->g, b->g, (int)s[0], (int)s[1], b->type);
}
static void run_layernorm_backward(Bench *b, size_t s[3]) {
    double sq[2 * EXAMPLES];
    float *dgamma = b->rows + 2 * s[0], *scratch = dgamma + 2 * s[1];
    layernorm_backward(b->w, dgamma, dgamma + s[1], sq, sq + EXAMPLES, b->y, b->x, b->rows, b->rows + s[0], b->g,
                       EXAMPLES, (int)s[0] / EXAMPLES, (int)s[1], scratch, b->type);
}
static void run_cross_entropy(Bench *b, size_t s[3]) { // the gradients of one call are the logits of the next call
    cross_entropy(b->rows, NULL, b->y, b->targets, (int)s[0], (int)s[1], (int)s[1], 0, 1, b->type);
}
static void run_norms(Bench *b, size_t s[3]) { b->sum = sum_squares(b->w, s[0]); }
static void run_adamw(Bench *b, size_t s[3]) {
    const AdamWStep step = adamw_step(1e-3, 0.9, 0.95, 1e-8, 0.1, 10, 1e-3);
    float *param = b->w, *grad = param + s[0], *m = grad + s[0], *v = m + s[0];
    adamw(param, NULL, grad, m, v, s[0], &step, true);
}

#ifdef HAVE_OPENBLAS
static void run_blas_forward(Bench *b, size_t s[3]) {
    int M = (int)s[0], N = (int)s[1], K = (int)s[2];
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, M, N, K, 1, b->x, K, b->w, N, 0, b->y, N);
}
static void run_blas_dinput(Bench *b, size_t s[3]) {
    int M = (int)s[0], N = (int)s[1], K = (int)s[2];
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, M, K, N, 1, b->y, N, b->w, N, 0, b->x, K);
}
static void run_blas_dweight(Bench *b, size_t s[3]) {
    int M = (int)s[0], N = (int)s[1], K = (int)s[2];
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, K, N, M, 1, b->x, K, b->y, N, 1, b->w, N);
}
static void run_blas_head_forward(Bench *b, size_t s[3]) {
    int M = (int)s[0], N = (int)s[1], K = (int)s[2];
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, M, N, K, 1, b->x, K, b->w, K, 0, b->y, N);
}
static void run_blas_head_dinput(Bench *b, size_t s[3]) {
    int M = (int)s[0], N = (int)s[1], K = (int)s[2];
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, M, K, N, 1, b->y, N, b->w, K, 0, b->x, K);
}
static void run_blas_head_dweight(Bench *b, size_t s[3]) {
    int M = (int)s[0], N = (int)s[1], K = (int)s[2];
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, N, K, M, 1, b->y, N, b->x, K, 1, b->w, K);
}
#    define BLAS(run) run
#else
#    define BLAS(run) NULL
#endif

typedef struct {
    const char *name;
    void (*run)(Bench *, size_t[3]);
    void (*blas)(Bench *, size_t[3]); // the same product by OpenBLAS; NULL: none
    size_t shape[3];                  // products: {M, N, K} of the forward product
    double flops, bytes;              // per call
    double calls;                     // calls per step of 124M, may be a fraction; 0: not in a step
    double best, best_blas;           // seconds per call
} Case;

static double seconds_a_call(Bench *bench, void (*run)(Bench *, size_t[3]), size_t shape[3]) {
    size_t calls = 0;
    double start = clock_seconds(), seconds = 0;
    do {
        run(bench, shape);
        calls++;
        seconds = clock_seconds() - start;
    } while (seconds < MIN_SECONDS);
    return seconds / (double)calls;
}

static Case make_case(const char *name, void (*run)(Bench *, size_t[3]), const size_t shape[3], double flops,
                      double bytes, double calls) {
    return (Case){name, run, NULL, {shape[0], shape[1], shape[2]}, flops, bytes, calls, 1e9, 1e9};
}

// size: bytes of a value.
static int add_product(Case *c, const char *name, size_t M, size_t N, size_t K, double calls, bool head, double size) {
    const size_t shape[3] = {M, N, K};
    double x = (double)(M * K), w = (double)(N * K), y = (double)(M * N), flops = 2 * x * (double)N;
    double bytes = size * (x + w + y), dweight_bytes = size * (x + y) + sizeof(float) * w;
    c[0] = make_case(name, head ? run_head_forward : run_forward, shape, flops, bytes, calls);
    c[1] = make_case("  dinput", head ? run_head_dinput : run_dinput, shape, flops, bytes, calls);
    c[2] = make_case("  dweight", head ? run_head_dweight : run_dweight, shape, flops, dweight_bytes, calls);
    c[0].blas = head ? BLAS(run_blas_head_forward) : BLAS(run_blas_forward);
    c[1].blas = head ? BLAS(run_blas_head_dinput) : BLAS(run_blas_dinput);
    c[2].blas = head ? BLAS(run_blas_head_dweight) : BLAS(run_blas_dweight);
    return 3;
}

// Counts causal products only: two forward, five backward, each with 2 * T^2/2 * D FLOPs per head.
static int add_attention(Case *c, const char *name, size_t B, size_t T, size_t NH, size_t D, double calls,
                         double size) {
    const size_t shape[3] = {B, T, NH * 1000 + D};
    double product = (double)(B * NH) * (double)T * (double)(T + 1) * (double)D, row = size * (double)(B * T * NH * D);
    c[0] = make_case(name, run_attention_forward, shape, 2 * product, 4 * row, calls);
    c[1] = make_case("  backward", run_attention_backward, shape, 5 * product, 8 * row, calls);
    return 2;
}

// Adds a layer, forward and backward. *_values: values read and written per element. Counts no operations.
static int add_layer(Case *c, const char *name, void (*forward)(Bench *, size_t[3]), int forward_values,
                     void (*backward)(Bench *, size_t[3]), int backward_values, size_t M, size_t N, double calls,
                     double size) {
    const size_t shape[3] = {M, N};
    c[0] = make_case(name, forward, shape, 0, size * forward_values * (double)(M * N), calls);
    if (backward) c[1] = make_case("  backward", backward, shape, 0, size * backward_values * (double)(M * N), calls);
    return backward ? 2 : 1;
}

static int fill_cases(Case *c, Dtype type) {
    const double size = (double)value_bytes(type), parameters = 124439808, steps = parameters / PASS_FLOATS;
    int n = 0;
    n += add_product(c + n, "1024 x 3072 x 768", 1024, 3072, 768, 0, false, size);
    n += add_product(c + n, "124M qkv 256x2304x768", 256, 2304, 768, 12, false, size);
    n += add_product(c + n, "124M proj 256x768x768", 256, 768, 768, 12, false, size);
    n += add_product(c + n, "124M fc 256x3072x768", 256, 3072, 768, 12, false, size);
    n += add_product(c + n, "124M fcproj 256x768x3072", 256, 768, 3072, 12, false, size);
    n += add_product(c + n, "124M head 256x50304x768", 256, 50304, 768, 1, true, size);
    n += add_attention(c + n, "attention B4 T64 H12 D64", 4, 64, 12, 64, 12, size);
    n += add_layer(c + n, "GELU 256x3072", run_gelu_forward, 2, run_gelu_backward, 3, 256, 3072, 12, size);
    n += add_layer(c + n, "LayerNorm 256x768", run_layernorm_forward, 2, run_layernorm_backward, 4, 256, 768, 25, size);
    n += add_layer(c + n, "cross-entropy 256x50304", run_cross_entropy, 2, NULL, 0, 256, 50304, 1, size);
    n += add_layer(c + n, "norms of 9.6M gradients", run_norms, 1, NULL, 0, PASS_FLOATS, 1, steps, 4);
    n += add_layer(c + n, "AdamW of 9.6M parameters", run_adamw, 7, NULL, 0, PASS_FLOATS, 1, steps, 4);
    n += add_product(c + n, "small qkv 768x384x128", 768, 384, 128, 0, false, size);
    n += add_product(c + n, "small proj 768x128x128", 768, 128, 128, 0, false, size);
    n += add_product(c + n, "small fc 768x512x128", 768, 512, 128, 0, false, size);
    n += add_product(c + n, "small fcproj 768x128x512", 768, 128, 512, 0, false, size);
    n += add_product(c + n, "small head 768x256x128", 768, 256, 128, 0, true, size);
    n += add_attention(c + n, "attention B1 T1024 H12 D64", 1, 1024, 12, 64, 0, size);
    n += add_attention(c + n, "attention B12 T64 H4 D32", 12, 64, 4, 32, 0, size);
    n += add_layer(c + n, "GELU 768x512", run_gelu_forward, 2, run_gelu_backward, 3, 768, 512, 0, size);
    return n;
}

// Keeps only groups whose name contains `text`. A group is a case and the cases with indented names after it.
static int select_cases(Case *cases, int n, const char *text) {
    int kept = 0;
    bool wanted = false;
    for (int i = 0; i < n; i++) {
        if (cases[i].name[0] != ' ') wanted = strstr(cases[i].name, text) != NULL;
        if (wanted) cases[kept++] = cases[i];
    }
    return kept;
}

// Allocates on huge pages, as engine_memory.c does: on small pages the head's product is 4% slower on an AVX2 core.
// Writes them: pages that were never written are one page of zeros, and the first write to each takes long.
static int allocate_huge(void **out, size_t bytes, Error *e) {
    const size_t page = 2 << 20;
    if (posix_memalign(out, page, round_up(bytes, page))) return FAIL(e, ERR_MEMORY, NULL, "out of memory");
    madvise(*out, bytes, MADV_HUGEPAGE);
    memset(*out, 0, bytes);
    return 0;
}

static int bench_create(Bench *bench, int threads, Dtype type, Error *e) {
    const size_t activations = (size_t)256 * 50304, weights = (size_t)50304 * 768; // the largest cases
    bench->threads = threads;
    bench->type = type;
    bench->matmul = (Matmul){threads, matmul_kernel(type), matmul_a_block(), NULL};
    bench->attention = (Attention){.threads = threads, .max_T = 1024, .max_D = 64, .type = type};
    if (!bench->matmul.kernel) return FAIL(e, ERR_UNAVAILABLE, NULL, "this machine has no instructions for bf16");
    TRY(allocate_huge((void **)&bench->matmul.scratch, matmul_scratch(type, 1024), e));
    TRY(allocate_huge((void **)&bench->attention.scratch, attention_scratch(threads, 1024, 64) * sizeof(float), e));
    TRY(allocate_huge((void **)&bench->x, activations * sizeof(float), e));
    TRY(allocate_huge((void **)&bench->y, activations * sizeof(float), e));
    TRY(allocate_huge((void **)&bench->w, weights * sizeof(float), e));
    TRY(memory_alloc_zero((void **)&bench->g, 50304 * sizeof(float), "g", e));
    size_t rows = 2 * 256 + 2 * 768 + layernorm_scratch(EXAMPLES, 256 / EXAMPLES, 768);
    TRY(memory_alloc_zero((void **)&bench->rows, rows * sizeof(float), "rows", e));
    TRY(memory_alloc_zero((void **)&bench->targets, 256 * sizeof(uint16_t), "targets", e));
    return 0;
}

static void fill(float *x, size_t n, Dtype type) { // values in [-1, 1], as large as activations; no subnormals
    for (size_t i = 0; i < n; i++) value_set(x, i, (float)((i * 2654435761u >> 8) % 2001) * 1e-3f - 1, type);
}

static double roofline_seconds(const Bench *bench, const Case *c) {
    return fmax(c->flops / bench->peak, c->bytes / bench->copy) / 1e9;
}

static void print_case(const Bench *bench, const Case *c) {
    printf("%-26s %9.3f ms %7.1f GB/s", c->name, c->best * 1e3, c->bytes / c->best / 1e9);
    if (c->flops > 0)
        printf(" %7.1f GFLOP/s %5.1f%% of the peak", c->flops / c->best / 1e9,
               100 * c->flops / c->best / 1e9 / bench->peak);
    printf(" %5.1f%% of the roofline", 100 * roofline_seconds(bench, c) / c->best);
    if (c->blas && bench->type == DTYPE_FP32)
        printf("   OpenBLAS %8.1f GFLOP/s, ours is %.2fx", c->flops / c->best_blas / 1e9, c->best_blas / c->best);
    printf("\n");
}

static void print_step(const Bench *bench, const Case *cases, int n) {
    double seconds = 0, roofline = 0;
    printf("a step of GPT-2 124M, B 4, T 64, without its embeddings: ms, share of the sum, share of its roofline\n");
    for (int i = 0; i < n; i++) seconds += cases[i].best * cases[i].calls;
    for (int i = 0; i < n; i++) {
        const Case *c = &cases[i];
        double least = roofline_seconds(bench, c);
        if (c->calls > 0)
            printf("%-26s %9.2f %6.1f%% %6.1f%%\n", c->name, 1e3 * c->best * c->calls,
                   100 * c->best * c->calls / seconds, 100 * least / c->best);
        roofline += least * c->calls;
    }
    printf("kernels of the step %.2f ms, their roofline %.2f ms\n", 1e3 * seconds, 1e3 * roofline);
}

// Fills the operands anew for each case. Otherwise dweight could add up to inf or NaN, whose speed may differ.
static void run_round(Bench *bench, Case *cases, int n, bool blas) {
    nanosleep(&(struct timespec){.tv_nsec = PAUSE_NANOSECONDS}, NULL);
    for (int i = 0; i < n; i++) {
        Case *c = &cases[i];
        if (blas && !c->blas) continue;
        const bool large = c->shape[1] == 50304 || c->run == run_norms; // the head and cross-entropy
        fill(bench->x, 1024 * 3 * 768, bench->type), fill(bench->y, large ? 256 * 50304 : 1024 * 3072, bench->type);
        fill(bench->w, large ? 50304 * 768 : 768 * 3072, bench->type), fill(bench->g, 50304, bench->type);
        if (c->run == run_adamw) memset(bench->w, 0, (size_t)4 * PASS_FLOATS * sizeof(float));
        double seconds = seconds_a_call(bench, blas ? c->blas : c->run, c->shape),
               *best = blas ? &c->best_blas : &c->best;
        if (seconds < *best) *best = seconds;
    }
}

int main(int argc, char **argv) {
    Bench bench = {0};
    Error e = {0};
    Case cases[MAX_ROWS];
    int threads = argc > 1 ? atoi(argv[1]) : omp_get_max_threads(), rounds = argc > 2 ? atoi(argv[2]) : ROUNDS;
    Dtype type = argc > 4 && strcmp(argv[4], "bf16") == 0 ? DTYPE_BF16 : DTYPE_FP32;
    int n = fill_cases(cases, type), code = bench_create(&bench, threads > 0 ? threads : 1, type, &e);
    if (code) {
        error_print(&e);
        return code;
    }
    if (argc > 3) n = select_cases(cases, n, argv[3]);
    omp_set_num_threads(bench.threads);
#ifdef HAVE_OPENBLAS
    openblas_set_num_threads(bench.threads);
    printf("OpenBLAS kernel: %s\n", openblas_get_corename());
#endif
    for (int round = 0; round < rounds; round++) {
        double peak = calibrate_flops(bench.threads, type) / 1e9;
        bench.peak = fmax(bench.peak, peak);
        bench.copy = fmax(bench.copy, calibrate_copy(bench.threads) / 1e9);
        run_round(&bench, cases, n, false);
#ifdef HAVE_OPENBLAS
        if (type == DTYPE_FP32) run_round(&bench, cases, n, true);
#endif
    }
    printf("%d threads, best of %d rounds; share of the peak of the same run\n", bench.threads, rounds);
    printf("copy %.1f GB/s\n%s peak %.1f GFLOP/s\n", bench.copy, bench.matmul.kernel->name, bench.peak);
    for (int i = 0; i < n; i++) print_case(&bench, &cases[i]);
    if (argc <= 3 || !*argv[3]) print_step(&bench, cases, n);
    memory_free(bench.matmul.scratch), memory_free(bench.attention.scratch);
    memory_free(bench.x), memory_free(bench.y), memory_free(bench.w), memory_free(bench.g);
    memory_free(bench.rows), memory_free(bench.targets);
    return 0;
}
