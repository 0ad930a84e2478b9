// One optimizer step: micro-steps, norms, update, noise scale, and a line of metrics.jsonl.
#include "run/run.h"

#include "math/adamw.h"

// Returns GNS_EXACT in the first step and every gns_exact_interval-th after it. A calibrating ramp picks its own steps.
static GnsMode step_mode(const Run *r) {
    const int64_t every = r->options.run.gns_exact_interval;
    if (r->options.gns == GNS_OFF) return GNS_OFF;
    if (r->options.run.gns_calibrates)
        return noise_sample_due(&r->position.noise, (double)r->at.tokens) ? GNS_EXACT : GNS_LN;
    return every > 0 && r->at.step % every == 0 ? GNS_EXACT : GNS_LN;
}

// On a thread: reads examples [first, first + count) into data.ahead. A failure sets count to 0.
static void *read_ahead(void *run_data) {
    RunData *d = run_data;
    if (dataset_rows(d->train, (uint64_t)d->first, (int)d->count, d->ahead, &(Error){0})) d->count = 0;
    return NULL;
}

// Sets data.rows to examples [first, first + n) of the training data, and starts to read [next, next + next_n).
static int train_rows(Run *r, int64_t first, int64_t n, int64_t next, int64_t next_n, Error *e) {
    RunData *d = &r->data;
    worker_join(&d->reader);
    if (d->first == first && d->count >= n) // count > n in the run's last step
        memcpy(d->rows, d->ahead, (size_t)(n * (r->shape.seq_len + 1)) * sizeof *d->rows);
    else TRY(dataset_rows(d->train, (uint64_t)first, (int)n, d->rows, e));
    d->first = next;
    d->count = next_n;
    if (worker_start(&d->reader, read_ahead, d, "reading data", &(Error){0})) d->count = 0;
    return 0;
}

// Computes the gradients of B rows over all ranks, and their norms. During a micro-step a thread reads the rank's next
// rows; during the last micro-step it reads rows of the next step, assuming the same batch. A rank without rows makes
// empty micro-steps. So does a rank that cannot read its rows; with --tensor it computes rows of zeros, since its group
// waits for them. If a rank cannot read, all ranks fail after the last micro-step. what: see progress_begin.
static int run_rows(Run *r, int64_t B, GnsMode mode, const char *what, Error *e) {
    const int ranks = r->comm->ranks, groups = r->parallel.groups, T = r->shape.seq_len;
    RankRows mine = rows_of_rank(B, r->parallel.group, groups);
    int64_t first = r->at.examples + mine.first, most = r->shape.micro_batch, done = 0;
    int64_t micro_steps = parallel_micro_steps(&r->parallel, B);
    Error unread = {0};
    progress_begin(&r->progress, what, B * T);
    if (r->at.loss_scale.scale > 0) engine_scale_loss(r->engine, r->at.loss_scale.scale);
    if (dtype_is_fp8(r->shape.dtype)) engine_exponents(r->engine, r->at.exponents);
    TRY(parallel_begin_step(&r->parallel, e));
    engine_examples(r->engine, (uint64_t)first);
    for (int64_t i = 0; i < micro_steps; i++) {
        int64_t n = mine.count - done < most ? mine.count - done : most;
        const bool last = done + n == mine.count; // then read rows of the next step
        const int64_t next = last ? first + B : first + done + n, left = last ? mine.count : mine.count - done - n;
        if (n > 0 && !unread.code) train_rows(r, first + done, n, next, left < most ? left : most, &unread);
        if (unread.code && ranks == 1) break;
        uint16_t *rows = n > 0 && (!unread.code || r->parallel.config.tensor > 1) ? r->data.rows : NULL;
        if (unread.code && rows) memset(rows, 0, (size_t)(n * (T + 1)) * sizeof *rows);
        progress_next(&r->progress, done * groups * T);
        TRY(parallel_micro_step(&r->parallel, rows, rows ? (int)n : 0, mode, i == micro_steps - 1, e));
        for (int64_t b = 0; rows && r->options.outliers && b < n; b++) { // rarity: mean surprise of a row's tokens
            double sum = 0;
            for (int t = 0; t < T; t++) sum += r->position.outliers.surprise[rows[b * (T + 1) + t]];
            r->position.outliers.rarity[done + b] = sum / T;
        }
        comm_progress(r->comm);
        done += n;
    }
    if (ranks > 1 || !unread.code) TRY(parallel_norms(&r->parallel, e));
    if (unread.code) *e = unread;
    return comm_agree(r->comm, unread.code, e);
}

static int fail_nonfinite(Run *r, int64_t B, Error *e) {
    comm_settle(r->comm); // all ranks have the same sums
    return FAIL(e, ERR_NONFINITE, "try a lower --lr, a longer --warmup-tokens or --grad-clip 1",
                "step %lld, examples %lld to %lld: loss %g, gradient norm %g, not finite; the update was not made",
                (long long)r->at.step + 1, (long long)r->at.examples, (long long)(r->at.examples + B - 1),
                r->position.result.loss_sum / (double)B, r->position.grad_norm);
}

static UpdateConfig update_config(const Run *r, int64_t B) {
    const double after = (double)(r->at.tokens + B * r->shape.seq_len);
    const double lr = ramp_lr(&r->position.ramp, schedule_lr(&r->position.ramp.config.schedule, after), B);
    return (UpdateConfig){
        .lr = lr * r->options.adamw_lr_factor,
        .muon_lr = lr,
        .beta1 = r->options.beta1,
        .beta2 = r->options.beta2,
        .eps = r->options.eps,
        .weight_decay = r->options.weight_decay,
        .momentum = r->options.momentum,
        .grad_clip = r->options.grad_clip,
        // A skipped outlier counts as a step of AdamW; an overflow does not.
        .step = r->at.moment_steps + r->at.step + 1 - r->at.loss_scale.overflows,
        .batch = B,
    };
}

// Updates the noise scales, and with them the ramp.
static void observe_noise(Run *r, int64_t B, GnsMode mode, RampTarget *target) {
    double step_tokens = (double)(B * r->shape.seq_len), done = (double)r->at.tokens + step_tokens;
    noise_observe(&r->position.noise, &r->model, &r->position.result, B, step_tokens, done, mode);
    if (mode == GNS_OFF) return;
    GnsFactor c;
    const GnsTracker *signal = noise_signal(&r->position.noise, &c);
    *target = ramp_target(&r->position.ramp, signal, c);
    ramp_observe(&r->position.ramp, step_tokens, r->position.noise.half_life, target->aim);
    const int sources = r->position.noise.sources;
    double share[sources + 1], sq[sources + 1], *gram = r->position.result.source_gram;
    for (int s = 0; s < sources; s++) share[s] = r->data.train->source[s].share, sq[s] = 0;
    for (int64_t b = 0; b < B && sources; b++)
        sq[dataset_example_source(r->data.train, (uint64_t)(r->at.examples + b))] += r->position.rows[b].sq;
    noise_observe_sources(&r->position.noise, (double)B, gram[sources * sources], share, sq, gram, step_tokens);
}

// Returns the first site of fp8 that saturated; -1 if none did, or if no exponent suits some amax.
static int saturated_site(const Run *r) {
    const float *amax = r->position.result.amax;
    int first = -1;
    for (int i = amax ? fp8_exponents(r->model.config.layers) - 1 : -1; i >= 0; i--) {
        const int at = fp8_exponent_at(i);
        if (fp8_saturates(-FP8_EXPONENT_MAX, amax[at])) return -1;
        if (fp8_saturates(r->at.exponents[at], amax[at])) first = at;
    }
    return first;
}

// Adapts exponents and, to rank 0's rows, channels with low parts. begin: see fp8_adapt.
static int adapt_fp8(Run *r, bool begin, Error *e) {
    const int layers = r->model.config.layers;
    const float *amax = r->position.result.amax; // NULL: not fp8
    if (!amax) return 0;
    fp8_adapt(r->at.exponents, amax, layers, begin);
    return comm_broadcast(r->comm, r->at.exponents, (size_t)fp8_entries(layers), e);
}

// Sums the step's statistics over all ranks. ERR_NONFINITE if the loss or a gradient is not finite, except after an
// overflow: the scaled gradient of fp16 overflowed, or factors of fp8 saturated, so the gradient's norm is not finite,
// but the loss is. A smaller scale may then help. The engine skips the update of such a gradient.
static int step_result(Run *r, int64_t B, StepSums *sums, Error *e) {
    *sums = (StepSums){.result = &r->position.result, .stop = r->position.stop || comm_asked_to_stop(r->comm)};
    sums->more = saver_writes(r->saving.saver);
    const Parallel *p = &r->parallel;
    const RankRows mine = rows_of_rank(B, p->group, p->groups);
    if (r->shape.step_rows) r->position.result.row = r->position.rows + mine.first;
    if (r->shape.step_rows) memset(r->position.rows, 0, (size_t)B * sizeof *r->position.rows);
    TRY(engine_result(r->engine, &r->position.result, e));
    for (int64_t b = 0; b < mine.count && r->options.outliers; b++) // each of a group's ranks adds 1 / tensor
        r->position.result.row[b].rarity = r->position.outliers.rarity[b] / p->config.tensor;
    TRY(parallel_sums(&r->parallel, sums, e));
    double *gram = r->position.result.source_gram;
    gram[r->position.noise.sources * r->position.noise.sources] = (double)(p->own * (p->own - 1)); // ordered pairs
    if (r->shape.step_rows) TRY(comm_sum(r->comm, gram, (int)((double *)(r->position.rows + B) - gram), e));
    r->saving.writing = sums->more;
    r->position.stop = sums->stop;
    double grad_sq = 0; // |sum_b g_b|^2
    for (int i = 0; i < r->model.tensor_count; i++) grad_sq += r->position.result.grad_sq[i];
    r->position.grad_norm = sqrt(grad_sq) / (double)B;
    const bool scales = r->at.loss_scale.scale > 0 || saturated_site(r) >= 0;
    const bool finite = isfinite(r->position.result.loss_sum), finite_norm = isfinite(r->position.grad_norm);
    r->position.overflowed = scales && finite && !finite_norm;
    return finite && (finite_norm || scales) ? 0 : fail_nonfinite(r, B, e);
}

// ---- Outliers -------------------------------------------------------------------------------------------------------

static bool is_outlier(Run *r, int64_t B) {
    const double most = r->options.on_spike ? r->options.spike_z : INFINITY;
    double loss = r->position.result.loss_sum / (double)B, norm = r->position.grad_norm;
    double loss_z = outliers_z(&r->at.loss_window, loss, most), norm_z = outliers_z(&r->at.grad_window, norm, most);
    r->at.spikes.value[r->at.spikes.count % OUTLIERS_WINDOW] = fmax(loss_z, norm_z);
    bool loss_out = r->options.skip_loss_z > 0 && loss_z > r->options.skip_loss_z,
         norm_out = r->options.skip_grad_z > 0 && norm_z > r->options.skip_grad_z;
    if (!loss_out && !norm_out) return false;
    if (!is_rank0(r)) return true;
    progress_break(&r->progress);
    fprintf(stderr, "step %lld: %s is an outlier (loss %.4g, z %.3g; gradient norm %.4g, z %.3g): update skipped\n",
            (long long)r->at.step + 1, loss_out ? "the loss" : "the gradient norm", loss, loss_z, norm, norm_z);
    return true;
}

// Updates the weights and sums the step's statistics. With --skip-loss-z or --skip-grad-z the update waits for the
// statistics, and so for the device.
static int update_unless_outlier(Run *r, int64_t B, const UpdateConfig *update, bool *skipped, StepSums *sums,
                                 Error *e) {
    // cut: the horizon or a replayed file shortened this step, so its mean gradient is noisier than a whole step's.
    const bool cut = B < r->at.batch && r->at.tokens + (B + 1) * r->shape.seq_len > r->options.run.horizon_tokens;
    const bool skips = r->options.skip_loss_z > 0 || r->options.skip_grad_z > 0;
    *skipped = false;
    if (skips && !cut) {
        TRY(step_result(r, B, sums, e));
        *skipped = r->position.overflowed || is_outlier(r, B);
    }
    if (!*skipped) {
        await_copy(r);
        TRY(parallel_update(&r->parallel, update, e));
    }
    TRY(step_result(r, B, sums, e));
    if (r->options.on_spike && !skips && !cut && !r->position.overflowed) is_outlier(r, B);
    return 0;
}

// Sets the loss scale or the exponents of the next step. *skipped: fp16's gradient overflowed. *repeat: a factor of fp8
// saturated; the step must be computed again, with the new exponents. Repeats end, since a site's amax depends only on
// the exponents of sites computed before it: each repeat settles a further site. A skip instead would cost loss: skips
// during the warm-up cost 0.06 nats after 80 steps (mean of seven seeds), 0.07 after 2,000 (one run; d12, 64 rows).
// ERR_NONFINITE on overflow at the smallest loss scale.
static int adapt_scales(Run *r, int64_t B, bool *skipped, bool *repeat, Error *e) {
    RunPoint *at = &r->at;
    const double scale = at->loss_scale.scale; // 0: not fp16
    const bool overflowed = r->position.overflowed;
    const int site = overflowed && scale == 0 ? saturated_site(r) : 0, k = at->exponents[site];
    *repeat = overflowed && scale == 0;
    *skipped = *skipped || overflowed;
    TRY(adapt_fp8(r, at->tokens >= r->options.warmup_tokens, e)); // fp8 in the warm-up costs loss for the whole run
    if (*repeat) at->loss_scale.overflows++, at->moment_steps++;  // AdamW's step stays the same
    if (scale != 0 && !loss_scale_step(&at->loss_scale, overflowed)) return fail_nonfinite(r, B, e);
    if (!overflowed || !is_rank0(r)) return 0;
    progress_break(&r->progress);
    const int l = site / FP8_ENTRIES, s = site % FP8_ENTRIES;
    if (*repeat && l == r->model.config.layers)
        fprintf(stderr, "step %lld: fp8 overflows at exponent %d of the head's %s: computed again with %d\n",
                (long long)at->step + 1, k, s == FP8_LN2 ? "lnf" : "wte", at->exponents[site]);
    else if (*repeat)
        fprintf(stderr, "step %lld: fp8 overflows at exponent %d of block %d's %s: computed again with %d\n",
                (long long)at->step + 1, k, l, fp8_site_names[s], at->exponents[site]);
    else
        fprintf(stderr, "step %lld: the gradient overflows at loss scale %.0f: update skipped, now %.0f\n",
                (long long)at->step + 1, scale, at->loss_scale.scale);
    return 0;
}

// ---- A step ---------------------------------------------------------------------------------------------------------

// True on rank 0 if --max-hours leaves time for this step and a save, but not for a further step. Call once per step.
static bool out_of_time(Run *r) {
    const double ending = 2; // seconds to end the program
    const double now = clock_seconds();
    Saving *s = &r->saving;
    if (s->step_began > 0) s->longest_step = fmax(s->longest_step, now - s->step_began);
    s->step_began = now;
    // 2 saves, as one may be running
    s->out_of_time = is_rank0(r) && now + 2 * s->longest_step + 2 * save_seconds(r) + ending >= s->limit;
    return s->out_of_time;
}

int train_step(Run *r, StepMetrics *metrics, Error *e) {
    StepSums sums;
    bool skipped, repeat;
    RampTarget target = {NAN, NAN, NAN, NAN, NAN};
    r->position.stop = out_of_time(r);
    comm_phase(r->comm, PHASE_STEP, r->at.step + 1);
    int64_t B = ramp_next(&r->position.ramp, r->at.step, r->at.tokens);
    TRY(comm_broadcast(r->comm, &B, sizeof B, e)); // rank 0's choice
    *metrics = (StepMetrics){.step = r->at.step + 1, .examples = r->at.examples + B, .batch = B};
    r->at.spikes.value[r->at.spikes.count % OUTLIERS_WINDOW] = NAN; // rollback_check increments the count
    r->at.first[r->at.spikes.count % OUTLIERS_WINDOW] = r->at.examples;
    const int64_t tokens = B * r->shape.seq_len;
    const UpdateConfig update = update_config(r, B);
    const GnsMode mode = step_mode(r);
    const double start = clock_seconds(), loss_scale = r->at.loss_scale.scale;
    do {
        TRY(run_rows(r, B, mode, NULL, e));
        TRY(update_unless_outlier(r, B, &update, &skipped, &sums, e));
        TRY(adapt_scales(r, B, &skipped, &repeat, e));
    } while (repeat);
    progress_end(&r->progress);
    if (!skipped) observe_noise(r, B, mode, &target);
    r->at.step++;
    r->at.batch = B;
    r->at.examples += B;
    r->at.tokens += tokens;
    const double seconds = clock_seconds() - start, tok_per_s = (double)tokens / seconds;
    const double peak = r->peak_flops * r->comm->ranks;
    const double norm = r->position.grad_norm;
    *metrics = (StepMetrics){
        .step = r->at.step,
        .tokens = r->at.tokens,
        .examples = r->at.examples,
        .batch = B,
        .loss = r->position.result.loss_sum / (double)B,
        .nll = r->shape.label_smoothing > 0 ? r->position.result.nll_sum / (double)B : NAN,
        .lr = update.muon_lr,
        .grad_norm = norm,
        .tok_per_s = tok_per_s,
        .slowest_rank = r->comm->ranks > 1 ? sums.slowest : -1,
        .wait_share = sums.lost / seconds,
        .mfu = peak > 0 ? tok_per_s * model_flops_per_token(&r->model, r->shape.seq_len) / peak : NAN,
        .mode = mode,
        .skipped = skipped,
        .loss_scale = loss_scale,
        .overflows = loss_scale > 0 || r->position.result.amax ? r->at.loss_scale.overflows : 0, // fp16, fp8
        .clipped = !skipped && adamw_clip(norm, r->options.grad_clip) < 1,
        .target = target,
        .has_target = r->options.run.ramp_mode == RAMP_GNS && !skipped,
    };
    r->position.clipped += metrics->clipped;
    if (is_rank0(r)) TRY(metrics_step(r->metrics, metrics, &r->position.noise, e));
    if (!r->options.outliers || !isfinite(norm)) return 0;
    return comm_agree(r->comm, is_rank0(r) ? row_outliers_observe(r, B, e) : 0, e);
}

// ---- What a step costs (--ramp gns) ---------------------------------------------------------------------------------

enum { COST_BATCHES = 3, COST_STEPS = 10, COST_RANGE = 16 };

// *seconds = time of the fastest of COST_STEPS steps of B rows; INFINITY if every gradient overflows. The first step
// does not count, since a GPU's update is timed with the next step. The steps change the moments but, with a learning
// rate of 0, not the weights. ERR_STOPPED after a signal.
static int time_steps(Run *r, int64_t B, double *seconds, Error *e) {
    const GnsMode mode = r->options.run.gns_exact_interval == 1 ? GNS_EXACT : GNS_LN;
    UpdateConfig update = update_config(r, B);
    StepSums sums;
    update.lr = update.muon_lr = 0;
    update.step = 1;
    *seconds = INFINITY;
    for (int i = 0; i < COST_STEPS; i++) {
        const double start = clock_seconds();
        TRY(run_rows(r, B, mode, "timing steps", e));
        TRY(parallel_update(&r->parallel, &update, e)); // no await_copy: no save has begun
        TRY(step_result(r, B, &sums, e));
        if (!r->position.overflowed && i > 0) *seconds = fmin(*seconds, clock_seconds() - start);
        loss_scale_step(&r->at.loss_scale, r->position.overflowed);
        TRY(adapt_fp8(r, true, e));
        if (!r->position.stop) continue;
        comm_settle(r->comm);
        return FAIL(e, ERR_STOPPED, "run the same command again", "%s before the first step", stop_cause(r));
    }
    return 0;
}

// All ranks run the same steps, and use rank 0's seconds. The run then begins as if --ramp-step-rows were given.
int measure_step_rows(Run *r, Error *e) {
    const Model *model = r->shape.model;
    RampConfig *ramp = &r->position.ramp.config;
    const LossScale scale = r->at.loss_scale;
    const int64_t low = ramp->batch_min, high = ramp->batch_max < COST_RANGE * low ? ramp->batch_max : COST_RANGE * low;
    const int64_t rows[COST_BATCHES] = {low, llround(sqrt((double)low * (double)high)), high};
    double seconds[COST_BATCHES], x = RAMP_LEAST_STEP_ROWS;
    float *zeros;
    int code = 0;
    if (ramp->mode != RAMP_GNS || ramp->step_rows > 0) return 0;
    comm_phase(r->comm, PHASE_STEP, 0);
    for (int i = 0; i < COST_BATCHES && low < high; i++) TRY(time_steps(r, rows[i], &seconds[i], e));
    progress_end(&r->progress);
    TRY(parallel_send_weights(&r->parallel, e));
    TRY(memory_alloc_zero((void **)&zeros, model_bucket_largest(model) * sizeof *zeros, "moments", e));
    for (int i = 0; i < 2 * model_bucket_count(model) && !code; i++)
        code = engine_load(r->engine, i % 2 ? STATE_MOMENT1 : STATE_MOMENT2, model_bucket(model, i / 2), zeros, e);
    memory_free(zeros);
    if (code) return code;
    r->at.loss_scale = scale;
    memset(r->at.exponents, FP8_UNSET, sizeof r->at.exponents);
    if (low < high) x = ramp_step_rows(rows, seconds, COST_BATCHES);
    TRY(comm_broadcast(r->comm, &x, sizeof x, e));
    ramp->step_rows = r->options.ramp_step_rows = x;
    r->options.given[OPTION_ramp_step_rows] = OPTION_GIVEN_CONFIG; // for a later --config RUN/run.json
    return comm_agree(r->comm, is_rank0(r) ? write_run_json(r, e) : 0, e);
}
