// attention_sm90: what Hopper's forward and backward share: tiles of heads, products, the drawing of tiles.
#pragma once

#include "cuda/attention_paths.cuh"
#include "cuda/vec.cuh"

enum { BOX_ROWS = 64, STORE_ROWS = 16 };

// Starts a copy of (ROWS, D) of one head, from row `row` of example b, into a tile. column: the head's first column.
template <int ROWS, int D>
__device__ static inline void tile_in(char *tile, const CUtensorMap *map, uint64_t *barrier, int column, int row,
                                      int b) {
    UNROLL_FOR (int panel = 0; panel < D / PANEL; panel++)
        UNROLL_FOR (int r = 0; r < ROWS; r += BOX_ROWS)
            copy_box_in(tile + (panel * ROWS + r) * PANEL_ROW_BYTES, map, barrier, column + panel * PANEL, row + r, b);
}

template <int ROWS, int D> constexpr int TILE_BYTES = ROWS *D *(int)sizeof(real);

// Products. A warpgroup computes 64 rows, each warp 16. Accumulators: see fragment_row, fragment_column.

// c (64, N) = a b + (accumulate ? c : 0), a (64, 16) in registers, b in shared memory. B_ALONG: the summed dimension
// runs along the rows of b; otherwise down the columns of b.
#ifdef SM90_CODE
#    define SM90_WGMMA_LEFT(N, COUNT, A, B, ACCUMULATE, B_DOWN)                                                        \
        template <bool B_ALONG>                                                                                        \
        __device__ static inline void wgmma(float(&c)[COUNT], const unsigned *a, uint64_t b, int accumulate) {         \
            SM90_ISSUE(N, COUNT, ACCUMULATE, "k16.f32." REAL_PTX "." REAL_PTX, "{" A "}, " B ", p, 1, 1, " B_DOWN,     \
                       "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(!B_ALONG));            \
        }
SM90_WGMMA_LEFT(64, 32, "%32, %33, %34, %35", "%36", "%37", "%38")
SM90_WGMMA_LEFT(128, 64, "%64, %65, %66, %67", "%68", "%69", "%70")
#endif

// Left operand (64, D) of a product, in shared memory or in registers. At D = 64 two operands in shared memory would
// need all bandwidth of shared memory, 128 bytes per clock.
struct LeftShared {
    const char *tile;

    __device__ void load(const char *own_tile) { tile = own_tile; }
};
struct LeftRegisters {
    unsigned r[16]; // 4 per 16 columns

    __device__ void load(const char *own_tile) {
        int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
        UNROLL_FOR (int k = 0; k < 4; k++) {
            int piece = 2 * k + threadIdx.x % 32 / 16;
            unsigned address = shared_address(own_tile) + row * PANEL_ROW_BYTES + (piece ^ row % 8) * 16;
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(r[4 * k]), "=r"(r[4 * k + 1]), "=r"(r[4 * k + 2]), "=r"(r[4 * k + 3])
                         : "r"(address)
                         : "memory");
        }
    }
};

// Issues c (64, N) = a (64, D) b (N, D)^T as one group. b: a tile of N rows.
template <int D, int N> __device__ static inline void issue_abt(float (&c)[N / 2], LeftShared a, const char *b) {
    uint64_t a_operand = operand(a.tile, 0), b_operand = operand(b, 0); // panel_bytes 0: a wgmma reads one panel
    UNROLL_FOR (int k = 0; k < D / 16; k++)
        wgmma<true, true>(c, a_operand + step_along_rows<64>(k), b_operand + step_along_rows<N>(k), k > 0);
    wgmma_commit();
}

template <int D, int N>
__device__ static inline void issue_abt(float (&c)[N / 2], const LeftRegisters &a, const char *b) {
    static_assert(D == 64 && N == 64, "the one case in use");
    uint64_t b_operand = operand(b, 0);
    UNROLL_FOR (int k = 0; k < D / 16; k++) wgmma<true>(c, a.r + 4 * k, b_operand + step_along_rows<N>(k), k > 0);
    wgmma_commit();
}

// Issues c (64, D) += p (64, K) b (K, D) as one group. p: from pack_rows; b: a tile of K rows.
template <int D, int K>
__device__ static inline void issue_pb(float (&c)[D / 2], const unsigned (&p)[K / 4], const char *b) {
    uint64_t b_operand = operand(b, K * PANEL_ROW_BYTES);
    UNROLL_FOR (int k = 0; k < K / 16; k++) wgmma<false>(c, p + 4 * k, b_operand + step_down_columns(k), 1);
    wgmma_commit();
}

// Packs an accumulator as the left operand of the next product. The layouts agree (PTX ISA, "wgmma.m64k16 A fragment").
template <int N> __device__ static inline void pack_rows(unsigned (&p)[N / 2], const float (&c)[N]) {
    UNROLL_FOR (int i = 0; i < N / 2; i++) p[i] = pack(c[2 * i], c[2 * i + 1]);
}

// Writes a warp's 16 rows of an accumulator, times factor0 (rows 0 to 7) and factor1 (8 to 15), to one head from row
// `row` on. stage: the warp's shared memory (16, D). Skips rows beyond T. The copy may be in flight on return.
template <int D>
__device__ static inline void warp_rows_out(const CUtensorMap *map, char *stage, const float (&c)[D / 2], float factor0,
                                            float factor1, int column, int row, int b) {
    int lane = threadIdx.x % 32;
    if (lane == 0) copy_out_wait_read(); // until the previous copy has read `stage`
    __syncwarp();
    UNROLL_FOR (int n = 0; n < D / 8; n++) {
        char *piece = stage + n / 8 * STORE_ROWS * PANEL_ROW_BYTES + lane / 4 * PANEL_ROW_BYTES +
                      ((n % 8) ^ (lane / 4)) * 16 + lane % 4 * 4;
        *(unsigned *)piece = pack(c[4 * n] * factor0, c[4 * n + 1] * factor0);
        *(unsigned *)(piece + 8 * PANEL_ROW_BYTES) = pack(c[4 * n + 2] * factor1, c[4 * n + 3] * factor1);
    }
    fence_before_copies();
    __syncwarp();
    if (lane == 0) {
        UNROLL_FOR (int panel = 0; panel < D / PANEL; panel++)
            copy_box_out(map, stage + panel * STORE_ROWS * PANEL_ROW_BYTES, column + panel * PANEL, row, b);
        copy_out_commit();
    }
}

// One tile of rows of one head. tile < 0: no more work.
struct HeadTile {
    int tile, head, b, column; // column of the head in (NH, D)
};

// Draws the next tile. `workers` threads draw until no tile is left. A block starts late if NCCL holds its
// multiprocessor; other blocks then draw the tiles.
// - *ticket counts draws. Each worker's last draw finds no tile; the last such draw wraps the count to 0.
// - Heads are drawn in about equal lots of at most `at_once` heads (the number of multiprocessors), so that a head's
//   keys and values stay in L2 until its tiles are done.
// - Within a lot the last tiles of all heads come first. Under the causal mask these tiles of queries take longest.
__device__ static inline HeadTile work_draw(unsigned *ticket, int workers, int at_once, int tiles, AttentionShape s) {
    int lots = (s.heads() + at_once - 1) / at_once, lot_heads = (s.heads() + lots - 1) / lots;
    int item = (int)atomicInc(ticket, s.heads() * tiles + workers - 1);
    if (item >= s.heads() * tiles) return {-1, 0, 0, 0};
    int lot = item / (lot_heads * tiles), rest = item - lot * lot_heads * tiles;
    int heads = min(lot_heads, s.heads() - lot * lot_heads), head = lot * lot_heads + rest % heads;
    return {tiles - 1 - rest / heads, head, head / s.NH, head % s.NH * s.D};
}

// Number of tiles of KEYS keys that queries up to `last` see.
template <int KEYS> __device__ static inline int key_tiles(int last, int T) { return min(last, T - 1) / KEYS + 1; }

// Describes a (B, T, columns) tensor to the copy engine, in boxes of `rows` rows x one panel.
static inline int attention_sm90_map(CUtensorMap *map, const real *tensor, int columns, int rows, AttentionShape s,
                                     Error *e) {
    return copy_map(map, tensor, {REAL_MAP, {columns, s.T, s.B}, {PANEL, rows, 1}}, e);
}
