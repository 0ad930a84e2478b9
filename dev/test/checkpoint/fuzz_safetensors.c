// Fuzzes the safetensors reader: fuzz_safetensors [seconds] [seed]. Mutates well-formed files, opens each, and reads all
// of an accepted one. Build it with ASan and UBSan. Beyond what these find, every rejection must be ERR_INPUT with a
// message that names the file, the byte and a remedy, and an accepted file must hold what it declares. The mutations
// depend on seed and iteration alone, so that failures can be reproduced.
#include "../safetensors_writer.h"
#include "../test.h"
#include "mutate.h"

#include <inttypes.h>
#include <unistd.h>

// Writes, with our own writer, the file that an iteration begins with.
static int seed_make(Sample *s, const char *path, uint64_t *state, Error *e) {
    SafetensorsWriter *writer;
    static const char *const names[] = {"a", "wte.weight", "h.0.attn.c_attn.bias", "\xc3\xa9\"\\"};
    size_t data = 0, bytes;
    int tensors = (int)draw(state, 5);
    TRY(writer_create(&writer, path, e));
    if (draw(state, 2)) safetensors_add_metadata(&writer->header, "format", "pt");
    for (int i = 0; i < tensors; i++) {
        SafetensorsType type = (SafetensorsType)draw(state, SAFETENSORS_TYPE_COUNT);
        const uint64_t shape[3] = {draw(state, 4), 1 + draw(state, 3), 2};
        int dimensions = (int)draw(state, 4);
        safetensors_add(&writer->header, names[i % 4], type, dimensions, shape);
        uint64_t count = 1;
        for (int d = 0; d < dimensions; d++) count *= shape[d];
        data += count * safetensors_type_bytes(type);
    }
    unsigned char zeros[1024] = {0};
    TRY(writer_write(writer, zeros, data, e));
    TRY(writer_finish(writer, e));
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
    for (size_t changes = draw(state, 5); changes > 0; changes--) mutate(s, 8, size_max(s->count, 9), state);
    header = s->count >= 8 + data ? s->count - 8 - data : 0;
    size_t fate = draw(state, 16);
    if (fate == 0) header = draw(state, SIZE_MAX) >> draw(state, 64);
    if (fate == 1) s->count = draw(state, s->count + 1);
    memcpy(s->bytes, &header, size_min(8, s->count));
}

static void read_all(const SafetensorsReader *reader, size_t file_bytes) {
    Error e = {0};
    static unsigned char raw[MAX_BYTES];
    uint64_t bytes = 0;
    for (int i = 0; i < reader->count; i++) {
        const SafetensorsEntry *entry = &reader->entries[i];
        CHECK(safetensors_find(reader, entry->name) == entry, "%s is not found", entry->name);
        CHECK_OK(safetensors_read(entry, 0, entry->count, raw, &e), &e);
        bytes += entry->count * safetensors_type_bytes(entry->type);
        float *values;
        CHECK_OK(memory_alloc((void **)&values, entry->count * sizeof *values, "values", &e), &e);
        int code = safetensors_read_f32(entry, 0, entry->count, values, &e);
        CHECK(code == 0 || (code == ERR_INPUT && test_says_byte(e.what)), "code %d: %s", code, e.what);
        memory_free(values);
    }
    CHECK(reader->data_offset + bytes == file_bytes, "%" PRIu64 " bytes of %zu", reader->data_offset + bytes,
          file_bytes);
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
        for (int k = 0; k < 64; k++) { // many mutants of each, because making them is slow
            Sample mutant = s;
            sample_make(&mutant, &state);
            file_write(path, &mutant);
            SafetensorsReader reader;
            e = (Error){0};
            int code = safetensors_open(&reader, path, &e);
            if (code) {
                rejected++;
                CHECK(code == ERR_INPUT && strstr(e.what, path) && e.hint[0], "code %d: %s (%s)", code, e.what, e.hint);
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
