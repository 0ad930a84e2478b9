// Prints a plan as a page for a person.
#include "plan/plan.h"

#include <math.h>

typedef struct {
    char s[80];
} Figure; // a number as text

// "19,073"
static Figure grouped(double x) {
    Figure out;
    x = rint(fmin(x, 1e18));
    if (x < 1000) snprintf(out.s, sizeof out.s, "%.0f", x);
    else snprintf(out.s, sizeof out.s, "%.60s,%03.0f", grouped(floor(x / 1000)).s, fmod(x, 1000));
    return out;
}

// "1.39 GiB"
static Figure binary(double bytes) {
    Figure out;
    bool small = bytes < (1 << 30);
    snprintf(out.s, sizeof out.s, "%.*f %s", small ? 1 : 2, bytes / (small ? 1 << 20 : 1 << 30), small ? "MiB" : "GiB");
    return out;
}

static Figure duration(double seconds) {
    Figure out;
    if (seconds < 120) snprintf(out.s, sizeof out.s, "%.3g seconds", seconds);
    else if (seconds < 7200) snprintf(out.s, sizeof out.s, "%.3g minutes", seconds / 60);
    else if (seconds < 3.6e6) snprintf(out.s, sizeof out.s, "%.3g hours", seconds / 3600);
    else snprintf(out.s, sizeof out.s, "%.24s days", grouped(seconds / 86400).s);
    return out;
}

// ---- Model, device, memory ------------------------------------------------------------------------------------------

static void print_training(const Plan *p) {
    const ModelConfig *c = &p->shape.model->config;
    double flops = model_flops_per_token(p->shape.model, p->shape.seq_len);
    printf("parameters  %s: %d layers, %d heads, %d channels, vocabulary %d, T %d\n",
           grouped((double)p->shape.model->parameters).s, c->layers, c->heads, c->channels, c->vocab, p->shape.seq_len);
    // model_flops_per_token: Kaplan et al. 2020 (arXiv 2001.08361), section 2.1, with causal attention
    printf("FLOPs       %.4g a token (" MODEL_FLOPS_FORMULA ")", flops);
    if (p->ramp)
        printf(", %.3g for %s tokens", flops * p->ramp->config.schedule.train_tokens,
               grouped(p->ramp->config.schedule.train_tokens).s);
    printf("\n");
    if (!p->train) return;
    const DatasetInfo *data = &p->train->info;
    printf("data        %s tokens", grouped((double)data->windows * p->shape.seq_len).s);
    if (p->ramp)
        printf(": %.2f epochs%s", p->ramp->config.schedule.train_tokens / (data->epoch * p->shape.seq_len),
               data->weights > 0 ? " of the source that is repeated most" : "");
    printf("\n");
}

static void print_device(const Plan *p) {
    const PlanDevice *d = &p->device;
    const Options *o = p->options;
    if (!(d->peak > 0)) {
        char names[400];
        device_spec_names(names, sizeof names);
        if (*d->name) printf("device      %s: not in the table of devices, so no times\n", d->name);
        else printf("device      none here, so no times\n");
        printf("            --device plans for %s\n", names);
        return;
    }
    Dtype dtype = d->value >= 4 ? DTYPE_FP32 : p->shape.dtype == DTYPE_FP16 ? DTYPE_FP16 : DTYPE_BF16;
    printf("device      %s: %.3g TFLOP/s %s, %.4g GB/s, ", d->name, 1e-12 * d->peak, dtype_names[dtype],
           1e-9 * d->spec.bandwidth);
    if (d->spec.memory_bytes > 0) printf("%.0f GiB ", d->spec.memory_bytes / (1 << 30));
    else printf("memory unknown ");
    const bool own = o->device_flops > 0 || o->device_bandwidth > 0 || o->device_memory > 0;
    const char *source = own ? "figures as given" : d->measured ? "measured just now" : "data sheet";
    const char *kernels = d->fuses_exact ? "; Hopper's kernels" : d->measured ? "" : "; general kernels";
    printf("(%s%s); critical intensity %.3g FLOPs a byte\n", source, kernels, d->peak / d->spec.bandwidth);
}

static void print_memory(const Plan *p) {
    const double mib = 1 << 20;
    const int most_ranks = 8960;
    MemoryPlan memory;
    double copy = plan_memory(p, p->shape.micro_batch, &memory);
    const bool known = p->device.spec.memory_bytes > 0;
    const bool lacks = known && !p->shape.inference && !plan_fewest_ranks(p, ZERO_0, 1);
    printf("\nmemory of %s, --micro-batch %d\n", p->ranks > 1 ? "a rank" : "the device", p->shape.micro_batch);
    for (int i = 0; i < memory.count; i++)
        printf("  %-36s %10.1f MiB\n", memory.item[i].what, (double)memory.item[i].bytes / mib);
    printf("  %-36s %10.1f MiB", "memory in all", (double)memory.total / mib);
    if (known) {
        int fits = plan_largest_micro_batch(p);
        printf(" of %.0f; ", plan_usable_memory(&p->device) / mib);
        if (fits)
            printf("%sthe largest --micro-batch that fits is %d", fits < p->shape.micro_batch ? "DOES NOT FIT: " : "",
                   fits);
        else printf("NOT EVEN ONE ROW FITS");
    }
    printf("\n");
    for (int zero = ZERO_0; zero <= ZERO_3 && lacks; zero++) {
        int fewest = plan_fewest_ranks(p, (ZeroStage)zero, most_ranks);
        printf(zero ? ", " : "  ranks from which it fits, at this micro-batch: ");
        printf(fewest ? "%d" : "none", fewest);
        printf(zero ? " with %d" : " with --zero %d", zero);
    }
    if (lacks) printf("\n");
    if (copy > 0 && !p->device.measured)
        printf("  (on the host: %s, a copy from which checkpoints are written)\n", binary(copy).s);
    if (p->estimate_memory) printf("  (estimated; train_gpt2cu --dry-run knows them to the byte, without a GPU)\n");
    if (!p->device.measured)
        printf("  (CUDA, libraries and NCCL as measured on H200s, driver 580%s)\n",
               p->ranks > 1 ? "; NCCL with NCCL_NVLS_ENABLE=0, otherwise it may take more" : "");
}

// ---- A step: the roofline of its kernels ----------------------------------------------------------------------------

static const char *const family_names[FAMILIES] = {
    "matmul, blocks", "matmul, head", "attention",   "LayerNorm, residual",     "GELU", "bias gradients", "loss",
    "embedding",      "dropout",      "exact norms", "update, norms, clearing",
};

static void print_step(const Plan *p) {
    int64_t T = p->shape.seq_len;
    PlanStep step = plan_step(p, p->rows);
    double tokens = (double)(p->rows * T), rate = tokens / step.seconds;
    double mfu = rate * model_flops_per_token(p->shape.model, (int)T) / (p->device.peak * p->ranks);
    printf("\nstep of %lld rows, %s tokens", (long long)p->rows, grouped(tokens).s);
    if (p->ranks > 1) printf(", on %d ranks", p->ranks);
    printf(": %lld micro-step%s\n", (long long)step.micro_steps, step.micro_steps == 1 ? "" : "s");
    if (p->rows < p->ranks / p->sharing.tensor)
        printf("  FEWER ROWS THAN RANKS: such a run is refused; use --batch-tokens %lld or more\n",
               (long long)(p->ranks / p->sharing.tensor * T));
    double flops = 0;
    for (int i = 0; i < FAMILIES; i++) flops += step.all.family[i].flops;
    bool tera = flops >= 1e13;
    double unit = step.seconds < 100 ? 1e3 : 1;                        // printed units per second
    const double critical = p->device.peak / p->device.spec.bandwidth; // FLOPs per byte
    printf("  %-24s %9s %9s %11s  %-8s %9s %6s\n", "kernels", tera ? "TFLOPs" : "GFLOPs", "GB", "FLOPs/byte",
           "bound by", unit > 1 ? "ms" : "s", "share");
    for (int i = 0; i < FAMILIES; i++) {
        double work = step.all.family[i].flops, bytes = step.all.family[i].bytes, s = step.all.family[i].seconds;
        if (!(bytes > 0)) continue;
        printf("  %-24s %9.4g %9.3g %11.1f  %-8s %9.4g %5.1f%%\n", family_names[i], work / (tera ? 1e12 : 1e9),
               1e-9 * bytes, work / bytes, work / bytes < critical ? "memory" : "compute", unit * s,
               100 * s / step.seconds);
    }
    if (step.exposed > 0)
        printf("  %-24s %9s %9s %11s  %-8s %9.4g %5.1f%%\n", "waiting for other ranks", "", "", "", "link",
               unit * step.exposed, 100 * step.exposed / step.seconds);
    if (step.seconds < 10) printf("  %.4g ms", 1e3 * step.seconds);
    else printf("  %s", duration(step.seconds).s);
    printf(", %s tok/s, MFU %.1f%%\n", grouped(rate).s, 100 * mfu);
}

// ---- Ranks ----------------------------------------------------------------------------------------------------------

static bool is_linked(const Plan *p, int ranks) { return ranks == 1 || plan_link_bandwidth(&p->device, ranks) > 0; }

// True if at most half of a step's time is exposed communication. groups: of --tensor ranks each.
static bool is_computing(const Plan *plan, int groups) {
    Plan p = plan_with(plan, plan->sharing.zero, groups * plan->sharing.tensor, plan->sharing.tensor);
    PlanStep step = plan_step(&p, p.rows);
    return is_linked(plan, p.ranks) && 2 * step.exposed <= step.seconds;
}

static void print_row(const Plan *plan, int ranks, ZeroStage zero, int tensor, double rate_of_one) {
    const Plan p = plan_with(plan, zero, ranks, tensor);
    const bool own = ranks == plan->ranks && zero == plan->sharing.zero && tensor == plan->sharing.tensor;
    double tokens = (double)(p.rows * p.shape.seq_len), price = p.options->price;
    const int groups = ranks / p.sharing.tensor;
    const char *bound = !is_linked(&p, ranks) ? "unknown" : is_computing(&p, groups) ? "compute" : "interconnect";
    const bool few = p.rows < groups;
    MemoryPlan memory;
    plan_memory(&p, p.shape.micro_batch, &memory);
    printf("%c%6d %6d %6d %8.0f %7.2f %9s  %-12s", own ? '>' : ' ', ranks, zero, p.sharing.tensor,
           ceil((double)ranks / p.device.spec.devices_a_machine), ldexp((double)memory.total, -30),
           grouped(tokens / ranks).s, bound);
    if (few || !is_linked(&p, ranks)) {
        printf(few ? " fewer rows than ranks\n" : " no times without --link\n");
        return;
    }
    PlanStep step = plan_step(&p, p.rows);
    double rate = tokens / step.seconds, hours = 1e9 / rate / 3600;
    printf(" %7.4g %7.2f %8.2f %12s %6.1f%% %7.3f", 1e-9 * step.bytes, 1e3 * step.exposed, 1e3 * step.seconds,
           grouped(rate).s, 100 * rate / (ranks * rate_of_one), hours);
    if (price > 0) printf(" %7.2f", hours * ranks * price);
    printf("\n");
}

// Prints the numbers of tokens and ranks with which a step is compute-bound, then what collectives cost.
//
// Austin et al. 2025, "How to scale your model", parts 5 and 12. Transfers overlap with arithmetic and with each other,
// at the full rates: C FLOP/s, and W B/s along each of m axes. FSDP takes m_F axes and K_F ranks, tensor parallelism
// m_T and K_T; m = m_F + m_T, K = K_F K_T. With I = v C / (2 W) for values of v bytes, the forward pass of an MLP
// (d to D to d channels) on B tokens takes
//
//     products   4 B d D / (K C)          seconds
//     FSDP       2 v d D / (K_T m_F W)    gathers two matrices divided by K_T. K_T = 1: compute-bound if B / K > I / m
//     tensors    2 v B d / (K_F m_T W)    gathers, then scatters activations. K_F = 1: compute-bound if K_T < D m / I
//
// The best split makes both transfers equally long: K_F = sqrt(B K m_F / (D m_T)). They take less time than the
// products if B / K > I^2 / (D m_F m_T). With a switch both share one link: m_F = m_T = 1/2. Only FSDP's transfers
// cross machines, and dividing tensors within a machine does not change the bytes that its network carries. Data
// parallelism sums gradients in the backward pass: twice FSDP's bytes for twice the FLOPs.
static void print_links(const Plan *p) {
    const ModelConfig *c = &p->shape.model->config;
    const PlanDevice *d = &p->device;
    const int machine = d->spec.devices_a_machine, inside = machine > 1 && p->ranks > machine ? machine : p->ranks;
    const double tokens = (double)(p->rows * p->shape.seq_len), K = p->ranks, D = 4.0 * c->channels;
    const double m = fmax(1, d->spec.axes), m_T = m > 1 ? floor(m / 2) : 0.5, m_F = m - m_T;
    const double flops = d->value / 2 * d->peak, I = flops / (plan_link_bandwidth(d, inside) / m);
    const double network = inside < p->ranks ? flops / (d->spec.network * machine) : 0;
    const double fsdp = flops / plan_link_bandwidth(d, p->ranks), both = fmax(I * I / (D * m_F * m_T), network);
    const double tensor_ranks = machine > 1 ? fmin(machine, D * m / I) : D * m / I;
    const double fsdp_ranks = fmin(K, fmax(K / inside, sqrt(tokens * K * m_F / (D * m_T)))); // of the best split
    printf("\ncompute-bound by bytes alone (Austin et al. 2025, How to scale your model), here %s tokens a rank\n",
           grouped(tokens / p->ranks).s);
    printf("  data parallel and FSDP: from %s tokens a rank; tensor parallel: up to %.3g ranks%s\n", grouped(fsdp).s,
           tensor_ranks, tensor_ranks < 2 ? ", so never" : "");
    if (both < fsdp)
        printf("  FSDP and tensor parallel: from %s tokens a rank; best here over %s and %.3g ranks\n", grouped(both).s,
               grouped(fsdp_ranks).s, K / fsdp_ranks);
    else printf("  FSDP and tensor parallel: from no fewer tokens than FSDP alone\n");
    // A token costs 6 N + 6 L C T FLOPs (N: weights of the products, 12 L C^2 + V C). Attention's term, 6 L C T, is the
    // larger one from T = N / (L C) = 12 C + V / L on.
    printf("  attention has more FLOPs than the products from T %s\n",
           grouped(model_flops_per_token(p->shape.model, 0) / (6.0 * c->layers * c->channels)).s);

    const double bytes = d->value * (double)range_length(model_bucket(p->shape.model, 1));
    const double ring = plan_ring_seconds(d, p->ranks, bytes), sent = 1e-6 * bytes * (K - 1) / K;
    printf("%-37s %10s %14s %10s %10s\n", "collectives, of a block's weights", "all-gather", "reduce-scatter",
           "all-reduce", "all-to-all");
    printf("  MB that a rank sends, of %-10.4g %10.4g %14.4g %10.4g %10.4g\n", 1e-6 * bytes, sent, sent, 2 * sent,
           sent / K);
    printf("  ms%33s %10.4g %14.4g %10.4g %10.4g\n", "", 1e3 * ring, 1e3 * ring, 2e3 * ring,
           1e3 * plan_all_to_all_seconds(d, p->ranks, bytes));
}

// Returns the largest --tensor to consider.
static int tensor_most(const Plan *p) {
    if (dtype_is_fp8(p->shape.dtype) || p->shape.optimizer == OPTIMIZER_MUON) return 1;
    return (int)fmin(p->shape.model->config.heads, p->device.spec.devices_a_machine);
}

// Returns plan q's "--zero 3 --tensor 2", then q's other options that differ from plan p's.
static Figure mesh(const Plan *q, const Plan *p) {
    Figure out;
    const bool shards = q->sharing.reduce != p->sharing.reduce && q->sharing.reduce == REDUCE_MICRO_STEP;
    size_t n = (size_t)snprintf(out.s, sizeof out.s, "--zero %d", q->sharing.zero);
    if (q->sharing.tensor > 1) n += (size_t)snprintf(out.s + n, sizeof out.s - n, " --tensor %d", q->sharing.tensor);
    if (q->sharing.shared) n += (size_t)snprintf(out.s + n, sizeof out.s - n, " --shard machine");
    if (shards) n += (size_t)snprintf(out.s + n, sizeof out.s - n, " --reduce micro-step");
    if (q->shape.micro_batch != p->shape.micro_batch)
        snprintf(out.s + n, sizeof out.s - n, " --micro-batch %d", q->shape.micro_batch);
    return out;
}

// Names the fastest --zero and --tensor that fit on the plan's ranks. Compares the fastest plans with and without
// --tensor. If a plan does not fit, tries a smaller micro-batch, with --zero 2 and 3 also --reduce micro-step.
static void print_advice(const Plan *p) {
    const int given = p->shape.micro_batch;
    Plan best[2];                             // [0]: without --tensor; [1]: with --tensor
    double seconds[2] = {INFINITY, INFINITY}; // INFINITY: none fits
    for (int k = 1; k <= tensor_most(p); k *= 2)
        for (int i = 0; i < 8 && p->ranks % k == 0 && p->ranks / k <= p->rows; i++) { // i >= 4: --shard machine
            const int zero = i % 4, machine = plan_machine(&p->device, p->ranks);
            if (i >= 4 && (machine == p->ranks || p->ranks % machine || machine % k)) continue;
            Plan q = plan_with(p, (ZeroStage)zero, p->ranks, k);
            q.sharing.shared = i >= 4 ? machine : 0;
            if (q.device.spec.memory_bytes > 0 && !plan_fits(&q, given)) {
                if (zero >= ZERO_2) q.sharing.reduce = REDUCE_MICRO_STEP;
                q.shape.micro_batch = (int)fmin(given, plan_largest_micro_batch(&q));
            }
            const double s = q.shape.micro_batch ? plan_step(&q, q.rows).seconds : INFINITY;
            if (s < seconds[k > 1]) best[k > 1] = q, seconds[k > 1] = s;
        }
    const int take = seconds[1] < seconds[0];
    const double times = seconds[!take] / seconds[take];
    if (isinf(seconds[take])) printf("  advice: nothing fits; change ranks or --batch-tokens, or use --recompute\n");
    else if (isfinite(times))
        printf("  advice: %s; %s takes %.2f times as long\n", mesh(&best[take], p).s, mesh(&best[!take], p).s, times);
    else printf("  advice: %s%s\n", mesh(&best[take], p).s, take ? "; without --tensor memory or rows fall short" : "");
}

// Prints a row for each number of ranks, rows for other --zero and --tensor on the plan's ranks, then print_links.
static void print_ranks(const Plan *p) {
    const PlanDevice *d = &p->device;
    bool price = p->options->price > 0;
    if (p->ranks == 1) return;
    printf("\nranks, at this batch: ");
    if (d->spec.devices_a_machine > 1) {
        printf("%.4g GB/s each way", 1e-9 * d->spec.link);
        if (d->spec.axes) printf(" along %d axes", d->spec.axes);
        printf(" among %d, ", d->spec.devices_a_machine);
    }
    if (d->spec.network > 0) printf("%.4g GB/s a device between machines\n", 1e-9 * d->spec.network);
    else printf("between machines unknown (--link)\n");
    printf("%37s %9s %22s %8s %8s %20s %7s%s\n", "GiB", "tokens", "GB sent", "exposed", "step", "", "hours a",
           price ? "  cost a" : "");
    printf("%7s %6s %6s %8s %7s %9s  %-12s %7s %7s %8s %12s %7s %7s%s\n", "ranks", "--zero", "tensor", "machines",
           "a rank", "a rank", "bound by", "a rank", "ms", "ms", "tok/s", "scaling", "B tok", price ? "   B tok" : "");
    const int K = p->sharing.tensor;
    const Plan one = plan_with(p, p->sharing.zero, 1, 1);
    double rate = (double)(p->rows * p->shape.seq_len) / plan_step(&one, p->rows).seconds;
    for (int n = 1; n <= 4 * p->ranks; n++) { // powers of two, one machine, and the plan's own number
        bool shown = n % K == 0 && ((n & (n - 1)) == 0 || n == d->spec.devices_a_machine);
        if (n == p->ranks || (shown && n / K <= p->rows && is_linked(p, n))) print_row(p, n, p->sharing.zero, K, rate);
    }
    for (int zero = ZERO_0; zero <= ZERO_3; zero++)
        if (zero != (int)p->sharing.zero) print_row(p, p->ranks, (ZeroStage)zero, K, rate);
    for (int k = 1; k <= tensor_most(p); k *= 2)
        if (k != K && p->ranks % k == 0) print_row(p, p->ranks, p->sharing.zero, k, rate);
    if (!is_linked(p, p->ranks)) return;
    if (p->rows * tensor_most(p) >= p->ranks) print_advice(p);
    const int most = K * plan_most(p, 0, (int)fmin((double)p->rows, 1 << 20) + 1, is_computing);
    if (most) printf("  compute-bound up to %d ranks: at most half of a step's time is exposed\n", most);
    else printf("  interconnect-bound on any number of ranks: more than half of a step's time is exposed\n");
    print_links(p);
}

// ---- The run --------------------------------------------------------------------------------------------------------

static void print_run(const Plan *p, const char *what, double target) {
    const PlanRun run = plan_run(p, target);
    printf("%s%s%s step%s of %lld", what, run.cut ? "about " : "", grouped((double)run.steps).s,
           run.steps == 1 ? "" : "s", (long long)run.first_batch);
    if (run.first_batch != run.last_batch) printf(" to %lld", (long long)run.last_batch);
    printf(" rows");
    if (p->device.peak > 0) {
        const Options *o = p->options;
        const int64_t every = o->val_every, validations = every > 0 && *o->val ? (run.steps + every - 1) / every : 0;
        int64_t rows = (o->val_tokens + p->shape.seq_len - 1) / p->shape.seq_len; // of a validation
        if (p->val) rows = (int64_t)fmin((double)rows, (double)p->val->info.windows);
        double validating = validations ? (double)validations * plan_step(p, rows).all.pass[PASS_FORWARD] : 0;
        double seconds = run.seconds + validating;
        printf(", %s", duration(seconds).s);
        if (validating > 0) printf(" (%.2g%% of it validation)", 100 * validating / seconds);
        if (o->price > 0) printf(", cost %.2f", seconds / 3600 * p->ranks * o->price);
    }
    printf("\n");
}

// Suggests values of the options that nobody gave, for AdamW: 20 tokens per parameter (Hoffmann et al. 2022, arXiv
// 2203.15556); batch and lr by Step Law (Li et al. 2025, arXiv 2503.04715: B = 0.58 D^0.571 tokens, lr = 1.79 N^-0.713
// D^0.307, N without embeddings); warm-up of 2 / (1 - beta2) steps (Ma and Yarats 2021, arXiv 1910.04209).
static void print_suggestions(const Plan *p) {
    const Options *o = p->options;
    const ModelConfig *c = &p->shape.model->config;
    const bool wants_batch = !o->given[OPTION_batch_tokens] && !o->steps, wants_rate = !o->given[OPTION_lr];
    const double N = 12.0 * c->layers * c->channels * c->channels, T = p->shape.seq_len;
    double D = p->ramp ? p->ramp->config.schedule.train_tokens : 20.0 * (double)p->shape.model->parameters;
    if (o->train_hours && p->device.peak > 0)
        D = 3600 * o->train_hours * (double)p->rows * T / plan_step(p, p->rows).seconds;
    const double rows = wants_batch ? fmax(round(0.58 * pow(D, 0.571) / T), p->ranks / p->sharing.tensor)
                                    : (double)o->run.batch_ref_rows;
    if (o->optimizer != OPTIMIZER_ADAMW || !(wants_batch || wants_rate) || !model_preset(&(ModelConfig){0}, o->model))
        return;
    printf("suggested   for %s tokens:", grouped(round(D)).s);
    if (wants_batch) printf(" --batch-tokens %.0f", rows * T);
    if (wants_rate) printf(" --lr %.1e", 1.79 * pow(N, -0.713) * pow(D, 0.307));
    if (!o->given[OPTION_warmup_tokens])
        printf(" --warmup-tokens %.0f", fmin(ceil(2 / (1 - o->beta2)) * rows * T, 0.1 * D));
    printf("\n            (Step Law, arXiv 2503.04715: AdamW on web text; %stry half and a quarter of the rate, too)\n",
           p->ramp || o->train_hours ? "" : "20 tokens per parameter; ");
}

void plan_print(const Plan *p) {
    print_training(p);
    print_device(p);
    print_memory(p);
    if (p->shape.inference) return;
    if (p->device.peak > 0) {
        print_step(p);
        print_ranks(p);
    }
    if (p->ramp && p->ramp->config.mode == RAMP_GNS) { // the noise scale of a future run is unknown
        printf("\nrun         its length depends on the noise scale; the ramp's bounds are\n");
        print_run(p, "  never growing             ", 0);
        print_run(p, "  growing as soon as it may ", INFINITY);
    } else if (p->ramp) print_run(p, "\nrun         ", 0);
    print_suggestions(p);
    const int64_t copies = p->ramp ? plan_checkpoints(p->ramp, p->options) : 1;
    const double bytes = (double)copies * p->checkpoint_bytes;
    printf("checkpoints %s each; at most %lld at a time: %s, %s free in %s%s\n", binary(p->checkpoint_bytes).s,
           (long long)copies, binary(bytes).s, binary(p->disk_free_bytes).s, p->options->out,
           p->disk_free_bytes < bytes ? ": NOT ENOUGH" : "");
}
