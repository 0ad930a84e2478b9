// sources: finds the files that the value of --train or --val names.
//
//     WORD                              one source
//     WORD WORD ...                     one source: the union of the words' files
//     WORD:WEIGHT WORD:WEIGHT ...       one source per word, mixed by weight (math/mixture.h)
//
// A word is a file or a pattern such as "dir/x_train_*.bin". In a word "\ " stands for a blank. If the whole value
// names or matches files, it is one word, blanks included. An existing file's name is no pattern and has no WEIGHT.
#pragma once

#include "base/common.h"

#include <glob.h>

typedef struct {
    const char *files; // as given, without the weight
    double weight;     // as given; 0: none
    char **path;       // (shards) sorted by bytes, without duplicates; `found` owns them
    int shards;
    glob_t found;
    double share; // p, the source's share of the examples. dataset_open sets `share` and the next line's fields
    uint64_t tokens, windows, first_window;
} DatasetSource;

typedef struct {
    DatasetSource *source; // (count); without weights one source has all files
    int count;
    double weights; // sum of the sources' weights
    char *value;    // owns the memory of the words
} Sources;

// ERR_INPUT if a word matches no file; ERR_USAGE if a weight is not above 0, or if only some words have one.
int sources_find(Sources *out, const char *value, Error *e);
void sources_free(Sources *sources); // an all-zero one is fine
