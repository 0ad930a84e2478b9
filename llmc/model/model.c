#include "model/model.h"

#include "math/rng.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const group_names[GROUP_COUNT] = {"embedding", "attention", "mlp", "ln"};

// ---- Presets --------------------------------------------------------------------------------------------------------

static const struct {
    const char *name, *depth;
    int layers, heads, channels;
} presets[] = {
    // GPT-2's four (Radford et al. 2019, table 2)
    {"gpt2-124M", "d12", 12, 12, 768},
    {"gpt2-350M", "d24", 24, 16, 1024},
    {"gpt2-774M", "d36", 36, 20, 1280},
    {"gpt2-1558M", "d48", 48, 25, 1600},
    // llm.c's other depths, with heads of 64; llm.c's d6 follows from the rule for dN
    {"d60", "d60", 60, 30, 1920},
    {"d72", "d72", 72, 45, 2880},
    {"d84", "d84", 84, 54, 3456},
};

bool model_preset(ModelConfig *config, const char *name) {
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++) {
        if (strcmp(name, presets[i].name) != 0 && strcmp(name, presets[i].depth) != 0) continue;
        config->layers = presets[i].layers;
        config->heads = presets[i].heads;
        config->channels = presets[i].channels;
        return true;
    }
    char *end;
    if (name[0] != 'd' || name[1] < '1' || name[1] > '9') return false;
    long depth = strtol(name + 1, &end, 10);
    if (*end || depth > MODEL_LAYERS_MAX) return false;
    config->layers = config->heads = (int)depth;
    config->channels = 64 * (int)depth;
    return true;
}

// ---- The table ------------------------------------------------------------------------------------------------------

RankRows rows_of_rank(int64_t items, int rank, int ranks) {
    int64_t each = items / ranks, longer = items % ranks; // each of the first `longer` ranks gets one more item
    return (RankRows){rank * each + (rank < longer ? rank : longer), each + (rank < longer)};
}

// Appends a tensor without its offset. `layer` is -1 outside the blocks.
static void model_append(Model *model, TensorKind kind, int layer) {
    const size_t V = (size_t)model->config.vocab, P = (size_t)model->config.context, C = (size_t)model->config.channels;
    size_t A = C, F = 4 * C;
#define X(kind, name, rows, columns, init, group)                                                                      \
    {name, kind, 0, (rows) > 0 ? 2 : 1, (rows) > 0 ? (rows) : 1, columns, 0, 0, 0, 0, 0, 0, 0, 1, init, group},
    const Tensor whole[TENSOR_KINDS] = {MODEL_TENSORS(X)};
    A = model->attention_width, F = model->mlp_width;
    const Tensor table[TENSOR_KINDS] = {MODEL_TENSORS(X)};
#undef X
    Tensor *t = &model->tensors[model->tensor_count++];
    const size_t head = C / (size_t)model->config.heads;
    *t = table[kind];
    t->layer = layer;
    snprintf(t->name, sizeof t->name, table[kind].name, layer); // only a block's names read `layer`
    t->count = t->rows * t->columns;
    t->whole_rows = whole[kind].rows, t->whole_columns = whole[kind].columns;
    const size_t first = t->group == GROUP_MLP ? model->mlp_first : (size_t)model->first_head * head;
    t->first_row = t->rows < t->whole_rows ? first : 0;
    t->first_column = t->columns < t->whole_columns ? first : 0;
    t->matrices = kind == QKV_W || kind == QKV_B ? 3 : 1;
    model->parameters += t->count;
    t->ln_place = model->ln_parameters;
    if (t->group == GROUP_LN) model->ln_parameters += t->count;
}

// Sets the offsets of the tensors that are cut; cut false: of those that are not.
static void place_tensors(Model *model, bool cut) {
    const size_t alignment = 64; // elements: 256 bytes of fp32, 128 of bf16; enough for any vector or bulk copy
    for (int i = 0; i < model->tensor_count; i++) {
        Tensor *t = &model->tensors[i];
        if (tensor_is_cut(t) != cut) continue;
        size_t in_memory = t->kind == WTE ? (size_t)model->vocab_padded * t->columns : t->count;
        t->offset = model->flat_count;
        model->flat_count += round_up(in_memory, alignment);
    }
}

static int config_check(const ModelConfig *c, Error *e) {
    const struct {
        const char *of;
        int size, least, most;
    } sizes[] = {{"layers", c->layers, 1, MODEL_LAYERS_MAX},
                 {"heads", c->heads, 1, MODEL_HEADS_MAX},
                 {"channels", c->channels, 1, MODEL_CHANNELS_MAX},
                 {"tokens in the vocabulary", c->vocab, 2, MODEL_VOCAB_MAX},
                 {"tokens of context", c->context, 1, MODEL_CONTEXT_MAX}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].size < sizes[i].least || sizes[i].size > sizes[i].most)
            return FAIL(e, ERR_USAGE, "use another model", "%d %s: must be %d to %d", sizes[i].size, sizes[i].of,
                        sizes[i].least, sizes[i].most);
    if (c->channels % c->heads == 0) return 0;
    return FAIL(e, ERR_USAGE, "choose --heads so that it divides --channels",
                "%d channels are not divisible by %d heads", c->channels, c->heads);
}

int model_check_file(const ModelConfig *config, const char *path, Error *e) {
    if (config_check(config, e) == 0) return 0;
    e->code = ERR_INPUT; // not ERR_USAGE, since the shape is from the file
    error_hint(e, "use another model");
    return error_prefix(e, "%s: it describes no GPT-2 that this program can train", path);
}

// Sets the heads, A and the columns of fc that rank t of K holds.
static int cut_widths(Model *model, int t, int K, Error *e) {
    const ModelConfig *c = &model->config;
    const int64_t wide = 4 * (int64_t)c->channels;
    int64_t unit = 64; // columns of the MLP per unit, so that products and copies work on whole vectors
    if (K > c->heads) {
        FAIL(e, ERR_USAGE, NULL, "--tensor %d: the model has %d head%s", K, c->heads, c->heads > 1 ? "s" : "");
        return error_hint(e, "use at most %d, so that each rank has one", c->heads);
    }
    while (wide % unit || wide / unit < K) unit /= 2;
    const RankRows heads = rows_of_rank(c->heads, t, K), units = rows_of_rank(wide / unit, t, K);
    model->first_head = (int)heads.first, model->heads = (int)heads.count;
    model->attention_width = (size_t)(c->channels / c->heads) * (size_t)heads.count;
    model->mlp_first = (size_t)(units.first * unit), model->mlp_width = (size_t)(units.count * unit);
    return 0;
}

int model_create_local(Model *model, const ModelConfig *config, int t, int K, Error *e) {
    memset(model, 0, sizeof *model);
    TRY(config_check(config, e));
    model->config = *config;
    model->vocab_padded = (int)round_up((size_t)config->vocab, 128); // whole tiles for the head's matmul
    TRY(cut_widths(model, t, K, e));
    size_t most = (size_t)TENSOR_KINDS * (size_t)config->layers;
    TRY(memory_alloc_zero((void **)&model->tensors, most * sizeof(Tensor), "the tensor table", e));
    for (int kind = 0; kind < LN1_W; kind++) model_append(model, (TensorKind)kind, -1);
    for (int layer = 0; layer < config->layers; layer++)
        for (int kind = LN1_W; kind < LNF_W; kind++) model_append(model, (TensorKind)kind, layer);
    for (int kind = LNF_W; kind < TENSOR_KINDS; kind++) model_append(model, (TensorKind)kind, -1);
    place_tensors(model, false);
    place_tensors(model, true);
    return 0;
}

int model_create(Model *model, const ModelConfig *config, Error *e) {
    return model_create_local(model, config, 0, 1, e);
}

void model_destroy(Model *model) {
    memory_free(model->tensors);
    memset(model, 0, sizeof *model);
}

const Tensor *model_tensor(const Model *model, TensorKind kind, int layer) {
    const int per_block = LNF_W - LN1_W;
    int index = (int)kind;
    if (kind >= LNF_W) index += (model->config.layers - 1) * per_block;
    else if (kind >= LN1_W) index += layer * per_block;
    assert(index < model->tensor_count && model->tensors[index].kind == kind);
    return &model->tensors[index];
}

size_t model_tensor_largest(const Model *model) {
    size_t most = (size_t)model->vocab_padded * (size_t)model->config.channels;
    for (int i = 0; i < model->tensor_count; i++) most = size_max(most, model->tensors[i].count);
    return most;
}

// ---- Cut tensors ----------------------------------------------------------------------------------------------------

size_t tensor_whole_index(const Tensor *t, size_t index) {
    const size_t matrices = (size_t)t->matrices, width = t->columns / matrices, whole = t->whole_columns / matrices;
    const size_t row = t->first_row + index / t->columns, column = index % t->columns;
    return row * t->whole_columns + column / width * whole + t->first_column + column % width;
}

size_t tensor_elements_before(const Tensor *t, size_t index) {
    const size_t matrices = (size_t)t->matrices, width = t->columns / matrices, whole = t->whole_columns / matrices;
    const size_t row = index / t->whole_columns, column = index % t->whole_columns, within = column % whole;
    if (row < t->first_row) return 0;
    if (row >= t->first_row + t->rows) return t->count;
    const size_t before = within > t->first_column ? size_min(within - t->first_column, width) : 0;
    return (row - t->first_row) * t->columns + column / whole * width + before;
}

size_t tensor_run(const Tensor *t, size_t index) {
    const size_t width = t->columns / (size_t)t->matrices;
    return t->columns < t->whole_columns ? width - index % width : t->count - index;
}

Range model_local_range(const Model *local, const Model *whole, int i, Range range) {
    const Tensor *t = &local->tensors[i];
    const size_t first = whole->tensors[i].offset;
    return (Range){t->offset + tensor_elements_before(t, range.begin - first),
                   t->offset + tensor_elements_before(t, range.end - first)};
}

// ---- Buckets --------------------------------------------------------------------------------------------------------

int model_bucket_count(const Model *model) { return 1 + model->config.layers; }

Range model_bucket(const Model *model, int i) {
    const TensorKind first = model->heads < model->config.heads ? QKV_W : LN1_W; // first tensor of a block's bucket
    size_t begin = i == 0 ? 0 : model_tensor(model, first, i - 1)->offset;
    size_t end = i == model->config.layers ? model->flat_count : model_tensor(model, first, i)->offset;
    return (Range){begin, end};
}

int model_bucket_at(const Model *model, size_t element) {
    Range first = model_bucket(model, 1); // blocks begin at equal distances; the last includes ln_f
    if (element < first.begin) return 0;
    return 1 + (int)size_min((element - first.begin) / range_length(first), (size_t)model->config.layers - 1);
}

size_t model_bucket_largest(const Model *model) { // the embeddings, or the last block with ln_f
    return size_max(range_length(model_bucket(model, 0)), range_length(model_bucket(model, model->config.layers)));
}

void model_init_values(const Model *model, const Tensor *tensor, uint64_t seed, size_t first, size_t n, float *out) {
    double scale = 0.02;
    if (tensor->init == INIT_RESIDUAL) scale /= sqrt(2.0 * model->config.layers);
    uint64_t stream = (uint64_t)(tensor - model->tensors);
    // Each value depends on its index alone. A single thread would need a minute or two for gpt2-1558M.
#pragma omp parallel for schedule(static) if (n > 4096)
    for (size_t i = 0; i < n; i++) {
        if (tensor->init == INIT_ZERO) out[i] = 0.0f;
        else if (tensor->init == INIT_ONE) out[i] = 1.0f;
        else out[i] = (float)(scale * rng_normal(seed, stream, first + i));
    }
}

double model_flops_per_token(const Model *model, int seq_len) {
    double wpe = (double)model_tensor(model, WPE, 0)->count;
    double attention = 6.0 * model->config.layers * model->config.channels * seq_len;
    return 6.0 * ((double)model->parameters - wpe) + attention;
}
