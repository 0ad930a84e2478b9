// sizes: what the CUDA engine takes of a device whatever the model. Plain C: plans for a GPU are made without it too.
#ifndef GNS_CUDA_SIZES_H
#define GNS_CUDA_SIZES_H

enum {
    CUDA_HEAD_BYTES = 800 << 20,      // most that a chunk of logits takes: 8k rows of GPT-2's vocabulary in bf16
    MATMUL_WORKSPACE_BYTES = 64 << 20 // what split sums may use
};

#endif
