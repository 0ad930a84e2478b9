// safetensors: reads ranges of Hugging Face's tensor file. layout.c writes it.
//
// The format (github.com/huggingface/safetensors, "Format"):
//
//     8 bytes   N, the header's length, unsigned, little-endian
//     N bytes   header, JSON in UTF-8, may end in spaces: {"__metadata__": {"key": "string", ...},
//                   "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
//     the rest  data: the tensors, row-major and little-endian; offsets count from here, and leave no holes
#pragma once

#include "base/files.h"
#include "base/text.h"

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
    JsonText header; // owns the names and the metadata
};

// Opens a file and checks all of its header. ERR_INPUT names the file, the tensor and the fault. After a failure
// safetensors_close is not needed.
int safetensors_open(SafetensorsReader *reader, const char *path, Error *e);
void safetensors_close(SafetensorsReader *reader);

// Returns the tensor of this name; NULL: none.
const SafetensorsEntry *safetensors_find(const SafetensorsReader *reader, const char *name);

// Reads elements [first, first + n) of a tensor in the file's type. Several threads may read from one reader.
int safetensors_read(const SafetensorsEntry *entry, uint64_t first, size_t n, void *out, Error *e);

// Reads elements of an F32, BF16 or F16 tensor as floats (exact). ERR_INPUT for another type.
int safetensors_read_f32(const SafetensorsEntry *entry, uint64_t first, size_t n, float *out, Error *e);
