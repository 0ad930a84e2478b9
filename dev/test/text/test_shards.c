// Token shards: tokens are read as written, in the order that shards.h defines; errors name malformed shards.
#include "text/shards.h"
#include "shard_file.h"
#include "../scratch.h"

#include <sys/stat.h>

static Error e;
static uint64_t shift; // set by dataset_window_at

// Writes a shard with any header and count tokens of value `token`; appends `extra` bytes, or cuts off -extra bytes.
static void write_raw(const char *path, int32_t magic, int32_t version, int32_t said, int count, uint16_t token,
                      int extra) {
    size_t bytes = SHARD_HEADER_BYTES + 2 * (size_t)count;
    char *raw = calloc(1, bytes + 64);
    int32_t header[3] = {magic, version, said};
    memcpy(raw, header, sizeof header);
    for (int i = 0; i < count; i++) memcpy(raw + SHARD_HEADER_BYTES + 2 * i, &token, 2);
    write_bytes(path, raw, (size_t)((long)bytes + extra));
    free(raw);
}

// Writes shards "NAME_000.bin", ... of the given lengths, with random tokens below vocab. Returns all tokens in one
// array.
static uint16_t *make_shards(const char *name, const int *lengths, int shards, int vocab) {
    size_t total = 0, at = 0;
    for (int i = 0; i < shards; i++) total += (size_t)lengths[i];
    uint16_t *tokens = malloc(2 * total);
    for (size_t i = 0; i < total; i++) tokens[i] = (uint16_t)draw((uint32_t)vocab);
    for (int i = 0; i < shards; i++) {
        char file[64];
        snprintf(file, sizeof file, "%s_%03d.bin", name, i);
        CHECK_OK(shard_write(file, tokens + at, (size_t)lengths[i], &e), &e);
        at += (size_t)lengths[i];
    }
    return tokens;
}

// Windows in file order equal those that the test computes from the tokens by definition.
static void test_sequential(void) {
    const int lengths[6] = {1, 100, 7, 8, 9, 1000}, T = 7, V = 300;
    uint16_t *tokens = make_shards("seq", lengths, 6, V), *rows = malloc(2 * 200 * 8);
    Dataset *data;
    CHECK_OK(dataset_open(&data, "seq_*.bin", T, V, 1, &e), &e);
    int windows = 0;
    size_t at = 0;
    for (int s = 0; s < 6; s++) windows += (lengths[s] - 1) / T;
    DatasetInfo info = data->info;
    CHECK(info.windows == (uint64_t)windows, "%d windows", windows);
    CHECK(info.shards == 6 && info.tokens == 1125, "%d shards", info.shards);
    for (int w = windows; w-- > 0;) CHECK_OK(dataset_window(data, (uint64_t)w, 0, rows + w * (T + 1), &e), &e);
    for (int s = 0, w = 0; s < 6; at += (size_t)lengths[s++])
        for (int k = 0; k < (lengths[s] - 1) / T; k++, w++)
            CHECK(memcmp(rows + w * (T + 1), tokens + at + (size_t)(k * T), 2 * (size_t)(T + 1)) == 0, "window %d", w);
    for (uint64_t i = 0; i < (uint64_t)windows; i++) { // the places where an example and its document begin
        ExamplePlace place;
        uint16_t row[8];
        CHECK_OK(dataset_rows(data, i, 1, row, &e), &e);
        CHECK_OK(dataset_place(data, i, 5, &place, &e), &e);
        const uint16_t *shard = tokens, *document;
        for (int s = 0; s < place.shard - data->shards; s++) shard += lengths[s];
        for (document = shard + place.offset; document > shard && *document != 5;) document--;
        CHECK(memcmp(row, shard + place.offset, sizeof row) == 0, "example %d is elsewhere", (int)i);
        CHECK(place.document == document - shard, "its document begins at %d", (int)place.document);
        CHECK_OK(dataset_place(data, i, -1, &place, &e), &e);
        CHECK(place.document == -1, "without a separator: %d", (int)place.document);
    }
    CHECK_OK(dataset_check(data, &e), &e);
    dataset_close(data);
    free(tokens);
    free(rows);
}

// With shifts, all windows of an epoch move by the same number of tokens, but no window beyond the end of its shard.
// Each shift below T occurs in some epoch. Shifts change neither the order of windows nor sequential reads.
static void test_shifted_windows(void) {
    enum { T = 8, EPOCHS = 200 };
    const int lengths[] = {T * 5 + 1, T * 3 + 6};
    uint16_t row[T + 1], plain[T + 1], text[2 * T * 8];
    int seen[T] = {0}, first = T; // first: shift of the epoch; T: not seen yet
    for (int i = 0; i < 2 * T * 8; i++) text[i] = (uint16_t)i;
    CHECK_OK(shard_write("shift_0.bin", text, (size_t)lengths[0], &e), &e);
    CHECK_OK(shard_write("shift_1.bin", text + lengths[0], (size_t)lengths[1], &e), &e);
    Dataset *data, *fixed;
    CHECK_OK(dataset_open(&data, "shift_*.bin", T, 1000, 5, &e), &e);
    CHECK_OK(dataset_open(&fixed, "shift_*.bin", T, 1000, 5, &e), &e);
    data->shifts = true;
    int N = (int)data->info.windows;
    CHECK(N == 8, "%d windows", N);
    for (int k = 0; k < EPOCHS * N; k++) {
        CHECK_OK(dataset_rows(data, (uint64_t)k, 1, row, &e), &e);
        CHECK_OK(dataset_rows(fixed, (uint64_t)k, 1, plain, &e), &e);
        int last = lengths[0] + (plain[0] >= lengths[0] ? lengths[1] : 0) - T - 1, shift = row[0] - plain[0];
        if (k % N == 0) first = T;
        if (row[0] < last && first == T) first = shift;
        CHECK(shift >= 0 && shift < T && row[0] <= last, "example %d: from %d to %d", k, plain[0], row[0]);
        CHECK(row[0] == last || shift == first, "example %d: shift %d, and %d before", k, shift, first);
        for (int t = 0; t <= T; t++) CHECK(row[t] == row[0] + t, "example %d, token %d: %d", k, t, row[t]);
        if (k % N == N - 1 && first < T) seen[first]++;
    }
    for (int shift = 0; shift < T; shift++) // each shift occurs 25 +- 4.7 times (binomial)
        CHECK(seen[shift] >= 5 && seen[shift] <= 50, "shift %d in %d epochs of %d", shift, seen[shift], EPOCHS);
    CHECK_OK(dataset_window(data, 1, 0, row, &e), &e);
    CHECK(row[0] == T, "a sequential window begins at %d", row[0]);
    dataset_close(data), dataset_close(fixed);
}

// The sequence of examples does not depend on the rows per read, the order of reads, or a restart. So batches,
// micro-batches and ranks do not change it.
static void test_any_split(void) {
    enum { T = 9, ROWS = 500, WIDTH = T + 1, MOST = 64 };
    const int lengths[2] = {1003, 411}; // 156 windows, so ROWS covers several epochs
    static uint16_t want[ROWS * WIDTH], got[MOST * WIDTH];
    free(make_shards("split", lengths, 2, 1000));
    Dataset *data;
    CHECK_OK(dataset_open(&data, "split_*.bin", T, 1000, 42, &e), &e);
    CHECK_OK(dataset_rows(data, 0, ROWS, want, &e), &e);
    for (int trial = 0; trial < 1000; trial++) {
        int count = 1 + (int)draw(MOST), at = (int)draw((uint32_t)(ROWS - count + 1));
        CHECK_OK(dataset_rows(data, (uint64_t)at, count, got, &e), &e);
        CHECK(memcmp(want + at * WIDTH, got, 2 * (size_t)(count * WIDTH)) == 0, "rows %d + %d differ", at, count);
        if (trial % 100) continue;
        dataset_close(data);
        CHECK_OK(dataset_open(&data, "split_*.bin", T, 1000, 42, &e), &e);
    }
    dataset_close(data);
}

// Returns the files of a data set.
static const char *names_of(const Dataset *data) {
    static char names[1000];
    size_t used = 0;
    names[0] = 0;
    for (int i = 0; i < data->info.shards; i++)
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i ? " " : "", data->shards[i].path);
    return names;
}

static void check_files(const char *value, const char *names, int sources) {
    Dataset *data;
    CHECK_OK(dataset_open(&data, value, 9, 1000, 1, &e), &e);
    if (!data) return;
    CHECK(strcmp(names_of(data), names) == 0 && data->info.sources == sources, "%s: %s in %d", value, names_of(data),
          data->info.sources);
    dataset_close(data);
}

static void test_words(void) {
    const int lengths[2] = {100, 200};
    static const char *const made[] = {"u", "v", "w a", "x:2"};
    for (int i = 0; i < 4; i++) free(make_shards(made[i], lengths, 2, 1000));
    check_files("u*", "u_000.bin u_001.bin", 1);
    check_files("v* u_001.bin", "u_001.bin v_000.bin v_001.bin", 1); // sorted, each once
    check_files("  u_001.bin\tu*  u_000.bin ", "u_000.bin u_001.bin", 1);
    free(make_shards("odd[1]*", lengths, 1, 1000));
    check_files("odd[1]*_000.bin", "odd[1]*_000.bin", 1); // a file of this name exists
    check_files("w a*", "w a_000.bin w a_001.bin", 1);
    check_files("w\\ a_000.bin u_000.bin", "u_000.bin w a_000.bin", 1);
    check_files("x:2_000.bin", "x:2_000.bin", 1);
    check_files("x:2_*.bin:2", "x:2_000.bin x:2_001.bin", 1);
    check_files("v*:0.5 u*:1e0", "v_000.bin v_001.bin u_000.bin u_001.bin", 2);

    Dataset *data;
    CHECK_OK(dataset_open(&data, "v*:0.5 u_000.bin:1.5", 9, 1000, 1, &e), &e);
    DatasetSource second = data->source[1];
    CHECK(data->source[0].share == 0.25 && second.share == 0.75 && data->source[0].shards == 2,
          "shares");
    CHECK(second.windows == 11 && second.first_window == 33 && second.tokens == 100, "%llu",
          (unsigned long long)second.windows);
    CHECK_CLOSE(data->info.epoch, 11 / 0.75, 1e-15, 0);
    dataset_close(data);

    static const struct {
        const char *value, *says;
        int code;
    } bad[] = {{"u*:0 v*:1", "u*:0: the weight of a source is not above 0", ERR_USAGE},
               {"u*:-1", "is not above 0", ERR_USAGE},
               {"u*:nan", "is not above 0", ERR_USAGE},
               {"u*:inf v*:1", "is not above 0", ERR_USAGE},
               {"u*:1 v*", "v*: it has no weight", ERR_USAGE},
               {"u* v*:1", "v*: it has a weight", ERR_USAGE},
               {"u*:1e308 v*:1e308", "too large", ERR_USAGE},
               {"u*:1 none*:1", "none*: no such file", ERR_INPUT},
               {"u*:one", "u*:one: no such file, and 'one' is no weight", ERR_INPUT},
               {"  ", "no such file", ERR_INPUT}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK_ERROR(dataset_open(&data, bad[i].value, 9, 1000, 1, &e), &e, bad[i].code, bad[i].says);
        CHECK(!data && e.hint[0], "%s", bad[i].value);
    }
    CHECK_ERROR(dataset_open(&data, "v*:1 u_000.bin:1", 150, 1000, 1, &e), &e, ERR_INPUT,
                "u_000.bin: 100 tokens in 1 file are too few");
}

// A weight does not change the order of a single source. Each source of a mixture has its own epochs and order, and
// gives its share of the examples.
static void test_mixture(void) {
    enum { EXAMPLES = 60000, N = 22 };
    Dataset *plain, *one, *mixed;
    const double share[3] = {0.6, 0.3, 0.1};
    uint64_t seen[3] = {0}, last[3][N], again = 0;
    char *in_epoch[3] = {calloc(N, 1), calloc(N, 1), calloc(N, 1)};
    CHECK_OK(dataset_open(&plain, "u*", 9, 1000, 42, &e), &e);
    CHECK_OK(dataset_open(&one, "u*:0.3", 9, 1000, 42, &e), &e);
    for (uint64_t i = 0; i < 200; i++)
        CHECK(dataset_window_at(plain, i, &shift) == dataset_window_at(one, i, &shift), "%llu", (unsigned long long)i);
    dataset_close(one);
    CHECK_OK(dataset_open(&mixed, "u_001.bin:6 v_001.bin:3 x:2_001.bin:1", 9, 1000, 42, &e), &e);
    for (uint64_t i = 0; i < EXAMPLES; i++) {
        uint64_t window = dataset_window_at(mixed, i, &shift), s = window / N, w = window % N;
        CHECK(s < 3, "window %llu", (unsigned long long)window);
        s = s < 3 ? s : 2;
        if (seen[s] % N == 0) memset(in_epoch[s], 0, N);
        CHECK(!in_epoch[s][w]++, "example %llu: window %llu of source %llu twice in an epoch", (unsigned long long)i,
              (unsigned long long)w, (unsigned long long)s);
        last[s][seen[s]++ % N] = w;
    }
    for (int s = 0; s < 3; s++) {
        double error = sqrt(share[s] * (1 - share[s]) / EXAMPLES);
        CHECK(fabs((double)seen[s] / EXAMPLES - share[s]) < 5 * error, "source %d: %g", s, (double)seen[s] / EXAMPLES);
        free(in_epoch[s]);
    }
    for (int k = 0; k < N; k++) again += (last[0][k] == last[1][k]) + (last[1][k] == last[2][k]);
    CHECK(again < N, "sources in one order: %llu", (unsigned long long)again);
    // Pins the order of this seed, which a resumed run must continue. Reads it backwards.
    uint64_t hash = 0;
    for (uint64_t i = EXAMPLES; i-- > 0;) hash += hash_element(i, (uint32_t)dataset_window_at(mixed, i, &shift));
    CHECK(hash == 0x86cc9428affed597u, "another order: %016llx", (unsigned long long)hash);
    dataset_close(plain);
    dataset_close(mixed);
}

// An excluded window occurs in no epoch of any source. No other example changes.
static void test_excluded_windows(void) {
    enum { EXAMPLES = 700, FIRST = 90, COUNT = 60 };
    const int lengths[2] = {701, 801}, T = 7, V = 300;
    uint64_t before[EXAMPLES], after[EXAMPLES];
    bool gone[300] = {0};
    Dataset *data;
    free(make_shards("excluded", lengths, 2, V));
    CHECK_OK(dataset_open(&data, "excluded_000.bin:0.4 excluded_001.bin:0.6", T, V, 1, &e), &e);
    data->shifts = true;
    for (int round = 0; round < 2; round++) { // round 1 excludes the replacements of round 0
        for (uint64_t k = 0; k < EXAMPLES; k++) before[k] = dataset_window_at(data, k, &shift);
        for (int k = FIRST; k < FIRST + COUNT; k++) gone[before[k]] = true;
        CHECK_OK(dataset_exclude(data, FIRST, COUNT, &e), &e);
        for (uint64_t k = 0; k < EXAMPLES; k++) {
            after[k] = dataset_window_at(data, k, &shift);
            const bool same_source = (after[k] < 100) == (before[k] < 100);
            CHECK(!gone[after[k]] && (round || gone[before[k]] || after[k] == before[k]) && same_source,
                  "example %d: %d, then %d", (int)k, (int)before[k], (int)after[k]);
        }
    }
    dataset_close(data);
}

// If there are too many shards to keep open, all are closed after use. Writes the shards in another order than by name.
static void test_many_shards(void) {
    enum { SHARDS = 300, T = 3 };
    for (uint16_t i = 0; i < SHARDS; i++) {
        uint16_t shard = (uint16_t)(i * 7 % SHARDS), tokens[5] = {shard, shard, shard, shard, shard};
        char name[32];
        snprintf(name, sizeof name, "many_%06d.bin", shard);
        CHECK_OK(shard_write(name, tokens, 5, &e), &e);
    }
    Dataset *data;
    uint16_t rows[SHARDS][T + 1];
    int unused = dup(0), still; // the lowest free descriptor
    close(unused);
    CHECK_OK(dataset_open(&data, "many_*.bin", T, SHARDS, 0, &e), &e);
    for (int i = 0; i < SHARDS; i++) CHECK_OK(dataset_window(data, (uint64_t)i, 0, rows[i], &e), &e);
    for (int i = 0; i < SHARDS; i++) CHECK(rows[i][0] == i && rows[i][T] == i, "row %d is of shard %d", i, rows[i][0]);
    CHECK(strstr(data->shards[7].path, "many_000007.bin"), "%s", data->shards[7].path);
    CHECK_OK(dataset_check(data, &e), &e);
    CHECK((still = dup(0)) == unused, "shards are left open: the next descriptor is %d", still);
    close(still);
    dataset_close(data);
}

static void refuse(const char *name, int T, int V, const char *text) {
    Dataset *data = (Dataset *)&e;
    CHECK_ERROR(dataset_open(&data, name, T, V, 0, &e), &e, ERR_INPUT, text);
    CHECK(data == NULL, "a data set in spite of an error");
    CHECK(strstr(e.what, name) && e.hint[0], "'%s' (%s) names no file or no remedy", e.what, e.hint);
}

static void test_bad_shards(void) {
    enum { M = SHARD_MAGIC };
    static const struct {
        const char *name;
        int32_t magic, version, said;
        int count;
        uint16_t token;
        int extra;
        const char *says;
    } cases[] = {
        {"cut_header.bin", M, 1, 0, 0, 0, -1, "not a token shard"},
        {"magic.bin", M + 1, 1, 100, 100, 0, 0, "not a token shard"},
        {"swapped.bin", (int32_t)0x88d83401, 0x01000000, 0x64000000, 100, 0, 0, "not a token shard"},
        {"text.bin", 0x20656854, 1, 100, 100, 0, 0, "not a token shard"},
        {"llama.bin", 20240801, 7, 100, 200, 0, 0, "not a token shard (magic 20240801, version 7"}, // has 32-bit tokens
        {"version.bin", M, 2, 100, 100, 0, 0, "version 2,"},
        {"none.bin", M, 1, 0, 0, 0, 0, " 0 tokens; want magic 20240520, version 1, 1 token or more"},
        {"negative.bin", M, 1, -5, 100, 0, 0, " -5 tokens"},
        {"truncated.bin", M, 1, 100, 99, 0, 0, "truncated: it ends at byte 1222"},
        {"half_token.bin", M, 1, 100, 100, 0, -1, "truncated"},
        {"huge_count.bin", M, 1, INT32_MAX, 100, 0, 0, "truncated"},
        {"longer.bin", M, 1, 100, 100, 0, 1, "longer than its header says"},
        {"short.bin", M, 1, 4, 4, 0, 0, "too few for one window of 4 + 1"},
        {"vocab.bin", M, 1, 100, 100, 256, 0, "token 256 at position 0, byte 1024,"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_raw(cases[i].name, cases[i].magic, cases[i].version, cases[i].said, cases[i].count, cases[i].token,
                  cases[i].extra);
        refuse(cases[i].name, 4, 256, cases[i].says);
    }
    static const char *const absent[] = {"absent.bin", "absent_*.bin", "no/such/dir/*.bin"};
    for (int i = 0; i < 3; i++) refuse(absent[i], 4, 256, "no such file");
    refuse(".", 4, 256, "not a regular file");
    write_text("empty.bin", "");
    refuse("empty.bin", 4, 256, "not a token shard");
    write_text("tiny.bin", "hello\n");
    refuse("tiny.bin", 4, 256, "not a token shard");
    if (mkfifo("pipe.bin", 0600) == 0) refuse("pipe.bin", 4, 256, "not a regular file");
    if (symlink("nowhere", "dangling.bin") == 0) refuse("dangling.bin", 4, 256, "cannot open");
    write_raw("unreadable.bin", M, 1, 100, 100, 0, 0);
    chmod("unreadable.bin", 0);
    if (geteuid() != 0) refuse("unreadable.bin", 4, 256, "cannot open"); // root may read anything
    Dataset *data;                                                       // a bad shard among good shards
    write_raw("set_0.bin", M, 1, 100, 100, 0, 0);
    write_raw("set_1.bin", M, 1, 100, 99, 0, 0);
    CHECK_ERROR(dataset_open(&data, "set_*.bin", 4, 256, 0, &e), &e, ERR_INPUT, "set_1.bin: truncated");
    write_raw("full.bin", M, 1, 100, 100, 65535, 0);
    CHECK_OK(dataset_open(&data, "full.bin", 4, 65536, 0, &e), &e); // every uint16 is in this vocabulary
    dataset_close(data);
    refuse("full.bin", 4, 65535, "token 65535 at position 0");
}

// A file too large to be checked when it is opened: reading the window with a bad token fails, and dataset_check fails.
static void test_large_shard(void) {
    const int T = 1000, count = 40000000;
    const char *path = "large.bin";
    write_raw(path, SHARD_MAGIC, SHARD_VERSION, count, 0, 0, 0);
    FILE *f = fopen(path, "r+b");
    const uint16_t bad = 512;
    CHECK(ftruncate(fileno(f), SHARD_HEADER_BYTES + 2L * count) == 0, "cannot make a sparse file");
    CHECK(fseek(f, SHARD_HEADER_BYTES + 2L * 31415926, SEEK_SET) == 0 && fwrite(&bad, 2, 1, f) == 1, "cannot write");
    fclose(f);
    Dataset *data;
    uint16_t row[1001];
    CHECK_OK(dataset_open(&data, path, T, 512, 0, &e), &e);
    CHECK_OK(dataset_window(data, 31414, 0, row, &e), &e);
    CHECK_ERROR(dataset_window(data, 31415, 0, row, &e), &e, ERR_INPUT, "position 31415926, byte 62832876,");
    CHECK_ERROR(dataset_check(data, &e), &e, ERR_INPUT, "position 31415926, byte 62832876,");
    uint64_t k = 0;
    while (dataset_window_at(data, k, &shift) != 31415) k++;
    CHECK_ERROR(dataset_rows(data, k, 1, row, &e), &e, ERR_INPUT, "large.bin: token 512");
    ExamplePlace place; // of an example long after the token that begins its document
    for (k = 0; dataset_window_at(data, k, &shift) != 31450;) k++;
    CHECK_OK(dataset_place(data, k, 512, &place, &e), &e);
    CHECK(place.offset == 31450000 && place.document == 31415926, "document %d", (int)place.document);
    CHECK(truncate(path, 2000000) == 0, "cannot truncate");
    CHECK_OK(dataset_window(data, 0, 0, row, &e), &e);
    CHECK_ERROR(dataset_window(data, 2000, 0, row, &e), &e, ERR_INPUT, "the file ends there");
    dataset_close(data);
    unlink(path);
}

int main(void) {
    scratch_begin();
    RUN(test_sequential, test_shifted_windows, test_any_split, test_words, test_mixture, test_excluded_windows,
        test_many_shards, test_bad_shards, test_large_shard);
    return scratch_end();
}
