#include "plan/devices.h"

#include <ctype.h>
#include <string.h>

// From NVIDIA's data sheets and architecture papers, in their units. TFLOP/s are dense: figures "with sparsity" are
// halved. GB/s, GB: speed and size of the memory (GB: 2^30 bytes). link: GB/s each way of NVLink (half of a sheet's sum
// over both directions), or of PCIe x16 for an RTX 3090 or a device without NVLink (4.0: 32, 5.0: 64).
//
// net: GB/s each way per device, in NVIDIA's own machines, from their data sheets: 200 Gb/s in DGX A100; 400 Gb/s in
// DGX H100, H200, GH200, B200 and GB200 NVL72. 0: NVIDIA builds no machine with this device.
//
// The first row whose name is part of the device's name is used, so longer names come first.
#define ROW(name, bf16, fp32, bandwidth, memory, link, network, ...)                                                   \
    {                                                                                                                  \
        name, 1e12 * (bf16), 1e12 * (fp32), 1e9 * (bandwidth), 1073741824.0 * (memory), 1e9 * (link), 1e9 * (network), \
            .devices_a_machine = __VA_ARGS__                                                                           \
    }

// clang-format off
static const DeviceSpec rows[] = {
    //                    bf16   fp32    GB/s   GB  link  net  devices
    ROW("GB200",          2500,    80,   8000, 186,  900,  50, 72), // GB200 NVL72 data sheet, per GPU
    ROW("B200",           2250,    75,   8000, 180,  900,  50,  8), // HGX B200, DGX B200 data sheets
    ROW("H200 NVL",        836,    60,   4800, 141,  450,   0,  4, .hopper = true), // H200 data sheet
    ROW("H200",            989,    67,   4800, 141,  450,  50,  8, .hopper = true), // H200 data sheet: SXM
    ROW("GH200",           989,    67,   4000,  96,  450,  50,  1, .hopper = true), // GH200 data sheet: 96 GB HBM3
    ROW("H100 PCIe",       756,    51,   2000,  80,  300,   0,  2, .hopper = true), // H100 PCIe product brief
    ROW("H100 NVL",        836,    60,   3900,  94,  300,   0,  2, .hopper = true), // H100 data sheet
    ROW("H100",            989,    67,   3350,  80,  450,  50,  8, .hopper = true), // H100 data sheet: SXM
    ROW("A100 SXM4 80GB",  312,  19.5,   2039,  80,  300,  25,  8), // A100 80GB data sheet: SXM
    ROW("A100 80GB",       312,  19.5,   1935,  80,  300,   0,  2), // A100 80GB data sheet: PCIe
    ROW("A100",            312,  19.5,   1555,  40,  300,  25,  8), // A100 40GB data sheet
    ROW("A800",            312,  19.5,   2039,  80,  200,   0,  8), // A800 data sheet
    ROW("A40",           149.7,  37.4,    696,  48, 56.2,   0,  2), // A40 data sheet
    ROW("A30",             165,  10.3,    933,  24,  100,   0,  2), // A30 data sheet
    ROW("A10G",             70,    35,    600,  24,   32,   0,  8), // A10G data sheet
    ROW("A10",             125,  31.2,    600,  24,   32,   0,  8), // A10 data sheet
    ROW("L40S",            362,  91.6,    864,  48,   32,   0,  8), // L40S data sheet
    ROW("L40",             181,  90.5,    864,  48,   32,   0,  8), // L40 data sheet
    ROW("L4",              121,  30.3,    300,  24,   32,   0,  8), // L4 data sheet
    ROW("RTX 5090",      209.5, 104.8,   1792,  32,   64,   0,  8), // RTX Blackwell GPU architecture
    ROW("RTX 4090",      165.2,  82.6,   1008,  24,   32,   0,  8), // Ada GPU architecture
    ROW("RTX 4080",       97.5,  48.7,    717,  16,   32,   0,  8), // Ada GPU architecture
    ROW("RTX 3090",         71,  35.6,    936,  24,   32,   0,  8), // Ampere GA102 GPU architecture
    ROW("RTX 3080",       59.5,  29.8,    760,  10,   32,   0,  8), // Ampere GA102 GPU architecture
    ROW("RTX 6000 Ada",    364,  91.1,    960,  48,   32,   0,  8), // RTX 6000 Ada data sheet
    ROW("RTX A6000",       155,  38.7,    768,  48, 56.2,   0,  2), // RTX A6000 data sheet
};
// clang-format on
enum { ROWS = sizeof rows / sizeof *rows };

// Copies letters and digits, in lower case. words: puts a blank before and after each run of them.
static void normalize(char out[100], const char *text, bool words) {
    size_t used = 0;
    if (words) out[used++] = ' ';
    for (; *text && used < 98; text++)
        if (isalnum((unsigned char)*text)) out[used++] = (char)tolower((unsigned char)*text);
        else if (words && out[used - 1] != ' ') out[used++] = ' ';
    if (words && out[used - 1] != ' ') out[used++] = ' ';
    out[used] = 0;
}

const DeviceSpec *device_spec_find(const char *text) {
    static const char *const others[] = {" ti ", " super ", " d ", " laptop ",
                                         " max q "}; // "RTX 4080 SUPER" is another device
    const DeviceSpec *around = NULL;                 // last row whose name contains the text
    char part[100], words[100], name[100];
    int count = 0; // rows whose name contains the text
    normalize(part, text, false);
    normalize(words, text, true);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strstr(words, others[i])) return NULL;
    for (int i = 0; i < ROWS; i++) {
        normalize(name, rows[i].name, true);
        if (strstr(words, name)) return &rows[i]; // whole words: no A40 in "RTX A4000", no H200 in "GH200"
        normalize(name, rows[i].name, false);
        if (strstr(name, part)) around = &rows[i], count++;
    }
    return count == 1 ? around : NULL;
}

void device_spec_names(char *out, size_t bytes) {
    size_t used = 0;
    *out = 0;
    for (int i = 0; i < ROWS && used < bytes; i++)
        used += (size_t)snprintf(out + used, bytes - used, "%s%s", i ? ", " : "", rows[i].name);
}

double device_peak_flops(const EngineDevice *device) {
    const DeviceSpec *spec = device_spec_find(device->name);
    if (!spec) return 0;
    return device->value_bytes < sizeof(float) ? spec->bf16_flops : spec->fp32_flops;
}
