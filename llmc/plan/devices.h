// devices: a table of GPUs' data sheets, for MFU (the share of the peak that training reaches) and for plans of runs on
// a GPU that this machine does not have (plan.h).
#pragma once

#include "model/engine.h"

typedef struct {
    const char *name;      // part of the name that the driver reports
    double bf16_flops;     // FLOP/s of dense matrix products, bf16 with fp32 sums
    double fp32_flops;     // FLOP/s outside the matrix units
    double bandwidth;      // B/s of device memory, read and written together
    double memory_bytes;   // bytes of device memory
    double link;           // B/s each way, from a device to the others of its machine; in a torus, along each axis
    double network;        // B/s each way of a device's share of its machine's network; 0: no standard machine
    int devices_a_machine; // devices joined by `link`
    int axes;              // axes of the torus that joins the devices; 0: a switch joins them
    bool hopper;           // compute capability 9.0, on which 16-bit builds fuse --gns exact
} DeviceSpec;

// Finds a device by the driver's name ("NVIDIA H200") or a user's text, ignoring case. Returns NULL for variants that
// the table lacks ("SUPER"). Returns the first row whose name stands in the text as whole words. Otherwise returns the
// only row that contains the letters and digits of the text ("4090", "a100sxm4"), or NULL.
const DeviceSpec *device_spec_find(const char *text);

// Writes the names, for messages: "GB200, B200, ...".
void device_spec_names(char *out, size_t bytes);

// Returns the peak of dense matrix products in the engine's precision (fp32 sums) in FLOP/s; 0: not in the table.
double device_peak_flops(const EngineDevice *device);
