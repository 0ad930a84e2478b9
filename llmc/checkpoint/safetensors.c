#include "checkpoint/safetensors.h"

#include "base/float16.h"
#include "base/text.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian, and read without conversion");

#define METADATA_NAME "__metadata__"

enum {
    PREFIX_BYTES = 8,      // hold the header's length
    MAX_HEADER = 100000000 // bytes; the format's own limit
};

static const char *const damaged = "the file is damaged or incomplete: copy or download it again";
static const char *const convert = "convert the tensor to F32, BF16 or F16";

static const struct {
    const char *name;
    size_t bytes;
} types[] = {
#define X(type, bytes) {#type, bytes},
    SAFETENSORS_TYPES(X)
#undef X
};

const char *safetensors_type_name(SafetensorsType type) { return types[type].name; }
size_t safetensors_type_bytes(SafetensorsType type) { return types[type].bytes; }

// ---------------------------------------------------------------------------------------------------------------------
// Parsing the header. entries_parse prefixes errors with the tensor's name, header_read with the file's.

static bool json_integer(const cJSON *item, uint64_t *out) {
    bool whole = json_whole(item, 0, INFINITY);
    if (whole) *out = (uint64_t)item->valuedouble;
    return whole;
}

// Reads entry->shape and entry->count. Refuses a tensor of 2^64 bytes or more.
static int shape_parse(SafetensorsEntry *entry, const cJSON *shape, Error *e) {
    const uint64_t most = UINT64_MAX / types[entry->type].bytes;
    bool good = cJSON_IsArray(shape) && cJSON_GetArraySize(shape) <= SAFETENSORS_MAX_DIMENSIONS;
    entry->count = 1;
    for (const cJSON *item = good ? shape->child : NULL; item; item = item->next) {
        uint64_t *size = &entry->shape[entry->dimensions++];
        good = good && json_integer(item, size) && (!*size || entry->count <= most / *size);
        entry->count *= *size;
    }
    if (good) return 0;
    return FAIL(e, ERR_INPUT, damaged, "its shape is not a list of up to %d whole numbers that fit in memory",
                SAFETENSORS_MAX_DIMENSIONS);
}

// Reads entry->begin and entry->end. They must be as far apart as shape and type require.
static int offsets_parse(SafetensorsEntry *entry, const cJSON *offsets, Error *e) {
    uint64_t bytes = entry->count * types[entry->type].bytes;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 || !json_integer(offsets->child, &entry->begin) ||
        !json_integer(offsets->child->next, &entry->end) || entry->begin > entry->end)
        return FAIL(e, ERR_INPUT, damaged, "its data_offsets are not two ascending whole numbers");
    if (entry->end - entry->begin == bytes) return 0;
    return FAIL(e, ERR_INPUT, damaged,
                "its data_offsets, %" PRIu64 " to %" PRIu64 ", are %" PRIu64
                " bytes, but its shape and dtype make %" PRIu64,
                entry->begin, entry->end, entry->end - entry->begin, bytes);
}

// Requires exactly three fields and all three names, so no name occurs twice.
static int entry_parse(SafetensorsEntry *entry, const cJSON *json, Error *e) {
    const cJSON *type = json_get(json, "dtype"), *shape = json_get(json, "shape");
    const cJSON *offsets = json_get(json, "data_offsets");
    if (!cJSON_IsObject(json) || !type || !shape || !offsets || cJSON_GetArraySize(json) != 3)
        return FAIL(e, ERR_INPUT, damaged, "not exactly dtype, shape and data_offsets");
    const char *name = cJSON_IsString(type) ? type->valuestring : "(not a string)";
    entry->type = 0;
    while (entry->type < SAFETENSORS_TYPE_COUNT && strcmp(types[entry->type].name, name) != 0) entry->type++;
    if (entry->type == SAFETENSORS_TYPE_COUNT) return FAIL(e, ERR_INPUT, convert, "unknown dtype %.40s", name);
    TRY(shape_parse(entry, shape, e));
    return offsets_parse(entry, offsets, e);
}

static int compare_entries(const void *pa, const void *pb) {
    const SafetensorsEntry *a = pa, *b = pb;
    if (a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
    if (a->end != b->end)
        return a->end < b->end ? -1 : 1; // an empty tensor sorts before the one that begins at its byte
    return strcmp(a->name, b->name);
}

static int compare_names(const void *a, const void *b) {
    return strcmp(((const SafetensorsEntry *)a)->name, ((const SafetensorsEntry *)b)->name);
}

// Checks that the entries, sorted by offset, cover the data exactly: no hole, no overlap, nothing after the last.
static int offsets_check(const SafetensorsReader *reader, uint64_t data_bytes, Error *e) {
    uint64_t at = 0;
    for (int i = 0; i < reader->count; at = reader->entries[i++].end) {
        const SafetensorsEntry *entry = &reader->entries[i];
        if (entry->begin != at)
            return FAIL(e, ERR_INPUT, damaged,
                        "tensor %.200s begins at byte %" PRIu64 " of the data, the one before it ends at %" PRIu64
                        ": %s",
                        entry->name, entry->begin, at, entry->begin < at ? "an overlap" : "a hole");
    }
    if (at == data_bytes) return 0;
    return FAIL(e, ERR_INPUT, damaged, "the tensors end at byte %" PRIu64 " of the data, the file holds %" PRIu64, at,
                data_bytes);
}

// Fills entries from the header.
static int entries_parse(SafetensorsReader *reader, uint64_t data_bytes, Error *e) {
    const cJSON *root = reader->header.root, *item;
    TRY(memory_alloc((void **)&reader->entries, (size_t)cJSON_GetArraySize(root) * sizeof *reader->entries,
                     "a list of tensors", e));
    cJSON_ArrayForEach(item, root) {
        if (strcmp(item->string, METADATA_NAME) == 0) continue;
        SafetensorsEntry *entry = &reader->entries[reader->count++];
        *entry = (SafetensorsEntry){.reader = reader, .name = item->string};
        if (entry_parse(entry, item, e)) return error_prefix(e, "tensor %.200s", entry->name);
    }
    // Refuse two tensors of one name before looking at the offsets: that explains an overlap.
    qsort(reader->entries, (size_t)reader->count, sizeof *reader->entries, compare_names);
    for (int i = 1; i < reader->count; i++)
        if (compare_names(&reader->entries[i - 1], &reader->entries[i]) == 0)
            return FAIL(e, ERR_INPUT, damaged, "tensor %.200s exists twice", reader->entries[i].name);
    qsort(reader->entries, (size_t)reader->count, sizeof *reader->entries, compare_entries);
    return offsets_check(reader, data_bytes, e);
}

// ---- Reading --------------------------------------------------------------------------------------------------------

static int header_read(SafetensorsReader *reader, uint64_t file_bytes, Error *e) {
    uint64_t bytes;
    char *text;
    TRY(file_read_range(reader->fd, reader->path, 0, &bytes, sizeof bytes, e));
    if (bytes > MAX_HEADER || bytes > file_bytes - PREFIX_BYTES)
        return FAIL(e, ERR_INPUT, "is this a safetensors file, and all of it?",
                    "%s: bytes 0 to 8 give the header %" PRIu64 " bytes; the file has %" PRIu64
                    ", the format allows %d",
                    reader->path, bytes, file_bytes, MAX_HEADER);
    reader->data_offset = PREFIX_BYTES + bytes;
    TRY(memory_alloc_zero((void **)&text, bytes + 1, reader->path, e));
    int code = file_read_range(reader->fd, reader->path, PREFIX_BYTES, text, bytes, e);
    size_t valid = code ? 0 : utf8_invalid_at(text, strlen(text));
    if (!code && valid < bytes)
        code =
            FAIL(e, ERR_INPUT, damaged, "%s: the header is not UTF-8 at byte %zu", reader->path, PREFIX_BYTES + valid);
    else if (!code && text[0] != '{')
        code = FAIL(e, ERR_INPUT, "is this a safetensors file?", "%s: the header at byte %d is not JSON", reader->path,
                    PREFIX_BYTES);
    if (code) return memory_free(text), code;
    TRY(json_parse_text(&reader->header, text, bytes, PREFIX_BYTES, reader->path, damaged, e)); // takes over text
    code = entries_parse(reader, file_bytes - reader->data_offset, e);
    return code == ERR_INPUT ? error_prefix(e, "%s", reader->path) : code;
}

int safetensors_open(SafetensorsReader *reader, const char *path, Error *e) {
    int code = 0;
    uint64_t file_bytes;
    *reader = (SafetensorsReader){.fd = -1};
    TRY_GOTO(memory_alloc((void **)&reader->path, strlen(path) + 1, path, e));
    strcpy(reader->path, path);
    TRY_GOTO(file_open_input(IN_PATH, path, &reader->fd, &file_bytes, e));
    TRY_GOTO(header_read(reader, file_bytes, e));
done:
    if (code) safetensors_close(reader);
    return code;
}

void safetensors_close(SafetensorsReader *reader) {
    memory_free(reader->entries);
    json_free(&reader->header);
    if (reader->fd >= 0) close(reader->fd);
    memory_free(reader->path);
    *reader = (SafetensorsReader){.fd = -1};
}

const SafetensorsEntry *safetensors_find(const SafetensorsReader *reader, const char *name) {
    for (int i = 0; i < reader->count; i++)
        if (strcmp(reader->entries[i].name, name) == 0) return &reader->entries[i];
    return NULL;
}

int safetensors_read(const SafetensorsEntry *entry, uint64_t first, size_t n, void *out, Error *e) {
    const SafetensorsReader *reader = entry->reader;
    size_t size = types[entry->type].bytes;
    assert(first <= entry->count && n <= entry->count - first);
    uint64_t at = reader->data_offset + entry->begin + first * size;
    return file_read_range(reader->fd, reader->path, at, out, n * size, e);
}

int safetensors_read_f32(const SafetensorsEntry *entry, uint64_t first, size_t n, float *out, Error *e) {
    SafetensorsType type = entry->type;
    if (type == SAFETENSORS_F32) return safetensors_read(entry, first, n, out, e);
    if (type != SAFETENSORS_BF16 && type != SAFETENSORS_F16)
        return FAIL(e, ERR_INPUT, convert,
                    "%s: tensor %.200s, whose data begins at byte %" PRIu64 ", is %s, not F32, BF16 or F16",
                    entry->reader->path, entry->name, entry->reader->data_offset + entry->begin, types[type].name);
    TRY(safetensors_read(entry, first, n, half_place(out, n), e));
    half_widen(out, n, type == SAFETENSORS_BF16);
    return 0;
}
