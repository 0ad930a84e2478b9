// masks: dropout (math/dropout.h) on the CPU, a span of a row at a time.
#pragma once

#include "cpu/value.h"
#include "math/dropout.h"

// `to` (B, T, C) = x times dropout's factors, element by element; `to` may be x. d: the dropout of the first example.
void dropout_apply(void *to, const void *x, Dropout d, DropoutPlace place, int B, int T, int C, Dtype type);

enum { DROPOUT_SPAN = 128 }; // columns

// factor (DROPOUT_SPAN) = the factors of columns [first, first + DROPOUT_SPAN). first: a multiple of DROPOUT_SPAN.
void dropout_factors(float *factor, Dropout d, DropoutPlace place, size_t head, size_t row, size_t first);
