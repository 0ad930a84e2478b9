// inspect: --check. Verifies a file or directory and prints what it holds.
#pragma once

#include "base/common.h"

// path: a checkpoint or one file of it, a run directory, a model's directory or file (llm.c's .bin, any .safetensors), or
// token shards (a file or a pattern). ERR_INPUT if anything is damaged.
int inspect(const char *path, FILE *out, Error *e);
