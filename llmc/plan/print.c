#define _POSIX_C_SOURCE 200809L
#include "plan/print.h"

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

static void print_model(FILE *f, const PlanReport *r) {
    const Plan *p = r->plan;
    const ModelConfig *c = &p->model->config;
    double flops = model_flops_per_token(p->model, p->shape.seq_len);
    char a[TEXT_BYTES], b[TEXT_BYTES];
    fprintf(f, "parameters  %s: %d layers, %d heads, %d channels, vocabulary %d, T %d\n",
            grouped(a, (double)p->model->parameters), c->layers, c->heads, c->channels, c->vocab, p->shape.seq_len);
    // Kaplan et al. 2020 (arXiv 2001.08361), section 2.1, with attention's part causal: model_flops_per_token
    fprintf(f, "FLOPs       %.4g a token (" MODEL_FLOPS_FORMULA ")", flops);
    if (r->ramp)
        fprintf(f, ", %.3g for %s tokens", flops * r->ramp->config.train_tokens,
                short_count(a, r->ramp->config.train_tokens));
    fprintf(f, "\n");
    if (!(r->train_tokens > 0)) return;
    fprintf(f, "data        %s tokens", short_count(b, r->train_tokens));
    if (r->ramp) fprintf(f, ": %.2f epochs", r->ramp->config.train_tokens / r->train_tokens);
    fprintf(f, "\n");
}

static void print_device(FILE *f, const PlanReport *r) {
    const PlanDevice *d = &r->plan->device;
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
            with_prefix(peak, d->peak), d->value < 4 ? "bf16" : "fp32", with_prefix(bandwidth, d->bandwidth),
            d->memory_bytes / (1 << 30), d->measured ? "measured just now" : "data sheet", plan_critical_intensity(d));
}

static void print_memory_line(FILE *f, const char *what, double bytes) {
    fprintf(f, "  %-36s %10.1f MiB", what, bytes / (1 << 20));
}

static void print_memory(FILE *f, const PlanReport *r) {
    const Plan *p = r->plan;
    MemoryPlan memory;
    plan_memory(p, p->shape.micro_batch, &memory);
    bool host_is_device = p->device.measured;
    fprintf(f, "\nmemory of %s, --micro-batch %d\n", p->ranks > 1 ? "a rank" : "the device", p->shape.micro_batch);
    for (int i = 0; i < memory.count; i++)
        print_memory_line(f, memory.item[i].what, (double)memory.item[i].bytes), fprintf(f, "\n");
    if (r->host_bytes > 0) print_memory_line(f, "copy for checkpoints, on the host", r->host_bytes), fprintf(f, "\n");
    double besides = host_is_device ? r->host_bytes : 0, all = (double)memory.total + besides;
    print_memory_line(f, "memory in all", all);
    if (p->device.memory_bytes > 0) {
        int fits = plan_largest_micro_batch(p, besides, MICRO_BATCH_MAX);
        fprintf(f, " of %.0f", plan_usable_memory(&p->device) / (1 << 20));
        if (fits) fprintf(f, "; the largest --micro-batch that fits is %d", fits);
        else fprintf(f, "; NOT EVEN ONE ROW FITS");
    }
    fprintf(f, "\n");
    PlanState state = plan_state(&p->shape, p->device.value);
    double parameters = (double)p->model->flat_count;
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

static void print_kernels(FILE *f, const PlanReport *r, const PlanStep *step) {
    const Plan *p = r->plan;
    PlanFamily family[FAMILIES];
    double flops = 0;
    plan_families(p, r->rows, family);
    for (int i = 0; i < FAMILIES; i++) flops += family[i].flops;
    bool tera = flops >= 1e13;
    fprintf(f, "  %-24s %9s %9s %11s  %-8s %9s %6s\n", "kernels", tera ? "TFLOPs" : "GFLOPs", "GB", "FLOPs/byte",
            "bound by", "ms", "share");
    for (int i = 0; i < FAMILIES; i++) {
        const PlanFamily *k = &family[i];
        if (!(k->bytes > 0)) continue;
        double intensity = k->flops / k->bytes;
        fprintf(f, "  %-24s %9.4g %9.3g %11.1f  %-8s %9.4g %5.1f%%\n", work_family_names[i],
                k->flops / (tera ? 1e12 : 1e9), 1e-9 * k->bytes, intensity,
                intensity < plan_critical_intensity(&p->device) ? "memory" : "compute", 1e3 * k->seconds,
                100 * k->seconds / step->seconds);
    }
    if (step->exposed > 0)
        fprintf(f, "  %-24s %9s %9s %11s  %-8s %9.4g %5.1f%%\n", "waiting for other ranks", "", "", "", "link",
                1e3 * step->exposed, 100 * step->exposed / step->seconds);
}

static void print_step(FILE *f, const PlanReport *r) {
    const Plan *p = r->plan;
    int64_t T = p->shape.seq_len;
    PlanStep step = plan_step(p, r->rows);
    double tokens = (double)(r->rows * T), rate = tokens / step.seconds;
    double mfu = rate * model_flops_per_token(p->model, (int)T) / (p->device.peak * p->ranks);
    char a[TEXT_BYTES], b[TEXT_BYTES];
    fprintf(f, "\nstep of %lld rows, %s tokens", (long long)r->rows, grouped(a, tokens));
    if (p->ranks > 1) fprintf(f, ", on %d ranks", p->ranks);
    fprintf(f, ": %lld micro-step%s\n", (long long)step.micro_steps, plural((double)step.micro_steps));
    if (r->rows < p->ranks)
        fprintf(f, "  FEWER ROWS THAN RANKS: such a run is refused; --batch-tokens of %lld or more will do\n",
                (long long)(p->ranks * T));
    print_kernels(f, r, &step);
    fprintf(f, "  %.4g ms, %s tok/s, MFU %.1f%%\n", 1e3 * step.seconds, grouped(b, rate), 100 * mfu);
}

// ---------------------------------------------------------------------------------------------------------------------
// Ranks

enum { RANKS_MOST = 8960, RANK_ROWS = 9 };

// Counts worth a line: one, a machine and two, `ranks` and around it, and thousands. Ascending; returns how many.
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

static Plan plan_with(const Plan *plan, int ranks) {
    Plan p = *plan;
    p.ranks = ranks;
    if (ranks == 1) p.zero = 0;
    return p;
}

// How --zero shards the transfer of gradients and weights.
static Sharding sharding_of(const Plan *p) { return p->zero ? SHARDING_STATE : SHARDING_NONE; }

// By bytes: at the peak and the links' full rate, does the arithmetic take longer than what travels?
static bool is_compute_bound(const PlanReport *r, int ranks) {
    double tokens = (double)(r->rows * r->plan->shape.seq_len) / ranks;
    return ranks == 1 || tokens >= plan_critical_tokens(r->plan, sharding_of(r->plan), ranks);
}

// By time: is at most half of a step waiting?
static bool is_computing(const PlanReport *r, int ranks) {
    Plan p = plan_with(r->plan, ranks);
    PlanStep step = plan_step(&p, r->rows);
    return 2 * step.exposed <= step.seconds;
}

// More than half of a step, if it is: what would not be waited for if answers came at once.
static bool is_latency_bound(const PlanReport *r, int ranks) {
    Plan p = plan_with(r->plan, ranks);
    PlanStep step = plan_step(&p, r->rows);
    p.device.efficiency.hop = p.device.efficiency.network_hop = 0;
    return 2 * (step.exposed - plan_step(&p, r->rows).exposed) > step.seconds;
}

static const char *bound_by(const PlanReport *r, int ranks) {
    if (is_latency_bound(r, ranks)) return "latency";
    return is_compute_bound(r, ranks) ? "compute" : "interconnect";
}

static void print_rank_row(FILE *f, const PlanReport *r, int ranks, double rate_of_one) {
    Plan p = plan_with(r->plan, ranks);
    double tokens = (double)(r->rows * p.shape.seq_len), machines = ceil((double)ranks / p.device.devices_a_machine);
    char a[TEXT_BYTES];
    fprintf(f, "%c%6d %8.0f %9s", ranks == r->plan->ranks ? '>' : ' ', ranks, machines, grouped(a, tokens / ranks));
    for (int s = 0; s < SHARDINGS; s++)
        fprintf(f, " %8s", ranks == 1 ? "-" : grouped(a, plan_critical_tokens(&p, (Sharding)s, ranks)));
    fprintf(f, "  %-12s", bound_by(r, ranks));
    if (r->rows < ranks) {
        fprintf(f, " fewer rows than ranks\n");
        return;
    }
    PlanStep step = plan_step(&p, r->rows);
    double rate = tokens / step.seconds, hours = 1e9 / rate / 3600;
    fprintf(f, " %7.2f %8.2f %12s %6.1f%% %7.3f", 1e3 * step.exposed, 1e3 * step.seconds, grouped(a, rate),
            100 * rate / (ranks * rate_of_one), hours);
    if (r->price > 0) fprintf(f, " %7.2f", hours * ranks * r->price);
    fprintf(f, "\n");
}

// The most ranks, none of them without a row, of which something holds that holds up to some number of them.
static int most_ranks(const PlanReport *r, bool (*holds)(const PlanReport *r, int ranks)) {
    const int64_t far = 1 << 20;
    int most = 1, over = (int)(r->rows < far ? r->rows + 1 : far);
    while (over - most > 1) {
        int middle = most + (over - most) / 2;
        if (plan_link_bandwidth(&r->plan->device, middle) > 0 && holds(r, middle)) most = middle;
        else over = middle;
    }
    return most;
}

// More ranks have fewer tokens each, need more for their links, and have more answers to wait for.
static void print_limit(FILE *f, const PlanReport *r) {
    fprintf(f, "  compute-bound up to %d ranks by bytes, up to %d by step time: at most half of it exposed\n",
            most_ranks(r, is_compute_bound), most_ranks(r, is_computing));
}

static void print_ranks(FILE *f, const PlanReport *r) {
    const Plan *p = r->plan;
    const PlanDevice *d = &p->device;
    int counts[RANK_ROWS], n = rank_counts(p->ranks, d->devices_a_machine, counts);
    bool price = r->price > 0;
    if (p->ranks == 1) return;
    if (!(plan_link_bandwidth(d, p->ranks) > 0))
        fprintf(f, "  what the ranks send each other is not counted: nothing is known of what joins them (--link)\n");
    if (d->devices_a_machine == 1 && !(d->network > 0)) return;
    fprintf(f, "\nranks, at this batch and --zero %d: ", p->zero);
    if (d->devices_a_machine > 1) fprintf(f, "%.4g GB/s each way among %d, ", 1e-9 * d->link, d->devices_a_machine);
    if (d->network > 0) fprintf(f, "%.4g GB/s a device between machines\n", 1e-9 * d->network);
    else fprintf(f, "beyond them nothing is known (--link)\n");
    fprintf(f, "%26s %26s %14s %7s %8s %20s %7s%s\n", "tokens", "tokens to be compute-bound", "", "exposed", "step", "",
            "hours a", price ? "  cost a" : "");
    fprintf(f, "%7s %8s %9s", "ranks", "machines", "a rank");
    for (int s = 0; s < SHARDINGS; s++) fprintf(f, " %8s", sharding_names[s]);
    fprintf(f, "  %-12s %7s %8s %12s %7s %7s%s\n", "bound by", "ms", "ms", "tok/s", "scaling", "B tok",
            price ? "   B tok" : "");
    Plan one = plan_with(p, 1);
    double rate = (double)(r->rows * p->shape.seq_len) / plan_step(&one, r->rows).seconds;
    for (int i = 0; i < n; i++)
        if (counts[i] == 1 || plan_link_bandwidth(d, counts[i]) > 0) print_rank_row(f, r, counts[i], rate);
    print_limit(f, r);
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

static double validation_seconds(const PlanReport *r, int64_t steps) {
    if (r->val_every <= 0 || r->val_rows <= 0) return 0;
    double times = floor((double)steps / (double)r->val_every) + (steps % r->val_every != 0);
    return times * plan_eval_seconds(r->plan, r->val_rows);
}

static void print_time(FILE *f, const PlanReport *r, const PlanRun *run) {
    if (!(r->plan->device.peak > 0)) return;
    char text[TEXT_BYTES];
    double validating = validation_seconds(r, run->steps), seconds = run->seconds + validating;
    fprintf(f, ", %s", duration(text, seconds));
    if (validating > 0) fprintf(f, " (%.2g%% of it validation)", 100 * validating / seconds);
    if (r->price > 0) fprintf(f, ", cost %.2f", seconds / 3600 * r->plan->ranks * r->price);
}

static void print_run_line(FILE *f, const PlanReport *r, const char *what, const PlanRun *run) {
    char a[TEXT_BYTES];
    fprintf(f, "%s%s%s step%s", what, run->cut ? "about " : "", grouped(a, (double)run->steps),
            plural((double)run->steps));
    if (run->first_batch == run->last_batch) fprintf(f, " of %lld rows", (long long)run->first_batch);
    else fprintf(f, " of %lld to %lld rows", (long long)run->first_batch, (long long)run->last_batch);
    print_time(f, r, run);
    fprintf(f, "\n");
}

// The noise scale of a run that has not been made is not known, but what it can do is: nothing, or all that the ramp
// lets it.
static void print_run(FILE *f, const PlanReport *r) {
    if (!r->ramp) return;
    fprintf(f, "\n");
    PlanRun slowest = plan_run(r->plan, r->ramp, 0);
    if (r->ramp->config.mode != RAMP_GNS) {
        print_run_line(f, r, "run         ", &slowest);
        return;
    }
    PlanRun fastest = plan_run(r->plan, r->ramp, INFINITY);
    fprintf(f, "run         the noise scale will say how long; the ramp's bounds are\n");
    print_run_line(f, r, "  never growing             ", &slowest);
    print_run_line(f, r, "  growing as soon as it may ", &fastest);
}

static void print_checkpoints(FILE *f, const PlanReport *r) {
    int64_t copies = r->ramp ? plan_checkpoints(r->ramp, r->checkpoint_every, r->best_every, r->keep) : 1;
    double bytes = (double)copies * r->checkpoint_bytes;
    char one[TEXT_BYTES], all[TEXT_BYTES], room[TEXT_BYTES];
    fprintf(f, "checkpoints %s each; at most %lld at a time: %s", binary(one, r->checkpoint_bytes), (long long)copies,
            binary(all, bytes));
    if (r->disk_free_bytes >= 0) {
        fprintf(f, ", %s free in %s", binary(room, r->disk_free_bytes), r->disk);
        if (r->disk_free_bytes < bytes) fprintf(f, ": NOT ENOUGH");
    }
    fprintf(f, "\n");
}

void plan_print(FILE *f, const PlanReport *r) {
    print_model(f, r);
    print_device(f, r);
    print_memory(f, r);
    if (r->plan->shape.inference) return;
    if (r->plan->device.peak > 0) {
        print_step(f, r);
        print_ranks(f, r);
    }
    print_run(f, r);
    print_checkpoints(f, r);
}
