// The CPU engine's memory. The same layouts plan (--dry-run) and place: the plan is exact.
#include "cpu/engine.h"
#include "cpu/layers.h"
#include "cpu/muon.h"
#include "cpu/value.h"
#include "model/shard.h"

#include <omp.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int engine_thread_count(const EngineConfig *config) {
    return config->threads > 0 ? config->threads : omp_get_max_threads();
}

int engine_head_rows(const EngineConfig *config) {
    // The rows of fp32 logits for bf16 too, so that sums over rows have the same order.
    size_t rows = ENGINE_HEAD_BYTES / sizeof(float) / (size_t)config->model->vocab_padded;
    size_t all = (size_t)config->micro_batch * (size_t)config->seq_len;
    return (int)size_min(all, size_max(rows, 64));
}

// One allocation, from which arrays are taken in turn. base NULL: they are only counted.
typedef struct {
    char *base;
    size_t used;
} Layout;

static void *take(Layout *a, size_t bytes) {
    void *p = a->base ? a->base + a->used : NULL;
    a->used += round_up(bytes, 64);
    return p;
}
#define TAKE(pointer, n)        ((pointer) = take(a, (size_t)(n) * sizeof *(pointer)))
#define TAKE_VALUES(pointer, n) ((pointer) = take(a, (size_t)(n)*value_bytes(type)))

static void layout_param(Engine *engine, Layout *a) {
    const EngineConfig *c = &engine->config;
    Dtype type = c->dtype;
    TAKE_VALUES(engine->weight, shard_weight_elements(c));
    if (type == DTYPE_FP32 && !c->shard_weights) engine->param = engine->weight;
    else if (!c->inference) TAKE(engine->param, shard_elements(c));
}

static void layout_grad(Engine *engine, Layout *a) {
    if (engine->config.inference) return;
    engine->grad_sum = TAKE(engine->grad, shard_grad_elements(&engine->config));
    if (engine->config.shard_grads) TAKE(engine->grad_sum, shard_elements(&engine->config));
}

static void layout_moments(Engine *engine, Layout *a) {
    if (engine->config.inference) return;
    TAKE(engine->moment1, shard_elements(&engine->config));
    TAKE(engine->moment2, shard_elements(&engine->config));
}

static void layout_block(Block *k, Layout *a, size_t N, size_t C, size_t NH, Dtype type) {
    TAKE_VALUES(k->ln1, N * C), TAKE(k->mean1, N), TAKE(k->rstd1, N);
    TAKE_VALUES(k->qkv, N * 3 * C);
    TAKE_VALUES(k->attention, N * C), TAKE(k->lse, N * NH);
    TAKE_VALUES(k->x_mid, N * C);
    TAKE_VALUES(k->ln2, N * C), TAKE(k->mean2, N), TAKE(k->rstd2, N);
    TAKE_VALUES(k->fc, N * 4 * C);
}

static void layout_blocks(Engine *engine, Layout *a) {
    const EngineConfig *c = &engine->config;
    size_t N = (size_t)c->micro_batch * (size_t)c->seq_len, C = (size_t)c->model->config.channels;
    Dtype type = c->dtype;
    TAKE(engine->block, c->model->config.layers);
    Block counted, *first = engine->block ? engine->block : &counted;
    for (int l = 0; l < c->model->config.layers; l++) {
        Block *k = engine->block ? &engine->block[l] : &counted;
        bool own = l == 0 || !c->inference;
        if (!own || (l > 0 && c->recompute == RECOMPUTE_BLOCK)) *k = *first;
        else layout_block(k, a, N, C, (size_t)c->model->config.heads, type);
        if (!own && c->micro_batch == 1) TAKE_VALUES(k->qkv, N * 3 * C);
        if (own) TAKE_VALUES(k->x, N * C);
        if (l > 0 && (!own || c->recompute != RECOMPUTE_NONE)) k->gelu = first->gelu;
        else TAKE_VALUES(k->gelu, N * 4 * C);
    }
}

static void layout_activations(Engine *engine, Layout *a) {
    const EngineConfig *c = &engine->config;
    size_t N = (size_t)c->micro_batch * (size_t)c->seq_len, C = (size_t)c->model->config.channels;
    int tensors = c->model->tensor_count;
    Dtype type = c->dtype;
    layout_blocks(engine, a);
    TAKE_VALUES(engine->x_final, N * C);
    TAKE_VALUES(engine->lnf, N * C), TAKE(engine->meanf, N), TAKE(engine->rstdf, N);
    TAKE_VALUES(engine->logits, engine_head_rows(c) * c->model->vocab_padded);
    TAKE(engine->nll, N);
    TAKE(engine->targets, N);
    if (c->document_mask) TAKE(engine->position, N);
    TAKE(engine->seen, c->seq_len);
    if (c->inference) return;
    if (c->label_smoothing > 0) TAKE(engine->loss, N);
    TAKE_VALUES(engine->dx, N * C), TAKE_VALUES(engine->dy, N * C);
    TAKE_VALUES(engine->dwide, N * 4 * C);
    TAKE(engine->ln_scratch, layernorm_scratch(c->micro_batch, c->seq_len, (int)C));
    TAKE(engine->ln_sq, 2 * c->micro_batch);
    TAKE(engine->grad_sq, tensors), TAKE(engine->rank_sq, tensors), TAKE(engine->example_sq, tensors);
    if (c->optimizer == OPTIMIZER_LAMB) TAKE(engine->trust_sq, 2 * tensors);
}

static void layout_exact(Engine *engine, Layout *a) {
    const EngineConfig *c = &engine->config;
    if (c->gns != GNS_EXACT || c->inference) return;
    size_t C = (size_t)c->model->config.channels;
    TAKE(engine->example_grad, model_tensor_largest(c->model));
    TAKE(engine->example_bias_grad, 4 * C);
    TAKE(engine->head_at_token, (size_t)c->micro_batch * (size_t)c->seq_len * C);
}

static void layout_muon(Engine *engine, Layout *a) {
    const EngineConfig *c = &engine->config;
    size_t C = (size_t)c->model->config.channels, largest = 4 * C * C; // fc, fcproj
    if (c->optimizer != OPTIMIZER_MUON || c->inference) return;
    TAKE(engine->matrix, largest);
    TAKE(engine->matrix_scratch, muon_scratch(largest, C));
}

static void layout_workspaces(Engine *engine, Layout *a) {
    const ModelConfig *m = &engine->config.model->config;
    size_t T = (size_t)engine->config.seq_len, D = (size_t)(m->channels / m->heads);
    size_t N = (size_t)engine->config.micro_batch * T;
    int threads = engine_thread_count(&engine->config);
    Dtype type = engine->config.dtype;
    engine->matmul = (Matmul){threads, matmul_kernel(type), matmul_a_block(), take(a, matmul_scratch(type, N))};
    engine->attention = (Attention){.threads = threads, .max_T = T, .max_D = D, .type = type};
    TAKE(engine->attention.scratch, attention_scratch(threads, T, D));
}

static const char *const moments_of[] = {"AdamW moments", "LAMB moments", "Muon, AdamW moments"};

static const struct {
    const char *what;
    void (*fill)(Engine *, Layout *);
} layouts[ENGINE_LAYOUTS] = {
    {"parameters", layout_param},
    {"gradients", layout_grad},
    {"moments", layout_moments},
    {"activations", layout_activations},
    {"exact per-example norms", layout_exact},
    {"Muon's products", layout_muon},
    {"kernel workspaces", layout_workspaces}, // not cleared: each thread touches its own first
};

void cpu_plan_memory(const EngineConfig *config, MemoryPlan *plan) {
    memset(plan, 0, sizeof *plan);
    for (int i = 0; i < ENGINE_LAYOUTS; i++) {
        Engine sketch = {.config = *config};
        Layout layout = {0};
        layouts[i].fill(&sketch, &layout);
        if (!layout.used) continue;
        bool moments = layouts[i].fill == layout_moments;
        plan->item[plan->count].what = moments ? moments_of[config->optimizer] : layouts[i].what;
        plan->item[plan->count++].bytes = layout.used;
        plan->total += layout.used;
    }
}

// Requests huge pages, before the memory is touched: with small ones every pass over it waits for TLB misses. A system
// without huge pages, or with these turned off, keeps small ones.
static void request_huge_pages(char *memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    size_t page = (size_t)sysconf(_SC_PAGESIZE), skip = round_up((size_t)(uintptr_t)memory, page) - (uintptr_t)memory;
    if (bytes > skip) madvise(memory + skip, (bytes - skip) / page * page, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

int engine_memory_take(Engine *engine, Error *e) {
    for (int i = 0; i < ENGINE_LAYOUTS; i++) {
        Layout layout = {0};
        layouts[i].fill(engine, &layout);
        TRY(memory_alloc(&engine->memory[i], layout.used, "the engine's memory", e));
        request_huge_pages(engine->memory[i], layout.used);
        if (layouts[i].fill != layout_workspaces) memset(engine->memory[i], 0, layout.used);
        layout = (Layout){.base = engine->memory[i]};
        layouts[i].fill(engine, &layout);
    }
    return 0;
}

void engine_memory_free(Engine *engine) {
    for (int i = 0; i < ENGINE_LAYOUTS; i++) memory_free(engine->memory[i]);
}
