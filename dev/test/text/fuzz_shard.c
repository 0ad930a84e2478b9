// Mutates valid shards. dataset_open must refuse a shard with a message, or the shard must read without a bad token.
// The sanitizers catch the rest.
//
//     fuzz_shard [SECONDS [SEED]]      default 5 seconds, seed 1: the same files every time
#include "text/shards.h"
#include "../test.h"

#include <unistd.h>

enum { MAX_BYTES = 8192 };
static struct {
    double seconds;
    uint64_t random;
    char path[512];
    long tried, accepted;
} fuzz = {5, 1, "", 0, 0};

static uint32_t draw(uint32_t below) { // xorshift64*
    fuzz.random ^= fuzz.random >> 12;
    fuzz.random ^= fuzz.random << 25;
    fuzz.random ^= fuzz.random >> 27;
    return (uint32_t)((fuzz.random * 0x2545f4914f6cdd1du) >> 33) % below;
}

static size_t make_valid(unsigned char *file) {
    int32_t n = (int32_t)draw(2000) + 1;
    int32_t header[SHARD_HEADER_INTS] = {SHARD_MAGIC, SHARD_VERSION, n};
    memcpy(file, header, sizeof header);
    uint32_t largest = 250 + draw(7);
    for (int i = 0; i < 2 * n; i++) file[SHARD_HEADER_BYTES + i] = i % 2 ? 0 : (unsigned char)draw(largest);
    return SHARD_HEADER_BYTES + 2 * (size_t)n;
}

static size_t mutate(unsigned char *file, size_t bytes) {
    static const int32_t edges[] = {0, 1, -1, 2, INT32_MAX, INT32_MIN, SHARD_MAGIC, SHARD_VERSION, 1 << 30, 65536};
    int32_t value;
    switch (draw(6)) {
    case 0: file[draw(16)] = (unsigned char)draw(256); break;                     // a byte of the header's start
    case 1: file[draw((uint32_t)bytes)] ^= (unsigned char)(1u << draw(8)); break; // a bit anywhere
    case 2: return draw((uint32_t)bytes + 1);                                     // cut
    case 3: return size_min(MAX_BYTES, bytes + draw(64));                         // lengthen
    case 4:
        value = edges[draw(sizeof edges / sizeof *edges)];
        memcpy(file + 4 * draw(4), &value, 4);
        break;
    case 5: // a count that fits the size, or is one off
        value = (int32_t)((bytes - size_min(bytes, SHARD_HEADER_BYTES)) / 2) + (int32_t)draw(3) - 1;
        memcpy(file + 8, &value, 4);
        break;
    }
    return bytes;
}

static void try_open(int T, int V) {
    Dataset *data;
    Error e;
    int code = dataset_open(&data, fuzz.path, T, V, 7, &e);
    fuzz.tried++;
    if (code) {
        CHECK(code == ERR_INPUT && strstr(e.what, fuzz.path) && e.hint[0], "code %d: %s", code, e.what);
        CHECK(test_says_byte(e.what) || strstr(e.what, "too few for one window"), "no byte: %s", e.what);
        return;
    }
    fuzz.accepted++;
    uint64_t N = dataset_describe(data).windows;
    uint16_t *rows = malloc(2 * 4 * ((size_t)T + 1));
    for (uint64_t k = 0; k < 2 * N && k < 40; k += 4) {
        code = dataset_rows(data, k, 4, rows, &e);
        CHECK(code == 0, "an accepted shard does not read: %s", e.what); // small: every token was checked
        for (int i = 0; i < 4 * (T + 1) && !code; i++) CHECK(rows[i] < V, "token %d", rows[i]);
    }
    free(rows);
    dataset_close(data);
}

static void fuzz_shard(void) {
    double end = clock_seconds() + fuzz.seconds;
    unsigned char *file = malloc(MAX_BYTES);
    while (clock_seconds() < end) {
        memset(file, 0, MAX_BYTES);
        size_t bytes = make_valid(file);
        for (uint32_t rounds = draw(4); rounds > 0 && bytes > 0; rounds--) bytes = mutate(file, bytes);
        FILE *f = fopen(fuzz.path, "wb");
        CHECK(f && fwrite(file, 1, bytes, f) == bytes, "cannot write %s", fuzz.path);
        if (f) fclose(f);
        try_open(1 + (int)draw(300), draw(2) ? 250 + (int)draw(7) : 65536);
    }
    free(file);
    CHECK(fuzz.accepted > fuzz.tried / 20 && fuzz.accepted < fuzz.tried, "%ld of %ld", fuzz.accepted, fuzz.tried);
    printf("  %ld files, %ld of them accepted\n", fuzz.tried, fuzz.accepted);
}

int main(int argc, char **argv) {
    if (argc > 1) fuzz.seconds = atof(argv[1]);
    if (argc > 2) fuzz.random = strtoull(argv[2], NULL, 10) | 1;
    const char *base = getenv("TMPDIR");
    char directory[480];
    snprintf(directory, sizeof directory, "%s/fuzz_shard_XXXXXX", base ? base : "/tmp");
    if (!mkdtemp(directory)) return ERR_INTERNAL;
    snprintf(fuzz.path, sizeof fuzz.path, "%s/shard.bin", directory);
    RUN(fuzz_shard);
    unlink(fuzz.path);
    rmdir(directory);
    return test_summary();
}
