#include "shards.h"
#include "base/hash.h"
#include "base/signals.h"
#include "text/tokenizer_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { STATE_VERSION = 4 }; // part of the fingerprint

#define HINT_THE_REST "check the disk and run the same command again: it does the rest"

// PREFIX_train_000000.bin, and ".partial" as the suffix.
static void shard_path(const Writer *w, int split, int shard, const char *suffix, char out[PATH_MAX]) {
    snprintf(out, PATH_MAX, "%s_%s_%06d.bin%s", w->o->out, SPLIT_NAMES[split], shard, suffix);
}

// True if this run writes the split, and so refuses or replaces its shards.
static bool owns_split(const Writer *w, int split) { return w->o->split == SPLITS || w->o->split == split; }

static void lock_path(const Writer *w, char out[PATH_MAX]) { snprintf(out, PATH_MAX, "%s.lock", w->o->out); }

int writer_lock(Writer *w, Error *e) {
    char path[PATH_MAX];
    struct stat held, named;
    lock_path(w, path);
    for (;; close(w->lock)) {
        TRY(file_open_output(IN_PATH, path, O_WRONLY | O_CREAT, &w->lock, e));
        if (flock(w->lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
            return FAIL(e, ERR_USAGE, "wait for it to end, or choose another --out",
                        "%s: another data/tokenize is writing there", w->o->out);
        w->locked = fstat(w->lock, &held) == 0 && stat(path, &named) == 0 && held.st_ino == named.st_ino;
        if (w->locked) return 0; // else its holder has removed it meanwhile
    }
}

int writer_check_inputs(const Writer *w, const Inputs *inputs, Error *e) {
    const char *prefix = path_name(w->o->out);
    char directory[PATH_MAX], path[PATH_MAX];
    struct stat st;
    Names names;
    path_parent(w->o->out, directory, sizeof directory);
    TRY(directory_list(directory, &names, e));
    int code = 0;
    for (int i = 0; i < names.count && !code; i++) {
        const char *name = names.name[i], *rest = name + strlen(prefix);
        if (strncmp(name, prefix, strlen(prefix)) || (strncmp(rest, "_train_", 7) && strncmp(rest, "_val_", 5))) continue;
        if (path_join(path, sizeof path, directory, name, e) || lstat(path, &st) != 0) continue;
        for (int k = 0; k < inputs->count && !code; k++)
            if (inputs->all[k].inode == st.st_ino && inputs->all[k].device == st.st_dev)
                code = FAIL(e, ERR_USAGE, "choose another --out", "%s is an input, and --out %s would replace it", path,
                            w->o->out);
    }
    names_free(&names);
    return code;
}

int writer_check_free(const Writer *w, Error *e) {
    char path[PATH_MAX];
    for (int split = 0; split < SPLITS && !w->o->force; split++)
        for (int shard = 0; shard < 2 && owns_split(w, split); shard++) { // llm.c's training shards count from 1
            shard_path(w, split, shard, "", path);
            if (access(path, F_OK) == 0)
                return FAIL(e, ERR_USAGE, "choose another --out, or --force to replace it", "%s: exists", path);
        }
    return 0;
}

// Closes the unfinished shard of a split, if there is one, and keeps it as PATH.partial.
static int writer_suspend(Writer *w, int split, Error *e) {
    ShardWriter *shard = w->shard[split];
    w->shard[split] = NULL;
    return shard ? shard_writer_suspend(shard, e) : 0;
}

static int writer_put(Writer *w, int split, const uint16_t *tokens, size_t count, Error *e) {
    struct SplitState *s = &w->state.split[split];
    ShardWriter **shard = &w->shard[split];
    char path[PATH_MAX];
    while (count > 0) {
        shard_path(w, split, s->shards, "", path);
        if (!*shard) TRY(shard_writer_open(shard, path, 0, e));
        size_t n = size_min(count, w->o->shard_tokens - shard_writer_count(*shard));
        TRY(shard_writer_put(*shard, tokens, n, e));
        s->tokens += n;
        s->last = tokens[n - 1];
        tokens += n;
        count -= n;
        if (shard_writer_count(*shard) < w->o->shard_tokens) continue;
        s->shards++;
        TRY(writer_suspend(w, split, e));
    }
    return 0;
}

static int writer_begin_document(Writer *w, int split, Error *e) {
    struct SplitState *s = &w->state.split[split];
    const uint16_t eot = (uint16_t)w->eot, newline = '\n';
    s->documents++;
    if (w->eot >= 0) return writer_put(w, split, &eot, 1, e);
    return s->tokens && s->last != '\n' ? writer_put(w, split, &newline, 1, e) : 0;
}

int writer_block(Writer *w, const TextBlock *b, Error *e) {
    const uint16_t *tokens = b->tokens;
    for (int i = 0; i < b->piece_count; i++) {
        const TextPiece *piece = &b->pieces[i];
        if (piece->begins) TRY(writer_begin_document(w, piece->split, e));
        TRY(writer_put(w, piece->split, tokens, piece->tokens, e));
        tokens += piece->tokens;
    }
    w->state.left_out += (uint64_t)b->left_out;
    w->state.place = b->end;
    return 0;
}

void writer_close(Writer *w) {
    for (int i = 0; i < SPLITS; i++) writer_suspend(w, i, &(Error){0});
}

void writer_unlock(Writer *w) {
    char path[PATH_MAX];
    if (w->lock < 0) return;
    lock_path(w, path);
    if (w->locked) unlink(path);
    close(w->lock);
}

// ---- The state ------------------------------------------------------------------------------------------------------

static uint64_t state_fingerprint(const TokenizeOptions *o, const Tokenizer *t, const Inputs *inputs) {
    const uint64_t numbers[] = {STATE_VERSION,           (uint64_t)o->format,     (uint64_t)o->invalid,
                                (uint64_t)o->split,      o->val_every_file,       o->max_bytes,
                                o->shard_tokens,         (uint64_t)t->vocab_size, (uint64_t)t->merge_count,
                                (uint64_t)t->added_count};
    uint64_t hash = hash_bytes(HASH_START, numbers, sizeof numbers);
    hash = hash_bytes(hash, &o->val_fraction, sizeof o->val_fraction);
    hash = hash_bytes(hash, o->field, strlen(o->field) + 1);
    if (o->separator) hash = hash_bytes(hash, o->separator, strlen(o->separator) + 1);
    hash = hash_bytes(hash, t->start, ((size_t)t->vocab_size + 1) * sizeof *t->start);
    hash = hash_bytes(hash, t->text, t->start[t->vocab_size]);
    hash = hash_bytes(hash, t->merges, (size_t)t->merge_count * sizeof *t->merges);
    hash = hash_bytes(hash, t->added, (size_t)t->added_count * sizeof *t->added);
    for (int i = 0; i < inputs->count; i++) {
        const Input *input = &inputs->all[i];
        hash = hash_bytes(hash, input->path, strlen(input->path) + 1);
        hash = hash_bytes(hash, &input->bytes, sizeof input->bytes);
        hash = hash_bytes(hash, &input->time, sizeof input->time);
    }
    return hash_finish(hash);
}

Writer writer_create(const TokenizeOptions *o, const Tokenizer *t, const Inputs *inputs) {
    Writer w = {.o = o, .lock = -1, .eot = tokenizer_eot(t)};
    w.state.fingerprint = state_fingerprint(o, t, inputs);
    return w;
}

static void state_path(const Writer *w, const char *suffix, char out[PATH_MAX]) {
    snprintf(out, PATH_MAX, "%s.state%s", w->o->out, suffix);
}

int state_save(Writer *w, Error *e) {
    char path[PATH_MAX];
    for (int i = 0; i < SPLITS; i++) {
        if (w->shard[i]) TRY(shard_writer_sync(w->shard[i], e));
        w->state.split[i].in_shard = w->shard[i] ? shard_writer_count(w->shard[i]) : 0;
    }
    state_path(w, "", path);
    TRY(file_replace(path, &w->state, sizeof w->state, e));
    w->saved = true;
    parent_sync(path);
    return 0;
}

void state_remove(const Writer *w) {
    char path[PATH_MAX];
    state_path(w, ".partial", path); // of a save that broke off
    unlink(path);
    state_path(w, "", path);
    unlink(path);
}

int state_read(Writer *w, bool *resumed, const char **unfit, Error *e) {
    char path[PATH_MAX], *data;
    size_t bytes;
    State state = {0};
    state_path(w, "", path);
    *unfit = NULL;
    *resumed = false;
    if (file_missing(path)) return 0;
    int code = file_read(path, sizeof state, &data, &bytes, e);
    if (code && e->unreadable) {
        *resumed = w->saved = true; // so that it stays, with its shards
        return code;
    }
    if (!code && bytes == sizeof state) memcpy(&state, data, bytes);
    else *unfit = "is damaged, or of another version";
    memory_free(data);
    if (!*unfit && state.fingerprint != w->state.fingerprint) *unfit = "is of another command or other inputs";
    if (*unfit) return 0;
    w->state = state;
    *resumed = w->saved = true;
    return 0;
}

// ---- Resuming and publishing ----------------------------------------------------------------------------------------

int writer_resume(Writer *w, Error *e) {
    char path[PATH_MAX];
    for (int i = 0; i < SPLITS; i++) {
        const struct SplitState *s = &w->state.split[i];
        shard_path(w, i, s->shards, "", path);
        if (s->in_shard) TRY(shard_writer_open(&w->shard[i], path, s->in_shard, e));
    }
    return 0;
}

// Removes a split's files of this suffix from this number on, the last one first: after an interruption the remaining
// files have no gap, and the next run finds them.
static int shards_remove(const Writer *w, int split, int from, const char *suffix, Error *e) {
    char path[PATH_MAX];
    int end = from;
    do shard_path(w, split, end, suffix, path);
    while (file_exists(path) && ++end);
    while (end-- > from) {
        shard_path(w, split, end, suffix, path);
        if (unlink(path) != 0)
            return FAIL(e, ERR_WRITE, HINT_THE_REST, "%s: cannot be removed: %s", path, strerror(errno));
    }
    return 0;
}

void writer_remove_partial(const Writer *w) {
    Error ignored;
    for (int i = 0; i < SPLITS; i++) shards_remove(w, i, 0, ".partial", &ignored);
}

// Renames a finished shard. After an interruption it may have its name already.
static int writer_publish_shard(const Writer *w, int split, int shard, Error *e) {
    char path[PATH_MAX], partial[PATH_MAX];
    shard_path(w, split, shard, "", path);
    shard_path(w, split, shard, ".partial", partial);
    if (file_exists(partial)) return shard_publish(path, e) ? error_hint(e, HINT_THE_REST) : 0;
    if (file_exists(path)) return 0;
    return FAIL(e, ERR_INPUT, "say --force to start over", "%s: missing, and so is %s.partial", path, path_name(path));
}

int writer_stopped(Error *e) { return FAIL(e, ERR_STOPPED, "run the same command again to resume", "a signal"); }

int writer_publish(Writer *w, Error *e) {
    if (!w->state.publishing) {
        for (int i = 0; i < SPLITS; i++) {
            bool last = w->shard[i];
            TRY(writer_suspend(w, i, e));
            w->state.split[i].shards += last;
        }
        w->state.publishing = true;
        TRY(state_save(w, e));
    }
    for (int i = 0; i < SPLITS; i++) {
        if (!owns_split(w, i)) continue;
        for (int shard = 0; shard < w->state.split[i].shards; shard++) {
            if (signals_pending()) return writer_stopped(e);
            TRY(writer_publish_shard(w, i, shard, e));
        }
        TRY(shards_remove(w, i, w->state.split[i].shards, "", e));
    }
    return 0;
}
