#!/usr/bin/env bash
# The full pipeline on this machine: text → tokenizer → shards → pretraining over ranks → resume → export → generation.
# Existing files are kept, and so is an existing run: a new one gets the next number.
set -euo pipefail
cd "$(dirname "$0")/../.."
source launcher/demos/ranks.sh

run=${1:-runs/quickstart}
work=$(dirname "$run")
base=$run
number=2
while [ -e "$run" ]; do run="$base-$number"; number=$((number + 1)); done

# The default corpus excludes tests, and tables of character names, which would fill the tokenizer's vocabulary.
corpus=(--source stdlib --exclude test '*/test' '*/tests' idlelib encodings pydoc_data)

pretrain() {
  on_ranks train --data.train "$work/data" --run.output_dir "$run" --parallel.context "$ranks" "$@"
}

start=$SECONDS
mkdir -p "$work"
say "1/6 tokenizer"
[ -e "$work/tokenizer.model" ] || show longctx tokenizer train "${corpus[@]}" --vocab-size 4096 --output "$work/tokenizer.model"
say "2/6 shards"
show longctx data build "${corpus[@]}" --tokenizer "$work/tokenizer.model" --output "$work/data"
say "3/6 pretraining, the first part"
pretrain --train.stop_after 90
say "4/6 pretraining, resumed"
pretrain --run.resume latest
say "5/6 export to Hugging Face"
show longctx convert --to hf "$run" "$run/hf"
say "6/6 a continuation, greedy and sampled"
prompt=$'def __init__(self, name, '
show longctx generate --checkpoint "$run" --prompt "$prompt" --max-new-tokens 48
show longctx generate --checkpoint "$run" --prompt "$prompt" --max-new-tokens 48 --temperature 0.8 --top-p 0.95

say "done in $((SECONDS - start)) s. Results:"
cat <<END
    $run/report.html      loss, loss by position, speed, expert load: open it in a browser
    $run/metrics.jsonl    the same numbers, a line a step; TensorBoard: .venv/bin/tensorboard --logdir $run
    $run/checkpoints      what a resume starts from
    $run/hf               for transformers: AutoModelForCausalLM.from_pretrained("$run/hf")
    $work/data            the shards; .venv/bin/longctx data inspect $work/data

    Next: your own text
    .venv/bin/longctx data build --source YOUR_FOLDER --tokenizer $work/tokenizer.model --output runs/mine
    .venv/bin/longctx train --ranks $ranks --data.train runs/mine --run.output_dir runs/first --parallel.context $ranks
    and every setting there is: .venv/bin/longctx train --help all
END
