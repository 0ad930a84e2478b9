// reader: reads the inputs into blocks of text.
#pragma once

#include "blocks.h"

#include <stdatomic.h>

enum { BLOCK_BYTES = 1 << 20 };

typedef struct {
    const TokenizeOptions *o;
    const Tokenizer *tokenizer;
    Inputs *inputs;
    atomic_bool *refused; // an input is refused: stop writing, and do not wait for pipes
    bool stopped;         // a signal arrived
    InputPlace place;     // the position of buffer[0]
    int fd;               // the open inputs->all[place.file], or -1
    uint64_t tail;        // offset of validation in this file; UINT64_MAX: documents stay whole
    bool ended;           // the buffer holds all the rest of the file
    bool separated;       // a separator was found
    char *buffer;
    size_t have, capacity;
} Reader; // the caller sets o, tokenizer, inputs, refused, place.line to 1 and fd to -1

void reader_free(Reader *r);
bool reader_stopped(Reader *r); // true after a signal

// Fills *b with the next block. *got is false at the end of the input and after a signal. ERR_INPUT if the input cannot
// be read.
int reader_next(Reader *r, TextBlock *b, bool *got, Error *e);

// For --invalid skip: leaves out text files that are not all UTF-8, and files that check_text_kind refuses. Call it
// first: written tokens are not removed again. A signal ends it early.
int reader_leave_out(Reader *r, Error *e);
