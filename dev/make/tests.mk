# Tests, fuzzers and benchmarks of the CPU trainer; included by the Makefile.

# Unit tests are programs; other tests are scripts that run programs. Fuzzers always run under the sanitizers.
UNIT_SOURCES := $(wildcard dev/test/*/test_*.c)
FUZZ_SOURCES := $(wildcard dev/test/*/fuzz_*.c)
UNIT := $(patsubst %.c,$(BUILD)/%,$(UNIT_SOURCES))
HELPERS := $(patsubst %.c,$(BUILD)/%,$(filter-out $(UNIT_SOURCES) $(FUZZ_SOURCES) dev/test/preload/%,$(wildcard dev/test/*/*.c)))
FUZZERS := $(patsubst %.c,$(SAN_BUILD)/%,$(FUZZ_SOURCES))
SCRIPTS := $(wildcard dev/test/*/test_*.sh)
TESTS := $(UNIT) $(FUZZERS) $(SCRIPTS)
# The longest tests start first, so that a short test ends last.
LONGEST := $(foreach name,test_cuda_build test_ranks test_faults test_shakespeare test_crash_ranks test_oracle test_crash test_launchers test_machines test_tokenize test_avx2 \
	test_report test_best test_outliers test_sources fuzz_readers test_program test_arm_build test_study test_demo test_rollback,$(filter %/$(name) %/$(name).sh,$(TESTS)))
CRASH_TESTS := $(addprefix $(BUILD)/dev/test/run/,test_resume test_crash test_crash_ranks)
CRASH_FUZZER := $(SAN_BUILD)/dev/test/run/fuzz_readers

# ----------------------------------------------------------------------------------------------------------------------
# Programs

# GNS_ENGINE: the engine in tests and benchmarks that run on either.
$(BUILD)/dev/%.o: ALL_CFLAGS += -DGNS_ENGINE=cpu_engine
$(BUILD)/dev/test/%.o: ALL_CFLAGS += -O0 # compiles in a third of the time; the library keeps -O3
# -O2 for tests whose run time counts.
$(BUILD)/dev/test/cpu/%.o $(BUILD)/dev/test/gns/%.o $(BUILD)/dev/test/math/%.o: ALL_CFLAGS += -O2
$(BUILD)/dev/test/run/test_metrics.o: ALL_CFLAGS += -O3 # compares bits of gns.h's inline functions with the library's
$(BUILD)/dev/%: $(BUILD)/dev/%.o $(BUILD)/train_gpt2.o $(LIBRARY)
	$(CC) $(ALL_CFLAGS) -o $@ $^ $(LDFLAGS) $(MPI_LIBS) $(LDLIBS)

# test_words compares the tokenizer's scanner with PCRE2.
$(BUILD)/dev/test/text/test_words: LDLIBS += -lpcre2-8

# Calls that tests make fail, count or replace.
wrap = $(addprefix -Wl$(comma)--wrap=,$(1))
FAULTS := write pwrite pread fsync renameat mkdir mkdirat openat unlinkat scandirat posix_memalign statvfs fstatvfs # dev/test/run/faults.h
$(BUILD)/dev/test/run/test_crash $(BUILD)/dev/test/run/test_best: LDFLAGS += $(call wrap,$(FAULTS))
$(BUILD)/dev/test/run/test_crash_ranks: LDFLAGS += $(call wrap,$(FAULTS) gethostname)
$(BUILD)/dev/test/base/test_files: LDFLAGS += $(call wrap,pwrite fsync pread fcntl)

BENCHES := $(addprefix $(BUILD)/dev/bench/,bench_cpu bench_engine bench_save bench_step)

# Calls that bench_save times or replaces.
TIMED := pwrite fsync pread run_state_write
$(BUILD)/dev/bench/bench_save: LDFLAGS += $(call wrap,$(TIMED))

# Calls that bench_step times.
STEP_KERNELS := matmul_nn matmul_nt matmul_tn layernorm_forward layernorm_backward gelu_forward gelu_backward cross_entropy attention_forward attention_backward
$(BUILD)/dev/bench/bench_step: LDFLAGS += $(call wrap,$(STEP_KERNELS))

# OpenBLAS is for comparison only.
ifeq ($(shell pkg-config --exists openblas 2> /dev/null && echo yes),yes)
$(BUILD)/dev/bench/bench_cpu.o: ALL_CFLAGS += -DHAVE_OPENBLAS $(shell pkg-config --cflags openblas)
$(BUILD)/dev/bench/bench_cpu: LDLIBS += $(shell pkg-config --libs openblas)
endif

# ----------------------------------------------------------------------------------------------------------------------
# Targets

# deps.sh may install MPI, which changes the build: a second make then finds MPI and builds.
WITH_DEPS := test test-long test-faults test-crash fuzz
$(WITH_DEPS):
	@scripts/deps.sh test
	@$(MAKE) --no-print-directory -s $@-run

test: ## every test that needs no GPU
check: test ## the same
test-run:
	@$(MAKE) --no-print-directory -s -j3 test-venv test-programs # test-venv waits for the network
	@dev/test/run.sh $(BUILD) $(LONGEST) $(filter-out $(LONGEST),$(TESTS))

test-venv:
	@scripts/deps.sh venv

# Sanitizes the code that reads bytes from outside; the fuzzers link this build's engine, ranks and plan.
UNSANITIZED := $(filter $(addprefix $(BUILD)/llmc/,cpu/% ranks/% plan/%),$(OBJECTS))
test-programs: $(UNIT) $(HELPERS) $(BENCHES) $(BUILD)/train_gpt2 $(BUILD)/data/tokenize
	@$(MAKE) --no-print-directory -s SAN=1 $(FUZZERS) $(SAN_BUILD)/data/tokenize \
		OBJECTS='$(UNSANITIZED) $(patsubst $(BUILD)/%,$(SAN_BUILD)/%,$(filter-out $(UNSANITIZED),$(OBJECTS)))'

test-long: ## the Shakespeare recipe with three seeds
test-long-run:
	@$(MAKE) --no-print-directory -s -j2 test-programs
	@GNS_LONG=1 dev/test/run.sh $(BUILD) dev/test/scripts/test_shakespeare.sh

test-faults: ## ranks that die, hang and exit at random times, ROUNDS=20 of five
test-faults-run:
	@$(MAKE) --no-print-directory -s -j2 test-programs
	@GNS_BUILD=$(BUILD) dev/test/ranks/test_faults.sh $(or $(ROUNDS),20)

test-crash: ## checkpoints: killed at every call, every call failing, every step resumed; with one rank and with four; half an hour
test-crash-run:
	@$(MAKE) --no-print-directory -s -j2 $(CRASH_TESTS)
	@$(MAKE) --no-print-directory -s SAN=1 $(CRASH_FUZZER)
	@GNS_LONG=1 dev/test/run.sh $(BUILD) $(CRASH_TESTS) $(CRASH_FUZZER)

# Without test_crash_ranks, which needs MPI, and test_crash, which takes an hour under qemu.
ARM_UNIT := $(filter-out %/test_crash %/test_crash_ranks,$(UNIT))
test-arm: ## the CPU trainer for 64-bit Arm under qemu: unit tests, and runs that it and this machine resume; 8 to 17 minutes
	@scripts/deps.sh test-arm
	@$(MAKE) --no-print-directory -s -j2 ARM=0 $(BUILD)/train_gpt2 $(BUILD)/data/tokenize
	@GNS_HERE=$(BUILD) $(MAKE) --no-print-directory -s ARM=1 test-arm-run
test-arm-run:
	@$(MAKE) --no-print-directory -s -j2 $(ARM_UNIT) $(BUILD)/train_gpt2 $(BUILD)/data/tokenize
	@GNS_RUNNER=dev/test/arm_run.sh dev/test/run.sh $(BUILD) dev/test/arm_check.sh $(ARM_UNIT)

fuzz: ## the readers' fuzzer, fifty minutes
fuzz-run:
	@$(MAKE) --no-print-directory -s -j2 SAN=1 $(FUZZERS)
	@for f in $(FUZZERS); do $$f 3000 || exit 1; done

bench: $(addprefix $(BUILD)/dev/bench/,bench_cpu bench_step bench_engine) ## CPU kernels and whole steps against the FMA peak, OpenBLAS and PyTorch
	@dev/bench/bench_cpu.sh $(BUILD)

results: ## measures this build as far as this machine can, and writes dev/RESULTS.md; PARTS="cpu gpu ranks draw"
	@dev/bench/results.sh $(PARTS)

bench-save: $(BUILD)/dev/bench/bench_save ## saves of 124M with optimizer state against dd conv=fsync, in turns
	@GOMP_SPINCOUNT=1000 $<

.PHONY: check $(WITH_DEPS) $(WITH_DEPS:%=%-run) test-venv test-programs test-arm test-arm-run bench bench-save results
