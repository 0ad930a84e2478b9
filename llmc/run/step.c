#include "run/run.h"

#include "base/signals.h"

// What this step measures: the first and every gns_exact_interval-th after it are exact.
static GnsMode step_mode(const Run *r) {
    int64_t every = r->options.run.gns_exact_interval;
    if (r->options.gns == GNS_OFF) return GNS_OFF;
    return every > 0 && r->at.step % every == 0 ? GNS_EXACT : GNS_LN;
}

// Are the ranks' own gradients measured too? They are read once more for it, which takes half a percent of a step that
// has one micro-step: now and then is enough for a cross-check.
static bool measures_ranks(const Run *r, GnsMode mode) {
    return mode == GNS_EXACT || (mode == GNS_LN && r->at.step % NOISE_RANKS_EVERY == 0);
}

// This rank's share of the step's rows. While the engine works on some, the loader reads the next: behind the last of
// this step it is taken to be as large as this one. A rank that has no more rows takes part in what is left.
static int run_micro_steps(Run *r, int64_t B, GnsMode mode, Error *e) {
    Share share = parallel_share(B, r->comm->rank, r->comm->ranks);
    int64_t first = r->at.examples + share.first, most = r->shape.micro_batch, done = 0;
    int64_t micro_steps = parallel_micro_steps(&r->parallel, B);
    TRY(parallel_begin_step(&r->parallel, measures_ranks(r, mode), e));
    for (int64_t i = 0; i < micro_steps; i++) {
        const uint16_t *rows = NULL;
        int64_t n = share.count - done < most ? share.count - done : most;
        bool last = done + n == share.count;
        int64_t next = last ? first + B : first + done + n, left = last ? share.count : share.count - done - n;
        if (n > 0) {
            TRY(loader_rows(r->loader, (uint64_t)(first + done), (int)n, &rows, e));
            loader_expect(r->loader, (uint64_t)next, (int)(left < most ? left : most));
        }
        TRY(parallel_micro_step(&r->parallel, rows, (int)n, mode, i == micro_steps - 1, e));
        comm_progress(r->comm);
        done += n;
    }
    return 0;
}

static double grad_norm(const Run *r, int64_t B) {
    double sq = 0;
    for (int i = 0; i < r->model.tensor_count; i++) sq += r->result.grad_sq[i];
    return sqrt(sq) / (double)B;
}

static int fail_nonfinite(Run *r, int64_t B, Error *e) {
    comm_settle(r->comm); // the numbers are those of all ranks
    char tensors[256] = "";
    for (int i = 0, n = 0; i < r->model.tensor_count && n < 4; i++) {
        if (isfinite(r->result.grad_sq[i])) continue;
        size_t used = strlen(tensors);
        snprintf(tensors + used, sizeof tensors - used, "%s%s", n++ ? ", " : " of ", r->model.tensors[i].name);
    }
    return FAIL(e, ERR_NONFINITE, "try a lower --lr, a longer --warmup-tokens or --grad-clip 1",
                "step %lld, examples %lld to %lld: loss %g, gradient norm %g, not finite%s%s; the update was not made",
                (long long)r->at.step + 1, (long long)r->at.examples, (long long)(r->at.examples + B - 1),
                r->result.loss_sum / (double)B, grad_norm(r, B), tensors[0] ? ": gradient" : "", tensors);
}

static UpdateConfig update_config(const Run *r, int64_t B) {
    const Options *o = &r->options;
    double after = (double)(r->at.tokens + B * r->shape.seq_len);
    return (UpdateConfig){
        .lr = ramp_lr(&r->ramp, schedule_lr(&r->schedule, after), B),
        .beta1 = o->beta1,
        .beta2 = o->beta2,
        .eps = o->eps,
        .weight_decay = o->weight_decay,
        .grad_clip = o->grad_clip,
        .step = r->at.step + 1,
        .batch = B,
    };
}

// The batches whose gradients' norms rank_sq is the sum of: the ranks' shares, or their micro-steps.
static int observe_ranks(Run *r, int64_t B, double rank_sq, Error *e) {
    int64_t *rows, count = 0;
    bool by_share = r->parallel.config.reduce == REDUCE_STEP;
    double batch_sq = 0;
    if (r->comm->ranks == 1) {
        r->noise.tokens_since_ranks = 0; // no step of theirs was left out
        return 0;
    }
    TRY(memory_alloc((void **)&rows, sizeof(int64_t) * (size_t)(B + r->comm->ranks), "shares", e));
    for (int i = 0; i < r->comm->ranks; i++) {
        int64_t left = parallel_share(B, i, r->comm->ranks).count, most = by_share ? left : r->shape.micro_batch;
        for (; left > 0; left -= rows[count++]) rows[count] = left < most ? left : most;
    }
    for (int i = 0; i < r->model.tensor_count; i++) batch_sq += r->result.grad_sq[i];
    noise_observe_ranks(&r->noise, rows, (int)count, rank_sq, batch_sq, r->noise.tokens_since_ranks);
    memory_free(rows);
    return 0;
}

// For the averages a step that was left out has not been: its gradients are out of line.
static int observe_noise(Run *r, int64_t B, double rank_sq, GnsMode mode, bool measured_ranks, Error *e) {
    double step_tokens = (double)(B * r->shape.seq_len);
    noise_observe(&r->noise, &r->model, &r->result, B, step_tokens, mode);
    if (mode == GNS_OFF) return 0;
    GnsEstimate ln = gns_estimate(&r->noise.ln);
    ramp_observe(&r->ramp, step_tokens, ramp_target(&r->ramp, noise_ratio(&r->noise), ln.valid ? ln.lower : NAN));
    return measured_ranks ? observe_ranks(r, B, rank_sq, e) : 0;
}

static StepMetrics step_metrics(const Run *r, int64_t B, double lr, double seconds) {
    double tok_per_s = (double)(B * r->shape.seq_len) / seconds, peak = r->peak_flops * r->comm->ranks;
    return (StepMetrics){
        .step = r->at.step,
        .tokens = r->at.tokens,
        .examples = r->at.examples,
        .batch = B,
        .loss = r->result.loss_sum / (double)B,
        .lr = lr,
        .grad_norm = grad_norm(r, B),
        .tok_per_s = tok_per_s,
        .mfu = peak > 0 ? tok_per_s * model_flops_per_token(&r->model, r->shape.seq_len) / peak : NAN,
    };
}

// Rank 0 decides, all follow.
static int agree_batch(Run *r, int64_t *B, Error *e) {
    *B = ramp_next(&r->ramp, r->at.step, r->at.tokens);
    TRY(comm_broadcast(r->comm, B, sizeof *B, e));
    if (*B % r->comm->ranks == 0 || r->uneven || !is_first(r)) return 0;
    r->uneven = true;
    progress_break(&r->progress);
    fprintf(stderr, "note: step %lld has %lld rows for %d ranks: some wait for those that have one more\n",
            (long long)r->at.step + 1, (long long)*B, r->comm->ranks);
    return 0;
}

// The step's numbers, over all ranks.
static int step_result(Run *r, StepSums *sums, Error *e) {
    *sums = (StepSums){.result = &r->result, .stop = signals_requested() != NULL};
    TRY(engine_result(r->engine, &r->result, e));
    TRY(parallel_sums(&r->parallel, sums, e));
    r->stop = sums->stop;
    return 0;
}

// A last step with fewer rows than the one before, which the horizon cut; a replayed file may have cut it as well.
static bool is_cut(const Run *r, int64_t B) {
    return B < r->at.batch && r->at.tokens + (B + 1) * r->shape.seq_len > r->options.run.horizon_tokens;
}

// Is this step to be left out? Asking means waiting for the device before the update, so it is not done unasked.
static bool is_outlier(Run *r, int64_t B) {
    const Options *o = &r->options;
    double loss = r->result.loss_sum / (double)B, norm = grad_norm(r, B);
    double loss_z = outliers_z(&r->at.loss_window, loss), norm_z = outliers_z(&r->at.grad_window, norm);
    bool loss_out = o->skip_loss_z > 0 && loss_z > o->skip_loss_z,
         norm_out = o->skip_grad_z > 0 && norm_z > o->skip_grad_z;
    if (!loss_out && !norm_out) return false;
    if (!is_first(r)) return true;
    progress_break(&r->progress);
    fprintf(stderr, "step %lld: %s is an outlier (loss %.4g, z %.3g; gradient norm %.4g, z %.3g): update skipped\n",
            (long long)r->at.step + 1, loss_out ? "the loss" : "the gradient norm", loss, loss_z, norm, norm_z);
    return true;
}

// A step that was cut is not compared with whole ones: the fewer the rows, the larger their mean gradient's noise.
static int update_unless_outlier(Run *r, int64_t B, const UpdateConfig *update, bool *skipped, Error *e) {
    const Options *o = &r->options;
    StepSums sums;
    *skipped = false;
    if ((o->skip_loss_z > 0 || o->skip_grad_z > 0) && !is_cut(r, B)) {
        TRY(step_result(r, &sums, e));
        if (!isfinite(r->result.loss_sum) || !isfinite(grad_norm(r, B))) return fail_nonfinite(r, B, e);
        *skipped = is_outlier(r, B);
    }
    if (*skipped) return 0;
    saver_settle(r->saver);
    return parallel_update(&r->parallel, update, e);
}

int train_step(Run *r, StepMetrics *metrics, GnsMode *mode, Error *e) {
    int64_t B;
    comm_phase(r->comm, PHASE_STEP, r->at.step + 1);
    TRY(agree_batch(r, &B, e));
    UpdateConfig update = update_config(r, B);
    bool skipped;
    *mode = step_mode(r);
    bool measured_ranks = measures_ranks(r, *mode);
    double start = clock_seconds();
    TRY(run_micro_steps(r, B, *mode, e));
    TRY(parallel_norms(&r->parallel, e));
    TRY(update_unless_outlier(r, B, &update, &skipped, e));
    StepSums sums;
    TRY(step_result(r, &sums, e));
    if (!isfinite(r->result.loss_sum) || !isfinite(grad_norm(r, B))) return fail_nonfinite(r, B, e);
    if (!skipped) TRY(observe_noise(r, B, sums.rank_sq, *mode, measured_ranks, e));
    r->at.step++;
    r->at.batch = B;
    r->at.examples += B;
    r->at.tokens += B * r->shape.seq_len;
    *metrics = step_metrics(r, B, update.lr, clock_seconds() - start);
    metrics->skipped = skipped;
    metrics->ranks_measured = measured_ranks && !skipped && r->comm->ranks > 1;
    return is_first(r) ? metrics_step(r->metrics, metrics, &r->noise, *mode, e) : 0;
}
