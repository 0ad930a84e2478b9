// shards: the tokens of blocks into the shards of two splits, and the state that lets a run go on after an interruption.
#ifndef GNS_TOKENIZE_SHARDS_H
#define GNS_TOKENIZE_SHARDS_H

#include "text/shards.h"
#include "text/tokenizer.h"
#include "blocks.h"

#include <limits.h>

typedef struct {
    ShardWriter *shard; // under construction, or NULL
    int shards;         // finished
    uint64_t tokens, documents;
    int last;          // the token written last
    uint64_t in_shard; // of a state that was read: tokens in the shard under construction
} Split;

typedef struct {
    const TokenizeOptions *o;
    int eot; // -1: bytes
    uint64_t fingerprint;
    Split splits[SPLITS];
    uint64_t left_out; // lines of jsonl, not UTF-8
    bool publishing;   // all is in whole shards, of which some may have their names
} Writer;

void shard_file(const TokenizeOptions *o, int split, int shard, char out[PATH_MAX]); // PREFIX_train_000000.bin

// Writes the tokens of a block behind those before. What cannot be written is ERR_WRITE, here and below.
int writer_block(Writer *w, const TextBlock *b, Error *e);

// Opens the shards that were under construction when the state was saved.
int writer_resume(Writer *w, Error *e);

// All shards get their names, and what an earlier run left behind them goes. The state says so first: should this break
// off, the same command does the rest. end: of the input.
int writer_publish(Writer *w, const Place *end, Error *e);

void writer_close(Writer *w);                         // partial shards stay
void writer_remove_partial(const TokenizeOptions *o); // all of them

// ---------------------------------------------------------------------------------------------------------------------
// The state: PREFIX.state

// What must be the same for a run to be resumed: the vocabulary, the options that matter, and the inputs.
uint64_t state_fingerprint(const TokenizeOptions *o, const Tokenizer *t, const Inputs *inputs);

int state_save(Writer *w, const Place *p, Error *e); // when all before p has been written
bool state_exists(const TokenizeOptions *o);
void state_remove(const TokenizeOptions *o);

// Where the same command stopped: true, with the place in the input, the counts and in_shard of every split. Otherwise
// *unfit is what is wrong with the state that is there, or NULL where there is none.
bool state_read(Writer *w, const Inputs *inputs, Place *place, const char **unfit);

#endif
