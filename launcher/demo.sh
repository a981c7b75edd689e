#!/usr/bin/env bash
# The whole road on this machine: text → tokenizer → shards → pretraining on two ranks → resume → report → export.
# Steps that are done already are skipped; a finished run is kept and a new one gets the next number.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

run=${1:-runs/quickstart}
work=$(dirname "$run")
say() { printf '\n\033[1m==> %s\033[0m\n' "$*"; }
pretrain() {
  # On one machine the launcher would still probe ssh; these two flags say there is nothing to probe.
  deepspeed --hostfile hostfile --no_ssh_check --master_addr 127.0.0.1 --master_port "$(free_port)" \
    launcher/pretrain.py --data.train "$work/data" --run.output_dir "$run" "$@" 2>&1 | grep --line-buffered -v ' \[INFO\] \['
}
free_port() { python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

next=2
base=$run
while [ -e "$run/metrics.jsonl" ]; do run="$base-$next"; next=$((next + 1)); done

start=$SECONDS
mkdir -p "$work"
say "1/6  tokenizer: $work/tokenizer.model"
[ -e "$work/tokenizer.model" ] || python -m launcher tokenizer train --source stdlib $EXCLUDE --vocab-size 4096 --output "$work/tokenizer.model"
say "2/6  shards: $work/data"
python -m launcher data build --source stdlib $EXCLUDE --tokenizer "$work/tokenizer.model" --output "$work/data"
