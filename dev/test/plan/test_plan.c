// plan: compares --dry-run's time, memory, ranks and cost with values computed by hand and with measured runs.
#include "ranks/parallel.h"
#include "plan/plan.h"

#include "../test.h"

static Error e; // set by the last call that failed

// ---- Work and time of kernels ---------------------------------------------------------------------------------------

// A machine with round numbers, 100 FLOP/s and 10 B/s, at full efficiency.
static PlanDevice round_device(void) {
    return (PlanDevice){
        .name = "round",
        .value = 2,
        .peak = 100,
        .spec = {.bandwidth = 10, .memory_bytes = 1e9, .link = 8, .network = 0.5, .devices_a_machine = 4},
        .head_bytes = 1e12,
        .efficiency = {.of_peak = {0.5, 0.4, 0.2, 0.1},
                       .matmul_reads = 0.25,
                       .stream = 0.5,
                       .copy = 1,
                       .link = 0.5,
                       .launch = 0.125,
                       .hop = 1,
                       .network_hop = 3},
    };
}

static void test_kernel_seconds(void) {
    PlanDevice d = round_device();
    // 1000 FLOPs at 50 FLOP/s: 20 s. A quarter of 40 B read, and 30 B written, at 10 B/s: 1 s + 3 s.
    Work w = {.kind = WORK_MATMUL, .flops = 1000, .read = 40, .written = 30, .count = 1};
    CHECK_CLOSE(plan_kernel_seconds(&d, &w), 24, 1e-12, 0);
    w.flops = 10; // 0.2 s + 4 s < 7 s for 70 B
    CHECK_CLOSE(plan_kernel_seconds(&d, &w), 7, 1e-12, 0);
    w.kind = WORK_STREAM; // at half of the bandwidth
    CHECK_CLOSE(plan_kernel_seconds(&d, &w), 14, 1e-12, 0);
    w = (Work){.kind = WORK_ATTENTION_FORWARD, .flops = 400, .read = 1, .count = 1};
    CHECK_CLOSE(plan_kernel_seconds(&d, &w), 10, 1e-12, 0);
    w.kind = WORK_ATTENTION_BACKWARD;
    CHECK_CLOSE(plan_kernel_seconds(&d, &w), 20, 1e-12, 0);
    w.kind = WORK_MASKS;
    CHECK_CLOSE(plan_kernel_seconds(&d, &w), 40, 1e-12, 0);
    w.flops = w.read = 0; // costs only the launch
    CHECK_CLOSE(plan_kernel_seconds(&d, &w), 0.125, 1e-12, 0);
}

// Returns a preset's model; makes each model once.
static const Model *model_of(const char *preset, int vocab, int seq_len) {
    static Model made[12];
    ModelConfig config = {.vocab = vocab, .context = seq_len};
    int i = 0;
    CHECK(model_preset(&config, preset), "%s", preset);
    while (made[i].tensor_count && memcmp(&made[i].config, &config, sizeof config) != 0) i++;
    if (!made[i].tensor_count) CHECK_OK(model_create(&made[i], &config, &e), &e);
    return &made[i];
}

static Options options; // set by make_plan

static Plan make_plan(const Model *model, const char *device, int micro_batch, int seq_len) {
    EngineDevice cpu = {.is_cpu = true, .value_bytes = 4, .head_bytes = 64 << 20, .flops = 1e11, .bandwidth = 1e10};
    Plan p = {.options = &options, .engine = &cpu_engine, .ranks = 1, .estimate_memory = true};
    p.sharing = (ParallelConfig){.tensor = 1, .batch_max = micro_batch};
    options_defaults(&options);
    snprintf(options.device, sizeof options.device, "%s", device);
    p.shape = (EngineConfig){.model = model, .micro_batch = micro_batch, .seq_len = seq_len, .gns = GNS_LN};
    CHECK_OK(plan_device(&p.device, &options, &cpu, &e), &e);
    return p;
}

// Makes a plan with GPT-2's vocabulary and 1024 tokens per row.
static Plan plan_of(const char *preset, const char *device, int micro_batch) {
    return make_plan(model_of(preset, 50257, 1024), device, micro_batch, 1024);
}

// Returns the work of a micro-step of the plan's rows.
static PlanWork micro_step(const Plan *p, double exact) {
    PlanWork w = {0};
    plan_add_micro_steps(&w, &p->device, &p->shape, p->shape.micro_batch, exact, 1);
    return w;
}

static PlanWork update_of(const Plan *p, Optimizer optimizer, double owned) {
    PlanWork w = {0};
    plan_add_update(&w, &p->device, p->shape.model, optimizer, owned);
    return w;
}

// Products cost 6 FLOPs per token and weight: 2 forward, 4 backward. Causal attention costs 7 C (T + 1) per token and
// layer; the formula counts 6 C T, without the q k^T that the backward pass recomputes.
static void test_work_is_the_formula(void) {
    Plan p = plan_of("d12", "H200", 64);
    p.device.fuses_exact = false;
    PlanWork w = micro_step(&p, 0);
    double N = 64 * 1024, C = 768, L = 12, T = 1024;
    CHECK_CLOSE(w.family[FAMILY_BLOCK_MATMUL].flops, 6 * N * L * 12 * C * C, 1e-12, 0);
    CHECK_CLOSE(w.family[FAMILY_HEAD_MATMUL].flops, 6 * N * C * 50304, 1e-12, 0);
    CHECK_CLOSE(w.family[FAMILY_ATTENTION].flops, N * L * 7 * C * (T + 1), 1e-12, 0);
    double all = w.family[FAMILY_BLOCK_MATMUL].flops + w.family[FAMILY_HEAD_MATMUL].flops;
    CHECK_CLOSE(all + N * L * 6 * C * T, N * model_flops_per_token(p.shape.model, 1024), 2e-3, 0);
    // A linear layer reads and writes 6 N (in + out) bytes in bf16, and 12 in out of weights and of fp32 gradients.
    CHECK_CLOSE(w.family[FAMILY_BLOCK_MATMUL].bytes, L * (6 * N * 16 * C + 12 * 12 * C * C), 1e-12, 0);
    // 25 LayerNorms in bf16: forward reads two values and writes two; backward reads three and writes one.
    CHECK_CLOSE(w.family[FAMILY_LAYERNORM].bytes, 25 * N * C * 2 * 8, 1e-12, 0);
    // Logits are read and written in place.
    CHECK_CLOSE(w.family[FAMILY_CROSSENTROPY].bytes, N * 50304 * 4, 1e-12, 0);
    // With stored exponentials: lnf is read twice and written; a row of wte is read.
    p.device.fuses_exact = true;
    PlanWork exponentials = micro_step(&p, 0);
    CHECK_CLOSE(exponentials.family[FAMILY_CROSSENTROPY].bytes, N * C * 4 * 2, 1e-12, 0);
    CHECK(exponentials.family[FAMILY_HEAD_MATMUL].bytes == w.family[FAMILY_HEAD_MATMUL].bytes, "products");
    double flat = (double)p.shape.model->flat_count, quarter = L * 12 * C * C / 4;
    CHECK_CLOSE(update_of(&p, OPTIMIZER_ADAMW, flat).family[FAMILY_OPTIMIZER].bytes, 38 * flat, 1e-12, 0);
    // LAMB reads weight, moments and gradient twice.
    CHECK_CLOSE(update_of(&p, OPTIMIZER_LAMB, flat).family[FAMILY_OPTIMIZER].bytes, 54 * flat, 1e-12, 0);
    // FLOPs in each of five steps: 6 C^3 for each C x C matrix (q, k, v, proj), 18 C^3 for each 4C x C (fc, fcproj).
    // Beside the products: 2 per gradient for norms, 9 per element of a matrix, 14 per other element.
    double muon = update_of(&p, OPTIMIZER_MUON, flat / 4).family[FAMILY_OPTIMIZER].flops;
    CHECK_CLOSE(muon - (2 * flat + 9 * quarter + 14 * (flat / 4 - quarter)), L / 4 * 5 * (4 * 6 + 2 * 18) * C * C * C,
                1e-9, 0);
}

static void test_recomputing_and_exact_norms_cost(void) {
    Plan p = plan_of("d12", "H200", 64);
    p.device.fuses_exact = false;
    PlanWork none = micro_step(&p, 0), exact = micro_step(&p, 1);
    p.shape.recompute = RECOMPUTE_GELU;
    PlanWork gelu = micro_step(&p, 0);
    p.shape.recompute = RECOMPUTE_BLOCK;
    PlanWork block = micro_step(&p, 0);
    p.shape.recompute = RECOMPUTE_NONE;
    const PlanWork often = micro_step(&p, 0.25); // a quarter of the micro-steps measures exact norms
    CHECK_CLOSE(often.pass[PASS_BACKWARD], 0.75 * none.pass[PASS_BACKWARD] + 0.25 * exact.pass[PASS_BACKWARD], 1e-12,
                0);
    double N = 64 * 1024, C = 768;
    CHECK_CLOSE(gelu.family[FAMILY_GELU].bytes - none.family[FAMILY_GELU].bytes, 11 * N * 4 * C * 4, 1e-9, 0);
    CHECK_CLOSE(block.family[FAMILY_BLOCK_MATMUL].flops - none.family[FAMILY_BLOCK_MATMUL].flops,
                11 * 2 * N * 8 * C * C, 1e-9, 0); // qkv, proj and fc of eleven blocks
    // Exact norms read every example's gradient of every matrix, in fp32, and read and write the sum once; in the head,
    // once for each of 4 chunks of 16 examples.
    double blocks = 12 * 12 * C * C, head = 50304 * C;
    CHECK_CLOSE(exact.family[FAMILY_EXACT_NORMS].bytes, 4 * (blocks * (64 + 2) + head * (64 + 4 * 2)), 1e-9, 0);
    // Norms fused into the products read and write only rows of the head's dwte.
    p.device.fuses_exact = true;
    PlanWork fused = micro_step(&p, 1);
    CHECK_CLOSE(fused.family[FAMILY_EXACT_NORMS].bytes, 2 * 4 * N * C, 1e-9, 0);
    for (WorkFamily f = FAMILY_BLOCK_MATMUL; f <= FAMILY_HEAD_MATMUL; f++)
        CHECK(fused.family[f].bytes == none.family[f].bytes, "family %d", f);
}

// Tests which devices, precisions and widths fuse exact norms, and what the norms cost in a step.
static void test_fused_exact_norms(void) {
    static const struct {
        const char *device;
        bool fuses;
    } devices[] = {{"H100", true},      {"H200", true},  {"GH200", true},
                   {"H100 PCIe", true}, {"B200", false}, {"A100", false}};
    const ModelConfig odd = {1, 1, 1026, 256, 64}, *d12 = &model_of("d12", 50257, 1024)->config;
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
        Plan p = plan_of("d12", devices[i].device, 64);
        CHECK(plan_fuses_exact(&p.device, d12) == devices[i].fuses, "%s", devices[i].device);
        CHECK(!plan_fuses_exact(&p.device, &odd), "%s, 1026 channels", devices[i].device);
        double ln = plan_step(&p, 64).seconds;
        options.run.gns_exact_interval = 1;
        double more = plan_step(&p, 64).seconds / ln - 1;
        CHECK(devices[i].fuses ? more > 0 && more < 0.005 : more > 0.1, "%s: %+.1f%%", devices[i].device, 100 * more);
    }
    EngineDevice here = {.name = "NVIDIA H200", .value_bytes = 4, .exact_is_fused = false};
    PlanDevice device;
    CHECK_OK(plan_device(&device, &(Options){.device = "H200"}, &here, &e), &e);
    CHECK(!plan_fuses_exact(&device, d12), "a build of fp32");
    for (int fused = 0; fused < 2; fused++) {
        here = (EngineDevice){.name = "NVIDIA H200", .value_bytes = 2, .exact_is_fused = fused};
        CHECK_OK(plan_device(&device, &(Options){.device = ""}, &here, &e), &e);
        CHECK(plan_fuses_exact(&device, d12) == fused, "what the engine says, %d", fused);
    }
}

// ---- Measured on an H200 SXM, bf16 ----------------------------------------------------------------------------------

static double planned_speed(const Plan *p) {
    int rows = p->shape.micro_batch;
    return rows * p->shape.seq_len / plan_step(p, rows).seconds;
}

static void test_measured_steps(void) {
    static const struct {
        const char *preset;
        int micro_batch;
        double tok_per_s;
        int64_t exact_interval;
        bool hopper;
    } cases[] = {
        {"d12", 64, 671800, 0, true},         {"d24", 32, 234700, 0, true},  {"d48", 16, 56800, 0, true},
        {"d12", 64, 648100, 1, true},         {"d12", 64, 635000, 0, false}, // before Hopper's own kernels
        {"d12", 64, 635000 / 1.21, 1, false},                                // --gns exact, batched: +21% of the step
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Plan p = plan_of(cases[i].preset, "NVIDIA H200", cases[i].micro_batch);
        options.run.gns_exact_interval = cases[i].exact_interval;
        p.device.fuses_exact = cases[i].hopper;
        double planned = planned_speed(&p), measured = cases[i].tok_per_s;
        CHECK(fabs(planned / measured - 1) < 0.06, "case %zu: %.0f tok/s, measured %.0f", i, planned, measured);
    }
    // Measured on an H100, in alternation (d24's fp8-dw on an H200): speeds of --dtype fp8 and fp8-dw, relative to
    // bf16.
    const double fp8[] = {728181.0 / 645424, 267008.0 / 237003, 66609.0 / 55501};
    const double fp8_dw[] = {764633.0 / 648753, 297368.0 / 240785, 73146.0 / 54817};
    for (int i = 0; i < 3; i++) {
        Plan p = plan_of(cases[i].preset, "H100", cases[i].micro_batch);
        options.run.gns_exact_interval = 0;
        const double bf16 = planned_speed(&p);
        p.shape.dtype = DTYPE_FP8_DW;
        const double dw = planned_speed(&p) / bf16;
        CHECK(fabs(dw / fp8_dw[i] - 1) < 0.03, "%s: fp8-dw x %.3f, measured %.3f", cases[i].preset, dw, fp8_dw[i]);
        p.shape.dtype = DTYPE_FP8;
        const double planned = planned_speed(&p) / bf16;
        CHECK(fabs(planned / fp8[i] - 1) < 0.03, "%s: fp8 x %.3f, measured %.3f", cases[i].preset, planned, fp8[i]);
    }
    Plan p = plan_of("d12", "H200", 64);
    double without = planned_speed(&p);
    p.shape.dropout.below = 1;
    CHECK_CLOSE(without / planned_speed(&p) - 1, 0.063, 0.08, 0); // +6.3% +- 0.5% of a step
}

// Measured on two cores of an EPYC with 233.6 GFLOP/s of multiply-adds: 243 tok/s with d12 and 4 rows of 64 tokens.
// Assumes 25 GB/s, the speed of a copy on two such cores.
static void test_measured_cpu(void) {
    Plan p = make_plan(model_of("d12", 50257, 64), "H200", 4, 64);
    EngineDevice cpu = {"CPU", true, .value_bytes = 4, .head_bytes = 64 << 20, .flops = 233.6e9, .bandwidth = 25e9};
    CHECK_OK(plan_device(&p.device, &(Options){.device = ""}, &cpu, &e), &e);
    CHECK(p.device.measured, "the CPU's own figures");
    CHECK_CLOSE(4 * 64 / plan_step(&p, 4).seconds, 243, 0.15, 0);
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

static double mib_of(const Plan *p) {
    MemoryPlan memory;
    plan_memory(p, p->shape.micro_batch, &memory);
    double sum = 0;
    for (int i = 0; i < memory.count; i++) sum += (double)memory.item[i].bytes;
    CHECK(sum == (double)memory.total, "the items make the sum");
    return sum / (1 << 20);
}

// measured false: figures of the CUDA engine's own exact plan, plus CUDA's 532 MiB; exact norms are batched. measured
// true: figures of nvidia-smi on H200s (4 ranks: of the trainer's log), with the head in chunks of 800 MiB. The terms
// -4800 to +192 update older figures: GELU's slope (1 byte) replaced GELU's input (2 bytes) in all blocks, with
// RECOMPUTE_BLOCK in one; RECOMPUTE_GELU keeps one more slope.
static void test_memory_estimate(void) {
    static const struct {
        const char *preset;
        int micro_batch;
        Recompute recompute;
        GnsMode gns;
        bool measured;
        int ranks;
        ZeroStage zero;
        double mib;
    } cases[] = {
        {"d12", 64, RECOMPUTE_NONE, GNS_LN, false, 1, ZERO_0, 22568.7 - 2304 + 532},
        {"d12", 64, RECOMPUTE_GELU, GNS_LN, false, 1, ZERO_0, 18344.7 + 192 + 532},
        {"d12", 64, RECOMPUTE_BLOCK, GNS_LN, false, 1, ZERO_0, 6780.7 - 192 + 532},
        {"d24", 32, RECOMPUTE_NONE, GNS_LN, false, 1, ZERO_0, 32591.6 - 3072 + 532},
        {"d48", 16, RECOMPUTE_NONE, GNS_LN, false, 1, ZERO_0, 67066.4 - 4800 + 532},
        {"d12", 64, RECOMPUTE_NONE, GNS_EXACT, false, 1, ZERO_0, 22899.6 - 2304 + 532},
        {"d12", 64, RECOMPUTE_NONE, GNS_LN, true, 1, ZERO_0, 22301 - 2304},
        {"d12", 64, RECOMPUTE_BLOCK, GNS_LN, true, 1, ZERO_0, 6513 - 192},
        {"d24", 32, RECOMPUTE_NONE, GNS_LN, true, 1, ZERO_0, 32315 - 3072},
        {"d12", 64, RECOMPUTE_NONE, GNS_LN, true, 4, ZERO_0, 22.6 * 1024 - 2304},
        {"d12", 64, RECOMPUTE_NONE, GNS_LN, true, 4, ZERO_1, 21.4 * 1024 - 2304},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Plan p = plan_of(cases[i].preset, "H200", cases[i].micro_batch);
        p.shape.recompute = cases[i].recompute, p.shape.gns = cases[i].gns;
        p.ranks = cases[i].ranks, p.sharing.zero = cases[i].zero;
        if (cases[i].measured) p.device.head_bytes = 800 << 20;
        else p.device.fuses_exact = false;
        double mib = mib_of(&p);
        CHECK(fabs(mib / cases[i].mib - 1) < 0.02, "case %zu: %.0f MiB, want %.0f", i, mib, cases[i].mib);
    }
    // Fused exact norms need a table of ints per chunk of the head, but no gradients of examples.
    Plan ln = plan_of("d12", "H200", 64), exact = ln;
    exact.shape.gns = GNS_EXACT;
    CHECK_CLOSE(mib_of(&exact) - mib_of(&ln), (4.0 * 64 * 1024 * 768 + 4.0 * 16 * 50304) / (1 << 20), 1e-3, 0);
}

// Several ranks add NCCL's measured memory. Gradients in bf16 add a buffer of the largest bucket: the embeddings, or
// with a small vocabulary the last block with ln_f.
static void test_library_memory(void) {
    Plan large = plan_of("d12", "H200", 64), small = make_plan(model_of("d2", 256, 64), "H200", 1, 64);
    const double bucket[] = {768 * (50304 + 1024), 12 * 128 * 128 + 13 * 128 + 2 * 128};
    for (int i = 0; i < 2; i++) {
        const Plan one = i ? small : large, two = plan_with(&one, ZERO_0, 2, 1), four = plan_with(&one, ZERO_0, 4, 1);
        options.comm_dtype = WIRE_FP32;
        CHECK_CLOSE(mib_of(&two) - mib_of(&one), 860, 1e-3, 0);
        CHECK(mib_of(&four) == mib_of(&two), "plans %d: four ranks", i);
        options.comm_dtype = WIRE_BF16;
        CHECK_CLOSE(mib_of(&two) - mib_of(&one), 860 + 2 * bucket[i] / (1 << 20), 1e-3, 0);
    }
    const double gpu = mib_of(&large);
    large.device.measured = true; // a CPU: without CUDA, but with the copy for checkpoints
    CHECK_CLOSE(gpu - mib_of(&large), 532, 1e-3, 0);
    large.copies = true;
    CHECK_CLOSE(mib_of(&large) - gpu, 12 * (double)large.shape.model->flat_count / (1 << 20) - 532, 1e-3, 0);
}

// Bytes per parameter on 8 ranks in bf16, by hand: 4 + 2 for weights, 4 for gradients, 8 for moments. ZeRO-0: 18.
// ZeRO-1: 4/8 + 2 + 4 + 8/8 = 7.5. ZeRO-2 keeps gradients of two blocks and the embeddings, and 1/8 of the sums. ZeRO-3
// keeps 4/8 + 2/8 for weights, and 2 bytes per weight in the slots.
static void test_state_bytes(void) {
    double block = 12 * 768 * 768 + 13 * 768, embeddings = (50304 + 1024) * 768;
    double all = (double)model_of("d12", 50257, 1024)->flat_count;
    double part = (2 * (block + 2 * 768) + embeddings) / all, want[] = {18, 7.5, 3.5 + 4 * part + 0.5, 2.25 + 6 * part};
    Plan one = plan_of("d12", "H200", 64);
    for (int zero = 0; zero < 4; zero++) {
        const Plan p = plan_with(&one, (ZeroStage)zero, 8, 1);
        MemoryPlan memory;
        plan_memory(&p, 64, &memory);
        double state = 0;
        for (int i = 0; i < 3; i++) state += (double)memory.item[i].bytes; // weights, gradients, moments
        CHECK_CLOSE(state / all, want[zero], 1e-3, 0);
    }
}

static void test_largest_micro_batch(void) {
    MemoryPlan memory;
    Plan p = make_plan(model_of("d2", 256, 64), "H200", 1, 64);
    p.estimate_memory = false, p.device.measured = true; // a CPU: the plan of this program's engine
    plan_memory(&p, 1, &memory);
    CHECK((p.device.spec.memory_bytes = (double)memory.total) > 0 && plan_largest_micro_batch(&p) == 0, "not one row");
    for (double bytes = 3e6; bytes < 100e6; bytes *= 1.7) {
        p.device.spec.memory_bytes = bytes;
        int fits = 0; // the largest micro-batch, found by trying all
        for (int b = 1; b == fits + 1; b++) {
            plan_memory(&p, b, &memory);
            if ((double)memory.total <= 0.97 * bytes) fits = b;
        }
        int got = plan_largest_micro_batch(&p);
        CHECK(got == fits, "%d rows in %.0f bytes, want %d", got, bytes, fits);
    }
}

// ---- Ranks ----------------------------------------------------------------------------------------------------------

static void test_ring(void) {
    PlanDevice d = round_device(); // 4 devices per machine; 8 B/s within, 4 x 0.5 B/s between machines; rings get half
    CHECK_CLOSE(plan_link_bandwidth(&d, 4), 8, 1e-12, 0);
    CHECK_CLOSE(plan_link_bandwidth(&d, 5), 2, 1e-12, 0);
    CHECK(plan_ring_seconds(&d, 1, 1e9) == 0, "no other rank");
    d.spec.link = 1.5; // slower than the machine's network cards together
    CHECK_CLOSE(plan_link_bandwidth(&d, 5), 1.5, 1e-12, 0);
    d.spec.link = 8;
    CHECK_CLOSE(plan_ring_seconds(&d, 4, 64), 3 * 1 + 0.75 * 64 / 4, 1e-12, 0);
    CHECK_CLOSE(plan_ring_seconds(&d, 8, 64), 5 * 1 + 2 * 3 + 0.875 * 64 / 1, 1e-12, 0);
    // Each of 4 ranks sends to 3 through the switch. Each of 8 ranks sends to 3 on its machine at 8 B/s, to 4 on the
    // other at 0.5 B/s.
    CHECK_CLOSE(plan_all_to_all_seconds(&d, 4, 64), 1 + 3 * 64.0 / 16 / 4, 1e-12, 0);
    CHECK_CLOSE(plan_all_to_all_seconds(&d, 8, 64), 3 + 4 * 64.0 / 64 / 0.25, 1e-12, 0);
    PlanDevice torus = d; // 4 x 4 x 4: three rounds per axis, both ways at once; a piece crosses 4/4 links per axis
    torus.spec.axes = 3, torus.spec.devices_a_machine = 64;
    CHECK_CLOSE(plan_link_bandwidth(&torus, 64), 24, 1e-12, 0);
    CHECK_CLOSE(plan_ring_seconds(&torus, 64, 64), 3 * 1.5 + 63.0 / 12, 1e-12, 0);
    CHECK_CLOSE(plan_all_to_all_seconds(&torus, 64, 64), 1 + 64 * 4.0 / (4 * 64) / 4, 1e-12, 0);
    // NCCL's all-reduce on 8 H200: bytes; bus bandwidth, which is 2 (K - 1) / K * bytes / seconds.
    static const double measured[][2] = {{249e6, 343e9}, {712e6, 356e9}, {3.1e9, 364e9}};
    Plan p = plan_of("d12", "H200", 64);
    for (int i = 0; i < 3; i++) {
        double bytes = measured[i][0], seconds = 2 * plan_ring_seconds(&p.device, 8, bytes);
        CHECK_CLOSE(2 * 7.0 / 8 * bytes / seconds, measured[i][1], 0.03, 0);
    }
    // The ZeRO paper, section 7: 2 values per parameter for plain data parallelism, ZeRO-1 and -2; up to 3 for ZeRO-3.
    double all = (double)p.shape.model->flat_count;
    p.ranks = 8, p.rows = 8 * 64;
    CHECK_CLOSE(plan_step(&p, p.rows).bytes, 7.0 / 8 * all * (4 + 4), 1e-12, 0);
    p.sharing.zero = ZERO_1;
    CHECK_CLOSE(plan_step(&p, p.rows).bytes, 7.0 / 8 * all * (4 + 2), 1e-12, 0);
    p.sharing.zero = ZERO_3, options.comm_dtype = WIRE_BF16; // the backward pass gathers 10 of 12 blocks again
    double blocks = all - (double)model_bucket(p.shape.model, 0).end;
    CHECK_CLOSE(plan_step(&p, p.rows).bytes, 7.0 / 8 * 2 * (2 * all + 10.0 / 12 * blocks), 1e-12, 0);
}

// Two ranks, 10 rows per step and a slow link: the passes hide little. Exposed time: blocks' gradients - backward pass
// + embeddings' gradients + gathering - update or forward pass. A bucket costs one latency and half of its bytes.
static void test_exposed(void) {
    Plan p = make_plan(model_of("d2", 256, 64), "H200", 10, 64);
    PlanEfficiency *s = &p.device.efficiency;
    p.ranks = 2;
    p.device.spec.link = 1e9, s->link = 0.5, s->hop = 1e-3; // 0.5 GB/s
    double C = 128, embeddings = 256 * C + 64 * C, layer = 12 * C * C + 13 * C;
    double last = layer + 2 * C; // with ln_f
    double scatter = 2 * 1e-3 + 0.5 * 4 * (layer + last) / 0.5e9, rest = 1e-3 + 0.5 * 4 * embeddings / 0.5e9;
    PlanStep zero0 = plan_step(&p, 10);
    const double *all = zero0.all.pass, backward = zero0.last.pass[PASS_BACKWARD];
    CHECK(backward > 0 && backward < scatter, "hides a part: %g s", backward);
    CHECK_CLOSE(zero0.exposed, scatter - backward + rest + rest + scatter - all[PASS_UPDATE], 1e-9, 0);
    CHECK_CLOSE(zero0.seconds, all[PASS_FORWARD] + all[PASS_BACKWARD] + all[PASS_UPDATE] + zero0.exposed, 1e-12, 0);
    p.sharing.zero = ZERO_1,
    options.comm_dtype = WIRE_BF16; // halves the bytes of gradients and weights, not the latencies
    PlanStep zero1 = plan_step(&p, 10);
    double half = (scatter - 2e-3) / 2 + 2e-3, half_rest = (rest - 1e-3) / 2 + 1e-3;
    CHECK_CLOSE(zero1.exposed,
                half - zero1.last.pass[PASS_BACKWARD] + half_rest + half_rest + half - zero1.all.pass[PASS_FORWARD],
                1e-9, 0);
    p.sharing.zero = ZERO_2, p.sharing.reduce = REDUCE_MICRO_STEP,
    p.shape.micro_batch = 2; // 5 rows per rank are micro-steps of 2, 2 and 1: three scatters
    PlanStep zero2 = plan_step(&p, 10);
    const double *first = zero2.first.pass;
    CHECK_CLOSE(zero2.exposed,
                3 * (half + half_rest) - 2 * (first[PASS_BACKWARD] + first[PASS_FORWARD]) -
                    zero2.last.pass[PASS_BACKWARD] + half_rest + half - first[PASS_FORWARD],
                1e-9, 0);
}

// ZeRO-3 with test_exposed's link and rows, and five layers. Two blocks stay in their slots between passes, so a pass
// gathers 3/5 of the blocks again.
static void test_exposed_weights(void) {
    const Model *model = model_of("d5", 256, 64);
    Plan p = make_plan(model, "H200", 2, 64);
    p.ranks = 2, p.rows = 10; // 5 rows per rank: three micro-steps
    p.device.spec.link = 1e9, p.device.efficiency.link = 0.5, p.device.efficiency.hop = 1e-3;
    p.sharing.zero = ZERO_3, options.comm_dtype = WIRE_BF16;
    double embeddings = (double)model_bucket(model, 0).end, blocks = (double)model->flat_count - embeddings;
    double all = 5e-3 + 0.5 * 2 * blocks / 0.5e9, rest = 1e-3 + 0.5 * 2 * embeddings / 0.5e9;
    for (int micro = 0; micro < 2; micro++) {
        p.sharing.reduce = micro ? REDUCE_MICRO_STEP : REDUCE_STEP;
        PlanStep s = plan_step(&p, 10);
        const double *first = s.first.pass, *last = s.last.pass, F = first[PASS_FORWARD], B = first[PASS_BACKWARD];
        double want = rest + all - F + 1.6 * all - last[PASS_BACKWARD] + rest +
                      2 * (fmax(0, (0.6 + micro) * all - B) + fmax(0, 0.6 * all + micro * rest - F));
        CHECK_CLOSE(s.exposed, want, 1e-9, 0);
        CHECK_CLOSE(s.bytes, 0.5 * 2 * ((micro ? 3 : 1) * (blocks + embeddings) + embeddings + 4 * blocks), 1e-9, 0);
    }
}

// --shard machine on two machines of two ranks, with test_exposed_weights' model: weights travel within a machine; half
// of the gradients' sums also travel over the network, in both directions. A rank's memory is as on one machine.
static void test_replicas(void) {
    const Model *model = model_of("d5", 256, 64);
    Plan p = make_plan(model, "H200", 2, 64);
    PlanEfficiency *s = &p.device.efficiency;
    p.ranks = 4, p.rows = 4; // one micro-step
    p.device.spec.link = 1e9, p.device.spec.network = 0.25e9, p.device.spec.devices_a_machine = 2;
    s->link = 0.5, s->hop = 1e-3, s->network_hop = 2e-3;
    p.sharing.zero = ZERO_3, p.sharing.shared = 2;
    options.comm_dtype = WIRE_FP32;
    const double rest = (double)model_bucket(model, 0).end, blocks = (double)model->flat_count - rest;
    const double gathered[] = {5e-3 + 0.5 * 2 * blocks / 0.5e9, 1e-3 + 0.5 * 2 * rest / 0.5e9}; // blocks, the rest
    const double summed[] = {5e-3 + 0.5 * 4 * blocks / 0.5e9 + 2 * (5 * 2 * 2e-3 + 0.5 * 4 * blocks / 2 / 0.125e9),
                             1e-3 + 0.5 * 4 * rest / 0.5e9 + 2 * (2 * 2e-3 + 0.5 * 4 * rest / 2 / 0.125e9)};
    PlanStep step = plan_step(&p, 4);
    CHECK_CLOSE(step.exposed,
                0.6 * gathered[0] + summed[0] - step.last.pass[PASS_BACKWARD] + summed[1] + gathered[1] +
                    fmax(0, gathered[0] - step.first.pass[PASS_FORWARD]),
                1e-9, 0);
    CHECK_CLOSE(step.bytes, 0.5 * (6 * rest + (4 + 2 * 1.6) * blocks) + 2 * 0.5 * 4 * (rest + blocks) / 2, 1e-9, 0);
    Plan one = plan_with(&p, ZERO_3, 2, 1);
    MemoryPlan machine, two;
    plan_memory(&one, 1, &machine), plan_memory(&p, 1, &two);
    CHECK(machine.total == two.total, "%zu bytes, on one machine %zu", two.total, machine.total);
    CHECK(plan_with(&p, ZERO_3, 1, 1).sharing.shared == 1, "one rank");
}

// d12 over two ranks: each has 6 heads, 1536 columns and half of the residual stream's rows. A micro-step of 4 rows
// makes 8 exchanges per layer, each of 4 x 1024 x 768 values in bf16.
static void test_tensor(void) {
    Plan one = plan_of("d12", "H200", 4), two = plan_with(&one, ZERO_1, 2, 2);
    MemoryPlan whole, cut;
    one.rows = two.rows = 10; // micro-steps of 4, 4 and 2
    PlanStep a = plan_step(&one, 10), b = plan_step(&two, 10);
    const double row = 2.0 * 1024 * 768;
    CHECK(b.micro_steps == 3, "%lld", (long long)b.micro_steps);
    CHECK_CLOSE(2 * b.all.family[FAMILY_BLOCK_MATMUL].flops, a.all.family[FAMILY_BLOCK_MATMUL].flops, 1e-12, 0);
    CHECK_CLOSE(2 * b.all.family[FAMILY_ATTENTION].flops, a.all.family[FAMILY_ATTENTION].flops, 1e-12, 0);
    CHECK_CLOSE(2 * b.all.family[FAMILY_HEAD_MATMUL].flops, a.all.family[FAMILY_HEAD_MATMUL].flops, 1e-12, 0);
    CHECK_CLOSE(2 * b.all.family[FAMILY_LAYERNORM].bytes, a.all.family[FAMILY_LAYERNORM].bytes, 1e-12, 0);
    // Bucket 0 is summed over both ranks; a block's bucket lies on one rank.
    const double embeddings = 50304 * 768.0 + 1024 * 768 + 12 * 6 * 768 + 2 * 768;
    CHECK_CLOSE(b.bytes, (4 + 2) * embeddings / 2 + 96 * 10 * row / 2, 1e-6, 0);
    const double waits =
        96 * (2 * plan_ring_seconds(&two.device, 2, 4 * row) + plan_ring_seconds(&two.device, 2, 2 * row));
    CHECK_CLOSE(b.exposed,
                waits + plan_ring_seconds(&two.device, 2, 4 * embeddings) +
                    plan_ring_seconds(&two.device, 2, 2 * embeddings),
                1e-6, 0);
    one.shape.recompute = two.shape.recompute = RECOMPUTE_BLOCK;
    CHECK_CLOSE(plan_step(&two, 10).bytes - b.bytes, 33 * 10 * row / 2, 1e-9, 0);
    plan_memory(&one, 4, &whole), plan_memory(&two, 4, &cut);
    const double matrices = 12 * (12 * 768.0 * 768 + 7 * 768); // with the biases of qkv and fc
    CHECK_CLOSE((double)cut.item[1].bytes, (double)whole.item[1].bytes - 4 * matrices / 2, 1e-6, 0); // gradients
    CHECK_CLOSE((double)cut.item[2].bytes, 8 * (matrices / 2 + embeddings / 2), 1e-6, 0);            // moments
}

// With Muon ranks own whole blocks; some ranks own one block more. A plan describes rank 0, which owns the most.
static void test_muon_ranks(void) {
    Plan p = plan_of("d12", "H200", 1);
    MemoryPlan memory;
    p.ranks = 8, p.shape.optimizer = OPTIMIZER_MUON;
    p.sharing = (ParallelConfig){ZERO_1, .tensor = 1, .batch_max = 64};
    plan_memory(&p, 1, &memory);
    const double block = 12.0 * 768 * 768 + 13 * 768, embeddings = (50304.0 + 1024) * 768;
    CHECK_CLOSE((double)memory.item[2].bytes, 8 * (2 * block + embeddings / 8), 1e-3, 0); // moments
}

// With 10 rows on 4 ranks, rank 0 has 3 rows, in micro-steps of 2 and 1.
static void test_steps_are_cut(void) {
    Plan p = plan_of("d12", "H200", 2);
    p.ranks = 4;
    PlanStep s = plan_step(&p, 10), two, one;
    CHECK(s.micro_steps == 2, "%lld", (long long)s.micro_steps);
    p.ranks = 1;
    two = plan_step(&p, 2), one = plan_step(&p, 1);
    CHECK(two.all.pass[PASS_BACKWARD] > 1.2 * one.all.pass[PASS_BACKWARD], "two rows take longer than one");
    double forward = two.all.pass[PASS_FORWARD] + one.all.pass[PASS_FORWARD];
    CHECK_CLOSE(s.all.pass[PASS_FORWARD], forward, 1e-12, 0);
    CHECK_CLOSE(s.last.pass[PASS_BACKWARD], one.all.pass[PASS_BACKWARD], 1e-12, 0);
    PlanStep five = plan_step(&p, 5);
    CHECK_CLOSE(five.all.pass[PASS_FORWARD], two.all.pass[PASS_FORWARD] + forward, 1e-12, 0);
    double seconds = 0;
    for (int i = 0; i < FAMILIES; i++) seconds += five.all.family[i].seconds;
    CHECK_CLOSE(seconds, five.seconds, 1e-12, 0);
}

// ---- Runs -----------------------------------------------------------------------------------------------------------

static PlanRun run_of(RampMode mode, int64_t low, int64_t high, double tokens, double half_life, double target) {
    Ramp ramp;
    RampConfig c = {
        .mode = mode, .batch_min = low, .batch_max = high, .batch_ref = low, .seq_len = 10, .kappa = 1, .waste = 1};
    c.schedule = (Schedule){.kind = SCHEDULE_LINEAR, .lr = 1, .train_tokens = tokens, .final_frac = 0.1};
    Plan p = make_plan(model_of("d2", 256, 10), "H200", 4, 10);
    options.run.gns_half_life_tokens = half_life;
    CHECK_OK(ramp_create(&ramp, &c, NULL, &e), &e);
    const double before = ramp.rows;
    p.ramp = &ramp;
    PlanRun run = plan_run(&p, target);
    CHECK(ramp.rows == before, "planning leaves the ramp alone");
    ramp_destroy(&ramp);
    return run;
}

// test_plan.sh compares the other modes with runs.
static void test_runs(void) {
    PlanRun run = run_of(RAMP_FIXED, 3, 3, 1000, 0, 0); // 100 rows: 33 steps of 3, one of 1
    CHECK(run.steps == 34 && run.first_batch == 3 && run.last_batch == 3 && !run.cut, "%lld", (long long)run.steps);
    // gns doubles the batch per half-life of 5 rows: 2, 2.6, 4.0 and 7.0 rows. 11 steps of 8 take the other 84 rows.
    run = run_of(RAMP_GNS, 2, 8, 1000, 50, INFINITY);
    CHECK(run.steps == 4 + 11 && run.last_batch == 8, "%lld steps to %lld", (long long)run.steps,
          (long long)run.last_batch);
    run = run_of(RAMP_GNS, 2, 8, 1000, 50, 0);
    CHECK(run.steps == 50 && run.last_batch == 2, "%lld steps", (long long)run.steps);
}

static void test_seconds_of_a_run(void) {
    Ramp ramp;
    Plan p = plan_of("d12", "H200", 4);
    RampConfig c = {.mode = RAMP_FIXED, .batch_ref = 3, .seq_len = 1024, .schedule = {.train_tokens = 1024 * 100}};
    CHECK_OK(ramp_create(&ramp, &c, NULL, &e), &e);
    p.ramp = &ramp;
    PlanRun run = plan_run(&p, 0);
    CHECK_CLOSE(run.seconds, 33 * plan_step(&p, 3).seconds + plan_step(&p, 1).seconds, 1e-9, 0);
    ramp.config.schedule.train_tokens = 3072.0 * (2.0 * PLAN_STEPS_MAX); // twice PLAN_STEPS_MAX
    run = plan_run(&p, 0);
    CHECK(run.cut && run.steps == 2 * (int64_t)PLAN_STEPS_MAX, "%lld steps", (long long)run.steps);
    CHECK_CLOSE(run.seconds, 2.0 * PLAN_STEPS_MAX * plan_step(&p, 3).seconds, 1e-6, 0);
    ramp_destroy(&ramp);
}

// Checkpoints of a run of 100 steps, counted by hand.
static void test_checkpoints_at_a_time(void) {
    static const struct {
        int64_t every, best_every, keep, want, spike_steps;
    } cases[] = {
        {0, 0, 2, 1, 0},          // at the end
        {50, 0, 2, 2, 0},         // at 50 and 100
        {49, 0, 2, 3, 0},         // at 49, 98 and 100
        {10, 0, 2, 3, 0},         // two kept, one being written
        {10, 0, 0, 10, 0},        // all kept
        {10, 25, 2, 4, 0},        // the best checkpoint, too
        {0, 60, 2, 2, 0},         // at 60 and 100
        {10, 25, 0, 13, 0},       // also at 25, 50 and 75; 50 counts twice
        {4, INT64_MAX, 0, 25, 0}, // no overflow
        {10, 0, 1, 4, 5},         // --on-spike: the newest, one 10 steps older, one being written, an abandoned one
        {10, 0, 3, 5, 5},         // --keep covers the window
        {3, 0, 2, 8, 5},          // 9 steps hold three checkpoints, and a rollback abandons as many
        {10, 25, 1, 5, 5},        // the best checkpoint, too
        {50, 0, 0, 4, 5},         // at steps 0, 50 and 100, and an abandoned one
    };
    Ramp ramp;
    RampConfig c = {.mode = RAMP_FIXED, .batch_ref = 3, .seq_len = 8, .schedule = {.train_tokens = 8 * 3 * 100}};
    CHECK_OK(ramp_create(&ramp, &c, NULL, &e), &e);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Options o = {.val = "x", .checkpoint_every = cases[i].every, .keep = cases[i].keep};
        o.on_spike = o.spike_steps = cases[i].spike_steps;
        o.keep_best = cases[i].best_every > 0, o.val_every = cases[i].best_every;
        int64_t got = plan_checkpoints(&ramp, &o);
        CHECK(got == cases[i].want, "case %zu: %lld, want %lld", i, (long long)got, (long long)cases[i].want);
    }
    ramp_destroy(&ramp);
}

// ---- Devices --------------------------------------------------------------------------------------------------------

static void test_names(void) {
    // clang-format off
    static const struct {
        const char *said, *name;
    } cases[] = { // first names that the driver reports, then names that users type
        {"NVIDIA H200", "H200"}, {"NVIDIA H200 NVL", "H200 NVL"}, {"NVIDIA GH200 480GB", "GH200"},
        {"NVIDIA GB200", "GB200"}, {"NVIDIA B200", "B200"}, {"NVIDIA H100 80GB HBM3", "H100"},
        {"NVIDIA H100 PCIe", "H100 PCIe"}, {"NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB"},
        {"NVIDIA A100-SXM4-40GB", "A100"}, {"NVIDIA A100 80GB PCIe", "A100 80GB"}, {"NVIDIA A10G", "A10G"},
        {"NVIDIA L40S", "L40S"}, {"NVIDIA L4", "L4"}, {"NVIDIA GeForce RTX 4090", "RTX 4090"},
        {"NVIDIA GeForce RTX 4090 Laptop GPU", NULL}, {"RTX 3080 Max-Q", NULL}, {"NVIDIA GeForce RTX 4080 SUPER", NULL},
        {"NVIDIA RTX A4000", NULL}, {"Radeon", NULL}, {"", NULL},
        {"4090", "RTX 4090"}, {"rtx4090", "RTX 4090"}, {"a100-80gb", "A100 80GB"}, {"a100", "A100"},
        {"NVIDIA-A100-80GB", "A100 80GB"}, {"nvidia a100 sxm4 80gb", "A100 SXM4 80GB"}, {"RTX-4080-SUPER", NULL},
        {"L4", "L4"}, {"a100sxm4", "A100 SXM4 80GB"}, {"h200", "H200"}, {"6000 ada", "RTX 6000 Ada"},
        {"40", NULL}, {"rtx 30", NULL}, {"4080 SUPER", NULL}, {"Voodoo", NULL}, {"-", NULL},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const DeviceSpec *spec = device_spec_find(cases[i].said);
        const char *want = cases[i].name;
        CHECK(spec ? want && strcmp(spec->name, want) == 0 : !want, "%s taken for %s", cases[i].said,
              spec ? spec->name : "");
    }
    char names[64]; // too short for the list, which is cut
    device_spec_names(names, sizeof names);
    CHECK(strlen(names) == sizeof names - 1 && strncmp(names, "GB200, B200, ", 13) == 0, "%s", names);
}

static void test_devices_here_and_elsewhere(void) {
    PlanDevice d;
    EngineDevice cpu = {"CPU, 2 threads", true, .value_bytes = 4, .flops = 2e11, .bandwidth = 2e10};
    EngineDevice gpu = {.name = "NVIDIA H100 80GB HBM3", .value_bytes = 2, .memory_bytes = 85e9};
    EngineDevice gpu32 = gpu, none = {.value_bytes = 2};
    cpu.memory_bytes = 1e10, gpu32.value_bytes = 4;
    CHECK_OK(plan_device(&d, &(Options){.device = ""}, &cpu, &e), &e);
    CHECK(d.measured && d.peak == 2e11 && d.spec.memory_bytes == 1e10 && d.value == 4 && !(d.spec.network > 0),
          "the CPU");
    CHECK_OK(plan_device(&d, &(Options){.device = "h200", .link = 12}, &cpu, &e), &e);
    CHECK(!d.measured && d.value == 2 && d.peak == 989e12 && d.spec.network == 12e9,
          "a GPU, planned by the CPU trainer");
    CHECK(strcmp(d.name, "H200") == 0, "by its own name, not %s", d.name);
    CHECK_OK(plan_device(&d, &(Options){.device = ""}, &gpu, &e), &e);
    CHECK(d.value == 2 && d.peak == 989e12 && d.spec.memory_bytes == 85e9, "the GPU here, with its own memory");
    CHECK_OK(plan_device(&d, &(Options){.device = "A100"}, &gpu32, &e), &e);
    CHECK(d.value == 4 && d.peak == 19.5e12 && d.spec.memory_bytes == 40.0 * (1 << 30), "another, in fp32");
    CHECK_OK(plan_device(&d, &(Options){.device = ""}, &none, &e), &e);
    CHECK(!(d.peak > 0) && !*d.name, "no GPU here, and none named: no times");
    snprintf(none.name, sizeof none.name, "NVIDIA RTX A4000");
    CHECK_OK(plan_device(&d, &(Options){.device = ""}, &none, &e), &e);
    CHECK(!(d.peak > 0) && strcmp(d.name, "NVIDIA RTX A4000") == 0, "one that the table does not have");
    cpu.flops = 0; // a CPU without a kernel for the type
    CHECK_OK(plan_device(&d, &(Options){.device = "4090", .device_memory = 48}, &cpu, &e), &e);
    CHECK(d.peak == 165.2e12 && d.value == 2 && d.head_bytes > 0, "a GPU, planned by a CPU without its type");
}

int main(void) {
    RUN(test_kernel_seconds, test_work_is_the_formula, test_recomputing_and_exact_norms_cost, test_fused_exact_norms,
        test_measured_steps, test_measured_cpu, test_memory_estimate, test_library_memory, test_state_bytes,
        test_largest_micro_batch, test_ring, test_exposed, test_exposed_weights, test_replicas, test_tensor,
        test_muon_ranks, test_steps_are_cut, test_runs, test_seconds_of_a_run, test_checkpoints_at_a_time, test_names,
        test_devices_here_and_elsewhere);
    return test_summary();
}
