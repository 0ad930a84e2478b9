// ranks_state: under mpirun, rank 0 collects the gradients and moments that ZeRO-2 or 3 has spread over the ranks, in ranges
// of every kind, and compares it with what was loaded; then the gradients of a step of micro-steps, some of them without
// rows, with those of one engine. Prints "ok" or what is wrong. For test_ranks.sh.
//
//     ranks_state WIRE together|apart|blind ZERO
//
// together: all ranks write into memory of rank 0's; apart: all but the last, which does not find it, as on another
// machine; blind: none does.
#include "ranks/parallel.h"
#include "../small_model.h"

#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    Comm comm;
    Model model;
    Parallel parallel;
    Engine *engine;
    float *want, *got; // (flat_count)
    float *shared;     // (flat_count), rank 0's; NULL: nobody shares it
    uint16_t *tokens;  // (rows, SEQ_LEN + 1)
    WireType wire;
    int finders; // ranks that find it
    ZeroStage zero;
} State;

enum { LAYERS = 3, SEQ_LEN = 8, VOCAB = 50 };

static int64_t step_rows(const State *s) { return 2 * s->comm.ranks + 1; } // one for rank 0 alone

// Calls of the engine's collect by bucket, and how many of them take over instead of adding.
static struct {
    const Model *model;
    int calls[LAYERS + 1], first[LAYERS + 1];
} collects;
static EngineApi watched; // the CPU engine, with these two in front

static int count_and_collect(Engine *engine, Range range, bool first, Error *e) {
    int bucket = model_bucket_at(collects.model, range.begin);
    collects.calls[bucket]++;
    collects.first[bucket] += first;
    return cpu_engine.collect(engine, range, first, e);
}

// A rank that does not find what another process has, and what it sends. See the Makefile: --wrap.
static struct {
    bool blind;
    size_t sent; // bytes of state
    int fails;   // this call of engine_store from now on
} rank;
static int fail_or_store(Engine *engine, StateKind kind, Range range, float *values, Error *e) {
    if (rank.fails && --rank.fails == 0) return FAIL(e, ERR_MEMORY, NULL, "the test's own");
    return cpu_engine.store(engine, kind, range, values, e);
}
int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int mode = flags & O_CREAT ? va_arg(more, int) : 0;
    va_end(more);
    return rank.blind && strncmp(path, "/proc/", 6) == 0 ? -1 : __real_open(path, flags, mode);
}
int __real_comm_send(Comm *comm, int to, const void *data, size_t bytes, Error *e);
int __wrap_comm_send(Comm *comm, int to, const void *data, size_t bytes, Error *e);
int __wrap_comm_send(Comm *comm, int to, const void *data, size_t bytes, Error *e) {
    if (bytes >= sizeof(float)) rank.sent += bytes;
    return __real_comm_send(comm, to, data, bytes, e);
}

// Who shares memory with rank 0, as all know it.
static int share(State *s, Error *e) {
    rank.blind = s->comm.rank >= s->finders;
    TRY(parallel_share_copy(&s->parallel, 1, s->model.flat_count, &s->shared, e));
    for (int r = 0; r < s->comm.ranks; r++)
        if (s->comm.ranks > 1 && s->parallel.copy.shared_by[r] != (r < s->finders || r == 0))
            return FAIL(e, ERR_INTERNAL, NULL, "rank %d shares memory, or does not", r);
    if (s->comm.rank == 0 && (s->shared != NULL) != (s->comm.ranks > 1))
        return FAIL(e, ERR_INTERNAL, NULL, "rank 0 has memory to share, or has none");
    return 0;
}

static int setup(State *s, Error *e) {
    ModelConfig shape = {.layers = LAYERS, .heads = 1, .channels = 20, .vocab = VOCAB, .context = SEQ_LEN};
    EngineConfig config = {.model = &s->model, .micro_batch = 1, .seq_len = SEQ_LEN, .threads = 1};
    TRY(comm_create(&s->comm, 30, e));
    if (s->finders < 0) s->finders = s->comm.ranks - 1;
    TRY(model_create(&s->model, &shape, e));
    ParallelConfig sharing = {s->zero, REDUCE_MICRO_STEP, .micro_batch = 1, .batch_max = step_rows(s),
                              .transport = TRANSPORT_OR_NULL(mpi_transport)};
    collects.model = &s->model;
    TRY(parallel_create(&s->parallel, &s->comm, &s->model, &sharing, e));
    parallel_shard(&s->parallel, &config);
    TRY(engine_create(&watched, &s->engine, &config, e));
    TRY(memory_alloc((void **)&s->want, sizeof(float) * s->model.flat_count, "test", e));
    TRY(memory_alloc((void **)&s->got, sizeof(float) * s->model.flat_count, "test", e));
    size_t tokens = (size_t)step_rows(s) * (SEQ_LEN + 1);
    TRY(memory_alloc((void **)&s->tokens, sizeof *s->tokens * tokens, "test", e));
    small_tokens(VOCAB, 1, tokens, s->tokens);
    TRY(parallel_start(&s->parallel, s->engine, s->wire, e));
    return share(s, e);
}

// room: floats that `got` has, of which those after the range stay.
static int compare(State *s, StateKind kind, Range range, float *got, size_t room, Error *e) {
    size_t n = range_length(range);
    for (size_t i = 0; i < room; i++) got[i] = NAN;
    TRY(parallel_store(&s->parallel, kind, range, got, e));
    for (size_t i = 0; i < room; i++)
        if (i < n ? !(got[i] == s->want[range.begin + i]) : !isnan(got[i]))
            return FAIL(e, ERR_INTERNAL, NULL, "kind %d, range %zu to %zu: element %zu is %g, not %g", kind,
                        range.begin, range.end, range.begin + i, got[i], i < n ? s->want[range.begin + i] : NAN);
    return 0;
}

// To memory of the caller's, and to some place in the memory that is shared.
static int compare_both(State *s, StateKind kind, Range range, size_t place, Error *e) {
    size_t count = s->model.flat_count, room = count - size_min(place, count - range_length(range));
    TRY(compare(s, kind, range, s->got, count, e));
    return s->shared ? compare(s, kind, range, s->shared + (count - room), room, e) : 0;
}

// A store that fails on rank 0 leaves nothing for the next to receive.
static int compare_after_failure(State *s, StateKind kind, float *got, Error *e) {
    const Range all = {0, s->model.flat_count};
    for (int i = 1; i <= s->parallel.buckets; i++) {
        Error own = {0};
        rank.fails = i;
        int code = parallel_store(&s->parallel, kind, all, got, &own);
        rank.fails = 0;
        if (code != ERR_MEMORY || own.code != code)
            return FAIL(e, ERR_INTERNAL, NULL, "store %d, which fails, ends with %d: %.200s", i, code, own.what);
        TRY(compare(s, kind, all, got, all.end, e));
    }
    return 0;
}

static int collect(State *s, StateKind kind, uint64_t seed, Error *e) {
    size_t count = s->model.flat_count;
    for (size_t i = 0; i < count; i++) s->want[i] = (float)rng_u32(seed, kind, i);
    TRY(engine_load(s->engine, kind, (Range){0, count}, s->want, e)); // of which a rank keeps its share
    if (s->comm.rank > 0) return parallel_serve(&s->parallel, e);
    TRY(compare_both(s, kind, (Range){0, count}, 0, e));
    TRY(compare_after_failure(s, kind, s->got, e));
    if (s->shared) TRY(compare_after_failure(s, kind, s->shared, e));
    for (uint64_t i = 0; i < 30; i++) {
        size_t a = rng_u32(seed, 10, 2 * i) % count, b = rng_u32(seed, 10, 2 * i + 1) % count;
        TRY(compare_both(s, kind, (Range){size_min(a, b), size_max(a, b)}, rng_u32(seed, 11, i) % count, e));
    }
    return parallel_serve_end(&s->parallel, e);
}

// The step's gradients on one engine that keeps everything.
static int whole_step(State *s, Error *e) {
    Engine *whole;
    Range all = {0, s->model.flat_count};
    EngineConfig config = {.model = &s->model, .micro_batch = (int)step_rows(s), .seq_len = SEQ_LEN, .threads = 1};
    TRY(engine_create(&watched, &whole, &config, e));
    int code = engine_load(whole, STATE_PARAM, all, s->want, e);
    if (!code) code = small_batch(whole, s->tokens, config.micro_batch, SEQ_LEN, config.micro_batch, GNS_OFF, e);
    if (!code) code = engine_store(whole, STATE_GRAD, all, s->want, e);
    engine_destroy(whole);
    return code;
}

static int step_of_ranks(State *s, int micro_steps, Error *e) {
    Share share = parallel_share(step_rows(s), s->comm.rank, s->comm.ranks);
    TRY(parallel_begin_step(&s->parallel, false, e));
    for (int i = 0; i < micro_steps; i++) {
        const uint16_t *row = s->tokens + (share.first + i) * (SEQ_LEN + 1);
        TRY(parallel_micro_step(&s->parallel, row, i < share.count, GNS_OFF, i == micro_steps - 1, e));
    }
    return parallel_norms(&s->parallel, e);
}

// Each bucket is collected once a micro-step, and only then.
static int check_collects(const State *s, int wanted, Error *e) {
    for (int i = 0; i < s->parallel.buckets; i++)
        if (collects.calls[i] != wanted || collects.first[i] != 1)
            return FAIL(e, ERR_INTERNAL, NULL, "bucket %d was collected %d times, not %d, taken over %d times, not 1",
                        i, collects.calls[i], wanted, collects.first[i]);
    return 0;
}

static int check_step(State *s, Error *e) {
    Range all = {0, s->model.flat_count};
    int micro_steps = (int)parallel_micro_steps(&s->parallel, step_rows(s));
    double most = 0, tolerance = s->wire == WIRE_BF16 ? 4e-3 : 1e-6;
    small_params(&s->model, 1, s->want);
    TRY(engine_load(s->engine, STATE_PARAM, all, s->want, e));
    TRY(step_of_ranks(s, micro_steps, e));
    TRY(check_collects(s, micro_steps, e));
    if (s->comm.rank > 0) return parallel_serve(&s->parallel, e);
    TRY(whole_step(s, e));
    TRY(parallel_store(&s->parallel, STATE_GRAD, all, s->got, e));
    for (size_t i = 0; i < all.end; i++) most = fmax(most, fabs(s->want[i]));
    // Ranks add up in another order. In the gaps between tensors is what was loaded.
    for (const Tensor *t = s->model.tensors, *end = t + s->model.tensor_count; t < end; t++)
        for (size_t i = t->offset; i < t->offset + t->count; i++)
            if (!(fabs(s->got[i] - s->want[i]) <= tolerance * most))
                return FAIL(e, ERR_INTERNAL, NULL, "gradient %zu of the step is %g, not %g", i, s->got[i], s->want[i]);
    return parallel_serve_end(&s->parallel, e);
}

// The whole of an array, for what rank 0 shares: who has a part in that sends none of it.
static int check_sent(State *s, Error *e) {
    rank.sent = 0;
    if (s->comm.rank == 0) {
        Range all = {0, s->model.flat_count};
        TRY(parallel_store(&s->parallel, STATE_MOMENT1, all, s->shared ? s->shared : s->got, e));
        return parallel_serve_end(&s->parallel, e);
    }
    TRY(parallel_serve(&s->parallel, e));
    if ((rank.sent > 0) == (s->comm.rank >= s->finders)) return 0;
    return FAIL(e, ERR_INTERNAL, NULL, "%zu bytes of state were sent", rank.sent);
}

// The ranks' own copies: none where rank 0 does not find another's; else they are of the moment of the copy, and rank 0
// reads any range of them.
static int check_copies(State *s, Error *e) {
    size_t count = s->model.flat_count;
    rank.blind = s->comm.rank == 0;
    TRY(parallel_keep_copies(&s->parallel, e));
    if (parallel_has_copies(&s->parallel)) return FAIL(e, ERR_INTERNAL, NULL, "copies that rank 0 cannot read");
    rank.blind = false;
    TRY(parallel_keep_copies(&s->parallel, e));
    if (parallel_has_copies(&s->parallel) != s->parallel.shard_weights)
        return FAIL(e, ERR_INTERNAL, NULL, "there are copies, or none");
    if (!s->parallel.shard_weights) return 0;
    for (StateKind kind = STATE_PARAM; kind <= STATE_MOMENT2; kind = (StateKind)(kind + 1)) {
        for (size_t i = 0; i < count; i++) s->want[i] = (float)rng_u32(9, kind, i);
        TRY(engine_load(s->engine, kind, (Range){0, count}, s->want, e));
    }
    if (s->comm.rank > 0) return parallel_serve(&s->parallel, e);
    TRY(parallel_copy(&s->parallel, e));
    for (uint64_t i = 0; i < 30; i++) {
        size_t a = rng_u32(9, 10, 2 * i) % count, b = rng_u32(9, 10, 2 * i + 1) % count;
        Range range = {size_min(a, b), size_max(a, b)};
        for (size_t k = 0; k < count; k++) s->got[k] = NAN;
        StateKind kind = i % 3 == 0 ? STATE_PARAM : i % 3 == 1 ? STATE_MOMENT1 : STATE_MOMENT2;
        TRY(parallel_read_copy(&s->parallel, kind, range, s->got, e));
        for (size_t k = 0; k < count; k++)
            if (k < range_length(range) ? s->got[k] != (float)rng_u32(9, kind, range.begin + k) : !isnan(s->got[k]))
                return FAIL(e, ERR_INTERNAL, NULL, "copy of kind %d, element %zu is %g", kind, k, s->got[k]);
    }
    return parallel_serve_end(&s->parallel, e);
}

int main(int argc, char **argv) {
    static State s;
    watched = cpu_engine;
    watched.collect = count_and_collect;
    watched.store = fail_or_store;
    s.wire = argc > 1 && strcmp(argv[1], "bf16") == 0 ? WIRE_BF16 : WIRE_FP32;
    const char *who = argc > 2 ? argv[2] : "together";
    s.zero = argc > 3 ? (ZeroStage)atoi(argv[3]) : ZERO_2;
    Error e = {0};
    const uint64_t seed = 20240520;
    s.finders = strcmp(who, "together") == 0 ? INT_MAX : strcmp(who, "apart") == 0 ? -1 : 0;
    int code = setup(&s, &e);
    if (!code) code = collect(&s, STATE_MOMENT1, seed, &e);
    if (!code) code = collect(&s, STATE_MOMENT2, seed, &e);
    if (!code) code = collect(&s, STATE_PARAM, seed, &e);
    if (!code) code = collect(&s, STATE_GRAD, seed, &e);
    if (!code) code = check_sent(&s, &e);
    if (!code) code = check_step(&s, &e);
    if (!code) code = check_copies(&s, &e);
    if (!code && s.comm.rank == 0) printf("ok\n");
    memory_free(s.tokens);
    memory_free(s.want);
    memory_free(s.got);
    parallel_destroy(&s.parallel);
    engine_destroy(s.engine);
    model_destroy(&s.model);
    e.code = code;
    return comm_finish(&s.comm, &e);
}
