// sm90: see sm90.cuh.
#include "cuda/sm90.cuh"

__global__ static void __launch_bounds__(SM90_THREADS(WARPGROUP)) probe_kernel() {}

bool sm90_runs(void) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, probe_kernel) == cudaSuccess && attributes.maxThreadsPerBlock > 1;
}

int copy_map(CUtensorMap *map, const void *tensor, const CopyTensor &t, Error *e) {
    // Looks the driver's function up once, without linking to the driver's library.
    static PFN_cuTensorMapEncodeTiled_v12000 encode;
    static cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    static const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000, cudaEnableDefault, &found);
#else
    static const cudaError_t status =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", (void **)&encode, cudaEnableDefault, &found);
#endif
    TRY(cuda_status(status, "cudaGetDriverEntryPoint", __FILE__, __LINE__, e));
    if (found != cudaDriverEntryPointSuccess)
        return FAIL(e, ERR_UNAVAILABLE, "update the NVIDIA driver", "the driver has no cuTensorMapEncodeTiled");
    const cuuint32_t step[3] = {1, 1, 1};
    const bool bytewise = t.type == CU_TENSOR_MAP_DATA_TYPE_UINT8;
    const int64_t bytes = bytewise ? 1 : t.type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? sizeof(float) : sizeof(real);
    const CUtensorMapSwizzle swizzle =
        bytewise && t.box[0] == PANEL ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
    const int64_t row = t.stride[0] ? t.stride[0] : t.size[0], plane = t.stride[1] ? t.stride[1] : t.size[1] * row;
    const cuuint64_t stride[2] = {(cuuint64_t)(row * bytes), (cuuint64_t)(plane * bytes)};
    CUresult result =
        encode(map, t.type, 3, (void *)tensor, (const cuuint64_t *)t.size, stride, (const cuuint32_t *)t.box, step,
               CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, t.promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return FAIL(e, ERR_INTERNAL, NULL, "cuTensorMapEncodeTiled: error %d for a tensor (.., %lld, %lld)",
                    (int)result, (long long)t.size[1], (long long)t.size[0]);
    return 0;
}
