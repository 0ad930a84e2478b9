// engine_fp8: e4m3 copies of factors (engine.cuh, math/fp8.h): their sites, exponents and places. Block L is the head.
#include "cuda/engine.cuh"
#include "cuda/fp8.cuh"
#include "cuda/layernorm.cuh"
#include "cuda/linear_sm90.cuh"
#include "cuda/weight_gradient.cuh"
#include "model/shard.h"

#include <math.h>

// Weights of a block in the order of their sites, and the offsets of their copies in units of C^2 bytes.
static const TensorKind matrices[] = {QKV_W, PROJ_W, FC_W, FCPROJ_W};
static const size_t matrix_at[] = {0, 3, 4, 8, 12};

static int matrix_index(TensorKind w) { return w == QKV_W ? 0 : w == PROJ_W ? 1 : w == FC_W ? 2 : 3; }
Fp8Site fp8_x_site(TensorKind w) { return (Fp8Site)(FP8_LN1 + matrix_index(w)); }
Fp8Site fp8_dy_site(TensorKind w) { return (Fp8Site)(FP8_DQKV - matrix_index(w)); }

// Index of the weight that a site of activations multiplies.
static int weight_of(Fp8Site s) { return s < FP8_DFCPROJ ? s - FP8_LN1 : FP8_DQKV - s; }

static int exponent_of(const Engine *engine, int site, int l) { return engine->exponent[l * FP8_ENTRIES + site]; }

// True if the product of a site of activations and its weight rounds both factors.
static bool rounds(const Engine *engine, Fp8Site s, int l) {
    return exponent_of(engine, s, l) != FP8_UNSET && exponent_of(engine, FP8_QKV_WEIGHT + weight_of(s), l) != FP8_UNSET;
}

bool fp8_dweight_rounds(const Engine *engine, bool fp8, TensorKind w, int l) {
    return fp8 && engine->config.dtype == DTYPE_FP8_DW && rounds(engine, fp8_x_site(w), l) &&
           rounds(engine, fp8_dy_site(w), l);
}

// True if a product or a LayerNorm writes the codes of site s and nothing reads s in bf16. If s is an x, its codes
// then lie in the memory of the bf16 x.
static bool is_alone(const Engine *engine, Fp8Site s, int l) {
    const ModelConfig *m = &engine->config.model->config;
    if (!fp8_dweight_rounds(engine, true, matrices[weight_of(s)], l)) return false;
    if (s == FP8_LN1 || s == FP8_LN2) return m->channels <= LAYERNORM_WARP_COLUMNS;
    if (s == FP8_GELU) return !engine->block[l].fc && rounds(engine, FP8_LN2, l);
    return s == FP8_DFC && rounds(engine, FP8_DFCPROJ, l) && linear_sm90_sums(engine->config.seq_len);
}

static uint8_t *site_codes(const Engine *engine, Fp8Site s, int l) {
    const Block *k = &engine->block[l];
    if (s < FP8_DFCPROJ && is_alone(engine, s, l))
        return (uint8_t *)(s == FP8_LN1 ? k->ln1 : s == FP8_LN2 ? k->ln2 : k->gelu);
    if (s == FP8_GELU || s == FP8_DFC || s == FP8_DQKV) return engine->copy_wide;
    return s < FP8_DFCPROJ ? engine->copy_x : engine->copy_branch;
}

// Return the places of a weight's transposed x and dy: copy_transposed, x before dy. If gelu is_alone, its transposed
// codes lie behind its codes instead.
static uint8_t *x_transposed(const Engine *engine, TensorKind w, int l) {
    const EngineConfig *c = &engine->config;
    const size_t wide = (size_t)c->micro_batch * c->seq_len * 4 * c->model->config.channels;
    if (w == FCPROJ_W && is_alone(engine, FP8_GELU, l)) return (uint8_t *)engine->block[l].gelu + wide;
    return engine->copy_transposed;
}
static uint8_t *dy_transposed(const Engine *engine, TensorKind w) {
    const EngineConfig *c = &engine->config;
    return engine->copy_transposed + (size_t)c->micro_batch * c->seq_len * model_tensor(c->model, w, 0)->rows;
}

// True if the product that writes the codes of s also writes them transposed.
static bool is_transposed(const Engine *engine, Fp8Site s, int l) {
    return (s == FP8_GELU || s == FP8_DFC) && is_alone(engine, s, l);
}

static uint8_t *weight_codes(const Engine *engine, int i, int l, bool transposed) {
    const size_t C = engine->config.model->config.channels, block = engine->config.shard_weights ? 0 : l;
    const int L = engine->config.model->config.layers;
    if (l == L) return engine->copy_weight + (engine->config.shard_weights ? 1 : L) * 2 * matrix_at[4] * C * C; // wte
    return engine->copy_weight + (matrix_at[i] + (2 * block + transposed) * matrix_at[4]) * C * C;
}

// Returns the part of copy_low_weight for x of site s: qkv's (3C, FP8_GROUPS), or fcproj's (C, FP8_GROUPS).
static uint8_t *low_weight(const Engine *engine, Fp8Site s, int l) {
    const size_t C = engine->config.model->config.channels, block = engine->config.shard_weights ? 0 : l;
    return engine->copy_low_weight + (4 * block + (s == FP8_LN1 ? 0 : 3)) * C * FP8_GROUPS;
}

Fp8Copy fp8_copy_of(const Engine *engine, bool fp8, Fp8Site s, int l) {
    if (!fp8) return {};
    const bool codes = rounds(engine, s, l);
    const int group = codes ? fp8_group_length(engine->exponent + l * FP8_ENTRIES, s) : 0;
    const int width = (s == FP8_GELU ? 4 : 1) * engine->config.model->config.channels;
    const int channels = l * FP8_ENTRIES + fp8_channels_at(s);
    float *amax = stats_amax(engine->stats, &engine->config);
    uint8_t *transposed = s == FP8_GELU ? x_transposed(engine, FCPROJ_W, l) : dy_transposed(engine, FC_W);
    return {codes ? site_codes(engine, s, l) : NULL,
            codes ? ldexpf(1, exponent_of(engine, s, l)) : 1,
            amax + l * FP8_ENTRIES + s,
            codes && is_alone(engine, s, l),
            is_transposed(engine, s, l) ? transposed : NULL,
            engine->config.seq_len,
            group,
            group ? fp8_group_count(group, width) : 0,
            width,
            engine->copy_low,
            engine->exponent_there + channels,
            amax + channels};
}

void fp8_factors(const Engine *engine, bool fp8, Linear *linear, Fp8Site s, int l) {
    const int i = weight_of(s);
    if (!fp8 || !rounds(engine, s, l)) return;
    linear->x8 = site_codes(engine, s, l), linear->weight8 = weight_codes(engine, i, l, s < FP8_DFCPROJ);
    linear->scale = ldexpf(1, -exponent_of(engine, s, l) - exponent_of(engine, FP8_QKV_WEIGHT + i, l));
    linear->groups = fp8_copy_of(engine, fp8, s, l).groups;
    linear->x_low = engine->copy_low, linear->weight_low = low_weight(engine, s, l);
}

// Returns the copy of weight i of block l.
static Fp8Copy weight_copy(const Engine *engine, int i, int l) {
    const int site = FP8_QKV_WEIGHT + i, k = exponent_of(engine, site, l);
    return {k == FP8_UNSET ? NULL : weight_codes(engine, i, l, false), ldexpf(1, k),
            stats_amax(engine->stats, &engine->config) + l * FP8_ENTRIES + site};
}

int fp8_copy_weights(Engine *engine, bool fp8, int l, Error *e) {
    const EngineConfig *c = &engine->config;
    const Model *model = c->model;
    const auto weight = [&](const Tensor *t) { return engine->weight + shard_weight_place(c, t->offset); };
    if (!fp8 || (c->shard_weights ? l == engine->copied : l <= engine->copied)) return 0;
    engine->copied = l;
    if (l == model->config.layers)
        return fp8_cast(weight_copy(engine, matrix_index(FC_W), l), weight(model_tensor(model, WTE, 0)),
                        model->vocab_padded * model->config.channels, engine->stream, e);
    for (int i = 0; i < 4; i++) {
        const Tensor *t = model_tensor(model, matrices[i], l);
        const Fp8Site x = fp8_x_site(matrices[i]);
        TRY(fp8_cast_transposed(weight_codes(engine, i, l, true), weight_copy(engine, i, l), weight(t), 1, (int)t->rows,
                                (int)t->columns, {}, NULL, engine->stream, e));
        TRY(fp8_low_columns(low_weight(engine, x, l), fp8_copy_of(engine, fp8, x, l), weight_codes(engine, i, l, true),
                            (int)t->columns, engine->stream, e));
    }
    return 0;
}

int fp8_copy_dqkv(Engine *engine, const real *dqkv, const ColumnGradient &bias, int l, int B, int T, Error *e) {
    return fp8_cast_transposed(dy_transposed(engine, QKV_W), fp8_copy_of(engine, true, FP8_DQKV, l), dqkv, B, T,
                               3 * engine->config.model->config.channels, bias, &engine->columns, engine->stream, e);
}

int fp8_dweight(Engine *engine, WeightGradient g, const real *x, TensorKind w, int l, WeightGradientShape s, Error *e) {
    const Fp8Site x_site = fp8_x_site(w), dy_site = fp8_dy_site(w);
    const int k = exponent_of(engine, x_site, l);
    uint8_t *x8 = x_transposed(engine, w, l), *dy8 = dy_transposed(engine, w);
    const bool x_done = is_transposed(engine, x_site, l), dy_done = w == QKV_W || is_transposed(engine, dy_site, l);
    if (!x_done && is_alone(engine, x_site, l))
        TRY(fp8_transpose(x8, site_codes(engine, x_site, l), s.B, s.T, s.in, engine->stream, e));
    else if (!x_done)
        TRY(fp8_cast_transposed(x8, {NULL, ldexpf(1, k)}, x, s.B, s.T, s.in, {}, NULL, engine->stream, e));
    if (!dy_done) TRY(fp8_transpose(dy8, site_codes(engine, dy_site, l), s.B, s.T, s.out, engine->stream, e));
    g.scale = ldexpf(1, -k - exponent_of(engine, dy_site, l)), s.e4m3 = true;
    return weight_gradient(g, x8, dy8, s, engine->pairs, engine->scratch, engine->stream, e);
}
