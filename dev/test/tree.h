// tree: removes a directory and its contents, for the scratch directories of tests. Links are unlinked, not followed.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static inline void remove_tree_at(int parent, const char *name) {
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            remove_tree_at(dirfd(directory), entry->d_name);
    if (directory) closedir(directory);
    unlinkat(parent, name, directory ? AT_REMOVEDIR : 0);
}

static inline void remove_tree(const char *path) { remove_tree_at(AT_FDCWD, path); }
