#include "cpu/bf16_tiles.h"

#ifdef BF16_X86

#    include <cpuid.h>
#    include <immintrin.h>
#    include <sys/syscall.h>
#    include <unistd.h>

// Asks Linux for the AMX registers: a process has none until it asks (Documentation/arch/x86/xstate.rst).
bool bf16_amx_available(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & AMX_BF16) || !(d & AMX_TILE)) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// Configures this thread's tiles, on its first call. Tiles 0 to 3: c, 2 x 2 tiles of 16 x 16; 4, 5: rows of a; 6, 7:
// columns of b.
__attribute__((target("amx-tile"))) static void configure(void) {
    static _Thread_local bool configured;
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config __attribute__((aligned(64))) = {.palette = 1};
    if (configured) return;
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
    configured = true;
}

__attribute__((target("amx-tile,amx-bf16"))) void bf16_tile_amx(float *c, const uint16_t *a, const uint16_t *b,
                                                                size_t pairs, size_t count, Ahead *ahead,
                                                                void (*between)(void *, size_t, size_t), void *work) {
    enum { A_ROW = 64, B_ROW = 128, C_ROW = 128, PAIRS = 16 }; // *_ROW: bytes between rows; PAIRS: pairs of k in a tile
    float *c1 = c + 16 * BF16_COLUMNS;
    size_t lines = (ahead->lines + pairs / PAIRS - 1) / (pairs / PAIRS); // to prefetch per step
    configure();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t at = 0; at < pairs; at += PAIRS, a += BF16_AMX_ROWS * BF16_STEP, b += PAIRS * 2 * BF16_COLUMNS) {
        _tile_loadd(4, a, A_ROW);
        _tile_loadd(6, b, B_ROW);
        _tile_loadd(7, b + BF16_COLUMNS, B_ROW);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (count > 16) {
            _tile_loadd(5, a + 16 * BF16_STEP, A_ROW);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        prefetch_ahead(ahead, lines);
        if (between) between(work, at / PAIRS, pairs / PAIRS);
    }
    _tile_stored(0, c, C_ROW);
    _tile_stored(1, c + 16, C_ROW);
    if (count <= 16) return;
    _tile_stored(2, c1, C_ROW);
    _tile_stored(3, c1 + 16, C_ROW);
}

#endif
