// A model cut over the ranks of a group (--tensor). The ranks are threads of this process and exchange rows through
// memory. Gradients, per-example norms, losses and logits of the ranks add up to the whole model's. The test derives
// the place of each element of a cut tensor from the local models' widths alone.
#include "world.h"

#include <pthread.h>

enum { RANKS_MAX = 4, ROWS = 5, MICRO_BATCH = 3, T = 13, FIRST = 1000, SEPARATOR = 7 };

typedef struct Group {
    const World *world;
    int ranks, exchanges;
    pthread_barrier_t barrier;
    const void *published[RANKS_MAX];
    struct Rank {
        struct Group *group;
        int t;
        Model model;
        EngineConfig config;
        Engine *engine;
        Outcome outcome;
        double rank_loss;
        float loss[ROWS * T], logits[64];
        const World *world;
    } rank[RANKS_MAX];
} Group;

// ---- Exchanges ------------------------------------------------------------------------------------------------------

static void publish(struct Rank *rank, const void *values) {
    rank->group->published[rank->t] = values;
    if (rank->t == 0) rank->group->exchanges++;
    pthread_barrier_wait(&rank->group->barrier);
}

static int gather_rows(void *context, void *values, int rows, size_t width, Dtype type, Error *e) {
    struct Rank *rank = context;
    const size_t bytes = width * (type == DTYPE_BF16 ? 2 : 4);
    publish(rank, values);
    for (int t = 0; t < rank->group->ranks; t++) {
        const RankRows of = rows_of_rank(rows, t, rank->group->ranks);
        const size_t at = (size_t)of.first * bytes;
        if (t != rank->t)
            memcpy((char *)values + at, (const char *)rank->group->published[t] + at, (size_t)of.count * bytes);
    }
    pthread_barrier_wait(&rank->group->barrier);
    return 0;
}

static int reduce_rows(void *context, void *own, const void *partial, int rows, size_t width, Dtype type, Error *e) {
    struct Rank *rank = context;
    const RankRows mine = rows_of_rank(rows, rank->t, rank->group->ranks);
    CHECK(type == DTYPE_FP32, "type %d", type);
    publish(rank, partial);
    for (size_t i = 0; i < (size_t)mine.count * width; i++) {
        float sum = 0;
        for (int t = 0; t < rank->group->ranks; t++)
            sum += ((const float *)rank->group->published[t])[(size_t)mine.first * width + i];
        ((float *)own)[i] = sum;
    }
    pthread_barrier_wait(&rank->group->barrier);
    return 0;
}

// ---- Places of a cut tensor's elements ------------------------------------------------------------------------------

// Returns the place in the whole flat array of element i of tensor k of rank t.
static size_t place_of(const Group *g, int t, int k, size_t i) {
    const Tensor *cut = &g->rank[t].model.tensors[k], *whole = &g->world->model.tensors[k];
    size_t attention = 0, mlp = 0; // columns of lower ranks
    for (int s = 0; s < t; s++) attention += g->rank[s].model.attention_width, mlp += g->rank[s].model.mlp_width;
    size_t row = i / cut->columns, column = i % cut->columns, A = g->rank[t].model.attention_width;
    switch (cut->kind) {
    case QKV_W:
    case QKV_B: column = column / A * (whole->columns / 3) + attention + column % A; break;
    case PROJ_W: row += attention; break;
    case FC_W:
    case FC_B: column += mlp; break;
    case FCPROJ_W: row += mlp; break;
    default: break;
    }
    return whole->offset + row * whole->columns + column;
}

// ---- Engines --------------------------------------------------------------------------------------------------------

static void group_open(Group *g, const World *w, EngineConfig config, int ranks) {
    *g = (Group){.world = w, .ranks = ranks};
    pthread_barrier_init(&g->barrier, NULL, (unsigned)ranks);
    for (int t = 0; t < ranks; t++) CHECK_OK(model_create_local(&g->rank[t].model, &w->model.config, t, ranks, &e), &e);
    for (int t = 0; t < ranks; t++) {
        struct Rank *rank = &g->rank[t];
        float *param = calloc(rank->model.flat_count, sizeof *param),
              *poison = calloc(rank->model.flat_count, sizeof *param);
        rank->group = g, rank->t = t, rank->world = w;
        rank->config = config;
        rank->config.model = &rank->model;
        rank->config.tensor = (TensorRanks){t, ranks, gather_rows, reduce_rows, rank};
        CHECK_OK(engine_create(&cpu_engine, &rank->engine, &rank->config, &e), &e);
        for (int k = 0; k < rank->model.tensor_count; k++)
            for (size_t i = 0; i < rank->model.tensors[k].count; i++)
                param[rank->model.tensors[k].offset + i] = w->param[place_of(g, t, k, i)];
        for (size_t i = 0; i < rank->model.flat_count; i++) poison[i] = NAN;
        for (int k = 0; k < rank->model.tensor_count; k++) { // leaves padding at 0
            const Tensor *tensor = &rank->model.tensors[k];
            CHECK_OK(engine_load(rank->engine, STATE_PARAM, tensor_range(tensor), param + tensor->offset, &e), &e);
            CHECK_OK(engine_load(rank->engine, STATE_GRAD, tensor_range(tensor), poison, &e), &e);
        }
        free(param), free(poison);
    }
}

static void *step(void *context) {
    struct Rank *rank = context;
    const World local = {.model = rank->model, .seq_len = T};
    Error e;
    for (int i = 0; i < ROWS * T; i++) rank->loss[i] = NAN;
    for (int v = 0; v < 64; v++) rank->logits[v] = NAN;
    rank->outcome = measure(&local, rank->engine, rank->world->tokens, FIRST, ROWS, MICRO_BATCH, rank->config.gns);
    CHECK_OK(engine_eval(rank->engine, rank->world->tokens, MICRO_BATCH, T, rank->loss, &e), &e);
    for (int n = 1; n <= T; n += 4) CHECK_OK(engine_logits(rank->engine, rank->world->tokens, n, rank->logits, &e), &e);
    return NULL;
}

static void group_run(Group *g) {
    pthread_t thread[RANKS_MAX];
    for (int t = 0; t < g->ranks; t++) pthread_create(&thread[t], NULL, step, &g->rank[t]);
    for (int t = 0; t < g->ranks; t++) pthread_join(thread[t], NULL);
}

static void group_close(Group *g) {
    for (int t = 0; t < g->ranks; t++) {
        engine_destroy(g->rank[t].engine);
        model_destroy(&g->rank[t].model);
        free(g->rank[t].outcome.grad);
    }
    pthread_barrier_destroy(&g->barrier);
}

// ---- Tests ----------------------------------------------------------------------------------------------------------

// Adds up the ranks' gradients, each element at its place in the whole model. Compares the sum with `want`.
static void check_gradients(const Group *g, const float *want) {
    float *sum = calloc(g->world->model.flat_count, sizeof *sum);
    for (int t = 0; t < g->ranks; t++)
        for (int k = 0; k < g->rank[t].model.tensor_count; k++)
            for (size_t i = 0; i < g->rank[t].model.tensors[k].count; i++)
                sum[place_of(g, t, k, i)] += g->rank[t].outcome.grad[g->rank[t].model.tensors[k].offset + i];
    for (int k = 0; k < g->world->model.tensor_count; k++) {
        const Tensor *t = &g->world->model.tensors[k];
        const double error = relative_error(sum + t->offset, want + t->offset, t->count);
        CHECK(error < 2e-6, "%d ranks: gradient of %s differs by %.2g", g->ranks, t->name, error);
    }
    free(sum);
}

static void check_numbers(const Group *g, const Outcome *one, const float *loss, const float *logits) {
    double loss_sum = 0, sum;
    for (int t = 0; t < g->ranks; t++) loss_sum += g->rank[t].outcome.loss;
    CHECK_CLOSE(loss_sum, one->loss, 1e-6, 0);
    for (int k = 0; k < g->world->model.tensor_count && g->rank[0].config.gns == GNS_EXACT; k++) {
        const bool cut = tensor_is_cut(&g->rank[0].model.tensors[k]);
        double square = 0;
        sum = 0;
        for (int t = 0; t < g->ranks; t++) {
            const double *grad_sq = g->rank[t].outcome.grad_sq;
            sum += g->rank[t].outcome.example_sq[k];
            square += cut ? grad_sq[k] : 0;
        }
        CHECK_CLOSE(sum, one->example_sq[k], 1e-5, 0);
        if (cut) CHECK_CLOSE(square, one->grad_sq[k], 1e-5, 0);
    }
    for (int b = 0; b < ROWS; b++) {
        RowResult row = {0};
        for (int t = 0; t < g->ranks; t++)
            row.sq += g->rank[t].outcome.row[b].sq, row.nll += g->rank[t].outcome.row[b].nll;
        CHECK_CLOSE(row.sq, one->row[b].sq, 1e-5, 0);
        CHECK_CLOSE(row.nll, one->row[b].nll, 1e-6, 0);
    }
    for (int i = 0; i < MICRO_BATCH * T; i++) {
        sum = 0;
        for (int t = 0; t < g->ranks; t++) sum += g->rank[t].loss[i];
        CHECK_CLOSE(sum, loss[i], 1e-5, 1);
    }
    for (int v = 0; v < g->world->model.config.vocab; v++) CHECK_CLOSE(g->rank[0].logits[v], logits[v], 2e-5, 1);
}

// Checks a rank's |v_s|^2: 0 without rows of source s, the row's squared norm with one row, above 0 with more.
static void check_sources(const Group *g, const Outcome *one) {
    for (int i = 0; i < g->ranks * WORLD_SOURCES && g->rank[0].config.gns != GNS_OFF; i++) {
        const int t = i / WORLD_SOURCES, s = i % WORLD_SOURCES;
        const double got = g->rank[t].outcome.source_gram[s * (WORLD_SOURCES + 1)];
        int rows = 0, last = 0;
        for (int b = 0; b < ROWS; b += MICRO_BATCH) {
            const RankRows own = rows_of_rank(ROWS - b < MICRO_BATCH ? ROWS - b : MICRO_BATCH, t, g->ranks);
            for (int k = b + (int)own.first; k < b + (int)(own.first + own.count); k++)
                if (world_source(NULL, (uint64_t)(FIRST + k)) == s) rows++, last = k;
        }
        if (rows < 2) CHECK_CLOSE(got, rows ? one->row[last].sq : 0, 1e-5, 0);
        else CHECK(got > 0, "rank %d, source %d: %g of %d rows", t, s, got, rows);
    }
}

// Compares a group of `ranks` engines with one engine.
static void check_group(const World *w, EngineConfig config, int ranks) {
    Group g;
    float loss[ROWS * T], logits[64];
    config.threads = 1, config.micro_batch = MICRO_BATCH, config.seq_len = T, config.separator = SEPARATOR;
    config.step_rows = WORLD_ROWS, config.sources = WORLD_SOURCES, config.source = world_source;
    Engine *engine = engine_of(w, config);
    Outcome one = measure(w, engine, w->tokens, FIRST, ROWS, MICRO_BATCH, config.gns);
    CHECK_OK(engine_eval(engine, w->tokens, MICRO_BATCH, T, loss, &e), &e);
    for (int n = 1; n <= T; n += 4) CHECK_OK(engine_logits(engine, w->tokens, n, logits, &e), &e);
    group_open(&g, w, config, ranks);
    group_run(&g);
    check_gradients(&g, one.grad);
    check_numbers(&g, &one, loss, logits);
    check_sources(&g, &one);
    const int want = 2 * tensor_exchanges(&g.rank[0].config, true) + 5 * tensor_exchanges(&g.rank[0].config, false);
    CHECK(g.exchanges == want, "%d exchanges, the watchdog counts %d", g.exchanges, want);
    free(one.grad);
    engine_destroy(engine);
    group_close(&g);
}

static const ModelConfig three = {.layers = 2, .heads = 3, .channels = 36, .vocab = 50, .context = T},
                         five = {.layers = 3, .heads = 5, .channels = 40, .vocab = 50, .context = T};

// In micro-steps of 3 and 2 rows a rank owns 2, 1 or no rows.
static void test_groups(void) {
    World w = world_of(three, T, ROWS, 3);
    for (int ranks = 2; ranks <= 3; ranks++)
        for (GnsMode mode = GNS_OFF; mode <= GNS_EXACT; mode++) check_group(&w, (EngineConfig){.gns = mode}, ranks);
    world_close(&w);
    w = world_of(five, T, ROWS, 4);
    check_group(&w, (EngineConfig){.gns = GNS_EXACT}, 4);
    world_close(&w);
}

static void test_masks_and_smoothing(void) {
    World w = world_of(three, T, ROWS, 3);
    for (size_t i = 2; i < ROWS * (T + 1); i += 3 + i % 4) w.tokens[i] = SEPARATOR;
    for (int ranks = 2; ranks <= 3; ranks++)
        for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_BLOCK; recompute++)
            check_group(&w,
                        (EngineConfig){.gns = GNS_EXACT,
                                       .recompute = (Recompute)recompute,
                                       .document_mask = true,
                                       .label_smoothing = 0.1f,
                                       .dropout = dropout_of(0.2, 9)},
                        ranks);
    world_close(&w);
}

int main(void) {
    RUN(test_groups, test_masks_and_smoothing);
    return test_summary();
}
