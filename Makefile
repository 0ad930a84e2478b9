# gns.c: `make help` says what there is.
#
#   SAN=1           AddressSanitizer and UndefinedBehaviorSanitizer, in a build of its own
#   NATIVE=0        for any x86-64 or Arm machine rather than this one
#   PRECISION=FP32  the CUDA trainer in fp32, for comparisons; BF16 otherwise
#   CUDA_ARCH=...   for example 90a or "80 90a"; by itself: the GPU that is there, else 80 and 90a
#   NO_MPI=1        one process only; otherwise Open MPI is used where it is installed
#   OPENBLAS=1      OpenBLAS instead of our own matmul on the CPU

.DEFAULT_GOAL := train_gpt2
.DELETE_ON_ERROR:
SHELL := /bin/bash

SAN ?= 0
NATIVE ?= 1
OPENBLAS ?= 0
NO_MPI ?= 0
VARIANT := cpu$(if $(filter 1,$(NO_MPI)),-nompi)$(if $(filter 1,$(SAN)),-san)$(if $(filter 0,$(NATIVE)),-generic)$(if $(filter 1,$(OPENBLAS)),-openblas)
BUILD := build/$(VARIANT)

CFLAGS ?= -O3
ALL_CFLAGS := -std=c11 -Wall -Wextra -fopenmp -fno-math-errno -ffp-contract=fast -MMD -MP $(CFLAGS)
LDLIBS := -lcjson -lpcre2-8 -lm -lpthread
ifneq ($(NATIVE),0)
ALL_CFLAGS += -march=native
endif
ifeq ($(SAN),1)
ALL_CFLAGS += -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
endif
ifeq ($(OPENBLAS),1)
ALL_CFLAGS += -DGNS_OPENBLAS
LDLIBS += -lopenblas
endif

# Open MPI, by its own compiler's account of itself or by pkg-config; without either there is one process.
ifneq ($(NO_MPI),1)
MPI_LIBS := $(shell mpicc --showme:link 2>/dev/null || pkg-config --libs ompi 2>/dev/null)
ifneq ($(MPI_LIBS),)
MPI_CFLAGS := -DGNS_MPI $(shell mpicc --showme:compile 2>/dev/null || pkg-config --cflags ompi 2>/dev/null)
endif
endif

OBJECTS := $(patsubst %.c,$(BUILD)/%.o,$(wildcard llmc/*.c llmc/cpu/*.c))
LIBRARY := $(BUILD)/libgns.a
TESTS := $(patsubst %.c,$(BUILD)/%,$(wildcard dev/test/test_*.c))
TOOLS := $(patsubst %.c,$(BUILD)/%,$(filter-out $(wildcard dev/test/test_*.c),$(wildcard dev/test/*.c)))
BENCHES := $(patsubst %.c,$(BUILD)/%,$(wildcard dev/bench/*.c))

# ----------------------------------------------------------------------------------------------------------------------
# The CPU trainer and the data program

train_gpt2: $(BUILD)/train_gpt2 ## the CPU trainer
	@ln -sf $< $@

data/tokenize: $(BUILD)/data/tokenize ## text to token shards
	@ln -sf ../$< $@

$(BUILD)/train_gpt2: $(BUILD)/train_gpt2.o $(LIBRARY)
	$(CC) $(ALL_CFLAGS) -o $@ $^ $(LDFLAGS) $(MPI_LIBS) $(LDLIBS)

# Only these see MPI.
$(BUILD)/llmc/comm.o $(BUILD)/llmc/cpu/transport_mpi.o: ALL_CFLAGS += $(MPI_CFLAGS)

$(BUILD)/data/tokenize: $(BUILD)/data/tokenize.o $(LIBRARY)
	$(CC) $(ALL_CFLAGS) -o $@ $^ $(LDFLAGS) $(LDLIBS)

$(LIBRARY): $(OBJECTS)
	@rm -f $@
	@$(AR) rcs $@ $^

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -c -o $@ $<

# The engine without its main, for tests.
$(BUILD)/engine.o: train_gpt2.c
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -DGNS_NO_MAIN -c -o $@ $<

$(BUILD)/dev/%: $(BUILD)/dev/%.o $(BUILD)/engine.o $(LIBRARY)
	$(CC) $(ALL_CFLAGS) -o $@ $^ $(LDFLAGS) $(LDLIBS)

-include $(shell find build -name '*.d' 2>/dev/null)
