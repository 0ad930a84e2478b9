// The memory of a plan.
#include "plan/plan.h"

#include "model/cuda_sizes.h"
#include "model/shard.h"
#include "ranks/transport.h"

#include <assert.h>
#include <math.h>
#include <string.h>

static void add_item(MemoryPlan *memory, const char *what, double bytes) {
    assert(memory->count < (int)(sizeof memory->item / sizeof *memory->item));
    memory->item[memory->count].what = what;
    memory->item[memory->count++].bytes = (size_t)bytes;
    memory->total += (size_t)bytes;
}

// Counts bytes as Rajbhandari et al. 2020 (arXiv 1910.02054), section 3: per parameter in mixed precision, less what
// each stage of ZeRO divides among the ranks. With sharded weights a GPU also keeps its share rounded.
PlanState plan_state(const EngineConfig *shape, const PlanDevice *device) {
    double all = (double)shape->model->flat_count, owned = (double)shard_elements(shape), fp32 = sizeof(float);
    double value = device->value, working = value * (double)shard_weight_elements(shape);
    bool rounded = value < fp32;
    if (shape->inference) return (PlanState){.weights = value * all};
    if (rounded && shape->shard_weights && !device->measured) working += value * owned;
    return (PlanState){
        .weights = rounded || shape->shard_weights ? fp32 * owned + working : fp32 * all,
        .gradients = fp32 * ((double)shard_grad_elements(shape) + (shape->shard_grads ? owned : 0)),
        .moments = 2 * fp32 * owned,
    };
}

bool plan_fuses_exact(const PlanDevice *device, const ModelConfig *model) {
    return device->fuses_exact && model->channels % WEIGHT_GRADIENT_MULTIPLE == 0;
}

bool plan_stores_exponentials(const PlanDevice *device, const EngineConfig *shape) {
    return device->fuses_exact && shape->dtype != DTYPE_FP16 && shape->label_smoothing == 0 &&
           shape->model->config.channels % LINEAR_SM90_MULTIPLE == 0;
}

void plan_estimate_memory(const EngineConfig *shape, const PlanDevice *device, MemoryPlan *memory) {
    const ModelConfig *m = &shape->model->config;
    double N = (double)shape->micro_batch * shape->seq_len, C = m->channels, value = device->value;
    PlanState state = plan_state(shape, device);
    memset(memory, 0, sizeof *memory);
    add_item(memory, "weights, estimated", state.weights);
    if (!shape->inference) {
        add_item(memory, "gradients, fp32, estimated", state.gradients);
        add_item(memory, "AdamW moments, fp32, estimated", state.moments);
    }
    // Activations of the blocks, bytes a token, as in Korthikanti et al. 2022 (arXiv 2205.05198), section 4, without
    // recomputing. But here attention keeps only its row sums, and dropout keeps nothing.
    double L = shape->inference ? 1 : m->layers; // blocks whose input is kept
    double kept = shape->recompute == RECOMPUTE_BLOCK ? 1 : L, gelu = shape->recompute == RECOMPUTE_NONE ? L : 1;
    double statistics = 4.0 + m->heads; // two means and deviations; attention's row sums
    // the block's input; ln1, qkv, attention, x_mid, ln2 and fc; GELU's output
    double blocks = value * (L * C + kept * 11 * C + gelu * 4 * C) + kept * sizeof(float) * statistics;
    add_item(memory, "activations, estimated", N * (blocks + value * C));
    // The head and the blocks' backward pass share memory. The head keeps the logits of as many examples as fit into
    // head_bytes, at least one.
    double one = value * shape->seq_len * shape->model->vocab_padded; // bytes of an example
    double examples = fmax(1, fmin(floor(device->head_bytes / one), shape->micro_batch));
    double chunk = examples * shape->model->vocab_padded; // elements, for every position
    bool exact = shape->gns == GNS_EXACT && !shape->inference, fused = plan_fuses_exact(device, &shape->model->config);
    double head = chunk * (value * shape->seq_len + (exact && fused ? sizeof(int) : 0)) + 2 * value * N * C,
           backward = shape->inference ? 0 : value * N * 6 * C;
    add_item(memory, "logits, gradients, scratch, estimated", fmax(head, backward) + MATMUL_WORKSPACE_BYTES);
    double example_grad = fused ? 0 : (double)model_tensor_largest(shape->model);
    if (exact) add_item(memory, "exact per-example norms, estimated", sizeof(float) * (example_grad + N * C));
}

// Adds a GPU's memory outside the engine. Measured on H200s on 2026-11-21 (driver 580, CUDA 13.0, NCCL 2.28) with
// cudaMemGetInfo and NVML, before and after each call:
//   526 MiB  the context, with or without this program's kernels
//     6 MiB  cuBLASLt and its kernels. d12 and d24, at any --recompute, used 531.5 MiB more than the engine's own plan
//   860 MiB  NCCL without NVLink multicast (NCCL_NVLS_ENABLE=0), the same on 2 and 4 ranks of a machine:
//            382 MiB at set-up; 376 of them, its kernels, stay after ncclCommAbort
//            474 MiB with the first reduce-scatter, for the rings' buffers, which other collectives share: per connection
//            and channel NCCL_BUFFSIZE, 4 MiB, and less for its short protocols
//            4 MiB with the first broadcast
// Assumes that other cards, drivers and networks need as much.
void plan_memory(const Plan *plan, int micro_batch, MemoryPlan *memory) {
    const double mib = 1 << 20, context = 532 * mib;
    EngineConfig shape = plan->shape;
    shape.micro_batch = micro_batch;
    if (plan->estimate_memory) plan_estimate_memory(&shape, &plan->device, memory);
    else plan->engine->plan_memory(&shape, memory);
    if (plan->device.measured) return; // a CPU
    add_item(memory, "CUDA context and libraries", context);
    if (plan->ranks == 1) return;
    size_t rounded = transport_buffer_bytes(plan->options->comm_dtype, model_bucket_largest(plan->shape.model));
    add_item(memory, "NCCL buffers and kernels", (double)TRANSPORT_NCCL_BYTES);
    if (rounded) add_item(memory, "rounded gradients, for their transfer", (double)rounded);
}

// The copy holds weights and moments: with --zero 3 those of a rank's share, otherwise all, on rank 0.
double plan_copy_bytes(const EngineConfig *shape) {
    return 3.0 * sizeof(float) * (double)(shape->shard_weights ? shard_elements(shape) : shape->model->flat_count);
}

double plan_reserved_bytes(const Plan *plan) { return plan->device.measured ? plan->host_bytes : 0; }

double plan_usable_memory(const PlanDevice *device) {
    const double share = 0.97; // a card has less than its data sheet says (H200: 1%), and other programs use some
    return share * device->spec.memory_bytes;
}

bool plan_fits(const Plan *plan, int micro_batch) {
    MemoryPlan memory;
    plan_memory(plan, micro_batch, &memory);
    return (double)memory.total + plan_reserved_bytes(plan) <= plan_usable_memory(&plan->device);
}

int plan_largest_micro_batch(const Plan *plan) {
    int allowed = MICRO_BATCH_TOKENS_MAX / plan->shape.seq_len;
    return plan_most(plan, 0, (allowed < MICRO_BATCH_MAX ? allowed : MICRO_BATCH_MAX) + 1, plan_fits);
}

int plan_check_fits(const Plan *plan, Error *e) {
    const double gib = 1 << 30, usable = plan_usable_memory(&plan->device);
    if (!(usable > 0) || plan_largest_micro_batch(plan)) return 0;
    Plan lean = *plan;
    lean.shape.recompute = RECOMPUTE_BLOCK;
    int rows = plan_largest_micro_batch(&lean);
    double weights = plan_state(&plan->shape, &plan->device).weights;
    MemoryPlan memory;
    plan_memory(plan, 1, &memory);
    FAIL(e, ERR_MEMORY, NULL, "the model does not fit: %.1f GiB are needed at --micro-batch 1, of %.1f GiB (%s)",
         ((double)memory.total + plan_reserved_bytes(plan)) / gib, usable / gib, plan->device.name);
    if (plan->shape.inference || weights > usable)
        return error_hint(e, "use a smaller model, or a device with more memory%s: the weights alone are %.1f GiB",
                          !plan->shape.inference ? ", or --zero 3 on more ranks" : "", weights / gib);
    if (rows) return error_hint(e, "use --recompute block, with --micro-batch %d or less", rows);
    return error_hint(e,
                      "use --recompute block and --zero 3 on more ranks, which divide weights, gradients and moments "
                      "among them; or a smaller model");
}
