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

// Returns the elements of tensor k that rank `owner` owns and that lie in `holder`'s part, as a range of the local flat
// array of `owner`.
static Range common(const Whole *w, int owner, int holder, int k) {
    const int K = w->parallel->config.tensor, shared = w->parallel->division.ranks;
    const Division as_owner = {.rank = owner % shared, .ranks = shared, .tensor = K};
    const Model *local = &w->local[owner % K];
    const Range whole = tensor_range(&w->model->tensors[k]);
    const Range there = range_overlap(whole, part_of(w, model_bucket_at(w->model, whole.begin), holder));
    if (!range_length(there)) return (Range){0, 0};
    const Range bucket = model_bucket(local, model_bucket_at(local, local->tensors[k].offset));
    return range_overlap(model_local_range(local, w->model, k, there),
                         division_part(&as_owner, bucket, division_rank(&as_owner, bucket)));
}

// For each tensor the ranks of a replica exchange what `common` returns, in turns. In turn s rank r sends to r + s and
// receives from r - s, modulo their number. After an error of engine_store a rank goes on, as others wait for it.
int whole_exchange(const Whole *w, Engine *engine, StateKind kind, float *parts, Error *e) {
    const Parallel *p = w->parallel;
    const int own = p->comm->rank, shared = p->division.ranks, first = own / shared * shared; // first of this replica
    size_t owned = 0, part = 0; // lengths of the longest owned range and of the longest part
    float *sent;                // (owned), then `received` (part)
    for (int i = 0; i < p->buckets; i++) {
        owned = size_max(owned, range_length(p->owned[i]));
        part = size_max(part, range_length(w->part[i]));
    }
    int code = memory_alloc((void **)&sent, (owned + part) * sizeof(float), "values of a checkpoint", e), failed = 0;
    if (!code) engine_pin(engine, sent, owned * sizeof(float));
    TRY_GOTO(comm_agree(p->comm, code, e));
    float *received = sent + owned;
    for (int k = 0, bucket = 0; k < w->model->tensor_count; k++) {
        const size_t offset = w->model->tensors[k].offset;
        if (offset >= model_bucket(w->model, bucket).end) parts += range_length(w->part[bucket++]);
        for (int s = 0; s < shared; s++) {
            const int to = first + (own - first + s) % shared, from = first + (own - first + shared - s) % shared;
            const Range out = common(w, own, to, k), in = common(w, from, own, k);
            if (range_length(out) && !failed) failed = engine_store(engine, kind, out, sent, e);
            TRY_GOTO(comm_swap(p->comm, sent, range_length(out), to, received, range_length(in), from, e));
            const Tensor *t = &w->local[from % p->config.tensor].tensors[k];
            for (size_t at = in.begin, n; at < in.end; at += n) { // to the places in the whole tensor
                n = size_min(tensor_run(t, at - t->offset), in.end - at);
                const size_t whole = offset + tensor_whole_index(t, at - t->offset);
                memcpy(parts + (whole - w->part[bucket].begin), received + (at - in.begin), n * sizeof *parts);
            }
        }
    }
    code = comm_agree(p->comm, failed, e);
done:
    if (sent) engine_unpin(engine, sent);
    memory_free(sent);
    return code;
}
