// value: an element of the CPU engine's weights or activations in memory, either fp32 or bf16 (fp32's upper half). As
// in the CUDA engine, kernels load floats, compute in fp32, and round once, to nearest even, when they store.
//
// Functions receive arrays of values as void pointers with a type; an index counts elements. BY_TYPE compiles a
// function for each type, so the type is a constant in its loops.
#pragma once

#include "base/float16.h"
#include "cpu/vector_math.h"
#include "model/modes.h"

static inline size_t value_bytes(Dtype type) { return type == DTYPE_BF16 ? sizeof(uint16_t) : sizeof(float); }

static inline void *value_at(const void *values, size_t i, Dtype type) {
    return (char *)(uintptr_t)values + i * value_bytes(type);
}

// Runs `body` with the constant TYPE, the value of `type`.
#define BY_TYPE(type, body)                                                                                            \
    do {                                                                                                               \
        if ((type) == DTYPE_BF16) {                                                                                    \
            const Dtype TYPE = DTYPE_BF16;                                                                             \
            body;                                                                                                      \
        } else {                                                                                                       \
            const Dtype TYPE = DTYPE_FP32;                                                                             \
            body;                                                                                                      \
        }                                                                                                              \
    } while (0)

VECTOR_INLINE float value_get(const void *p, size_t i, const Dtype type) {
    return type == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}
VECTOR_INLINE void value_set(void *p, size_t i, float x, const Dtype type) {
    if (type == DTYPE_BF16) ((uint16_t *)p)[i] = f32_to_bf16(x);
    else ((float *)p)[i] = x;
}

typedef uint16_t Bf16Vec __attribute__((vector_size(VEC * 2), may_alias, aligned(2)));

VECTOR_INLINE Bf16Vec bf16_round(Vec v) {
    VecBits bits = (VecBits)v, rounded = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    return __builtin_convertvector((VecBits)vec_select(v == v, (Vec)rounded, (Vec)quiet) >> 16, Bf16Vec);
}

// Load and store VEC values from element i on.
VECTOR_INLINE Vec value_load(const void *p, size_t i, const Dtype type) {
    if (type != DTYPE_BF16) return vec_load((const float *)p + i);
    return (Vec)(__builtin_convertvector(*(const Bf16Vec *)((const uint16_t *)p + i), VecBits) << 16);
}
VECTOR_INLINE void value_store(void *p, size_t i, Vec v, const Dtype type) {
    if (type == DTYPE_BF16) *(Bf16Vec *)((uint16_t *)p + i) = bf16_round(v);
    else vec_store((float *)p + i, v);
}

// to[at + i] = scale * from[from_at + i], i < n, between two types
VECTOR_INLINE void scale_values(void *to, size_t at, const Dtype to_type, const void *from, size_t from_at,
                                const Dtype from_type, size_t n, float scale) {
#pragma omp simd
    for (size_t i = 0; i < n; i++) value_set(to, at + i, scale * value_get(from, from_at + i, from_type), to_type);
}
