// save: the checkpoints of a run. saver.h writes one; here it is decided who waits for it and who hears of a failure.
//
// | when                                             | function           | waits | a failure                              |
// | --- | --- | --- | --- |
// | --checkpoint-every, a new lowest validation loss | save_in_background | no    | is printed; training continues         |
// | the disk is full: lines of the log wait          | save_for_log       | yes   | ends the run beyond LOG_WAITS_MAX      |
// | a signal, the last step                          | save_and_wait      | yes   | ends the run                           |
// | training ends at a file                          | save_at_error      | yes   | is printed; the run ends on its error  |
//
// All ranks call these together after parallel_send_weights; save_at_error calls that itself. No checkpoint is written of
// weights that differ between ranks (ERR_RANK). A step that is saved already is not saved again.
#pragma once

#include "run/run.h"

int save_in_background(Run *r, Error *e);
int save_for_log(Run *r, Error *e);
int save_and_wait(Run *r, Error *e);
int save_at_error(Run *r, Error *e); // e: the error that ended training; gets the checkpoint as a hint

// Once a step: moves a save on (saver_advance), and prints the report of one that has ended.
int collect_save(Run *r, Error *e);

// Training ended on an error while a save may still run. If all ranks know the error, they wait for the save. If only this
// rank does, the others wait in a collective: then it waits half their timeout, to report the error before that.
void end_save(Run *r);

// ---- For the loop and the saves -------------------------------------------------------------------------------------

// Rank 0 does `work`; the other ranks wait, and compute forward passes with it if it asks.
int on_rank_0(Run *r, int (*work)(Run *r, Error *e), Error *e);

int compare_ranks(Setup *setup, Position *position, Error *e); // ERR_RANK unless all ranks have the same weights

double save_seconds(const Run *r);    // the longest so far; before the first a guess
const char *stop_cause(const Run *r); // the signal's name, or that another rank had it
