// common: what every module stands on. Errors as values, checked memory and the clock.
//
// A function that can fail returns int: 0, or the exit code of what went wrong, with the story in its last argument,
// an Error *. It is handed up to program_main (program.h), which prints it and ends the program (comm_finish). Only the
// watchdog (watchdog.h) ends it from beside, when the ranks have stopped getting on.
#ifndef GNS_COMMON_H
#define GNS_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

// Exit codes: a contract with scripts (64 to 75 follow BSD's sysexits.h).
enum {
    EXIT_DONE = 0,
    ERR_USAGE = 64,     // the command line or the configuration
    ERR_INPUT = 65,     // a named input is missing, unreadable or malformed
    ERR_NO_GPU = 69,    // no usable GPU
    ERR_INTERNAL = 70,  // a fault of this program
    ERR_MEMORY = 71,    // out of memory, on the host or the device
    ERR_WRITE = 74,     // writing failed
    ERR_STOPPED = 75,   // stopped on request; run the same command again
    ERR_NONFINITE = 76, // a loss or gradient is not a number
    ERR_SKIPPED = 77,   // a test that could not run here
    ERR_RANK = 78       // a rank was lost or went astray, or a deadline passed
};

typedef struct {
    int code;         // one of the above; 0: no error
    char what[1024];  // what went wrong, naming the file or flag
    char hint[512];   // what to do about it; may be empty
    const char *file; // source position that raised it
    int line;
} Error;

// error_set fills *e and returns code, so that `return FAIL(...)` both reports and unwinds.
// hint is a plain string (may be NULL); what is a printf format.
int error_set(Error *e, const char *file, int line, int code, const char *hint, const char *format, ...)
    __attribute__((format(printf, 6, 7)));
#define FAIL(e, code, hint, ...) error_set((e), __FILE__, __LINE__, (code), (hint), __VA_ARGS__)

// The hint with arguments of its own, for an error already set. Returns e->code.
int error_hint(Error *e, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Puts "prefix: " in front of what is said already ("--config run.cfg line 3: ..."). Returns e->code.
int error_prefix(Error *e, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Runs a call that returns an error code, and hands a failure up.
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int try_code_ = (call);                                                                                        \
        if (try_code_) return try_code_;                                                                               \
    } while (0)

// The same inside a function that has one exit: needs `int code` and a label `done`.
#define TRY_GOTO(call)                                                                                                 \
    do {                                                                                                               \
        code = (call);                                                                                                 \
        if (code) goto done;                                                                                           \
    } while (0)

// Prints the one line of an error to stderr: "error: WHAT. HINT", with the rank in front when there are several, and
// `host`, its machine's name, when these are several too ("" or NULL: they are not).
void error_print_on(const Error *e, int rank, int ranks, const char *host);
static inline void error_print(const Error *e, int rank, int ranks) { error_print_on(e, rank, ranks, NULL); }

// "gns.c 0.1 (c19d900e12)": the version, and the commit it was built from where git could tell, with a + where files had
// been changed since.
const char *version_text(void);

// Memory, 64-byte aligned, not cleared. *out is NULL on failure (71). `what` names it in the message.
int memory_alloc(void **out, size_t bytes, const char *what, Error *e);
int memory_alloc_zero(void **out, size_t bytes, const char *what, Error *e);
void memory_free(void *p); // NULL is fine

double clock_seconds(void); // monotonic

// What takes long tells whoever waits for it of each piece that it has done: a chunk, a file, a token.
typedef struct {
    void (*beat)(void *context);
    void *context;
} Pulse;
static inline void pulse_beat(const Pulse *pulse) { // NULL: nobody waits
    if (pulse) pulse->beat(pulse->context);
}

static inline size_t size_min(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t size_max(size_t a, size_t b) { return a > b ? a : b; }
static inline size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

#ifdef __cplusplus
}
#endif

// Functions of the pure-math headers run on the host and, compiled by nvcc, on the device.
#ifdef __CUDACC__
#    define GNS_HD __host__ __device__
#else
#    define GNS_HD
#endif

#endif
