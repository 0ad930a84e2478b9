// run.json: what the run is, everything resolved, and the commands that it was started with.
//
// A run may have several parts: each stop and each start makes one. "parts" has them all in order, but those of which
// nothing is left, since a later one went on from a checkpoint before their first step was saved. "options" of a part are
// those that the first one was given, and then what was changed; those of the whole file are the last part's.
#include "run/run.h"

#include "base/files.h"
#include "base/json.h"
#include "base/text.h"

#include <cjson/cJSON.h>
#include <limits.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { RUN_JSON_MAX_BYTES = 1 << 26 };

static void put_data_json(FILE *f, const char *name, const Dataset *data) {
    if (!data) return;
    DatasetInfo info = dataset_describe(data);
    fprintf(f, "  \"%s\": {\"shards\": %d, \"tokens\": %llu, \"windows\": %llu},\n", name, info.shards,
            (unsigned long long)info.tokens, (unsigned long long)info.windows);
}

// ---------------------------------------------------------------------------------------------------------------------
// Parts

// The parts of the run.json that is there, as far as what they did still counts. A run.json that is no longer whole
// costs the memory of them, not the run.
static cJSON *earlier_parts(const Position *position, const Saving *saving, const char *path) {
    JsonText old;
    if (!saving->saved[0] || json_read(&old, path, RUN_JSON_MAX_BYTES, NULL, &(Error){0})) return NULL;
    cJSON *parts = cJSON_DetachItemFromObjectCaseSensitive(old.root, "parts"), *part = parts ? parts->child : NULL;
    json_free(&old);
    while (part) {
        cJSON *next = part->next;
        double first_step = cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(part, "first_step"));
        if (!(first_step <= (double)position->at.step)) cJSON_Delete(cJSON_DetachItemViaPointer(parts, part));
        part = next;
    }
    return parts;
}

static void put_text_field(FILE *f, const char *name, const char *text) {
    fprintf(f, ", \"%s\": ", name);
    text_write_json(f, text);
}

static void host_name(char *out, size_t bytes) {
    if (gethostname(out, bytes) != 0) snprintf(out, bytes, "unknown");
    out[bytes - 1] = 0;
}

static void working_directory(char *out, size_t bytes) {
    if (!getcwd(out, bytes)) snprintf(out, bytes, "unknown");
}

// The part's own options: of the first one those that were given, of a later one those that are no more as they were.
static void put_part_options(FILE *f, const Run *r) {
    bool given[OPTION_COUNT];
    for (int id = 0; id < OPTION_COUNT; id++) given[id] = r->setup.options.given[id] != 0;
    fputs(", \"options\": ", f);
    options_write_json_some(f, &r->setup.options, r->saving.saved[0] ? r->saving.changed : given);
}

static void put_this_part(FILE *f, const Run *r) {
    char host[256], directory[PATH_MAX], date[32] = "";
    FileDigest program;
    time_t now = time(NULL);
    struct tm utc;
    host_name(host, sizeof host);
    working_directory(directory, sizeof directory);
    if (gmtime_r(&now, &utc)) strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &utc);
    fprintf(f, "{\"first_step\": %lld, \"ranks\": %d", (long long)r->position.at.step + 1, r->setup.comm->ranks);
    put_text_field(f, "started", date);
    put_text_field(f, "host", host);
    if (file_digest("/proc/self/exe", DIGEST_ALL, NULL, &program, &(Error){0}) == 0)
        put_text_field(f, "program_xxh3_128", program.hash);
    put_text_field(f, "directory", directory);
    put_part_options(f, r);
    fputs(", \"command\": [", f);
    for (int i = 0; i < r->setup.argc; i++) {
        if (i) fputs(", ", f);
        text_write_json(f, r->setup.argv[i]);
    }
    fputs("]}", f);
}

static void put_parts(FILE *f, const Run *r, const cJSON *earlier) {
    const cJSON *part;
    fputs("  \"parts\": [\n", f);
    cJSON_ArrayForEach(part, earlier) {
        char *text = cJSON_PrintUnformatted(part);
        if (text) fprintf(f, "    %s,\n", text);
        cJSON_free(text);
    }
    fputs("    ", f);
    put_this_part(f, r);
    fputs("\n  ],\n", f);
}

// ---------------------------------------------------------------------------------------------------------------------
// The file

static void put_run_json(FILE *f, const Run *r, const cJSON *parts) {
    char engine[256];
    engine_describe(r->setup.engine, engine, sizeof engine);
    const ModelConfig *c = &r->setup.model.config;
    fprintf(f, "{\n  \"program\": \"%s\",\n  \"engine\": \"%s\",\n", version_text(), engine);
    fprintf(f,
            "  \"model\": {\"layers\": %d, \"heads\": %d, \"channels\": %d, \"vocab\": %d, \"context\": %d, "
            "\"parameters\": %zu, \"flops_per_token\": %.17g, \"flops_formula\": \"" MODEL_FLOPS_FORMULA "\"},\n",
            c->layers, c->heads, c->channels, c->vocab, c->context, r->setup.model.parameters,
            model_flops_per_token(&r->setup.model, r->setup.shape.seq_len));
    double peak = r->setup.peak_flops;
    if (peak > 0) fprintf(f, "  \"peak_flops\": %.17g,\n", peak); // of one rank's device
    else fprintf(f, "  \"peak_flops\": null,\n");
    put_data_json(f, "train_data", r->data.train);
    put_data_json(f, "val_data", r->data.val);
    put_parts(f, r, parts);
    fprintf(f, "  \"tuning\": \"%s\",\n  \"options\": ", r->position.at.tuning); // plain characters, all of them
    options_write_json(f, &r->setup.options, 2);
    fprintf(f, "\n}\n");
}

int write_run_json(const Run *r, Error *e) {
    char path[ARCHIVE_PATH], *text;
    size_t bytes;
    TRY(path_join(path, sizeof path, r->setup.options.out, "run.json", e));
    FILE *f = open_memstream(&text, &bytes);
    if (!f) return FAIL(e, ERR_MEMORY, "free some memory", "no memory for run.json");
    cJSON *parts = earlier_parts(&r->position, &r->saving, path);
    put_run_json(f, r, parts);
    cJSON_Delete(parts);
    fclose(f);
    int code = file_replace(path, text, bytes, e);
    free(text);
    return code;
}
