# What the demos share: the ranks they start, and how they show what they do. Sourced in the root of the repository.
export PATH="$PWD/.venv/bin:$PATH"

# A rank for each GPU, and two on a machine without any. A power of two, into which the demos' rows can be cut.
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
ranks=$((gpus ? 1 : 2))
while ((2 * ranks <= gpus)); do ranks=$((2 * ranks)); done

say() { printf '\n==> %s\n' "$*"; }
show() { printf '    $'; printf ' %q' "$@"; printf '\n'; "$@"; }
on_ranks() { show longctx "$1" --ranks "$ranks" "${@:2}"; }
