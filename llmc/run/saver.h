// saver: writes checkpoints while training continues. Every rank has one, with a thread that writes what the rank owns at
// its places in the files (layout.h).
//
//     step_NNNNNNNN/  model.safetensors                                      (layout)
//                     config.json, generation_config.json                    (checkpoint)
//                     the tokenizer's files, where one is known              (tokenizer)
//                     MANIFEST.json                                          (manifest)
//       training/     optimizer.safetensors, state.json                      (layout, run_state): what only a resume needs
//
// A save, on all ranks:
//
//     idle --saver_start--> writing --saver_advance, when no rank writes--> idle (the other ranks)
//                                                                       `--> finishing (rank 0) --saver_collect--> idle
//
// What the main threads and the savers' threads promise each other:
//   1. At most one save is running. All main threads start it together (saver_start), and leave `writing` together: the
//      sums of saver_counts over the ranks tell them that no rank writes any more.
//   2. A checkpoint is the state after one step. The text of state.json is fixed when the save starts. Weights and
//      moments do not change until the rank's snapshot is taken: every update waits for it (saver_await_snapshot).
//   3. Where rank 0's engine holds the whole state, its thread takes the snapshot; otherwise each main thread takes its
//      rank's. Without memory for a copy there is no snapshot: the thread reads the engine, and the update waits.
//   4. Rank 0 creates the files. Each rank opens them once and writes only through these descriptors, only its own pieces.
//   5. While writing or finishing, the thread owns the copy, the pieces, the text of state.json and the report. The main
//      thread reads only the atomics `ended` and `done`.
//   6. Only main threads talk to other ranks. If one rank fails, all give the save up.
//   7. A checkpoint gets its name when its files and the metrics are on the disk, except lines that could not be
//      written (metrics.h), and after it has been read back; before that, if the run waits for the save. Older checkpoints
//      are removed after it was read back; earlier only if the disk has no room for both.
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
    Parallel *parallel;
    Engine *engine; // outlives the saver
    const Model *model;
    const Tokenizer *tokenizer; // may be NULL
    TextTokens text;            // for config.json
    int64_t keep;               // complete checkpoints to keep; 0: all
    const Metrics *metrics;     // synced before the checkpoint gets its name; rank 0's
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
    double seconds;          // until it was read back
    double snapshot_seconds; // of those, until the snapshot was taken
    double stall_seconds;    // how long training paused, on this rank
} SaveReport;

// Bytes of a checkpoint on the disk, without state.json.
uint64_t saver_checkpoint_bytes(const Model *model, const Tokenizer *tokenizer);

int saver_create(Saver **out, const SaverConfig *config, Error *e);
void saver_destroy(Saver *saver); // waits for the thread; NULL is fine

// Allocates the copy of what this rank owns, and touches and pins it in the background: the first touch of fresh memory
// takes seconds, for which training would stand still at the first save. Without this call, or memory, there is no copy.
void saver_prepare(Saver *saver);

// Keeps the checkpoint of step `before` until the next save has succeeded, and that of step `after` from then on,
// regardless of config.keep. -1: none.
void saver_protect(Saver *saver, int64_t before, int64_t after);

// On rank 0, before saver_start: makes room, and creates the files. Owns `state` (from malloc), also on failure. named: the
// checkpoint gets its name before it is read back.
int saver_begin(Saver *saver, int64_t step, char *state, size_t state_bytes, bool named, Error *e);

// All ranks together: starts to write. A failure of this rank is one of the save, which saver_advance reports.
void saver_start(Saver *saver, int64_t step);

// Waits until this rank's state may change. NULL is fine.
void saver_await_snapshot(Saver *saver);

// 1 or 0: this rank writes; it has failed to. And how many pieces it has done, of all saves. NULL: zeros.
typedef struct {
    double writing, failed, done;
} SaverCounts;
SaverCounts saver_counts(const Saver *saver);

// All ranks together, with the sums of their counts. Once no rank writes, rank 0 receives the digests, lists the files in
// the manifest and finishes the save on its thread, unless some rank failed.
int saver_advance(Saver *saver, const SaverCounts *sums, Error *e);

bool saver_is_writing(const Saver *saver); // the same on all ranks

// On rank 0: true if a save has ended since the last call, with its report. On other ranks false.
bool saver_collect(Saver *saver, SaveReport *report);
bool saver_is_finishing(const Saver *saver);
