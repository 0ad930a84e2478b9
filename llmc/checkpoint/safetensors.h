// safetensors: Hugging Face's tensor file, read and written a range at a time.
//
// The format (github.com/huggingface/safetensors, "Format"):
//
//     8 bytes   N, the header's length, unsigned, little-endian
//     N bytes   header, JSON in UTF-8, may end in spaces: {"__metadata__": {"key": "string", ...},
//                   "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
//     the rest  data: the tensors, row-major and little-endian; offsets count from here, and leave no holes
#pragma once

#include "base/files.h"
#include "base/json.h"

// The element types: X(type, bytes of an element). The names are the format's own.
// clang-format off
#define SAFETENSORS_TYPES(X)                                                                                           \
    X(BOOL, 1) X(U8, 1) X(I8, 1) X(F8_E5M2, 1) X(F8_E4M3, 1)                                                           \
    X(U16, 2) X(I16, 2) X(F16, 2) X(BF16, 2)                                                                           \
    X(U32, 4) X(I32, 4) X(F32, 4)                                                                                      \
    X(U64, 8) X(I64, 8) X(F64, 8)
// clang-format on

#define X(type, bytes) SAFETENSORS_##type,
typedef enum { SAFETENSORS_TYPES(X) SAFETENSORS_TYPE_COUNT } SafetensorsType;
#undef X

const char *safetensors_type_name(SafetensorsType type); // "F32"
size_t safetensors_type_bytes(SafetensorsType type);     // of one element

enum { SAFETENSORS_MAX_DIMENSIONS = 8 };

// ---- Reading --------------------------------------------------------------------------------------------------------

typedef struct SafetensorsReader SafetensorsReader;

typedef struct {
    const SafetensorsReader *reader;
    const char *name; // owned by the reader
    SafetensorsType type;
    int dimensions; // 0: a scalar
    uint64_t shape[SAFETENSORS_MAX_DIMENSIONS];
    uint64_t count;      // elements
    uint64_t begin, end; // bytes of the data
} SafetensorsEntry;

struct SafetensorsReader { // must not move: its entries point to it
    char *path;            // for messages
    int fd;
    uint64_t data_offset;      // the file's byte at which the data begins
    SafetensorsEntry *entries; // in the order of the data
    int count;
    const SafetensorsEntry **by_name; // names ascending
    JsonText header;                  // owns the names and the metadata
};

// Opens a file and checks all of its header. ERR_INPUT names the file, the tensor and what is wrong with it. Only an
// opened reader needs safetensors_close.
int safetensors_open(SafetensorsReader *reader, const char *path, Error *e);
void safetensors_close(SafetensorsReader *reader);

// The tensor of this name; NULL where there is none.
const SafetensorsEntry *safetensors_find(const SafetensorsReader *reader, const char *name);

// Elements [first, first + n) of a tensor as they are in the file. Several threads may read from one reader.
int safetensors_read(const SafetensorsEntry *entry, uint64_t first, size_t n, void *out, Error *e);

// The same of an F32, BF16 or F16 tensor, as floats (exact); ERR_INPUT for another type.
int safetensors_read_f32(const SafetensorsEntry *entry, uint64_t first, size_t n, float *out, Error *e);

// ---------------------------------------------------------------------------------------------------------------------
// Writing: create; add metadata, then tensors; write the data from first to last; finish. After a failure, abandon. The
// header depends on what was added and in which order, and on nothing else: equal contents are equal files.

typedef struct SafetensorsWriter SafetensorsWriter;

// Creates the file (outfile_create, with its `dir`): write to a temporary name and rename the finished file.
int safetensors_create(SafetensorsWriter **out, int dir, const char *path, Error *e);

// Declares the next tensor of the file. Data begins at a multiple of 8 bytes and has no gaps, so declare wide types
// first, and each name once.
void safetensors_add(SafetensorsWriter *writer, const char *name, SafetensorsType type, int dimensions,
                     const uint64_t *shape);
void safetensors_add_metadata(SafetensorsWriter *writer, const char *key, const char *value);

// Appends data, any number of bytes at a time, to the tensors in the order in which they were added. From the first
// call on nothing can be added.
int safetensors_write(SafetensorsWriter *writer, const void *data, size_t bytes, Error *e);

// Makes the file durable (fsync) and frees the writer, on failure too. ERR_INTERNAL where data is missing; the
// unfinished file is removed then. digest may be NULL.
int safetensors_finish(SafetensorsWriter *writer, FileDigest *digest, Error *e);

// Frees the writer and removes the unfinished file. NULL is fine.
void safetensors_abandon(SafetensorsWriter *writer);
