// newton_schulz: the iteration of math/muon.h on the CPU, in fp32.
#pragma once

#include "cpu/matmul.h"

// Floats of scratch for matrices of at most `count` elements whose shorter side is at most `side`.
size_t newton_schulz_scratch(size_t count, size_t side);

// Returns NewtonSchulz(x) of x (rows, columns). The result lies in x or in scratch; x is overwritten. mm: fp32's.
const float *newton_schulz(Matmul mm, float *x, float *scratch, size_t rows, size_t columns);
