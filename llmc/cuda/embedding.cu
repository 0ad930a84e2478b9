// embedding: see embedding.cuh.
#include "cuda/embedding.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "math/accumulate.h"

enum { THREADS = 256 };

__device__ static inline int token_at(const uint16_t *tokens, int n, int T) {
    return tokens[(size_t)(n / T) * (T + 1) + n % T];
}

// Position of flat row n in its document; in its example if `first` is NULL.
__device__ static inline int position_of(const uint16_t *first, int n, int T) { return n % T - (first ? first[n] : 0); }

// Grid: a thread per pack of W columns.
template <int W>
__global__ void embed_kernel(real *out, const uint16_t *tokens, const uint16_t *first, const real *wte, const real *wpe,
                             const __grid_constant__ RowDropout drop, size_t packs_total, int C) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= packs_total) return;
    const int packs = C / W, n = (int)(i / packs), c = (int)(i % packs) * W, T = drop.T; // packs: packs of a row
    float x[W], p[W];
    pack_get(x, pack_load<W>(wte + (size_t)token_at(tokens, n, T) * C + c));
    pack_get(p, pack_load<W>(wpe + (size_t)position_of(first, n, T) * C + c));
    floats_add(x, p);
    if (drop.dropout.below) dropout_multiply(x, drop, n / T, n % T, c);
    pack_store(out + (size_t)n * C + c, pack_of<W>(x));
}

int embedding_forward(real *out, const uint16_t *tokens, const uint16_t *first, const real *wte, const real *wpe,
                      const RowDropout &drop, int B, int C, cudaStream_t stream, Error *e) {
    const size_t packs = (size_t)B * drop.T * (C % VEC ? C : C / VEC);
    const auto kernel = C % VEC ? embed_kernel<1> : embed_kernel<VEC>;
    return launch({blocks_of(packs, THREADS), THREADS, stream}, e, kernel, out, tokens, first, wte, wpe, drop, packs,
                  C);
}

// ---- On the host ----------------------------------------------------------------------------------------------------

void embedding_documents(uint16_t *first, uint16_t *last, const uint16_t *tokens, int separator, int B, int T) {
    for (int b = 0; b < B; b++, tokens += T + 1, first += T, last += T) {
        for (int t = 0; t < T; t++) first[t] = (uint16_t)(t == 0 || tokens[t] == separator ? t : first[t - 1]);
        for (int t = T - 1; t >= 0; t--) last[t] = t == T - 1 || first[t + 1] > t ? (uint16_t)t : last[t + 1];
    }
}

// Counting sorts are stable: equal keys keep the order of their rows, so sums over them have one order.
void embedding_sort(uint32_t *sorted, const uint16_t *tokens, const uint16_t *first, int B, int T) {
    const EmbeddingOrder all = embedding_order(sorted, false, B * T), by_example = embedding_order(sorted, true, B * T);
    uint32_t *keys = by_example.key;            // until the second sort: the key of each row
    uint32_t next[(1 << 16) + 1] = {}, row = 0; // next[k]: where the next row goes, of key k or of example k
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++, row++) {
            keys[row] = tokens ? tokens[row + b] : t - (first ? first[row] : 0);
            next[keys[row] + 1]++;
        }
    for (int key = 0; key < 1 << 16; key++) next[key + 1] += next[key];
    for (row = 0; row < (uint32_t)(B * T); row++) {
        const uint32_t i = next[keys[row]]++;
        all.key[i] = keys[row], all.row[i] = row;
    }
    for (int b = 0; b < B; b++) next[b] = b * T;
    for (int k = 0; k < B * T; k++) {
        const uint32_t i = next[all.row[k] / T]++;
        by_example.key[i] = all.key[k], by_example.row[i] = all.row[k];
    }
}

// Backward. Sorted rows are cut into tiles of TILE rows; rows of one key (token or position) form a run. Kernel 1 sums
// each tile's runs. It adds the sum of a run within one tile to dw; a run across tiles leaves a partial sum per tile,
// which kernel 2 adds in a fixed order. partials (tiles, 2, C): [0] sums the run that began before the tile, [1] the
// run that begins in the tile and continues after it.

enum { TILE = 32, ROWS_IN_FLIGHT = 8, COLUMN_THREADS_MAX = 256 };

template <int W> __device__ inline void row_add(float *to, const float (&x)[W]) {
    float sum[W];
    floats_load(sum, to);
    floats_add(sum, x);
    floats_store(to, sum);
}

// Grid: (tile, columns).
template <int W>
__global__ void __launch_bounds__(COLUMN_THREADS_MAX)
    token_tile_kernel(float *dw, float *partials, const real *dx, EmbeddingOrder order, int N, int C) {
    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (c >= C) return;
    const int begin = blockIdx.x * TILE, end = min(begin + TILE, N);
    bool continued = begin > 0 && order.key[begin - 1] == order.key[begin];
    float sum[W] = {};
    for (int i0 = begin; i0 < end; i0 += ROWS_IN_FLIGHT) {
        Pack<W> packs[ROWS_IN_FLIGHT];
        UNROLL_FOR (int r = 0; r < ROWS_IN_FLIGHT; r++)
            if (i0 + r < end) packs[r] = pack_load<W>(dx + (size_t)order.row[i0 + r] * C + c);
        UNROLL_FOR (int r = 0; r < ROWS_IN_FLIGHT; r++) {
            const int i = i0 + r;
            if (i >= end) continue;
            float x[W];
            pack_get(x, packs[r]);
            floats_add(sum, x);
            const uint32_t token = order.key[i];
            const bool continues = i + 1 < N && order.key[i + 1] == token;
            if (continues && i + 1 < end) continue;
            float *slot = partials + (size_t)blockIdx.x * 2 * C + c;
            if (continued) floats_store(slot, sum);
            else if (continues) floats_store(slot + C, sum);
            else row_add(dw + (size_t)token * C + c, sum);
            continued = false;
            UNROLL_FOR (int j = 0; j < W; j++) sum[j] = 0.0f;
        }
    }
}

// Returns the first i in [low, high) with key[i stride] != token; high if there is none. Equal keys must come first.
__device__ static int run_end(const uint32_t *key, uint32_t token, int low, int high, int stride) {
    while (low < high) {
        const int middle = (low + high) / 2;
        if (key[(size_t)middle * stride] == token) low = middle + 1;
        else high = middle;
    }
    return low;
}

enum { RUN_SHARES = 4 }; // a thread sums a run's partials in 4 shares, so 4 loads are in flight

// Grid: (tile, columns). Adds up the partials of the run that starts in this tile and continues, if any.
template <int W>
__global__ void __launch_bounds__(COLUMN_THREADS_MAX)
    token_run_kernel(float *dw, const float *partials, EmbeddingOrder order, int N, int C) {
    const int tile = blockIdx.x, tiles = gridDim.x, last_row = tile * TILE + TILE - 1;
    if (last_row + 1 >= N) return;
    const uint32_t token = order.key[last_row];
    if (order.key[last_row + 1] != token) return;
    if (tile > 0 && order.key[tile * TILE - 1] == token) return; // the run began before this tile
    const int end = run_end(order.key, token, tile + 1, tiles, TILE);

    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    float sum[RUN_SHARES][W] = {};
    if (c >= C) return;
    for (int t0 = tile; t0 < end; t0 += RUN_SHARES)
        UNROLL_FOR (int i = 0; i < RUN_SHARES; i++) {
            const int t = t0 + i;
            float part[W] = {};
            if (t < end) floats_load(part, partials + ((size_t)t * 2 + (t == tile)) * C + c);
            floats_add(sum[i], part);
        }
    UNROLL_FOR (int i = 1; i < RUN_SHARES; i++) floats_add(sum[0], sum[i]);
    row_add(dw + (size_t)token * C + c, sum[0]);
}

int embedding_backward(float *dw, const real *dx, EmbeddingOrder order, int B, int T, int C, void *workspace,
                       cudaStream_t stream, Error *e) {
    const int W = C % VEC ? 1 : VEC, packs = C / W, columns = ceil_div(packs, COLUMN_THREADS_MAX);
    const int threads = (int)round_up((size_t)ceil_div(packs, columns), WARP);
    const dim3 blocks(ceil_div(B * T, TILE), columns);
    const auto tile = W == 1 ? token_tile_kernel<1> : token_tile_kernel<VEC>;
    const auto run = W == 1 ? token_run_kernel<1> : token_run_kernel<VEC>;
    float *partials = (float *)workspace;
    TRY(launch({blocks, threads, stream}, e, tile, dw, partials, dx, order, B * T, C));
    return launch({blocks, threads, stream}, e, run, dw, partials, order, B * T, C);
}

// Per-example norms. Grid: a block per example and GROUP_COLUMNS columns. The example's sorted rows are cut between
// runs into SHARES pieces of about equal length. A thread sums a column over one piece.

enum { GROUP_COLUMNS = 64, SHARES = 8, EXAMPLE_THREADS = GROUP_COLUMNS * SHARES };

// Returns the first index >= i at which a run begins.
__device__ static int run_begin(const uint32_t *key, int i, int T) {
    return i > 0 ? run_end(key, key[i - 1], i, T, 1) : i;
}

// partials (2, B, groups): |E_b|^2, <E_b, U_b> of the block's columns.
__global__ void __launch_bounds__(EXAMPLE_THREADS, 2)
    example_kernel(double *partials, const real *dx, const float *UG, EmbeddingOrder order, int groups, int T, int C) {
    __shared__ float shared[2][EXAMPLE_THREADS / WARP];
    const int b = blockIdx.x / groups, share = threadIdx.x / GROUP_COLUMNS, part = (T + SHARES - 1) / SHARES;
    const int c = blockIdx.x % groups * GROUP_COLUMNS + threadIdx.x % GROUP_COLUMNS;
    const uint32_t *key = order.key + (size_t)b * T, *row = order.row + (size_t)b * T; // example b's T positions
    const int begin = run_begin(key, min(share * part, T), T), end = run_begin(key, min((share + 1) * part, T), T);
    float square = 0.0f, cross = 0.0f, run = 0.0f;
    for (int i0 = begin; c < C && i0 < end; i0 += ROWS_IN_FLIGHT) {
        float x[ROWS_IN_FLIGHT], u[ROWS_IN_FLIGHT];
        UNROLL_FOR (int r = 0; r < ROWS_IN_FLIGHT; r++) {
            const size_t at = i0 + r < end ? (size_t)row[i0 + r] * C + c : 0;
            x[r] = i0 + r < end ? (float)dx[at] : 0.0f;
            const bool last = i0 + r < end && (i0 + r + 1 == end || key[i0 + r + 1] != key[i0 + r]); // ends a run
            u[r] = UG && last ? UG[at] : 0.0f;
        }
        UNROLL_FOR (int r = 0; r < ROWS_IN_FLIGHT; r++) {
            const int i = i0 + r;
            if (i >= end) continue;
            run += x[r];
            if (i + 1 < end && key[i + 1] == key[i]) continue;
            cross = add_product(cross, run, u[r]);
            square = add_square(square, run);
            run = 0.0f;
        }
    }
    square = block_sum(square, shared[0]), cross = block_sum(cross, shared[1]);
    if (threadIdx.x == 0) partials[blockIdx.x] = square, partials[gridDim.x + blockIdx.x] = cross;
}

size_t embedding_workspace_bytes(int B, int T, int C) {
    const size_t partials = (size_t)ceil_div(B * T, TILE) * 2 * C * sizeof(float);
    return size_max(partials, (size_t)2 * B * ceil_div(C, GROUP_COLUMNS) * sizeof(double));
}

int embedding_example_squares(double *squares, double *cross, const real *dx, const float *UG, EmbeddingOrder order,
                              int B, int T, int C, void *workspace, cudaStream_t stream, Error *e) {
    double *partials = (double *)workspace;
    const int groups = ceil_div(C, GROUP_COLUMNS);
    TRY(launch({B * groups, EXAMPLE_THREADS, stream}, e, example_kernel, partials, dx, UG, order, groups, T, C));
    return reduce_example_partials({{squares, cross}}, partials, 2, B, groups, stream, e);
}

// Grid: a block per token.
__global__ void gather_kernel(float *UG, const float *U, const int *row_at, int C) {
    const int t = row_at[blockIdx.x] - 1;
    for (int c = threadIdx.x; t >= 0 && c < C; c += THREADS) UG[(size_t)t * C + c] = U[(size_t)blockIdx.x * C + c];
}

int embedding_gather(float *UG, const float *U, const int *row_at, int V, int C, cudaStream_t stream, Error *e) {
    return launch({V, THREADS, stream}, e, gather_kernel, UG, U, row_at, C);
}

__global__ void row_at_kernel(int *row_at, const uint16_t *tokens, int N, int T, int V) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n < N) atomicMax(row_at + (size_t)(n / T) * V + token_at(tokens, n, T), n % T + 1);
}

int embedding_rows(int *row_at, const uint16_t *tokens, int E, int T, int V, cudaStream_t stream, Error *e) {
    CUDA_TRY(cudaMemsetAsync(row_at, 0, (size_t)E * V * sizeof *row_at, stream), e);
    return launch({blocks_of(E * T, THREADS), THREADS, stream}, e, row_at_kernel, row_at, tokens, E * T, T, V);
}
