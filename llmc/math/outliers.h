// outliers: measures how far a step's loss or gradient norm lies above recent values, to skip outliers (--skip-loss-z,
// --skip-grad-z) and to roll spikes back (--on-spike). The last step is not judged if the horizon cuts its batch.
#pragma once

#include "base/common.h"
#include <math.h>

enum { OUTLIERS_WINDOW = 128 }; // steps; nothing is judged before the window is full

// The last OUTLIERS_WINDOW values of a quantity, in a ring. Stored in checkpoints.
typedef struct {
    double value[OUTLIERS_WINDOW];
    int64_t count; // values seen so far
} Outliers;

// Returns z, the number of standard deviations by which x lies above the window's mean; NaN while the window is not
// full. Adds x to the window unless z > most. With `most` INFINITY the window follows a lasting shift within 128 steps.
// Computes mean and deviation from the whole window each time, so that a resumed run has the same bits.
static inline double outliers_z(Outliers *o, double x, double most) {
    double z = NAN;
    if (o->count >= OUTLIERS_WINDOW) {
        double sum = 0, squares = 0;
        for (int i = 0; i < OUTLIERS_WINDOW; i++) sum += o->value[i];
        double mean = sum / OUTLIERS_WINDOW;
        for (int i = 0; i < OUTLIERS_WINDOW; i++) squares += (o->value[i] - mean) * (o->value[i] - mean);
        double deviation = sqrt(squares / OUTLIERS_WINDOW);
        z = deviation > 0 ? (x - mean) / deviation : x > mean ? INFINITY : 0;
    }
    if (!(z > most)) o->value[o->count++ % OUTLIERS_WINDOW] = x;
    return z;
}
