// devices: finding a GPU in the table.
#include "plan/devices.h"

#include "../test.h"

static void test_names(void) {
    // clang-format off
    static const struct {
        const char *said, *name, *several;
    } cases[] = { // names of the driver, then a person's
        {"NVIDIA H200", "H200", ""}, {"NVIDIA H200 NVL", "H200 NVL", ""}, {"NVIDIA GH200 480GB", "GH200", ""},
        {"NVIDIA GB200", "GB200", ""}, {"NVIDIA B200", "B200", ""}, {"NVIDIA H100 80GB HBM3", "H100", ""},
        {"NVIDIA H100 PCIe", "H100 PCIe", ""}, {"NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB", ""},
        {"NVIDIA A100-SXM4-40GB", "A100", ""}, {"NVIDIA A100 80GB PCIe", "A100 80GB", ""}, {"NVIDIA A10G", "A10G", ""},
        {"NVIDIA L40S", "L40S", ""}, {"NVIDIA L4", "L4", ""}, {"NVIDIA GeForce RTX 4090", "RTX 4090", ""},
        {"NVIDIA GeForce RTX 4090 Laptop GPU", NULL, ""}, {"NVIDIA GeForce RTX 4080 SUPER", NULL, ""},
        {"NVIDIA RTX A4000", NULL, ""}, {"Radeon", NULL, ""}, {"", NULL, ""},
        {"4090", "RTX 4090", ""}, {"rtx4090", "RTX 4090", ""}, {"a100-80gb", "A100 80GB", ""}, {"a100", "A100", ""},
        {"L4", "L4", ""}, {"a100sxm4", "A100-SXM4-80GB", ""}, {"h200", "H200", ""}, {"6000 ada", "RTX 6000 Ada", ""},
        {"40", NULL, "A40, L40S, L40, RTX 4090, RTX 4080"}, {"rtx 30", NULL, "RTX 3090, RTX 3080"},
        {"4080 SUPER", NULL, ""}, {"Voodoo", NULL, ""}, {"-", NULL, ""},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char list[400];
        const DeviceSpec *spec = device_spec_find(cases[i].said, list, sizeof list);
        const char *want = cases[i].name;
        CHECK(spec ? want && strcmp(spec->name, want) == 0 : !want, "%s taken for %s", cases[i].said,
              spec ? spec->name : "");
        CHECK(strcmp(list, cases[i].several) == 0, "%s: %s", cases[i].said, list);
    }
    char names[64]; // shorter than the list: cut, not overrun
    device_spec_names(names, sizeof names);
    CHECK(strlen(names) == sizeof names - 1 && strncmp(names, "GB200, B200, ", 13) == 0, "%s", names);
}

int main(void) {
    RUN(test_names);
    return test_summary();
}
