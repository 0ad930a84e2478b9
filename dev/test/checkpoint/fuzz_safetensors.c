// Fuzzes the safetensors reader: fuzz_safetensors [seconds] [seed]. Mutates well-formed files, opens each, and reads
// all of what was accepted. To be built with ASan and UBSan, which find what goes wrong unseen; beyond that, every
// rejection must be ERR_INPUT with a message that names the file, the byte and a remedy, and an accepted file must hold
// what it declares. The mutations are a function of the seed and the iteration alone, so a failure is found again.
#define _POSIX_C_SOURCE 200809L
#include "checkpoint/safetensors.h"
#include "../test.h"

#include <inttypes.h>
#include <unistd.h>

enum { MAX_BYTES = 4096 };

typedef struct {
    unsigned char bytes[MAX_BYTES];
    size_t count;
} Sample;

// Bits for the mutations (splitmix64: Steele et al. 2014).
static uint64_t draw(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static size_t draw_below(uint64_t *state, size_t n) { return n ? draw(state) % n : 0; }

// What JSON and the format are made of, and numbers at the edges.
static const char *const words[] = {
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\"",
    "\\",
    "\\u0000",
    "\\ud800",
    "null",
    "true",
    "-0",
    "-1",
    "0",
    "1",
    "4",
    "8",
    "1.5",
    "1e400",
    "1e-400",
    "4294967296",
    "2147483648",
    "9007199254740993",
    "18446744073709551615",
    "18446744073709551616",
    "[]",
    "[[[[[[[[",
    "{}",
    "\"a\"",
    "\"dtype\"",
    "\"shape\"",
    "\"data_offsets\"",
    "\"__metadata__\"",
    "\"F32\"",
    "\"BF16\"",
    "\"U8\"",
    "[0,0]",
    "[4,8]",
    " ",
    "\n",
    "\xff",
    "\xc3\xa9",
};

// Replaces [at, at + remove) by the given bytes, within the room there is.
static void splice(Sample *s, size_t at, size_t remove, const void *insert, size_t bytes) {
    if (at > s->count) return;
    remove = size_min(remove, s->count - at);
    if (s->count - remove + bytes > MAX_BYTES) return;
    unsigned char copy[MAX_BYTES];
    memcpy(copy, insert, bytes); // it may lie in s itself
    memmove(s->bytes + at + bytes, s->bytes + at + remove, s->count - at - remove);
    memcpy(s->bytes + at, copy, bytes);
    s->count += bytes - remove;
}

// One change behind the length field. What does not fit the length field is seldom interesting: it is set right later.
static void mutate(Sample *s, uint64_t *state) {
    size_t at = 8 + draw_below(state, s->count > 8 ? s->count - 8 : 1), from = draw_below(state, s->count);
    const char *word = words[draw_below(state, sizeof words / sizeof *words)];
    unsigned char byte = (unsigned char)draw(state);
    switch (draw_below(state, 8)) {
    case 0: splice(s, at, 1, &byte, 1); break;
    case 1: splice(s, at, 0, word, strlen(word)); break;
    case 2: splice(s, at, strlen(word), word, strlen(word)); break;
    case 3: splice(s, at, 1 + draw_below(state, 16), "", 0); break;
    case 4: splice(s, at, 0, s->bytes + from, draw_below(state, size_min(100, s->count - from))); break;
    case 5: s->count = at; break;
    case 6: { // another number in a number's place
        while (at < s->count && (s->bytes[at] < '0' || s->bytes[at] > '9')) at++;
        size_t digits = 0;
        while (at + digits < s->count && s->bytes[at + digits] >= '0' && s->bytes[at + digits] <= '9') digits++;
        splice(s, at, digits, word, strlen(word));
        break;
    }
    default:
        if (at < s->count) s->bytes[at] ^= (unsigned char)(1 << draw_below(state, 8));
    }
}

// Writes, with our own writer, the file that an iteration begins with.
static int seed_make(Sample *s, const char *path, uint64_t *state, Error *e) {
    SafetensorsWriter *writer;
    static const char *const names[] = {"a", "wte.weight", "h.0.attn.c_attn.bias", "\xc3\xa9\"\\"};
    size_t data = 0, bytes;
    int tensors = (int)draw_below(state, 5);
    TRY(safetensors_create(&writer, path, e));
    if (draw(state) & 1) safetensors_add_metadata(writer, "format", "pt");
    for (int i = 0; i < tensors; i++) {
        SafetensorsType type = (SafetensorsType)draw_below(state, SAFETENSORS_TYPE_COUNT);
        const uint64_t shape[3] = {draw_below(state, 4), 1 + draw_below(state, 3), 2};
        int dimensions = (int)draw_below(state, 4);
        safetensors_add(writer, names[i % 4], type, dimensions, shape);
        uint64_t count = 1;
        for (int d = 0; d < dimensions; d++) count *= shape[d];
        data += count * safetensors_type_bytes(type);
    }
    unsigned char zeros[1024] = {0};
    TRY(safetensors_write(writer, zeros, data, e));
    TRY(safetensors_finish(writer, NULL, e));
    char *file;
    TRY(file_read(path, MAX_BYTES, &file, &bytes, e));
    memcpy(s->bytes, file, bytes);
    s->count = bytes;
    memory_free(file);
    return 0;
}

// Mutates, then usually sets the length field so that it points at the same data as before: the parser is the target.
static void sample_make(Sample *s, uint64_t *state) {
    uint64_t header;
    memcpy(&header, s->bytes, 8);
    size_t data = s->count - 8 - (size_t)header;
    for (size_t changes = draw_below(state, 5); changes > 0; changes--) mutate(s, state);
    header = s->count >= 8 + data ? s->count - 8 - data : 0;
    size_t fate = draw_below(state, 16);
    if (fate == 0) header = draw(state) >> draw_below(state, 64);
    if (fate == 1) s->count = draw_below(state, s->count + 1);
    memcpy(s->bytes, &header, size_min(8, s->count));
}

static void read_all(const SafetensorsReader *reader, size_t file_bytes) {
    Error e = {0};
    unsigned char raw[MAX_BYTES];
    uint64_t bytes = 0;
    for (int i = 0; i < reader->count; i++) {
        const SafetensorsEntry *entry = &reader->entries[i];
        CHECK(safetensors_find(reader, entry->name) == entry, "%s is not found", entry->name);
        CHECK_OK(safetensors_read(reader, entry, 0, entry->count, raw, &e), &e);
        bytes += entry->count * safetensors_type_bytes(entry->type);
        float *values;
        CHECK_OK(memory_alloc((void **)&values, entry->count * sizeof *values, "values", &e), &e);
        int code = safetensors_read_f32(reader, entry, 0, entry->count, values, &e);
        CHECK(code == 0 || (code == ERR_INPUT && test_says_byte(e.what)), "code %d: %s", code, e.what);
        memory_free(values);
    }
    CHECK(reader->data_offset + bytes == file_bytes, "%" PRIu64 " bytes of %zu", reader->data_offset + bytes,
          file_bytes);
    safetensors_metadata(reader, "format");
}

static void file_write(const char *path, const Sample *s) {
    unlink(path); // some file systems wait for the disk when a file is overwritten
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(s->bytes, 1, s->count, f) == s->count, "%s: cannot write", path);
    if (f) fclose(f);
}

static double seconds = 5;
static uint64_t seed = 1;

static void test_mutations(void) {
    char path[] = "/tmp/gns_fuzz_XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0, "no temporary file");
    close(fd);
    Sample s;
    Error e = {0};
    int64_t accepted = 0, rejected = 0;
    for (double start = clock_seconds(); clock_seconds() - start < seconds && !test_state.failures;) {
        uint64_t state = seed << 32 | (uint64_t)(accepted + rejected);
        CHECK_OK(seed_make(&s, path, &state, &e), &e);
        for (int k = 0; k < 64; k++) { // many mutants of each, for making them is dear
            Sample mutant = s;
            sample_make(&mutant, &state);
            file_write(path, &mutant);
            SafetensorsReader reader;
            e = (Error){0};
            int code = safetensors_open(&reader, path, &e);
            if (code) {
                rejected++;
                CHECK(code == ERR_INPUT && strstr(e.what, path) && e.hint[0], "code %d: %s (%s)", code, e.what, e.hint);
                CHECK(test_says_byte(e.what), "no byte: %s", e.what);
            } else {
                accepted++;
                read_all(&reader, mutant.count);
                safetensors_close(&reader);
            }
        }
    }
    printf("  %" PRId64 " files: %" PRId64 " accepted, %" PRId64 " rejected\n", accepted + rejected, accepted,
           rejected);
    CHECK(accepted > 0 && rejected > 0, "one of the two never happened");
    if (test_state.failures) printf("  the last file is %s\n", path);
    else unlink(path);
}

int main(int argc, char **argv) {
    if (argc > 1) seconds = atof(argv[1]);
    if (argc > 2) seed = strtoull(argv[2], NULL, 10);
    RUN(test_mutations);
    return test_summary();
}
