#include "run/inspect.h"

#include "checkpoint/archive.h"
#include "checkpoint/checkpoint.h"
#include "text/shards.h"
#include "run/state.h"
#include "checkpoint/safetensors.h"

#include <inttypes.h>
#include <string.h>

static int look_at_values(void *worst, Range range, const float *values, Error *e) {
    (void)e;
    for (size_t i = 0; i < range_length(range); i++)
        if (!(values[i] - values[i] == 0)) ++*(size_t *)worst; // not finite
    return 0;
}

// Reads all of the weights, and of the optimizer's memory where it is there.
static int inspect_model(const char *directory, FILE *out, Error *e) {
    ModelConfig c;
    Model model;
    size_t bad = 0;
    TRY(checkpoint_read_config(directory, &c, e));
    TRY(model_create(&model, &c, e));
    int code = checkpoint_load_model(directory, &model, look_at_values, &bad, e);
    if (!code && directory_holds(directory, OPTIMIZER_NAME))
        code = checkpoint_load_optimizer(directory, &model, NULL, 0, look_at_values, look_at_values, &bad, e);
    if (!code)
        fprintf(out, "%s: GPT-2, %zu parameters: %d layers, %d heads, %d channels, vocabulary %d, context %d\n",
                directory, model.parameters, c.layers, c.heads, c.channels, c.vocab, c.context);
    if (!code && bad) code = FAIL(e, ERR_INPUT, "use another one", "%s: %zu values are not finite", directory, bad);
    model_destroy(&model);
    return code;
}

// Of what --keep-best kept, if it did, and where it is not: this one may have been taken from its run.
static int inspect_best(const char *directory, const BestPoint *best, FILE *out, Error *e) {
    char run[ARCHIVE_PATH];
    if (!best->step) return 0;
    TRY(path_join(run, sizeof run, directory, "..", e));
    fprintf(out, "%s: lowest validation loss %.4f after step %" PRId64 "%s\n", directory, best->loss, best->step,
            archive_has(run, best->step) ? "" : ", whose checkpoint is not beside this one");
    return 0;
}

static int inspect_checkpoint(const char *directory, FILE *out, Error *e) {
    Manifest manifest;
    RunSummary summary;
    TRY(manifest_read(&manifest, directory, e));
    TRY(manifest_verify(&manifest, directory, VERIFY_DISK, e));
    for (int i = 0; i < manifest.count; i++)
        fprintf(out, "  %-24s %12" PRIu64 " bytes  %s\n", manifest.file[i].name, manifest.file[i].digest.bytes,
                manifest.file[i].digest.hash);
    TRY(inspect_model(directory, out, e));
    TRY(run_state_summary(&summary, directory, e));
    fprintf(out, "%s: step %" PRId64 ", %" PRId64 " tokens, %" PRId64 " examples, batch %" PRId64 "; written by %s\n",
            directory, summary.step, summary.tokens, summary.examples, summary.batch, summary.build);
    TRY(inspect_best(directory, &summary.best, out, e));
    fprintf(out, "%s: as it was written\n", directory);
    return 0;
}

// All checkpoints, the good ones and the bad; an error where one is bad.
static int inspect_run(const char *directory, FILE *out, bool *any, Error *e) {
    Names names;
    Error first = {0};
    *any = false;
    TRY(directory_list(directory, &names, e));
    for (int i = 0; i < names.count; i++) {
        char path[ARCHIVE_PATH];
        Error one = {0};
        if (archive_step_of(names.name[i]) < 0) continue;
        *any = true;
        int code = path_join(path, sizeof path, directory, names.name[i], &one);
        if (!code) code = inspect_checkpoint(path, out, &one);
        if (code) fprintf(out, "%s\n", one.what);
        if (code && !first.code) first = one;
    }
    names_free(&names);
    if (first.code) *e = first;
    return first.code;
}

static int inspect_shards(const char *pattern, FILE *out, Error *e) {
    Dataset *data;
    const int any_token = 65536;
    TRY(dataset_open(&data, pattern, 1, any_token, 0, e));
    int code = dataset_check(data, e);
    DatasetInfo info = dataset_describe(data);
    if (!code)
        fprintf(out, "%s: token shards, %d file%s, %" PRIu64 " tokens\n", pattern, info.shards,
                info.shards == 1 ? "" : "s", info.tokens);
    dataset_close(data);
    return code;
}

static bool is_safetensors(const char *name) {
    const char *dot = strrchr(name, '.');
    return dot && strcmp(dot, ".safetensors") == 0;
}

static int inspect_tensors(const char *path, FILE *out, Error *e) {
    SafetensorsReader reader;
    TRY(safetensors_open(&reader, path, e));
    for (int i = 0; i < reader.count; i++) {
        const SafetensorsEntry *t = &reader.entries[i];
        fprintf(out, "  %-40s %-5s %12" PRIu64 " values\n", t->name, safetensors_type_name(t->type), t->count);
    }
    fprintf(out, "%s: %d tensors, header and size are right\n", path, reader.count);
    safetensors_close(&reader);
    return 0;
}

// One file of a checkpoint, against what the manifest beside it says.
static int inspect_listed(const char *directory, const char *name, FILE *out, Error *e) {
    Manifest manifest;
    char path[ARCHIVE_PATH];
    TRY(manifest_read(&manifest, directory, e));
    if (strcmp(name, MANIFEST_NAME) != 0) TRY(manifest_verify_file(&manifest, directory, name, e));
    TRY(path_join(path, sizeof path, directory, name, e));
    if (is_safetensors(name)) TRY(inspect_tensors(path, out, e));
    fprintf(out, "%s: as it was written\n", path);
    return 0;
}

static int inspect_file(const char *path, FILE *out, Error *e) {
    char directory[ARCHIVE_PATH];
    const char *name = path_name(path);
    path_parent(path, directory, sizeof directory);
    if (directory_holds(directory, MANIFEST_NAME)) return inspect_listed(directory, name, out, e);
    if (checkpoint_is_model(path)) return inspect_model(path, out, e);
    if (is_safetensors(name)) return inspect_tensors(path, out, e);
    return inspect_shards(path, out, e);
}

int inspect(const char *path, FILE *out, Error *e) {
    bool any;
    if (!directory_exists(path)) return inspect_file(path, out, e);
    if (directory_holds(path, MANIFEST_NAME)) return inspect_checkpoint(path, out, e);
    if (directory_holds(path, STATE_NAME) || directory_holds(path, OPTIMIZER_NAME))
        return FAIL(e, ERR_INPUT, "use another one", "%s: an incomplete checkpoint: it has no " MANIFEST_NAME, path);
    if (checkpoint_is_model(path)) return inspect_model(path, out, e);
    TRY(inspect_run(path, out, &any, e));
    if (any) return 0;
    return FAIL(e, ERR_INPUT, "name a checkpoint, a run directory, a model's directory or token shards",
                "%s: neither a checkpoint nor a run with checkpoints", path);
}
