// The CPU engine's memory. The same layout plans (--dry-run) and places, so the plan is never wrong.
#include "model/shard.h"
#include "cpu/engine.h"
#include "cpu/layers.h"

#include <omp.h>
#include <string.h>

int engine_head_rows(const EngineConfig *config) {
    size_t rows = ENGINE_HEAD_BYTES / sizeof(float) / (size_t)config->model->vocab_padded;
    size_t all = (size_t)config->micro_batch * (size_t)config->seq_len;
    return (int)size_min(all, size_max(rows, 64));
}

// Lays out all memory: with base == NULL it only counts. One walk serves the plan and the allocation.
typedef struct {
    char *base;
    size_t used;
} Arena;

static void *arena_take(Arena *a, size_t bytes) {
    void *p = a->base ? a->base + a->used : NULL;
    a->used += round_up(bytes, 64);
    return p;
}
#define TAKE(arena, n) arena_take((arena), (size_t)(n) * sizeof(float))

static void layout_param(Engine *engine, Arena *a) { engine->param = TAKE(a, engine->config.model->flat_count); }

static void layout_grad(Engine *engine, Arena *a) {
    if (engine->config.inference) return;
    engine->grad = TAKE(a, shard_grad_elements(&engine->config));
    engine->grad_sum = engine->config.shard_grads ? TAKE(a, shard_elements(&engine->config)) : engine->grad;
}

static void layout_moments(Engine *engine, Arena *a) {
    if (engine->config.inference) return;
    engine->moment1 = TAKE(a, shard_elements(&engine->config));
    engine->moment2 = TAKE(a, shard_elements(&engine->config));
}

static void layout_block(Block *k, Arena *a, size_t N, size_t C, size_t NH) {
    k->ln1 = TAKE(a, N * C), k->mean1 = TAKE(a, N), k->rstd1 = TAKE(a, N);
    k->qkv = TAKE(a, N * 3 * C);
    k->attention = TAKE(a, N * C), k->lse = TAKE(a, N * NH);
    k->x_mid = TAKE(a, N * C);
    k->ln2 = TAKE(a, N * C), k->mean2 = TAKE(a, N), k->rstd2 = TAKE(a, N);
    k->fc = TAKE(a, N * 4 * C);
}

static void layout_activations(Engine *engine, Arena *a) {
    const ModelConfig *m = &engine->config.model->config;
    int B = engine->config.micro_batch, T = engine->config.seq_len;
    size_t N = (size_t)B * (size_t)T, C = (size_t)m->channels, NH = (size_t)m->heads;
    int L = m->layers;
    engine->block = arena_take(a, sizeof(Block) * (size_t)L);
    Block ignored, *first = engine->block ? engine->block : &ignored;
    for (int l = 0; l < L; l++) {
        Block *k = engine->block ? &engine->block[l] : &ignored;
        bool own = l == 0 || !engine->config.inference;
        if (!own || (l > 0 && engine->config.recompute == RECOMPUTE_BLOCK)) *k = *first;
        else layout_block(k, a, N, C, NH);
        if (!own && B == 1) k->qkv = TAKE(a, N * 3 * C);
        if (own) k->x = TAKE(a, N * C);
        k->gelu = l > 0 && (!own || engine->config.recompute != RECOMPUTE_NONE) ? first->gelu : TAKE(a, N * 4 * C);
    }
    engine->x_final = TAKE(a, N * C);
    engine->lnf = TAKE(a, N * C), engine->meanf = TAKE(a, N), engine->rstdf = TAKE(a, N);
    engine->logits = TAKE(a, (size_t)engine_head_rows(&engine->config) * (size_t)engine->config.model->vocab_padded);
    engine->loss = TAKE(a, N);
    engine->targets = arena_take(a, N * sizeof(uint16_t));
    engine->seen = arena_take(a, (size_t)T * sizeof(uint16_t));
    if (engine->config.inference) return;
    engine->dx = TAKE(a, N * C), engine->dy = TAKE(a, N * C);
    engine->dwide = TAKE(a, N * 4 * C);
    engine->ln_scratch = TAKE(a, layernorm_scratch(B, T, (int)C));
    engine->ln_sq = arena_take(a, 2 * (size_t)B * sizeof(double));
    engine->grad_sq = arena_take(a, (size_t)engine->config.model->tensor_count * sizeof(double));
    engine->rank_sq = arena_take(a, (size_t)engine->config.model->tensor_count * sizeof(double));
    engine->example_sq = arena_take(a, (size_t)engine->config.model->tensor_count * sizeof(double));
}

static void layout_exact(Engine *engine, Arena *a) {
    if (engine->config.gns != GNS_EXACT || engine->config.inference) return;
    size_t N = (size_t)engine->config.micro_batch * (size_t)engine->config.seq_len;
    engine->example_grad = TAKE(a, model_tensor_largest(engine->config.model));
    engine->example_bias_grad = TAKE(a, 4 * (size_t)engine->config.model->config.channels);
    engine->head_at_token = TAKE(a, N * (size_t)engine->config.model->config.channels);
}

static const struct {
    const char *what;
    void (*fill)(Engine *, Arena *);
} layouts[ENGINE_LAYOUTS] = {
    {"parameters", layout_param},
    {"gradients", layout_grad},
    {"AdamW moments", layout_moments},
    {"activations", layout_activations},
    {"exact per-example norms", layout_exact},
};

int engine_thread_count(const EngineConfig *config) {
    return config->threads > 0 ? config->threads : omp_get_max_threads();
}

void cpu_plan_memory(const EngineConfig *config, MemoryPlan *plan) {
    const ModelConfig *m = &config->model->config;
    int threads = engine_thread_count(config);
    memset(plan, 0, sizeof *plan);
    for (int i = 0; i < ENGINE_LAYOUTS; i++) {
        Engine sketch = {.config = *config};
        Arena arena = {0};
        layouts[i].fill(&sketch, &arena);
        if (!arena.used) continue;
        plan->item[plan->count].what = layouts[i].what;
        plan->item[plan->count++].bytes = arena.used;
    }
    plan->item[plan->count].what = "kernel workspaces";
    plan->item[plan->count++].bytes =
        matmul_bytes(threads) + attention_bytes(threads, (size_t)config->seq_len, (size_t)(m->channels / m->heads));
    for (int i = 0; i < plan->count; i++) plan->total += plan->item[i].bytes;
}

int engine_memory_take(Engine *engine, Error *e) {
    for (int i = 0; i < ENGINE_LAYOUTS; i++) {
        Arena arena = {0};
        layouts[i].fill(engine, &arena);
        TRY(memory_alloc_zero(&engine->memory[i], arena.used, "the engine's memory", e));
        arena = (Arena){.base = engine->memory[i]};
        layouts[i].fill(engine, &arena);
    }
    return 0;
}

void engine_memory_free(Engine *engine) {
    for (int i = 0; i < ENGINE_LAYOUTS; i++) memory_free(engine->memory[i]);
}
