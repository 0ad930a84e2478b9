#include "cpu/attention.h"
#include "cpu/masks.h"
#include "cpu/tile.h"
#include "cpu/value.h"
#include "math/loss.h"

#include <assert.h>
#include <math.h>
#include <omp.h>

// Both passes copy a head's rows to scratch, padded with zeros to whole tiles: rows to Tp and columns to Dp, multiples
// of TILE_COLUMNS. So products have no edges.
//
// The forward pass computes a row panel of scores, TILE_ROWS x Tp, at a time. The backward pass computes blocks of
// ROW_BLOCK queries x KEY_BLOCK keys: larger ones load and store dq, dk and dv less often, but must fit in the
// second-level cache. Both skip tiles of scores above the diagonal or of other documents.
enum { ROW_BLOCK = 64, KEY_BLOCK = 256 };
enum { SCORE_ROW = KEY_BLOCK + VEC };      // floats; not a power of two: all rows would fall on one cache set
enum { SERIAL_MULTIPLY_ADDS = 64 * 1024 }; // fewer run on one thread

typedef struct {
    float *q;                // (Tp, Dp), scaled by 1/sqrt(D)
    float *k, *v, *dout;     // (Tp, Dp)
    float *k_t, *v_t;        // (Tp / TILE_COLUMNS, D, TILE_COLUMNS): transposed panels
    float *dk, *dv;          // (Tp, Dp)
    float *rows;             // (ROW_BLOCK, Dp): a panel of out, or a block of dq
    float *scores, *dscores; // forward: scores (TILE_ROWS, Tp + VEC); backward: both (ROW_BLOCK, SCORE_ROW)
    float *lse, *delta;      // (Tp)
} Scratch;

// One head of one example.
typedef struct {
    size_t T, D, Tp, Dp;
    size_t qkv_row, out_row;  // 3C and C
    Dtype type;               // type of qkv, out and their gradients; sums, scores and scratch are fp32
    float scale;              // 1/sqrt(D)
    size_t index;             // the head's number
    Dropout dropout;          // for this example
    const uint16_t *position; // (T) or NULL
} Head;

// The first key that query t sees: the first token of its document. Padding belongs to the last document.
static size_t first_key(const Head *head, size_t t) {
    size_t last = head->T - 1;
    return head->position ? size_min(t, last) - head->position[size_min(t, last)] : 0;
}
static size_t round_down(size_t n, size_t multiple) { return n / multiple * multiple; }

static float *cut_floats(float *base, size_t *used, size_t n) {
    float *p = base ? base + *used : NULL;
    *used += round_up(n, 16); // whole cache lines
    return p;
}

// Lays out a thread's scratch at `base`; NULL: only counts. Returns the floats used.
static size_t scratch_layout(Scratch *s, float *base, size_t max_T, size_t max_D) {
    size_t Tp = round_up(max_T, TILE_COLUMNS), Dp = round_up(max_D, TILE_COLUMNS), used = 0;
    float **matrices[] = {&s->q, &s->k, &s->v, &s->dout, &s->k_t, &s->v_t, &s->dk, &s->dv};
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) *matrices[i] = cut_floats(base, &used, Tp * Dp);
    s->rows = cut_floats(base, &used, ROW_BLOCK * Dp);
    s->scores = cut_floats(base, &used, size_max(TILE_ROWS * (Tp + VEC), (size_t)ROW_BLOCK * SCORE_ROW));
    s->dscores = cut_floats(base, &used, (size_t)ROW_BLOCK * SCORE_ROW);
    s->lse = cut_floats(base, &used, Tp);
    s->delta = cut_floats(base, &used, Tp);
    return used;
}

size_t attention_scratch(int threads, size_t max_T, size_t max_D) {
    Scratch s;
    return (size_t)threads * scratch_layout(&s, NULL, max_T, max_D);
}

static Scratch scratch_of_thread(const Attention *at) {
    Scratch s;
    size_t floats = attention_scratch(1, at->max_T, at->max_D);
    scratch_layout(&s, at->scratch + (size_t)omp_get_thread_num() * floats, at->max_T, at->max_D);
    return s;
}

// to[at + i] = scale * from[from_at + i], i < n, between two types
VECTOR_INLINE void scale_values(void *to, size_t at, const Dtype to_type, const void *from, size_t from_at,
                                const Dtype from_type, size_t n, float scale) {
    size_t whole = n / VEC * VEC;
    for (size_t i = 0; i < whole; i += VEC)
        value_store(to, at + i, scale * value_load(from, from_at + i, from_type), to_type);
    for (size_t i = whole; i < n; i++) value_set(to, at + i, scale * value_get(from, from_at + i, from_type), to_type);
}

// to (Tp, Dp) = scale * from (T, D), padded with zeros
static void copy_padded(const Head *head, float *to, const void *from, size_t from_row, float scale) {
    size_t D = head->D, Dp = head->Dp;
    for (size_t t = 0; t < head->T; t++, to += Dp) {
        BY_TYPE(head->type, scale_values(to, 0, DTYPE_FP32, from, t * from_row, TYPE, D, scale));
        memset(to + D, 0, (Dp - D) * sizeof *to);
    }
    memset(to, 0, (head->Tp - head->T) * Dp * sizeof *to);
}

// Rows [t, t + rows) of to (T, D) = scale * from (rows, Dp)
static void copy_rows_out(const Head *head, void *to, size_t t, size_t to_row, const float *from, size_t rows,
                          float scale) {
    for (size_t i = 0; i < rows; i++, from += head->Dp)
        BY_TYPE(head->type, scale_values(to, (t + i) * to_row, TYPE, from, 0, DTYPE_FP32, head->D, scale));
}

// to (Tp / TILE_COLUMNS, D, TILE_COLUMNS) = from (T, D), transposed in panels. floats: scratch (Tp, Dp), for bf16.
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

// Writes a tile of C = A B; add: C += A B. A is (rows, K), k contiguous.
static void write_tile(float *c, size_t c_row, size_t rows, const float *a, size_t a_row, const float *b, size_t b_row,
                       size_t K, bool add) {
    TILE_DISPATCH(rows, {
        Tile t = tile_product(ROWS, K, a, a_row, 1, b, b_row);
        tile_write(ROWS, c, c_row, &t, add);
    });
}

// Adds a tile of A^T B to C. A is (K, rows).
static void add_tile_transposed(float *c, size_t c_row, size_t rows, const float *a, size_t a_row, const float *b,
                                size_t b_row, size_t K) {
    TILE_DISPATCH(rows, {
        Tile t = tile_product(ROWS, K, a, 1, a_row, b, b_row);
        tile_write(ROWS, c, c_row, &t, true);
    });
}

// Sets scores [begin, end) of a row to -infinity. Stores whole vectors: a vector load right after partial stores is
// slow.
VECTOR_INLINE void hide(float *scores, size_t begin, size_t end) {
    size_t j = round_down(begin, VEC);
    VecBits key = {0}; // counts from `begin`; keys before it wrap to the largest numbers
    for (int i = 0; i < VEC; i++) key[i] = (uint32_t)j - (uint32_t)begin + (uint32_t)i;
    for (; j < end; j += VEC, key += VEC)
        vec_store(scores + j, vec_select(key < (uint32_t)(end - begin), vec_set(-INFINITY), vec_load(scores + j)));
}

// Turns scores [begin, end) of a row into exp(score - max), and the rest of [0, padded) into 0. Returns the sum.
static float softmax_row(float *scores, size_t begin, size_t end, size_t padded, float *max) {
    hide(scores, 0, begin);
    hide(scores, end, padded);
    Vec max_v = vec_load(scores), sum = {0};
    for (size_t j = VEC; j < padded; j += VEC) max_v = vec_max(vec_load(scores + j), max_v);
    *max = vec_largest(max_v);
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
static void forward_panel(const Head *head, const Scratch *s, void *out, float *lse, size_t i, size_t rows) {
    size_t Dp = head->Dp, score_row = head->Tp + VEC, keys = size_min(head->Tp, round_up(i + rows, TILE_COLUMNS));
    size_t first = round_down(first_key(head, i), TILE_COLUMNS);
    for (size_t j = first; j < keys; j += TILE_COLUMNS)
        write_tile(s->scores + j, score_row, rows, s->q + i * Dp, Dp, s->k_t + j * head->D, TILE_COLUMNS, head->D,
                   false);
    float sum[TILE_ROWS];
    size_t valid = size_min(rows, head->T - i);
    for (size_t r = 0; r < rows; r++) {
        float max, *scores = s->scores + r * score_row;
        sum[r] = softmax_row(scores + first, first_key(head, i + r) - first, i + r + 1 - first, keys - first, &max);
        if (r < valid) lse[i + r] = loss_logsumexp(max, sum[r]);
        if (r < valid && head->dropout.below) drop_row(head, scores, i + r, first, keys);
    }
    for (size_t d = 0; d < Dp; d += TILE_COLUMNS)
        write_tile(s->rows + d, Dp, rows, s->scores + first, score_row, s->v + first * Dp + d, Dp, i + rows - first,
                   false);
    for (size_t r = 0; r < valid; r++) copy_rows_out(head, out, i + r, head->out_row, s->rows + r * Dp, 1, 1 / sum[r]);
}

// delta_t = sum_d dout_td out_td = sum_j P_tj dP_tj (FlashAttention, appendix B.4); it holds with dropout too
VECTOR_INLINE float row_delta(const float *dout, const void *out, size_t at, size_t D, const Dtype type) {
    size_t whole = D / VEC * VEC;
    Vec sum = {0};
    for (size_t d = 0; d < whole; d += VEC) sum += vec_load(dout + d) * value_load(out, at + d, type);
    if (whole < D) sum += vec_load_part(dout + whole, D - whole) * value_load_part(out, at + whole, D - whole, type);
    return vec_sum(sum);
}

// Turns row t of scores and dP, keys [j, j + n), into P = exp(score - lse) and dS = P (dP - delta), both 0 outside keys
// [first, t]. n is a multiple of VEC. factor: dropout's, or NULL. With dropout, dP is the gradient of the
// probabilities after dropout, and the output P holds the probabilities after dropout.
VECTOR_INLINE void backward_softmax(float *scores, float *dscores, size_t first, size_t t, size_t j, size_t n,
                                    float lse, float delta, const float *factor) {
    VecBits key = {0}; // counts from `first`; keys before it wrap to the largest numbers
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

// backward_softmax of keys [j, end) with dropout. noinline: inlined, it slows down runs without dropout.
__attribute__((noinline)) static void backward_dropped_row(const Head *head, const Scratch *s, float *scores,
                                                           float *dscores, size_t t, size_t j, size_t end) {
    float factor[DROPOUT_SPAN];
    for (size_t next; j < end; scores += next - j, dscores += next - j, j = next) {
        size_t span = round_down(j, DROPOUT_SPAN);
        next = size_min(end, span + DROPOUT_SPAN);
        dropout_factors(factor, head->dropout, DROPOUT_PROBABILITY, head->index, t, span);
        backward_softmax(scores, dscores, first_key(head, t), t, j, next - j, s->lse[t], s->delta[t],
                         factor + (j - span));
    }
}

// The keys of block [j, j + keys) that some query of [i, i + rows) sees: [begin, end), counted from j.
typedef struct {
    size_t begin, end;
} Seen;
static Seen keys_seen(const Head *head, size_t i, size_t rows, size_t j, size_t keys) {
    size_t end = i + rows > j ? size_min(keys, i + rows - j) : 0, first = first_key(head, i);
    return (Seen){size_min(end, first > j ? first - j : 0), end};
}

// Writes P and dS of queries [i, i + rows) and keys [j, j + keys) to rows [r, r + rows) of s->scores and s->dscores.
// rows <= TILE_ROWS.
static void backward_scores(const Head *head, const Scratch *s, size_t i, size_t rows, size_t r, size_t j,
                            size_t keys) {
    size_t D = head->D, Dp = head->Dp;
    float *p = s->scores + r * SCORE_ROW, *ds = s->dscores + r * SCORE_ROW;
    Seen seen = keys_seen(head, i, rows, j, keys);
    size_t begin = round_down(seen.begin, TILE_COLUMNS), end = size_min(keys, round_up(seen.end, TILE_COLUMNS));
    for (size_t c = begin; c < end; c += TILE_COLUMNS) {
        write_tile(p + c, SCORE_ROW, rows, s->q + i * Dp, Dp, s->k_t + (j + c) * D, TILE_COLUMNS, D, false);
        write_tile(ds + c, SCORE_ROW, rows, s->dout + i * Dp, Dp, s->v_t + (j + c) * D, TILE_COLUMNS, D, false);
    }
    for (size_t t = i; t < i + rows; t++, p += SCORE_ROW, ds += SCORE_ROW) {
        if (head->dropout.below) backward_dropped_row(head, s, p + begin, ds + begin, t, j + begin, j + end);
        else
            backward_softmax(p + begin, ds + begin, first_key(head, t), t, j + begin, end - begin, s->lse[t],
                             s->delta[t], NULL);
        if (begin > 0) memset(p, 0, begin * sizeof *p), memset(ds, 0, begin * sizeof *ds);
        if (end < keys) memset(p + end, 0, (keys - end) * sizeof *p), memset(ds + end, 0, (keys - end) * sizeof *ds);
    }
}

// For queries [i, i_end) and keys [j, j + keys): dv += P^T dout, dk += dS^T q, dq = dS k; add: dq += dS k.
static void backward_block(const Head *head, const Scratch *s, size_t i, size_t i_end, size_t j, size_t keys,
                           bool add) {
    size_t Dp = head->Dp;
    for (size_t row = i; row < i_end; row += TILE_ROWS)
        backward_scores(head, s, row, size_min(TILE_ROWS, i_end - row), row - i, j, keys);
    for (size_t c = 0; c < keys && j + c < i_end; c += TILE_ROWS) {
        size_t rows = size_min(TILE_ROWS, keys - c), first = size_max(i, j + c), last = i_end;
        while (last > first && first_key(head, last - 1) >= j + c + rows) last--;
        // Only queries [first, last) of the block see keys [j + c, j + c + rows).
        size_t offset = (first - i) * SCORE_ROW + c, K = last - first;
        for (size_t d = 0; d < Dp; d += TILE_COLUMNS) {
            float *dv = s->dv + (j + c) * Dp + d, *dk = s->dk + (j + c) * Dp + d;
            add_tile_transposed(dv, Dp, rows, s->scores + offset, SCORE_ROW, s->dout + first * Dp + d, Dp, K);
            add_tile_transposed(dk, Dp, rows, s->dscores + offset, SCORE_ROW, s->q + first * Dp + d, Dp, K);
        }
    }
    for (size_t row = i; row < i_end; row += TILE_ROWS) {
        size_t rows = size_min(TILE_ROWS, i_end - row);
        Seen seen = keys_seen(head, row, rows, j, keys);
        for (size_t d = 0; d < Dp; d += TILE_COLUMNS)
            write_tile(s->rows + (row - i) * Dp + d, Dp, rows, s->dscores + (row - i) * SCORE_ROW + seen.begin,
                       SCORE_ROW, s->k + (j + seen.begin) * Dp + d, Dp, seen.end - seen.begin, add);
    }
}

static void backward_head(const Head *head, const Scratch *s, void *dq, void *dk, void *dv, const void *dout,
                          const void *q, const void *k, const void *v, const void *out, const float *lse) {
    size_t Tp = head->Tp, Dp = head->Dp, row = head->qkv_row;
    copy_padded(head, s->q, q, row, head->scale);
    copy_padded(head, s->k, k, row, 1);
    copy_padded(head, s->dout, dout, head->out_row, 1);
    transpose_panels(head, s->k_t, k, row, s->dk);
    transpose_panels(head, s->v_t, v, row, s->dk);
    memset(s->dk, 0, Tp * Dp * sizeof(float));
    memset(s->dv, 0, Tp * Dp * sizeof(float));
    for (size_t t = 0; t < head->T; t++)
        BY_TYPE(head->type, s->delta[t] = row_delta(s->dout + t * Dp, out, t * head->out_row, head->D, TYPE));
    memcpy(s->lse, lse, head->T * sizeof(float));
    for (size_t t = head->T; t < Tp; t++) s->lse[t] = INFINITY, s->delta[t] = 0; // padding: P = 0
    for (size_t i = 0; i < head->T; i += ROW_BLOCK) {
        size_t i_end = size_min(Tp, i + ROW_BLOCK), first = round_down(first_key(head, i), TILE_COLUMNS);
        for (size_t j = first; j < i_end; j += KEY_BLOCK)
            backward_block(head, s, i, i_end, j, size_min(KEY_BLOCK, round_up(i_end, TILE_COLUMNS) - j), j > first);
        copy_rows_out(head, dq, i, row, s->rows, size_min(head->T, i_end) - i, head->scale);
    }
    copy_rows_out(head, dk, 0, row, s->dk, head->T, 1);
    copy_rows_out(head, dv, 0, row, s->dv, head->T, 1);
}

static Head head_of(const Attention *at, size_t T, size_t NH, size_t D) {
    assert(T <= at->max_T && D <= at->max_D && D > 0);
    return (Head){.T = T,
                  .D = D,
                  .Tp = round_up(T, TILE_COLUMNS),
                  .Dp = round_up(D, TILE_COLUMNS),
                  .qkv_row = 3 * NH * D,
                  .out_row = NH * D,
                  .type = at->type,
                  .scale = 1 / sqrtf((float)D),
                  .dropout = at->dropout,
                  .position = at->position};
}

// Head i % NH of example i / NH.
static Head head_at(const Head *first, size_t i, size_t NH) {
    Head head = *first;
    head.index = i % NH;
    head.dropout.example += i / NH;
    if (head.position) head.position += i / NH * head.T;
    return head;
}

void attention_forward(const Attention *at, void *out, float *lse, const void *qkv, size_t B, size_t T, size_t first,
                       size_t NH, size_t D) {
    const Head first_head = head_of(at, T, NH, D);
    const size_t C = NH * D, scores = B * NH * (T - first) * T;
#pragma omp parallel for schedule(static) num_threads(at->threads) if (scores * D >= SERIAL_MULTIPLY_ADDS)
    for (size_t bh = 0; bh < B * NH; bh++) {
        size_t b = bh / NH, column = bh % NH * D;
        const Head head = head_at(&first_head, bh, NH);
        const Scratch s = scratch_of_thread(at);
        size_t q = b * T * 3 * C + column; // (T, D), rows 3C apart; then k and v
        copy_padded(&head, s.q, value_at(qkv, q, at->type), head.qkv_row, head.scale);
        copy_padded(&head, s.v, value_at(qkv, q + 2 * C, at->type), head.qkv_row, 1);
        transpose_panels(&head, s.k_t, value_at(qkv, q + C, at->type), head.qkv_row, s.k);
        for (size_t i = round_down(first, TILE_ROWS); i < T; i += TILE_ROWS)
            forward_panel(&head, &s, value_at(out, b * T * C + column, at->type), lse + bh * T, i,
                          size_min(TILE_ROWS, head.Tp - i));
    }
}

void attention_backward(const Attention *at, void *dqkv, const void *dout, const void *qkv, const void *out,
                        const float *lse, size_t B, size_t T, size_t NH, size_t D) {
    const Head first_head = head_of(at, T, NH, D);
    const size_t C = NH * D;
#pragma omp parallel for schedule(static) num_threads(at->threads) if (B * NH * T * T * D >= SERIAL_MULTIPLY_ADDS)
    for (size_t bh = 0; bh < B * NH; bh++) {
        size_t b = bh / NH, rows = b * T * C + bh % NH * D, rows3 = b * T * 3 * C + bh % NH * D;
        const Head head = head_at(&first_head, bh, NH);
        const Scratch s = scratch_of_thread(at);
        const void *q[3]; // then k and v
        void *dq[3];
        for (size_t i = 0; i < 3; i++) {
            q[i] = value_at(qkv, rows3 + i * C, at->type);
            dq[i] = value_at(dqkv, rows3 + i * C, at->type);
        }
        backward_head(&head, &s, dq[0], dq[1], dq[2], value_at(dout, rows, at->type), q[0], q[1], q[2],
                      value_at(out, rows, at->type), lse + bh * T);
    }
}
