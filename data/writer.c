#define _GNU_SOURCE // FNM_EXTMATCH
#include "writer.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define PARTIAL ".partial"

typedef struct {
    char text[PATH_MAX];
} Path;

// Returns a shard's path, as PREFIX_train_000000.bin, with a suffix ("" or PARTIAL).
static Path shard_path(const Writer *w, int split, int shard, const char *suffix) {
    Path path;
    snprintf(path.text, sizeof path.text, "%s_%s_%06d.bin%s", w->o->out, SPLIT_NAMES[split], shard, suffix);
    return path;
}

static int remove_shard(const Writer *w, int split, int shard, const char *suffix, Error *e) {
    const Path path = shard_path(w, split, shard, suffix);
    if (unlink(path.text) == 0 || errno == ENOENT) return 0;
    return FAIL(e, ERR_WRITE, "check the disk", "%s: cannot be removed: %s", path.text, strerror(errno));
}

// True if this run writes the split.
static bool owns_split(const Writer *w, int split) { return w->o->split == SPLITS || w->o->split == split; }

static int key_split(const Writer *w) { return w->o->split == VAL ? VAL : TRAIN; }

// Removes shards that end in `suffix`, in the splits that this run writes: highest number first, KEY (writer.h) last.
// An interruption leaves no gap in the numbers, so the next call finds the remaining shards.
static int remove_shards(const Writer *w, const char *suffix, Error *e) {
    for (int split = SPLITS; split-- > 0;) {
        int end = owns_split(w, split);
        while (end && file_exists(shard_path(w, split, end, suffix).text)) end++;
        while (end-- > 0) TRY(remove_shard(w, split, end, suffix, e));
    }
    return 0;
}

// ---- Acquiring the prefix -------------------------------------------------------------------------------------------

static int acquire_lock(Writer *w, Error *e) {
    char path[PATH_MAX];
    struct stat held, named;
    snprintf(path, sizeof path, "%s.lock", w->o->out);
    TRY(file_check_free(IN_PATH, path, e)); // writer_close removes it
    TRY(file_open_output(IN_PATH, path, O_WRONLY | O_CREAT, &w->lock, e));
    bool locked = flock(w->lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
    // If another run has unlinked the file since, the lock guards nothing. On NFS st_nlink stays 1: compare inodes.
    if (locked && fstat(w->lock, &held) == 0 && stat(path, &named) == 0 && held.st_ino == named.st_ino) return 0;
    close(w->lock);
    w->lock = -1;
    return FAIL(e, ERR_USAGE, "wait for it to end, or choose another --out",
                "%s: another data/tokenize is writing there", w->o->out);
}

// Refuses an input that is a shard of this prefix, perhaps an unfinished one: PREFIX_train_000000.bin.partial.
static int check_inputs(const Writer *w, const char *directory, const Inputs *inputs, Error *e) {
    char real[PATH_MAX], prefix[PATH_MAX + NAME_MAX + 2];
    if (!realpath(directory, real)) return 0;
    size_t length = (size_t)snprintf(prefix, sizeof prefix, "%s/%s", real, path_name(w->o->out));
    for (int i = 0; i < inputs->count; i++) {
        const char *path = inputs->all[i].path;
        if (realpath(strcmp(path, "-") ? path : "/proc/self/fd/0", real) && strncmp(real, prefix, length) == 0 &&
            fnmatch("_@(train|val)_+([0-9]).bin*", real + length, FNM_EXTMATCH) == 0)
            return FAIL(e, ERR_USAGE, "choose another --out", "%s is an input, and --out %s would replace it", real,
                        w->o->out);
    }
    return 0;
}

int writer_open(Writer *w, const TokenizeOptions *o, const Tokenizer *t, const Inputs *inputs, Error *e) {
    char directory[PATH_MAX];
    *w = (Writer){.o = o, .lock = -1, .eot = t->eot, .newline = t->byte_token['\n']};
    path_parent(o->out, directory, sizeof directory);
    TRY(directory_create(directory, e));
    TRY(acquire_lock(w, e));
    TRY(check_inputs(w, directory, inputs, e));
    const Path key = shard_path(w, key_split(w), 0, "");
    bool interrupted = !file_exists(key.text) && file_exists(shard_path(w, key_split(w), 0, PARTIAL).text);
    for (int split = 0; split < SPLITS; split++) // the first shards may be missing: llm.c numbers from 1
        for (int shard = 0; shard < 1000 && owns_split(w, split); shard++) {
            const Path path = shard_path(w, split, shard, "");
            if (!o->force && !interrupted && file_exists(path.text))
                return FAIL(e, ERR_USAGE, "choose another --out, or --force to replace it", "%s: exists", path.text);
        }
    if (interrupted) TRY(remove_shards(w, "", e));
    w->opened = true;
    return remove_shards(w, PARTIAL, e);
}

// ---- Writing --------------------------------------------------------------------------------------------------------

static int shard_failed(const char *path, Error *e) {
    return FAIL(e, ERR_WRITE, "free some space or choose another place", "%s: cannot write: %s", path, strerror(errno));
}

// Writes the header of a split's unfinished shard, syncs the shard and closes it.
static int finish_shard(Writer *w, int split, Error *e) {
    struct SplitState *s = &w->split[split];
    const int32_t header[SHARD_HEADER_INTS] = {SHARD_MAGIC, SHARD_VERSION, (int32_t)s->in_file};
    if (!s->file) return 0;
    const Path path = shard_path(w, split, s->shards++, PARTIAL);
    bool written = fseeko(s->file, 0, SEEK_SET) == 0 && fwrite(header, sizeof header, 1, s->file) == 1 &&
                   fflush(s->file) == 0 && fsync(fileno(s->file)) == 0;
    written = fclose(s->file) == 0 && written;
    s->file = NULL;
    return written ? 0 : shard_failed(path.text, e);
}

static int writer_put(Writer *w, int split, const uint16_t *tokens, size_t count, Error *e) {
    struct SplitState *s = &w->split[split];
    int fd;
    while (count > 0) {
        const Path path = shard_path(w, split, s->shards, PARTIAL);
        if (!s->file) {
            TRY(file_open_output(IN_PATH, path.text, O_WRONLY | O_TRUNC, &fd, e));
            if (!(s->file = fdopen(fd, "wb"))) return close(fd), shard_failed(path.text, e);
            fseeko(s->file, SHARD_HEADER_BYTES, SEEK_SET);
            s->in_file = 0;
        }
        size_t n = size_min(count, (size_t)(w->o->shard_tokens - s->in_file));
        if (fwrite(tokens, sizeof *tokens, n, s->file) != n) return shard_failed(path.text, e);
        s->in_file += (int64_t)n;
        s->tokens += n;
        s->last = tokens[n - 1];
        tokens += n;
        count -= n;
        if (s->in_file == w->o->shard_tokens) TRY(finish_shard(w, split, e));
    }
    return 0;
}

int writer_block(Writer *w, const TextBlock *b, Error *e) {
    const uint16_t *tokens = b->tokens, begin = (uint16_t)(w->eot >= 0 ? w->eot : w->newline);
    for (int i = 0; i < b->piece_count; i++) {
        const TextPiece *piece = &b->pieces[i];
        struct SplitState *s = &w->split[piece->split];
        s->documents += piece->begins;
        bool separates = w->eot >= 0 || (w->newline >= 0 && s->tokens && s->last != w->newline);
        if (piece->begins && separates) TRY(writer_put(w, piece->split, &begin, 1, e));
        TRY(writer_put(w, piece->split, tokens, piece->tokens, e));
        tokens += piece->tokens;
    }
    return 0;
}

int writer_publish(Writer *w, Error *e) {
    char directory[PATH_MAX];
    for (int i = 0; i < SPLITS; i++) TRY(finish_shard(w, i, e));
    TRY(remove_shard(w, key_split(w), 0, "", e));
    w->opened = false; // a failure from here on counts as an interruption: the next run cleans up
    TRY(remove_shards(w, "", e));
    path_parent(w->o->out, directory, sizeof directory);
    int dir = open(directory, O_RDONLY | O_CLOEXEC | O_DIRECTORY), code = dir < 0 ? shard_failed(directory, e) : 0;
    for (int i = SPLITS; i-- > 0;) // rename KEY last
        for (int k = 1; k <= w->split[i].shards && !code; k++) {
            const int shard = k % w->split[i].shards;
            code = path_rename(dir, shard_path(w, i, shard, PARTIAL).text, shard_path(w, i, shard, "").text, e);
        }
    close(dir);
    return code;
}

void writer_close(Writer *w) {
    char path[PATH_MAX];
    Error ignored;
    for (int i = 0; i < SPLITS; i++)
        if (w->split[i].file) fclose(w->split[i].file);
    if (w->opened) remove_shards(w, PARTIAL, &ignored);
    if (w->lock < 0) return;
    snprintf(path, sizeof path, "%s.lock", w->o->out);
    unlink(path);
    close(w->lock);
}
