// shard_file: writes a token shard in one call.
#pragma once

#include "base/files.h"
#include "text/shards.h"

#include <string.h>

static inline int shard_write(const char *path, const uint16_t *tokens, size_t count, Error *e) {
    const int32_t header[SHARD_HEADER_INTS] = {SHARD_MAGIC, SHARD_VERSION, (int32_t)count};
    char *file;
    TRY(memory_alloc((void **)&file, sizeof header + 2 * count, "a shard", e));
    memcpy(file, header, sizeof header);
    memcpy(file + sizeof header, tokens, 2 * count);
    int code = file_replace(IN_PATH, path, file, sizeof header + 2 * count, e);
    memory_free(file);
    return code;
}
