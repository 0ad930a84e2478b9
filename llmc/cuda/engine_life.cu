// engine_life: creates and destroys the CUDA engine; describes the device. Device memory is one allocation, in which
// buffers of different phases of a step overlap. One layout serves --dry-run and allocation, so the plan is exact.
#include "model/shard.h"
#include "model/arena.h"
#include "cuda/attention.cuh"
#include "cuda/embedding.cuh"
#include "cuda/engine.cuh"
#include "cuda/gelu.cuh"
#include "cuda/layernorm.cuh"
#include "cuda/linear_sm90.cuh"
#include "cuda/muon.cuh"
#include "cuda/sm90.cuh"
#include "model/cuda_sizes.h"

#include <assert.h>
#include <string.h>

// ---- Buffers and the phases that need them --------------------------------------------------------------------------

enum { FORWARD, HEAD, BACKWARD, UPDATE };

// Cuts the micro-batch into equal chunks of at most CUDA_HEAD_BYTES of logits. A step of d12 is 0.5% faster with chunks
// of 16k rows than with 8k or 4k, and 2% slower with 2k.
int engine_head_examples(const EngineConfig *config) {
    size_t one = (size_t)config->seq_len * config->model->vocab_padded * sizeof(real);
    int rows = own_rows_most(config), most = (int)size_min(size_max(CUDA_HEAD_BYTES / one, 1), rows);
    int chunks = (rows + most - 1) / most;
    return (rows + chunks - 1) / chunks;
}

// True if all widths of a block's products are multiples of `multiple`.
static bool widths_are(const EngineConfig *c, int multiple) {
    return c->model->config.channels % multiple == 0 && attention_shape(c, 1, 1).C() % multiple == 0 &&
           c->model->mlp_width % multiple == 0;
}

bool engine_fuses(const Engine *engine) {
    return engine->pairs.count > 0 && widths_are(&engine->config, WEIGHT_GRADIENT_MULTIPLE);
}

// Largest workspace of weight_gradient for B examples.
static size_t weight_gradient_bytes(const Engine *engine, int B) {
    const EngineConfig *c = &engine->config;
    const int T = c->seq_len, C = c->model->config.channels, A = attention_shape(c, B, T).C();
    const int F = (int)c->model->mlp_width, Vp = (int)c->model->vocab_padded, head = min(B, engine_head_examples(c));
    size_t most = 0;
    for (WeightGradientShape s :
         {WeightGradientShape{B, T, A, C}, {B, T, C, 3 * A}, {B, T, C, F}, {B, T, F, C}, {head, T, Vp, C}})
        for (int e4m3 = 0; e4m3 <= (c->dtype == DTYPE_FP8_DW); e4m3++) {
            s.e4m3 = e4m3;
            most = size_max(most, weight_gradient_workspace_bytes(s, engine->pairs.count));
        }
    return most;
}

// Scratch for all matrices of one shape, at most 256 MiB: larger batches are no faster.
size_t engine_muon_bytes(const EngineConfig *config) {
    const int C = config->model->config.channels, L = config->model->config.layers;
    const size_t one = muon_scratch_bytes(1, C, 4 * C), all = muon_scratch_bytes(4 * L, C, C);
    return size_max(one, size_min(all, (size_t)256 << 20));
}

// Scratch of head_exponentials (train_gpt2.cu).
static size_t head_bytes(const EngineConfig *c) {
    const size_t rows = (size_t)engine_head_examples(c) * c->seq_len;
    return REAL_DTYPE == DTYPE_BF16 ? rows * (2 + linear_sm90_tiles((int)c->model->vocab_padded)) * sizeof(float) : 0;
}

// Returns the largest scratch of any kernel for 1 to micro_batch rows: fewer rows may need more.
static size_t scratch_bytes(const Engine *engine) {
    const EngineConfig *config = &engine->config;
    int T = config->seq_len, C = config->model->config.channels, own = own_rows_most(config);
    size_t most = size_max(reduce_squares_workspace_bytes(config->model->tensor_count), head_bytes(config));
    if (config->optimizer == OPTIMIZER_LAMB)
        most = size_max(most, optimizer_trust_workspace_bytes(config->model->tensor_count));
    for (int B = 1; B <= config->micro_batch; B++) {
        most = size_max(most, attention_workspace_bytes(attention_shape(config, B, T)));
        if (B <= own) most = size_max(most, embedding_workspace_bytes(B, T, C));
        if (engine_fuses(engine)) most = size_max(most, weight_gradient_bytes(engine, B));
        if (config->gns == GNS_EXACT) most = size_max(most, reduce_examples_workspace_bytes(B));
    }
    return most;
}

// Returns the bytes for a block's column gradients: two LayerNorms, biases of fc and qkv.
static size_t columns_bytes(const Engine *engine) {
    const EngineConfig *config = &engine->config;
    int T = config->seq_len, C = config->model->config.channels, F = (int)config->model->mlp_width;
    size_t most = 0;
    for (int B = 1; B <= config->micro_batch; B++) {
        const AttentionShape s = attention_shape(config, B, T);
        const auto pass = [&](int out) { // either of two kernels sums the columns of dwide: take the larger size
            return size_max(bias_backward_bytes(B, T, out), weight_gradient_column_bytes({B, T, C, out}));
        };
        const size_t fc = size_max(pass(F), linear_sm90_column_bytes(B * T, T, F)), qkv = pass(3 * s.C());
        const size_t rounded = config->dtype == DTYPE_FP8_DW ? fp8_column_bytes(B, T, 3 * C) : 0;
        const int own = (int)own_rows(config, B).count; // every B is tried: fewer rows may need more
        const size_t norm = own ? layernorm_backward_bytes(own, T, C) : 0;
        most = size_max(most, 2 * norm + fc + size_max(qkv, rounded));
    }
    return most;
}

#define ADD(what, pointer, n, from, to)                                                                                \
    arena_add(a, (what), (void **)&(pointer), (size_t)(n) * sizeof(*(pointer)), (from), (to))

static const char *const moments_of[] = {"AdamW moments, fp32", "LAMB moments, fp32", "Muon, AdamW moments, fp32"};
static_assert(sizeof moments_of / sizeof *moments_of == OPTIMIZERS, "a name for each");

static void layout_state(Engine *engine, Arena *a) {
    const Model *model = engine->config.model;
    const bool rounded = sizeof(real) < sizeof(float), inference = engine->config.inference;
    const bool lamb = engine->config.optimizer == OPTIMIZER_LAMB;
    const bool apart = rounded || engine->config.shard_weights; // master weights are a separate array
    const char *working = "working weights, " REAL_NAME;
    size_t n = model->flat_count, owned = shard_elements(&engine->config);
    if (!apart) ADD("master weights, fp32", engine->param, n, FORWARD, UPDATE);
    else ADD(working, engine->weight, shard_slotted_elements(model, engine->config.shard_weights), FORWARD, UPDATE);
    if (apart && !inference) ADD("master weights, fp32", engine->param, owned, FORWARD, UPDATE);
    if (rounded && engine->config.shard_weights) ADD(working, engine->own_weight, owned, FORWARD, UPDATE);
    ADD("small tables", engine->stats, stats_count(&engine->config), FORWARD, UPDATE);
    ADD("small tables", engine->grad_scale, 1, FORWARD, UPDATE);
    ADD("small tables", engine->ticket, 1, FORWARD, UPDATE);
    ADD("small tables", engine->segment, model->tensor_count, FORWARD, UPDATE);
    ADD("small tables", engine->rule, n / DECAY_GRANULE, FORWARD, UPDATE);
    ADD("small tables", engine->tensor, lamb ? n / DECAY_GRANULE : 0, FORWARD, UPDATE);
    ADD("small tables", engine->trust, lamb ? 2 * model->tensor_count : 0, FORWARD, UPDATE);
    ADD("small tables", engine->exponent_there, engine_sites(&engine->config), FORWARD, UPDATE);
    arena_add(a, "matmul workspace", &engine->matmul_scratch, MATMUL_WORKSPACE_BYTES, FORWARD, UPDATE);
    if (inference) return;
    const size_t sums = engine->config.sources * model->ln_parameters;
    if (sums) ADD("sums by source, fp32", engine->source_sum, sums, FORWARD, UPDATE);
    ADD("gradients, fp32", engine->grad, shard_slotted_elements(model, engine->config.shard_grads), FORWARD, UPDATE);
    if (engine->config.shard_grads) ADD("gradients, fp32", engine->grad_sum, owned, FORWARD, UPDATE);
    ADD(moments_of[engine->config.optimizer], engine->moment1, owned, FORWARD, UPDATE);
    ADD(moments_of[engine->config.optimizer], engine->moment2, owned, FORWARD, UPDATE);
}

// Returns the distance in elements between two blocks' slices of an activation. Slices are aligned.
static size_t slice_stride(size_t count) { return round_up(count, ARENA_ALIGNMENT / sizeof(real)); }

// Calls f(member of Block, number of blocks that keep it, elements per block) for every activation.
template <typename F> static void each_activation(const EngineConfig *config, F f) {
    const ModelConfig *m = &config->model->config;
    const AttentionShape s = attention_shape(config, config->micro_batch, config->seq_len);
    size_t N = (size_t)own_rows_most(config) * s.T, all = (size_t)s.B * s.T, C = m->channels, L = m->layers;
    size_t A = s.C(), wide = config->model->mlp_width;
    size_t x = config->inference ? 1 : L, rest = config->recompute == RECOMPUTE_BLOCK ? 1 : x;
    f(&Block::x, x, N * C);
    f(&Block::ln1, rest, all * C);
    f(&Block::mean1, rest, N);
    f(&Block::rstd1, rest, N);
    f(&Block::qkv, config->inference && config->micro_batch == 1 ? L : rest, all * 3 * A);
    f(&Block::attention, rest, all * A);
    f(&Block::lse, rest, all * s.NH);
    f(&Block::x_mid, rest, N * C);
    f(&Block::ln2, rest, all * C);
    f(&Block::mean2, rest, N);
    f(&Block::rstd2, rest, N);
    f(&Block::gelu, config->recompute == RECOMPUTE_NONE ? x : 1, all * wide);
    f(&Block::slope, config->recompute == RECOMPUTE_NONE ? x : 1, all * wide);
    f(&Block::fc, config->recompute == RECOMPUTE_GELU ? x : 0, all * wide);
}

static void layout_activations(Engine *engine, Arena *a) {
    const EngineConfig *c = &engine->config;
    size_t N = (size_t)own_rows_most(c) * c->seq_len, all = (size_t)c->micro_batch * c->seq_len;
    size_t C = c->model->config.channels;
    const char *what = "activations";
    each_activation(c, [&](auto member, size_t kept, size_t count) {
        ADD(what, engine->base.*member, kept * slice_stride(count), FORWARD, BACKWARD);
    });
    ADD(what, engine->x_final, N * C, FORWARD, BACKWARD);
    ADD(what, engine->lnf, N * C, FORWARD, HEAD);
    ADD(what, engine->meanf, N, FORWARD, BACKWARD);
    ADD(what, engine->rstdf, N, FORWARD, BACKWARD);
    ADD(what, engine->tokens, 2 * c->micro_batch + (c->document_mask ? 3 : 1) * all, FORWARD, BACKWARD);
    ADD(what, engine->loss, N, HEAD, BACKWARD);
    ADD(what, engine->smoothed, c->label_smoothing > 0 && !c->inference ? N : 0, HEAD, BACKWARD);
    if (engine_sites(c)) {
        const size_t blocks = c->shard_weights ? 1 : c->model->config.layers;
        const size_t wte = c->fp8_head ? c->model->vocab_padded * C : 0;
        ADD("copies in e4m3", engine->copy_weight, blocks * 24 * C * C + wte, FORWARD, BACKWARD);
        ADD("copies in e4m3", engine->copy_low_weight, blocks * 4 * C * FP8_GROUPS, FORWARD, BACKWARD);
        ADD("copies in e4m3", engine->copy_low, N * FP8_GROUPS, FORWARD, BACKWARD);
        ADD("copies in e4m3", engine->copy_x, N * C, FORWARD, BACKWARD);
        ADD("copies in e4m3", engine->copy_wide, N * 4 * C, FORWARD, BACKWARD);
        ADD("copies in e4m3", engine->copy_branch, N * C, BACKWARD, BACKWARD);
        if (c->dtype == DTYPE_FP8_DW) ADD("copies in e4m3", engine->copy_transposed, N * 5 * C, BACKWARD, BACKWARD);
    }
}

static void layout_scratch(Engine *engine, Arena *a) {
    const EngineConfig *c = &engine->config;
    size_t N = (size_t)own_rows_most(c) * c->seq_len, all = (size_t)c->micro_batch * c->seq_len;
    size_t C = c->model->config.channels, A = attention_shape(c, 1, 1).C();
    const bool is_cut = tensor_ranks(c) > 1;
    size_t head_rows = (size_t)engine_head_examples(c) * c->seq_len;
    const char *what = "scratch of the step";
    if (is_cut) // all rows of a product or gradient, then other ranks' partial sums of this rank's rows
        ADD(what, engine->exchange, all * C + (tensor_ranks(c) - 1) * N * C, FORWARD,
            c->inference ? FORWARD : BACKWARD);
    ADD(what, engine->delta, N * C, FORWARD, c->recompute == RECOMPUTE_BLOCK ? BACKWARD : FORWARD);
    ADD(what, engine->logits, size_max(head_rows, 2) * c->model->vocab_padded, HEAD, HEAD); // 2: one row of fp32
    arena_add(a, what, &engine->scratch, c->inference ? head_bytes(c) : scratch_bytes(engine), HEAD, UPDATE);
    if (c->inference) return;
    ADD(what, engine->dx, N * C, BACKWARD, BACKWARD);
    ADD(what, engine->dy, N * C, HEAD, BACKWARD);
    const size_t behind = is_cut || c->dropout.below ? ARENA_ALIGNMENT : 0; // aligns dattention (train_gpt2.cu)
    ADD(what, engine->dwide, all * size_max(c->model->mlp_width, 4 * A) + behind, BACKWARD, BACKWARD);
    arena_add(a, what, &engine->columns.memory, columns_bytes(engine), BACKWARD, BACKWARD);
    if (c->step_rows) ADD(what, engine->ln_rows, own_rows_most(c) * c->model->ln_parameters, BACKWARD, BACKWARD);
    ADD(what, engine->sorted, 4 * N, BACKWARD, BACKWARD);
    if (c->optimizer == OPTIMIZER_MUON)
        arena_add(a, "Muon's products", &engine->muon, engine_muon_bytes(c), UPDATE, UPDATE);
    if (c->gns != GNS_EXACT) return;
    what = "exact per-example norms";
    if (!engine_fuses(engine)) ADD(what, engine->example_grad, model_tensor_largest(c->model), FORWARD, BACKWARD);
    ADD(what, engine->head_row_at, engine_head_examples(c) * c->model->vocab_padded, HEAD, HEAD);
    ADD(what, engine->head_at_token, N * C, FORWARD, BACKWARD);
}

// Fills an empty arena with all buffers of the configuration; returns its bytes.
static size_t engine_layout(Engine *engine, Arena *a) {
    layout_state(engine, a);
    layout_activations(engine, a);
    layout_scratch(engine, a);
    return arena_plan(a);
}

void cuda_plan_memory(const EngineConfig *config, MemoryPlan *plan) {
    Engine sketch = {};
    Arena arena = {};
    sketch.config = *config;
    sketch.pairs.count = weight_gradient_clusters();
    if (config->plan_fused && !sketch.pairs.count) sketch.pairs.count = HOPPER_MULTIPROCESSORS / 2;
    size_t own = 0;
    memset(plan, 0, sizeof *plan);
    plan->total = engine_layout(&sketch, &arena);
    for (int i = 0; i < arena.count; i++) {
        const ArenaBuffer *b = &arena.buffer[i];
        if (b->from != FORWARD || b->to < BACKWARD) continue; // shares memory; counted in the last item
        int k = 0;
        while (k < plan->count && strcmp(plan->item[k].what, b->what) != 0) k++;
        if (k == plan->count) plan->item[plan->count++].what = b->what;
        plan->item[k].bytes += b->bytes;
        own += b->bytes;
    }
    plan->item[plan->count].what = "logits and gradients, sharing memory";
    plan->item[plan->count++].bytes = plan->total - own;
}

// Writes the options that fit into `available` bytes: the largest micro-batch that fits, with the least recomputation.
static void suggest_fit(const EngineConfig *config, size_t available, char *out, size_t bytes) {
    MemoryPlan plan;
    for (int B = config->micro_batch; B >= 1; B = B / 2)
        for (int r = config->recompute; r <= (config->inference ? config->recompute : RECOMPUTE_BLOCK); r++) {
            EngineConfig smaller = *config;
            smaller.micro_batch = B;
            smaller.recompute = (Recompute)r;
            cuda_plan_memory(&smaller, &plan);
            if (plan.total > available) continue;
            int n = snprintf(out, bytes, "--micro-batch %d", B);
            if (r != config->recompute) snprintf(out + n, bytes - n, " --recompute %s", recompute_names[r]);
            snprintf(out + strlen(out), bytes - strlen(out), " would fit (%.1f GiB)", (double)plan.total / (1 << 30));
            return;
        }
    snprintf(out, bytes, "not even one row fits: choose a smaller model or a shorter --seq-len");
}

// Allocates the device memory and sets the pointers to its buffers.
static int memory_take(Engine *engine, Error *e) {
    Arena arena = {};
    size_t bytes = engine_layout(engine, &arena), available = 0, all = 0;
    CUDA_TRY(cudaMemGetInfo(&available, &all), e);
    size_t leave = engine->config.leave + CUDA_LATER_BYTES, room = available > leave ? available - leave : 0;
    cudaError_t status = bytes > room ? cudaErrorMemoryAllocation : cudaMalloc(&engine->memory, bytes);
    if (status == cudaErrorMemoryAllocation) {
        char fit[128];
        (void)cudaGetLastError(); // clears the failure, which the next launch would report
        suggest_fit(&engine->config, room, fit, sizeof fit);
        FAIL(e, ERR_MEMORY, NULL,
             "out of GPU memory: --micro-batch %d of %d tokens needs %.1f GiB, %.1f of the %s's %.1f are free%s",
             engine->config.micro_batch, engine->config.seq_len, (double)bytes / (1 << 30), (double)room / (1 << 30),
             engine->device.properties.name, (double)all / (1 << 30),
             engine->config.leave ? ", NCCL's share apart" : "");
        return error_hint(e, "%s", fit);
    }
    CUDA_TRY(status, e);
    arena_place(&arena, engine->memory);
    if (!engine->weight) engine->weight = (real *)engine->param;
    if (!engine->grad_sum) engine->grad_sum = engine->grad;
    each_activation(&engine->config, [&](auto member, size_t kept, size_t count) { // kept 1: blocks share it; 0: NULL
        for (int l = 0; l < engine->config.model->config.layers; l++)
            engine->block[l].*member = engine->base.*member + (kept > 1 ? l * slice_stride(count) : 0);
    });
    return 0;
}

// ---- Creating, destroying and describing an engine ------------------------------------------------------------------

static int tables_load(Engine *engine, Error *e) {
    const Model *model = engine->config.model;
    const size_t tensors = model->tensor_count, granules = model->flat_count / DECAY_GRANULE;
    const size_t bytes = tensors * sizeof(Range) + granules * (sizeof(uint16_t) + sizeof(UpdateRule));
    Range *segment; // three tables: each tensor's segment, each granule's segment number, each granule's rule
    TRY(memory_alloc_zero((void **)&segment, bytes, "tables of tensors", e));
    uint16_t *tensor = (uint16_t *)(segment + tensors);
    UpdateRule *rule = (UpdateRule *)(tensor + granules);
    size_t s = 0;
    for (size_t i = 0; i < 2 * tensors; i++) { // whole tensors, then cut ones
        const Tensor *t = &model->tensors[i % tensors];
        const bool muon = engine->config.optimizer == OPTIMIZER_MUON && tensor_muon_matrices(t);
        if (tensor_is_cut(t) != (i >= tensors)) continue;
        assert(t->offset % DECAY_GRANULE == 0);
        segment[s] = tensor_range(t);
        for (size_t k = t->offset / DECAY_GRANULE; k * DECAY_GRANULE < segment[s].end; k++) {
            tensor[k] = (uint16_t)s;
            rule[k] = muon ? RULE_MUON : t->dimensions < 2 ? RULE_PLAIN : RULE_DECAY;
        }
        s++;
    }
    int code = copy_in(engine, engine->segment, segment, tensors * sizeof *segment, e);
    if (!code) code = copy_in(engine, engine->rule, rule, granules * sizeof *rule, e);
    if (!code && engine->tensor) code = copy_in(engine, engine->tensor, tensor, granules * sizeof *tensor, e);
    if (!code) code = CUDA_CALL(cudaStreamSynchronize(engine->stream), e);
    memory_free(segment);
    return code;
}

int cuda_check_dtype(Dtype dtype, Error *e) {
    if (dtype == REAL_DTYPE || (dtype_is_fp8(dtype) && FP8_BUILT)) return 0;
    const char *other = dtype_is_fp8(dtype) ? "BF16" : "BF16, FP16 or FP32";
    FAIL(e, ERR_USAGE, NULL, "--dtype %s: this program was built for %s", dtype_names[dtype], REAL_NAME);
    return error_hint(e, "leave --dtype out, or build another: make train_gpt2cu PRECISION=%s", other);
}

static int engine_open(Engine *engine, Error *e) {
    const EngineConfig *c = &engine->config;
    TRY(cuda_check(c, e));
    TRY(device_open(&engine->device, e));
    if (dtype_is_fp8(c->dtype) && !sm90_runs())
        return FAIL(e, ERR_USAGE, "use --dtype bf16; on Hopper, build with CUDA_ARCH=90a",
                    "--dtype %s needs a Hopper GPU (H100, H200): this is a %s", dtype_names[c->dtype],
                    engine->device.properties.name);
    TRY(weight_gradient_pairs(&engine->pairs, e));
    TRY(memory_alloc_zero((void **)&engine->block, c->model->config.layers * sizeof(Block), "blocks", e));
    TRY(memory_alloc_zero((void **)&engine->matmul, sizeof(Matmul), "matmul plans", e));
    TRY(memory_alloc((void **)&engine->seen, c->seq_len * sizeof *engine->seen, "tokens", e));
    TRY(memory_take(engine, e));
    CUDA_TRY(cudaStreamCreateWithFlags(&engine->stream, cudaStreamNonBlocking), e);
    CUDA_TRY(cudaStreamCreateWithFlags(&engine->store_stream, cudaStreamNonBlocking), e);
    CUDA_TRY(cudaEventCreateWithFlags(&engine->state_ready, cudaEventDisableTiming), e);
    TRY(matmul_create(engine->matmul, engine->matmul_scratch, engine->stream, e));
    for (int i = 0; i < TOKEN_SLOTS; i++) {
        const size_t B = c->micro_batch, N = B * c->seq_len;
        CUDA_TRY(cudaMallocHost(&engine->staged[i], (2 * B + 3 * N) * sizeof(uint16_t)), e);
        CUDA_TRY(cudaMallocHost(&engine->staged_sorted[i], 8 * N * sizeof(uint32_t)), e);
        CUDA_TRY(cudaEventCreateWithFlags(&engine->sent[i], cudaEventDisableTiming), e);
    }
    CUDA_TRY(cudaMallocHost(&engine->logits_host, c->model->config.vocab * sizeof(float)), e);
    CUDA_TRY(cudaMallocHost(&engine->stats_host, (stats_count(c) + 1) * sizeof(double)), e);
    CUDA_TRY(cudaEventCreateWithFlags(&engine->stats_there, cudaEventDisableTiming), e);
    if (engine_sites(c)) {
        CUDA_TRY(cudaMallocHost(&engine->exponent, engine_sites(c)), e);
        memset(engine->exponent, FP8_UNSET, engine_sites(c));
        TRY(copy_in(engine, engine->exponent_there, engine->exponent, engine_sites(c), e));
        engine->measures = true;
    }
    engine->fused_linear = sm90_runs() && widths_are(c, LINEAR_SM90_MULTIPLE);
    CUDA_TRY(cudaMemsetAsync(engine->ticket, 0, sizeof *engine->ticket, engine->stream), e);
    TRY(tables_load(engine, e));
    TRY(engine_state_clear(engine, e));
    return CUDA_CALL(cudaStreamSynchronize(engine->stream), e);
}

void cuda_destroy(Engine *engine) {
    if (engine->stream) cudaStreamSynchronize(engine->stream);
    if (engine->exponent) cudaFreeHost(engine->exponent);
    if (engine->stats_there) cudaEventDestroy(engine->stats_there);
    if (engine->stats_host) cudaFreeHost(engine->stats_host);
    if (engine->logits_host) cudaFreeHost(engine->logits_host);
    for (int i = 0; i < TOKEN_SLOTS; i++) {
        if (engine->sent[i]) cudaEventDestroy(engine->sent[i]);
        if (engine->staged_sorted[i]) cudaFreeHost(engine->staged_sorted[i]);
        if (engine->staged[i]) cudaFreeHost(engine->staged[i]);
    }
    if (engine->matmul) matmul_destroy(engine->matmul);
    if (engine->state_ready) cudaEventDestroy(engine->state_ready);
    if (engine->store_stream) cudaStreamDestroy(engine->store_stream);
    if (engine->stream) cudaStreamDestroy(engine->stream);
    if (engine->memory) cudaFree(engine->memory);
    memory_free(engine->seen);
    memory_free(engine->matmul);
    memory_free(engine->block);
    memory_free(engine);
}

int cuda_create(Engine **out, const EngineConfig *config, Error *e) {
    assert(config->seq_len <= config->model->config.context && config->micro_batch > 0);
    assert((size_t)config->micro_batch * config->seq_len <= MICRO_BATCH_TOKENS_MAX);
    TRY(memory_alloc_zero((void **)out, sizeof(Engine), "the engine", e));
    (*out)->config = *config;
    if (!dtype_is_fp8(config->dtype)) (*out)->config.dtype = REAL_DTYPE;
    (*out)->loss_scale = 1;
    int code = engine_open(*out, e);
    if (!code) return 0;
    cuda_destroy(*out);
    *out = NULL;
    return code;
}

void cuda_describe(const Engine *engine, char *out, size_t bytes) {
    const cudaDeviceProp *d = &engine->device.properties;
    const Dtype type = engine->config.dtype;
    const char *e4m3 = type == DTYPE_FP8_DW ? " with products and weight gradients in e4m3"
                       : dtype_is_fp8(type) ? " with products in e4m3"
                                            : "";
    snprintf(out, bytes, "%s, %s%s, %d multiprocessors, %.0f GiB, %s kernels", d->name, REAL_NAME, e4m3,
             d->multiProcessorCount, (double)d->totalGlobalMem / (1 << 30),
             engine->pairs.count ? "Hopper's" : "general");
}

void cuda_device(const EngineConfig *config, bool, EngineDevice *out) { // plan/devices.h has the speeds
    Device device;
    Engine sketch = {};
    Error none_here;
    memset(out, 0, sizeof *out);
    out->value_bytes = sizeof(real);
    out->head_bytes = CUDA_HEAD_BYTES;
    if (device_open(&device, &none_here)) return;
    snprintf(out->name, sizeof out->name, "%s", device.properties.name);
    out->memory_bytes = (double)device.properties.totalGlobalMem;
    sketch.config = *config;
    sketch.pairs.count = weight_gradient_clusters();
    out->exact_is_fused = engine_fuses(&sketch);
}
