// device: which GPU this is, and whether it can run this program.
#pragma once

#include "cuda/cuda_common.cuh"

typedef struct {
    int ordinal;
    cudaDeviceProp properties;
} Device;

// The number of GPUs; ERR_UNAVAILABLE, with the reason, where there is none.
int device_count(int *count, Error *e);

// Makes device `ordinal` the current one. ERR_UNAVAILABLE or ERR_MEMORY where other programs occupy it.
int device_take(int ordinal, Error *e);

// Describes the current device. The same errors, and ERR_UNAVAILABLE where it is too old for this program or the program
// holds no code for it.
int device_open(Device *device, Error *e);
