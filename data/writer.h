// writer: writes the tokens of blocks to the shards of two splits.
//
// 1. One run at a time writes to a prefix: it holds flock on PREFIX.lock.
// 2. Shards are written as PATH.partial. They get their names when all shards are whole and on disk. Until then shards
//    of an earlier run stay.
// 3. KEY is the first shard of the run. It gets its name last, and an earlier KEY is removed first. So all shards are
//    whole if KEY exists. KEY.partial without KEY shows an interrupted run, whose files the next run removes.
#pragma once

#include "text/shards.h"
#include "reader.h"

typedef struct {
    const TokenizeOptions *o;
    int eot, newline; // tokens that separate documents; -1: none
    int lock;         // descriptor of PREFIX.lock, or -1
    bool opened;      // this run owns the PATH.partial files; writer_close removes them
    struct SplitState {
        FILE *file;      // the unfinished shard, or NULL
        int64_t in_file; // tokens in `file`
        int shards;      // finished shards
        int last;        // last token written
        uint64_t tokens, documents;
    } split[SPLITS];
} Writer;

// Acquires the prefix, creates its directory, and removes what an interrupted run left. ERR_USAGE if another run holds
// the prefix, if an input is one of its shards, or if shards exist and --force is not given.
int writer_open(Writer *w, const TokenizeOptions *o, const Tokenizer *t, const Inputs *inputs, Error *e);

// Appends the tokens of a block. Both this and writer_publish return ERR_WRITE if writing fails.
int writer_block(Writer *w, const TextBlock *b, Error *e);

// Gives all shards their names. Removes the shards of an earlier run.
int writer_publish(Writer *w, Error *e);

// Removes the lock and the unfinished shards. {.lock = -1} is fine.
void writer_close(Writer *w);
