// matmul_kernel: the interface of matmul.c to its kernels, which pack panels of A and B and multiply two of them.
#pragma once

#include "cpu/bf16_tiles.h"
#include "cpu/matmul.h"

// C (M,N) = A B, or += with accumulate. Element (i, k) of A is a[i * a_row + k * a_column], element (k, j) of B is
// b[k * b_row + j * b_column]. One of an operand's two strides is 1.
typedef struct {
    const MatmulKernel *kernel;
    size_t M, N, K;
    const void *a;
    size_t a_row, a_column;
    const void *b;
    size_t b_row, b_column;
    void *c;
    const void *bias;   // (N), added to every row; or NULL
    float *column_sums; // (N), of B over k; or NULL. b_column must then be 1
    bool accumulate;    // for column_sums too
    bool c_float;       // C is fp32 whatever the values are
    bool stream;        // C is written past the caches
} MatmulProduct;

typedef struct {
    size_t n, columns; // of B and C: [n, n + columns)
    size_t k, depth;   // of A and B: [k, k + depth)
    size_t padded;     // depth, with the zeros that fill the kernel's last step
    size_t i, rows;    // of A and C: [i, i + rows)
    char *panels;      // A packed
    float *partial;    // (M, columns) sums over the blocks of k so far, where C cannot hold them
} MatmulBlock;

// A tile whose sums are complete, but not written yet.
typedef struct {
    const MatmulProduct *product;
    const MatmulBlock *block;
    size_t i, j, rows; // rows 0: no tile
} MatmulTile;

// A thread's tiles of one panel of B, one after the other.
typedef struct {
    Ahead ahead;     // the present tile's share
    MatmulTile last; // AMX: the tile that is written while the next one is computed
    float sums[BF16_AMX_ROWS * BF16_COLUMNS] __attribute__((aligned(CACHE_LINE))); // bf16
} MatmulTiles;

enum { MATMUL_PANEL_BYTES = 48 << 10 }; // largest panel of A or B

struct MatmulKernel {
    const char *name;
    Dtype type;
    size_t rows, columns;           // of a tile of C
    size_t step;                    // of k: panels are padded with zeros to a multiple
    size_t block_depth, depth_unit; // length of a block of k: at most, a multiple of
    void (*pack_a)(void *panel, const MatmulProduct *, const MatmulBlock *, size_t i,
                   size_t count); // rows [i, i + count) of A
    void (*pack_b)(void *panel, const MatmulProduct *, const MatmulBlock *, size_t j,
                   size_t count); // columns [j, j + count) of B
    void (*tile)(MatmulTiles *, const MatmulProduct *, const MatmulBlock *, const void *a, const void *b, size_t i,
                 size_t j);        // C's tile at (i, j)
    void (*finish)(MatmulTiles *); // writes the last tile; NULL: every tile is written at once
    Bf16Tile *bf16_tile;           // bf16 alone
    Bf16TileBetween *bf16_between; // AMX alone
    bool (*available)(void);       // true if this machine has the instructions; NULL: always
};

// bf16: the kernels of this architecture, the fastest first. The last is plain C, an oracle for tests.
#if defined(BF16_X86)
enum { MATMUL_BF16_KERNELS = 3 };
#elif defined(__aarch64__)
enum { MATMUL_BF16_KERNELS = 2 };
#else
enum { MATMUL_BF16_KERNELS = 1 };
#endif
extern const MatmulKernel matmul_fp32, matmul_bf16[MATMUL_BF16_KERNELS];
