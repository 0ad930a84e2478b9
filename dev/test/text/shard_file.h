// shard_file: writes a token shard in one call.
#pragma once

#include "text/shards.h"

static inline int shard_write(const char *path, const uint16_t *tokens, size_t count, Error *e) {
    ShardWriter *w;
    Error second; // after the first
    TRY(shard_writer_open(&w, path, e));
    int code = shard_writer_put(w, tokens, count, e);
    int end = shard_writer_close(&w, code ? &second : e);
    return code ? code : end ? end : shard_publish(path, e);
}
