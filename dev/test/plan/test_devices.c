// devices: finding a GPU in the table.
#include "plan/devices.h"

#include "../test.h"

// The driver's names, and a person's: the name as in the table, or the only one that contains it.
static void test_names(void) {
    // clang-format off
    static const struct {
        const char *said, *name;
    } drivers[] = {
        {"NVIDIA H200", "H200"}, {"h200", "H200"}, {"NVIDIA H200 NVL", "H200 NVL"}, {"NVIDIA GH200 480GB", "GH200"},
        {"NVIDIA GB200", "GB200"}, {"NVIDIA B200", "B200"}, {"NVIDIA H100 80GB HBM3", "H100"}, {"NVIDIA H100 PCIe", "H100 PCIe"},
        {"NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"}, {"NVIDIA A100-SXM4-40GB", "A100"}, {"NVIDIA A100 80GB PCIe", "A100 80GB"},
        {"NVIDIA A10G", "A10G"}, {"NVIDIA L40S", "L40S"}, {"NVIDIA L4", "L4"}, {"NVIDIA GeForce RTX 4090", "RTX 4090"},
        {"NVIDIA GeForce RTX 4090 Laptop GPU", NULL}, {"NVIDIA GeForce RTX 4080 SUPER", NULL}, {"NVIDIA RTX A4000", NULL},
        {"Radeon", NULL}, {"", NULL},
    };
    static const struct {
        const char *said, *name, *several;
    } people[] = {
        {"4090", "RTX 4090", ""}, {"rtx4090", "RTX 4090", ""}, {"a100-80gb", "A100 80GB", ""}, {"a100", "A100", ""},
        {"L4", "L4", ""}, {"NVIDIA A100-SXM4-40GB", "A100", ""}, {"a100sxm4", "A100-SXM4-80GB", ""}, {"h200", "H200", ""},
        {"6000 ada", "RTX 6000 Ada", ""}, {"40", NULL, "A40, L40S, L40, RTX 4090, RTX 4080"},
        {"rtx 30", NULL, "RTX 3090, RTX 3080"}, {"4080 SUPER", NULL, ""}, {"Voodoo", NULL, ""}, {"-", NULL, ""},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof drivers / sizeof *drivers; i++) {
        const DeviceSpec *spec = device_spec_find(drivers[i].said);
        const char *want = drivers[i].name;
        CHECK(spec ? want && strcmp(spec->name, want) == 0 : !want, "%s taken for %s", drivers[i].said,
              spec ? spec->name : "");
    }
    for (size_t i = 0; i < sizeof people / sizeof *people; i++) {
        char list[400];
        const DeviceSpec *spec = device_spec_choose(people[i].said, list, sizeof list);
        const char *want = people[i].name;
        CHECK(spec ? want && strcmp(spec->name, want) == 0 : !want, "%s taken for %s", people[i].said,
              spec ? spec->name : "");
        CHECK(strcmp(list, people[i].several) == 0, "%s: %s", people[i].said, list);
    }
    char names[64]; // shorter than the list: cut, not overrun
    device_spec_names(names, sizeof names);
    CHECK(strlen(names) == sizeof names - 1 && strncmp(names, "GB200, B200, ", 13) == 0, "%s", names);
}

int main(void) {
    RUN(test_names);
    return test_summary();
}
