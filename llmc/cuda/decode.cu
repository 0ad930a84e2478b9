// decode: see decode.cuh. One kernel computes all layers. Its blocks, one per multiprocessor, pass results to each
// other as words:
// 1. A word is a float in memory. One thread writes it, once per launch, in one store; before that all its bits are set
//    (EMPTY). (A NaN of these bits is sent as another NaN.) A launch clears the words of the launch before.
// 2. A reader repeats its load until the word is not EMPTY. Only words carry results: relaxed order is enough, without
//    a fence, a flag or a barrier of the whole device. A result costs one store and one load of latency.
// 3. A word depends only on words of earlier phases, and all blocks run at once (a cooperative launch): no reader waits
//    forever.
// 4. Each warp computes the inputs of the rows that it multiplies, and keeps its columns of the residual stream: only
//    LayerNorm's sums and the sums of a tile pass a barrier. Their memory is double-buffered: every warp passed the
//    barrier after reading A before anyone overwrites A.
// 5. A warp fetches its own weights, STAGES chunks ahead across products, layers and the head, into its own part of a
//    ring in shared memory. Each use of a chunk waits for all but the last STAGES - 1 groups of fetches. A warp fetches
//    one chunk after each use, while words are on their way: fetches delay loads of words.
// 6. Few warps hide latency here, and a phase's code runs once per layer: minimise instructions, do not unroll.
//    Reconverge with __syncwarp before shuffles.
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
enum { HEAD_ROWS = 4 };                             // of wte that a warp takes at once
enum { KEY_LANES_MAX = ATTENTION_HEAD_SIZE_MAX / VEC };
enum { FOUR = 4 }; // words or columns that a thread takes at once
enum { QKV, PROJ, FC, FCPROJ, PRODUCTS };
constexpr unsigned EMPTY = 0xffffffff;

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
    int key_lanes_shift;             // log2 of the lanes of a warp that share a key
    unsigned by_heads, by_head_size; // reciprocals, see quotient
    int attention_words;             // (head_splits, C) heads' results of a range
    int weight_words;                // (head_splits, NH) log2 of the sums of weights
    int chunk, room_width, in_count;
    int keys_rounds;             // that there is room for
    int head_packs;              // of a lane in a row of wte
    float score_scale;           // log2 e / sqrt(D)
    real *cache;                 // qkv of block 0
    float *words, *words_before; // of this launch, of the launch before
    size_t words_count;
    float *logits;
} Layers;

// n / d, where by = reciprocal(d) and n is less than 2^16.
static unsigned reciprocal(unsigned d) { return (unsigned)((((uint64_t)1 << 32) + d - 1) / d); }
__device__ static int quotient(unsigned n, unsigned by) { return by ? (int)__umulhi(n, by) : (int)n; }

__device__ static float rounded(float x) { return real_to_float((real)x); }

// A warp's rows of a matrix: of the residual stream, or of a tile.
struct Rows {
    int begin, end;
};

// A thread block's tile of a product, with a warp's rows of it.
struct Tile {
    int first, end, split; // columns
    Rows rows;
};

__device__ static Tile tile_of(const Product &p, int i, int warp) {
    const int split = i & (p.splits - 1), first = (i >> p.split_shift) * p.columns, begin = split * p.split_rows;
    const int end = min(begin + p.split_rows, p.in), mine = min(begin + warp * p.warp_rows, p.in);
    return {first, min(first + p.columns, p.out), split, {mine, min(mine + p.warp_rows, end)}};
}

// A thread block's head and range of keys.
struct KeyRange {
    int head, split, begin, end;
    int slots, slot; // keys that a warp takes at once, and which of them a lane shares
    int element;     // the lane's first
};

__device__ static KeyRange range_of(const Layers &a, int item, int row) {
    const int split = quotient(item, a.by_heads), lane = threadIdx.x % WARP;
    return {.head = item - split * a.NH,
            .split = split,
            .begin = split * a.keys_each,
            .end = min((split + 1) * a.keys_each, row + 1),
            .slots = WARP >> a.key_lanes_shift,
            .slot = lane >> a.key_lanes_shift,
            .element = (lane & ((1 << a.key_lanes_shift) - 1)) * VEC};
}

// A lane's key of a round of the range.
__device__ static int key_of(const KeyRange &r, int round, int warp) {
    return r.begin + (round * WARPS + warp) * r.slots + r.slot;
}

// ---- Weights --------------------------------------------------------------------------------------------------------

// What a warp fetches next: a chunk of the steps of a tile of a product of a block; after the last block of rows of wte, the
// `tile`-th that it takes together, from pack `step` on.
struct Stream {
    int phase; // block * PRODUCTS + product
    int tile, step, stage;
};

// Skips to a tile that there is.
__device__ static void stream_settle(Stream *s, const Layers &a) {
#pragma unroll 1
    while (s->phase < a.L * PRODUCTS && s->tile >= a.product[s->phase % PRODUCTS].tiles)
        s->tile = ++s->phase < a.L * PRODUCTS ? blockIdx.x : 0;
}

// The warp's place in a stage of the ring; step k of it is k THREADS packs further.
__device__ static Pack<VEC> *stage_at(const Layers &a, Pack<VEC> *ring, int stage) {
    return ring + stage * a.chunk * THREADS + threadIdx.x / WARP * WARP;
}

// Where a pack of a step lies: in the order of ldmatrix, 8 rows of the one column of packs, then of the other.
__device__ static int pack_slot(unsigned row, int pack) { return row / 8 * 16 + pack * 8 + row % 8; }

// The first of the rows of wte that a warp takes together, its `turn`-th ones.
__device__ static int head_row(int turn) {
    return ((turn * (int)gridDim.x + (int)blockIdx.x) * WARPS + (int)threadIdx.x / WARP) * HEAD_ROWS;
}

__device__ static void fetch_head(Stream *s, const Layers &a, Pack<VEC> *to) {
    const int v = head_row(s->tile), count = min(a.chunk / HEAD_ROWS, a.head_packs - s->step);
    to += threadIdx.x % WARP;
    if (v >= a.V) return;
#pragma unroll 1
    for (int k = 0; k < count; k++) {
        const int c = ((s->step + k) * WARP + (int)threadIdx.x % WARP) * VEC;
        UNROLL_FOR (int i = 0; i < HEAD_ROWS; i++)
            pack_fetch(to + (k * HEAD_ROWS + i) * THREADS, a.wte + (size_t)(v + i) * a.C + c, v + i < a.V && c < a.C);
    }
    s->step += count;
    if (s->step == a.head_packs) s->step = 0, s->tile++;
}

// Steps beside each other are fetched together, so that a warp reads as many bytes of a row as there are.
__device__ static void fetch_steps(Stream *s, const Layers &a, Pack<VEC> *to) {
    const Product &p = a.product[s->phase % PRODUCTS];
    const Tile t = tile_of(p, s->tile, threadIdx.x / WARP);
    const int shift = p.piece_shift + 1, lane = threadIdx.x % WARP, pack = lane & ((1 << shift) - 1);
    const int c = t.first + pack * VEC, count = min(a.chunk, p.steps - s->step), rows = WARP >> shift;
    const int begin = t.rows.begin + (s->step >> p.piece_shift) * STEP_ROWS, there = c < t.end ? t.rows.end - begin : 0;
    const real *w = p.w + s->phase / PRODUCTS * a.stride + (size_t)(begin + (lane >> shift)) * p.out + c;
    to += pack / STEP_PACKS * THREADS + pack_slot(0, pack % STEP_PACKS);
#pragma unroll 2
    for (unsigned row = lane >> shift; row < count * rows; row += rows, w += rows * p.out)
        pack_fetch(to + (row / STEP_ROWS << p.piece_shift) * THREADS + pack_slot(row % STEP_ROWS, 0), w,
                   (int)row < there);
    s->step += count;
    if (s->step == p.steps) s->step = 0, s->tile += gridDim.x;
    stream_settle(s, a);
}

// Fetches the next chunk: one group.
__device__ static void stream_fetch(Stream *s, const Layers &a, Pack<VEC> *ring) {
    Pack<VEC> *to = stage_at(a, ring, s->stage);
    if (s->phase < a.L * PRODUCTS) fetch_steps(s, a, to);
    else fetch_head(s, a, to);
    fetch_commit();
    s->stage = s->stage + 1 == STAGES ? 0 : s->stage + 1;
}

// ---- Words ----------------------------------------------------------------------------------------------------------

__device__ static void word_send(float *to, float x) {
    const unsigned bits = min(__float_as_uint(x), EMPTY - 1);
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

// Loads of one word, and of four side by side; *there becomes false if one is not there yet.
__device__ static void word_load(float *x, const float *from, bool *there) {
    unsigned w;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(w) : "l"(from) : "memory");
    *there &= w != EMPTY, *x = __uint_as_float(w);
}
__device__ static void words_load(float (&x)[FOUR], const float *from, bool *there) {
    unsigned w[FOUR];
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "l"(from)
                 : "memory");
    UNROLL_FOR (int j = 0; j < FOUR; j++) *there &= w[j] != EMPTY, x[j] = __uint_as_float(w[j]);
}

// Sums of the words of all splits: of four columns.
__device__ static void words_sum(float (&sum)[FOUR], const float *words, int splits, int stride) {
    float x[SPLITS_MAX][FOUR];
    bool there;
    do {
        there = true;
        UNROLL_FOR (int s = 0; s < SPLITS_MAX; s++)
            if (s < splits) words_load(x[s], words + s * stride, &there);
    } while (!there);
    UNROLL_FOR (int j = 0; j < FOUR; j++) sum[j] = x[0][j];
    UNROLL_FOR (int s = 1; s < SPLITS_MAX; s++)
        UNROLL_FOR (int j = 0; j < FOUR; j++)
            if (s < splits) sum[j] += x[s][j];
}

struct alignas(FOUR * sizeof(real)) Four {
    real of[FOUR];
};

// ---- Products -------------------------------------------------------------------------------------------------------

// What a multiplying warp keeps from product to product.
struct State {
    Stream stream;
    int stage;              // of the chunk that is used next
    bool owes;              // the fetch after QKV waits until attention has loaded its words
    Pack<VEC> *ring, *keys; // keys: (keys_rounds, 2, THREADS)
    int warp, lane;
    int turn;    // of the two buffers of sums over warps
    float *x;    // (C) the residual stream; a warp knows its own columns
    float mean;  // of the last LayerNorm
    real *in;    // (in_count) the input of a product; a warp knows its own rows
    float *room; // (2, WARPS, room_width)
};

__device__ static float *room_of(State *s, const Layers &a) {
    s->turn ^= 1;
    return s->room + s->turn * WARPS * a.room_width;
}

// A warp's sums over its rows of a tile. Adds `count` steps of weights; in: the inputs of their rows; weights of rows that
// the warp has not are zeros.
#ifdef GNS_FP32
struct Sums {
    float of[VEC];
};

__device__ static void chunk_multiply(Sums *sums, const Pack<VEC> *w, const real *in, int count, const Product &) {
    const int lane = threadIdx.x % WARP;
#    pragma unroll 1
    for (int k = 0; k < count; k++) {
        float from[VEC];
        pack_get(from, w[k * THREADS + pack_slot(lane / STEP_PACKS, lane % STEP_PACKS)]);
        const float x = in[k * STEP_ROWS + lane / STEP_PACKS];
        UNROLL_FOR (int j = 0; j < VEC; j++) sums->of[j] = add_product(sums->of[j], x, from[j]);
    }
    __syncwarp(); // all lanes have read the chunk, whose place the next fetch takes
}

// room (columns): the warp's sums.
__device__ static void sums_write(float *room, Sums *sums, const Product &) {
    const int pack = threadIdx.x % STEP_PACKS;
    UNROLL_FOR (int j = 0; j < VEC; j++) {
        UNROLL_FOR (int offset = WARP / 2; offset >= STEP_PACKS; offset /= 2)
            sums->of[j] += __shfl_xor_sync(0xffffffffu, sums->of[j], offset);
        if (threadIdx.x % WARP < STEP_PACKS) room[pack * VEC + j] = sums->of[j];
    }
}
#else
struct Sums {
    float of[PIECES_MAX][4];
}; // of steps whose numbers are equal modulo PIECES_MAX

// The left operand is the weights (16 columns, 16 rows), all columns of the right one are the input. count: a multiple of
// PIECES_MAX.
__device__ static void chunk_multiply(Sums *sums, const Pack<VEC> *w, const real *in, int count, const Product &p) {
    const Pack<VEC> *end = w + count * THREADS;
    const real *from[PIECES_MAX];
    UNROLL_FOR (int k = 0; k < PIECES_MAX; k++) from[k] = in + threadIdx.x % 4 * 2 + (k >> p.piece_shift) * STEP_ROWS;
    const int forward = (PIECES_MAX >> p.piece_shift) * STEP_ROWS;
    w += threadIdx.x % WARP;
#    pragma unroll 1
    for (; w < end; w += PIECES_MAX * THREADS) {
        unsigned a[PIECES_MAX][4], x[PIECES_MAX][2];
        UNROLL_FOR (int k = 0; k < PIECES_MAX; k++) {
            ldmatrix_transposed(a[k], (const real *)(w + k * THREADS));
            x[k][0] = *(const unsigned *)from[k], x[k][1] = *(const unsigned *)(from[k] + 8), from[k] += forward;
        }
        UNROLL_FOR (int k = 0; k < PIECES_MAX; k++) mma(sums->of[k], a[k], x[k][0], x[k][1]);
    }
}

__device__ static void sums_write(float *room, Sums *sums, const Product &p) {
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
__device__ static void tile_send(State *s, const Layers &a, int which, const Tile &t, Sums *sums, float bias,
                                 float *words) {
    const Product &p = a.product[which];
    const int column = t.first + threadIdx.x;
    float *room = room_of(s, a), total = bias;
    sums_write(room + s->warp * a.room_width, sums, p);
    __syncthreads();
    if (column < t.end) {
        UNROLL_FOR (int w = 0; w < WARPS; w++) total += room[w * a.room_width + threadIdx.x];
        word_send(words + p.words + t.split * p.out + column, finished(total, which));
    }
    __syncwarp();
}

// The next chunk, once it is there.
__device__ static const Pack<VEC> *chunk_await(State *s, const Layers &a) {
    const Pack<VEC> *chunk = stage_at(a, s->ring, s->stage);
    s->stage = s->stage + 1 == STAGES ? 0 : s->stage + 1;
    fetch_wait<STAGES - 1>();
    __syncwarp(); // each lane has waited
    return chunk;
}

// Multiplies a tile with s->in and sends its sums; the first split's include the bias.
__device__ static void multiply(State *s, const Layers &a, int which, const Tile &t, float bias, float *words,
                                int tile) {
    const Product &p = a.product[which];
    Sums sums = {};
#pragma unroll 1
    for (int step = 0; step < p.steps; step += a.chunk) {
        const real *in = s->in + t.rows.begin + (step >> p.piece_shift) * STEP_ROWS;
        const Pack<VEC> *w = chunk_await(s, a);
        chunk_multiply(&sums, w, in, min(a.chunk, p.steps - step), p);
        if (step + a.chunk >= p.steps) tile_send(s, a, which, t, &sums, bias, words);
        if (which == QKV && tile + gridDim.x >= p.tiles && step + a.chunk >= p.steps) s->owes = true;
        else stream_fetch(&s->stream, a, s->ring);
    }
}

// ---- LayerNorm ------------------------------------------------------------------------------------------------------

// A warp's columns of the residual stream.
__device__ static Rows columns_of(const Layers &a, int warp) {
    const int each = a.product[QKV].warp_rows, begin = min(a.C, warp * each);
    return {begin, min(a.C, begin + each)};
}

// x += the finished product, in this warp's columns.
__device__ static void add_branch(State *s, const Product &p, const float *words, Rows columns) {
#pragma unroll 1
    for (int c = columns.begin + s->lane * FOUR; c < columns.end; c += WARP * FOUR) {
        float x[FOUR], sum[FOUR];
        words_sum(sum, words + p.words + c, p.splits, p.out);
        floats_load(x, s->x + c);
        UNROLL_FOR (int j = 0; j < FOUR; j++) x[j] = rounded(x[j] + rounded(sum[j]));
        floats_store(s->x + c, x);
    }
    __syncwarp();
}

// The sum of what lanes 0 to WARPS - 1 have, as do the lanes WARPS further and so on: in every lane.
__device__ static float warps_sum(float x) {
    UNROLL_FOR (int offset = WARPS / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Sets s->mean; returns 1/deviation of x. Sums are of distances to the last mean, which cancel few digits.
__device__ static float moments(State *s, const Layers &a, Rows columns) {
    __shared__ float2 parts[WARPS];
    float sum = 0, squares = 0;
#pragma unroll 1
    for (int c = columns.begin + s->lane * FOUR; c < columns.end; c += WARP * FOUR) {
        float x[FOUR];
        floats_load(x, s->x + c);
        UNROLL_FOR (int j = 0; j < FOUR; j++) sum += x[j] - s->mean, squares = add_square(squares, x[j] - s->mean);
    }
    __syncwarp();
    sum = warp_sum(sum), squares = warp_sum(squares);
    if (s->lane == 0) parts[s->warp] = {sum, squares};
    __syncthreads();
    sum = warps_sum(parts[s->lane % WARPS].x), squares = warps_sum(parts[s->lane % WARPS].y);
    const float shift = __fdividef(sum, (float)a.C);
    s->mean += shift;
    return layernorm_rstd(fmaxf(squares - sum * shift, 0), a.C);
}

// gamma and beta of a lane's first columns, loaded before its words are there.
struct Scales {
    Four gamma, beta;
};
__device__ static Scales scales_of(Norm n, size_t ahead, Rows columns, int lane) {
    const int c = min(columns.begin + lane * FOUR, max(columns.end - FOUR, 0));
    return {*(const Four *)(n.gamma + ahead + c), *(const Four *)(n.beta + ahead + c)};
}

// in = LN(x) in this warp's columns.
__device__ static void normalise(State *s, const Layers &a, Scales scales, Norm n, size_t ahead, Rows columns) {
    const float rstd = moments(s, a, columns);
#pragma unroll 1
    for (Rows left = columns; left.begin < left.end; left.begin += WARP * FOUR) {
        const int c = left.begin + s->lane * FOUR;
        float x[FOUR];
        Four to;
        if (left.begin > columns.begin) scales = scales_of(n, ahead, left, s->lane);
        if (c >= left.end) continue;
        floats_load(x, s->x + c);
        UNROLL_FOR (int j = 0; j < FOUR; j++)
            to.of[j] = (real)layernorm_y(layernorm_xhat(x[j], s->mean, rstd), real_to_float(scales.gamma.of[j]),
                                         real_to_float(scales.beta.of[j]));
        *(Four *)(s->in + c) = to;
    }
    __syncwarp();
}

// in = what FC sent, in these rows.
__device__ static void activations(State *s, const float *words, Rows rows) {
#pragma unroll 1
    for (int c = rows.begin + s->lane * FOUR; c < rows.end; c += WARP * FOUR) {
        float x[FOUR];
        Four to;
        words_sum(x, words + c, 1, 0);
        UNROLL_FOR (int j = 0; j < FOUR; j++) to.of[j] = (real)x[j];
        *(Four *)(s->in + c) = to;
    }
    __syncwarp();
}

// ---- Attention of one query -----------------------------------------------------------------------------------------

// The token's own query, key and value, this lane's elements.
struct Own {
    float q[VEC];
    Pack<VEC> k, v;
};

// The last range of keys has the token's own.
__device__ static void own_await(Own *own, const Layers &a, const float *words, const KeyRange &r, int row) {
    const bool mine = r.element < a.D, last = mine && row < r.end;
    const float *from = words + r.head * a.D + r.element;
    float x[3][VEC] = {};
    bool there;
    do {
        there = true;
        UNROLL_FOR (int i = 0; i < 3; i++)
            UNROLL_FOR (int e = 0; e < VEC; e += FOUR)
                if (i == 0 ? mine : last) words_load(*(float(*)[FOUR])(x[i] + e), from + i * a.C + e, &there);
    } while (!there);
    __syncwarp();
    UNROLL_FOR (int e = 0; e < VEC; e++) own->q[e] = x[0][e];
    own->k = pack_of(x[1]), own->v = pack_of(x[2]);
}

// A lane's part of a softmax: the largest score so far, and sums with weights 2^(score - largest). Scores are in units of
// log 2.
struct Softmax {
    float largest, weights, values[VEC];
};

// The weight of a part in the whole, whose largest score is given; a part may have no keys.
__device__ static float share_of(float largest, float of_all) {
    return largest == -INFINITY ? 0 : exp2_fast(largest - of_all);
}

// Adds a key, which is none if not `there`.
__device__ static void attend(Softmax *s, Pack<VEC> k, Pack<VEC> v, const Own &own, const Layers &a, bool there) {
    float score = 0, x[VEC];
    pack_get(x, k);
    UNROLL_FOR (int e = 0; e < VEC; e++) score = add_product(score, own.q[e], x[e]);
    UNROLL_FOR (int offset = KEY_LANES_MAX / 2; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, score, offset);
        score += offset >> a.key_lanes_shift ? 0 : other;
    }
    score = there ? score * a.score_scale : -INFINITY;
    const float largest = fmaxf(s->largest, score), old = share_of(s->largest, largest);
    const float weight = there ? exp2_fast(score - largest) : 0;
    s->largest = largest, s->weights = s->weights * old + weight;
    pack_get(x, v);
    UNROLL_FOR (int e = 0; e < VEC; e++) s->values[e] = s->values[e] * old + weight * x[e];
}

// room (D + 2): the warp's sums, their largest score, the sum of weights.
__device__ static void softmax_write(float *room, Softmax *s, const Layers &a, int element) {
    float largest = s->largest;
#pragma unroll 1
    for (int offset = WARP / 2; offset >> a.key_lanes_shift > 0; offset /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    const float share = share_of(s->largest, largest);
    s->weights *= share;
    UNROLL_FOR (int e = 0; e < VEC; e++) s->values[e] *= share;
#pragma unroll 1
    for (int offset = WARP / 2; offset >> a.key_lanes_shift > 0; offset /= 2) {
        s->weights += __shfl_xor_sync(0xffffffffu, s->weights, offset);
        UNROLL_FOR (int e = 0; e < VEC; e++) s->values[e] += __shfl_xor_sync(0xffffffffu, s->values[e], offset);
    }
    if (threadIdx.x % WARP >> a.key_lanes_shift > 0 || element >= a.D) return;
    floats_store(room + element, s->values);
    if (element == 0) room[a.D] = largest, room[a.D + 1] = s->weights;
}

// Sends the range's result, and log2 of its sum of weights, from those of the warps.
__device__ static void attention_send(const Layers &a, const float *room, const KeyRange &r, float *words) {
    const int d = threadIdx.x;
    float largest = -INFINITY, weights = 0, sum = 0;
    if (d > a.D) return;
    UNROLL_FOR (int w = 0; w < WARPS; w++) largest = fmaxf(largest, room[w * a.room_width + a.D]);
    UNROLL_FOR (int w = 0; w < WARPS; w++) {
        const float *of = room + w * a.room_width, share = share_of(of[a.D], largest);
        weights = add_product(weights, share, of[a.D + 1]), sum = add_product(sum, share, of[d]);
    }
    if (d < a.D) word_send(words + a.attention_words + r.split * a.C + r.head * a.D + d, __fdividef(sum, weights));
    else word_send(words + a.weight_words + r.split * a.NH + r.head, largest + __log2f(weights));
}

// Fetches keys and values from round `round` of the range on, as many as there is room for.
__device__ static void keys_fetch(Pack<VEC> *keys, const Layers &a, const real *cache, const KeyRange &r, int round,
                                  int row) {
#pragma unroll 1
    for (int i = 0; i < a.keys_rounds; i++) {
        const int key = key_of(r, round + i, threadIdx.x / WARP);
        const real *k = cache + (size_t)key * 3 * a.C + a.C + r.head * a.D + r.element;
        const bool there = key < min(r.end, row) && r.element < a.D;
        pack_fetch(keys + i * 2 * THREADS + threadIdx.x, k, there);
        pack_fetch(keys + (i * 2 + 1) * THREADS + threadIdx.x, k + a.C, there);
    }
}

// A thread block's first head and range of keys, if it has one: while few weights are fetched.
__device__ static void keys_ahead(State *s, const Layers &a, const real *cache, int row) {
    if (blockIdx.x < a.NH * a.head_splits) keys_fetch(s->keys, a, cache, range_of(a, blockIdx.x, row), 0, row);
    fetch_commit();
}

// A thread block's heads and ranges of keys.
__device__ static void attention(State *s, const Layers &a, real *cache, float *words, int row) {
#pragma unroll 1
    for (int item = blockIdx.x; item < a.NH * a.head_splits; item += gridDim.x) {
        const KeyRange r = range_of(a, item, row);
        Softmax softmax = {-INFINITY};
        Own own;
        own_await(&own, a, words, r, row);
        fetch_wait<0>();
#pragma unroll 1
        for (int round = 0, at = 0; key_of(r, round, 0) - r.slot < r.end; round++, at++) {
            if (at == a.keys_rounds) at = 0;
            if (at == 0 && (round > 0 || item > blockIdx.x)) {
                keys_fetch(s->keys, a, cache, r, round, row), fetch_commit();
                fetch_wait<0>();
            }
            const Pack<VEC> *k = s->keys + at * 2 * THREADS + threadIdx.x;
            const int key = key_of(r, round, s->warp);
            attend(&softmax, key == row ? own.k : k[0], key == row ? own.v : k[THREADS], own, a, key < r.end);
        }
        float *room = room_of(s, a);
        softmax_write(room + s->warp * a.room_width, &softmax, a, r.element);
        __syncthreads();
        attention_send(a, room, r, words);
        if (row < r.end && threadIdx.x < 1 << a.key_lanes_shift && r.element < a.D) {
            real *to = cache + (size_t)row * 3 * a.C + a.C + r.head * a.D + r.element;
            pack_store(to, own.k), pack_store(to + a.C, own.v);
        }
        __syncwarp();
    }
    if (s->owes) stream_fetch(&s->stream, a, s->ring), s->owes = false;
}

// in = the heads' results, in these rows, from the results of ranges of keys. Lanes take four rows and every GROUPS-th
// range.
__device__ static void attention_output(State *s, const Layers &a, const float *words, Rows rows) {
    constexpr int GROUPS = 4, EACH = HEAD_SPLITS_MAX / GROUPS, ACROSS = WARP / GROUPS;
    const int group = s->lane / ACROSS;
#pragma unroll 1
    for (int first = rows.begin; first < rows.end; first += ACROSS * FOUR) {
        const int c = first + s->lane % ACROSS * FOUR;
        float part[EACH][FOUR] = {}, weight[EACH], largest = -INFINITY, sum[FOUR] = {}, weights = 0;
        const float *from = words + a.attention_words + group * a.C + c;
        const float *weight_from = words + a.weight_words + group * a.NH + quotient(c, a.by_head_size);
        bool there;
        do {
            there = true;
            UNROLL_FOR (int i = 0; i < EACH; i++) {
                weight[i] = -INFINITY;
                if (group + i * GROUPS >= a.head_splits || c >= rows.end) continue;
                words_load(part[i], from + i * GROUPS * a.C, &there);
                word_load(&weight[i], weight_from + i * GROUPS * a.NH, &there);
            }
        } while (!there);
        __syncwarp();
        UNROLL_FOR (int i = 0; i < EACH; i++) largest = fmaxf(largest, weight[i]);
        UNROLL_FOR (int offset = ACROSS; offset < WARP; offset *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
        UNROLL_FOR (int i = 0; i < EACH; i++) {
            const float share = share_of(weight[i], largest);
            weights += share;
            UNROLL_FOR (int j = 0; j < FOUR; j++) sum[j] = add_product(sum[j], share, part[i][j]);
        }
        Four to;
        UNROLL_FOR (int offset = ACROSS; offset < WARP; offset *= 2) {
            weights += __shfl_xor_sync(0xffffffffu, weights, offset);
            UNROLL_FOR (int j = 0; j < FOUR; j++) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], offset);
        }
        UNROLL_FOR (int j = 0; j < FOUR; j++) to.of[j] = (real)__fdividef(sum[j], weights);
        if (group == 0 && c < rows.end) *(Four *)(s->in + c) = to;
    }
    __syncwarp();
}

// ---- The pass -------------------------------------------------------------------------------------------------------

// Logits, from s->in.
__device__ static void head(State *s, const Layers &a) {
#pragma unroll 1
    for (int turn = 0, v; (v = head_row(turn)) < a.V; turn++) {
        float sum[HEAD_ROWS] = {};
#pragma unroll 1
        for (int first = 0; first < a.head_packs; first += a.chunk / HEAD_ROWS) {
            const int count = min(a.chunk / HEAD_ROWS, a.head_packs - first);
            const Pack<VEC> *pack = chunk_await(s, a) + s->lane;
#pragma unroll 1
            for (int k = 0; k < count; k++) {
                const int c = ((first + k) * WARP + s->lane) * VEC;
                float x[VEC] = {}, w[VEC];
                if (c < a.C) pack_get(x, pack_load<VEC>(s->in + c));
                UNROLL_FOR (int i = 0; i < HEAD_ROWS; i++) {
                    pack_get(w, pack[(k * HEAD_ROWS + i) * THREADS]);
                    UNROLL_FOR (int j = 0; j < VEC; j++) sum[i] = add_product(sum[i], x[j], w[j]);
                }
            }
            stream_fetch(&s->stream, a, s->ring);
        }
        const float logit = warp_sum_each(sum);
        v += s->lane / (WARP / HEAD_ROWS);
        if (s->lane % (WARP / HEAD_ROWS) == 0 && v < a.V) a.logits[v] = logit;
    }
}

// s->in = LN(x), after the last product's sums have been added to x. For QKV or FC of block l, or with l = L for the head.
// Where a thread block has no tile of that product it only adds.
__device__ static void norm_input(State *s, const Layers &a, int which, int l, bool wanted) {
    const bool last = l == a.L;
    const size_t ahead = last ? 0 : l * a.stride;
    const Norm norm = last ? a.lnf : which == QKV ? a.ln1 : a.ln2;
    const Rows columns = columns_of(a, s->warp);
    const Scales scales = scales_of(norm, ahead, columns, s->lane);
    const float *words = a.words + l * a.words_stride - (which == QKV ? a.words_stride : 0);
    if (which == FC || l > 0) add_branch(s, a.product[which == QKV ? FCPROJ : PROJ], words, columns);
    if (wanted) normalise(s, a, scales, norm, ahead, columns);
}

// A product of block l, with what comes before it: the input of its rows. l = L: of the head's input alone.
__device__ static void product(State *s, const Layers &a, int which, int l) {
    const size_t ahead = l * a.stride;
    const Product &p = a.product[which];
    const int tiles = l < a.L ? p.tiles : 0;
    float *words = a.words + l * a.words_stride;
#pragma unroll 1
    for (int i = blockIdx.x;; i += gridDim.x) {
        const Tile t = tile_of(p, i, s->warp);
        const int c = t.first + threadIdx.x;
        const float bias = i < tiles && t.split == 0 && c < t.end ? real_to_float(p.bias[ahead + c]) : 0;
        if ((which == QKV || which == FC) && i == blockIdx.x) norm_input(s, a, which, l, i < tiles || l == a.L);
        if (i >= tiles) return;
        if (which == PROJ) attention_output(s, a, words, t.rows);
        if (which == FCPROJ) activations(s, words + a.product[FC].words, t.rows);
        multiply(s, a, which, t, bias, words, i);
    }
}

// From the token to the logits.
__device__ static void pass(State *s, const Layers &a, int token, int row) {
    const Rows columns = columns_of(a, s->warp);
    for (int c = threadIdx.x; c < a.in_count; c += THREADS) s->in[c] = (real)0; // weights of 0 multiply any of it
    for (int c = columns.begin + s->lane; c < columns.end; c += WARP)
        s->x[c] = rounded(real_to_float(a.wte[(size_t)token * a.C + c]) + real_to_float(a.wpe[(size_t)row * a.C + c]));
    __syncthreads();
#pragma unroll 1
    for (int phase = 0; phase <= a.L * PRODUCTS; phase++) { // one piece of code for all products
        const int l = phase / PRODUCTS, which = phase % PRODUCTS;
        product(s, a, which, l);
        if (which == QKV && l < a.L) attention(s, a, a.cache + l * a.qkv_stride, a.words + l * a.words_stride, row);
        if (which == FCPROJ && l + 1 < a.L) keys_ahead(s, a, a.cache + (l + 1) * a.qkv_stride, row);
    }
    __syncthreads();
    head(s, a);
}

__device__ static void words_clear(float *words, size_t count) {
    const size_t first = (blockIdx.x * (size_t)THREADS + threadIdx.x) * FOUR;
#pragma unroll 1
    for (size_t i = first; i < count; i += gridDim.x * (size_t)THREADS * FOUR)
        *(uint4 *)(words + i) = {EMPTY, EMPTY, EMPTY, EMPTY};
}

__global__ void __launch_bounds__(THREADS, 1) decode_kernel(const __grid_constant__ Layers a, int token, int row) {
    extern __shared__ float4 shared[];
    State s = {.warp = (int)threadIdx.x / WARP, .lane = (int)threadIdx.x % WARP};
    s.ring = (Pack<VEC> *)shared;
    s.keys = s.ring + STAGES * a.chunk * THREADS;
    s.room = (float *)(s.keys + a.keys_rounds * 2 * THREADS);
    s.x = s.room + 2 * WARPS * a.room_width;
    s.in = (real *)(s.x + a.C);
    s.stream.tile = blockIdx.x;
    stream_settle(&s.stream, a);
    keys_ahead(&s, a, a.cache, row);
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) stream_fetch(&s.stream, a, s.ring);
    pass(&s, a, token, row);
    words_clear(a.words_before, a.words_count);
}

// ---- Set-up ---------------------------------------------------------------------------------------------------------

static size_t words_of(const ModelConfig *m) { // of all blocks, at most
    const size_t C = m->channels, splits = SPLITS_MAX, ranges = HEAD_SPLITS_MAX;
    return m->layers * round_up((7 + 2 * splits + ranges) * C + ranges * m->heads, FOUR);
}

size_t decode_scratch_floats(const ModelConfig *config) { return 2 * words_of(config); }

static int log2_of(int n) { // rounded up
    int power = 0;
    while (1 << power < n) power++;
    return power;
}

// Cuts a product into tiles, one a thread block if they are not too wide, and into as many splits as take the least time by
// an estimate: reading takes a nanosecond for 32 bytes, in pieces of 64, computing 20 ns a step, a tile 300 ns beside that,
// and a split costs its readers 250.
static void product_cut(Product *p, int splits_max, int blocks) {
    const int pieces_max = REAL_DTYPE == DTYPE_FP32 ? 1 : PIECES_MAX;
    int least = INT_MAX;
    for (int splits = 1; splits <= splits_max; splits *= 2) {
        const int packs = ceil_div(p->out / VEC * splits, blocks);
        Product q = *p;
        q.columns = VEC * (packs < pieces_max * STEP_PACKS ? packs : pieces_max * STEP_PACKS);
        q.piece_shift = log2_of(ceil_div(q.columns, VEC * STEP_PACKS)), q.pieces = 1 << q.piece_shift;
        q.splits = splits, q.split_shift = log2_of(splits);
        q.tiles = ceil_div(p->out, q.columns) * splits;
        q.split_rows = (int)round_up(ceil_div(p->in, splits), STEP_ROWS);
        q.warp_rows = (int)round_up(ceil_div(q.split_rows, WARPS), STEP_ROWS);
        q.steps = (int)round_up(q.warp_rows / STEP_ROWS * q.pieces, PIECES_MAX);
        const int bytes = q.split_rows * round_up(q.columns * sizeof(real), 64);
        const int time = ceil_div(q.tiles, blocks) * (bytes / 32 + 20 * q.steps + 300) + 250 * splits;
        if (time < least) least = time, *p = q;
    }
}

static size_t in_count_of(int C) { return 5 * (size_t)C + PIECES_MAX * STEP_ROWS; }
static int room_width_of(int D) { return (int)round_up(size_max(D + 2, PIECES_MAX * STEP_PACKS * VEC), FOUR); }
constexpr size_t ROUND_BYTES = 2 * THREADS * sizeof(Pack<VEC>), STEP_BYTES = STAGES * THREADS * sizeof(Pack<VEC>);
static size_t shared_bytes_of(const ModelConfig *m, int chunk, int rounds) {
    const size_t C = m->channels, room = 2 * WARPS * (size_t)room_width_of(C / m->heads);
    return chunk * STEP_BYTES + rounds * ROUND_BYTES + (C + room) * sizeof(float) + in_count_of(C) * sizeof(real);
}
constexpr size_t STATIC_BYTES = 1024;

bool decode_fits(const ModelConfig *m, const cudaDeviceProp *device) {
    return device->cooperativeLaunch && m->channels / m->heads % VEC == 0 &&
           shared_bytes_of(m, PIECES_MAX, 1) + STATIC_BYTES <= device->sharedMemPerBlockOptin;
}

// Ranges of keys of each head, for the token in this row.
static void set_keys(Layers *a, int row, int blocks) {
    const int most = blocks / a->NH < HEAD_SPLITS_MAX ? blocks / a->NH : HEAD_SPLITS_MAX;
    a->key_lanes_shift = log2_of(ceil_div(a->D, VEC));
    const int splits = ceil_div(row + 1, WARPS * WARP >> a->key_lanes_shift);
    a->keys_each = ceil_div(row + 1, most < 1 ? 1 : splits < most ? splits : most);
    a->head_splits = ceil_div(row + 1, a->keys_each);
    a->by_heads = reciprocal(a->NH), a->by_head_size = reciprocal(a->D);
    a->score_scale = 1.44269504f / sqrtf((float)a->D);
}

// What a launch needs to know but for the weights.
static Layers layers_for(const Decoder *d, float *logits, int row) {
    const ModelConfig *m = &d->model->config;
    Layers a = {};
    a.L = m->layers, a.NH = m->heads, a.C = m->channels, a.V = m->vocab, a.D = m->channels / m->heads;
    a.cache = d->qkv, a.qkv_stride = d->qkv_stride, a.logits = logits, a.words_count = words_of(m);
    a.words = d->scratch + d->turn % 2 * a.words_count, a.words_before = d->scratch + (d->turn + 1) % 2 * a.words_count;
    a.room_width = room_width_of(a.D), a.in_count = (int)in_count_of(a.C);
    set_keys(&a, row, d->device->multiProcessorCount);
    const size_t left = d->device->sharedMemPerBlockOptin - STATIC_BYTES - shared_bytes_of(m, 0, 0);
    a.keys_rounds =
        (int)size_min(ceil_div(a.keys_each, WARPS * WARP >> a.key_lanes_shift), size_max(1, left / 6 / ROUND_BYTES));
    a.chunk = (int)size_min(CHUNK_MAX, (left - a.keys_rounds * ROUND_BYTES) / STEP_BYTES);
    a.chunk -= a.chunk % PIECES_MAX;
    a.head_packs = ceil_div(a.C, WARP * VEC);
    return a;
}

static Layers layers_of(const Decoder *d, float *logits, int row) {
    Layers a = layers_for(d, logits, row);
    int words = 0;
    const auto at = [&](TensorKind kind) { return d->weight + model_tensor(d->model, kind, 0)->offset; };
    const auto norm = [&](TensorKind w, TensorKind b) { return Norm{at(w), at(b)}; };
    const auto product = [&](TensorKind w, TensorKind b, int in, int out, int splits_max) {
        Product p = {};
        p.w = at(w), p.bias = at(b), p.in = in, p.out = out, p.words = words;
        product_cut(&p, splits_max, d->device->multiProcessorCount);
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
    a.words_stride = round_up(words + a.head_splits * (a.C + a.NH), FOUR);
    return a;
}

int decode(float *logits, const Decoder *d, int token, int row, cudaStream_t stream, Error *e) {
    Layers a = layers_of(d, logits, row);
    const size_t shared = shared_bytes_of(&d->model->config, a.chunk, a.keys_rounds);
    if (d->turn == 0) CUDA_TRY(cudaMemsetAsync(d->scratch, 0xff, 2 * a.words_count * sizeof(float), stream), e);
    void *parameters[] = {&a, &token, &row};
    TRY(shared_memory_allow(decode_kernel, shared, e));
    return CUDA_CALL(cudaLaunchCooperativeKernel((void *)decode_kernel, dim3(d->device->multiProcessorCount),
                                                 dim3(THREADS), parameters, shared, stream),
                     e);
}
