# The CUDA trainer, its tests and benchmarks; included by the Makefile, after tests.mk.

PRECISION ?= BF16
NVCC := $(if $(CUDA_HOME),$(CUDA_HOME)/bin/nvcc)
CUDA_BUILD := build/cuda-$(PRECISION)
CUDA_FILES := train_gpt2.cu $(wildcard llmc/cuda/*.cu) # test_cuda_build.sh compiles them as one
CUDA_OBJECTS := $(patsubst %.cu,$(CUDA_BUILD)/%.o,$(CUDA_FILES) $(wildcard llmc/ranks/*.cu))
ifeq ($(MPI_LIBS),)
CUDA_OBJECTS := $(filter-out %/transport_nccl.o,$(CUDA_OBJECTS))
endif

# Which GPUs to build for. 80 is the first with tensor cores for bf16. The fp16 kernels also run on 75, but not on 70, which
# CUDA 13 has dropped. Without a GPU nvidia-smi prints a message, which grep removes. CUDA 12.8 is the first to support
# 100 and 120; for later GPUs the driver compiles PTX_ARCH.
TUNED_ARCH := 80 90a
OLDEST := $(if $(filter FP16,$(PRECISION)),75,80)
OLDEST_GPU := $(if $(filter FP16,$(PRECISION)),7.5 (T4),8.0 (A100))
ifneq ($(CUDA_GOALS),)
ifeq ($(filter BF16 FP16 FP32,$(PRECISION)),)
$(error PRECISION=$(PRECISION): it may be BF16, FP16 or FP32)
endif
ifeq ($(CUDA_ARCH),)
GPUS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | grep -xE '[0-9]+\.[0-9]' | tr -d . | sort -un)
CUDA_ARCH := $(or $(shell printf '%s\n' $(GPUS) | awk '$$1 >= $(OLDEST)'),$(GPUS))
ifeq ($(CUDA_ARCH),)
CUDA_ARCH := $(TUNED_ARCH) $(if $(shell $(NVCC) --list-gpu-arch 2> /dev/null | grep -x compute_120),100 120)
PTX_ARCH := 80
endif
endif
TOO_OLD := $(firstword $(shell printf '%s\n' $(CUDA_ARCH) | sed 's/[a-z]*$$//' | awk '$$1 && $$1 < $(OLDEST) { printf "%.1f\n", $$1 / 10 }'))
ifneq ($(TOO_OLD),)
$(error compute capability $(TOO_OLD): the CUDA trainer needs $(OLDEST_GPU) or newer; CUDA_ARCH=$(OLDEST) builds for another machine)
endif
endif
# Only 90a has Hopper's own instructions (wgmma), which the fast attention and products use.
NVCC_FLAGS := -O3 -std=c++20 -Illmc -diag-suppress 177 -Xcompiler -Wall,-Wextra,-Wno-deprecated-enum-enum-conversion,-Wno-missing-field-initializers -Xptxas -v \
	$(foreach a,$(patsubst 90,90a,$(CUDA_ARCH)),-gencode=arch=compute_$(a),code=sm_$(a)) $(if $(PTX_ARCH),-gencode=arch=compute_$(PTX_ARCH)$(comma)code=compute_$(PTX_ARCH)) \
	$(if $(filter FP%,$(PRECISION)),-DGNS_$(PRECISION)) $(NCCL_HOME:%=-I%/include)
# NCCL from PyPI has no libnccl.so, only libnccl.so.2.
LIBRARY_DIRS = $(CUDA_HOME)/lib64 $(if $(MPI_LIBS),$(or $(NCCL_HOME:%=%/lib),$(CUDA_HOME)/lib))
CUDA_LINK = -Xcompiler -fopenmp $(foreach d,$(LIBRARY_DIRS),-L$(d) -Xlinker -rpath=$(d)) -lcublasLt $(if $(MPI_LIBS),-Xlinker -l:libnccl.so.2) $(patsubst -Wl$(comma)%,-Xlinker %,$(MPI_LIBS)) $(LDLIBS)

# Prints a short line instead of nvcc's long command; with V=1 the command, with make -s nothing.
say = $(if $(filter 1,$(V)),,@$(if $(findstring s,$(firstword -$(MAKEFLAGS))),,echo "NVCC $(1)";))

train_gpt2cu: $(CUDA_BUILD)/train_gpt2cu ## the CUDA trainer
	@ln -sf $< $@

$(CUDA_BUILD)/train_gpt2cu: $(BUILD)/llmc/run/main_cuda.o $(CUDA_OBJECTS) $(LIBRARY) $(CUDA_BUILD)/cflags
	$(call say,$@)$(NVCC) -o $@ $(filter-out %/cflags,$^) $(CUDA_LINK)

# Changes of these rebuild CUDA objects: nvcc, its flags and GPUs; the linked library and its flags.
$(CUDA_BUILD)/flags: FORCE
	$(call write_if_new,$(NVCC) $(NVCC_FLAGS))
$(CUDA_BUILD)/cflags: FORCE
	$(call write_if_new,$(BUILD): $(FLAGS))

$(CUDA_BUILD)/%.o: %.cu $(CUDA_BUILD)/flags
	@command -v "$(firstword $(NVCC))" > /dev/null || { echo "error: no nvcc$(CUDA_HOME:%= in %/bin). Install the CUDA Toolkit (12 or 13), or say where it is: make $@ CUDA_HOME=/path" >&2; exit 69; }
	@mkdir -p $(@D)
	$(call say,$<)$(NVCC) $(NVCC_FLAGS) -MMD -MP -MF $(@:.o=.d) -c -o $@ $< 2> $(@:.o=.ptxas) || { cat $(@:.o=.ptxas) >&2; exit 1; }
	@dev/make/ptxas.sh $< $(@:.o=.ptxas) "$(TUNED_ARCH)" >&2 || { rm -f $@; exit 1; }

# ----------------------------------------------------------------------------------------------------------------------
# Tests and benchmarks of the GPU, and tests and benchmarks that run on either engine

CUDA_EITHER := dev/bench/bench_engine dev/bench/bench_save dev/test/model/test_shard_cuda
CUDA_PROGRAMS := $(patsubst %.cu,$(CUDA_BUILD)/%,$(wildcard dev/test/cuda/test_*_cuda.cu dev/bench/bench_*.cu)) $(addprefix $(CUDA_BUILD)/,$(CUDA_EITHER))

define CUDA_COMPILE
@mkdir -p $(@D)
$(CC) $(ALL_CFLAGS) -DGNS_ENGINE=cuda_engine -DGNS_CUDA -I$(CUDA_HOME)/include -c -o $@ $<
endef
$(CUDA_BUILD)/%.o: %.c $(CUDA_BUILD)/cflags | $(BUILD)/headers
	$(CUDA_COMPILE)
$(CUDA_BUILD)/%_cuda.o: %.c $(CUDA_BUILD)/cflags | $(BUILD)/headers
	$(CUDA_COMPILE)

$(CUDA_PROGRAMS): %: %.o $(BUILD)/train_gpt2.o $(CUDA_OBJECTS) $(LIBRARY) $(CUDA_BUILD)/cflags
	$(call say,$@)$(NVCC) -o $@ $(filter-out %/cflags,$^) $(CUDA_LINK)

cuda_wrap = $(addprefix -Xlinker --wrap=,$(1))
$(CUDA_BUILD)/dev/bench/bench_save: CUDA_LINK += $(call cuda_wrap,$(TIMED))

# This test replaces the CUDA runtime and the other ranks.
$(CUDA_BUILD)/dev/test/cuda/test_device_cuda: CUDA_LINK += $(call cuda_wrap,$(addprefix cuda,GetDeviceCount DriverGetVersion SetDevice GetDevice \
	DeviceGetPCIBusId GetDeviceProperties GetDeviceProperties_v2 FuncGetAttributes DeviceGetStreamPriorityRange \
	StreamCreateWithPriority EventCreateWithFlags) ncclCommInitRank ncclGetLastError comm_gather comm_agree comm_broadcast)

$(CUDA_BUILD)/dev/test/cuda/test_matmul_cuda: CUDA_LINK += $(call cuda_wrap,cublasLtMatmulAlgoGetHeuristic cublasLtMatmulAlgoCheck)

cuda-programs-one: $(CUDA_PROGRAMS) $(CUDA_BUILD)/train_gpt2cu

cuda-programs: $(BUILD)/train_gpt2 $(BUILD)/data/tokenize
	$(MAKE) PRECISION=BF16 cuda-programs-one
	$(MAKE) PRECISION=FP16 cuda-programs-one
	$(MAKE) PRECISION=FP32 cuda-programs-one

has-gpu:
	@[ -e /dev/nvidia0 ] || nvidia-smi --list-gpus 2> /dev/null | grep -q '^GPU ' || { \
		echo "error: no NVIDIA GPU here (nvidia-smi lists none). make train_gpt2cu compiles without one" >&2; exit 69; }

test-gpu: has-gpu cuda-programs ## every test that needs a GPU, in every precision
	@dev/test/gpu_check.sh tests

bench-gpu: has-gpu cuda-programs ## GPU kernels against the card's ceilings, whole steps of d12, d24 and d48
	@dev/test/gpu_check.sh bench

.PHONY: cuda-programs-one cuda-programs has-gpu test-gpu bench-gpu
