// Tests durable writing, with O_DIRECT and through the page cache: contents and digests of files of all sizes, file
// systems that refuse O_DIRECT or calls with it, and calls that fail, are interrupted or fall short.
#define _GNU_SOURCE // O_DIRECT
#include "base/manifest.h"
#include "base/thread.h"
#include "../scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <omp.h>
#include <stdarg.h>

enum { MIB = 1 << 20, PAGE = 4096, STAGE = 4 * MIB, LARGEST = 3 * STAGE };

static unsigned char *data; // (LARGEST)

// ---- Faults: the linker sends these calls here (--wrap) -------------------------------------------------------------

typedef enum { NOTHING, FAILS, FALLS_SHORT } What;
typedef enum { WRITE, FSYNC, PREAD, CALLS } Call;

static struct {
    Call call;
    What what;
    long at; // number of the faulty call, from 1
    int error;
    bool refuse_flag, refuse_calls; // refuse the flag O_DIRECT; refuse reads and writes with the flag
    long count[CALLS];
} plan;

static void plan_fault(Call call, What what, long at, int error) {
    memset(&plan, 0, sizeof plan);
    plan.call = call, plan.what = what, plan.at = at, plan.error = error;
}

int __real_fcntl(int fd, int command, ...);
static bool is_direct(int fd) { return __real_fcntl(fd, F_GETFL) & O_DIRECT; }

// Returns the bytes that this call may move; -1: the call fails. A short call moves whole blocks half of the time.
static ssize_t allow(Call call, int fd, size_t bytes) {
    bool here = ++plan.count[call] == plan.at && call == plan.call;
    if (plan.refuse_calls && call != FSYNC && is_direct(fd)) return errno = EINVAL, -1;
    if (here && plan.what == FAILS) return errno = plan.error, -1;
    if (!here || plan.what != FALLS_SHORT || bytes <= PAGE) return (ssize_t)bytes;
    return draw(2) ? PAGE * (1 + draw((uint32_t)bytes / PAGE)) : 1 + draw((uint32_t)bytes - 1);
}

// Clears O_DIRECT for a short call, which may then move part of a block, as on some file systems. Returns old flags.
static int pause_direct(int fd, size_t bytes, ssize_t n) {
    int flags = __real_fcntl(fd, F_GETFL);
    if (n > 0 && n < (ssize_t)bytes) __real_fcntl(fd, F_SETFL, flags & ~O_DIRECT);
    return flags;
}

#define WRAP(name, buffer, call)                                                                                       \
    ssize_t __real_##name(int fd, buffer memory, size_t bytes, off_t at);                                              \
    ssize_t __wrap_##name(int fd, buffer memory, size_t bytes, off_t at) {                                             \
        ssize_t n = allow(call, fd, bytes);                                                                            \
        if (n < 0) return n;                                                                                           \
        int flags = pause_direct(fd, bytes, n);                                                                        \
        n = __real_##name(fd, memory, (size_t)n, at);                                                                  \
        __real_fcntl(fd, F_SETFL, flags);                                                                              \
        return n;                                                                                                      \
    }
WRAP(pwrite, const void *, WRITE)
WRAP(pread, void *, PREAD)

int __real_fsync(int fd);
int __wrap_fsync(int fd) { return allow(FSYNC, fd, 0) < 0 ? -1 : __real_fsync(fd); }

int __wrap_fcntl(int fd, int command, ...) {
    va_list args;
    va_start(args, command);
    int flags = command == F_SETFL ? va_arg(args, int) : 0;
    va_end(args);
    if (command == F_SETFL && (flags & O_DIRECT) && plan.refuse_flag) return errno = EINVAL, -1;
    return __real_fcntl(fd, command, flags);
}

// Writes the file's pieces forwards or backwards, from aligned or unaligned memory.
static int save_in_pieces(const char *path, size_t bytes, size_t largest_piece, Error *e) {
    static unsigned char memory[LARGEST + 2 * PAGE];
    unsigned char *aligned = memory + PAGE - (size_t)memory % PAGE + (draw(2) ? draw(PAGE) : 0);
    size_t begin[4096], count = 0;
    int fd;
    memcpy(aligned, data, bytes);
    TRY(file_open_output(IN_PATH, path, O_WRONLY | O_TRUNC, &fd, e));
    for (size_t done = 0; done < bytes && count < 4095; done += 1 + draw((uint32_t)largest_piece))
        begin[count++] = done;
    begin[count] = bytes;
    int code = 0;
    bool backwards = draw(2);
    for (size_t i = 0; i < count && !code; i++) {
        size_t k = backwards ? count - 1 - i : i;
        code = file_write_range(fd, path, begin[k], aligned + begin[k], begin[k + 1] - begin[k], e);
    }
    int closed = file_close(fd, path, code ? &(Error){0} : e);
    return code ? code : closed;
}

// Reads with stdio, not with the functions under test.
static void check_contents(const char *path, size_t bytes) {
    static unsigned char got[LARGEST + 1];
    memset(got, 0xee, sizeof got);
    FILE *f = fopen(path, "rb");
    size_t n = f ? fread(got, 1, sizeof got, f) : 0;
    if (f) fclose(f);
    CHECK(n == bytes && memcmp(got, data, bytes) == 0, "%zu bytes, want %zu, or wrong ones", n, bytes);
}

static void count_beat(void *beats) { ++*(size_t *)beats; }

// Checks file_digest_range on a part of the file, past the page cache or through it.
static void check_range(const char *path, size_t from, size_t bytes, bool past_cache) {
    size_t beats = 0;
    uint64_t all;
    int fd;
    const Pulse pulse = {count_beat, &beats};
    FileDigest want = digest_of(data + from, bytes), read = {0};
    Error e = {0};
    CHECK_OK(file_open_input(IN_PATH, path, &fd, &all, &e), &e);
    if (past_cache) file_past_cache(fd, true);
    CHECK_OK(file_digest_range(fd, path, from, bytes, &pulse, &read, &e), &e);
    CHECK(digest_equal(&read, &want), "bytes %zu to %zu: read as %s, want %s", from, from + bytes, read.hash,
          want.hash);
    CHECK(beats >= (bytes + STAGE - 1) / STAGE && beats <= bytes / STAGE + 2, "%zu bytes: %zu beats", bytes, beats);
    close(fd);
}

static void check_file(const char *path, size_t bytes) {
    FileDigest want = digest_of(data, bytes), read = {0};
    Error e = {0};
    check_contents(path, bytes);
    CHECK_OK(file_digest(path, &read, &e), &e);
    CHECK(digest_equal(&read, &want), "%zu bytes: read as %s, want %s", bytes, read.hash, want.hash);
    for (int past = 0; past < 2; past++) {
        size_t from = draw((uint32_t)bytes + 1);
        check_range(path, 0, bytes, past);
        check_range(path, from, bytes - from, past);
    }
}

static void check_save(size_t bytes, size_t largest_piece) {
    Error e = {0};
    CHECK_OK(save_in_pieces("file", bytes, largest_piece, &e), &e);
    check_file("file", bytes);
}

static void test_all_sizes(void) {
    static const size_t sizes[] = {0, 1, PAGE - 1, PAGE, STAGE - 1, STAGE, STAGE + 1, STAGE + PAGE, 2 * STAGE, LARGEST};
    plan_fault(WRITE, NOTHING, 0, 0);
    CHECK(strcmp(digest_of("", 0).hash, "99aa06d3014798d86001c324468d497f") == 0, "not XXH3-128"); // from xxhsum
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) check_save(sizes[i], LARGEST);
    for (int i = 0; i < 10; i++) check_save(draw(LARGEST), i % 2 ? 64 * PAGE : MIB);
}

static void test_refused(void) {
    for (int i = 0; i < 6; i++) {
        plan_fault(WRITE, NOTHING, 0, 0);
        plan.refuse_flag = i % 2;
        plan.refuse_calls = !plan.refuse_flag;
        check_save(STAGE + draw(2 * STAGE), MIB);
    }
}

static const size_t fault_bytes = 2 * STAGE + 12345;

static void test_calls_that_fail(void) {
    static const int errors[] = {ENOSPC, EIO};
    FileDigest digest;
    Error e = {0};
    for (int i = 0; i < 2; i++) {
        plan_fault(WRITE, FAILS, 1, errors[i]);
        CHECK_ERROR(file_replace(IN_PATH, "saved", data, fault_bytes, &e), &e, ERR_WRITE, strerror(errors[i]));
        CHECK(!file_exists("saved") && !file_exists("saved.partial"), "a write fails, and something is left");
    }
    plan_fault(FSYNC, FAILS, 1, EIO);
    CHECK_ERROR(file_replace(IN_PATH, "saved", data, fault_bytes, &e), &e, ERR_WRITE, "fsync failed");
    CHECK(!file_exists("saved") && !file_exists("saved.partial"), "fsync fails, and something is left");

    plan_fault(WRITE, NOTHING, 0, 0);
    check_save(fault_bytes, MIB);
    for (long n = 1; n <= 3; n++) {
        plan_fault(PREAD, FAILS, n, EIO);
        char want[40];
        snprintf(want, sizeof want, "read failed at byte %ld:", (n - 1) * 65536);
        CHECK_ERROR(file_digest("file", &digest, &e), &e, ERR_INPUT, want);
    }
}

static void test_interrupted_and_short_calls(void) {
    for (Call call = 0; call < CALLS; call++)
        for (long n = 1; n <= (call == FSYNC ? 1 : call == PREAD ? 6 : 3); n++) {
            plan_fault(call, FAILS, n, EINTR);
            check_save(fault_bytes, MIB);
            CHECK(plan.count[call] >= n, "no call %ld", n);
            if (call == FSYNC) continue;
            plan_fault(call, FALLS_SHORT, n, 0);
            check_save(fault_bytes, MIB);
        }
}

static void test_replace(void) {
    Error e = {0};
    plan_fault(WRITE, NOTHING, 0, 0);
    CHECK_OK(file_replace(IN_PATH, "replaced", data + 1, fault_bytes, &e), &e);
    CHECK_OK(file_replace(IN_PATH, "replaced", data, 1000, &e), &e);
    check_file("replaced", 1000);
    plan_fault(WRITE, FAILS, 1, ENOSPC);
    CHECK_ERROR(file_replace(IN_PATH, "replaced", data, 2000, &e), &e, ERR_WRITE, "replaced.partial: write failed");
    plan_fault(WRITE, NOTHING, 0, 0);
    check_file("replaced", 1000);
    CHECK(!file_exists("replaced.partial"), "the failed file is left");
}

// Checks that every message about a limit of the system names a remedy.
static void test_limits(void) {
    static const struct {
        int error;
        const char *remedy;
    } cases[] = {{EMFILE, "ulimit -n"}, {EFBIG, "ulimit -f"}, {ENOENT, "other"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Error e;
        FAIL(&e, ERR_WRITE, "other", "x: cannot write: %s", strerror(cases[i].error));
        CHECK(strstr(e.hint, cases[i].remedy), "%s (%s)", e.what, e.hint);
    }
}

// ---- Verification ---------------------------------------------------------------------------------------------------

// Two ranks divide a file's pieces. The threads of a rank divide the rank's share. Exactly one rank finds a wrong byte.
static void test_every_piece_is_verified(void) {
    enum { PIECES = 3 * LARGEST / MANIFEST_PIECE, RANKS = 2 };
    FileDigest piece[PIECES];
    Manifest manifest = {.dir = open(".", O_RDONLY)};
    const int fd = open("large", O_RDWR | O_CREAT, 0666);
    Error e;
    plan_fault(WRITE, NOTHING, 0, 0);
    for (uint64_t i = 0; i < 3; i++) CHECK_OK(file_write_range(fd, "large", i * LARGEST, data, LARGEST, &e), &e);
    for (size_t i = 0; i < PIECES; i++) piece[i] = digest_of(data + i * MANIFEST_PIECE % LARGEST, MANIFEST_PIECE);
    CHECK_OK(manifest_add(&manifest, "large", piece, PIECES, &e), &e);
    for (int threads = 1; threads <= 3; threads++)
        for (int wrong = -1; wrong < PIECES; wrong++) { // -1: none
            const size_t at = (size_t)(wrong < 0 ? 0 : wrong) * MANIFEST_PIECE + 7;
            unsigned char byte = (unsigned char)~data[at % LARGEST];
            int found = 0;
            omp_set_num_threads(threads);
            if (wrong >= 0) CHECK(pwrite(fd, &byte, 1, (off_t)at) == 1, "pwrite");
            for (int rank = 0; rank < RANKS; rank++) {
                manifest.share = (Share){rank, RANKS};
                found += manifest_verify(&manifest, NULL, VERIFY_BYTES, &e) == ERR_INPUT;
            }
            CHECK(found == (wrong >= 0), "%d threads, piece %d: found %d times", threads, wrong, found);
            byte = (unsigned char)~byte;
            if (wrong >= 0) CHECK(pwrite(fd, &byte, 1, (off_t)at) == 1, "pwrite");
        }
    manifest_free(&manifest);
    close(manifest.dir);
    close(fd);
}

// A manifest whose "pieces" are no list, or a list of other values than pieces, is refused.
static void test_pieces_of_another_type(void) {
    static const char *const cases[] = {"7", "[]", "{}", "[[1]]", "[1, 2]", "[{}]", "{\"a\": [1]}"};
    char text[20000];
    Manifest manifest;
    Error e;
    for (size_t i = 0; i <= sizeof cases / sizeof *cases; i++) {
        size_t n = (size_t)sprintf(text, "{\"format\": 2, \"files\": [{\"name\": \"a\", \"bytes\": 1, \"pieces\": ");
        if (i < sizeof cases / sizeof *cases) n += (size_t)sprintf(text + n, "%s", cases[i]);
        else { // an object of 99 good pieces
            for (int k = 0; k < 99; k++)
                n += (size_t)sprintf(text + n, "%c\"%d\": [1, \"%s\"]", k ? ',' : '{', k, digest_of("a", 1).hash);
            text[n++] = '}';
        }
        n += (size_t)sprintf(text + n, "}],\n");
        n += (size_t)sprintf(text + n, "  \"xxh3_128_above\": \"%s\"\n}\n", digest_of(text, n).hash);
        CHECK_OK(file_replace(IN_PATH, "MANIFEST.json", text, n, &e), &e);
        CHECK(manifest_read(&manifest, IN_PATH, ".", &e) == ERR_INPUT && strstr(e.what, "malformed"), "%zu: %s", i,
              e.what);
        manifest_free(&manifest);
    }
}

// ---- A container's CPU quota ----------------------------------------------------------------------------------------

static void test_cpu_quota(void) {
    static const struct {
        const char *files; // shell commands that write the files of sys/fs/cgroup
        int want;
    } cases[] = {{"echo 150000 100000 > cpu.max", 2},
                 {"echo 10000 100000 > cpu.max", 1},
                 {"echo max 100000 > cpu.max", INT_MAX},
                 {":", INT_MAX}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char command[400];
        snprintf(command, sizeof command, "rm -rf root && mkdir -p root/sys/fs/cgroup && cd root/sys/fs/cgroup && %s",
                 cases[i].files);
        CHECK(system(command) == 0, "%s", command);
        CHECK(thread_quota("root") == cases[i].want, "%s: %d", command, thread_quota("root"));
    }
}

int main(void) {
    scratch_begin();
    data = malloc(LARGEST);
    for (size_t i = 0; i < LARGEST; i++) data[i] = (unsigned char)draw(256);
    RUN(test_limits, test_all_sizes, test_refused, test_calls_that_fail, test_interrupted_and_short_calls, test_replace,
        test_every_piece_is_verified, test_pieces_of_another_type);
    free(data);
    RUN(test_cpu_quota);
    return scratch_end();
}
