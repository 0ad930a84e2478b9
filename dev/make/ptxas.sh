#!/usr/bin/env bash
# Reads ptxas's report on the kernels of a file: ptxas.sh SOURCE REPORT "TUNED_ARCHITECTURES"
# Prints ptxas's numbered remarks (one says that the tensor cores' products, wgmma, do not overlap) and the kernels that
# spill registers to memory. Fails on spills for a tuned architecture; for others the kernel is slower, not wrong. Drops the
# remark that Turing's multiprocessors cannot hold two blocks of 768 threads (.minnctapersm).
grep -vE 'ptxas info *: [^(]|bytes stack frame|minnctapersm|^$' "$2"
awk -v source="$1" -v tuned_archs="${3// /|}" '
    /Compiling entry function/ { entry = $0 }
    / [1-9][0-9]* bytes spill/ { print entry; print; spills = 1; if (entry ~ "sm_(" tuned_archs ").$") tuned = 1 }
    END { if (spills) print (tuned ? "error" : "warning") ": " source ": registers spill"; exit tuned }' "$2"
