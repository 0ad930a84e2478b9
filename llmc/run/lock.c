#include "run/lock.h"

#include "base/files.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

enum { HOST_BYTES = 256 };

static void host_name(char host[HOST_BYTES]) {
    if (gethostname(host, HOST_BYTES - 1) != 0) strcpy(host, "unknown");
    host[HOST_BYTES - 1] = 0;
}

int run_lock_take(int fd, int dir, const char *directory, LockHolder *holder, Error *e) {
    char path[PATH_MAX], host[HOST_BYTES], here[HOST_BYTES], who[HOST_BYTES + 64] = "", *text;
    size_t bytes;
    long process;
    *holder = LOCK_FREE;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return 0;
    *holder = LOCK_ELSEWHERE;
    TRY(path_join(path, sizeof path, directory, "written_by", e));
    if (file_read_in(dir, path, 2 * HOST_BYTES, &text, &bytes, e) == 0) {
        if (sscanf(text, "%255s %ld", host, &process) == 2) {
            host_name(here);
            if (strcmp(host, here) == 0 && (kill((pid_t)process, 0) == 0 || errno == EPERM)) *holder = LOCK_HERE;
            snprintf(who, sizeof who, "%s process %ld on %s", *holder == LOCK_HERE ? ":" : "; the last known one was",
                     process, host);
        }
        memory_free(text);
    }
    return FAIL(e, ERR_USAGE, "wait for it to end, or choose another --out",
                "%s/metrics.jsonl: another run is writing to it%s", directory, who);
}

int run_lock_sign(int dir, const char *directory, Error *e) {
    char path[PATH_MAX], host[HOST_BYTES], line[HOST_BYTES + 32];
    TRY(path_join(path, sizeof path, directory, "written_by", e));
    host_name(host);
    int n = snprintf(line, sizeof line, "%s %ld\n", host, (long)getpid());
    return file_replace(dir, path, line, (size_t)n, e);
}
