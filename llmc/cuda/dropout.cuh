// dropout: the masks of math/dropout.h in kernels.
#pragma once

#include "cuda/cuda_common.cuh"
#include "math/dropout.h"

// Of the rows of a (B, T, C) tensor. Without dropout.below nothing drops.
struct RowDropout {
    Dropout dropout; // of the layer and of the first example
    DropoutPlace place;
    int T;
};

// All ones in each half of a word of a block whose element is kept. Bits 0 to 14 of the halves are compared as numbers of
// fp16: they have the order of the bits, and what is no number is not less.
__device__ static inline unsigned dropout_kept(unsigned word, unsigned below) {
    unsigned kept;
    asm("{\n.reg .b32 bits;\nabs.f16x2 bits, %1;\nset.geu.u32.f16x2 %0, bits, %2;\n}"
        : "=r"(kept)
        : "r"(word), "r"(below << 16 | below));
    return kept;
}

// The two elements of a word: 0 where one drops.
__device__ static inline void dropout_clear(float &x, float &y, unsigned word, unsigned below) {
    asm("{\n.reg .b32 bits;\n.reg .pred p, q;\nabs.f16x2 bits, %2;\nsetp.geu.f16x2 p|q, bits, %3;\n"
        "selp.f32 %0, %0, 0f00000000, p;\nselp.f32 %1, %1, 0f00000000, q;\n}"
        : "+f"(x), "+f"(y)
        : "r"(word), "r"(below << 16 | below));
}

// The same of example b.
__device__ static inline RowDropout dropout_of_example(RowDropout r, int b) {
    r.dropout.example += b;
    return r;
}

// x = W elements of row t of r's example, from column c on, times their factors. W: 1, or 8 with c % 8 == 0.
template <int W> __device__ static inline void dropout_multiply(float (&x)[W], const RowDropout &r, int t, int c) {
    const float scale = dropout_scale(r.dropout);
    if constexpr (W == 1) x[0] *= dropout_factor(r.dropout, r.place, 0, t, c);
    else {
        static_assert(W == 8, "a block");
        const RngBlock block = dropout_block(r.dropout, r.place, 0, t, c / 8);
        UNROLL_FOR (int i = 0; i < 4; i++) {
            dropout_clear(x[2 * i], x[2 * i + 1], block.word[i], r.dropout.below);
            x[2 * i] *= scale, x[2 * i + 1] *= scale;
        }
    }
}
