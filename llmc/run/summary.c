// What a run prints about itself before the first step.
#include "run/run.h"

static void print_data(const Run *r) {
    DatasetInfo info = r->data.train->info;
    double examples = (double)r->options.run.horizon_tokens / r->shape.seq_len;
    printf("data    %llu tokens, %llu windows of T", (unsigned long long)info.tokens, (unsigned long long)info.windows);
    bool decided = r->options.run.horizon_tokens < HORIZON_UNDECIDED / 2;
    if (info.weights == 0 && decided) printf("; the run is %.3g epochs", examples / (double)info.windows);
    printf("\n");
    for (int s = 0; info.weights > 0 && s < info.sources; s++) {
        DatasetSource source = r->data.train->source[s];
        printf("        %5.2f%% of the rows from %s: %llu tokens, %.3g epochs\n", 100 * source.share, source.files,
               (unsigned long long)source.tokens, source.share * examples / (double)source.windows);
    }
    const int val = r->data.val ? r->data.val->info.shards : 0;
    int shared = 0; // number of shards of --val that are also in --train, whatever their names
    for (int i = 0, known = 0; i < val; i++, shared += known)
        for (int j = known = 0; j < info.shards && !known; j++)
            known = digest_equal(&r->data.train->shards[j].digest, &r->data.val->shards[i].digest);
    if (shared)
        printf("note: --val shares %d of its %d shards with --train: the model is trained on text of its validation\n",
               shared, val);
}

static void print_length(const Run *r) {
    const Position *position = &r->position;
    const Options *o = &r->options;
    int64_t T = r->shape.seq_len, horizon = o->run.horizon_tokens;
    if (o->train_hours && !r->at.horizon) {
        printf("run     %g hours; the speed will tell how many tokens\n", o->train_hours);
        return;
    }
    if (o->run.ramp_mode != RAMP_FIXED) {
        printf("run     %lld tokens in steps of %lld to %lld rows of %lld tokens\n", (long long)horizon,
               (long long)position->ramp.config.batch_min, (long long)position->ramp.config.batch_max, (long long)T);
        if (o->run.ramp_mode == RAMP_GNS && o->ramp_step_rows > 0)
            printf("        a step of B rows costs as much as %g + B rows\n", o->ramp_step_rows);
        return;
    }
    int64_t B = o->run.batch_ref_rows, rows = (horizon - r->at.tokens) / T, steps = rows / B + (rows % B != 0);
    printf("run     %lld %sstep%s of %lld rows of %lld tokens, %lld tokens%s\n", (long long)steps,
           r->at.step ? "more " : "", steps == 1 ? "" : "s", (long long)B, (long long)T, (long long)horizon,
           r->at.step ? " in all" : "");
}

static void print_engine(const Run *r) {
    char engine[256];
    MemoryPlan plan;
    double peak = r->peak_flops;
    int tuned = 0;
    engine_describe(r->engine, engine, sizeof engine);
    r->engine_api->plan_memory(&r->shape, &plan);
    printf("engine  %s, %.0f MiB\n", engine, (double)plan.total / (1 << 20));
    if (r->data.train && peak > 0)
        printf("MFU     share of %.4g TFLOP/s, %.4g FLOPs a token (" MODEL_FLOPS_FORMULA ")\n", 1e-12 * peak,
               model_flops_per_token(&r->model, r->shape.seq_len));
    for (const char *c = r->at.tuning; *c; c++) tuned += *c == '='; // "MACHINE: SHAPE=ALGORITHM ..."
    if (r->at.tuning[0]) printf("tuned   %d matrix products\n", tuned);
    if (r->comm->ranks > 1) printf("ranks   %d, each with such an engine", r->comm->ranks);
    if (r->parallel.config.tensor > 1) printf(", %d for a model", r->parallel.config.tensor);
    const int ranks = r->comm->ranks, shared = r->parallel.config.shared;
    if (shared && shared < ranks) printf(", %d replicas on %d ranks each", ranks / shared, shared);
    if (ranks > 1) printf("\n");
}

void print_setup(const Run *r) {
    const ModelConfig *c = &r->model.config;
    const char *source = r->source, *moments = r->options.with_optimizer ? " and moments" : "";
    const bool new_run = r->data.train && !r->saving.saved[0];
    printf("model   %.2fM parameters: %d layer%s, %d heads, %d channels, vocabulary %d, T %d",
           1e-6 * (double)r->model.parameters, c->layers, c->layers > 1 ? "s" : "", c->heads, c->channels, c->vocab,
           r->shape.seq_len);
    // A new run names the origin of its weights: a preset's name may look like a trained model's.
    if (new_run && *source) printf("; weights%s from %s", moments, source);
    else if (new_run) printf("; from scratch, seed %lld", (long long)r->options.seed);
    printf("\n");
    if (r->data.train) {
        print_data(r);
        print_length(r);
        if (r->options.optimizer == OPTIMIZER_LAMB) fputs("update  LAMB\n", stdout);
        if (r->options.optimizer == OPTIMIZER_MUON)
            fputs("update  Muon for the matrices of the blocks, AdamW for the rest\n", stdout);
    }
    if (r->data.hellaswag) {
        HellaSwagInfo info = r->data.hellaswag->info;
        printf("tests   %d questions of %s", info.questions, r->options.hellaswag);
        if (info.left_out) printf("; %d with an ending longer than T are left out", info.left_out);
        if (info.cut) printf("; the context cut to fit T before %d of %d endings", info.cut, info.rows);
        fputs("\n", stdout);
    }
    print_engine(r);
    if (comm_is_bound(r->comm)) // loading, saving, MPI and NCCL compete with the computation for these cores
        printf("note: rank 0 may run on %d of the %d cores here, and its share is %d: mpirun --bind-to none lifts "
               "that (srun: --cpu-bind=none)\n",
               r->comm->cores, r->comm->cores_here, r->comm->cores_here / r->comm->local_ranks);
    const double warmup = (double)r->options.warmup_tokens;
    const bool never_ends = warmup > r->position.ramp.config.schedule.train_tokens;
    if (r->data.train && r->at.step == 0 && (!warmup || never_ends) && r->options.optimizer != OPTIMIZER_LAMB)
        printf("note: %s; --warmup-tokens of 1%% of the run is usual\n",
               never_ends ? "the warm-up is longer than the run, so the rate never reaches --lr"
                          : "no warm-up: AdamW's first steps have the full --lr, and moments of few batches");
    if (r->data.train && !r->tokenizer && r->model.config.vocab > 256) // tokens are not bytes
        printf("note: checkpoints will hold no tokenizer, which --sample-only and transformers need: --tokenizer "
               "DIRECTORY\n");
    fflush(stdout);
}
