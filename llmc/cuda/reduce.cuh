// reduce: sums on the device. Every sum of floats is a fixed tree, so the order in which blocks run changes no bit.
//
// Column gradients (biases, gamma, beta) are sums over the rows of a (B, T, C) tensor, in two passes:
// 1. The kernel that reads the tensor cuts its rows into equal runs, one per block. Slot k + b gets the sum of the rows
//    that lie in both run k and example b. The next pair (k, b) has a larger k + b, so no slot is written twice.
//    LayerNorm's runs may interleave within an example.
// 2. column_finish adds an example's slots, squares the sum, and adds up the examples.
// The gradient has the same bits with and without norms.
#pragma once

#include "cuda/cuda_common.cuh"
#include "model/model.h"

// Output of one column gradient. sum NULL: no output.
typedef struct ColumnGradient {
    float *sum;      // (C) += sum over all rows, or = if `first`
    double *squares; // (1) += sum over examples b of |g_b|^2; g_b (C) is the sum over b's rows. Or NULL
    bool first;
    float *rows = NULL; // (B, C) = g_b of each example, `stride` elements apart; or NULL
    size_t stride = 0;
} ColumnGradient;

// How the rows are cut into runs. This depends on the shape only, not on the GPU.
typedef struct {
    int rows;           // B * T
    int T;              // rows per example
    int rows_per_block; // rows per run
    int blocks;         // number of runs
    int slots;          // blocks + B
} ColumnSplit;

enum { COLUMN_SETS_MAX = 3, COLUMN_JOBS_MAX = 4 };
ColumnSplit column_split(int B, int T, int target_blocks);

// Column gradients that await pass two. A job holds the sets of one kernel, all of one C. column_begin adds a job and
// returns memory for its partial sums, (slots, sets, C) fp32. column_finish runs pass two of all jobs and empties the
// list.
typedef struct {
    ColumnGradient of[COLUMN_SETS_MAX];
    ColumnSplit split;
    int sets, C;
    float *partials;
} ColumnJob;
struct ColumnJobs {
    void *memory; // room for column_bytes of each job
    size_t used = 0;
    int count = 0;
    ColumnJob job[COLUMN_JOBS_MAX] = {};
};
size_t column_bytes(ColumnSplit split, int sets, int C);
float *column_begin(ColumnJobs *jobs, const ColumnGradient *gradients, int sets, ColumnSplit split, int C);
int column_finish(ColumnJobs *jobs, cudaStream_t stream, Error *e);

// squares[s] = sum of x^2 over the part of segment s < S that lies in the range. Does not change squares[s] of segments
// outside. x: the range's first element, aligned to 16 bytes. segments: in device memory, ascending, without overlap.
// NaN and infinity propagate to their segment's sum.
size_t reduce_squares_workspace_bytes(int S);
int reduce_squares(double *squares, const float *x, Range range, const Range *segments, int S, void *workspace,
                   cudaStream_t stream, Error *e);

// One pass over the gradients of E examples: row b of x (E, n) fp32 is g_b.
//   gradient (n) += sum over b of g_b, in order
//   squares (1)  += sum over b of |g_b|^2
size_t reduce_examples_workspace_bytes(int E);
int reduce_examples(float *gradient, double *squares, const float *x, int E, size_t n, void *workspace,
                    cudaStream_t stream, Error *e);

// sums (rows) += row sums of x (rows, n), a block per row. For losses.
int reduce_sum(double *sums, const float *x, int rows, size_t n, cudaStream_t stream, Error *e);

// products (rows, others) = x x^T, x (rows, n), a block per element. others is `rows`, or 1: the diagonal alone.
int reduce_products(double *products, const float *x, int rows, int others, size_t n, cudaStream_t stream, Error *e);

// sum (n) += x (n), or = x if `first`. With `of`: sum[of[b]] (n) += x[b] (n) for b < rows.
int reduce_add(float *sum, const float *x, size_t n, bool first, cudaStream_t stream, Error *e, int rows = 1,
               const uint16_t *of = NULL);

// *sum += hash (base/hash.h) of n values of 2 or 4 bytes. place: index of the first value in the hashed array.
int reduce_hash(uint64_t *sum, const void *x, size_t value_bytes, size_t n, uint64_t place, cudaStream_t stream,
                Error *e);

// Last step of per-example norms: adds up partials (sets, B, G).
typedef struct {
    double *of[COLUMN_SETS_MAX]; // *of[s] += sum of set s over B and G; or NULL
    double *rows = NULL;         // (sets, B) += sums over G; or NULL
} ExampleSums;
int reduce_example_partials(ExampleSums sums, const double *partials, int sets, int B, int G, cudaStream_t stream,
                            Error *e);
