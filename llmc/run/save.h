// save: the checkpoints of a run. Every rank writes what it owns at its places in the files (layout.h), on a thread,
// while training continues.
//
// | when                                         | function           | waits | a failure                            |
// | --- | --- | --- | --- |
// | --checkpoint-every, a lowest validation loss | save_in_background | no    | is printed; training continues       |
// | a signal, the last step                      | save_and_wait      | yes   | ends the run                         |
// | a file's error ends training                 | save_at_error      | yes   | is printed; the run ends on its error |
//
// All ranks call these together, and compare_ranks before them; save_at_error calls it itself. No step is saved twice.
//
// dev/docs/code.md lists a checkpoint's files, and draws the states of a save.
//
// What the main threads and the saves' threads promise each other:
//   1. At most one save runs. All main threads start it together. They leave `writing` together, when the sum of
//      saver_writes over the ranks is 0.
//   2. A checkpoint is the state after one step. Each rank's thread first copies what the rank owns; the main thread
//      awaits the copy before the next update (await_copy). If a rank has no memory for the copy, its thread reads the
//      engine, and all ranks wait until everything is written. compare_ranks has awaited all weights, so engine_store
//      waits for no transfer. With --tensor each rank writes a part of the whole model: the main threads first exchange
//      the values of these parts into the copies, while training waits.
//   3. Rank 0 creates the files. Each rank opens them once and writes only through these descriptors, only its pieces.
//   4. While writing or finishing, the thread owns the copy, the pieces, the text of state.json, the manifest, the
//      notes and the error. The main thread reads only the atomics `copying`, `ended` and `done`.
//   5. Only main threads talk to other ranks. If one rank fails, all ranks give the save up.
//   6. A checkpoint gets its name when its files and metrics.jsonl are on the disk; lines of the log may still wait in
//      memory (metrics.h). The checkpoint is then read back, and removed if it differs. Older checkpoints are removed
//      last, or first if the disk lacks room for the new checkpoint and the waiting lines.
#pragma once

#include "model/model.h"
#include "text/tokenizer.h"

typedef struct Run Run;
typedef struct Saver Saver;

// Bytes of a checkpoint on the disk, without state.json.
uint64_t saver_checkpoint_bytes(const Model *model, const Tokenizer *tokenizer);

int saver_create(Saver **out, const Run *r, Error *e);

// All ranks call it before a run that saves in the background. Allocates the copy of what this rank owns. A thread
// touches and pins the copy: the first touch of fresh memory takes seconds, in which training would stand still.
int saver_prepare(Saver *saver, Error *e);
void saver_destroy(Saver *saver); // waits for the thread; saver may be NULL

int save_in_background(Run *r, Error *e);
int save_and_wait(Run *r, Error *e);

void await_copy(Run *r); // call before every update

double saver_writes(const Saver *saver); // 1 if this rank writes, else 0

// Call once per step, with the sum of saver_writes over all ranks in r->saving.writing. Advances a running save, and
// reports an ended one. Then tries to write the lines of the log that wait because the disk was full.
int collect_save(Run *r, Error *e);

// Call when training ended on the error e, while transfers and a save may still run. If all ranks know the error, they
// wait for both; after an error of a file they first save this step, and e's hint names the checkpoint. An error that
// only this rank knows ends the job at once, and with it a save; a checkpoint that has its name stays. code: e's.
void save_at_error(Run *r, int code, Error *e);

// ---- For the loop and the saves -------------------------------------------------------------------------------------

int compare_ranks(Run *r, Error *e); // ERR_RANK unless all ranks have the same weights

double save_seconds(const Run *r);    // seconds of the longest save so far; a guess before the first save
const char *stop_cause(const Run *r); // the signal's name, or what else stops the run
