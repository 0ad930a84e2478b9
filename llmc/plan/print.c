#define _POSIX_C_SOURCE 200809L
// A plan as a page for a person.
#include "plan/plan.h"

#include <math.h>
#include <string.h>

enum { TEXT_BYTES = 32 };

// "124.4M", "9.9B": four figures or so.
static const char *short_count(char out[TEXT_BYTES], double x) {
    const char *const units[] = {"", "k", "M", "B", "T"};
    int u = 0;
    while (x >= 1000 && u < 4) x /= 1000, u++;
    snprintf(out, TEXT_BYTES, "%.*f%s", u == 0 || x >= 1000 ? 0 : x < 10 ? 2 : 1, x, units[u]);
    return out;
}

// "989 T", "233 G": with the prefix of a unit to follow.
static const char *with_prefix(char out[TEXT_BYTES], double x) {
    bool tera = x >= 1e12;
    snprintf(out, TEXT_BYTES, "%.3g %s", tera ? 1e-12 * x : 1e-9 * x, tera ? "T" : "G");
    return out;
}

// "19,073"
static const char *grouped(char out[TEXT_BYTES], double x) {
    char digits[TEXT_BYTES];
    int n = snprintf(digits, sizeof digits, "%.0f", fmin(x, 1e18)), used = 0;
    for (int i = 0; i < n; i++) {
        if (i > 0 && (n - i) % 3 == 0) out[used++] = ',';
        out[used++] = digits[i];
    }
    out[used] = 0;
    return out;
}

// "1.39 GiB"
static const char *binary(char out[TEXT_BYTES], double bytes) {
    bool small = bytes < (1 << 30);
    snprintf(out, TEXT_BYTES, "%.*f %s", small ? 1 : 2, bytes / (small ? 1 << 20 : 1 << 30), small ? "MiB" : "GiB");
    return out;
}

static const char *plural(double n) { return n == 1 ? "" : "s"; }

static const char *duration(char out[TEXT_BYTES], double seconds) {
    if (seconds < 120) snprintf(out, TEXT_BYTES, "%.3g seconds", seconds);
    else if (seconds < 7200) snprintf(out, TEXT_BYTES, "%.3g minutes", seconds / 60);
    else snprintf(out, TEXT_BYTES, "%.3g hours", seconds / 3600);
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// Model, device, memory

static void print_model(FILE *f, const Plan *p) {
    const ModelConfig *c = &p->shape.model->config;
    double flops = model_flops_per_token(p->shape.model, p->shape.seq_len);
    char a[TEXT_BYTES], b[TEXT_BYTES];
    fprintf(f, "parameters  %s: %d layers, %d heads, %d channels, vocabulary %d, T %d\n",
            grouped(a, (double)p->shape.model->parameters), c->layers, c->heads, c->channels, c->vocab,
            p->shape.seq_len);
    // Kaplan et al. 2020 (arXiv 2001.08361), section 2.1, with attention's part causal: model_flops_per_token
    fprintf(f, "FLOPs       %.4g a token (" MODEL_FLOPS_FORMULA ")", flops);
    if (p->ramp)
        fprintf(f, ", %.3g for %s tokens", flops * p->ramp->config.train_tokens,
                short_count(a, p->ramp->config.train_tokens));
    fprintf(f, "\n");
    if (!(p->train_tokens > 0)) return;
    fprintf(f, "data        %s tokens", short_count(b, p->train_tokens));
    if (p->ramp) fprintf(f, ": %.2f epochs", p->ramp->config.train_tokens / p->train_tokens);
    fprintf(f, "\n");
}

static void print_device(FILE *f, const Plan *p) {
    const PlanDevice *d = &p->device;
    if (!(d->peak > 0)) {
        char names[400];
        device_spec_names(names, sizeof names);
        if (*d->name) fprintf(f, "device      %s: not in the table of devices, so no times\n", d->name);
        else fprintf(f, "device      none here, so no times\n");
        fprintf(f, "            --device plans for %s\n", names);
        return;
    }
    char peak[TEXT_BYTES], bandwidth[TEXT_BYTES];
    fprintf(f, "device      %s: %sFLOP/s %s, %sB/s, %.0f GiB (%s); critical intensity %.3g FLOPs a byte\n", d->name,
            with_prefix(peak, d->peak), d->value < 4 ? "bf16" : "fp32", with_prefix(bandwidth, d->spec.bandwidth),
            d->spec.memory_bytes / (1 << 30), d->measured ? "measured just now" : "data sheet",
            plan_critical_intensity(d));
}

static void print_bytes(FILE *f, const char *what, double bytes, const char *end) {
    fprintf(f, "  %-36s %10.1f MiB%s", what, bytes / (1 << 20), end);
}

static void print_memory(FILE *f, const Plan *p) {
    MemoryPlan memory;
    plan_memory(p, p->shape.micro_batch, &memory);
    fprintf(f, "\nmemory of %s, --micro-batch %d\n", p->ranks > 1 ? "a rank" : "the device", p->shape.micro_batch);
    for (int i = 0; i < memory.count; i++) print_bytes(f, memory.item[i].what, (double)memory.item[i].bytes, "\n");
    if (p->host_bytes > 0) print_bytes(f, "copy for checkpoints, on the host", p->host_bytes, "\n");
    double besides = p->device.measured ? p->host_bytes : 0; // a CPU has one memory for both
    print_bytes(f, "memory in all", (double)memory.total + besides, "");
    if (p->device.spec.memory_bytes > 0) {
        int fits = plan_largest_micro_batch(p, besides, MICRO_BATCH_MAX);
        fprintf(f, " of %.0f", plan_usable_memory(&p->device) / (1 << 20));
        if (fits) fprintf(f, "; the largest --micro-batch that fits is %d", fits);
        else fprintf(f, "; NOT EVEN ONE ROW FITS");
    }
    fprintf(f, "\n");
    PlanState state = plan_state(&p->shape, p->device.value);
    double parameters = (double)p->shape.model->flat_count;
    fprintf(f, "  of it, bytes a parameter: weights %.3g, gradients %.3g, moments %.3g\n", state.weights / parameters,
            state.gradients / parameters, state.moments / parameters);
    if (p->estimate_memory)
        fprintf(f, "  (from the sizes of tensors; train_gpt2cu --dry-run knows them to the byte, without a GPU)\n");
    if (!p->device.measured)
        fprintf(f, "  (CUDA, libraries and NCCL as measured on H200s, driver 580%s)\n",
                p->ranks > 1 ? "; NCCL with NCCL_NVLS_ENABLE=0, otherwise it may take more" : "");
}

// ---------------------------------------------------------------------------------------------------------------------
// A step: the roofline of its kernels

static void print_kernels(FILE *f, const Plan *p, const PlanStep *step) {
    double flops = 0;
    for (int i = 0; i < FAMILIES; i++) flops += step->all.family[i].flops;
    bool tera = flops >= 1e13;
    fprintf(f, "  %-24s %9s %9s %11s  %-8s %9s %6s\n", "kernels", tera ? "TFLOPs" : "GFLOPs", "GB", "FLOPs/byte",
            "bound by", "ms", "share");
    for (int i = 0; i < FAMILIES; i++) {
        double work = step->all.family[i].flops, bytes = step->all.family[i].bytes, s = step->all.family[i].seconds;
        if (!(bytes > 0)) continue;
        fprintf(f, "  %-24s %9.4g %9.3g %11.1f  %-8s %9.4g %5.1f%%\n", work_family_names[i], work / (tera ? 1e12 : 1e9),
                1e-9 * bytes, work / bytes, work / bytes < plan_critical_intensity(&p->device) ? "memory" : "compute",
                1e3 * s, 100 * s / step->seconds);
    }
    if (step->exposed > 0)
        fprintf(f, "  %-24s %9s %9s %11s  %-8s %9.4g %5.1f%%\n", "waiting for other ranks", "", "", "", "link",
                1e3 * step->exposed, 100 * step->exposed / step->seconds);
}

static void print_step(FILE *f, const Plan *p) {
    int64_t T = p->shape.seq_len;
    PlanStep step = plan_step(p, p->rows);
    double tokens = (double)(p->rows * T), rate = tokens / step.seconds;
    double mfu = rate * model_flops_per_token(p->shape.model, (int)T) / (p->device.peak * p->ranks);
    char a[TEXT_BYTES], b[TEXT_BYTES];
    fprintf(f, "\nstep of %lld rows, %s tokens", (long long)p->rows, grouped(a, tokens));
    if (p->ranks > 1) fprintf(f, ", on %d ranks", p->ranks);
    fprintf(f, ": %lld micro-step%s\n", (long long)step.micro_steps, plural((double)step.micro_steps));
    if (p->rows < p->ranks)
        fprintf(f, "  FEWER ROWS THAN RANKS: such a run is refused; use --batch-tokens %lld or more\n",
                (long long)(p->ranks * T));
    print_kernels(f, p, &step);
    fprintf(f, "  %.4g ms, %s tok/s, MFU %.1f%%\n", 1e3 * step.seconds, grouped(b, rate), 100 * mfu);
}

// ---------------------------------------------------------------------------------------------------------------------
// Ranks

enum { RANKS_MOST = 8960, RANK_ROWS = 9 };

// The counts to print: one, a machine, two machines, `ranks` and around it, thousands. Ascending; returns how many.
static int rank_counts(int ranks, int machine, int counts[RANK_ROWS]) {
    const int wanted[RANK_ROWS] = {1,     machine,   2 * machine, ranks / 4, ranks / 2,
                                   ranks, 2 * ranks, 4 * ranks,   RANKS_MOST};
    int n = 0, last = 0;
    for (;;) {
        int next = 0;
        for (int i = 0; i < RANK_ROWS; i++)
            if (wanted[i] > last && (wanted[i] <= RANKS_MOST || wanted[i] == ranks) && (!next || wanted[i] < next))
                next = wanted[i];
        if (!next) return n;
        last = counts[n++] = next;
    }
}

static PlanStep step_on(const Plan *plan, int ranks) {
    Plan p = *plan;
    p.ranks = ranks;
    return plan_step(&p, p.rows);
}

// By bytes: at the peak and the links' full rate, does the arithmetic take longer than the transfers?
static bool is_compute_bound(const Plan *p, int ranks) {
    double tokens = (double)(p->rows * p->shape.seq_len) / ranks;
    Sharding sharding = p->options->zero == ZERO_0 ? SHARDING_NONE : SHARDING_STATE;
    return ranks == 1 || tokens >= plan_critical_tokens(p, sharding, ranks);
}

// By time: is at most half of a step exposed communication?
static bool is_computing(const Plan *p, int ranks) {
    PlanStep step = step_on(p, ranks);
    return 2 * step.exposed <= step.seconds;
}

// Do the latencies of the rings make up more than half of a step?
static bool is_latency_bound(const Plan *p, int ranks) {
    PlanStep step = step_on(p, ranks);
    Plan instant = *p;
    instant.device.efficiency.hop = instant.device.efficiency.network_hop = 0;
    return 2 * (step.exposed - step_on(&instant, ranks).exposed) > step.seconds;
}

static void print_rank_row(FILE *f, const Plan *p, int ranks, double rate_of_one) {
    double tokens = (double)(p->rows * p->shape.seq_len), price = p->options->price;
    char a[TEXT_BYTES];
    fprintf(f, "%c%6d %8.0f %9s", ranks == p->ranks ? '>' : ' ', ranks,
            ceil((double)ranks / p->device.spec.devices_a_machine), grouped(a, tokens / ranks));
    for (int s = 0; s < SHARDINGS; s++)
        fprintf(f, " %8s", ranks == 1 ? "-" : grouped(a, plan_critical_tokens(p, (Sharding)s, ranks)));
    fprintf(f, "  %-12s",
            is_latency_bound(p, ranks)   ? "latency"
            : is_compute_bound(p, ranks) ? "compute"
                                         : "interconnect");
    if (p->rows < ranks) {
        fprintf(f, " fewer rows than ranks\n");
        return;
    }
    PlanStep step = step_on(p, ranks);
    double rate = tokens / step.seconds, hours = 1e9 / rate / 3600;
    fprintf(f, " %7.2f %8.2f %12s %6.1f%% %7.3f", 1e3 * step.exposed, 1e3 * step.seconds, grouped(a, rate),
            100 * rate / (ranks * rate_of_one), hours);
    if (price > 0) fprintf(f, " %7.2f", hours * ranks * price);
    fprintf(f, "\n");
}

// The most ranks, each with a row, for which `holds` is true; it is true up to some number of ranks.
static int most_ranks(const Plan *p, bool (*holds)(const Plan *p, int ranks)) {
    const int64_t far = 1 << 20;
    int most = 1, over = (int)(p->rows < far ? p->rows + 1 : far);
    while (over - most > 1) {
        int middle = most + (over - most) / 2;
        if (plan_link_bandwidth(&p->device, middle) > 0 && holds(p, middle)) most = middle;
        else over = middle;
    }
    return most;
}

static void print_ranks(FILE *f, const Plan *p) {
    const PlanDevice *d = &p->device;
    int counts[RANK_ROWS], n = rank_counts(p->ranks, d->spec.devices_a_machine, counts);
    bool price = p->options->price > 0;
    if (p->ranks == 1) return;
    if (!(plan_link_bandwidth(d, p->ranks) > 0))
        fprintf(f, "  transfers between the ranks are not counted: their bandwidth is unknown (--link)\n");
    if (d->spec.devices_a_machine == 1 && !(d->spec.network > 0)) return;
    fprintf(f, "\nranks, at this batch and --zero %d: ", p->options->zero);
    if (d->spec.devices_a_machine > 1)
        fprintf(f, "%.4g GB/s each way among %d, ", 1e-9 * d->spec.link, d->spec.devices_a_machine);
    if (d->spec.network > 0) fprintf(f, "%.4g GB/s a device between machines\n", 1e-9 * d->spec.network);
    else fprintf(f, "between machines unknown (--link)\n");
    fprintf(f, "%26s %26s %14s %7s %8s %20s %7s%s\n", "tokens", "tokens to be compute-bound", "", "exposed", "step", "",
            "hours a", price ? "  cost a" : "");
    fprintf(f, "%7s %8s %9s", "ranks", "machines", "a rank");
    for (int s = 0; s < SHARDINGS; s++) fprintf(f, " %8s", sharding_names[s]);
    fprintf(f, "  %-12s %7s %8s %12s %7s %7s%s\n", "bound by", "ms", "ms", "tok/s", "scaling", "B tok",
            price ? "   B tok" : "");
    double rate = (double)(p->rows * p->shape.seq_len) / step_on(p, 1).seconds;
    for (int i = 0; i < n; i++)
        if (counts[i] == 1 || plan_link_bandwidth(d, counts[i]) > 0) print_rank_row(f, p, counts[i], rate);
    fprintf(f, "  compute-bound up to %d ranks by bytes, up to %d by step time: at most half of it exposed\n",
            most_ranks(p, is_compute_bound), most_ranks(p, is_computing));
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

static double validation_seconds(const Plan *p, int64_t steps) {
    int64_t every = p->options->val_every;
    if (every <= 0 || p->val_rows <= 0) return 0;
    return (double)((steps + every - 1) / every) * plan_eval_seconds(p, p->val_rows);
}

static void print_time(FILE *f, const Plan *p, const PlanRun *run) {
    if (!(p->device.peak > 0)) return;
    char text[TEXT_BYTES];
    double validating = validation_seconds(p, run->steps), seconds = run->seconds + validating;
    fprintf(f, ", %s", duration(text, seconds));
    if (validating > 0) fprintf(f, " (%.2g%% of it validation)", 100 * validating / seconds);
    if (p->options->price > 0) fprintf(f, ", cost %.2f", seconds / 3600 * p->ranks * p->options->price);
}

static void print_run_line(FILE *f, const Plan *p, const char *what, const PlanRun *run) {
    char a[TEXT_BYTES];
    fprintf(f, "%s%s%s step%s", what, run->cut ? "about " : "", grouped(a, (double)run->steps),
            plural((double)run->steps));
    if (run->first_batch == run->last_batch) fprintf(f, " of %lld rows", (long long)run->first_batch);
    else fprintf(f, " of %lld to %lld rows", (long long)run->first_batch, (long long)run->last_batch);
    print_time(f, p, run);
    fprintf(f, "\n");
}

// The noise scale of a future run is unknown; the ramp's bounds are not.
static void print_run(FILE *f, const Plan *p) {
    if (!p->ramp) return;
    fprintf(f, "\n");
    PlanRun slowest = plan_run(p, 0);
    if (p->ramp->config.mode != RAMP_GNS) {
        print_run_line(f, p, "run         ", &slowest);
        return;
    }
    PlanRun fastest = plan_run(p, INFINITY);
    fprintf(f, "run         its length depends on the noise scale; the ramp's bounds are\n");
    print_run_line(f, p, "  never growing             ", &slowest);
    print_run_line(f, p, "  growing as soon as it may ", &fastest);
}

static void print_checkpoints(FILE *f, const Plan *p) {
    int64_t copies = p->ramp ? plan_checkpoints(p->ramp, p->options) : 1;
    double bytes = (double)copies * p->checkpoint_bytes;
    char one[TEXT_BYTES], all[TEXT_BYTES], room[TEXT_BYTES];
    fprintf(f, "checkpoints %s each; at most %lld at a time: %s", binary(one, p->checkpoint_bytes), (long long)copies,
            binary(all, bytes));
    if (p->disk_free_bytes >= 0) {
        fprintf(f, ", %s free in %s", binary(room, p->disk_free_bytes), p->disk);
        if (p->disk_free_bytes < bytes) fprintf(f, ": NOT ENOUGH");
    }
    fprintf(f, "\n");
}

void plan_print(FILE *f, const Plan *p) {
    print_model(f, p);
    print_device(f, p);
    print_memory(f, p);
    if (p->shape.inference) return;
    if (p->device.peak > 0) {
        print_step(f, p);
        print_ranks(f, p);
    }
    print_run(f, p);
    print_checkpoints(f, p);
}
