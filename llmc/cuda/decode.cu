// One kernel walks through all layers. Its thread blocks, one a multiprocessor, pass results to each other as words:
// 1. A word is a float in memory. Before a launch all bits of all words are set (EMPTY). One thread writes a word, once a
//    launch, in one store. (A NaN of these bits is sent as another NaN.) No word is used twice, so none is cleared between.
// 2. A reader repeats its load until the word is not EMPTY. Nothing but words is passed: no fence, flag or barrier of the
//    whole device is needed, and a result costs one store and one load of latency.
// 3. A word depends only on words of earlier phases, and all thread blocks run at once (a cooperative launch): no reader
//    waits forever.
// 4. In a thread block each warp computes the inputs of the rows that it multiplies, and keeps its columns of the residual
//    stream: an input passes no barrier but that of LayerNorm's sums. The sums of a tile end with a barrier. Two buffers of
//    these take turns: who writes one has passed the barrier of the other, and so has who read it.
// 5. A warp fetches its own weights, STAGES chunks in advance across products, layers and the head, into its own part of a
//    ring in shared memory. Each use of a chunk waits for all but the last STAGES - 1 groups of fetches, and one chunk is
//    fetched after each use.
// 6. A phase's code runs once a layer: loops are not unrolled where that is not said, because reading instructions takes
//    longer than a branch.
#include "cuda/decode.cuh"
#include "cuda/gelu.cuh"
#include "cuda/mma.cuh"
#include "cuda/vec.cuh"
#include "math/layernorm.h"
#include "model/cuda_sizes.h"

enum { THREADS = 256, WARPS = THREADS / WARP };
enum { SPLITS_MAX = 4, HEAD_SPLITS_MAX = 12 };
enum { STEP_ROWS = 16, STEP_PACKS = 2, PIECES_MAX = 4 };
enum { STAGES = 2, CHUNK_MAX = 32 / sizeof(real) }; // chunks in flight; steps in one
enum { AT_ONCE = 4 };                               // rows of the head that a warp has in flight
enum { QKV, PROJ, FC, FCPROJ, PRODUCTS };
constexpr unsigned EMPTY = 0xffffffff;
template <int W> constexpr int WORDS = W == 1 ? 1 : 4; // that a thread loads at once, where W columns are side by side

// y (out) = x (in) W (in, out) + bias. A tile is `columns` columns of the rows of one split; each split has sums of its own in
// words (splits, out). A warp takes its rows of a tile in steps of STEP_ROWS rows and STEP_PACKS packs of columns, `pieces`
// of them beside each other.
typedef struct {
    const real *w, *bias; // of block 0
    int in, out, columns;
    int splits, split_shift; // powers of two and their logarithms
    int pieces, piece_shift;
    int tiles;                 // in all splits
    int split_rows, warp_rows; // at most
    int steps;                 // of a warp in a tile
    int words;                 // their place among those of a block
} Product;

typedef struct {
    const real *gamma, *beta; // of block 0
} Norm;

typedef struct {
    int L, NH, C, V, D;
    size_t stride, qkv_stride, words_stride; // from one block's weights, qkv, words to the next one's
    const real *wte, *wpe;
    Norm ln1, ln2, lnf;
    Product product[PRODUCTS];
    int head_splits, keys_each;      // ranges of keys, and their keys
    int key_lanes, key_lanes_shift;  // lanes of a warp that share a key, a power of two
    unsigned by_heads, by_head_size; // reciprocals, see quotient
    int attention_words,
        weight_words; // (head_splits, C) heads' results of a range; (head_splits, NH) log2 of the sums of weights
    int chunk, room_width, in_count;
    int head_rows, head_packs; // rows of wte that a warp takes at once; packs of a lane in each
    float per_channel;         // 1 / C
    float score_scale;         // log2 e / sqrt(D)
    int keys_rounds;           // that there is room for
    real *cache;               // qkv of block 0
    float *words, *logits;
} Layers;

// n / d, where by = reciprocal(d) and n is less than 2^16.
static unsigned reciprocal(unsigned d) { return (unsigned)((((uint64_t)1 << 32) + d - 1) / d); }
__device__ static int quotient(unsigned n, unsigned by) { return by ? (int)__umulhi(n, by) : (int)n; }

__device__ static float rounded(float x) { return real_to_float((real)x); }

// ---- Words ----------------------------------------------------------------------------------------------------------

__device__ static void word_send(float *to, float x) {
    const unsigned bits = min(__float_as_uint(x), EMPTY - 1);
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

// Loads V words that lie side by side; *there becomes false if one is not there yet.
template <int V> __device__ static void words_load(float (&x)[V], const float *from, bool *there) {
    static_assert(V == 1 || V == 4);
    unsigned w[V];
    if constexpr (V == 1) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(w[0]) : "l"(from) : "memory");
    else
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "l"(from)
                     : "memory");
    UNROLL_FOR (int j = 0; j < V; j++) *there &= w[j] != EMPTY, x[j] = __uint_as_float(w[j]);
}

// Between loads of words that are not there: loads delay the stores that they wait for.
__device__ static bool pause(void) {
    __nanosleep(20);
    return true;
}

// A warp's rows of a matrix: of the residual stream, or of a tile.
struct Rows {
    int begin, end;
};

// use(c, sums) for the rows, V at a time: the sums of their words in all splits, at most S. A lane has N V rows in flight.
template <int V, int S, int N, typename Use>
__device__ static void for_sums(const float *words, int splits, int stride, Rows rows, Use use) {
#pragma unroll 1
    for (int first = rows.begin + (int)threadIdx.x % WARP * V; first < rows.end; first += N * WARP * V) {
        float x[N][S][V];
        bool there;
        do {
            there = true;
            UNROLL_FOR (int i = 0; i < N; i++)
                UNROLL_FOR (int s = 0; s < S; s++)
                    if (first + i * WARP * V < rows.end && s < splits)
                        words_load<V>(x[i][s], words + s * stride + first + i * WARP * V, &there);
        } while (!there && pause());
        UNROLL_FOR (int i = 0; i < N; i++) {
            float sum[V] = {};
            if (first + i * WARP * V >= rows.end) break;
            UNROLL_FOR (int s = 0; s < S; s++)
                UNROLL_FOR (int j = 0; j < V; j++)
                    if (s < splits) sum[j] += x[i][s][j];
            use(first + i * WARP * V, sum);
        }
    }
}

// ---- Weights --------------------------------------------------------------------------------------------------------

// A thread block's tile of a product.
struct Tile {
    int first, end, split; // columns
    Rows rows;             // of this warp
};

__device__ static Tile tile_of(const Product &p, int i) {
    const int split = i & (p.splits - 1), first = (i >> p.split_shift) * p.columns, begin = split * p.split_rows;
    const int end = min(begin + p.split_rows, p.in);
    const int mine = min(begin + (int)threadIdx.x / WARP * p.warp_rows, p.in);
    return {first, min(first + p.columns, p.out), split, {mine, min(mine + p.warp_rows, end)}};
}

// What a warp fetches next: a chunk of the steps of a tile.
struct Stream {
    int layer, product, tile, step, stage;
};

// Skips to a tile that there is.
__device__ static void stream_settle(Stream *s, const Layers &a) {
#pragma unroll 1
    while (s->layer < a.L && s->tile >= a.product[s->product].tiles) {
        s->tile = blockIdx.x;
        if (++s->product == PRODUCTS) s->product = 0, s->layer++;
        if (s->layer == a.L) s->tile = 0;
    }
}

// The warp's place in a stage of the ring; step k of it is k THREADS packs further.
template <int W> __device__ static Pack<W> *stage_at(const Layers &a, Pack<W> *ring, int stage) {
    return ring + stage * a.chunk * THREADS + threadIdx.x / WARP * WARP;
}

// Where a pack of a step lies: in the order of ldmatrix, 8 rows of the one column of packs, then of the other.
__device__ static int slot_of(int row, int pack) { return row / 8 * 16 + pack * 8 + row % 8; }

__device__ static void fetch_one(Pack<VEC> *to, const real *from, bool there) { pack_fetch(to, from, there); }
__device__ static void fetch_one(Pack<1> *to, const real *from, bool there) {
    *to = there ? pack_load<1>(from) : Pack<1>{};
}

// The first of the rows of wte that a warp takes together, its `turn`-th ones.
__device__ static int head_row(const Layers &a, int turn) {
    return ((turn * gridDim.x + blockIdx.x) * WARPS + threadIdx.x / WARP) * a.head_rows;
}

// After the last layer: packs of rows of wte. (s->tile: the turn. s->step: the first pack.)
template <int W> __device__ static void stream_fetch_head(Stream *s, const Layers &a, Pack<W> *to) {
    const int v = head_row(a, s->tile), count = min(a.chunk, a.head_packs - s->step);
    if (v >= a.V) return;
#pragma unroll 1
    for (int i = 0; i < a.head_rows; i++)
#pragma unroll 1
        for (int k = 0; k < count; k++) {
            const int c = ((s->step + k) * WARP + (int)threadIdx.x % WARP) * W;
            fetch_one(to + (i * count + k) * THREADS + threadIdx.x % WARP, a.wte + (size_t)(v + i) * a.C + c,
                      v + i < a.V && c < a.C);
        }
    s->step += count;
    if (s->step == a.head_packs) s->step = 0, s->tile++;
}

// Fetches the next chunk: one group. Steps beside each other are fetched together, so that a warp reads as many bytes of a
// row as there are.
template <int W> __device__ static void stream_fetch(Stream *s, const Layers &a, Pack<W> *ring) {
    if (s->layer == a.L) stream_fetch_head(s, a, stage_at(a, ring, s->stage));
    else {
        const Product &p = a.product[s->product];
        const Tile t = tile_of(p, s->tile);
        const int shift = p.piece_shift + 1, lane = threadIdx.x % WARP, pack = lane & ((1 << shift) - 1);
        const int c = t.first + pack * W, count = min(a.chunk, p.steps - s->step);
        const real *w = p.w + s->layer * a.stride + c;
        Pack<W> *to = stage_at(a, ring, s->stage) + pack / STEP_PACKS * THREADS;
#pragma unroll 1
        for (int k = 0; k < count; k++) {
            const int row = ((k & (p.pieces - 1)) << (5 - shift)) + (lane >> shift), group = k >> p.piece_shift;
            const int r = t.rows.begin + ((s->step >> p.piece_shift) + group) * STEP_ROWS + row;
            fetch_one(to + (group << p.piece_shift) * THREADS + slot_of(row, pack % STEP_PACKS), w + (size_t)r * p.out,
                      r < t.rows.end && c < t.end);
        }
        s->step += count;
        if (s->step == p.steps) s->step = 0, s->tile += gridDim.x;
        stream_settle(s, a);
    }
    fetch_commit();
    s->stage = s->stage + 1 == STAGES ? 0 : s->stage + 1;
}

// What a thread block keeps from product to product.
template <int W> struct State {
    Stream stream;
    int stage; // of the chunk that is used next
    bool owes; // the fetch after QKV waits until attention has loaded its words
    int turn;  // of the two buffers of sums over warps
    float *x;  // (C) the residual stream; a warp knows its own columns
    real *in;  // (5C + 2 STEP_ROWS) the input of a product; a warp knows its own rows
    Pack<W> *ring;
    Pack<W> *keys; // (keys_rounds, 2, PARTS, THREADS)
    float *room;   // (2, WARPS, room_width)
};

template <int W> __device__ static float *room_of(State<W> *s, const Layers &a) {
    s->turn ^= 1;
    return s->room + s->turn * WARPS * a.room_width;
}

// ---- Products -------------------------------------------------------------------------------------------------------

// Sums v over the lanes whose numbers are equal modulo `across`. Of the W sums a lane gets `count` from number `first` on.
struct Share {
    int first, count;
};
template <int W> __device__ static Share sum_lanes(float (&v)[W], int across) {
    Share share = {0, W};
    int offset = WARP / 2;
    UNROLL_FOR (int half = W / 2; half > 0; half /= 2) {
        if (offset < across) break;
        const bool upper = threadIdx.x & offset;
        UNROLL_FOR (int i = 0; i < half; i++) {
            const float sent = upper ? v[i] : v[i + half], kept = upper ? v[i + half] : v[i];
            v[i] = kept + __shfl_xor_sync(0xffffffffu, sent, offset);
        }
        share.first += upper ? half : 0, share.count = half, offset /= 2;
    }
#pragma unroll 1
    for (; offset >= across; offset /= 2) v[0] += __shfl_xor_sync(0xffffffffu, v[0], offset);
    return share;
}

// A warp's sums over its rows of a tile: with matrix units where 16 bits lie side by side.
template <int W> struct Sums { float of[W]; };

// Adds `count` steps of weights. in: the inputs of their rows; weights of rows that the warp has not are zeros.
template <int W>
__device__ static void chunk_multiply(Sums<W> *sums, const Pack<W> *stage, const real *in, int count, const Product &) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int k = 0; k < count; k++) {
        float w[W];
        const float x = real_to_float(in[k * STEP_ROWS + lane / STEP_PACKS]);
        pack_get(w, stage[k * THREADS + slot_of(lane / STEP_PACKS, lane % STEP_PACKS)]);
        UNROLL_FOR (int j = 0; j < W; j++) sums->of[j] = add_product(sums->of[j], x, w[j]);
    }
}

// room (columns): the warp's sums.
template <int W> __device__ static void sums_write(float *room, Sums<W> *sums, const Product &) {
    const Share share = sum_lanes(sums->of, STEP_PACKS);
    UNROLL_FOR (int j = 0; j < W; j++)
        if (j < share.count) room[threadIdx.x % STEP_PACKS * W + share.first + j] = sums->of[j];
}

#ifndef GNS_FP32
template <> struct Sums<VEC> { float of[PIECES_MAX][4]; }; // of steps whose numbers are equal modulo PIECES_MAX

// The left operand is the weights (16 columns, 16 rows), all columns of the right one are the input.
__device__ static void chunk_multiply(Sums<VEC> *sums, const Pack<VEC> *stage, const real *in, int count,
                                      const Product &p) {
    stage += threadIdx.x % WARP, in += threadIdx.x % 4 * 2;
#    pragma unroll 1
    for (int first = 0; first < count; first += PIECES_MAX) {
        unsigned w[PIECES_MAX][4], x[PIECES_MAX][2];
        UNROLL_FOR (int k = 0; k < PIECES_MAX; k++) {
            const real *from = in + ((first + k) >> p.piece_shift) * STEP_ROWS;
            if (first + k >= count) continue;
            ldmatrix_transposed(w[k], (const real *)(stage + (first + k) * THREADS));
            x[k][0] = *(const unsigned *)from, x[k][1] = *(const unsigned *)(from + 8);
        }
        UNROLL_FOR (int k = 0; k < PIECES_MAX; k++)
            if (first + k < count) mma(sums->of[k], w[k], x[k][0], x[k][1]);
    }
}

__device__ static void sums_write(float *room, Sums<VEC> *sums, const Product &p) {
    const int piece = threadIdx.x % 4, column = threadIdx.x % WARP / 4;
    float low = 0, high = 0;
    UNROLL_FOR (int k = 0; k < PIECES_MAX; k++)
        if ((k & (p.pieces - 1)) == piece) low += sums->of[k][0], high += sums->of[k][2];
    if (piece < p.pieces) room[piece * 16 + column] = low, room[piece * 16 + column + 8] = high;
}
#endif

// What is sent of a sum: that of a split as it is; else what the next phase takes.
__device__ static float finished(float sum, int which) {
    if (which == QKV) return rounded(sum);
    return which == FC ? rounded(gelu(rounded(sum))) : sum;
}

// Sends the block's sums of a tile, from those of the warps.
template <int W>
__device__ static void tile_send(State<W> *s, const Layers &a, int which, const Tile &t, Sums<W> *sums, float bias,
                                 float *words) {
    const Product &p = a.product[which];
    const int column = t.first + threadIdx.x;
    float *room = room_of(s, a), total = bias;
    sums_write(room + (int)threadIdx.x / WARP * a.room_width, sums, p);
    __syncthreads();
    if (column >= t.end) return;
    UNROLL_FOR (int w = 0; w < WARPS; w++) total += room[w * a.room_width + threadIdx.x];
    word_send(words + p.words + t.split * p.out + column, finished(total, which));
}

// Multiplies a tile with s->in and sends its sums; the first split's include the bias.
template <int W>
__device__ static void multiply(State<W> *s, const Layers &a, int which, const Tile &t, float bias, float *words,
                                int tile) {
    const Product &p = a.product[which];
    Sums<W> sums = {};
#pragma unroll 1
    for (int step = 0; step < p.steps; step += a.chunk) {
        const real *in = s->in + t.rows.begin + (step >> p.piece_shift) * STEP_ROWS;
        fetch_wait<STAGES - 1>();
        __syncwarp(); // each lane has waited
        chunk_multiply(&sums, stage_at(a, s->ring, s->stage), in, min(a.chunk, p.steps - step), p);
        s->stage = s->stage + 1 == STAGES ? 0 : s->stage + 1;
        if (step + a.chunk >= p.steps) tile_send(s, a, which, t, &sums, bias, words);
        if (which == QKV && tile + gridDim.x >= p.tiles && step + a.chunk >= p.steps) s->owes = true;
        else stream_fetch(&s->stream, a, s->ring);
    }
}

// The bias of this thread's column of a tile: for the first split.
__device__ static float bias_of(const Product &p, const Tile &t, size_t ahead) {
    const int c = t.first + threadIdx.x;
    return t.split == 0 && c < t.end ? real_to_float(p.bias[ahead + c]) : 0;
}

// ---- LayerNorm ------------------------------------------------------------------------------------------------------

// A warp's columns of the residual stream.
__device__ static Rows columns_of(const Layers &a) {
    const int each = a.product[QKV].warp_rows, begin = min(a.C, (int)threadIdx.x / WARP * each);
    return {begin, min(a.C, begin + each)};
}

// x += the finished product, in this warp's columns.
template <int V> __device__ static void add_branch(float *x, const Product &p, const float *words, Rows columns) {
    for_sums<V, SPLITS_MAX, 1>(words + p.words, p.splits, p.out, columns, [=](int c, const float(&sum)[V]) {
        float y[V];
        floats_load(y, x + c);
        UNROLL_FOR (int j = 0; j < V; j++) y[j] = rounded(y[j] + rounded(sum[j]));
        floats_store(x + c, y);
    });
}

// The sum of what lanes 0 to WARPS - 1 have, as do the lanes WARPS further and so on: in every lane.
__device__ static float warps_sum(float x) {
    UNROLL_FOR (int offset = WARPS / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Mean and 1/deviation of x (C), of which each warp knows its columns. A warp's sums are of distances to its first value,
// which cancel few digits; they are added as in Chan et al. 1979.
struct Moments {
    float mean, rstd;
};
template <int V> __device__ static Moments moments(const float *x, Rows columns, const Layers &a) {
    __shared__ float4 parts[WARPS]; // number of columns, sum, mean, sum of squares of distances to it
    const int lane = threadIdx.x % WARP;
    const float n = columns.end - columns.begin, shift = n > 0 ? x[columns.begin] : 0;
    float sum = 0, squares = 0;
#pragma unroll 1
    for (int c = columns.begin + lane * V; c < columns.end; c += WARP * V) {
        float y[V];
        floats_load(y, x + c);
        UNROLL_FOR (int j = 0; j < V; j++) sum += y[j] - shift, squares = add_square(squares, y[j] - shift);
    }
    sum = warp_sum(sum), squares = warp_sum(squares);
    const float mean_here = n > 0 ? __fdividef(sum, n) : 0;
    if (lane == 0) parts[threadIdx.x / WARP] = {n, sum + n * shift, mean_here + shift, squares - sum * mean_here};
    __syncthreads();
    const float4 part = parts[lane % WARPS];
    const float mean = warps_sum(part.y) * a.per_channel;
    const float all = warps_sum(part.w + part.x * (part.z - mean) * (part.z - mean));
    return {mean, layernorm_rstd(all, a.C)};
}

// V values side by side.
template <int V> struct alignas(V * sizeof(real)) Reals { real of[V]; };

// gamma and beta of a lane's first columns, loaded before its words are there.
template <int V> struct Scales { Reals<V> gamma, beta; };
template <int V> __device__ static Scales<V> scales_of(Norm n, size_t ahead, Rows columns) {
    const int c = min(columns.begin + (int)threadIdx.x % WARP * V, max(columns.end - V, 0));
    return {*(const Reals<V> *)(n.gamma + ahead + c), *(const Reals<V> *)(n.beta + ahead + c)};
}

// y = LN(x) in this warp's columns.
template <int V>
__device__ static void normalise(real *y, const float *x, Scales<V> s, Norm n, size_t ahead, Rows columns,
                                 const Layers &a) {
    __syncwarp();
    const Moments m = moments<V>(x, columns, a);
#pragma unroll 1
    for (Rows left = columns; left.begin < left.end; left.begin += WARP * V) {
        const int c = left.begin + (int)threadIdx.x % WARP * V;
        float from[V];
        Reals<V> to;
        if (left.begin > columns.begin) s = scales_of<V>(n, ahead, left);
        if (c >= left.end) continue;
        floats_load(from, x + c);
        UNROLL_FOR (int j = 0; j < V; j++)
            to.of[j] = (real)layernorm_y(layernorm_xhat(from[j], m.mean, m.rstd), real_to_float(s.gamma.of[j]),
                                         real_to_float(s.beta.of[j]));
        *(Reals<V> *)(y + c) = to;
    }
    __syncwarp();
}

// x = what FC sent, in these rows.
template <int V> __device__ static void activations(real *x, const float *words, Rows rows) {
    for_sums<V, 1, 2>(words, 1, 0, rows, [=](int c, const float(&sum)[V]) {
        Reals<V> to;
        UNROLL_FOR (int j = 0; j < V; j++) to.of[j] = (real)sum[j];
        *(Reals<V> *)(x + c) = to;
    });
    __syncwarp();
}

// ---- Attention of one query -----------------------------------------------------------------------------------------

template <int W> constexpr int PARTS = W == 1 ? ATTENTION_HEAD_SIZE_MAX / WARP : 1; // packs of a lane in a key

// A thread block's head and range of keys. A round: as many keys as the warps take at once.
struct KeyRange {
    int head, split, begin, end;
    int first, round; // the key of this lane in the first round
    int element;      // of a key, this lane's first
};

__device__ static KeyRange range_of(const Layers &a, int item, int row, int W) {
    const int each = a.keys_each, split = quotient(item, a.by_heads), slots = WARP >> a.key_lanes_shift;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    return {.head = item - split * a.NH,
            .split = split,
            .begin = split * each,
            .end = min((split + 1) * each, row + 1),
            .first = split * each + warp * slots + (lane >> a.key_lanes_shift),
            .round = slots * WARPS,
            .element = (lane & (a.key_lanes - 1)) * W};
}

// A thread's place for part j of its key in a round; that of the value is PARTS further.
template <int W> __device__ static Pack<W> *key_at(Pack<W> *keys, int i, int j) {
    return keys + (i * 2 * PARTS<W> + j) * THREADS + threadIdx.x;
}

// Fetches keys and values from `past` keys after the range's first on that are in memory, for as many rounds as there is room.
template <int W>
__device__ static void keys_fetch(Pack<W> *keys, const Layers &a, const real *cache, const KeyRange &r, int past,
                                  int row) {
    const int end = min(r.end, row);
    int key = r.first + past;
#pragma unroll 1
    for (int i = 0; i < a.keys_rounds; i++, key += r.round)
        UNROLL_FOR (int j = 0; j < PARTS<W>; j++) {
            const int d = r.element + j * WARP * W;
            const real *k = cache + (size_t)key * 3 * a.C + a.C + r.head * a.D + d;
            fetch_one(key_at(keys, i, j), k, key < end && d < a.D);
            fetch_one(key_at(keys, i, j) + PARTS<W> * THREADS, k + a.C, key < end && d < a.D);
        }
}

// The token's own query, key and value, this lane's elements. The last range of keys has the token's own, which goes into
// memory too.
template <int W> struct Own {
    float q[PARTS<W>][W];
    Pack<W> k[PARTS<W>], v[PARTS<W>];
};

template <int W>
__device__ static void own_await(Own<W> *own, const Layers &a, const float *words, real *cache, const KeyRange &r,
                                 int row) {
    constexpr int V = WORDS<W>;
    const bool last = r.begin <= row && row < r.end;
    UNROLL_FOR (int j = 0; j < PARTS<W>; j++) {
        const int d = r.element + j * WARP * W, c = r.head * a.D + d;
        float x[3][W / V][V] = {};
        bool there;
        do {
            there = true;
            UNROLL_FOR (int i = 0; i < 3; i++)
                UNROLL_FOR (int e = 0; e < W / V; e++)
                    if (d < a.D && (i == 0 || last)) words_load<V>(x[i][e], words + i * a.C + c + e * V, &there);
        } while (!there && pause());
        float k[W], v[W];
        UNROLL_FOR (int e = 0; e < W; e++)
            own->q[j][e] = x[0][e / V][e % V], k[e] = x[1][e / V][e % V], v[e] = x[2][e / V][e % V];
        own->k[j] = pack_of(k), own->v[j] = pack_of(v);
        if (!last || threadIdx.x >= a.key_lanes || d >= a.D) continue;
        pack_store(cache + (size_t)row * 3 * a.C + a.C + c, own->k[j]);
        pack_store(cache + (size_t)row * 3 * a.C + 2 * a.C + c, own->v[j]);
    }
}

// A lane's part of a softmax: the largest score so far, and sums with weights 2^(score - largest). Scores are in units of
// log 2.
template <int W> struct Softmax { float largest, weights, values[PARTS<W>][W]; };

// The weight of a part in the whole, whose largest score is given; a part may have no keys.
__device__ static float share_of(float largest, float of_all) {
    return largest == -INFINITY ? 0 : exp2_fast(largest - of_all);
}

// Adds a key, which is none if not `there`.
template <int W>
__device__ static void attend(Softmax<W> *s, const Pack<W> (&k)[PARTS<W>], const Pack<W> (&v)[PARTS<W>],
                              const Own<W> &own, const Layers &a, bool there) {
    float score = 0, x[W];
    UNROLL_FOR (int j = 0; j < PARTS<W>; j++) {
        pack_get(x, k[j]);
        UNROLL_FOR (int e = 0; e < W; e++) score = add_product(score, own.q[j][e], x[e]);
    }
    UNROLL_FOR (int offset = WARP / 2; offset > 0; offset /= 2)
        if (offset < a.key_lanes) score += __shfl_xor_sync(0xffffffffu, score, offset);
    score = there ? score * a.score_scale : -INFINITY;
    const float largest = fmaxf(s->largest, score), old = share_of(s->largest, largest);
    const float weight = there ? exp2_fast(score - largest) : 0;
    s->largest = largest, s->weights = s->weights * old + weight;
    UNROLL_FOR (int j = 0; j < PARTS<W>; j++) {
        pack_get(x, v[j]);
        UNROLL_FOR (int e = 0; e < W; e++) s->values[j][e] = s->values[j][e] * old + weight * x[e];
    }
}

// room (D + 2): the warp's sums, their largest score, the sum of weights.
template <int W> __device__ static void softmax_of_warp(float *room, Softmax<W> *s, const Layers &a, int element) {
    float largest = s->largest;
#pragma unroll 1
    for (int offset = WARP / 2; offset >= a.key_lanes; offset /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    const float share = share_of(s->largest, largest);
    s->weights *= share;
    UNROLL_FOR (int j = 0; j < PARTS<W>; j++)
        UNROLL_FOR (int e = 0; e < W; e++) s->values[j][e] *= share;
#pragma unroll 1
    for (int offset = WARP / 2; offset >= a.key_lanes; offset /= 2) {
        s->weights += __shfl_xor_sync(0xffffffffu, s->weights, offset);
        UNROLL_FOR (int j = 0; j < PARTS<W>; j++)
            UNROLL_FOR (int e = 0; e < W; e++) s->values[j][e] += __shfl_xor_sync(0xffffffffu, s->values[j][e], offset);
    }
    if (threadIdx.x % WARP >= a.key_lanes) return;
    UNROLL_FOR (int j = 0; j < PARTS<W>; j++)
        if (element + j * WARP * W < a.D) floats_store(room + element + j * WARP * W, s->values[j]);
    if (threadIdx.x % WARP == 0) room[a.D] = largest, room[a.D + 1] = s->weights;
}

// Sends the range's result, and log2 of its sum of weights, from those of the warps. By whole warps.
__device__ static void attention_send(const Layers &a, const float *room, const KeyRange &r, float *words) {
    const int d = threadIdx.x, warp = d % WARPS;
    if (d / WARP * WARP > a.D) return;
    const float mine = room[warp * a.room_width + a.D];
    float largest = mine, sum = 0;
    UNROLL_FOR (int offset = WARPS / 2; offset > 0; offset /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    const float share = share_of(mine, largest), weights = warps_sum(share * room[warp * a.room_width + a.D + 1]);
    UNROLL_FOR (int w = 0; w < WARPS; w++)
        sum += __shfl_sync(0xffffffffu, share, w) * room[w * a.room_width + min(d, a.D)];
    if (d < a.D)
        word_send(words + a.attention_words + r.split * a.C + r.head * a.D + d,
                  weights == 0 ? 0 : __fdividef(sum, weights));
    else if (d == a.D) word_send(words + a.weight_words + r.split * a.NH + r.head, largest + __log2f(weights));
}

// The rounds of keys that have been fetched.
template <int W>
__device__ static void attend_rounds(Softmax<W> *s, Pack<W> *keys, const Own<W> &own, const Layers &a,
                                     const KeyRange &r, int past, int row) {
    int key = r.first + past;
#pragma unroll 1
    for (int i = 0; i < a.keys_rounds && r.end > r.begin + past + i * r.round; i++, key += r.round) {
        Pack<W> k[PARTS<W>], v[PARTS<W>];
        UNROLL_FOR (int j = 0; j < PARTS<W>; j++) {
            const Pack<W> *from = key_at(keys, i, j);
            k[j] = from[0], v[j] = from[PARTS<W> * THREADS];
            if (key == row) k[j] = own.k[j], v[j] = own.v[j];
        }
        attend(s, k, v, own, a, key < r.end);
    }
}

// A thread block's first head and range of keys, if it has one.
template <int W> __device__ static void keys_ahead(State<W> *s, const Layers &a, const real *cache, int row) {
    if (blockIdx.x < a.NH * a.head_splits) keys_fetch(s->keys, a, cache, range_of(a, blockIdx.x, row, W), 0, row);
}

// A thread block's heads and ranges of keys.
template <int W> __device__ static void attention(State<W> *s, const Layers &a, real *cache, float *words, int row) {
#pragma unroll 1
    for (int item = blockIdx.x; item < a.NH * a.head_splits; item += gridDim.x) {
        const KeyRange r = range_of(a, item, row, W);
        float *room = room_of(s, a);
        Softmax<W> softmax = {-INFINITY};
        Own<W> own;
        own_await(&own, a, words, cache, r, row);
        fetch_wait<0>();
#pragma unroll 1
        for (int past = 0; r.begin + past < r.end; past += a.keys_rounds * r.round) {
            if (past > 0 || item > blockIdx.x) keys_fetch(s->keys, a, cache, r, past, row), fetch_commit();
            if (past > 0 || item > blockIdx.x) fetch_wait<0>();
            attend_rounds(&softmax, s->keys, own, a, r, past, row);
        }
        softmax_of_warp(room + (int)threadIdx.x / WARP * a.room_width, &softmax, a, r.element);
        __syncthreads();
        attention_send(a, room, r, words);
    }
}

// x = the heads' results, in these rows, from the results of ranges of keys. Lanes take V rows and every GROUPS-th range.
template <int V> __device__ static void attention_output(real *x, const Layers &a, const float *words, Rows rows) {
    constexpr int GROUPS = 2, EACH = HEAD_SPLITS_MAX / GROUPS, ACROSS = WARP / GROUPS;
    const int lane = threadIdx.x % WARP, group = lane / ACROSS;
#pragma unroll 1
    for (int first = rows.begin; first < rows.end; first += ACROSS * V) {
        const int c = first + lane % ACROSS * V;
        float part[EACH][V] = {}, weight[EACH][1], largest = -INFINITY, sum[V] = {}, weights = 0;
        const float *from = words + a.attention_words + group * a.C + c;
        const float *weight_from = words + a.weight_words + group * a.NH + quotient(c, a.by_head_size);
        bool there;
        do {
            there = true;
            UNROLL_FOR (int i = 0; i < EACH; i++) {
                weight[i][0] = -INFINITY;
                if (group + i * GROUPS >= a.head_splits || c >= rows.end) continue;
                words_load<V>(part[i], from + i * GROUPS * a.C, &there);
                words_load<1>(weight[i], weight_from + i * GROUPS * a.NH, &there);
            }
        } while (!there && pause());
        UNROLL_FOR (int i = 0; i < EACH; i++) largest = fmaxf(largest, weight[i][0]);
        UNROLL_FOR (int offset = ACROSS; offset < WARP; offset *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
        UNROLL_FOR (int i = 0; i < EACH; i++) {
            const float share = share_of(weight[i][0], largest);
            weights += share;
            UNROLL_FOR (int j = 0; j < V; j++) sum[j] = add_product(sum[j], share, part[i][j]);
        }
        UNROLL_FOR (int offset = ACROSS; offset < WARP; offset *= 2) {
            weights += __shfl_xor_sync(0xffffffffu, weights, offset);
            UNROLL_FOR (int j = 0; j < V; j++) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], offset);
        }
        Reals<V> to;
        const float whole = 1 / weights;
        UNROLL_FOR (int j = 0; j < V; j++) to.of[j] = (real)(sum[j] * whole);
        if (group == 0 && c < rows.end) *(Reals<V> *)(x + c) = to;
    }
    __syncwarp();
}

// ---- The pass -------------------------------------------------------------------------------------------------------

// Logits, from s->in.
template <int W> __device__ static void head(State<W> *s, const Layers &a) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int turn = 0;; turn++) {
        const int v = head_row(a, turn);
        if (v >= a.V) return;
        float sum[AT_ONCE] = {};
#pragma unroll 1
        for (int first = 0; first < a.head_packs; first += a.chunk) {
            const int count = min(a.chunk, a.head_packs - first);
            fetch_wait<STAGES - 1>();
            const Pack<W> *pack = stage_at(a, s->ring, s->stage) + lane;
#pragma unroll 1
            for (int k = 0; k < count; k++) {
                const int c = ((first + k) * WARP + lane) * W;
                float x[W] = {}, w[W];
                if (c < a.C) pack_get(x, pack_load<W>(s->in + c));
                UNROLL_FOR (int i = 0; i < AT_ONCE; i++) {
                    if (i >= a.head_rows) break;
                    pack_get(w, pack[(i * count + k) * THREADS]);
                    UNROLL_FOR (int j = 0; j < W; j++) sum[i] = add_product(sum[i], x[j], w[j]);
                }
            }
            stream_fetch_head(&s->stream, a, stage_at(a, s->ring, s->stage));
            fetch_commit();
            s->stage = s->stage + 1 == STAGES ? 0 : s->stage + 1;
        }
        const float logit = warp_sum_each(sum);
        const int row = lane / (WARP / AT_ONCE);
        if (lane % (WARP / AT_ONCE) == 0 && row < a.head_rows && v + row < a.V) a.logits[v + row] = logit;
    }
}

// A product of block l, with what comes before it: the input of its rows.
template <int W> __device__ static void product(State<W> *s, const Layers &a, int which, int l) {
    constexpr int V = WORDS<W>;
    const size_t ahead = l * a.stride;
    float *words = a.words + l * a.words_stride;
    const Rows columns = columns_of(a);
    const Norm norm = which == QKV ? a.ln1 : a.ln2;
    const bool norms = which == QKV || which == FC;
    const int tiles = a.product[which].tiles;
#pragma unroll 1
    for (int i = blockIdx.x;; i += gridDim.x) {
        const bool first = norms && i == blockIdx.x;
        const Tile t = tile_of(a.product[which], i);
        const float bias = i < tiles ? bias_of(a.product[which], t, ahead) : 0;
        if (first) {
            const bool mlp = which == FC;
            const Scales<V> scales = scales_of<V>(norm, ahead, columns);
            if (l > 0 || mlp)
                add_branch<V>(s->x, a.product[mlp ? PROJ : FCPROJ], words - (mlp ? 0 : a.words_stride), columns);
            if (i < tiles) normalise<V>(s->in, s->x, scales, norm, ahead, columns, a);
        }
        if (i >= tiles) return;
        if (which == PROJ) attention_output<V>(s->in, a, words, t.rows);
        if (which == FCPROJ) activations<V>(s->in, words + a.product[FC].words, t.rows);
        multiply(s, a, which, t, bias, words, i);
    }
}

// A block, up to the words of its last product; x is there but for the last product of the block before.
template <int W> __device__ static void layer(State<W> *s, const Layers &a, int l, int row) {
    real *cache = a.cache + l * a.qkv_stride;
#pragma unroll 1
    for (int which = 0; which < PRODUCTS; which++) {
        int w = which;
        asm volatile("" : "+r"(w));
        product(s, a, w, l);
        if (which == QKV) {
            attention(s, a, cache, a.words + l * a.words_stride, row);
            if (s->owes) stream_fetch(&s->stream, a, s->ring), s->owes = false;
            if (l + 1 < a.L) keys_ahead(s, a, cache + a.qkv_stride, row);
            fetch_commit();
        }
    }
}

template <int W>
__global__ void __launch_bounds__(THREADS, 1) decode_kernel(const __grid_constant__ Layers a, int token, int row) {
    constexpr int V = WORDS<W>;
    extern __shared__ float4 shared[];
    const Rows columns = columns_of(a);
    State<W> s = {};
    s.ring = (Pack<W> *)shared;
    s.keys = s.ring + STAGES * a.chunk * THREADS;
    s.room = (float *)(s.keys + a.keys_rounds * 2 * PARTS<W> * THREADS),
    s.in = (real *)(s.room + 2 * WARPS * a.room_width);
    s.x = (float *)(s.in + a.in_count);
    for (int c = threadIdx.x; c < a.in_count; c += THREADS) s.in[c] = (real)0; // weights of 0 multiply any of it
    s.stream.tile = blockIdx.x;
    stream_settle(&s.stream, a);
    keys_ahead(&s, a, a.cache, row);
    fetch_commit();
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) stream_fetch(&s.stream, a, s.ring);
    __syncthreads();
    for (int c = columns.begin + (int)threadIdx.x % WARP; c < columns.end; c += WARP)
        s.x[c] = rounded(real_to_float(a.wte[(size_t)token * a.C + c]) + real_to_float(a.wpe[(size_t)row * a.C + c]));
#pragma unroll 1
    for (int l = 0; l < a.L; l++) {
        layer(&s, a, l, row);
    }
    const Scales<V> scales = scales_of<V>(a.lnf, 0, columns);
    add_branch<V>(s.x, a.product[FCPROJ], a.words + (a.L - 1) * a.words_stride, columns);
    normalise(s.in, s.x, scales, a.lnf, 0, columns, a);
    __syncthreads();
    head(&s, a);
}

// ---- Set-up ---------------------------------------------------------------------------------------------------------

static size_t words_of(const ModelConfig *m, int splits, int head_splits) { // of a block, at most
    const size_t C = m->channels;
    return round_up((7 + 2 * (size_t)splits + (size_t)head_splits) * C + (size_t)head_splits * m->heads, 4);
}

size_t decode_scratch_floats(const ModelConfig *config) {
    return config->layers * words_of(config, SPLITS_MAX, HEAD_SPLITS_MAX);
}

static int log2_of(int n) { // rounded up
    int power = 0;
    while (1 << power < n) power++;
    return power;
}

// Cuts a product into tiles: so that the estimated time of the thread block with most tiles is least. (Reading takes a
// nanosecond for 32 bytes, in pieces of 32, and computing 40 ns a step; a tile begins and ends in 300 ns, and a split costs
// its readers 250.)
static void cut(Product *p, int splits_max, int pieces_max, int width, int blocks) {
    int least = INT_MAX;
    for (int pieces = 1; pieces <= pieces_max; pieces *= 2)
        for (int packs = pieces * STEP_PACKS / 2 + 1; packs <= pieces * STEP_PACKS; packs++)
            for (int splits = 1; splits <= splits_max; splits *= 2) {
                Product q = *p;
                q.columns = packs * width;
                q.pieces = pieces, q.piece_shift = log2_of(pieces), q.splits = splits, q.split_shift = log2_of(splits);
                q.tiles = ceil_div(p->out, q.columns) * splits;
                q.split_rows = (int)round_up(ceil_div(p->in, splits), WORDS<VEC>);
                q.warp_rows = (int)round_up(ceil_div(q.split_rows, WARPS), WORDS<VEC>);
                q.steps = ceil_div(q.warp_rows, STEP_ROWS) * pieces;
                const int bytes = q.split_rows * round_up(q.columns * sizeof(real), 64);
                const int time = ceil_div(q.tiles, blocks) * (bytes / 32 + 20 * q.steps + 300) + 250 * splits;
                if (time < least) least = time, *p = q;
            }
}

// Bytes of shared memory beside the ring, and of a ring whose chunks have one step.
static size_t in_count_of(int C) { return round_up(5 * (size_t)C, VEC) + 2 * STEP_ROWS; }
static size_t shared_bytes_of(int C, int room_width) {
    return ((size_t)C + 2 * WARPS * room_width) * sizeof(float) + in_count_of(C) * sizeof(real);
}
template <int W> constexpr size_t RING_BYTES = STAGES *THREADS * sizeof(Pack<W>);
template <int W> constexpr size_t ROUND_BYTES = 2 * PARTS<W> *THREADS * sizeof(Pack<W>);
constexpr size_t STATIC_BYTES = 1024;
static int room_width_of(int D) { return (int)round_up(size_max(D + 2, PIECES_MAX * STEP_PACKS * VEC), 4); }

bool decode_fits(int channels, size_t shared_bytes) {
    return shared_bytes_of(channels, room_width_of(ATTENTION_HEAD_SIZE_MAX)) + RING_BYTES<VEC> + ROUND_BYTES<VEC> +
               STATIC_BYTES <=
           shared_bytes;
}

// Ranges of keys of each head, for the token in this row, and rounds of them; what is left of shared memory is the ring's.
template <int W> static void set_keys(Layers *a, int row, int blocks, size_t shared_bytes) {
    const int most = blocks / a->NH < HEAD_SPLITS_MAX ? blocks / a->NH : HEAD_SPLITS_MAX;
    a->key_lanes_shift = W == 1 ? 5 : log2_of(ceil_div(a->D, W)), a->key_lanes = 1 << a->key_lanes_shift;
    const int round = WARP / a->key_lanes * WARPS, splits = ceil_div(row + 1, round);
    a->head_splits = most < 1 ? 1 : splits < most ? splits : most;
    a->keys_each = ceil_div(row + 1, a->head_splits);
    a->by_heads = reciprocal(a->NH), a->by_head_size = reciprocal(a->D);
    a->score_scale = 1.44269504f / sqrtf((float)a->D);
    a->room_width = room_width_of(a->D), a->in_count = (int)in_count_of(a->C);
    const size_t left = shared_bytes - STATIC_BYTES - shared_bytes_of(a->C, a->room_width);
    a->keys_rounds = (int)size_min(ceil_div(a->keys_each, round), size_max(1, left / 6 / ROUND_BYTES<W>));
    a->chunk = (int)size_min(CHUNK_MAX, (left - a->keys_rounds * ROUND_BYTES<W>) / RING_BYTES<W>);
    a->chunk -= a->chunk % (a->chunk > PIECES_MAX ? PIECES_MAX : a->chunk > 1 ? 2 : 1);
}

// What a launch needs to know but for the weights.
template <int W> static Layers layers_for(const Decoder *d, float *logits, int row) {
    const ModelConfig *m = &d->model->config;
    const int C = m->channels;
    Layers a = {};
    a.L = m->layers, a.NH = m->heads, a.C = C, a.V = m->vocab, a.D = C / m->heads;
    a.cache = d->qkv, a.qkv_stride = d->qkv_stride, a.words = d->scratch, a.logits = logits;
    a.per_channel = 1.0f / C;
    set_keys<W>(&a, row, d->multiprocessors, d->shared_bytes);
    a.head_packs = ceil_div(C, WARP * W), a.head_rows = a.chunk / a.head_packs;
    a.head_rows = a.head_rows < 1 ? 1 : a.head_rows > AT_ONCE ? AT_ONCE : a.head_rows;
    return a;
}

template <int W> static Layers layers_of(const Decoder *d, float *logits, int row) {
    Layers a = layers_for<W>(d, logits, row);
    int words = 0, pieces_max = a.chunk < PIECES_MAX ? a.chunk : PIECES_MAX;
    if (W == 1 || REAL_DTYPE == DTYPE_FP32) pieces_max = 1;
    const auto at = [&](TensorKind kind) { return d->weight + model_tensor(d->model, kind, 0)->offset; };
    const auto norm = [&](TensorKind w, TensorKind b) { return Norm{at(w), at(b)}; };
    const auto product = [&](TensorKind w, TensorKind b, int in, int out, int splits_max) {
        Product p = {};
        p.w = at(w), p.bias = at(b), p.in = in, p.out = out, p.words = words;
        cut(&p, splits_max, pieces_max, W, d->multiprocessors);
        words += p.splits * out;
        return p;
    };
    if (a.L > 1) a.stride = model_tensor(d->model, LN1_W, 1)->offset - model_tensor(d->model, LN1_W, 0)->offset;
    a.wte = at(WTE), a.wpe = at(WPE);
    a.ln1 = norm(LN1_W, LN1_B), a.ln2 = norm(LN2_W, LN2_B), a.lnf = norm(LNF_W, LNF_B);
    a.product[QKV] = product(QKV_W, QKV_B, a.C, 3 * a.C, 1);
    a.product[PROJ] = product(PROJ_W, PROJ_B, a.C, a.C, SPLITS_MAX);
    a.product[FC] = product(FC_W, FC_B, a.C, 4 * a.C, 1);
    a.product[FCPROJ] = product(FCPROJ_W, FCPROJ_B, 4 * a.C, a.C, SPLITS_MAX);
    a.attention_words = words, a.weight_words = words + a.head_splits * a.C;
    a.words_stride = round_up(words + a.head_splits * (a.C + a.NH), 4);
    return a;
}

template <int W> static int run(float *logits, const Decoder *d, int token, int row, cudaStream_t stream, Error *e) {
    Layers a = layers_of<W>(d, logits, row);
    const size_t shared = shared_bytes_of(a.C, a.room_width) + a.chunk * RING_BYTES<W> + a.keys_rounds * ROUND_BYTES<W>;
    CUDA_TRY(cudaMemsetAsync(a.words, 0xff, a.L * a.words_stride * sizeof *a.words, stream), e);
    void *parameters[] = {&a, &token, &row};
    TRY(shared_memory_allow(decode_kernel<W>, shared, e));
    return CUDA_CALL(cudaLaunchCooperativeKernel((void *)decode_kernel<W>, dim3(d->multiprocessors), dim3(THREADS),
                                                 parameters, shared, stream),
                     e);
}

int decode(float *logits, const Decoder *decoder, int token, int row, cudaStream_t stream, Error *e) {
    const ModelConfig *m = &decoder->model->config;
    const auto of_width = m->channels / m->heads % VEC ? run<1> : run<VEC>;
    return of_width(logits, decoder, token, row, stream, e);
}
