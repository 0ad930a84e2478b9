#!/usr/bin/env bash
# What `make clean` takes and what it leaves, and a first build on a machine that MPI is yet to be installed on: in
# directories made up for it.
set -u
. "$(dirname "$0")/checks.sh" make
unset MAKEFLAGS MFLAGS NO_MPI NATIVE SAN # of the make that runs the tests

begin
mkdir -p "$work"/tree/{data,build/{cpu/llmc,cpu-nompi-generic-san,cuda-BF16,demo/run/step_00000008,ramp_study,venv/bin,cpustudy}}
cd "$work/tree" || exit 70
touch build/cpu/llmc/x.o build/demo/run/step_00000008/model.safetensors build/fuzz_coverage
ln -s build/cpu/train_gpt2 train_gpt2
ln -s ../build/cpu/data/tokenize data/tokenize
returns 0 make -f "$root/Makefile" clean
for gone in build/cpu build/cpu-nompi-generic-san build/cuda-BF16 build/fuzz_coverage train_gpt2 data/tokenize; do
    check "$gone is left" [ ! -e $gone -a ! -L $gone ]
    check "$gone: not said to go" grep -qE "^rm .*$gone( |\$)" "$work/log"
done
for kept in build/demo/run/step_00000008/model.safetensors build/ramp_study build/venv/bin build/cpustudy; do
    check "$kept is gone" [ -e $kept ]
done
check "what is kept is not said: $(tail -n 1 "$work/log")" says "$work/log" "kept: build/cpustudy build/demo build/ramp_study build/venv"
rm -rf build && mkdir build
returns 0 make -f "$root/Makefile" clean
check "an empty build is said to be kept" [ "$(grep -c kept "$work/log")" = 0 ]
end clean

# What a target needs is looked for again when deps.sh has installed it. There is no MPI before it.
begin
mkdir -p "$work"/first/{bin,scripts,llmc,dev/test}
cd "$work/first" || exit 70
ln -s "$root/Makefile" Makefile
program() { printf '#!/bin/sh\n%s\n' "$2" > "$1" && chmod +x "$1"; } # FILE TEXT
program bin/pkg-config 'exit 1'
program bin/mpicc '[ -e installed ] || exit 1; [ "$1" != --showme:link ] || echo -lm'
program scripts/deps.sh 'touch installed'
echo 'int engine;' > train_gpt2.c
echo 'int module;' > llmc/module.c
printf '#include <stdio.h>\nint main(int n, char **words) { return n == 2 && printf("%%s seconds\\n", words[1]) > 0 ? 0 : 1; }\n' > dev/test/fuzz_none.c
PATH=$work/first/bin:$PATH returns 0 make fuzz
check "no fuzzer ran: $(tail -n 1 "$work/log")" says "$work/log" "600 seconds"
check "built without MPI: $(ls -d build/*)" [ -e build/cpu-san/dev/test/fuzz_none -a ! -e build/cpu-nompi-san ]
cd "$root" || exit 70
end first_time_without_mpi
exit $failed
