// checkpoint: reads and writes a model's directory, for --model and for Hugging Face's transformers:
//
//     config.json            GPT-2's configuration
//     model.safetensors      the weights; layout.h describes how a run writes them
//     *.safetensors          the weights in several files, if there is no model.safetensors
//
// --model also reads llm.c's .bin (llmc_bin).
#pragma once

#include "base/manifest.h"
#include "model/engine.h"

#define OPTIMIZER_NAME "optimizer.safetensors"

// True if the path is a directory with a config.json, or llm.c's .bin.
bool checkpoint_is_model(const char *path);

// ERR_INPUT if a directory holds weights only as PyTorch's pickle.
int checkpoint_refuse_pickle(const char *path, Error *e);

// Reads a model's shape. ERR_INPUT if the file is missing or malformed, or describes a model that is not GPT-2.
int checkpoint_read_config(const char *path, ModelConfig *config, Error *e);

// Returns `eot`, the tokenizer's end of text. If it is -1 (none) and the vocabulary has GPT-2's size, returns GPT-2's.
static inline int checkpoint_end_of_text(int vocab, int eot) { return eot < 0 && vocab == 50257 ? vocab - 1 : eot; }

// Compares a share of a checkpoint's files with its manifest. Skips the optimizer's file unless `moments`. The message
// of ERR_INPUT names the file that differs. A path without a manifest passes.
int checkpoint_verify_model(const char *path, bool moments, Share share, const Pulse *pulse, Error *e);

// Computes a digest of a model's weights without reading all of them. {0} if they are in several files.
int checkpoint_digest_model(const char *path, FileDigest *digest, Error *e);

// What is loaded, and its destination. wanted: `count` ascending ranges of the flat array; count 0: all of it. `load`
// receives the tensors' elements in these ranges, never padding. model: the model in the files, or one rank's cut of it
// (model_create_local).
typedef struct {
    const Model *model;
    const Range *wanted;
    int count;
    float *buffer; // (RECEIVER_VALUES)
    StateWriter load;
    void *context;
} Receiver;
enum { RECEIVER_VALUES = 1 << 23 }; // maximum of values in a call of `load`

// Reads elements [first, first + n) of a tensor of the whole model. Several threads call it at once.
typedef int (*TensorReader)(const void *context, size_t first, size_t n, float *out, Error *e);

// Reads the wanted values of tensor i with `read`, and hands them to `load`.
int checkpoint_load_tensor(const Receiver *to, StateKind kind, int i, TensorReader read, const void *context, Error *e);

// Hands the wanted weights to `load`. Checks all shapes first. With llm.c's .bin hands over all weights, wanted or not.
int checkpoint_load_model(const char *path, const Receiver *to, Error *e);

// Writes a line to `notes` if the files hold tensors that are not in the model.
int checkpoint_note_unknown(const char *path, const Model *model, FILE *notes, Error *e);

// Writes config.json and generation_config.json into the manifest's directory, and adds them to the manifest. eot:
// the token that begins and ends a text; -1: none. dropout: the probability in training. Only other programs read eot
// and dropout.
int checkpoint_save_config(Manifest *manifest, const ModelConfig *config, int eot, double dropout, Error *e);

// Writes the path of a file that only a resume needs: "DIRECTORY/training/NAME", or an older build's "DIRECTORY/NAME".
int checkpoint_training_path(char *out, size_t bytes, const char *directory, const char *name, Error *e);

// Hands the wanted values of a moment of the model `whole` to `load`. Checks the tensor first.
int checkpoint_load_moment(const char *directory, StateKind moment, const Model *whole, const Receiver *to, Error *e);
