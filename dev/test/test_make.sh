#!/usr/bin/env bash
# What `make clean` takes and what it leaves, in a directory made up for it.
set -u
. "$(dirname "$0")/checks.sh" make
unset MAKEFLAGS MFLAGS # of the make that runs the tests, which is silent

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
cd "$root" || exit 70
end clean
exit $failed
