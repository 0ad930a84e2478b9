#!/usr/bin/env bash
# Tests make in made-up trees: clean, first builds without MPI or a library, builds for several GPUs.
# shellcheck disable=SC2086
set -u
. "$(dirname "$0")/../checks.sh" make
unset MAKEFLAGS MFLAGS MAKELEVEL NO_MPI NATIVE SAN CUDA_ARCH CUDA_HOME CFLAGS # set by the make that runs the tests

with_make() { mkdir -p dev && ln -s "$root/Makefile" . && ln -s "$root/dev/make" dev; } # links make's files to this directory
program() { printf '#!/bin/sh\n%s\n' "$2" > "$1" && chmod +x "$1"; } # FILE TEXT

begin
mkdir -p "$work"/tree/{data,build/{cpu/llmc,cpu-nompi-generic-san,cuda-BF16,demo/run/step_00000008,ramp_study,venv/bin,cpustudy}}
cd "$work/tree" || exit 70
with_make
touch build/cpu/llmc/x.o build/demo/run/step_00000008/model.safetensors
ln -s build/cpu/train_gpt2 train_gpt2
ln -s ../build/cpu/data/tokenize data/tokenize
returns 0 make clean
for gone in build/cpu build/cpu-nompi-generic-san build/cuda-BF16 train_gpt2 data/tokenize; do
    check "$gone is left" [ ! -e $gone -a ! -L $gone ]
    check "$gone: not said to go" grep -qE "^rm .*$gone( |\$)" "$work/log"
done
for kept in build/demo/run/step_00000008/model.safetensors build/ramp_study build/venv/bin build/cpustudy; do
    check "$kept is gone" [ -e $kept ]
done
check "what is kept is not said: $(tail -n 1 "$work/log")" says "$work/log" "kept: build/cpustudy build/demo build/ramp_study build/venv"
end clean

# A target looks for MPI again after deps.sh has installed MPI.
begin
mkdir -p "$work"/first/{bin,scripts,llmc/base,dev/test/base}
cd "$work/first" || exit 70
with_make
program bin/pkg-config 'exit 1'
program bin/mpicc '[ -e installed ] || exit 1; [ "$1" != --showme:link ] || echo -lm'
program scripts/deps.sh 'touch installed'
echo 'int engine;' > train_gpt2.c
echo 'int module;' > llmc/base/module.c
printf '#include <stdio.h>\nint main(int n, char **words) { return n == 2 && printf("%%s seconds\\n", words[1]) > 0 ? 0 : 1; }\n' > dev/test/base/fuzz_none.c
PATH=$work/first/bin:$PATH returns 0 make fuzz
check "no fuzzer ran: $(tail -n 1 "$work/log")" says "$work/log" "3000 seconds"
check "built without MPI: $(ls -d build/*)" [ -e build/cpu-san/dev/test/base/fuzz_none -a ! -e build/cpu-nompi-san ]
cd "$root" || exit 70
end first_time_without_mpi

begin
mkdir -p "$work"/installed/{llmc/{base,run},data}
cd "$work/installed" || exit 70
with_make
echo 'int engine;' | tee train_gpt2.c > llmc/base/module.c
printf '#include <stdio.h>\nint main(void) { return puts("a program") < 0; }\n' | tee data/tokenize.c > llmc/run/main_cpu.c
returns 0 make all NO_MPI=1
check "all is not both" [ "$(./train_gpt2)$(data/tokenize)" = "a programa program" ]
program train_gpt2cu 'echo on a GPU'
where="PREFIX=/usr DESTDIR=$PWD/here"
returns 0 make install $where NO_MPI=1
check "installed: $(ls here/usr/bin)" [ "$(ls here/usr/bin | xargs)" = "gns_tokenize train_gpt2 train_gpt2cu" ]
check "completions" grep -q ' train_gpt2cu$' here/usr/share/bash-completion/completions/train_gpt2cu
rm -rf build/cpu-nompi # installed programs are copies, not links
check "they do not run" [ "$(here/usr/bin/train_gpt2)$(here/usr/bin/gns_tokenize)$(here/usr/bin/train_gpt2cu)" = "a programa programon a GPU" ]
touch here/usr/bin/tokenize # a file of another program
returns 0 make uninstall $where NO_MPI=1
check "left: $(find here/usr -type f)" [ "$(find here/usr -type f)" = here/usr/bin/tokenize ]
returns 0 make help
for target in all install uninstall check AVX2=1; do check "$target is not in make help" grep -qE "^ +$target +[a-z]" "$work/log"; done
cd "$root" || exit 70
end install

# A library's missing header is an error of one line.
begin
mkdir -p "$work"/bare/{bin,none}
cd "$work/bare" || exit 70
with_make
ln -s "$root/llmc" .
program bin/cc 'for word; do [ "$word" != -E ] || exec gcc -nostdinc "$@"; done
exec gcc "$@"'
returns 2 env PATH="$work/bare/bin:$PATH" make build/cpu/llmc/base/common.o NO_MPI=1 BUILD=build/cpu
check "not one line: $(cat "$work/log")" [ "$(grep -vc '^make' "$work/log")" = 1 ]
check "$(cat "$work/log")" says "$work/log" "error: no cjson/cJSON.h: scripts/deps.sh demo installs"
touch none/xxhash.h && mkdir none/cjson && touch none/cjson/cJSON.h
returns 0 env PATH="$work/bare/bin:$PATH" make build/cpu/llmc/base/common.o NO_MPI=1 BUILD=build/cpu CFLAGS="-I$PWD/none"
returns 0 make clean
check "kept: $(cat "$work/log")" [ ! -e build ]
end no_header

# CC and CFLAGS: errors name what does not work, the user's -march= is the only one, NaN checks are not compiled away.
begin
mkdir "$work/flags"
cd "$work/flags" || exit 70
with_make
ln -s "$root/llmc" .
compiles() { rm -rf build && returns "$1" make build/cpu/llmc/base/common.o NO_MPI=1 BUILD=build/cpu "${@:2}"; } # CODE VARIABLE=VALUE
for bad in CC=nosuchcc CFLAGS=-march=nosuch "CFLAGS=-Ofast" "CFLAGS=-O2 -ffast-math" "CFLAGS=-O2 -ffinite-math-only"; do
    compiles 2 "$bad"
    [[ $bad == *nosuch* ]] && check "$bad: not one line: $(cat "$work/log")" [ "$(grep -vc '^make' "$work/log")" = 1 ]
    check "$bad: $(cat "$work/log")" grep -qE '^error: CC=.* does not work: .*nosuch|NaN checks need IEEE arithmetic' "$work/log"
done
[ "$(uname -m)" != x86_64 ] || { compiles 0 && check "not for this machine: $(cat "$work/log")" says "$work/log" " -march=native"; }
returns 0 make -n build/cpu/llmc/base/common.o NO_MPI=1 BUILD=build/cpu CFLAGS="-O1 -march=one"
check "-march=one: $(cat "$work/log")" [ "$(grep -c -- =native "$work/log")$(grep -c -- "-march=one -c" "$work/log")" = 01 ]
end compiler

# A fake nvcc logs its arguments, and prints the file `report` when it compiles.
mkdir -p "$work"/gpu/{bin,cuda/bin,llmc/{base,cuda,run}}
cd "$work/gpu" || exit 70
with_make
program cuda/bin/nvcc '[ "$*" != --list-gpu-arch ] || exec cat archs
echo "$*" >> calls
for word; do [ "$before" != -o ] || : > "$word"; before=$word; done
case "$*" in *" -c "*) cat report >&2 ;; esac'
echo 'int module;' | tee llmc/base/module.c > llmc/run/main_cuda.c
touch train_gpt2.cu llmc/cuda/kernel.cu report archs
build_gpu() { rm -f calls && touch calls && PATH=$work/gpu/bin:$PATH make train_gpt2cu CUDA_HOME="$work/gpu/cuda" NO_MPI=1 "$@"; } # [VARIABLE=VALUE...]
compiled() { grep -e ' -c ' calls | grep -oE 'sm_[0-9]+a?|[a-z0-9_]+\.cu$' | sort -u | xargs; } # prints files and architectures
gpus() { program bin/nvidia-smi "printf '$1\\n'"; }

# Other GPUs or flags recompile only what depends on them.
begin
while IFS='|' read -r arch want; do
    returns 0 build_gpu CUDA_ARCH="$arch"
    check "for $arch: $(compiled)" [ "$(compiled)" = "$want" ]
done << END
90a|kernel.cu sm_90a train_gpt2.cu
90a|
80|kernel.cu sm_80 train_gpt2.cu
80 90|kernel.cu sm_80 sm_90a train_gpt2.cu
END
returns 2 build_gpu CUDA_HOME=none; check "$(cat "$work/log")" says "$work/log" "error: no nvcc in none/bin. Install"
returns 0 build_gpu CUDA_ARCH=80
for native in 0 1; do
    returns 0 build_gpu CUDA_ARCH=80 NATIVE=$native
    library=build/cpu-nompi$([ $native = 1 ] || echo -generic)/libgns.a
    check "NATIVE=$native: linked with another library: $(cat calls)" says calls " $library "
    check "NATIVE=$native: nvcc compiled $(compiled)" [ -z "$(compiled)" ]
done
end other_flags

# A build without NCCL says once that NCCL is missing; its program reports this, too.
begin
mkdir -p nccl/include llmc/ranks
program bin/mpicc '[ "$1" != --showme:link ] || echo -lm'
echo 'int comm;' > llmc/ranks/comm.c
with_nccl_home() { PATH=$PWD/bin:$PATH make train_gpt2cu CUDA_HOME="$PWD/cuda" CUDA_ARCH=90a NCCL_HOME="$PWD/nccl"; }
returns 0 with_nccl_home
check "$(cat "$work/log")" says "$work/log" "note: no nccl.h in $PWD/nccl/include, so for one GPU only: install libnccl-dev"
check "its reason: $(cat "$work/log")" grep -q -- '-DGNS_NO_NCCL .*-o build/cpu-nonccl/llmc/ranks/comm.o' "$work/log"
touch nccl/include/nccl.h
returns 0 with_nccl_home
check "there: $(cat "$work/log")" [ "$(grep -c 'no nccl.h\|NO_NCCL' "$work/log")" = 0 ]
check "linked: $(tail -n 1 calls)" grep -q -- "-rpath=$PWD/cuda/lib64 -L$PWD/nccl/lib -Xlinker -rpath=$PWD/nccl/lib .*-l:libnccl.so.2" calls
end nccl

# Without CUDA_ARCH make builds for the GPUs that nvidia-smi lists.
begin
finds() { # COMPUTE_CAPABILITIES ARCHITECTURES [VARIABLE=VALUE]
    gpus "$1"
    rm -rf build
    returns 0 build_gpu "${@:3}"
    check "$1: $(compiled)" [ "$(compiled)" = "kernel.cu $2 train_gpt2.cu" ]
    check "whole commands: $(cat "$work/log")" [ "$(grep -c gencode "$work/log")" = 0 -a "$(grep -cx 'NVCC train_gpt2.cu' "$work/log")" = 1 ]
}
finds '9.0\n9.0' sm_90a
finds '7.0\n7.5\n8.0' "sm_75 sm_80" PRECISION=FP16
finds '8.9\n12.0\n6.1' "sm_120 sm_89"
finds 'No devices were found' "sm_80 sm_90a"
printf 'compute_100\ncompute_120\ncompute_121\n' > archs
finds 'No devices were found' "sm_100 sm_120 sm_80 sm_90a"
check "nothing for later GPUs: $(cat calls)" says calls code=compute_80
too_old() { # CAPABILITY [VARIABLE=VALUE...]
    local oldest="8.0 (A100) or newer; CUDA_ARCH=80"
    [[ "$*" != *FP16* ]] || oldest="7.5 (T4) or newer; CUDA_ARCH=75"
    returns 2 build_gpu "${@:2}"
    check "$1: $(cat "$work/log")" says "$work/log" "compute capability $1: the CUDA trainer needs $oldest builds for another machine"
    check "$1: more than a line: $(cat "$work/log")" one_line "$work/log"
}
if [ ! -e /dev/nvidia0 ]; then # refused before anything is compiled
    gpus 9.0
    rm -rf build
    PATH=$PWD/bin:$PATH returns 2 make test-gpu NO_MPI=1
    check "without a GPU: $(cat "$work/log")" says "$work/log" "error: no NVIDIA GPU here"
    check "it compiles" [ ! -e build ]
fi
gpus '7.5\n7.5'
too_old 7.5
gpus 9.0
too_old 7.0 CUDA_ARCH="70 90a" PRECISION=FP16
returns 2 build_gpu PRECISION=FP61
check "FP61: $(cat "$work/log")" says "$work/log" "PRECISION=FP61: it may be BF16, FP16 or FP32"
end gpus_found

# Register spills are errors for GPUs with tuned kernels, warnings for others. Hopper's products must overlap.
begin
gpus 9.0
for arch in 80 90a 120; do
    printf "ptxas info    : Compiling entry function 'thrifty' for 'sm_120'\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Compiling entry function 'too_large' for 'sm_$arch'\nptxas info    : Function properties for too_large\n    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n" > report
    case $arch in 80 | 90a) code=2 ;; *) code=0 ;; esac
    rm -rf build
    returns $code build_gpu CUDA_ARCH=$arch
    check "sm_$arch: $(cat "$work/log")" says "$work/log" "too_large"
    check "sm_$arch: $(cat "$work/log")" says "$work/log" "registers spill"
    check "sm_$arch: names what does not spill" [ "$(grep -c thrifty "$work/log")" = 0 ]
    check "sm_$arch: an object is left" [ $code = 0 -o "$(find build -name kernel.o -o -name train_gpt2.o | wc -l)" = 0 ]
done
echo "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to that in the function 'slow'" > report
returns 2 build_gpu CUDA_ARCH=90a
check "wgmma waits: $(cat "$work/log")" grep -q "^error: .*: ptxas makes wgmma wait" "$work/log"
cd "$root" || exit 70
end spills
exit $failed
