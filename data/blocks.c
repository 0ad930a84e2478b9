#define _GNU_SOURCE // memmem
#include "blocks.h"
#include "base/hash.h"
#include "jsonl.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { KEEP_BYTES = 4 << 20 }; // block_reserve frees a larger buffer that it does not need

#define HINT_INVALID "repair it, or say --invalid bytes to take it as it is, --invalid skip to leave it out"

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
        if (!pieces) return FAIL(e, ERR_MEMORY, NULL, "out of memory: the documents of a block");
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

int fail_at_line(Error *e, const Input *input, uint64_t line, const char *hint, const char *why) {
    return FAIL(e, ERR_INPUT, hint, "%s line %" PRIu64 ": %s", input_name(input), line, why);
}

static const char not_utf8[] = "its text is not valid UTF-8";

int fail_at_bad_line(Error *e, const Input *input, const BadLine *bad) {
    const char *hint = "every line must be a JSON object with a text field: see --field; --invalid skip leaves such "
                       "lines out";
    return fail_at_line(e, input, bad->line, bad->why == not_utf8 ? HINT_INVALID : hint, bad->why);
}

// ---- Checking the text ----------------------------------------------------------------------------------------------

int check_text_kind(const Input *input, const char *text, size_t bytes, Error *e) {
    static const struct {
        const char *begin, *what, *command;
    } kinds[] = {{"\x1f\x8b", "gzip, not text", "zcat"},
                 {"\x28\xb5\x2f\xfd", "zstd, not text", "zstdcat"},
                 {"PAR1", "parquet, not text", "data/parquet_to_jsonl.py"},
                 {"version https://git-lfs", "a Git LFS pointer, not the text", NULL},
                 {"\xff\xfe", "UTF-16, not UTF-8", "iconv -f UTF-16 -t UTF-8"},
                 {"\xfe\xff", "UTF-16, not UTF-8", "iconv -f UTF-16 -t UTF-8"}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        size_t length = strlen(kinds[i].begin);
        if (bytes < length || memcmp(text, kinds[i].begin, length) != 0) continue;
        FAIL(e, ERR_INPUT, "git lfs pull fetches the text", "%s: is %s", input_name(input), kinds[i].what);
        if (!kinds[i].command) return e->code;
        return error_hint(e, "say %s %s | data/tokenize ... %s-", kinds[i].command, input->path,
                          input->jsonl ? "--format jsonl " : "");
    }
    return 0;
}

// Decodes the text of every line in place. Skips a byte order mark before the first line.
static int block_parse_jsonl(TextBlock *b, const TokenizeOptions *o, Error *e) {
    uint64_t line = b->start.line;
    for (size_t at = b->start.offset ? 0 : utf8_mark(b->text, b->bytes), end; at < b->bytes; at = end + 1, line++) {
        char *newline = memchr(b->text + at, '\n', b->bytes - at);
        end = newline ? (size_t)(newline - b->text) : b->bytes;
        size_t first = at;
        while (first < end && (b->text[first] == ' ' || b->text[first] == '\t' || b->text[first] == '\r')) first++;
        if (first == end) continue; // a blank line
        TextPiece piece = {.at = at, .begins = true, .split = document_split(o, b->input, b->start.file, line)};
        const char *why = jsonl_field(b->text + at, end - at, o->field, &piece.bytes);
        bool checks = !why && o->invalid != INVALID_BYTES;
        if (checks && utf8_invalid_at(b->text + at, piece.bytes) < piece.bytes) why = not_utf8;
        if (!why) TRY(block_add_piece(b, piece, e));
        else if (o->invalid == INVALID_SKIP) b->left_out++;
        else if (b->bad_count++ < BAD_LINES) b->bad[b->bad_count - 1] = (BadLine){line, why};
    }
    return b->bad_count ? fail_at_bad_line(e, b->input, &b->bad[0]) : 0;
}

int block_check(TextBlock *b, const TokenizeOptions *o, Error *e) {
    if (b->start.offset == 0 && o->invalid != INVALID_BYTES) TRY(check_text_kind(b->input, b->text, b->bytes, e));
    if (b->input->jsonl) return block_parse_jsonl(b, o, e);
    bool eot = !*o->separator && memmem(b->text, b->bytes, "<|endoftext|>", 13);
    bool mark = b->start.offset == 0 && utf8_mark(b->text, b->bytes);
    b->notes = eot << NOTE_EOT | mark << NOTE_MARK;
    for (int i = 0; i < b->piece_count && o->invalid == INVALID_ERROR; i++) {
        size_t at = b->pieces[i].at, bytes = b->pieces[i].bytes, bad = utf8_invalid_at(b->text + at, bytes);
        if (bad == bytes) continue;
        char why[80];
        bad += at;
        snprintf(why, sizeof why, "byte 0x%02x at offset %" PRIu64 " is not valid UTF-8", (uint8_t)b->text[bad],
                 b->start.offset + bad);
        return fail_at_line(e, b->input, b->start.line + count_lines(b->text, bad), HINT_INVALID, why);
    }
    return 0;
}

int block_encode(TextBlock *b, Encoder *encoder, Error *e) {
    uint16_t *tokens = b->tokens;
    for (int i = 0; i < b->piece_count; i++) {
        TextPiece *piece = &b->pieces[i];
        TRY(encoder_run(encoder, b->text + piece->at, piece->bytes, tokens, &piece->tokens, e));
        tokens += piece->tokens;
    }
    return 0;
}

// ---- Which documents are validation ---------------------------------------------------------------------------------

int document_split(const TokenizeOptions *o, const Input *input, int file, uint64_t document) {
    // By path: a file keeps its split when files are added or removed.
    if (o->val_every_file)
        return hash_finish(hash_bytes(HASH_START, input->path, strlen(input->path))) % (uint64_t)o->val_every_file == 0;
    if (o->split != SPLITS) return o->split;
    // By number: the same files in the same order give the same split wherever they are.
    uint64_t key[2] = {(uint64_t)file, document};
    return (double)(hash_finish(hash_bytes(HASH_START, key, sizeof key)) >> 11) < o->val_fraction * 0x1p53;
}
