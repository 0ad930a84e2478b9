#include "cpu/newton_schulz.h"

#include "cpu/layers.h"
#include "math/muon.h"

size_t newton_schulz_scratch(size_t count, size_t side) { return count + 2 * side * side; }

// Computes the polynomial p of x x^T or x^T x, whichever is smaller: p(x x^T) x = x p(x^T x).
const float *newton_schulz(Matmul mm, float *x, float *scratch, size_t rows, size_t columns) {
    size_t count = rows * columns, side = size_min(rows, columns);
    float *y = scratch, *gram = y + count, *poly = gram + side * side;
    const float scale = (float)(1.0 / (sqrt(sum_squares(x, count)) + MUON_EPS));
#pragma omp parallel for simd schedule(static) if (count > PARALLEL_FLOATS)
    for (size_t i = 0; i < count; i++) x[i] *= scale;
    for (int step = 0; step < MUON_STEPS; step++) {
        bool wide = rows <= columns;
        if (wide) matmul_nt(mm, gram, x, x, rows, rows, columns);
        else matmul_tn(mm, gram, NULL, x, x, columns, columns, rows, false);
        matmul_nn(mm, poly, gram, gram, NULL, side, side, side); // below: poly (side, side) = a I + b gram + c gram^2
#pragma omp parallel for simd schedule(static) if (side * side > PARALLEL_FLOATS)
        for (size_t i = 0; i < side * side; i++) poly[i] = MUON_B * gram[i] + MUON_C * poly[i];
        for (size_t i = 0; i < side; i++) poly[i * side + i] += MUON_A;
        if (wide) matmul_nn(mm, y, poly, x, NULL, rows, columns, rows);
        else matmul_nn(mm, y, x, poly, NULL, rows, columns, columns);
        float *next = y;
        y = x;
        x = next;
    }
    return x;
}
