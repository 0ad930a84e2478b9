# gns.c: `make help` says what there is.
#
#   SAN=1           AddressSanitizer and UndefinedBehaviorSanitizer, in a build of its own
#   NATIVE=0        for any x86-64 or Arm machine rather than this one
#   PRECISION=FP32  the CUDA trainer in fp32, for comparisons; BF16 otherwise
#   CUDA_ARCH=...   for example 80 or "80 90"; by itself: the GPU that is there, else 80 and 90
#   NO_MPI=1        one process only; otherwise Open MPI is used where it is installed

.DEFAULT_GOAL := train_gpt2
.DELETE_ON_ERROR:
SHELL := /bin/bash
comma := ,

SAN ?= 0
NATIVE ?= 1
NO_MPI ?= 0

# Several GPUs need NCCL beside MPI; without it the CUDA trainer is one process.
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(or $(shell command -v nvcc 2> /dev/null),$(wildcard /usr/local/cuda/bin/nvcc)))
NCCL := $(wildcard $(CUDA_HOME)/include/nccl.h /usr/include/nccl.h /usr/local/include/nccl.h)
CUDA_GOALS := $(filter train_gpt2cu cuda-% %-gpu build/cuda-%,$(MAKECMDGOALS))
ifneq ($(CUDA_GOALS),)
ifeq ($(NCCL),)
NO_MPI := 1
endif
endif

# Open MPI, by its own compiler's account of itself or by pkg-config; without either there is one process.
ifneq ($(NO_MPI),1)
MPI_LIBS := $(shell mpicc --showme:link 2> /dev/null || pkg-config --libs ompi 2> /dev/null)
endif
ifneq ($(MPI_LIBS),)
MPI_LIBS := -Wl,--as-needed $(MPI_LIBS)
MPI_CFLAGS := $(shell mpicc --showme:compile 2> /dev/null || pkg-config --cflags ompi 2> /dev/null)
endif
VARIANT := cpu$(if $(MPI_LIBS),,-nompi)$(if $(filter 0,$(NATIVE)),-generic)
SAN_BUILD := build/$(VARIANT)-san
BUILD := $(if $(filter 1,$(SAN)),$(SAN_BUILD),build/$(VARIANT))

CFLAGS ?= -O3
ALL_CFLAGS := -std=c11 -Illmc $(if $(MPI_LIBS),-DGNS_MPI) -Wall -Wextra -fopenmp -fno-math-errno -ffp-contract=fast -MMD -MP $(CFLAGS)
LDLIBS := -lcjson -lm -lpthread
ifneq ($(NATIVE),0)
ALL_CFLAGS += -march=native
endif
ifeq ($(SAN),1)
ALL_CFLAGS += -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
endif

# A file of one line, written only when the line changes, so that what depends on it is made anew just then.
write_if_new = @mkdir -p $(@D) && line='$(subst ','\'',$(1))' && { echo "$$line" | cmp -s - $@ || echo "$$line" > $@; }

# The library: plain C, compiled once, linked to either trainer. The mains are not in it.
OBJECTS := $(patsubst %.c,$(BUILD)/%.o,$(filter-out llmc/run/main_% $(if $(MPI_LIBS),,%/transport_mpi.c),$(wildcard llmc/*/*.c)))
LIBRARY := $(BUILD)/libgns.a
# ----------------------------------------------------------------------------------------------------------------------
# The CPU trainer and the data program

train_gpt2: $(BUILD)/train_gpt2 ## the CPU trainer
	@ln -sf $< $@

data/tokenize: $(BUILD)/data/tokenize ## text to token shards
	@ln -sf ../$< $@

$(BUILD)/train_gpt2: $(BUILD)/llmc/run/main_cpu.o $(BUILD)/train_gpt2.o $(LIBRARY)
	$(CC) $(ALL_CFLAGS) -o $@ $^ $(LDFLAGS) $(MPI_LIBS) $(LDLIBS)

# Which commit this is, for --version and run.json: built anew when that changes.
COMMIT := $(if $(wildcard .git),$(shell git describe --always --dirty=+ --abbrev=10 2> /dev/null))
$(BUILD)/llmc/base/version.o: $(BUILD)/commit
$(BUILD)/llmc/base/version.o: ALL_CFLAGS += $(if $(COMMIT),'-DGNS_COMMIT=" ($(COMMIT))"')
$(BUILD)/commit: FORCE
	$(call write_if_new,$(COMMIT))

# With what everything is compiled: anew when that changes.
FLAGS := $(CC) $(ALL_CFLAGS)
$(BUILD)/flags: FORCE
	$(call write_if_new,$(FLAGS))

# Only these see the headers of MPI.
$(BUILD)/llmc/ranks/comm.o $(BUILD)/llmc/ranks/transport_mpi.o: ALL_CFLAGS += $(MPI_CFLAGS)

$(BUILD)/data/tokenize: $(patsubst %.c,$(BUILD)/%.o,$(wildcard data/*.c)) $(LIBRARY)
	$(CC) $(ALL_CFLAGS) -o $@ $^ $(LDFLAGS) $(LDLIBS)

$(LIBRARY): $(OBJECTS)
	@rm -f $@
	@$(AR) rcs $@ $^

# Looked for once: one line where one is missing, instead of the compiler's page.
$(BUILD)/headers: $(BUILD)/flags
	@for header in cjson/cJSON.h xxhash.h; do \
		echo "#include <$$header>" | $(CC) $(CFLAGS) -E -x c - > /dev/null 2>&1 || { echo "error: no $$header:" \
			"scripts/deps.sh demo installs what is missing (Debian, Ubuntu), or CFLAGS='-O3 -I/path' says where it is" >&2; exit 69; }; \
	done
	@touch $@

$(BUILD)/%.o: %.c $(BUILD)/flags | $(BUILD)/headers
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -c -o $@ $<

# PCRE2 is what the tests compare the tokenizer's own scanner with.
$(BUILD)/dev/test/text/test_words: LDLIBS += -lpcre2-8

# GNS_ENGINE: the engine of tests and benchmarks that run on either.
$(BUILD)/dev/%.o: ALL_CFLAGS += -DGNS_ENGINE=cpu_engine
$(BUILD)/dev/%: $(BUILD)/dev/%.o $(BUILD)/train_gpt2.o $(LIBRARY)
	$(CC) $(ALL_CFLAGS) -o $@ $^ $(LDFLAGS) $(MPI_LIBS) $(LDLIBS)

# Calls that these tests make fail (dev/test/run/faults.h).
FAULTS := $(addprefix -Wl$(comma)--wrap=,write fsync rename mkdir open unlink unlinkat aligned_alloc statvfs)
$(BUILD)/dev/test/run/test_crash: LDFLAGS += $(FAULTS)
$(BUILD)/dev/test/run/test_best: LDFLAGS += $(FAULTS)
$(BUILD)/dev/test/run/test_crash_ranks: LDFLAGS += $(FAULTS) $(addprefix -Wl$(comma)--wrap=,gethostname manifest_verify)
$(BUILD)/dev/test/text/test_shards: LDFLAGS += $(addprefix -Wl$(comma)--wrap=,fsync pread)
$(BUILD)/dev/test/base/test_files: LDFLAGS += $(addprefix -Wl$(comma)--wrap=,write fsync pread fcntl)
$(BUILD)/dev/test/run/test_remove: LDFLAGS += $(addprefix -Wl$(comma)--wrap=,lstat open openat unlink unlinkat)

# Which these tests count.
$(BUILD)/dev/test/model/test_memory: LDFLAGS += -Wl,--wrap=aligned_alloc
$(BUILD)/dev/test/ranks/ranks_state: LDFLAGS += -Wl,--wrap=open,--wrap=comm_send

# Calls that this benchmark takes the time of.
TIMED := write fsync pread
$(BUILD)/dev/bench/bench_save: LDFLAGS += $(addprefix -Wl$(comma)--wrap=,$(TIMED))

# ----------------------------------------------------------------------------------------------------------------------
# The CUDA trainer

PRECISION ?= BF16
NVCC := $(if $(CUDA_HOME),$(CUDA_HOME)/bin/nvcc)
CUDA_BUILD := build/cuda-$(PRECISION)
CUDA_OBJECTS := $(patsubst %.cu,$(CUDA_BUILD)/%.o,$(wildcard llmc/cuda/*.cu llmc/ranks/*.cu))
ifeq ($(MPI_LIBS),)
CUDA_OBJECTS := $(filter-out %/transport_nccl.o,$(CUDA_OBJECTS))
endif

# Which GPUs to build for. 80 is the first with matrix units for bf16; nvidia-smi may say in words that it has none.
TUNED_ARCH := 80 90a
ifneq ($(CUDA_GOALS),)
ifeq ($(CUDA_ARCH),)
GPUS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | grep -xE '[0-9]+\.[0-9]' | tr -d . | sort -un)
CUDA_ARCH := $(or $(shell printf '%s\n' $(GPUS) | grep -vE '^[1-7].$$'),$(GPUS),$(TUNED_ARCH))
endif
TOO_OLD := $(firstword $(shell printf '%s\n' $(CUDA_ARCH) | sed -nE 's/^([1-7])([0-9])[a-z]*$$/\1.\2/p'))
ifneq ($(TOO_OLD),)
$(error compute capability $(TOO_OLD): the CUDA trainer needs 8.0 (A100) or newer; CUDA_ARCH=80 builds for another machine)
endif
endif
# 90 has Hopper's own instructions, which the fast attention is made of, as 90a only.
NVCC_FLAGS := -O3 -std=c++20 -Illmc -diag-suppress 177 -Xcompiler -Wall,-Wextra,-Wno-deprecated-enum-enum-conversion -Xptxas -v \
	$(foreach a,$(patsubst 90,90a,$(CUDA_ARCH)),-gencode=arch=compute_$(a),code=sm_$(a)) \
	$(if $(filter FP32,$(PRECISION)),-DGNS_FP32)

train_gpt2cu: $(CUDA_BUILD)/train_gpt2cu ## the CUDA trainer
	@ln -sf $< $@

CUDA_LINK = -Xcompiler -fopenmp -L$(CUDA_HOME)/lib64 -lcublasLt $(if $(MPI_LIBS),-L$(CUDA_HOME)/lib -lnccl) $(patsubst -Wl$(comma)%,-Xlinker %,$(MPI_LIBS)) $(LDLIBS)

$(CUDA_BUILD)/train_gpt2cu: $(BUILD)/llmc/run/main_cuda.o $(CUDA_BUILD)/train_gpt2.o $(CUDA_OBJECTS) $(LIBRARY)
	$(NVCC) -o $@ $^ $(CUDA_LINK)

# With what nvcc compiles, and for which GPUs: anew when that changes. The C beside it also, and so linked with another
# library, when that is another build's.
CUDA_FLAGS := $(NVCC) $(NVCC_FLAGS)
$(CUDA_BUILD)/flags: FORCE
	$(call write_if_new,$(CUDA_FLAGS))
$(CUDA_BUILD)/cflags: FORCE
	$(call write_if_new,$(BUILD): $(FLAGS))

# ptxas says what every kernel uses; the report is kept. A kernel that spills registers to memory fails the build for the
# GPUs that kernels are tuned for; for others it is said: slower, not wrong.
SPILLS = awk '/Compiling entry function/ { entry = $$0 } / [1-9][0-9]* bytes spill/ { print entry; print; spills = 1; \
	if (entry ~ /sm_($(subst $() ,|,$(TUNED_ARCH))).$$/) tuned = 1 } \
	END { if (spills) print (tuned ? "error" : "warning") ": $<: registers spill"; exit tuned }'

# Its numbered remarks are shown too: among them is that products of the tensor cores wait for one another (wgmma).
$(CUDA_BUILD)/%.o: %.cu $(CUDA_BUILD)/flags
	@[ -n "$(NVCC)" ] || { echo "error: no nvcc. Install the CUDA Toolkit (12 or 13), or say where it is: make $@ CUDA_HOME=/path" >&2; exit 69; }
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -MMD -MP -MF $(@:.o=.d) -c -o $@ $< 2> $(@:.o=.ptxas) || { cat $(@:.o=.ptxas) >&2; exit 1; }
	@grep -vE 'ptxas info *: [^(]|bytes stack frame|^$$' $(@:.o=.ptxas) >&2 || true
	@$(SPILLS) $(@:.o=.ptxas) >&2 || { rm -f $@; exit 1; }

# Tests and benchmarks of either engine.
$(CUDA_BUILD)/%.o: %.c $(CUDA_BUILD)/cflags | $(BUILD)/headers
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -DGNS_ENGINE=cuda_engine -c -o $@ $<

# GPU tests and benchmarks.
CUDA_PROGRAMS := $(patsubst %.cu,$(CUDA_BUILD)/%,$(wildcard dev/test/cuda/test_*_cuda.cu dev/bench/bench_*.cu)) $(addprefix $(CUDA_BUILD)/dev/bench/,bench_engine bench_save) $(CUDA_BUILD)/dev/test/model/test_shard_cuda

$(CUDA_BUILD)/dev/bench/bench_save: CUDA_LINK += $(addprefix -Xlinker --wrap=,$(TIMED))

# The runtime, and the other ranks, that this test plays.
$(CUDA_BUILD)/dev/test/cuda/test_device_cuda: CUDA_LINK += $(addprefix -Xlinker --wrap=,$(addprefix cuda,GetDeviceCount \
	SetDevice GetDevice DeviceGetPCIBusId GetDeviceProperties GetDeviceProperties_v2 FuncGetAttributes) comm_gather comm_agree)

$(CUDA_BUILD)/dev/test/model/test_shard_cuda.o: dev/test/model/test_shard.c $(CUDA_BUILD)/cflags
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -DGNS_ENGINE=cuda_engine -c -o $@ $<

$(CUDA_PROGRAMS): %: %.o $(CUDA_BUILD)/train_gpt2.o $(BUILD)/train_gpt2.o $(CUDA_OBJECTS) $(LIBRARY)
	$(NVCC) -o $@ $^ $(CUDA_LINK)

cuda-programs-one: $(CUDA_PROGRAMS) $(CUDA_BUILD)/train_gpt2cu

cuda-programs: $(BUILD)/train_gpt2 $(BUILD)/data/tokenize
	$(MAKE) PRECISION=BF16 cuda-programs-one
	$(MAKE) PRECISION=FP32 cuda-programs-one

test-gpu: cuda-programs ## every test that needs a GPU, in both precisions
	@scripts/gpu_check.sh tests

bench-gpu: cuda-programs ## GPU kernels against the card's ceilings, whole steps of d12, d24 and d48
	@scripts/gpu_check.sh bench

# ----------------------------------------------------------------------------------------------------------------------
# The demo and the tests: the two commands of the README. Both install what is missing first, or say what to install.

demo: ## train a small GPT-2 on this machine's own C headers, two minutes; TEXT=path for your own text
	@scripts/deps.sh demo
	@$(MAKE) --no-print-directory -s -j2 train_gpt2 data/tokenize
	@scripts/demo.sh "$$TEXT"

# Unit tests are programs; the rest are scripts that drive programs. The fuzzers always run under the sanitizers.
UNIT_SOURCES := $(wildcard dev/test/*/test_*.c)
FUZZ_SOURCES := $(wildcard dev/test/*/fuzz_*.c)
UNIT := $(patsubst %.c,$(BUILD)/%,$(UNIT_SOURCES))
HELPERS := $(patsubst %.c,$(BUILD)/%,$(filter-out $(UNIT_SOURCES) $(FUZZ_SOURCES),$(wildcard $(patsubst %,dev/test/%/*.c,checkpoint cpu run ranks scripts model text gns plan))))
FUZZERS := $(patsubst %.c,$(SAN_BUILD)/%,$(FUZZ_SOURCES))
SCRIPTS := $(wildcard dev/test/*/test_*.sh)
PROGRAMS := $(BUILD)/train_gpt2 $(BUILD)/data/tokenize

# What deps.sh installs decides how this is built (MPI or none), so the rest is a make of its own, which looks again.
WITH_DEPS := test test-long test-faults test-crash fuzz
$(WITH_DEPS):
	@scripts/deps.sh test
	@$(MAKE) --no-print-directory -s $@-run

test: ## every test that needs no GPU
test-run:
	@$(MAKE) --no-print-directory -s -j2 test-programs
	@dev/test/run.sh $(BUILD) $(UNIT) $(FUZZERS) $(SCRIPTS)

test-programs: $(UNIT) $(HELPERS) $(PROGRAMS)
	@$(MAKE) --no-print-directory -s SAN=1 $(FUZZERS) $(SAN_BUILD)/train_gpt2 $(SAN_BUILD)/data/tokenize

test-long: ## the Shakespeare recipe with three seeds
test-long-run:
	@$(MAKE) --no-print-directory -s -j2 test-programs
	@GNS_LONG=1 dev/test/run.sh $(BUILD) dev/test/scripts/test_shakespeare.sh

test-faults: ## ranks that die, hang and exit at random times, ROUNDS=20 of five
test-faults-run:
	@$(MAKE) --no-print-directory -s -j2 test-programs
	@GNS_BUILD=$(BUILD) dev/test/ranks/test_faults.sh $(or $(ROUNDS),20)

CRASH_TESTS := $(addprefix $(BUILD)/dev/test/run/,test_resume test_crash test_crash_ranks)

test-crash: ## checkpoints: killed at every call, every call failing, every step resumed; with one rank and with four; half an hour
test-crash-run:
	@$(MAKE) --no-print-directory -s -j2 $(CRASH_TESTS)
	@$(MAKE) --no-print-directory -s SAN=1 $(SAN_BUILD)/dev/test/fuzz_checkpoint
	@GNS_LONG=1 dev/test/run.sh $(BUILD) $(CRASH_TESTS) $(SAN_BUILD)/dev/test/fuzz_checkpoint

fuzz: ## the fuzzers, ten minutes each
fuzz-run:
	@$(MAKE) --no-print-directory -s -j2 SAN=1 $(FUZZERS)
	@for f in $(FUZZERS); do $$f 600 || exit 1; done

FUZZ_SECONDS ?= 600
FUZZ_TARGETS := $(addprefix step/,MANIFEST.json state.json config.json model.safetensors optimizer.safetensors) \
	many/model.safetensors.index.json words/vocab.json words/merges.txt word/tokenizer.json added/tokenizer_config.json \
	shard.bin model.bin

fuzz-coverage: ## readers of checkpoints, tokenizers and shards under libFuzzer, FUZZ_SECONDS=600 each; needs clang
	@command -v clang > /dev/null || { echo "error: no clang. Run: sudo apt-get install clang libomp-dev" >&2; exit 69; }
	@mkdir -p build
	clang -std=c11 -O1 -g -fopenmp -Wno-everything -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
		-DGNS_LIBFUZZER -o build/fuzz_coverage dev/test/checkpoint/fuzz_checkpoint.c train_gpt2.c \
		-Illmc $(filter-out llmc/run/main_% %/transport_mpi.c,$(wildcard llmc/*/*.c)) $(LDLIBS)
	@for t in $(FUZZ_TARGETS); do echo "== $$t"; scratch=$$(mktemp -d -p $(firstword $(wildcard /dev/shm) build)); \
		TMPDIR=$$(realpath $$scratch) GNS_FUZZ_TARGET=$$t build/fuzz_coverage -max_total_time=$(FUZZ_SECONDS) -max_len=65535 \
			-timeout=60 -artifact_prefix=$(CURDIR)/build/ -print_final_stats=1 corpus > build/fuzz_coverage.log 2>&1; \
		code=$$?; rm -rf $$scratch; [ $$code = 0 ] || { tail -n 30 build/fuzz_coverage.log; exit 1; }; \
		grep -E 'stat::number_of_executed|DONE' build/fuzz_coverage.log; done

bench: $(BUILD)/dev/bench/bench_cpu $(BUILD)/dev/bench/bench_engine ## CPU kernels and whole steps against the FMA peak, OpenBLAS and PyTorch
	@dev/bench/bench_cpu.sh $(BUILD)

bench-save: $(BUILD)/dev/bench/bench_save ## saves of 124M with optimizer state against dd conv=fsync, in turns
	@GOMP_SPINCOUNT=1000 $<

# OpenBLAS is only what the benchmark compares with.
ifeq ($(shell pkg-config --exists openblas 2> /dev/null && echo yes),yes)
$(BUILD)/dev/bench/bench_cpu.o: ALL_CFLAGS += -DHAVE_OPENBLAS $(shell pkg-config --cflags openblas)
$(BUILD)/dev/bench/bench_cpu: LDLIBS += $(shell pkg-config --libs openblas)
endif

help: ## this list
	@echo "make TARGET, where TARGET is"
	@grep -hE '^[a-z0-9_/-]+:.*## ' Makefile | sed -E 's/^([a-z0-9_\/-]+):.*## /  \1 @/' | awk -F@ '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo "and variables may follow:"
	@sed -nE 's/^#   ([A-Z_]+=.*)/    \1/p' Makefile

# What costs time to have again stays: runs, also those in build/, and Python's environment.
COMPILED := $(wildcard build/cpu build/cpu-* build/cuda-* build/fuzz_coverage) train_gpt2 train_gpt2cu data/tokenize

clean: ## removes what was compiled, and says what it keeps: runs, build/venv
	rm -rf $(COMPILED)
	@rmdir build 2> /dev/null || [ ! -d build ] || { cd build && kept=(*) && \
		echo "kept: $${kept[*]/#/build/} (rm -rf build removes these as well)"; }

.PHONY: FORCE demo $(WITH_DEPS) $(WITH_DEPS:%=%-run) test-programs fuzz-coverage bench bench-save test-gpu bench-gpu cuda-programs cuda-programs-one help clean train_gpt2 train_gpt2cu data/tokenize

-include $(shell find build -name '*.d' 2>/dev/null)
