#include "cpu/attention.h"
#include "cpu/layers.h"
#include "cpu/tile.h"
#include "cpu/value.h"
#include "math/loss.h"

#include <assert.h>
#include <math.h>
#include <omp.h>

// Both passes copy a head's rows to scratch, padded with zeros from (T, D) to (Tp, Dp), multiples of TILE_COLUMNS. So
// products have only whole tiles.
//
// The forward pass computes TILE_ROWS x Tp scores at a time, a row panel. The backward pass computes blocks of
// ROW_BLOCK queries x KEY_BLOCK keys. Larger blocks would load and store dq, dk and dv less often, but a block must fit
// in the second-level cache. Both passes skip tiles of scores above the diagonal or of other documents.
enum { ROW_BLOCK = 64, KEY_BLOCK = 256 };
enum { SCORE_ROW = KEY_BLOCK + VEC };      // floats; a power of two would put all rows in one cache set
enum { SERIAL_MULTIPLY_ADDS = 64 * 1024 }; // products with fewer multiply-adds run on one thread

// One head of one example, with its thread's scratch.
typedef struct {
    size_t T, D, Tp, Dp;
    size_t qkv_row, out_row;  // elements of a row: 3C and C
    Dtype type;               // type of qkv, out and their gradients; sums, scores and scratch are fp32
    float scale;              // 1/sqrt(D)
    size_t index;             // index of the head in the whole model, for dropout
    Dropout dropout;          // dropout of this example
    const uint16_t *position; // (T) or NULL
    float *q;                 // (Tp, Dp), scaled by 1/sqrt(D)
    float *k, *v, *dout;      // (Tp, Dp)
    float *k_t, *v_t;         // (Tp / TILE_COLUMNS, D, TILE_COLUMNS): transposed panels
    float *dk, *dv;           // (Tp, Dp)
    float *rows;              // (ROW_BLOCK, Dp): a panel of out, or a block of dq
    float *scores, *dscores;  // forward: scores (TILE_ROWS, Tp + VEC); backward: both (ROW_BLOCK, SCORE_ROW)
    float *lse, *delta;       // (Tp)
} Head;

// Returns the first key that query t sees: its document's first token. Padding belongs to the last document.
static size_t first_key(const Head *head, size_t t) {
    size_t last = head->T - 1;
    return head->position ? size_min(t, last) - head->position[size_min(t, last)] : 0;
}
static size_t round_down(size_t n, size_t multiple) { return n / multiple * multiple; }

// Lays out a thread's scratch at `base`; NULL: only counts. Returns the floats used.
static size_t scratch_layout(Head *head, float *base, size_t max_T, size_t max_D) {
    size_t Tp = round_up(max_T, TILE_COLUMNS), Dp = round_up(max_D, TILE_COLUMNS), used = 0;
    size_t block = (size_t)ROW_BLOCK * SCORE_ROW, scores = size_max(TILE_ROWS * (Tp + VEC), block);
    const struct {
        float **array;
        size_t floats;
    } parts[] = {{&head->q, Tp * Dp},     {&head->k, Tp * Dp},           {&head->v, Tp * Dp},
                 {&head->dout, Tp * Dp},  {&head->k_t, Tp * Dp},         {&head->v_t, Tp * Dp},
                 {&head->dk, Tp * Dp},    {&head->dv, Tp * Dp},          {&head->scores, scores},
                 {&head->dscores, block}, {&head->rows, ROW_BLOCK * Dp}, {&head->lse, Tp},
                 {&head->delta, Tp}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].array = base ? base + used : NULL;
        used += round_up(parts[i].floats, 16); // whole cache lines
    }
    return used;
}

size_t attention_scratch(int threads, size_t max_T, size_t max_D) {
    Head head;
    return (size_t)threads * scratch_layout(&head, NULL, max_T, max_D);
}

// Returns head i % NH of example i / NH, with the calling thread's scratch.
static Head head_at(const Attention *at, size_t T, size_t NH, size_t D, size_t i) {
    assert(T <= at->max_T && D <= at->max_D && D > 0);
    Head head = {.T = T,
                 .D = D,
                 .Tp = round_up(T, TILE_COLUMNS),
                 .Dp = round_up(D, TILE_COLUMNS),
                 .qkv_row = 3 * NH * D,
                 .out_row = NH * D,
                 .type = at->type,
                 .scale = 1 / sqrtf((float)D),
                 .index = at->first_head + i % NH,
                 .dropout = dropout_at(at->dropout, at->dropout.example + i / NH, at->dropout.layer),
                 .position = at->position ? at->position + i / NH * T : NULL};
    size_t floats = attention_scratch(1, at->max_T, at->max_D);
    scratch_layout(&head, at->scratch + (size_t)omp_get_thread_num() * floats, at->max_T, at->max_D);
    return head;
}

// `to` (Tp, Dp) = scale * `from` (T, D), padded with zeros
static void copy_padded(const Head *head, float *to, const void *from, size_t from_row, float scale) {
    size_t D = head->D, Dp = head->Dp;
    for (size_t t = 0; t < head->T; t++, to += Dp) {
        BY_TYPE(head->type, scale_values(to, 0, DTYPE_FP32, from, t * from_row, TYPE, D, scale));
        memset(to + D, 0, (Dp - D) * sizeof *to);
    }
    memset(to, 0, (head->Tp - head->T) * Dp * sizeof *to);
}

// Rows [t, t + rows) of `to` (T, D) = scale * `from` (rows, Dp)
static void copy_rows_out(const Head *head, void *to, size_t t, size_t to_row, const float *from, size_t rows,
                          float scale) {
    for (size_t i = 0; i < rows; i++, from += head->Dp)
        BY_TYPE(head->type, scale_values(to, (t + i) * to_row, TYPE, from, 0, DTYPE_FP32, head->D, scale));
}

// `to` (Tp / TILE_COLUMNS, D, TILE_COLUMNS) = `from` (T, D), transposed in panels. floats: scratch (Tp, Dp), for bf16.
static void transpose_panels(const Head *head, float *to, const void *from, size_t from_row, float *floats) {
    const float *rows = from;
    if (head->type != DTYPE_FP32) {
        copy_padded(head, floats, from, from_row, 1);
        rows = floats, from_row = head->Dp;
    }
    for (size_t t = 0; t < head->T; t += TILE_COLUMNS)
        pack_transposed(to + t * head->D, TILE_COLUMNS, rows + t * from_row, from_row,
                        size_min(TILE_COLUMNS, head->T - t), head->D);
}

// Writes a tile of C = A B, or C += A B if `add`. Element (i, k) of A lies at a[i * a_row + k * a_k].
static void write_tile(float *c, size_t c_row, size_t rows, const float *a, size_t a_row, size_t a_k, const float *b,
                       size_t b_row, size_t K, bool add) {
    TILE_DISPATCH(rows, {
        Tile t = tile_zero(ROWS);
        tile_add_product(ROWS, &t, K, a, a_row, a_k, b, b_row);
        tile_write(ROWS, c, c_row, &t, add, false);
    });
}

// Sets scores [begin, end) of a row to -infinity. Stores whole vectors: a vector load after partial stores is slow.
VECTOR_INLINE void hide(float *scores, size_t begin, size_t end) {
    size_t j = round_down(begin, VEC);
    // key: index minus `begin`, unsigned. Earlier keys wrap to the largest numbers, so one comparison tests both ends.
    VecBits key = {0};
    for (int i = 0; i < VEC; i++) key[i] = (uint32_t)j - (uint32_t)begin + (uint32_t)i;
    for (; j < end; j += VEC, key += VEC)
        vec_store(scores + j, vec_select(key < (uint32_t)(end - begin), vec_set(-INFINITY), vec_load(scores + j)));
}

// Replaces scores [begin, end) of a row by exp(score - max), and the rest of [0, padded) by 0. Returns the sum.
static float softmax_row(float *scores, size_t begin, size_t end, size_t padded, float *max) {
    hide(scores, 0, begin);
    hide(scores, end, padded);
    Vec sum = {0};
    *max = largest(scores, padded);
    for (size_t j = 0; j < padded; j += VEC) {
        Vec p = vec_exp(vec_load(scores + j) - *max);
        vec_store(scores + j, p);
        sum += p;
    }
    return vec_sum(sum);
}

// Applies dropout to the probabilities of query t and keys [j, end). j and end are multiples of VEC.
static void drop_row(const Head *head, float *scores, size_t t, size_t j, size_t end) {
    float factor[DROPOUT_SPAN];
    while (j < end) {
        size_t span = round_down(j, DROPOUT_SPAN);
        dropout_factors(factor, head->dropout, DROPOUT_PROBABILITY, head->index, t, span);
        for (size_t next = size_min(end, span + DROPOUT_SPAN); j < next; j += VEC)
            vec_store(scores + j, vec_load(scores + j) * vec_load(factor + (j - span)));
    }
}

// Writes rows [i, i + rows) of out = softmax(q k^T) v and of lse.
static void forward_panel(const Head *head, void *out, float *lse, size_t i, size_t rows) {
    size_t Dp = head->Dp, score_row = head->Tp + VEC, keys = size_min(head->Tp, round_up(i + rows, TILE_COLUMNS));
    size_t first = round_down(first_key(head, i), TILE_COLUMNS);
    for (size_t j = first; j < keys; j += TILE_COLUMNS)
        write_tile(head->scores + j, score_row, rows, head->q + i * Dp, Dp, 1, head->k_t + j * head->D, TILE_COLUMNS,
                   head->D, false);
    float sum[TILE_ROWS];
    size_t valid = size_min(rows, head->T - i);
    for (size_t r = 0; r < rows; r++) {
        float max, *scores = head->scores + r * score_row;
        sum[r] = softmax_row(scores + first, first_key(head, i + r) - first, i + r + 1 - first, keys - first, &max);
        if (r < valid) lse[i + r] = loss_logsumexp(max, sum[r]);
        if (r < valid && head->dropout.below) drop_row(head, scores, i + r, first, keys);
    }
    for (size_t d = 0; d < Dp; d += TILE_COLUMNS)
        write_tile(head->rows + d, Dp, rows, head->scores + first, score_row, 1, head->v + first * Dp + d, Dp,
                   i + rows - first, false);
    for (size_t r = 0; r < valid; r++)
        copy_rows_out(head, out, i + r, head->out_row, head->rows + r * Dp, 1, 1 / sum[r]);
}

// Returns delta_t = sum_d dout_td out_td = sum_j P_tj dP_tj (FlashAttention, appendix B.4), also with dropout.
VECTOR_INLINE float row_delta(const float *dout, const void *out, size_t at, size_t D, const Dtype type) {
    size_t whole = D / VEC * VEC;
    float lane[VEC];
    Vec sum = {0};
    for (size_t d = 0; d < whole; d += VEC) sum += vec_load(dout + d) * value_load(out, at + d, type);
    vec_store(lane, sum);
    for (size_t d = whole; d < D; d++) lane[d - whole] += dout[d] * value_get(out, at + d, type);
    return vec_sum(vec_load(lane));
}

// For query t and keys [j, j + n), with P = exp(score - lse): replaces scores by f P, and dP in dscores by
// dS = P (f dP - delta). Both are 0 outside keys [first, t]. n: a multiple of VEC. f: dropout's `factor`; 1 if NULL.
VECTOR_INLINE void backward_softmax(float *scores, float *dscores, size_t first, size_t t, size_t j, size_t n,
                                    float lse, float delta, const float *factor) {
    VecBits key = {0}; // index minus `first`, unsigned, as in `hide`
    for (int i = 0; i < VEC; i++) key[i] = (uint32_t)j - (uint32_t)first + (uint32_t)i;
    for (size_t i = 0; i < n; i += VEC, key += VEC) {
        Vec p = vec_exp(vec_load(scores + i) - lse), dp = vec_load(dscores + i);
        VecInt seen = key <= (uint32_t)(t - first);
        if (factor) dp *= vec_load(factor + i);
        vec_store(dscores + i, vec_select(seen, p * (dp - delta), (Vec){0}));
        if (factor) p *= vec_load(factor + i);
        vec_store(scores + i, vec_select(seen, p, (Vec){0}));
    }
}

// Writes dropout's factors for query t and keys [j, end) to `factor`, in whole spans. Returns the address of key j's.
static const float *row_factors(const Head *head, float *factor, size_t t, size_t j, size_t end) {
    size_t first = round_down(j, DROPOUT_SPAN);
    for (size_t span = first; span < end; span += DROPOUT_SPAN)
        dropout_factors(factor + (span - first), head->dropout, DROPOUT_PROBABILITY, head->index, t, span);
    return factor + (j - first);
}

// The keys of block [j, j + keys) that some query of [i, i + rows) sees: [j + begin, j + end).
typedef struct {
    size_t begin, end;
} Seen;
static Seen keys_seen(const Head *head, size_t i, size_t rows, size_t j, size_t keys) {
    size_t end = i + rows > j ? size_min(keys, i + rows - j) : 0, first = first_key(head, i);
    return (Seen){size_min(end, first > j ? first - j : 0), end};
}

// Writes P and dS of queries [i, i + rows) and keys [j, j + keys) to head->scores and head->dscores, from row r on.
// rows <= TILE_ROWS.
static void backward_scores(const Head *head, size_t i, size_t rows, size_t r, size_t j, size_t keys) {
    size_t D = head->D, Dp = head->Dp;
    float *p = head->scores + r * SCORE_ROW, *ds = head->dscores + r * SCORE_ROW;
    Seen seen = keys_seen(head, i, rows, j, keys);
    size_t begin = round_down(seen.begin, TILE_COLUMNS), end = size_min(keys, round_up(seen.end, TILE_COLUMNS));
    for (size_t c = begin; c < end; c += TILE_COLUMNS) {
        write_tile(p + c, SCORE_ROW, rows, head->q + i * Dp, Dp, 1, head->k_t + (j + c) * D, TILE_COLUMNS, D, false);
        write_tile(ds + c, SCORE_ROW, rows, head->dout + i * Dp, Dp, 1, head->v_t + (j + c) * D, TILE_COLUMNS, D,
                   false);
    }
    for (size_t t = i; t < i + rows; t++, p += SCORE_ROW, ds += SCORE_ROW) {
        float factor[KEY_BLOCK + 2 * DROPOUT_SPAN];
        const float *f = head->dropout.below ? row_factors(head, factor, t, j + begin, j + end) : NULL;
        backward_softmax(p + begin, ds + begin, first_key(head, t), t, j + begin, end - begin, head->lse[t],
                         head->delta[t], f);
        if (begin > 0) memset(p, 0, begin * sizeof *p), memset(ds, 0, begin * sizeof *ds);
        if (end < keys) memset(p + end, 0, (keys - end) * sizeof *p), memset(ds + end, 0, (keys - end) * sizeof *ds);
    }
}

// Computes dv += P^T dout, dk += dS^T q and dq = dS k (`add`: dq += dS k) for queries [i, i_end), keys [j, j + keys).
static void backward_block(const Head *head, size_t i, size_t i_end, size_t j, size_t keys, bool add) {
    size_t Dp = head->Dp;
    for (size_t row = i; row < i_end; row += TILE_ROWS)
        backward_scores(head, row, size_min(TILE_ROWS, i_end - row), row - i, j, keys);
    for (size_t c = 0; c < keys && j + c < i_end; c += TILE_ROWS) {
        size_t rows = size_min(TILE_ROWS, keys - c), first = size_max(i, j + c), last = i_end;
        while (last > first && first_key(head, last - 1) >= j + c + rows) last--;
        // Only queries [first, last) of the block see keys [j + c, j + c + rows).
        size_t offset = (first - i) * SCORE_ROW + c, K = last - first;
        for (size_t d = 0; d < Dp; d += TILE_COLUMNS) {
            float *dv = head->dv + (j + c) * Dp + d, *dk = head->dk + (j + c) * Dp + d;
            write_tile(dv, Dp, rows, head->scores + offset, 1, SCORE_ROW, head->dout + first * Dp + d, Dp, K, true);
            write_tile(dk, Dp, rows, head->dscores + offset, 1, SCORE_ROW, head->q + first * Dp + d, Dp, K, true);
        }
    }
    for (size_t row = i; row < i_end; row += TILE_ROWS) {
        size_t rows = size_min(TILE_ROWS, i_end - row);
        Seen seen = keys_seen(head, row, rows, j, keys);
        for (size_t d = 0; d < Dp; d += TILE_COLUMNS)
            write_tile(head->rows + (row - i) * Dp + d, Dp, rows, head->dscores + (row - i) * SCORE_ROW + seen.begin,
                       SCORE_ROW, 1, head->k + (j + seen.begin) * Dp + d, Dp, seen.end - seen.begin, add);
    }
}

void attention_forward(const Attention *at, void *out, float *lse, const void *qkv, size_t B, size_t T, size_t first,
                       size_t NH, size_t D) {
    const size_t C = NH * D, scores = B * NH * (T - first) * T;
#pragma omp parallel for schedule(static) num_threads(at->threads) if (scores * D >= SERIAL_MULTIPLY_ADDS)
    for (size_t i = 0; i < B * NH; i++) {
        const Head head = head_at(at, T, NH, D, i);
        const size_t row = i / NH * T, column = i % NH * D;
        const void *q = value_at(qkv, row * 3 * C + column, at->type); // (T, D), rows 3C apart; k at C, v at 2C
        copy_padded(&head, head.q, q, head.qkv_row, head.scale);
        copy_padded(&head, head.v, value_at(q, 2 * C, at->type), head.qkv_row, 1);
        transpose_panels(&head, head.k_t, value_at(q, C, at->type), head.qkv_row, head.k);
        for (size_t t = round_down(first, TILE_ROWS); t < T; t += TILE_ROWS)
            forward_panel(&head, value_at(out, row * C + column, at->type), lse + i * T, t,
                          size_min(TILE_ROWS, head.Tp - t));
    }
}

void attention_backward(const Attention *at, void *dqkv, const void *dout, const void *qkv, const void *out,
                        const float *lse, size_t B, size_t T, size_t NH, size_t D) {
    const size_t C = NH * D;
#pragma omp parallel for schedule(static) num_threads(at->threads) if (B * NH * T * T * D >= SERIAL_MULTIPLY_ADDS)
    for (size_t i = 0; i < B * NH; i++) {
        const Head h = head_at(at, T, NH, D, i);
        const size_t row = i / NH * T, column = i % NH * D, bytes = h.Tp * h.Dp * sizeof(float);
        const void *q = value_at(qkv, row * 3 * C + column, h.type), *k = value_at(q, C, h.type);
        void *dq = value_at(dqkv, row * 3 * C + column, h.type);
        copy_padded(&h, h.q, q, h.qkv_row, h.scale);
        copy_padded(&h, h.k, k, h.qkv_row, 1);
        copy_padded(&h, h.dout, value_at(dout, row * C + column, h.type), h.out_row, 1);
        transpose_panels(&h, h.k_t, k, h.qkv_row, h.dk);
        transpose_panels(&h, h.v_t, value_at(k, C, h.type), h.qkv_row, h.dk);
        memset(h.dk, 0, bytes), memset(h.dv, 0, bytes);
        for (size_t t = 0; t < T; t++)
            BY_TYPE(h.type, h.delta[t] = row_delta(h.dout + t * h.Dp, out, (row + t) * C + column, D, TYPE));
        memcpy(h.lse, lse + i * T, T * sizeof(float));
        for (size_t t = T; t < h.Tp; t++) h.lse[t] = INFINITY, h.delta[t] = 0; // so P = 0 in padding
        for (size_t t = 0; t < T; t += ROW_BLOCK) {
            size_t end = size_min(h.Tp, t + ROW_BLOCK), first = round_down(first_key(&h, t), TILE_COLUMNS);
            for (size_t j = first; j < end; j += KEY_BLOCK)
                backward_block(&h, t, end, j, size_min(KEY_BLOCK, round_up(end, TILE_COLUMNS) - j), j > first);
            copy_rows_out(&h, dq, t, h.qkv_row, h.rows, size_min(T, end) - t, h.scale);
        }
        copy_rows_out(&h, value_at(dq, C, h.type), 0, h.qkv_row, h.dk, T, 1);
        copy_rows_out(&h, value_at(dq, 2 * C, h.type), 0, h.qkv_row, h.dv, T, 1);
    }
}
