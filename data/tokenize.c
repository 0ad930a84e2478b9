// tokenize: text in, token shards out (llmc/data.h has their format).
//
//     data/tokenize --tokenizer bytes|DIR --out PREFIX [options] INPUT...
//
// One thread, the coordinator, reads the inputs in blocks and writes tokens in the order of the blocks; the others
// encode blocks in whatever order they come to them. Where a block ends is a function of the input alone, so the bytes
// that come out do not depend on the number of threads. Memory is a fixed number of blocks, whatever the input.
//
// Shards are written as PREFIX_train_000000.bin.partial, ... and get their names together, when all is done. Meanwhile
// PREFIX.state says how far input and output are: the same command, given again after an interruption, goes on there.
#define _GNU_SOURCE // memmem, sigtimedwait
#include "../llmc/data.h"
#include "../llmc/tokenizer.h"
#include "inputs.h"
#include "jsonl.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

enum {
    BLOCK_BYTES = 1 << 20,    // what a worker gets at a time
    LINE_BYTES_MAX = 1 << 26, // the longest line of JSON, or text without a space
    KEEP_BYTES = 4 << 20,     // a block's buffers that grew beyond this are given back
    BLOCKS_PER_THREAD = 3,    // one in work, one waiting, one to be written
    THREADS_MAX = 256,
    SAVE_SECONDS = 20, // between two saves of the state
    STATE_VERSION = 1
};

// ---------------------------------------------------------------------------------------------------------------------
// Options

typedef struct {
    const char *tokenizer, *out, *files_from, *format, *field, *separator, *invalid;
    double val_fraction;
    uint64_t val_every_file, max_bytes, shard_tokens, threads;
    bool force, help;
} Options;

typedef enum { TEXT, COUNT, FRACTION, SWITCH } FlagKind;

typedef struct {
    const char *name, *unit, *help;
    FlagKind kind;
    size_t offset; // in Options
    uint64_t low, high;
} Flag;

#define AT(member) offsetof(Options, member)
static const Flag FLAGS[] = {
    {"--tokenizer", "bytes|DIR", "the vocabulary: bytes, or a directory with GPT-2's files", TEXT, AT(tokenizer), 0, 0},
    {"--out", "PREFIX", "writes PREFIX_train_000000.bin, PREFIX_val_000000.bin, ...", TEXT, AT(out), 0, 0},
    {"--files-from", "LIST", "a file that names more inputs, one path a line", TEXT, AT(files_from), 0, 0},
    {"--format", "auto|text|jsonl", "auto: jsonl where the name ends in .jsonl or .ndjson, else text", TEXT, AT(format),
     0, 0},
    {"--field", "NAME", "the field of a jsonl line that holds the text (text)", TEXT, AT(field), 0, 0},
    {"--separator", "STRING", "parts the documents of a text file; a newline before and behind it goes too", TEXT,
     AT(separator), 0, 0},
    {"--val-fraction", "F",
     "validation: the last part of each text file; of jsonl and with --separator, documents by hash", FRACTION,
     AT(val_fraction), 0, 0},
    {"--val-every-file", "K", "validation: one file in K, by hash of its path", COUNT, AT(val_every_file), 2, 1000000},
    {"--max-bytes", "N", "stop after N bytes of input", COUNT, AT(max_bytes), 1, INT64_MAX},
    {"--shard-tokens", "N", "tokens in a shard (100000000)", COUNT, AT(shard_tokens), 1, SHARD_MAX_TOKENS},
    {"--invalid", "error|bytes", "text that is not UTF-8: refuse it, or take its bytes as they are (error)", TEXT,
     AT(invalid), 0, 0},
    {"--threads", "N", "encoding threads (one a processor)", COUNT, AT(threads), 1, THREADS_MAX},
    {"--force", "", "replace shards of the same PREFIX, and start over", SWITCH, AT(force), 0, 0},
    {"--help", "", "this text", SWITCH, AT(help), 0, 0},
};
enum { FLAG_COUNT = sizeof FLAGS / sizeof *FLAGS };

static void print_help(void) {
    printf("Turns text into token shards.\n\n  data/tokenize --tokenizer bytes|DIR --out PREFIX [options] INPUT...\n\n"
           "INPUT is a text file, a .jsonl file, a directory (its .txt, .md, .jsonl and .ndjson files) or - for\n"
           "standard input. Every document begins with <|endoftext|>; bytes have no such token, and a newline\n"
           "stands between documents where there is none. The same command goes on after an interruption.\n\n");
    for (int i = 0; i < FLAG_COUNT; i++) printf("  %-16s %-15s  %s\n", FLAGS[i].name, FLAGS[i].unit, FLAGS[i].help);
}

static int flag_parse(const Flag *flag, const char *text, Options *o, Error *e) {
    char *member = (char *)o + flag->offset, *end;
    errno = 0;
    if (flag->kind == TEXT) *(const char **)member = text;
    if (flag->kind == TEXT && !*text) return FAIL(e, ERR_USAGE, "see --help", "%s: empty", flag->name);
    if (flag->kind == COUNT) {
        unsigned long long n = strtoull(text, &end, 10);
        if (*text < '0' || *text > '9' || *end || errno || n < flag->low || n > flag->high)
            return FAIL(e, ERR_USAGE, "see --help", "%s %s: not a whole number from %" PRIu64 " to %" PRIu64,
                        flag->name, text, flag->low, flag->high);
        *(uint64_t *)member = n;
    }
    if (flag->kind == FRACTION) {
        double f = strtod(text, &end);
        if (end == text || *end || !(f >= 0 && f < 1))
            return FAIL(e, ERR_USAGE, "see --help", "%s %s: not a number from 0 to below 1", flag->name, text);
        *(double *)member = f;
    }
    return 0;
}

static bool one_of(const char *value, const char *a, const char *b, const char *c) {
    return !strcmp(value, a) || !strcmp(value, b) || (c && !strcmp(value, c));
}

static int options_check(const Options *o, int inputs, Error *e) {
    if (!o->tokenizer)
        return FAIL(e, ERR_USAGE, "say --tokenizer bytes, or name a directory", "--tokenizer is missing");
    if (!o->out) return FAIL(e, ERR_USAGE, "say --out data/NAME", "--out is missing");
    if (strlen(o->out) > PATH_MAX - 64) return FAIL(e, ERR_USAGE, "use a shorter path", "--out: path too long");
    if (inputs == 0 && !o->files_from)
        return FAIL(e, ERR_USAGE, "name a file or a directory, or - for standard input", "no INPUT");
    if (!one_of(o->format, "auto", "text", "jsonl"))
        return FAIL(e, ERR_USAGE, "it is auto, text or jsonl", "--format %s: unknown", o->format);
    if (!one_of(o->invalid, "error", "bytes", NULL))
        return FAIL(e, ERR_USAGE, "it is error or bytes", "--invalid %s: unknown", o->invalid);
    if (o->val_fraction > 0 && o->val_every_file)
        return FAIL(e, ERR_USAGE, "choose one", "--val-fraction and --val-every-file contradict each other");
    if (o->separator && !strcmp(o->format, "jsonl"))
        return FAIL(e, ERR_USAGE, "every line of jsonl is a document", "--separator does not go with --format jsonl");
    return 0;
}

// Fills o; the inputs named on the command line are moved to the front of argv, *inputs of them.
static int options_parse(int argc, char **argv, Options *o, int *inputs, Error *e) {
    bool given[FLAG_COUNT] = {0}, only_inputs = false;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    *o = (Options){.format = "auto", .field = "text", .invalid = "error", .shard_tokens = 100000000};
    o->threads = processors < 1 ? 1 : processors > THREADS_MAX ? THREADS_MAX : (uint64_t)processors;
    *inputs = 0;
    for (int i = 1; i < argc; i++) {
        if (only_inputs || argv[i][0] != '-' || !argv[i][1]) {
            argv[(*inputs)++] = argv[i];
            continue;
        }
        only_inputs = strcmp(argv[i], "--") == 0;
        if (only_inputs) continue;
        int f = 0;
        while (f < FLAG_COUNT && strcmp(argv[i], FLAGS[f].name)) f++;
        if (f == FLAG_COUNT) return FAIL(e, ERR_USAGE, "see --help", "%s: unknown option", argv[i]);
        if (given[f]) return FAIL(e, ERR_USAGE, "give it once", "%s is given twice", argv[i]);
        given[f] = true;
        if (FLAGS[f].kind == SWITCH) *(bool *)((char *)o + FLAGS[f].offset) = true;
        else if (i + 1 == argc) return FAIL(e, ERR_USAGE, "see --help", "%s needs a value", argv[i]);
        else TRY(flag_parse(&FLAGS[f], argv[++i], o, e));
    }
    return o->help ? 0 : options_check(o, *inputs, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Blocks: what passes from the reader through a worker to the writer

enum { TRAIN, VAL, SPLITS };
static const char *const SPLIT_NAMES[SPLITS] = {"train", "val"};

// A place in the input. Everything that decides what the next block is.
typedef struct {
    int file;
    uint64_t offset, line, document; // in the file; lines count from 1
    uint64_t taken;                  // bytes of input before this place
    int inside;                      // the document that goes on here has begun before
    int skip_newline;                // a separator has just ended
} Place;

typedef struct { // a document, or a part of one
    size_t at, bytes;
    size_t tokens; // set by the worker
    bool begins;   // with the document's first byte
    int split;
} Piece;

typedef struct {
    enum { FREE, FILLED, TAKEN, DONE } state;
    const Input *input;
    bool jsonl; // the pieces are the worker's to find
    Place start, end;
    char *text;
    size_t bytes, text_capacity;
    uint16_t *tokens; // (text_capacity): a byte is at most a token
    Piece *pieces;
    int piece_count, piece_capacity;
    int code; // of the worker
    Error error;
} Block;

static int block_reserve(Block *b, size_t bytes, Error *e) {
    if (bytes <= b->text_capacity && b->text_capacity <= size_max(KEEP_BYTES, bytes)) return 0;
    memory_free(b->text);
    memory_free(b->tokens);
    b->text = NULL;
    b->tokens = NULL;
    b->text_capacity = 0;
    TRY(memory_alloc((void **)&b->text, bytes, "a block of text", e));
    TRY(memory_alloc((void **)&b->tokens, bytes * sizeof *b->tokens, "a block of tokens", e));
    b->text_capacity = bytes;
    return 0;
}

static int block_add_piece(Block *b, Piece piece, Error *e) {
    if (piece.bytes == 0) return 0;
    if (b->piece_count == b->piece_capacity) {
        int capacity = b->piece_capacity ? 2 * b->piece_capacity : 64;
        Piece *pieces = realloc(b->pieces, (size_t)capacity * sizeof *pieces);
        if (!pieces) return FAIL(e, ERR_MEMORY, NULL, "out of memory: documents of a block");
        b->pieces = pieces;
        b->piece_capacity = capacity;
    }
    b->pieces[b->piece_count++] = piece;
    return 0;
}

static void block_free(Block *b) {
    memory_free(b->text);
    memory_free(b->tokens);
    free(b->pieces);
}

static uint64_t count_lines(const char *text, size_t bytes) {
    uint64_t lines = 0;
    for (const char *end = text + bytes; (text = memchr(text, '\n', (size_t)(end - text))); text++) lines++;
    return lines;
}

static const char *input_name(const Input *input) { return strcmp(input->path, "-") ? input->path : "standard input"; }

static int fail_at_line(Error *e, const Input *input, uint64_t line, const char *hint, const char *why) {
    return FAIL(e, ERR_INPUT, hint, "%s line %" PRIu64 ": %s", input_name(input), line, why);
}

// ---------------------------------------------------------------------------------------------------------------------
// Which documents are validation

// FNV-1a (Fowler, Noll, Vo), 64 bits, and SplitMix64's finaliser, because FNV's upper bits mix badly.
static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) hash = (hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t hash_finish(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

enum { HASH_BITS = 53 }; // what a double holds
#define HASH_START 0xcbf29ce484222325u

// The split of document number `document` (by line, in jsonl) of input number `file`, where whole documents are drawn.
// By number, not by path: the same files in the same order give the same split wherever they lie.
static int split_of(const Options *o, const Input *input, int file, uint64_t document) {
    if (o->val_every_file)
        return hash_finish(hash_bytes(HASH_START, input->path, strlen(input->path))) % o->val_every_file == 0;
    uint64_t key[2] = {(uint64_t)file, document};
    uint64_t hash = hash_finish(hash_bytes(HASH_START, key, sizeof key)) >> (64 - HASH_BITS);
    return (double)hash < o->val_fraction * (double)((uint64_t)1 << HASH_BITS);
}

// ---------------------------------------------------------------------------------------------------------------------
// The reader

typedef struct {
    const Options *o;
    const Tokenizer *tokenizer;
    const Inputs *inputs;
    int fd;        // of inputs->all[place.file], or -1
    uint64_t tail; // where validation begins in this file; UINT64_MAX: whole documents are drawn
    bool ended;    // nothing behind what is in the buffer
    Place place;   // of buffer[0]
    char *buffer;
    size_t have, capacity;
    sigset_t signals;
    bool stopped; // by a signal
} Reader;

static bool reader_signalled(Reader *r) {
    const struct timespec now = {0, 0};
    r->stopped = r->stopped || sigtimedwait(&r->signals, NULL, &now) > 0;
    return r->stopped;
}

// Waits for a pipe or a terminal, and for a signal meanwhile.
static bool reader_wait(Reader *r) {
    enum { POLL_MS = 100 };
    struct pollfd p = {r->fd, POLLIN, 0};
    while (poll(&p, 1, POLL_MS) == 0)
        if (reader_signalled(r)) return false;
    return !reader_signalled(r);
}

// Reads until the buffer holds `want` bytes, the input ends or --max-bytes is reached.
static int reader_fill(Reader *r, size_t want, Error *e) {
    const Input *input = &r->inputs->all[r->place.file];
    if (want > r->capacity) {
        char *buffer = realloc(r->buffer, want);
        if (!buffer) return FAIL(e, ERR_MEMORY, NULL, "out of memory: reading %s", input_name(input));
        r->buffer = buffer;
        r->capacity = want;
    }
    while (r->have < want && !r->ended) {
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
    }
    return 0;
}

static bool has_tail(const Options *o, const Input *input) {
    return o->val_fraction > 0 && !o->separator && !input->jsonl;
}

// A text file that is one document is split by place: its last part is validation, like nanoGPT's 90/10. The split moves
// up to where a character begins.
static int reader_set_tail(Reader *r, Error *e) {
    const Input *input = &r->inputs->all[r->place.file];
    r->tail = UINT64_MAX;
    if (!has_tail(r->o, input)) return 0;
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

// Opens the file at place, and goes to the place's offset in it (a pipe is read up to there).
static int reader_open(Reader *r, Error *e) {
    const Input *input = &r->inputs->all[r->place.file];
    uint64_t offset = r->place.offset;
    r->fd = strcmp(input->path, "-") ? open(input->path, O_RDONLY | O_CLOEXEC) : STDIN_FILENO;
    if (r->fd < 0)
        return FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot open: %s", input->path, strerror(errno));
    r->ended = false;
    r->have = 0;
    TRY(reader_set_tail(r, e));
    if (!offset || lseek(r->fd, (off_t)offset, SEEK_SET) >= 0) return 0;
    char skipped[4096];
    while (offset > 0) {
        ssize_t n = read(r->fd, skipped, size_min(sizeof skipped, offset));
        if (n <= 0)
            return FAIL(e, ERR_INPUT, "give the same input again, or --force to start over",
                        "%s: shorter than when this was interrupted", input_name(input));
        offset -= (uint64_t)n;
    }
    return 0;
}

static void reader_close(Reader *r) {
    if (r->fd > STDIN_FILENO) close(r->fd);
    r->fd = -1;
}

// Keeps a separator whole: a cut in one, or between it and the newline before it, moves behind it.
static size_t reader_spare_separator(const Reader *r, size_t cut) {
    size_t length = strlen(r->o->separator), from = cut > length - 1 ? cut - (length - 1) : 0;
    const char *found = memmem(r->buffer + from, size_min(r->have, cut + length) - from, r->o->separator, length);
    return found ? (size_t)(found - r->buffer) + length : cut;
}

// How many bytes of the buffer make the next block; 0: it takes more to tell.
static size_t reader_cut(const Reader *r, bool jsonl) {
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
static int reader_find_pieces(Reader *r, Block *b, Error *e) {
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
        TRY(block_add_piece(b, (Piece){.at = at, .bytes = end - at, .begins = !p->inside, .split = split}, e));
        if (end > at) p->inside = 1;
        if (!found) return 0;
        at = stop + length;
        p->document++;
        p->inside = 0;
        p->skip_newline = 1;
    }
}

static int reader_take(Reader *r, Block *b, size_t bytes, Error *e) {
    b->input = &r->inputs->all[r->place.file];
    b->jsonl = b->input->jsonl;
    b->start = r->place;
    b->bytes = bytes;
    b->piece_count = 0;
    TRY(block_reserve(b, size_max(bytes, BLOCK_BYTES), e));
    memcpy(b->text, r->buffer, bytes);
    memmove(r->buffer, r->buffer + bytes, r->have - bytes);
    r->have -= bytes;
    if (!b->jsonl) TRY(reader_find_pieces(r, b, e));
    r->place.offset += bytes;
    r->place.taken += bytes;
    r->place.line += count_lines(b->text, bytes);
    if (r->tail != UINT64_MAX && b->start.offset < r->tail && r->place.offset >= r->tail) r->place.inside = 0;
    b->end = r->place;
    return 0;
}

// Fills *b with the next block; *got is false when there is none left, or a signal came.
static int reader_next(Reader *r, Block *b, bool *got, Error *e) {
    *got = false;
    while (r->place.file < r->inputs->count && !reader_signalled(r)) {
        const Input *input = &r->inputs->all[r->place.file];
        if (r->fd < 0) TRY(reader_open(r, e));
        size_t bytes = 0;
        for (size_t want = BLOCK_BYTES; bytes == 0; want *= 2) {
            if (want > LINE_BYTES_MAX)
                return fail_at_line(e, input, r->place.line + (r->buffer[0] == '\n'), "break it up",
                                    input->jsonl ? "longer than 64 MiB" : "more than 64 MiB without a space");
            TRY(reader_fill(r, want, e));
            if (r->stopped) return 0;
            bytes = reader_cut(r, input->jsonl);
            if (r->ended) break;
        }
        if (bytes) {
            *got = true;
            return reader_take(r, b, bytes, e);
        }
        reader_close(r);
        uint64_t taken = r->place.taken + r->have; // what --max-bytes cut off counts as taken
        r->place = (Place){.file = r->place.file + 1, .line = 1, .taken = taken};
        r->have = 0;
        if (r->o->max_bytes && taken >= r->o->max_bytes) r->place.file = r->inputs->count;
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The workers

typedef struct {
    const Options *o;
    const Tokenizer *tokenizer;
    Block *blocks; // a ring
    int block_count;
    uint64_t filled, taken; // blocks so far
    bool over;
    pthread_mutex_t lock;
    pthread_cond_t work, done; // there is a block to encode; one has been
} Pool;

static bool is_blank(const char *text, size_t bytes) {
    while (bytes > 0 && (text[bytes - 1] == ' ' || text[bytes - 1] == '\t' || text[bytes - 1] == '\r')) bytes--;
    return bytes == 0;
}

static int block_parse_jsonl(const Options *o, Block *b, Error *e) {
    uint64_t line = b->start.line;
    size_t end = 0;
    for (size_t at = 0; at < b->bytes; at = end + 1, line++) {
        char *newline = memchr(b->text + at, '\n', b->bytes - at);
        end = newline ? (size_t)(newline - b->text) : b->bytes;
        if (is_blank(b->text + at, end - at)) continue;
        Piece piece = {.at = at, .begins = true, .split = split_of(o, b->input, b->start.file, line)};
        const char *why = jsonl_field(b->text + at, end - at, o->field, &piece.bytes);
        if (why)
            return fail_at_line(e, b->input, line, "every line must be a JSON object with a text field: see --field",
                                why);
        if (!strcmp(o->invalid, "error") && utf8_invalid_at(b->text + at, piece.bytes) < piece.bytes)
            return fail_at_line(e, b->input, line, "repair it, or say --invalid bytes", "its text is not valid UTF-8");
        TRY(block_add_piece(b, piece, e));
    }
    return 0;
}

static int block_check_utf8(const Block *b, const Piece *piece, Error *e) {
    size_t bad = utf8_invalid_at(b->text + piece->at, piece->bytes);
    if (bad == piece->bytes) return 0;
    char why[80];
    bad += piece->at;
    snprintf(why, sizeof why, "byte 0x%02x at offset %" PRIu64 " is not valid UTF-8", (unsigned char)b->text[bad],
             b->start.offset + bad);
    return fail_at_line(e, b->input, b->start.line + count_lines(b->text, bad), "repair it, or say --invalid bytes",
                        why);
}

static int block_encode(const Options *o, Block *b, Encoder *encoder, Error *e) {
    size_t count = 0;
    if (b->jsonl) TRY(block_parse_jsonl(o, b, e));
    for (int i = 0; i < b->piece_count; i++) {
        Piece *piece = &b->pieces[i];
        if (!b->jsonl && !strcmp(o->invalid, "error")) TRY(block_check_utf8(b, piece, e));
        TRY(encoder_run(encoder, b->text + piece->at, piece->bytes, b->tokens + count, &piece->tokens, e));
        count += piece->tokens;
    }
    return 0;
}

static void *worker_main(void *argument) {
    Pool *pool = argument;
    Encoder *encoder = NULL;
    Error error;
    int code = encoder_create(&encoder, pool->tokenizer, &error);
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->taken == pool->filled && !pool->over) pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->taken == pool->filled) break;
        Block *b = &pool->blocks[pool->taken++ % (uint64_t)pool->block_count];
        b->state = TAKEN;
        pthread_mutex_unlock(&pool->lock);
        b->error = error;
        b->code = code ? code : block_encode(pool->o, b, encoder, &b->error);
        pthread_mutex_lock(&pool->lock);
        b->state = DONE;
        pthread_cond_signal(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
    encoder_destroy(encoder);
    return NULL;
}

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
    const char *texts[] = {o->format, o->field, o->separator ? o->separator : "", o->invalid};
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

// ---------------------------------------------------------------------------------------------------------------------
// Progress

typedef struct {
    double start, shown;
    uint64_t start_bytes, total_bytes; // total 0: unknown
    bool terminal;
} Progress;

static void progress_show(Progress *p, uint64_t bytes, uint64_t tokens, bool last) {
    enum { WIDTH = 30 };
    double now = clock_seconds(), every = p->terminal ? 0.2 : 10; // seconds between two lines
    if (!last && now - p->shown < every) return;
    if (last && !p->terminal) return; // the summary says it all
    p->shown = now;
    double rate = (double)(bytes - p->start_bytes) / (now - p->start + 1e-9);
    char line[256];
    int n = 0;
    if (p->total_bytes) {
        double part = (double)bytes / (double)p->total_bytes;
        part = part > 1 ? 1 : part;
        char bar[WIDTH + 1];
        for (int i = 0; i < WIDTH; i++) bar[i] = i < part * WIDTH ? '#' : '.';
        bar[WIDTH] = 0;
        double left = rate > 0 ? (double)(p->total_bytes - size_min(bytes, p->total_bytes)) / rate : 0;
        n = snprintf(line, sizeof line, "[%s] %5.1f%%  ETA %d:%02d:%02d  ", bar, 100 * part, (int)(left / 3600),
                     (int)(left / 60) % 60, (int)left % 60);
    }
    snprintf(line + n, sizeof line - (size_t)n, "%.1f MB  %.1f MB/s  %" PRIu64 " tokens", (double)bytes / 1e6,
             rate / 1e6, tokens);
    fprintf(stderr, p->terminal ? "\r%s\x1b[K" : "%s\n", line);
    if (last) fprintf(stderr, "\n");
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

typedef struct {
    Options options;
    Inputs inputs;
    Tokenizer *tokenizer;
    Reader reader;
    Writer writer;
    Pool pool;
    pthread_t *threads;
    int thread_count;
    Progress progress;
    Place written;   // all before it is in the shards
    double saved;    // when the state was
    uint64_t blocks; // written
} Run;

static int inputs_gather(Run *run, char **names, int count, Error *e) {
    const Options *o = &run->options;
    int pipes = 0;
    for (int i = 0; i < count; i++) TRY(inputs_add(&run->inputs, names[i], false, e));
    if (o->files_from) TRY(inputs_add_list(&run->inputs, o->files_from, e));
    if (run->inputs.count == 0)
        return FAIL(e, ERR_INPUT, "a directory is searched for .txt, .md, .jsonl and .ndjson files", "no text in %s",
                    count ? names[0] : o->files_from);
    for (int i = 0; i < run->inputs.count; i++) {
        Input *input = &run->inputs.all[i];
        if (strcmp(o->format, "auto")) input->jsonl = !strcmp(o->format, "jsonl");
        if (!strcmp(input->path, "-") && pipes++)
            return FAIL(e, ERR_USAGE, "name it once", "standard input is named twice");
        if (input->pipe && has_tail(o, input))
            return FAIL(e, ERR_USAGE, "write it to a file first, or give --separator or --format jsonl",
                        "--val-fraction: where %s ends is not known before", input_name(input));
    }
    return 0;
}

static int output_check(const Options *o, Error *e) {
    char path[PATH_MAX];
    for (int split = 0; split < SPLITS && !o->force; split++)
        for (int shard = 0; shard < 2; shard++) { // llm.c's training shards count from 1
            shard_path(o, split, shard, path);
            if (access(path, F_OK) == 0)
                return FAIL(e, ERR_USAGE, "choose another --out, or --force to replace it", "%s: exists", path);
        }
    return 0;
}

static int threads_start(Run *run, Error *e) {
    Pool *pool = &run->pool;
    int count = (int)run->options.threads;
    pool->block_count = BLOCKS_PER_THREAD * count;
    TRY(memory_alloc_zero((void **)&pool->blocks, (size_t)pool->block_count * sizeof(Block), "blocks", e));
    TRY(memory_alloc_zero((void **)&run->threads, (size_t)count * sizeof(pthread_t), "threads", e));
    for (; run->thread_count < count; run->thread_count++) {
        int code = pthread_create(&run->threads[run->thread_count], NULL, worker_main, pool);
        if (code) return FAIL(e, ERR_MEMORY, "use fewer --threads", "cannot start a thread: %s", strerror(code));
    }
    return 0;
}

static void threads_stop(Run *run) {
    Pool *pool = &run->pool;
    pthread_mutex_lock(&pool->lock);
    pool->over = true;
    pool->filled = pool->taken; // what nobody has begun, nobody begins
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < run->thread_count; i++) pthread_join(run->threads[i], NULL);
    for (int i = 0; pool->blocks && i < pool->block_count; i++) block_free(&pool->blocks[i]);
    memory_free(pool->blocks);
    memory_free(run->threads);
}

static void pool_give(Pool *pool, Block *b) {
    pthread_mutex_lock(&pool->lock);
    b->state = FILLED;
    pool->filled++;
    pthread_cond_signal(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

// Waits for the oldest block and writes it.
static int run_write_oldest(Run *run, Error *e) {
    Pool *pool = &run->pool;
    Block *b = &pool->blocks[run->blocks % (uint64_t)pool->block_count];
    pthread_mutex_lock(&pool->lock);
    while (b->state != DONE) pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    if (b->code) {
        *e = b->error;
        return b->code;
    }
    TRY(writer_block(&run->writer, b, e));
    b->state = FREE;
    run->blocks++;
    run->written = b->end;
    const Split *s = run->writer.splits;
    progress_show(&run->progress, b->end.taken, s[TRAIN].tokens + s[VAL].tokens, false);
    if (clock_seconds() - run->saved < SAVE_SECONDS) return 0;
    run->saved = clock_seconds();
    return state_save(&run->writer, &run->written, e);
}

// Keeps the ring full and writes from its other end. An error is reported when all before it has been written, so that
// of several errors it is always the first in the input.
static int run_blocks(Run *run, Error *e) {
    Pool *pool = &run->pool;
    Error reader_error;
    int reader_code = 0;
    for (bool more = true; more || run->blocks < pool->filled;) {
        if (more && pool->filled - run->blocks < (uint64_t)pool->block_count) {
            Block *b = &pool->blocks[pool->filled % (uint64_t)pool->block_count];
            reader_code = reader_next(&run->reader, b, &more, &reader_error);
            if (reader_code) more = false;
            if (more) pool_give(pool, b);
        } else TRY(run_write_oldest(run, e));
    }
    if (reader_code) *e = reader_error;
    return reader_code;
}

static int run_finish(Run *run, Error *e) {
    const Options *o = &run->options;
    const Split *splits = run->writer.splits;
    if (run->reader.stopped) {
        TRY(state_save(&run->writer, &run->written, e));
        return FAIL(e, ERR_STOPPED, "run the same command again to go on", "stopped by a signal");
    }
    bool want_val = o->val_fraction > 0 || o->val_every_file;
    if (splits[TRAIN].tokens + splits[VAL].tokens == 0)
        return FAIL(e, ERR_INPUT, "is this the right input?", "%s: no text in it", input_name(&run->inputs.all[0]));
    for (int i = 0; i < SPLITS; i++)
        if (splits[i].tokens == 0 && (i == TRAIN || want_val))
            return FAIL(e, ERR_INPUT, "give more documents, or another share for validation",
                        "no text fell into the %s split of %s", SPLIT_NAMES[i], o->out);
    TRY(writer_publish(&run->writer, e));
    progress_show(&run->progress, run->written.taken, splits[TRAIN].tokens + splits[VAL].tokens, true);
    for (int i = 0; i < SPLITS; i++)
        if (splits[i].tokens)
            printf("%s_%s_*.bin: %" PRIu64 " tokens of %" PRIu64 " document%s in %d shard%s\n", o->out, SPLIT_NAMES[i],
                   splits[i].tokens, splits[i].documents, splits[i].documents == 1 ? "" : "s", splits[i].shards,
                   splits[i].shards == 1 ? "" : "s");
    return 0;
}

static int run_prepare(Run *run, char **names, int count, Error *e) {
    Options *o = &run->options;
    Reader *r = &run->reader;
    bool resumed = false;
    TRY(tokenizer_load(&run->tokenizer, o->tokenizer, e));
    TRY(inputs_gather(run, names, count, e));
    TRY(output_check(o, e));
    run->writer = (Writer){.o = o, .eot = tokenizer_eot(run->tokenizer)};
    run->writer.fingerprint = fingerprint(o, run->tokenizer, &run->inputs);
    r->o = run->pool.o = o;
    r->tokenizer = run->pool.tokenizer = run->tokenizer;
    r->inputs = &run->inputs;
    r->place = (Place){.line = 1};
    if (!o->force) TRY(state_load(&run->writer, &r->place, &resumed, e));
    if (!resumed) writer_remove_partial(o);
    else fprintf(stderr, "going on after %.1f MB\n", (double)r->place.taken / 1e6);
    run->written = r->place;
    run->saved = clock_seconds();
    run->progress = (Progress){.start = run->saved, .start_bytes = r->place.taken, .terminal = isatty(STDERR_FILENO)};
    bool known = true;
    for (int i = 0; i < run->inputs.count; i++) {
        run->progress.total_bytes += run->inputs.all[i].bytes;
        known = known && !run->inputs.all[i].pipe;
    }
    if (o->max_bytes && (!known || o->max_bytes < run->progress.total_bytes)) run->progress.total_bytes = o->max_bytes;
    else if (!known) run->progress.total_bytes = 0;
    return threads_start(run, e);
}

static int tokenize(int argc, char **argv, Error *e) {
    Run run = {.reader.fd = -1};
    int inputs, code;
    TRY(options_parse(argc, argv, &run.options, &inputs, e));
    if (run.options.help) return print_help(), 0;
    sigemptyset(&run.reader.signals); // blocked, and asked for between blocks: no handler, no global
    sigaddset(&run.reader.signals, SIGINT);
    sigaddset(&run.reader.signals, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &run.reader.signals, NULL);
    signal(SIGXFSZ, SIG_IGN); // a limit on file sizes is a failed write, like a full disk
    pthread_mutex_init(&run.pool.lock, NULL);
    pthread_cond_init(&run.pool.work, NULL);
    pthread_cond_init(&run.pool.done, NULL);
    bool started = false;
    TRY_GOTO(run_prepare(&run, argv, inputs, e));
    started = true;
    TRY_GOTO(run_blocks(&run, e));
    TRY_GOTO(run_finish(&run, e));
done:
    threads_stop(&run);
    writer_close(&run.writer);
    // After a bad input nothing is left. After a signal, or a full disk, the same command goes on if it has got
    // anywhere.
    if (started && (code == 0 || code == ERR_INPUT || !state_exists(&run.options))) writer_remove_partial(&run.options);
    reader_close(&run.reader);
    free(run.reader.buffer);
    inputs_free(&run.inputs);
    tokenizer_destroy(run.tokenizer);
    return code;
}

int main(int argc, char **argv) {
    Error e;
    int code = tokenize(argc, argv, &e);
    if (code) error_print(&e, 0, 1);
    return code;
}
