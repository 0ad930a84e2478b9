// safetensors: Hugging Face's tensor file, read and written, a range at a time.
//
// The format (github.com/huggingface/safetensors, "Format"):
//
//     8 bytes   N, the header's length, unsigned, little-endian
//     N bytes   header, JSON in UTF-8, may end in spaces: {"__metadata__": {"key": "string", ...},
//                   "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
//     the rest  data: the tensors, row-major and little-endian; offsets count from here, and leave no holes
#ifndef GNS_SAFETENSORS_H
#define GNS_SAFETENSORS_H

#include "files.h"

#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

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

// ---------------------------------------------------------------------------------------------------------------------
// Reading

typedef struct {
    const char *name; // owned by the reader
    SafetensorsType type;
    int dimensions; // 0: a scalar
    uint64_t shape[SAFETENSORS_MAX_DIMENSIONS];
    uint64_t count;      // elements
    uint64_t begin, end; // bytes, from the beginning of the data
} SafetensorsEntry;

typedef struct {
    char *path; // for messages
    int fd;
    uint64_t data_offset;      // bytes from the beginning of the file to that of the data
    SafetensorsEntry *entries; // in the order of the data
    int count;
    int *by_name;         // indices of entries, names ascending
    struct cJSON *header; // the names and the metadata live here
} SafetensorsReader;

// Opens a file and checks the whole of its header. ERR_INPUT, naming the file, the tensor and what is wrong with it.
// The reader needs safetensors_close only where this succeeded.
int safetensors_open(SafetensorsReader *reader, const char *path, Error *e);
void safetensors_close(SafetensorsReader *reader);

// The tensor of a name; NULL where there is none.
const SafetensorsEntry *safetensors_find(const SafetensorsReader *reader, const char *name);

// A string of the file's metadata; NULL where there is none of that key.
const char *safetensors_metadata(const SafetensorsReader *reader, const char *key);

// Elements [first, first + n) of a tensor as they lie in the file. Several threads may read from one reader.
int safetensors_read(const SafetensorsReader *reader, const SafetensorsEntry *entry, uint64_t first, size_t n,
                     void *out, Error *e);

// The same of an F32, BF16 or F16 tensor, as floats (exact); ERR_INPUT for another type.
int safetensors_read_f32(const SafetensorsReader *reader, const SafetensorsEntry *entry, uint64_t first, size_t n,
                         float *out, Error *e);

// ---------------------------------------------------------------------------------------------------------------------
// Writing: create; add tensors and metadata; write the data from first to last; finish. The header is a function of
// what was added and its order alone, so equal contents are equal files.

typedef struct SafetensorsWriter SafetensorsWriter;

// Creates the file, or empties the one that is there: write to a temporary name and rename what was finished.
int safetensors_create(SafetensorsWriter **out, const char *path, Error *e);

// Declares the next tensor of the file. Data begins at a multiple of 8 bytes and has no gaps, so declare wide types
// first.
int safetensors_add(SafetensorsWriter *writer, const char *name, SafetensorsType type, int dimensions,
                    const uint64_t *shape, Error *e);
int safetensors_add_metadata(SafetensorsWriter *writer, const char *key, const char *value, Error *e); // UTF-8

// Appends data: any number of bytes, to the tensors in the order in which they were added. Nothing more can be added
// then. They are gathered, and go out some megabytes at a time. After a failure, abandon the writer.
int safetensors_write(SafetensorsWriter *writer, const void *data, size_t bytes, Error *e);

// Makes the file durable (fsync) and frees the writer, whatever comes out. ERR_INTERNAL where data is missing; the
// unfinished file is removed then.
int safetensors_finish(SafetensorsWriter *writer, Error *e);
int safetensors_finish_digest(SafetensorsWriter *writer, FileDigest *digest, Error *e); // and says what it holds

// Frees the writer and removes the unfinished file. NULL is fine.
void safetensors_abandon(SafetensorsWriter *writer);

// ---------------------------------------------------------------------------------------------------------------------
// Conversions between fp32 (1 sign, 8 exponent, 23 fraction bits) and the 16-bit types, through their bits. To fp32 is
// exact; from fp32 rounds to the nearest, ties to even (IEEE 754), and makes a NaN a quiet one.

static inline uint32_t f32_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float f32_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// bf16 is the upper half of an fp32.
static inline float bf16_to_f32(uint16_t x) { return f32_from_bits((uint32_t)x << 16); }

static inline uint16_t f32_to_bf16(float x) {
    uint32_t bits = f32_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); // NaN
    uint32_t odd = bits >> 16 & 1;
    return (uint16_t)((bits + 0x7fff + odd) >> 16); // just under a half, and the last bit when a tie must go up
}

// fp16: 1 sign, 5 exponent (bias 15), 10 fraction bits; exponent 0: fraction * 2^-24.
static inline float f16_to_f32(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 1023;
    if (exponent == 31) return f32_from_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent) return f32_from_bits(sign | (exponent + 127 - 15) << 23 | fraction << 13);
    float magnitude = (float)fraction * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

static inline uint16_t f32_to_f16(float x) {
    uint32_t bits = f32_bits(x), magnitude = bits & 0x7fffffff;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 1023)); // NaN
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); // 65520 and more round to infinity
    if (magnitude < 0x38800000) {                                  // under 2^-14: subnormal, in units of 2^-24
        // Adding 0.5 puts the unit 2^-24 at the last bit of the fp32, so the addition itself does the rounding.
        return (uint16_t)(sign | (f32_bits(f32_from_bits(magnitude) + 0.5f) - f32_bits(0.5f)));
    }
    uint32_t odd = magnitude >> 13 & 1;
    return (uint16_t)(sign | ((magnitude - ((127u - 15) << 23) + 0xfff + odd) >> 13));
}

#ifdef __cplusplus
}
#endif
#endif
