// The CUDA engine's updates (--optimizer) equal the CPU engine's up to rounding. Their bits depend neither on old
// scratch memory nor on how calls divide the parameters. A gradient that is not finite changes nothing. Gradients are
// random. Arguments: engine_test.cuh.
#include "engine_test.cuh"

#include "cuda/engine.cuh"
#include "math/rng.h"
#include "ranks/transport.h"

static const Case many = {"more matrices than a call takes", {17, 1, 16, 31, 8}, 8, 2, 2};

static const double ROUNDING = 1e-4;               // largest error of a step
static const double STEP = FP32 ? ROUNDING : 0.05; // largest error of Muon's step; the CPU multiplies in fp32

struct Random {
    uint64_t draws;
    float operator()(double deviation) { return (float)(deviation * rng_normal(seed, 1 << 20, draws++)); }
};

// Returns gradients of different sizes, times the loss scale; 0 in the padding.
static std::vector<float> random_gradient(const World *w, Random &random) {
    std::vector<float> grad(w->model.flat_count, 0);
    for (int k = 0; k < w->model.tensor_count; k++) {
        const Tensor *t = &w->model.tensors[k];
        const double size = loss_scale(w) * pow(10, -k % 4);
        for (size_t i = 0; i < t->count; i++) grad[t->offset + i] = random(size);
    }
    return grad;
}

static std::vector<float> state_of(const World *w, const Api *api, Engine *engine, StateKind kind) {
    std::vector<float> x(w->model.flat_count, NAN);
    CALL_OK(api->store(engine, kind, all_of(&w->model), x.data(), &e));
    return x;
}

// Fills Muon's scratch. It shares memory with activations, so it may hold anything before an update.
static void poison(Engine *engine, int byte) {
    if (engine->muon) cudaMemset(engine->muon, byte, engine_muon_bytes(&engine->config));
}

static void load_gradient(const World *w, const Api *api, Engine *engine, const std::vector<float> &grad) {
    CALL_OK(api->begin_step(engine, &e));
    CALL_OK(api->load(engine, STATE_GRAD, all_of(&w->model), grad.data(), &e));
    CALL_OK(api->norms(engine, all_of(&w->model), &e));
}

static void step(const World *w, const Api *api, Engine *engine, const std::vector<float> &grad, int number) {
    const UpdateConfig u = update_config(w->c, number);
    load_gradient(w, api, engine, grad);
    if (optimizer == OPTIMIZER_LAMB) CALL_OK(api->trust(engine, all_of(&w->model), &u, &e));
    CALL_OK(api->update(engine, all_of(&w->model), &u, &e));
}

// Returns |got - want| / |want - before| of a tensor.
static double tensor_error(const Tensor *t, const std::vector<float> &got, const std::vector<float> &want,
                           const std::vector<float> &before) {
    double off = 0, moved = 0;
    for (size_t i = t->offset; i < t->offset + t->count; i++) {
        off += pow((double)got[i] - want[i], 2);
        moved += pow((double)want[i] - before[i], 2);
    }
    return moved > 0 ? sqrt(off / moved) : INFINITY;
}

static void compare_engines(const World *w) {
    Random random = {};
    double worst = 0;
    Engine *a = engine_of(&gpu, w), *b = engine_of(&cpu, w);
    for (int number = 1; number <= (small ? 1 : 2); number++) {
        const std::vector<float> grad = random_gradient(w, random), before = state_of(w, &cpu, b, STATE_PARAM);
        CALL_OK(gpu.load(a, STATE_PARAM, all_of(&w->model), before.data(), &e)); // so that errors do not add up
        poison(a, 0xff);
        step(w, &gpu, a, grad, number);
        step(w, &cpu, b, grad, number);
        const std::vector<float> got = state_of(w, &gpu, a, STATE_PARAM), want = state_of(w, &cpu, b, STATE_PARAM);
        for (int k = 0; k < w->model.tensor_count; k++) {
            const Tensor *t = &w->model.tensors[k];
            const bool muon = optimizer == OPTIMIZER_MUON && tensor_muon_matrices(t);
            const double error = tensor_error(t, got, want, before), most = muon ? STEP : ROUNDING;
            CHECK(error <= most, "%s, %s, step %d, %s: %.2e of the step off", optimizer_names[optimizer], w->c->name,
                  number, t->name, error);
            if (muon || optimizer != OPTIMIZER_MUON) worst = fmax(worst, error);
        }
        for (StateKind kind : {STATE_MOMENT1, STATE_MOMENT2}) {
            const std::vector<float> x = state_of(w, &gpu, a, kind), y = state_of(w, &cpu, b, kind), none(x.size(), 0);
            for (int k = 0; k < w->model.tensor_count; k++) {
                const Tensor *t = &w->model.tensors[k];
                if (kind == STATE_MOMENT2 && optimizer == OPTIMIZER_MUON && tensor_muon_matrices(t)) continue; // all 0
                CHECK(tensor_error(t, x, y, none) <= 1e-5, "%s, %s: moment %d of %s", optimizer_names[optimizer],
                      w->c->name, kind, t->name);
            }
        }
    }
    printf("  %s, %s: at most %.1e of a step off\n", optimizer_names[optimizer], w->c->name, worst);
}

template <typename F> static void each_world(F f) {
    for (int i = 0; i < case_count + !small; i++) {
        World w(i < case_count ? &cases[i] : &many, steps);
        f(&w);
    }
}

static void test_against_cpu(void) {
    for (Optimizer o : {OPTIMIZER_ADAMW, OPTIMIZER_LAMB, OPTIMIZER_MUON}) {
        optimizer = o;
        each_world(compare_engines);
    }
}

// ---- Equal bits -----------------------------------------------------------------------------------------------------

static void check_bits(const World *w, Engine *a, Engine *b, const char *what) {
    for (StateKind kind : {STATE_PARAM, STATE_MOMENT1, STATE_MOMENT2}) {
        const std::vector<float> x = state_of(w, &gpu, a, kind), y = state_of(w, &gpu, b, kind);
        CHECK(memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0, "%s, %s: %s, array %d differs",
              optimizer_names[optimizer], w->c->name, what, kind);
        for (float v : x) CHECK(isfinite(v), "%s: %g", w->c->name, v);
    }
}

// Updates all ranks' parts, bucket by bucket; parts hold whole matrices. LAMB first computes the norms of whole
// tensors.
static void update_in_parts(const World *w, Engine *engine, int number, int ranks) {
    const UpdateConfig u = update_config(w->c, number);
    if (optimizer == OPTIMIZER_LAMB) CALL_OK(gpu.trust(engine, all_of(&w->model), &u, &e));
    const Division division = {0, ranks, 1, &w->model};
    for (int i = 0; i < model_bucket_count(&w->model); i++)
        for (int r = 0; r < ranks; r++)
            CALL_OK(gpu.update(engine, division_part(&division, model_bucket(&w->model, i), r), &u, &e));
}

static void compare_bits(const World *w) {
    Random random = {2 << 20};
    Engine *engine[4];
    for (Engine *&one : engine) one = engine_of(&gpu, w);
    for (int number = 1; number <= 2; number++) {
        const std::vector<float> grad = random_gradient(w, random);
        for (int i = 0; i < 4; i++) {
            poison(engine[i], i == 1 ? 0 : 0xff);
            if (i < 2) step(w, &gpu, engine[i], grad, number);
            else load_gradient(w, &gpu, engine[i], grad), update_in_parts(w, engine[i], number, i == 2 ? 1 : 4);
        }
        check_bits(w, engine[0], engine[1], "two runs");
        check_bits(w, engine[0], engine[2], "by bucket");
        check_bits(w, engine[0], engine[3], "by the parts of four ranks");
    }
}

static void test_bits(void) {
    for (Optimizer o : {OPTIMIZER_LAMB, OPTIMIZER_MUON}) {
        optimizer = o;
        each_world(compare_bits);
    }
}

// Squared norms add up over the parts of a tensor.
static void test_trust_in_parts(void) {
    Random random = {};
    optimizer = OPTIMIZER_LAMB;
    World w(&cases[2], 1);
    const size_t n = 2 * (size_t)w.model.tensor_count,
                 cut[] = {0, 64 * 7, w.model.flat_count / 3 / 64 * 64, w.model.flat_count};
    const UpdateConfig u = update_config(w.c, 1);
    Engine *engine = engine_of(&gpu, &w);
    std::vector<double> whole(n), part(n), sum(n, 0);
    const auto squares = [&](Range range, std::vector<double> &out) {
        cudaMemset(engine_buffer(engine, BUFFER_TRUST, 0), 0, n * sizeof(double));
        CALL_OK(gpu.trust(engine, range, &u, &e));
        cudaStreamSynchronize((cudaStream_t)engine_stream(engine));
        cudaMemcpy(out.data(), engine_buffer(engine, BUFFER_TRUST, 0), n * sizeof(double), cudaMemcpyDeviceToHost);
    };
    load_gradient(&w, &gpu, engine, random_gradient(&w, random));
    squares(all_of(&w.model), whole);
    for (int i = 0; i < 3; i++) {
        squares(Range{cut[i], cut[i + 1]}, part);
        for (size_t k = 0; k < n; k++) sum[k] += part[k];
    }
    for (size_t k = 0; k < n; k++) {
        CHECK(k % (n / 2) == 0 || whole[k] > 0, "squares %zu: %g", k, whole[k]);
        CHECK_CLOSE(sum[k], whole[k], 1e-12, 0);
    }
}

static void test_nonfinite(void) {
    Random random = {};
    World w(&cases[2], 1);
    for (Optimizer o : {OPTIMIZER_ADAMW, OPTIMIZER_LAMB, OPTIMIZER_MUON}) {
        optimizer = o;
        Engine *a = engine_of(&gpu, &w), *b = engine_of(&gpu, &w);
        std::vector<float> grad = random_gradient(&w, random);
        step(&w, &gpu, a, grad, 1);
        step(&w, &gpu, b, grad, 1);
        grad[w.model.tensors[4].offset + 5] = o == OPTIMIZER_LAMB ? INFINITY : NAN;
        step(&w, &gpu, a, grad, 2);
        check_bits(&w, a, b, "a gradient that is not finite");
    }
}

int main(int argc, char **argv) {
    engine_test_begin("test_optimizers_cuda", argc, argv);
    RUN(test_against_cpu, test_bits, test_trust_in_parts, test_nonfinite);
    return test_summary();
}
