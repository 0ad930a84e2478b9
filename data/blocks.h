// blocks: the inputs cut into blocks of text, each with the documents in it, and the split that each document goes to.
//
// A block passes from the reader through a worker to the writer. Where it ends is a function of the input alone, and
// such that encoding the blocks is encoding the whole: so it does not show in what comes out.
#ifndef GNS_TOKENIZE_BLOCKS_H
#define GNS_TOKENIZE_BLOCKS_H

#include "base/files.h"
#include "inputs.h"
#include "settings.h"

enum { TRAIN, VAL, SPLITS };
extern const char *const SPLIT_NAMES[SPLITS]; // "train", "val"

// A place in the input. Everything that decides what the next block is.
typedef struct {
    int file;
    uint64_t offset, line, document; // in the file; lines count from 1
    uint64_t taken;                  // bytes of input before this place
    int inside;                      // the document that goes on here has begun before
    int skip_newline;                // a separator has just ended
    FileDigest piped;                // of the input before this place, what came through pipes
} Place;

typedef struct { // a document, or a part of one
    size_t at, bytes;
    size_t tokens; // set by the worker
    bool begins;   // with the document's first byte
    int split;
} TextPiece;

typedef struct {
    enum { BLOCK_FREE, BLOCK_FILLED, BLOCK_TAKEN, BLOCK_DONE } state;
    const Input *input;
    bool jsonl; // the pieces are the worker's to find
    Place start, end;
    char *text;
    size_t bytes, text_capacity;
    uint16_t *tokens; // (text_capacity): a byte is at most a token
    TextPiece *pieces;
    int piece_count, piece_capacity;
    int left_out; // lines of jsonl, not UTF-8 (--invalid skip)
    int code;     // of the worker
    Error error;
} TextBlock;

int block_reserve(TextBlock *b, size_t bytes, Error *e);      // room for so much text; what there was is lost
int block_add_piece(TextBlock *b, TextPiece piece, Error *e); // an empty one is passed over
void block_free(TextBlock *b);

uint64_t count_lines(const char *text, size_t bytes); // of newlines

// What an input's first bytes say that is no UTF-8 text at all (gzip, UTF-16): ERR_INPUT, and how text is made of it.
int check_kind(const Input *input, const char *text, size_t bytes, Error *e);

// The length of the byte order mark that the text begins with, or 0.
size_t byte_order_mark(const char *text, size_t bytes);

// "INPUT line N: WHY", ERR_INPUT.
int fail_at_line(Error *e, const Input *input, uint64_t line, const char *hint, const char *why);

// ---------------------------------------------------------------------------------------------------------------------
// Which documents are validation

// The split of document number `document` (by line, in jsonl) of input number `file`, where whole documents are drawn.
int split_of(const TokenizeOptions *o, const Input *input, int file, uint64_t document);

bool owns_split(const TokenizeOptions *o, int split);  // whether a run may refuse or replace what is there
bool fills_split(const TokenizeOptions *o, int split); // whether it must put something into it

#endif
