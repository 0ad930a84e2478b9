// peak_memory PROGRAM ARGUMENT...: runs the program and prints its peak resident memory in MiB. The program's output
// goes to standard error; its exit code is returned.
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv) {
    struct rusage usage;
    int status;
    if (argc < 2) return 64;
    pid_t child = fork();
    if (child == 0) {
        dup2(2, 1);
        execv(argv[1], argv + 1);
        _exit(127);
    }
    if (child < 0 || wait4(child, &status, 0, &usage) < 0 || !WIFEXITED(status)) return 70;
    printf("%.1f\n", (double)usage.ru_maxrss / 1024); // Linux counts in KiB
    return WEXITSTATUS(status);
}
