#include "run/run.h"

#include "checkpoint/checkpoint.h"

#include <inttypes.h>

static int count_not_finite(void *count, StateKind kind, Range range, const float *values, Error *e) {
    for (size_t i = 0; i < range_length(range); i++)
        if (!isfinite(values[i])) ++*(size_t *)count;
    return 0;
}

// Reads all weights, and all moments if the directory has them.
static int inspect_model(const char *directory, Error *e) {
    ModelConfig c;
    Model model;
    size_t bad = 0;
    TRY(checkpoint_read_config(directory, &c, e));
    TRY(model_create(&model, &c, e));
    Receiver to = {.model = &model, .load = count_not_finite, .context = &bad};
    int code = memory_alloc((void **)&to.buffer, RECEIVER_VALUES * sizeof *to.buffer, "a file buffer", e);
    if (!code) code = checkpoint_load_model(directory, &to, e);
    const bool trained =
        directory_holds(directory, OPTIMIZER_NAME) || directory_holds(directory, TRAINING OPTIMIZER_NAME);
    for (StateKind kind = STATE_MOMENT1; !code && trained && kind <= STATE_MOMENT2; kind++)
        code = checkpoint_load_moment(directory, kind, &model, &to, e);
    memory_free(to.buffer);
    if (!code)
        printf("%s: GPT-2, %zu parameters: %d layer%s, %d heads, %d channels, vocabulary %d, context %d\n", directory,
               model.parameters, c.layers, c.layers > 1 ? "s" : "", c.heads, c.channels, c.vocab, c.context);
    if (!code) code = checkpoint_note_unknown(directory, &model, stdout, e);
    if (!code && bad) code = FAIL(e, ERR_INPUT, "use another one", "%s: %zu values are not finite", directory, bad);
    model_destroy(&model);
    return code;
}

static int inspect_checkpoint(const char *directory, Error *e) {
    Manifest manifest;
    RunSummary s;
    int code = manifest_read(&manifest, IN_PATH, directory, e);
    if (!code) code = manifest_verify(&manifest, NULL, VERIFY_DISK, e);
    for (int i = 0; i < manifest.count && !code; i++)
        printf("  %-32s %12" PRIu64 " bytes\n", manifest.file[i].name, manifest.file[i].bytes);
    manifest_free(&manifest);
    if (code) return code;
    TRY(inspect_model(directory, e));
    TRY(run_state_summary(&s, directory, e));
    printf("%s: step %" PRId64 ", %" PRId64 " tokens, %" PRId64 " examples, batch %" PRId64 "; written by %s\n",
           directory, s.at.step, s.at.tokens, s.at.examples, s.at.batch, s.build);
    if (s.at.best.step)
        printf("%s: lowest validation loss %.4f after step %" PRId64 "\n", directory, s.at.best.loss, s.at.best.step);
    printf("%s: undamaged\n", directory);
    return 0;
}

// Inspects all checkpoints, and returns the first error.
static int inspect_run(const char *directory, Error *e) {
    Names names;
    Error first = {0};
    bool any = false;
    TRY(directory_list(IN_PATH, directory, &names, e));
    for (int i = 0; i < names.count; i++) {
        char path[PATH_MAX];
        Error one = {0};
        if (archive_step_of(names.entry[i]->d_name) < 0) continue;
        any = true;
        int code = path_join(path, sizeof path, directory, names.entry[i]->d_name, &one);
        if (!code) code = inspect_checkpoint(path, &one);
        if (code && !file_exists(path)) continue; // a live run has removed it
        if (code) printf("%s\n", one.what);
        if (code && !first.code) first = one;
    }
    names_free(&names);
    if (!any)
        return FAIL(e, ERR_INPUT, "name a checkpoint, a run directory, a model's directory or token shards",
                    "%s: neither a checkpoint nor a run with checkpoints", directory);
    if (first.code) *e = first;
    return first.code;
}

static int inspect_shards(const char *pattern, Error *e) {
    Dataset *data;
    TRY(dataset_open(&data, pattern, 1, 65536, 0, e)); // any token
    int code = dataset_check(data, e);
    if (!code)
        printf("%s: token shards, %d file%s, %" PRIu64 " tokens\n", pattern, data->info.shards,
               data->info.shards == 1 ? "" : "s", data->info.tokens);
    dataset_close(data);
    return code;
}

int inspect(const char *path, Error *e) {
    if (directory_holds(path, MANIFEST_NAME)) return inspect_checkpoint(path, e);
    if (directory_holds(path, STATE_NAME))
        return FAIL(e, ERR_INPUT, "name the checkpoint", "%s: a directory in a checkpoint", path);
    if (directory_holds(path, "training"))
        return FAIL(e, ERR_INPUT, "use another one", "%s: an incomplete checkpoint: it has no " MANIFEST_NAME, path);
    if (checkpoint_is_model(path)) return inspect_model(path, e);
    if (directory_exists(path)) return inspect_run(path, e);
    if (file_exists(path) && (path_ends(path, ".safetensors") || path_ends(path, ".json")))
        return FAIL(e, ERR_INPUT, "name its directory", "%s: a file of a checkpoint, a model or a run", path);
    return inspect_shards(path, e);
}
