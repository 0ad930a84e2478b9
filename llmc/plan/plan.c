#define _POSIX_C_SOURCE 200809L
#include "plan/plan.h"

#include "model/cuda_sizes.h"
#include "ranks/parallel.h"

#include <math.h>
#include <string.h>

// ---------------------------------------------------------------------------------------------------------------------
// Devices

// NVIDIA GPUs: measured on an H200 SXM (dev/RESULTS.md) against its data sheet, 989 TFLOP/s and 4.8 TB/s; other cards
// are taken to reach the same part of theirs.
static const PlanEfficiency gpu_efficiency = {
    .matmul = 750.0 / 989, // cuBLASLt, bf16, 8192 x 8192 x 8192
    // Products of N = 65536 rows over 768 channels: 529 to 702 TFLOP/s. Those that write much (fc 638, the head's
    // forward 613) are slower than those that read as much (fcproj 682, the head's dinput 691): results leave when a
    // tile's arithmetic is done, operands come while it goes on. With all of the writing exposed and a third of the
    // reading, the ten products of a step are met within 10%.
    .matmul_reads = 1.0 / 3,
    .attention_forward = 403.0 / 989,  // 12 heads of 64, T = 1024, causal
    .attention_backward = 318.0 / 989, // likewise
    .copy = 4.23 / 4.8,
    .stream = 0.9 * 4.23 / 4.8, // LayerNorm 75 to 93% of a copy, GELU 96%, loss 86%, norms 92%
    .link = 364.0 / 450,        // NCCL, 8 ranks: bus bandwidth of an all-reduce of 3.1 GB
    .launch = 4e-6, // of the order of a kernel's start and end; matters to small models only, and was not measured
    // At 249 MB the same all-reduce reached 343 GB/s: 75 us more than its bytes, over 2 x 7 rounds.
    .hop = 75e-6 / 14,
    .network_hop = 14e-6, // NCCL's own estimate of a ring over a network (its src/graph/tuning.cc)
};

// A CPU's peak and bandwidth are measured on the spot, so these are the efficiencies of our own kernels (dev/RESULTS.md).
static const PlanEfficiency cpu_efficiency = {
    .matmul = 0.92,
    .matmul_reads = 0, // operands are packed into the caches while others are multiplied
    .attention_forward = 0.35,
    .attention_backward = 0.35,
    .copy = 1,
    .stream = 1,
    .link = 0.8,
    .launch = 5e-6, // a parallel region and its barrier
    .hop = 50e-6,   // MPI over TCP, of the order of a switched Ethernet's round trip
    .network_hop = 50e-6,
};

static void device_from_spec(PlanDevice *d, const DeviceSpec *spec) {
    d->peak = d->value < 4 ? spec->bf16_flops : spec->fp32_flops;
    d->bandwidth = spec->bandwidth;
    d->memory_bytes = spec->memory_bytes;
    d->link = spec->link;
    d->network = spec->network;
    d->devices_a_machine = spec->devices_a_machine;
    d->efficiency = gpu_efficiency;
}

static void device_from_measurement(PlanDevice *d, const EngineDevice *here) {
    d->measured = true;
    d->peak = here->flops;
    d->bandwidth = here->bandwidth;
    d->devices_a_machine = 1;
    d->efficiency = cpu_efficiency;
}

// No such device in the table: its names as a hint.
static int unknown_device(const char *wanted, Error *e) {
    char names[400];
    device_spec_names(names, sizeof names);
    FAIL(e, ERR_USAGE, NULL, "--device %.60s: not in the table of devices", wanted);
    return error_hint(e, "it has %s", names);
}

int plan_device(PlanDevice *out, const char *wanted, const EngineDevice *here, double link_override, Error *e) {
    const double bf16_bytes = 2;
    bool gpu_engine = !(here->flops > 0);
    *out = (PlanDevice){.value = (double)here->value_bytes, .head_bytes = (double)here->head_bytes};
    const DeviceSpec *spec = device_spec_find(*wanted ? wanted : here->name);
    if (*wanted && !spec) return unknown_device(wanted, e);
    if (*wanted && !gpu_engine) out->value = bf16_bytes, out->head_bytes = CUDA_HEAD_BYTES;
    snprintf(out->name, sizeof out->name, "%s", spec && (*wanted || gpu_engine) ? spec->name : here->name);
    if (!*wanted && !gpu_engine) device_from_measurement(out, here);
    else if (spec) device_from_spec(out, spec);
    if (!*wanted && here->memory_bytes > 0) out->memory_bytes = here->memory_bytes;
    if (link_override > 0) out->network = link_override;
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

double plan_critical_intensity(const PlanDevice *d) { return d->peak / d->bandwidth; }

double plan_kernel_seconds(const PlanDevice *d, const Work *w) {
    const PlanEfficiency *s = &d->efficiency;
    double bytes = w->read + w->written, seconds = 0;
    switch (w->kind) {
    case WORK_MATMUL:
        seconds =
            w->flops / (s->matmul * d->peak) + (s->matmul_reads * w->read + w->written) / (s->copy * d->bandwidth);
        break;
    case WORK_ATTENTION_FORWARD: seconds = w->flops / (s->attention_forward * d->peak); break;
    case WORK_ATTENTION_BACKWARD: seconds = w->flops / (s->attention_backward * d->peak); break;
    case WORK_STREAM: seconds = bytes / (s->stream * d->bandwidth); break;
    }
    return fmax(fmax(seconds, bytes / (s->copy * d->bandwidth)), s->launch);
}

static WorkShape work_shape(const Plan *p, int rows, bool exact) {
    return (WorkShape){
        .model = p->model,
        .rows = rows,
        .seq_len = p->shape.seq_len,
        .value = p->device.value,
        .head_bytes = p->device.head_bytes,
        .recompute = p->shape.recompute,
        .exact = exact,
    };
}

// A micro-step's forward and backward, s: the mean over steps that measure exact norms and those that do not.
typedef struct {
    double forward, backward;
} MicroSeconds;

static MicroSeconds micro_seconds(const Plan *p, int rows) {
    MicroSeconds sum = {0};
    if (rows == 0) return sum;
    for (int exact = 0; exact < 2; exact++) {
        double part = exact ? p->exact_part : 1 - p->exact_part;
        if (part == 0) continue;
        Workload load = {0};
        WorkShape shape = work_shape(p, rows, exact);
        workload_micro_step(&load, &shape);
        for (int i = 0; i < load.count; i++) {
            double *to = load.work[i].pass == PASS_FORWARD ? &sum.forward : &sum.backward;
            *to += part * load.work[i].count * plan_kernel_seconds(&p->device, &load.work[i]);
        }
    }
    return sum;
}

// Parameters that a rank updates.
static double owned_parameters(const Plan *p) {
    double all = (double)p->model->flat_count;
    return p->zero ? all / p->ranks : all;
}

static double update_seconds(const Plan *p) {
    Workload load = {0};
    double seconds = 0;
    workload_update(&load, p->model, owned_parameters(p), p->device.value);
    for (int i = 0; i < load.count; i++) seconds += plan_kernel_seconds(&p->device, &load.work[i]);
    return seconds;
}

// The rows of the rank that has most of them, as micro-steps.
typedef struct {
    int64_t full; // of micro_batch rows
    int rest;     // rows of one more; 0: none
} MicroSteps;

static MicroSteps micro_steps(const Plan *p, int64_t rows) {
    int64_t mine = parallel_share(rows, 0, p->ranks).count;
    return (MicroSteps){mine / p->shape.micro_batch, (int)(mine % p->shape.micro_batch)};
}

static void add_families(const Plan *p, const Workload *load, double times, PlanFamily families[FAMILIES]) {
    for (int i = 0; i < load->count; i++) {
        const Work *w = &load->work[i];
        PlanFamily *f = &families[w->family];
        f->flops += times * w->count * w->flops;
        f->bytes += times * w->count * (w->read + w->written);
        f->seconds += times * w->count * plan_kernel_seconds(&p->device, w);
    }
}

void plan_families(const Plan *p, int64_t rows, PlanFamily families[FAMILIES]) {
    MicroSteps steps = micro_steps(p, rows);
    memset(families, 0, FAMILIES * sizeof *families);
    for (int exact = 0; exact < 2; exact++) {
        double part = exact ? p->exact_part : 1 - p->exact_part;
        WorkShape full = work_shape(p, p->shape.micro_batch, exact), rest = work_shape(p, steps.rest, exact);
        Workload load = {0}, last = {0};
        workload_micro_step(&load, &full);
        add_families(p, &load, part * (double)steps.full, families);
        if (steps.rest) workload_micro_step(&last, &rest);
        add_families(p, &last, part, families);
    }
    Workload update = {0};
    workload_update(&update, p->model, owned_parameters(p), p->device.value);
    add_families(p, &update, 1, families);
}

// ---------------------------------------------------------------------------------------------------------------------
// Between ranks

const char *const sharding_names[SHARDINGS] = {"DP", "ZeRO-1/2", "FSDP"};

// A ring enters and leaves a machine through all of its network cards at once (NCCL's channels: one a card), so these
// add up, and the ring is as slow as the slower of them and the link inside.
double plan_link_bandwidth(const PlanDevice *d, int ranks) {
    if (ranks <= d->devices_a_machine) return d->link;
    double machine = d->network * d->devices_a_machine;
    return d->devices_a_machine > 1 ? fmin(d->link, machine) : machine;
}

double plan_ring_seconds(const PlanDevice *d, int ranks, double bytes) {
    if (ranks == 1) return 0;
    double machines = ceil((double)ranks / d->devices_a_machine), network_hops = machines > 1 ? machines : 0;
    double latency =
        (ranks - 1 - fmin(network_hops, ranks - 1)) * d->efficiency.hop + network_hops * d->efficiency.network_hop;
    double bandwidth = d->efficiency.link * plan_link_bandwidth(d, ranks);
    return latency + (ranks - 1.0) / ranks * bytes / bandwidth;
}

// Rajbhandari et al. 2020 (arXiv 1910.02054), section 7: plain data parallelism and ZeRO-1 and -2 pass on two values a
// parameter and step (gradients scattered; gradients or weights gathered), ZeRO-3 three (weights gathered twice) a
// micro-step.
double plan_ring_bytes(const Plan *p, Sharding sharding, int ranks) {
    double weights = p->device.value, gathered[SHARDINGS] = {p->wire > 0 ? sizeof(float) : 0, weights, 2 * weights};
    return (ranks - 1.0) / ranks * (double)p->model->flat_count * (p->wire + gathered[sharding]);
}

double plan_critical_tokens(const Plan *p, Sharding sharding, int ranks) {
    double bandwidth = plan_link_bandwidth(&p->device, ranks);
    double flops = model_flops_per_token(p->model, p->shape.seq_len);
    return plan_ring_bytes(p, sharding, ranks) / bandwidth * p->device.peak / flops;
}

// A transfer of all of the model's values between the ranks, bucket by bucket, s: the blocks', and the embeddings'.
typedef struct {
    double blocks, embeddings;
} Transfer;

static Transfer transfer(const Plan *p, double value_bytes) {
    const Model *model = p->model;
    double L = model->config.layers, embeddings = (double)model_tensor(model, LN1_W, 0)->offset;
    double block = ((double)model->flat_count - embeddings) / L;
    return (Transfer){L * plan_ring_seconds(&p->device, p->ranks, value_bytes * block),
                      plan_ring_seconds(&p->device, p->ranks, value_bytes * embeddings)};
}

// Gradients are scattered behind the backward pass that makes them, but the embeddings', which come last: these hide
// behind the next forward pass where there is one (--reduce micro-step). Then either all gradients are gathered, while
// those that are there are applied (ZeRO-0); or the updated weights are, behind the next forward pass, which needs the
// embeddings first.
static double exposed_seconds(const Plan *p, const PlanStep *s) {
    if (p->ranks == 1 || !(plan_link_bandwidth(&p->device, p->ranks) > 0)) return 0;
    Transfer scatter = transfer(p, p->wire), gather = transfer(p, p->zero ? p->device.value : sizeof(float));
    double exposed = fmax(0, scatter.blocks - s->last_backward) + scatter.embeddings;
    if (p->every_micro_step && s->micro_steps > 1) {
        double others = (double)(s->micro_steps - 1);
        exposed +=
            others * (fmax(0, scatter.blocks - s->first_backward) + fmax(0, scatter.embeddings - s->first_forward));
    }
    return exposed + gather.embeddings + fmax(0, gather.blocks - (p->zero ? s->first_forward : s->update));
}

// ---------------------------------------------------------------------------------------------------------------------
// Steps and runs

PlanStep plan_step(const Plan *p, int64_t rows) {
    MicroSteps steps = micro_steps(p, rows);
    MicroSeconds full = {0}, rest = micro_seconds(p, steps.rest);
    if (steps.full) full = micro_seconds(p, p->shape.micro_batch);
    PlanStep s = {
        .forward = (double)steps.full * full.forward + rest.forward,
        .backward = (double)steps.full * full.backward + rest.backward,
        .update = update_seconds(p),
        .first_forward = steps.full ? full.forward : rest.forward,
        .first_backward = steps.full ? full.backward : rest.backward,
        .last_backward = steps.rest ? rest.backward : full.backward,
        .micro_steps = steps.full + (steps.rest > 0),
    };
    s.exposed = exposed_seconds(p, &s);
    s.seconds = s.forward + s.backward + s.update + s.exposed;
    return s;
}

double plan_eval_seconds(const Plan *p, int64_t rows) {
    MicroSteps steps = micro_steps(p, rows);
    double seconds = micro_seconds(p, steps.rest).forward;
    return steps.full ? seconds + (double)steps.full * micro_seconds(p, p->shape.micro_batch).forward : seconds;
}

PlanRun plan_run(const Plan *p, const Ramp *ramp, double target) {
    Ramp r = *ramp; // its state is walked through; what it points to is only read
    int64_t T = r.config.seq_len, tokens = 0, batch, before = 0;
    double seconds = 0;
    PlanRun run = {0};
    while ((batch = ramp_next(&r, run.steps, tokens)) > 0) {
        if (batch != before) seconds = p->device.peak > 0 ? plan_step(p, batch).seconds : 0;
        if (run.steps == PLAN_STEPS_MAX) {
            int64_t left = ((int64_t)r.config.train_tokens - tokens) / (batch * T);
            run.steps += left;
            run.seconds += (double)left * seconds;
            run.cut = true;
            return run;
        }
        if (run.steps == 0) run.first_batch = batch;
        if (batch >= before) run.last_batch = batch; // the horizon may cut the last one short
        before = batch;
        run.steps++;
        run.seconds += seconds;
        tokens += batch * T;
        ramp_observe(&r, (double)(batch * T), target);
    }
    return run;
}

static int64_t greatest_common_divisor(int64_t a, int64_t b) { // Euclid's
    return b ? greatest_common_divisor(b, a % b) : a;
}

int64_t plan_checkpoints(const Ramp *ramp, int64_t every, int64_t best_every, int64_t keep) {
    const Plan untimed = {0};
    if (every == 0 && best_every == 0) return 1;
    int64_t steps = plan_run(&untimed, ramp, 0).steps, written = 1; // at the end
    if (every > 0) written += (steps - 1) / every;
    if (best_every > 0) written += (steps - 1) / best_every;
    if (every > 0 && best_every > 0) // those of both, at the multiples of the least common one, are one
        written -= (steps - 1) / every / (best_every / greatest_common_divisor(every, best_every));
    int64_t stay = keep + 1 + (best_every > 0); // one is written before the oldest goes
    return keep > 0 && stay < written ? stay : written;
}
