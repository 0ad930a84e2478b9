#include "run/state.h"

#include "base/json.h"
#include "checkpoint/checkpoint.h"
#include "options/table.h"
#include "run/run.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { STATE_FORMAT = 1, STATE_MAX_BYTES = 1 << 26 };

static const char *const damaged = "use another checkpoint, or --fresh to start over";
static const char *const other_build = "resume with the program that wrote it, or --fresh to start over";
static const char *const other_run = "give the run's own value, or another --out, or --fresh to start over";

// ---- Shards ---------------------------------------------------------------------------------------------------------

int shard_list_create(ShardList *list, const Dataset *data, Error *e) {
    int count = dataset_describe(data).shards, code = 0;
    *list = (ShardList){0};
    TRY(memory_alloc_zero((void **)&list->shard, (size_t)count * sizeof *list->shard, "shard names", e));
    for (; list->count < count && !code; list->count++) {
        const char *path = dataset_shard_path(data, list->count);
        char *name = list->shard[list->count].name;
        snprintf(name, sizeof list->shard->name, "%s", path_name(path));
        code = file_digest(path, DIGEST_SAMPLE, &list->shard[list->count].digest, e);
    }
    if (code) shard_list_destroy(list);
    return code;
}

void shard_list_destroy(ShardList *list) {
    memory_free(list->shard);
    *list = (ShardList){0};
}

// ---------------------------------------------------------------------------------------------------------------------
// One walk over the state both writes and reads it, so that writer and reader have the same fields.

typedef struct {
    cJSON *object; // the current object or array; an array's items are named "0", "1", ...
    bool writing;
    const char *path;  // of the file
    JsonText json;     // the text that is read, for messages
    const char *build; // that wrote it
    char where[80];    // "noise.ln.": goes before a field's name in messages
} StateIO;

static int out_of_memory(Error *e) { return FAIL(e, ERR_MEMORY, "free some memory", "no memory for " STATE_NAME); }

static cJSON *get(const StateIO *io, const char *name) {
    if (cJSON_IsArray(io->object)) return cJSON_GetArrayItem(io->object, atoi(name));
    return json_get(io->object, name);
}

// Adds an item and takes it over. item: NULL where memory is short.
static int put(const StateIO *io, const char *name, cJSON *item, Error *e) {
    bool array = cJSON_IsArray(io->object);
    if (array ? cJSON_AddItemToArray(io->object, item) : cJSON_AddItemToObject(io->object, name, item)) return 0;
    cJSON_Delete(item);
    return out_of_memory(e);
}

static int malformed(const StateIO *io, const char *name, const char *want, Error *e) {
    if (!get(io, name))
        return FAIL(e, ERR_INPUT, other_build,
                    "%s: no field \"%s%s\", which this build needs; it was written by %.200s", io->path, io->where,
                    name, io->build);
    return FAIL(e, ERR_INPUT, damaged, "%s: field \"%s%s\" is not %s", io->path, io->where, name, want);
}

// 17 significant digits read back as the same double. NaN is null; infinity is a number beyond every double.
static int io_real(const StateIO *io, const char *name, double *x, Error *e) {
    char text[40];
    if (io->writing) {
        if (isnan(*x)) strcpy(text, "null");
        else if (isinf(*x)) strcpy(text, *x > 0 ? "1e999" : "-1e999");
        else snprintf(text, sizeof text, "%.17g", *x);
        return put(io, name, cJSON_CreateRaw(text), e);
    }
    const cJSON *item = get(io, name);
    if (!cJSON_IsNumber(item) && !cJSON_IsNull(item)) return malformed(io, name, "a number", e);
    *x = cJSON_IsNull(item) ? NAN : item->valuedouble;
    return 0;
}

static int io_int(const StateIO *io, const char *name, int64_t *x, Error *e) {
    if (io->writing) {
        char text[40];
        snprintf(text, sizeof text, "%" PRId64, *x);
        return put(io, name, cJSON_CreateRaw(text), e);
    }
    const cJSON *item = get(io, name);
    if (!json_whole(item, 0, INFINITY)) return malformed(io, name, "a whole number, 0 or more", e);
    *x = (int64_t)item->valuedouble;
    return 0;
}

// A count that is left out where it is 0.
static int io_rare(const StateIO *io, const char *name, int64_t *x, Error *e) {
    return (io->writing ? *x > 0 : get(io, name) != NULL) ? io_int(io, name, x, e) : 0;
}

// Enters the object or array of a name; `writing` creates it.
static int io_enter(const StateIO *io, const char *name, bool array, StateIO *inner, Error *e) {
    StateIO in = *io;
    snprintf(in.where, sizeof in.where, "%.50s%.20s.", io->where, name);
    if (io->writing) {
        in.object = array ? cJSON_CreateArray() : cJSON_CreateObject();
        TRY(put(io, name, in.object, e));
    } else {
        in.object = get(io, name);
        if (array && !cJSON_IsArray(in.object)) return malformed(io, name, "a list", e);
        if (!array && !cJSON_IsObject(in.object)) return malformed(io, name, "an object", e);
    }
    *inner = in;
    return 0;
}

static const char *index_name(char out[16], int index) {
    snprintf(out, 16, "%d", index);
    return out;
}

// ---- Where the run stands -------------------------------------------------------------------------------------------

static int io_tracker(const StateIO *io, const char *name, GnsTracker *t, Error *e) {
    const struct {
        const char *name;
        double *value;
    } fields[] = {
#define FIELD(name) {#name, &t->name}
        FIELD(steps),  FIELD(weight),      FIELD(weight_sq), FIELD(g2),      FIELD(s),      FIELD(last_g2),
        FIELD(last_s), FIELD(diff_weight), FIELD(diff_gg),   FIELD(diff_ss), FIELD(diff_gs)
#undef FIELD
    };
    StateIO in;
    TRY(io_enter(io, name, false, &in, e));
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) TRY(io_real(&in, fields[i].name, fields[i].value, e));
    return 0;
}

// Without the half-lives: they are options, and may change.
static int io_noise(const StateIO *io, Noise *noise, Error *e) {
    GnsCalibration *c = &noise->calibration;
    const struct {
        const char *name;
        double *value;
    } fields[] = {{"ratio", &c->ratio},
                  {"ratio_var", &c->var},
                  {"ratio_few", &c->sum_w2},
                  {"cross_gg", &c->cross[0][0]},
                  {"cross_gs", &c->cross[0][1]},
                  {"cross_sg", &c->cross[1][0]},
                  {"cross_ss", &c->cross[1][1]},
                  {"tokens_since_sample", &noise->tokens_since_sample},
                  {"tokens_since_ranks", &noise->tokens_since_ranks}};
    StateIO in, types, layers;
    char number[16];
    TRY(io_enter(io, "noise", false, &in, e));
    TRY(io_tracker(&in, "ln", &noise->ln, e));
    if (io->writing ? noise->total.steps > 0 : get(&in, "total") != NULL)
        TRY(io_tracker(&in, "total", &noise->total, e));
    TRY(io_tracker(&in, "ranks", &noise->ranks, e));
    TRY(io_tracker(&in, "sampled_total", &c->total, e));
    TRY(io_tracker(&in, "sampled_ln", &c->ln, e));
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) TRY(io_real(&in, fields[i].name, fields[i].value, e));
    TRY(io_enter(&in, "type", false, &types, e));
    for (int i = 0; i < GROUP_COUNT; i++) TRY(io_tracker(&types, group_names[i], &noise->type[i], e));
    TRY(io_enter(&in, "layer", false, &layers, e));
    for (int l = 0; l < noise->layers; l++) TRY(io_tracker(&layers, index_name(number, l), &noise->layer[l], e));
    return 0;
}

static int io_window(const StateIO *io, const char *name, Outliers *o, Error *e) {
    StateIO in, ring;
    char number[16];
    TRY(io_enter(io, name, false, &in, e));
    TRY(io_int(&in, "count", &o->count, e));
    TRY(io_enter(&in, "ring", true, &ring, e));
    int n = o->count < OUTLIERS_WINDOW ? (int)o->count : OUTLIERS_WINDOW;
    if (!io->writing && cJSON_GetArraySize(ring.object) != n) return malformed(&in, "ring", "as long as its window", e);
    for (int i = 0; i < n; i++) TRY(io_real(&ring, index_name(number, i), &o->value[i], e));
    return 0;
}

static int io_point(const StateIO *io, RunPoint *at, Error *e) {
    TRY(io_int(io, "step", &at->step, e));
    TRY(io_int(io, "tokens", &at->tokens, e));
    TRY(io_int(io, "examples", &at->examples, e));
    TRY(io_int(io, "batch", &at->batch, e));
    TRY(io_int(io, "metrics_bytes", &at->metrics_bytes, e));
    TRY(io_rare(io, "moment_steps", &at->moment_steps, e));
    TRY(io_rare(io, "horizon", &at->horizon, e));
    if (io->writing || get(io, "seconds")) TRY(io_real(io, "seconds", &at->seconds, e));
    TRY(io_real(io, "val_loss", &at->val_loss, e));
    TRY(io_int(io, "best_step", &at->best.step, e));
    TRY(io_real(io, "best_loss", &at->best.loss, e));
    TRY(io_rare(io, "best_stale", &at->best.stale, e));
    TRY(io_window(io, "loss_window", &at->loss_window, e));
    TRY(io_window(io, "grad_window", &at->grad_window, e));
    LossScale *s = &at->loss_scale;
    if (io->writing ? s->scale != 0 || s->overflows != 0 : get(io, "loss_scale") != NULL) { // of fp16 only
        TRY(io_real(io, "loss_scale", &s->scale, e));
        TRY(io_int(io, "loss_scale_steps", &s->clean, e));
        TRY(io_int(io, "loss_scale_overflows", &s->overflows, e));
        if (s->scale != 0 && !loss_scale_valid(s->scale)) return malformed(io, "loss_scale", "a power of two", e);
    }
    if (io->writing) return put(io, "tuning", cJSON_CreateString(at->tuning), e);
    const char *tuning = cJSON_GetStringValue(get(io, "tuning"));
    if (!tuning || strlen(tuning) >= sizeof at->tuning) return malformed(io, "tuning", "a string that fits", e);
    strcpy(at->tuning, tuning);
    return 0;
}

static int io_position(const StateIO *io, Position *p, Error *e) {
    StateIO ramp;
    TRY(io_point(io, &p->at, e));
    TRY(io_enter(io, "ramp", false, &ramp, e));
    TRY(io_real(&ramp, "rows", &p->ramp.state.rows, e));
    if (!(p->ramp.state.rows >= 0)) return malformed(&ramp, "rows", "a number of rows", e);
    return io_noise(io, &p->noise, e);
}

// ---- What may not change: written as it is now, compared when read --------------------------------------------------

static int fixed_text(const StateIO *io, const char *name, const char *flag, const char *now, Error *e) {
    if (io->writing) return put(io, name, cJSON_CreateString(now), e);
    const char *was = cJSON_GetStringValue(get(io, name));
    if (!was) return malformed(io, name, "a string", e);
    if (strcmp(was, now) == 0) return 0;
    return FAIL(e, ERR_INPUT, other_run, "%s: this run has %s%s = %.80s (%s), the command has %.80s", io->path,
                io->where, name, was, flag, now);
}

static int fixed_int(const StateIO *io, const char *name, const char *flag, int64_t now, Error *e) {
    int64_t was = now;
    TRY(io_int(io, name, &was, e));
    if (was == now) return 0;
    return FAIL(e, ERR_INPUT, other_run, "%s: this run has %s%s = %" PRId64 " (%s), the command has %" PRId64, io->path,
                io->where, name, was, flag, now);
}

static int io_shards(const StateIO *io, const ShardList *list, Error *e) {
    StateIO shards, in;
    char number[16], file[200];
    TRY(io_enter(io, "train_data", true, &shards, e));
    int count = io->writing ? list->count : cJSON_GetArraySize(shards.object);
    if (count != list->count)
        return FAIL(e, ERR_INPUT, other_run, "%s: this run has train_data of %d shards (--train), the command has %d",
                    io->path, count, list->count);
    for (int i = 0; i < count; i++) {
        TRY(io_enter(&shards, index_name(number, i), false, &in, e));
        TRY(fixed_text(&in, "name", "--train", list->shard[i].name, e));
        snprintf(file, sizeof file, "--train: %.80s", list->shard[i].name);
        TRY(fixed_int(&in, "bytes", file, (int64_t)list->shard[i].digest.bytes, e));
        TRY(fixed_text(&in, "xxh3_128", file, list->shard[i].digest.hash, e));
    }
    return 0;
}

// The weights of --train: each source's fraction of the rows and its number of shards. Left out without weights.
static int io_mixture(const StateIO *io, const Dataset *data, Error *e) {
    StateIO sources, in;
    DatasetInfo info = dataset_describe(data);
    int now = info.weighted ? info.sources : 0, was = cJSON_GetArraySize(get(io, "train_mixture"));
    char number[16], share[40];
    if (!io->writing && was != now)
        return FAIL(e, ERR_INPUT, other_run, "%s: this run has %d weights (--train), the command has %d", io->path, was,
                    now);
    if (!now) return 0;
    TRY(io_enter(io, "train_mixture", true, &sources, e));
    for (int s = 0; s < now; s++) {
        DatasetSource source = dataset_source(data, s);
        snprintf(share, sizeof share, "%.17g", source.share);
        TRY(io_enter(&sources, index_name(number, s), false, &in, e));
        TRY(fixed_text(&in, "share", "--train", share, e));
        TRY(fixed_int(&in, "shards", "--train", source.shards, e));
    }
    return 0;
}

static int io_fixed(const StateIO *io, const Setup *s, const RunData *data, Error *e) {
    StateIO in;
    const ModelConfig *model = &s->model.config;
    char seed[40]; // text: a seed may need all of its 63 bits
    snprintf(seed, sizeof seed, "%" PRId64, s->options.seed);
    TRY(io_enter(io, "model", false, &in, e));
    TRY(fixed_text(&in, "start", "--model", s->source[0] ? s->model_name : "scratch", e)); // the files may be moved
    TRY(fixed_int(&in, "layers", "--model, --layers", model->layers, e));
    TRY(fixed_int(&in, "heads", "--model, --heads", model->heads, e));
    TRY(fixed_int(&in, "channels", "--model, --channels", model->channels, e));
    TRY(fixed_int(&in, "vocab", "--model, --vocab-size", model->vocab, e));
    TRY(fixed_int(&in, "context", "--model, --seq-len", model->context, e));
    TRY(fixed_int(io, "seq_len", "--seq-len", s->shape.seq_len, e));
    TRY(fixed_text(io, "seed", "--seed", seed, e));
    if (io_shards(io, &data->shards, e))
        return strcmp(e->hint, other_run)
                   ? e->code
                   : error_hint(e,
                                "give the run's own; to go on with other data: --model %s --with-optimizer --out NEW",
                                s->options.out);
    return io_mixture(io, data->train, e);
}

// ---- What may change ------------------------------------------------------------------------------------------------

static int options_text(const Options *o, Text *text, Error *e) {
    TRY(text_begin(text, e));
    options_write_json(text->f, o, 2);
    return text_end(text, e);
}

static int write_record(const StateIO *io, const Setup *s, Error *e) {
    Text options;
    char engine[256], build[300];
    engine_describe(s->engine, engine, sizeof engine);
    snprintf(build, sizeof build, "%s, %s", version_text(), engine);
    TRY(put(io, "build", cJSON_CreateString(build), e));
    TRY(put(io, "ranks", cJSON_CreateNumber(s->comm->ranks), e));
    TRY(options_text(&s->options, &options, e));
    int code = put(io, "options", cJSON_CreateRaw(options.text), e);
    text_free(&options);
    return code;
}

// A longer run bends the schedule: the rate at this point may rise at once.
static void print_rate_jump(FILE *f, const Position *p, const cJSON *was) {
    const double much = 1.5;
    Schedule then = p->schedule;
    then.train_tokens = cJSON_GetNumberValue(json_get(json_get(was, "resolved"), "horizon_tokens"));
    double tokens = (double)p->at.tokens, before = schedule_lr(&then, tokens), now = schedule_lr(&p->schedule, tokens);
    if (then.train_tokens < p->schedule.train_tokens && now > much * before)
        fprintf(
            f,
            "the learning rate rises from %.3g to %.3g in one step, as the schedule now ends later: a smaller --lr or "
            "--lr-schedule constant goes on without it; wsd is the schedule for runs that may become longer\n",
            before, now);
}

// *out: the options as JSON, to be deleted.
static int options_object(const Options *o, cJSON **out, Error *e) {
    Text text;
    *out = NULL;
    TRY(options_text(o, &text, e));
    *out = cJSON_Parse(text.text);
    text_free(&text);
    return *out ? 0 : out_of_memory(e);
}

// Lists the options that differ from the file's. One that the file lacks is newer than the file, and had its default.
// ERR_USAGE for an option that makes the run (OptionRow.of_run).
static int compare_options(const StateIO *io, const Options *o, bool *changed, FILE *f, Error *e) {
    Options *by_default;
    cJSON *now = NULL, *defaults = NULL;
    TRY(memory_alloc_zero((void **)&by_default, sizeof *by_default, "options", e));
    options_defaults(by_default);
    int code = options_object(o, &now, e);
    if (!code) code = options_object(by_default, &defaults, e);
    for (int id = 0; id < OPTION_COUNT && !code; id++) {
        const OptionRow *row = &option_rows[id];
        const cJSON *before = json_get(get(io, "options"), row->field), *item = json_get(now, row->field);
        if (!before) before = json_get(defaults, row->field);
        changed[id] = item && !row->of_invocation && row->kind != ROW_FILE && !cJSON_Compare(before, item, true);
        if (!changed[id]) continue;
        char flag[FLAG_BYTES], *then_text = cJSON_PrintUnformatted(before), *now_text = cJSON_PrintUnformatted(item);
        option_flag(flag, (OptionId)id);
        if (row->of_run)
            code = FAIL(e, ERR_USAGE, other_run, "%s: this run has %s %s, the command has %s", io->path, flag,
                        then_text ? then_text : "(none)", now_text ? now_text : "(none)");
        else fprintf(f, "%s %s is now %s\n", flag, then_text ? then_text : "(none)", now_text ? now_text : "(none)");
        cJSON_free(then_text);
        cJSON_free(now_text);
    }
    cJSON_Delete(now);
    cJSON_Delete(defaults);
    memory_free(by_default);
    return code;
}

static int list_changes(const StateIO *io, Run *r, Text *changes, Error *e) {
    const cJSON *ranks = get(io, "ranks");
    TRY(text_begin(changes, e));
    const char *now = version_text();          // only the same build promises the same bits
    int length = (int)strcspn(io->build, ","); // "BUILD, ENGINE"
    if ((size_t)length != strlen(now) || strncmp(io->build, now, (size_t)length) != 0)
        fprintf(changes->f, "build: %.*s then, %s now\n", length, io->build, now);
    if (cJSON_IsNumber(ranks) && ranks->valuedouble != r->setup.comm->ranks)
        fprintf(changes->f, "ranks: %.0f then, %d now\n", ranks->valuedouble, r->setup.comm->ranks);
    int code = compare_options(io, &r->setup.options, r->saving.changed, changes->f, e);
    print_rate_jump(changes->f, &r->position, get(io, "options"));
    int ended = text_end(changes, code ? &(Error){0} : e);
    if (code) text_free(changes);
    return code ? code : ended;
}

// Keeps the run's mode without --gns, on any machine: another mode would change its batches.
static int keep_gns(const StateIO *io, Options *o, Error *e) {
    const char *was = cJSON_GetStringValue(json_get(get(io, "options"), "gns"));
    if (o->given[OPTION_gns] || !was) return 0;
    if (option_set(o, OPTION_gns, "gns", was, 0, e))
        return malformed(io, "options", "an object with a known \"gns\"", e);
    return options_resolve_gns(o, (GnsMode)o->gns, e);
}

// Keeps the measured step cost without --ramp-step-rows. Fails if none was measured: the run began with another --ramp
// or with an older build.
static int keep_step_rows(const StateIO *io, Run *r, Error *e) {
    Options *o = &r->setup.options;
    const double was = cJSON_GetNumberValue(json_get(get(io, "options"), "ramp_step_rows"));
    if (o->ramp_step_rows == 0 && was > 0) r->position.ramp.config.step_rows = o->ramp_step_rows = was;
    const bool complete = r->position.at.tokens >= o->run.horizon_tokens;
    if (o->run.ramp_mode != RAMP_GNS || o->ramp_step_rows > 0 || complete) return 0;
    FAIL(e, ERR_USAGE, NULL,
         "%s: --ramp gns measures what a step costs before a run's first step, and this run has not", io->path);
    return error_hint(e, "add --ramp-step-rows X, from a similar run's run.json; 1e9 with --ramp-waste 1 --ramp-kappa "
                         "0.65 is what older builds did");
}

// Refuses a new --micro-batch without --batch-tokens (with a ramp, --batch-min): it would change the run's batch.
static int check_unnamed_batch(const StateIO *io, const Options *now, Error *e) {
    const cJSON *then = get(io, "options");
    double rows = cJSON_GetNumberValue(json_get(then, "micro_batch"));
    double named =
        cJSON_GetNumberValue(json_get(then, "batch_tokens")) + cJSON_GetNumberValue(json_get(then, "batch_min"));
    if (named != 0 || now->batch_tokens || now->batch_min || rows == (double)now->micro_batch) return 0;
    FAIL(e, ERR_USAGE, NULL, "%s: --micro-batch was %.0f and is %lld; without --batch-tokens it is the run's batch",
         io->path, rows, (long long)now->micro_batch);
    return error_hint(e, "add --batch-tokens %.0f to keep the batch", rows * (double)now->seq_len);
}

// Keeps the length that --train-hours has decided.
static int keep_hours(const StateIO *io, Run *r, Error *e) {
    const double was = cJSON_GetNumberValue(json_get(get(io, "options"), "train_hours"));
    const int64_t horizon = r->position.at.horizon, T = r->setup.shape.seq_len;
    const Options *o = &r->setup.options;
    if (!o->train_hours || !horizon) return r->position.at.horizon = 0;
    if (horizon % T || horizon > HORIZON_UNDECIDED) return malformed(io, "horizon", "a length in whole rows", e);
    if (was == o->train_hours) return run_set_horizon(r, horizon, e);
    FAIL(e, ERR_USAGE, NULL, "--train-hours %g: this run has %g, and its length is decided", o->train_hours, was);
    return error_hint(e, "use --train-tokens; its length is %" PRId64, horizon);
}

// ---- The file -------------------------------------------------------------------------------------------------------

int run_state_write(const Run *r, char **text, size_t *bytes, Error *e) {
    StateIO io = {.object = cJSON_CreateObject(), .writing = true, .path = STATE_NAME};
    int64_t format = STATE_FORMAT;
    Position position = r->position;
    position.at.seconds = run_seconds(r);
    int code = io.object ? io_int(&io, "format", &format, e) : out_of_memory(e);
    if (!code) code = io_position(&io, &position, e);
    if (!code) code = io_fixed(&io, &r->setup, &r->data, e);
    if (!code) code = write_record(&io, &r->setup, e);
    *text = code ? NULL : cJSON_Print(io.object);
    cJSON_Delete(io.object);
    if (!code && !*text) code = out_of_memory(e);
    *bytes = *text ? strlen(*text) : 0;
    return code;
}

// Opens DIRECTORY/state.json; json_free it after success. path: PATH_MAX bytes.
static int state_open(StateIO *io, char *path, const char *directory, Error *e) {
    int64_t format = STATE_FORMAT;
    TRY(checkpoint_training_path(path, PATH_MAX, directory, STATE_NAME, e));
    *io = (StateIO){.path = path};
    TRY(json_read(&io->json, path, STATE_MAX_BYTES, damaged, e));
    io->object = io->json.root;
    io->build = cJSON_GetStringValue(json_get(io->object, "build"));
    if (!io->build) io->build = "an unknown build";
    int code = 0;
    if (!cJSON_IsObject(io->object)) code = FAIL(e, ERR_INPUT, damaged, "%s: no JSON object", path);
    if (!code) code = io_int(io, "format", &format, e);
    if (!code && format != STATE_FORMAT)
        code = FAIL(e, ERR_INPUT, other_build, "%s: format %" PRId64 ", only %d is known; it was written by %.200s",
                    path, format, STATE_FORMAT, io->build);
    if (code) json_free(&io->json);
    return code;
}

int run_state_read(Run *r, const char *directory, Text *changes, Error *e) {
    char path[PATH_MAX];
    StateIO io;
    *changes = (Text){0};
    TRY(state_open(&io, path, directory, e));
    int code = io_fixed(&io, &r->setup, &r->data, e);
    if (!code) code = io_position(&io, &r->position, e);
    const RunPoint *at = &r->position.at;
    if (!code && (double)at->tokens != (double)at->examples * r->setup.shape.seq_len)
        code = malformed(&io, "tokens", "examples x seq_len", e);
    if (!code && at->step > at->examples) code = malformed(&io, "step", "at most examples", e);
    r->position.begun -= at->seconds;
    if (!code) code = check_unnamed_batch(&io, &r->setup.options, e);
    if (!code) code = keep_gns(&io, &r->setup.options, e);
    if (!code) code = keep_hours(&io, r, e);
    if (!code) code = keep_step_rows(&io, r, e);
    if (!code) code = list_changes(&io, r, changes, e);
    json_free(&io.json);
    return code;
}

static void copy_text(char *out, size_t bytes, const cJSON *object, const char *name) {
    const char *text = cJSON_GetStringValue(json_get(object, name));
    snprintf(out, bytes, "%s", text ? text : "");
}

int run_state_summary(RunSummary *summary, const char *directory, Error *e) {
    char path[PATH_MAX];
    StateIO io;
    *summary = (RunSummary){0}; // fields that are left out are 0
    TRY(state_open(&io, path, directory, e));
    int code = io_point(&io, &summary->at, e);
    snprintf(summary->build, sizeof summary->build, "%s", io.build);
    copy_text(summary->start, sizeof summary->start, get(&io, "model"), "start");
    copy_text(summary->model, sizeof summary->model, get(&io, "options"), "model");
    copy_text(summary->optimizer, sizeof summary->optimizer, get(&io, "options"), "optimizer");
    json_free(&io.json);
    return code;
}
