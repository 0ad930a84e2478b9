// dropout: masks of math/dropout.h in kernels.
#pragma once

#include "cuda/cuda_common.cuh"
#include "math/dropout.h"

// Kernel parameters computed on the host.
struct DropoutConstants {
    uint32_t key[DROPOUT_ROUNDS][2]; // keys of Philox's rounds
    unsigned below;                  // Dropout.below in both halves
    float scale;                     // factor of kept elements
};
static inline DropoutConstants dropout_constants(Dropout d) {
    DropoutConstants c = {{}, d.below << 16 | d.below, dropout_scale(d)};
    for (uint32_t i = 0; i < DROPOUT_ROUNDS; i++) {
        c.key[i][0] = (uint32_t)d.seed + i * 0x9E3779B9u; // as in rng_rounds
        c.key[i][1] = (uint32_t)(d.seed >> 32) + i * 0xBB67AE85u;
    }
    return c;
}

// Random blocks whose counters differ in the first word only. In the first two rounds, terms of the other words are
// computed once, so a block takes 12 products, not 14.
struct DropoutBlocks {
    const DropoutConstants &c;
    uint32_t first, second[3];

    __device__ DropoutBlocks(const DropoutConstants &c_, RngBlock counter) : c(c_) {
        counter.word[0] = 0;
        const RngBlock one = rng_round(counter, c.key[0][0], c.key[0][1]);
        const RngBlock two = rng_round({{one.word[0], one.word[1], 0, 0}}, c.key[1][0], c.key[1][1]);
        first = one.word[2], second[0] = two.word[0], second[1] = two.word[2], second[2] = two.word[3];
    }
    __device__ RngBlock block(uint32_t word) const {
        const RngBlock p = rng_round({{word, 0, 0, 0}}, 0, 0), q = rng_round({{0, 0, p.word[2] ^ first, 0}}, 0, 0);
        RngBlock x = {{q.word[0] ^ second[0], q.word[1], p.word[3] ^ second[1], second[2]}};
        UNROLL_FOR (int i = 2; i < DROPOUT_ROUNDS; i++) x = rng_round(x, c.key[i][0], c.key[i][1]);
        return x;
    }
};

// Dropout of a (B, T, C) tensor. dropout.below 0: nothing drops.
struct RowDropout {
    Dropout dropout; // dropout.example: number of example 0; example b has number dropout.example + b
    DropoutPlace place;
    int T;
    DropoutConstants constants;
};
static inline RowDropout row_dropout(Dropout dropout, DropoutPlace place, int T) {
    return {dropout, place, T, dropout_constants(dropout)};
}

// Returns a mask: 16 ones for each kept element, 16 zeros for each dropped one. Compares bits 0 to 14 of each half as
// fp16 numbers >= 0: such numbers are in the order of their bits read as integers.
__device__ static inline unsigned dropout_kept(const DropoutConstants &c, unsigned word) {
    unsigned kept;
    asm("{\n.reg .b32 bits;\nabs.f16x2 bits, %1;\nset.geu.u32.f16x2 %0, bits, %2;\n}"
        : "=r"(kept)
        : "r"(word), "r"(c.below));
    return kept;
}

// Zeroes x if the mask's low half is 0, y if its high half is 0. As fp16, 16 ones are a NaN.
__device__ static inline void mask_clear(float &x, float &y, unsigned mask) {
    asm("{\n.reg .pred p, q;\nsetp.nan.f16x2 p|q, %2, %2;\n"
        "selp.f32 %0, %0, 0f00000000, p;\nselp.f32 %1, %1, 0f00000000, q;\n}"
        : "+f"(x), "+f"(y)
        : "r"(mask));
}

// Zeroes x, y if their half of the random word drops them.
__device__ static inline void dropout_clear(const DropoutConstants &c, float &x, float &y, unsigned word) {
    mask_clear(x, y, dropout_kept(c, word));
}

// Multiplies x by dropout's factors. x: columns c to c + W - 1 of row t of example b. W: 1, or 8 with c % 8 == 0.
template <int W>
__device__ static inline void dropout_multiply(float (&x)[W], const RowDropout &r, int b, int t, int c) {
    const Dropout d = dropout_at(r.dropout, r.dropout.example + b, r.dropout.layer);
    if constexpr (W == 1) x[0] *= dropout_factor(d, r.place, 0, t, c);
    else {
        static_assert(W == 8, "a block");
        const RngBlock counter = dropout_counter(d, r.place, 0, t, c / 8);
        const RngBlock block = DropoutBlocks(r.constants, counter).block(counter.word[0]);
        UNROLL_FOR (int i = 0; i < 4; i++) {
            dropout_clear(r.constants, x[2 * i], x[2 * i + 1], block.word[i]);
            x[2 * i] *= r.constants.scale, x[2 * i + 1] *= r.constants.scale;
        }
    }
}
