#include "ranks/whole.h"

#include <string.h>

static Range part_of(const Whole *w, int bucket, int rank) {
    const Division all = {.ranks = w->parallel->division.ranks, .tensor = 1};
    return division_part(&all, model_bucket(w->model, bucket), rank % all.ranks);
}

int whole_create(Whole *w, const Parallel *p, const Model *model, Error *e) {
    const size_t buckets = (size_t)p->buckets, K = (size_t)p->config.tensor;
    *w = (Whole){.parallel = p, .model = model};
    TRY(memory_alloc_zero((void **)&w->local, K * sizeof *w->local, "local models", e));
    TRY(memory_alloc((void **)&w->part, buckets * sizeof *w->part, "parts of a checkpoint", e));
    for (int i = 0; i < p->buckets; i++) w->part[i] = part_of(w, i, p->comm->rank);
    for (int t = 0; t < (int)K; t++) TRY(model_create_local(&w->local[t], &model->config, t, (int)K, e));
    return 0;
}

void whole_destroy(Whole *w) {
    for (int t = 0; w->local && t < w->parallel->config.tensor; t++) model_destroy(&w->local[t]);
    memory_free(w->local);
    memory_free(w->part);
    *w = (Whole){0};
}

// One bucket of one array.
typedef struct {
    const Whole *whole;
    Engine *engine;
    StateKind kind;
    int bucket, first, end; // tensors [first, end) of the whole model are in the bucket
    float *part;            // this rank's part of the bucket
    float *values[2];       // (room) values sent; values received. Reused: fresh memory costs a fault per page
    size_t room[2];
} Exchange;

// Returns the elements of tensor k that rank `owner` owns and that lie in `holder`'s part, as a range of the local flat
// array of `owner`.
static Range common(const Exchange *x, int owner, int holder, int k) {
    const Whole *w = x->whole;
    const int K = w->parallel->config.tensor, shared = w->parallel->division.ranks;
    const Division as_owner = {.rank = owner % shared, .ranks = shared, .tensor = K};
    const Model *local = &w->local[owner % K];
    const Range there = range_overlap(tensor_range(&w->model->tensors[k]), part_of(w, x->bucket, holder));
    if (!range_length(there)) return (Range){0, 0};
    const Range bucket = model_bucket(local, model_bucket_at(local, local->tensors[k].offset));
    return range_overlap(model_local_range(local, w->model, k, there),
                         division_part(&as_owner, bucket, division_rank(&as_owner, bucket)));
}

// Copies a range of a local tensor to its places in the part.
static void copy_held(const Exchange *x, const Tensor *t, size_t whole_offset, Range range, const float *values) {
    const size_t begin = x->whole->part[x->bucket].begin;
    for (size_t at = range.begin, n; at < range.end; at += n, values += n) {
        n = size_min(tensor_run(t, at - t->offset), range.end - at);
        memcpy(x->part + (whole_offset + tensor_whole_index(t, at - t->offset) - begin), values, n * sizeof *values);
    }
}

// Visits the values that this rank sends to each rank or, if `receives`, gets from each. values NULL: adds the number
// of values to count (ranks). Otherwise copies values: from the engine to `values` or, if `receives`, from `values` to
// the part.
static int pass(const Exchange *x, bool receives, int *count, float *values, Error *e) {
    const Whole *w = x->whole;
    const int own = w->parallel->comm->rank, K = w->parallel->config.tensor;
    const int shared = w->parallel->division.ranks, first = own / shared * shared; // first rank of this replica
    for (int r = first; r < first + shared; r++)
        for (int k = x->first; k < x->end; k++) {
            const int owner = receives ? r : own;
            const Range range = common(x, owner, receives ? own : r, k);
            if (!values) count[r] += (int)range_length(range);
            if (!values || !range_length(range)) continue;
            if (receives) copy_held(x, &w->local[owner % K].tensors[k], w->model->tensors[k].offset, range, values);
            else TRY(engine_store(x->engine, x->kind, range, values, e));
            values += range_length(range);
        }
    return 0;
}

static void free_values(Exchange *x, int i) {
    if (i == 0 && x->values[i]) engine_unpin(x->engine, x->values[i]);
    memory_free(x->values[i]);
    x->values[i] = NULL;
}

static int exchange_bucket(Exchange *x, Error *e) {
    Comm *comm = x->whole->parallel->comm;
    const size_t ranks = (size_t)comm->ranks;
    int counts[4 * ranks], code = 0; // counts: see comm_exchange
    memset(counts, 0, sizeof counts);
    for (int i = 0; i < 2 && !code; i++) {
        size_t all = 0;
        pass(x, i, counts + (size_t)i * ranks, NULL, e);
        for (size_t r = 0; r < ranks; r++) all += (size_t)counts[(size_t)i * ranks + r];
        if (x->values[i] && all <= x->room[i]) continue;
        free_values(x, i);
        code = memory_alloc((void **)&x->values[i], all * sizeof(float), "values of a checkpoint", e);
        if (i == 0 && !code) engine_pin(x->engine, x->values[i], all * sizeof(float));
        x->room[i] = all;
    }
    if (!code) code = pass(x, false, NULL, x->values[0], e);
    TRY(comm_agree(comm, code, e)); // a rank that misses an exchange would leave other ranks waiting
    TRY(comm_exchange(comm, x->values[0], x->values[1], counts, e));
    return pass(x, true, NULL, x->values[1], e);
}

int whole_exchange(const Whole *w, Engine *engine, StateKind kind, float *parts, Error *e) {
    Exchange x = {.whole = w, .engine = engine, .kind = kind, .part = parts};
    int code = 0;
    for (; x.bucket < w->parallel->buckets && !code; x.part += range_length(w->part[x.bucket++])) {
        const size_t end = model_bucket(w->model, x.bucket).end;
        for (x.first = x.end; x.end < w->model->tensor_count && w->model->tensors[x.end].offset < end;) x.end++;
        code = exchange_bucket(&x, e);
    }
    for (int i = 0; i < 2; i++) free_values(&x, i);
    return code;
}
