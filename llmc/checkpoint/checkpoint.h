// checkpoint: a directory that Hugging Face's transformers loads as it is, and that --model reads:
//
//     config.json            GPT-2's configuration
//     model.safetensors      the fp32 master weights in the layout of the tensor table, vocabulary unpadded, format: pt
//
// and, in a run's checkpoints, the optimizer's memory besides:
//
//     optimizer.safetensors  the moments, F32, as ranges of the model's flat array (padding included): tensors
//                            "moment1.BEGIN-END" and "moment2.BEGIN-END" that cover it. Files "optimizer*.safetensors"
//                            are read together, so whoever holds a range of the moments may write a file of its own.
//
// This module knows files and the tensor table, not engines: the flat parameter array is read and written in ranges,
// through functions that the caller gives.
#ifndef GNS_CHECKPOINT_H
#define GNS_CHECKPOINT_H

#include "base/manifest.h"
#include "model/model.h"

#define OPTIMIZER_NAME "optimizer.safetensors"

// What --model reads besides: the weights in several files with a model.safetensors.index.json, and llm.c's .bin
// (llmc_bin).

// Is this the path of a directory with a config.json, or of llm.c's .bin?
bool checkpoint_is_model(const char *path);

// ERR_INPUT where a directory has weights only in a form that is not read here, PyTorch's pickle, with the way out.
int checkpoint_refuse_pickle(const char *path, Error *e);

// Reads the shape. ERR_INPUT where the file is missing or malformed, or describes a model that is not GPT-2.
int checkpoint_read_config(const char *path, ModelConfig *config, Error *e);

// The tokens that begin and end a text, for those who generate some; -1: none.
typedef struct {
    int bos, eos;
} TextTokens;

// What a model's config.json says of them, where there is a `path` with one and these are tokens of its vocabulary.
// Otherwise the tokenizer's end of text (-1: it has none, or there is no tokenizer), or else GPT-2's in its vocabulary.
TextTokens checkpoint_text_tokens(const char *path, int vocab, int eot);

// Where the path is that of a checkpoint with a manifest: is what a model is read from as it was written? ERR_INPUT names
// the file that is not. Elsewhere there is nothing to compare with.
int checkpoint_verify_model(const char *path, Error *e);

// Tells a model from others, without reading all of it: its weights' files by name, size and a sample.
int checkpoint_hash_model(const char *path, uint64_t *hash, Error *e);

// Reads the weights (F32, F16 or BF16) and hands every tensor of the model to `load`. All shapes are checked before the
// first value goes out.
int checkpoint_load_model(const char *path, const Model *model, RangeWriter load, void *context, Error *e);

// Writes both files into a directory that exists, durably. Their digests go to the manifest, where there is one.
int checkpoint_save_model(const char *directory, const Model *model, TextTokens text, RangeReader store, void *context,
                          Manifest *manifest, Error *e);

// Writes the range `mine` of the moments to the file `name` (OPTIMIZER_NAME for all of it).
int checkpoint_save_optimizer(const char *directory, const char *name, const Model *model, Range mine,
                              RangeReader moment1, RangeReader moment2, void *context, Manifest *manifest, Error *e);

// Reads the moments of the `count` wanted ranges, or all of them (0), whatever ranges they were written in. All of the
// files are checked before the first value goes out.
int checkpoint_load_optimizer(const char *directory, const Model *model, const Range *wanted, int count,
                              RangeWriter moment1, RangeWriter moment2, void *context, Error *e);
#endif
