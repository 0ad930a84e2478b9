#define _POSIX_C_SOURCE 200809L
#include "text/shards.h"
#include "base/files.h"
#include "math/permutation.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "shards are little-endian and read as they are");

enum {
    KEEP_OPEN_MAX = 256,                // more shards than this are opened for every read: descriptors are few
    CHECK_AT_OPEN_BYTES = 64 * 1000000, // smaller files have all their tokens checked when opened
    CHECK_TOKENS = 1 << 16,             // tokens checked at a time
    LLAMA3_MAGIC = 20240801             // llm.c's shards of 32-bit tokens
};

#define HINT_TOKENIZE "make shards with data/tokenize (or llm.c's scripts)"

typedef struct {
    char *path;
    int fd;                // -1: opened for every read
    uint64_t tokens;       // n_i
    uint64_t windows;      // floor((n_i - 1) / T)
    uint64_t first_window; // windows in the shards before this one
} Shard;

struct Dataset {
    Shard *shards;
    int count;
    int seq_len, vocab_size;
    uint64_t seed;
    uint64_t windows, tokens;
};

// ---------------------------------------------------------------------------------------------------------------------
// Files

static int file_open(int *fd, const char *path, Error *e) {
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // non-blocking: a pipe must not make us wait for a writer
    if (*fd < 0)
        return FAIL(e, ERR_INPUT, "check the path and its permissions", "%s: cannot open: %s", path, strerror(errno));
    return 0;
}

// pread rather than a memory map: a file that shrinks is an error message, not a SIGBUS.
static int file_read_at(int fd, const char *path, void *out, size_t bytes, uint64_t offset, Error *e) {
    for (size_t have = 0; have < bytes;) {
        ssize_t n = pread(fd, (char *)out + have, bytes - have, (off_t)(offset + have));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return FAIL(e, ERR_INPUT, "check the disk", "%s: cannot read at byte %llu: %s", path,
                        (unsigned long long)(offset + have), strerror(errno));
        if (n == 0)
            return FAIL(e, ERR_INPUT, "do not touch shards in use",
                        "%s: the file got shorter while in use: it ends at byte %llu", path,
                        (unsigned long long)(offset + have));
        have += (size_t)n;
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Opening

// Name, size and header agree, or an error says which of them is wrong. Sets shard->tokens.
static int shard_check_header(Shard *shard, int fd, Error *e) {
    const char *path = shard->path;
    struct stat st;
    if (fstat(fd, &st) != 0) return FAIL(e, ERR_INPUT, "check the disk", "%s: %s", path, strerror(errno));
    if (S_ISDIR(st.st_mode))
        return FAIL(e, ERR_INPUT, "name the shards in it, for example 'DIR/*_train_*.bin'", "%s: is a directory", path);
    if (!S_ISREG(st.st_mode)) return FAIL(e, ERR_INPUT, HINT_TOKENIZE, "%s: not a regular file", path);
    int32_t header[SHARD_HEADER_INTS];
    if (st.st_size < SHARD_HEADER_BYTES)
        return FAIL(e, ERR_INPUT, HINT_TOKENIZE, "%s: it ends at byte %lld: too few for a shard's header of %d", path,
                    (long long)st.st_size, SHARD_HEADER_BYTES);
    TRY(file_read_at(fd, path, header, sizeof header, 0, e));
    if (header[0] == LLAMA3_MAGIC)
        return FAIL(e, ERR_INPUT, HINT_TOKENIZE " and a vocabulary of at most 65536 tokens",
                    "%s: holds 32-bit tokens (Llama 3's vocabulary): magic %d at byte 0", path, header[0]);
    if (header[0] != SHARD_MAGIC)
        return FAIL(e, ERR_INPUT, HINT_TOKENIZE, "%s: not a token shard (magic %d at byte 0, want %d)", path, header[0],
                    SHARD_MAGIC);
    if (header[1] != SHARD_VERSION)
        return FAIL(e, ERR_INPUT, HINT_TOKENIZE, "%s: shard version %d at byte 4, only %d is known", path, header[1],
                    SHARD_VERSION);
    if (header[2] <= 0)
        return FAIL(e, ERR_INPUT, HINT_TOKENIZE, "%s: its header counts %d tokens, at byte 8", path, header[2]);
    long long want = SHARD_HEADER_BYTES + 2LL * header[2];
    if (st.st_size != want)
        return FAIL(
            e, ERR_INPUT, "copy or make the shard again", "%s: %s: it ends at byte %lld, but %d tokens make %lld", path,
            st.st_size < want ? "truncated" : "longer than its header says", (long long)st.st_size, header[2], want);
    shard->tokens = (uint64_t)header[2];
    return 0;
}

static int tokens_largest(const uint16_t *tokens, size_t count) { // a loop the compiler can vectorise
    uint16_t largest = 0;
    for (size_t i = 0; i < count; i++) largest = tokens[i] > largest ? tokens[i] : largest;
    return largest;
}

static int tokens_check(const Dataset *data, const Shard *shard, const uint16_t *tokens, size_t count, uint64_t at,
                        Error *e) {
    if (data->vocab_size > UINT16_MAX) return 0;                    // every uint16 is a token
    if (tokens_largest(tokens, count) < data->vocab_size) return 0; // a bad one is rare
    size_t i = 0;
    while (tokens[i] < data->vocab_size) i++;
    FAIL(e, ERR_INPUT, NULL, "%s: token %d at position %llu, byte %llu, is outside the vocabulary of %d", shard->path,
         tokens[i], (unsigned long long)(at + i), (unsigned long long)(SHARD_HEADER_BYTES + 2 * (at + i)),
         data->vocab_size);
    return error_hint(e,
                      "the shard was made with another tokenizer, or is damaged: see --vocab-size, or tokenize again");
}

static int shard_check_tokens(const Dataset *data, const Shard *shard, int fd, Error *e) {
    uint16_t *tokens = NULL;
    int code = memory_alloc((void **)&tokens, CHECK_TOKENS * sizeof *tokens, "checking a shard", e);
    for (uint64_t at = 0; !code && at < shard->tokens; at += CHECK_TOKENS) {
        size_t count = shard->tokens - at < CHECK_TOKENS ? (size_t)(shard->tokens - at) : CHECK_TOKENS;
        TRY_GOTO(file_read_at(fd, shard->path, tokens, 2 * count, SHARD_HEADER_BYTES + 2 * at, e));
        TRY_GOTO(tokens_check(data, shard, tokens, count, at, e));
    }
done:
    memory_free(tokens);
    return code;
}

static int shard_open(Dataset *data, Shard *shard, bool keep_open, Error *e) {
    int fd, code = 0;
    TRY(file_open(&fd, shard->path, e));
    TRY_GOTO(shard_check_header(shard, fd, e));
    if (2 * shard->tokens < CHECK_AT_OPEN_BYTES) TRY_GOTO(shard_check_tokens(data, shard, fd, e));
    shard->windows = (shard->tokens - 1) / (uint64_t)data->seq_len;
    shard->first_window = data->windows;
    data->windows += shard->windows;
    data->tokens += shard->tokens;
    if (keep_open) shard->fd = fd;
done:
    if (shard->fd != fd) close(fd);
    return code;
}

static int compare_names(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

// The files a pattern names, copied into data->shards. A file whose name holds a '*' or '[' is found as itself.
static int data_find(Dataset *data, const char *pattern, Error *e) {
    struct stat st;
    glob_t found = {0};
    int code = 0;
    bool literal = stat(pattern, &st) == 0;
    int result = literal ? 0 : glob(pattern, GLOB_NOSORT, NULL, &found);
    if (result && result != GLOB_NOMATCH) {
        code = result == GLOB_NOSPACE ? FAIL(e, ERR_MEMORY, NULL, "out of memory listing %s", pattern)
                                      : FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot list", pattern);
        goto done;
    }
    data->count = literal ? 1 : (int)found.gl_pathc;
    if (data->count == 0) {
        code = FAIL(e, ERR_INPUT, "check the path; " HINT_TOKENIZE, "%s: no such file", pattern);
        goto done;
    }
    if (!literal) qsort(found.gl_pathv, found.gl_pathc, sizeof *found.gl_pathv, compare_names); // whatever the locale
    TRY_GOTO(memory_alloc_zero((void **)&data->shards, (size_t)data->count * sizeof *data->shards, "shards", e));
    for (int i = 0; i < data->count; i++) data->shards[i].fd = -1;
    for (int i = 0; i < data->count; i++) {
        const char *path = literal ? pattern : found.gl_pathv[i];
        TRY_GOTO(memory_alloc((void **)&data->shards[i].path, strlen(path) + 1, "shards", e));
        strcpy(data->shards[i].path, path);
    }
done:
    globfree(&found);
    return code;
}

int dataset_open(Dataset **out, const char *pattern, int seq_len, int vocab_size, uint64_t seed, Error *e) {
    assert(seq_len > 0 && vocab_size > 0);
    Dataset *data;
    *out = NULL;
    TRY(memory_alloc_zero((void **)&data, sizeof *data, "data set", e));
    data->seq_len = seq_len;
    data->vocab_size = vocab_size;
    data->seed = seed;
    int code = 0;
    TRY_GOTO(data_find(data, pattern, e));
    for (int i = 0; i < data->count; i++) TRY_GOTO(shard_open(data, &data->shards[i], data->count <= KEEP_OPEN_MAX, e));
    if (data->windows == 0) {
        code = FAIL(e, ERR_INPUT, "use a shorter --seq-len or more text",
                    "%s: %llu tokens in %d file%s are too few for one window of %d + 1", pattern,
                    (unsigned long long)data->tokens, data->count, data->count == 1 ? "" : "s", seq_len);
        goto done;
    }
    *out = data;
    return 0;
done:
    dataset_close(data);
    return code;
}

void dataset_close(Dataset *data) {
    if (!data) return;
    for (int i = 0; data->shards && i < data->count; i++) {
        if (data->shards[i].fd >= 0) close(data->shards[i].fd);
        memory_free(data->shards[i].path);
    }
    memory_free(data->shards);
    memory_free(data);
}

DatasetInfo dataset_describe(const Dataset *data) {
    DatasetInfo info = {data->count, data->tokens, data->windows, 0};
    for (int i = 0; i < data->count; i++) info.skipped += data->shards[i].windows == 0;
    return info;
}

int dataset_largest_token(const Dataset *data, uint64_t tokens, int *largest, Error *e) {
    const Shard *shard = &data->shards[0];
    uint16_t *buffer;
    int fd = shard->fd, code = 0;
    *largest = 0;
    TRY(memory_alloc((void **)&buffer, CHECK_TOKENS * sizeof *buffer, "looking at a shard", e));
    if (fd < 0) TRY_GOTO(file_open(&fd, shard->path, e));
    uint64_t end = tokens < shard->tokens ? tokens : shard->tokens;
    for (uint64_t at = 0; at < end; at += CHECK_TOKENS) {
        size_t count = end - at < CHECK_TOKENS ? (size_t)(end - at) : CHECK_TOKENS;
        TRY_GOTO(file_read_at(fd, shard->path, buffer, 2 * count, SHARD_HEADER_BYTES + 2 * at, e));
        int here = tokens_largest(buffer, count);
        *largest = here > *largest ? here : *largest;
    }
done:
    if (fd >= 0 && fd != shard->fd) close(fd);
    memory_free(buffer);
    return code;
}

uint64_t dataset_windows(const Dataset *data) { return data->windows; }

const char *dataset_shard_path(const Dataset *data, int shard) {
    assert(shard >= 0 && shard < data->count);
    return data->shards[shard].path;
}

// ---------------------------------------------------------------------------------------------------------------------
// Examples

uint64_t dataset_window_at(const Dataset *data, uint64_t example) {
    uint64_t epoch = example / data->windows, k = example % data->windows;
    return permutation_at(data->windows, permutation_key(data->seed, epoch), k);
}

// The last shard whose first window is this one or an earlier one. (A shard without windows shares its first_window
// with the next shard, or has first_window = N: it is never the answer.)
static const Shard *shard_of_window(const Dataset *data, uint64_t window) {
    int low = 0, high = data->count - 1;
    while (low < high) {
        int middle = low + (high - low + 1) / 2;
        if (data->shards[middle].first_window <= window) low = middle;
        else high = middle - 1;
    }
    return &data->shards[low];
}

static int window_read(const Dataset *data, uint64_t window, uint16_t *out /* (T+1) */, Error *e) {
    const Shard *shard = shard_of_window(data, window);
    uint64_t at = (window - shard->first_window) * (uint64_t)data->seq_len;
    size_t count = (size_t)data->seq_len + 1;
    int fd = shard->fd;
    if (fd < 0) TRY(file_open(&fd, shard->path, e));
    int code = file_read_at(fd, shard->path, out, count * sizeof *out, SHARD_HEADER_BYTES + 2 * at, e);
    if (fd != shard->fd) close(fd);
    return code ? code : tokens_check(data, shard, out, count, at, e);
}

int dataset_rows(const Dataset *data, uint64_t first_example, int count, uint16_t *out, Error *e) {
    for (int i = 0; i < count; i++)
        TRY(window_read(data, dataset_window_at(data, first_example + (uint64_t)i),
                        out + (size_t)i * ((size_t)data->seq_len + 1), e));
    return 0;
}

int dataset_rows_sequential(const Dataset *data, uint64_t first_window, int count, uint16_t *out, Error *e) {
    assert(count >= 0 && first_window + (uint64_t)count <= data->windows);
    for (int i = 0; i < count; i++)
        TRY(window_read(data, first_window + (uint64_t)i, out + (size_t)i * ((size_t)data->seq_len + 1), e));
    return 0;
}

int dataset_check(const Dataset *data, Error *e) {
    for (int i = 0; i < data->count; i++) {
        const Shard *shard = &data->shards[i];
        int fd = shard->fd;
        if (fd < 0) TRY(file_open(&fd, shard->path, e));
        int code = shard_check_tokens(data, shard, fd, e);
        if (fd != shard->fd) close(fd);
        if (code) return code;
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing

enum { PARTIAL_MAX = PATH_MAX + 16 };

struct ShardWriter {
    char path[PATH_MAX], partial[PARTIAL_MAX];
    FILE *file;
    uint64_t count;
};

#define HINT_WRITE "free some space or choose another place"

static void partial_path(char out[PARTIAL_MAX], const char *path) { snprintf(out, PARTIAL_MAX, "%s.partial", path); }

static int write_failed(const ShardWriter *w, Error *e) {
    return FAIL(e, ERR_WRITE, HINT_WRITE, "%s: cannot write: %s", w->path, strerror(errno));
}

static int shard_write_header(ShardWriter *w, Error *e) {
    int32_t header[SHARD_HEADER_INTS] = {SHARD_MAGIC, SHARD_VERSION, (int32_t)w->count};
    if (fwrite(header, sizeof header, 1, w->file) != 1) return write_failed(w, e);
    return 0;
}

static int writer_create(ShardWriter **out, const char *path, int flags, Error *e) {
    int fd;
    *out = NULL;
    if (strlen(path) >= PATH_MAX) return FAIL(e, ERR_USAGE, "use a shorter path", "%.80s...: path too long", path);
    TRY(memory_alloc_zero((void **)out, sizeof **out, "shard writer", e));
    strcpy((*out)->path, path);
    partial_path((*out)->partial, path);
    int code = file_open_output((*out)->partial, O_WRONLY | flags, &fd, e);
    if (!code) (*out)->file = fdopen(fd, "wb");
    if (!code && (*out)->file) return 0;
    if (!code) write_failed(*out, e), close(fd);
    memory_free(*out);
    *out = NULL;
    return e->code;
}

int shard_writer_open(ShardWriter **out, const char *path, Error *e) {
    TRY(writer_create(out, path, O_CREAT | O_TRUNC, e));
    int code = shard_write_header(*out, e);
    if (!code) return 0;
    fclose((*out)->file);
    unlink((*out)->partial);
    memory_free(*out);
    *out = NULL;
    return code;
}

int shard_writer_resume(ShardWriter **out, const char *path, uint64_t count, Error *e) {
    ShardWriter *w;
    TRY(writer_create(&w, path, 0, e));
    off_t bytes = (off_t)(SHARD_HEADER_BYTES + 2 * count);
    if (fseeko(w->file, 0, SEEK_END) != 0 || ftello(w->file) < bytes || ftruncate(fileno(w->file), bytes) != 0 ||
        fseeko(w->file, 0, SEEK_END) != 0) {
        fclose(w->file);
        memory_free(w);
        return FAIL(e, ERR_INPUT, "start again from nothing", "%s.partial: shorter than it was, or unreadable", path);
    }
    w->count = count;
    *out = w;
    return 0;
}

int shard_writer_put(ShardWriter *w, const uint16_t *tokens, size_t count, Error *e) {
    if (count > SHARD_MAX_TOKENS - w->count)
        return FAIL(e, ERR_USAGE, "write several shards", "%s: a shard holds at most %d tokens", w->path,
                    SHARD_MAX_TOKENS);
    if (count && fwrite(tokens, sizeof *tokens, count, w->file) != count) return write_failed(w, e);
    w->count += count;
    return 0;
}

uint64_t shard_writer_count(const ShardWriter *w) { return w->count; }

int shard_writer_sync(ShardWriter *w, Error *e) {
    if (fseeko(w->file, 0, SEEK_SET) != 0) return write_failed(w, e);
    TRY(shard_write_header(w, e));
    if (fseeko(w->file, 0, SEEK_END) != 0 || fflush(w->file) != 0 || fsync(fileno(w->file)) != 0)
        return write_failed(w, e);
    return 0;
}

int shard_writer_suspend(ShardWriter *w, Error *e) {
    int code = shard_writer_sync(w, e);
    if (fclose(w->file) != 0 && !code) code = write_failed(w, e);
    memory_free(w);
    return code;
}

int shard_publish(const char *path, Error *e) {
    char partial[PARTIAL_MAX];
    partial_path(partial, path);
    TRY(file_check_output(path, e));
    if (rename(partial, path) != 0)
        return FAIL(e, ERR_WRITE, HINT_WRITE, "%s: cannot rename %s: %s", path, partial, strerror(errno));
    parent_sync(path); // a rename is on disk once the directory that holds the name is
    return 0;
}
