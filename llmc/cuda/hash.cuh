// hash: of arrays in device memory, for comparing replicas.
#ifndef GNS_CUDA_HASH_CUH
#define GNS_CUDA_HASH_CUH

#include "cuda/cuda_common.cuh"

// *sum (device) += the hash (../hash.h) of n elements, of which x[0] has the given place. The sum is one of integers,
// so the order in which blocks add to it changes nothing.
int hash_add(uint64_t *sum, const float *x, size_t n, uint64_t place, cudaStream_t stream, Error *e);
int hash_add(uint64_t *sum, const __nv_bfloat16 *x, size_t n, uint64_t place, cudaStream_t stream, Error *e);

#endif
