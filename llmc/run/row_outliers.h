// row_outliers: OUT/outliers.jsonl (--outliers N), a list of the rows that differ most from other rows of their step.
// Each kind of outlier measures a number x of a row:
//
//     loud      log norm; the norm is |g_b| over all LayerNorms
//     rare      mean of -log(a token's share of the text): other languages and alphabets, binary data
//     strange   loss - log norm: garbage, whose gradient has no direction
//     uniform   log norm - log loss: repetitions of one token, whose gradient has one direction
//
// Lists the N rows with the largest scores of each kind. A score says how many robust standard deviations x lies above
// its median in the step. D is the median of |x - median| in a step:
//
//     score = (x - median) / (1.4826 * mean of D over the last 128 steps)
//
// Rank 0 judges the rows of all ranks, so the number of ranks does not change the list.
#pragma once

#include "base/text.h"
#include "run/state.h"

typedef enum { ROW_LOUD, ROW_RARE, ROW_STRANGE, ROW_UNIFORM, ROW_KINDS } RowKind;
static const char *const row_kinds[ROW_KINDS] = {"loud", "rare", "strange", "uniform"};

typedef struct {
    cJSON *list[ROW_KINDS];     // objects of outliers.jsonl, highest score first
    Outliers spread[ROW_KINDS]; // D of the last steps
    double least[ROW_KINDS];    // a row needs a larger score to be kept
    double *surprise;           // (vocabulary) -log of a token's share of the text
    double *rarity;             // (3 x largest batch) mean surprise of each of this rank's rows, then scratch
} RowOutliers;

int row_outliers_create(Run *r, Error *e);             // on every rank; keeps the lists of setup_resume
int row_outliers_observe(Run *r, int64_t B, Error *e); // on rank 0: judges the B rows of the step
int row_outliers_write(const Run *r, Error *e);        // on rank 0: writes outliers.jsonl
