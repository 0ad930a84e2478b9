// Evaluation: the loss on validation rows and HellaSwag's questions, in training and alone (--eval-only).
#include "run/run.h"

// ---------------------------------------------------------------------------------------------------------------------
// Loss

// Rows [done, done + n) of `rows` windows spread evenly over the validation set.
static int read_val_rows(Run *r, int64_t done, int n, int64_t rows, Error *e) {
    uint64_t windows = dataset_windows(r->val);
    for (int i = 0; i < n; i++) {
        uint64_t window = (uint64_t)(done + i) * windows / (uint64_t)rows;
        TRY(dataset_rows_sequential(r->val, window, 1, r->rows + (size_t)i * ((size_t)r->shape.seq_len + 1), e));
    }
    return 0;
}

// Bytes of the text that a row's targets stand for; <|endoftext|> stands between texts and for none.
static double target_bytes(const Tokenizer *tokenizer, const uint16_t *row, int T) {
    double sum = 0;
    for (int t = 1; t <= T; t++) {
        size_t bytes;
        tokenizer_decode(tokenizer, row[t], &bytes);
        if (row[t] != tokenizer_eot(tokenizer)) sum += (double)bytes;
    }
    return sum;
}

int evaluate_loss(Run *r, int64_t most_tokens, Evaluation *out, Error *e) {
    int64_t T = r->shape.seq_len, rows = most_tokens / T + (most_tokens % T != 0);
    int64_t windows = (int64_t)dataset_windows(r->val);
    if (rows > windows) rows = windows;
    double sums[2] = {0}; // of losses, of bytes
    Share share = parallel_share(rows, r->comm->rank, r->comm->ranks);
    for (int64_t done = 0; done < share.count;) {
        int n = (int)(share.count - done < r->shape.micro_batch ? share.count - done : r->shape.micro_batch);
        TRY(read_val_rows(r, share.first + done, n, rows, e));
        TRY(engine_eval(r->engine, r->rows, n, (int)T, r->losses, e));
        for (int64_t i = 0; i < n * T; i++) sums[0] += r->losses[i];
        for (int i = 0; i < n && r->tokenizer; i++)
            sums[1] += target_bytes(r->tokenizer, r->rows + i * (T + 1), (int)T);
        comm_progress(r->comm);
        done += n;
    }
    TRY(comm_sum(r->comm, sums, 2, e));
    *out = (Evaluation){.rows = rows, .tokens = rows * T, .loss = sums[0] / (double)(rows * T), .bytes = sums[1]};
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// HellaSwag

// sum: (share.count), of the rows that are this rank's.
static int sum_endings(Run *r, Share share, double *sum, Error *e) {
    int width = hellaswag_describe(r->hellaswag).width;
    int first = (int)share.first, end = (int)(share.first + share.count);
    for (int n; first < end; first += n) {
        n = end - first < r->shape.micro_batch ? end - first : r->shape.micro_batch;
        hellaswag_rows(r->hellaswag, first, n, r->rows);
        TRY(engine_eval(r->engine, r->rows, n, width, r->losses, e));
        hellaswag_sums(r->hellaswag, first, n, r->losses, sum + (first - share.first));
        comm_progress(r->comm);
    }
    return 0;
}

// sum: (rows), on every rank. Each comes from one rank, so that the score does not depend on who did what.
static int share_endings(Run *r, int rows, double *sum, Error *e) {
    int ranks = r->comm->ranks;
    size_t most = (size_t)parallel_share(rows, 0, ranks).count; // the others have as many, or one less
    double *shares;                                             // (1 + ranks, most): this rank's, then everybody's
    TRY(memory_alloc_zero((void **)&shares, (1 + (size_t)ranks) * most * sizeof *shares, "HellaSwag's scores", e));
    int code = sum_endings(r, parallel_share(rows, r->comm->rank, ranks), shares, e);
    if (!code) code = comm_gather(r->comm, shares, shares + most, most * sizeof *shares, e);
    for (int k = 0; !code && k < ranks; k++) {
        Share share = parallel_share(rows, k, ranks);
        memcpy(sum + share.first, shares + (1 + (size_t)k) * most, (size_t)share.count * sizeof *sum);
    }
    memory_free(shares);
    return code;
}

int evaluate_hellaswag(Run *r, HellaSwagScore *score, Error *e) {
    int rows = hellaswag_describe(r->hellaswag).rows;
    double *sum;
    TRY(memory_alloc((void **)&sum, (size_t)rows * sizeof *sum, "HellaSwag's scores", e));
    int code = share_endings(r, rows, sum, e);
    for (int i = 0; i < rows && !code; i++) {
        if (isfinite(sum[i])) continue;
        comm_settle(r->comm); // all ranks have the same sums
        code = FAIL(e, ERR_NONFINITE, "see whether --check finds fault with the model",
                    "the loss on the questions of %s is not finite", r->options.hellaswag);
    }
    if (!code) *score = hellaswag_score(r->hellaswag, sum);
    memory_free(sum);
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------
// --eval-only

static int print_loss(Run *r, Error *e) {
    const Options *o = &r->options;
    Evaluation v;
    int64_t windows = (int64_t)dataset_windows(r->val);
    TRY(evaluate_loss(r, options_given(o, "--val-tokens") ? o->val_tokens : INT64_MAX, &v, e));
    if (!isfinite(v.loss)) {
        comm_settle(r->comm); // all ranks have the same sum
        return FAIL(e, ERR_NONFINITE, "see whether --check finds fault with it",
                    "the loss of --model %s on %s is not finite", o->model, o->val);
    }
    if (!is_first(r)) return 0;
    printf("validation  %s: %lld tokens, %lld of %lld windows\n", o->val, (long long)v.tokens, (long long)v.rows,
           (long long)windows);
    printf("  loss        %10.6f  nats a token\n", v.loss);
    printf("  perplexity  %10.4f\n", exp(v.loss));
    if (v.bytes > 0)
        printf("  bits a byte %10.6f  at %.3f bytes a token\n", v.loss * (double)v.tokens / log(2.0) / v.bytes,
               v.bytes / (double)v.tokens);
    return 0;
}

// The standard error of a share of n yes and no.
static double share_error(double share, int n) { return n > 1 ? sqrt(share * (1 - share) / (n - 1)) : NAN; }

static int print_hellaswag(Run *r, Error *e) {
    HellaSwagScore score;
    TRY(evaluate_hellaswag(r, &score, e));
    if (!is_first(r)) return 0;
    double acc = (double)score.correct / score.questions, norm = (double)score.correct_norm / score.questions;
    printf("hellaswag   %s: %d questions\n", r->options.hellaswag, score.questions);
    printf("  acc         %10.6f  +- %.4f\n", acc, share_error(acc, score.questions));
    printf("  acc_norm    %10.6f  +- %.4f  by mean loss\n", norm, share_error(norm, score.questions));
    return 0;
}

static int setup_evaluation(Run *r, Error *e) {
    TRY(setup_data(r, e));
    TRY(setup_rows(r, e));
    return setup_engine(r, e);
}

int evaluate_model(Run *r, Error *e) {
    TRY(setup_device(r, e));
    TRY(comm_agree(r->comm, setup_evaluation(r, e), e));
    TRY(setup_same_data(r, e));
    comm_phase(r->comm, PHASE_STEP, 0);
    if (is_first(r)) {
        printf("--model %s\n", r->options.model);
        say_setup(r);
    }
    if (r->val) TRY(print_loss(r, e));
    return r->hellaswag ? print_hellaswag(r, e) : 0;
}
