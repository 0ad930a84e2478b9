#define _GNU_SOURCE // memmem, memrchr
#include "reader.h"
#include "base/pipe.h"
#include "base/signals.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LINE_BYTES_MAX = 1 << 26 }; // the longest line of JSON, or text without a space

static Input *reader_input(const Reader *r) { return &r->inputs->all[r->place.file]; }

bool reader_stopped(Reader *r) { return r->stopped = r->stopped || signals_requested(); }

// True if the rest of the input must not be read.
static bool reader_skips(const Reader *r) {
    const Input *input = reader_input(r);
    return input->left_out || (input->pipe && atomic_load(r->refused));
}

// Returns how many of the next `bytes` bytes --max-bytes allows after `taken` bytes.
static uint64_t reader_limit(const Reader *r, uint64_t taken, uint64_t bytes) {
    return size_min((uint64_t)r->o->max_bytes - taken, bytes);
}

// Reads until the buffer holds `want` bytes, the input ends or --max-bytes is reached.
static int reader_fill(Reader *r, size_t want, Error *e) {
    enum { POLL_MS = 100 };
    Input *input = reader_input(r);
    if (want > r->capacity) {
        char *buffer = realloc(r->buffer, want);
        if (!buffer) return FAIL(e, ERR_MEMORY, NULL, "out of memory: reading the input");
        r->buffer = buffer;
        r->capacity = want;
    }
    while (r->have < want && !r->ended) {
        size_t room = reader_limit(r, r->place.taken + r->have, want - r->have);
        struct pollfd ready = {r->fd, POLLIN, 0};
        Wait wait = {clock_seconds(), r->have > 0 || r->place.offset > 0}; // true: data has arrived, no note is due
        while (input->pipe && room && poll(&ready, 1, POLL_MS) <= 0) {
            if (reader_stopped(r) || atomic_load(r->refused)) return 0;
            wait_note(&wait, r->fd, input_name(input));
        }
        ssize_t got = read(r->fd, r->buffer + r->have, room);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return FAIL(e, ERR_INPUT, "check the disk", "%s: cannot read: %s", input_name(input), strerror(errno));
        r->have += (size_t)got;
        r->ended = got == 0;
        if (input->undecided) TRY(input_decide(input, r->o, r->buffer, r->have, r->ended, e));
    }
    return 0;
}

// Opens the file of `place`, at its beginning.
static int reader_open(Reader *r, Error *e) {
    const Input *input = reader_input(r);
    char next[3]; // a character begins within three bytes
    r->fd = strcmp(input->path, "-") ? open(input->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : STDIN_FILENO;
    if (r->fd < 0)
        return FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot open: %s", input->path, strerror(errno));
    r->ended = false;
    r->have = 0;
    r->tail = UINT64_MAX;
    if (input->pipe || !input_has_tail(r->o, input)) return 0;

    // A text file is one document, so its end becomes validation, as in nanoGPT's 90/10. The tail begins at a whole
    // character.
    r->tail = (uint64_t)((double)reader_limit(r, r->place.taken, input->bytes) * (1 - r->o->val_fraction));
    ssize_t got = pread(r->fd, next, sizeof next, (off_t)r->tail);
    for (ssize_t i = 0; i < got && (next[i] & 0xC0) == 0x80; i++) r->tail++;
    return 0;
}

static void reader_close(Reader *r) {
    if (r->fd > STDIN_FILENO) close(r->fd);
    r->fd = -1;
}

// ---- Blocks ---------------------------------------------------------------------------------------------------------

// Returns the length of the next block; 0: the buffer must grow to decide.
static size_t reader_cut(const Reader *r, bool jsonl) {
    bool limited = r->place.taken + r->have >= (uint64_t)r->o->max_bytes;
    if (jsonl) {
        if (r->ended && !limited) return r->have;
        const char *newline = memrchr(r->buffer, '\n', r->have);
        return newline ? (size_t)(newline - r->buffer) + 1 : 0;
    }
    bool before_tail = r->tail != UINT64_MAX && r->tail > r->place.offset;
    if (before_tail && r->tail - r->place.offset <= r->have) return r->tail - r->place.offset;
    if (r->ended) return limited ? utf8_boundary(r->buffer, r->have) : r->have;
    size_t length = strlen(r->o->separator), hold = length ? length + 1 : 0;
    if (r->have <= hold) return 0;
    size_t cut = tokenizer_cut(r->tokenizer, r->buffer, r->have - hold);
    if (!hold || !cut) return cut;
    // If the cut falls inside \r\n or a separator, or right before a separator, move it past them.
    cut += r->buffer[cut - 1] == '\r' && r->buffer[cut] == '\n';
    size_t from = cut > length - 1 ? cut - (length - 1) : 0;
    const char *found = memmem(r->buffer + from, size_min(r->have, cut + length) - from, r->o->separator, length);
    return found ? (size_t)(found - r->buffer) + length : cut;
}

// Finds the documents of a block of text. Without --separator the block is part of one document.
static int reader_find_pieces(Reader *r, TextBlock *b, Error *e) {
    const char *separator = r->o->separator;
    size_t length = strlen(separator);
    for (size_t at = 0;;) {
        InputPlace *p = &r->place;
        if (p->skip_newline && at < b->bytes) {
            at += at + 1 < b->bytes && b->text[at] == '\r' && b->text[at + 1] == '\n' ? 2 : b->text[at] == '\n';
            p->skip_newline = false;
        }
        const char *found = length ? memmem(b->text + at, b->bytes - at, separator, length) : NULL;
        size_t stop = found ? (size_t)(found - b->text) : b->bytes;
        size_t end = found && stop > at && b->text[stop - 1] == '\n' ? stop - 1 : stop;
        if (end < stop && end > at && b->text[end - 1] == '\r') end--;
        if (found) r->separated = true;
        int split = r->tail != UINT64_MAX ? p->offset >= r->tail : document_split(r->o, b->input, p->file, p->document);
        TRY(block_add_piece(b, (TextPiece){.at = at, .bytes = end - at, .begins = !p->inside, .split = split}, e));
        if (end > at) p->inside = true;
        if (!found) return 0;
        at = stop + length;
        p->document++;
        p->inside = false;
        p->skip_newline = true;
    }
}

static int reader_fill_block(Reader *r, TextBlock *b, size_t bytes, Error *e) {
    b->input = reader_input(r);
    b->start = r->place;
    b->bytes = bytes;
    b->piece_count = b->left_out = b->bad_count = b->notes = 0;
    TRY(block_reserve(b, size_max(bytes, BLOCK_BYTES), e));
    memcpy(b->text, r->buffer, bytes);
    memmove(r->buffer, r->buffer + bytes, r->have - bytes);
    r->have -= bytes;
    if (!b->input->jsonl) TRY(reader_find_pieces(r, b, e));
    r->place.offset += bytes;
    r->place.taken += bytes;
    r->place.line += count_lines(b->text, bytes);
    if (b->start.offset < r->tail && r->place.offset >= r->tail) r->place.inside = false;
    return 0;
}

int reader_next(Reader *r, TextBlock *b, bool *got, Error *e) {
    *got = false;
    while (r->place.file < r->inputs->count && !reader_stopped(r)) {
        const Input *input = reader_input(r);
        size_t bytes = 0;
        if (r->fd < 0 && !reader_skips(r)) TRY(reader_open(r, e));
        for (size_t want = BLOCK_BYTES; bytes == 0 && !reader_skips(r); want *= 2) {
            if (want > LINE_BYTES_MAX)
                return fail_at_line(e, input, r->place.line + (r->buffer[0] == '\n'), "break it up",
                                    input->jsonl ? "longer than 64 MiB" : "more than 64 MiB without a space");
            TRY(reader_fill(r, want, e));
            if (r->stopped) return 0;
            bytes = reader_skips(r) ? 0 : reader_cut(r, input->jsonl);
            if (r->ended) break;
        }
        *got = bytes > 0;
        if (*got) return reader_fill_block(r, b, bytes, e);

        // Go to the next input. Bytes in the buffer that no block holds count as taken.
        reader_close(r);
        uint64_t taken = r->place.taken + r->have;
        bool full = taken >= (uint64_t)r->o->max_bytes;
        r->place = (InputPlace){.file = full ? r->inputs->count : r->place.file + 1, .line = 1, .taken = taken};
        r->have = 0;
    }
    return 0;
}

void reader_free(Reader *r) {
    reader_close(r);
    free(r->buffer);
}

int reader_leave_out(Reader *r, Error *e) {
    int left_out = 0;
    for (int i = 0; i < r->inputs->count && !reader_stopped(r); i++) {
        Input *input = &r->inputs->all[i];
        int fd = input->pipe ? -1 : open(input->path, O_RDONLY | O_CLOEXEC);
        char *text = fd < 0 ? MAP_FAILED : mmap(NULL, input->bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (fd >= 0) close(fd);
        if (text == MAP_FAILED) continue; // it is empty, or reader_open will report the error
        input->left_out = check_text_kind(input, text, input->bytes, &(Error){0}) ||
                          (!input->jsonl && utf8_invalid_at(text, input->bytes) < input->bytes);
        munmap(text, input->bytes);
        left_out += input->left_out;
    }
    if (left_out < r->inputs->count) return 0;
    return FAIL(e, ERR_INPUT, "file FILE tells what they are", "not one of %d files is UTF-8; the first is %s", left_out,
                r->inputs->all[0].path);
}
