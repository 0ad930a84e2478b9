// model: GPT-2's shape, its presets, and THE TENSOR TABLE. The table holds every property of a parameter tensor: name,
// shape, initialisation, weight decay, layer and group. Allocation, initialisation, the update, checkpoints, GNS groups
// and tests walk this table; nothing else in the program lists the tensors.
#pragma once

#include "base/common.h"

GNS_C_BEGIN

typedef struct {
    int layers;   // L
    int heads;    // NH
    int channels; // C, a multiple of NH
    int vocab;    // V, without padding: 256 for bytes, 50257 for GPT-2
    int context;  // rows of wpe: the longest sequence the model can see (Hugging Face: n_positions)
} ModelConfig;

// A tensor's group, for gradient noise by type.
typedef enum { GROUP_EMBEDDING, GROUP_ATTENTION, GROUP_MLP, GROUP_LN, GROUP_COUNT } TensorGroup;
extern const char *const group_names[GROUP_COUNT];

typedef enum {
    INIT_ZERO,
    INIT_ONE,
    INIT_NORMAL,  // N(0, 0.02^2) (Radford et al. 2019; Hugging Face initializer_range)
    INIT_RESIDUAL // N(0, 0.02^2 / 2L): projections that add to the residual stream (Radford et al. 2019, section 2.3)
} TensorInit;

// The table: X(kind, name, rows, columns, init, group). rows 0: a vector. Names are Hugging Face's; "%d" is the layer.
// Tensors with two dimensions decay; vectors do not. Weights are (in, out), as in Hugging Face's Conv1D. P: context. A:
// width of attention, F: width of the MLP; C and 4 C in a whole model (model_create_local).
// clang-format off
#define MODEL_TENSORS(X)                                                                                               \
    X(WTE,         "wte.weight",                V, C,     INIT_NORMAL,   GROUP_EMBEDDING)                              \
    X(WPE,         "wpe.weight",                P, C,     INIT_NORMAL,   GROUP_EMBEDDING)                              \
    X(LN1_W,       "h.%d.ln_1.weight",          0, C,     INIT_ONE,      GROUP_LN)                                     \
    X(LN1_B,       "h.%d.ln_1.bias",            0, C,     INIT_ZERO,     GROUP_LN)                                     \
    X(QKV_W,       "h.%d.attn.c_attn.weight",   C, 3 * A, INIT_NORMAL,   GROUP_ATTENTION)                              \
    X(QKV_B,       "h.%d.attn.c_attn.bias",     0, 3 * A, INIT_ZERO,     GROUP_ATTENTION)                              \
    X(PROJ_W,      "h.%d.attn.c_proj.weight",   A, C,     INIT_RESIDUAL, GROUP_ATTENTION)                              \
    X(PROJ_B,      "h.%d.attn.c_proj.bias",     0, C,     INIT_ZERO,     GROUP_ATTENTION)                              \
    X(LN2_W,       "h.%d.ln_2.weight",          0, C,     INIT_ONE,      GROUP_LN)                                     \
    X(LN2_B,       "h.%d.ln_2.bias",            0, C,     INIT_ZERO,     GROUP_LN)                                     \
    X(FC_W,        "h.%d.mlp.c_fc.weight",      C, F,     INIT_NORMAL,   GROUP_MLP)                                    \
    X(FC_B,        "h.%d.mlp.c_fc.bias",        0, F,     INIT_ZERO,     GROUP_MLP)                                    \
    X(FCPROJ_W,    "h.%d.mlp.c_proj.weight",    F, C,     INIT_RESIDUAL, GROUP_MLP)                                    \
    X(FCPROJ_B,    "h.%d.mlp.c_proj.bias",      0, C,     INIT_ZERO,     GROUP_MLP)                                    \
    X(LNF_W,       "ln_f.weight",               0, C,     INIT_ONE,      GROUP_LN)                                     \
    X(LNF_B,       "ln_f.bias",                 0, C,     INIT_ZERO,     GROUP_LN)
// clang-format on

#define X(kind, name, rows, columns, init, group) kind,
typedef enum { MODEL_TENSORS(X) TENSOR_KINDS } TensorKind;
#undef X

// One tensor of a model. The model's parameters are one flat array in which every tensor begins at a multiple of
// 64 elements; gradients and moments have the same layout.
typedef struct {
    char name[40]; // Hugging Face's, without the "transformer." in front
    TensorKind kind;
    int layer;            // -1 outside the blocks
    int dimensions;       // 1 or 2
    size_t rows, columns; // shape in this model; rows = 1 for a vector
    size_t offset;        // index of the first element in the flat array
    size_t count;         // elements: rows * columns
    size_t ln_place;      // number of LayerNorm parameters in earlier tensors
    // Shape of the whole tensor, and row and column of this tensor's first element in it (model_create_local).
    size_t whole_rows, whole_columns, first_row, first_column;
    int matrices; // matrices of equal width side by side: 3 in qkv's tensors, else 1. first_column counts within one
    TensorInit init;
    TensorGroup group;
} Tensor;

typedef struct Range { // has a tag, since nvcc 13.0 fails at a std::vector of an unnamed type
    size_t begin, end; // elements [begin, end) of the flat array
} Range;

// Returns how many matrices, side by side, Muon orthogonalizes in a tensor: 3 in QKV_W, 1 in a block's other matrices.
// 0: AdamW updates the tensor.
static inline size_t tensor_muon_matrices(const Tensor *t) {
    return t->dimensions < 2 || t->layer < 0 ? 0 : (size_t)t->matrices;
}

GNS_HD static inline Range tensor_range(const Tensor *t) { return (Range){t->offset, t->offset + t->count}; }
GNS_HD static inline size_t range_length(Range range) { return range.end - range.begin; }
static inline size_t range_float_bytes(Range range) { return range_length(range) * sizeof(float); }

// True if this model holds only a part of the tensor.
static inline bool tensor_is_cut(const Tensor *t) { return t->columns < t->whole_columns || t->rows < t->whole_rows; }

// Returns the part that two ranges share; may be empty.
GNS_HD static inline Range range_overlap(Range a, Range b) {
    size_t begin = size_max(a.begin, b.begin), end = size_min(a.end, b.end);
    return begin < end ? (Range){begin, end} : (Range){begin, begin};
}

typedef struct {
    ModelConfig config;     // shape of the whole model
    int vocab_padded;       // rows of wte in memory: V rounded up to 128; rows from V on stay 0 and are never saved
    int first_head, heads;  // this model's heads: [first_head, first_head + heads)
    size_t attention_width; // A: heads times a head's width; qkv has 3 A columns
    size_t mlp_first, mlp_width; // this model's columns of fc: the first column; F, the number of columns
    int tensor_count;
    Tensor *tensors;   // wte, wpe, the blocks from first to last, ln_f; a whole model's flat array has this order
    size_t flat_count; // elements of the flat array, padding included
    size_t parameters; // elements without padding
    size_t ln_parameters;
} Model;

// The items [first, first + count) that a rank gets when `ranks` ranks divide `items` rows or heads. If there is a
// remainder, each of the lowest ranks gets one item more.
typedef struct {
    int64_t first, count;
} RankRows;
RankRows rows_of_rank(int64_t items, int rank, int ranks);

// Fills *config, except vocab and context, from a preset's name: gpt2-124M, -350M, -774M, -1558M, or dN. False if no
// preset has that name.
bool model_preset(ModelConfig *config, const char *name);
#define MODEL_PRESET_HELP "gpt2-124M, gpt2-350M, gpt2-774M, gpt2-1558M, or dN (N layers)" // for messages

// The largest model. The option table has the same limits; test_options compares them.
enum {
    MODEL_LAYERS_MAX = 1000,
    MODEL_HEADS_MAX = 1000,
    MODEL_CHANNELS_MAX = 1 << 16,
    MODEL_VOCAB_MAX = 1 << 16, // tokens are 16-bit
    MODEL_CONTEXT_MAX = 1 << 16
};

// Most rows B and most tokens N = B T of a micro-batch: N and the number of attention's work items must fit an int. A
// work item is a tile of up to 32 tokens in one head, so there are at most MODEL_HEADS_MAX (N / 32 + B) work items.
enum { MICRO_BATCH_MAX = 1 << 16, MICRO_BATCH_TOKENS_MAX = 1 << 25 };

// ERR_INPUT if no model has this shape. The message names the file `path`.
int model_check_file(const ModelConfig *config, const char *path, Error *e);

// Builds the table. ERR_USAGE if no model has this shape.
int model_create(Model *model, const ModelConfig *config, Error *e);
void model_destroy(Model *model);

// Builds the table of rank t of K ranks that hold one model together (--tensor): the same tensors with other shapes and
// offsets. qkv's columns and proj's rows are cut by heads. fc's columns and fcproj's rows are cut in units of 64 (fewer
// in small models). Shares may be uneven. Other tensors are not cut; bucket 0 holds all of them, the later buckets hold
// the cut tensors. ERR_USAGE with fewer heads than ranks. K = 1: the table of model_create.
int model_create_local(Model *local, const ModelConfig *config, int t, int K, Error *e);

// A cut tensor's elements keep the whole tensor's order. Indices count from a tensor's first element.
size_t tensor_whole_index(const Tensor *t, size_t index);     // the element's index in the whole tensor
size_t tensor_elements_before(const Tensor *t, size_t whole); // number of elements whose whole index is below `whole`
size_t tensor_run(const Tensor *t, size_t index);             // length of the run from `index` on in the whole tensor

// Returns the range of `local` that holds the elements of `range`, a range of the whole model within tensor i.
Range model_local_range(const Model *local, const Model *whole, int i, Range range);

// Returns the tensor of a kind. Ignores `layer` for tensors outside the blocks.
const Tensor *model_tensor(const Model *model, TensorKind kind, int layer);

size_t model_tensor_largest(const Model *model); // elements of the largest tensor in memory

// Buckets: consecutive ranges of the flat array. The forward pass reads one after the other; the backward pass
// completes their gradients from the last to the first. Bucket 0 is the embeddings, 1 + l is block l; the last bucket
// includes ln_f. If blocks are cut (model_create_local), all whole tensors are in bucket 0.
int model_bucket_count(const Model *model);
Range model_bucket(const Model *model, int i);
int model_bucket_at(const Model *model, size_t element); // the bucket of an element
size_t model_bucket_largest(const Model *model);         // elements

// Writes the initial values of elements [first, first + n) of a tensor. They depend on (seed, tensor, element) alone.
void model_init_values(const Model *model, const Tensor *tensor, uint64_t seed, size_t first, size_t n, float *out);

// Floating-point operations of training on one token at sequence length T: 6 N + 6 L C T, forward and backward. N is
// the number of parameters without wpe; wte counts once, as the head. The attention term is Chowdhery et al.'s 12 L C T
// (2022, appendix B), halved because attention is causal. llm.c's formula also counts wpe.
#define MODEL_FLOPS_FORMULA "6 N + 6 L C T, N without position embeddings"
double model_flops_per_token(const Model *model, int seq_len);

GNS_C_END
