// scratch: a new working directory, files in it, and random numbers, for tests that need no trainer.
#pragma once

#include "base/files.h"
#include "base/hash.h"
#include "test.h"
#include "tree.h"

#include <limits.h>
#include <time.h>
#include <unistd.h>

static uint64_t random_state; // starts from $GNS_SEED, or from the clock

// Returns a number below `below`, by splitmix64 (Steele et al. 2014).
static inline uint32_t draw(uint32_t below) {
    return (uint32_t)(hash_finish(random_state += HASH_GOLDEN) >> 32) % below;
}

static inline void random_begin(void) {
    const char *seed = getenv("GNS_SEED");
    random_state = seed ? strtoull(seed, NULL, 10) : (uint64_t)(clock_seconds() * 1e6) ^ (uint64_t)time(NULL) << 32;
    printf("  seed %llu\n", (unsigned long long)random_state);
}

static char scratch[PATH_MAX]; // the working directory until scratch_end

static inline void scratch_begin(void) {
    snprintf(scratch, sizeof scratch, "%s/gns_test_XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    if (!mkdtemp(scratch) || chdir(scratch) != 0) exit(ERR_INTERNAL);
    random_begin();
}

static inline int scratch_end(void) {
    if (chdir("/") == 0) remove_tree(scratch);
    return test_summary();
}

static inline void write_bytes(const char *path, const void *bytes, size_t count) {
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(bytes, 1, count, f) == count, "cannot write %s", path);
    if (f) fclose(f);
}

static inline void write_text(const char *path, const char *text) { write_bytes(path, text, strlen(text)); }
