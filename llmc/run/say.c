// What a run says of itself before it begins.
#include "run/run.h"

#include "checkpoint/checkpoint.h"
#include "base/files.h"
#include "plan/plan.h"

// How the step's line comes by it.
static void say_mfu(const Setup *setup) {
    double peak = setup->peak_flops;
    printf("MFU     ");
    if (peak > 0) printf("share of %.4g TFLOP/s, ", 1e-12 * peak);
    else printf("unknown, as the device's peak is; ");
    printf("%.4g FLOPs a token (" MODEL_FLOPS_FORMULA ")\n",
           model_flops_per_token(&setup->model, setup->shape.seq_len));
}

// "MACHINE: SHAPE=ALGORITHM SHAPE=ALGORITHM ..."
static void say_tuning(const Position *position) {
    int count = 0;
    for (const char *c = position->at.tuning; *c; c++) count += *c == '=';
    printf("tuned   %d matrix products\n", count);
}

static void say_data(const Setup *setup, const RunData *data) {
    DatasetInfo info = dataset_describe(data->train);
    double epoch = (double)info.windows * setup->shape.seq_len; // tokens
    printf("data    %llu tokens, %llu windows of T; the run is %.3g epochs\n", (unsigned long long)info.tokens,
           (unsigned long long)info.windows, (double)setup->options.run.horizon_tokens / epoch);
}

// Told by what they hold: a copy has another name. Where they cannot be read just now, there is nothing to say.
static void say_shared_shards(const RunData *data) {
    ShardList val;
    int shared = 0;
    Error ignored;
    if (!data->val || shard_list_create(&val, data->val, &ignored)) return;
    for (int i = 0; i < val.count; i++) {
        bool known = false;
        for (int j = 0; j < data->shards.count && !known; j++)
            known = digest_equal(&data->shards.shard[j].digest, &val.shard[i].digest);
        shared += known;
    }
    if (shared)
        printf(
            "note: --val shares %d of its %d shards with --train: its loss is of text that the model is trained on\n",
            shared, val.count);
    shard_list_destroy(&val);
}

// How long the run is, and from where it goes on.
static void say_run(const Setup *setup, const Position *position) {
    const Options *o = &setup->options;
    int64_t T = setup->shape.seq_len, horizon = o->run.horizon_tokens;
    printf("run     ");
    if (o->run.ramp_mode != RAMP_FIXED) {
        printf("%lld tokens in steps of %lld to %lld rows of %lld tokens\n", (long long)horizon,
               (long long)ramp_smallest(&position->ramp), (long long)ramp_largest(&position->ramp), (long long)T);
        return;
    }
    int64_t B = o->run.batch_ref_rows, rows = (horizon - position->at.tokens) / T, steps = rows / B + (rows % B != 0);
    printf("%lld %sstep%s of %lld rows of %lld tokens, ", (long long)steps, position->at.step ? "more " : "",
           steps == 1 ? "" : "s", (long long)B, (long long)T);
    if (position->at.step)
        printf("to step %lld: %lld tokens in all\n", (long long)(position->at.step + steps), (long long)horizon);
    else printf("%lld tokens\n", (long long)horizon);
}

static void say_hellaswag(const Setup *setup, const RunData *data) {
    HellaSwagInfo info = hellaswag_describe(data->hellaswag);
    printf("tests   %d questions of %s", info.questions, setup->options.hellaswag);
    if (info.left_out) printf(", and %d left out, which have an ending longer than T", info.left_out);
    if (info.cut) printf("; the context cut to fit T before %d of %d endings", info.cut, info.rows);
    printf("\n");
}

// Of a new run, for the name of a preset may be taken for a trained model's.
static void say_weights(const Run *r) {
    if (!r->data.train || r->saving.saved[0]) return;
    if (r->setup.source[0]) printf("; weights from %s", r->setup.source);
    else printf("; from scratch, seed %lld", (long long)r->setup.options.seed);
}

// A vocabulary that is larger than bytes stands for text.
static void say_tokenizer(const Setup *setup, const RunData *data) {
    if (!data->train || setup->tokenizer || setup->model.config.vocab <= 256) return;
    printf(
        "note: checkpoints will hold no tokenizer, which --sample-only and transformers need: --tokenizer DIRECTORY\n");
}

// Bytes, or the characters of a small alphabet, where a model of words is to be trained: its vocabulary would be empty for
// the most part, and its tokenizer would make nothing of what it learns.
static void say_small_tokens(const Setup *setup, const Dataset *data) {
    const uint64_t enough = 1 << 20; // tokens, in which words are met
    const char *path = dataset_shard_path(data, 0);
    bool words = setup->tokenizer && !tokenizer_is_bytes(setup->tokenizer);
    const char *remedy = words || !setup->tokenizer
                             ? "say --tokenizer bytes if these are bytes, or the right --vocab-size"
                         : setup->options.given[OPTION_vocab_size] ? "leave --vocab-size out, and it is that of bytes"
                                                                   : "tokenize the text as --model had its own";
    int V = setup->model.config.vocab, largest;
    Error ignored;
    if (!(words || V > 1000) || dataset_largest_token(data, enough, &largest, &ignored) || largest >= BYTE_VALUES)
        return;
    fprintf(stderr, "warning: %s has no token above %d, and ", path, largest);
    if (words && setup->options.tokenizer[0])
        fprintf(stderr, "--tokenizer %s makes others: tokenize the text with it, or say --tokenizer bytes\n",
                setup->options.tokenizer);
    else fprintf(stderr, "the vocabulary is %d: %s\n", V, remedy);
}

// Before the first step, not when it is too late: a disk that --dry-run calls too small.
static void say_room(const Setup *setup, const Position *position) {
    const Options *o = &setup->options;
    const double mib = 1 << 20, one = (double)saver_checkpoint_bytes(&setup->model, setup->tokenizer);
    int there;
    uint64_t left;
    Error ignored;
    if (archive_count(o->out, &there, &ignored) || disk_free(o->out, &left, &ignored)) return;
    int64_t most = plan_checkpoints(&position->ramp, o), more = most > there ? most - there : 1;
    if ((double)left >= (double)more * one) return;
    double fit = there + (double)left / one;
    const char *then = fit < 1    ? "Not one can be saved: make room"
                       : !o->keep ? "Make room, or let older ones go with --keep"
                       : fit < 2  ? "One alone has room, and stays: make room for another"
                                  : "Older ones make room, as far as they can";
    fprintf(stderr,
            "warning: checkpoints take %.1f MiB each, at most %lld at a time, of which %d are there: %.1f MiB more, "
            "%.1f MiB free in %s: NOT ENOUGH. %s\n",
            one / mib, (long long)most, there, (double)more * one / mib, (double)left / mib, o->out, then);
}

// Everything that works beside the computation (loading, saving, MPI, NCCL) has the same cores.
static void say_cores(const Setup *setup) {
    const CommCores *c = &setup->comm->cores;
    if (!comm_is_bound(setup->comm)) return;
    printf("note: rank 0 may run on %d of the %d cores here", c->mine, c->here);
    if (c->sharers > 1) printf(", with %d other rank%s", c->sharers - 1, c->sharers > 2 ? "s" : "");
    printf(", and its share is %d: mpirun --bind-to none lifts that (srun: --cpu-bind=none)\n",
           c->here / setup->comm->local_ranks);
}

void say_setup(const Run *r) {
    char engine[256];
    MemoryPlan plan;
    const ModelConfig *c = &r->setup.model.config;
    engine_describe(r->setup.engine, engine, sizeof engine);
    r->setup.engine_api->plan_memory(&r->setup.shape, &plan);
    printf("model   %.2fM parameters: %d layers, %d heads, %d channels, vocabulary %d, T %d",
           1e-6 * (double)r->setup.model.parameters, c->layers, c->heads, c->channels, c->vocab,
           r->setup.shape.seq_len);
    say_weights(r);
    printf("\n");
    if (r->data.train) {
        say_data(&r->setup, &r->data);
        say_shared_shards(&r->data);
        say_run(&r->setup, &r->position);
    }
    if (r->data.hellaswag) say_hellaswag(&r->setup, &r->data);
    printf("engine  %s, %.0f MiB\n", engine, (double)plan.total / (1 << 20));
    if (r->data.train) say_mfu(&r->setup);
    if (r->position.at.tuning[0]) say_tuning(&r->position);
    if (r->setup.comm->ranks > 1) printf("ranks   %d, each with such an engine\n", r->setup.comm->ranks);
    say_cores(&r->setup);
    if (r->setup.parallel.config.zero == ZERO_2 && r->setup.parallel.buckets && !r->setup.parallel.shard_grads)
        printf(
            "note: gradients are whole on every rank, since a step may have several micro-steps; --reduce micro-step "
            "shards them, in sums of another order\n");
    say_tokenizer(&r->setup, &r->data);
    fflush(stdout);
    if (r->data.train) say_small_tokens(&r->setup, r->data.train);
    else if (r->data.val) say_small_tokens(&r->setup, r->data.val);
    if (r->data.train) say_room(&r->setup, &r->position);
}
