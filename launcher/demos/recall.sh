#!/usr/bin/env bash
# A model with recall: text → three runs over ranks with growing documents → needles in one process and over all ranks,
# up to twice the length, with and without YaRN. Existing files are kept; a new run gets the next number.
set -euo pipefail
cd "$(dirname "$0")/../.."
source launcher/demos/ranks.sh

run=${1:-runs/recall}
text=$run-data
base=$run
number=2
while [ -e "$run" ]; do run="$base-$number"; number=$((number + 1)); done

practise() {
  [ -e "$text/$1.jsonl" ] || show longctx data practice --output "$text/$1.jsonl" --documents "${@:2}"
}
pretrain() {
  on_ranks train --config recall --data.train "$text/$1" --run.output_dir "$2" \
    --parallel.context "$ranks" "${@:3}"
}
needles() {
  # Sentences from a separate seed: no evaluation needle is in a training text.
  "${evaluate[@]}" --tasks niah_word --lengths 512,1024,1536,2048 --samples 22 --haystack "$text/haystack.jsonl" "$@"
}

start=$SECONDS
mkdir -p "$text"
say "1/6 text, tokenizer, shards"
practise short 12000 --words 0 30 --pairs 1 1 --mentions 2 5 --questions 1 1
practise middle 4000 --words 10 380 --pairs 1 1 --mentions 1 5 --questions 1 1 --seed 1
practise long 2800 --words 300 830 --pairs 1 1 --mentions 1 3 --questions 1 1 --seed 2
practise haystack 60 --words 500 500 --pairs 0 0 --seed 3
[ -e "$text/tokenizer.model" ] ||
  show longctx tokenizer train --source "$text/short.jsonl" --vocab-size 1152 --output "$text/tokenizer.model"
for stage in short middle long; do
  show longctx data build --source "$text/$stage.jsonl" --tokenizer "$text/tokenizer.model" --output "$text/$stage"
done

say "2/6 pretraining, ranks: $ranks. Short documents, longer ones, documents of up to 1,024 tokens"
pretrain short "$run/1-short"
pretrain middle "$run/2-middle" --run.start_from "$run/1-short" --train.steps 400 --train.lr 2e-3
pretrain long "$run/3-long" --run.start_from "$run/2-middle" --train.steps 800 --train.lr 2e-3 --train.final_lr_ratio 0.05
model=$run/3-long

say "3/6 needles up to twice the training length, in one process"
evaluate=(show longctx evaluate)
needles --checkpoint "$model" --beyond-positions --output "$model/one-process"
say "4/6 the same over all ranks, which share each prompt"
evaluate=(on_ranks evaluate)
needles --checkpoint "$model" --beyond-positions --output "$model/ranks"

say "5/6 the same with YaRN"
# As model cards advise: the weights stay the same, and config.json scales the positions.
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
needles --checkpoint "$run/recall-with-yarn" --output "$model/ranks-with-yarn"

say "6/6 plots: needles side by side, and attention in layer 1 on held-out documents"
show longctx report "$model/one-process" "$model/ranks" "$model/ranks-with-yarn" --output "$run/needles.html"
for head in {0..7}; do
  show longctx attention --checkpoint "$model" --text "$text/short/validation" --length 450 --layer 1 --head "$head" \
    --output "$model/attention"
done

show python - "$model" <<'PYTHON'
import csv, sys
from pathlib import Path

TRAINED = 1024
worst = 1.0
print("\n    score of niah_word, a mean over depths, by length in tokens")
for name in ("one-process", "ranks", "ranks-with-yarn"):
    cells = {}
    with (Path(sys.argv[1]) / name / "depth_niah_word.csv").open() as file:
        for row in csv.DictReader(file):
            cells.setdefault(int(row["length"]), []).append(float(row["mean"]))
    means = {length: sum(column) / len(column) for length, column in sorted(cells.items())}
    print(f"    {name:20}", "  ".join(f"{length:,}: {mean:.3f}" for length, mean in means.items()))
    worst = min(worst, *(mean for length, mean in means.items() if length <= TRAINED))
sys.exit(worst < 0.95 and f"A score up to {TRAINED:,} tokens is {worst:.3f}; the demo promises 0.95.")
PYTHON

say "done in $((SECONDS - start)) s. Results:"
cat <<END
    $run/needles.html    the needles: score by length and depth, in one process, over ranks, and with YaRN
    $model/report.html    loss, speed and every evaluation
    $model/attention/attention_layer1_head0.html    point at a token: what it attends to
END
[ -z "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ] || python -m webbrowser "file://$(realpath "$run/needles.html")"
