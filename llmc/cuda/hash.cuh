// hash: of arrays in device memory, for comparing replicas.
#ifndef GNS_CUDA_HASH_CUH
#define GNS_CUDA_HASH_CUH

#include "cuda/cuda_common.cuh"

// *sum (device) += the hash (base/hash.h) of n elements, the first of which has the given place in the sum. Integers: the
// order in which blocks add changes nothing. X: float, __nv_bfloat16.
template <typename X> int hash_add(uint64_t *sum, const X *x, size_t n, uint64_t place, cudaStream_t stream, Error *e);

#endif
