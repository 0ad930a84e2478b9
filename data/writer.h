// writer: writes the tokens of blocks to the shards of two splits.
//
// 1. One run at a time writes to a prefix: flock on PREFIX.lock.
// 2. Shards are written as PATH.partial. They get their names when all of them are whole and on disk; shards of an earlier
//    run stay until then.
// 3. The first shard of the run, KEY, gets its name last, and an earlier KEY goes first. So shards are whole if KEY
//    exists; KEY.partial without KEY says that a run was interrupted: the next one removes all that it left.
#pragma once

#include "text/shards.h"
#include "blocks.h"

typedef struct {
    const TokenizeOptions *o;
    int eot, newline; // tokens that separate documents; -1: none
    int lock;         // the open PREFIX.lock, or -1
    bool locked, opened;
    bool publishing; // KEY has no name, and others may have
    struct SplitState {
        FILE *file;      // the unfinished shard, or NULL
        int64_t in_file; // its tokens
        int shards;      // finished ones
        int last;        // the last token
        uint64_t tokens, documents;
    } split[SPLITS];
    uint64_t left_out; // lines of jsonl (--invalid skip)
} Writer;

// Acquires the prefix, creates its directory, and removes what an interrupted run left. ERR_USAGE where another run holds
// the prefix, where an input is one of its shards, and where shards exist already without --force.
int writer_open(Writer *w, const TokenizeOptions *o, const Tokenizer *t, const Inputs *inputs, Error *e);

// Appends the tokens of a block. ERR_WRITE where something cannot be written, here and below.
int writer_block(Writer *w, const TextBlock *b, Error *e);

// Gives all shards their names. Shards of an earlier run go.
int writer_publish(Writer *w, Error *e);

// Removes the unfinished shards, and all of this run's if writer_publish has failed, and the lock. {.lock = -1} is fine.
void writer_close(Writer *w);
