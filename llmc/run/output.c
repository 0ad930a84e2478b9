// The run directory: what an earlier run left there, and what this run writes.
#include "run/run.h"

#include "base/files.h"
#include "base/hash.h"
#include "base/text.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

// ---- run.json -------------------------------------------------------------------------------------------------------
// Each start or rollback begins a part. "parts" lists them in order, except those whose steps were all written again.
// The first part lists the given options; later parts list the changed options. The file's own "options" are all
// resolved options of the last part. Each manifest repeats the "id", and --keep removes only checkpoints with it.

static void put_data_json(FILE *f, const char *name, const Dataset *data) {
    if (!data) return;
    DatasetInfo info = data->info;
    fprintf(f, "  \"%s\": {\"shards\": %d, \"tokens\": %llu, \"windows\": %llu", name, info.shards,
            (unsigned long long)info.tokens, (unsigned long long)info.windows);
    for (int s = 0; info.weights > 0 && s < info.sources; s++) {
        DatasetSource source = data->source[s];
        fprintf(f, "%s{\"files\": ", s ? ", " : ", \"sources\": [");
        text_write_json(f, source.files);
        fprintf(f, ", \"share\": %.17g, \"shards\": %d, \"tokens\": %llu, \"windows\": %llu}", source.share,
                source.shards, (unsigned long long)source.tokens, (unsigned long long)source.windows);
    }
    fputs(info.weights > 0 ? "]},\n" : "},\n", f);
}

static void put_text_field(FILE *f, const char *name, const char *text) {
    fprintf(f, ", \"%s\": ", name);
    text_write_json(f, text);
}

static void put_run_json(FILE *f, const Run *r, const cJSON *old) {
    char engine[256], host[256] = "unknown", directory[PATH_MAX], date[32];
    const cJSON *part;
    const time_t now = time(NULL);
    FileDigest program;
    engine_describe(r->engine, engine, sizeof engine);
    const ModelConfig *c = &r->model.config;
    fprintf(f, "{\n  \"id\": \"%s\",\n  \"program\": \"%s\",\n  \"engine\": \"%s\",\n", r->archive.id, version_text(),
            engine);
    fprintf(f,
            "  \"model\": {\"layers\": %d, \"heads\": %d, \"channels\": %d, \"vocab\": %d, \"context\": %d, "
            "\"parameters\": %zu, \"flops_per_token\": %.17g, \"flops_formula\": \"" MODEL_FLOPS_FORMULA "\"},\n",
            c->layers, c->heads, c->channels, c->vocab, c->context, r->model.parameters,
            model_flops_per_token(&r->model, r->shape.seq_len));
    if (r->peak_flops > 0) fprintf(f, "  \"peak_flops\": %.17g,\n", r->peak_flops); // peak of one rank's device
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
    gethostname(host, sizeof host - 1);
    if (!getcwd(directory, sizeof directory)) strcpy(directory, "unknown");
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    fprintf(f, "    {\"first_step\": %lld, \"ranks\": %d, \"process\": %ld", (long long)r->saving.first_step,
            r->comm->ranks, (long)getpid());
    put_text_field(f, "started", date);
    put_text_field(f, "host", host);
    if (file_digest("/proc/self/exe", &program, &(Error){0}) == 0) put_text_field(f, "program_xxh3_128", program.hash);
    put_text_field(f, "directory", directory);
    fputs(", \"options\": ", f);
    options_write_json(f, &r->options, r->saving.first_step > 1 ? r->saving.changed : r->options.given);
    for (int i = 0; i < r->argc; i++) {
        fputs(i ? ", " : ", \"command\": [", f);
        text_write_json(f, r->argv[i]);
    }
    fprintf(f, "]}\n  ],\n  \"tuning\": \"%s\",\n  \"options\": ", r->at.tuning); // needs no escapes
    options_write_json(f, &r->options, NULL);
    fprintf(f, "\n}\n");
}

int write_run_json(Run *r, Error *e) {
    char path[PATH_MAX], aside[PATH_MAX + 8];
    uint64_t random[2];
    cJSON *old = NULL;
    Text new;
    TRY(path_join(path, sizeof path, r->archive.path, "run.json", e));
    const bool exists = file_exists_in(r->archive.dir, path);
    if (exists && json_read(&old, r->archive.dir, path, 1 << 26, NULL, e) && e->unreadable) return e->code;
    if (exists && !json_get(old, "parts")) {
        snprintf(aside, sizeof aside, "%s.damaged", path);
        TRY(path_rename(r->archive.dir, path, aside, e));
        fprintf(stderr, "warning: %s: damaged, or not a run's: now %s. A new one lacks earlier parts\n", path, aside);
    }
    if (!json_get(old, "parts") || !r->saving.saved[0]) cJSON_Delete(old), old = NULL; // not this run's
    // Choose the id once: from run.json, else from the resumed checkpoint, else 128 random bits.
    const char *known = cJSON_GetStringValue(json_get(old, "id"));
    if (!known || strlen(known) >= sizeof r->archive.id) known = r->saving.own.run;
    if (!*r->archive.id) strcpy(r->archive.id, known);
    if (!*r->archive.id && getentropy(random, sizeof random) == 0) // always, on Linux
        snprintf(r->archive.id, sizeof r->archive.id, "%016" PRIx64 "%016" PRIx64, random[0], random[1]);
    int code = text_begin(&new, e);
    if (!code) put_run_json(new.f, r, old);
    if (!code) code = text_end(&new, e);
    if (!code) code = file_replace(r->archive.dir, path, new.text, new.bytes, e);
    text_free(&new);
    cJSON_Delete(old);
    return code;
}

// ---- The directory --------------------------------------------------------------------------------------------------

// True if `path` leads to the directory `place`, a path without links, or below it.
static bool lies_in(const char *path, const char *place) {
    char real[PATH_MAX];
    const size_t length = strlen(place);
    return realpath(path, real) && strncmp(real, place, length) == 0 && (real[length] == '/' || !real[length]);
}

// Renames an earlier run's directory, where --out leads, and creates a new one. Fails if this run needs what is in it.
static int move_old_run(const Run *r, Error *e) {
    const Dataset *data[] = {r->data.train, r->data.val};
    const char *out = r->options.out;
    char place[PATH_MAX], aside[PATH_MAX + 16];
    if (!realpath(out, place)) return FAIL(e, ERR_WRITE, "choose another --out", "%s: %s", out, strerror(errno));
    for (int d = 0; d < 2; d++)
        for (int s = -1; data[d] && s < data[d]->info.shards; s++) {
            const char *path = s < 0 ? "." : data[d]->shards[s].path;
            snprintf(aside, sizeof aside, "%.*s.", (int)(path_name(path) - path), path); // the directory of `path`
            if (lies_in(path, place) || lies_in(aside, place))
                return FAIL(e, ERR_USAGE, "choose another --out",
                            "%s holds an earlier run, which is not moved aside: %s is in it", out,
                            s < 0 ? "the working directory" : path);
        }
    for (int i = 1; i == 1 || file_exists(aside); i++) snprintf(aside, sizeof aside, "%s.%d", place, i);
    if (rename(place, aside) != 0)
        return FAIL(e, ERR_WRITE, "choose another --out", "%s holds an earlier run and cannot be moved aside: %s", out,
                    strerror(errno));
    fprintf(stderr, "%s held an earlier run: moved to %s\n", out, aside);
    return directory_create(place, e);
}

static bool saves_before_the_end(const Run *r) {
    const Options *o = &r->options;
    if (o->run.horizon_tokens == 0) return false; // --dry-run without a run's length
    int64_t steps = (o->run.horizon_tokens - 1) / (r->position.ramp.config.batch_min * o->seq_len);
    return o->on_spike || (o->checkpoint_every > 0 && steps >= o->checkpoint_every) ||
           (best_every(o) > 0 && steps >= best_every(o));
}

// Fails on rank 0 unless the disk has room for the next saves. A new run needs room for two checkpoints, or for one if
// it saves only at its end. A resumed run with one checkpoint, or with --keep 0, needs room for one more. With two or
// more it needs none, as a save may first remove an old one. A rollback needs no more room than the run before it.
int setup_room(const Run *r, Error *e) {
    const uint64_t one = saver_checkpoint_bytes(&r->model, r->tokenizer);
    uint64_t left;
    int present = 0; // number of this run's checkpoints; a new run has 0, as it moves an earlier run aside
    if (!is_rank0(r) || r->back.why.code) return 0;
    if (r->metrics) TRY(archive_tidy(&r->archive, false, stderr, e)); // removes a killed save's files; the lock is held
    if (r->saving.saved[0]) TRY(archive_count(&r->archive, &present, e));
    const int needed = present ? present == 1 || r->options.keep == 0 : saves_before_the_end(r) ? 2 : 1;
    TRY(disk_free(IN_PATH, r->options.out, &left, e));
    if (left >= (uint64_t)needed * one) return 0;
    return FAIL(e, ERR_WRITE, "free some space, or choose another --out",
                "--out %s: a save needs room for %d checkpoint%s of %llu bytes, and the disk has %llu bytes left",
                r->options.out, needed, needed > 1 ? "s, the old one and the new," : "", (unsigned long long)one,
                (unsigned long long)left);
}

// Locks the run directory, moves aside or refuses what is not this run's, cuts logs and checkpoints back to its step.
static int setup_directory(Run *r, Error *e) {
    static const char *const names[3] = {"samples.jsonl", "outliers.jsonl", "metrics.rolled_back.jsonl"};
    const char *out = r->options.out;
    char path[PATH_MAX];
    int checkpoints;
    TRY(directory_create(out, e));
    if (!archive_is_open(&r->archive)) TRY(archive_open(&r->archive, out, e));
    if (!r->metrics) TRY(metrics_open(&r->metrics, r->archive.dir, out, &(bool){0}, e));
    TRY(archive_count(&r->archive, &checkpoints, e));
    // Move an earlier run aside. A run that stopped before its first step left neither checkpoints nor lines.
    if (!r->saving.saved[0] && (checkpoints > 0 || metrics_bytes(r->metrics) > 0)) {
        metrics_close(r->metrics, e);
        r->metrics = NULL;
        archive_close(&r->archive);
        TRY(move_old_run(r, e));
        return setup_directory(r, e);
    }
    for (int i = 0; !r->saving.saved[0] && i < 3; i++) {
        TRY(path_join(path, sizeof path, out, names[i], e));
        TRY(file_check_free(r->archive.dir, path, e));
    }
    const bool back = r->back.why.code;
    TRY(archive_tidy(&r->archive, back && r->options.keep > 0, stderr, e));
    // Write run.json before logs and checkpoints change: this sets archive->id, and fails if the old one is unreadable.
    TRY(write_run_json(r, e));
    TRY(archive_set_aside_after(&r->archive, r->at.step, back ? "rolled_back" : "damaged", stderr, e));
    return metrics_begin(r->metrics, r->at.step, r->at.metrics_bytes, back, e);
}

bool saves_in_background(const Run *r) {
    return r->options.tensor > 1 || saves_before_the_end(r); // --tensor: all saves need a copy
}

int setup_output(Run *r, Error *e) {
    char path[PATH_MAX];
    FileDigest seen = {0};
    r->saving.first_step = r->at.step + 1;
    TRY(comm_agree(r->comm, is_rank0(r) ? setup_directory(r, e) : 0, e));
    // If all ranks write, each must see the run.json that rank 0 has just written: all write to one directory.
    if (!parallel_stores_alone(&r->parallel)) {
        if (!archive_is_open(&r->archive)) archive_open(&r->archive, r->options.out, &(Error){0});
        TRY(path_join(path, sizeof path, r->options.out, "run.json", e));
        file_digest(path, &seen, &(Error){0});
        TRY(comm_same(
            r->comm, hash_bytes(HASH_START, seen.hash, sizeof seen.hash), 1, ERR_USAGE, "another directory (--out)",
            "give a directory that all machines share, or --zero 0, where rank 0 writes alone (not with --tensor)", e));
    }
    TRY(saver_create(&r->saving.saver, r, e));
    if (!is_rank0(r)) return 0;
    progress_run(&r->progress, r->at.step, r->at.tokens, r->options.run.horizon_tokens);
    return 0;
}
