#!/usr/bin/env bash
# From messages to a chat model: text → base model, trained over ranks → export → conversations rendered by a chat
# template → tuning over the same ranks → comparison. Existing files are kept; a new run gets the next number.
set -euo pipefail
cd "$(dirname "$0")/../.."
source launcher/demos/ranks.sh

run=${1:-runs/chat}
work=$run-data
base=$run
number=2
while [ -e "$run" ]; do run="$base-$number"; number=$((number + 1)); done

practise() {
  [ -e "$work/$1.jsonl" ] || show longctx data practice --output "$work/$1.jsonl" --words 0 30 --pairs 1 1 "${@:2}"
}
ask() {
  # The last message is the expected answer; without it the conversation is a prompt.
  show longctx generate --checkpoint "$1" --chat --prompts-file "$work/questions.jsonl" --max-new-tokens 24 --output "$2"
  longctx score --checkpoint "$1" --data "$work/chats/validation" --output "$2.scores" --json >"$2.json"
}

start=$SECONDS
mkdir -p "$work" "$run"
say "1/5 text, conversations, a tokenizer, shards of the text"
practise text --documents 12000 --mentions 2 5 --questions 1 1
practise chats --documents 3000 --mentions 1 3 --questions 1 1 --seed 1 --messages
practise held-out --documents 60 --mentions 1 3 --questions 1 1 --seed 2 --messages
[ -e "$work/tokenizer.model" ] ||
  show longctx tokenizer train --source "$work/text.jsonl" --vocab-size 1152 --output "$work/tokenizer.model"
show longctx data build --source "$work/text.jsonl" --tokenizer "$work/tokenizer.model" --output "$work/text"

say "2/5 a base model, ranks: $ranks. It continues text, without any chat format"
on_ranks train --config recall --data.train "$work/text" --run.output_dir "$run/base" --train.steps 400 \
  --parallel.context "$ranks" --train.final_lr_ratio 0.1
show longctx convert --to hf "$run/base" "$run/base-hf"

say "3/5 conversations in our own chat template: a base model has none"
cat >"$work/template.jinja" <<'JINJA'
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{ 'Question: ' + message['content'] + '\nAnswer:\n' }}
{%- else -%}
{%- generation -%}{{ message['content'] + eos_token }}{%- endgeneration -%}{{ '\n' }}
{%- endif -%}
{%- endfor -%}
JINJA
show longctx data build --source "$work/chats.jsonl" --tokenizer "$run/base-hf" --chat-template "$work/template.jinja" \
  --output "$work/chats" --overwrite
show longctx data inspect "$work/chats" --seq-len 1024

say "4/5 tuning, ranks: $ranks"
on_ranks train --config sft-recall --run.start_from "$run/base-hf" --data.train "$work/chats" \
  --run.output_dir "$run/tuned" --parallel.context "$ranks"
show longctx convert --to hf "$run/tuned" "$run/tuned-hf"

say "5/5 sixty held-out questions, before and after"
python - "$work/held-out.jsonl" "$work/questions.jsonl" <<'PYTHON'
import json, sys

with open(sys.argv[1]) as source, open(sys.argv[2], "w") as questions:
    for line in source:
        *messages, answer = json.loads(line)["messages"]
        questions.write(json.dumps({"messages": messages, "answer": answer["content"]}) + "\n")
PYTHON
install -D -m 644 "$work/template.jinja" "$run/base-hf/chat_template.jinja"
ask "$run/base-hf" "$run/before.jsonl"
ask "$run/tuned-hf" "$run/after.jsonl"

show python - "$run" <<'PYTHON'
import json, sys
from pathlib import Path

print("\n                 right answers   log-likelihood of a reply's token")
share = 0.0
for name in ("before", "after"):
    path = Path(sys.argv[1]) / f"{name}.jsonl"
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    right = sum(answer["continuation"].strip() == answer["answer"] for answer in answers)
    total = json.loads(Path(f"{path}.json").read_text())
    mean = total["counted_log_likelihood"] / total["counted_tokens"]
    print(f"    {name:10} {right:6} of {len(answers)}   {mean:16.3f}")
    share = right / len(answers)
sys.exit(share < 0.9 and f"{share:.0%} of the answers are right; the demo promises 90 %.")
PYTHON

say "done in $((SECONDS - start)) s. Results:"
cat <<END
    $run/tuned/report.html    loss, validation, speed
    $run/tuned-hf             for transformers; apply_chat_template renders as it was trained
    .venv/bin/longctx generate --checkpoint $run/tuned --chat --max-new-tokens 24 --prompts-file $work/questions.jsonl
END
