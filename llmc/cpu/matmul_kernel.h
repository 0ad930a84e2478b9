// matmul_kernel: the interface between matmul.c and its kernels. A kernel packs and multiplies panels of A and B.
#pragma once

#include "cpu/matmul.h"

enum { CACHE_LINE = 64 };

// Memory to prefetch while a tile is computed, a few cache lines at a time. More at once would delay the tile's loads,
// since an Emerald Rapids has at most 16 lines in flight, each for 100 ns.
typedef struct {
    const char *run;             // the present run of `length` bytes; runs lie `stride` bytes apart
    size_t byte, length, stride; // byte: the next line's offset in the run
    size_t lines;                // lines left to prefetch
} Ahead;

static inline __attribute__((always_inline)) void prefetch_ahead(Ahead *ahead, size_t lines) {
    for (; lines > 0 && ahead->lines > 0; lines--, ahead->lines--) {
        __builtin_prefetch(ahead->run + ahead->byte);
        ahead->byte += CACHE_LINE;
        if (ahead->byte >= ahead->length) ahead->byte = 0, ahead->run += ahead->stride;
    }
}

// C (M,N) = A B; accumulate: C += A B. Element (i, k) of A is a[i * a_row + k * a_column], element (k, j) of B is
// b[k * b_row + j * b_column]. Each operand has one stride of 1.
typedef struct {
    const MatmulKernel *kernel;
    size_t M, N, K;
    const void *a;
    size_t a_row, a_column;
    const void *b;
    size_t b_row, b_column;
    void *c;
    const void *bias;   // (N), added to every row; or NULL
    float *column_sums; // (N), sums of B over k (b_column must be 1); or NULL
    bool accumulate;    // adds to C and column_sums
    bool c_float;       // C is fp32, whatever the type of the values
    bool stream;        // C is written past the caches
} MatmulProduct;

typedef struct {
    size_t n, columns; // columns [n, n + columns) of B and C
    size_t k, depth;   // [k, k + depth) in A and B
    size_t padded;     // depth rounded up to the kernel's depth_unit; panels of bf16 end in zeros
    size_t i, rows;    // rows [i, i + rows) of A and C
    char *panels;      // the packed rows of A, panel_bytes for each panel
    size_t panel_bytes;
    float *partial; // (M, columns) sums over earlier blocks of k, if C cannot hold them
} MatmulBlock;

enum { BF16_STEP = 32, BF16_COLUMNS = 32, BF16_ROWS = 12, BF16_AMX_ROWS = 32 };

// A thread's state while it computes the tiles of one panel of B, one after the other.
typedef struct {
    const MatmulProduct *product;
    const MatmulBlock *block;
    size_t j;                 // the panel's first column
    Ahead ahead;              // what to prefetch during the present tile
    size_t last_i, last_rows; // bf16: the last tile, written while the next one is computed; last_rows 0: no tile
    float sums[BF16_AMX_ROWS * BF16_COLUMNS] __attribute__((aligned(CACHE_LINE))); // the last tile's values
} MatmulTiles;

enum { MATMUL_PANEL_BYTES = 48 << 10 }; // largest panel of A or B

// Packs rows or columns [first, first + count) of an operand, for the block's k.
typedef void MatmulPack(void *panel, const MatmulProduct *, const MatmulBlock *, size_t first, size_t count);

struct MatmulKernel {
    const char *name;
    Dtype type;
    size_t rows, columns;           // size of a tile of C
    size_t block_depth, depth_unit; // longest block of k; depth_unit divides all lengths but the last
    MatmulPack *pack_a, *pack_b;    // pack rows of A, columns of B
    void (*tile)(MatmulTiles *, const void *a, const void *b, size_t i); // computes C's tile at row i
    void (*finish)(MatmulTiles *); // writes the last tile; NULL: `tile` writes every tile itself
    // bf16: computes tiles->sums (rows, 32) = A B from packed panels, over pairs of k in ascending order. Writes the
    // last tile before it overwrites that tile's sums. A has `count` rows; later rows of the sums are arbitrary.
    // pairs: a multiple of BF16_STEP / 2, not 0.
    //   a: (pairs, 12, 2); for AMX (pairs / 16, 32 rows, 32)      b: (pairs, 32, 2)
    void (*multiply)(MatmulTiles *tiles, const uint16_t *a, const uint16_t *b, size_t pairs, size_t count);
    bool (*available)(void); // bf16: true if this machine has the instructions
};

// matmul_bf16: the bf16 kernels of this architecture, fastest first. A kernel without a name ends the list.
extern const MatmulKernel matmul_fp32, matmul_bf16[];
