#!/usr/bin/env bash
# Check and measure longctx on one GPU: part 1 takes at most 420 s, part 2 at most 260 s.
#
#   benchmarks/first_gpu.sh 1|2
#
# STEPS="ring slices" runs these steps alone. OUT is the folder of the archive r.tgz (default: a new one). DRY=1 runs
# everything at small sizes on a CPU. SECONDS_IN_ALL is another limit. PYTHON names the interpreter (python3).
set -u
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.first_gpu "$@"
