// shards: reads training examples from token shards.
//
// A shard is a file in llm.c's format, little-endian:
//
//     int32 header[256]   [0] magic 20240520, [1] version 1, [2] token count n, the rest 0
//     uint16 tokens[n]
//
// An example is a window of T tokens of one shard and the token after it: T + 1 consecutive tokens. The first T are the
// inputs, the last T the targets. Windows start at multiples of T and never cross a shard. Shards of n_i tokens hold
//
//     N = sum_i floor((n_i - 1) / T)   windows.
//
// The order of training is a pure function of (seed, epoch, k): example number e of a run is window permutation_at(N,
// key(seed, epoch), k), where epoch = floor(e / N) and k = e mod N. With several sources, e first chooses one of them
// (math/mixture.h). So one counter is a run's position in its data, and the sequence does not depend on batch size,
// micro-batch, ranks or restarts. With `shifts` the windows of an epoch begin permutation_shift(T, key) tokens later;
// the last window of a shard moves only as far as the shard allows.
//
// The value of --train or --val names the files:
//
//     WORD                              one source
//     WORD WORD ...                     one source: the union of the words' files
//     WORD:WEIGHT WORD:WEIGHT ...       one source per word, mixed by weight (math/mixture.h)
//
// A word is a file or a pattern such as "dir/x_train_*.bin". In a word "\ " stands for a blank. If the whole value
// names or matches files, it is one word, blanks included. An existing file's name is no pattern and has no WEIGHT.
#pragma once

#include "base/files.h"

#include <glob.h>

enum { SHARD_HEADER_INTS = 256, SHARD_HEADER_BYTES = 4 * SHARD_HEADER_INTS, SHARD_MAGIC = 20240520, SHARD_VERSION = 1 };

typedef struct {
    const char *path;
    int fd;                // -1: every read opens the file
    uint64_t tokens;       // n_i
    uint64_t first_window; // windows in the shards before this one
    FileDigest digest;     // identifies the shard in any directory (file_digest)
} Shard;

typedef struct {
    const char *files; // as given, without the weight
    double weight;     // as given; 0: none
    glob_t found;      // gl_pathv holds the paths (shards), sorted by bytes, then duplicates
    int shards;
    double share; // p, the source's share of the examples
    uint64_t tokens, windows, first_window;
} DatasetSource;

typedef struct {
    int shards;
    uint64_t tokens;  // sum of n_i
    int largest;      // largest token that dataset_open has checked
    uint64_t windows; // N
    int sources;      // 1 if no source has a weight
    double weights;   // sum of the sources' weights; 0: none has one
    double epoch;     // mean number of examples until some source has been read once
} DatasetInfo;

typedef struct { // one thread at a time may read examples
    DatasetInfo info;
    DatasetSource *source; // (info.sources)
    char *value;           // owns the words
    Shard *shards;         // (info.shards) in reading order
    double *share_end;     // (sources) p_0 + ... + p_s, where p_s is the share of source s
    uint64_t *counts;      // (sources + 1): how many of the run's first counts[sources] examples each source has
    int seq_len, vocab_size;
    uint64_t seed;
    bool shifts;    // shift windows by epoch; the caller may set it before the first dataset_rows
    bool *excluded; // (windows) true: dataset_window_at skips the window; NULL: none
} Dataset;

// Opens the shards that `files` names. ERR_INPUT if a word matches no file; ERR_USAGE if a weight is not above 0, or if
// only some words have one. Checks every header against its file's size, and every file below 64 MB for tokens outside
// vocab_size. If the first file is larger, checks its first million tokens.
int dataset_open(Dataset **out, const char *files, int seq_len, int vocab_size, uint64_t seed, Error *e);
void dataset_close(Dataset *data); // NULL is fine

// Excludes the present windows of examples [first, first + count) from all later reads. An example whose window is
// excluded reads a replacement: the window at the same place of the next epoch. Other examples keep their windows.
int dataset_exclude(Dataset *data, uint64_t first, uint64_t count, Error *e);

// Returns the window of an example. *shift = tokens by which the window begins later (`shifts`).
uint64_t dataset_window_at(const Dataset *data, uint64_t example, uint64_t *shift);

int dataset_example_source(const void *dataset, uint64_t example); // for EngineConfig.source; callable on any thread

// Where an example's tokens begin: token `offset` of a shard.
typedef struct {
    const Shard *shard;
    uint64_t offset;
    int64_t document; // index of the last separator at or before `offset`; 0: there is none; -1: unknown
} ExamplePlace;

// Finds an example's place. separator: the token that begins a document; -1: none. Searches at most 131,072 tokens.
int dataset_place(const Dataset *data, uint64_t example, int separator, ExamplePlace *place, Error *e);

// Reads examples [first_example, first_example + count) of the shuffled sequence, which continues epoch after epoch.
// Checks every token against the vocabulary.
int dataset_rows(const Dataset *data, uint64_t first_example, int count, uint16_t *out /* (count, T+1) */, Error *e);

// Reads a window that begins `shift` tokens later; 0 in validation. Windows are numbered in the order of the files.
int dataset_window(const Dataset *data, uint64_t window, uint64_t shift, uint16_t *out /* (T+1) */, Error *e);

// Checks every token of every shard against the vocabulary (`--check`).
int dataset_check(const Dataset *data, Error *e);
