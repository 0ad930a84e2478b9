// shards: the tokens of blocks into the shards of two splits, and the state that lets a run go on after an interruption.
#ifndef GNS_TOKENIZE_SHARDS_H
#define GNS_TOKENIZE_SHARDS_H

#include "blocks.h"

enum { STATE_VERSION = 1 };

// ---------------------------------------------------------------------------------------------------------------------
// The writer

typedef struct {
    ShardWriter *shard; // under construction, or NULL
    int shards;         // finished
    uint64_t tokens, documents;
    int last; // the token written last
} Split;

typedef struct {
    const Options *o;
    int eot; // -1: bytes
    uint64_t fingerprint;
    Split splits[SPLITS];
} Writer;

static void shard_path(const Options *o, int split, int shard, char out[PATH_MAX]) {
    snprintf(out, PATH_MAX, "%s_%s_%06d.bin", o->out, SPLIT_NAMES[split], shard);
}

static int writer_put(Writer *w, int split, const uint16_t *tokens, size_t count, Error *e) {
    Split *s = &w->splits[split];
    char path[PATH_MAX];
    while (count > 0) {
        shard_path(w->o, split, s->shards, path);
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

static int writer_block(Writer *w, const Block *b, Error *e) {
    const uint16_t *tokens = b->tokens;
    for (int i = 0; i < b->piece_count; i++) {
        const Piece *piece = &b->pieces[i];
        if (piece->begins) TRY(writer_begin_document(w, piece->split, e));
        TRY(writer_put(w, piece->split, tokens, piece->tokens, e));
        tokens += piece->tokens;
    }
    return 0;
}

static void writer_close(Writer *w) { // partial files stay
    Error ignored;
    for (int i = 0; i < SPLITS; i++)
        if (w->splits[i].shard) shard_writer_suspend(w->splits[i].shard, &ignored);
    w->splits[TRAIN].shard = w->splits[VAL].shard = NULL;
}

// All shards get their names, and what an earlier run left behind them goes.
static int writer_publish(Writer *w, Error *e) {
    char path[PATH_MAX];
    for (int i = 0; i < SPLITS; i++) {
        Split *s = &w->splits[i];
        ShardWriter *last = s->shard;
        s->shard = NULL;
        if (last) TRY(shard_writer_suspend(last, e));
        if (last) s->shards++;
    }
    for (int i = 0; i < SPLITS; i++) {
        int shard = 0;
        if (!owns_split(w->o, i)) continue;
        for (; shard < w->splits[i].shards; shard++) {
            shard_path(w->o, i, shard, path);
            TRY(shard_publish(path, e));
        }
        do shard_path(w->o, i, shard++, path);
        while (unlink(path) == 0);
    }
    return 0;
}

// Removes partial shards and the state.
static void writer_remove_partial(const Options *o) {
    char path[PATH_MAX], partial[PATH_MAX + 16];
    for (int i = 0; i < SPLITS; i++)
        for (int shard = 0, gone = 0; !gone; shard++) {
            shard_path(o, i, shard, path);
            snprintf(partial, sizeof partial, "%s.partial", path);
            gone = unlink(partial) != 0;
        }
    snprintf(path, sizeof path, "%s.state", o->out);
    unlink(path);
}

// ---------------------------------------------------------------------------------------------------------------------
// The state: PREFIX.state, one line of numbers

#define STATE_FORMAT                                                                                                   \
    "gns tokenize %d %" SCNx64 " %d %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %d %d %d %" SCNu64 " %" SCNu64     \
    " %d %" SCNu64 " %d %" SCNu64 " %" SCNu64 " %d %" SCNu64 "\n"

// What must be the same for a run to be resumed: the vocabulary, the options that matter, and the inputs.
static uint64_t fingerprint(const Options *o, const Tokenizer *t, const Inputs *inputs) {
    uint64_t hash = HASH_START;
    for (int token = 0; token < tokenizer_vocab_size(t); token++) {
        size_t bytes;
        const char *text = tokenizer_decode(t, token, &bytes);
        hash = hash_bytes(hash, text, bytes);
        hash = hash_bytes(hash, &bytes, sizeof bytes);
    }
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

static int state_save(Writer *w, const Place *p, Error *e) {
    char path[PATH_MAX], partial[PATH_MAX + 16];
    uint64_t in_shard[SPLITS];
    for (int i = 0; i < SPLITS; i++) {
        ShardWriter *shard = w->splits[i].shard;
        if (shard) TRY(shard_writer_sync(shard, e));
        in_shard[i] = shard ? shard_writer_count(shard) : 0;
    }
    snprintf(path, sizeof path, "%s.state", w->o->out);
    snprintf(partial, sizeof partial, "%s.partial", path);
    FILE *f = fopen(partial, "w");
    const Split *t = &w->splits[TRAIN], *v = &w->splits[VAL];
    bool ok = f && fprintf(f, STATE_FORMAT, STATE_VERSION, w->fingerprint, p->file, p->offset, p->line, p->document,
                           p->taken, p->inside, p->skip_newline, t->shards, in_shard[TRAIN], t->tokens, t->last,
                           t->documents, v->shards, in_shard[VAL], v->tokens, v->last, v->documents) > 0;
    ok = ok && fflush(f) == 0 && fsync(fileno(f)) == 0;
    if (f && fclose(f) != 0) ok = false;
    if (!ok || rename(partial, path) != 0)
        return FAIL(e, ERR_WRITE, "free some space or choose another place", "%s: cannot write: %s", path,
                    strerror(errno));
    return 0;
}

static bool state_exists(const Options *o) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s.state", o->out);
    return access(path, F_OK) == 0;
}

// Takes up where the same command stopped; *resumed says whether there was anything to take up.
static int state_load(Writer *w, Place *p, bool *resumed, Error *e) {
    char path[PATH_MAX];
    Split *t = &w->splits[TRAIN], *v = &w->splits[VAL];
    uint64_t in_shard[SPLITS], print;
    Place place = {0};
    int version;
    *resumed = false;
    snprintf(path, sizeof path, "%s.state", w->o->out);
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    int fields = fscanf(f, STATE_FORMAT, &version, &print, &place.file, &place.offset, &place.line, &place.document,
                        &place.taken, &place.inside, &place.skip_newline, &t->shards, &in_shard[TRAIN], &t->tokens,
                        &t->last, &t->documents, &v->shards, &in_shard[VAL], &v->tokens, &v->last, &v->documents);
    fclose(f);
    if (fields != 19 || version != STATE_VERSION || print != w->fingerprint) {
        fprintf(stderr, "%s is of another command or other inputs: starting over\n", path);
        memset(w->splits, 0, sizeof w->splits);
        return 0;
    }
    for (int i = 0; i < SPLITS; i++) {
        if (!in_shard[i]) continue;
        char shard[PATH_MAX];
        shard_path(w->o, i, w->splits[i].shards, shard);
        TRY(shard_writer_resume(&w->splits[i].shard, shard, in_shard[i], e));
    }
    *p = place;
    *resumed = true;
    return 0;
}

#endif
