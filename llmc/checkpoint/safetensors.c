#define _POSIX_C_SOURCE 200809L
#include "checkpoint/safetensors.h"

#include "base/float16.h"
#include "base/json.h"
#include "base/text.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian, and read without conversion");

#define METADATA_NAME "__metadata__"

enum {
    PREFIX_BYTES = 8,      // the header's length
    MAX_HEADER = 100000000 // bytes; the format's own limit
};

static const double max_integer = 9007199254740992; // 2^53: JSON numbers arrive as doubles, exact up to here

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
// The header, from text to entries. Errors get the tensor's name in entry_parse and the file's in header_parse.

// Byte of the file at which a part of the header begins. Walks through the header: for messages only.
static size_t file_byte(const JsonText *h, const cJSON *item) { return PREFIX_BYTES + json_place(h, item); }

// A JSON number that is whole, and exact as a double.
static bool json_integer(const cJSON *item, uint64_t *out) {
    if (!cJSON_IsNumber(item)) return false;
    double x = item->valuedouble;
    if (!(x >= 0 && x <= max_integer) || x != (double)(uint64_t)x) return false;
    *out = (uint64_t)x;
    return true;
}

static bool type_find(const char *name, SafetensorsType *out) {
    for (*out = 0; *out < SAFETENSORS_TYPE_COUNT; ++*out)
        if (strcmp(types[*out].name, name) == 0) return true;
    return false;
}

// Reads entry->shape and entry->count; the count's size in bytes fits in 64 bits.
static int shape_parse(SafetensorsEntry *entry, const cJSON *shape, const JsonText *h, Error *e) {
    const uint64_t most = UINT64_MAX / types[entry->type].bytes;
    if (!cJSON_IsArray(shape))
        return FAIL(e, ERR_INPUT, damaged, "its shape at byte %zu is not a list", file_byte(h, shape));
    entry->count = 1;
    const cJSON *item;
    cJSON_ArrayForEach(item, shape) {
        uint64_t size;
        if (entry->dimensions == SAFETENSORS_MAX_DIMENSIONS)
            return FAIL(e, ERR_INPUT, "is this a GPT-2 file?", "its shape at byte %zu has more than %d dimensions",
                        file_byte(h, shape), SAFETENSORS_MAX_DIMENSIONS);
        if (!json_integer(item, &size))
            return FAIL(e, ERR_INPUT, damaged, "dimension %d at byte %zu is not a whole number from 0 to 2^53",
                        entry->dimensions, file_byte(h, item));
        if (size && entry->count > most / size)
            return FAIL(e, ERR_INPUT, damaged, "the product of its shape at byte %zu overflows 64 bits",
                        file_byte(h, shape));
        entry->shape[entry->dimensions++] = size;
        entry->count *= size;
    }
    return 0;
}

// Reads entry->begin and entry->end, which must be as far apart as shape and type say.
static int offsets_parse(SafetensorsEntry *entry, const cJSON *offsets, const JsonText *h, Error *e) {
    uint64_t bytes = entry->count * types[entry->type].bytes;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 || !json_integer(offsets->child, &entry->begin) ||
        !json_integer(offsets->child->next, &entry->end) || entry->begin > entry->end)
        return FAIL(e, ERR_INPUT, damaged, "its data_offsets at byte %zu are not two ascending whole numbers",
                    file_byte(h, offsets));
    if (entry->end - entry->begin == bytes) return 0;
    return FAIL(e, ERR_INPUT, damaged,
                "its data_offsets at byte %zu, %" PRIu64 " to %" PRIu64 ", are %" PRIu64
                " bytes, but its shape and dtype make %" PRIu64,
                file_byte(h, offsets), entry->begin, entry->end, entry->end - entry->begin, bytes);
}

// Exactly three fields, of which all three names are found: none is there twice.
static int fields_parse(SafetensorsEntry *entry, const cJSON *json, const JsonText *h, Error *e) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(json, "dtype");
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(json, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(json, "data_offsets");
    if (!cJSON_IsObject(json) || !type || !shape || !offsets || cJSON_GetArraySize(json) != 3)
        return FAIL(e, ERR_INPUT, damaged, "not exactly dtype, shape and data_offsets at byte %zu", file_byte(h, json));
    if (!cJSON_IsString(type) || !type_find(type->valuestring, &entry->type))
        return FAIL(e, ERR_INPUT, convert, "unknown dtype %.40s at byte %zu",
                    cJSON_IsString(type) ? type->valuestring : "(not a string)", file_byte(h, type));
    TRY(shape_parse(entry, shape, h, e));
    return offsets_parse(entry, offsets, h, e);
}

static int entry_parse(SafetensorsEntry *entry, const cJSON *json, const JsonText *h, Error *e) {
    *entry = (SafetensorsEntry){.name = json->string};
    return fields_parse(entry, json, h, e) ? error_prefix(e, "tensor %.200s", entry->name) : 0;
}

static int metadata_check(const cJSON *metadata, const JsonText *h, Error *e) {
    const cJSON *item;
    if (!cJSON_IsObject(metadata))
        return FAIL(e, ERR_INPUT, damaged, METADATA_NAME " at byte %zu is not an object", file_byte(h, metadata));
    cJSON_ArrayForEach(item, metadata) if (!cJSON_IsString(item)) {
        return FAIL(e, ERR_INPUT, damaged, METADATA_NAME ": %.200s at byte %zu is not a string", item->string,
                    file_byte(h, item));
    }
    return 0;
}

static int fail_twice(const JsonText *h, const char *name, Error *e) {
    const cJSON *item, *last = NULL;
    cJSON_ArrayForEach(item, h->root) if (strcmp(item->string, name) == 0) last = item;
    return FAIL(e, ERR_INPUT, damaged, "%s%.200s is there twice, at byte %zu too",
                strcmp(name, METADATA_NAME) == 0 ? "" : "tensor ", name, file_byte(h, last));
}

static int compare_entries(const void *pa, const void *pb) {
    const SafetensorsEntry *a = pa, *b = pb;
    if (a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
    if (a->end != b->end) return a->end < b->end ? -1 : 1; // empty tensors come before the one that begins there
    return strcmp(a->name, b->name);
}

static int compare_names(const void *a, const void *b) {
    return strcmp((*(const SafetensorsEntry *const *)a)->name, (*(const SafetensorsEntry *const *)b)->name);
}

// Fills reader->by_name. Two tensors of one name are an error.
static int names_sort(SafetensorsReader *reader, const JsonText *h, Error *e) {
    const SafetensorsEntry **names;
    TRY(memory_alloc((void **)&names, (size_t)reader->count * sizeof *names, "the names of tensors", e));
    reader->by_name = names;
    for (int i = 0; i < reader->count; i++) names[i] = &reader->entries[i];
    qsort(names, (size_t)reader->count, sizeof *names, compare_names);
    for (int i = 1; i < reader->count; i++)
        if (compare_names(&names[i - 1], &names[i]) == 0) return fail_twice(h, names[i]->name, e);
    return 0;
}

// The entries, sorted by their data, must cover all of it: no hole, no overlap, nothing beyond its end.
static int offsets_check(const SafetensorsReader *reader, uint64_t data_bytes, Error *e) {
    uint64_t at = 0;
    for (int i = 0; i < reader->count; at = reader->entries[i++].end) {
        const SafetensorsEntry *entry = &reader->entries[i];
        if (entry->begin != at)
            return FAIL(e, ERR_INPUT, damaged,
                        "tensor %.200s begins at byte %" PRIu64 " of the data, the one before it ends at %" PRIu64
                        ": %s",
                        entry->name, entry->begin, at, entry->begin < at ? "an overlap" : "a hole");
        if (entry->end > data_bytes)
            return FAIL(e, ERR_INPUT, damaged,
                        "tensor %.200s ends at byte %" PRIu64 " of the data, the file holds %" PRIu64, entry->name,
                        entry->end, data_bytes);
    }
    if (at == data_bytes) return 0;
    return FAIL(e, ERR_INPUT, damaged, "the tensors end at byte %" PRIu64 " of the data, the file holds %" PRIu64, at,
                data_bytes);
}

// From JSON text to reader->header.
static int json_parse(SafetensorsReader *reader, const char *text, size_t bytes, Error *e) {
    const char *nul = memchr(text, 0, bytes), *stop = NULL;
    size_t valid = 0, length;
    if (nul)
        return FAIL(e, ERR_INPUT, damaged, "zero byte in the header, at byte %zu", PREFIX_BYTES + (size_t)(nul - text));
    while ((length = utf8_character(text + valid, bytes - valid)) > 0) valid += length;
    if (valid < bytes) return FAIL(e, ERR_INPUT, damaged, "the header is not UTF-8 at byte %zu", PREFIX_BYTES + valid);
    if (bytes == 0 || text[0] != '{')
        return FAIL(e, ERR_INPUT, "is this a safetensors file?", "the header at byte %d is not JSON", PREFIX_BYTES);
    reader->header = cJSON_ParseWithLengthOpts(text, bytes, &stop, 0);
    if (reader->header) stop += strspn(stop, " \t\r\n");
    if (reader->header && stop == text + bytes) return 0;
    return FAIL(e, ERR_INPUT, damaged, "the header is malformed JSON at byte %zu",
                PREFIX_BYTES + (size_t)(stop ? stop - text : 0));
}

static int entries_parse(SafetensorsReader *reader, const char *text, size_t bytes, uint64_t data_bytes, Error *e) {
    TRY(json_parse(reader, text, bytes, e));
    const JsonText h = {text, bytes, reader->header};
    size_t items = (size_t)cJSON_GetArraySize(reader->header);
    TRY(memory_alloc((void **)&reader->entries, items * sizeof *reader->entries, "a list of tensors", e));
    int metadata = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, reader->header) {
        if (strcmp(item->string, METADATA_NAME) == 0) {
            TRY(metadata_check(item, &h, e));
            if (metadata++) return fail_twice(&h, METADATA_NAME, e);
        } else TRY(entry_parse(&reader->entries[reader->count++], item, &h, e));
    }
    qsort(reader->entries, (size_t)reader->count, sizeof *reader->entries, compare_entries);
    TRY(names_sort(reader, &h, e)); // before the offsets: a name that is there twice says more than the overlap
    return offsets_check(reader, data_bytes, e);
}

// Fills header, entries and by_name from the header's text, which a NUL follows. The caller frees them, on failure too.
static int header_parse(SafetensorsReader *reader, const char *text, size_t bytes, uint64_t data_bytes, Error *e) {
    int code = entries_parse(reader, text, bytes, data_bytes, e);
    return code == ERR_INPUT ? error_prefix(e, "%s", reader->path) : code;
}

static void header_free(SafetensorsReader *reader) {
    memory_free(reader->entries);
    memory_free(reader->by_name);
    cJSON_Delete(reader->header);
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading

// Finds the header's length and the data's.
static int lengths_read(SafetensorsReader *reader, uint64_t file_bytes, uint64_t *header_bytes, uint64_t *data_bytes,
                        Error *e) {
    if (file_bytes < PREFIX_BYTES)
        return FAIL(e, ERR_INPUT, damaged,
                    "%s: the file ends at byte %" PRIu64 ", within the %d that give its header's length", reader->path,
                    file_bytes, PREFIX_BYTES);
    TRY(file_read_range(reader->fd, reader->path, 0, header_bytes, sizeof *header_bytes, e));
    if (*header_bytes > MAX_HEADER)
        return FAIL(e, ERR_INPUT, "is this a safetensors file?",
                    "%s: bytes 0 to 8 give the header %" PRIu64 " bytes, more than the %d it may have", reader->path,
                    *header_bytes, MAX_HEADER);
    if (*header_bytes > file_bytes - PREFIX_BYTES)
        return FAIL(e, ERR_INPUT, damaged, "%s: bytes 0 to 8 give the header %" PRIu64 " bytes, the file has %" PRIu64,
                    reader->path, *header_bytes, file_bytes);
    reader->data_offset = PREFIX_BYTES + *header_bytes;
    *data_bytes = file_bytes - reader->data_offset;
    return 0;
}

int safetensors_open(SafetensorsReader *reader, const char *path, Error *e) {
    int code = 0;
    char *text = NULL;
    uint64_t file_bytes, header_bytes = 0, data_bytes = 0;
    *reader = (SafetensorsReader){.fd = -1};
    TRY_GOTO(memory_alloc((void **)&reader->path, strlen(path) + 1, path, e));
    strcpy(reader->path, path);
    TRY_GOTO(file_open_input(path, &reader->fd, &file_bytes, e));
    TRY_GOTO(lengths_read(reader, file_bytes, &header_bytes, &data_bytes, e));
    TRY_GOTO(memory_alloc((void **)&text, header_bytes + 1, path, e));
    TRY_GOTO(file_read_range(reader->fd, path, PREFIX_BYTES, text, header_bytes, e));
    text[header_bytes] = 0;
    TRY_GOTO(header_parse(reader, text, header_bytes, data_bytes, e));
done:
    memory_free(text);
    if (code) safetensors_close(reader);
    return code;
}

void safetensors_close(SafetensorsReader *reader) {
    header_free(reader);
    if (reader->fd >= 0) close(reader->fd);
    memory_free(reader->path);
    *reader = (SafetensorsReader){.fd = -1};
}

const SafetensorsEntry *safetensors_find(const SafetensorsReader *reader, const char *name) {
    const SafetensorsEntry key = {.name = name}, *wanted = &key;
    void *found = bsearch(&wanted, reader->by_name, (size_t)reader->count, sizeof wanted, compare_names);
    return found ? *(const SafetensorsEntry **)found : NULL;
}

const char *safetensors_metadata(const SafetensorsReader *reader, const char *key) {
    const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(reader->header, METADATA_NAME);
    return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(metadata, key));
}

int safetensors_read(const SafetensorsReader *reader, const SafetensorsEntry *entry, uint64_t first, size_t n,
                     void *out, Error *e) {
    size_t size = types[entry->type].bytes;
    assert(first <= entry->count && n <= entry->count - first);
    uint64_t at = reader->data_offset + entry->begin + first * size;
    return file_read_range(reader->fd, reader->path, at, out, n * size, e);
}

int safetensors_read_f32(const SafetensorsReader *reader, const SafetensorsEntry *entry, uint64_t first, size_t n,
                         float *out, Error *e) {
    SafetensorsType type = entry->type;
    if (type == SAFETENSORS_F32) return safetensors_read(reader, entry, first, n, out, e);
    if (type != SAFETENSORS_BF16 && type != SAFETENSORS_F16)
        return FAIL(e, ERR_INPUT, convert,
                    "%s: tensor %.200s, whose data begins at byte %" PRIu64 ", is %s, not F32, BF16 or F16",
                    reader->path, entry->name, reader->data_offset + entry->begin, types[type].name);
    TRY(safetensors_read(reader, entry, first, n, half_place(out, n), e));
    half_widen(out, n, type == SAFETENSORS_BF16);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing

struct SafetensorsWriter {
    OutFile *file;          // NULL once finished
    Text tensors, metadata; // the header's two halves, without the braces around them
    uint64_t declared;      // bytes of data
    uint64_t written;       // bytes of data
    bool header_done;
    char path[]; // for messages
};

int safetensors_create(SafetensorsWriter **out, const char *path, Error *e) {
    int code = 0;
    TRY(memory_alloc_zero((void **)out, sizeof **out + strlen(path) + 1, path, e));
    strcpy((*out)->path, path);
    TRY_GOTO(text_begin(&(*out)->tensors, e));
    TRY_GOTO(text_begin(&(*out)->metadata, e));
    TRY_GOTO(outfile_create(&(*out)->file, path, e));
    return 0;
done:
    safetensors_abandon(*out);
    *out = NULL;
    return code;
}

void safetensors_add(SafetensorsWriter *writer, const char *name, SafetensorsType type, int dimensions,
                     const uint64_t *shape) {
    assert(!writer->header_done);
    FILE *f = writer->tensors.f;
    uint64_t bytes = types[type].bytes;
    if (ftell(f)) fputc(',', f);
    text_write_json(f, name);
    fprintf(f, ":{\"dtype\":\"%s\",\"shape\":[", types[type].name);
    for (int i = 0; i < dimensions; i++) {
        fprintf(f, "%s%" PRIu64, i ? "," : "", shape[i]);
        bytes *= shape[i];
    }
    fprintf(f, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", writer->declared, writer->declared + bytes);
    writer->declared += bytes;
}

void safetensors_add_metadata(SafetensorsWriter *writer, const char *key, const char *value) {
    assert(!writer->header_done);
    FILE *f = writer->metadata.f;
    if (ftell(f)) fputc(',', f);
    text_write_json(f, key);
    fputc(':', f);
    text_write_json(f, value);
}

// Refuses a header that our own reader refuses.
static int header_verify(const SafetensorsWriter *writer, const Text *header, Error *e) {
    SafetensorsReader reader = {.path = (char *)writer->path};
    int code = header_parse(&reader, header->text + PREFIX_BYTES, header->bytes - PREFIX_BYTES, writer->declared, e);
    header_free(&reader);
    if (code != ERR_INPUT) return code;
    e->code = ERR_INTERNAL;
    return error_hint(e, "this is a fault of the program");
}

// Length, {metadata, tensors} and spaces, so that the data begins at a multiple of 8 bytes.
static int header_write(SafetensorsWriter *writer, Error *e) {
    const Text *metadata = &writer->metadata, *tensors = &writer->tensors;
    Text header;
    uint64_t length = 0;
    TRY(text_end(&writer->metadata, e));
    TRY(text_end(&writer->tensors, e));
    TRY(text_begin(&header, e));
    fwrite(&length, sizeof length, 1, header.f);
    fputc('{', header.f);
    if (metadata->bytes) fprintf(header.f, "\"" METADATA_NAME "\":{%s}", metadata->text);
    fprintf(header.f, "%s%s}", metadata->bytes && tensors->bytes ? "," : "", tensors->text);
    while (ftell(header.f) % 8) fputc(' ', header.f);
    TRY(text_end(&header, e));
    length = header.bytes - PREFIX_BYTES;
    memcpy(header.text, &length, sizeof length);
    int code = header_verify(writer, &header, e);
    if (!code) code = outfile_write(writer->file, header.text, header.bytes, e);
    writer->header_done = !code;
    text_free(&header);
    return code;
}

int safetensors_write(SafetensorsWriter *writer, const void *data, size_t bytes, Error *e) {
    if (!writer->header_done) TRY(header_write(writer, e));
    assert(bytes <= writer->declared - writer->written);
    TRY(outfile_write(writer->file, data, bytes, e));
    writer->written += bytes;
    return 0;
}

int safetensors_finish(SafetensorsWriter *writer, FileDigest *digest, Error *e) {
    int code = writer->header_done ? 0 : header_write(writer, e);
    if (!code && writer->written != writer->declared)
        code = FAIL(e, ERR_INTERNAL, NULL, "%s: %" PRIu64 " bytes of %" PRIu64 " written", writer->path,
                    writer->written, writer->declared);
    if (!code) {
        code = outfile_finish(writer->file, digest, e);
        writer->file = NULL;
    }
    safetensors_abandon(writer);
    return code;
}

void safetensors_abandon(SafetensorsWriter *writer) {
    if (!writer) return;
    outfile_abandon(writer->file);
    text_free(&writer->tensors);
    text_free(&writer->metadata);
    memory_free(writer);
}
