// layernorm: see layernorm.cuh.
#include "cuda/layernorm.cuh"
#include "cuda/vec.cuh"
#include "math/layernorm.h"

#include <assert.h>

// The row to normalise: a, a + b, or a + dropout(b).
enum Input { ALONE, SUM, DROPPED };

// Loads columns [c, c + W) of a row to normalise, rounded as stored.
template <Input INPUT, int W> __device__ inline Pack<W> row_load(const LayerNorm &n, int row, int c) {
    const Pack<W> x = pack_load<W>(n.a + (size_t)row * n.C + c);
    if constexpr (INPUT == ALONE) return x;
    const Pack<W> y = pack_load<W>(n.b + (size_t)row * n.C + c);
    float s[W], t[W];
    pack_get(s, x);
    pack_get(t, y);
    if constexpr (INPUT == DROPPED) dropout_multiply(t, n.drop, row / n.drop.T, row % n.drop.T, c);
    floats_add(s, t);
    return pack_of<W>(s);
}

template <int W>
__device__ inline Pack<W> pack_normalise(const float (&x)[W], float mean, float rstd, const real *gamma,
                                         const real *beta, int c) {
    float g[W], b[W], y[W];
    pack_get(g, pack_load<W>(gamma + c));
    pack_get(b, pack_load<W>(beta + c));
    UNROLL_FOR (int j = 0; j < W; j++) y[j] = layernorm_y(layernorm_xhat(x[j], mean, rstd), g[j], b[j]);
    return pack_of<W>(y);
}

enum { FORWARD_WARPS = 8, ROW_PACKS_MAX = LAYERNORM_WARP_COLUMNS / (WARP * VEC) };

// Grid: a warp per row, held in registers: C <= PACKS * 256, C % 8 == 0. COPY: also writes n.copy; if DROPPED, only if
// n.copy.amax is set.
template <Input INPUT, int PACKS, bool COPY>
__global__ void __launch_bounds__(FORWARD_WARPS *WARP) forward_warp_kernel(const __grid_constant__ LayerNorm n) {
    __shared__ float amax; // largest |out| in the block
    const int row = blockIdx.x * FORWARD_WARPS + threadIdx.y, lane = threadIdx.x, C = n.C;
    const bool copies = COPY && (INPUT != DROPPED || n.copy.amax);
    static_assert(LAYERNORM_WARP_COLUMNS <= FP8_GROUPS * FP8_LN1_GROUP);
    unsigned most = 0;
    if (copies && lane + threadIdx.y == 0) amax = 0;
    if (copies) __syncthreads();
    if (row >= n.N) return;
    const size_t start = (size_t)row * C;
    Pack<VEC> packs[PACKS];
    UNROLL_FOR (int p = 0; p < PACKS; p++) {
        const int c = (p * WARP + lane) * VEC;
        packs[p] = c < C ? row_load<INPUT, VEC>(n, row, c) : Pack<VEC>{};
    }
    float x[PACKS][VEC], sum = 0.0f;
    UNROLL_FOR (int p = 0; p < PACKS; p++) {
        const int c = (p * WARP + lane) * VEC;
        if (INPUT != ALONE && c < C) pack_store(n.sum + start + c, packs[p]);
        pack_get(x[p], packs[p]);
        UNROLL_FOR (int j = 0; j < VEC; j++) sum += x[p][j];
    }
    const float m = warp_sum(sum) / C;
    float squares = 0.0f;
    UNROLL_FOR (int p = 0; p < PACKS; p++)
        if ((p * WARP + lane) * VEC < C)
            UNROLL_FOR (int j = 0; j < VEC; j++) squares = add_square(squares, x[p][j] - m);
    const float r = layernorm_rstd(warp_sum(squares), C);
    UNROLL_FOR (int p = 0; p < PACKS; p++) {
        const int c = (p * WARP + lane) * VEC;
        if (c >= C) continue;
        const Pack<VEC> y = pack_normalise<VEC>(x[p], m, r, n.gamma, n.beta, c);
        if (!copies || !n.copy.alone) pack_store(n.out + start + c, y);
        if (copies) fp8_copy(n.copy, start + c, y, most);
        if (copies && n.copy.groups) fp8_low_copy(n.copy, row, c, y);
    }
    if (lane == 0) n.mean[row] = m, n.rstd[row] = r;
    if (!copies) return;
    fp8_raise(&amax, fp8_most_value(most));
    __syncthreads();
    if (lane + threadIdx.y == 0) fp8_raise_to(n.copy.amax, amax);
}

enum { ROW_THREADS = 256 };

// Grid: a block per row, any C. Reads the row three times, twice from cache.
template <int W>
__global__ void __launch_bounds__(ROW_THREADS) forward_block_kernel(const __grid_constant__ LayerNorm n) {
    __shared__ float shared[2][ROW_THREADS / WARP];
    const int C = n.C;
    const size_t start = (size_t)blockIdx.x * C;
    float sum = 0.0f, squares = 0.0f, x[W];
    for (int c = threadIdx.x * W; c < C; c += ROW_THREADS * W) {
        const Pack<W> pack = !n.b                   ? row_load<ALONE, W>(n, blockIdx.x, c)
                             : n.drop.dropout.below ? row_load<DROPPED, W>(n, blockIdx.x, c)
                                                    : row_load<SUM, W>(n, blockIdx.x, c);
        if (n.b) pack_store(n.sum + start + c, pack);
        pack_get(x, pack);
        for (int j = 0; j < W; j++) sum += x[j];
    }
    const real *row = (n.b ? n.sum : n.a) + start; // no barrier: a thread re-reads only its own columns
    const float m = block_sum(sum, shared[0]) / C;
    for (int c = threadIdx.x * W; c < C; c += ROW_THREADS * W) {
        pack_get(x, pack_load<W>(row + c));
        for (int j = 0; j < W; j++) squares = add_square(squares, x[j] - m);
    }
    const float r = layernorm_rstd(block_sum(squares, shared[1]), C);
    for (int c = threadIdx.x * W; c < C; c += ROW_THREADS * W) {
        pack_get(x, pack_load<W>(row + c));
        pack_store(n.out + start + c, pack_normalise<W>(x, m, r, n.gamma, n.beta, c));
    }
    if (threadIdx.x == 0) n.mean[blockIdx.x] = m, n.rstd[blockIdx.x] = r;
}

// DROPPED has kernels for even PACKS only.
template <Input INPUT, int PACKS, bool COPY>
constexpr auto of = forward_warp_kernel<INPUT, INPUT == DROPPED ? (PACKS + 1) / 2 * 2 : PACKS, COPY>;
template <Input INPUT, bool COPY>
constexpr decltype(&forward_warp_kernel<INPUT, 8, COPY>) of_packs[ROW_PACKS_MAX] = {
    of<INPUT, 1, COPY>, of<INPUT, 2, COPY>, of<INPUT, 3, COPY>, of<INPUT, 4, COPY>,
    of<INPUT, 5, COPY>, of<INPUT, 6, COPY>, of<INPUT, 7, COPY>, of<INPUT, 8, COPY>};

int layernorm_forward(const LayerNorm &n, cudaStream_t stream, Error *e) {
    const bool copies = n.copy.amax, drops = n.b && n.drop.dropout.below;
    const auto kernels = n.b && (drops || copies) ? of_packs<DROPPED, FP8_BUILT> // DROPPED without dropout only adds b
                         : n.b                    ? of_packs<SUM, false>
                         : copies                 ? of_packs<ALONE, FP8_BUILT>
                                                  : of_packs<ALONE, false>;
    const int packs = ceil_div(n.C, WARP * VEC);
    if (n.C % VEC == 0 && packs <= ROW_PACKS_MAX)
        return launch({blocks_of(n.N, FORWARD_WARPS), dim3(WARP, FORWARD_WARPS), stream}, e, kernels[packs - 1], n);
    TRY(launch({n.N, ROW_THREADS, stream}, e, n.C % VEC ? forward_block_kernel<1> : forward_block_kernel<VEC>, n));
    return fp8_cast(n.copy, n.out, (size_t)n.N * n.C, stream, e);
}

// Backward. Both kernels are pass one of a column gradient (reduce.cuh) with the sets dgamma, dbeta and, if wanted,
// dbias. Grid: a block per run of rows.

// A tile is TILE rows. The next tile is fetched while one is computed. The fetched tile (96 bytes per thread, dresidual
// included) fills 24 of 128 registers.
enum { BACKWARD_THREADS_MAX = 512, TILE = 4 / sizeof(real) };

// A thread's 8 columns of a tile.
typedef struct {
    Pack<VEC> dy[TILE], x[TILE], dresidual[TILE];
    float mean[TILE], rstd[TILE];
} RowTile;

// Loads a tile. Rows >= stop and columns >= C are zeros, which change no sum.
template <bool ACCUMULATE>
__device__ inline void tile_fetch(RowTile &t, const LayerNormBackward &k, int row, int stop, int c) {
    const size_t start = (size_t)row * k.C + c;
    UNROLL_FOR (int r = 0; r < TILE; r++) {
        const bool there = c < k.C && row + r < stop;
        const size_t i = start + r * k.C;
        t.dy[r] = there ? pack_load<VEC>(k.dy + i) : Pack<VEC>{};
        t.x[r] = there ? pack_load<VEC>(k.x + i) : Pack<VEC>{};
        if (ACCUMULATE) t.dresidual[r] = there ? pack_load<VEC>(k.dresidual + i) : Pack<VEC>{};
        t.mean[r] = there ? k.mean[row + r] : 0.0f;
        t.rstd[r] = there ? k.rstd[row + r] : 0.0f;
    }
}

// First half of a tile: adds to dgamma, dbeta. sums: a thread's sums of dy gamma [2 r] and of dy gamma xhat [2 r + 1].
template <int SETS>
__device__ inline void tile_sums(float (&sums)[2 * TILE], float (&grads)[SETS][VEC], RowTile &t,
                                 const Pack<VEC> &gamma_pack) {
    float gamma[VEC];
    pack_get(gamma, gamma_pack);
    UNROLL_FOR (int r = 0; r < TILE; r++) {
        float dy[VEC], x[VEC];
        pack_get(dy, t.dy[r]);
        pack_get(x, t.x[r]);
        sums[2 * r] = sums[2 * r + 1] = 0.0f;
        UNROLL_FOR (int j = 0; j < VEC; j++) {
            sums[2 * r] = fmaf(dy[j], gamma[j], sums[2 * r]);
            layernorm_add(&sums[2 * r + 1], &grads[0][j], &grads[1][j], dy[j], gamma[j],
                          layernorm_xhat(x[j], t.mean[r], t.rstd[r]));
        }
        pack_forget(t.dy[r]);
        pack_forget(t.x[r]);
    }
}

// Replaces the threads' sums by block sums. Callers alternate between two buffers, so one barrier per tile suffices.
__device__ static inline void tile_sums_join(float (&sums)[2 * TILE], float (*shared)[2 * TILE]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int lanes_each = WARP / (2 * TILE);
    UNROLL_FOR (int i = 0; i < 2 * TILE; i++) {
        const float sum = warp_sum(sums[i]);
        if (lane == 0) shared[warp][i] = sum;
    }
    __syncthreads();
    // Lane l adds sum l % (2 TILE) of warps l / (2 TILE), l / (2 TILE) + lanes_each and so on.
    const int first = lane / (2 * TILE), i0 = lane % (2 * TILE);
    float all = first < warps ? shared[first][i0] : 0.0f;
    for (int w = first + lanes_each; w < warps; w += lanes_each) all += shared[w][i0];
    UNROLL_FOR (int offset = 2 * TILE; offset < WARP; offset *= 2) all += __shfl_xor_sync(0xffffffffu, all, offset);
    UNROLL_FOR (int i = 0; i < 2 * TILE; i++) sums[i] = __shfl_sync(0xffffffffu, all, i);
}

// Second half: writes dresidual and dbranch, adds to dbias. If `copies`, writes k.copy, raises `most`. means: sums / C.
template <bool ACCUMULATE, bool DROP, int SETS>
__device__ inline void tile_write(bool copies, const LayerNormBackward &k, float (&grads)[SETS][VEC],
                                  const float (&means)[2 * TILE], const RowTile &t, const Pack<VEC> &gamma_pack, int b,
                                  int row, int stop, int c, unsigned &most) {
    float gamma[VEC];
    pack_get(gamma, gamma_pack);
    UNROLL_FOR (int r = 0; r < TILE; r++) {
        if (c >= k.C || row + r >= stop) continue;
        // With g = dy gamma, xhat = (x - mean) rstd: dx = rstd (g - mean(g) - xhat mean(g xhat)), linear in x - mean
        const float rstd = t.rstd[r], at_x = -rstd * rstd * means[2 * r + 1], alone = -rstd * means[2 * r];
        float dy[VEC], x[VEC], dx[VEC] = {};
        pack_get(dy, t.dy[r]);
        pack_get(x, t.x[r]);
        if (ACCUMULATE) pack_get(dx, t.dresidual[r]);
        UNROLL_FOR (int j = 0; j < VEC; j++)
            dx[j] = fmaf(rstd, dy[j] * gamma[j], fmaf(at_x, x[j] - t.mean[r], dx[j] + alone));
        Pack<VEC> written = pack_of<VEC>(dx);
        pack_store(k.dresidual + (size_t)(row + r) * k.C + c, written);
        if constexpr (DROP) {
            pack_forget(written);
            pack_get(dx, written);
            dropout_multiply(dx, k.drop, b, row + r - b * k.split.T, c);
            written = pack_of<VEC>(dx);
            pack_store(k.dbranch + (size_t)(row + r) * k.C + c, written);
        }
        if (copies) fp8_copy(k.copy, (size_t)(row + r) * k.C + c, written, most);
        if constexpr (SETS == 3) {
            pack_get(dx, written);
            floats_add(grads[2], dx);
        }
    }
}

// A thread owns 8 columns, the block a whole row: C % 8 == 0, C <= 8 * BACKWARD_THREADS_MAX. Threads beyond the row
// only join the barriers. If runs do not cross examples, tile i goes to block i % weave of the example, so that rows
// read at one time are neighbours in DRAM. COPY: also writes k.copy; if DROP, only if k.copy.amax is set.
template <bool ACCUMULATE, bool DBIAS, bool DROP, bool COPY = false>
__global__ void __launch_bounds__(BACKWARD_THREADS_MAX) backward_kernel(const __grid_constant__ LayerNormBackward k) {
    constexpr int SETS = DBIAS ? 3 : 2;
    const bool copies = COPY && (!DROP || k.copy.amax);
    unsigned most = 0;
    __shared__ float shared[2][BACKWARD_THREADS_MAX / WARP][2 * TILE];
    const int c = threadIdx.x * VEC;
    const float per_column = 1.0f / k.C;
    after_wait();
    after_allow();
    Pack<VEC> gamma = c < k.C ? pack_load<VEC>(k.gamma + c) : Pack<VEC>{};

    const int weave = k.step / TILE, run = blockIdx.x / weave * weave * k.split.rows_per_block;
    const int end = min(run + weave * k.split.rows_per_block, k.split.rows);
    int row = run + blockIdx.x % weave * TILE, b = row / k.split.T, stop = min(end, (b + 1) * k.split.T);
    float grads[SETS][VEC] = {};
    RowTile next;
    tile_fetch<ACCUMULATE>(next, k, row, stop, c);
    for (int buffer = 0; row < end; buffer ^= 1) {
        const int after = min(row + k.step, stop), after_stop = after < stop ? stop : min(end, stop + k.split.T);
        RowTile tile = next;
        float sums[2 * TILE];
        tile_fetch<ACCUMULATE>(next, k, after, after_stop, c);
        tile_sums(sums, grads, tile, gamma);
        pack_forget(gamma);
        tile_sums_join(sums, shared[buffer]);
        UNROLL_FOR (int i = 0; i < 2 * TILE; i++) sums[i] *= per_column;
        tile_write<ACCUMULATE, DROP>(copies, k, grads, sums, tile, gamma, b, row, stop, c, most);
        if (after == stop) { // the block's last tile of an example
            UNROLL_FOR (int set = 0; set < SETS; set++) {
                if (c < k.C) floats_store(k.partials + ((size_t)(blockIdx.x + b) * SETS + set) * k.C + c, grads[set]);
                UNROLL_FOR (int j = 0; j < VEC; j++) grads[set][j] = 0.0f;
            }
            b++;
        }
        row = after, stop = after_stop;
    }
    if (copies) fp8_raise(k.copy.amax, fp8_most_value(most));
}

// Any C: the block walks along each row and adds to the partial sums in device memory.
__global__ static void __launch_bounds__(ROW_THREADS) backward_any_kernel(const __grid_constant__ LayerNormBackward k) {
    __shared__ float shared[2][ROW_THREADS / WARP];
    const int sets = k.bias ? 3 : 2, C = k.C, begin = blockIdx.x * k.split.rows_per_block;
    after_wait();
    after_allow();
    const int end = min(begin + k.split.rows_per_block, k.split.rows);
    for (int row = begin; row < end; row++) {
        const int b = row / k.split.T;
        const bool fresh = row == begin || row % k.split.T == 0;
        const size_t start = (size_t)row * C;
        const float mean = k.mean[row], rstd = k.rstd[row];
        float *slot = k.partials + (size_t)(blockIdx.x + b) * sets * C; // (sets, C)
        float m1 = 0.0f, m2 = 0.0f;
        for (int c = threadIdx.x; c < C; c += ROW_THREADS) {
            const float dy = (float)k.dy[start + c], gamma = (float)k.gamma[c];
            const float xhat = layernorm_xhat((float)k.x[start + c], mean, rstd);
            float dgamma = fresh ? 0.0f : slot[c], dbeta = fresh ? 0.0f : slot[C + c];
            m1 += dy * gamma;
            layernorm_add(&m2, &dgamma, &dbeta, dy, gamma, xhat);
            slot[c] = dgamma;
            slot[C + c] = dbeta;
        }
        m1 = block_sum(m1, shared[0]) / C;
        m2 = block_sum(m2, shared[1]) / C;
        for (int c = threadIdx.x; c < C; c += ROW_THREADS) {
            const float dy = (float)k.dy[start + c], gamma = (float)k.gamma[c];
            const float xhat = layernorm_xhat((float)k.x[start + c], mean, rstd);
            const float old = k.accumulate ? (float)k.dresidual[start + c] : 0.0f;
            real written = (real)(old + layernorm_dx(dy, gamma, xhat, rstd, m1, m2));
            k.dresidual[start + c] = written;
            if (k.drop.dropout.below) {
                float branch[1] = {(float)written};
                dropout_multiply(branch, k.drop, b, row % k.split.T, c);
                k.dbranch[start + c] = written = (real)branch[0];
            }
            if (k.bias) slot[2 * C + c] = (fresh ? 0.0f : slot[2 * C + c]) + (float)written;
        }
        __syncthreads(); // before `shared` is reused
    }
}

static bool backward_is_fast(int C) { return C % VEC == 0 && C <= VEC * BACKWARD_THREADS_MAX; }
static int backward_threads(int C) { return backward_is_fast(C) ? (int)round_up((size_t)C / VEC, WARP) : ROW_THREADS; }

// As many runs as 132 multiprocessors hold blocks. A multiprocessor has registers for 512 threads of the fast kernel.
static ColumnSplit backward_split(int B, int T, int C) {
    return column_split(B, T, 132 * (BACKWARD_THREADS_MAX / backward_threads(C)));
}

size_t layernorm_backward_bytes(int B, int T, int C) {
    return column_bytes(backward_split(B, T, C), COLUMN_SETS_MAX, C);
}

int layernorm_backward(LayerNormBackward k, const ColumnGradient (&gradients)[3], int B, ColumnJobs *jobs,
                       cudaStream_t stream, Error *e) {
    // Rows: (accumulate, bias) = (false, true), (true, false), (true, true). Columns: plain, with a copy, with dropout
    static constexpr decltype(&backward_kernel<true, true, false>) fast[3][3] = {
        {backward_kernel<false, true, false>, backward_kernel<false, true, false, FP8_BUILT>,
         backward_kernel<false, true, true, FP8_BUILT>},
        {backward_kernel<true, false, false>, NULL, backward_kernel<true, false, true>},
        {backward_kernel<true, true, false>, backward_kernel<true, true, false, FP8_BUILT>,
         backward_kernel<true, true, true, FP8_BUILT>}};
    const bool drops = k.drop.dropout.below, copies = k.copy.amax;
    k.bias = gradients[2].sum;
    assert(k.bias || !copies);
    k.split = backward_split(B, k.drop.T, k.C);
    const int rows = k.split.rows_per_block;
    k.step = TILE * (k.drop.T % rows ? 1 : k.drop.T / rows);
    k.partials = column_begin(jobs, gradients, k.bias ? 3 : 2, k.split, k.C);
    const bool is_fast = backward_is_fast(k.C) && (k.accumulate || k.bias);
    const Launch l = {.blocks = k.split.blocks,
                      .threads = is_fast ? backward_threads(k.C) : (int)ROW_THREADS,
                      .stream = stream,
                      .early = true};
    const int inputs = !k.accumulate ? 0 : k.bias ? 2 : 1;
    TRY(launch(l, e, is_fast ? fast[inputs][drops ? 2 : copies] : backward_any_kernel, k));
    return is_fast ? 0 : fp8_cast(k.copy, drops ? k.dbranch : k.dresidual, (size_t)k.split.rows * k.C, stream, e);
}
