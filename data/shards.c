#define _POSIX_C_SOURCE 200809L
#include "shards.h"
#include "base/hash.h"
#include "text/tokenizer_impl.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

enum { STATE_VERSION = 3 }; // 1 had no digest of pipes, and 2 did not count what is left out

void shard_file(const TokenizeOptions *o, int split, int shard, char out[PATH_MAX]) {
    snprintf(out, PATH_MAX, "%s_%s_%06d.bin", o->out, SPLIT_NAMES[split], shard);
}

static int writer_put(Writer *w, int split, const uint16_t *tokens, size_t count, Error *e) {
    Split *s = &w->splits[split];
    char path[PATH_MAX];
    while (count > 0) {
        shard_file(w->o, split, s->shards, path);
        if (!s->shard) TRY(shard_writer_open(&s->shard, path, e));
        size_t n = size_min(count, w->o->shard_tokens - shard_writer_count(s->shard));
        TRY(shard_writer_put(s->shard, tokens, n, e));
        s->tokens += n;
        s->last = tokens[n - 1];
        tokens += n;
        count -= n;
        if (shard_writer_count(s->shard) < w->o->shard_tokens) continue;
        ShardWriter *full = s->shard;
        s->shard = NULL;
        s->shards++;
        TRY(shard_writer_suspend(full, e));
    }
    return 0;
}

static int writer_begin_document(Writer *w, int split, Error *e) {
    Split *s = &w->splits[split];
    const uint16_t eot = (uint16_t)w->eot, newline = '\n';
    s->documents++;
    if (w->eot >= 0) return writer_put(w, split, &eot, 1, e);
    return s->tokens && s->last != '\n' ? writer_put(w, split, &newline, 1, e) : 0;
}

int writer_block(Writer *w, const TextBlock *b, Error *e) {
    const uint16_t *tokens = b->tokens;
    w->left_out += (uint64_t)b->left_out;
    for (int i = 0; i < b->piece_count; i++) {
        const TextPiece *piece = &b->pieces[i];
        if (piece->begins) TRY(writer_begin_document(w, piece->split, e));
        TRY(writer_put(w, piece->split, tokens, piece->tokens, e));
        tokens += piece->tokens;
    }
    return 0;
}

void writer_close(Writer *w) {
    Error ignored;
    for (int i = 0; i < SPLITS; i++)
        if (w->splits[i].shard) shard_writer_suspend(w->splits[i].shard, &ignored);
    w->splits[TRAIN].shard = w->splits[VAL].shard = NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// The state: PREFIX.state, one line of numbers

#define STATE_VERSION_FORMAT "gns tokenize %d %" SCNx64
#define STATE_PLACE_FORMAT   " %d %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %d %d"
#define STATE_PIPED_FORMAT   " %" SCNu64 " %32s"
#define STATE_SPLIT_FORMAT   " %d %" SCNu64 " %" SCNu64 " %d %" SCNu64

uint64_t state_fingerprint(const TokenizeOptions *o, const Tokenizer *t, const Inputs *inputs) {
    uint64_t hash = HASH_START;
    for (int token = 0; token < tokenizer_vocab_size(t); token++) {
        size_t bytes;
        const char *text = tokenizer_decode(t, token, &bytes);
        hash = hash_bytes(hash, text, bytes);
        hash = hash_bytes(hash, &bytes, sizeof bytes);
    }
    for (int i = 0; i < t->added_count; i++)
        hash = hash_bytes(hash, (int[]){t->added[i].token, t->added[i].normalized}, 2 * sizeof(int));
    const char *texts[] = {o->format, o->field, o->separator ? o->separator : "", o->invalid, o->split ? o->split : ""};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) hash = hash_bytes(hash, texts[i], strlen(texts[i]) + 1);
    const uint64_t numbers[] = {o->val_every_file, o->max_bytes, o->shard_tokens};
    hash = hash_bytes(hash, numbers, sizeof numbers);
    hash = hash_bytes(hash, &o->val_fraction, sizeof o->val_fraction);
    for (int i = 0; i < inputs->count; i++) {
        const Input *input = &inputs->all[i];
        hash = hash_bytes(hash, input->path, strlen(input->path) + 1);
        hash = hash_bytes(hash, &input->bytes, sizeof input->bytes);
        hash = hash_bytes(hash, &input->time, sizeof input->time);
    }
    return hash_finish(hash);
}

static void state_path(const TokenizeOptions *o, char out[PATH_MAX]) { snprintf(out, PATH_MAX, "%s.state", o->out); }

int state_save(Writer *w, const Place *p, Error *e) {
    char path[PATH_MAX], line[1024];
    uint64_t in_shard[SPLITS];
    for (int i = 0; i < SPLITS; i++) {
        ShardWriter *shard = w->splits[i].shard;
        if (shard) TRY(shard_writer_sync(shard, e));
        in_shard[i] = shard ? shard_writer_count(shard) : 0;
    }
    const Split *t = &w->splits[TRAIN], *v = &w->splits[VAL];
    int bytes =
        snprintf(line, sizeof line,
                 STATE_VERSION_FORMAT " %d" STATE_PLACE_FORMAT STATE_PIPED_FORMAT STATE_SPLIT_FORMAT STATE_SPLIT_FORMAT
                                      " %" PRIu64 "\n",
                 STATE_VERSION, w->fingerprint, w->publishing, p->file, p->offset, p->line, p->document, p->taken,
                 p->inside, p->skip_newline, p->piped.bytes, p->piped.hash, t->shards, in_shard[TRAIN], t->tokens,
                 t->last, t->documents, v->shards, in_shard[VAL], v->tokens, v->last, v->documents, w->left_out);
    state_path(w->o, path);
    TRY(file_replace(path, line, (size_t)bytes, e));
    parent_sync(path);
    return 0;
}

bool state_exists(const TokenizeOptions *o) {
    char path[PATH_MAX];
    state_path(o, path);
    return file_exists(path);
}

void state_remove(const TokenizeOptions *o) {
    char path[PATH_MAX], partial[PATH_MAX + 16];
    state_path(o, path);
    snprintf(partial, sizeof partial, "%s.partial", path);
    unlink(partial);
    unlink(path);
}

static bool has_pipe(const Inputs *inputs) {
    for (int i = 0; i < inputs->count; i++)
        if (inputs->all[i].pipe) return true;
    return false;
}

// What comes behind the version and the fingerprint. Version 1 had no `publishing`, and of pipes it had no digest.
static bool state_read_numbers(FILE *f, int version, Place *p, Split splits[SPLITS], int *publishing,
                               uint64_t *left_out) {
    *publishing = 0;
    *left_out = 0;
    p->piped = digest_of("", 0);
    bool ok = version == 1 || fscanf(f, " %d", publishing) == 1;
    ok = ok && fscanf(f, STATE_PLACE_FORMAT, &p->file, &p->offset, &p->line, &p->document, &p->taken, &p->inside,
                      &p->skip_newline) == 7;
    ok = ok && (version == 1 || fscanf(f, STATE_PIPED_FORMAT, &p->piped.bytes, p->piped.hash) == 2);
    for (int i = 0; i < SPLITS; i++) {
        Split *s = &splits[i];
        ok = ok && fscanf(f, STATE_SPLIT_FORMAT, &s->shards, &s->in_shard, &s->tokens, &s->last, &s->documents) == 5;
    }
    return ok && (version < 3 || fscanf(f, " %" SCNu64, left_out) == 1);
}

bool state_read(Writer *w, const Inputs *inputs, Place *place, const char **unfit) {
    char path[PATH_MAX];
    Place p = {0};
    Split splits[SPLITS] = {0};
    uint64_t print, left_out;
    int version, publishing;
    *unfit = NULL;
    state_path(w->o, path);
    FILE *f = fopen(path, "r");
    if (!f) return false;
    if (fscanf(f, STATE_VERSION_FORMAT, &version, &print) != 2) *unfit = "is damaged";
    else if (version < 1 || version > STATE_VERSION || (version == 1 && has_pipe(inputs)))
        *unfit = "was written by another version";
    else if (print != w->fingerprint) *unfit = "is of another command or other inputs";
    else if (!state_read_numbers(f, version, &p, splits, &publishing, &left_out)) *unfit = "is damaged";
    fclose(f);
    if (*unfit) return false;
    *place = p;
    memcpy(w->splits, splits, sizeof splits);
    w->publishing = publishing;
    w->left_out = left_out;
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Going on and the end

#define HINT_THE_REST "look after the disk and run the same command again: it does the rest"

// Removes a split's shards from this number on, or its partial ones. The last goes first: what is left should this break
// off has no gap, and is found again.
static int shards_remove(const TokenizeOptions *o, int split, int from, const char *suffix, Error *e) {
    char path[PATH_MAX], file[PATH_MAX + 16];
    int end = from;
    for (bool there = true; there; end += there) {
        shard_file(o, split, end, path);
        snprintf(file, sizeof file, "%s%s", path, suffix);
        there = file_exists(file);
    }
    while (end-- > from) {
        shard_file(o, split, end, path);
        snprintf(file, sizeof file, "%s%s", path, suffix);
        if (unlink(file) != 0)
            return FAIL(e, ERR_WRITE, HINT_THE_REST, "%s: cannot be removed: %s", file, strerror(errno));
    }
    return 0;
}

void writer_remove_partial(const TokenizeOptions *o) {
    Error ignored;
    for (int i = 0; i < SPLITS; i++) shards_remove(o, i, 0, ".partial", &ignored);
}

int writer_resume(Writer *w, Error *e) {
    char path[PATH_MAX];
    for (int i = 0; i < SPLITS; i++) {
        Split *s = &w->splits[i];
        shard_file(w->o, i, s->shards, path);
        if (s->in_shard) TRY(shard_writer_resume(&s->shard, path, s->in_shard, e));
    }
    return 0;
}

// A shard gets its name, which it may have from the run before.
static int writer_publish_shard(const char *path, bool again, Error *e) {
    char partial[PATH_MAX + 16];
    snprintf(partial, sizeof partial, "%s.partial", path);
    if (again && !file_exists(partial)) {
        if (file_exists(path)) return 0;
        return FAIL(e, ERR_INPUT, "say --force to start over", "%s: is gone, and so is what it was to be made of",
                    path);
    }
    int code = shard_publish(path, e);
    return code ? error_hint(e, HINT_THE_REST) : 0;
}

int writer_publish(Writer *w, const Place *end, Error *e) {
    char path[PATH_MAX];
    bool again = w->publishing;
    for (int i = 0; i < SPLITS; i++) {
        Split *s = &w->splits[i];
        ShardWriter *last = s->shard;
        s->shard = NULL;
        if (last) TRY(shard_writer_suspend(last, e));
        if (last) s->shards++;
    }
    w->publishing = true;
    if (!again) TRY(state_save(w, end, e));
    for (int i = 0; i < SPLITS; i++) {
        if (!owns_split(w->o, i)) continue;
        for (int shard = 0; shard < w->splits[i].shards; shard++) {
            shard_file(w->o, i, shard, path);
            TRY(writer_publish_shard(path, again, e));
        }
        TRY(shards_remove(w->o, i, w->splits[i].shards, "", e));
    }
    return 0;
}
