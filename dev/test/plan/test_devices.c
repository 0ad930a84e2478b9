// devices: the table of GPUs, against data sheets and how the chips are made.
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
}

// Figures as the chips make them: multiprocessors x FLOPs a clock (matrix: bf16, dense, summed in fp32; vector: two a core)
// x clock, and pins of the memory's bus x bits a second and pin. The clocks are the boost clocks of the makers' papers.
static void test_device_figures_of_chips(void) {
    static const struct {
        const char *name;
        double multiprocessors, matrix, vector, ghz, bus, gbit, gib;
    } chips[] = {
        {"H200", 132, 4096, 256, 1.83, 6144, 6.25, 141},
        {"H100", 132, 4096, 256, 1.83, 5120, 5.23, 80},
        {"H100 PCIe", 114, 4096, 256, 1.62, 5120, 3.186, 80},
        {"A100", 108, 2048, 128, 1.41, 5120, 2.43, 40},
        {"A100-SXM4-80GB", 108, 2048, 128, 1.41, 5120, 3.19, 80},
        {"A100 80GB", 108, 2048, 128, 1.41, 5120, 3.02, 80},
        {"A40", 84, 1024, 256, 1.74, 384, 14.5, 48},
        {"A30", 56, 2048, 128, 1.44, 3072, 2.43, 24},
        {"A10", 72, 1024, 256, 1.695, 384, 12.5, 24},
        {"L40S", 142, 1024, 256, 2.52, 384, 18, 48},
        {"L4", 58, 1024, 256, 2.04, 192, 12.5, 24},
        {"RTX 5090", 170, 512, 256, 2.407, 512, 28, 32},
        {"RTX 4090", 128, 512, 256, 2.52, 384, 21, 24},
        {"RTX 4080", 76, 512, 256, 2.505, 256, 22.4, 16},
        {"RTX 3090", 82, 512, 256, 1.695, 384, 19.5, 24},
        {"RTX 3080", 68, 512, 256, 1.71, 320, 19, 10},
        {"RTX 6000 Ada", 142, 1024, 256, 2.505, 384, 20, 48},
        {"RTX A6000", 84, 1024, 256, 1.8, 384, 16, 48},
    };
    for (size_t i = 0; i < sizeof chips / sizeof *chips; i++) {
        const DeviceSpec *spec = device_spec_find(chips[i].name);
        double clocks = 1e9 * chips[i].ghz * chips[i].multiprocessors;
        CHECK(strcmp(spec->name, chips[i].name) == 0, "%s for %s", spec->name, chips[i].name);
        CHECK_CLOSE(spec->bf16_flops, clocks * chips[i].matrix, 0.02, 0);
        CHECK_CLOSE(spec->fp32_flops, clocks * chips[i].vector, 0.1, 0); // vectors are clocked higher than matrices
        CHECK_CLOSE(spec->bandwidth, 1e9 * chips[i].bus * chips[i].gbit / 8, 0.02, 0);
        CHECK(spec->memory_bytes == chips[i].gib * (1 << 30), "%s: %g bytes", spec->name, spec->memory_bytes);
    }
    char names[64]; // shorter than the list: cut, not overrun
    device_spec_names(names, sizeof names);
    CHECK(strlen(names) == sizeof names - 1 && strncmp(names, "GB200, B200, ", 13) == 0, "%s", names);
    CHECK_CLOSE(device_spec_find("B200")->bf16_flops, 36e15 / 2 / 8, 1e-3, 0); // DGX B200: 36 PFLOP/s, sparse, of eight
    CHECK_CLOSE(device_spec_find("B200")->bandwidth, 64e12 / 8, 1e-3, 0);
    CHECK_CLOSE(device_spec_find("GB200")->bf16_flops, 360e15 / 2 / 72, 1e-3, 0); // GB200 NVL72
    CHECK_CLOSE(device_spec_find("GB200")->bandwidth, 576e12 / 72, 1e-3, 0);
}

int main(void) {
    RUN(test_names, test_device_figures_of_chips);
    return test_summary();
}
