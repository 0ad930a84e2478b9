// row_outliers: OUT/outliers.jsonl (--outliers N), the rows of a run that differ most from other rows of their step:
//
//     loud      log norm; the norm is |g_b| over all LayerNorms
//     rare      mean of -log(a token's share of the text): other languages and alphabets, binary data
//     strange   loss - log norm: garbage, whose gradient has no direction
//     uniform   log norm - log loss: repetitions of one token, whose gradient has one direction
//
// Keeps the N largest scores of each kind. A row's score is how far its number x lies above the step's median, in
// robust standard deviations. D is a step's median |x - median|:
//
//     score = (x - median) / (1.4826 * mean of D over the last 128 steps)
//
// Rank 0 judges the rows of all ranks, so any number of ranks keeps the same rows.
#pragma once

#include "base/text.h"
#include "run/state.h"

typedef enum { ROW_LOUD, ROW_RARE, ROW_STRANGE, ROW_UNIFORM, ROW_KINDS } RowKind;
extern const char *const row_kinds[ROW_KINDS];

typedef struct {
    cJSON *list[ROW_KINDS];     // objects of outliers.jsonl, highest score first
    Outliers spread[ROW_KINDS]; // D of the last steps
    double least[ROW_KINDS];    // a row needs a larger score to be kept
    double *scratch;            // (2, largest batch)
    double *rarity;             // (largest batch) mean surprise of this rank's rows
    double *surprise;           // (vocabulary) -log of a token's share of the text
} RowOutliers;

int row_outliers_create(Run *r, Error *e);             // every rank calls it, after a resume
int row_outliers_observe(Run *r, int64_t B, Error *e); // on rank 0: judges the B rows of the step
int row_outliers_write(const Run *r, Error *e);        // on rank 0: writes outliers.jsonl
