// inspect: --check. Verifies a file or directory and says what it holds.
#pragma once

#include "base/common.h"

// path: a checkpoint or one file of it, a run directory with checkpoints, a model's directory or file (llm.c's .bin, any
// .safetensors), or token shards (a file or a pattern).
// ERR_INPUT where something is not as it was written.
int inspect(const char *path, FILE *out, Error *e);
