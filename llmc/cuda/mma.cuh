// mma: a warp's matrix product in 16 bits on any GPU, and loads of its operands from shared memory.
#pragma once

#include "cuda/cuda_common.cuh"

#ifndef GNS_FP32
__device__ static void ldmatrix(unsigned (&r)[4], const real *p) {
    unsigned address = (unsigned)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ static void ldmatrix_transposed(unsigned (&r)[4], const real *p) {
    unsigned address = (unsigned)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// c (16, 8) += a (16, 16) b (16, 8). A lane holds columns 2 (lane % 4) + {0, 1} of c in rows lane / 4 + {0, 8}.
__device__ static void mma(float *c, const unsigned (&a)[4], unsigned b0, unsigned b1) {
#    if __CUDA_ARCH__ < 800 // Turing multiplies 8 of the summed dimension at a time
    const unsigned b[2] = {b0, b1};
    UNROLL_FOR (int k = 0; k < 2; k++)
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
#    else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." REAL_PTX "." REAL_PTX ".f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#    endif
}
#endif
