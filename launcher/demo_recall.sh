#!/usr/bin/env bash
# A model that recalls: text → three runs on two ranks, documents longer each time → needles at one rank and at two,
# and at twice the length with and without YaRN. What is there already is kept; a new run gets the next number.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

run=${1:-runs/recall}
text=$run-data
base=$run
number=2
while [ -e "$run" ]; do run="$base-$number"; number=$((number + 1)); done

say() { printf '\n==> %s\n' "$*"; }
show() { printf '    $'; printf ' %q' "$@"; printf '\n'; "$@"; }
free_port() { python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
ranks() { show deepspeed -q --num_gpus 2 --master_port "$(free_port)" "$@"; }
practise() {
  [ -e "$text/$1.jsonl" ] || show longctx data practice --output "$text/$1.jsonl" --documents "${@:2}"
}
pretrain() {
  ranks launcher/pretrain.py --config recall --data.train "$text/$1" --run.output_dir "$2" "${@:3}"
}
needles() {
  # Plain sentences of their own seed: no needle of an evaluation stands in a text that the model has read.
  "${evaluate[@]}" --tasks niah_word --samples 22 --haystack "$text/haystack.jsonl" "$@"
}

start=$SECONDS
mkdir -p "$text"
say "1/6 text, tokenizer, shards"
practise short 10000 --words 0 30 --pairs 1 1 --mentions 2 5 --questions 1 1
practise middle 4000 --words 10 380 --pairs 1 1 --mentions 1 5 --questions 1 1
practise long 2000 --words 200 820 --pairs 1 1 --mentions 1 4 --questions 1 1
practise haystack 60 --words 500 500 --pairs 0 0 --seed 1
[ -e "$text/tokenizer.model" ] ||
  show longctx tokenizer train --source "$text/short.jsonl" --vocab-size 1152 --output "$text/tokenizer.model"
for stage in short middle long; do
  show longctx data build --source "$text/$stage.jsonl" --tokenizer "$text/tokenizer.model" --output "$text/$stage"
done

say "2/6 pretraining on two ranks: short documents, longer ones, documents of up to 1,024 tokens"
pretrain short "$run/1-short"
pretrain middle "$run/2-middle" --run.start_from "$run/1-short" --train.steps 400 --train.lr 2e-3
pretrain long "$run/3-long" --run.start_from "$run/2-middle" --train.steps 400 --train.lr 1e-3 --train.final_lr_ratio 0.05
model=$run/3-long

say "3/6 needles at the length of training, in one process"
evaluate=(show longctx evaluate)
needles --checkpoint "$model" --lengths 256,512,768,1024 --output "$model/needles-1-rank"
say "4/6 the same over two ranks that share each prompt"
evaluate=(ranks launcher/evaluate.py)
needles --checkpoint "$model" --lengths 256,512,768,1024 --output "$model/needles-2-ranks"

say "5/6 twice the length: as it is, and with YaRN"
evaluate=(show longctx evaluate)
needles --checkpoint "$model" --lengths 1024,1536,2048 --beyond-positions --output "$model/twice-without-scaling"
# As model cards tell it: the weights stay, config.json says that positions are stretched.
show longctx convert --to hf "$model" "$run/recall-with-yarn"
show python - "$run/recall-with-yarn/config.json" <<'PYTHON'
import json, sys

with open(sys.argv[1]) as file:
    config = json.load(file)
rope = config["rope_parameters"]
rope |= {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": config["max_position_embeddings"]}
config["max_position_embeddings"] *= 2
with open(sys.argv[1], "w") as file:
    json.dump(config, file, indent=2)
print(json.dumps(rope))
PYTHON
needles --checkpoint "$run/recall-with-yarn" --lengths 1024,1536,2048 --output "$model/twice-with-yarn"

show longctx report "$model/twice-without-scaling" "$model/twice-with-yarn" --output "$model/twice.html"

say "6/6 what the heads of the last layer attend to, in short documents that were held out"
for head in 0 1; do
  show longctx attention --checkpoint "$model" --text "$text/short/validation" --length 450 --layer 1 --head "$head" \
    --output "$model/attention"
done

show python - "$model" <<'PYTHON'
import csv, sys
from pathlib import Path

worst = 1.0
for name in ("needles-1-rank", "needles-2-ranks", "twice-without-scaling", "twice-with-yarn"):
    with (Path(sys.argv[1]) / name / "depth_niah_word.csv").open() as file:
        rows = list(csv.DictReader(file))
    means = {}
    for row in rows:
        means.setdefault(int(row["length"]), []).append(float(row["mean"]))
    line = ", ".join(f"{length:,}: {sum(cells) / len(cells):.3f}" for length, cells in sorted(means.items()))
    print(f"    {name:24} {line}")
    if name.startswith("needles"):
        cells = [cell for column in means.values() for cell in column]
        worst = min(worst, sum(cells) / len(cells))
print(f"    grid at the length of training: {worst:.3f}")
sys.exit(worst < 0.95)
PYTHON

say "done in $((SECONDS - start)) s. What there is now:"
cat <<END
    $model/report.html    loss, speed and all pictures on one page
    $model/needles-2-ranks/depth_niah_word.svg    the needles: score by length and depth
    $model/twice_niah_word.svg    at twice the length, as it is and with YaRN, side by side
    $model/attention/attention_layer1_head0.html    point at a token: what it attends to
END
[ -z "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ] || python -m webbrowser "file://$PWD/$model/report.html"
