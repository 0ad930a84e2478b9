// The memory of a plan.
#include "plan/plan.h"

#include "model/cuda_sizes.h"
#include "model/shard.h"
#include "ranks/transport.h"

#include <assert.h>
#include <math.h>

static void add_item(MemoryPlan *memory, const char *what, double bytes) {
    assert(memory->count < (int)(sizeof memory->item / sizeof *memory->item));
    memory->item[memory->count].what = what;
    memory->item[memory->count++].bytes = (size_t)bytes;
}

bool plan_fuses_exact(const PlanDevice *device, const ModelConfig *model) {
    return device->fuses_exact && model->channels % WEIGHT_GRADIENT_MULTIPLE == 0;
}

// Estimates the CUDA engine's memory in a build without it, from the CPU engine's plan for values of the same type. The
// CUDA engine differs in five ways. (1) Its head keeps the logits of as many examples as fit into head_bytes, at least
// one, in memory that later holds the blocks' gradients. (2) With sharded weights it also keeps rounded owned weights.
// (3) Its exact norms may be fused. (4) It keeps GELU's derivative, one byte if values are rounded, instead of GELU's
// input; with --recompute gelu it keeps the inputs, and one block's derivative. (5) With --tensor it receives partial
// sums from other ranks only, not from itself.
static void estimate_engine(const Plan *plan, EngineConfig shape, MemoryPlan *memory) {
    const PlanDevice *device = &plan->device;
    const Model *model = shape.model;
    const double rows = (double)own_rows(&shape, shape.micro_batch).count, T = shape.seq_len;
    const double n = rows * T * model->config.channels;                   // values of own rows
    const double wide = shape.micro_batch * T * (double)model->mlp_width; // values of fc's output in all rows
    const bool rounded = device->value < sizeof(float), exact = shape.gns == GNS_EXACT && !shape.inference;
    const double example = device->value * shape.seq_len * model->vocab_padded; // bytes of one example's logits
    const double examples = fmax(1, fmin(floor(device->head_bytes / example), rows));
    const double qkv = 3 * shape.micro_batch * T * (double)model->attention_width;
    const bool fp8 = dtype_is_fp8(shape.dtype) && !shape.inference, dweight = fp8 && shape.dtype == DTYPE_FP8_DW;
    // Bytes of the gradient of qkv or fc, and of a weight gradient's factors in e4m3.
    const double gradients = (shape.inference ? 0 : device->value * fmax(qkv, wide)) + (dweight ? 5 * n : 0);
    shape.dtype = rounded ? DTYPE_BF16 : DTYPE_FP32;
    shape.gns = GNS_OFF;
    plan->engine->plan_memory(&shape, memory);
    memory->count--; // the CPU kernels' workspaces
    if (rounded && shape.shard_weights) memory->item[0].bytes += (size_t)device->value * shard_elements(&shape);
    add_item(memory, "logits, matmul workspace", fmax(0, examples * example - gradients) + MATMUL_WORKSPACE_BYTES);
    const double blocks = shape.recompute == RECOMPUTE_NONE && !shape.inference ? model->config.layers : 1;
    const double input = shape.recompute == RECOMPUTE_GELU ? 0 : device->value;
    const double own = tensor_ranks(&shape) > 1 ? device->value * n : 0;
    const int64_t more = (int64_t)(wide * blocks * ((rounded ? 1 : device->value) - input) - own);
    memory->item[shape.inference ? 1 : 3].bytes += (size_t)more; // activations
    double norms =
        plan_fuses_exact(device, &model->config) ? examples * model->vocab_padded : (double)model_tensor_largest(model);
    if (exact) add_item(memory, "exact per-example norms", sizeof(float) * (norms + n));
    // Bytes of a block's weights and their transposes, and of low parts; then of wte.
    const double C = model->config.channels, weights = 24 * C * C + 4 * C * FP8_GROUPS;
    if (fp8)
        add_item(memory, "copies in e4m3",
                 ((dweight ? 11 : 6) + FP8_GROUPS / C) * n +
                     (shape.shard_weights ? 1 : model->config.layers) * weights +
                     (shape.fp8_head ? C * (double)model->vocab_padded : 0));
}

// Adds a GPU's memory outside the engine, measured on H200s (driver 580, CUDA 13.0, NCCL 2.28): 526 MiB for the
// context, 6 MiB for cuBLASLt, 860 MiB for NCCL without NVLink multicast (NCCL_NVLS_ENABLE=0), on 2 or 4 ranks.
double plan_memory(const Plan *plan, int micro_batch, MemoryPlan *memory) {
    const double mib = 1 << 20, context = 532 * mib;
    Model local;
    const Model *model = plan_model(plan, &local);
    EngineConfig shape = plan->shape;
    Parallel parallel;
    Comm comm = {.ranks = plan->ranks, .local_ranks = 1}; // no rank is started
    shape.micro_batch = micro_batch, shape.model = model;
    shape.owned = NULL, shape.owned_count = 0, shape.shard_grads = shape.shard_weights = false;
    parallel_create(&parallel, &comm, &plan->sharing, &shape, &(Error){0});
    // If this machine lacks memory for parallel_create, `shape` stays unsharded, and the plan is for whole arrays.
    if (plan->estimate_memory) estimate_engine(plan, shape, memory);
    else plan->engine->plan_memory(&shape, memory);
    // The copy for saves holds the weights and moments that a rank owns. With --zero 0 only rank 0 has a copy,
    // which is whole. With --tensor each rank copies a part of the whole model.
    const double all = (double)plan->shape.model->flat_count / fmax(1, parallel.division.ranks);
    double copy =
        plan->copies ? 3.0 * sizeof(float) * (plan->sharing.tensor > 1 ? all : (double)shard_elements(&shape)) : 0;
    if (plan->device.measured) { // a CPU
        if (copy > 0) add_item(memory, "copy for checkpoints", copy);
        const double wire = (double)transport_mpi_bytes(model_bucket_largest(model));
        if (plan->ranks > 1) add_item(memory, "gradients in transfer", wire);
    } else {
        add_item(memory, "CUDA context and libraries", context);
        size_t wire = transport_buffer_bytes(plan->options->comm_dtype, model_bucket_largest(model));
        if (plan->ranks > 1) add_item(memory, "NCCL buffers and kernels", (double)TRANSPORT_NCCL_BYTES);
        if (plan->ranks > 1 && wire) add_item(memory, "rounded gradients, for their transfer", (double)wire);
    }
    memory->total = 0;
    for (int i = 0; i < memory->count; i++) memory->total += memory->item[i].bytes;
    parallel_destroy(&parallel);
    model_destroy(&local);
    return copy;
}

double plan_usable_memory(const PlanDevice *device) {
    const double share = 0.97; // a card has less than its data sheet says (H200: 1% less), and other programs use some
    return share * device->spec.memory_bytes;
}

bool plan_fits(const Plan *plan, int micro_batch) {
    MemoryPlan memory;
    plan_memory(plan, micro_batch, &memory);
    return (double)memory.total <= plan_usable_memory(&plan->device);
}

int plan_largest_micro_batch(const Plan *plan) {
    int allowed = MICRO_BATCH_TOKENS_MAX / plan->shape.seq_len;
    return plan_most(plan, 0, (allowed < MICRO_BATCH_MAX ? allowed : MICRO_BATCH_MAX) + 1, plan_fits);
}

static bool lacks_memory(const Plan *p, int groups) {
    Plan on = plan_with(p, p->sharing.zero, groups * p->sharing.tensor, p->sharing.tensor);
    return !plan_fits(&on, p->shape.micro_batch);
}

// Tries one rank, or one group of --tensor, first, since without NCCL one rank may need less memory than each of two.
// From two on, more ranks never need more memory per rank.
int plan_fewest_ranks(const Plan *plan, ZeroStage zero, int most) {
    const int K = plan->sharing.tensor;
    Plan p = plan_with(plan, zero, plan->ranks, K);
    if (!lacks_memory(&p, 1)) return K;
    return most < 2 * K || lacks_memory(&p, most / K) ? 0 : K * (plan_most(&p, 1, most / K, lacks_memory) + 1);
}

int plan_check_fits(const Plan *plan, Error *e) {
    const double gib = 1 << 30, usable = plan_usable_memory(&plan->device);
    if (!(usable > 0) || plan_largest_micro_batch(plan)) return 0;
    MemoryPlan memory;
    plan_memory(plan, 1, &memory);
    FAIL(e, ERR_MEMORY, NULL, "the model does not fit: %.1f GiB are needed at --micro-batch 1, of %.1f GiB (%s)",
         (double)memory.total / gib, usable / gib, plan->device.name);
    Plan lean = *plan;
    lean.shape.recompute = RECOMPUTE_BLOCK;
    int rows = plan_largest_micro_batch(&lean);
    if (plan->shape.inference) return error_hint(e, "use a smaller model, or a device with more memory");
    if (rows) return error_hint(e, "use --recompute block, with --micro-batch %d or less", rows);
    return error_hint(e,
                      "use --recompute block and --zero 3 on more ranks, which divide weights, gradients and moments "
                      "among them; or a smaller model, or a device with more memory");
}
