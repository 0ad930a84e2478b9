#include "device.cuh"

#include "../device_specs.h"

double device_peak_flops(const Device *device) {
    const DeviceSpec *spec = device_spec_find(device->name);
    if (!spec) return 0;
    return sizeof(real) == sizeof(float) ? spec->fp32_flops : spec->bf16_flops;
}

__global__ static void probe_kernel() {}

int device_open(Device *device, Error *e) {
    const int oldest = 8; // compute capability 8.0, Ampere: the first with bf16 matrix units
    const char *hint = "the CPU trainer, train_gpt2, needs no GPU";
    int count = 0, current = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess) return FAIL(e, ERR_NO_GPU, hint, "no usable NVIDIA GPU: %s", cudaGetErrorString(status));
    if (count == 0) return FAIL(e, ERR_NO_GPU, hint, "no NVIDIA GPU on this machine");
    cudaDeviceProp properties;
    CUDA_TRY(cudaGetDevice(&current), e);
    CUDA_TRY(cudaGetDeviceProperties(&properties, current), e);
    snprintf(device->name, sizeof device->name, "%s", properties.name);
    device->ordinal = current;
    device->major = properties.major;
    device->minor = properties.minor;
    device->multiprocessors = properties.multiProcessorCount;
    device->memory_bytes = properties.totalGlobalMem;
    if (device->major < oldest)
        return FAIL(e, ERR_NO_GPU, hint, "the GPU is too old: %s has compute capability %d.%d, this program needs %d.0",
                    device->name, device->major, device->minor, oldest);
    cudaFuncAttributes attributes;
    status = cudaFuncGetAttributes(&attributes, probe_kernel);
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
        FAIL(e, ERR_NO_GPU, NULL, "this program was built without code for the %s (compute capability %d.%d)",
             device->name, device->major, device->minor);
        return error_hint(e, "build it again with CUDA_ARCH=%d%d", device->major, device->minor);
    }
    CUDA_TRY(status, e);
    return 0;
}
