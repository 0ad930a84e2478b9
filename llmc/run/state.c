#include "run/state.h"

#include "base/json.h"
#include "options/table.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { STATE_FORMAT = 1, STATE_MAX_BYTES = 1 << 26 };

static const char *const damaged = "use another checkpoint, or --fresh to start over";

// ---------------------------------------------------------------------------------------------------------------------
// Shards

int shard_list_create(ShardList *list, const Dataset *data, Error *e) {
    int count = dataset_describe(data).shards, code = 0;
    *list = (ShardList){0};
    TRY(memory_alloc_zero((void **)&list->shard, (size_t)count * sizeof *list->shard, "shard names", e));
    for (; list->count < count; list->count++) {
        const char *path = dataset_shard_path(data, list->count), *name = path_name(path);
        char **copy = &list->shard[list->count].name;
        TRY_GOTO(file_digest(path, DIGEST_SAMPLE, NULL, &list->shard[list->count].digest, e));
        TRY_GOTO(memory_alloc((void **)copy, strlen(name) + 1, "shard names", e));
        strcpy(*copy, name);
    }
done:
    if (code) shard_list_destroy(list);
    return code;
}

void shard_list_destroy(ShardList *list) {
    for (int i = 0; i < list->count; i++) memory_free(list->shard[i].name);
    memory_free(list->shard);
    *list = (ShardList){0};
}

// ---------------------------------------------------------------------------------------------------------------------
// One walk over the state both writes and reads it, so the two cannot come apart.

typedef struct {
    cJSON *object; // the present one
    bool writing;
    const char *path;  // of the file
    JsonText json;     // that is read: for messages
    const char *build; // that wrote it
    char where[80];    // "noise.ln.": in front of a field's name in messages
} StateIO;

static int out_of_memory(Error *e) { return FAIL(e, ERR_MEMORY, "free some memory", "no memory for " STATE_NAME); }

static bool has_field(const StateIO *io, const char *name) {
    return io->writing || cJSON_GetObjectItemCaseSensitive(io->object, name);
}

static int malformed(const StateIO *io, const char *name, const char *want, Error *e) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(io->object, name);
    if (!item)
        return FAIL(e, ERR_INPUT, "go on with the program that wrote it, or --fresh to start over",
                    "%s: no field \"%s%s\" in the object at byte %zu, which this build needs; it was written by %.200s",
                    io->path, io->where, name, json_place(&io->json, io->object), io->build);
    return FAIL(e, ERR_INPUT, damaged, "%s: field \"%s%s\" at byte %zu is not %s", io->path, io->where, name,
                json_place(&io->json, item), want);
}

static int io_raw(const StateIO *io, const char *name, const char *text, Error *e) {
    return cJSON_AddRawToObject(io->object, name, text) ? 0 : out_of_memory(e);
}

// 17 significant digits read back as the same double; NaN is null, and infinity a number that no double holds.
static void real_text(char out[40], double x) {
    if (isnan(x)) strcpy(out, "null");
    else if (isinf(x)) strcpy(out, x > 0 ? "1e999" : "-1e999");
    else snprintf(out, 40, "%.17g", x);
}

static bool real_value(const cJSON *item, double *x) {
    if (cJSON_IsNull(item)) *x = NAN;
    else if (cJSON_IsNumber(item)) *x = item->valuedouble;
    else return false;
    return true;
}

static int io_real(StateIO *io, const char *name, double *x, Error *e) {
    char text[40];
    if (!io->writing)
        return real_value(cJSON_GetObjectItemCaseSensitive(io->object, name), x) ? 0
                                                                                 : malformed(io, name, "a number", e);
    real_text(text, *x);
    return io_raw(io, name, text, e);
}

static int io_int(StateIO *io, const char *name, int64_t *x, Error *e) {
    const double exact = 9007199254740992; // 2^53: what a JSON number says exactly
    if (io->writing) {
        char text[40];
        snprintf(text, sizeof text, "%" PRId64, *x);
        return io_raw(io, name, text, e);
    }
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(io->object, name);
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble <= exact) ||
        item->valuedouble != floor(item->valuedouble))
        return malformed(io, name, "a whole number, 0 or more", e);
    *x = (int64_t)item->valuedouble;
    return 0;
}

static int io_text(const StateIO *io, const char *name, char *text, size_t bytes, Error *e) {
    if (io->writing) return cJSON_AddStringToObject(io->object, name, text) ? 0 : out_of_memory(e);
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(io->object, name);
    if (!cJSON_IsString(item)) return malformed(io, name, "a string", e);
    if (strlen(item->valuestring) >= bytes) return malformed(io, name, "as short as it must be", e);
    strcpy(text, item->valuestring);
    return 0;
}

static int io_object(const StateIO *io, const char *name, StateIO *inner, Error *e) {
    *inner = *io;
    snprintf(inner->where, sizeof inner->where, "%.50s%.20s.", io->where, name);
    if (io->writing) inner->object = cJSON_AddObjectToObject(io->object, name);
    else inner->object = cJSON_GetObjectItemCaseSensitive(io->object, name);
    if (io->writing && !inner->object) return out_of_memory(e);
    return cJSON_IsObject(inner->object) ? 0 : malformed(io, name, "an object", e);
}

static int io_tracker(const StateIO *io, const char *name, GnsTracker *t, Error *e) {
    StateIO in;
    TRY(io_object(io, name, &in, e));
    TRY(io_real(&in, "steps", &t->steps, e));
    TRY(io_real(&in, "weight", &t->weight, e));
    TRY(io_real(&in, "weight_sq", &t->weight_sq, e));
    TRY(io_real(&in, "g2", &t->g2, e));
    TRY(io_real(&in, "s", &t->s, e));
    TRY(io_real(&in, "last_g2", &t->last_g2, e));
    TRY(io_real(&in, "last_s", &t->last_s, e));
    TRY(io_real(&in, "diff_weight", &t->diff_weight, e));
    TRY(io_real(&in, "diff_gg", &t->diff_gg, e));
    TRY(io_real(&in, "diff_ss", &t->diff_ss, e));
    return io_real(&in, "diff_gs", &t->diff_gs, e);
}

// Half-lives are the options' business and may change. Before there were ranks nothing was measured among them. In older
// builds the differences behind the calibration's errors weighed otherwise (diff_sq): those of such a checkpoint fade
// within a few half-lives.
static int io_noise(const StateIO *io, Noise *noise, Error *e) {
    StateIO in, types, layers;
    TRY(io_object(io, "noise", &in, e));
    TRY(io_tracker(&in, "ln", &noise->ln, e));
    if (has_field(&in, "ranks")) TRY(io_tracker(&in, "ranks", &noise->ranks, e));
    TRY(io_tracker(&in, "sampled_total", &noise->calibration.total, e));
    TRY(io_tracker(&in, "sampled_ln", &noise->calibration.ln, e));
    TRY(io_real(&in, "ratio", &noise->calibration.ratio, e));
    TRY(io_real(&in, "tokens_since_sample", &noise->tokens_since_sample, e));
    if (has_field(&in, "tokens_since_ranks")) // before, every step was one of theirs
        TRY(io_real(&in, "tokens_since_ranks", &noise->tokens_since_ranks, e));
    TRY(io_object(&in, "type", &types, e));
    for (int i = 0; i < GROUP_COUNT; i++) TRY(io_tracker(&types, group_names[i], &noise->type[i], e));
    TRY(io_object(&in, "layer", &layers, e));
    for (int l = 0; l < noise->layers; l++) {
        char name[16];
        snprintf(name, sizeof name, "%d", l);
        TRY(io_tracker(&layers, name, &noise->layer[l], e));
    }
    return 0;
}

static int io_window(const StateIO *io, const char *name, Outliers *o, Error *e) {
    StateIO in;
    TRY(io_object(io, name, &in, e));
    TRY(io_int(&in, "count", &o->count, e));
    int n = o->count < OUTLIERS_WINDOW ? (int)o->count : OUTLIERS_WINDOW;
    cJSON *ring =
        in.writing ? cJSON_AddArrayToObject(in.object, "ring") : cJSON_GetObjectItemCaseSensitive(in.object, "ring");
    if (in.writing && !ring) return out_of_memory(e);
    if (!in.writing && (!cJSON_IsArray(ring) || cJSON_GetArraySize(ring) != n))
        return malformed(&in, "ring", "a list of the window's numbers", e);
    for (int i = 0; i < n; i++) {
        char text[40];
        if (!in.writing) {
            if (!real_value(cJSON_GetArrayItem(ring, i), &o->value[i])) return malformed(&in, "ring", "numbers", e);
            continue;
        }
        real_text(text, o->value[i]);
        cJSON *item = cJSON_CreateRaw(text);
        if (!item || !cJSON_AddItemToArray(ring, item)) return out_of_memory(e);
    }
    return 0;
}

// Before there was --keep-best nothing was known to be the best.
static int io_best(StateIO *io, BestPoint *best, Error *e) {
    if (!has_field(io, "best_step")) {
        *best = (BestPoint){.loss = INFINITY};
        return 0;
    }
    TRY(io_int(io, "best_step", &best->step, e));
    return io_real(io, "best_loss", &best->loss, e);
}

static int io_progress(StateIO *io, const RunState *s, Error *e) {
    StateIO ramp;
    RunPoint *at = s->at;
    TRY(io_int(io, "step", &at->step, e));
    TRY(io_int(io, "tokens", &at->tokens, e));
    TRY(io_int(io, "examples", &at->examples, e));
    TRY(io_int(io, "batch", &at->batch, e));
    TRY(io_int(io, "metrics_bytes", &at->metrics_bytes, e));
    TRY(io_real(io, "val_loss", &at->val_loss, e));
    TRY(io_best(io, &at->best, e));
    TRY(io_object(io, "ramp", &ramp, e));
    TRY(io_int(&ramp, "batch", &s->ramp->batch, e));
    TRY(io_real(&ramp, "tokens_above", &s->ramp->tokens_above, e));
    TRY(io_noise(io, s->noise, e));
    TRY(io_window(io, "loss_window", &at->loss_window, e));
    TRY(io_window(io, "grad_window", &at->grad_window, e));
    if (!has_field(io, "tuning")) { // before there was --tune
        at->tuning[0] = 0;
        return 0;
    }
    return io_text(io, "tuning", at->tuning, sizeof at->tuning, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// What may not change

static const char *const other_run = "give the run's own value, or another --out, or --fresh to start over";

static int fixed_int(StateIO *io, const char *name, const char *flag, int64_t now, Error *e) {
    int64_t was = now;
    TRY(io_int(io, name, &was, e));
    if (was == now) return 0;
    return FAIL(e, ERR_INPUT, other_run,
                "%s: this run was begun with %s%s = %" PRId64 " (%s), and is now to have %" PRId64, io->path, io->where,
                name, was, flag, now);
}

static int fixed_text(const StateIO *io, const char *name, const char *flag, const char *now, Error *e) {
    if (io->writing) return cJSON_AddStringToObject(io->object, name, now) ? 0 : out_of_memory(e);
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(io->object, name);
    if (!cJSON_IsString(item)) return malformed(io, name, "a string", e);
    if (strcmp(item->valuestring, now) == 0) return 0;
    return FAIL(e, ERR_INPUT, other_run, "%s: this run was begun with %s%s = %.80s (%s), and is now to have %.80s",
                io->path, io->where, name, item->valuestring, flag, now);
}

// "a/model/" of a build that took the slash for a part of the name: its last part without it.
static void name_start(cJSON *model) {
    cJSON *item = cJSON_GetObjectItemCaseSensitive(model, "start");
    char *path = cJSON_GetStringValue(item);
    size_t n = path ? strlen(path) : 0;
    if (n < 2 || path[n - 1] != '/') return;
    while (n > 1 && path[n - 1] == '/') path[--n] = 0;
    char *slash = strrchr(path, '/');
    if (slash && slash[1]) memmove(path, slash + 1, strlen(slash + 1) + 1);
}

static int fixed_model(const StateIO *io, const RunState *s, Error *e) {
    StateIO in;
    TRY(io_object(io, "model", &in, e));
    if (!io->writing) name_start(in.object);
    TRY(fixed_text(&in, "start", "--model", s->start, e));
    TRY(fixed_int(&in, "layers", "--model, --layers", s->model.layers, e));
    TRY(fixed_int(&in, "heads", "--model, --heads", s->model.heads, e));
    TRY(fixed_int(&in, "channels", "--model, --channels", s->model.channels, e));
    TRY(fixed_int(&in, "vocab", "--model, --vocab-size", s->model.vocab, e));
    return fixed_int(&in, "context", "--model, --seq-len", s->model.context, e);
}

// As text: a seed may need all of its 63 bits.
static int fixed_seed(const StateIO *io, uint64_t now, Error *e) {
    char text[40];
    snprintf(text, sizeof text, "%" PRIu64, now);
    return fixed_text(io, "seed", "--seed", text, e);
}

static int write_shards(const StateIO *io, const ShardList *list, Error *e) {
    cJSON *array = cJSON_AddArrayToObject(io->object, "train_data");
    if (!array) return out_of_memory(e);
    for (int i = 0; i < list->count; i++) {
        char bytes[32];
        cJSON *item = cJSON_CreateObject();
        if (!item || !cJSON_AddItemToArray(array, item)) return out_of_memory(e);
        snprintf(bytes, sizeof bytes, "%" PRIu64, list->shard[i].digest.bytes);
        if (!cJSON_AddStringToObject(item, "name", list->shard[i].name) ||
            !cJSON_AddRawToObject(item, "bytes", bytes) ||
            !cJSON_AddStringToObject(item, "xxh3_128", list->shard[i].digest.hash))
            return out_of_memory(e);
    }
    return 0;
}

static int compare_shards(const StateIO *io, const ShardList *list, Error *e) {
    const cJSON *array = cJSON_GetObjectItemCaseSensitive(io->object, "train_data");
    if (!cJSON_IsArray(array)) return malformed(io, "train_data", "a list", e);
    int count = cJSON_GetArraySize(array);
    if (count != list->count)
        return FAIL(e, ERR_INPUT, other_run,
                    "%s: this run was begun with train_data of %d shards (--train), now there are %d", io->path, count,
                    list->count);
    for (int i = 0; i < count; i++) {
        const cJSON *item = cJSON_GetArrayItem(array, i);
        const cJSON *name = cJSON_GetObjectItemCaseSensitive(item, "name");
        const cJSON *bytes = cJSON_GetObjectItemCaseSensitive(item, "bytes");
        const cJSON *hash = cJSON_GetObjectItemCaseSensitive(item, "xxh3_128");
        if (!cJSON_IsString(name) || !cJSON_IsNumber(bytes) || !cJSON_IsString(hash))
            return malformed(io, "train_data", "a list of names, bytes and hashes", e);
        const FileDigest *now = &list->shard[i].digest;
        bool same_name = strcmp(name->valuestring, list->shard[i].name) == 0;
        if (same_name && bytes->valuedouble == (double)now->bytes && strcmp(hash->valuestring, now->hash) == 0)
            continue;
        return FAIL(e, ERR_INPUT, other_run,
                    "%s: train_data differs in shard %d (--train): %.80s, %.0f bytes, hash %.32s when the run was "
                    "begun; %.80s, %" PRIu64 " bytes, hash %s now",
                    io->path, i, name->valuestring, bytes->valuedouble, hash->valuestring, list->shard[i].name,
                    now->bytes, now->hash);
    }
    return 0;
}

static int io_fixed(StateIO *io, const RunState *s, Error *e) {
    TRY(fixed_model(io, s, e));
    TRY(fixed_int(io, "seq_len", "--seq-len", s->seq_len, e));
    TRY(fixed_seed(io, s->seed, e));
    return io->writing ? write_shards(io, s->train, e) : compare_shards(io, s->train, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// The file

static int options_text(const Options *o, char **text, Error *e) {
    size_t bytes;
    FILE *f = open_memstream(text, &bytes);
    if (!f) return out_of_memory(e);
    options_write_json(f, o, 2);
    bool bad = ferror(f);
    if (fclose(f) == 0 && !bad) return 0;
    free(*text);
    return out_of_memory(e);
}

static int write_record(StateIO *io, const RunState *s, Error *e) {
    char *options;
    if (!cJSON_AddStringToObject(io->object, "build", s->build) ||
        !cJSON_AddNumberToObject(io->object, "ranks", s->ranks))
        return out_of_memory(e);
    TRY(options_text(s->options, &options, e));
    int code = io_raw(io, "options", options, e);
    free(options);
    return code;
}

int run_state_write(const RunState *state, char **text, size_t *bytes, Error *e) {
    StateIO io = {.object = cJSON_CreateObject(), .writing = true, .path = STATE_NAME};
    int64_t format = STATE_FORMAT;
    int code = io.object ? 0 : out_of_memory(e);
    if (!code) code = io_int(&io, "format", &format, e);
    if (!code) code = io_progress(&io, state, e);
    if (!code) code = io_fixed(&io, state, e);
    if (!code) code = write_record(&io, state, e);
    *text = code ? NULL : cJSON_Print(io.object);
    cJSON_Delete(io.object);
    if (code) return code;
    if (!*text) return out_of_memory(e);
    *bytes = strlen(*text);
    return 0;
}

// Opens the file as far as any reader needs it. Where this succeeds, json_free must follow.
static int state_open(StateIO *io, char *path, size_t path_bytes, const char *directory, Error *e) {
    int64_t format = 0;
    int code = 0;
    TRY(path_join(path, path_bytes, directory, STATE_NAME, e));
    *io = (StateIO){.path = path};
    TRY(json_read(&io->json, path, STATE_MAX_BYTES, damaged, e));
    io->object = io->json.root;
    io->build = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(io->object, "build"));
    if (!io->build) io->build = "an unknown build";
    if (!cJSON_IsObject(io->object))
        code =
            FAIL(e, ERR_INPUT, damaged, "%s: not a JSON object at byte %zu", path, json_place(&io->json, io->object));
    if (!code) code = io_int(io, "format", &format, e);
    if (!code && format != STATE_FORMAT)
        code = FAIL(e, ERR_INPUT, "go on with the program that wrote it, or --fresh to start over",
                    "%s: format %" PRId64 " at byte %zu, only %d is known; it was written by %.200s", path, format,
                    json_place(&io->json, cJSON_GetObjectItemCaseSensitive(io->object, "format")), STATE_FORMAT,
                    io->build);
    if (code) json_free(&io->json);
    return code;
}

// Options that say what this invocation does rather than what the run is. (Those of planning are in no state.json.)
static bool is_passing(OptionId id) {
    static const OptionId passing[] = {OPTION_config, OPTION_fresh, OPTION_out};
    for (size_t i = 0; i < sizeof passing / sizeof *passing; i++)
        if (passing[i] == id) return true;
    return false;
}

static void put_value(FILE *f, const cJSON *value) {
    char *text = value ? cJSON_PrintUnformatted(value) : NULL;
    fputs(text ? text : "(nothing)", f);
    cJSON_free(text);
}

static int options_json(const Options *o, cJSON **json, Error *e) {
    char *text;
    TRY(options_text(o, &text, e));
    *json = cJSON_Parse(text);
    free(text);
    return *json ? 0 : out_of_memory(e);
}

static int defaults_json(cJSON **json, Error *e) {
    Options *o;
    TRY(memory_alloc((void **)&o, sizeof *o, "options", e));
    options_defaults(o);
    int code = options_json(o, json, e);
    memory_free(o);
    return code;
}

// The same bits are promised of the same build only. In the text the engine follows, behind a comma.
static void put_build_change(FILE *f, const char *then) {
    int length = (int)strcspn(then, ",");
    const char *now = version_text();
    if ((size_t)length == strlen(now) && strncmp(then, now, (size_t)length) == 0) return;
    fprintf(f, "build: %.*s then, %s now\n", length, then, now);
}

// An option that the build which wrote the file did not have is taken to have been at its default.
static void put_changes(FILE *f, bool *changed, const cJSON *was, const cJSON *now, const cJSON *defaults) {
    for (int id = 0; id < OPTION_COUNT; id++) {
        char flag[FLAG_BYTES];
        const char *field = option_rows[id].field;
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(now, field);
        const cJSON *before = cJSON_GetObjectItemCaseSensitive(was, field);
        if (!before) before = cJSON_GetObjectItemCaseSensitive(defaults, field);
        changed[id] = item && !is_passing((OptionId)id) && !cJSON_Compare(before, item, true);
        if (!changed[id]) continue;
        option_flag(flag, (OptionId)id);
        fprintf(f, "%s ", flag);
        put_value(f, before);
        fputs(" is now ", f);
        put_value(f, item);
        fputc('\n', f);
    }
}

static int list_changes(const StateIO *io, const RunState *s, char **changes, bool *changed, Error *e) {
    const cJSON *ranks = cJSON_GetObjectItemCaseSensitive(io->object, "ranks");
    cJSON *now = NULL, *defaults = NULL;
    size_t bytes;
    FILE *f = open_memstream(changes, &bytes);
    int code = f ? options_json(s->options, &now, e) : out_of_memory(e);
    if (!code) code = defaults_json(&defaults, e);
    if (!code) put_build_change(f, io->build);
    if (!code && cJSON_IsNumber(ranks) && ranks->valuedouble != s->ranks)
        fprintf(f, "ranks: %.0f then, %d now\n", ranks->valuedouble, s->ranks);
    if (!code) put_changes(f, changed, cJSON_GetObjectItemCaseSensitive(io->object, "options"), now, defaults);
    cJSON_Delete(now);
    cJSON_Delete(defaults);
    bool bad = f && ferror(f); // asked before fclose
    if (f && (fclose(f) != 0 || bad) && !code) code = out_of_memory(e);
    if (code && f) free(*changes), *changes = NULL;
    return code;
}

// A batch that nobody has named is one micro-batch, and that must not change what the run computes: then the batch wants
// a name. (An unnamed one under a ramp is --batch-min.)
static int check_unnamed_batch(const StateIO *io, const RunState *s, Error *e) {
    const cJSON *then = cJSON_GetObjectItemCaseSensitive(io->object, "options");
    double rows = cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(then, "micro_batch"));
    double named = cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(then, "batch_tokens")) +
                   cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(then, "batch_min"));
    const Options *now = s->options;
    if (named != 0 || now->batch_tokens || now->batch_min || rows == (double)now->micro_batch) return 0;
    FAIL(e, ERR_USAGE, NULL,
         "%s: --micro-batch was %.0f and is %lld; without --batch-tokens it settles the batch that --lr is meant for",
         io->path, rows, (long long)now->micro_batch);
    return error_hint(e, "add --batch-tokens %.0f to go on with the same one", rows * (double)s->seq_len);
}

// What no run could have written, in a file whose JSON is sound.
static int check_counts(const StateIO *io, const RunState *s, Error *e) {
    if ((double)s->at->tokens != (double)s->at->examples * (double)s->seq_len)
        return malformed(io, "tokens", "examples x seq_len", e);
    return s->at->step > s->at->examples ? malformed(io, "step", "at most examples", e) : 0;
}

int run_state_read(const RunState *state, const char *directory, char **changes, bool changed[OPTION_COUNT], Error *e) {
    char path[PATH_MAX];
    StateIO io;
    *changes = NULL;
    TRY(state_open(&io, path, sizeof path, directory, e));
    int code = io_fixed(&io, state, e);
    if (!code) code = io_progress(&io, state, e);
    if (!code) code = check_counts(&io, state, e);
    if (!code) code = check_unnamed_batch(&io, state, e);
    if (!code) code = list_changes(&io, state, changes, changed, e);
    json_free(&io.json);
    return code;
}

static void copy_text(char *out, size_t bytes, const cJSON *object, const char *name) {
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, name));
    snprintf(out, bytes, "%s", text ? text : "");
}

int run_state_summary(RunSummary *summary, const char *directory, Error *e) {
    char path[PATH_MAX];
    StateIO io;
    TRY(state_open(&io, path, sizeof path, directory, e));
    int code = io_int(&io, "step", &summary->step, e);
    if (!code) code = io_int(&io, "tokens", &summary->tokens, e);
    if (!code) code = io_int(&io, "examples", &summary->examples, e);
    if (!code) code = io_int(&io, "batch", &summary->batch, e);
    if (!code) code = io_best(&io, &summary->best, e);
    snprintf(summary->build, sizeof summary->build, "%s", io.build);
    copy_text(summary->start, sizeof summary->start, cJSON_GetObjectItemCaseSensitive(io.object, "model"), "start");
    copy_text(summary->model, sizeof summary->model, cJSON_GetObjectItemCaseSensitive(io.object, "options"), "model");
    json_free(&io.json);
    return code;
}
