#!/usr/bin/env bash
# From pairs to a translation model: pairs → one tokenizer for both sides → shards → encoder-decoder over ranks → BLEU on
# held-out pages → ten translations → a plot of cross attention. Existing files are kept; a new run gets the next number.
set -euo pipefail
cd "$(dirname "$0")/../.."
source launcher/demos/ranks.sh

run=${1:-runs/translate}
work=$run-data
base=$run
number=2
while [ -e "$run" ]; do run="$base-$number"; number=$((number + 1)); done
pairs=(--source-field en --text-field de)

start=$SECONDS
mkdir -p "$work" "$run"
say "1/5 pairs, one tokenizer for both sides, shards"
[ -e "$work/train.jsonl" ] ||
  show python -m launcher.demos.pairs "$work" ${LONGCTX_HELP_PAGES:+--help-pages "$LONGCTX_HELP_PAGES"}
# Sums in words need only a small vocabulary.
size=4000
[ "$(wc -c <"$work/train.jsonl")" -gt 5000000 ] || size=600
[ -e "$work/tokenizer.model" ] ||
  show longctx tokenizer train --source "$work/train.jsonl" "${pairs[@]}" --vocab-size "$size" --output "$work/tokenizer.model"
for split in train held-out; do
  show longctx data build --source "$work/$split.jsonl" "${pairs[@]}" --tokenizer "$work/tokenizer.model" \
    --validation-fraction 0 --output "$work/$split"
done
show longctx data inspect "$work/train" --seq-len 512 --source-seq-len 512

say "2/5 encoder-decoder training, ranks: $ranks"
on_ranks train --config translate-small --data.train "$work/train" --data.validation "$work/held-out" \
  --model.vocab_size "$size" --run.output_dir "$run/model" --parallel.context "$ranks"

say "3/5 held-out pages"
for beams in 1 4; do
  on_ranks evaluate --checkpoint "$run/model" --tasks translation --samples 200 --beams "$beams" \
    --length-penalty 0.6 --parallel.context 1 --output "$run/beams-$beams"
done

say "4/5 ten examples"
show python - "$run/beams-4/translation.jsonl" <<'PYTHON'
import json, sys

with open(sys.argv[1]) as rows:
    for row in [json.loads(line) for line in rows][:10]:
        print(f"\n    {row['source']}\n  → {row['written']}\n  = {row['reference']}")
PYTHON

say "5/5 cross attention in the last layer"
printf '%s\n' "${LONGCTX_SENTENCE:-$(python -c '
import json, sys
rows = [json.loads(line)["source"] for line in open(sys.argv[1])]
print(min((row for row in rows if len(row.split()) > 7), key=len, default=rows[0]))
' "$run/beams-4/translation.jsonl")}" >"$run/sentence.txt"
show longctx attention --checkpoint "$run/model" --cross --text "$run/sentence.txt" --layer 1 --head 0 --output "$run/attention"

say "done in $((SECONDS - start)) s. Results:"
cat <<END
    $run/model/report.html    loss, validation, speed
    $run/attention            the target against its source, by cross attention
    $run/beams-4              BLEU, chrF, every translation
    .venv/bin/longctx generate --checkpoint $run/model --beams 4 --max-new-tokens 64 --prompt "Click the icon."
END
