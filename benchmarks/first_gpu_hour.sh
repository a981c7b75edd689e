#!/usr/bin/env bash
# The first hour on a machine with GPUs: every check that waits for one, one after the other, and one report.
#
#   benchmarks/first_gpu_hour.sh [--output FOLDER] [--only STAGE …] [--minutes N]
#   benchmarks/first_gpu_hour.sh --dry-run     what can run on a CPU, at tiny sizes: checks the script
#
# A stage that fails or takes too long stops no other. PYTHON names the interpreter (default: .venv/bin/python).
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
    echo "$python is not there. Run \`make setup\`, or name an interpreter: PYTHON=python3 $0" >&2
    exit 1
fi
exec "$python" -m benchmarks.first_gpu_hour "$@"
