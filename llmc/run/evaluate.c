// Computes the loss on validation rows and the HellaSwag score, during training or alone (--eval-only).
#include "run/run.h"

// ---- Rows -----------------------------------------------------------------------------------------------------------

// Returns the number of bytes of the text of a row's targets; <|endoftext|> has 0 bytes.
static double target_bytes(const Tokenizer *tokenizer, const uint16_t *row, int T) {
    double sum = 0;
    for (int t = 1; t <= T; t++) {
        size_t bytes;
        tokenizer_decode(tokenizer, row[t], &bytes);
        if (row[t] != tokenizer->eot) sum += (double)bytes;
    }
    return sum;
}

// Evaluates this rank's share of `rows` rows, and adds up the results of all ranks. questions true: sum[i] is the loss
// of ending i. questions false: sum[0] is the total loss, sum[1] the number of bytes of the text.
static int evaluate_rows(Run *r, bool questions, int64_t rows, int width, double *sum, Error *e) {
    const bool counts = r->comm->rank % r->parallel.config.tensor == 0; // only rank 0 of a tensor group counts bytes
    RankRows mine = rows_of_rank(rows, r->parallel.group, r->parallel.groups);
    int unread = 0; // error code if this rank cannot read its rows; then the evaluation fails on all ranks
    Error ignored;
    progress_begin(&r->progress, questions ? "HellaSwag" : "validation", mine.count);
    for (int64_t done = 0, passes = parallel_micro_steps(&r->parallel, rows); passes > 0; passes--) {
        const int n = (int)(mine.count - done < r->shape.micro_batch ? mine.count - done : r->shape.micro_batch);
        const int64_t first = mine.first + done;
        if (n > 0 && questions) hellaswag_rows(r->data.hellaswag, (int)first, n, r->data.rows);
        for (int i = 0; i < n && !questions && !unread; i++) { // windows spread evenly over the validation set
            const uint64_t window = (uint64_t)(first + i) * r->data.val->info.windows / (uint64_t)rows;
            unread = dataset_window(r->data.val, window, 0, r->data.rows + i * (width + 1), e);
        }
        if (unread && r->comm->ranks == 1) break;
        // A rank that has no rows or cannot read them computes rows of zeros, as other ranks wait for its transfers.
        const int computed = n > 0 ? n : 1;
        if (unread || n == 0) memset(r->data.rows, 0, (size_t)computed * (size_t)(width + 1) * sizeof *r->data.rows);
        progress_next(&r->progress, done);
        TRY(engine_eval(r->engine, r->data.rows, computed, width, r->data.losses, unread ? &ignored : e));
        if (questions) hellaswag_sums(r->data.hellaswag, (int)first, n, r->data.losses, sum + first);
        for (int64_t i = 0; !questions && i < (int64_t)n * width; i++) sum[0] += r->data.losses[i];
        for (int i = 0; !questions && r->tokenizer && counts && i < n; i++)
            sum[1] += target_bytes(r->tokenizer, r->data.rows + i * (width + 1), width);
        comm_progress(r->comm);
        done += n;
    }
    progress_end(&r->progress);
    TRY(comm_agree(r->comm, unread, e));
    return comm_sum(r->comm, sum, questions ? (int)rows : 2, e); // all ranks but one add 0 to an ending's loss
}

int evaluate_loss(Run *r, int64_t most_tokens, Evaluation *out, Error *e) {
    int64_t T = r->shape.seq_len, rows = most_tokens / T + (most_tokens % T != 0);
    int64_t windows = (int64_t)r->data.val->info.windows;
    double sum[2] = {0};
    if (rows > windows) rows = windows;
    TRY(evaluate_rows(r, false, rows, (int)T, sum, e));
    *out = (Evaluation){.rows = rows, .tokens = rows * T, .loss = sum[0] / (double)(rows * T), .bytes = sum[1]};
    return 0;
}

int evaluate_hellaswag(Run *r, HellaSwagScore *score, Error *e) {
    const HellaSwagInfo info = r->data.hellaswag->info;
    double *sum;
    TRY(memory_alloc_zero((void **)&sum, (size_t)info.rows * sizeof *sum, "HellaSwag's scores", e));
    int code = evaluate_rows(r, true, info.rows, info.width, sum, e);
    for (int i = 0; i < info.rows && !code; i++) {
        if (isfinite(sum[i])) continue;
        comm_settle(r->comm); // all ranks have the same sums, so all fail
        code = FAIL(e, ERR_NONFINITE, "check the model with --check", "the loss on the questions of %s is not finite",
                    r->options.hellaswag);
    }
    if (!code) *score = hellaswag_score(r->data.hellaswag, sum);
    memory_free(sum);
    return code;
}

// ---- --eval-only ----------------------------------------------------------------------------------------------------

// Prints the fraction yes / n, with its standard error if n > 1.
static void print_fraction(const char *name, int yes, int n, const char *note) {
    double fraction = (double)yes / n;
    printf("  %-13s %10.6f", name, fraction);
    if (n > 1) printf("  +- %.4f", sqrt(fraction * (1 - fraction) / (n - 1)));
    printf("%s\n", note);
}

int evaluate_model(Run *r, Error *e) {
    const Options *o = &r->options;
    Evaluation v;
    HellaSwagScore score;
    TRY(setup_device(r, e));
    int code = setup_data(r, e);
    if (!code) code = setup_rows(r, e);
    if (!code) code = setup_engine(r, e);
    TRY(comm_agree(r->comm, code, e));
    TRY(setup_same_data(r, e));
    comm_phase(r->comm, PHASE_STEP, 0);
    if (is_rank0(r)) {
        printf("--model %s\n", o->model);
        print_setup(r);
    }
    if (r->data.val) TRY(evaluate_loss(r, o->given[OPTION_val_tokens] ? o->val_tokens : INT64_MAX, &v, e));
    if (r->data.val && !isfinite(v.loss)) {
        comm_settle(r->comm); // all ranks have the same sum, so all fail
        return FAIL(e, ERR_NONFINITE, "check the model with --check", "the loss of --model %s on %s is not finite",
                    o->model, o->val);
    }
    if (r->data.val && is_rank0(r)) {
        printf("validation  %s: %lld tokens, %lld of %lld windows\n", o->val, (long long)v.tokens, (long long)v.rows,
               (long long)r->data.val->info.windows);
        printf("  loss          %10.6f  nats per token\n", v.loss);
        printf("  perplexity    %10.4f\n", exp(v.loss));
        if (v.bytes > 0)
            printf("  bits per byte %10.6f  at %.3f bytes per token\n", v.loss * (double)v.tokens / log(2.0) / v.bytes,
                   v.bytes / (double)v.tokens);
    }
    if (!r->data.hellaswag) return 0;
    TRY(evaluate_hellaswag(r, &score, e));
    if (!is_rank0(r)) return 0;
    printf("hellaswag   %s: %d questions\n", o->hellaswag, score.questions);
    print_fraction("acc", score.correct, score.questions, "");
    print_fraction("acc_norm", score.correct_norm, score.questions, "  by mean loss");
    return 0;
}
