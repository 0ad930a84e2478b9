#define _POSIX_C_SOURCE 200809L
#include "checkpoint/safetensors.h"

#include "base/float16.h"
#include "base/json.h"

#include <cjson/cJSON.h>
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian, and read as it lies");

#define METADATA_NAME "__metadata__"

static const uint64_t prefix_bytes = 8;             // the header's length
static const uint64_t max_header = 100 * 1000000;   // bytes; the format's own limit
static const double max_integer = 9007199254740992; // 2^53: JSON numbers arrive as doubles, exact up to here

static const char *const damaged = "the file is damaged or incomplete: copy or download it again";

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
// The header, from text to entries

// A header under way: of which file, its text, and the tree that cJSON made of it.
typedef struct {
    const char *path;
    JsonText json;
} Header;

// Where in the file a part of the header stands. Walks through the header: for messages only.
static uint64_t header_byte(const Header *h, const cJSON *item) { return prefix_bytes + json_place(&h->json, item); }

// How many of the bytes are UTF-8 as RFC 3629 has it: no overlong forms, no surrogates, nothing above U+10FFFF.
static size_t utf8_length(const unsigned char *s, size_t bytes) {
    size_t i = 0;
    while (i < bytes) {
        size_t first = i;
        unsigned char c = s[i++];
        int more = c < 0x80 ? 0 : c < 0xc2 ? -1 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : c < 0xf5 ? 3 : -1;
        if (more < 0 || bytes - i < (size_t)more) return first;
        unsigned char low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80; // of the first continuation byte
        unsigned char high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
        for (; more > 0; more--, i++, low = 0x80, high = 0xbf)
            if (s[i] < low || s[i] > high) return first;
    }
    return bytes;
}

// A JSON number that is a whole one and fits.
static bool json_integer(const cJSON *item, uint64_t *out) {
    if (!cJSON_IsNumber(item)) return false;
    double x = item->valuedouble;
    if (!(x >= 0 && x <= max_integer) || x != (double)(uint64_t)x) return false;
    *out = (uint64_t)x;
    return true;
}

static bool type_find(const char *name, SafetensorsType *out) {
    for (int i = 0; i < SAFETENSORS_TYPE_COUNT; i++) {
        if (strcmp(types[i].name, name) != 0) continue;
        *out = (SafetensorsType)i;
        return true;
    }
    return false;
}

// Reads entry->shape and entry->count; the count's size in bytes fits in 64 bits.
static int shape_parse(SafetensorsEntry *entry, const cJSON *shape, const Header *h, Error *e) {
    const uint64_t most = UINT64_MAX / types[entry->type].bytes;
    if (!cJSON_IsArray(shape))
        return FAIL(e, ERR_INPUT, damaged, "%s: tensor %.200s: its shape at byte %" PRIu64 " is not a list", h->path,
                    entry->name, header_byte(h, shape));
    entry->count = 1;
    const cJSON *item;
    cJSON_ArrayForEach(item, shape) {
        uint64_t size;
        if (entry->dimensions == SAFETENSORS_MAX_DIMENSIONS)
            return FAIL(e, ERR_INPUT, "is this a GPT-2 file?",
                        "%s: tensor %.200s: its shape at byte %" PRIu64 " has more than %d dimensions", h->path,
                        entry->name, header_byte(h, shape), SAFETENSORS_MAX_DIMENSIONS);
        if (!json_integer(item, &size))
            return FAIL(e, ERR_INPUT, damaged,
                        "%s: tensor %.200s: dimension %d at byte %" PRIu64 " is not a whole number from 0 to 2^53",
                        h->path, entry->name, entry->dimensions, header_byte(h, item));
        if (size && entry->count > most / size)
            return FAIL(e, ERR_INPUT, damaged,
                        "%s: tensor %.200s: the product of its shape at byte %" PRIu64 " overflows 64 bits", h->path,
                        entry->name, header_byte(h, shape));
        entry->shape[entry->dimensions++] = size;
        entry->count *= size;
    }
    return 0;
}

// Where the tensor's data lies, which must be as much as its shape and type make.
static int offsets_parse(SafetensorsEntry *entry, const cJSON *offsets, const Header *h, Error *e) {
    uint64_t bytes = entry->count * types[entry->type].bytes;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 || !json_integer(offsets->child, &entry->begin) ||
        !json_integer(offsets->child->next, &entry->end) || entry->begin > entry->end)
        return FAIL(e, ERR_INPUT, damaged,
                    "%s: tensor %.200s: its data_offsets at byte %" PRIu64 " are not two ascending whole numbers",
                    h->path, entry->name, header_byte(h, offsets));
    if (entry->end - entry->begin == bytes) return 0;
    return FAIL(e, ERR_INPUT, damaged,
                "%s: tensor %.200s: its data_offsets at byte %" PRIu64 ", %" PRIu64 " to %" PRIu64 ", are %" PRIu64
                " bytes, but its shape and dtype make %" PRIu64,
                h->path, entry->name, header_byte(h, offsets), entry->begin, entry->end, entry->end - entry->begin,
                bytes);
}

// One tensor of the header. That exactly three fields are there and the three are found rules out doubled ones.
static int entry_parse(SafetensorsEntry *entry, const cJSON *json, const Header *h, Error *e) {
    *entry = (SafetensorsEntry){.name = json->string};
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(json, "dtype");
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(json, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(json, "data_offsets");
    if (!cJSON_IsObject(json) || !type || !shape || !offsets || cJSON_GetArraySize(json) != 3)
        return FAIL(e, ERR_INPUT, damaged,
                    "%s: tensor %.200s at byte %" PRIu64 " has not exactly dtype, shape and data_offsets", h->path,
                    entry->name, header_byte(h, json));
    if (!cJSON_IsString(type) || !type_find(type->valuestring, &entry->type))
        return FAIL(e, ERR_INPUT, "convert the tensor to F32, BF16 or F16",
                    "%s: tensor %.200s: unknown dtype %.40s at byte %" PRIu64, h->path, entry->name,
                    cJSON_IsString(type) ? type->valuestring : "(not a string)", header_byte(h, type));
    TRY(shape_parse(entry, shape, h, e));
    return offsets_parse(entry, offsets, h, e);
}

static int compare_entries(const void *pa, const void *pb) {
    const SafetensorsEntry *a = pa, *b = pb;
    if (a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
    if (a->end != b->end) return a->end < b->end ? -1 : 1; // empty tensors come before the one that begins there
    return strcmp(a->name, b->name);
}

typedef struct {
    const char *name;
    int index;
} Name;

static int compare_names(const void *pa, const void *pb) {
    return strcmp(((const Name *)pa)->name, ((const Name *)pb)->name);
}

static int fail_twice(const Header *h, const char *name, Error *e) {
    const cJSON *item, *last = NULL;
    cJSON_ArrayForEach(item, h->json.root) if (strcmp(item->string, name) == 0) last = item;
    bool metadata = strcmp(name, METADATA_NAME) == 0;
    return FAIL(e, ERR_INPUT, damaged, "%s: %s%.200s is there twice, at byte %" PRIu64 " too", h->path,
                metadata ? "" : "tensor ", name, header_byte(h, last));
}

// Fills reader->by_name. Two tensors of one name are an error.
static int names_sort(SafetensorsReader *reader, const Header *h, Error *e) {
    int code = 0;
    Name *names = NULL;
    TRY_GOTO(memory_alloc((void **)&names, (size_t)reader->count * sizeof *names, reader->path, e));
    TRY_GOTO(memory_alloc((void **)&reader->by_name, (size_t)reader->count * sizeof *reader->by_name, reader->path, e));
    for (int i = 0; i < reader->count; i++) names[i] = (Name){reader->entries[i].name, i};
    qsort(names, (size_t)reader->count, sizeof *names, compare_names);
    for (int i = 0; i < reader->count; i++) {
        reader->by_name[i] = names[i].index;
        if (i && strcmp(names[i].name, names[i - 1].name) == 0) TRY_GOTO(fail_twice(h, names[i].name, e));
    }
done:
    memory_free(names);
    return code;
}

// The entries, sorted by their data, must cover all of it: no hole, no overlap, nothing behind the end.
static int offsets_check(const SafetensorsReader *reader, uint64_t data_bytes, Error *e) {
    uint64_t at = 0;
    for (int i = 0; i < reader->count; at = reader->entries[i++].end) {
        const SafetensorsEntry *entry = &reader->entries[i];
        if (entry->begin != at)
            return FAIL(e, ERR_INPUT, damaged,
                        "%s: tensor %.200s begins at byte %" PRIu64 " of the data, the one before it ends at %" PRIu64
                        ": %s",
                        reader->path, entry->name, entry->begin, at, entry->begin < at ? "an overlap" : "a hole");
        if (entry->end > data_bytes)
            return FAIL(e, ERR_INPUT, damaged,
                        "%s: tensor %.200s ends at byte %" PRIu64 " of the data, the file holds %" PRIu64, reader->path,
                        entry->name, entry->end, data_bytes);
    }
    if (at != data_bytes)
        return FAIL(e, ERR_INPUT, damaged,
                    "%s: the tensors end at byte %" PRIu64 " of the data, the file holds %" PRIu64, reader->path, at,
                    data_bytes);
    return 0;
}

static int metadata_check(const cJSON *metadata, const Header *h, Error *e) {
    if (!cJSON_IsObject(metadata))
        return FAIL(e, ERR_INPUT, damaged, "%s: " METADATA_NAME " at byte %" PRIu64 " is not an object", h->path,
                    header_byte(h, metadata));
    const cJSON *item;
    cJSON_ArrayForEach(item, metadata) if (!cJSON_IsString(item)) {
        return FAIL(e, ERR_INPUT, damaged, "%s: " METADATA_NAME ": %.200s at byte %" PRIu64 " is not a string", h->path,
                    item->string, header_byte(h, item));
    }
    return 0;
}

// From JSON text to reader->header.
static int json_parse(SafetensorsReader *reader, const char *text, size_t bytes, Error *e) {
    const char *nul = memchr(text, 0, bytes), *stop = NULL;
    if (nul)
        return FAIL(e, ERR_INPUT, damaged, "%s: zero byte in the header, at byte %" PRIu64, reader->path,
                    prefix_bytes + (uint64_t)(nul - text));
    size_t valid = utf8_length((const unsigned char *)text, bytes);
    if (valid < bytes)
        return FAIL(e, ERR_INPUT, damaged, "%s: the header is not UTF-8 at byte %" PRIu64, reader->path,
                    prefix_bytes + valid);
    if (bytes == 0 || text[0] != '{')
        return FAIL(e, ERR_INPUT, "is this a safetensors file?", "%s: the header at byte %" PRIu64 " is not JSON",
                    reader->path, prefix_bytes);
    reader->header = cJSON_ParseWithLengthOpts(text, bytes, &stop, 0);
    if (reader->header) stop += strspn(stop, " \t\r\n");
    if (!reader->header || stop != text + bytes)
        return FAIL(e, ERR_INPUT, damaged, "%s: the header is malformed JSON at byte %" PRIu64, reader->path,
                    prefix_bytes + (uint64_t)(stop ? stop - text : 0));
    return 0;
}

// Fills everything of the reader from the header's text (with a NUL behind it) but path, fd and data_offset.
// On failure the caller clears up.
static int header_parse(SafetensorsReader *reader, const char *text, size_t bytes, uint64_t data_bytes, Error *e) {
    TRY(json_parse(reader, text, bytes, e));
    const Header h = {reader->path, {text, bytes, reader->header}};
    size_t items = (size_t)cJSON_GetArraySize(reader->header);
    TRY(memory_alloc((void **)&reader->entries, items * sizeof *reader->entries, reader->path, e));
    int metadata = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, reader->header) {
        if (strcmp(item->string, METADATA_NAME) == 0) {
            TRY(metadata_check(item, &h, e));
            if (metadata++) return fail_twice(&h, METADATA_NAME, e);
        } else TRY(entry_parse(&reader->entries[reader->count++], item, &h, e));
    }
    qsort(reader->entries, (size_t)reader->count, sizeof *reader->entries, compare_entries);
    TRY(names_sort(reader, &h, e)); // a doubled name says more than the overlap that it makes
    return offsets_check(reader, data_bytes, e);
}

static void header_free(SafetensorsReader *reader) {
    memory_free(reader->entries);
    memory_free(reader->by_name);
    cJSON_Delete(reader->header);
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading

// All of the bytes [offset, offset + bytes) of the file.
static int read_at(const SafetensorsReader *reader, uint64_t offset, void *out, size_t bytes, Error *e) {
    size_t have = 0;
    while (have < bytes) {
        ssize_t n = pread(reader->fd, (char *)out + have, bytes - have, (off_t)(offset + have));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return FAIL(e, ERR_INPUT, "check the disk, and that nothing else writes to the file",
                        "%s: read failed at byte %" PRIu64 ": %s", reader->path, offset + have,
                        n ? strerror(errno) : "the file got shorter");
        have += (size_t)n;
    }
    return 0;
}

// Finds the header's length, and that of the data behind it.
static int lengths_read(SafetensorsReader *reader, uint64_t *header_bytes, uint64_t *data_bytes, Error *e) {
    struct stat st;
    if (fstat(reader->fd, &st) != 0 || !S_ISREG(st.st_mode))
        return FAIL(e, ERR_INPUT, "name a regular file", "%s: not a regular file", reader->path);
    uint64_t file_bytes = (uint64_t)st.st_size;
    if (file_bytes < prefix_bytes)
        return FAIL(e, ERR_INPUT, damaged,
                    "%s: the file ends at byte %" PRIu64 ", within the %" PRIu64 " that give its header's length",
                    reader->path, file_bytes, prefix_bytes);
    TRY(read_at(reader, 0, header_bytes, sizeof *header_bytes, e));
    if (*header_bytes > max_header)
        return FAIL(e, ERR_INPUT, "is this a safetensors file?",
                    "%s: bytes 0 to 8 give the header %" PRIu64 " bytes, more than the %" PRIu64 " it may have",
                    reader->path, *header_bytes, max_header);
    if (*header_bytes > file_bytes - prefix_bytes)
        return FAIL(e, ERR_INPUT, damaged, "%s: bytes 0 to 8 give the header %" PRIu64 " bytes, the file has %" PRIu64,
                    reader->path, *header_bytes, file_bytes);
    reader->data_offset = prefix_bytes + *header_bytes;
    *data_bytes = file_bytes - reader->data_offset;
    return 0;
}

int safetensors_open(SafetensorsReader *reader, const char *path, Error *e) {
    int code = 0;
    char *text = NULL;
    uint64_t header_bytes = 0, data_bytes = 0;
    *reader = (SafetensorsReader){.fd = -1};
    TRY_GOTO(memory_alloc((void **)&reader->path, strlen(path) + 1, path, e));
    strcpy(reader->path, path);
    reader->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a FIFO is to be refused, not waited for
    if (reader->fd < 0) {
        code = FAIL(e, ERR_INPUT, "check the path", "%s: cannot open: %s", path, strerror(errno));
        goto done;
    }
    TRY_GOTO(lengths_read(reader, &header_bytes, &data_bytes, e));
    TRY_GOTO(memory_alloc((void **)&text, header_bytes + 1, path, e));
    TRY_GOTO(read_at(reader, prefix_bytes, text, header_bytes, e));
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
    int low = 0, high = reader->count;
    while (low < high) {
        int middle = low + (high - low) / 2;
        const SafetensorsEntry *entry = &reader->entries[reader->by_name[middle]];
        int order = strcmp(name, entry->name);
        if (order == 0) return entry;
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return NULL;
}

const char *safetensors_metadata(const SafetensorsReader *reader, const char *key) {
    const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(reader->header, METADATA_NAME);
    return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(metadata, key));
}

int safetensors_read(const SafetensorsReader *reader, const SafetensorsEntry *entry, uint64_t first, size_t n,
                     void *out, Error *e) {
    size_t size = types[entry->type].bytes;
    assert(first <= entry->count && n <= entry->count - first);
    return read_at(reader, reader->data_offset + entry->begin + first * size, out, n * size, e);
}

int safetensors_read_f32(const SafetensorsReader *reader, const SafetensorsEntry *entry, uint64_t first, size_t n,
                         float *out, Error *e) {
    SafetensorsType type = entry->type;
    if (type == SAFETENSORS_F32) return safetensors_read(reader, entry, first, n, out, e);
    if (type != SAFETENSORS_BF16 && type != SAFETENSORS_F16)
        return FAIL(e, ERR_INPUT, "convert the tensor to F32, BF16 or F16",
                    "%s: tensor %.200s, whose data begins at byte %" PRIu64 ", is %s, not F32, BF16 or F16",
                    reader->path, entry->name, reader->data_offset + entry->begin, types[type].name);
    // The 16-bit values go into the upper half of out, from where a float never overtakes the values yet to be read.
    const char *half = (const char *)out + n * sizeof(uint16_t);
    TRY(safetensors_read(reader, entry, first, n, (char *)out + n * sizeof(uint16_t), e));
    for (size_t i = 0; i < n; i++) {
        uint16_t x;
        memcpy(&x, half + i * sizeof x, sizeof x);
        out[i] = type == SAFETENSORS_BF16 ? bf16_to_f32(x) : f16_to_f32(x);
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing

// JSON text under way.
typedef struct {
    FILE *stream; // over text
    char *text;
    size_t bytes;
} Text;

struct SafetensorsWriter {
    char *path;
    OutFile *file;          // NULL once finished
    Text tensors, metadata; // the header's two halves, without the braces around them
    uint64_t declared;      // bytes of data
    uint64_t written;       // bytes of data
    bool header_done;
};

static int text_open(Text *text, const char *path, Error *e) {
    text->stream = open_memstream(&text->text, &text->bytes);
    if (!text->stream) return FAIL(e, ERR_MEMORY, "free some memory", "%s: no memory for the header", path);
    return 0;
}

static void text_free(Text *text) {
    if (text->stream) fclose(text->stream);
    free(text->text);
}

// A JSON string (RFC 8259, section 7).
static void text_put_string(Text *text, const char *s) {
    fputc('"', text->stream);
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c < 0x20) fprintf(text->stream, "\\u%04x", c);
        else if (c == '"' || c == '\\') fprintf(text->stream, "\\%c", c);
        else fputc(c, text->stream);
    }
    fputc('"', text->stream);
}

static void writer_free(SafetensorsWriter *writer) {
    text_free(&writer->tensors);
    text_free(&writer->metadata);
    memory_free(writer->path);
    memory_free(writer);
}

int safetensors_create(SafetensorsWriter **out, const char *path, Error *e) {
    int code = 0;
    SafetensorsWriter *writer;
    *out = NULL;
    TRY(memory_alloc_zero((void **)&writer, sizeof *writer, path, e));
    TRY_GOTO(memory_alloc((void **)&writer->path, strlen(path) + 1, path, e));
    strcpy(writer->path, path);
    TRY_GOTO(text_open(&writer->tensors, path, e));
    TRY_GOTO(text_open(&writer->metadata, path, e));
    TRY_GOTO(outfile_create(&writer->file, path, e));
    *out = writer;
done:
    if (code) writer_free(writer);
    return code;
}

int safetensors_add(SafetensorsWriter *writer, const char *name, SafetensorsType type, int dimensions,
                    const uint64_t *shape, Error *e) {
    assert(!writer->header_done);
    FILE *stream = writer->tensors.stream;
    uint64_t bytes = types[type].bytes;
    if (ftell(stream)) fputc(',', stream);
    text_put_string(&writer->tensors, name);
    fprintf(stream, ":{\"dtype\":\"%s\",\"shape\":[", types[type].name);
    for (int i = 0; i < dimensions; i++) {
        fprintf(stream, "%s%" PRIu64, i ? "," : "", shape[i]);
        bytes *= shape[i];
    }
    fprintf(stream, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", writer->declared, writer->declared + bytes);
    writer->declared += bytes;
    if (ferror(stream)) return FAIL(e, ERR_MEMORY, "free some memory", "%s: no memory for the header", writer->path);
    return 0;
}

int safetensors_add_metadata(SafetensorsWriter *writer, const char *key, const char *value, Error *e) {
    assert(!writer->header_done);
    FILE *stream = writer->metadata.stream;
    if (ftell(stream)) fputc(',', stream);
    text_put_string(&writer->metadata, key);
    fputc(':', stream);
    text_put_string(&writer->metadata, value);
    if (ferror(stream)) return FAIL(e, ERR_MEMORY, "free some memory", "%s: no memory for the header", writer->path);
    return 0;
}

// A header that our own reader refuses must never reach the disk.
static int header_verify(const SafetensorsWriter *writer, const char *text, size_t bytes, Error *e) {
    SafetensorsReader reader = {.path = writer->path, .fd = -1};
    int code = header_parse(&reader, text, bytes, writer->declared, e);
    header_free(&reader);
    if (code == ERR_INPUT) {
        code = e->code = ERR_INTERNAL;
        error_hint(e, "this is a fault of the program");
    }
    return code;
}

// {metadata, tensors}, with spaces behind it so that the data begins at a multiple of 8 bytes.
static int header_write(SafetensorsWriter *writer, Error *e) {
    Text header = {0};
    TRY(text_open(&header, writer->path, e));
    uint64_t zero = 0;
    fwrite(&zero, sizeof zero, 1, header.stream); // the length's place
    fputc('{', header.stream);
    fflush(writer->metadata.stream);
    fflush(writer->tensors.stream);
    if (writer->metadata.bytes) fprintf(header.stream, "\"" METADATA_NAME "\":{%s}", writer->metadata.text);
    if (writer->metadata.bytes && writer->tensors.bytes) fputc(',', header.stream);
    fprintf(header.stream, "%s}", writer->tensors.text);
    while (ftell(header.stream) % 8) fputc(' ', header.stream);
    int code = 0;
    if (fflush(header.stream) != 0 || ferror(header.stream)) {
        code = FAIL(e, ERR_MEMORY, "free some memory", "%s: no memory for the header", writer->path);
        goto done;
    }
    uint64_t length = header.bytes - prefix_bytes;
    memcpy(header.text, &length, sizeof length);
    TRY_GOTO(header_verify(writer, header.text + prefix_bytes, length, e));
    TRY_GOTO(outfile_write(writer->file, header.text, header.bytes, e));
    writer->header_done = true;
done:
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
    int code = 0;
    if (!writer->header_done) TRY_GOTO(header_write(writer, e));
    if (writer->written != writer->declared) {
        code = FAIL(e, ERR_INTERNAL, NULL, "%s: %" PRIu64 " bytes of %" PRIu64 " written", writer->path,
                    writer->written, writer->declared);
        goto done;
    }
    code = outfile_finish(writer->file, digest, e);
    writer->file = NULL;
done:
    safetensors_abandon(writer);
    return code;
}

void safetensors_abandon(SafetensorsWriter *writer) {
    if (!writer) return;
    outfile_abandon(writer->file);
    writer_free(writer);
}
