#include "device.cuh"

#include <string.h>

// Data sheets, dense, without sparsity: bf16 with fp32 accumulation, and fp32 outside the tensor cores, in TFLOP/s.
// The first name that the device's name contains counts, so the longer names stand first.
static const struct {
    const char *name;
    double bf16, fp32;
} peaks[] = {
    {"GB200", 2500, 80},    {"B200", 2250, 75},         {"H200 NVL", 836, 60},       {"H200", 989, 67},
    {"GH200", 989, 67},     {"H100 PCIe", 756, 51},     {"H100 NVL", 836, 60},       {"H100", 989, 67},
    {"A100", 312, 19.5},    {"A800", 312, 19.5},        {"A40", 149.7, 37.4},        {"A30", 165, 10.3},
    {"A10G", 70, 35},       {"A10", 125, 31.2},         {"L40S", 362, 91.6},         {"L40", 181, 90.5},
    {"L4", 121, 30.3},      {"RTX 5090", 209.5, 104.8}, {"RTX 4090", 165.2, 82.6},   {"RTX 4080", 97.5, 48.7},
    {"RTX 3090", 71, 35.6}, {"RTX 3080", 59.5, 29.8},   {"RTX 6000 Ada", 364, 91.1}, {"RTX A6000", 155, 38.7},
};

double device_peak_flops(const Device *device) {
    for (size_t i = 0; i < sizeof peaks / sizeof *peaks; i++)
        if (strstr(device->name, peaks[i].name)) return 1e12 * (sizeof(real) == 4 ? peaks[i].fp32 : peaks[i].bf16);
    return 0;
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
