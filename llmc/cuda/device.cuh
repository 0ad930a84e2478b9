// device: chooses and describes the GPU, and checks that it can run this program.
#pragma once

#include "cuda/cuda_common.cuh"

typedef struct {
    int ordinal;
    cudaDeviceProp properties;
} Device;

// *count = number of GPUs. ERR_UNAVAILABLE, with the reason, if there is none.
int device_count(int *count, Error *e);

// Makes device `ordinal` current. ERR_UNAVAILABLE or ERR_MEMORY if other programs occupy the device.
int device_take(int ordinal, Error *e);

// Describes the current device. Errors as device_take. ERR_UNAVAILABLE also if the device is too old, or if the build
// lacks code for this device.
int device_open(Device *device, Error *e);
