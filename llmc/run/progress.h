// progress: shows a run to a person, as one line that updates itself on a terminal, as plain lines elsewhere.
//
// The main thread reports what it begins (progress_begin) and how far it is (progress_next). A second thread wakes ten
// times a second: it shows work that takes longer than 1 s (10 s in a log), and acknowledges a signal at once.
//
//   1. The thread shows work only between progress_begin and progress_end. progress_break silences the thread until the
//      next progress_begin. So the main thread calls progress_break before it prints other output while work runs.
//   2. The lock of `ticker` guards everything here.
//
// Only rank 0 shows progress. On other ranks Progress is {0}, and every function does nothing.
#pragma once

#include "base/thread.h"
#include "run/metrics.h"

typedef struct {
    FILE *out;
    bool terminal;         // redraw one line
    bool drawn;            // a line to redraw is shown
    bool answered;         // a signal was acknowledged
    double started;        // when the run started, in seconds of the clock
    double shown, stepped; // when the last line and the last step's line were shown; 0: never
    double ends;           // clock time when --train-hours ends; 0: not given, or the horizon is decided
    int64_t horizon;       // tokens of the whole run; 0: no run
    int64_t step, tokens;  // totals of the run
    int64_t first_tokens;  // tokens done at `started`
    struct {
        bool runs;           // false: nothing to show
        const char *what;    // the work's name; NULL: a step
        double begun;        // when the work began
        int64_t done, total; // tokens of a step, or other units; total 0: unknown
        bool quiet, shown;   // quiet: silenced by progress_break; shown: a line has shown this work
    } now;
    char last[64], numbers[400]; // the last step's line: its text before the ETA, and after it
    Ticker ticker;
} Progress;

// plain: shows plain lines, even on a terminal. ticker_start starts the thread, progress_destroy ends it.
void progress_create(Progress *p, FILE *out, bool plain);
void progress_destroy(Progress *p);

// Begins a run at `step`, and starts the clock of its ETA.
void progress_run(Progress *p, int64_t step, int64_t done_tokens, int64_t horizon_tokens);

// Begins work of `total` units. If `total` is 0, the total is unknown and progress_next counts bytes. what: the work's
// name in the line; NULL: the next step, of `total` tokens.
void progress_begin(Progress *p, const char *what, int64_t total);
void progress_next(Progress *p, int64_t done); // sets the units that are done
void progress_end(Progress *p);                // ends the work

// Adds a step and shows its line; in a log, at most one line per interval (log_interval), unless `force`.
void progress_step(Progress *p, const StepMetrics *step, const Noise *noise, bool force);

// Ends the updating line, before other output.
void progress_break(Progress *p);

// Returns the seconds until the run ends, at its tokens per second so far, pauses included; NaN: unknown.
double progress_left(const Progress *p, double now);

// Shows the work, and acknowledges a signal. The thread calls progress_tick ten times a second.
void progress_tick(Progress *p, double now);

// Returns the columns of f's terminal. If f is not a terminal: $COLUMNS, or 80.
int progress_columns(FILE *f);
