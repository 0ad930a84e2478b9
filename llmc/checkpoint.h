// checkpoint: a directory that Hugging Face's transformers loads as it is, and that --model reads:
//
//     config.json        GPT-2's configuration
//     model.safetensors  the fp32 master weights in the layout of the tensor table, vocabulary unpadded, format: pt
//
// This module knows files and the tensor table, not engines: the flat parameter array is read and written in ranges,
// through functions that the caller gives.
#ifndef GNS_CHECKPOINT_H
#define GNS_CHECKPOINT_H

#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

// Is this the path of a directory with a config.json?
bool checkpoint_is_model(const char *path);

// Reads DIRECTORY/config.json. ERR_INPUT where it is missing or malformed, or describes a model that is not GPT-2.
int checkpoint_read_config(const char *directory, ModelConfig *config, Error *e);

typedef int (*RangeReader)(void *context, Range range, float *values, Error *e);       // engine -> file
typedef int (*RangeWriter)(void *context, Range range, const float *values, Error *e); // file -> engine

// Reads DIRECTORY/model.safetensors (F32, F16 or BF16) and hands every tensor of the model to `load`. All of the file's
// shapes are checked before the first value goes out.
int checkpoint_load_model(const char *directory, const Model *model, RangeWriter load, void *context, Error *e);

// Writes both files into a directory that exists.
int checkpoint_save_model(const char *directory, const Model *model, RangeReader store, void *context, Error *e);

#ifdef __cplusplus
}
#endif
#endif
