// shards: writes the tokens of blocks to the shards of two splits, and PREFIX.state, to resume an interrupted run.
//
// 1. The shards of a run are written as PATH.partial. They get their names when all of them are whole and on disk.
// 2. PREFIX.state names a place in the input, and how many tokens of each split come from before it. It is replaced as
//    a whole, after the sync of these tokens. A resumed run cuts off the tokens after them.
// 3. Its fingerprint covers the options, the vocabulary and the inputs: another command starts over. The text of pipes
//    is read again and compared by digest (reader.c).
// 4. Before the first shard gets its name, the state says `publishing`; it is removed after the last. In between the
//    same command renames the remaining shards; another command is refused as soon as one shard has its name.
#pragma once

#include "text/shards.h"
#include "blocks.h"

typedef struct { // as it is in the file
    uint64_t fingerprint;
    Place place; // all text before it has been written
    struct SplitState {
        int shards; // full ones
        int last;   // the last token
        uint64_t tokens, documents;
        uint64_t in_shard; // tokens in the unfinished shard
    } split[SPLITS];
    uint64_t left_out; // lines of jsonl that are not UTF-8
    bool publishing;
} State;

typedef struct {
    const TokenizeOptions *o;
    int eot; // -1: bytes
    State state;
    ShardWriter *shard[SPLITS]; // unfinished, or NULL
    bool saved;                 // a state of this run is on disk
    int lock;                   // the open PREFIX.lock, or -1
    bool locked;
} Writer;

// A writer of no tokens yet, with the fingerprint of its run.
Writer writer_create(const TokenizeOptions *o, const Tokenizer *t, const Inputs *inputs);

// One run at a time writes to a prefix: flock on PREFIX.lock, which writer_unlock removes. ERR_USAGE for a second run.
int writer_lock(Writer *w, Error *e);
void writer_unlock(Writer *w);

// ERR_USAGE if an input is one of the prefix's shards, finished or not.
int writer_check_inputs(const Writer *w, const Inputs *inputs, Error *e);

// ERR_USAGE where shards exist already, and --force is not given.
int writer_check_free(const Writer *w, Error *e);

// Appends the tokens of a block. ERR_WRITE where something cannot be written, here and below.
int writer_block(Writer *w, const TextBlock *b, Error *e);

int writer_resume(Writer *w, Error *e); // opens the unfinished shards of w->state

int writer_stopped(Error *e); // ERR_STOPPED: after a signal

// Gives all shards their names, and removes those of an earlier run that come after them. ERR_STOPPED on a signal.
int writer_publish(Writer *w, Error *e);

void writer_close(Writer *w);                // keeps unfinished shards
void writer_remove_partial(const Writer *w); // of both splits
int state_save(Writer *w, Error *e);         // syncs the shards first
void state_remove(const Writer *w);

// Reads the state of an interrupted run into w->state. *resumed is false where there is none, and where it does not fit
// this run: *unfit says why, NULL if there is none. ERR_INPUT where it cannot be read.
int state_read(Writer *w, bool *resumed, const char **unfit, Error *e);
