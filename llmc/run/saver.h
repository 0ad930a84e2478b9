// saver: writes checkpoints while training continues, on a thread of its own.
//
//     step_NNNNNNNN/  model.safetensors                                      (layout)
//                     config.json, generation_config.json                    (checkpoint)
//                     the tokenizer's files, where one is known              (tokenizer)
//                     MANIFEST.json                                          (manifest)
//       training/     optimizer.safetensors, state.json                      (layout, run_state): what only a resume needs
//
// What the main thread and the saver's thread promise each other:
//   1. At most one save is running. The main thread starts it (saver_start, saver_run) and ends it (saver_collect).
//   2. A checkpoint is the state after one step. The text of state.json is fixed when the save starts. Weights and
//      moments do not change until the snapshot is taken: every update waits for it (saver_await_snapshot).
//   3. Where rank 0's engine holds the whole state, the thread takes the snapshot. Otherwise the main thread takes it
//      in saver_start, while the other ranks send their parts (parallel_serve); with --zero 3 every rank copies its
//      own, and the thread reads those copies.
//   4. Between saver_start and saver_collect the thread owns the copy, the text of state.json and the report. The main
//      thread reads only the atomics `ended` and `pieces`.
//   5. Only the main thread talks to other ranks. The thread counts the pieces of its work; while other ranks wait, the
//      main thread sends them a heartbeat for each (saver_collect).
//   6. A checkpoint gets its name when its files and the metrics are on the disk, except lines that could not be
//      written (metrics.h). Older checkpoints are removed after it has been read back and verified; earlier only if the
//      disk has no room for both.
#pragma once

#include "checkpoint/archive.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"
#include "run/metrics.h"
#include "ranks/parallel.h"
#include "text/tokenizer.h"

typedef struct Saver Saver;

typedef struct {
    const Archive *archive;
    Engine *engine; // outlives the saver
    const Model *model;
    const Tokenizer *tokenizer; // may be NULL
    TextTokens text;            // for config.json
    int64_t keep;               // complete checkpoints to keep; 0: all
    const Metrics *metrics;     // synced before the checkpoint gets its name
    double dropout;             // for config.json
} SaverConfig;

// The outcome of a save.
typedef struct {
    int64_t step;
    Error error;      // code 0: the checkpoint is on the disk, under its name, verified
    Error note;       // code 0, or why an older checkpoint could not be removed
    char notes[8192]; // lines for stderr: files left over from removed checkpoints
    Removed removed;  // older checkpoints, removed beforehand to make room
    char directory[ARCHIVE_PATH];
    double seconds;          // from the snapshot to the rename
    double snapshot_seconds; // of those, until the snapshot was taken
    double stall_seconds;    // how long training paused
} SaveReport;

// The copy on rank 0: this many arrays, whose beginnings are saver_copy_stride floats apart, at whole pages.
enum { SAVER_ARRAYS = 3 };
size_t saver_copy_stride(const Model *model);

// Bytes of a checkpoint on the disk, without state.json.
uint64_t saver_checkpoint_bytes(const Model *model, const Tokenizer *tokenizer);

int saver_create(Saver **out, const SaverConfig *config, Error *e);
void saver_destroy(Saver *saver); // waits for a running save; NULL is fine

// Allocates the copy, and touches and pins it in the background: the first touch of fresh memory takes seconds, for
// which training would stand still at the first save. Without this call saver_start does it.
// memory: used instead (parallel_share_copy); outlives the saver; may be NULL.
int saver_prepare(Saver *saver, float *memory, Error *e);

// Keeps the checkpoint of step `before` until the next save has succeeded, and that of step `after` from then on,
// regardless of config.keep. -1: none.
void saver_protect(Saver *saver, int64_t before, int64_t after);

// Starts a save on rank 0, while the other ranks serve (parallel_serve), and returns when their parts are copied. Owns
// `state` (from malloc), also on failure.
int saver_start(Saver *saver, Parallel *parallel, int64_t step, char *state, size_t state_bytes, Error *e);

// The same, but saves straight from the engines, without a copy, and returns when it is done.
void saver_run(Saver *saver, Parallel *parallel, int64_t step, char *state, size_t state_bytes, SaveReport *report);

// Waits until the snapshot of a running save is taken. NULL is fine.
void saver_await_snapshot(Saver *saver);

// Waits at most this long for a running save; true if it has ended, with its report (may be NULL). served: the other
// ranks serve meanwhile (parallel_serve) and get heartbeats; otherwise NULL. A NULL saver has no save.
bool saver_collect(Saver *saver, double seconds, Parallel *served, SaveReport *report);
