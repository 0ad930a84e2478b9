// Promises of the CUDA engine. Two runs give the same bits, whatever they recompute and whatever their memory held. Two
// engines with one tuning give the same bits. Norms and updates range by range equal those of the whole array. A
// gradient that is not finite changes nothing. Arguments: engine_test.cuh.
#include "engine_test.cuh"

#include "cuda/engine.cuh"
#include "cuda/optimizer.cuh"
#include "base/hash.h"

#include <atomic>
// Checks that two trained engines have the same bits.
static void check_same_bits(const World *w, Engine *a, Engine *b, const char *what) {
    size_t bytes = w->model.flat_count * sizeof(float);
    Array<float> x(w->model.flat_count, NAN), y = x;
    for (int kind = STATE_PARAM; kind <= STATE_MOMENT2; kind++) {
        CALL_OK(gpu.store(a, (StateKind)kind, all_of(&w->model), x, &e));
        CALL_OK(gpu.store(b, (StateKind)kind, all_of(&w->model), y, &e));
        CHECK(memcmp(x, y, bytes) == 0, "%s: %s, array %d differs", w->c->name, what, kind);
    }
}

static void same_bits(Dtype type) {
    static const struct {
        const char *what;
        Recompute recompute;
    } others[] = {{"recompute gelu", RECOMPUTE_GELU}, {"recompute block", RECOMPUTE_BLOCK}, {"again", RECOMPUTE_NONE}};
    fp8 = type;
    for (int i = 0; i < 2 * case_count; i++) {
        const Case *c = &cases[i / 2];
        double losses[2][STEPS];
        masked = i % 2;
        optimizer = (Optimizer)(i % OPTIMIZERS);
        if (fp8 && !fp8_runs(fp8, c)) continue;
        World w(c, steps);
        Engine *a = engine_of(&gpu, &w);
        train(&gpu, a, &w, losses[0]);
        CHECK(isfinite(losses[0][steps - 1]), "%s: loss %g", c->name, losses[0][steps - 1]);
        for (int k = 0; k < (small ? 2 : 3); k++) {
            Engine *b = engine_of(&gpu, &w, others[k].recompute);
            train(&gpu, b, &w, losses[1]);
            CHECK(memcmp(losses[0], losses[1], steps * sizeof(double)) == 0, "%s: %s, losses differ", c->name,
                  others[k].what);
            check_same_bits(&w, a, b, others[k].what);
        }
    }
    masked = false, fp8 = DTYPE_FP32, optimizer = OPTIMIZER_ADAMW;
}

static void test_same_bits(void) { same_bits(DTYPE_FP32); }
static void test_same_bits_fp8(void) {
    if (!fp8_runs(DTYPE_FP8, &cases[3])) SKIP("only Hopper has fp8, and only in bf16");
    for (Dtype type : fp8_types) same_bits(type);
}

// Returns an engine whose memory is filled with a byte after creation, except tables, ticket and the loaded state. A
// result that depends on the byte shows a read of unwritten memory.
static Engine *engine_filled(const World *w, int byte, Recompute recompute) {
    const size_t n = w->model.flat_count;
    std::vector<UpdateRule> rule(n / DECAY_GRANULE);
    std::vector<Range> segment(w->model.tensor_count);
    std::vector<float> zero(n);
    MemoryPlan plan;
    Engine *engine = engine_of(&gpu, w, recompute);
    if (!engine) return NULL;
    cuda_engine.plan_memory(&engine->config, &plan);
    cudaMemcpy(rule.data(), engine->rule, rule.size(), cudaMemcpyDeviceToHost);
    cudaMemcpy(segment.data(), engine->segment, segment.size() * sizeof(Range), cudaMemcpyDeviceToHost);
    cudaMemset(engine->memory, byte, plan.total);
    cudaMemset(engine->ticket, 0, sizeof *engine->ticket);
    cudaMemcpy(engine->rule, rule.data(), rule.size(), cudaMemcpyHostToDevice);
    cudaMemcpy(engine->segment, segment.data(), segment.size() * sizeof(Range), cudaMemcpyHostToDevice);
    cudaError_t status = cudaDeviceSynchronize();
    CHECK(status == cudaSuccess, "%s", cudaGetErrorString(status));
    CALL_OK(gpu.load(engine, STATE_PARAM, all_of(&w->model), w->param, &e));
    CALL_OK(gpu.load(engine, STATE_MOMENT1, all_of(&w->model), zero.data(), &e));
    CALL_OK(gpu.load(engine, STATE_MOMENT2, all_of(&w->model), zero.data(), &e));
    for (const Tensor *t = w->model.tensors, *last = t + w->model.tensor_count - 1; t <= last; t++) {
        Range gap = {t->offset + t->count, t < last ? t[1].offset : n}; // padding, whose gradient is always 0
        CALL_OK(gpu.load(engine, STATE_GRAD, gap, zero.data(), &e));
    }
    return engine;
}

static void check_same_outcome(const World *w, const Outcome *a, const Outcome *b, const char *what) {
    size_t tensors = (size_t)w->model.tensor_count;
    CHECK(isfinite(a->loss) && a->loss == b->loss, "%s, %s: loss %.9g and %.9g", w->c->name, what, a->loss, b->loss);
    for (size_t i = 0; i < w->model.flat_count; i++)
        CHECK(isfinite(a->grad[i]) && a->grad[i] == b->grad[i], "%s, %s: gradient %zu: %g and %g", w->c->name, what, i,
              a->grad[i], b->grad[i]);
    for (size_t k = 0; k < tensors; k++)
        CHECK(isfinite(a->grad_sq[k]), "%s, %s: |g|^2 of tensor %zu", w->c->name, what, k);
    CHECK(memcmp(a->grad_sq, b->grad_sq, tensors * sizeof(double)) == 0, "%s, %s: |g|^2 differ", w->c->name, what);
    CHECK(memcmp(a->example_sq, b->example_sq, tensors * sizeof(double)) == 0, "%s, %s: |g_b|^2 differ", w->c->name,
          what);
}

static void check_same_inference(const World *w, Engine *a, Engine *b, const char *what) {
    size_t V = (size_t)w->c->config.vocab, T = (size_t)w->c->seq_len, n = (size_t)w->c->micro_batch * T;
    Array<float> x(size_max(V, n), NAN), y = x;
    CALL_OK(gpu.eval(a, w->tokens, w->c->micro_batch, (int)T, x, &e));
    CALL_OK(gpu.eval(b, w->tokens, w->c->micro_batch, (int)T, y, &e));
    for (size_t i = 0; i < n; i++)
        CHECK(isfinite(x[i]) && x[i] == y[i], "%s, %s: loss of token %zu: %g and %g", w->c->name, what, i, x[i], y[i]);
    CALL_OK(gpu.logits(a, w->tokens, (int)(T + 1) / 2, x, &e));
    CALL_OK(gpu.logits(b, w->tokens, (int)(T + 1) / 2, y, &e));
    for (size_t v = 0; v < V; v++)
        CHECK(isfinite(x[v]) && x[v] == y[v], "%s, %s: logit %zu: %g and %g", w->c->name, what, v, x[v], y[v]);
}

// An engine for inference, whose blocks share one block's memory, gives the same results.
static void test_inference(void) {
    for (int i = 0; i < case_count; i++) {
        MemoryPlan training, plan;
        World w(&cases[i], 1);
        Engine *a = engine_of(&gpu, &w);
        const EngineConfig config = {
            .model = &w.model, .micro_batch = w.c->micro_batch, .seq_len = w.c->seq_len, .inference = true};
        Engine *b = world_engine(&gpu, &w, config);
        if (a && b) {
            check_same_inference(&w, a, b, "inference");
            cuda_engine.plan_memory(&a->config, &training);
            cuda_engine.plan_memory(&config, &plan);
            CHECK(plan.total < training.total, "%s: takes %zu bytes, training %zu", w.c->name, plan.total,
                  training.total);
        }
    }
}

// Compares engines whose memory was filled with NaN (0xff in every type) and with zeros, bit for bit, in every kind of
// step. compute-sanitizer's initcheck cannot replace this test: it does not see bulk stores of cuBLASLt's kernels.
static void compare_filled(const World *w, Recompute recompute, const char *what) {
    if (fp8) {
        exponents_begin(w);
        Engine *engine = engine_of(&gpu, w);
        exponents_next(measure_batch(&gpu, engine, w, GNS_OFF).amax);
    }
    Engine *a = engine_filled(w, 0xff, recompute), *b = engine_filled(w, 0, recompute);
    if (a && b) {
        check_same_inference(w, a, b, what);
        for (GnsMode mode : {GNS_EXACT, GNS_LN, GNS_OFF}) {
            UpdateConfig update = update_config(w->c, mode == GNS_EXACT ? 1 : mode == GNS_LN ? 2 : 3);
            Outcome x = measure_batch(&gpu, a, w, mode);
            Outcome y = measure_batch(&gpu, b, w, mode);
            check_same_outcome(w, &x, &y, what);
            CALL_OK(gpu.update(a, all_of(&w->model), &update, &e));
            CALL_OK(gpu.update(b, all_of(&w->model), &update, &e));
        }
        check_same_bits(w, a, b, what);
    }
}

static void filled_memory(Dtype type) {
    fp8 = type;
    for (int i = 0; i < 2 * case_count; i++) {
        const Case *c = &cases[i / 2];
        masked = i % 2;
        if (fp8 && !fp8_runs(fp8, c)) continue;
        World w(c, 1);
        compare_filled(&w, RECOMPUTE_NONE, "memory filled");
        compare_filled(&w, RECOMPUTE_BLOCK, "memory filled, recompute block");
    }
    masked = false, fp8 = DTYPE_FP32;
}

static void test_filled_memory(void) { filled_memory(DTYPE_FP32); }
static void test_filled_memory_fp8(void) {
    if (!fp8_runs(DTYPE_FP8, &cases[3])) SKIP("only Hopper has fp8, and only in bf16");
    for (Dtype type : fp8_types) filled_memory(type);
}

// Compares the batch's gradient from one micro-step with its gradient from several micro-steps.
static void compare_parts(const World *w, Engine *engine, int micro_batch, GnsMode mode) {
    const double tolerance = FP32 ? 1e-5 : 1e-2;
    Outcome whole = measure(&gpu, engine, w, w->tokens, w->c->batch, w->c->batch, mode);
    Outcome parts = measure(&gpu, engine, w, w->tokens, w->c->batch, micro_batch, mode);
    CHECK_CLOSE(parts.loss, whole.loss, tolerance, 0);
    for (int k = 0; k < w->model.tensor_count; k++) {
        const Tensor *t = &w->model.tensors[k];
        const double error = relative_error(parts.grad + t->offset, whole.grad + t->offset, t->count);
        CHECK(error <= tolerance, "%s, %d rows at a time: %s is %.2e off", w->c->name, micro_batch, t->name, error);
        CHECK_CLOSE(parts.grad_sq[k], whole.grad_sq[k], tolerance, 0);
        if (mode == GNS_EXACT) CHECK_CLOSE(parts.example_sq[k], whole.example_sq[k], tolerance, 0);
    }
}

// Compares one micro-step with micro-steps of 1, 3, 5 and 7 rows. The head of `in_chunks` runs in chunks of rows.
static void test_accumulation(void) {
    static const Case in_chunks = {"a head in chunks", {1, 1, 32, 50257, 1024}, 1024, 17, 17};
    for (const Case *c : {&cases[CASES - 1], &in_chunks}) {
        masked = c == &cases[CASES - 1]; // an example's masks must not depend on the other rows
        World w(c, 1);
        Engine *engine = engine_of(&gpu, &w, RECOMPUTE_NONE, c->batch);
        if (engine) {
            CHECK((engine_head_examples(&engine->config) < c->batch) == (c == &in_chunks), "%s: the head's chunks",
                  c->name);
            for (GnsMode mode : {GNS_OFF, GNS_EXACT})
                for (int micro = 1; micro < 8; micro += 2) compare_parts(&w, engine, micro, mode);
        }
    }
    masked = false;
}

// A tuning gives the same bits in another engine. Another machine's tuning is refused, and the engine stays untuned.
// Tuning does not change weights.
static void test_tuning(void) {
    Error e = {};
    double losses[3][STEPS];
    char elsewhere[TUNING_BYTES];
    World w(&cases[CASES - 1], steps);
    Engine *a = engine_of(&gpu, &w), *b = engine_of(&gpu, &w);
    CHECK(engine_tuning(a)[0] == 0, "tuned unasked: %s", engine_tuning(a));
    CALL_OK(engine_tune(a, &e));
    printf("  %.400s...\n", engine_tuning(a));
    CHECK(strlen(engine_tuning(a)) > 100, "'%s'", engine_tuning(a));
    CALL_OK(engine_set_tuning(b, engine_tuning(a), &e));
    CHECK(strcmp(engine_tuning(a), engine_tuning(b)) == 0, "'%s'", engine_tuning(b));
    train(&gpu, a, &w, losses[0]);
    train(&gpu, b, &w, losses[1]);
    CHECK(memcmp(losses[0], losses[1], steps * sizeof(double)) == 0, "losses differ");
    check_same_bits(&w, a, b, "tuned, and a tuning taken over");
    snprintf(elsewhere, sizeof elsewhere, "x%s", engine_tuning(a));
    CHECK_ERROR(engine_set_tuning(b, elsewhere, &e), &e, ERR_INPUT, "tuned for x");
    CHECK(engine_tuning(b)[0] == 0, "'%s' is left", engine_tuning(b));
    a = engine_of(&gpu, &w);
    CALL_OK(gpu.load(b, STATE_PARAM, all_of(&w.model), w.param, &e));
    Outcome untuned = measure_batch(&gpu, a, &w, GNS_OFF);
    Outcome refused = measure_batch(&gpu, b, &w, GNS_OFF);
    CHECK(!memcmp(untuned.grad, refused.grad, w.model.flat_count * sizeof(float)),
          "a refused tuning changed something");
}

// Norms of ranges add up to the whole array's; an update range by range equals a whole update.
static void test_ranges(void) {
    World w(&cases[2], 1);
    Engine *a = engine_of(&gpu, &w), *b = engine_of(&gpu, &w);
    UpdateConfig update = update_config(w.c, 1);
    size_t cut[] = {0, 64 * 7, w.model.flat_count / 3 / 64 * 64, w.model.flat_count};
    Outcome whole = measure_batch(&gpu, a, &w, GNS_OFF);
    Outcome other = measure_batch(&gpu, b, &w, GNS_OFF);
    CALL_OK(gpu.update(a, all_of(&w.model), &update, &e));
    for (int i = 0; i < 3; i++) CALL_OK(gpu.update(b, Range{cut[i], cut[i + 1]}, &update, &e));
    check_same_bits(&w, a, b, "update in pieces");
    Array<double> sum(w.model.tensor_count, NAN);
    for (int k = 0; k < w.model.tensor_count; k++) sum[k] = 0;
    StepResult r = {NAN, other.grad_sq, other.example_sq, 0, NULL, NULL, NULL};
    for (int i = 0; i < 3; i++) {
        CALL_OK(gpu.norms(b, Range{cut[i], cut[i + 1]}, &e));
        CALL_OK(gpu.result(b, &r, &e));
        for (int k = 0; k < w.model.tensor_count; k++) { // a tensor outside the range keeps its norm
            const Tensor *t = &w.model.tensors[k];
            if (t->offset < cut[i + 1] && t->offset + t->count > cut[i]) sum[k] += r.grad_sq[k];
        }
    }
    for (int k = 0; k < w.model.tensor_count; k++) CHECK_CLOSE(sum[k], whole.grad_sq[k], 1e-6, 0);
}

// Computes what engine_hash must return: a hash of the working weights, in a 16-bit build also of the fp32 masters.
static uint64_t hash_of(const float *param, Range range) {
    uint64_t sum = 0;
    for (size_t i = range.begin; i < range.end; i++) {
        uint32_t bits, rounded;
        float working = FP32 ? param[i] : round_real(param[i]);
        __half half = __float2half_rn(param[i]);
        uint16_t half_bits;
        memcpy(&bits, &param[i], sizeof bits);
        memcpy(&rounded, &working, sizeof rounded);
        memcpy(&half_bits, &half, sizeof half_bits);
        sum += hash_element(i, FP32 ? rounded : FP16 ? half_bits : rounded >> 16);
        if (!FP32) sum += hash_element(((uint64_t)1 << 48) + i, bits);
    }
    return sum;
}

static void test_hash(void) {
    World w(&cases[2], 1);
    size_t n = w.model.flat_count;
    Engine *engine = engine_of(&gpu, &w);
    Array<float> param(n, NAN);
    uint64_t hash, again;
    CALL_OK(gpu.store(engine, STATE_PARAM, all_of(&w.model), param, &e));
    for (size_t cut = 0; cut < n; cut = 3 * cut + 1) {
        Range range = {cut, n - cut / 2 > cut ? n - cut / 2 : n};
        CALL_OK(engine_hash(engine, range, &hash, &e));
        CHECK(hash == hash_of(param, range), "from %zu to %zu", range.begin, range.end);
    }
    CALL_OK(engine_hash(engine, all_of(&w.model), &hash, &e));
    for (size_t i = 0; i < n; i += n / 20) { // changes the last bit of one weight, which bf16 drops
        uint32_t bits;
        memcpy(&bits, &param[i], sizeof bits);
        bits ^= 1;
        memcpy(&param[i], &bits, sizeof bits);
        CALL_OK(gpu.load(engine, STATE_PARAM, Range{i, i + 1}, &param[i], &e));
        CALL_OK(engine_hash(engine, all_of(&w.model), &again, &e));
        CHECK(again != hash && again == hash_of(param, all_of(&w.model)), "element %zu", i);
        hash = again;
    }
}

// Delays the engine's stream for a while.
struct Hold {
    double seconds;
    std::atomic<bool> ended;
};

static void hold_stream(void *context) {
    Hold *hold = (Hold *)context;
    for (double start = clock_seconds(); clock_seconds() - start < hold->seconds;) continue;
    hold->ended = true;
}

static void hold_engine(Engine *engine, Hold *hold) {
    hold->seconds = 1;
    hold->ended = false;
    CHECK(cudaLaunchHostFunc((cudaStream_t)engine_stream(engine), hold_stream, hold) == cudaSuccess, "not held");
}

// got: (flat_count), pinned as a checkpoint's copy is.
static void check_stored(Engine *engine, const World *w, StateKind kind, float *got, const float *want) {
    size_t bytes = w->model.flat_count * sizeof(float);
    memset(got, 0xff, bytes);
    CALL_OK(gpu.store(engine, kind, all_of(&w->model), got, &e));
    CHECK(memcmp(got, want, bytes) == 0, "%s, array %d differs", w->c->name, kind);
}

// A store of weights and moments waits for the last update, not for later work, so a checkpoint can copy them during
// the next step. A store of gradients waits for all queued work.
static void test_store_beside_step(void) {
    static const StateKind kinds[] = {STATE_MOMENT1, STATE_PARAM, STATE_MOMENT2, STATE_GRAD};
    World w(&cases[3], 1);
    Engine *a = engine_of(&gpu, &w, RECOMPUTE_NONE, w.c->batch), *b = engine_of(&gpu, &w, RECOMPUTE_NONE, w.c->batch);
    UpdateConfig update = update_config(w.c, 1);
    Array<float> want[4]; // by StateKind: arrays of engine b, whose stream is not held
    float *got;
    Hold hold;
    CHECK(cudaMallocHost(&got, w.model.flat_count * sizeof(float)) == cudaSuccess, "no pinned memory");
    for (Engine *engine : {b, a}) {
        Outcome o = measure(&gpu, engine, &w, w.tokens, w.c->batch, w.c->batch, GNS_LN);
        if (engine == a) hold_engine(a, &hold);
        CALL_OK(gpu.update(engine, all_of(&w.model), &update, &e));
    }
    CALL_OK(gpu.begin_step(b, &e));
    CALL_OK(gpu.micro_step(b, w.tokens, w.c->batch, GNS_LN, &e));
    for (StateKind kind : kinds) {
        want[kind].resize(w.model.flat_count);
        CALL_OK(gpu.store(b, kind, all_of(&w.model), want[kind], &e));
    }
    check_stored(a, &w, STATE_MOMENT1, got, want[STATE_MOMENT1]);
    CHECK(hold.ended, "copied before the update");
    hold_engine(a, &hold);
    CALL_OK(gpu.begin_step(a, &e));
    CALL_OK(gpu.micro_step(a, w.tokens, w.c->batch, GNS_LN, &e));
    for (StateKind kind : kinds) {
        if (kind == STATE_GRAD) CHECK(!hold.ended, "the copies waited for the next step");
        check_stored(a, &w, kind, got, want[kind]);
    }
    CHECK(hold.ended, "gradients were copied before the step that makes them");
    cudaFreeHost(got);
}

// A gradient that overflows changes nothing, so the next step equals a fresh engine's.
static void test_overflow(void) {
    if (!FP16) SKIP("only fp16 overflows");
    World w(&cases[2], 1);
    Engine *a = engine_of(&gpu, &w), *b = engine_of(&gpu, &w);
    UpdateConfig update = update_config(w.c, 1);
    gpu.scale_loss(a, 0x1p30);
    Outcome over = measure_batch(&gpu, a, &w, GNS_EXACT);
    double square = 0;
    for (int k = 0; k < w.model.tensor_count; k++) square += over.grad_sq[k];
    CHECK(isfinite(over.loss) && !isfinite(square), "loss %g, norm %g", over.loss, square);
    CALL_OK(gpu.update(a, all_of(&w.model), &update, &e));
    gpu.scale_loss(a, loss_scale(&w));
    Outcome x = measure_batch(&gpu, a, &w, GNS_EXACT);
    Outcome y = measure_batch(&gpu, b, &w, GNS_EXACT);
    check_same_outcome(&w, &x, &y, "after an overflow");
    CALL_OK(gpu.update(a, all_of(&w.model), &update, &e));
    CALL_OK(gpu.update(b, all_of(&w.model), &update, &e));
    check_same_bits(&w, a, b, "after an overflow");
}

// Without exponents, or without the weights' exponents, fp8 has the bits of bf16. With all exponents fp8 rounds. After
// a step in which a site saturates, an update changes nothing.
static void fp8_bits(Dtype type, const Case *c) {
    World w(c, 1);
    Engine *plain = engine_of(&gpu, &w);
    const Outcome want = measure_batch(&gpu, plain, &w, GNS_EXACT);
    fp8 = type;
    exponents_begin(&w);
    Engine *a = engine_of(&gpu, &w);
    const Outcome first = measure_batch(&gpu, a, &w, GNS_EXACT);
    check_same_outcome(&w, &want, &first, "fp8 without exponents");
    exponents_next(first.amax);
    Outcome o = measure_batch(&gpu, a, &w, GNS_EXACT);
    CHECK(o.loss != first.loss, "loss %g equals bf16's", o.loss);
    CHECK_CLOSE(o.loss, first.loss, 2e-2, 0);
    double least = 1;
    for (const Tensor *t = w.model.tensors; t < w.model.tensors + w.model.tensor_count; t++)
        least = fmin(least, cosine_of(o.grad + t->offset, first.grad + t->offset, t->count));
    printf("  %s: least cosine with bf16's gradient %.5f\n", dtype_names[type], least);
    CHECK(least >= 0.99, "cosine %.5f", least);

    UpdateConfig update = update_config(c, 1);
    Array<float> after(w.model.flat_count, NAN);
    for (size_t i = 0; i < exponents.size(); i++) {
        const int s = i % FP8_ENTRIES;
        const bool head = i / FP8_ENTRIES == (size_t)c->config.layers;
        if (head ? !fp8_head || (s != FP8_LN2 && s != FP8_FC_WEIGHT) : s >= FP8_SITES) continue;
        CHECK(exponents[i] != FP8_UNSET, "site %zu has no exponent", i);
        exponents[i] += 6; // the largest value, in [64, 128), becomes 4096 or more, above FP8_MAX
        o = measure_batch(&gpu, a, &w, GNS_LN);
        CHECK(isfinite(o.loss) && o.grad_sq[0] == INFINITY, "site %zu: loss %g, norm %g", i, o.loss, o.grad_sq[0]);
        CALL_OK(gpu.update(a, all_of(&w.model), &update, &e));
        exponents[i] -= 6;
    }
    CALL_OK(gpu.store(a, STATE_PARAM, all_of(&w.model), after, &e));
    CHECK(memcmp(after, w.param, w.model.flat_count * sizeof(float)) == 0, "parameters moved");

    for (size_t i = 0; i < exponents.size(); i++)
        if (i % FP8_ENTRIES >= FP8_QKV_WEIGHT) exponents[i] = FP8_UNSET;
    o = measure_batch(&gpu, a, &w, GNS_EXACT);
    check_same_outcome(&w, &want, &o, "fp8 without weights' exponents");
    fp8 = DTYPE_FP32;
}

static void test_fp8(void) {
    if (!fp8_runs(DTYPE_FP8, &cases[3])) SKIP("only Hopper has fp8, and only in bf16");
    fp8_bits(DTYPE_FP8, &cases[3]);
    fp8_head = false, fp8_bits(DTYPE_FP8_DW, case_for_dw), fp8_head = true;
}

// Each exponent changes results. A dy site's exponent changes gradients of earlier layers, not the loss. It changes the
// gradient of the same layer's weight only in fp8-dw. If one of two factors has no exponent, neither is rounded.
static void each_site(Dtype type, const Case *c) {
    static const TensorKind behind[] = {FC_W, LN2_W, QKV_W, LN1_W}, own[] = {FCPROJ_W, FC_W, PROJ_W, QKV_W};
    World w(c, 1);
    const size_t bytes = w.model.flat_count * sizeof(float);
    fp8 = type;
    exponents_begin(&w);
    Engine *a = engine_of(&gpu, &w);
    const Outcome unrounded = measure_batch(&gpu, a, &w, GNS_LN);
    exponents_next(unrounded.amax);
    const Array<int8_t> k = exponents;
    const Outcome all = measure_batch(&gpu, a, &w, GNS_LN);
    for (int n = 0; n < FP8_SITES + 2; n++) { // the sites of block 1, then the head's
        const bool head = n >= FP8_SITES;
        const int s = !head ? n : n == FP8_SITES ? FP8_LN2 : FP8_FC_WEIGHT, i = s - FP8_DFCPROJ;
        const bool of_gradient = i >= 0 && s <= FP8_DQKV;
        const size_t at = (head ? c->config.layers : 1) * FP8_ENTRIES + s;
        exponents = k;
        exponents[at] -= 12; // most values become subnormal or 0
        const Outcome coarse = measure_batch(&gpu, a, &w, GNS_LN);
        const auto same = [&](TensorKind kind) {
            const Tensor *t = model_tensor(&w.model, kind, 1);
            return memcmp(coarse.grad + t->offset, all.grad + t->offset, t->count * sizeof(float)) == 0;
        };
        CHECK((coarse.loss == all.loss) == of_gradient, "%s: loss %.9g and %.9g", fp8_site_names[s], coarse.loss,
              all.loss);
        CHECK(memcmp(coarse.grad, all.grad, bytes) != 0, "the exponent of %s does nothing", fp8_site_names[s]);
        if (of_gradient)
            CHECK(!same(behind[i]) && same(own[i]) == (type == DTYPE_FP8), "the exponent of %s", fp8_site_names[s]);
        exponents_begin(&w);
        exponents[at] = k[at];
        const Outcome alone = measure_batch(&gpu, a, &w, GNS_LN);
        CHECK(memcmp(alone.grad, unrounded.grad, bytes) == 0 && alone.loss == unrounded.loss, "%s rounds alone",
              fp8_site_names[s]);
    }
    fp8 = DTYPE_FP32;
}

static void test_fp8_each_site(void) {
    if (!fp8_runs(DTYPE_FP8, &cases[2])) SKIP("only Hopper has fp8, and only in bf16");
    each_site(DTYPE_FP8, &cases[2]);
    each_site(DTYPE_FP8_DW, case_for_dw);
}

// fp8-dw has fp8's loss and amax, and fp8's gradients except the rounded weight gradients. Each site of the last block
// is unset in turn. Each engine alternates between two batches, so that a read of a stale copy fails.
static void test_fp8_dw_unset(void) {
    static const TensorKind matrices[] = {QKV_W, PROJ_W, FC_W, FCPROJ_W};
    if (!fp8_runs(DTYPE_FP8_DW, case_for_dw)) SKIP("only Hopper has fp8, and only in bf16");
    for (const Case *c : {case_for_dw, &cases[9]}) { // T = 144 keeps dfc in bf16 and e4m3; T = 1024 only in e4m3
        World w(c, 2);
        Engine *engine[2];
        for (int i = 0; i < 2; i++) fp8 = fp8_types[i], engine[i] = engine_of(&gpu, &w);
        const auto measured = [&](int i, int batch) {
            const uint16_t *tokens = w.tokens + (size_t)batch * rows_of(c) * (c->seq_len + 1);
            return measure(&gpu, engine[i], &w, tokens, rows_of(c), c->micro_batch, GNS_EXACT);
        };
        exponents_begin(&w);
        exponents_next(measured(0, 0).amax);
        const Array<int8_t> k = exponents;
        for (int s = -1; s < FP8_SITES; s++) {
            const int x = s - FP8_LN1, dy = FP8_DQKV - s, weight = s - FP8_QKV_WEIGHT, last = c->config.layers - 1;
            const int unset = s < 0 ? -1 : s < FP8_DFCPROJ ? x : s < FP8_QKV_WEIGHT ? dy : weight;
            const char *what = s < 0 ? "nothing" : fp8_site_names[s];
            exponents = k;
            if (s >= 0) exponents[last * FP8_ENTRIES + s] = FP8_UNSET;
            const Outcome a = measured(0, s & 1), b = measured(1, s & 1);
            CHECK(a.loss == b.loss, "%s, %s unset: loss %.9g and %.9g", c->name, what, a.loss, b.loss);
            CHECK(memcmp(a.amax, b.amax, k.size() * sizeof(float)) == 0, "%s, %s unset: amax", c->name, what);
            for (int i = 0; i < w.model.tensor_count; i++) {
                const Tensor *t = &w.model.tensors[i];
                const bool alone = t->layer == last && unset >= 0 && t->kind == matrices[unset];
                const bool rounds = t->layer >= 0 && t->dimensions == 2 && !alone;
                const float *of_a = a.grad + t->offset, *of_b = b.grad + t->offset;
                const bool same = memcmp(of_a, of_b, t->count * sizeof(float)) == 0;
                const double cosine = cosine_of(of_a, of_b, t->count);
                CHECK(cosine >= 0.99, "%s, %s unset: gradient of %s, cosine %.5f", c->name, what, t->name, cosine);
                if (t->kind == QKV_B || t->kind == FC_B) continue; // fp8-dw sums them in another order
                CHECK(same != rounds && (a.example_sq[i] == b.example_sq[i]) == same, "%s, %s unset: gradient of %s",
                      c->name, what, t->name);
            }
        }
    }
    fp8 = DTYPE_FP32;
}

// A step after an update copies the new weights, so its bits equal a fresh engine's.
static void test_fp8_after_update(void) {
    const Case *c = case_for_dw;
    if (!fp8_runs(DTYPE_FP8, c)) SKIP("only Hopper has fp8, and only in bf16");
    for (const Dtype type : fp8_types) {
        World w(c, 1);
        UpdateConfig update = update_config(c, 1);
        update.lr = 4e-3; // changes most weights by a tenth; neighbours in e4m3 differ by 6 to 12%
        fp8 = type;
        exponents_begin(&w);
        Engine *a = engine_of(&gpu, &w);
        exponents_next(measure_batch(&gpu, a, &w, GNS_LN).amax);
        measure_batch(&gpu, a, &w, GNS_LN); // copies the old weights
        CALL_OK(gpu.update(a, all_of(&w.model), &update, &e));
        const Outcome x = measure_batch(&gpu, a, &w, GNS_LN);
        CALL_OK(gpu.store(a, STATE_PARAM, all_of(&w.model), w.param, &e));
        Engine *b = engine_of(&gpu, &w);
        const Outcome y = measure_batch(&gpu, b, &w, GNS_LN);
        check_same_outcome(&w, &x, &y, "fp8 after an update");
        CHECK(memcmp(x.amax, y.amax, x.amax.size() * sizeof(float)) == 0, "other amax");
    }
    fp8 = DTYPE_FP32;
}

// If a micro-batch does not fit, the error names a remedy.
static void test_memory(void) {
    Error e = {};
    Model model;
    ModelConfig config = {0, 0, 0, 50257, 1024};
    CHECK(model_preset(&config, "gpt2-124M"), "preset");
    CALL_OK(model_create(&model, &config, &e));
    Engine *engine = NULL;
    const EngineConfig huge = {.model = &model, .micro_batch = 4096, .seq_len = 1024};
    CHECK_ERROR(engine_create(&cuda_engine, &engine, &huge, &e), &e, ERR_MEMORY, "--micro-batch 4096");
    CHECK(engine == NULL, "no engine");
    CHECK(strstr(e.hint, "--micro-batch ") && strstr(e.hint, "would fit"), "hint: %s", e.hint);
    printf("  %s. %s\n", e.what, e.hint);
    model_destroy(&model);
}

int main(int argc, char **argv) {
    engine_test_begin("test_engine_bits_cuda", argc, argv);
    if (!small) steps = 5; // enough: a difference in bits appears at once
    RUN(test_fp8, test_fp8_each_site, test_fp8_after_update, test_same_bits_fp8);
    if (!small) RUN(test_fp8_dw_unset, test_filled_memory_fp8);
    RUN(test_same_bits, test_inference);
    if (!small) RUN(test_filled_memory); // not under compute-sanitizer: see gpu_check.sh
    if (!small) RUN(test_accumulation);
    if (!small) RUN(test_tuning); // runs cuBLASLt's kernels, not ours
    RUN(test_ranges, test_hash);
    if (!small) RUN(test_store_beside_step); // not under compute-sanitizer, which waits for every kernel
    RUN(test_overflow);
    if (!small) RUN(test_memory);
    return test_summary();
}
