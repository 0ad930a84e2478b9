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

// The line of written_by, which no other process has. False if this machine has no such process.
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

int run_lock_take(int fd, const char *path, const char *directory, LockHolder *holder, Error *e) {
    char holder_path[PATH_MAX], *text, host[HOST_BYTES], now[HOLDER_BYTES], who[HOST_BYTES + 64] = "";
    size_t bytes;
    long process;
    *holder = LOCK_FREE;
    TRY(path_join(holder_path, sizeof holder_path, directory, RUN_LOCK_HOLDER, e));
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return 0;
    *holder = LOCK_UNKNOWN;
    if (file_read(holder_path, HOLDER_BYTES, &text, &bytes, &(Error){0}) == 0) {
        if (sscanf(text, "%255s %ld", host, &process) == 2) {
            if (describe_process(process, now) && strcmp(text, now) == 0) *holder = LOCK_ALIVE;
            snprintf(who, sizeof who, "%s process %ld on %s", *holder == LOCK_UNKNOWN ? ": it was" : ":", process,
                     host);
        }
        memory_free(text);
    }
    return FAIL(e, ERR_USAGE, "wait for it to end, or choose another --out", "%s: another run is writing to it%s", path,
                who);
}

int run_lock_sign(const char *directory, Error *e) {
    char holder_path[PATH_MAX], self[HOLDER_BYTES];
    TRY(path_join(holder_path, sizeof holder_path, directory, RUN_LOCK_HOLDER, e));
    if (!describe_process((long)getpid(), self)) strcpy(self, "\n"); // no /proc
    return file_save(holder_path, self, strlen(self), NULL, e);
}
