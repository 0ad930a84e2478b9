// engine_life: creates and destroys the CUDA engine: streams, events, host buffers, tables; describes the device.
#include "cuda/engine.cuh"
#include "cuda/linear_sm90.cuh"
#include "cuda/matmul.cuh"
#include "cuda/optimizer.cuh"
#include "cuda/weight_gradient.cuh"
#include "model/cuda_sizes.h"

#include <assert.h>
#include <string.h>

static int tables_load(Engine *engine, Error *e) {
    const Model *model = engine->config.model;
    const size_t granules = model->flat_count / DECAY_GRANULE;
    uint16_t *tensor; // of every granule
    CUDA_TRY(cudaMemsetAsync(engine->rule, RULE_PLAIN, granules, engine->stream), e);
    CUDA_TRY(cudaMemsetAsync(engine->ticket, 0, sizeof *engine->ticket, engine->stream), e);
    TRY(memory_alloc_zero((void **)&tensor, granules * sizeof *tensor, "the table of tensors", e));
    int code = 0;
    for (int i = 0; i < model->tensor_count && !code; i++) {
        const Tensor *t = &model->tensors[i];
        const Range segment = tensor_range(t);
        const bool muon = engine->config.optimizer == OPTIMIZER_MUON && tensor_muon_matrices(t);
        const UpdateRule rule = muon ? RULE_MUON : t->dimensions < 2 ? RULE_PLAIN : RULE_DECAY;
        const size_t first = t->offset / DECAY_GRANULE, count = (t->count + DECAY_GRANULE - 1) / DECAY_GRANULE;
        assert(t->offset % DECAY_GRANULE == 0);
        for (size_t k = 0; k < count; k++) tensor[first + k] = (uint16_t)i;
        code = copy_in(engine, engine->segment + i, &segment, sizeof segment, e);
        if (!code) code = CUDA_CALL(cudaMemsetAsync(engine->rule + first, rule, count, engine->stream), e);
        if (!code) code = CUDA_CALL(cudaStreamSynchronize(engine->stream), e); // `segment` leaves scope
    }
    if (!code && engine->tensor) code = copy_in(engine, engine->tensor, tensor, granules * sizeof *tensor, e);
    if (!code) code = CUDA_CALL(cudaStreamSynchronize(engine->stream), e);
    memory_free(tensor);
    return code;
}

int cuda_check_dtype(Dtype dtype, Error *e) {
    if (dtype == REAL_DTYPE) return 0;
    return FAIL(e, ERR_USAGE, "leave --dtype out, or build another: make train_gpt2cu PRECISION=BF16, FP16 or FP32",
                "--dtype %s: this program was built for %s", dtype_names[dtype], REAL_NAME);
}

// Only attention limits the model.
int cuda_check(const EngineConfig *config, Error *e) {
    const ModelConfig *m = &config->model->config;
    return attention_check(m->channels / m->heads, e);
}

static int engine_open(Engine *engine, Error *e) {
    const EngineConfig *c = &engine->config;
    TRY(cuda_check(c, e));
    TRY(device_open(&engine->device, e));
    TRY(weight_gradient_pairs(&engine->pairs, e));
    TRY(memory_alloc_zero((void **)&engine->block, c->model->config.layers * sizeof(Block), "blocks", e));
    TRY(memory_alloc_zero((void **)&engine->matmul, sizeof(Matmul), "matmul plans", e));
    TRY(memory_alloc((void **)&engine->seen, c->seq_len * sizeof *engine->seen, "tokens", e));
    TRY(engine_memory_take(engine, e));
    CUDA_TRY(cudaStreamCreateWithFlags(&engine->stream, cudaStreamNonBlocking), e);
    CUDA_TRY(cudaStreamCreateWithFlags(&engine->store_stream, cudaStreamNonBlocking), e);
    CUDA_TRY(cudaEventCreateWithFlags(&engine->state_ready, cudaEventDisableTiming), e);
    TRY(matmul_create(engine->matmul, engine->matmul_scratch, engine->stream, e));
    for (int i = 0; i < TOKEN_SLOTS; i++) {
        const size_t B = c->micro_batch, N = B * c->seq_len;
        CUDA_TRY(cudaMallocHost(&engine->staged[i], (B + 3 * N) * sizeof(uint16_t)), e);
        CUDA_TRY(cudaMallocHost(&engine->staged_sorted[i], 8 * N * sizeof(uint32_t)), e);
        CUDA_TRY(cudaEventCreateWithFlags(&engine->sent[i], cudaEventDisableTiming), e);
    }
    CUDA_TRY(cudaMallocHost(&engine->logits_host, c->model->config.vocab * sizeof(float)), e);
    CUDA_TRY(cudaMallocHost(&engine->stats_host, (stats_count(c->model) + 1) * sizeof(double)), e);
    CUDA_TRY(cudaEventCreateWithFlags(&engine->stats_there, cudaEventDisableTiming), e);
    engine->fused_linear = linear_sm90_runs(c->model->config.channels, c->model->config.channels);
    TRY(tables_load(engine, e));
    TRY(engine_state_clear(engine, e));
    return CUDA_CALL(cudaStreamSynchronize(engine->stream), e);
}

void cuda_destroy(Engine *engine) {
    if (engine->stream) cudaStreamSynchronize(engine->stream);
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
    (*out)->config.dtype = REAL_DTYPE;
    (*out)->loss_scale = 1;
    int code = engine_open(*out, e);
    if (!code) return 0;
    cuda_destroy(*out);
    *out = NULL;
    return code;
}

void cuda_describe(const Engine *engine, char *out, size_t bytes) {
    const cudaDeviceProp *d = &engine->device.properties;
    snprintf(out, bytes, "%s, %s, %d multiprocessors, %.0f GiB, %s kernels", d->name, REAL_NAME, d->multiProcessorCount,
             (double)d->totalGlobalMem / (1 << 30), engine->pairs.count ? "Hopper's" : "general");
}

void cuda_device(const EngineConfig *config, bool, EngineDevice *out) { // speeds: plan/devices.h
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
