// Functions of set-up: model, engine, data and schedule. run.h has the order of their calls.
#include "run/run.h"

#include "base/files.h"
#include "base/hash.h"
#include "checkpoint/checkpoint.h"
#include "model/cuda_sizes.h"
#include "plan/devices.h"

// ---- The model ------------------------------------------------------------------------------------------------------

static int shape_from_files(const Run *r, ModelConfig *config, Error *e) {
    const Options *o = &r->options;
    TRY(checkpoint_read_config(r->source, config, e));
    const bool other_vocab = o->given[OPTION_vocab_size] && o->vocab_size != config->vocab;
    if (o->given[OPTION_layers] || o->given[OPTION_heads] || o->given[OPTION_channels] || other_vocab)
        return FAIL(e, ERR_USAGE, "leave out --layers, --heads, --channels and --vocab-size",
                    "--model %s has a shape of its own, with a vocabulary of %d", o->model, config->vocab);
    bool trains = options_train(o) || (o->dry_run && *o->train); // else a default --seq-len is cut to the context
    if (o->seq_len > config->context && (trains || o->given[OPTION_seq_len]))
        return FAIL(e, ERR_USAGE, "use a smaller --seq-len", "--seq-len %lld: --model %s has a context of %d tokens",
                    (long long)o->seq_len, o->model, config->context);
    return 0;
}

static int shape_from_preset(const Options *o, const Tokenizer *tokenizer, ModelConfig *config, Error *e) {
    if (!model_preset(config, o->model)) {
        TRY(checkpoint_refuse_pickle(o->model, e));
        if (file_exists(o->model) && !directory_exists(o->model)) // fails on a pointer of Git LFS
            TRY(file_digest(o->model, &(FileDigest){0}, e));
        return FAIL(e, file_exists(o->model) ? ERR_INPUT : ERR_USAGE,
                    "presets, which start from scratch: " MODEL_PRESET_HELP "; for OpenAI's weights: hf download "
                    "openai-community/gpt2 config.json model.safetensors vocab.json merges.txt --local-dir "
                    "models/gpt2 (or gpt2-medium, -large, -xl), then --model models/gpt2",
                    "--model %s: neither a preset, nor a directory with config.json, nor llm.c's .bin%s", o->model,
                    file_exists(o->model) ? "" : " (no such file or directory)");
    }
    if (o->given[OPTION_layers]) config->layers = (int)o->layers;
    if (o->given[OPTION_heads]) config->heads = (int)o->heads;
    if (o->given[OPTION_channels]) config->channels = (int)o->channels;
    config->vocab = tokenizer ? tokenizer->vocab_size : 50257; // GPT-2's vocabulary
    if (o->given[OPTION_vocab_size]) config->vocab = (int)o->vocab_size;
    config->context = (int)o->seq_len;
    return 0;
}

// Loads the model's own tokenizer unless --tokenizer is loaded. ERR_USAGE if there is none and samples need one.
static int setup_tokenizer(Run *r, bool model_from_file, Error *e) {
    const Options *o = &r->options;
    const char *given = o->tokenizer, *path = given;
    int vocab = r->model.config.vocab;
    if (!*path && model_from_file && tokenizer_exists(r->source)) path = r->source;
    if (!*path && vocab == 256) path = "bytes";
    if (!*path && (o->eval_only || !(o->sample_only || o->sample_every || *o->prompt))) return 0;
    if (!*path)
        return FAIL(e, ERR_USAGE, "give --tokenizer the directory of its files (data/gpt2), or use --vocab-size 256",
                    "samples (--sample-only, --sample-every, --prompt) need a tokenizer for the vocabulary of %d",
                    vocab);
    if (!r->tokenizer) TRY(tokenizer_load(&r->tokenizer, path, e));
    int tokens = r->tokenizer->vocab_size;
    bool other = model_from_file && *given && vocab > 2 * tokens; // larger than padding can explain
    if (tokens <= vocab && !other) return 0;
    FAIL(e, ERR_INPUT, NULL, "the tokenizer %s has %d tokens, the model's vocabulary %d", path, tokens, vocab);
    const char *own = "use the tokenizer that the model was trained with";
    return error_hint(e, model_from_file ? own : "use --vocab-size %d, or another --tokenizer", tokens);
}

// Fails if the engine, or the GPU of --device, cannot compute the shape or type that the options ask for. ERR_INPUT if
// a shape that was read from files is the cause; otherwise ERR_USAGE.
static int check_shape(const Run *r, bool from_file, Error *e) {
    const EngineConfig *shape = &r->shape;
    int code = r->options.dry_run && r->options.device[0] ? cuda_check(shape, e) : 0;
    if (!code && r->engine_api->check) code = r->engine_api->check(shape, e);
    if (!code || !from_file || fp8_check(shape->dtype, shape->model->config.channels, shape->seq_len, &(Error){0}))
        return code;
    error_hint(e, "use another model, or the CPU trainer, train_gpt2");
    error_prefix(e, "--model %s", r->options.model);
    return e->code = ERR_INPUT;
}

int setup_shape(Run *r, Error *e) {
    Options *o = &r->options;
    ModelConfig config = {0};
    const EngineApi *engine = r->engine_api;
    const bool from_file = r->source[0], plan_gpu = o->dry_run && *o->device && !engine->tune; // by the CPU trainer
    if (!o->given[OPTION_dtype]) o->dtype = engine->dtype;
    if (!plan_gpu || dtype_is_fp8((Dtype)o->dtype)) TRY(engine->check_dtype((Dtype)o->dtype, e));
    if (o->loss_scale != 0 && !engine->needs_loss_scale && o->dtype != DTYPE_FP16)
        return FAIL(e, ERR_USAGE, "leave it out; make train_gpt2cu PRECISION=FP16 builds the trainer that needs it",
                    "--loss-scale: gradients of %s need none", dtype_names[o->dtype]);
    if (o->loss_scale != 0 && !loss_scale_valid(o->loss_scale))
        return FAIL(e, ERR_USAGE, "use 1, 2, 4, ...", "--loss-scale %g is no power of two from 1 on", o->loss_scale);
    if (o->tune && !engine->tune && !plan_gpu)
        return FAIL(e, ERR_USAGE, "leave it out, or plan for a GPU with --dry-run --device",
                    "--tune is for GPUs: on the CPU a matrix product has one algorithm");
    if (*o->tokenizer) TRY(tokenizer_load(&r->tokenizer, o->tokenizer, e));
    TRY(from_file ? shape_from_files(r, &config, e) : shape_from_preset(o, r->tokenizer, &config, e));
    TRY(model_create(&r->model, &config, e));
    r->shape = (EngineConfig){
        .model = &r->model,
        .micro_batch = o->sample_only ? 1 : (int)o->micro_batch,
        .seq_len = (int)(o->seq_len < config.context ? o->seq_len : config.context),
        .threads = r->shape.threads,
        .dtype = o->dtype,
        .fp8_head = o->fp8_head && dtype_is_fp8((Dtype)o->dtype),
        .recompute = o->recompute,
        .optimizer = o->optimizer,
        .label_smoothing = (float)o->label_smoothing,
        .inference = o->sample_only || o->eval_only,
        .dropout = dropout_of(o->dropout, (uint64_t)o->seed),
    };
    TRY(check_shape(r, from_file, e));
    TRY(setup_tokenizer(r, from_file, e));
    const bool words = !r->tokenizer || r->tokenizer->merge_count > 0;
    if (!o->sample_tokens) o->sample_tokens = words ? 100 : 400; // some lines of text
    if (!o->document_mask) return 0;
    int separator = r->tokenizer ? r->tokenizer->eot : checkpoint_end_of_text(config.vocab, -1);
    if (separator < 0)
        return FAIL(e, ERR_USAGE, "leave it out, or use a tokenizer with one (data/gpt2)",
                    "--document-mask: the vocabulary of %d tokens has no <|endoftext|> between documents",
                    config.vocab);
    r->shape.document_mask = true;
    r->shape.separator = (uint16_t)separator;
    return 0;
}

// ---- The engine -----------------------------------------------------------------------------------------------------

// Loads values. Fails on a value that is not finite, and names its tensor, which later errors could not.
static int load(void *run, StateKind kind, Range range, const float *values, Error *e) {
    Run *r = run;
    const size_t n = range_length(range);
    size_t at = range.begin;
    int bad = 0;
#pragma omp parallel for simd schedule(static) reduction(| : bad)
    for (size_t i = 0; i < n; i++) bad |= !isfinite(values[i]);
    progress_next(&r->progress, r->progress.now.done + (int64_t)n);
    if (!bad) return engine_load(r->engine, kind, range, values, e);
    const Tensor *t = r->shape.model->tensors;
    while (isfinite(values[at - range.begin])) at++;
    while (at < t->offset || at >= t->offset + t->count) t++;
    return FAIL(e, ERR_INPUT, "use another checkpoint", "%s: %s%s is not finite",
                r->saving.saved[0] ? r->saving.saved : r->source, kind == STATE_PARAM ? "" : "a moment of ", t->name);
}

// A tensor of the whole model whose values are drawn.
typedef struct {
    const Run *run;
    const Tensor *tensor;
} Drawn;

static int draw_weights(const void *drawn, size_t first, size_t n, float *out, Error *e) {
    const Drawn *d = drawn;
    if (d->run->options.zero_projections && d->tensor->init == INIT_RESIDUAL) memset(out, 0, n * sizeof *out);
    else model_init_values(&d->run->model, d->tensor, (uint64_t)d->run->options.seed, first, n, out);
    return 0;
}

int setup_shards(Run *r, Comm *comm, Error *e) {
    const Options *o = &r->options;
    const bool infers = r->shape.inference;
    const int K = infers ? 1 : (int)o->tensor;
    const bool exact = o->run.gns_exact_interval > 0 || o->run.gns_calibrates; // some steps are exact
    r->shape.gns = exact ? GNS_EXACT : (GnsMode)o->gns;
    ParallelConfig config = {
        .shared = o->shard && !infers ? comm->local_ranks : 0,
        .tensor = K,
        .zero = infers ? ZERO_0 : o->zero, // inference computes with all weights
        .reduce = o->reduce,
        .batch_max = r->position.ramp.replay ? r->position.ramp.config.batch_max : o->run.batch_max_rows,
        .transport = r->transport_api,
    };
    if (K > 1) { // make this rank's local model
        const int ranks = o->shard ? comm->local_ranks : comm->ranks;
        if (ranks % K) {
            FAIL(e, ERR_USAGE, "use a --tensor that divides them", "--tensor %d: there %s %d rank%s%s", K,
                 ranks > 1 ? "are" : "is", ranks, ranks > 1 ? "s" : "", o->shard ? " a machine (--shard machine)" : "");
            if (o->shard) return e->code;
            return error_hint(e, "use %s %d, or a --tensor that divides them", o->dry_run ? "--ranks" : "mpirun -np",
                              (ranks / K + 1) * K);
        }
        TRY(model_create_local(&r->local, &r->model.config, comm->rank % K, K, e));
        r->shape.model = &r->local;
    }
    TRY(parallel_create(&r->parallel, comm, &config, &r->shape, e));
    if (o->outliers || r->position.noise.sources)
        r->shape.step_rows = (int)rows_of_rank(config.batch_max, 0, comm->ranks / K).count;
    r->shape.sources = r->position.noise.sources;
    if (comm->ranks > 1 && !infers) // evaluation does not use NCCL
        r->shape.leave =
            TRANSPORT_NCCL_BYTES + transport_buffer_bytes(o->comm_dtype, model_bucket_largest(r->shape.model));
    return 0;
}

int setup_device(const Run *r, Error *e) {
    return r->comm->ranks > 1 && r->transport_api->device ? r->transport_api->device(r->comm, e) : 0;
}

// Sets the default of --gns: exact if all devices fuse exact norms, else ln. A resumed run keeps its mode (state.c).
int setup_gns(Run *r, Error *e) {
    EngineDevice device;
    if (!r->options.given[OPTION_gns] && !r->saving.saved[0]) {
        r->engine_api->device(&r->shape, false, &device);
        double lacking = device.exact_is_fused ? 0 : 1; // number of ranks whose device does not fuse exact norms
        TRY(comm_sum(r->comm, &lacking, 1, e));
        TRY(options_resolve_gns(&r->options, lacking == 0 ? GNS_EXACT : GNS_LN, e));
    }
    r->position.noise.follows_total = ramp_follows_total(&r->options);
    return 0;
}

int setup_moments(Run *r, Error *e) {
    RunSummary then;
    if (!r->source[0])
        return FAIL(e, ERR_USAGE, "name a run, or a checkpoint of one", "--with-optimizer: --model %s has no moments",
                    r->options.model);
    if (run_state_summary(&then, r->source, e))
        return error_hint(e, "--with-optimizer needs a run, or a checkpoint of one");
    if (strcasecmp(then.optimizer, optimizer_names[r->options.optimizer]) != 0)
        return FAIL(e, ERR_USAGE, "use that, or leave --with-optimizer out", "%s: its moments are of --optimizer %s",
                    r->source, then.optimizer);
    r->at.moment_steps = then.at.moment_steps + then.at.step - then.at.loss_scale.overflows;
    return 0;
}

// Loads what this rank owns of a checkpoint's arrays, or draws the weights. parallel_start gathers what others own.
static int load_state(Run *r, Error *e) {
    Receiver to = {.model = r->shape.model, .wanted = r->parallel.owned, .load = load, .context = r};
    const size_t bytes = RECEIVER_VALUES * sizeof *to.buffer;
    const bool resumes = r->saving.saved[0], moments = resumes || r->options.with_optimizer;
    const char *from = resumes ? r->saving.saved : r->source;
    const Share share = {r->comm->local_rank, r->comm->local_ranks}; // each machine may have files of its own
    const Pulse pulse = {comm_progress, r->comm};
    const int ranks = r->shape.inference || r->comm->ranks == 1 ? 1 : r->parallel.division.ranks;
    progress_begin(&r->progress, *from ? "loading the model" : "drawing the weights",
                   (moments ? 3 : 1) * (int64_t)(r->model.parameters / (size_t)ranks));
    if (*from && !resumes) TRY(checkpoint_verify_model(from, moments, share, &pulse, e));
    if (moments && !resumes) TRY(setup_moments(r, e));
    if (!r->shape.inference) to.count = r->parallel.buckets;
    TRY(memory_alloc((void **)&to.buffer, bytes, "a file buffer", e));
    engine_pin(r->engine, to.buffer, bytes);
    int code = *from ? checkpoint_load_model(from, &to, e) : 0;
    for (int i = 0; !*from && i < r->model.tensor_count && !code; i++)
        code = checkpoint_load_tensor(&to, STATE_PARAM, i, draw_weights, &(Drawn){r, &r->model.tensors[i]}, e);
    if (moments && !code) code = checkpoint_load_moment(from, STATE_MOMENT1, &r->model, &to, e);
    if (moments && !code) code = checkpoint_load_moment(from, STATE_MOMENT2, &r->model, &to, e);
    engine_unpin(r->engine, to.buffer);
    memory_free(to.buffer);
    if (code || !*from || resumes || !is_rank0(r)) return code;
    progress_break(&r->progress);
    return checkpoint_note_unknown(from, &r->model, stderr, e);
}

int setup_engine(Run *r, Error *e) {
    EngineDevice device;
    TRY(setup_shards(r, r->comm, e));
    r->shape.source = dataset_example_source, r->shape.source_data = r->data.train;
    TRY(engine_create(r->engine_api, &r->engine, &r->shape, e));
    if (r->shape.model == &r->local) TRY(whole_create(&r->whole, &r->parallel, &r->model, e));
    r->engine_api->device(&r->shape, false, &device);
    r->peak_flops = device_peak_flops(&device);
    TRY(load_state(r, e));
    progress_end(&r->progress);
    return 0;
}

// On rank 0: restores the checkpoint's algorithms, and with them the run's bits; --tune then chooses those of the other
// products. All ranks then use rank 0's algorithms; if these do not fit some rank, no rank uses any of them.
int setup_tuning(Run *r, Error *e) {
    char *tuning = r->at.tuning;
    Error misfit = {0};
    int code = 0;
    if (is_rank0(r)) {
        if (engine_set_tuning(r->engine, tuning, &misfit))
            fprintf(stderr, "note: %s: %s. The last bits may differ from here on\n", r->saving.saved, misfit.what);
        progress_begin(&r->progress, "timing matrix products", 0);
        if (r->options.tune) code = engine_tune(r->engine, e);
        progress_end(&r->progress);
        strcpy(tuning, engine_tuning(r->engine));
    }
    TRY(comm_agree(r->comm, code, e));
    TRY(comm_broadcast(r->comm, tuning, sizeof r->at.tuning, e));
    double misfits = !is_rank0(r) && engine_set_tuning(r->engine, tuning, &misfit) ? 1 : 0;
    TRY(comm_sum(r->comm, &misfits, 1, e));
    if (misfits == 0) return 0;
    if (is_rank0(r))
        fprintf(stderr, "note: the ranks have different GPUs or libraries: matrix products are not tuned\n");
    tuning[0] = 0;
    return engine_set_tuning(r->engine, "", e);
}

// ---- Data and schedule ----------------------------------------------------------------------------------------------

int setup_data(Run *r, Error *e) {
    Options *o = &r->options;
    int T = r->shape.seq_len, V = r->model.config.vocab;
    bool hellaswag = o->eval_only ? o->given[OPTION_hellaswag] : o->hellaswag_every > 0;
    progress_begin(&r->progress, "reading the data", 0);
    if (!o->eval_only) {
        TRY(dataset_open(&r->data.train, o->train, T, V, (uint64_t)o->seed, e));
        if (o->shift_windows) r->data.train->shifts = true;
        DatasetInfo info = r->data.train->info;
        if (o->epochs && info.weights > 0)
            return FAIL(e, ERR_USAGE, "use --train-tokens or --steps",
                        "--epochs %g: the sources of a --train with weights have epochs of their own", o->epochs);
        TRY(options_resolve_epochs(o, (int64_t)info.windows, e));
    }
    if (o->val[0]) {
        TRY(dataset_open(&r->data.val, o->val, T, V, (uint64_t)o->seed, e));
        if (r->data.val->info.weights > 0)
            return FAIL(e, ERR_USAGE, "leave them out: validation reads all files alike", "--val %s: it has weights",
                        o->val);
    }
    // A model of words should not train on bytes or on the characters of a small alphabet. Only warn if an option names
    // a model or vocabulary.
    const Dataset *seen = r->data.train ? r->data.train : r->data.val;
    const bool words = V > 1000 || (r->tokenizer && r->tokenizer->merge_count > 0);
    if (seen && words && seen->info.largest < BYTE_VALUES) {
        const uint8_t *given = o->given;
        FAIL(e, ERR_INPUT,
             "say --tokenizer bytes if these are bytes, else the tokenizer or --vocab-size of these shards",
             "%s has no token above %d, and the vocabulary is %d", seen->shards[0].path, seen->info.largest, V);
        if (!(given[OPTION_model] || given[OPTION_layers] || given[OPTION_channels] || given[OPTION_vocab_size] ||
              given[OPTION_tokenizer]))
            return e->code;
        if (is_rank0(r)) fprintf(stderr, "warning: %s. %s\n", e->what, e->hint);
    }
    if (hellaswag) TRY(hellaswag_open(&r->data.hellaswag, o->hellaswag, r->tokenizer, T, e));
    progress_end(&r->progress);
    return 0;
}

static uint64_t hash_shards(const Dataset *data) { // data may be NULL
    uint64_t hash = HASH_START;
    for (int i = 0; data && i < data->info.shards; i++) {
        const char *name = path_name(data->shards[i].path);
        hash = hash_bytes(hash, name, strlen(name) + 1);
        hash = hash_bytes(hash, data->shards[i].digest.hash, HASH_TEXT); // covers the shard's size, too
    }
    return hash;
}

// Compares hashes of contents, not paths, as machines may hold copies of the files.
int setup_same_data(const Run *r, Error *e) {
    const Ramp *ramp = &r->position.ramp;
    const uint64_t replay = hash_bytes(HASH_START, ramp->replay, sizeof *ramp->replay * (size_t)ramp->replay_steps);
    uint64_t model = HASH_START;
    FileDigest weights = {0}, questions = {0};
    int code = 0;
    if (r->comm->ranks == 1) return 0;
    if (r->source[0]) code = checkpoint_digest_model(r->source, &weights, e);
    model = hash_bytes(model, weights.hash, sizeof weights.hash);
    model = hash_bytes(model, &r->model.config, sizeof r->model.config); // the vocabulary may come from the tokenizer
    model = hash_bytes(model, &r->shape.separator, sizeof r->shape.separator);
    if (!code && r->data.hellaswag) code = file_digest(r->options.hellaswag, &questions, e);
    TRY(comm_agree(r->comm, code, e));
    const struct {
        uint64_t hash;
        const char *other;
    } same[] = {{model, "another model (--model, --tokenizer)"},
                {hash_shards(r->data.train), "other training data (--train)"},
                {hash_shards(r->data.val), "other validation data (--val)"},
                {hash_bytes(HASH_START, questions.hash, sizeof questions.hash), "other questions (--hellaswag)"},
                {replay, "another run to replay (--ramp)"}};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        TRY(comm_same(r->comm, same[i].hash, 1, ERR_INPUT, same[i].other, SAME_FILES_HINT, e));
    return 0;
}

int setup_schedule(Run *r, Error *e) {
    const Options *o = &r->options;
    const DatasetInfo data = r->data.train ? r->data.train->info : (DatasetInfo){0};
    RampConfig ramp = {
        .mode = o->run.ramp_mode,
        .batch_min = o->run.batch_min_rows,
        .batch_max = o->run.batch_max_rows,
        .batch_ref = o->run.batch_ref_rows,
        .seq_len = o->seq_len,
        .kappa = o->ramp_kappa,
        .waste = o->ramp_waste,
        .step_rows = o->ramp_step_rows,
        .lr_power = o->ramp_lr_power,
        .schedule = {.kind = o->lr_schedule,
                     .lr = o->lr,
                     .warmup_tokens = (double)o->warmup_tokens,
                     .train_tokens = (double)o->run.horizon_tokens,
                     .final_frac = o->final_lr_frac,
                     .hold_frac = o->lr_hold_frac},
    };
    TRY(ramp_create(&r->position.ramp, &ramp, o->run.ramp_argument, e));
    return noise_create(&r->position.noise, &r->model, o->run.gns_half_life_tokens, o->gns_ratio,
                        data.sources > 1 && o->gns != GNS_OFF ? data.sources : 0, e);
}

int run_set_horizon(Run *r, int64_t tokens, Error *e) {
    r->at.horizon = r->options.run.horizon_tokens = tokens;
    TRY(options_resolve_gns(&r->options, (GnsMode)r->options.gns, e)); // sets the half-life
    r->position.ramp.config.schedule.train_tokens = (double)tokens;
    r->position.noise.half_life = r->options.run.gns_half_life_tokens;
    return 0;
}

int setup_rows(Run *r, Error *e) {
    size_t rows = (size_t)r->shape.micro_batch, T = (size_t)r->shape.seq_len;
    TRY(memory_alloc_zero((void **)&r->data.rows, 2 * rows * (T + 1) * sizeof(uint16_t), "token rows", e));
    r->data.ahead = r->data.rows + rows * (T + 1);
    return memory_alloc((void **)&r->data.losses, rows * T * sizeof(float), "losses", e);
}

int setup_buffers(Run *r, Error *e) {
    size_t n = (size_t)r->model.tensor_count;
    TRY(setup_rows(r, e));
    Position *p = &r->position;
    StepResult *result = &p->result;
    const size_t rows = (size_t)p->ramp.config.batch_max, gram = (size_t)(p->noise.sources * p->noise.sources) + 1;
    const size_t sites = (size_t)fp8_entries(r->model.config.layers);
    const size_t bytes = (2 * n + gram) * sizeof(double) + rows * sizeof *p->rows + sites * sizeof *result->amax;
    if (memory_alloc((void **)&result->grad_sq, bytes, "norms", e))
        return error_hint(e, "use smaller batches (--batch-tokens, --batch-max, --ramp)");
    result->example_sq = result->grad_sq + n;
    result->source_gram = result->example_sq + n;
    p->rows = (RowResult *)(result->source_gram + gram);
    if (dtype_is_fp8(r->shape.dtype)) result->amax = (float *)(p->rows + rows);
    return r->options.outliers ? row_outliers_create(r, e) : 0;
}

void run_end_training(Run *r) {
    saver_destroy(r->saving.saver);
    worker_join(&r->data.reader);
    whole_destroy(&r->whole);
    parallel_destroy(&r->parallel);
    engine_destroy(r->engine);
    model_destroy(&r->local);
    r->shape.model = &r->model;
    memory_free(r->position.result.grad_sq);
    memory_free(r->position.outliers.surprise);
    for (int k = 0; k < ROW_KINDS; k++) cJSON_Delete(r->position.outliers.list[k]);
    memory_free(r->data.losses);
    memory_free(r->data.rows);
    noise_destroy(&r->position.noise);
    ramp_destroy(&r->position.ramp);
    memory_free(r->data.hellaswag);
    dataset_close(r->data.val);
    dataset_close(r->data.train);
    r->engine = NULL;
    r->data = (RunData){0};
    r->saving = (Saving){0};
}

int run_destroy(Run *r, Error *e) {
    progress_destroy(&r->progress);
    run_end_training(r);
    const int code = metrics_close(r->metrics, e);
    archive_close(&r->archive);
    memory_free(r->tokenizer);
    model_destroy(&r->model);
    return code;
}
