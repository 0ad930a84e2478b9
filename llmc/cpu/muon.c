#include "cpu/muon.h"

#include "cpu/layers.h"
#include "math/muon.h"

size_t muon_scratch(size_t count, size_t side) { return count + 2 * side * side; }

static void scale(float *x, float factor, size_t n) {
#pragma omp parallel for simd schedule(static) if (n > PARALLEL_FLOATS)
    for (size_t i = 0; i < n; i++) x[i] *= factor;
}

// poly (n, n) = a I + b gram + c gram^2.
static void polynomial(Matmul mm, float *poly, const float *gram, size_t n) {
    matmul_nn(mm, poly, gram, gram, NULL, n, n, n);
#pragma omp parallel for simd schedule(static) if (n * n > PARALLEL_FLOATS)
    for (size_t i = 0; i < n * n; i++) poly[i] = MUON_B * gram[i] + MUON_C * poly[i];
    for (size_t i = 0; i < n; i++) poly[i * n + i] += MUON_A;
}

// The polynomial is of the smaller of x x^T and x^T x: p(x x^T) x = x p(x^T x).
const float *muon_orthogonalize(Matmul mm, float *x, float *scratch, size_t rows, size_t columns) {
    size_t count = rows * columns, side = size_min(rows, columns);
    float *y = scratch, *gram = y + count, *poly = gram + side * side;
    scale(x, (float)(1.0 / (sqrt(sum_squares(x, count)) + MUON_EPS)), count);
    for (int step = 0; step < MUON_STEPS; step++) {
        bool wide = rows <= columns;
        if (wide) matmul_nt(mm, gram, x, x, rows, rows, columns);
        else matmul_tn(mm, gram, NULL, x, x, columns, columns, rows, false);
        polynomial(mm, poly, gram, side);
        if (wide) matmul_nn(mm, y, poly, x, NULL, rows, columns, rows);
        else matmul_nn(mm, y, x, poly, NULL, rows, columns, columns);
        float *next = y;
        y = x;
        x = next;
    }
    return x;
}
