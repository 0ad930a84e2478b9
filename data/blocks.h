// blocks: the inputs cut into blocks of text, the documents in each, and the split that a document belongs to.
//
// A block passes from the reader through a worker to the writer. Where it ends depends on the input alone, and encoding
// block by block gives the same tokens as encoding the whole: the shards do not depend on the blocks.
#pragma once

#include "text/tokenizer.h"
#include "inputs.h"

// A position in the inputs: everything that the next block depends on.
typedef struct {
    int file;
    uint64_t offset, line, document; // in the file; lines count from 1
    uint64_t taken;                  // bytes of input before this place
    bool inside;                     // a document that began earlier continues here
    bool skip_newline;               // a separator ends here
} InputPlace;

typedef struct { // a document, or a part of one
    size_t at, bytes;
    size_t tokens; // set by the worker
    bool begins;   // it holds the document's first byte
    int split;
} TextPiece;

typedef struct { // a line of jsonl that is refused
    uint64_t line;
    const char *why;
} BadLine;
enum { BAD_LINES = 10 }; // that are named

typedef struct {
    const Input *input;
    InputPlace start;
    char *text;
    size_t bytes, text_capacity;
    uint16_t *tokens;  // (text_capacity): no token is shorter than a byte
    TextPiece *pieces; // found by the reader; in jsonl by the worker
    int piece_count, piece_capacity;
    int left_out; // lines of jsonl (--invalid skip)
    BadLine bad[BAD_LINES];
    int bad_count; // may be larger
    int notes;     // on a text: 1 << NOTE_*
    int code;      // of the worker
    Error error;
} TextBlock;

int block_reserve(TextBlock *b, size_t bytes, Error *e);      // room for so much text; drops the old text
int block_add_piece(TextBlock *b, TextPiece piece, Error *e); // an empty one is ignored
void block_free(TextBlock *b);

// For the worker. block_check: ERR_INPUT if the text is not acceptable. It also finds the pieces of jsonl.
int block_check(TextBlock *b, const TokenizeOptions *o, Error *e);
int block_encode(TextBlock *b, Encoder *encoder, Error *e);

uint64_t count_lines(const char *text, size_t bytes); // newlines

// ERR_INPUT, with the command that converts it, if an input's first bytes are gzip, zstd or UTF-16.
int check_text_kind(const Input *input, const char *text, size_t bytes, Error *e);

// "INPUT line N: WHY", ERR_INPUT.
int fail_at_bad_line(Error *e, const Input *input, const BadLine *bad);
int fail_at_line(Error *e, const Input *input, uint64_t line, const char *hint, const char *why);

// The split of document number `document` (in jsonl: its line) of input number `file`, where documents stay whole.
int document_split(const TokenizeOptions *o, const Input *input, int file, uint64_t document);
