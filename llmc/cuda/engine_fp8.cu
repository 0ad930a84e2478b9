// engine_fp8: the e4m3 copies of a block's factors (engine.cuh, math/fp8.h), their sites, exponents and places.
#include "cuda/engine.cuh"
#include "cuda/fp8.cuh"
#include "cuda/linear_sm90.cuh"
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

static int exponent_of(const Engine *engine, int site, int l) { return engine->exponent[l * FP8_SITES + site]; }

// True if the product of a site of activations and its weight rounds both.
static bool rounds(const Engine *engine, Fp8Site s, int l) {
    return exponent_of(engine, s, l) != FP8_UNSET && exponent_of(engine, FP8_QKV_WEIGHT + weight_of(s), l) != FP8_UNSET;
}

static uint8_t *site_codes(const Engine *engine, Fp8Site s) {
    if (s == FP8_GELU || s == FP8_DFC || s == FP8_DQKV) return engine->copy_wide;
    return s < FP8_DFCPROJ ? engine->copy_x : engine->copy_branch;
}
static uint8_t *weight_codes(const Engine *engine, int i, int l, bool transposed) {
    const size_t C = engine->config.model->config.channels, block = engine->config.shard_weights ? 0 : l;
    return engine->copy_weight + (matrix_at[i] + (2 * block + transposed) * matrix_at[4]) * C * C;
}

Fp8Copy fp8_copy_of(const Engine *engine, bool fp8, Fp8Site s, int l) {
    if (!fp8) return {};
    const bool codes = rounds(engine, s, l);
    return {codes ? site_codes(engine, s) : NULL, codes ? ldexpf(1, exponent_of(engine, s, l)) : 1,
            stats_amax(engine->stats, &engine->config) + l * FP8_SITES + s};
}

void fp8_factors(const Engine *engine, bool fp8, Linear *linear, Fp8Site s, int l) {
    const int i = weight_of(s);
    if (!fp8 || !rounds(engine, s, l)) return;
    linear->x8 = site_codes(engine, s), linear->weight8 = weight_codes(engine, i, l, s < FP8_DFCPROJ);
    linear->scale = ldexpf(1, -exponent_of(engine, s, l) - exponent_of(engine, FP8_QKV_WEIGHT + i, l));
}

int fp8_copy_weights(Engine *engine, bool fp8, int l, Error *e) {
    Fp8Weights copies;
    if (!fp8 || (engine->config.shard_weights ? l == engine->copied : l <= engine->copied)) return 0;
    for (int i = 0; i < 4; i++) {
        const Tensor *t = model_tensor(engine->config.model, matrices[i], l);
        const int site = FP8_QKV_WEIGHT + i, k = exponent_of(engine, site, l);
        const Fp8Copy copy = {k == FP8_UNSET ? NULL : weight_codes(engine, i, l, false), ldexpf(1, k),
                              stats_amax(engine->stats, &engine->config) + l * FP8_SITES + site};
        copies.of[i] = {engine->weight + shard_weight_place(&engine->config, t->offset), (int)t->rows, (int)t->columns,
                        copy, weight_codes(engine, i, l, true)};
    }
    engine->copied = l;
    return fp8_weights(copies, engine->stream, e);
}
