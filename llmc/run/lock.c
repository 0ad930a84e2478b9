#include "run/lock.h"

#include "base/files.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

enum { HOST_BYTES = 256, HOLDER_BYTES = 512 };

// Start of a process of this machine: word 22 of its stat (proc(5)). Word 2, the name, ends at the last ')'.
static bool start_of_process(long process, unsigned long long *ticks) {
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%ld/stat", process);
    FILE *f = fopen(path, "re");
    if (!f) return false;
    const char *at = fgets(line, sizeof line, f) ? strrchr(line, ')') : NULL;
    fclose(f);
    for (int word = 3; at && word <= 22; word++) at = strchr(at + 1, ' ');
    return at && sscanf(at, "%llu", ticks) == 1;
}

// Writes the line of written_by for a process; no two processes share one. False if this machine has no such process.
static bool describe_process(long process, char out[HOLDER_BYTES]) {
    char host[HOST_BYTES] = "", boot[64] = "";
    unsigned long long start;
    if (!start_of_process(process, &start) || gethostname(host, sizeof host - 1) != 0) return false;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (f && !fgets(boot, sizeof boot, f)) boot[0] = 0;
    if (f) fclose(f);
    boot[strcspn(boot, "\n")] = 0;
    snprintf(out, HOLDER_BYTES, "%s %ld %llu %s\n", host, process, start, boot);
    return true;
}

// The line of written_by, and what it says. False where there is none.
static bool read_holder(const char *directory, char line[HOLDER_BYTES], char host[HOST_BYTES], long *process) {
    char path[PATH_MAX], *text;
    size_t bytes;
    if (path_join(path, sizeof path, directory, RUN_LOCK_HOLDER, &(Error){0}) ||
        file_read(path, HOLDER_BYTES - 1, &text, &bytes, &(Error){0}))
        return false;
    strcpy(line, text);
    memory_free(text);
    return sscanf(line, "%255s %ld", host, process) == 2;
}

int run_lock_take(int fd, const char *path, const char *directory, LockHolder *holder, Error *e) {
    char line[HOLDER_BYTES], host[HOST_BYTES], now[HOLDER_BYTES], who[HOST_BYTES + 64] = "";
    long process;
    *holder = LOCK_FREE;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return 0;
    *holder = LOCK_UNKNOWN;
    if (read_holder(directory, line, host, &process)) {
        if (describe_process(process, now) && strcmp(line, now) == 0) *holder = LOCK_ALIVE;
        snprintf(who, sizeof who, "%s process %ld on %s", *holder == LOCK_UNKNOWN ? "; the last known one was" : ":",
                 process, host);
    }
    return FAIL(e, ERR_USAGE, "wait for it to end, or choose another --out", "%s: another run is writing to it%s", path,
                who);
}

int run_lock_sign(const char *directory, Error *e) {
    char holder_path[PATH_MAX], self[HOLDER_BYTES];
    TRY(path_join(holder_path, sizeof holder_path, directory, RUN_LOCK_HOLDER, e));
    if (!describe_process((long)getpid(), self)) strcpy(self, "\n"); // no /proc
    return file_save(holder_path, self, strlen(self), e);
}

bool run_lock_is_ours(const char *directory) {
    char line[HOLDER_BYTES], host[HOST_BYTES], self[HOLDER_BYTES];
    long process;
    return read_holder(directory, line, host, &process) && describe_process((long)getpid(), self) &&
           !strcmp(line, self);
}
