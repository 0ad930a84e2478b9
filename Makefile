# gns.c: `make help` lists the targets.
#
#   SAN=1           AddressSanitizer and UndefinedBehaviorSanitizer, in a build of its own
#   NATIVE=0        for any x86-64 or Arm machine rather than this one
#   AVX2=1          for any x86-64 machine with AVX2, in a build of its own: the kernels of a machine without AVX-512
#   ARM=1           for any 64-bit Arm machine, on another one: cross-compiled, without MPI, in a build of its own
#   PRECISION=...   the CUDA trainer in BF16 (default), in FP16 for GPUs from 7.5 on, or in FP32 for comparisons
#   CUDA_ARCH=...   for example 80 or "80 90"; default: this machine's GPUs, else 80, 90, 100, 120 and, as PTX, later ones
#   NCCL_HOME=...   where NCCL is, for several GPUs, if not in CUDA_HOME, /usr or /usr/local
#   V=1             nvcc's whole commands
#   NO_MPI=1        one process only; default: Open MPI if it is installed
#   PREFIX=...      where install puts programs and uninstall looks for them, below DESTDIR; default: /usr/local

.DEFAULT_GOAL := train_gpt2
.DELETE_ON_ERROR:
SHELL := /bin/bash
comma := ,

SAN ?= 0
NATIVE ?= 1
AVX2 ?= 0
NO_MPI ?= 0

# ARM=1 uses Debian's cross compiler, and libraries that scripts/deps.sh arm unpacks to build/arm64.
ARM ?= 0
ifeq ($(ARM),1)
CC := aarch64-linux-gnu-gcc -isystem build/arm64/usr/include -Lbuild/arm64/usr/lib/aarch64-linux-gnu
AR := aarch64-linux-gnu-ar
NATIVE := 0
NO_MPI := 1
endif

# Several GPUs need NCCL and MPI; without NCCL the CUDA trainer is one process.
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(or $(shell command -v nvcc 2> /dev/null),$(wildcard /usr/local/cuda/bin/nvcc)))
NCCL := $(wildcard $(addsuffix /include/nccl.h,$(or $(NCCL_HOME),$(CUDA_HOME) /usr /usr/local)))
CUDA_GOALS := $(filter train_gpt2cu cuda-% %-gpu build/cuda-%,$(MAKECMDGOALS))
ifneq ($(CUDA_GOALS),)
ifeq ($(NCCL)$(filter 1,$(NO_MPI)),)
NO_MPI := 1
NO_NCCL := 1
$(info note: no nccl.h$(NCCL_HOME:%= in %/include), so for one GPU only: install libnccl-dev, or say where NCCL is: NCCL_HOME=/path)
endif
endif

# Open MPI's flags, from its compiler or from pkg-config.
ifneq ($(NO_MPI),1)
MPI_LIBS := $(shell mpicc --showme:link 2> /dev/null || pkg-config --libs ompi 2> /dev/null)
endif
ifneq ($(MPI_LIBS),)
MPI_LIBS := -Wl,--as-needed $(MPI_LIBS)
MPI_CFLAGS := $(shell mpicc --showme:compile 2> /dev/null || pkg-config --cflags ompi 2> /dev/null)
ifeq ($(shell pkg-config --exists pmix 2> /dev/null && echo yes),yes)
MPI_LIBS += $(shell pkg-config --libs pmix)
MPI_CFLAGS += -DGNS_PMIX $(shell pkg-config --cflags pmix)
endif
endif
VARIANT := $(if $(filter 1,$(ARM)),cpu-arm64,cpu$(if $(MPI_LIBS),,$(if $(NO_NCCL),-nonccl,-nompi))$(if $(filter 0,$(NATIVE)),-generic)$(if $(filter 1,$(AVX2)),-avx2))
SAN_BUILD := build/$(VARIANT)-san
BUILD := $(if $(filter 1,$(SAN)),$(SAN_BUILD),build/$(VARIANT))

CFLAGS ?= -O3
# Compiles for this machine, unless CFLAGS names another. On Arm with -mcpu, since Clang has no -march=native there.
THIS_MACHINE := $(if $(filter aarch64%,$(shell $(CC) -dumpmachine 2> /dev/null)),-mcpu=native,-march=native)
MACHINE := $(if $(filter 0,$(NATIVE))$(filter -march=% -mcpu=%,$(CFLAGS)),,$(THIS_MACHINE))
ifeq ($(AVX2),1)
MACHINE := -march=haswell -DGNS_AVX2
endif
ALL_CFLAGS := -std=gnu11 -Illmc $(if $(MPI_LIBS),-DGNS_MPI) -Wall -Wextra -Wno-unused-parameter -fopenmp -fno-math-errno -ffp-contract=fast -MMD -MP $(MACHINE) $(CFLAGS)
LDLIBS := -lcjson -lm -lpthread
ifeq ($(SAN),1)
ALL_CFLAGS += -O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
# -O1 for the files whose run time counts; -O0 for the others, which then compile in half the time.
$(BUILD)/llmc/cpu/%.o $(BUILD)/train_gpt2.o: ALL_CFLAGS += -O1
endif

# Writes a file of one line if the line has changed; then make rebuilds what depends on the file.
write_if_new = @mkdir -p $(@D) && line='$(subst ','\'',$(1))' && { echo "$$line" | cmp -s - $@ || echo "$$line" > $@; }

# ----------------------------------------------------------------------------------------------------------------------
# The CPU trainer and the data program

train_gpt2: $(BUILD)/train_gpt2 ## the CPU trainer
	@ln -sf $< $@

data/tokenize: $(BUILD)/data/tokenize ## text to token shards
	@ln -sf ../$< $@

all: train_gpt2 data/tokenize ## both of these

# data/tokenize is installed as gns_tokenize: "tokenize" is too general a name for a program in PATH.
PREFIX ?= /usr/local
BIN = $(DESTDIR)$(PREFIX)/bin
COMPLETIONS = $(DESTDIR)$(PREFIX)/share/bash-completion/completions
install: all ## copies the programs to PREFIX/bin, train_gpt2cu too if it is built; data/tokenize becomes gns_tokenize
	@install -d '$(BIN)' && install train_gpt2 $(wildcard train_gpt2cu) '$(BIN)' && install data/tokenize '$(BIN)/gns_tokenize'
	@install -d '$(COMPLETIONS)' && for p in train_gpt2 $(wildcard train_gpt2cu) gns_tokenize; do dev/make/completion.sh '$(BIN)'/$$p $$p > '$(COMPLETIONS)'/$$p || true; done
	@echo "installed in $(BIN): train_gpt2$(if $(wildcard train_gpt2cu), train_gpt2cu) gns_tokenize$(if $(filter 0,$(NATIVE)),, (for this machine; NATIVE=0 for any))"

uninstall: ## removes these programs from PREFIX/bin
	cd '$(BIN)' && rm -f train_gpt2 train_gpt2cu gns_tokenize
	cd '$(COMPLETIONS)' && rm -f train_gpt2 train_gpt2cu gns_tokenize

# The library: plain C, compiled once, linked to either trainer. The mains are not in it.
OBJECTS := $(patsubst %.c,$(BUILD)/%.o,$(filter-out llmc/run/main_% $(if $(MPI_LIBS),,%/transport_mpi.c),$(wildcard llmc/*/*.c)))
LIBRARY := $(BUILD)/libgns.a

# Makes each program and object under the name PART, which ends with the shell's process id, then renames it, since
# another make may be reading the old file.
PART = $@.part$$$$
SHOW_WHOLE = && mv -f $(PART) $@

$(LIBRARY): $(OBJECTS)
	@rm -f $(PART) && $(AR) rcs $(PART) $^ $(SHOW_WHOLE)

$(BUILD)/train_gpt2: $(BUILD)/llmc/run/main_cpu.o $(BUILD)/train_gpt2.o $(LIBRARY)
	$(CC) $(ALL_CFLAGS) -o $(PART) $^ $(LDFLAGS) $(MPI_LIBS) $(LDLIBS) $(SHOW_WHOLE)

$(BUILD)/data/tokenize: $(patsubst %.c,$(BUILD)/%.o,$(wildcard data/*.c)) $(LIBRARY)
	$(CC) $(ALL_CFLAGS) -o $(PART) $^ $(LDFLAGS) $(LDLIBS) $(SHOW_WHOLE)

# The commit, for --version and run.json.
COMMIT := $(if $(wildcard .git),$(shell git describe --always --dirty=+ --abbrev=10 2> /dev/null))
$(BUILD)/llmc/base/version.o: $(BUILD)/commit
$(BUILD)/llmc/base/version.o: ALL_CFLAGS += $(if $(COMMIT),'-DGNS_COMMIT=" ($(COMMIT))"')
$(BUILD)/commit: FORCE
	$(call write_if_new,$(COMMIT))

# The compiler and its flags; if they change, everything is rebuilt.
FLAGS := $(CC) $(ALL_CFLAGS)
$(BUILD)/flags: FORCE
	$(call write_if_new,$(FLAGS))

# Only these objects include MPI's headers.
$(BUILD)/llmc/ranks/comm.o $(BUILD)/llmc/ranks/transport_mpi.o $(BUILD)/llmc/ranks/open_mpi.o: ALL_CFLAGS += $(MPI_CFLAGS) $(if $(NO_NCCL),-DGNS_NO_NCCL)

# Checks the compiler and the libraries' headers once, so that a missing header gives one line, not a page of errors.
$(BUILD)/headers: $(BUILD)/flags
	@why=$$($(CC) $(ALL_CFLAGS) -E -x c -MF /dev/null /dev/null 2>&1 > /dev/null) || { echo "error: CC=$(firstword $(CC)) with these CFLAGS does not work: $${why%%$$'\n'*}" \
		"(CC and CFLAGS choose the compiler and its flags)" >&2; exit 69; }
	@for header in cjson/cJSON.h xxhash.h; do \
		echo "#include <$$header>" | $(CC) $(CFLAGS) -E -x c - > /dev/null 2>&1 || { echo "error: no $$header:" \
			"scripts/deps.sh demo installs what is missing (Debian, Ubuntu), or CFLAGS='-O3 -I/path' says where it is" >&2; exit 69; }; \
	done
	@touch $@

$(BUILD)/%.o: %.c $(BUILD)/flags | $(BUILD)/headers
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -c -MF $(@:.o=.d) -MT $@ -o $(PART) $< $(SHOW_WHOLE)

# ----------------------------------------------------------------------------------------------------------------------

demo: ## train a small GPT-2 on this machine's own C headers, one to four minutes; TEXT=path for your own text
	@scripts/deps.sh demo
	@[ -x train_gpt2 -a -x data/tokenize ] || echo "== compiling train_gpt2 and data/tokenize (half a minute)"
	@$(MAKE) --no-print-directory -s -j2 train_gpt2 data/tokenize
	@scripts/demo.sh "$$TEXT"

help: ## this list
	@echo "make TARGET, where TARGET is"
	@grep -hE '^[a-z0-9_/-]+:.*## ' Makefile dev/make/*.mk | sed -E 's/^([a-z0-9_\/-]+):.*## /  \1 @/' | awk -F@ '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo "and variables may follow:"
	@sed -nE 's/^#   ([A-Z0-9_]+=.*)/    \1/p' Makefile

# Keeps what takes long to make: runs (in build/, too), Python's environment and Arm's libraries.
clean: ## removes what was compiled; keeps runs and build/venv
	rm -rf $(wildcard build/cpu build/cpu-* build/cuda-*) train_gpt2 train_gpt2cu data/tokenize
	@rmdir build 2> /dev/null || [ ! -d build ] || { cd build && kept=(*) && \
		echo "kept: $${kept[*]/#/build/} (rm -rf build removes these as well)"; }

.PHONY: FORCE all install uninstall demo help clean train_gpt2 train_gpt2cu data/tokenize

include dev/make/tests.mk dev/make/cuda.mk
-include $(shell find build -type f -name '*.d' 2>/dev/null)
