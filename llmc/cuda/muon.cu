// muon: see muon.cuh. Kernels: grid (MATRIX_BLOCKS, matrix); a warp per row, W columns per lane at a time.
#include "cuda/muon.cuh"
#include "cuda/vec.cuh"
#include "math/muon.h"

#include <utility>

enum { MATRIX_BLOCKS = 64, MATRIX_WARPS = 8 };
enum { LIKE_MATRICES = 24 }; // MatmulShape.like_batch: bits do not depend on how many matrices a rank owns

// Scratch: partial sums of |x|^2 (count, MATRIX_BLOCKS); x and y (count, rows, columns); gram and poly (count, side,
// side).
size_t muon_scratch_bytes(int count, int rows, int columns) {
    const size_t side = min(rows, columns), reals = 2 * ((size_t)rows * columns + side * side);
    return count * (reals * sizeof(real) + MATRIX_BLOCKS * sizeof(double));
}

int muon_capacity(size_t bytes, int rows, int columns) {
    const size_t n = bytes / muon_scratch_bytes(1, rows, columns);
    return n < 1 ? 1 : n > MUON_MATRICES_MAX ? MUON_MATRICES_MAX : (int)n;
}

// ---- Before and after Newton-Schulz: gradients to x, orthogonal x to weights ----------------------------------------

// Calls f(row, column) for this thread's elements of a matrix, W columns at a time.
template <int W, typename F> __device__ static inline void each_of_matrix(int rows, int columns, F f) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int r = blockIdx.x * MATRIX_WARPS + warp; r < rows; r += MATRIX_BLOCKS * MATRIX_WARPS)
#pragma unroll 2
        for (int c = lane * W; c < columns; c += WARP * W) f(r, c);
}

// Updates the moments. squares: each block's part of |x|^2, x from muon_momentum (math/muon.h).
template <int W>
__global__ static void __launch_bounds__(MATRIX_WARPS *WARP)
    momentum_kernel(double *squares, const __grid_constant__ MuonMatrices all, float mu, const float *grad_scale) {
    __shared__ double shared[MATRIX_WARPS];
    const MuonMatrix &m = all.matrix[blockIdx.y];
    const float scale = *grad_scale;
    float sum = 0;
    if (!isnan(scale)) {
        each_of_matrix<W>(all.rows, all.columns, [&](int r, int c) {
            const size_t at = r * m.stride + c;
            float g[W], moment[W];
            floats_load(g, m.grad + at);
            floats_load(moment, m.moment + at);
            UNROLL_FOR (int j = 0; j < W; j++) {
                const float x = muon_momentum(g[j] * scale, &moment[j], mu);
                sum += x * x;
            }
            floats_store(m.moment + at, moment);
        });
    }
    const double total = block_sum((double)sum, shared);
    if (threadIdx.x == 0) squares[blockIdx.y * MATRIX_BLOCKS + blockIdx.x] = total;
}

// out = x / (|x| + eps), x recomputed from fp32 gradients and moments.
template <int W>
__global__ static void __launch_bounds__(MATRIX_WARPS *WARP)
    normalize_kernel(real *out, const double *squares, const __grid_constant__ MuonMatrices all, float mu,
                     const float *grad_scale) {
    const MuonMatrix &m = all.matrix[blockIdx.y];
    const float scale = *grad_scale;
    double sum = 0;
    for (int k = 0; k < MATRIX_BLOCKS; k++) sum += squares[blockIdx.y * MATRIX_BLOCKS + k];
    const float norm = (float)(1.0 / (sqrt(sum) + MUON_EPS));
    out += (size_t)blockIdx.y * all.rows * all.columns;
    each_of_matrix<W>(all.rows, all.columns, [&](int r, int c) {
        const size_t at = r * m.stride + c;
        float g[W], moment[W];
        Bundle<real, W> x;
        floats_load(g, m.grad + at);
        floats_load(moment, m.moment + at);
        UNROLL_FOR (int j = 0; j < W; j++) x.x[j] = (real)(norm * muon_nesterov(g[j] * scale, moment[j], mu));
        *(Bundle<real, W> *)(out + (size_t)r * all.columns + c) = x;
    });
}

// Updates weights with the orthogonal matrices o.
template <int W>
__global__ static void __launch_bounds__(MATRIX_WARPS *WARP)
    apply_kernel(const real *o, const __grid_constant__ MuonMatrices all, MuonStep step, float scale,
                 const float *grad_scale) {
    const MuonMatrix &m = all.matrix[blockIdx.y];
    if (isnan(*grad_scale)) return;
    o += (size_t)blockIdx.y * all.rows * all.columns;
    each_of_matrix<W>(all.rows, all.columns, [&](int r, int c) {
        const size_t at = r * m.stride + c;
        const Bundle<real, W> x = *(const Bundle<real, W> *)(o + (size_t)r * all.columns + c);
        float p[W];
        Bundle<real, W> rounded;
        floats_load(p, m.param + at);
        UNROLL_FOR (int j = 0; j < W; j++) {
            p[j] = muon_update(p[j], (float)x.x[j], step.lr, scale, step.weight_decay);
            rounded.x[j] = (real)p[j];
        }
        floats_store(m.param + at, p);
        if (m.weight) *(Bundle<real, W> *)(m.weight + at) = rounded;
    });
}

// ---- Newton-Schulz --------------------------------------------------------------------------------------------------

// y = a x + (b G + c G^2) x, G = x x^T. For a tall x: y = a x + x (b G + c G^2), with the smaller G = x^T x.
static int iterate(Matmul *mm, real *y, const real *x, real *gram_x, real *poly_x, int count, int rows, int columns,
                   Error *e) {
    const bool wide = rows <= columns;
    const int side = wide ? rows : columns, longer = wide ? columns : rows;
    const int64_t square = (int64_t)side * side, all = (int64_t)rows * columns;
    MatmulShape gram = {.m = side, .n = side, .k = longer, .transpose_a = !wide, .transpose_b = wide, .batch = count};
    MatmulShape poly = {.m = side, .n = side, .k = side, .accumulate = true, .batch = count};
    MatmulShape next = {.m = rows, .n = columns, .k = side, .accumulate = true, .batch = count};
    gram.stride_a = gram.stride_b = all, gram.stride_out = square;
    poly.stride_a = poly.stride_b = poly.stride_out = square;
    gram.like_batch = poly.like_batch = next.like_batch = LIKE_MATRICES;
    next.stride_a = wide ? square : all, next.stride_b = wide ? all : square, next.stride_out = all;
    TRY(matmul_run(mm, gram, {gram_x, x, x}, e));
    TRY(matmul_run(mm, poly, {poly_x, gram_x, gram_x, NULL, MUON_C, MUON_B, gram_x}, e));
    return matmul_run(mm, next, {y, wide ? poly_x : x, wide ? x : poly_x, NULL, 1, MUON_A, x}, e);
}

int muon_run(Matmul *mm, const MuonMatrices *matrices, MuonStep step, const float *grad_scale, void *scratch,
             cudaStream_t stream, Error *e) {
    const MuonMatrices &all = *matrices;
    if (all.count == 0) return 0;
    const size_t elements = (size_t)all.count * all.rows * all.columns, side = min(all.rows, all.columns);
    const bool by_four = all.columns % 4 == 0;
    const Launch l = {dim3(MATRIX_BLOCKS, all.count), MATRIX_WARPS * WARP, stream};
    double *squares = (double *)scratch;
    real *x = (real *)(squares + all.count * MATRIX_BLOCKS), *y = x + elements, *gram = y + elements;
    TRY(launch(l, e, by_four ? momentum_kernel<4> : momentum_kernel<1>, squares, all, step.momentum, grad_scale));
    TRY(launch(l, e, by_four ? normalize_kernel<4> : normalize_kernel<1>, x, squares, all, step.momentum, grad_scale));
    for (int i = 0; i < MUON_STEPS; i++) {
        TRY(iterate(mm, y, x, gram, gram + all.count * side * side, all.count, all.rows, all.columns, e));
        std::swap(x, y);
    }
    const float scale = (float)muon_scale(all.rows, all.columns);
    return launch(l, e, by_four ? apply_kernel<4> : apply_kernel<1>, x, all, step, scale, grad_scale);
}
