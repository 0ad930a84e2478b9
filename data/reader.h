// reader: from the inputs to blocks of text.
#pragma once

#include "blocks.h"

#include <stdatomic.h>

enum { BLOCK_BYTES = 1 << 20 };

typedef struct {
    const TokenizeOptions *o;
    const Tokenizer *tokenizer;
    Inputs *inputs;
    atomic_bool *refused; // some input is refused: nothing more is written, and pipes are not waited for
    bool stopped;         // by a signal
    InputPlace place;     // of buffer[0]
    int fd;               // of inputs->all[place.file], or -1
    uint64_t tail;        // where validation begins in this file; UINT64_MAX: documents are not divided
    bool ended;           // the buffer holds the rest of the file
    bool separated;       // a separator was found
    char *buffer;
    size_t have, capacity;
} Reader; // the caller sets o, tokenizer, inputs, refused, place.line to 1 and fd to -1

void reader_free(Reader *r);
bool reader_stopped(Reader *r); // asks for signals

// Fills *b with the next block; *got is false at the end of the input and after a signal. ERR_INPUT where the input
// cannot be read.
int reader_next(Reader *r, TextBlock *b, bool *got, Error *e);

// --invalid skip: leaves out the text files that are not UTF-8 throughout, and those that check_text_kind refuses. Call
// it first, since written tokens are not removed again. A signal ends it early.
int reader_leave_out(Reader *r, Error *e);
