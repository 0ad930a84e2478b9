// device_specs: the data sheets of GPUs. One table, for the share of the peak that training reaches (MFU) and for
// planning a run on a GPU that this machine does not have (plan.h).
#pragma once

#include "model/engine.h"

typedef struct {
    const char *name;      // part of the driver's name for it
    double bf16_flops;     // FLOP/s of dense matrix products, bf16 with fp32 sums
    double fp32_flops;     // FLOP/s outside the matrix units
    double bandwidth;      // B/s of device memory, read and written together
    double memory_bytes;   // of the device
    double link;           // B/s, each way, from a device to the others of its machine
    double network;        // B/s, each way, of a device's share of the machine's network; 0: no standard machine
    int devices_a_machine; // that `link` joins
    bool hopper;           // compute capability 9.0: the kernel that fuses exact norms, in 16 bits
} DeviceSpec;

// The row of a device by what its driver calls it ("NVIDIA H200"), or by what a person does ("h200", "A100 80GB");
// NULL: not in the table.
const DeviceSpec *device_spec_find(const char *name);

// The row for a user's text: of that name, or the only one whose name contains the text ("4090"), ignoring case, blanks
// and dashes; else device_spec_find's. NULL if no row matches, or several do, which `several` then lists.
const DeviceSpec *device_spec_choose(const char *text, char *several, size_t bytes);

// The names, for messages: "GB200, B200, ...".
void device_spec_names(char *out, size_t bytes);

// Peak of dense matrix products in the engine's precision (fp32 sums), FLOP/s; 0 for a device not in the table.
double device_peak_flops(const EngineDevice *device);
