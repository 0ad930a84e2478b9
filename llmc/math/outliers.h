// guard: is this step's loss or gradient norm out of line with those before it? A step that is can be left out of
// training (--skip-loss-z, --skip-grad-z). A last step that the horizon cuts short is not looked at.
#ifndef GNS_GUARD_H
#define GNS_GUARD_H

#include "base/common.h"
#include <math.h>

enum { GUARD_WINDOW = 128 }; // steps to compare with; before there are as many, nothing is out of line

// The last GUARD_WINDOW values of a quantity, in a ring. A checkpoint holds it.
typedef struct {
    double value[GUARD_WINDOW];
    int64_t count; // values seen so far
} Outliers;

// How many standard deviations x lies above the mean of the window, NaN while it is not full; then x joins the window,
// an outlier too: should the quantity have moved for good, it is at home there after a while. Taken anew from the
// window each time, so that a resumed run computes the same bits.
static inline double outliers_z(Outliers *o, double x) {
    double z = NAN;
    if (o->count >= GUARD_WINDOW) {
        double sum = 0, squares = 0;
        for (int i = 0; i < GUARD_WINDOW; i++) sum += o->value[i];
        double mean = sum / GUARD_WINDOW;
        for (int i = 0; i < GUARD_WINDOW; i++) squares += (o->value[i] - mean) * (o->value[i] - mean);
        double deviation = sqrt(squares / GUARD_WINDOW);
        z = deviation > 0 ? (x - mean) / deviation : x > mean ? INFINITY : 0;
    }
    o->value[o->count++ % GUARD_WINDOW] = x;
    return z;
}

#endif
