// blocks: cuts the inputs into blocks of text, finds the documents in each, and chooses each document's split.
//
// A block passes from the reader through a worker to the writer. Its end depends on the input alone. Encoding block by
// block gives the same tokens as encoding the whole, so the shards do not depend on the blocks.
#pragma once

#include "text/tokenizer.h"
#include "inputs.h"

// A position in the inputs. The next block depends on nothing else.
typedef struct {
    int file;
    uint64_t offset, line, document; // within the file; lines count from 1
    uint64_t taken;                  // bytes of all inputs before this place
    bool inside;                     // this place lies inside a document
    bool skip_newline;               // a separator ends here: skip a newline
} InputPlace;

typedef struct { // a document, or the part of one in this block
    size_t at, bytes;
    size_t tokens; // set by the worker
    bool begins;   // holds the document's first byte
    int split;
} TextPiece;

typedef struct { // a refused line of jsonl
    uint64_t line;
    const char *why;
} BadLine;
enum { BAD_LINES = 10 }; // refused lines that are printed

typedef struct {
    const Input *input;
    InputPlace start;
    char *text;
    size_t bytes, text_capacity;
    uint16_t *tokens;  // (text_capacity): no token is shorter than a byte
    TextPiece *pieces; // the reader finds them; in jsonl the worker
    int piece_count, piece_capacity;
    int left_out; // skipped lines of jsonl (--invalid skip)
    BadLine bad[BAD_LINES];
    int bad_count; // may exceed BAD_LINES
    int notes;     // bits 1 << NOTE_*
    int code;      // the worker's error code
    Error error;
} TextBlock;

int block_reserve(TextBlock *b, size_t bytes, Error *e);      // makes room for `bytes` of text; drops the old text
int block_add_piece(TextBlock *b, TextPiece piece, Error *e); // ignores an empty one
void block_free(TextBlock *b);

// Called by the worker. block_check returns ERR_INPUT for refused text, and finds the pieces of jsonl.
int block_check(TextBlock *b, const TokenizeOptions *o, Error *e);
int block_encode(TextBlock *b, Encoder *encoder, Error *e);

uint64_t count_lines(const char *text, size_t bytes); // counts newlines

// Returns ERR_INPUT if an input begins like gzip, zstd, parquet, UTF-16 or a Git LFS pointer; names a remedy.
int check_text_kind(const Input *input, const char *text, size_t bytes, Error *e);

// Return ERR_INPUT with "INPUT line N: WHY".
int fail_at_bad_line(Error *e, const Input *input, const BadLine *bad);
int fail_at_line(Error *e, const Input *input, uint64_t line, const char *hint, const char *why);

// Returns the split of a whole document: number `document` (in jsonl: its line) of input number `file`.
int document_split(const TokenizeOptions *o, const Input *input, int file, uint64_t document);
