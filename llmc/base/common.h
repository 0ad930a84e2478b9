// common: errors as values, memory, texts that grow, the clock, a program's begin and end. Every module uses it.
//
// A function that can fail returns int: 0, or the exit code. Its last argument, an Error *, receives the details.
// Callers return the error up to program_main (program.h), which prints it and ends the program. Only the watchdog
// (watchdog.h) ends the program from another thread, when the ranks make no progress or NCCL fails.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

// A NaN in the loss or a gradient ends a run, so the compiler must not assume that NaN never occurs.
#if defined __FAST_MATH__ || (defined __FINITE_MATH_ONLY__ && __FINITE_MATH_ONLY__ > 0)
#    error "NaN checks need IEEE arithmetic: leave out -Ofast, -ffast-math and -ffinite-math-only"
#endif

// Enclose the functions that C++ files call. Types, inline functions and variables need no enclosing.
#ifdef __cplusplus
#    define GNS_C_BEGIN extern "C" {
#    define GNS_C_END   }
#else
#    define GNS_C_BEGIN
#    define GNS_C_END
#endif

GNS_C_BEGIN

// Exit codes: a contract with scripts (64 to 75 follow BSD's sysexits.h).
enum {
    ERR_USAGE = 64,       // a wrong command line or configuration
    ERR_INPUT = 65,       // a named input is missing, unreadable or malformed
    ERR_UNAVAILABLE = 69, // no usable GPU, or a CPU without the instructions of --dtype
    ERR_INTERNAL = 70,    // a fault of this program
    ERR_MEMORY = 71,      // out of memory, on the host or the device
    ERR_WRITE = 74,       // writing failed
    ERR_STOPPED = 75,     // stopped on request; run the same command again
    ERR_NONFINITE = 76,   // a loss or gradient is not finite
    ERR_SKIPPED = 77,     // a test that could not run here
    ERR_RANK = 78         // a rank was lost or diverged, or a deadline passed
};

typedef struct {
    int code;         // one of the codes above; 0: no error
    char what[1024];  // what went wrong, with the file or flag
    char hint[512];   // the remedy; may be empty
    const char *file; // source position
    int line;
    bool unreadable; // set by FAIL_UNREADABLE: the file exists but cannot be read, and may be undamaged
} Error;

// Fills *e and returns code: `return FAIL(...)`. hint is a plain string or NULL; format is printf's.
int error_set(Error *e, const char *file, int line, int code, const char *hint, const char *format, ...)
    __attribute__((format(printf, 6, 7)));
#define FAIL(e, code, hint, ...)      error_set((e), __FILE__, __LINE__, (code), (hint), __VA_ARGS__)
#define FAIL_UNREADABLE(e, hint, ...) (FAIL(e, ERR_INPUT, hint, __VA_ARGS__), (e)->unreadable = true, ERR_INPUT)

// Replaces the hint of an error. Returns e->code.
int error_hint(Error *e, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Puts "PREFIX: " in front of an error's text ("--config run.cfg line 3: ..."). Returns e->code.
int error_prefix(Error *e, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Calls a function that returns an error code, and returns any failure to the caller.
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int try_code_ = (call);                                                                                        \
        if (try_code_) return try_code_;                                                                               \
    } while (0)

// TRY for a function with one exit: needs `int code` and a label `done`.
#define TRY_GOTO(call)                                                                                                 \
    do {                                                                                                               \
        code = (call);                                                                                                 \
        if (code) goto done;                                                                                           \
    } while (0)

// Prints an error to stderr as one line: "error: WHAT. HINT", or "stopped: ..." (ERR_STOPPED).
// With several ranks the line names the rank, and its machine if `host` is given ("" or NULL: one machine).
void error_print_on(const Error *e, int rank, int ranks, const char *host);
static inline void error_print(const Error *e) { error_print_on(e, 0, 1, NULL); }

// Returns "gns.c 0.2 (c19d900e12+)": the version, the commit if git knows it, and + if files differed from the commit.
const char *version_text(void);

// Allocates memory, 64-byte aligned. *out is NULL on failure (ERR_MEMORY). `what` names the memory in the message.
int memory_alloc(void **out, size_t bytes, const char *what, Error *e);
int memory_alloc_zero(void **out, size_t bytes, const char *what, Error *e);
void memory_free(void *p); // NULL is fine

// A text that grows: text_begin, write to f, text_end, use `text`, text_free.
typedef struct {
    FILE *f;
    char *text; // after text_end: `bytes` bytes and a NUL, from malloc
    size_t bytes;
} Text;

int text_begin(Text *text, Error *e);
int text_end(Text *text, Error *e); // on failure (ERR_MEMORY) it has freed the text
void text_free(Text *text);         // callable at any time after text_begin, and on an all-zero Text

double clock_seconds(void); // monotonic

// Call it first in main. If the parent process closed a standard stream, opens /dev/null in its place, so that no later
// file gets the stream's number. Buffers standard output.
void process_begin(void);

// Call it last in main. Flushes standard output. ERR_WRITE if part of the output could not be written.
int process_end(Error *e);

// A heartbeat. Long work calls `beat` after each chunk, file or token, so that waiting ranks see progress.
typedef struct {
    void (*beat)(void *context);
    void *context;
} Pulse;
static inline void pulse_beat(const Pulse *pulse) { // may be NULL
    if (pulse) pulse->beat(pulse->context);
}

// Marks functions that nvcc compiles for host and device.
#ifdef __CUDACC__
#    define GNS_HD __host__ __device__
#else
#    define GNS_HD
#endif

GNS_HD static inline size_t size_min(size_t a, size_t b) { return a < b ? a : b; }
GNS_HD static inline size_t size_max(size_t a, size_t b) { return a > b ? a : b; }
static inline size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

GNS_C_END
