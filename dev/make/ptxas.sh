#!/usr/bin/env bash
# Reads ptxas's report on the kernels of a file: ptxas.sh SOURCE REPORT "TUNED_ARCHITECTURES"
# Prints ptxas's numbered remarks and the kernels that spill registers to memory. Fails on spills for a tuned architecture;
# on others a spill only costs time. Fails on remarks that wgmma, the tensor cores' products of 90a, do not overlap.
# Drops the remark that Turing's multiprocessors cannot hold two blocks of 768 threads (.minnctapersm).
grep -vE 'ptxas info *: [^(]|bytes stack frame|minnctapersm|^$' "$2"
awk -v source="$1" -v tuned_archs="${3// /|}" '
    /Compiling entry function/ { entry = $0 }
    / [1-9][0-9]* bytes spill/ { print entry; print; spills = 1; if (entry ~ "sm_(" tuned_archs ").$") tuned = 1 }
    /\(C75[0-9]+\).*(wgmma|GMMA)/ { serial = 1 }
    END {
        if (spills) print (tuned ? "error" : "warning") ": " source ": registers spill"
        if (serial) print "error: " source ": ptxas makes wgmma wait; use another CUDA Toolkit, or CUDA_ARCH=80 for slower kernels"
        exit tuned || serial
    }' "$2"
