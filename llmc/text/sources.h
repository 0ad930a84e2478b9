// sources: finds the files that the value of --train or --val names.
//
//     WORD                              one source
//     WORD WORD ...                     one source: the union of their files
//     WORD:WEIGHT WORD:WEIGHT ...       one source per word, mixed by weight (math/mixture.h)
//
// A word is a file or a pattern such as "dir/x_train_*.bin"; "\ " is a blank in it. A value that names or matches files
// as a whole is one word, with its blanks. The name of an existing file keeps its colons and is no pattern.
#pragma once

#include "base/common.h"

#include <glob.h>

typedef struct {
    const char *text; // as given, without the weight
    double weight;    // as given; 0: none
    char **path;      // (count) sorted by bytes, without duplicates; in found
    int count;
    glob_t found;
} Source;

typedef struct {
    Source *source;
    int count;
    char *value; // owns the memory of the texts
} Sources;

// ERR_INPUT if a word matches no file; ERR_USAGE if a weight is not above 0, or if only some words have one.
int sources_find(Sources *out, const char *value, Error *e);
void sources_free(Sources *sources); // an empty one is fine
