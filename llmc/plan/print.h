// plan_print: a plan as a page for a person.
#ifndef GNS_PLAN_PRINT_H
#define GNS_PLAN_PRINT_H

#include "plan/plan.h"

typedef struct {
    const Plan *plan;
    const Ramp *ramp;                         // NULL: nothing says how long the run is
    int64_t rows;                             // of a step: the batch the table of kernels is for
    double price;                             // of an hour of one device; 0: not said
    double train_tokens;                      // in --train; 0: not looked at
    double host_bytes;                        // of the copy that checkpoints are written from
    int64_t val_every, val_rows;              // validation: steps between, rows; 0: none
    int64_t checkpoint_every, best_every;     // steps between, at least (plan_checkpoints)
    int64_t keep;                             // how many stay (0: all)
    double checkpoint_bytes, disk_free_bytes; // disk_free: -1: not known
    const char *disk;                         // where
} PlanReport;

void plan_print(FILE *f, const PlanReport *report);
#endif
