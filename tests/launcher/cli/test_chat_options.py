"""Conversations on their whole road: built, trained, exported and talked to by one template; bad ones on one screen."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import transformers

from data_pipeline.shards.manifest import MANIFEST_FILE
from data_pipeline.shards.reader import ShardSet
from data_pipeline.texts import read_texts
from launcher.cli import main
from launcher.training.setup import build_run
from launcher.training.trainer import Trainer
from longctx.chat.chat_encoder import ChatEncoder
from longctx.chat.chat_prompts import with_chat_prompts
from longctx.chat.chat_rule import ChatRule, TrainOn
from longctx.chat.conversation import Conversation
from longctx.chat.turn_ends import turn_ends
from longctx.evaluation import Haystack, Setting, find_tasks
from longctx.generation.load_decoder import load_model
from longctx.generation.loop import generate
from longctx.tokenizer import load_tokenizer
from tests.bounded import check_screen
from tests.helpers import REPOSITORY, run_distributed
from tests.launcher.cli.calls import VOCAB_SIZE, call
from tests.launcher.runs import tiny_config, tiny_start
from tests.launcher.workers import leave_out_pictures
from tests.longctx.chat.templates import FORGETFUL, MARKED, PLAIN, START, STOP, STRICT
from tests.longctx.tokenizer.byte_level import tokenizer_json, write_model

STOP_ID = 262
QUESTION = [{"role": "user", "content": "def main?"}]
CHATS = [[*QUESTION, {"role": "assistant", "content": f"It is number {number}."}] for number in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model of random weights, whose tokenizer has control tokens and no template."""
    added = [(START, 261, True), (STOP, STOP_ID, True)]
    return write_model(tmp_path_factory.mktemp("base") / "hf", tokenizer_json(*added), rows=264)


def write_chats(folder: Path, chats: Sequence[Any], name: str = "chats.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def build(capsys, source: Path, tokenizer: Path, output: Path, *more: object, template: str = PLAIN):
    """Exit code, output and errors of ``data build``."""
    file = output.parent / "template.jinja"
    file.write_text(template)
    if template:
        more = ("--chat-template", file, *more)
    words = ["data", "build", "--source", source, "--tokenizer", tokenizer, "--output", output, "--workers", 1]
    return call(capsys, *words, "--validation-fraction", 0, *more)


def train(shards: Path, output: Path, start: Path | None) -> None:
    """Tune a model, or train a new one."""
    leave_out_pictures()
    model = {"model.vocab_size": VOCAB_SIZE}
    if start is not None:
        model = {"run.start_from": start}
    changed: dict[str, Any] = {"data.seq_len": 64, "train.steps": 2, "train.tokens_per_step": 128, "train.lr": 1e-3}
    changed |= {"validation.rows": 0, "checkpoint.every_steps": 2, **model}
    config = (tiny_config if start is None else tiny_start)(shards, output, changed)
    Trainer(build_run(config, torch.device("cpu"))).train()


@pytest.mark.timeout(120)
def test_a_template_travels_from_the_shards_to_an_answer_and_to_transformers(capsys, model, tmp_path):
    """A base model is tuned by a template of the user's, which its checkpoint and its export then have."""
    shards, run, exported = tmp_path / "shards", tmp_path / "run", tmp_path / "hf"
    code, out, err = build(capsys, write_chats(tmp_path, CHATS), model, shards)
    assert code == 0, err
    assert "messages" in err
    assert ShardSet.open(shards).is_masked
    run_distributed(train, 2, shards, run, model, timeout=100)
    assert call(capsys, "convert", "--to", "hf", run, exported, "--verify", "none")[0] == 0
    assert (exported / "chat_template.jinja").read_text() == PLAIN
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == [1, STOP_ID]
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    ids = theirs.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    ours = load_tokenizer(run / "checkpoints" / "step_000002")
    assert ChatEncoder(ours).encode_prompt(Conversation(tuple(QUESTION))).tolist() == ids
    wanted = ours.decode(generate(load_model(run), ids, 9, stop_ids=[1, STOP_ID]))
    words = ["generate", "--checkpoint", run, "--chat", "--max-new-tokens", 9]
    auto = ["generate", "--checkpoint", run, "--chat-template", "auto", "--max-new-tokens", 9, "--prompt", "Hi"]
    by_auto = call(capsys, *auto)
    assert by_auto[:2] == call(capsys, *words, "--prompt", "Hi")[:2]
    assert "rendered by the model's chat template" in by_auto[2]
    for prompt in (["--prompt", QUESTION[0]["content"]], ["--prompt-file", _file(tmp_path, QUESTION[0]["content"])]):
        code, out, err = call(capsys, *words, *prompt)
        assert (code, out) == (0, f"{wanted}\n"), err
    lines = [{"messages": QUESTION, "id": 7}, {"prompt": QUESTION[0]["content"]}]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = call(capsys, *words, "--prompts-file", tmp_path / "lines.jsonl")
    found = [json.loads(line) for line in out.splitlines()]
    assert [row["continuation"] for row in found] == [wanted, wanted], err
    assert found[0]["id"] == 7


@pytest.mark.few(1)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("start", ["", "hf"])
def test_transformers_reads_the_control_tokens_that_a_template_wrote(capsys, world, run, tmp_path, start):
    """Of a tokenizer of our own, whose export else takes all that a text spells for text: new, and tuned further."""
    assert run.parent == world, "the run's fixture makes the folder that is tuned further"
    shards, output, exported = tmp_path / "shards", tmp_path / "run", tmp_path / "hf"
    template = "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    source = world / (start or "tokenizer.model")
    code, _, err = build(capsys, write_chats(tmp_path, CHATS), source, shards, template=template)
    assert code == 0, err
    run_distributed(train, 2, shards, output, world / start if start else None, timeout=100)
    code, _, err = call(capsys, "convert", "--to", "hf", output, exported)
    assert code == 0, err
    ours, theirs = load_tokenizer(exported), transformers.AutoTokenizer.from_pretrained(exported)
    ids = theirs.apply_chat_template(CHATS[0], return_dict=False)
    assert ids == ChatEncoder(ours).encode(Conversation(tuple(CHATS[0]), (), (True, True))).ids.tolist()
    assert ids.count(ours.special.end) == 2


def _file(folder: Path, text: str) -> Path:
    (folder / "prompt.txt").write_text(text)
    return folder / "prompt.txt"


def test_a_reply_ends_with_the_templates_end_of_turn(model, tmp_path):
    """Whatever the model's own end token is, and none if a template writes no control token there."""
    (tmp_path / "t").mkdir()
    for path in model.iterdir():
        (tmp_path / "t" / path.name).write_bytes(path.read_bytes())
    line = MARKED.replace("{% endgeneration %}", "{{ '\n' }}{% endgeneration %}")
    assert line != MARKED
    # Of a reply that another begins than its prompt does, the first one behind its text.
    other = PLAIN.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")
    assert other != PLAIN
    silent = "{{ messages[-1].content }}"
    for template in (PLAIN, MARKED, line, other, silent):
        (tmp_path / "t" / "chat_template.jinja").write_text(template)
        tokenizer = load_tokenizer(tmp_path / "t")
        for train_on in get_args(TrainOn):
            found = turn_ends(ChatEncoder(tokenizer, ChatRule(train_on=train_on)))
            assert found == (set() if template == silent else {STOP_ID})


def test_a_template_that_ends_no_reply_is_said(capsys, model, tmp_path):
    open_end = PLAIN.replace("{{ '<|im_end|>' }}", "")
    code, _, err = build(capsys, write_chats(tmp_path, CHATS), model, tmp_path / "shards", template=open_end)
    assert (code, "ends no reply with a control token" in err) == (0, True), err
    code, _, err = build(capsys, write_chats(tmp_path, CHATS), model, tmp_path / "usual")
    assert (code, "ends no reply" in err) == (0, False), err


def two_systems(chat: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"role": "system", "content": "A"}, {"role": "system", "content": "B"}, *chat]


ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a second system turn') }}{% endif %}{% endfor %}" + PLAIN
)
REASONED = [*CHATS[0][:1], {"role": "assistant", "content": "1", "reasoning_content": "why"}, *CHATS[1]]
BAD: dict[str, tuple[list[Any], str, list[str]]] = {
    "a role that the template refuses": (
        [two_systems(chat) for chat in CHATS],
        STRICT,
        ["message 0: Begin with a question, not with system", "chats.jsonl:1 (", "--"],
    ),
    "two system turns": (
        [two_systems(chat) for chat in CHATS],
        ONE_SYSTEM,
        ["message 1: a second system turn", "chats.jsonl:1 ("],
    ),
    "a template that changes its past": (
        [REASONED] * 12,
        FORGETFUL,
        ["message 1: ", "--train-on last", "chats.jsonl:1 ("],
    ),
    "a prompt that replies do not follow": (
        CHATS,
        PLAIN.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'"),
        ["begins a reply otherwise", "message 1: ", "--train-on all", "chats.jsonl:1 ("],
    ),
    "no reply": ([QUESTION] * 12, PLAIN, ["no token counts", "--train-on all"]),
    "a fault of the template": (CHATS, "{{ messages[99].content }}", ["message 0: ", "no element 99"]),
}


@pytest.mark.parametrize("train_on", ["replies", "last", "each"])
def test_what_is_advised_for_a_prompt_that_replies_do_not_follow_works(capsys, model, tmp_path, train_on):
    chats, template, _ = BAD["a prompt that replies do not follow"]
    several = write_chats(tmp_path, [[*chat, *chat] for chat in chats])
    code, _, err = build(capsys, several, model, tmp_path / "shards", "--train-on", train_on, template=template)
    assert (code, "--train-on all" in err, "--train-on last" in err) == (1, True, False), err
    code, _, err = build(
        capsys, several, model, tmp_path / "shards", "--train-on", "all", "--overwrite", template=template
    )
    assert code == 0, err


@pytest.mark.parametrize("name", BAD)
def test_conversations_that_cannot_be_trained_on_are_one_screen_with_the_row(capsys, model, tmp_path, name):
    chats, template, said = BAD[name]
    code, out, err = build(capsys, write_chats(tmp_path, chats), model, tmp_path / "shards", template=template)
    assert (code, out) == (1, ""), err
    for text in said:
        assert text in err
    assert len(err.splitlines()) < 25
    assert not (tmp_path / "shards").exists()


WRONG_OPTIONS = {
    "enable_thinking": "enable_thinking=false",
    "enable_thinking=False": "Write enable_thinking=false",
    "n=NaN": "JSON has no NaN",
    "messages=[]": "Leave it out",
    "if=1": "not NAME=VALUE",
    "none=1": "not NAME=VALUE",
    "a=1 a=2": "a is given twice",
}


@pytest.mark.parametrize("given", WRONG_OPTIONS)
def test_variables_that_mean_nothing_are_refused(capsys, model, tmp_path, given):
    code, _, err = build(
        capsys, write_chats(tmp_path, CHATS), model, tmp_path / "shards", "--chat-option", *given.split()
    )
    assert (code, WRONG_OPTIONS[given] in err) == (2, True), err


def test_variables_may_be_given_one_by_one(capsys, model, tmp_path):
    """Those of special tokens hold for every program that the model is tuned for."""
    options = ("--chat-option", "who=Ann", "bos_token=<B>", "--chat-option", "n=[1, 2.5]")
    template = "{{ bos_token }}{{ who }} {{ n }} {{ later | default('') }}" + PLAIN
    code, _, err = build(capsys, write_chats(tmp_path, CHATS), model, tmp_path / "s", *options, template=template)
    assert code == 0, err
    shards = ShardSet.open(tmp_path / "s")
    begin = "<B>Ann [1, 2.5] "
    assert shards.tokenizer().decode(shards.document(0)).startswith(begin)
    assert not (tmp_path / "hf").exists()
    shards.tokenizer().save(Path(shutil.copytree(model, tmp_path / "hf")))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.apply_chat_template(QUESTION, tokenize=False, later="x").startswith(f"{begin}x<|im_start|>")


def test_a_conversation_that_is_cut_before_its_reply_is_told_what_helps(capsys, model, tmp_path):
    long = write_chats(tmp_path, CHATS)
    short = ("--max-tokens", 8, "--too-long", "keep-begin")
    code, _, err = build(capsys, long, model, tmp_path / "shards", *short)
    assert (code, "--max-tokens N" in err, "--train-on all" in err) == (1, True, False), err
    code, _, err = build(capsys, long, model, tmp_path / "shards", "--max-tokens", 90, *short[2:], "--overwrite")
    assert code == 0, err


def test_a_damaged_folder_is_built_anew_and_with_a_new_date(capsys, model, tmp_path):
    """Its manifest is read for the date alone, which a folder that is not replaced keeps."""
    chats, template = write_chats(tmp_path, CHATS), "{{ strftime_now('%Y') }}" + PLAIN
    words = (capsys, chats, model, tmp_path / "shards")

    def date() -> str:
        return json.loads((tmp_path / "shards" / MANIFEST_FILE).read_text())["options"]["chat"]["now"]

    assert build(*words, "--chat-date", "2001-02-03", template=template)[0] == 0
    code, _, err = build(*words, template=template)
    assert (code, date()) == (0, "2001-02-03"), err
    code, _, err = build(*words, "--overwrite", template=template)
    assert (code, date() > "2026") == (0, True), err
    (tmp_path / "shards" / MANIFEST_FILE).write_text("{")
    code, _, err = build(*words, "--overwrite", template=template)
    assert code == 0, err
    assert date() > "2026"


def test_a_tenth_may_be_left_out_and_more_if_the_user_says_so(capsys, model, tmp_path):
    few = write_chats(tmp_path, [*CHATS, QUESTION])
    code, _, err = build(capsys, few, model, tmp_path / "few")
    assert code == 0, err
    many = write_chats(tmp_path, [*CHATS, QUESTION, QUESTION], "many.jsonl")
    code, _, err = build(capsys, many, model, tmp_path / "many")
    assert (code, "--most-left-out 0.1" in err) == (1, True)
    code, _out, err = build(capsys, many, model, tmp_path / "many", "--most-left-out", 0.2)
    assert code == 0, err
    assert ShardSet.open(tmp_path / "many").num_documents == len(CHATS)


def test_what_is_no_message_is_named_by_its_row_and_its_turn(capsys, model, tmp_path):
    wrong = [[{"role": "user", "content": 5}], [{"role": "user"}], ["Hi"], [{"content": "x"}], "no list"]
    code, out, err = build(capsys, write_chats(tmp_path, [*CHATS, *wrong]), model, tmp_path / "shards")
    assert code == 0, err
    text = f"{out}{err}"
    assert "13" in text
    code, _, err = build(
        capsys, write_chats(tmp_path, [*CHATS, *wrong], "strict.jsonl"), model, tmp_path / "strict", "--strict"
    )
    assert code == 1
    assert "13" in err


def test_a_base_model_is_told_what_to_pass(capsys, model, tmp_path):
    code, _, err = build(capsys, write_chats(tmp_path, CHATS), model, tmp_path / "shards", template="")
    assert (code, "--chat-template FILE" in err) == (1, True)
    words = ["generate", "--checkpoint", model, "--max-new-tokens", 3]
    code, _, err = call(capsys, *words, "--prompt", "x", "--chat")
    assert (code, "no chat template" in err) == (1, True), err
    code, _, err = call(capsys, *words, "--prompt", "x", "--system", "y")
    assert (code, "--chat" in err) == (2, True), err
    (tmp_path / "lines.jsonl").write_text(json.dumps({"messages": QUESTION}))
    code, _, err = call(capsys, *words, "--prompts-file", tmp_path / "lines.jsonl")
    assert (code, "--chat" in err) == (2, True), err


def test_one_system_turn_and_not_another(capsys, model, tmp_path):
    folder = Path(shutil.copytree(model, tmp_path / "hf"))
    (folder / "chat_template.jinja").write_text(PLAIN)
    (tmp_path / "lines.jsonl").write_text(json.dumps({"messages": [{"role": "system", "content": "A"}, *QUESTION]}))
    words = ["generate", "--checkpoint", folder, "--max-new-tokens", 3, "--chat", "--system", "B"]
    code, out, err = call(capsys, *words, "--prompts-file", tmp_path / "lines.jsonl")
    assert (code, out, "line 1: it starts with a system turn" in err) == (2, "", True), err


def test_tasks_are_asked_by_the_template(capsys, model, tmp_path):
    """A user's turn up to the last "Answer:", which begins the reply; the template's tokens count in the length."""
    folder = tmp_path / "hf"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(PLAIN)
    output = tmp_path / "evaluation"
    words = [
        "evaluate",
        "--checkpoint",
        folder,
        "--tasks",
        "niah_word",
        "--samples",
        1,
        "--haystack",
        REPOSITORY / "docs",
    ]
    words += ["--lengths", 700, "--output", output]
    code, out, err = call(capsys, *words, "--chat-template", "auto")
    assert code == 0, err
    assert "Prompts were rendered by the model's chat template." in out
    (row,) = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer(folder)
    haystack = Haystack(read_texts(REPOSITORY / "docs"), source="docs")
    setting = Setting(tokenizer=with_chat_prompts(tokenizer, ["Answer:"]), haystack=haystack)
    (task,) = find_tasks(["niah_word"])
    sample = next(task.samples(setting, 700, 1))
    question, _, begun = sample.prompt.rpartition("Answer:")
    turn = Conversation(({"role": "user", "content": question.rstrip()},))
    ids = ChatEncoder(tokenizer).encode_prompt(turn).tolist() + tokenizer.encode(f"Answer:{begun}").tolist()
    assert begun.startswith(" The secret code of")
    assert 600 < len(ids) == sample.prompt_tokens <= 700 - sample.answer_tokens
    new_ids = generate(load_model(folder), ids, sample.answer_tokens, stop_ids=[1, STOP_ID])
    assert row["output"] == tokenizer.decode(new_ids)
    code, _, err = call(capsys, *words)
    assert (code, "chat: stored" in err) == (2, True), err
    assert "has a chat template. --chat-template auto applies it" in err


def test_tasks_that_ask_nothing_are_refused(capsys, model, tmp_path):
    words = [
        "evaluate",
        "--checkpoint",
        model,
        "--output",
        tmp_path / "out",
        "--lengths",
        700,
        "--chat-template",
        "auto",
        "--tasks",
    ]
    for tasks, said in (("probes,niah", "copy and associative_recall"), ("ppl", "ppl read plain text")):
        code, _, err = call(capsys, *words, tasks)
        assert (code, said in err) == (2, True), err


LINES = b"def main?\n\nAnd what is\tclass?\n"


def tuned(model: Path, folder: Path) -> Path:
    """A model with a template, which refuses a system turn."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(STRICT)
    return folder


class Typed(io.TextIOWrapper):
    """Standard input of a terminal."""

    def isatty(self) -> bool:
        return True


def talk(said: bytes, *words: object, stream: type[io.TextIOWrapper] = io.TextIOWrapper) -> tuple[int, str, str]:
    """Exit code, output and errors of a chat with this standard input."""
    out, err, own = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = stream(io.BytesIO(said))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main(["generate", "--chat", *map(str, words)])
    finally:
        sys.stdin = own
    return code, out.getvalue(), err.getvalue()


def test_each_reply_reads_all_that_was_said_before_it(model, tmp_path):
    folder = tuned(model, tmp_path / "hf")
    tokenizer = load_tokenizer(folder)
    turns: list[dict[str, str]] = []
    replies: list[str] = []
    for line in filter(None, LINES.decode().split("\n")):
        turns.append({"role": "user", "content": line})
        ids = ChatEncoder(tokenizer).encode_prompt(Conversation(tuple(turns))).tolist()
        replies.append(tokenizer.decode(generate(load_model(folder), ids, 9, stop_ids=[1, STOP_ID])))
        turns.append({"role": "assistant", "content": replies[-1]})
    wanted = "".join(f"{reply}\n" for reply in replies)
    words = ["--checkpoint", folder, "--max-new-tokens", 9]
    code, out, err = talk(LINES, *words)
    assert (code, out) == (0, wanted), err
    assert "--max-new-tokens 9" in err
    assert talk(LINES, *words, "--output", tmp_path / "said.txt")[:2] == (0, "")
    assert (tmp_path / "said.txt").read_text() == wanted
    code, out, err = talk(b"", *words)
    assert (code, out, "No message: standard input is empty" in err) == (0, "", True), err
    run_distributed(_talk_on_a_rank, 2, words, wanted, timeout=100)


def _talk_on_a_rank(words: list[object], wanted: str) -> None:
    code, out, err = talk(LINES, *words)
    assert code == 0, err
    # Rank 0 alone reads and writes.
    assert out == (wanted if dist.get_rank() == 0 else "")


WRONG: dict[str, tuple[bytes, list[object], str]] = {
    "too long": (b"x" * 5000, ["--max-new-tokens", 9], "egin a new chat"),
    "refused": (LINES, ["--max-new-tokens", 9, "--system", "Be short."], "Begin with a question"),
    "no UTF-8": (b"\xff\n", ["--max-new-tokens", 9], "not UTF-8"),
    "no reply": (LINES, ["--max-new-tokens", 0], "--max-new-tokens 256"),
    "many": (LINES, ["--max-new-tokens", 9, "--max-sequences", 2], "--prompts-file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_turn_without_a_reply_is_one_screen(model, tmp_path, name):
    said, words, wanted = WRONG[name]
    code, out, err = talk(said, "--checkpoint", tuned(model, tmp_path / "hf"), *words)
    assert (code in (1, 2), out, wanted in err) == (True, "", True), err
    check_screen(err)


def test_whoever_types_a_turn_without_a_reply_may_say_something_else(model, tmp_path):
    words = ["--checkpoint", tuned(model, tmp_path / "hf"), "--max-new-tokens", 9]
    wanted = talk(LINES, *words)[1]
    code, out, err = talk(b"x" * 5000 + b"\n" + LINES, *words, stream=Typed)
    assert (code, out) == (0, wanted), err
    assert "egin a new chat" in err
    assert err.count("> ") == 5


def test_nothing_to_continue_is_a_mistake(capsys, model):
    code, out, err = call(capsys, "generate", "--checkpoint", model, "--max-new-tokens", 3)
    assert (code, out, "--prompt TEXT" in err) == (2, "", True), err
    code, out, err = talk(LINES, "--checkpoint", model, "--max-new-tokens", 3)
    assert (code, out, "no chat template" in err) == (1, "", True), err
