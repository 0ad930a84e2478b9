// device: see device.cuh.
#include "cuda/device.cuh"

__global__ static void probe_kernel() {}

static const char *const hint_no_gpu = "the CPU trainer, train_gpt2, needs no GPU";
static const char *const hint_old_driver =
    CUDART_VERSION >= 13000 ? "update the driver, or build with CUDA 12" : "update the driver";

int device_count(int *count, Error *e) {
    int driver = 0; // 0: no driver
    *count = 0;
    cudaError_t status = cudaGetDeviceCount(count);
    if (status == cudaErrorInsufficientDriver) (void)cudaDriverGetVersion(&driver);
    if (status != cudaSuccess)
        return FAIL(e, ERR_UNAVAILABLE, driver ? hint_old_driver : hint_no_gpu, "no usable NVIDIA GPU: %s",
                    cudaGetErrorString(status));
    return *count ? 0 : FAIL(e, ERR_UNAVAILABLE, hint_no_gpu, "no NVIDIA GPU on this machine");
}

// Returns the error for the status of the first call on a GPU. That call creates a context, which needs memory.
static int first_call(cudaError_t status, int ordinal, Error *e) {
    const char *hint = "wait for the programs that nvidia-smi lists, or choose another GPU with CUDA_VISIBLE_DEVICES";
    cudaDeviceProp properties;
    if (status == cudaSuccess) return 0;
    (void)cudaGetLastError(); // clears the failure, which this function reports
    const char *name = cudaGetDeviceProperties(&properties, ordinal) == cudaSuccess ? properties.name : "unknown";
    if (status == cudaErrorMemoryAllocation)
        return FAIL(e, ERR_MEMORY, hint,
                    "out of GPU memory: GPU %d (%s) has not even the half GiB free that CUDA itself needs", ordinal,
                    name);
    return FAIL(e, ERR_UNAVAILABLE, hint, "GPU %d (%s) cannot be used: %s", ordinal, name, cudaGetErrorString(status));
}

int device_take(int ordinal, Error *e) { return first_call(cudaSetDevice(ordinal), ordinal, e); }

int device_open(Device *device, Error *e) {
    const cudaDeviceProp *p = &device->properties;
    int count;
    TRY(device_count(&count, e));
    CUDA_TRY(cudaGetDevice(&device->ordinal), e);
    CUDA_TRY(cudaGetDeviceProperties(&device->properties, device->ordinal), e);
    if (10 * p->major + p->minor < REAL_OLDEST)
        return FAIL(e, ERR_UNAVAILABLE, hint_no_gpu,
                    "the GPU is too old: %s has compute capability %d.%d, this program needs %d.%d", p->name, p->major,
                    p->minor, REAL_OLDEST / 10, REAL_OLDEST % 10);
    cudaFuncAttributes attributes;
    cudaError_t status = cudaFuncGetAttributes(&attributes, probe_kernel);
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
        FAIL(e, ERR_UNAVAILABLE, NULL, "this program was built without code for the %s (compute capability %d.%d)",
             p->name, p->major, p->minor);
        return error_hint(e, "build it again with CUDA_ARCH=%d%d", p->major, p->minor);
    }
    return first_call(status, device->ordinal, e);
}
