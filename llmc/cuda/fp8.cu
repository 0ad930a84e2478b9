// fp8: see fp8.cuh.
#include "cuda/fp8.cuh"

enum { THREADS = 256, PACKS = 4 }; // packs in flight per thread

// Raises *amax to the largest `most` of a block's threads. All threads must call.
__device__ static void block_raise(float *amax, unsigned most) {
    __shared__ float of_block;
    if (threadIdx.x == 0) of_block = 0;
    __syncthreads();
    fp8_raise(&of_block, fp8_most_value(most));
    __syncthreads();
    if (threadIdx.x == 0) fp8_raise_to(amax, of_block);
}

// Grid: a thread per PACKS packs.
__global__ static void __launch_bounds__(THREADS) cast_kernel(Fp8Copy copy, const real *y, size_t packs) {
    const size_t first = (size_t)blockIdx.x * THREADS * PACKS + threadIdx.x;
    Pack<VEC> v[PACKS];
    unsigned most = 0;
    UNROLL_FOR (int p = 0; p < PACKS; p++) {
        const size_t i = first + p * THREADS;
        v[p] = i < packs ? pack_load<VEC>(y + i * VEC) : Pack<VEC>{};
    }
    UNROLL_FOR (int p = 0; p < PACKS; p++) {
        const size_t i = first + p * THREADS;
        if (i < packs) fp8_copy(copy, i * VEC, v[p], most);
    }
    block_raise(copy.amax, most);
}

// Grid: a thread per group of a row.
__global__ static void low_kernel(Fp8Copy copy, const real *y, int rows) {
    const int i = blockIdx.x * THREADS + threadIdx.x, row = i / copy.groups, g = i % copy.groups;
    uint32_t most = 0;
    if (row >= rows) return;
    y += (size_t)row * copy.columns + g * copy.group;
    const float x = y[fp8_channel(copy.channels[g], copy.group)];
    copy.low[(size_t)row * FP8_GROUPS + g] = fp8_low_code(x, copy.scale);
    for (int c = 0; c < copy.group && row % FP8_LOW_ROWS == 0; c++) most = max(most, fp8_candidate((float)y[c], c));
    fp8_raise_to(copy.candidates + g, __uint_as_float(most));
}

int fp8_cast(const Fp8Copy &copy, const real *y, size_t n, cudaStream_t stream, Error *e) {
    if (!copy.amax) return 0;
    TRY(launch({blocks_of(n / VEC, THREADS * PACKS), THREADS, stream}, e, cast_kernel, copy, y, n / VEC));
    if (!copy.groups) return 0;
    const int rows = (int)(n / copy.columns);
    return launch({blocks_of((size_t)rows * copy.groups, THREADS), THREADS, stream}, e, low_kernel, copy, y, rows);
}

// Grid: a thread per group of a column of the weight.
__global__ static void low_columns_kernel(uint8_t *low, Fp8Copy copy, const uint8_t *codes, int out) {
    const int i = blockIdx.x * THREADS + threadIdx.x, o = i / copy.groups, g = i % copy.groups;
    if (o >= out) return;
    const int channel = g * copy.group + fp8_channel(copy.channels[g], copy.group);
    low[(size_t)o * FP8_GROUPS + g] = codes[(size_t)o * copy.columns + channel];
}

int fp8_low_columns(uint8_t *low, const Fp8Copy &copy, const uint8_t *codes, int out, cudaStream_t stream, Error *e) {
    if (!copy.groups) return 0;
    return launch({blocks_of(out * copy.groups, THREADS), THREADS, stream}, e, low_columns_kernel, low, copy, codes,
                  out);
}

// ---- Transposed copies ----------------------------------------------------------------------------------------------

// A tile of codes in shared memory: 64 columns of at most TILE_ROWS rows. 8 bytes of padding after every eighth row
// avoid bank conflicts in tile_transpose.
enum { TILE = 64, TILE_PACKS = TILE / VEC, TILE_ROWS = 128, TILE_BYTES = TILE_ROWS * TILE + TILE_ROWS / 8 * 8 };
__device__ static uint2 *tile_at(uint8_t *tile, int r, int c) { return (uint2 *)(tile + r * TILE + r / 8 * 8 + c); }

// Transposes a matrix of 4 x 4 bytes.
__device__ static void words_transpose(unsigned (&x)[4]) {
    const unsigned a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[0], x[1], 0x7362);
    const unsigned c = __byte_perm(x[2], x[3], 0x5140), d = __byte_perm(x[2], x[3], 0x7362);
    x[0] = __byte_perm(a, c, 0x5410), x[1] = __byte_perm(a, c, 0x7632);
    x[2] = __byte_perm(b, d, 0x5410), x[3] = __byte_perm(b, d, 0x7632);
}

// Writes the columns of a tile of `rows` rows, column c from to[c * stride] on. A thread transposes 8 rows x 4 columns.
__device__ static void tile_transpose(uint8_t *to, size_t stride, const uint8_t *tile, int rows) {
    const int strips = rows / 8;
    for (int i = threadIdx.x; i < strips * TILE / 4; i += THREADS) {
        const int r = i % strips * 8, c = i / strips * 4;
        unsigned upper[4], lower[4];
        UNROLL_FOR (int k = 0; k < 4; k++) {
            const uint8_t *row = tile + (r + k) * TILE + r / 8 * 8 + c;
            upper[k] = *(const unsigned *)row, lower[k] = *(const unsigned *)(row + 4 * TILE);
        }
        words_transpose(upper), words_transpose(lower);
        UNROLL_FOR (int k = 0; k < 4; k++) *(uint2 *)(to + (c + k) * stride + r) = {upper[k], lower[k]};
    }
}

struct Transpose {
    uint8_t *to;
    const void *from; // values of type real, or codes
    Fp8Copy copy;
    float *columns; // partial sums (reduce.cuh), or NULL
    ColumnSplit split;
    int C;
};

// Stores the sums of a tile's columns. sums: the thread's sums of 8 columns over every 32nd row.
__device__ static void tile_columns_out(float *to, float (&sums)[VEC]) {
    __shared__ alignas(16) float shared[THREADS / WARP][TILE];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    UNROLL_FOR (int offset = TILE_PACKS; offset < WARP; offset *= 2)
        UNROLL_FOR (int j = 0; j < VEC; j++) sums[j] += __shfl_xor_sync(~0u, sums[j], offset);
    if (lane < TILE_PACKS) floats_store(shared[warp] + lane * VEC, sums);
    __syncthreads();
    if (threadIdx.x >= TILE) return;
    float sum = 0.0f;
    UNROLL_FOR (int w = 0; w < THREADS / WARP; w++) sum += shared[w][threadIdx.x];
    to[threadIdx.x] = sum;
}

// Grid: a block per tile, which is 64 columns of one run of rows.
template <bool CODES>
__global__ static void __launch_bounds__(THREADS) transpose_kernel(const __grid_constant__ Transpose t) {
    constexpr int ROW_STEP = THREADS / TILE_PACKS, STEPS = TILE_ROWS / ROW_STEP;
    __shared__ alignas(8) uint8_t tile[TILE_BYTES];
    const int rows = t.split.rows_per_block, across = t.C / TILE;
    const int run = blockIdx.x / across, column = blockIdx.x % across * TILE;
    const int r = threadIdx.x / TILE_PACKS, c = threadIdx.x % TILE_PACKS * VEC;
    const size_t first = (size_t)run * rows, at = (first + r) * t.C + column + c, step = (size_t)ROW_STEP * t.C;
    Pack<VEC> x[STEPS];
    float sums[VEC] = {};
    unsigned most = 0;
    UNROLL_FOR (int i = 0; i < STEPS; i++)
        if (!CODES && r + i * ROW_STEP < rows) x[i] = pack_load<VEC>((const real *)t.from + at + i * step);
    UNROLL_FOR (int i = 0; i < STEPS; i++) {
        if (r + i * ROW_STEP >= rows) continue;
        uint2 codes;
        if constexpr (CODES) codes = *(const uint2 *)((const uint8_t *)t.from + at + i * step);
        else {
            float f[VEC];
            codes = fp8_codes(x[i], t.copy.scale);
            if (t.copy.codes) *(uint2 *)(t.copy.codes + at + i * step) = codes;
            pack_get(f, x[i]);
            floats_add(sums, f);
            fp8_most(most, x[i]);
        }
        *tile_at(tile, r + i * ROW_STEP, c) = codes;
    }
    __syncthreads();
    const int T = t.split.T, b = run / (T / rows);
    tile_transpose(t.to + ((size_t)b * t.C + column) * T + first % T, T, tile, rows);
    if (t.copy.amax) block_raise(t.copy.amax, most);
    if (t.columns) tile_columns_out(t.columns + (size_t)(run + b) * t.C + column, sums);
}

// The rows of a run are the largest power of two that divides T, but at most TILE_ROWS.
static ColumnSplit transpose_split(int B, int T) {
    const int rows = min(T & -T, (int)TILE_ROWS), blocks = B * T / rows;
    return {B * T, T, rows, blocks, blocks + B};
}

size_t fp8_column_bytes(int B, int T, int C) { return column_bytes(transpose_split(B, T), 1, C); }

int fp8_cast_transposed(uint8_t *transposed, const Fp8Copy &copy, const real *y, int B, int T, int C,
                        const ColumnGradient &columns, ColumnJobs *jobs, cudaStream_t stream, Error *e) {
    const ColumnSplit split = transpose_split(B, T);
    float *partials = columns.sum ? column_begin(jobs, &columns, 1, split, C) : NULL;
    return launch({C / TILE * split.blocks, THREADS, stream}, e, transpose_kernel<false>,
                  Transpose{transposed, y, copy, partials, split, C});
}

int fp8_transpose(uint8_t *transposed, const uint8_t *codes, int B, int T, int C, cudaStream_t stream, Error *e) {
    const ColumnSplit split = transpose_split(B, T);
    return launch({C / TILE * split.blocks, THREADS, stream}, e, transpose_kernel<true>,
                  Transpose{transposed, codes, {}, NULL, split, C});
}

// Grid: one block.
__global__ static void veto_kernel(double *norm, const int8_t *k, const float *amax, int count) {
    for (int i = threadIdx.x; i < count; i += THREADS)
        if (fp8_saturates(k[fp8_exponent_at(i)], amax[fp8_exponent_at(i)])) *norm = INFINITY;
}

int fp8_veto(double *norm, const int8_t *k, const float *amax, int count, cudaStream_t stream, Error *e) {
    return launch({1, THREADS, stream}, e, veto_kernel, norm, k, amax, count);
}
