// Tests which GPU a rank chooses, and the errors if it cannot use the GPU. Needs no GPU: fakes replace functions of the
// CUDA runtime and of the messages between two ranks. The Makefile wraps these functions.
#include "../test.h"

#include "cuda/device.cuh"
#include "ranks/transport.h"

enum { RANKS = 2, SENT_BYTES = 256 };

// What the fakes answer, and what the program asked them.
static struct {
    int count;           // number of GPUs
    const char *bus;     // PCI address of the GPU that this rank takes
    const char *nccl;    // NCCL's error when it starts
    bool asked;          // the program asked for `count`
    int current;         // number of the GPU that the program took
    int major;           // compute capability of all GPUs
    cudaError_t counted; // result of cudaGetDeviceCount
    cudaError_t taken;   // result of cudaSetDevice
    cudaError_t opened;  // result of the first call that needs a context
} gpu;

static struct {
    char sent[RANKS][SENT_BYTES]; // what each rank sent in its latest comm_gather
    bool settled;
} talk;

static cudaError_t properties(cudaDeviceProp *p) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Fake 1");
    p->major = gpu.major;
    return cudaSuccess;
}

extern "C" {
cudaError_t __wrap_cudaGetDeviceCount(int *count) {
    gpu.asked = true;
    *count = gpu.count;
    return gpu.counted;
}
cudaError_t __wrap_cudaDriverGetVersion(int *version) {
    *version = gpu.count ? 12000 : 0;
    return cudaSuccess;
}
cudaError_t __wrap_cudaSetDevice(int device) {
    gpu.current = device;
    return gpu.taken;
}
cudaError_t __wrap_cudaGetDevice(int *device) {
    *device = gpu.current;
    return cudaSuccess;
}
cudaError_t __wrap_cudaDeviceGetPCIBusId(char *id, int bytes, int) {
    snprintf(id, (size_t)bytes, "%s", gpu.bus);
    return cudaSuccess;
}
cudaError_t __wrap_cudaGetDeviceProperties(cudaDeviceProp *p, int) { return properties(p); }
cudaError_t __wrap_cudaGetDeviceProperties_v2(cudaDeviceProp *p, int) { return properties(p); } // the name in CUDA 12
cudaError_t __wrap_cudaFuncGetAttributes(cudaFuncAttributes *, const void *) { return gpu.opened; }

cudaError_t __wrap_cudaDeviceGetStreamPriorityRange(int *, int *) { return cudaSuccess; }
cudaError_t __wrap_cudaStreamCreateWithPriority(cudaStream_t *, unsigned, int) { return cudaSuccess; }
cudaError_t __wrap_cudaEventCreateWithFlags(cudaEvent_t *, unsigned) { return cudaSuccess; }
struct NcclId {
    char bytes[128];
};
int __wrap_ncclCommInitRank(void **, int, NcclId, int) { return 1; } // ncclUnhandledCudaError
const char *__wrap_ncclGetLastError(void *) { return gpu.nccl; }
int __wrap_comm_broadcast(Comm *, void *, size_t, Error *) { return 0; }
int __wrap_comm_gather(Comm *comm, const void *mine, void *all, size_t bytes, Error *) {
    CHECK(bytes <= SENT_BYTES && comm->ranks == RANKS, "%zu bytes", bytes);
    memcpy(talk.sent[comm->rank], mine, bytes);
    for (int r = 0; r < RANKS; r++) memcpy((char *)all + (size_t)r * bytes, talk.sent[r], bytes);
    return 0;
}
int __wrap_comm_agree(Comm *, int code, Error *) {
    talk.settled = talk.settled || code;
    return code;
}
}

static Error e;
static Device device;

static void gpus_are(int count) {
    memset(&gpu, 0, sizeof gpu);
    memset(&talk, 0, sizeof talk);
    gpu.count = count;
    gpu.major = 9;
    gpu.bus = "0000:1B:00.0";
}

// Lets rank `rank` of two on one machine choose a GPU. The rank sees the GPU at `bus`.
static int take(int rank, const char *bus) {
    Comm comm = {};
    comm.rank = comm.local_rank = rank;
    comm.ranks = comm.local_ranks = RANKS;
    gpu.bus = bus;
    return nccl_transport.device(&comm, &e);
}

static void test_every_rank_has_its_own(void) {
    gpus_are(2);
    CHECK_OK(take(0, "0000:1B:00.0"), &e);
    CHECK_OK(take(1, "0000:2A:00.0"), &e);
    CHECK(gpu.current == 1, "rank 1 took GPU %d", gpu.current);
    gpus_are(1); // a batch system shows one GPU to each rank
    CHECK_OK(take(0, "0000:1B:00.0"), &e);
    CHECK_OK(take(1, "0000:2A:00.0"), &e);
}

static void test_two_ranks_on_one(void) {
    gpus_are(1);
    CHECK_OK(take(0, "0000:1B:00.0"), &e);
    CHECK_ERROR(take(1, "0000:1B:00.0"), &e, ERR_UNAVAILABLE, "ranks 1 and 0 have the same GPU (0000:1B:00.0)");
    CHECK(talk.settled, "the other rank does not know");
    setenv("NCCL_HOSTID", "another machine", 1); // NCCL then uses sockets
    CHECK_OK(take(1, "0000:1B:00.0"), &e);
    unsetenv("NCCL_HOSTID");
}

static void test_nccl_lacks_memory(void) {
    Transport *t = NULL;
    Comm comm = {};
    const Division alone = {1, RANKS, 1, NULL};
    comm.rank = 1, comm.ranks = RANKS;
    gpus_are(2);
    gpu.nccl = "Cuda failure 2 'out of memory'";
    CHECK_ERROR(nccl_transport.create(&t, &comm, &alone, WIRE_FP32, 0, NULL, &e), &e, ERR_MEMORY,
                "out of GPU memory: NCCL");
    CHECK(strstr(e.hint, "--micro-batch"), "%s", e.hint);
    gpu.nccl = "unrecognized";
    CHECK_ERROR(nccl_transport.create(&t, &comm, &alone, WIRE_FP32, 0, NULL, &e), &e, ERR_RANK, "ncclCommInitRank: ");
}

static void test_more_ranks_than_gpus(void) {
    gpus_are(3);
    Comm comm = {};
    comm.rank = 3, comm.ranks = 4, comm.local_rank = 3, comm.local_ranks = 4;
    CHECK_ERROR(nccl_transport.device(&comm, &e), &e, ERR_UNAVAILABLE, "4 ranks on this machine, and 3 GPUs");
    CHECK(talk.settled, "the other ranks do not know");
}

static void test_no_gpu(void) {
    gpus_are(0);
    CHECK_ERROR(device_open(&device, &e), &e, ERR_UNAVAILABLE, "no NVIDIA GPU");
    CHECK_ERROR(take(0, ""), &e, ERR_UNAVAILABLE, "no NVIDIA GPU");
    CHECK(talk.settled, "the other rank does not know");
    gpu.counted = cudaErrorInsufficientDriver;
    CHECK_ERROR(device_open(&device, &e), &e, ERR_UNAVAILABLE, "driver");
    CHECK(strstr(e.hint, "needs no GPU"), "without a driver: %s", e.hint);
    gpu.count = 1;
    CHECK_ERROR(device_open(&device, &e), &e, ERR_UNAVAILABLE, "driver");
    CHECK(strncmp(e.hint, "update the driver", 17) == 0, "%s", e.hint);
    gpu.count = 0;
    CHECK_ERROR(take(0, ""), &e, ERR_UNAVAILABLE, "driver");
}

// Tests the errors of a GPU that cannot be used, or has no memory for a context.
static void test_busy(void) {
    const cudaError_t busy[] = {cudaErrorDevicesUnavailable, cudaErrorInitializationError, cudaErrorECCUncorrectable,
                                cudaErrorSystemNotReady, cudaErrorMpsServerNotReady};
    for (cudaError_t status : busy) {
        gpus_are(2);
        gpu.opened = gpu.taken = status;
        CHECK_ERROR(device_open(&device, &e), &e, ERR_UNAVAILABLE, "GPU 0 (Fake 1) cannot be used: ");
        CHECK_ERROR(take(1, "0000:2A:00.0"), &e, ERR_UNAVAILABLE, "GPU 1 (Fake 1) cannot be used: ");
        CHECK(strstr(e.what, cudaGetErrorString(status)) && strstr(e.hint, "CUDA_VISIBLE_DEVICES"), "%s", e.what);
        CHECK(talk.settled, "the other rank does not know");
    }
    gpus_are(2);
    gpu.opened = gpu.taken = cudaErrorMemoryAllocation;
    CHECK_ERROR(device_open(&device, &e), &e, ERR_MEMORY, "out of GPU memory: GPU 0 (Fake 1)");
    CHECK_ERROR(take(1, "0000:2A:00.0"), &e, ERR_MEMORY, "out of GPU memory: GPU 1 (Fake 1)");
    CHECK(strstr(e.hint, "nvidia-smi"), "%s", e.hint);
}

static void test_wrong_kind(void) {
    gpus_are(1);
    CHECK_OK(device_open(&device, &e), &e);
    CHECK(strcmp(device.properties.name, "Fake 1") == 0 && device.ordinal == 0, "%s", device.properties.name);
    gpu.opened = cudaErrorNoKernelImageForDevice;
    CHECK_ERROR(device_open(&device, &e), &e, ERR_UNAVAILABLE, "without code for the Fake 1");
    gpu.major = 7;
    CHECK_ERROR(device_open(&device, &e), &e, ERR_UNAVAILABLE, "too old");
}

int main(void) {
    gpus_are(0);
    take(0, "");
    if (!gpu.asked) return printf("SKIP test_device_cuda: built without NCCL, for one process\n"), ERR_SKIPPED;
    RUN(test_every_rank_has_its_own, test_two_ranks_on_one, test_nccl_lacks_memory, test_more_ranks_than_gpus,
        test_no_gpu, test_busy, test_wrong_kind);
    return test_summary();
}
