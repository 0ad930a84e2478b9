// plan: what --dry-run says of time, memory, ranks and cost, against hand-computed cases and measured runs.
#include "../../llmc/device_specs.h"

#include "test.h"

// ---------------------------------------------------------------------------------------------------------------------
// The table of devices

static void check_device(const char *said, const char *name) {
    const DeviceSpec *spec = device_spec_find(said);
    if (!name) CHECK(!spec, "%s taken for a %s", said, spec->name);
    else CHECK(spec && strcmp(spec->name, name) == 0, "%s taken for %s", said, spec ? spec->name : "nothing");
}

static void test_device_names(void) {
    check_device("NVIDIA H200", "H200");
    check_device("h200", "H200");
    check_device("NVIDIA H200 NVL", "H200 NVL");
    check_device("NVIDIA GH200 480GB", "GH200");
    check_device("NVIDIA GB200", "GB200");
    check_device("NVIDIA B200", "B200");
    check_device("NVIDIA H100 80GB HBM3", "H100");
    check_device("NVIDIA H100 PCIe", "H100 PCIe");
    check_device("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB");
    check_device("NVIDIA A100-SXM4-40GB", "A100");
    check_device("NVIDIA A100 80GB PCIe", "A100 80GB");
    check_device("NVIDIA A10G", "A10G");
    check_device("NVIDIA L40S", "L40S");
    check_device("NVIDIA L4", "L4");
    check_device("NVIDIA GeForce RTX 4090", "RTX 4090");
    check_device("NVIDIA GeForce RTX 4090 Laptop GPU", NULL);
    check_device("NVIDIA GeForce RTX 4080 SUPER", NULL);
    check_device("NVIDIA RTX A4000", NULL);
    check_device("Radeon", NULL);
    check_device("", NULL);
}

// Peaks as the data sheets give them, read again.
static void test_device_figures(void) {
    CHECK_CLOSE(device_spec_find("H200")->bf16_flops, 989e12, 1e-3, 0);
    CHECK_CLOSE(device_spec_find("H200")->bandwidth, 4.8e12, 1e-3, 0);
    CHECK_CLOSE(device_spec_find("A100")->bf16_flops, 312e12, 1e-3, 0);
    CHECK_CLOSE(device_spec_find("A100")->memory_bytes, 40.0 * (1 << 30), 1e-3, 0);
    CHECK_CLOSE(device_spec_find("RTX 4090")->bandwidth, 1008e9, 1e-3, 0);
    char names[64]; // shorter than the list: cut, not overrun
    device_spec_names(names, sizeof names);
    CHECK(strlen(names) == sizeof names - 1 && strncmp(names, "GB200, B200, ", 13) == 0, "%s", names);
}

int main(void) {
    RUN(test_device_names);
    RUN(test_device_figures);
    return test_summary();
}
