#include "cuda/decode.cuh"
#include "cuda/gelu.cuh"
#include "cuda/vec.cuh"
#include "math/layernorm.h"
#include "model/cuda_sizes.h"

enum { THREADS = 512, WARPS = THREADS / WARP };
enum { SPLITS_MAX = 8, HEAD_SPLITS_MAX = 12, AT_ONCE = 4 }; // AT_ONCE: rows that a warp has in flight
enum { HEAD_PARTS = ATTENTION_HEAD_SIZE_MAX / WARP, ROOM = ATTENTION_HEAD_SIZE_MAX + 2 };
enum { TILE_THREADS = 4, TILE_ROWS = THREADS / TILE_THREADS }; // of a tile: across its columns; its rows at a time
enum { FETCHED = 16 / sizeof(real) };                          // rows of a thread that are fetched in advance

// y (out) = x (in) W (in, out) + bias. Each of `splits` ranges of rows has a sum of its own in partials (splits, out).
typedef struct {
    const real *w, *bias;
    int in, out, splits;
    float *partials;
} Product;

typedef struct {
    const real *gamma, *beta;
} Norm;

// The weights of block 0; those of each next block are `stride` elements further.
typedef struct {
    int L, NH, C, V, head_splits;
    size_t stride, qkv_stride;
    const real *wte, *wpe;
    Norm ln1, ln2, lnf;
    Product qkv, proj, fc, fcproj;
    real *cache;      // qkv of block 0
    float *attention; // (NH, head_splits, D + 2): sum of values, largest score, sum of weights
    float *logits;
    unsigned *arrived; // thread blocks at any barrier so far; 0 at first
} Layers;

// A barrier of all thread blocks in two parts: between them a block fetches what no other writes.
__device__ static void arrive(unsigned *arrived) {
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
}

// Waits until all have arrived n times, and sees what they wrote before.
__device__ static void await_blocks(unsigned *arrived, unsigned n) {
    if (threadIdx.x == 0) {
        unsigned now;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
        while (now < n * gridDim.x);
    }
    __syncthreads();
}

__device__ static float rounded(float x) { return real_to_float((real)x); }

__device__ static Norm norm_of(Norm n, size_t ahead) { return {n.gamma + ahead, n.beta + ahead}; }
__device__ static Product product_of(Product p, size_t ahead) {
    p.w += ahead, p.bias += ahead;
    return p;
}

// Element c of a finished product. Other multiprocessors wrote its parts: not from this one's own cache.
__device__ static float output(const Product &p, int c) {
    float sum = 0;
    UNROLL_FOR (int s = 0; s < SPLITS_MAX; s++)
        if (s < p.splits) sum += __ldcg(p.partials + (size_t)s * p.out + c);
    return rounded(sum + real_to_float(p.bias[c]));
}

// x (C) += the finished product.
__device__ static void add_output(float *x, const Product &p) {
    for (int c = threadIdx.x; c < p.out; c += THREADS) x[c] = rounded(x[c] + output(p, c));
}

// y = LN(x), each (C) in shared memory.
__device__ static void normalise(float *y, const float *x, Norm n, int C) {
    __shared__ float shared[2][WARPS];
    float sum = 0, squares = 0;
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += THREADS) sum += x[c];
    const float mean = block_sum(sum, shared[0]) / C;
    for (int c = threadIdx.x; c < C; c += THREADS) squares = add_square(squares, x[c] - mean);
    const float rstd = layernorm_rstd(block_sum(squares, shared[1]), C);
    for (int c = threadIdx.x; c < C; c += THREADS)
        y[c] =
            rounded(layernorm_y(layernorm_xhat(x[c], mean, rstd), real_to_float(n.gamma[c]), real_to_float(n.beta[c])));
    __syncthreads();
}

// A tile of a product: of its columns, and of the rows of one split.
struct Tile {
    int first, begin, end, split; // column; rows
};

template <int W> __device__ static int tiles_of(const Product &p) {
    return (p.out + TILE_THREADS * W - 1) / (TILE_THREADS * W) * p.splits;
}

template <int W> __device__ static Tile tile_of(const Product &p, int i) {
    const int rows = (p.in + p.splits - 1) / p.splits, split = i % p.splits;
    return {i / p.splits * TILE_THREADS * W, split * rows, min(p.in, (split + 1) * rows), split};
}

__device__ static void prefetch_line(const real *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// By one thread block: n values, at most 64 a thread.
__device__ static void prefetch_vector(const real *p, int n, int block) {
    if (blockIdx.x == block && threadIdx.x * 64 < n) prefetch_line(p + threadIdx.x * 64);
}

// The vectors of a block, to the second-level cache: while the block before it is computed.
__device__ static void prefetch_vectors(const Layers &a, size_t ahead) {
    prefetch_vector(a.ln1.gamma + ahead, a.C, 0);
    prefetch_vector(a.ln1.beta + ahead, a.C, 1);
    prefetch_vector(a.qkv.bias + ahead, 3 * a.C, 2);
    prefetch_vector(a.proj.bias + ahead, a.C, 3);
    prefetch_vector(a.ln2.gamma + ahead, a.C, 4);
    prefetch_vector(a.ln2.beta + ahead, a.C, 5);
    prefetch_vector(a.fc.bias + ahead, 4 * a.C, 6);
    prefetch_vector(a.fcproj.bias + ahead, a.C, 7);
}

// Rows of a thread block's first tile. They are fetched before it waits for the other blocks: weights are there already.
template <int W> struct Fetched { Pack<W> w[FETCHED]; };

__device__ static int first_row(const Tile &t) { return t.begin + (int)threadIdx.x / TILE_THREADS; }

// The weights of this thread in row number k of its rows of a tile; 0 where it has none.
template <int W> __device__ static Pack<W> weights_of(const Product &p, const Tile &t, int k) {
    const int r = first_row(t) + k * TILE_ROWS, c = t.first + (int)threadIdx.x % TILE_THREADS * W;
    return r < t.end && c < p.out ? pack_load<W>(p.w + (size_t)r * p.out + c) : Pack<W>{};
}

template <int W> __device__ static void fetch(Fetched<W> *f, const Product &p) {
    if (blockIdx.x >= tiles_of<W>(p)) return;
    const Tile t = tile_of<W>(p, blockIdx.x);
    UNROLL_FOR (int k = 0; k < FETCHED; k++) f->w[k] = weights_of<W>(p, t, k);
}

// sum += x[r] w
template <int W> __device__ static void add_row(float (&sum)[W], const Pack<W> &pack, const float *x, int r, int end) {
    float w[W];
    pack_get(w, pack);
    const float value = r < end ? x[r] : 0;
    UNROLL_FOR (int j = 0; j < W; j++) sum[j] = add_product(sum[j], value, w[j]);
}

// The thread block's sum of a tile, from those of its threads.
template <int W>
__device__ static void finish_tile(const Product &p, const Tile &t, float (&sum)[W], float (*room)[ROOM]) {
    const int lane = threadIdx.x % WARP, column = threadIdx.x;
    UNROLL_FOR (int j = 0; j < W; j++)
        UNROLL_FOR (int offset = TILE_THREADS; offset < WARP; offset *= 2)
            sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], offset);
    if (lane < TILE_THREADS)
        UNROLL_FOR (int j = 0; j < W; j++) room[threadIdx.x / WARP][lane * W + j] = sum[j];
    __syncthreads();
    if (column < TILE_THREADS * W && t.first + column < p.out) {
        float total = 0;
        UNROLL_FOR (int k = 0; k < WARPS; k++) total += room[k][column];
        p.partials[(size_t)t.split * p.out + t.first + column] = total;
    }
    __syncthreads();
}

// The partial sums of a product, from x in shared memory: a tile at a time, W columns a thread.
template <int W> __device__ static void multiply(const Product &p, const float *x, Fetched<W> *f, float (*room)[ROOM]) {
    for (int i = blockIdx.x; i < tiles_of<W>(p); i += gridDim.x) {
        const Tile t = tile_of<W>(p, i);
        float sum[W] = {};
        for (int k = 0; first_row(t) + k * TILE_ROWS < t.end; k += FETCHED) {
            if (k > 0 || i > (int)blockIdx.x)
                UNROLL_FOR (int j = 0; j < FETCHED; j++) f->w[j] = weights_of<W>(p, t, k + j);
            UNROLL_FOR (int j = 0; j < FETCHED; j++)
                add_row(sum, f->w[j], x, first_row(t) + (k + j) * TILE_ROWS, t.end);
        }
        finish_tile(p, t, sum, room);
    }
}

// x = gelu(fc), in the rows that this thread block multiplies.
template <int W> __device__ static void gelu_output(float *x, const Product &fc, const Product &fcproj) {
    const int tiles = tiles_of<W>(fcproj);
    Tile rows = tile_of<W>(fcproj, blockIdx.x);
    if (tiles > gridDim.x) rows.begin = 0, rows.end = fcproj.in;
    for (int c = rows.begin + threadIdx.x; c < rows.end && blockIdx.x < tiles; c += THREADS)
        x[c] = rounded(gelu(output(fc, c)));
    __syncthreads();
}

// ---- Attention of one query -----------------------------------------------------------------------------------------

// A warp's part of a softmax: the largest score so far, and sums with weights exp(score - largest).
struct Softmax {
    float largest, weights, values[HEAD_PARTS]; // values: of elements lane, lane + 32, ...
};

// AT_ONCE keys from `key` on, those before `end`. own: q, k and v of the token, whose row of the cache is not written yet.
__device__ static void attend(Softmax *s, const real *keys, int key, int end, int row, const float *own, int C, int D) {
    const int lane = threadIdx.x % WARP;
    float score[AT_ONCE], v[AT_ONCE][HEAD_PARTS];
    UNROLL_FOR (int i = 0; i < AT_ONCE; i++) {
        const real *k = keys + (size_t)(key + i) * 3 * C;
        score[i] = 0;
        UNROLL_FOR (int j = 0; j < HEAD_PARTS; j++) {
            const int d = lane + j * WARP;
            v[i][j] = 0;
            if (d >= D || key + i >= end) continue;
            const bool last = key + i == row;
            score[i] += own[d] * (last ? own[D + d] : real_to_float(k[d]));
            v[i][j] = last ? own[2 * D + d] : real_to_float(k[C + d]);
        }
    }
    float largest = s->largest;
    UNROLL_FOR (int i = 0; i < AT_ONCE; i++) {
        score[i] = key + i < end ? warp_sum(score[i]) * rsqrtf((float)D) : -INFINITY;
        largest = fmaxf(largest, score[i]);
    }
    const float old = expf(s->largest - largest);
    s->largest = largest, s->weights *= old;
    UNROLL_FOR (int j = 0; j < HEAD_PARTS; j++) s->values[j] *= old;
    UNROLL_FOR (int i = 0; i < AT_ONCE; i++) {
        const float weight = expf(score[i] - largest);
        s->weights += weight;
        UNROLL_FOR (int j = 0; j < HEAD_PARTS; j++) s->values[j] += weight * v[i][j];
    }
}

// The weight of a part in the whole, whose largest score is given; a part may have no keys.
__device__ static float share(float largest, float of_all) { return largest == -INFINITY ? 0 : expf(largest - of_all); }

// out (D + 2): the warps' parts, which lie in room, added up.
__device__ static void attention_finish(float *out, const float (*room)[ROOM], int D) {
    float largest = -INFINITY, sum = 0;
    if (threadIdx.x >= D + 2) return;
    for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, room[w][D]);
    const int d = threadIdx.x == D ? D + 1 : threadIdx.x; // thread D + 1 writes the largest
    for (int w = 0; w < WARPS; w++) sum += room[w][min(d, D + 1)] * share(room[w][D], largest);
    if (threadIdx.x <= D) out[d] = sum;
    else out[D] = largest;
}

// The keys and values of this thread block's first head and range, to the second-level cache.
__device__ static void prefetch_keys(const Layers &a, const real *cache, int row) {
    const int D = a.C / a.NH, each = (row + a.head_splits) / a.head_splits;
    const int h = blockIdx.x % a.NH, begin = (int)blockIdx.x / a.NH * each, end = min(begin + each, row);
    if (blockIdx.x >= a.NH * a.head_splits) return;
    for (int i = threadIdx.x; i < 2 * (end - begin); i += THREADS)
        prefetch_line(cache + (size_t)(begin + i / 2) * 3 * a.C + (1 + i % 2) * a.C + h * D);
}

// A head and a range of keys at a time. own (3 D): shared memory.
__device__ static void attention(const Layers &a, const Product &qkv, real *cache, int row, float *own,
                                 float (*room)[ROOM]) {
    const int D = a.C / a.NH, each = (row + a.head_splits) / a.head_splits;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int item = blockIdx.x; item < a.NH * a.head_splits; item += gridDim.x) {
        const int h = item % a.NH, split = item / a.NH, begin = split * each;
        const int end = min(begin + each, row + 1);
        for (int i = threadIdx.x; i < 3 * D; i += THREADS) {
            const int c = i / D * a.C + h * D + i % D;
            own[i] = output(qkv, c);
            if (split == 0) cache[(size_t)row * 3 * a.C + c] = (real)own[i];
        }
        __syncthreads();
        Softmax s = {-INFINITY};
        for (int key = begin + warp * AT_ONCE; key < end; key += WARPS * AT_ONCE)
            attend(&s, cache + a.C + h * D, key, end, row, own, a.C, D);
        UNROLL_FOR (int j = 0; j < HEAD_PARTS; j++)
            if (lane + j * WARP < D) room[warp][lane + j * WARP] = s.values[j];
        if (lane == 0) room[warp][D] = s.largest, room[warp][D + 1] = s.weights;
        __syncthreads();
        attention_finish(a.attention + (size_t)(h * a.head_splits + split) * (D + 2), room, D);
        __syncthreads();
    }
}

// x (C) = the heads' results, from the parts of their keys.
__device__ static void attention_output(float *x, const Layers &a) {
    const int D = a.C / a.NH;
    for (int c = threadIdx.x; c < a.C; c += THREADS) {
        const float *parts = a.attention + (size_t)(c / D) * a.head_splits * (D + 2);
        float largest = -INFINITY, sum = 0, weights = 0, score[HEAD_SPLITS_MAX], part[HEAD_SPLITS_MAX][2];
        UNROLL_FOR (int s = 0; s < HEAD_SPLITS_MAX; s++) {
            const bool there = s < a.head_splits;
            score[s] = there ? __ldcg(parts + s * (D + 2) + D) : -INFINITY;
            part[s][0] = there ? __ldcg(parts + s * (D + 2) + c % D) : 0;
            part[s][1] = there ? __ldcg(parts + s * (D + 2) + D + 1) : 0;
        }
        UNROLL_FOR (int s = 0; s < HEAD_SPLITS_MAX; s++) largest = fmaxf(largest, score[s]);
        UNROLL_FOR (int s = 0; s < HEAD_SPLITS_MAX; s++) {
            const float of_all = share(score[s], largest);
            sum += of_all * part[s][0];
            weights += of_all * part[s][1];
        }
        x[c] = rounded(sum / weights);
    }
    __syncthreads();
}

// ---- The pass -------------------------------------------------------------------------------------------------------

// A warp takes AT_ONCE rows of wte at a time.
template <int W> __device__ static void head(const Layers &a, const float *x) {
    const int lane = threadIdx.x % WARP, warp = blockIdx.x * WARPS + threadIdx.x / WARP;
    for (int v = warp * AT_ONCE; v < a.V; v += gridDim.x * WARPS * AT_ONCE) {
        float sum[AT_ONCE] = {};
#pragma unroll 2
        for (int c = lane * W; c < a.C; c += WARP * W)
            UNROLL_FOR (int i = 0; i < AT_ONCE; i++) {
                float w[W];
                if (v + i >= a.V) continue;
                pack_get(w, pack_load<W>(a.wte + (size_t)(v + i) * a.C + c));
                UNROLL_FOR (int j = 0; j < W; j++) sum[i] = add_product(sum[i], x[c + j], w[j]);
            }
        UNROLL_FOR (int i = 0; i < AT_ONCE; i++) {
            const float logit = warp_sum(sum[i]);
            if (lane == 0 && v + i < a.V) a.logits[v + i] = logit;
        }
    }
}

// x (C) in every thread block: the residual stream. in (4C): the input of the next product.
template <int W>
__global__ void __launch_bounds__(THREADS) decode_kernel(const __grid_constant__ Layers a, int token, int row) {
    extern __shared__ float x[];
    __shared__ float room[WARPS][ROOM];
    float *in = x + a.C;
    unsigned barriers = 0;
    Fetched<W> f;
    fetch(&f, a.qkv);
    for (int c = threadIdx.x; c < a.C; c += THREADS)
        x[c] = rounded(real_to_float(a.wte[(size_t)token * a.C + c]) + real_to_float(a.wpe[(size_t)row * a.C + c]));
    for (int l = 0; l < a.L; l++) {
        const size_t ahead = l * a.stride;
        const Product qkv = product_of(a.qkv, ahead), proj = product_of(a.proj, ahead), fc = product_of(a.fc, ahead);
        const Product fcproj = product_of(a.fcproj, ahead);
        real *cache = a.cache + l * a.qkv_stride;
        if (l + 1 < a.L) prefetch_vectors(a, ahead + a.stride);
        normalise(in, x, norm_of(a.ln1, ahead), a.C);
        multiply(qkv, in, &f, room);
        arrive(a.arrived);
        prefetch_keys(a, cache, row);
        fetch(&f, proj);
        await_blocks(a.arrived, ++barriers);
        attention(a, qkv, cache, row, in, room);
        arrive(a.arrived);
        await_blocks(a.arrived, ++barriers);
        attention_output(in, a);
        multiply(proj, in, &f, room);
        arrive(a.arrived);
        fetch(&f, fc);
        await_blocks(a.arrived, ++barriers);
        add_output(x, proj);
        normalise(in, x, norm_of(a.ln2, ahead), a.C);
        multiply(fc, in, &f, room);
        arrive(a.arrived);
        fetch(&f, fcproj);
        await_blocks(a.arrived, ++barriers);
        gelu_output<W>(in, fc, fcproj);
        multiply(fcproj, in, &f, room);
        arrive(a.arrived);
        if (l + 1 < a.L) fetch(&f, product_of(a.qkv, ahead + a.stride));
        await_blocks(a.arrived, ++barriers);
        add_output(x, fcproj);
    }
    normalise(in, x, a.lnf, a.C);
    head<W>(a, in);
}

// ---- Set-up ---------------------------------------------------------------------------------------------------------

size_t decode_scratch_floats(const ModelConfig *config) {
    return SPLITS_MAX * 9 * (size_t)config->channels +
           HEAD_SPLITS_MAX * (size_t)(config->channels + 2 * config->heads) + 1;
}

// Into how many ranges of rows a product is cut: by the estimated time of the thread block with most tiles, and of adding
// the sums. (A block reads 36 bytes a nanosecond; a tile begins and ends in 0.7 us, a sum adds 0.03 us.)
static int splits_for(int in, int out, int columns, int blocks) {
    const int tiles = (out + columns - 1) / columns;
    double least = INFINITY;
    int best = 1;
    for (int s = 1; s <= SPLITS_MAX; s++) {
        const double read = (double)in / s * columns * sizeof(real) / 36;
        const double time = (tiles * s + blocks - 1) / blocks * (read + 700) + 30 * s;
        if (time < least) least = time, best = s;
    }
    return best;
}

static Layers layers_of(const Decoder *d, float *logits, int columns) {
    const ModelConfig *m = &d->model->config;
    const int C = m->channels, blocks = d->multiprocessors;
    float *room = d->scratch;
    const auto at = [&](TensorKind kind) { return d->weight + model_tensor(d->model, kind, 0)->offset; };
    const auto norm = [&](TensorKind w, TensorKind b) { return Norm{at(w), at(b)}; };
    const auto product = [&](TensorKind w, TensorKind b, int in, int out) {
        Product p = {at(w), at(b), in, out, splits_for(in, out, columns, blocks), room};
        room += SPLITS_MAX * (size_t)out;
        return p;
    };
    const size_t stride =
        m->layers > 1 ? model_tensor(d->model, LN1_W, 1)->offset - model_tensor(d->model, LN1_W, 0)->offset : 0;
    const int head_splits = blocks / m->heads;
    return {.L = m->layers,
            .NH = m->heads,
            .C = C,
            .V = m->vocab,
            .head_splits = head_splits < 1                 ? 1
                           : head_splits > HEAD_SPLITS_MAX ? HEAD_SPLITS_MAX
                                                           : head_splits,
            .stride = stride,
            .qkv_stride = d->qkv_stride,
            .wte = at(WTE),
            .wpe = at(WPE),
            .ln1 = norm(LN1_W, LN1_B),
            .ln2 = norm(LN2_W, LN2_B),
            .lnf = norm(LNF_W, LNF_B),
            .qkv = product(QKV_W, QKV_B, C, 3 * C),
            .proj = product(PROJ_W, PROJ_B, C, C),
            .fc = product(FC_W, FC_B, C, 4 * C),
            .fcproj = product(FCPROJ_W, FCPROJ_B, 4 * C, C),
            .cache = d->qkv,
            .attention = room,
            .logits = logits,
            .arrived = (unsigned *)(d->scratch + decode_scratch_floats(m) - 1)};
}

static size_t shared_bytes_of(int channels) { return 5 * (size_t)channels * sizeof(float); }

bool decode_fits(int channels, size_t shared_bytes) {
    return shared_bytes_of(channels) + WARPS * (2 + ROOM) * sizeof(float) <= shared_bytes;
}

template <int W> static int run(float *logits, const Decoder *d, int token, int row, cudaStream_t stream, Error *e) {
    const size_t shared = shared_bytes_of(d->model->config.channels);
    Layers layers = layers_of(d, logits, TILE_THREADS * W);
    CUDA_TRY(cudaMemsetAsync(layers.arrived, 0, sizeof *layers.arrived, stream), e);
    void *parameters[] = {&layers, &token, &row};
    TRY(shared_memory_allow(decode_kernel<W>, shared, e));
    return CUDA_CALL(cudaLaunchCooperativeKernel((void *)decode_kernel<W>, dim3(d->multiprocessors), dim3(THREADS),
                                                 parameters, shared, stream),
                     e);
}

int decode(float *logits, const Decoder *decoder, int token, int row, cudaStream_t stream, Error *e) {
    const auto of_width = decoder->model->config.channels % VEC ? run<1> : run<VEC>;
    return of_width(logits, decoder, token, row, stream, e);
}
