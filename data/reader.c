#define _GNU_SOURCE // memmem, memrchr
#include "reader.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LINE_BYTES_MAX = 1 << 26 }; // the longest line of JSON, or text without a space

static bool reader_signalled(Reader *r) {
    const struct timespec now = {0, 0};
    r->stopped = r->stopped || sigtimedwait(&r->signals, NULL, &now) > 0;
    return r->stopped;
}

// When nothing will be written, a pipe, which may take its time, is read no further.
static bool reader_is_done_with(const Reader *r, const Input *input) {
    return input->left_out || (input->pipe && atomic_load(r->refused));
}

// Waits for a pipe or a terminal, and meanwhile for a signal or for something to be refused.
static bool reader_wait(Reader *r) {
    enum { POLL_MS = 100 };
    struct pollfd p = {r->fd, POLLIN, 0};
    int ready;
    do {
        if (reader_signalled(r) || atomic_load(r->refused)) return false;
        ready = poll(&p, 1, POLL_MS);
    } while (ready == 0);
    return !reader_signalled(r);
}

// Text from a pipe is looked at as it comes: what is no UTF-8 is to be told at once, and not when a block is full.
static bool reader_looks(const TokenizeOptions *o, const Input *input) {
    const char *separator = o->separator ? o->separator : "";
    bool text = utf8_invalid_at(separator, strlen(separator)) == strlen(separator);
    return input->pipe && !input->jsonl && text && !strcmp(o->invalid, "error");
}

static bool reader_finds_invalid(const Reader *r, size_t from, size_t *whole) {
    *whole = utf8_boundary(r->buffer, r->have);
    return utf8_invalid_at(r->buffer + from, *whole - from) < *whole - from;
}

static int reader_reserve(Reader *r, size_t bytes, Error *e) {
    if (bytes <= r->capacity) return 0;
    char *buffer = realloc(r->buffer, bytes);
    if (!buffer) return FAIL(e, ERR_MEMORY, NULL, "out of memory: reading the input");
    r->buffer = buffer;
    r->capacity = bytes;
    return 0;
}

// Reads until the buffer holds `want` bytes, the input ends or --max-bytes is reached.
static int reader_fill(Reader *r, size_t want, Error *e) {
    const Input *input = &r->inputs->all[r->place.file];
    bool looks = reader_looks(r->o, input);
    size_t looked = 0;
    TRY(reader_reserve(r, want, e));
    while (r->have < want && !r->ended && !r->invalid) {
        uint64_t room = want - r->have;
        if (r->o->max_bytes) {
            uint64_t left = r->o->max_bytes - r->place.taken - r->have;
            room = left < room ? left : room;
        }
        if (input->pipe && room && !reader_wait(r)) return 0;
        ssize_t n = room ? read(r->fd, r->buffer + r->have, room) : 0;
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return FAIL(e, ERR_INPUT, "check the disk", "%s: cannot read: %s", input_name(input), strerror(errno));
        r->have += (size_t)n;
        r->ended = n == 0;
        r->invalid = looks && reader_finds_invalid(r, looked, &looked);
    }
    return 0;
}

bool reader_has_tail(const TokenizeOptions *o, const Input *input) {
    return o->val_fraction > 0 && !o->separator && !input->jsonl;
}

// A text file that is one document is split by place: its last part is validation, like nanoGPT's 90/10. The split moves
// up to where a character begins.
static int reader_set_tail(Reader *r, Error *e) {
    const Input *input = &r->inputs->all[r->place.file];
    r->tail = UINT64_MAX;
    if (!reader_has_tail(r->o, input)) return 0;
    uint64_t bytes = input->bytes;
    if (r->o->max_bytes) {
        uint64_t left = r->o->max_bytes - (r->place.taken - r->place.offset);
        bytes = left < bytes ? left : bytes;
    }
    unsigned char next[3] = {0}; // behind at most three bytes a character begins
    r->tail = (uint64_t)((double)bytes * (1 - r->o->val_fraction));
    ssize_t n = pread(r->fd, next, sizeof next, (off_t)r->tail);
    if (n < 0) return FAIL(e, ERR_INPUT, "check the disk", "%s: cannot read: %s", input_name(input), strerror(errno));
    for (int i = 0; i < n && (next[i] & 0xC0) == 0x80; i++) r->tail++;
    return 0;
}

// Opens the file at place, and goes to the place's offset in it; a pipe is where it is.
static int reader_open(Reader *r, Error *e) {
    const Input *input = &r->inputs->all[r->place.file];
    r->fd = strcmp(input->path, "-") ? open(input->path, O_RDONLY | O_CLOEXEC) : STDIN_FILENO;
    if (r->fd < 0)
        return FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot open: %s", input->path, strerror(errno));
    r->ended = false;
    r->have = 0;
    TRY(reader_set_tail(r, e));
    if (!input->pipe && lseek(r->fd, (off_t)r->place.offset, SEEK_SET) < 0)
        return FAIL(e, ERR_INPUT, "check the disk", "%s: cannot read: %s", input_name(input), strerror(errno));
    return 0;
}

static void reader_leave(Reader *r) {
    if (r->fd > STDIN_FILENO) close(r->fd);
    r->fd = -1;
}

// On to the next input, so many bytes later: what --max-bytes cut off counts as taken.
static void reader_go_on(Reader *r, uint64_t bytes) {
    reader_leave(r);
    uint64_t taken = r->place.taken + bytes;
    r->place = (Place){.file = r->place.file + 1, .line = 1, .taken = taken, .piped = r->place.piped};
    r->have = 0;
    r->invalid = false;
    if (r->o->max_bytes && taken >= r->o->max_bytes) r->place.file = r->inputs->count;
}

void reader_pass_over(Reader *r, int file) {
    if (r->place.file != file || r->fd < 0) return;
    uint64_t bytes = r->inputs->all[file].bytes;
    reader_go_on(r, bytes > r->place.offset ? bytes - r->place.offset : 0);
}

// Reads past so many bytes of a pipe, or to its end.
static int reader_skip(Reader *r, uint64_t bytes, Error *e) {
    char skipped[1 << 16];
    while (bytes > 0 && reader_wait(r)) {
        ssize_t n = read(r->fd, skipped, size_min(sizeof skipped, bytes));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return FAIL(e, ERR_INPUT, "check where it comes from", "%s: cannot read: %s",
                        input_name(&r->inputs->all[r->place.file]), strerror(errno));
        if (n == 0) break;
        digester_add(r->piped, skipped, (size_t)n);
        bytes -= (uint64_t)n;
    }
    return 0;
}

// After an interruption: reads every pipe up to where it was then, and finds out whether the same came through it. (Of
// a file, size and time tell: see fingerprint.)
static int reader_rejoin(Reader *r, Error *e) {
    const Place place = r->place;
    const char *name = NULL;
    for (int i = 0; i <= place.file; i++) {
        const Input *input = &r->inputs->all[i];
        if (!input->pipe) continue;
        name = name ? "the pipes" : input_name(input);
        r->place.file = i;
        TRY(reader_open(r, e));
        TRY(reader_skip(r, i < place.file ? UINT64_MAX : place.offset, e));
        if (i < place.file) reader_leave(r);
    }
    r->place = place;
    if (r->stopped) return 0;
    FileDigest came = digester_read(r->piped);
    if (name && !digest_equal(&came, &place.piped))
        return FAIL(e, ERR_INPUT, HINT_SAME_INPUT, "%s: not the input that was interrupted: %s", name,
                    came.bytes < place.piped.bytes ? "it ends too early" : "its text is another");
    r->resumed = false;
    return 0;
}

// Keeps a separator whole: a cut in one, or between it and the newline before it, moves behind it.
static size_t reader_spare_separator(const Reader *r, size_t cut) {
    size_t length = strlen(r->o->separator), from = cut > length - 1 ? cut - (length - 1) : 0;
    const char *found = memmem(r->buffer + from, size_min(r->have, cut + length) - from, r->o->separator, length);
    return found ? (size_t)(found - r->buffer) + length : cut;
}

// How many bytes of the buffer make the next block; 0: it takes more to tell.
static size_t reader_cut(const Reader *r, bool jsonl) {
    if (r->invalid) return r->have;
    bool last = r->ended, limited = r->o->max_bytes && r->place.taken + r->have >= r->o->max_bytes;
    if (jsonl) {
        if (last && !limited) return r->have;
        const char *newline = memrchr(r->buffer, '\n', r->have);
        return newline ? (size_t)(newline - r->buffer) + 1 : 0;
    }
    uint64_t to_tail = r->tail > r->place.offset && r->tail != UINT64_MAX ? r->tail - r->place.offset : UINT64_MAX;
    if (to_tail <= r->have) return to_tail;
    if (last) return limited ? utf8_boundary(r->buffer, r->have) : r->have;
    size_t hold = r->o->separator ? strlen(r->o->separator) : 0;
    if (r->have <= hold) return 0;
    size_t cut = tokenizer_cut(r->tokenizer, r->buffer, r->have - hold);
    return hold && cut ? reader_spare_separator(r, cut) : cut;
}

// The documents in the first `bytes` of the buffer, parted by the separator if there is one.
static int reader_find_pieces(Reader *r, TextBlock *b, Error *e) {
    const char *separator = r->o->separator;
    size_t length = separator ? strlen(separator) : 0;
    for (size_t at = 0;;) {
        Place *p = &r->place;
        if (p->skip_newline && at < b->bytes) {
            if (b->text[at] == '\n') at++;
            p->skip_newline = 0;
        }
        const char *found = separator ? memmem(b->text + at, b->bytes - at, separator, length) : NULL;
        size_t stop = found ? (size_t)(found - b->text) : b->bytes;
        size_t end = found && stop > at && b->text[stop - 1] == '\n' ? stop - 1 : stop;
        int split = r->tail != UINT64_MAX ? p->offset >= r->tail : split_of(r->o, b->input, p->file, p->document);
        TRY(block_add_piece(b, (TextPiece){.at = at, .bytes = end - at, .begins = !p->inside, .split = split}, e));
        if (end > at) p->inside = 1;
        if (!found) return 0;
        at = stop + length;
        p->document++;
        p->inside = 0;
        p->skip_newline = 1;
    }
}

static int reader_take(Reader *r, TextBlock *b, size_t bytes, Error *e) {
    b->input = &r->inputs->all[r->place.file];
    b->jsonl = b->input->jsonl;
    b->start = r->place;
    b->bytes = bytes;
    b->piece_count = b->left_out = 0;
    TRY(block_reserve(b, size_max(bytes, BLOCK_BYTES), e));
    memcpy(b->text, r->buffer, bytes);
    memmove(r->buffer, r->buffer + bytes, r->have - bytes);
    r->have -= bytes;
    r->invalid = false;
    if (!b->jsonl) TRY(reader_find_pieces(r, b, e));
    r->place.offset += bytes;
    r->place.taken += bytes;
    r->place.line += count_lines(b->text, bytes);
    if (b->input->pipe) {
        digester_add(r->piped, b->text, bytes);
        r->place.piped = digester_read(r->piped);
    }
    if (r->tail != UINT64_MAX && b->start.offset < r->tail && r->place.offset >= r->tail) r->place.inside = 0;
    b->end = r->place;
    return 0;
}

// Reads on in a file that is open, from its beginning to its end or to what is not UTF-8. Of jsonl, whose lines are looked
// at one by one, the first bytes only.
static int reader_check(Reader *r, int fd, const Input *input, bool *taken, Error *e) {
    size_t have = 0;
    *taken = true;
    TRY(reader_reserve(r, BLOCK_BYTES, e));
    for (bool first = true; *taken && !reader_signalled(r); first = false) {
        ssize_t n = read(fd, r->buffer + have, BLOCK_BYTES - have);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return FAIL(e, ERR_INPUT, "check the disk", "%s: cannot read: %s", input_name(input), strerror(errno));
        have += (size_t)n;
        Error why;
        if (first && check_kind(input, r->buffer, have, &why)) *taken = false;
        if (input->jsonl) return 0;
        size_t whole = n ? utf8_boundary(r->buffer, have) : have;
        if (utf8_invalid_at(r->buffer, whole) < whole) *taken = false;
        if (n == 0) return 0;
        memmove(r->buffer, r->buffer + whole, have - whole);
        have -= whole;
    }
    return 0;
}

int reader_leave_out(Reader *r, Inputs *inputs, Error *e) {
    int left_out = 0;
    for (int i = 0; i < inputs->count; i++) {
        Input *input = &inputs->all[i];
        bool taken;
        if (input->pipe) continue;
        int fd = open(input->path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            return FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot open: %s", input->path, strerror(errno));
        int code = reader_check(r, fd, input, &taken, e);
        close(fd);
        if (code) return code;
        input->left_out = !taken;
        left_out += !taken;
    }
    if (left_out == inputs->count)
        return FAIL(e, ERR_INPUT, "file FILE tells what they are", "not one of %d files is UTF-8; the first is %s",
                    inputs->count, inputs->all[0].path);
    return 0;
}

int reader_next(Reader *r, TextBlock *b, bool *got, Error *e) {
    *got = false;
    if (r->resumed) TRY(reader_rejoin(r, e));
    while (r->place.file < r->inputs->count && !reader_signalled(r)) {
        const Input *input = &r->inputs->all[r->place.file];
        if (reader_is_done_with(r, input)) {
            reader_go_on(r, r->have);
            continue;
        }
        if (r->fd < 0) TRY(reader_open(r, e));
        size_t bytes = 0;
        for (size_t want = BLOCK_BYTES; bytes == 0; want *= 2) {
            if (want > LINE_BYTES_MAX)
                return fail_at_line(e, input, r->place.line + (r->buffer[0] == '\n'), "break it up",
                                    input->jsonl ? "longer than 64 MiB" : "more than 64 MiB without a space");
            TRY(reader_fill(r, want, e));
            if (r->stopped) return 0;
            if (reader_is_done_with(r, input)) break;
            bytes = reader_cut(r, input->jsonl);
            if (r->ended) break;
        }
        if (bytes) {
            *got = true;
            return reader_take(r, b, bytes, e);
        }
        reader_go_on(r, r->have);
    }
    return 0;
}

int reader_init(Reader *r, const TokenizeOptions *o, const Tokenizer *tokenizer, const Inputs *inputs,
                const atomic_bool *refused, Error *e) {
    *r =
        (Reader){.o = o, .tokenizer = tokenizer, .inputs = inputs, .refused = refused, .fd = -1, .signals = r->signals};
    TRY(digester_create(&r->piped, e));
    r->place = (Place){.line = 1, .piped = digester_read(r->piped)};
    return 0;
}

void reader_free(Reader *r) {
    reader_leave(r);
    digester_destroy(r->piped);
    free(r->buffer);
}
