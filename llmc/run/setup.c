#define _XOPEN_SOURCE 700 // realpath
#include "run/run.h"

#include "checkpoint/checkpoint.h"
#include "model/cuda_sizes.h"
#include "plan/devices.h"
#include "base/files.h"
#include "base/hash.h"

#include <errno.h>
#include <omp.h>
#include <stdlib.h>
#include <sys/stat.h>

// ---------------------------------------------------------------------------------------------------------------------
// Set-up: the model

static int shape_from_files(const Run *r, ModelConfig *config, Error *e) {
    const Options *o = &r->options;
    static const char *const settled[] = {"--layers", "--heads", "--channels"};
    for (size_t i = 0; i < sizeof settled / sizeof *settled; i++)
        if (options_given(o, settled[i]))
            return FAIL(e, ERR_USAGE, "leave it out", "%s: the shape is settled by --model %s", settled[i], o->model);
    TRY(checkpoint_read_config(r->source, config, e));
    if (options_given(o, "--vocab-size") && o->vocab_size != config->vocab)
        return FAIL(e, ERR_USAGE, "leave it out", "--vocab-size %lld: --model %s has %d", (long long)o->vocab_size,
                    o->model, config->vocab);
    bool shorten = !options_train(o) && !options_given(o, "--seq-len"); // to what the model can see
    if (o->seq_len > config->context && !shorten)
        return FAIL(e, ERR_USAGE, "use a smaller --seq-len", "--seq-len %lld: --model %s sees %d tokens at most",
                    (long long)o->seq_len, o->model, config->context);
    return 0;
}

// Elsewhere such a name stands for OpenAI's weights, here a preset for a shape: say how to get the former.
static int hint_presets(const char *model, Error *e) {
    static const char owner[] = "openai-community/", *const published[] = {"gpt2-medium", "gpt2-large", "gpt2-xl"};
    const char *name = strncmp(model, owner, strlen(owner)) == 0 ? model + strlen(owner) : model, *wanted = "gpt2";
    for (size_t i = 0; i < sizeof published / sizeof *published; i++)
        if (strcmp(name, published[i]) == 0) wanted = published[i];
    return error_hint(e,
                      "presets, which start from scratch: %s; for OpenAI's weights: hf download %s%s config.json "
                      "model.safetensors vocab.json merges.txt --local-dir models/%s, then --model models/%s",
                      model_preset_help, owner, wanted, wanted, wanted);
}

// A vocabulary that is not given is the tokenizer's, where there is one, or GPT-2's.
static int preset_vocab(const Options *o, const Tokenizer *tokenizer) {
    if (options_given(o, "--vocab-size")) return (int)o->vocab_size;
    return tokenizer ? tokenizer_vocab_size(tokenizer) : 50257;
}

static int shape_from_preset(const Options *o, const Tokenizer *tokenizer, ModelConfig *config, Error *e) {
    if (!model_preset(config, o->model)) {
        TRY(checkpoint_refuse_pickle(o->model, e));
        if (file_exists(o->model))
            FAIL(e, ERR_INPUT, NULL, "--model %s: neither a preset, nor a directory with config.json, nor llm.c's .bin",
                 o->model);
        else FAIL(e, ERR_USAGE, NULL, "--model %s: no preset, and no such file or directory", o->model);
        return hint_presets(o->model, e);
    }
    if (options_given(o, "--layers")) config->layers = (int)o->layers;
    if (options_given(o, "--heads")) config->heads = (int)o->heads;
    if (options_given(o, "--channels")) config->channels = (int)o->channels;
    config->vocab = preset_vocab(o, tokenizer);
    config->context = (int)o->seq_len;
    return 0;
}

// The tokenizer that was named, which is there already, or the model's own; none is no error as long as no text is needed.
static int setup_tokenizer(Run *r, bool model_from_file, Error *e) {
    const Options *o = &r->options;
    int vocab = r->model.config.vocab;
    const char *path = *o->tokenizer ? o->tokenizer : NULL;
    if (!path && model_from_file && tokenizer_exists(r->source)) path = r->source;
    if (!path && vocab == 256) path = "bytes";
    if (!path) return 0;
    if (!r->tokenizer) TRY(tokenizer_load(&r->tokenizer, path, e));
    int tokens = tokenizer_vocab_size(r->tokenizer);
    if (tokens <= vocab) return 0;
    FAIL(e, ERR_INPUT, NULL, "the tokenizer %s has %d tokens, the model's vocabulary %d", path, tokens, vocab);
    return error_hint(e, model_from_file ? "use the tokenizer that the model was trained with" : "use --vocab-size %d",
                      tokens);
}

// By this program's engine, and by the GPU for which --device wants a plan, whichever program makes it.
static int check_computable(const Run *r, Error *e) {
    const ModelConfig *m = &r->model.config;
    if (r->options.dry_run && r->options.device[0]) TRY(attention_check(m->channels / m->heads, e));
    return r->api->check(&r->shape, e);
}

// What cannot be computed is the fault of the options, or of the files that the shape comes from.
static int check_shape(const Run *r, bool from_file, Error *e) {
    Error why;
    int code = check_computable(r, &why);
    if (!code) return 0;
    if (from_file)
        return FAIL(e, ERR_INPUT, "use another model, or the CPU trainer, train_gpt2", "--model %s: %s",
                    r->options.model, why.what);
    *e = why;
    return code;
}

static int setup_shape(Run *r, Error *e) {
    const Options *o = &r->options;
    ModelConfig config = {0};
    bool from_file = r->source[0];
    if (*o->tokenizer) TRY(tokenizer_load(&r->tokenizer, o->tokenizer, e));
    TRY(from_file ? shape_from_files(r, &config, e) : shape_from_preset(o, r->tokenizer, &config, e));
    TRY(model_create(&r->model, &config, e));
    r->shape = (EngineConfig){
        .model = &r->model,
        .micro_batch = o->sample_only ? 1 : (int)o->micro_batch,
        .seq_len = (int)(o->seq_len < config.context ? o->seq_len : config.context),
        .threads = o->threads ? (int)o->threads : comm_threads(r->comm),
        .gns = o->gns,
        .recompute = o->recompute,
        .inference = o->sample_only || o->eval_only,
    };
    if (r->shape.threads > 0) omp_set_num_threads(r->shape.threads); // those of model_init_values
    if (o->run.gns_exact_interval > 0) r->shape.gns = GNS_EXACT;
    TRY(check_shape(r, from_file, e));
    return setup_tokenizer(r, from_file, e);
}

int setup_model(Run *r, Error *e) {
    TRY(setup_source(r, e));
    return comm_agree(r->comm, setup_shape(r, e), e);
}

static int check_tokenizer(const Run *r, Error *e) {
    if (r->tokenizer) return 0;
    const char *flag = r->options.sample_only ? "--sample-only" : r->options.prompt[0] ? "--prompt" : "--sample-every";
    return FAIL(e, ERR_USAGE, "give --tokenizer the directory of its files (data/gpt2), or use --vocab-size 256",
                "%s: no tokenizer for a vocabulary of %d", flag, r->model.config.vocab);
}

static int read_prompt(char **text, const char *path, Error *e) {
    const size_t most = 1 << 20; // bytes: more than any model sees
    size_t bytes;
    TRY(file_read(path, most, text, &bytes, e));
    if (bytes > 0 && strlen(*text) == bytes) return 0; // file_read puts a NUL behind it
    return FAIL(e, ERR_INPUT, "name a file of text", "%s: %s", path,
                bytes ? "a zero byte: this is no text" : "is empty");
}

// Perhaps no file was meant.
static int refuse_prompt(const char *path, Error *e) {
    if (!file_exists(path))
        error_hint(e, "check the path: @ names a file, and a prompt that begins with @ goes into one");
    return error_prefix(e, "--prompt");
}

int setup_sampling(Run *r, Error *e) {
    const Options *o = &r->options;
    const char *prompt = o->prompt;
    if (!o->sample_only && o->sample_every == 0 && !prompt[0]) return 0;
    TRY(check_tokenizer(r, e));
    if (prompt[0] != '@' || !is_first(r)) return 0;
    if (!prompt[1]) return FAIL(e, ERR_USAGE, "say --prompt @FILE", "--prompt @ names no file");
    return read_prompt(&r->prompt_file, prompt + 1, e) ? refuse_prompt(prompt + 1, e) : 0;
}

static int range_to_engine(void *engine, Range range, const float *values, Error *e) {
    return engine_load(engine, STATE_PARAM, range, values, e);
}

static int init_parameters(Run *r, Error *e) {
    enum { CHUNK = 1 << 20 };
    float *buffer;
    int code = 0;
    TRY(memory_alloc((void **)&buffer, CHUNK * sizeof(float), "initial weights", e));
    for (int i = 0; i < r->model.tensor_count; i++) {
        const Tensor *t = &r->model.tensors[i];
        for (size_t first = 0; first < t->count; first += CHUNK) {
            size_t n = size_min(CHUNK, t->count - first);
            model_init_values(&r->model, t, (uint64_t)r->options.seed, first, n, buffer);
            TRY_GOTO(engine_load(r->engine, STATE_PARAM, (Range){t->offset + first, t->offset + first + n}, buffer, e));
        }
    }
done:
    memory_free(buffer);
    return code;
}

static int moment1_to_engine(void *engine, Range range, const float *values, Error *e) {
    return engine_load(engine, STATE_MOMENT1, range, values, e);
}

static int moment2_to_engine(void *engine, Range range, const float *values, Error *e) {
    return engine_load(engine, STATE_MOMENT2, range, values, e);
}

int setup_shards(Run *r, Comm *comm, Error *e) {
    const Options *o = &r->options;
    ParallelConfig config = {
        .zero = o->zero,
        .reduce = o->reduce,
        .micro_batch = r->shape.micro_batch,
        .batch_max = r->ramp.replay ? ramp_largest(&r->ramp) : o->run.batch_max_rows,
        .transport = r->transport,
    };
    TRY(parallel_create(&r->parallel, comm, &r->model, &config, e));
    parallel_shard(&r->parallel, &r->shape);
    if (comm->ranks > 1 && !r->shape.inference) // where nothing is exchanged there is no NCCL
        r->shape.leave = TRANSPORT_NCCL_BYTES + transport_buffer_bytes(o->comm_dtype, model_bucket_largest(&r->model));
    return 0;
}

int setup_device(Run *r, Error *e) {
    return r->comm->ranks > 1 && r->transport->device ? r->transport->device(r->comm, e) : 0;
}

int setup_engine(Run *r, Error *e) {
    EngineDevice device;
    TRY(setup_shards(r, r->comm, e));
    TRY(engine_create(r->api, &r->engine, &r->shape, e));
    r->api->device(&r->shape, false, &device);
    r->peak_flops = device_peak_flops(&device);
    if (r->saved[0]) {
        TRY(checkpoint_load_model(r->saved, &r->model, range_to_engine, r->engine, e));
        return checkpoint_load_optimizer(r->saved, &r->model, r->shape.owned, r->shape.owned_count, moment1_to_engine,
                                         moment2_to_engine, r->engine, e);
    }
    if (!r->source[0]) return init_parameters(r, e);
    if (r->comm->local_rank == 0) TRY(checkpoint_verify_model(r->source, e)); // once on a machine
    return checkpoint_load_model(r->source, &r->model, range_to_engine, r->engine, e);
}

// The algorithms that the run was begun with, so that it goes on with the same bits; and timed ones where --tune asks
// for them and there are none yet.
static int decide_tuning(Run *r, Error *e) {
    Error misfit = {0};
    if (!is_first(r)) return 0;
    if (engine_set_tuning(r->engine, r->at.tuning, &misfit))
        fprintf(stderr, "note: %s: %s. The last bits may differ from here on\n", r->saved, misfit.what);
    if (r->options.tune) TRY(engine_tune(r->engine, e));
    strcpy(r->at.tuning, engine_tuning(r->engine));
    return 0;
}

// Rank 0 decides, all follow; where one cannot, none does.
int setup_tuning(Run *r, Error *e) {
    Error misfit = {0};
    TRY(comm_agree(r->comm, decide_tuning(r, e), e));
    TRY(comm_broadcast(r->comm, r->at.tuning, sizeof r->at.tuning, e));
    double misfits = !is_first(r) && engine_set_tuning(r->engine, r->at.tuning, &misfit) ? 1 : 0;
    TRY(comm_sum(r->comm, &misfits, 1, e));
    if (misfits == 0) return 0;
    if (is_first(r))
        fprintf(stderr, "note: the ranks have different GPUs or libraries: matrix products are not tuned\n");
    r->at.tuning[0] = 0;
    return engine_set_tuning(r->engine, "", e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Set-up: what training needs besides

// Base names count: a checkpoint knows its shards by them.
static uint64_t hash_shards(const ShardList *list) {
    uint64_t hash = HASH_START;
    for (int i = 0; i < list->count; i++) {
        const FileDigest *digest = &list->shard[i].digest;
        hash = hash_bytes(hash, list->shard[i].name, strlen(list->shard[i].name) + 1);
        hash = hash_bytes(hash, &digest->bytes, sizeof digest->bytes);
        hash = hash_bytes(hash, digest->hash, sizeof digest->hash);
    }
    return hash;
}

// The shape as well, for a vocabulary may be the tokenizer's.
static int hash_model(Run *r, Error *e) {
    uint64_t weights = 0;
    if (r->source[0]) TRY(checkpoint_hash_model(r->source, &weights, e));
    r->data_hash.model = hash_bytes(HASH_START, &weights, sizeof weights);
    r->data_hash.model = hash_bytes(r->data_hash.model, &r->model.config, sizeof r->model.config);
    return 0;
}

// Machines may have copies of their own. Counts say nothing: shards are cut to the same length.
static int hash_data(Run *r, Error *e) {
    ShardList val;
    FileDigest questions;
    TRY(hash_model(r, e));
    if (r->train) r->data_hash.train = hash_shards(&r->shards);
    r->data_hash.replay = hash_bytes(HASH_START, r->ramp.replay, sizeof(int64_t) * (size_t)r->ramp.replay_steps);
    if (r->val) {
        TRY(shard_list_create(&val, r->val, e));
        r->data_hash.val = hash_shards(&val);
        shard_list_destroy(&val);
    }
    if (!r->hellaswag) return 0;
    TRY(file_digest_sampled(r->options.hellaswag, &questions, e));
    r->data_hash.questions = hash_bytes(HASH_START, questions.hash, sizeof questions.hash);
    return 0;
}

int setup_data(Run *r, Error *e) {
    const Options *o = &r->options;
    int T = r->shape.seq_len, V = r->model.config.vocab;
    bool hellaswag = o->eval_only ? options_given(o, "--hellaswag") : o->hellaswag_every > 0;
    if (!o->eval_only) TRY(data_open(&r->train, o->train, T, V, (uint64_t)o->seed, e));
    if (o->val[0]) TRY(data_open(&r->val, o->val, T, V, (uint64_t)o->seed, e));
    if (hellaswag) TRY(hellaswag_open(&r->hellaswag, o->hellaswag, r->tokenizer, V, T, e));
    if (r->train) TRY(shard_list_create(&r->shards, r->train, e));
    return r->comm->ranks > 1 ? hash_data(r, e) : 0;
}

int setup_same_data(const Run *r, Error *e) {
    const struct {
        uint64_t hash;
        const char *what;
    } found[] = {
        {r->data_hash.model, "another model (--model, --tokenizer)"},
        {r->data_hash.train, "other training data (--train)"},
        {r->data_hash.val, "other validation data (--val)"},
        {r->data_hash.questions, "other questions (--hellaswag)"},
        {r->data_hash.replay, "another run to replay (--ramp)"},
    };
    for (size_t i = 0; i < sizeof found / sizeof *found; i++)
        TRY(comm_same(r->comm, found[i].hash, ERR_INPUT, found[i].what, SAME_FILES_HINT, e));
    return 0;
}

int setup_schedule(Run *r, Error *e) {
    const Options *o = &r->options;
    r->schedule = (Schedule){
        .kind = o->lr_schedule,
        .lr = o->lr,
        .warmup_tokens = (double)o->warmup_tokens,
        .train_tokens = (double)o->run.horizon_tokens,
        .final_frac = o->final_lr_frac,
    };
    RampConfig ramp = {
        .mode = o->run.ramp_mode,
        .batch_min = o->run.batch_min_rows,
        .batch_max = o->run.batch_max_rows,
        .batch_ref = o->run.batch_ref_rows,
        .seq_len = o->seq_len,
        .kappa = o->ramp_kappa,
        .lr_power = o->ramp_lr_power,
        .half_life_tokens = o->run.gns_half_life_tokens,
        .train_tokens = (double)o->run.horizon_tokens,
        .schedule = r->schedule,
    };
    TRY(ramp_create(&r->ramp, &ramp, o->run.ramp_replay, e));
    return noise_create(&r->noise, &r->model, o->run.gns_half_life_tokens, o->gns_ratio, e);
}

int setup_rows(Run *r, Error *e) {
    size_t rows = (size_t)r->shape.micro_batch, T = (size_t)r->shape.seq_len;
    TRY(memory_alloc((void **)&r->rows, rows * (T + 1) * sizeof(uint16_t), "token rows", e));
    return memory_alloc((void **)&r->losses, rows * T * sizeof(float), "losses", e);
}

int setup_buffers(Run *r, Error *e) {
    size_t n = (size_t)r->model.tensor_count;
    TRY(setup_rows(r, e));
    TRY(loader_create(&r->loader, r->train, r->shape.micro_batch, r->shape.seq_len, e));
    TRY(memory_alloc((void **)&r->result.rank_sq, n * sizeof(double), "norms", e));
    TRY(memory_alloc((void **)&r->result.grad_sq, n * sizeof(double), "norms", e));
    return memory_alloc((void **)&r->result.example_sq, n * sizeof(double), "norms", e);
}

// What state.json says of this run: of a path the name alone, since all files may have been moved together. `build` and
// its text belong to the caller.
RunState run_state(Run *r, const char *build) {
    return (RunState){
        .model = r->model.config,
        .start = r->source[0] ? r->start : "scratch",
        .seq_len = r->shape.seq_len,
        .seed = (uint64_t)r->options.seed,
        .train = &r->shards,
        .at = &r->at,
        .ramp = &r->ramp.state,
        .noise = &r->noise,
        .build = build,
        .ranks = r->comm->ranks,
        .options = &r->options,
    };
}

// An earlier run in the same place is never overwritten: it is moved aside, and a new directory takes its place. Where
// --out is a link that is the place it leads to, which may be on another disk for a reason.
static int move_old_run(const char *out, Error *e) {
    char place[ARCHIVE_PATH], aside[ARCHIVE_PATH];
    struct stat st;
    snprintf(place, sizeof place, "%s", out);
    if (lstat(out, &st) == 0 && S_ISLNK(st.st_mode) && !realpath(out, place))
        return FAIL(e, ERR_WRITE, "choose another --out", "%s: where does it lead? %s", out, strerror(errno));
    for (int i = 1; i < 100000; i++) {
        int n = snprintf(aside, sizeof aside, "%s.%d", place, i);
        if (n < 0 || (size_t)n >= sizeof aside) return FAIL(e, ERR_USAGE, "use a shorter path", "--out: path too long");
        if (file_exists(aside)) continue;
        if (rename(place, aside) != 0)
            return FAIL(e, ERR_WRITE, "choose another --out", "%s holds an earlier run and cannot be moved aside: %s",
                        out, strerror(errno));
        fprintf(stderr, "%s held an earlier run: moved to %s\n", out, aside);
        return directory_create(place, e);
    }
    return FAIL(e, ERR_WRITE, "choose another --out", "%s: too many earlier runs beside it", out);
}

// Is there a run that this one does not go on from? One that was stopped before its first step is none.
static int holds_other_run(const Run *r, bool *holds, Error *e) {
    int checkpoints;
    TRY(archive_count(r->options.out, &checkpoints, e));
    *holds = !r->saved[0] && (checkpoints > 0 || metrics_bytes(r->metrics) > 0);
    return 0;
}

// From here on the run directory is ours.
static int setup_directory(Run *r, Error *e) {
    const char *out = r->options.out;
    bool holds, may_go;
    TRY(directory_create(out, e));
    if (!r->metrics) TRY(metrics_open(&r->metrics, out, &may_go, e));
    TRY(holds_other_run(r, &holds, e));
    if (holds) {
        metrics_close(r->metrics, e);
        r->metrics = NULL;
        TRY(move_old_run(out, e));
        TRY(metrics_open(&r->metrics, out, &may_go, e));
    }
    if (metrics_bytes(r->metrics) < r->at.metrics_bytes)
        fprintf(stderr,
                "warning: %s/metrics.jsonl is shorter than the checkpoint says: some of its steps are missing\n", out);
    TRY(archive_tidy(out, stderr, e));
    TRY(archive_set_aside_after(out, r->at.step, stderr, e));
    return metrics_begin(r->metrics, r->at.step, r->at.metrics_bytes, e);
}

static int setup_tensorboard(Run *r, Error *e) {
    char *command;
    TRY(metrics_tensorboard(r->metrics, r->at.step + 1, e));
    TRY(run_command_text(r, &command, e));
    int code = metrics_command(r->metrics, r->at.step + 1, command, e);
    free(command);
    return code;
}

void describe_build(const Run *r, char *out, size_t bytes) {
    char engine[256];
    engine_describe(r->engine, engine, sizeof engine);
    snprintf(out, bytes, "%s, %s", version_text(), engine);
}

// Can the run be long enough for a checkpoint before its end?
bool may_save_aside(const Run *r) {
    const Options *o = &r->options;
    if (o->run.horizon_tokens == 0) return false; // a plan of no run, without a ramp
    int64_t steps = (o->run.horizon_tokens - 1) / (ramp_smallest(&r->ramp) * o->seq_len);
    return (o->checkpoint_every > 0 && steps >= o->checkpoint_every) || (best_every(o) > 0 && steps >= best_every(o));
}

int setup_output(Run *r, Error *e) {
    const Options *o = &r->options;
    const bool saves_aside = may_save_aside(r);
    float *copy = NULL;
    if (saves_aside) TRY(parallel_share_copy(&r->parallel, SAVER_ARRAYS, saver_copy_stride(&r->model), &copy, e));
    if (!is_first(r)) return 0;
    TRY(setup_directory(r, e));
    TRY(write_run_json(r, e));
    if (o->tensorboard) TRY(setup_tensorboard(r, e));
    int eot = r->tokenizer ? tokenizer_eot(r->tokenizer) : -1;
    TextTokens text = checkpoint_text_tokens(o->model, r->model.config.vocab, eot);
    SaverConfig saver = {o->out, r->engine, &r->model, r->tokenizer, text, o->keep, r->metrics};
    TRY(saver_create(&r->saver, &saver, e));
    if (saves_aside) TRY(saver_prepare(r->saver, copy, e));
    TRY(progress_create(&r->progress, stdout, r->engine, r->at.tokens, o->run.horizon_tokens, e));
    r->progress.val_loss = r->at.val_loss;
    if (r->at.step > 0) TRY(metrics_losses(r->metrics, progress_past, &r->progress, e));
    if (r->comm->ranks > 1) r->progress.terminal = false; // mpirun's pseudo-terminal, which ends up in a log file
    return 0;
}

void run_destroy(Run *r) {
    progress_destroy(&r->progress);
    saver_destroy(r->saver);
    parallel_destroy(&r->parallel);
    engine_destroy(r->engine);
    memory_free(r->result.rank_sq);
    memory_free(r->result.example_sq);
    memory_free(r->result.grad_sq);
    memory_free(r->losses);
    memory_free(r->rows);
    loader_destroy(r->loader);
    noise_destroy(&r->noise);
    ramp_destroy(&r->ramp);
    shard_list_destroy(&r->shards);
    hellaswag_close(r->hellaswag);
    data_close(r->val);
    data_close(r->train);
    tokenizer_destroy(r->tokenizer);
    memory_free(r->prompt_file);
    model_destroy(&r->model);
}
