// test: a small harness. One program tests one module:
//
//     static void test_addition(void) { CHECK(1 + 1 == 2, "got %d", 1 + 1); }
//     int main(void) { RUN(test_addition, test_multiplication); return test_summary(); }
//
// RUN prints a line per test: "PASS program/test_addition 0.01s", "FAIL ...: N of M checks" or "SKIP ...";
// dev/test/run.sh counts these lines. A test that checks nothing fails. GNS_ONLY="test_this test_that" runs only these
// tests; it must also name the tests whose results they use.
#pragma once

#include "base/common.h"
#include "math/rng.h"
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

// Returns a word of rng.h's stream, for tests that need integers.
GNS_HD static inline uint32_t rng_u32(uint64_t seed, uint64_t stream, uint64_t index) {
    return rng_block(seed, stream, index / 4).word[index % 4];
}

static struct {
    int checks, failures, skipped; // counts for the current test
    int total_failures;
} test_state;

// If the condition is false: prints where and why, at most ten times per test. The test continues.
#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        test_state.checks++;                                                                                           \
        if (!(condition) && test_state.failures++ < 10) {                                                              \
            printf("  %s:%d: %s: ", __FILE__, __LINE__, #condition);                                                   \
            printf(__VA_ARGS__);                                                                                       \
            printf("\n");                                                                                              \
        }                                                                                                              \
    } while (0)

// Checks |a - b| <= tolerance * max(|b|, floor); NaN fails.
#define CHECK_CLOSE(a, b, tolerance, floor_)                                                                           \
    do {                                                                                                               \
        double a_ = (a), b_ = (b), t_ = (tolerance)*fmax(fabs(b_), (floor_));                                          \
        CHECK(fabs(a_ - b_) <= t_, "%s = %.9g, want %.9g +- %.2g", #a, a_, b_, t_);                                    \
    } while (0)

// CHECK_OK: the call succeeds. CHECK_ERROR: the call returns this code, and its message contains this text.
#define CHECK_OK(call, e) CHECK((call) == 0, "%s (%s)", (e)->what, (e)->hint)
#define CHECK_ERROR(call, e, code_, text)                                                                              \
    do {                                                                                                               \
        int got_ = (call);                                                                                             \
        CHECK(got_ == (code_), "exit code %d, want %d: %s", got_, (code_), got_ ? (e)->what : "success");              \
        CHECK(got_ == 0 || strstr((e)->what, (text)), "'%s' does not mention '%s'", (e)->what, (text));                \
    } while (0)

// Returns the larger number, or infinity if x is NaN: a later number must not hide it.
static inline double worse(double worst, double x) { return x <= worst ? worst : isnan(x) ? INFINITY : x; }

#define SKIP(why)                                                                                                      \
    do {                                                                                                               \
        test_state.skipped = 1;                                                                                        \
        printf("  skipped: %s\n", why);                                                                                \
        return;                                                                                                        \
    } while (0)

// Formats a path or another short text, in one of 64 buffers in turn.
__attribute__((format(printf, 1, 2))) static inline const char *path_of(const char *format, ...) {
    static char buffers[64][4096];
    static int next;
    char *path = buffers[next++ % 64];
    va_list args;
    va_start(args, format);
    vsnprintf(path, sizeof buffers[0], format, args);
    va_end(args);
    return path;
}

// Returns true if GNS_ONLY is unset or holds the name as a whole word.
static inline bool test_wanted(const char *name) {
    const char *only = getenv("GNS_ONLY");
    size_t n = strlen(name);
    for (const char *at = only; at && (at = strstr(at, name)); at += n)
        if ((at == only || at[-1] == ' ') && (at[n] == ' ' || !at[n])) return true;
    return !only;
}

static void test_run(const char *file, const char *name, void (*f)(void)) {
    const char *program = strrchr(file, '/') ? strrchr(file, '/') + 1 : file;
    test_state.checks = test_state.failures = test_state.skipped = 0;
    double start = clock_seconds();
    f();
    double seconds = clock_seconds() - start;
    int width = (int)strcspn(program, ".");
    if (test_state.failures || (!test_state.checks && !test_state.skipped)) {
        printf("FAIL %.*s/%s %.2fs: %d of %d checks\n", width, program, name, seconds, test_state.failures,
               test_state.checks);
        test_state.total_failures++;
    } else printf("%s %.*s/%s %.2fs\n", test_state.skipped ? "SKIP" : "PASS", width, program, name, seconds);
    fflush(stdout);
}

// Runs tests: RUN(test_this, test_that).
#define RUN(...)                                                                                                       \
    do {                                                                                                               \
        void (*const tests_[])(void) = {__VA_ARGS__};                                                                  \
        char names_[] = #__VA_ARGS__, *rest_, *name_ = strtok_r(names_, ", ", &rest_);                                 \
        for (size_t i_ = 0; i_ < sizeof tests_ / sizeof *tests_; i_++, name_ = strtok_r(NULL, ", ", &rest_))           \
            if (test_wanted(name_)) test_run(__FILE__, name_, tests_[i_]);                                             \
    } while (0)

static inline int test_summary(void) { return test_state.total_failures ? 1 : 0; }
