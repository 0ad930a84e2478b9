// checkpoint: a model's directory, as Hugging Face's transformers loads it and --model reads it:
//
//     config.json            GPT-2's configuration
//     model.safetensors      the weights
//
// layout.h says what is in the weights' file of a run's checkpoint, and in its training/optimizer.safetensors.
//
// This module knows files and the tensor table, not engines: it reads and writes ranges of the flat parameter array
// through functions that the caller gives.
//
// --model also reads weights in several files with a model.safetensors.index.json, and llm.c's .bin (llmc_bin).
#pragma once

#include "base/manifest.h"
#include "model/model.h"

#define OPTIMIZER_NAME "optimizer.safetensors"

// True if the path is a directory with a config.json, or llm.c's .bin.
bool checkpoint_is_model(const char *path);

// ERR_INPUT, with the remedy, if a directory has its weights only as PyTorch's pickle, which is not read here.
int checkpoint_refuse_pickle(const char *path, Error *e);

// Reads the shape. ERR_INPUT where the file is missing or malformed, or describes a model that is not GPT-2.
int checkpoint_read_config(const char *path, ModelConfig *config, Error *e);

// The tokens that begin and end a text, for programs that generate text; -1: none.
typedef struct {
    int bos, eos;
} TextTokens;

// The tokens that the config.json at `path` names, if it exists and they are in the vocabulary. Otherwise `eot`, the
// tokenizer's end of text (-1: none), or GPT-2's for a vocabulary of GPT-2's size.
TextTokens checkpoint_text_tokens(const char *path, int vocab, int eot);

// Compares a checkpoint's files with its manifest; the optimizer's file only with `moments`. ERR_INPUT names the file that
// differs. A path without a manifest passes.
int checkpoint_verify_model(const char *path, bool moments, Error *e);

// Identifies a model without reading all of it: hashes the names, the sizes and a sample of its weights' files.
int checkpoint_hash_model(const char *path, uint64_t *hash, Error *e);

// Reads the weights (F32, F16 or BF16) and hands every tensor of the model to `load`. All shapes are checked before the
// first value is handed over.
int checkpoint_load_model(const char *path, const Model *model, RangeWriter load, void *context, Error *e);

// One line to `notes` for tensors in the files that the model does not have.
int checkpoint_note_unknown(const char *path, const Model *model, FILE *notes, Error *e);

// Writes config.json and generation_config.json into an existing directory, and adds them to the manifest, which may be
// NULL. dropout: the probability of training, for programs that train further.
int checkpoint_save_config(const char *directory, const ModelConfig *config, TextTokens text, double dropout,
                           Manifest *manifest, Error *e);

// "DIRECTORY/training/NAME", of a file that only a resume needs; of an older build "DIRECTORY/NAME".
int checkpoint_training_path(char *out, size_t bytes, const char *directory, const char *name, Error *e);

// Reads the moments of `count` wanted ranges, of all elements where count is 0. The file is checked before the first
// value is handed over.
int checkpoint_load_optimizer(const char *directory, const Model *model, const Range *wanted, int count,
                              RangeWriter moment1, RangeWriter moment2, void *context, Error *e);
