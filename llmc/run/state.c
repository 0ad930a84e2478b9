#include "run/run.h"

#include "base/text.h"
#include "checkpoint/checkpoint.h"

#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>

enum { STATE_FORMAT = 1, STATE_MAX_BYTES = 1 << 26 };

static const char *const damaged = "use another checkpoint, or the program that wrote it, or --fresh to start over";
static const char *const other_run = "give the run's own value, or another --out, or --fresh to start over";

// ---- Fields ---------------------------------------------------------------------------------------------------------

// One walk over the state both writes and reads it, so the written and the read fields agree. A field has a path:
// "noise.ln.g2", or in a list "train_data[0].name". After an error the walk does nothing more.
typedef struct {
    bool writing;
    char file[PATH_MAX];
    const char *build; // the build that wrote the file
    cJSON *root;
    int code;
    Error *e;
} StateIO;

enum { STATE_PATH = 320 };
#define AT(...) path_text((char[STATE_PATH]){0}, __VA_ARGS__)

__attribute__((format(printf, 2, 3))) static const char *path_text(char out[STATE_PATH], const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(out, STATE_PATH, format, args);
    va_end(args);
    return out;
}

// Returns the item at a path; NULL: missing. Puts `add`, unless NULL, at a missing path, and creates its parents.
static cJSON *find(const StateIO *io, const char *path, cJSON *add) {
    cJSON *at = io->root;
    for (const char *name = path, *end; at && *name; name = end + (*end != 0)) {
        char key[STATE_PATH];
        cJSON *parent = at;
        const bool list = cJSON_IsArray(parent);
        snprintf(key, sizeof key, "%.*s", (int)strcspn(name, ".[]"), name);
        end = name + strlen(key);
        end += *end == ']';
        at = list ? cJSON_GetArrayItem(parent, atoi(key)) : json_get(parent, key);
        if (at || !add) continue;
        at = !*end ? add : *end == '[' ? cJSON_CreateArray() : cJSON_CreateObject();
        if (!(list ? cJSON_AddItemToArray(parent, at) : cJSON_AddItemToObject(parent, key, at))) return NULL;
    }
    return at;
}

static cJSON *get(const StateIO *io, const char *path) { return find(io, path, NULL); }
static double number(const StateIO *io, const char *path) { return cJSON_GetNumberValue(get(io, path)); }
static const char *text_at(const StateIO *io, const char *path) { // "": none
    const char *text = cJSON_GetStringValue(get(io, path));
    return text ? text : "";
}

static int out_of_memory(Error *e) { return FAIL(e, ERR_MEMORY, "free some memory", "no memory for " STATE_NAME); }

// Adds an item at a path; deletes it on failure.
static void put(StateIO *io, const char *path, cJSON *item) {
    if (!io->code && item && find(io, path, item)) return;
    cJSON_Delete(item);
    if (!io->code) io->code = out_of_memory(io->e);
}

static int malformed(StateIO *io, const char *path, const char *want) {
    if (io->code) return io->code;
    const bool missing = !get(io, path);
    return io->code = FAIL(io->e, ERR_INPUT, damaged, "%s: field \"%s\" is %s%s; it was written by %.200s", io->file,
                           path, missing ? "missing" : "not ", missing ? "" : want, io->build);
}

// 17 significant digits read back as the same double. NaN is null; infinity is a number beyond every double.
static void real(StateIO *io, const char *path, double *x) {
    const cJSON *item = get(io, path);
    const char *infinite = *x > 0 ? "1e999" : "-1e999";
    if (io->writing) put(io, path, cJSON_CreateRaw(isnan(*x) ? "null" : isinf(*x) ? infinite : AT("%.17g", *x)));
    else if (!cJSON_IsNumber(item) && !cJSON_IsNull(item)) malformed(io, path, "a number");
    else *x = cJSON_IsNull(item) ? NAN : item->valuedouble;
}

static void count_to(StateIO *io, const char *path, int64_t *x, int64_t most) {
    const cJSON *item = get(io, path);
    if (io->writing) put(io, path, cJSON_CreateRaw(AT("%" PRId64, *x)));
    else if (!json_whole(item, 0, INFINITY)) malformed(io, path, "a whole number, 0 or more");
    else if (item->valuedouble > (double)most) malformed(io, path, AT("at most %" PRId64, most));
    else *x = (int64_t)item->valuedouble;
}

static void count(StateIO *io, const char *path, int64_t *x) { count_to(io, path, x, INT64_MAX); }

// For a field that may be missing. Writing: returns `writes`. Reading: true if the file has the field.
static bool has(const StateIO *io, const char *path, bool writes) {
    return io->writing ? writes : get(io, path) != NULL;
}

// A field that may not change. Writing: adds `now`. Reading: frees `now`; another value is ERR_INPUT for --train, else
// ERR_USAGE.
static void keep(StateIO *io, const char *path, const char *flag, cJSON *now) {
    const cJSON *was = get(io, path);
    if (io->writing) {
        put(io, path, now);
        return;
    }
    char *then_text = cJSON_PrintUnformatted(was), *now_text = cJSON_PrintUnformatted(now);
    if (!was) malformed(io, path, "");
    else if (!io->code && !cJSON_Compare(was, now, true))
        io->code =
            FAIL(io->e, strncmp(flag, "--train", 7) == 0 ? ERR_INPUT : ERR_USAGE, other_run,
                 "%s: this run has %s = %.80s (%s), the command has %.80s", io->file, path, then_text, flag, now_text);
    cJSON_free(then_text);
    cJSON_free(now_text);
    cJSON_Delete(now);
}

// ---- Where the run stands -------------------------------------------------------------------------------------------

static void io_tracker(StateIO *io, const char *path, GnsTracker *t) {
#define FIELD(name) real(io, AT("%s." #name, path), &t->name)
    FIELD(steps), FIELD(weight), FIELD(weight_sq), FIELD(g2), FIELD(s), FIELD(last_g2), FIELD(last_s);
    FIELD(diff_weight), FIELD(diff_gg), FIELD(diff_ss), FIELD(diff_gs);
#undef FIELD
}

// The half-lives are not stored: they are options, which may change.
static void io_noise(StateIO *io, Noise *noise) {
    GnsCalibration *c = &noise->calibration;
    io_tracker(io, "noise.ln", &noise->ln);
    if (has(io, "noise.total", noise->total.steps > 0)) io_tracker(io, "noise.total", &noise->total);
    io_tracker(io, "noise.sampled_total", &c->total);
    io_tracker(io, "noise.sampled_ln", &c->ln);
    real(io, "noise.ratio", &c->ratio.value);
    real(io, "noise.ratio_var", &c->ratio.var);
    real(io, "noise.ratio_few", &c->ratio.sum_w2);
    for (int i = 0; i < 4; i++) real(io, AT("noise.cross_%c%c", "gs"[i / 2], "gs"[i % 2]), &c->cross[i / 2][i % 2]);
    real(io, "noise.tokens_since_sample", &noise->tokens_since_sample);
    for (int i = 0; i < GROUP_COUNT; i++) io_tracker(io, AT("noise.type.%s", group_names[i]), &noise->type[i]);
    for (int l = 0; l < noise->layers; l++) io_tracker(io, AT("noise.layer.%d", l), &noise->layer[l]);
    for (int i = 0; i < noise->source_trackers && has(io, "noise.source", true); i++)
        io_tracker(io, AT("noise.source.%d", i), &noise->source[i]); // missing in an older state, or after --gns off
}

static void io_window(StateIO *io, const char *name, Outliers *o) {
    count(io, AT("%s.count", name), &o->count);
    if (io->writing) put(io, AT("%s.ring", name), cJSON_CreateArray());
    for (int i = 0; i < o->count && i < OUTLIERS_WINDOW; i++) real(io, AT("%s.ring[%d]", name, i), &o->value[i]);
}

static void io_point(StateIO *io, RunPoint *at) {
    LossScale *s = &at->loss_scale;
    count(io, "step", &at->step);
    count(io, "tokens", &at->tokens);
    count(io, "examples", &at->examples);
    count(io, "batch", &at->batch);
    count(io, "metrics_bytes", &at->metrics_bytes);
    if (has(io, "moment_steps", at->moment_steps > 0)) count(io, "moment_steps", &at->moment_steps);
    if (has(io, "horizon", at->horizon > 0)) count(io, "horizon", &at->horizon);
    if (has(io, "seconds", true)) real(io, "seconds", &at->seconds);
    real(io, "val_loss", &at->val_loss);
    count(io, "best_step", &at->best.step);
    real(io, "best_loss", &at->best.loss);
    if (has(io, "best_stale", at->best.stale > 0)) count(io, "best_stale", &at->best.stale);
    io_window(io, "loss_window", &at->loss_window);
    io_window(io, "grad_window", &at->grad_window);
    // written for fp16, and for fp8 after an overflow
    if (has(io, "loss_scale", s->scale != 0 || s->overflows != 0)) {
        real(io, "loss_scale", &s->scale);
        count(io, "loss_scale_steps", &s->clean);
        count(io, "loss_scale_overflows", &s->overflows);
        if (s->scale != 0 && !loss_scale_valid(s->scale)) malformed(io, "loss_scale", "a power of two");
    }
    const char *tuning = cJSON_GetStringValue(get(io, "tuning"));
    if (io->writing) put(io, "tuning", cJSON_CreateString(at->tuning));
    else if (!tuning || strlen(tuning) >= sizeof at->tuning) malformed(io, "tuning", "a string that fits");
    else strcpy(at->tuning, tuning);
}

// The channels with low parts (math/fp8.h): a string per block, a character per group, '0' for none.
static void io_channels(StateIO *io, int8_t *k, int blocks) {
    enum { GROUPS = FP8_ENTRIES - FP8_SITES };
    if (io->writing) put(io, "fp8_channels", cJSON_CreateArray());
    if (!has(io, "fp8_channels", true)) return; // an older version's state.json
    for (int l = 0; l < blocks && !io->code; l++) {
        const char *path = AT("fp8_channels[%d]", l);
        char text[GROUPS + 1] = "";
        int8_t *channel = k + l * FP8_ENTRIES + FP8_SITES;
        for (int i = 0; i < GROUPS && io->writing; i++) text[i] = (char)('0' + channel[i] - FP8_UNSET);
        if (io->writing) put(io, path, cJSON_CreateString(text));
        else snprintf(text, sizeof text, "%s", text_at(io, path));
        for (int i = 0; i < GROUPS && !io->code; i++) {
            if (text[i] < '0' || text[i] > '0' + FP8_GELU_GROUP) malformed(io, path, "a character per group");
            channel[i] = (int8_t)(FP8_UNSET + text[i] - '0');
        }
    }
}

// --dtype fp8 and fp8-dw: exponents and channels. They stay unset if the run last had neither.
static void io_exponents(StateIO *io, const Run *r, int8_t *k) {
    const char *path = "fp8_exponents";
    const int blocks = r->model.config.layers;
    if (!dtype_is_fp8(r->shape.dtype)) return;
    if (io->writing) put(io, path, cJSON_CreateArray());
    else memset(k, FP8_UNSET, (size_t)fp8_entries(blocks));
    if (!has(io, path, true)) return;
    for (int i = 0; i < fp8_exponents(blocks) && !io->code; i++) {
        if (i == blocks * FP8_SITES && !has(io, AT("%s[%d]", path, i), true)) break; // an older version's: no head
        int8_t *to = k + fp8_exponent_at(i);
        double x = *to;
        real(io, AT("%s[%d]", path, i), &x);
        if (x == FP8_UNSET || (fabs(x) <= FP8_EXPONENT_MAX && x == trunc(x))) *to = (int8_t)x;
        else malformed(io, AT("%s[%d]", path, i), "an exponent");
    }
    io_channels(io, k, blocks);
}

static void io_position(StateIO *io, Run *r) {
    RunPoint *at = &r->at;
    Rollback *back = &r->back;
    Ramp *ramp = &r->position.ramp;
    io_point(io, at);
    // Any mode stores its next batch: a later part with --ramp gns goes on from it.
    const bool other = io->writing && ramp->config.mode != RAMP_GNS;
    double rows = other ? (double)ramp_batch(ramp, at->step, (double)at->tokens) : ramp->rows;
    real(io, "ramp.rows", &rows);
    if (!(rows >= 0)) malformed(io, "ramp.rows", "a number of rows");
    if (!io->writing) ramp->rows = rows;
    io_noise(io, &r->position.noise);
    io_exponents(io, r, at->exponents);
    for (int k = 0; k < ROW_KINDS && r->options.outliers; k++) {
        const char *spread = AT("outliers.spread.%s", row_kinds[k]), *rows = AT("outliers.rows.%s", row_kinds[k]);
        if (has(io, spread, true)) io_window(io, spread, &r->position.outliers.spread[k]);
        if (io->writing) put(io, rows, cJSON_Duplicate(r->position.outliers.list[k], true));
        else r->position.outliers.list[k] = cJSON_Duplicate(get(io, rows), true);
    }
    if (r->options.on_spike && has(io, "spikes.z", true)) io_window(io, "spikes.z", &at->spikes);
    for (int i = 0; i < at->spikes.count && i < OUTLIERS_WINDOW; i++)
        count_to(io, AT("spikes.first.ring[%d]", i), &at->first[i], at->examples);
    // During a rollback r->back holds the rollbacks that the checkpoint lists, and later ones.
    const int64_t made = io->writing ? back->made : cJSON_GetArraySize(get(io, "spikes.skipped"));
    if (made > ROLLBACKS_MAX) malformed(io, "spikes.skipped", "a list that fits");
    for (int i = 0; i < made && !io->code; i++) {
        count(io, AT("spikes.skipped[%d].first", i), &back->first[i]);
        count_to(io, AT("spikes.skipped[%d].rows", i), &back->rows[i], 1 << 30);
    }
    if (made > back->made && !io->code) back->made = made;
}

// ---- What may not change --------------------------------------------------------------------------------------------

// A length that may not change: fails unless the file's list has length `now`.
static void keep_length(StateIO *io, const char *name, int now, const char *what) {
    const int was = cJSON_GetArraySize(get(io, name));
    if (!io->writing && !io->code && was != now)
        io->code = FAIL(io->e, ERR_INPUT, other_run, "%s: this run has %s of %d %s (--train), the command has %d",
                        io->file, name, was, what, now);
}

static void io_identity(StateIO *io, const Run *r, const RunData *data) {
    const ModelConfig *model = &r->model.config;
    const char *start = r->source[0] ? r->model_name : "scratch"; // only the name: the files may be moved
    const DatasetInfo info = data->train->info;
    const int weights = info.weights > 0 ? info.sources : 0;
    keep(io, "model.start", "--model", cJSON_CreateString(start));
    keep(io, "model.layers", "--model, --layers", cJSON_CreateNumber(model->layers));
    keep(io, "model.heads", "--model, --heads", cJSON_CreateNumber(model->heads));
    keep(io, "model.channels", "--model, --channels", cJSON_CreateNumber(model->channels));
    keep(io, "model.vocab", "--model, --vocab-size", cJSON_CreateNumber(model->vocab));
    keep(io, "model.context", "--model, --seq-len", cJSON_CreateNumber(model->context));
    keep(io, "seq_len", "--seq-len", cJSON_CreateNumber(r->shape.seq_len));
    keep(io, "seed", "--seed",
         cJSON_CreateString(AT("%" PRId64, r->options.seed))); // a string: a JSON number holds 53 bits
    if (io->code) return;
    if (!io->writing && !cJSON_IsArray(get(io, "train_data"))) malformed(io, "train_data", "a list");
    keep_length(io, "train_data", info.shards, "shards");
    for (int i = 0; i < info.shards && !io->code; i++) {
        const char *name = path_name(data->train->shards[i].path), *flag = AT("--train: %.80s", name);
        const FileDigest *digest = &data->train->shards[i].digest;
        keep(io, AT("train_data[%d].name", i), "--train", cJSON_CreateString(name));
        keep(io, AT("train_data[%d].bytes", i), flag, cJSON_CreateNumber((double)digest->bytes));
        keep(io, AT("train_data[%d].xxh3_128", i), flag, cJSON_CreateString(digest->hash));
    }
    keep_length(io, "train_mixture", weights, "weights");
    for (int i = 0; i < weights; i++) { // a source's fraction of the rows, and its number of shards
        const DatasetSource source = data->train->source[i];
        keep(io, AT("train_mixture[%d].share", i), "--train", cJSON_CreateString(AT("%.17g", source.share)));
        keep(io, AT("train_mixture[%d].shards", i), "--train", cJSON_CreateNumber(source.shards));
    }
    if (io->code && strcmp(io->e->hint, other_run) == 0)
        error_hint(io->e, "give the run's own; to go on with other data: --model %s --with-optimizer --out NEW",
                   r->options.out);
}

// ---- What may change ------------------------------------------------------------------------------------------------

// Returns the options as JSON; NULL: no memory. raw: a single item that holds their text.
static cJSON *options_item(const Options *o, bool raw) {
    Text text;
    cJSON *item = NULL;
    if (text_begin(&text, &(Error){0})) return NULL;
    options_write_json(text.f, o, NULL);
    if (!text_end(&text, &(Error){0})) item = raw ? cJSON_CreateRaw(text.text) : cJSON_Parse(text.text);
    text_free(&text);
    return item;
}

// Prints what a resume changes. An option that the file lacks is newer than the file; its old value was the default.
// ERR_USAGE if an option that may not change (OptionRow.of_run) differs.
static int print_changes(const StateIO *io, Run *r, FILE *f, Error *e) {
    const double ranks = number(io, "ranks"), tokens = (double)r->at.tokens;
    const char *version = version_text();            // only the same build promises the same bits
    const int length = (int)strcspn(io->build, ","); // io->build is "BUILD, ENGINE"
    Options by_default;
    options_defaults(&by_default);
    cJSON *options = options_item(&r->options, false), *defaults = options_item(&by_default, false);
    int code = options && defaults ? 0 : out_of_memory(e);
    fprintf(f, "resuming from %s: %lld steps, %lld tokens done\n", r->saving.saved, (long long)r->at.step,
            (long long)r->at.tokens);
    if ((size_t)length != strlen(version) || strncmp(io->build, version, (size_t)length) != 0)
        fprintf(f, "build: %.*s then, %s now\n", length, io->build, version);
    if (ranks > 0 && ranks != r->comm->ranks) fprintf(f, "ranks: %.0f then, %d now\n", ranks, r->comm->ranks);
    for (int id = 0; id < OPTION_COUNT && !code; id++) {
        const OptionRow *row = &option_rows[id];
        const cJSON *before = get(io, AT("options.%s", row->field)), *item = json_get(options, row->field);
        if (!before) before = json_get(defaults, row->field);
        if (!item || row->of_invocation || row->kind == ROW_FILE || cJSON_Compare(before, item, true)) continue;
        r->saving.changed[id] = true;
        char *then_text = cJSON_PrintUnformatted(before), *now_text = cJSON_PrintUnformatted(item);
        const Flag flag = row_flag(row);
        if (row->of_run)
            code = FAIL(e, ERR_USAGE, other_run, "%s: this run has %s %s, the command has %s", io->file, flag.s,
                        then_text, now_text);
        else fprintf(f, "%s %s is now %s\n", flag.s, then_text, now_text);
        cJSON_free(then_text);
        cJSON_free(now_text);
    }
    cJSON_Delete(options);
    cJSON_Delete(defaults);
    const Schedule *now = &r->position.ramp.config.schedule;
    Schedule then = *now;
    then.train_tokens = number(io, "options.resolved.horizon_tokens");
    const double lr_then = schedule_lr(&then, tokens), lr_now = schedule_lr(now, tokens);
    if (!code && then.train_tokens < now->train_tokens && lr_now > 1.5 * lr_then)
        fprintf(f,
                "the learning rate rises from %.3g to %.3g in one step, as the schedule now ends later: a smaller --lr "
                "or --lr-schedule constant goes on without it; wsd is the schedule for runs that may become longer\n",
                lr_then, lr_now);
    return code;
}

// Keeps --gns and --ramp-step-rows unless the command gives them, and the horizon that --train-hours has decided.
// ERR_USAGE if --micro-batch would change the batch, if --train-hours changed since, or if --ramp gns has no step cost.
static int keep_values(StateIO *io, Run *r, Error *e) {
    Options *o = &r->options;
    const double rows = number(io, "options.micro_batch"), step_rows = number(io, "options.ramp_step_rows");
    const double named = number(io, "options.batch_tokens") + number(io, "options.batch_min");
    const double hours = number(io, "options.train_hours");
    const char *gns = cJSON_GetStringValue(get(io, "options.gns"));
    const OptionTable t = options_table(o);
    int64_t *horizon = &r->at.horizon; // not 0: --train-hours has decided the length
    if (named == 0 && !o->batch_tokens && !o->batch_min && rows != (double)o->micro_batch) {
        FAIL(e, ERR_USAGE, NULL, "%s: --micro-batch was %.0f and is %lld; without --batch-tokens it is the run's batch",
             io->file, rows, (long long)o->micro_batch);
        return error_hint(e, "add --batch-tokens %.0f to keep the batch", rows * (double)o->seq_len);
    }
    if (!o->given[OPTION_gns] && gns) {
        if (row_set(&t, OPTION_gns, "gns", gns, 0, e)) return malformed(io, "options.gns", "a known mode");
        TRY(options_resolve_gns(o, (GnsMode)o->gns, e));
    }
    if (!o->train_hours) *horizon = 0;
    if (*horizon % o->seq_len || *horizon > HORIZON_UNDECIDED)
        return malformed(io, "horizon", "a length in whole rows");
    if (*horizon && hours != o->train_hours) {
        FAIL(e, ERR_USAGE, NULL, "--train-hours %g: this run has %g, and its length is decided", o->train_hours, hours);
        return error_hint(e, "use --train-tokens; its length is %" PRId64, *horizon);
    }
    if (*horizon) TRY(run_set_horizon(r, *horizon, e));
    if (o->ramp_step_rows == 0 && step_rows > 0) r->position.ramp.config.step_rows = o->ramp_step_rows = step_rows;
    if (o->run.ramp_mode != RAMP_GNS || o->ramp_step_rows > 0 || r->at.tokens >= o->run.horizon_tokens) return 0;
    return FAIL(e, ERR_USAGE,
                "add --ramp-step-rows X, from a similar run's run.json; 1e9 with --ramp-waste 1 --ramp-kappa 0.65 is "
                "what older builds did",
                "%s: --ramp gns measures what a step costs before a run's first step, and this run has not", io->file);
}

// ---- The file -------------------------------------------------------------------------------------------------------

int run_state_write(Run *r, char **text, size_t *bytes, Error *e) {
    StateIO io = {.root = cJSON_CreateObject(), .writing = true, .e = e};
    int64_t format = STATE_FORMAT;
    char engine[256];
    r->at.seconds = run_seconds(r);
    count(&io, "format", &format);
    io_position(&io, r);
    io_identity(&io, r, &r->data);
    engine_describe(r->engine, engine, sizeof engine);
    put(&io, "build", cJSON_CreateString(AT("%s, %s", version_text(), engine)));
    put(&io, "ranks", cJSON_CreateNumber(r->comm->ranks));
    put(&io, "options", options_item(&r->options, true));
    *text = io.code ? NULL : cJSON_Print(io.root);
    cJSON_Delete(io.root);
    if (*text) *bytes = strlen(*text);
    return io.code || *text ? io.code : out_of_memory(e);
}

// Opens state.json of a checkpoint's directory. After success the caller deletes io->root (cJSON_Delete).
static int state_open(StateIO *io, const char *directory, Error *e) {
    int64_t format = STATE_FORMAT;
    *io = (StateIO){.e = e};
    TRY(checkpoint_training_path(io->file, sizeof io->file, directory, STATE_NAME, e));
    TRY(json_read(&io->root, IN_PATH, io->file, STATE_MAX_BYTES, damaged, e));
    io->build = *text_at(io, "build") ? text_at(io, "build") : "an unknown build";
    if (!cJSON_IsObject(io->root)) io->code = FAIL(e, ERR_INPUT, damaged, "%s: no JSON object", io->file);
    else count(io, "format", &format);
    if (!io->code && format != STATE_FORMAT)
        io->code = FAIL(e, ERR_INPUT, damaged, "%s: format %" PRId64 ", only %d is known; it was written by %.200s",
                        io->file, format, STATE_FORMAT, io->build);
    if (io->code) cJSON_Delete(io->root);
    return io->code;
}

int run_state_read(Run *r, const char *directory, FILE *changes, Error *e) {
    StateIO io;
    TRY(state_open(&io, directory, e));
    io_identity(&io, r, &r->data);
    io_position(&io, r);
    if (!r->back.why.code) r->begun -= r->at.seconds; // a rollback keeps its clock
    int code = io.code;
    if (!code) code = keep_values(&io, r, e);
    if (!code && changes) code = print_changes(&io, r, changes, e);
    cJSON_Delete(io.root);
    return code;
}

int run_state_summary(RunSummary *summary, const char *directory, Error *e) {
    StateIO io;
    *summary = (RunSummary){0}; // fields that the file lacks stay 0
    TRY(state_open(&io, directory, e));
    io_point(&io, &summary->at);
    snprintf(summary->build, sizeof summary->build, "%s", io.build);
    snprintf(summary->start, sizeof summary->start, "%s", text_at(&io, "model.start"));
    snprintf(summary->model, sizeof summary->model, "%s", text_at(&io, "options.model"));
    snprintf(summary->optimizer, sizeof summary->optimizer, "%s", text_at(&io, "options.optimizer"));
    summary->document_mask = cJSON_IsTrue(get(&io, "options.document_mask"));
    cJSON_Delete(io.root);
    return io.code;
}
