// llmc_bin: reads llm.c's model file, little-endian. Version 3 is fp32, version 5 is bf16:
//
//     int32 header[256]   [0] magic 20240326, [1] version, [2] context, [3] vocabulary, [4] layers, [5] heads,
//                         [6] channels, [7] vocabulary as padded in the file, the rest 0
//     parameters          ordered by kind as in the tensor table, then by layer; wte has header[7] rows
//
// The weight matrices of blocks are (out, in) in the file and (in, out) here.
#pragma once

#include "model/engine.h"

// True if the file begins with the magic.
bool llmc_bin_is(const char *path);

int llmc_bin_read_config(const char *path, ModelConfig *config, Error *e);

// Hands every tensor of the model to `load`.
int llmc_bin_load(const char *path, const Model *model, StateWriter load, void *context, Error *e);
