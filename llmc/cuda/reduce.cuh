// reduce: sums on the device. No result depends on which block runs first: every sum of floats is a fixed tree.
//
// Column gradients (biases, gamma, beta) are sums over the rows of a (B, T, C) tensor. Stage one cuts the rows into
// equal runs, one a block, and writes a partial row sum for every run k and example b with rows in common, into slot
// k + b (along the rows k, b or both grow, so slots never collide). Stage two adds an example's slots, squares, and
// adds the examples. So per-example norms need no second pass over the tensor, and the gradient has the same bits with
// and without them.
#pragma once

#include "cuda/cuda_common.cuh"

// Where one column gradient goes. sum == NULL: the whole set is not wanted.
typedef struct {
    float *sum;      // (C) += sum over all rows (first: =)
    double *squares; // (1) += sum over examples of |g_b|^2, g_b (C) the sum over the example's rows; or NULL
    bool first;
} ColumnGradient;

// How the rows are cut: a function of the shape alone, so that bits do not depend on the GPU.
typedef struct {
    int rows;           // B * T
    int T;              // rows of one example
    int rows_per_block; // of one run
    int blocks;         // runs
    int slots;          // blocks + B
} ColumnSplit;

enum { COLUMN_SETS_MAX = 3, COLUMN_JOBS_MAX = 4 };
ColumnSplit column_split(int B, int T, int target_blocks);

// Column gradients, at most COLUMN_JOBS_MAX, that await stage two. column_begin gives a stage one the place for its
// partials, (slots, sets, C) fp32. column_finish runs stage two for all of them in two launches, and empties the list. The
// sets of one job have the same C.
typedef struct {
    ColumnGradient of[COLUMN_SETS_MAX];
    ColumnSplit split;
    int sets, C;
    float *partials;
} ColumnJob;
struct ColumnJobs {
    void *memory; // column_bytes of all that the list may hold at a time, together
    size_t used = 0;
    int count = 0;
    ColumnJob job[COLUMN_JOBS_MAX] = {};
};
size_t column_bytes(ColumnSplit split, int sets, int C);
float *column_begin(ColumnJobs *jobs, const ColumnGradient *gradients, int sets, ColumnSplit split, int C);
int column_finish(ColumnJobs *jobs, cudaStream_t stream, Error *e);

// A tensor's place in a flat buffer, in elements. Tables are sorted by offset and do not overlap; gaps are skipped.
struct ReduceSegment {
    size_t offset, count;
};

// squares[s] = sum of x^2 over segment s. x (n) fp32, segments (S) in device memory, squares (S) in device memory.
// A NaN or infinity in a segment makes its sum one.
size_t reduce_squares_workspace_bytes(int S);
int reduce_squares(double *squares, const float *x, size_t n, const ReduceSegment *segments, int S, void *workspace,
                   cudaStream_t stream, Error *e);

// Per-example gradients in one pass: x (E, n) fp32 holds g_b of E examples.
//   gradient (n) += sum over b of x_b, in order
//   squares (1)  += sum over b of |x_b|^2
size_t reduce_examples_workspace_bytes(int E);
int reduce_examples(float *gradient, double *squares, const float *x, int E, size_t n, void *workspace,
                    cudaStream_t stream, Error *e);

// sum (1) += sum of x (n) fp32, by one block. For losses.
int reduce_sum(double *sum, const float *x, size_t n, cudaStream_t stream, Error *e);

// sum (n) += x (n) (first: =). X: float, double.
template <typename X> int reduce_add(X *sum, const X *x, size_t n, bool first, cudaStream_t stream, Error *e);

// *sum (device) += the hash (base/hash.h) of n elements, the first of which has the given place in the sum. Integers: the
// order in which blocks add changes nothing. X: float, __nv_bfloat16, __half.
template <typename X>
int reduce_hash(uint64_t *sum, const X *x, size_t n, uint64_t place, cudaStream_t stream, Error *e);

// The last step of every per-example norm. partials (sets, B, G) fp64: parts of |g_b|^2. For every set s
// *of[s] += sum over b and g of its partials, where of[s] is not NULL.
typedef struct {
    double *of[COLUMN_SETS_MAX];
} ExampleSums;
int reduce_example_partials(ExampleSums sums, const double *partials, int sets, int B, int G, cudaStream_t stream,
                            Error *e);
