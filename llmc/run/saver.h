// saver: writes checkpoints while training goes on. A thread of its own copies the state, which no one changes before the
// next update (saver_settle); writes the copy down, verifies it and thins out the older ones. Where ranks share the
// state out they put their parts into the copy first, between two steps. One save at a time.
//
//     step_NNNNNNNN/  model.safetensors, config.json, optimizer.safetensors   (checkpoint)
//                     the tokenizer's files, where one is known               (tokenizer)
//                     state.json                                              (run_state)
//                     MANIFEST.json                                           (manifest)
#pragma once

#include "checkpoint/archive.h"
#include "checkpoint/checkpoint.h"
#include "run/metrics.h"
#include "ranks/parallel.h"
#include "text/tokenizer.h"

typedef struct Saver Saver;

typedef struct {
    const char *out; // the run directory
    Engine *engine;  // outlives the saver
    const Model *model;
    const Tokenizer *tokenizer; // may be NULL
    TextTokens text;            // for config.json
    int64_t keep;               // complete checkpoints to leave; 0: all
    const Metrics *metrics;     // to be on the disk as far as the state says
} SaverConfig;

// What became of a save.
typedef struct {
    int64_t step;
    Error error;      // code 0: it is on the disk, under its name, verified
    Error note;       // code 0, or what went wrong beside it: an older one could not be removed
    char notes[8192]; // lines for stderr: files that stay of checkpoints that were removed
    Removed removed;  // older ones, before it was written, for want of room
    char directory[ARCHIVE_PATH];
    double seconds;          // from the snapshot to the rename
    double snapshot_seconds; // of those, until the snapshot was taken
    double stall_seconds;    // how long training stood still
} SaveReport;

// The copy on rank 0 that a checkpoint is made of: so many arrays, which begin so many floats apart, at whole pages.
enum { SAVER_ARRAYS = 3 };
size_t saver_copy_stride(const Model *model);

// Bytes that a checkpoint takes on the disk, state.json apart.
uint64_t saver_checkpoint_bytes(const Model *model, const Tokenizer *tokenizer);

int saver_create(Saver **out, const SaverConfig *config, Error *e);
void saver_destroy(Saver *saver); // waits for a save under way; NULL is fine

// Takes the memory for the copy that saver_start needs, and touches and pins it in the background: a system hands out
// fresh memory so slowly that training would stand still for seconds at the first save.
// Without it the first save does so.
// memory: what outlives the saver, to be used for it (parallel_share_copy); NULL: it takes its own.
int saver_prepare(Saver *saver, float *memory, Error *e);

// Whatever `keep` says: until the next save has succeeded the checkpoint of step `before` stays, and from then on that
// of step `after`; -1: of none.
void saver_stay(Saver *saver, int64_t before, int64_t after);

// On rank 0, while the others serve (parallel_serve): takes the snapshot and returns; none may be under way. Takes
// `state` over, from malloc, whatever comes out.
int saver_start(Saver *saver, Parallel *parallel, int64_t step, char *state, size_t state_bytes, Error *e);

// Likewise: saves and waits, straight from the engines: takes no memory for a copy. None may be under way.
void saver_run(Saver *saver, Parallel *parallel, int64_t step, char *state, size_t state_bytes, SaveReport *report);

// Before every update: waits until the snapshot of a save under way is taken. NULL is fine.
void saver_settle(Saver *saver);

// Waits for a save under way, so many seconds at most. Is none any more? served: where the others serve meanwhile, they
// are told as it gets on; NULL: they do not.
bool saver_wait(const Saver *saver, double seconds, Parallel *served);

// Has a save ended, since it was asked last? `wait`: waits for one that is under way.
bool saver_collect(Saver *saver, bool wait, SaveReport *report);
