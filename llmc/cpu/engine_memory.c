// The CPU engine's memory: one allocation. `layout` both plans it (--dry-run) and places it, so plans are exact.
#include "cpu/engine_cpu.h"
#include "cpu/layers.h"
#include "cpu/value.h"
#include "model/shard.h"

#include <omp.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int engine_thread_count(const EngineConfig *config) {
    return config->threads > 0 ? config->threads : omp_get_max_threads();
}

// Returns how many tokens of a full micro-step this rank owns (engine.h, "own rows").
static size_t own_tokens(const EngineConfig *c) {
    return (size_t)own_rows(c, c->micro_batch).count * (size_t)c->seq_len;
}

int engine_head_rows(const EngineConfig *config) {
    // Use fp32's size for bf16, too, so that all types sum over rows in the same order.
    size_t rows = ENGINE_HEAD_BYTES / sizeof(float) / (size_t)config->model->vocab_padded;
    return (int)size_min(own_tokens(config), size_max(rows, 64));
}

// Reserves arrays one after another, and counts the bytes of each part of the plan. base NULL: only counts.
typedef struct {
    char *base;
    size_t used;
    MemoryPlan plan;
} Region;

static void *reserve(Region *a, size_t bytes) {
    void *p = a->base ? a->base + a->used : NULL;
    a->used += round_up(bytes, 64);
    return p;
}
#define RESERVE(pointer, n)        ((pointer) = reserve(a, (size_t)(n) * sizeof *(pointer)))
#define RESERVE_VALUES(pointer, n) ((pointer) = reserve(a, (size_t)(n)*value_bytes(type)))

// Ends a part of the plan: the arrays reserved since the previous part. No-op if there are none.
static void end_part(Region *a, const char *what) {
    if (a->used == a->plan.total) return;
    a->plan.item[a->plan.count].what = what;
    a->plan.item[a->plan.count++].bytes = a->used - a->plan.total;
    a->plan.total = a->used;
}

static void layout_state(Engine *engine, Region *a) {
    static const char *const moments[] = {"AdamW moments", "LAMB moments", "Muon, AdamW moments"};
    _Static_assert(sizeof moments / sizeof *moments == OPTIMIZERS, "a name for each");
    const EngineConfig *c = &engine->config;
    Dtype type = c->dtype;
    RESERVE_VALUES(engine->weight, shard_slotted_elements(c->model, c->shard_weights));
    if (type == DTYPE_FP32 && !c->shard_weights) engine->param = engine->weight;
    else if (!c->inference) RESERVE(engine->param, shard_elements(c));
    end_part(a, "parameters");
    if (c->inference) return;
    engine->grad_sum = RESERVE(engine->grad, shard_slotted_elements(c->model, c->shard_grads));
    if (c->shard_grads) RESERVE(engine->grad_sum, shard_elements(c));
    end_part(a, "gradients");
    RESERVE(engine->moment1, shard_elements(c)), RESERVE(engine->moment2, shard_elements(c));
    end_part(a, moments[c->optimizer]);
}

static void layout_blocks(Engine *engine, Region *a) {
    const EngineConfig *c = &engine->config;
    const Model *m = c->model;
    size_t all = (size_t)c->micro_batch * (size_t)c->seq_len, N = own_tokens(c), C = (size_t)m->config.channels;
    size_t A = m->attention_width, F = m->mlp_width;
    Dtype type = c->dtype;
    RESERVE(engine->block, m->config.layers);
    Block counted, *first = engine->block ? engine->block : &counted;
    for (int l = 0; l < m->config.layers; l++) {
        Block *k = engine->block ? &engine->block[l] : &counted;
        bool own = l == 0 || !c->inference;
        if (l > 0) *k = *first;
        if (l == 0 || (own && c->recompute != RECOMPUTE_BLOCK)) {
            RESERVE_VALUES(k->ln1, all * C), RESERVE(k->mean1, N), RESERVE(k->rstd1, N);
            RESERVE_VALUES(k->qkv, all * 3 * A);
            RESERVE_VALUES(k->attention, all * A), RESERVE(k->lse, all * (size_t)m->heads);
            RESERVE_VALUES(k->x_mid, N * C);
            RESERVE_VALUES(k->ln2, all * C), RESERVE(k->mean2, N), RESERVE(k->rstd2, N);
            RESERVE_VALUES(k->fc, all * F);
        }
        if (!own && c->micro_batch == 1) RESERVE_VALUES(k->qkv, all * 3 * A);
        if (own) RESERVE_VALUES(k->x, N * C);
        if (l == 0 || (own && c->recompute == RECOMPUTE_NONE)) RESERVE_VALUES(k->gelu, all * F);
    }
}

static void layout_activations(Engine *engine, Region *a) {
    const EngineConfig *c = &engine->config;
    size_t all = (size_t)c->micro_batch * (size_t)c->seq_len, N = own_tokens(c);
    size_t C = (size_t)c->model->config.channels, A = c->model->attention_width;
    int tensors = c->model->tensor_count, rows = (int)own_rows(c, c->micro_batch).count;
    Dtype type = c->dtype;
    layout_blocks(engine, a);
    if (tensor_ranks(c) > 1) RESERVE_VALUES(engine->exchange, (all + (size_t)tensor_ranks(c) * N) * C);
    RESERVE_VALUES(engine->x_final, N * C);
    RESERVE_VALUES(engine->lnf, N * C), RESERVE(engine->meanf, N), RESERVE(engine->rstdf, N);
    RESERVE_VALUES(engine->logits, engine_head_rows(c) * c->model->vocab_padded);
    RESERVE(engine->nll, N);
    RESERVE(engine->targets, N);
    if (c->document_mask) RESERVE(engine->position, all);
    RESERVE(engine->seen, c->seq_len);
    if (c->inference) return;
    if (c->label_smoothing > 0) RESERVE(engine->loss, N);
    RESERVE_VALUES(engine->dx, N * C), RESERVE_VALUES(engine->dy, size_max(N * C, all * A));
    // 2 C values (bf16) hold the C floats that embeddings_backward needs
    RESERVE_VALUES(engine->dwide, size_max(2 * C, all * size_max(3 * A, c->model->mlp_width)));
    RESERVE(engine->ln_scratch, layernorm_scratch(rows, c->seq_len, (int)C));
    RESERVE(engine->ln_sq, 2 * rows);
    if (c->step_rows) RESERVE(engine->row, c->step_rows);
    if (c->sources) RESERVE(engine->source_sum, (size_t)c->sources * c->model->ln_parameters);
    RESERVE(engine->grad_sq, tensors), RESERVE(engine->example_sq, tensors);
    if (c->optimizer == OPTIMIZER_LAMB) RESERVE(engine->trust_sq, 2 * tensors);
}

static MemoryPlan layout(Engine *engine, char *base) {
    const EngineConfig *c = &engine->config;
    const ModelConfig *m = &c->model->config;
    size_t T = (size_t)c->seq_len, N = (size_t)c->micro_batch * T, C = (size_t)m->channels, D = C / (size_t)m->heads;
    int threads = engine_thread_count(c);
    Region region = {.base = base}, *a = &region;
    layout_state(engine, a);
    layout_activations(engine, a);
    end_part(a, "activations");
    if (c->gns == GNS_EXACT && !c->inference) {
        RESERVE(engine->example_grad, model_tensor_largest(c->model));
        RESERVE(engine->example_bias_grad, 4 * C);
        RESERVE(engine->head_at_token, own_tokens(c) * C);
    }
    end_part(a, "exact per-example norms");
    if (c->optimizer == OPTIMIZER_MUON && !c->inference) {
        RESERVE(engine->matrix, 4 * C * C), RESERVE(engine->matrix_next, 4 * C * C); // fc and fcproj are the largest
        RESERVE(engine->gram, C * C), RESERVE(engine->poly, C * C);
    }
    end_part(a, "Muon's products");
    if (engine->fp8) {
        RESERVE(engine->factor[0], N * 4 * C);
        RESERVE(engine->factor[1], size_max(model_tensor_largest(c->model), engine->fp8_dweight ? N * 4 * C : 0));
        RESERVE(engine->exponents, fp8_sites(engine)), RESERVE(engine->amax, fp8_sites(engine));
    }
    end_part(a, "rounded factors");
    engine->matmul =
        (Matmul){threads, matmul_kernel(c->dtype), matmul_a_block(), reserve(a, matmul_scratch(c->dtype, N))};
    engine->attention = (Attention){
        .threads = threads, .max_T = T, .max_D = D, .first_head = (size_t)c->model->first_head, .type = c->dtype};
    RESERVE(engine->attention.scratch, attention_scratch(threads, T, D));
    end_part(a, "kernel workspaces");
    return region.plan;
}

// Plans the memory of an engine whose arrays are still NULL, and sets its config.
static MemoryPlan plan_engine(Engine *engine, const EngineConfig *config) {
    engine->config = *config;
    engine->fp8 = dtype_is_fp8(config->dtype) && !config->inference;
    engine->fp8_dweight = config->dtype == DTYPE_FP8_DW && !config->inference;
    if (dtype_is_fp8(config->dtype)) engine->config.dtype = DTYPE_FP32;
    return layout(engine, NULL);
}

void cpu_plan_memory(const EngineConfig *config, MemoryPlan *plan) { *plan = plan_engine(&(Engine){0}, config); }

int engine_memory_take(Engine *engine, const EngineConfig *config, Error *e) {
    const MemoryPlan plan = plan_engine(engine, config);
    TRY(memory_alloc((void **)&engine->memory, plan.total, "the engine's memory", e));
    // Ask for huge pages before the memory is touched, since every pass over small pages waits for TLB misses. On a
    // system without huge pages this changes nothing.
    size_t page = (size_t)sysconf(_SC_PAGESIZE),
           skip = round_up((uintptr_t)engine->memory, page) - (uintptr_t)engine->memory;
    if (plan.total > skip) madvise(engine->memory + skip, (plan.total - skip) / page * page, MADV_HUGEPAGE);
    // Clear all parts but the last, the workspaces, since each thread must be the first to touch its workspace.
    memset(engine->memory, 0, plan.total - plan.item[plan.count - 1].bytes);
    layout(engine, engine->memory);
    return 0;
}
