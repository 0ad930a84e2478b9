// The loader returns the rows of dataset_rows, whether it has read them ahead or not. It ends and fails cleanly.
#include "text/loader.h"
#include "shard_file.h"
#include "../scratch.h"

enum { V = 5000, T = 13, MAX_ROWS = 9 };

static Error e;
// Writes a shard of random tokens below `vocab`.
static void make_shard(const char *name, size_t count, int vocab) {
    uint16_t *tokens = malloc(count * sizeof *tokens);
    for (size_t i = 0; i < count; i++) tokens[i] = (uint16_t)draw((uint32_t)vocab);
    CHECK_OK(shard_write(name, tokens, count, &e), &e);
    free(tokens);
}

// Overwrites the tokens of a shard that the loader keeps open.
static void overwrite_tokens(const char *name, size_t count, uint16_t token) {
    FILE *f = fopen(name, "r+b");
    fseek(f, SHARD_HEADER_BYTES, SEEK_SET);
    for (size_t i = 0; i < count; i++) fwrite(&token, sizeof token, 1, f);
    fclose(f);
}

typedef struct {
    Dataset *data;
    Loader *loader;
} Fixture;

static Fixture fixture_open(const char *pattern, int max_rows, int seq_len) {
    Fixture f = {0};
    CHECK_OK(dataset_open(&f.data, pattern, seq_len, V, 7, &e), &e);
    CHECK_OK(loader_create(&f.loader, f.data, max_rows, seq_len, &e), &e);
    return f;
}

static void fixture_close(Fixture *f) {
    loader_destroy(f->loader);
    dataset_close(f->data);
}

// Returns true if dataset_rows gives the same rows.
static bool same_rows(const Fixture *f, const uint16_t *rows, uint64_t first, int n) {
    uint16_t want[MAX_ROWS * (T + 1)];
    CHECK_OK(dataset_rows(f->data, first, n, want, &e), &e);
    return memcmp(rows, want, (size_t)n * (T + 1) * sizeof *rows) == 0;
}

// Reads rows in order and at random places. Announces the right rows, other rows, too many, too few or none. Checks
// rows while the thread reads the next rows.
static void test_order(void) {
    make_shard("order_0.bin", 1700, V);
    make_shard("order_1.bin", 450, V);
    Fixture f = fixture_open("order_*.bin", MAX_ROWS, T);
    uint64_t windows = f.data->info.windows, first = 0;
    for (int i = 0; i < 2000; i++) {
        int n = 1 + (int)draw(MAX_ROWS), kind = (int)draw(6);
        const uint16_t *rows = NULL;
        CHECK_OK(loader_rows(f.loader, first, n, &rows, &e), &e);
        uint64_t next = draw(8) ? first + (uint64_t)n : draw(5 * (uint32_t)windows);
        int next_n = 1 + (int)draw(MAX_ROWS);
        if (kind < 3) loader_expect(f.loader, next, next_n);
        if (kind == 3) loader_expect(f.loader, draw(5 * (uint32_t)windows), next_n);
        if (kind == 4) loader_expect(f.loader, next, 0);
        CHECK(rows && same_rows(&f, rows, first, n), "draw %d: rows %llu + %d", i, (unsigned long long)first, n);
        first = next;
    }
    fixture_close(&f);
}

// The loader reads announced rows at once, other rows on demand.
static void test_reads_ahead(void) {
    const size_t count = 400;
    const uint16_t *rows;
    make_shard("ahead.bin", count, V - 1);
    Fixture f = fixture_open("ahead.bin", MAX_ROWS, T);
    loader_expect(f.loader, 0, 4);
    loader_expect(f.loader, 0, 0); // waits until the thread is idle
    uint16_t before[4 * (T + 1)];
    CHECK_OK(dataset_rows(f.data, 0, 4, before, &e), &e);
    overwrite_tokens("ahead.bin", count, V - 1);
    CHECK_OK(loader_rows(f.loader, 0, 3, &rows, &e), &e); // a run's last step needs fewer rows
    CHECK(memcmp(rows, before, 3 * (T + 1) * sizeof *rows) == 0, "read on demand, not ahead");
    CHECK_OK(loader_rows(f.loader, 0, 4, &rows, &e), &e);
    CHECK(rows[0] == V - 1 && rows[4 * (T + 1) - 1] == V - 1, "read ahead without being asked");
    fixture_close(&f);
}

// Destroys the loader while its thread reads several megabytes. Sanitizers would see a write after loader_destroy.
static void test_ends_while_reading(void) {
    enum { LONG_T = 1024, LONG_ROWS = 512 };
    const uint16_t *rows;
    make_shard("long.bin", 600000, V);
    for (int i = 0; i < 50; i++) {
        Fixture f = fixture_open("long.bin", LONG_ROWS, LONG_T);
        if (i % 3 == 0) CHECK_OK(loader_rows(f.loader, draw(1000), LONG_ROWS, &rows, &e), &e);
        if (i % 5) loader_expect(f.loader, draw(1000), LONG_ROWS);
        fixture_close(&f);
    }
    loader_destroy(NULL);
}

// A shard is cut or damaged while in use: loader_rows returns the error; when the file is whole again, it returns rows.
static void test_errors_reach_the_caller(void) {
    const size_t count = 300;
    const uint16_t *rows;
    make_shard("bad.bin", count, V);
    Fixture f = fixture_open("bad.bin", MAX_ROWS, T);
    for (int ahead = 0; ahead < 2; ahead++) {
        CHECK(truncate("bad.bin", SHARD_HEADER_BYTES + 20) == 0, "truncate");
        if (ahead) loader_expect(f.loader, 5, 9);
        CHECK_ERROR(loader_rows(f.loader, 5, 9, &rows, &e), &e, ERR_INPUT, "bad.bin: read failed at byte");
        overwrite_tokens("bad.bin", count, V);
        if (ahead) loader_expect(f.loader, 5, 9);
        CHECK_ERROR(loader_rows(f.loader, 5, 9, &rows, &e), &e, ERR_INPUT, "token 5000 at position");
        if (ahead) loader_expect(f.loader, 5, 9);
        loader_expect(f.loader, 0, 0); // the thread fails before the file is whole
        overwrite_tokens("bad.bin", count, 7);
        CHECK_OK(loader_rows(f.loader, 5, 9, &rows, &e), &e);
        CHECK(rows[0] == 7 && same_rows(&f, rows, 5, 9), "rows after the repair");
    }
    CHECK(truncate("bad.bin", SHARD_HEADER_BYTES) == 0, "truncate");
    loader_expect(f.loader, 0, 9); // nobody asks for these rows, so nobody sees their error
    fixture_close(&f);
}

int main(void) {
    scratch_begin();
    RUN(test_order, test_reads_ahead, test_ends_while_reading, test_errors_reach_the_caller);
    return scratch_end();
}
