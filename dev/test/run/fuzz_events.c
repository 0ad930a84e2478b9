// Mutates TensorBoard's event files and cuts them back: tensorboard_cut must leave a beginning of the file, or none of
// it, change nothing when asked again, and of a file that nobody touched leave just the steps asked for. Meant for the
// sanitizers, which catch what goes wrong in between.
//
//     fuzz_events [SECONDS [SEED]]      default 3 seconds, seed 1; 100 files at least
#define _DEFAULT_SOURCE // mkdtemp
#include "base/files.h"
#include "run/tensorboard.h"
#include "../test.h"

#include <unistd.h>

enum { HEADER_BYTES = 12, FOOTER_BYTES = 4, MAX_STEPS = 12, MAX_BYTES = 1 << 16 };
static struct {
    double seconds;
    uint64_t random;
    char directory[480], path[1024]; // of the one event file
    size_t end[MAX_STEPS + 1];       // bytes of the file up to and including a step
    long tried, cut;
} fuzz = {.seconds = 3, .random = 1};

static uint32_t draw(uint32_t below) { // xorshift64*
    fuzz.random ^= fuzz.random >> 12;
    fuzz.random ^= fuzz.random << 25;
    fuzz.random ^= fuzz.random >> 27;
    return (uint32_t)((fuzz.random * 0x2545f4914f6cdd1du) >> 33) % below;
}

static size_t read_file(unsigned char *data) {
    FILE *f = fopen(fuzz.path, "rb");
    size_t bytes = f ? fread(data, 1, MAX_BYTES, f) : 0;
    if (f) fclose(f);
    return bytes;
}

static void write_file(const unsigned char *data, size_t bytes) {
    FILE *f = fopen(fuzz.path, "wb");
    CHECK(f && fwrite(data, 1, bytes, f) == bytes, "cannot write %s", fuzz.path);
    if (f) fclose(f);
}

static bool find_file(void) {
    Names names;
    Error e;
    if (directory_list(fuzz.directory, &names, &e) || names.count == 0) return false;
    snprintf(fuzz.path, sizeof fuzz.path, "%s/%s", fuzz.directory, names.name[0]);
    names_free(&names);
    return true;
}

// Steps 1 to n: a number each, and now and then a text.
static void make_file(unsigned char *data, int n) {
    TensorBoard *tb;
    Error e = {0};
    CHECK_OK(tensorboard_create(&tb, fuzz.directory, 1, &e), &e);
    CHECK(find_file(), "no event file");
    fuzz.end[0] = read_file(data);
    for (int step = 1; step <= n; step++) {
        tensorboard_scalar(tb, "loss", (double)draw(1000) / 7);
        CHECK_OK(tensorboard_write(tb, step, &e), &e);
        if (draw(3) == 0) CHECK_OK(tensorboard_text(tb, step, "sample", "a\n\nb\n", &e), &e);
        fuzz.end[step] = read_file(data);
    }
    CHECK_OK(tensorboard_close(tb, &e), &e);
}

// CRC-32C from its polynomial, one bit of the message at a time, and its mask.
static void put_crc(unsigned char *out, const unsigned char *data, size_t bytes) {
    uint32_t crc = 0xffffffffu;
    for (size_t bit = 0; bit < 8 * bytes; bit++) {
        uint32_t low = (crc ^ (uint32_t)(data[bit / 8] >> (bit % 8))) & 1;
        crc = (crc >> 1) ^ (low ? 0x82f63b78u : 0);
    }
    crc = ~crc;
    crc = ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
    for (int i = 0; i < 4; i++) out[i] = (unsigned char)(crc >> (8 * i));
}

static void put_length(unsigned char *header, uint64_t length) {
    for (int i = 0; i < 8; i++) header[i] = (unsigned char)(length >> (8 * i));
    put_crc(header + 8, header, 8);
}

// Field 1, of so many bytes that they lead back to where it begins, or near it: 2^64 less its own 11 and more.
static void put_endless_field(unsigned char *body) {
    uint64_t length = (uint64_t)0 - (9 + draw(4));
    *body++ = 1 << 3 | 2;
    for (; length >= 0x80; length >>= 7) *body++ = (unsigned char)(length | 0x80);
    *body = (unsigned char)length;
}

// A change inside one of the first records, with a CRC that holds: what reads the fields gets to see it.
static void mutate_inside(unsigned char *data, size_t bytes) {
    size_t at = 0, length = 0;
    for (uint32_t skip = draw(4);; skip--) {
        if (at + HEADER_BYTES > bytes) return;
        length = (size_t)data[at] | (size_t)data[at + 1] << 8;
        if (length == 0 || at + HEADER_BYTES + length + FOOTER_BYTES > bytes) return;
        if (skip == 0) break;
        at += HEADER_BYTES + length + FOOTER_BYTES;
    }
    unsigned char *body = data + at + HEADER_BYTES;
    if (draw(8) == 0) { // a length that leads out of the file, or nowhere
        put_length(data + at, draw(2) ? UINT64_MAX - draw(64) : length + draw(1u << 31));
        return;
    }
    if (length > 16 && draw(4) == 0) put_endless_field(body);
    for (uint32_t times = 1 + draw(3); times > 0; times--)
        body[draw((uint32_t)size_min(length, 24))] = (unsigned char)draw(256);
    put_crc(body + length, body, length);
}

static size_t mutate(unsigned char *data, size_t bytes) {
    switch (draw(4)) {
    case 0: mutate_inside(data, bytes); return bytes;
    case 1: data[draw((uint32_t)bytes)] ^= (unsigned char)(1u << draw(8)); return bytes;
    case 2: return draw((uint32_t)bytes + 1); // cut
    default:
        for (uint32_t more = draw(64); more > 0; more--) data[bytes++] = (unsigned char)draw(256);
        return bytes;
    }
}

static void cut_and_check(const unsigned char *before, size_t bytes, int step, bool whole) {
    static unsigned char after[MAX_BYTES], again[MAX_BYTES];
    Error e = {0};
    CHECK_OK(tensorboard_cut(fuzz.directory, step, &e), &e);
    size_t left = read_file(after);
    CHECK(left <= bytes && memcmp(after, before, left) == 0, "%zu bytes left, no beginning of the %zu", left, bytes);
    CHECK_OK(tensorboard_cut(fuzz.directory, step, &e), &e);
    CHECK(read_file(again) == left && memcmp(after, again, left) == 0, "the same cut again changes something");
    size_t want = step > 0 ? fuzz.end[step] : 0;
    CHECK(!whole || left == want, "step %d: %zu bytes left, want %zu", step, left, want);
    fuzz.tried++;
    fuzz.cut += left < bytes;
}

static void fuzz_events(void) {
    static unsigned char data[MAX_BYTES];
    double end = clock_seconds() + fuzz.seconds;
    while (clock_seconds() < end || fuzz.tried <= 100) {
        int n = 1 + (int)draw(MAX_STEPS);
        make_file(data, n);
        size_t bytes = fuzz.end[n];
        uint32_t rounds = draw(4);
        for (uint32_t i = 0; i < rounds && bytes > 0; i++) bytes = mutate(data, bytes);
        write_file(data, bytes);
        cut_and_check(data, bytes, (int)draw((uint32_t)n + 1), rounds == 0);
        unlink(fuzz.path);
    }
    CHECK(fuzz.tried > 100 && fuzz.cut > fuzz.tried / 4 && fuzz.cut < fuzz.tried, "%ld of %ld", fuzz.cut, fuzz.tried);
    printf("  %ld files, %ld of them cut\n", fuzz.tried, fuzz.cut);
}

int main(int argc, char **argv) {
    if (argc > 1) fuzz.seconds = atof(argv[1]);
    if (argc > 2) fuzz.random = strtoull(argv[2], NULL, 10) | 1;
    const char *base = getenv("TMPDIR");
    snprintf(fuzz.directory, sizeof fuzz.directory, "%s/fuzz_events_XXXXXX", base ? base : "/tmp");
    if (!mkdtemp(fuzz.directory)) return ERR_INTERNAL;
    RUN(fuzz_events);
    rmdir(fuzz.directory);
    return test_summary();
}
