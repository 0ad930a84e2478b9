// safetensors: reads ranges of Hugging Face's tensor files. layout.c writes such files.
//
// The format (github.com/huggingface/safetensors, "Format"):
//
//     8 bytes   N, the header's length, unsigned, little-endian
//     N bytes   header, JSON in UTF-8, may end in spaces: {"__metadata__": {"key": "string", ...},
//                   "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
//     the rest  data: the tensors, row-major and little-endian, without gaps; offsets count from here
#pragma once

#include "base/files.h"
#include "base/text.h"

#include <limits.h>

typedef struct SafetensorsReader SafetensorsReader;

typedef struct {
    const SafetensorsReader *reader;
    const char *name, *dtype; // owned by the reader
    size_t value_bytes;       // bytes of one element; 0: a type other than F32, F16 and BF16
    int dimensions;           // 0: a scalar
    uint64_t shape[2];        // sizes of the first two dimensions
    uint64_t count;           // elements
    uint64_t begin, end;      // offsets in the data, in bytes
} SafetensorsEntry;

struct SafetensorsReader { // must not move: its entries point to it
    char path[PATH_MAX];   // for messages
    int fd;
    uint64_t data_offset;      // the file's byte at which the data begins
    SafetensorsEntry *entries; // in the header's order
    int count;
    cJSON *header; // owns the names and the types
};

// Opens a file and checks its header and its size. The message of ERR_INPUT names the file and the malformed tensor.
// After a failure safetensors_close is not needed.
int safetensors_open(SafetensorsReader *reader, const char *path, Error *e);
void safetensors_close(SafetensorsReader *reader);

// Reads elements [first, first + n) of a SafetensorsEntry of F32, BF16 or F16 as floats (exact). ERR_INPUT for another
// type. Several threads may read from one reader.
int safetensors_read(const void *entry, size_t first, size_t n, float *out, Error *e);
