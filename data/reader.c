#define _GNU_SOURCE // memmem, memrchr
#include "reader.h"
#include "base/hash.h"
#include "base/signals.h"
#include "base/text.h"
#include "jsonl.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BLOCK_BYTES = 1 << 20, POLL_MS = 100 };

#define HINT_INVALID "repair it, or say --invalid bytes to take it as it is, --invalid skip to leave it out"
#define HINT_JSONL                                                                                                     \
    "every line must be a JSON object with a text field: see --field; --invalid skip leaves such lines out"

// ---- Blocks ---------------------------------------------------------------------------------------------------------

// Adds a piece unless it is empty. At least one byte lies between two pieces, so capacity / 2 + 1 pieces suffice.
static void block_add_piece(TextBlock *b, TextPiece piece) {
    if (piece.bytes > 0) b->pieces[b->piece_count++] = piece;
}

static uint64_t count_lines(const char *text, size_t bytes) { // counts newlines
    uint64_t lines = 0;
    for (const char *end = text + bytes; (text = memchr(text, '\n', (size_t)(end - text))); text++) lines++;
    return lines;
}

// Counts a fault; keeps the first FAULTS_MAX.
static void block_fault(TextBlock *b, uint64_t line, const char *hint, const char *why) {
    if (b->fault_count++ >= FAULTS_MAX) return;
    FAIL(&b->faults[b->fault_count - 1], ERR_INPUT, hint, "%s line %" PRIu64 ": %s", input_name(b->input), line, why);
}

// Returns the split of an input's document number `document` (in jsonl: the line's number).
static int document_split(const TokenizeOptions *o, const Input *input, uint64_t document) {
    // Hash the path: a file keeps its split when other files are added or removed.
    if (o->val_every_file)
        return hash_finish(hash_bytes(HASH_START, input->path, strlen(input->path))) % (uint64_t)o->val_every_file == 0;
    if (o->split != SPLITS) return o->split;
    // Hash the input's number: the same files in the same order have the same splits in any directory.
    uint64_t key[2] = {input->number, document};
    return (double)(hash_finish(hash_bytes(HASH_START, key, sizeof key)) >> 11) < o->val_fraction * 0x1p53;
}

// ---- Encoding -------------------------------------------------------------------------------------------------------

// Finds the text of every line. Skips a byte order mark before the first line.
static void block_parse_jsonl(TextBlock *b, Reader *r) {
    const TokenizeOptions *o = r->o;
    uint64_t line = b->line;
    for (size_t at = b->offset ? 0 : utf8_mark(b->text, b->bytes), end; at < b->bytes; at = end + 1, line++) {
        char *newline = memchr(b->text + at, '\n', b->bytes - at);
        end = newline ? (size_t)(newline - b->text) : b->bytes;
        b->text[end] = 0;
        if (at + strspn(b->text + at, " \t\r") == end) continue; // a blank line
        TextPiece piece = {.at = at, .begins = true, .split = document_split(o, b->input, line)};
        const char *why = jsonl_field(b->text + at, end - at, o->field, &piece.bytes);
        bool invalid = !why && o->invalid != INVALID_BYTES && utf8_invalid_at(b->text + at, piece.bytes) < piece.bytes;
        if (!why && !invalid) block_add_piece(b, piece);
        else if (o->invalid == INVALID_SKIP) atomic_fetch_add(&r->left_out, 1);
        else if (invalid) block_fault(b, line, HINT_INVALID, "its text is not valid UTF-8");
        else block_fault(b, line, HINT_JSONL, why);
    }
}

static void block_check_text(TextBlock *b, const TokenizeOptions *o) {
    bool eot = !*o->separator && memmem(b->text, b->bytes, "<|endoftext|>", 13);
    bool mark = b->offset == 0 && utf8_mark(b->text, b->bytes);
    atomic_fetch_or(&b->input->notes, eot << NOTE_EOT | mark << NOTE_MARK);
    for (int i = 0; i < b->piece_count && o->invalid == INVALID_ERROR && !b->ends; i++) {
        size_t at = b->pieces[i].at, bytes = b->pieces[i].bytes, bad = utf8_invalid_at(b->text + at, bytes);
        char why[80];
        if (bad == bytes) continue;
        snprintf(why, sizeof why, "byte 0x%02x at offset %" PRIu64 " is not valid UTF-8", (uint8_t)b->text[at + bad],
                 b->offset + at + bad);
        block_fault(b, b->line + count_lines(b->text, at + bad), HINT_INVALID, why);
        b->ends = true;
    }
}

int block_encode(TextBlock *b, Reader *r, WordCache *cache, Error *e) {
    const TokenizeOptions *o = r->o;
    if (!b->ends && b->input->format == FORMAT_JSONL) block_parse_jsonl(b, r);
    else if (!b->ends) block_check_text(b, o);
    if (b->fault_count) atomic_store(&r->refused, true);
    uint16_t *tokens = b->tokens;
    for (int i = 0; i < b->piece_count && !atomic_load(&r->refused); i++) {
        TextPiece *piece = &b->pieces[i];
        TRY(tokenizer_encode(r->tokenizer, cache, b->text + piece->at, piece->bytes, tokens, &piece->tokens, e));
        tokens += piece->tokens;
    }
    return 0;
}

// ---- Reading --------------------------------------------------------------------------------------------------------

static Input *reader_input(const Reader *r) { return &r->inputs->all[r->file]; }

// True if the rest of the input must not be read.
static bool reader_skips(const Reader *r) {
    return reader_input(r)->left_out || (reader_input(r)->pipe && atomic_load(&r->refused));
}

// Reads until the buffer holds `want` bytes, the input ends or --max-bytes is reached.
static int reader_fill(Reader *r, size_t want, Error *e) {
    Input *input = reader_input(r);
    while (r->have < want && !r->ended) {
        size_t room = size_min((size_t)r->o->max_bytes - r->taken - r->have, want - r->have);
        struct pollfd ready = {r->fd, POLLIN, 0};
        while (input->pipe && room && poll(&ready, 1, POLL_MS) <= 0)
            if (signals_requested() || atomic_load(&r->refused)) return 0;
        ssize_t got = read(r->fd, r->buffer + r->have, room);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return FAIL(e, ERR_INPUT, "check the disk", "%s: cannot read: %s", input_name(input), strerror(errno));
        r->have += (size_t)got;
        r->ended = got == 0;
        const uint64_t now = r->offset + r->have;
        if (r->ended && room && input->bytes && now != input->bytes)
            return FAIL(e, ERR_INPUT, "run the command again, once nothing writes to it",
                        "%s: had %" PRIu64 " bytes, and now has %" PRIu64, input_name(input), input->bytes, now);
        if (input->format == FORMAT_AUTO) TRY(input_decide(input, r->o, r->buffer, r->have, r->ended, e));
    }
    return 0;
}

// Fails (ERR_INPUT) with a remedy if an input begins like gzip, zstd, parquet, UTF-16, UTF-32 or a Git LFS pointer.
static int check_text_kind(const Input *input, const char *text, size_t bytes, Error *e) {
    static const struct {
        const char *begin, *what, *remedy;
    } kinds[] = {{"\x1f\x8b", "gzip, not text", "say zcat FILE | data/tokenize ... -"},
                 {"\x28\xb5\x2f\xfd", "zstd, not text", "say zstdcat FILE | data/tokenize ... -"},
                 {"PAR1", "parquet, not text", "say data/parquet_to_jsonl.py FILE | data/tokenize ... -"},
                 {"version https://git-lfs", "a Git LFS pointer, not the text", "git lfs pull fetches the text"},
                 {"\xff\xfe", "UTF-16, not UTF-8", "say iconv -f UTF-16 -t UTF-8 FILE | data/tokenize ... -"},
                 {"\xfe\xff", "UTF-16, not UTF-8", "say iconv -f UTF-16 -t UTF-8 FILE | data/tokenize ... -"}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (bytes >= strlen(kinds[i].begin) && memcmp(text, kinds[i].begin, strlen(kinds[i].begin)) == 0)
            return FAIL(e, ERR_INPUT, kinds[i].remedy, "%s: is %s", input_name(input), kinds[i].what);
    if (memchr(text, 0, size_min(bytes, 4)))
        return FAIL(e, ERR_INPUT, "say iconv -f UTF-16LE (UTF-16BE, UTF-32) -t UTF-8 FILE | data/tokenize ... -",
                    "%s: is UTF-16 or UTF-32, not UTF-8", input_name(input));
    return 0;
}

// Opens the input at its beginning, and decides its format. With --invalid skip, checks the whole file first, since
// tokens cannot be removed once they are written. Leaves out a text file that is not all UTF-8, and a file of another
// kind (gzip, ...).
static int reader_open(Reader *r, Error *e) {
    Input *input = reader_input(r);
    char next[3]; // at most three continuation bytes precede the next character
    r->fd = strcmp(input->path, "-") ? open(input->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : STDIN_FILENO;
    if (r->fd < 0)
        return FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot open: %s", input->path, strerror(errno));
    TRY(reader_fill(r, BLOCK_BYTES, e));
    const bool plain = input->format == FORMAT_TEXT, skip = r->o->invalid == INVALID_SKIP;
    const bool tail = plain && r->o->val_fraction > 0 && !*r->o->separator;
    const bool other = r->o->invalid != INVALID_BYTES && check_text_kind(input, r->buffer, r->have, e);
    if (other && (input->pipe || !skip)) return e->code;
    char *text = MAP_FAILED; // stays so for an empty file; if mapping fails, reading reports the cause
    if (plain && skip) text = mmap(NULL, input->bytes, PROT_READ, MAP_PRIVATE, r->fd, 0);
    input->left_out = other || (text != MAP_FAILED && utf8_invalid_at(text, input->bytes) < input->bytes);
    if (text != MAP_FAILED) munmap(text, input->bytes);
    if (input->left_out) r->have = 0; // --max-bytes does not count them
    r->tail = UINT64_MAX;
    if (!tail) return 0;

    // A text file is one document, so its end becomes validation data, as in nanoGPT's 90/10 split. This tail begins
    // with a whole character.
    r->tail = (uint64_t)((double)size_min((size_t)r->o->max_bytes - r->taken, input->bytes) * (1 - r->o->val_fraction));
    ssize_t got = pread(r->fd, next, sizeof next, (off_t)r->tail);
    for (ssize_t i = 0; i < got && (next[i] & 0xC0) == 0x80; i++) r->tail++;
    return 0;
}

// Goes to the next input. Counts the bytes left in the buffer as taken.
static void reader_advance(Reader *r) {
    if (r->fd > STDIN_FILENO) close(r->fd);
    r->fd = -1;
    r->taken += r->have;
    r->file = r->taken >= (uint64_t)r->o->max_bytes ? r->inputs->count : r->file + 1;
    r->offset = r->document = r->have = 0;
    r->line = 1;
    r->inside = r->skip_newline = r->ended = false;
}

// Returns the length of the next block; 0: the buffer must grow to decide.
static size_t reader_cut(const Reader *r) {
    bool limited = r->taken + r->have >= (uint64_t)r->o->max_bytes;
    if (reader_input(r)->format == FORMAT_JSONL) {
        if (r->ended && !limited) return r->have;
        const char *newline = memrchr(r->buffer, '\n', r->have);
        return newline ? (size_t)(newline - r->buffer) + 1 : 0;
    }
    if (r->tail != UINT64_MAX && r->tail > r->offset && r->tail - r->offset <= r->have) return r->tail - r->offset;
    if (r->ended) return limited ? utf8_boundary(r->buffer, r->have) : r->have;
    size_t length = strlen(r->o->separator), hold = length ? length + 1 : 0;
    if (r->have <= hold) return 0;
    size_t cut = tokenizer_cut(r->tokenizer, r->buffer, r->have - hold);
    if (!hold || !cut) return cut;
    // If the cut falls inside \r\n, inside a separator or right before one, move the cut past it.
    cut += r->buffer[cut - 1] == '\r' && r->buffer[cut] == '\n';
    size_t from = cut > length - 1 ? cut - (length - 1) : 0;
    const char *found = memmem(r->buffer + from, size_min(r->have, cut + length) - from, r->o->separator, length);
    return found ? (size_t)(found - r->buffer) + length : cut;
}

// Finds the documents of a block of text. Without --separator the block is part of one document.
static void reader_find_pieces(Reader *r, TextBlock *b) {
    const char *separator = r->o->separator;
    size_t length = strlen(separator);
    for (size_t at = 0;;) {
        if (r->skip_newline && at < b->bytes) {
            at += at + 1 < b->bytes && b->text[at] == '\r' && b->text[at + 1] == '\n' ? 2 : b->text[at] == '\n';
            r->skip_newline = false;
        }
        const char *found = length ? memmem(b->text + at, b->bytes - at, separator, length) : NULL;
        size_t stop = found ? (size_t)(found - b->text) : b->bytes;
        size_t end = found && stop > at && b->text[stop - 1] == '\n' ? stop - 1 : stop;
        if (end < stop && end > at && b->text[end - 1] == '\r') end--;
        int split = r->tail != UINT64_MAX ? r->offset >= r->tail : document_split(r->o, b->input, r->document);
        block_add_piece(b, (TextPiece){.at = at, .bytes = end - at, .begins = !r->inside, .split = split});
        if (end > at) r->inside = true;
        if (!found) return;
        at = stop + length;
        r->document++;
        r->inside = false;
        r->skip_newline = r->separated = true;
    }
}

// Moves the first bytes of the buffer to the block.
static int reader_fill_block(Reader *r, TextBlock *b, size_t bytes, Error *e) {
    size_t capacity = size_max(bytes, BLOCK_BYTES);
    if (b->capacity != capacity) {        // after a long line, free its memory
        size_t pieces = capacity / 2 + 1; // pages that are never touched cost nothing
        memory_free(b->pieces);
        b->capacity = 0;
        size_t room = pieces * sizeof *b->pieces + capacity * (sizeof *b->tokens + 1) + 1;
        TRY(memory_alloc((void **)&b->pieces, room, "a block of text", e));
        b->tokens = (uint16_t *)(b->pieces + pieces);
        b->text = (char *)(b->tokens + capacity);
        b->capacity = capacity;
    }
    b->bytes = bytes;
    memcpy(b->text, r->buffer, bytes);
    memmove(r->buffer, r->buffer + bytes, r->have - bytes);
    r->have -= bytes;
    if (b->input->format == FORMAT_TEXT) reader_find_pieces(r, b);
    r->offset += bytes;
    r->taken += bytes;
    r->line += count_lines(b->text, bytes);
    if (b->offset < r->tail && r->offset >= r->tail) r->inside = false;
    return 0;
}

int reader_next(Reader *r, TextBlock *b, bool *got, Error *e) {
    *got = false;
    for (; r->file < r->inputs->count; reader_advance(r)) {
        Input *input = reader_input(r);
        size_t bytes = 0;
        int code = r->fd < 0 && !reader_skips(r) ? reader_open(r, e) : 0;
        b->input = input;
        b->offset = r->offset;
        b->line = r->line;
        b->piece_count = b->fault_count = b->ends = 0;
        for (size_t want = BLOCK_BYTES; bytes == 0 && !code && !reader_skips(r); want *= 2) {
            if (want <= LINE_BYTES_MAX) code = reader_fill(r, want, e);
            else
                code = FAIL(e, ERR_INPUT, "break it up", "%s line %" PRIu64 ": %s", input_name(input),
                            r->line + (r->buffer[0] == '\n'),
                            input->format == FORMAT_JSONL ? "longer than 64 MiB" : "more than 64 MiB without a space");
            if (signals_requested()) return 0;
            if (!code && !reader_skips(r)) bytes = reader_cut(r);
            if (r->ended) break;
        }
        if (bytes > 0) code = reader_fill_block(r, b, bytes, e);
        *got = bytes > 0 || code == ERR_INPUT;
        if (code == ERR_INPUT) {
            b->faults[b->fault_count++] = *e;
            b->ends = true;
            reader_advance(r);
        }
        if (*got || code) return code == ERR_INPUT ? 0 : code;
    }
    return 0;
}
