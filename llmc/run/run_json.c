// run.json: the run's set-up with all options resolved, and its parts.
//
// Each start of a run begins a part. "parts" lists the parts in order, except parts whose steps were all written again.
// The first part's "options" are the given ones; a later part's are the changed ones. The file's "options" are all
// options of the last part. Each checkpoint's manifest repeats "id": --keep removes only checkpoints with the run's id.
#include "run/run.h"

#include "base/files.h"
#include "base/text.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <time.h>
#include <unistd.h>

static void put_data_json(FILE *f, const char *name, const Dataset *data) {
    if (!data) return;
    DatasetInfo info = dataset_describe(data);
    fprintf(f, "  \"%s\": {\"shards\": %d, \"tokens\": %llu, \"windows\": %llu", name, info.shards,
            (unsigned long long)info.tokens, (unsigned long long)info.windows);
    for (int s = 0; info.weighted && s < info.sources; s++) {
        DatasetSource source = dataset_source(data, s);
        fprintf(f, "%s{\"files\": ", s ? ", " : ", \"sources\": [");
        text_write_json(f, source.files);
        fprintf(f, ", \"share\": %.17g, \"shards\": %d, \"tokens\": %llu, \"windows\": %llu}", source.share,
                source.shards, (unsigned long long)source.tokens, (unsigned long long)source.windows);
    }
    fputs(info.weighted ? "]},\n" : "},\n", f);
}

// ---- Parts ----------------------------------------------------------------------------------------------------------

static void put_text_field(FILE *f, const char *name, const char *text) {
    fprintf(f, ", \"%s\": ", name);
    text_write_json(f, text);
}

static void put_this_part(FILE *f, const Run *r) {
    char host[256] = "unknown", directory[PATH_MAX], date[32];
    bool given[OPTION_COUNT];
    FileDigest program;
    time_t now = time(NULL);
    gethostname(host, sizeof host - 1);
    if (!getcwd(directory, sizeof directory)) strcpy(directory, "unknown");
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    fprintf(f, "{\"first_step\": %lld, \"ranks\": %d", (long long)r->saving.first_step, r->setup.comm->ranks);
    put_text_field(f, "started", date);
    put_text_field(f, "host", host);
    if (file_digest("/proc/self/exe", &program, &(Error){0}) == 0) put_text_field(f, "program_xxh3_128", program.hash);
    put_text_field(f, "directory", directory);
    for (int id = 0; id < OPTION_COUNT; id++) given[id] = r->setup.options.given[id] != 0;
    fputs(", \"options\": ", f);
    options_write_json_some(f, &r->setup.options, r->saving.first_step > 1 ? r->saving.changed : given);
    for (int i = 0; i < r->setup.argc; i++) {
        fputs(i ? ", " : ", \"command\": [", f);
        text_write_json(f, r->setup.argv[i]);
    }
    fputs("]}", f);
}

// ---- The file -------------------------------------------------------------------------------------------------------

static void put_run_json(FILE *f, const Run *r, const cJSON *old) {
    char engine[256];
    const cJSON *part;
    engine_describe(r->setup.engine, engine, sizeof engine);
    const ModelConfig *c = &r->setup.model.config;
    fprintf(f, "{\n  \"id\": \"%s\",\n  \"program\": \"%s\",\n  \"engine\": \"%s\",\n", r->saving.archive.id,
            version_text(), engine);
    fprintf(f,
            "  \"model\": {\"layers\": %d, \"heads\": %d, \"channels\": %d, \"vocab\": %d, \"context\": %d, "
            "\"parameters\": %zu, \"flops_per_token\": %.17g, \"flops_formula\": \"" MODEL_FLOPS_FORMULA "\"},\n",
            c->layers, c->heads, c->channels, c->vocab, c->context, r->setup.model.parameters,
            model_flops_per_token(&r->setup.model, r->setup.shape.seq_len));
    double peak = r->setup.peak_flops;
    if (peak > 0) fprintf(f, "  \"peak_flops\": %.17g,\n", peak); // peak of one rank's device
    else fprintf(f, "  \"peak_flops\": null,\n");
    put_data_json(f, "train_data", r->data.train);
    put_data_json(f, "val_data", r->data.val);
    fputs("  \"parts\": [\n", f);
    cJSON_ArrayForEach(part, json_get(old, "parts")) { // earlier parts, without those whose first step is written again
        double first_step = cJSON_GetNumberValue(json_get(part, "first_step"));
        char *text = first_step < (double)r->saving.first_step ? cJSON_PrintUnformatted(part) : NULL;
        if (text) fprintf(f, "    %s,\n", text);
        cJSON_free(text);
    }
    fputs("    ", f);
    put_this_part(f, r);
    fprintf(f, "\n  ],\n  \"tuning\": \"%s\",\n  \"options\": ", r->position.at.tuning); // needs no escapes
    options_write_json(f, &r->setup.options, 2);
    fprintf(f, "\n}\n");
}

// Chooses the id in run.json, else the id of the resumed checkpoint, else (a new run, or an older build's) 128 random
// bits.
static int choose_id(Archive *archive, const char *of_json, const char *of_checkpoint, Error *e) {
    const char *known = of_json && strlen(of_json) < sizeof archive->id ? of_json : of_checkpoint;
    uint64_t random[2];
    if (*archive->id) return 0; // chosen at the start
    snprintf(archive->id, sizeof archive->id, "%s", known);
    if (*archive->id) return 0;
    if (getentropy(random, sizeof random) != 0)
        return FAIL(e, ERR_INTERNAL, NULL, "no random number for the run's id: %s", strerror(errno));
    snprintf(archive->id, sizeof archive->id, "%016" PRIx64 "%016" PRIx64, random[0], random[1]);
    return 0;
}

int write_run_json(Run *r, Error *e) {
    Archive *archive = &r->saving.archive;
    char path[ARCHIVE_PATH], *text = NULL;
    size_t bytes;
    JsonText old = {0};
    Text new = {0};
    TRY(path_join(path, sizeof path, archive->path, "run.json", e));
    if (r->saving.saved[0] && file_read_in(archive->dir, path, RUN_JSON_MAX_BYTES, &text, &bytes, e) && e->unreadable)
        return e->code;
    if (text) json_parse_text(&old, text, bytes, 0, path, NULL, e); // a damaged one counts as none
    int code = choose_id(archive, cJSON_GetStringValue(json_get(old.root, "id")), r->saving.own.newest.run, e);
    if (!code) code = text_begin(&new, e);
    if (!code) put_run_json(new.f, r, old.root);
    if (!code) code = text_end(&new, e);
    if (!code) code = file_replace(archive->dir, path, new.text, new.bytes, e);
    if (!code) code = run_state_describe(r, e);
    text_free(&new);
    json_free(&old);
    return code;
}
