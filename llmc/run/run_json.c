// run.json: the run's set-up with all options resolved, and its parts.
//
// Each start of a run begins a part. "parts" has them in order, without those whose steps a later part wrote again. The
// first part's "options" are those that were given; a later part's are those that changed. The "options" of the file are
// all options of the last part.
#include "run/run.h"

#include "base/files.h"
#include "base/json.h"
#include "base/text.h"

#include <cjson/cJSON.h>
#include <limits.h>
#include <time.h>
#include <unistd.h>

enum { RUN_JSON_MAX_BYTES = 1 << 26 };

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

// The parts in the existing run.json whose first step is kept. A damaged run.json has none; ERR_INPUT where it cannot be
// read.
static int put_earlier_parts(FILE *f, const Run *r, const char *path, Error *e) {
    JsonText old;
    const cJSON *part;
    if (!r->saving.saved[0]) return 0;
    if (json_read(&old, path, RUN_JSON_MAX_BYTES, NULL, e)) return e->unreadable ? e->code : 0;
    cJSON_ArrayForEach(part, json_get(old.root, "parts")) {
        double first_step = cJSON_GetNumberValue(json_get(part, "first_step"));
        char *text = first_step <= (double)r->position.at.step ? cJSON_PrintUnformatted(part) : NULL;
        if (text) fprintf(f, "    %s,\n", text);
        cJSON_free(text);
    }
    json_free(&old);
    return 0;
}

static void put_text_field(FILE *f, const char *name, const char *text) {
    fprintf(f, ", \"%s\": ", name);
    text_write_json(f, text);
}

static void put_this_part(FILE *f, const Run *r) {
    char host[256], directory[PATH_MAX], date[32] = "";
    bool given[OPTION_COUNT];
    FileDigest program;
    time_t now = time(NULL);
    struct tm utc;
    if (gethostname(host, sizeof host - 1) != 0) strcpy(host, "unknown");
    host[sizeof host - 1] = 0;
    if (!getcwd(directory, sizeof directory)) strcpy(directory, "unknown");
    if (gmtime_r(&now, &utc)) strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &utc);
    fprintf(f, "{\"first_step\": %lld, \"ranks\": %d", (long long)r->saving.first_step, r->setup.comm->ranks);
    put_text_field(f, "started", date);
    put_text_field(f, "host", host);
    if (file_digest("/proc/self/exe", DIGEST_ALL, NULL, &program, &(Error){0}) == 0)
        put_text_field(f, "program_xxh3_128", program.hash);
    put_text_field(f, "directory", directory);
    for (int id = 0; id < OPTION_COUNT; id++) given[id] = r->setup.options.given[id] != 0;
    fputs(", \"options\": ", f);
    options_write_json_some(f, &r->setup.options, r->saving.saved[0] ? r->saving.changed : given);
    for (int i = 0; i < r->setup.argc; i++) {
        fputs(i ? ", " : ", \"command\": [", f);
        text_write_json(f, r->setup.argv[i]);
    }
    fputs("]}", f);
}

// ---- The file -------------------------------------------------------------------------------------------------------

static int put_run_json(FILE *f, const Run *r, const char *path, Error *e) {
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
    fputs("  \"parts\": [\n", f);
    TRY(put_earlier_parts(f, r, path, e));
    fputs("    ", f);
    put_this_part(f, r);
    fprintf(f, "\n  ],\n  \"tuning\": \"%s\",\n  \"options\": ", r->position.at.tuning); // needs no escapes
    options_write_json(f, &r->setup.options, 2);
    fprintf(f, "\n}\n");
    return 0;
}

int write_run_json(const Run *r, Error *e) {
    char path[ARCHIVE_PATH];
    Text text;
    TRY(path_join(path, sizeof path, r->setup.options.out, "run.json", e));
    TRY(text_begin(&text, e));
    int code = put_run_json(text.f, r, path, e);
    if (!code) code = text_end(&text, e);
    if (!code) code = file_replace(path, text.text, text.bytes, e);
    text_free(&text);
    return code;
}
