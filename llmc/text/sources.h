// sources: the files that the value of --train or --val names.
//
//     WORD                              one source
//     WORD WORD ...                     one source, their union: as if one pattern matched all these files
//     WORD:WEIGHT WORD:WEIGHT ...       as many sources, mixed by weight (math/mixture.h)
//
// A word is a file or a pattern such as "dir/x_train_*.bin"; "\ " is a blank in it. What exists or matches as it is
// written, with blanks, colons or a '*' in the name, is meant so.
#pragma once

#include "base/common.h"

typedef struct {
    const char *text; // as given, without the weight
    double weight;    // as given; 0: none
    char **path;      // in the byte order of the names, each once
    int count;
} Source;

typedef struct {
    Source *source;
    int count;
    char *value, *words; // memory of the texts
} Sources;

// ERR_INPUT where a word matches no file; ERR_USAGE for a weight that is not above 0, and where only some words have one.
int sources_find(Sources *out, const char *value, Error *e);
void sources_free(Sources *sources); // {0} is fine
