// Compares a model cut over the ranks of a tensor group with the whole model on the CUDA engine. The ranks are K
// engines, as threads on one GPU. The test exchanges their rows by copies and sums on the host. Arguments:
// engine_test.cuh.
#include "engine_test.cuh"

#include <barrier>
#include <functional>
#include <mutex>
#include <thread>

static const double LOSS = by_type(2e-6, 7e-4, 5e-3), GRADIENT = by_type(1e-5, 1.6e-2, 4e-2);
static const double NORM = by_type(1e-5, 1.3e-2, 4e-2), LOGIT = by_type(1e-5, 4e-3, 3e-2);

enum { RANKS_MOST = 4 };

static const Case own_cases[] = {{"three heads of 64", {2, 3, 192, 300, 128}, 128, 5, 3},
                                 {"five heads of 64", {2, 5, 320, 300, 65}, 65, 3, 3}};
enum { OWN_CASES = sizeof own_cases / sizeof *own_cases };

// ---- A group --------------------------------------------------------------------------------------------------------

// Kernels whose blocks wait for each other must not share a GPU. So an engine queues and awaits work while its thread
// holds `turn`, and the thread releases `turn` in an exchange.
struct Group {
    const Case *c;
    int K;
    std::mutex turn;
    std::barrier<> all;
    struct Rank {
        Group *group;
        int t;
        World world;
        Engine *engine = NULL;
        real *rows = NULL; // what the rank gives to the exchange
        int exchanges = 0;
    };
    std::vector<Rank *> rank;

    Group(const World *whole, int K, Recompute recompute);
    ~Group() {
        for (Rank *r : rank) delete r;
    }
    void run(const std::function<void(Rank *)> &f);
};

static int group_enter(Group::Rank *r, void *rows) {
    const cudaError_t status = cudaStreamSynchronize((cudaStream_t)gpu.stream(r->engine));
    r->rows = (real *)rows;
    r->exchanges++;
    r->group->turn.unlock();
    r->group->all.arrive_and_wait();
    return status;
}

static int group_leave(Group::Rank *r, int code, Error *e) {
    const cudaError_t status = cudaDeviceSynchronize();
    r->group->all.arrive_and_wait();
    r->group->turn.lock();
    return code || status ? FAIL(e, ERR_INTERNAL, NULL, "an exchange failed: %d, %d", code, status) : 0;
}

static int group_gather(void *context, void *values, int rows, size_t width, Dtype, Error *e) {
    Group::Rank *r = (Group::Rank *)context;
    int code = group_enter(r, values);
    for (const Group::Rank *other : r->group->rank) {
        const RankRows own = rows_of_rank(rows, other->t, r->group->K);
        if (other != r)
            code |= cudaMemcpy(r->rows + own.first * width, other->rows + own.first * width,
                               own.count * width * sizeof(real), cudaMemcpyDeviceToDevice);
    }
    return group_leave(r, code, e);
}

static int group_reduce(void *context, void *out, const void *partial, int rows, size_t width, Dtype, Error *e) {
    Group::Rank *r = (Group::Rank *)context;
    const RankRows own = rows_of_rank(rows, r->t, r->group->K);
    const size_t n = own.count * width;
    std::vector<real> part(n);
    std::vector<float> sum(n);
    int code = group_enter(r, (void *)partial);
    for (const Group::Rank *other : r->group->rank) {
        code |= cudaMemcpy(part.data(), other->rows + own.first * width, n * sizeof(real), cudaMemcpyDeviceToHost);
        for (size_t i = 0; i < n; i++) sum[i] += (float)part[i];
    }
    for (size_t i = 0; i < n; i++) part[i] = (real)sum[i];
    code |= cudaMemcpy(out, part.data(), n * sizeof(real), cudaMemcpyHostToDevice);
    std::fill(part.begin(), part.end(), (real)NAN); // an exchange may overwrite memory after the rows; this one does
    real *room = (real *)partial + rows * width;
    for (int k = 1; k < r->group->K; k++, room += n)
        code |= cudaMemcpy(room, part.data(), n * sizeof(real), cudaMemcpyHostToDevice);
    return group_leave(r, code, e);
}

// Sets a rank's parameters to its part of the whole model's.
static void cut_params(World *local, const World *whole) {
    local->param.assign(local->model.flat_count, 0);
    for (int k = 0; k < whole->model.tensor_count; k++) {
        const Tensor *t = &local->model.tensors[k];
        for (size_t i = 0; i < t->count; i++)
            local->param[t->offset + i] = whole->param[whole->model.tensors[k].offset + tensor_whole_index(t, i)];
    }
}

Group::Group(const World *whole, int K, Recompute recompute) : c(whole->c), K(K), all(K) {
    for (int t = 0; t < K; t++) {
        Rank *r = new Rank{this, t, World(c, 1)};
        rank.push_back(r);
        model_destroy(&r->world.model);
        CALL_OK(model_create_local(&r->world.model, &c->config, t, K, &e));
        cut_params(&r->world, whole);
        EngineConfig config = config_of(&r->world, c->micro_batch, recompute);
        config.tensor = {t, K, group_gather, group_reduce, r};
        r->engine = world_engine(&gpu, &r->world, config);
        if (r->engine) gpu.scale_loss(r->engine, loss_scale(whole));
    }
}

// Calls f for every rank, each in its own thread.
void Group::run(const std::function<void(Rank *)> &f) {
    std::vector<std::thread> threads;
    for (Rank *r : rank)
        threads.emplace_back([&f, r] {
            const std::lock_guard<std::mutex> turn(r->group->turn);
            f(r);
            cudaDeviceSynchronize();
        });
    for (std::thread &thread : threads) thread.join();
}

// ---- A step ---------------------------------------------------------------------------------------------------------

static void poison(Engine *engine, const World *w) {
    Array<float> nan(w->model.flat_count, NAN);
    CALL_OK(gpu.load(engine, STATE_PARAM, all_of(&w->model), nan, &e));
    measure_batch(&gpu, engine, w, GNS_EXACT);
    CALL_OK(gpu.load(engine, STATE_PARAM, all_of(&w->model), w->param, &e));
}

// Sums a step's outcome over the ranks. Checks each rank's own |g|^2 against its gradient.
static Outcome group_measure(Group *g, const World *w, int rows, int micro_batch, GnsMode mode) {
    std::vector<Outcome> of(g->K);
    g->run([&](Group::Rank *r) {
        of[r->t] = measure(&gpu, r->engine, &r->world, r->world.tokens, rows, micro_batch, mode);
    });
    Outcome sum = {};
    sum.grad.assign(w->model.flat_count, 0);
    sum.example_sq.assign(w->model.tensor_count, 0);
    sum.row.assign(w->c->batch, RowResult{0, 0, 0});
    for (const Group::Rank *r : g->rank) {
        const Outcome &o = of[r->t];
        sum.loss += o.loss, sum.nll += o.nll;
        for (int b = 0; b < rows; b++) sum.row[b].sq += o.row[b].sq, sum.row[b].nll += o.row[b].nll;
        for (int s = 0; s < SOURCES; s++) sum.source_gram[s][s] += o.source_gram[s][s];
        for (int k = 0; k < w->model.tensor_count; k++) {
            const Tensor *t = &r->world.model.tensors[k];
            double square = 0;
            for (size_t i = 0; i < t->count; i++) {
                const float x = o.grad[t->offset + i];
                square += (double)x * x;
                sum.grad[w->model.tensors[k].offset + tensor_whole_index(t, i)] += x;
            }
            CHECK(fabs(o.grad_sq[k] - square) <= 1e-5 * square, "%s of rank %d of %d: |g|^2 %g, want %g", t->name, r->t,
                  g->K, o.grad_sq[k], square);
            sum.example_sq[k] += o.example_sq[k];
        }
    }
    return sum;
}

static double worst_seen[2]; // largest error of a gradient, of a norm

static void check_step(const World *w, const Outcome *got, const Outcome *want, int K, int rows) {
    CHECK_CLOSE(got->loss, want->loss, LOSS, 0);
    CHECK_CLOSE(got->nll, want->nll, LOSS, 0);
    for (int k = 0; k < w->model.tensor_count; k++) {
        const Tensor *t = &w->model.tensors[k];
        const double error = relative_error(got->grad + t->offset, want->grad + t->offset, t->count);
        CHECK(error <= GRADIENT, "%s, %d ranks, %d rows, %s: gradient off by %.2e", w->c->name, K, rows, t->name,
              error);
        worst_seen[0] = fmax(worst_seen[0], error);
        if (isnan(want->example_sq[k])) continue;
        const double norm = fabs(got->example_sq[k] / want->example_sq[k] - 1);
        CHECK(norm <= NORM, "%s, %d ranks, %d rows, %s: sum |g_b|^2 %g, want %g", w->c->name, K, rows, t->name,
              got->example_sq[k], want->example_sq[k]);
        worst_seen[1] = fmax(worst_seen[1], norm);
    }
    for (int b = 0; b < rows; b++) {
        CHECK_CLOSE(got->row[b].sq, want->row[b].sq, NORM, 0);
        CHECK_CLOSE(got->row[b].nll, want->row[b].nll, LOSS, 0);
    }
    for (int s = 0; s < SOURCES && rows <= SOURCES; s++) // at most one row per source
        CHECK_CLOSE(got->source_gram[s][s], want->source_gram[s][s], NORM, 0);
}

static void check_inference(Group *g, Engine *engine, const World *w) {
    const size_t V = w->c->config.vocab, T = w->c->seq_len, n = w->c->micro_batch;
    Array<float> want(size_max(V, n * T), NAN), got(n * T, 0);
    std::vector<Array<float>> of(g->K, want);
    CALL_OK(gpu.eval(engine, w->tokens, (int)n, (int)T, want, &e));
    g->run([&](Group::Rank *r) { CALL_OK(gpu.eval(r->engine, w->tokens, (int)n, (int)T, of[r->t], &e)); });
    for (size_t i = 0; i < n * T; i++) {
        for (const auto &x : of) got[i] += x[i];
        CHECK_CLOSE(got[i], want[i], 10 * LOSS, 1.0);
    }
    CALL_OK(gpu.logits(engine, w->tokens, (int)(T + 1) / 2, want, &e));
    g->run([&](Group::Rank *r) { CALL_OK(gpu.logits(r->engine, w->tokens, (int)(T + 1) / 2, of[r->t], &e)); });
    const double error = relative_error(of[0], want, V);
    CHECK(error <= LOGIT, "%s, %d ranks: logits off by %.2e", w->c->name, g->K, error);
}

// Checks each rank's number of exchanges since there were `before`.
static void check_exchanges(const Group *g, int before, Recompute recompute, int micro_steps) {
    EngineConfig config = config_of(&g->rank[0]->world, 1, recompute);
    config.tensor.ranks = g->K;
    for (const Group::Rank *r : g->rank)
        CHECK(r->exchanges - before == micro_steps * tensor_exchanges(&config, true), "%s, rank %d of %d: %d exchanges",
              g->c->name, r->t, g->K, r->exchanges - before);
}

// Checks that other modes of recomputation give the same bits.
static void check_recompute(const World *w, const Outcome *none, int K) {
    for (Recompute recompute : {RECOMPUTE_GELU, RECOMPUTE_BLOCK}) {
        const int rows = rows_of(w->c), micro = w->c->micro_batch;
        Group g(w, K, recompute);
        Outcome got = group_measure(&g, w, rows, micro, GNS_EXACT);
        CHECK(memcmp(got.grad, none->grad, w->model.flat_count * sizeof(float)) == 0, "%s, %d ranks: --recompute %s",
              w->c->name, K, recompute_names[recompute]);
        check_exchanges(&g, 0, recompute, (rows + micro - 1) / micro);
    }
}

static void check_group(const World *w, Engine *engine, int K) {
    const int rows = rows_of(w->c), micro = w->c->micro_batch;
    Group g(w, K, RECOMPUTE_NONE);
    g.run([](Group::Rank *r) { poison(r->engine, &r->world); });
    for (GnsMode mode : {GNS_LN, GNS_EXACT}) {
        Outcome want = measure(&gpu, engine, w, w->tokens, rows, micro, mode);
        Outcome got = group_measure(&g, w, rows, micro, mode);
        check_step(w, &got, &want, K, rows);
        if (mode == GNS_EXACT && K == 2 && !small) check_recompute(w, &got, K);
    }
    // A step of one row, which rank 0 has. The other ranks hold gradients of the previous step.
    const int before = g.rank[0]->exchanges;
    Outcome want = measure(&gpu, engine, w, w->tokens, 1, micro, GNS_EXACT);
    Outcome got = group_measure(&g, w, 1, micro, GNS_EXACT);
    check_step(w, &got, &want, K, 1);
    check_exchanges(&g, before, RECOMPUTE_NONE, 1);
    check_inference(&g, engine, w);
}

static void check_case(const Case *c) {
    World w(c, 1);
    Engine *engine = engine_of(&gpu, &w);
    for (int K = 2; engine && K <= RANKS_MOST && K <= c->config.heads; K++) check_group(&w, engine, K);
}

static void test_cut_models(void) {
    for (const Case &c : own_cases) check_case(&c);
    for (int i = 0; i < case_count; i++) check_case(&cases[i]);
    printf("  largest relative error of a gradient %.1e, of a norm %.1e\n", worst_seen[0], worst_seen[1]);
}

static void test_cut_models_with_masks(void) {
    masked = true;
    test_cut_models();
    masked = false;
}

int main(int argc, char **argv) {
    engine_test_begin("test_tensor_cuda", argc, argv);
    RUN(test_cut_models, test_cut_models_with_masks);
    return test_summary();
}
