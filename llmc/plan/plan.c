#include "plan/plan.h"

#include "model/cuda_sizes.h"

#include <math.h>

// ---- Devices --------------------------------------------------------------------------------------------------------

// Fractions of the data sheet (989 TFLOP/s, 4.8 TB/s), measured on an H200 SXM, assumed for all NVIDIA GPUs.
static const PlanEfficiency gpu_efficiency = {
    .of_peak[WORK_MATMUL] = 750.0 / 989, // cuBLASLt, bf16, 8192 x 8192 x 8192
    // Products of N = 65536 rows over 768 channels reach 529 to 702 TFLOP/s. Products that write much (fc 638, the
    // head's forward 613) are slower than products that read as much (fcproj 682, the head's dinput 691), since a
    // tile's operands are loaded during arithmetic, but its results are written later. The plan counts all writes and a
    // third of the reads, which is within 10% of the measured time of each of a step's ten products.
    .matmul_reads = 1.0 / 3,
    .of_peak[WORK_ATTENTION_FORWARD] = 403.0 / 989,  // 12 heads of 64, T = 1024, causal
    .of_peak[WORK_ATTENTION_BACKWARD] = 318.0 / 989, // the same shape
    // Products in e4m3, with the copies they need. On an H100 the planned gain of a step of d12, d24 and d48 is within
    // 3% of the measured gain. cuBLASLt's products alone are 1.45 to 1.89 times as fast as bf16's.
    .of_peak[WORK_FP8] = 1.55 * 750 / 989,
    .of_peak[WORK_MASKS] = 31.0 / 989, // dropout 0.1 adds 6.3% to d12's step: branches add 2.4%, attention the rest
    .copy = 4.23 / 4.8,
    .stream = 0.9 * 4.23 / 4.8, // LayerNorm 75 to 93% of a copy, GELU 96%, loss 86%, norms 92%
    .link = 364.0 / 450,        // NCCL, 8 ranks: bus bandwidth of an all-reduce of 3.1 GB
    .launch = 4e-6,             // order of magnitude, not measured; matters to small models only
    // At 249 MB the same all-reduce reached 343 GB/s, so its 2 x 7 rounds cost 75 us more than its bytes.
    .hop = 75e-6 / 14,
    .network_hop = 14e-6, // NCCL's own estimate of a ring over a network (its src/graph/tuning.cc)
};

// Efficiencies of our kernels on CPUs. Peak and bandwidth are measured at the start of a plan.
static const PlanEfficiency cpu_efficiency = {
    .of_peak = {0.92, 0.35, 0.35, 0.35},
    .matmul_reads = 0, // operands are packed into the caches during arithmetic
    .copy = 1,
    .stream = 1,
    .link = 0.8,
    .launch = 5e-6, // a parallel region and its barrier
    .hop = 50e-6,   // MPI over TCP: about a round trip on switched Ethernet
    .network_hop = 50e-6,
};

int plan_device(PlanDevice *out, const Options *o, const EngineDevice *here, Error *e) {
    const double planned_bytes = o->given[OPTION_dtype] && o->dtype == DTYPE_FP32 ? sizeof(float) : 2;
    const char *wanted = o->device;
    const bool elsewhere = *wanted && here->is_cpu; // the CPU trainer plans for a GPU
    char names[400];
    const DeviceSpec *known = device_spec_find(*wanted ? wanted : here->name);
    if (*wanted && !known && !(o->device_flops > 0 && o->device_bandwidth > 0)) {
        device_spec_names(names, sizeof names);
        FAIL(e, ERR_USAGE, NULL, "--device %.60s: not in the table of devices", wanted);
        return error_hint(e, "use one of %s; or add --device-flops, --device-bandwidth and --device-memory", names);
    }
    PlanDevice d = {.spec = known ? *known : (DeviceSpec){.devices_a_machine = o->device_link > 0 ? 8 : 1},
                    .measured = !*wanted && here->is_cpu,
                    .value = elsewhere ? planned_bytes : (double)here->value_bytes,
                    .head_bytes = elsewhere ? CUDA_HEAD_BYTES : (double)here->head_bytes};
    snprintf(d.name, sizeof d.name, "%.255s", known ? known->name : *wanted ? wanted : here->name);
    d.efficiency = d.measured ? cpu_efficiency : gpu_efficiency;
    d.fuses_exact = *wanted ? d.spec.hopper && d.value < sizeof(float) : here->exact_is_fused;
    d.peak = d.measured ? here->flops : d.value < sizeof(float) ? d.spec.bf16_flops : d.spec.fp32_flops;
    if (d.measured) d.spec.bandwidth = here->bandwidth;
    if (!*wanted && here->memory_bytes > 0) d.spec.memory_bytes = here->memory_bytes;
    if (o->device_flops > 0) d.peak = 1e12 * o->device_flops;
    if (o->device_bandwidth > 0) d.spec.bandwidth = 1e9 * o->device_bandwidth;
    if (o->device_memory > 0) d.spec.memory_bytes = o->device_memory * (1 << 30);
    if (o->device_link > 0) d.spec.link = 1e9 * o->device_link;
    if (o->link > 0) d.spec.network = 1e9 * o->link;
    if (o->device_count > 0) d.spec.devices_a_machine = (int)o->device_count;
    d.spec.axes = (int)o->device_axes;
    if ((o->device_count > 1 || o->device_axes > 0) && d.spec.link == 0)
        return FAIL(e, ERR_USAGE, "add --device-link", "--device-count, --device-axes: the devices' link is unknown");
    *out = d;
    return 0;
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

double plan_kernel_seconds(const PlanDevice *d, const Work *w) {
    const PlanEfficiency *s = &d->efficiency;
    double bytes = w->read + w->written, copied = s->copy * d->spec.bandwidth;
    double seconds =
        w->kind == WORK_STREAM ? bytes / (s->stream * d->spec.bandwidth) : w->flops / (s->of_peak[w->kind] * d->peak);
    if (w->kind == WORK_MATMUL || w->kind == WORK_FP8) seconds += (s->matmul_reads * w->read + w->written) / copied;
    return fmax(fmax(seconds, bytes / copied), s->launch);
}

const Model *plan_model(const Plan *p, Model *local) {
    const int K = p->sharing.tensor;
    *local = (Model){0};
    const bool cut = K > 1 && model_create_local(local, &p->shape.model->config, 0, K, &(Error){0}) == 0;
    return cut ? local : p->shape.model;
}

// ---- Between ranks --------------------------------------------------------------------------------------------------

// A ring uses all network cards of a machine at once (one NCCL channel per card), so their bandwidths add up. The ring
// is limited by this sum and by the link inside a machine.
double plan_link_bandwidth(const PlanDevice *d, int ranks) {
    double link = d->spec.link * fmax(1, d->spec.axes), machine = d->spec.network * d->spec.devices_a_machine;
    if (ranks <= d->spec.devices_a_machine) return link;
    return d->spec.devices_a_machine > 1 ? fmin(link, machine) : machine;
}

// Returns the ranks along an axis of the torus.
static double axis_ranks(const PlanDevice *d, int ranks) {
    return pow(fmin(ranks, d->spec.devices_a_machine), 1.0 / d->spec.axes);
}

double plan_ring_seconds(const PlanDevice *d, int ranks, double bytes) {
    if (ranks == 1) return 0;
    double machines = ceil((double)ranks / d->spec.devices_a_machine), network_hops = machines > 1 ? machines : 0;
    double hops = d->spec.axes ? d->spec.axes * (axis_ranks(d, ranks) - 1) / 2 : fmax(0, ranks - 1 - network_hops);
    double bandwidth = d->efficiency.link * plan_link_bandwidth(d, ranks);
    return hops * d->efficiency.hop + network_hops * d->efficiency.network_hop +
           (ranks - 1.0) / ranks * bytes / bandwidth;
}

// Each of K ranks holds bytes/K and sends bytes/K^2 to every other rank, directly if a switch or a network joins them.
// In a torus a piece passes on average k/4 links of each axis of k ranks.
double plan_all_to_all_seconds(const PlanDevice *d, int ranks, double bytes) {
    const double machine = d->spec.devices_a_machine, piece = bytes / ranks / ranks, inside = fmin(ranks, machine);
    double sent = d->spec.axes ? inside * axis_ranks(d, ranks) / 4 : inside - 1;
    double seconds = machine > 1 ? sent * piece / d->spec.link : 0;
    if (ranks > machine) seconds = fmax(seconds, (ranks - machine) * piece / d->spec.network);
    return seconds / d->efficiency.link + (ranks > machine ? d->efficiency.network_hop : d->efficiency.hop);
}

// Returns how many ranks share bucket 0 (--shard).
static int shared_by(const Plan *p) { return p->sharing.shared ? p->sharing.shared : p->ranks; }

// Returns the bytes of one exchange of rows (TensorRanks).
static double exchanged_bytes(const Plan *p, double rows) {
    return p->device.value * rows * p->shape.seq_len * p->shape.model->config.channels;
}

// A transfer of all of the model's values between the ranks, bucket by bucket.
typedef struct {
    double blocks, embeddings;            // seconds
    double block_bytes, embeddings_bytes; // that a rank sends
} Transfer;

// replicas: includes sums of each part over the machines that hold a replica.
static Transfer transfer(const Plan *p, const Model *model, double value_bytes, bool replicas) {
    const int shared = shared_by(p), K = p->sharing.tensor, machines = replicas ? (p->ranks + shared - 1) / shared : 1;
    PlanDevice peers = p->device; // counts only ranks of equal t (parallel.h): a machine has devices / K of them
    PlanDevice apart = p->device; // as if each rank had its own machine
    peers.spec.devices_a_machine = (int)fmax(1, peers.spec.devices_a_machine / K);
    apart.spec.devices_a_machine = 1;
    double L = model->config.layers, embeddings = value_bytes * (double)model_bucket(model, 0).end;
    double blocks = value_bytes * (double)model->flat_count - embeddings;
    const double part = blocks * K / shared, whole = embeddings / shared; // bytes per rank
    const double sums = 2 * (machines - 1.0) / machines;
    return (Transfer){
        L * (plan_ring_seconds(&peers, shared / K, blocks / L) + 2 * plan_ring_seconds(&apart, machines, part / L)),
        plan_ring_seconds(&p->device, shared, embeddings) + 2 * plan_ring_seconds(&apart, machines, whole),
        blocks - part + sums * part, embeddings - whole + sums * whole};
}

// Sets the bytes and the exposed seconds of a step's transfers, without --tensor's exchanges.
//
// Counts values as Rajbhandari et al. 2020 (arXiv 1910.02054), section 7, do. With ZeRO-0 to ZeRO-2 a rank sends two
// values per parameter and step: it scatters gradients, and gathers gradients or weights. ZeRO-3 gathers weights in
// both passes of each micro-step, except for blocks that are still in their slots.
//
// Scattering gradients: the backward pass hides the blocks' transfers. The embeddings' gradients are complete last, so
// only the next micro-step's forward pass can hide their transfer (--reduce micro-step).
// Gathering: the update hides the blocks' gradients (ZeRO-0), or the next forward pass hides the blocks' weights.
// Nothing hides the embeddings, which a forward pass needs first. With ZeRO-3 a pass hides its gathering of blocks.
static void add_transfers(const Plan *p, const Model *model, PlanStep *s) {
    if (p->ranks == 1 || !(plan_link_bandwidth(&p->device, p->ranks) > 0)) return;
    bool zero = p->sharing.zero != ZERO_0, often = p->sharing.reduce == REDUCE_MICRO_STEP;
    const double *first = s->first.pass, *last = s->last.pass;
    const Transfer scatter = transfer(p, model, p->options->comm_dtype == WIRE_BF16 ? 2 : sizeof(float), true);
    const Transfer gather = transfer(p, model, zero ? p->device.value : sizeof(float), false);
    const Transfer early = often ? scatter : (Transfer){0}; // in each of the `others`, the micro-steps but the last
    const double others = (double)s->micro_steps - 1;
    // The fraction of the blocks that a pass of ZeRO-3 gathers. The slots still hold the other blocks.
    const double L = model->config.layers, again = p->sharing.zero == ZERO_3 ? fmax(0, L - SHARD_SLOTS) / L : 0;
    const double gathered = again * gather.blocks;
    s->exposed = fmax(0, gathered + scatter.blocks - last[PASS_BACKWARD]) + scatter.embeddings;
    s->exposed += others * (fmax(0, gathered + early.blocks - first[PASS_BACKWARD]) +
                            fmax(0, gathered + early.embeddings - first[PASS_FORWARD]));
    s->exposed += gather.embeddings;
    s->exposed += fmax(0, gather.blocks - (zero ? first[PASS_FORWARD] : s->all.pass[PASS_UPDATE]));
    s->bytes = scatter.block_bytes + scatter.embeddings_bytes + gather.embeddings_bytes +
               (1 + (2 * others + 1) * again) * gather.block_bytes;
    s->bytes += others * (early.block_bytes + early.embeddings_bytes);
}

// ---- Other modes ----------------------------------------------------------------------------------------------------

Plan plan_with(const Plan *plan, ZeroStage zero, int ranks, int tensor) {
    Plan p = *plan;
    p.sharing.zero = zero, p.ranks = ranks, p.sharing.tensor = ranks % tensor ? 1 : tensor;
    if (p.sharing.shared) p.sharing.shared = plan_machine(&p.device, ranks);
    if (zero < ZERO_2) p.sharing.reduce = REDUCE_STEP;
    return p;
}

int plan_most(const Plan *p, int low, int over, bool (*holds)(const Plan *p, int n)) {
    while (over - low > 1) {
        int middle = low + (over - low) / 2;
        if (holds(p, middle)) low = middle;
        else over = middle;
    }
    return low;
}

// ---- Steps and runs -------------------------------------------------------------------------------------------------

PlanStep plan_step(const Plan *p, int64_t rows) {
    const int K = p->sharing.tensor, groups = p->ranks / K;
    int64_t mine = rows_of_rank(rows, 0, groups).count, whole = mine / p->shape.micro_batch; // micro-steps
    int left = (int)(mine % p->shape.micro_batch);                                           // rows
    Model local;
    EngineConfig shape = p->shape;
    shape.model = plan_model(p, &local), shape.tensor.ranks = K;
    // exact: the fraction of steps of this batch that measure exact norms
    const Options *o = p->options;
    double tokens = (double)(rows * p->shape.seq_len), exact = 0;
    double sampled = o->run.gns_half_life_tokens * GNS_CALIBRATION_HALF_LIVES / GNS_CALIBRATION_SAMPLES;
    if (o->run.gns_calibrates) exact = tokens / (tokens + sampled);
    else if (o->run.gns_exact_interval > 0) exact = 1.0 / (double)o->run.gns_exact_interval;
    PlanStep s = {.micro_steps = whole + (left > 0)};
    plan_add_micro_steps(&s.first, &p->device, &shape, whole ? p->shape.micro_batch : left, exact, 1);
    plan_add_micro_steps(&s.last, &p->device, &shape, left ? left : p->shape.micro_batch, exact, 1);
    plan_add_micro_steps(&s.all, &p->device, &shape, p->shape.micro_batch, exact, (double)whole);
    plan_add_micro_steps(&s.all, &p->device, &shape, left, exact, 1);
    double all = (double)shape.model->flat_count, embeddings = (double)model_bucket(shape.model, 0).end;
    double owned = p->sharing.zero != ZERO_0 ? ((all - embeddings) * K + embeddings) / shared_by(p) : all;
    plan_add_update(&s.all, &p->device, shape.model, p->shape.optimizer, owned);
    add_transfers(p, shape.model, &s);
    const double n = tensor_exchanges(&shape, true);
    s.bytes += n * (K - 1.0) / K * exchanged_bytes(p, (double)mine);
    if (n > 0 && plan_link_bandwidth(&p->device, K) > 0) // nothing hides exchanges, since products wait for them
        s.exposed += (double)whole * n * plan_ring_seconds(&p->device, K, exchanged_bytes(p, p->shape.micro_batch)) +
                     (left > 0) * n * plan_ring_seconds(&p->device, K, exchanged_bytes(p, left));
    model_destroy(&local);
    s.seconds = s.all.pass[PASS_FORWARD] + s.all.pass[PASS_BACKWARD] + s.all.pass[PASS_UPDATE] + s.exposed;
    return s;
}

PlanRun plan_run(const Plan *p, double target) {
    Ramp r = *p->ramp; // a copy: the run's state does not change
    int64_t T = r.config.seq_len, tokens = 0, batch, before = 0;
    double seconds = 0;
    PlanRun run = {0};
    while (run.steps < PLAN_STEPS_MAX && (batch = ramp_next(&r, run.steps, tokens)) > 0) {
        if (batch != before) seconds = p->device.peak > 0 ? plan_step(p, batch).seconds : 0;
        if (run.steps == 0) run.first_batch = batch;
        if (batch >= before) run.last_batch = batch; // the horizon may cut the last step short
        before = batch;
        run.steps++;
        run.seconds += seconds;
        tokens += batch * T;
        ramp_observe(&r, (double)(batch * T), p->options->run.gns_half_life_tokens, target);
    }
    const int64_t left = ((int64_t)r.config.schedule.train_tokens - tokens) / (before * T);
    run.steps += left;
    run.seconds += (double)left * seconds;
    run.cut = left > 0;
    return run;
}

int64_t plan_checkpoints(const Ramp *ramp, const Options *o) {
    const Plan untimed = {.options = o, .ramp = ramp};
    int64_t every = o->checkpoint_every, best = best_every(o);
    if (every == 0 && best == 0) return 1;
    int64_t steps = plan_run(&untimed, 0).steps - 1; // the last step always writes a checkpoint
    // --on-spike keeps the newest checkpoint before the window, and all later ones: perhaps step 0's, too, and those of
    // steps that a rollback took back.
    const int64_t window = o->on_spike ? 2 * o->spike_steps - 1 : 0;
    const int64_t recent = (every ? (window + every - 1) / every : 0) + (best ? window / best : 0);
    const int64_t written = 1 + (every ? steps / every : 0) + (best ? steps / best : 0) + (o->on_spike != 0);
    // A new checkpoint is written before the oldest is removed.
    const int64_t kept = (o->keep > recent ? o->keep : recent + 1) + 1 + (best > 0);
    return recent + (o->keep > 0 && kept < written ? kept : written);
}
