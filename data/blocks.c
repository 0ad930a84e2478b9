#define _POSIX_C_SOURCE 200809L
#include "blocks.h"
#include "base/hash.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { KEEP_BYTES = 4 << 20 }; // a block's buffers that grew beyond this are given back

const char *const SPLIT_NAMES[SPLITS] = {"train", "val"};

int block_reserve(TextBlock *b, size_t bytes, Error *e) {
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

int block_add_piece(TextBlock *b, TextPiece piece, Error *e) {
    if (piece.bytes == 0) return 0;
    if (b->piece_count == b->piece_capacity) {
        int capacity = b->piece_capacity ? 2 * b->piece_capacity : 64;
        TextPiece *pieces = realloc(b->pieces, (size_t)capacity * sizeof *pieces);
        if (!pieces) return FAIL(e, ERR_MEMORY, NULL, "out of memory: documents of a block");
        b->pieces = pieces;
        b->piece_capacity = capacity;
    }
    b->pieces[b->piece_count++] = piece;
    return 0;
}

void block_free(TextBlock *b) {
    memory_free(b->text);
    memory_free(b->tokens);
    free(b->pieces);
}

uint64_t count_lines(const char *text, size_t bytes) {
    uint64_t lines = 0;
    for (const char *end = text + bytes; (text = memchr(text, '\n', (size_t)(end - text))); text++) lines++;
    return lines;
}

int check_kind(const Input *input, const char *text, size_t bytes, Error *e) {
    static const struct {
        const char *begin, *what, *command;
    } kinds[] = {{"\x1f\x8b", "gzip, not text", "zcat"},
                 {"\x28\xb5\x2f\xfd", "zstd, not text", "zstdcat"},
                 {"\xff\xfe", "UTF-16, not UTF-8", "iconv -f UTF-16 -t UTF-8"},
                 {"\xfe\xff", "UTF-16, not UTF-8", "iconv -f UTF-16 -t UTF-8"}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        size_t length = strlen(kinds[i].begin);
        if (bytes < length || memcmp(text, kinds[i].begin, length) != 0) continue;
        FAIL(e, ERR_INPUT, NULL, "%s: is %s", input_name(input), kinds[i].what);
        return error_hint(e, "say %s %s | data/tokenize ... %s-", kinds[i].command, input->path,
                          input->jsonl ? "--format jsonl " : "");
    }
    return 0;
}

size_t byte_order_mark(const char *text, size_t bytes) {
    return bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
}

int fail_at_line(Error *e, const Input *input, uint64_t line, const char *hint, const char *why) {
    return FAIL(e, ERR_INPUT, hint, "%s line %" PRIu64 ": %s", input_name(input), line, why);
}

// ---------------------------------------------------------------------------------------------------------------------
// Which documents are validation

enum { HASH_BITS = 53 }; // what a double holds

int split_of(const TokenizeOptions *o, const Input *input, int file, uint64_t document) {
    // By path as it is given, so that a file keeps its split when others come and go.
    if (o->val_every_file)
        return hash_finish(hash_bytes(HASH_START, input->path, strlen(input->path))) % o->val_every_file == 0;
    // By number, not by path: the same files in the same order give the same split wherever they lie.
    if (o->split) return strcmp(o->split, "val") == 0 ? VAL : TRAIN;
    uint64_t key[2] = {(uint64_t)file, document};
    uint64_t hash = hash_finish(hash_bytes(HASH_START, key, sizeof key)) >> (64 - HASH_BITS);
    return (double)hash < o->val_fraction * (double)((uint64_t)1 << HASH_BITS);
}

bool owns_split(const TokenizeOptions *o, int split) { return !o->split || strcmp(o->split, SPLIT_NAMES[split]) == 0; }

bool fills_split(const TokenizeOptions *o, int split) {
    return o->val_fraction > 0 || o->val_every_file || (o->split ? owns_split(o, split) : split == TRAIN);
}
