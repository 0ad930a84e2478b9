// device: which GPU this is, whether it will do, and what its makers say it can do.
#ifndef GNS_DEVICE_CUH
#define GNS_DEVICE_CUH

#include "cuda_common.cuh"

typedef struct {
    char name[256];
    int ordinal;
    int major, minor; // compute capability
    int multiprocessors;
    size_t memory_bytes;
} Device;

// Looks at the current device. ERR_NO_GPU, in one clear line, where there is none, where it is too old for this
// program, or where the program holds no code for it.
int device_open(Device *device, Error *e);

// Peak of dense matrix products in the build's precision (fp32 sums), FLOP/s; 0 for a device not in the table.
double device_peak_flops(const Device *device);

#endif
