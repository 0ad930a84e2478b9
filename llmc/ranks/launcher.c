#include "ranks/launcher.h"

#include "base/signals.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

// Writes the PLACE of this process (launcher.h).
static bool read_place(char *place, size_t bytes) {
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!f) return false;
    bool read = fscanf(f, "%40s", place) == 1;
    size_t used = read ? strlen(place) : 0;
    fclose(f);
    if (!read || used + 2 > bytes) return false;
    place[used++] = '/';
    ssize_t n = readlink("/proc/self/ns/pid", place + used, bytes - used - 1);
    if (n <= 0) return false;
    place[used + (size_t)n] = 0;
    return true;
}

// No-op before Linux 5.3, which has no pidfd.
static void launcher_add(Launchers *l, const char *name, int process, bool reports_exits) {
#ifdef SYS_pidfd_open
    int fd = (int)syscall(SYS_pidfd_open, process, 0);
    if (l->count == LAUNCHERS_MAX || (fd < 0 && errno != ESRCH)) return;
    l->one[l->count].process = fd;
    l->one[l->count].reports_exits = reports_exits;
    snprintf(l->one[l->count++].gone, LAUNCHER_NAME, "%s (process %d) is gone", name, process);
#else
    (void)l, (void)name, (void)process, (void)reports_exits;
#endif
}

void launchers_watch(Launchers *l, bool has_parent) {
    char here[128], place[128], name[32];
    int process, length;
    const char *at = getenv("GNS_LAUNCHERS");
    *l = (Launchers){0};
    if (has_parent) launcher_add(l, "parent", (int)getppid(), true);
    if (!at || !read_place(here, sizeof here)) return;
    for (; sscanf(at, " %31[^:]:%d@%127s%n", name, &process, place, &length) == 3; at += length)
        if (strcmp(place, here) == 0) launcher_add(l, name, process, has_parent && strcmp(name, "mpirun") == 0);
}

static bool is_gone(const struct Launcher *launcher) {
    struct pollfd end = {.fd = launcher->process, .events = POLLIN};
    return end.fd < 0 || poll(&end, 1, 0) == 1;
}

bool launchers_reporter_gone(const Launchers *l) {
    for (int i = 0; i < l->count; i++)
        if (l->one[i].reports_exits && is_gone(&l->one[i])) return true;
    return false;
}

void launchers_check(const Launchers *l) {
    for (int i = 0; i < l->count; i++)
        if (is_gone(&l->one[i])) signals_orphaned(l->one[i].gone);
}
