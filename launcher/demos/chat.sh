#!/usr/bin/env bash
# From messages to a chat model that prefers short replies: text → base model, trained over ranks → export →
# conversations rendered by a chat template → tuning of all weights, and of adapters → preferences → comparison.
# Existing files are kept; a new run gets the next number.
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
conversations() {
  practise "$1" --mentions 1 3 --questions 1 1 --messages "${@:2}"
}
tune() {
  on_ranks train --config "$1" --run.start_from "$run/$2-hf" --run.output_dir "$run/$3" --parallel.context "$ranks" \
    "${@:4}"
  show longctx convert --to hf "$run/$3" "$run/$3-hf"
}
ask() {
  # Greedily for right answers; with temperature 1 as often as the model replies so.
  local questions=(--checkpoint "$run/$1-hf" --chat --prompts-file "$work/questions.jsonl" --max-new-tokens 24)
  show longctx generate "${questions[@]}" --output "$run/$1.jsonl"
  longctx generate "${questions[@]}" --temperature 1 --output "$run/$1-sampled.jsonl"
  longctx score --checkpoint "$run/$1-hf" --data "$work/chats/validation" --output "$run/$1.scores" --json \
    >"$run/$1.json"
}

start=$SECONDS
mkdir -p "$work" "$run"
say "1/6 text, conversations, a tokenizer, shards of the text"
practise text --documents 12000 --mentions 2 5 --questions 1 1
conversations chats --documents 12000 --seed 1
conversations others --documents 1000 --seed 2
conversations held-out --documents 100 --seed 3
[ -e "$work/tokenizer.model" ] ||
  show longctx tokenizer train --source "$work/text.jsonl" --vocab-size 1152 --output "$work/tokenizer.model"
show longctx data build --source "$work/text.jsonl" --tokenizer "$work/tokenizer.model" --output "$work/text"

say "2/6 a base model, ranks: $ranks. It continues text, without any chat format"
on_ranks train --config recall --data.train "$work/text" --run.output_dir "$run/base" --train.steps 800 \
  --parallel.context "$ranks" --train.final_lr_ratio 0.1
show longctx convert --to hf "$run/base" "$run/base-hf"

say "3/6 conversations in our own chat template: a base model has none. Half of the replies are only the code"
cat >"$work/template.jinja" <<'JINJA'
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{ 'Question: ' + message['content'] + '\nAnswer:' }}
{%- else -%}
{%- generation -%}{{ ' ' + message['content'] + eos_token }}{%- endgeneration -%}{{ '\n' }}
{%- endif -%}
{%- endfor -%}
JINJA
python - "$work" <<'PYTHON'
import json, sys
from pathlib import Path

work = Path(sys.argv[1])


def records(name):
    """Yield each conversation's question and answer, and the answer's code."""
    for line in (work / f"{name}.jsonl").read_text().splitlines():
        question, answer = json.loads(line)["messages"]
        yield question, answer, {**answer, "content": answer["content"].split(" is ")[1]}


def write(name, values):
    (work / f"{name}.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))


write("mixed", ({"messages": [q, (full, code)[i % 2]]} for i, (q, full, code) in enumerate(records("chats"))))
write("pairs", ({"prompt": [q], "chosen": [code], "rejected": [full]} for q, full, code in records("others")))
write("questions", ({"messages": [q], "code": code["content"]} for q, full, code in records("held-out")))
PYTHON
build=(--tokenizer "$run/base-hf" --chat-template "$work/template.jinja" --overwrite)
show longctx data build --source "$work/mixed.jsonl" --output "$work/chats" "${build[@]}"
show longctx data inspect "$work/chats" --seq-len 1024

say "4/6 tuning, ranks: $ranks. All weights, then adapters of rank 16 alone"
tune sft-recall base full --data.train "$work/chats"
tune lora-recall base lora --data.train "$work/chats"

say "5/6 preferences for the code alone, with the tuned model as reference"
show longctx data build --kind preferences --source "$work/pairs.jsonl" --output "$work/pairs" "${build[@]}"
show longctx score --references --checkpoint "$run/full-hf" --data "$work/pairs"
tune dpo-recall full dpo --data.train "$work/pairs"

say "6/6 a hundred held-out questions"
install -D -m 644 "$work/template.jinja" "$run/base-hf/chat_template.jinja"
for name in base full lora dpo; do ask "$name"; done

show python - "$run" <<'PYTHON'
import json, sys
from pathlib import Path

run = Path(sys.argv[1])
names = {"base": "base model", "full": "all weights", "lora": "adapters", "dpo": "all weights, then DPO"}


def replies(name):
    """Return pairs of a question's code and the model's reply."""
    found = map(json.loads, (run / f"{name}.jsonl").read_text().splitlines())
    return [(record["code"], record["continuation"].strip()) for record in found]


print(f"\n    {'':22} right answers   nats per reply token   only the code")
right, nats, short = {}, {}, {}
for name, title in names.items():
    asked, sampled = replies(name), replies(f"{name}-sampled")
    scores = json.loads((run / f"{name}.json").read_text())
    right[name] = sum(code in reply for code, reply in asked) / len(asked)
    nats[name] = -scores["counted_log_likelihood"] / scores["counted_tokens"]
    short[name] = sum(" is " not in reply for _, reply in sampled) / len(sampled)
    print(f"    {title:22} {right[name]:12.0%}   {nats[name]:20.3f}   {short[name]:13.0%}")
steps = map(json.loads, (run / "dpo" / "metrics.jsonl").read_text().splitlines())
kl = [step["reference_kl"] for step in steps if "reference_kl" in step]
print(f"\n    KL of DPO to its reference: {kl[-1]:.2f} nats per reply")
faults = []
if min(right["full"], right["lora"], right["dpo"]) < 0.9:
    faults.append("fewer than 90 % of the answers are right")
if abs(nats["full"] - nats["lora"]) > 0.02:
    faults.append("adapters and all weights differ by more than 0.02 nats")
if not short["full"] < 0.65 < 0.9 < short["dpo"]:
    faults.append("DPO has not raised the share of short replies from a half to 90 %")
sys.exit("; ".join(faults) or None)
PYTHON

say "done in $((SECONDS - start)) s. Results:"
cat <<END
    $run/full/report.html    loss, validation, speed; likewise lora and dpo
    $run/dpo-hf              for transformers; apply_chat_template renders as it was trained
    .venv/bin/longctx generate --checkpoint $run/dpo --chat --max-new-tokens 24 --prompts-file $work/questions.jsonl
END
