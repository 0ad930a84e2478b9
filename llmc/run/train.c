// The training loop, the same for every engine. All ranks run it together; rank 0 alone prints and writes logs.
#include "run/run.h"

#include <stdlib.h>
#include <time.h>

// ---- --on-spike rollback --------------------------------------------------------------------------------------------

// A run that spikes returns to a checkpoint before the spike and continues without the spike's rows.
//
// A step is a spike if its loss or the norm of its gradient is more than --spike-z standard deviations above the mean
// of the last 128 steps that were no spikes (math/outliers.h). A spike lasts if K = --spike-steps of the last 2 K steps
// are spikes, or if a loss or gradient is not finite. These 2 K steps are the window.
//
//   1. All ranks have the same sums, so all ranks decide alike.
//   2. Training ends as on an error, but the run directory stays open and locked. `train` (program.c) resumes, without
//      the window's rows, from the newest checkpoint before the window, or from the oldest if all are later.
//   3. The next checkpoint stores the excluded rows. A run killed before that repeats the spike and the rollback.
//   4. setup_output cuts the log, as on every resume. Cut lines move to metrics.rolled_back.jsonl; after a kill that
//      file may hold them twice. Abandoned checkpoints become step_N.rolled_back.
//   5. A checkpoint to go back to always exists. The run begins with one of step 0, and archive_thin spares the newest
//      one before the last 2 K steps. With --keep-best it also spares the best one that any kept checkpoint names.
//
// code, *e: what train_step returned. If a spike lasts, returns ERR_NONFINITE with the reason, and plans a rollback
// unless ROLLBACKS_MAX were made. Otherwise returns `code`.
static int rollback_check(Run *r, const StepMetrics *m, int code, Error *e) {
    const Options *o = &r->options;
    Rollback *back = &r->back;
    const cJSON *row;
    int64_t spikes = 0;
    if (!o->on_spike || (code && code != ERR_NONFINITE)) return code;
    const int64_t now = r->at.spikes.count++, window = 2 * o->spike_steps, steps = now < window ? now + 1 : window;
    for (int64_t i = now; i > now - steps; i--) spikes += r->at.spikes.value[i % OUTLIERS_WINDOW] > o->spike_z;
    if (!code && spikes < o->spike_steps) return 0;
    if (!code) {
        comm_settle(r->comm); // (1)
        FAIL(e, ERR_NONFINITE, "try a lower --lr, a longer --warmup-tokens or --grad-clip 1; or a higher --spike-z",
             "step %lld: %lld of the last %lld steps are spikes (loss %.4g, gradient norm %.4g, z %.3g)",
             (long long)m->step, (long long)spikes, (long long)steps, m->loss, m->grad_norm,
             r->at.spikes.value[now % OUTLIERS_WINDOW]);
    }
    if (back->made == ROLLBACKS_MAX) return error_prefix(e, "after %d rollbacks", ROLLBACKS_MAX);
    back->first[back->made] = r->at.first[(now + 1 - steps) % OUTLIERS_WINDOW];
    back->rows[back->made] = m->examples - back->first[back->made];
    back->made++;
    back->latest = m->step - steps;
    // Name the window's three rows of highest score of each kind (--outliers). Only rank 0 has them.
    for (int k = 0, n = 0; k < ROW_KINDS; k++, n = 0) cJSON_ArrayForEach(row, r->position.outliers.list[k]) {
            const size_t used = strlen(e->what);
            const char *shard = cJSON_GetStringValue(json_get(row, "shard"));
            if (cJSON_GetNumberValue(json_get(row, "step")) > (double)back->latest && shard && n++ < 3)
                snprintf(e->what + used, sizeof e->what - used, "; %s %s:%.0f", row_kinds[k], path_name(shard),
                         cJSON_GetNumberValue(json_get(row, "offset")));
        }
    back->why = *e;
    return e->code;
}

// ---- --train-hours --------------------------------------------------------------------------------------------------

// On rank 0: returns the tokens that fill the time, cut to three digits; 0: not yet known. The first, slow steps do not
// count.
static int64_t tokens_for_hours(Run *r, const StepMetrics *m) {
    enum { WARM = 5, STEPS = 50 };
    const Options *o = &r->options;
    const double time = 3600 * o->train_hours, left = time - run_seconds(r) - save_seconds(r);
    const int64_t T = r->shape.seq_len;
    const double batch = (double)(m->batch * T);
    if (m->step < r->saving.first_step + WARM) return 0;
    r->saving.timed_tokens += batch;
    r->saving.timed_seconds += batch / m->tok_per_s;
    if (left > 0.9 * time && (m->step < STEPS || left > 0.98 * time)) return 0;
    const double a_token = r->saving.timed_seconds / r->saving.timed_tokens;
    double validation = 0; // seconds per step; a forward pass takes a third of a training pass
    if (r->data.val && o->val_every > 0)
        validation = fmin((double)o->val_tokens, (double)r->data.val->info.tokens) * a_token / 3 / (double)o->val_every;
    const double steps = fmax(0, left) / (batch * a_token + validation);
    const double all = fmin((double)m->tokens + steps * batch, (double)HORIZON_UNDECIDED);
    const double unit = pow(10, floor(log10(all)) - 2);
    const int64_t tokens = (int64_t)(floor(all / unit) * unit) / T * T;
    return tokens > m->tokens ? tokens : m->tokens;
}

static int decide_length(Run *r, const StepMetrics *m, Error *e) {
    int64_t tokens = is_rank0(r) ? tokens_for_hours(r, m) : 0;
    TRY(comm_broadcast(r->comm, &tokens, sizeof tokens, e));
    if (!tokens) return 0;
    TRY(run_set_horizon(r, tokens, e));
    if (!is_rank0(r)) return comm_agree(r->comm, 0, e);
    progress_break(&r->progress);
    r->progress.ends = 0;
    r->progress.horizon = tokens;
    printf("length  %lld tokens fill --train-hours %g\n", (long long)tokens, r->options.train_hours);
    return comm_agree(r->comm, write_run_json(r, e), e);
}

// ---- Validation, samples --------------------------------------------------------------------------------------------

static int validate(Run *r, Error *e) {
    Evaluation v;
    TRY(evaluate_loss(r, r->options.val_tokens, &v, e));
    r->at.val_loss = v.loss;
    r->position.val_bytes = v.bytes / (double)v.tokens;
    if (r->options.keep_best) { // only rank 0 knows whether the best checkpoint was saved
        TRY(comm_broadcast(r->comm, &r->at.best, sizeof r->at.best, e));
        r->saving.is_best = v.loss < r->at.best.loss;
        if (!r->saving.is_best && r->options.patience) r->at.best.stale++;
    }
    if (!is_rank0(r)) return 0;
    progress_break(&r->progress);
    printf("step %5lld  val loss %.4f\n", (long long)r->at.step, v.loss);
    return metrics_test(r->metrics, r->at.step, r->at.tokens, "val_loss", v.loss, NAN, e);
}

static int test_hellaswag(Run *r, Error *e) {
    HellaSwagScore score;
    TRY(evaluate_hellaswag(r, &score, e));
    if (!is_rank0(r)) return 0;
    const int n = score.questions;
    const double acc = (double)score.correct / n, norm = (double)score.correct_norm / n;
    progress_break(&r->progress);
    printf("step %5lld  HellaSwag acc %d/%d = %.4f  acc_norm %d/%d = %.4f\n", (long long)r->at.step, score.correct, n,
           acc, score.correct_norm, n, norm);
    return metrics_test(r->metrics, r->at.step, r->at.tokens, "hellaswag", acc, norm, e);
}

static int sample(Run *r, Error *e) {
    comm_phase(r->comm, PHASE_CHECKPOINT, r->at.step);
    progress_begin(&r->progress, "the sample", 0);
    progress_break(&r->progress); // silences the progress while print_samples prints
    const int code = print_samples(r, e);
    progress_end(&r->progress);
    return code;
}

// ---- The end --------------------------------------------------------------------------------------------------------

static int stop_and_save(Run *r, Error *e) {
    const char *cause = stop_cause(r);
    progress_break(&r->progress);
    TRY(save_and_wait(r, e));
    comm_settle(r->comm);
    FAIL(e, ERR_STOPPED, NULL, "%s after step %lld, saved in %s", cause, (long long)r->at.step, r->saving.saved);
    return error_hint(e, "run the same command %s to resume", r->options.fresh ? "without --fresh" : "again");
}

// Samples from the finished model, saves it, and prints the end. An error in sampling must not prevent the save.
static int finish_run(Run *r, Error *e) {
    const Options *o = &r->options;
    Error sampling;
    progress_break(&r->progress);
    const int code = o->sample_every > 0 ? sample(r, &sampling) : 0;
    const bool settled = r->comm->settled;
    if (code && r->comm->ranks > 1 && !settled) return *e = sampling, code; // other ranks would not save with this one
    r->comm->settled = false; // the ranks must agree on the save's errors too
    TRY(save_and_wait(r, e));
    r->comm->settled = settled;
    if (code) *e = sampling;
    if (code || !is_rank0(r)) return code;
    if (reached_loss(r))
        printf("validation loss %.4f, at most --stop-at-loss %g, after %lld steps, %lld tokens, %.1f seconds\n",
               r->at.val_loss, o->stop_at_loss, (long long)r->at.step, (long long)r->at.tokens, run_seconds(r));
    else if (out_of_patience(r) && r->at.tokens < o->run.horizon_tokens)
        printf("ended early, after step %lld: %lld validations without a new lowest loss (--patience %lld)\n",
               (long long)r->at.step, (long long)r->at.best.stale, (long long)o->patience);
    const double steps = (double)(r->at.step - r->saving.first_step + 1); // of this part, as `clipped`
    if (r->position.clipped)
        printf("gradients clipped (--grad-clip %g) in %.3g%% of %.0f steps\n", o->grad_clip,
               100 * (double)r->position.clipped / steps, steps);
    if (isfinite(r->at.val_loss)) {
        printf("validation loss %.4f nats per token", r->at.val_loss);
        if (r->position.val_bytes > 0)
            printf(" = %.4f bits per byte", r->at.val_loss / log(2.0) / r->position.val_bytes);
        printf("\n");
    }
    if (o->keep_best && r->at.best.step && r->at.best.step != r->at.step)
        printf("lowest validation loss %.4f after step %lld, in %s/step_%08lld\n", r->at.best.loss,
               (long long)r->at.best.step, o->out, (long long)r->at.best.step);
    printf("model in %s, the run's numbers in %s/metrics.jsonl\n", r->saving.saved, o->out);
    return 0;
}

// ---- The loop -------------------------------------------------------------------------------------------------------

static bool is_due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

static int train_loop(Run *r, Error *e) {
    const Options *o = &r->options;
    const int64_t compare_every = 100; // steps
    StepMetrics m;
    for (bool last = false; !last;) {
        if (r->comm->ranks == 1 && comm_asked_to_stop(r->comm))
            r->position.stop = true; // with several ranks, train_step sets it on all
        if (r->position.stop) return stop_and_save(r, e);
        TRY(rollback_check(r, &m, train_step(r, &m, e), e));
        if (o->train_hours && !r->at.horizon) TRY(decide_length(r, &m, e));
        last = r->at.tokens >= o->run.horizon_tokens; // if true, finish_run samples and saves
        const bool validates = r->data.val && o->val_every > 0 && (last || is_due(r->at.step, o->val_every));
        const bool saves = is_due(r->at.step, o->checkpoint_every), samples = is_due(r->at.step, o->sample_every);
        const bool compares = saves || r->position.stop || is_due(r->at.step, compare_every);
        if (last || compares || validates || samples || is_due(r->at.step, o->hellaswag_every))
            TRY(parallel_send_weights(&r->parallel, e));
        r->saving.is_best = false;
        if (validates) TRY(validate(r, e));
        last = last || ends_early(r);
        if (r->data.hellaswag && (last || is_due(r->at.step, o->hellaswag_every))) TRY(test_hellaswag(r, e));
        if (compares || last || r->saving.is_best) TRY(compare_ranks(r, e)); // before a save
        progress_step(&r->progress, &m, &r->position.noise, last || r->at.step == 1);
        if (samples && !last) TRY(sample(r, e));
        TRY(collect_save(r, e));
        if ((saves || r->saving.is_best) && !last) TRY(save_in_background(r, e));
    }
    return finish_run(r, e);
}

int train_run(Run *r, Error *e) {
    const Options *o = &r->options;
    const char *end = getenv("GNS_END"); // end of a launcher's --max-hours, in seconds since 1970
    r->saving.limit = !o->max_hours ? INFINITY
                      : end         ? clock_seconds() + strtod(end, NULL) - (double)time(NULL)
                                    : r->started + 3600 * o->max_hours;
    if (o->train_hours && !r->at.horizon) r->progress.ends = r->begun + 3600 * o->train_hours;
    double *scale = &r->at.loss_scale.scale; // 0: the run begins, or had another type than fp16
    if (!r->engine_api->needs_loss_scale) *scale = 0;
    else if (*scale == 0) *scale = o->loss_scale > 0 ? o->loss_scale : LOSS_SCALE_START;
    TRY(parallel_start(&r->parallel, r->engine, o->comm_dtype, e));
    int code = measure_step_rows(r, e);
    // Only after measure_step_rows: touching the copy's memory slows steps down.
    if (!code && saves_in_background(r)) code = saver_prepare(r->saving.saver, e);
    if (!code) code = compare_ranks(r, e);
    if (!code && is_rank0(r)) print_setup(r);
    if (!code && o->on_spike && r->at.step == 0) code = save_in_background(r, e);
    if (!code) code = train_loop(r, e);
    if (!code) return parallel_drain(&r->parallel, e);
    save_at_error(r, code, e);
    return code;
}
