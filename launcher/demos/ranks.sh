# Functions for all demos: how many ranks to start, and how to print commands. Sourced in the repository root.
export PATH="$PWD/.venv/bin:$PATH"

# One rank per GPU, two without GPUs; a power of two, which divides the demos' rows.
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
ranks=$((gpus ? 1 : 2))
while ((2 * ranks <= gpus)); do ranks=$((2 * ranks)); done

say() { printf '\n==> %s\n' "$*"; }
show() { printf '    $'; printf ' %q' "$@"; printf '\n'; "$@"; }
on_ranks() { show longctx "$1" --ranks "$ranks" "${@:2}"; }
