#include "checkpoint/safetensors.h"

#include "base/float16.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian, and read without conversion");

enum {
    PREFIX_BYTES = 8,      // the field that holds the header's length
    MAX_HEADER = 100000000 // the format's own limit, in bytes
};

static const char *const damaged = "the file is damaged or incomplete: copy or download it again";

// ---- The header -----------------------------------------------------------------------------------------------------

static bool json_integer(const cJSON *item, uint64_t *out) {
    bool whole = json_whole(item, 0, INFINITY);
    if (whole) *out = (uint64_t)item->valuedouble;
    return whole;
}

// Refuses 2^61 elements or more, and offsets that do not fit shape and type.
static int entry_parse(SafetensorsEntry *entry, const cJSON *json, Error *e) {
    const cJSON *type = json_get(json, "dtype"), *shape = json_get(json, "shape");
    const cJSON *offsets = json_get(json, "data_offsets");
    bool fits = cJSON_IsArray(shape);
    if (!cJSON_IsString(type)) return FAIL(e, ERR_INPUT, damaged, "its dtype is no string");
    entry->dtype = type->valuestring;
    if (strcmp(entry->dtype, "F32") == 0) entry->value_bytes = sizeof(float);
    if (strcmp(entry->dtype, "F16") == 0 || strcmp(entry->dtype, "BF16") == 0) entry->value_bytes = sizeof(uint16_t);
    entry->count = 1;
    for (const cJSON *item = fits ? shape->child : NULL; item; item = item->next) {
        uint64_t size = 0;
        fits = fits && json_integer(item, &size) && (!size || entry->count <= UINT64_MAX / 8 / size);
        if (entry->dimensions < 2) entry->shape[entry->dimensions] = size;
        entry->dimensions++;
        entry->count *= size;
    }
    if (!fits) return FAIL(e, ERR_INPUT, damaged, "its shape is not a list of whole numbers that fit in memory");
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 || !json_integer(offsets->child, &entry->begin) ||
        !json_integer(offsets->child->next, &entry->end) || entry->begin > entry->end)
        return FAIL(e, ERR_INPUT, damaged, "its data_offsets are not two ascending whole numbers");
    const uint64_t bytes = entry->end - entry->begin, want = entry->count * entry->value_bytes;
    if (!entry->value_bytes || bytes == want) return 0;
    return FAIL(e, ERR_INPUT, damaged,
                "its data_offsets, %" PRIu64 " to %" PRIu64 ", are %" PRIu64
                " bytes, but its shape and dtype make %" PRIu64,
                entry->begin, entry->end, bytes, want);
}

static int entries_parse(SafetensorsReader *reader, uint64_t data_bytes, Error *e) {
    const cJSON *root = reader->header, *item;
    uint64_t end = 0;
    if (!cJSON_IsObject(root)) return FAIL(e, ERR_INPUT, "is this a safetensors file?", "the header is no object");
    TRY(memory_alloc((void **)&reader->entries, (size_t)cJSON_GetArraySize(root) * sizeof *reader->entries,
                     "a list of tensors", e));
    cJSON_ArrayForEach(item, root) {
        if (strcmp(item->string, "__metadata__") == 0) continue;
        SafetensorsEntry *entry = &reader->entries[reader->count++];
        *entry = (SafetensorsEntry){.reader = reader, .name = item->string};
        if (entry_parse(entry, item, e)) return error_prefix(e, "tensor %.200s", entry->name);
        if (entry->end > end) end = entry->end;
    }
    if (end == data_bytes) return 0;
    return FAIL(e, ERR_INPUT, damaged, "the tensors end at byte %" PRIu64 " of the data, the file holds %" PRIu64, end,
                data_bytes);
}

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
    if (code) return memory_free(text), code;
    TRY(json_parse_text(&reader->header, text, bytes, reader->path, damaged, e));
    code = entries_parse(reader, file_bytes - reader->data_offset, e);
    return code == ERR_INPUT ? error_prefix(e, "%s", reader->path) : code;
}

// ---- Reading --------------------------------------------------------------------------------------------------------

int safetensors_open(SafetensorsReader *reader, const char *path, Error *e) {
    uint64_t file_bytes;
    *reader = (SafetensorsReader){.fd = -1};
    snprintf(reader->path, sizeof reader->path, "%s", path);
    TRY(file_open_input(IN_PATH, path, &reader->fd, &file_bytes, e));
    int code = header_read(reader, file_bytes, e);
    if (code) safetensors_close(reader);
    return code;
}

void safetensors_close(SafetensorsReader *reader) {
    memory_free(reader->entries);
    cJSON_Delete(reader->header);
    if (reader->fd >= 0) close(reader->fd);
    *reader = (SafetensorsReader){.fd = -1};
}

int safetensors_read(const void *context, size_t first, size_t n, float *out, Error *e) {
    const SafetensorsEntry *entry = context;
    const SafetensorsReader *reader = entry->reader;
    const size_t bytes = entry->value_bytes;
    const uint64_t at = reader->data_offset + entry->begin;
    if (!bytes)
        return FAIL(e, ERR_INPUT, "convert the tensor to F32, BF16 or F16",
                    "%s: tensor %.200s is %.40s, not F32, BF16 or F16", reader->path, entry->name, entry->dtype);
    assert(first <= entry->count && n <= entry->count - first);
    const bool half = bytes == sizeof(uint16_t);
    void *to = half ? half_place(out, n) : out;
    TRY(file_read_range(reader->fd, reader->path, at + first * bytes, to, n * bytes, e));
    if (half) half_widen(out, n, *entry->dtype == 'B');
    return 0;
}
