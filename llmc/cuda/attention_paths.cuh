// attention_paths: the two implementations of attention.cuh, and what they share.
#pragma once

#include "cuda/attention.cuh"
#include "cuda/sm90.cuh"

#include <float.h>
#include <math.h>

// Softmax runs in base 2: exp(x) = exp2(x log2 e).
constexpr float LN2 = 0.6931471805599453f;

// Workspace of the backward, filled by the backward's first kernel. Padding (rows from T on) holds lse2 = infinity and
// delta = 0, so P = exp2(S - lse2) is 0 there.
struct AttentionRows {
    float *lse2;  // (B, NH, padded T) lse * log2(e)
    float *delta; // (B, NH, padded T) rowsum(dO * O); in attention_sm90, divided by dropout's scale
};

// Any GPU, any D <= 128: mma.sync in 16 bits, plain fp32 (no TF32) in the FP32 build.
int attention_tiled_forward(const Attention &a, cudaStream_t stream, Error *e);
int attention_tiled_backward(const Attention &a, AttentionRows rows, cudaStream_t stream, Error *e);

// Hopper (sm90_runs), D = 64 or 128: wgmma and the copy engine.
int attention_sm90_forward(const Attention &a, cudaStream_t stream, Error *e);
int attention_sm90_backward(const Attention &a, AttentionRows rows, cudaStream_t stream, Error *e);

static inline float attention_scale(AttentionShape s) { return 1.0f / sqrtf((float)s.D); }

// first_key: the first key that a query of example b sees; last_query: the last query that sees a key. Both ignore the
// causal mask. Rows beyond T are treated as row T - 1.
__device__ static inline int first_key(const AttentionMasks &masks, AttentionShape s, int b, int query) {
    return masks.first ? masks.first[(size_t)b * s.T + min(query, s.T - 1)] : 0;
}
__device__ static inline int last_query(const AttentionMasks &masks, AttentionShape s, int b, int key) {
    return masks.last ? masks.last[(size_t)b * s.T + min(key, s.T - 1)] : s.T - 1;
}

// Dropout of one head of one example.
struct HeadDropout {
    Dropout dropout;
    int head; // the head's index in the whole model
    DropoutBlocks blocks;

    __device__ HeadDropout(const AttentionMasks &masks, int b, int head_)
        : dropout(dropout_at(masks.dropout, masks.dropout.example + b, masks.dropout.layer)),
          head(masks.first_head + head_),
          blocks(masks.constants, dropout_counter(dropout, DROPOUT_PROBABILITY, head, 0, 0)) {}
};

// Returns element i's bit in a lane's mask of kept elements: bit i / 2 of 16-bit half i % 2. The 64 halves of a warp's
// masks form an 8 x 8 matrix, which movmatrix can transpose.
__device__ static inline unsigned kept_bit(int i) { return 1u << (i % 2 * 16 + i / 2); }

constexpr int VECTOR = 16 / sizeof(real); // elements of a 16-byte access

__device__ static inline float dot_vectors(uint4 a, uint4 b) {
    real x[VECTOR], y[VECTOR];
    *(uint4 *)x = a;
    *(uint4 *)y = b;
    float sum = 0.0f;
    UNROLL_FOR (int i = 0; i < VECTOR; i++) sum += (float)x[i] * (float)y[i];
    return sum;
}

template <int N> __device__ static inline void clear(float (&c)[N]) {
    UNROLL_FOR (int i = 0; i < N; i++) c[i] = 0.0f;
}

// Layout of accumulators, for mma.m16n8k16, wgmma and the fp32 loops alike. A warp owns a matrix (16, N). A lane's
// element i lies in row lane / 4 + fragment_row(i) and column fragment_column(i).

__device__ static inline int fragment_row(int i) { return i / 2 % 2 * 8; }
// The remainder is unsigned: a signed one costs instructions, and makes attention_tiled's dkdv_kernel spill.
__device__ static inline int fragment_column(int i) { return i / 4 * 8 + (int)(threadIdx.x % 4) * 2 + i % 2; }

// Index of a lane's k-th element in its first (i = 0) or second (i = 1) row.
__device__ static inline int fragment_element(int i, int k) { return k / 2 * 4 + 2 * i + k % 2; }

// Returns the random block (math/dropout.h) for a lane's elements of a 16 x 16 tile. Elements 2 w, 2 w + 1 use word w.
__device__ static inline RngBlock lane_block(const HeadDropout &h, unsigned query0, unsigned key0) {
    unsigned lane = threadIdx.x % 32;
    return h.blocks.block(((lane / 4) << 16 | lane % 4) + ((query0 / 2) << 16) + key0 / 4);
}

// Returns the mask (kept_bit) of a lane's E elements in a tile of 16 rows and 2 E columns at (row, column). Rows are
// queries or, TRANSPOSED, keys.
template <int E, bool TRANSPOSED>
__device__ static inline unsigned lane_kept(const HeadDropout &h, int row, int column) {
    unsigned kept = 0, transposed;
    UNROLL_FOR (int k = 0; k < E / 8; k++) {
        const RngBlock block = TRANSPOSED ? lane_block(h, column + 16 * k, row) : lane_block(h, row, column + 16 * k);
        UNROLL_FOR (int w = 0; w < 4; w++)
            kept |= dropout_kept(h.blocks.c, block.word[w]) & (kept_bit(0) | kept_bit(1))
                                                                  << (4 * k + (TRANSPOSED ? w % 2 * 2 + w / 2 : w));
    }
    if (!TRANSPOSED) return kept;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(kept));
    return transposed;
}

// Kernel variants: the causal mask only (CAUSAL); also documents; also dropout, with or without documents.
// attention_tiled has no DOCUMENTS: its DROPPED runs without dropout, too.
enum Masks { CAUSAL, DOCUMENTS, DROPPED };

static inline Masks masks_of(const AttentionMasks &masks) {
    return masks.dropout.below ? DROPPED : masks.first ? DOCUMENTS : CAUSAL;
}

// Masks of a warp's rows. A lane's rows i = 0, 1 are queries or, TRANSPOSED, keys.
template <Masks M, bool TRANSPOSED> struct WarpMasks {
    int limit[2]; // first key of a query; TRANSPOSED: last query of a key
    int all;      // first key that all rows of the warp see; TRANSPOSED: last query that sees all rows
    float factor; // dropout's scale of kept elements
    int warp_row;
    HeadDropout dropout;

    __device__ WarpMasks(const AttentionMasks &masks, AttentionShape s, int b, int head, int warp_row_)
        : factor(M == DROPPED ? masks.constants.scale : 1.0f), warp_row(warp_row_),
          dropout(masks, uniform(b), uniform(head) % s.NH) {
        int row = warp_row + threadIdx.x % 32 / 4;
        UNROLL_FOR (int i = 0; i < 2; i++)
            limit[i] = TRANSPOSED ? last_query(masks, s, b, row + 8 * i) : first_key(masks, s, b, row + 8 * i);
        all = TRANSPOSED ? last_query(masks, s, b, warp_row) : first_key(masks, s, b, warp_row + 15);
    }
    // Sets elements of other documents to `nothing`, in a tile of 2 N columns from `column` on.
    template <int N> __device__ void hide(float (&c)[N], int column, float nothing) const {
        if constexpr (M != CAUSAL) {
            if (TRANSPOSED ? column + 2 * N - 1 <= all : column >= all) return;
            UNROLL_FOR (int i = 0; i < N; i++) {
                int other = column + fragment_column(i), own = limit[i / 2 % 2];
                if (TRANSPOSED ? other > own : other < own) c[i] = nothing;
            }
        }
    }
    // Returns the mask (kept_bit) of a lane's E elements from `column` on; all ones without dropout.
    template <int E> __device__ unsigned kept(int column) const {
        return M == DROPPED && dropout.dropout.below ? lane_kept<E, TRANSPOSED>(dropout, warp_row, column) : ~0u;
    }
};

// Returns a mask for packed elements 2 i, 2 i + 1: 16 ones for each kept element, 16 zeros for each dropped one. The
// shift makes an element's bit the sign bit of a byte, which prmt replicates.
__device__ static inline unsigned kept_pair(unsigned kept, int i) {
    unsigned mask;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(kept << (7 - i % 8)), "r"(i < 8 ? 0xaa88 : 0xbb99));
    return mask;
}

// Return the maximum (row_max) or sum (row_sum) over the 4 neighbouring lanes that share a row.
__device__ static inline float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ static inline float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
