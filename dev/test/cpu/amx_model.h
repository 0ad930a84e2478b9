// amx_model: AMX's instructions in C, after Intel's manual (volume 2, TDPBF16PS): bf16_tile_amx runs on any machine. Its
// loads, products and places are tested so. What the instructions do is tested by test_matmul where the machine has them.
#pragma once

#include "cpu/value.h"

#include <immintrin.h>

static _Thread_local struct {
    uint16_t row_bytes[8];
    uint8_t rows[8], bytes[8][16][64] __attribute__((aligned(64)));
} amx;

static void amx_configure(const void *config) { // palette 1: rows' bytes at 16, rows at 48
    memcpy(amx.row_bytes, (const char *)config + 16, sizeof amx.row_bytes);
    memcpy(amx.rows, (const char *)config + 48, sizeof amx.rows);
    memset(amx.bytes, 0xff, sizeof amx.bytes); // NaN
}
static void amx_zero(int tile) { memset(amx.bytes[tile], 0, sizeof amx.bytes[tile]); }
static void amx_load(int tile, const void *from, size_t stride) {
    for (int r = 0; r < amx.rows[tile]; r++)
        memcpy(amx.bytes[tile][r], (const char *)from + (size_t)r * stride, amx.row_bytes[tile]);
}
static void amx_store(int tile, void *to, size_t stride) {
    for (int r = 0; r < amx.rows[tile]; r++)
        memcpy((char *)to + (size_t)r * stride, amx.bytes[tile][r], amx.row_bytes[tile]);
}
static void amx_multiply(int to, int left, int right) {
    float *c, sum[32];
    for (int m = 0; m < amx.rows[to]; m++) {
        memset(sum, 0, sizeof sum);
        for (int k = 0; k < amx.row_bytes[left] / 4; k++)
            for (int n = 0; n < amx.row_bytes[to] / 4; n++)
                for (int half = 0; half < 2; half++) {
                    uint16_t x = ((uint16_t *)amx.bytes[left][m])[2 * k + half];
                    uint16_t y = ((uint16_t *)amx.bytes[right][k])[2 * n + half];
                    sum[2 * n + half] += bf16_to_f32(x) * bf16_to_f32(y);
                }
        c = (float *)amx.bytes[to][m];
        for (int n = 0; n < amx.row_bytes[to] / 4; n++) c[n] += sum[2 * n] + sum[2 * n + 1];
    }
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig      amx_configure
#define _tile_zero            amx_zero
#define _tile_loadd           amx_load
#define _tile_stored          amx_store
#define _tile_dpbf16ps        amx_multiply
#define bf16_tile_amx         bf16_tile_amx_model
#define bf16_tile_amx_between bf16_tile_amx_between_model
#define bf16_amx_available    bf16_amx_available_too
#include "cpu/bf16_amx.c"
#undef bf16_tile_amx
#undef bf16_tile_amx_between
#undef bf16_amx_available
