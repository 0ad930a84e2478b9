// reader: from the inputs to blocks of text.
#ifndef GNS_TOKENIZE_READER_H
#define GNS_TOKENIZE_READER_H

#include "text/tokenizer.h"
#include "blocks.h"

#include <signal.h>
#include <stdatomic.h>

enum { BLOCK_BYTES = 1 << 20 }; // what a worker gets at a time

#define HINT_SAME_INPUT "give the same input again, or --force to start over"

typedef struct {
    const TokenizeOptions *o;
    const Tokenizer *tokenizer;
    const Inputs *inputs;
    int fd;                     // of inputs->all[place.file], or -1
    uint64_t tail;              // where validation begins in this file; UINT64_MAX: whole documents are drawn
    bool ended;                 // nothing behind what is in the buffer
    bool invalid;               // what came through a pipe into the buffer is not UTF-8
    const atomic_bool *refused; // something cannot be taken, whoever found that: nothing will be written
    Place place;                // of buffer[0]
    char *buffer;
    size_t have, capacity;
    Digester *piped; // what place.piped is taken from
    bool resumed;    // at place, and not yet known to read the same input as before
    sigset_t signals;
    bool stopped; // by a signal
} Reader;

// At the beginning of the inputs; r->signals, which are blocked and stop it, stay as they are.
int reader_init(Reader *r, const TokenizeOptions *o, const Tokenizer *tokenizer, const Inputs *inputs,
                const atomic_bool *refused, Error *e);
void reader_free(Reader *r); // all zero is fine

// Fills *b with the next block; *got is false when there is none left, or a signal came. What cannot be read, or is not
// the input of before (resumed), is ERR_INPUT.
int reader_next(Reader *r, TextBlock *b, bool *got, Error *e);

// A file that cannot be taken is read no further, if that is the one under way.
void reader_pass_over(Reader *r, int file);

// Marks what --invalid skip leaves out: the text files that are not UTF-8 from beginning to end, and what check_kind refuses.
// Before anything is read otherwise, for a document that has begun cannot be taken back. A signal ends it early.
int reader_leave_out(Reader *r, Inputs *inputs, Error *e);

// Whether the input is split by place: its last part is validation.
bool reader_has_tail(const TokenizeOptions *o, const Input *input);

#endif
