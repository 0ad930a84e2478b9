// device: which GPU this is, whether it will do, and what it is called.
#ifndef GNS_DEVICE_CUH
#define GNS_DEVICE_CUH

#include "cuda/cuda_common.cuh"

typedef struct {
    char name[256];
    int ordinal;
    int major, minor; // compute capability
    int multiprocessors;
    size_t memory_bytes;
} Device;

// How many there are, one at least: ERR_NO_GPU otherwise, and why.
int device_count(int *count, Error *e);

// Makes device number `ordinal` the current one. ERR_NO_GPU, or ERR_MEMORY, where others have it to themselves.
int device_take(int ordinal, Error *e);

// Looks at the current device. The same errors, in one clear line, and ERR_NO_GPU where it is too old for this program,
// or where the program holds no code for it.
int device_open(Device *device, Error *e);

#endif
