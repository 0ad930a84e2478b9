// reader: reads the inputs in blocks of text, finds the documents in each block, and chooses each document's split.
//
// A block's end depends on the input alone, and encoding by blocks gives the same tokens as encoding the whole input.
// So the shards depend neither on the blocks nor on the number of threads.
#pragma once

#include "text/tokenizer.h"
#include "inputs.h"

#include <stdatomic.h>

typedef struct { // a document, or a document's part in this block
    size_t at, bytes;
    size_t tokens; // set by block_encode
    bool begins;   // holds the document's first byte
    int split;
} TextPiece;

enum { FAULTS_MAX = 10 }; // most faults that a block keeps, and that a run prints

typedef struct {
    Input *input;
    uint64_t offset, line; // position of the block's first byte in the input; lines count from 1
    TextPiece *pieces;     // (capacity / 2 + 1) set by reader_next, in jsonl by block_encode; owns tokens and text
    uint16_t *tokens;      // (capacity) a token has at least one byte
    char *text;            // (capacity + 1)
    size_t bytes, capacity;
    int piece_count;
    Error faults[FAULTS_MAX]; // why the input is refused
    int fault_count;          // may exceed FAULTS_MAX
    bool ends;                // a fault ends the input: later faults are not reported
} TextBlock;

enum { LINE_BYTES_MAX = 1 << 26 }; // bytes of the longest line of JSON, and of the longest text without a space

typedef struct {
    const TokenizeOptions *o;
    const Tokenizer *tokenizer;
    Inputs *inputs;
    atomic_bool refused;             // an input is refused: stop writing, and do not wait for pipes
    atomic_ulong left_out;           // skipped lines of jsonl (--invalid skip)
    int file;                        // the input that is being read
    int fd;                          // open file of this input, or -1
    uint64_t offset, line, document; // position of buffer[0] in the file
    uint64_t taken;                  // bytes of all inputs before buffer[0]
    uint64_t tail;                   // where this file's validation part begins; UINT64_MAX: documents stay whole
    bool inside;                     // buffer[0] lies inside a document
    bool skip_newline;               // buffer[0] follows a separator: skip a newline
    bool ended;                      // the buffer holds the whole rest of the file
    bool separated;                  // a separator was found
    char *buffer;                    // (LINE_BYTES_MAX) memory that is never touched costs nothing
    size_t have;                     // bytes in `buffer`
} Reader; // the caller sets o, tokenizer, inputs, buffer, line (to 1) and fd (to -1)

// Fills *b with the next block. *got is false at the end of all inputs and after a signal. If an input cannot be read,
// its block has a fault and no text.
int reader_next(Reader *r, TextBlock *b, bool *got, Error *e);

// Looks for faults, finds the pieces of jsonl, and encodes the pieces unless an input is refused.
int block_encode(TextBlock *b, Reader *r, WordCache *cache, Error *e);
