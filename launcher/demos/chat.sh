#!/usr/bin/env bash
# From messages to a chat model: text → base model, trained over ranks → export → conversations rendered by a chat
# template → tuning of all weights, and of LoRA adapters → preferences (DPO) → comparison. Existing files are kept; a new
# run gets the next number.
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
  show longctx generate --checkpoint "$1" --chat --prompts-file "$work/questions.jsonl" --max-new-tokens 24 \
    --temperature 1 --output "$2"
  longctx score --checkpoint "$1" --data "$work/chats/validation" --output "$2.scores" --json >"$2.json"
}
write_records() {
  # Every second reply is short. Preferences compare both replies to a question: the short one is chosen.
  python - "$work" <<'PYTHON'
import json, sys
from pathlib import Path

work = Path(sys.argv[1])

def read(name):
    return [json.loads(line)["messages"] for line in (work / f"{name}.jsonl").read_text().splitlines()]

def write(name, records):
    (work / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

def short(reply):
    return {"role": "assistant", "content": reply["content"].split(" is ")[-1]}

chats, compared = read("long-chats"), read("compared")
write("chats", ({"messages": [*m[:-1], short(m[-1]) if n % 2 else m[-1]]} for n, m in enumerate(chats)))
write("preferences", ({"prompt": m[:-1], "chosen": [short(m[-1])], "rejected": [m[-1]]} for m in compared))
write("questions", ({"messages": m[:-1], "answer": short(m[-1])["content"]} for m in read("held-out")))
PYTHON
}

start=$SECONDS
mkdir -p "$work" "$run"
say "1/6 text, conversations, preferences, a tokenizer, shards of the text"
practise text --documents 12000 --mentions 2 5 --questions 1 1
practise long-chats --documents 3000 --mentions 1 3 --questions 1 1 --seed 1 --messages
practise compared --documents 400 --mentions 1 3 --questions 1 1 --seed 3 --messages
practise held-out --documents 60 --mentions 1 3 --questions 1 1 --seed 2 --messages
[ -e "$work/preferences.jsonl" ] || write_records
[ -e "$work/tokenizer.model" ] ||
  show longctx tokenizer train --source "$work/text.jsonl" --vocab-size 1152 --output "$work/tokenizer.model"
show longctx data build --source "$work/text.jsonl" --tokenizer "$work/tokenizer.model" --output "$work/text"

say "2/6 a base model, ranks: $ranks. It continues text, without any chat format"
on_ranks train --config recall --data.train "$work/text" --run.output_dir "$run/base" --train.steps 400 \
  --parallel.context "$ranks" --train.final_lr_ratio 0.1
show longctx convert --to hf "$run/base" "$run/base-hf"

say "3/6 conversations in our own chat template: a base model has none"
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

say "4/6 tuning of all weights, and of adapters of rank 16 beside frozen weights, ranks: $ranks"
tune() { on_ranks train --run.start_from "$run/base-hf" --data.train "$work/chats" --parallel.context "$ranks" "$@"; }
tune --config sft-recall --run.output_dir "$run/tuned"
tune --config lora-recall --run.output_dir "$run/lora"
show longctx convert --to hf "$run/tuned" "$run/tuned-hf"

say "5/6 preferences (DPO): short replies are chosen. The tuned model is the reference, and its likelihoods are stored"
show longctx data build --kind preferences --source "$work/preferences.jsonl" --tokenizer "$run/tuned-hf" \
  --output "$run/preferences"
on_ranks score --references --checkpoint "$run/tuned" --data "$run/preferences"
on_ranks train --config dpo-recall --run.start_from "$run/tuned" --data.train "$run/preferences" \
  --run.output_dir "$run/dpo"

say "6/6 sixty held-out questions: before, all weights, adapters, and after preferences; replies are drawn"
install -D -m 644 "$work/template.jinja" "$run/base-hf/chat_template.jinja"
ask "$run/base-hf" "$run/before.jsonl"
for which in tuned lora dpo; do ask "$run/$which" "$run/$which.jsonl"; done

show python - "$run" <<'PYTHON'
import json, sys
from pathlib import Path

run, found = Path(sys.argv[1]), {}
print("\n                  right answers   short replies   log-likelihood of a reply's token")
for name, title in (("before", "before"), ("tuned", "all weights"), ("lora", "adapters"), ("dpo", "preferences")):
    answers = [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
    replies = [(answer["continuation"].strip(), answer["answer"]) for answer in answers]
    right = sum(reply.endswith(answer) for reply, answer in replies) / len(replies)
    short = sum(" is " not in reply for reply, _ in replies) / len(replies)
    total = json.loads((run / f"{name}.jsonl.json").read_text())
    mean = total["counted_log_likelihood"] / total["counted_tokens"]
    found[name] = right, short, mean
    print(f"    {title:13} {right:10.0%} {short if name != 'before' else float('nan'):15.0%} {mean:16.3f}")
records = [json.loads(line) for line in (run / "dpo/metrics.jsonl").read_text().splitlines()]
last = [record for record in records if "reference_kl" in record][-1]
print(f"    DPO: {last['preference_accuracy']:.0%} preferred, KL to its reference {last['reference_kl']:.2f} nats a reply")
for name, least in (("tuned", 0.9), ("lora", 0.9), ("dpo", 0.9)):
    if found[name][0] < least:
        sys.exit(f"{name}: {found[name][0]:.0%} of the answers are right; the demo promises {least:.0%}.")
if abs(found["tuned"][2] - found["lora"][2]) > 0.02:
    sys.exit("adapters and all weights differ by more than 0.02 nats a token.")
if found["dpo"][1] <= 0.9:
    sys.exit(f"{found['dpo'][1]:.0%} of the replies are short after preferences; the demo promises more than 90 %.")
PYTHON

say "done in $((SECONDS - start)) s. Results:"
cat <<END
    $run/tuned/report.html    loss, validation, speed
    $run/dpo/report.html      rewards and KL of the preferences
    $run/tuned-hf             for transformers; apply_chat_template renders as it was trained
    .venv/bin/longctx generate --checkpoint $run/dpo --chat --max-new-tokens 24 --prompts-file $work/questions.jsonl
END
