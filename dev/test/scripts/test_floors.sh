#!/usr/bin/env bash
# The folders of llmc/ are floors: no include and no call across objects goes up (floors.py). Every header compiles
# alone, as C, and as CUDA C++ if device code includes it.
set -u
. "$(dirname "$0")/../checks.sh" floors
python=$(find_python) || skip_suite "no python3"

begin
returns 0 "$python" dev/test/scripts/floors.py "$build"
cat "$work/log"
end no_arrow_up

begin
mpi=$(mpicc --showme:compile 2> /dev/null || pkg-config --cflags ompi 2> /dev/null)
for header in llmc/*/*.h; do
    [ -n "$mpi" ] || [ "$header" != llmc/ranks/mpi_check.h ] || continue
    # shellcheck disable=SC2086
    echo "#include \"${header#llmc/}\"" | ${CC:-cc} -std=gnu11 -Illmc -Wall -Wextra -Wno-unused-parameter -Werror -fopenmp $mpi -fsyntax-only -x c - > "$work/log" 2>&1 ||
        check "$header: $(head -n 3 "$work/log")" false
done
end headers_as_c

# Compile all headers that .cu and .cuh files include, in ascending and in descending order, since a header that lacks
# an include fails in one of the orders. -ptx runs only the device compiler, which also checks host code.
begin
if nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2> /dev/null); then
    { (cd llmc && ls cuda/*.cuh) && grep -ho '#include "[a-z]*/[a-z0-9_]*\.h"' llmc/*/*.cu* train_gpt2.cu | cut -d '"' -f 2; } | sort -u > "$work/headers"
    for order in cat tac; do
        $order "$work/headers" | sed 's/.*/#include "&"/' > "$work/$order.cu"
        returns 0 "$nvcc" -std=c++20 -Illmc -arch=sm_90 -ptx -o "$work/$order.ptx" "$work/$order.cu"
    done
    end headers_as_cuda
else
    echo "SKIP floors/headers_as_cuda: no nvcc"
fi
exit $failed
