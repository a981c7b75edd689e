"""Records with preferences: read from any format, encoded with one prompt, and left out with a reason."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.inspect import find_problems
from data_pipeline.prepare.build_shards import BuildReport, build_shards
from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule
from data_pipeline.prepare.encode_preferences import with_mismatched_replies
from data_pipeline.prepare.parts import source_parts
from data_pipeline.prepare.source_items import Document
from data_pipeline.prepare.sources import open_source
from data_pipeline.shards.reader import ShardSet
from longctx.chat.chat_rule import ChatRule
from longctx.chat.preference import preference_kind_of, preference_of
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer
from tests.bounded import refusal
from tests.longctx.chat.cases import TOOLS, reply, said, user
from tests.longctx.chat.templates import FORGETFUL, MARKED, PLAIN, chat_tokenizer

Texts = tuple[str, str, str]
END = "<|im_end|>"
ASKED = said("user", "q") + "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("base"), None)


def written(folder: Path, records: Sequence[dict[str, Any]], ending: str = "jsonl") -> Path:
    """A file of these records."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"records.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(list(records)), path)
    elif ending == "csv":
        cells = [[value if isinstance(value, str) else json.dumps(value) for value in row.values()] for row in records]
        lines = [[*records[0]], *cells]
        text = "\n".join(",".join('"' + cell.replace('"', '""') + '"' for cell in line) for line in lines)
        path.write_text(text + "\n")
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def build(
    folder: Path, tokenizer: Tokenizer, records: Sequence[dict[str, Any]], ending: str = "jsonl", **options: Any
) -> BuildReport:
    source = open_source(written(folder / "source", records, ending), format="preferences")
    options = {"validation_fraction": 0.0, "chat": None, "workers": 1} | options
    return build_shards(source, tokenizer, folder / "shards", **options)


def texts_in(folder: Path) -> list[Texts]:
    """Prompt and replies of each record, with control tokens spelled out."""
    shards = ShardSet.open(folder)
    tokenizer = shards.tokenizer()

    def text(ids: np.ndarray) -> str:
        parts = [tokenizer.piece(int(n)) if tokenizer.is_control[n] else tokenizer.decode([n]) for n in ids]
        return "".join(parts)

    found = []
    for number in range(shards.num_documents):
        (prompt,), tokens = shards.slices([(number, 0, 1 << 30)], "source"), shards.document(number)
        second = int(shards.second_starts(np.array([number]))[0])
        found.append((text(prompt), text(tokens[:second]), text(tokens[second:])))
    return found


WANTED = (ASKED, f"a{END}", f"b{END}")
FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "messages": {"prompt": [user("q")], "chosen": [reply("a")], "rejected": [reply("b")]},
    "mixed": {"prompt": "q", "chosen": [reply("a")], "rejected": "b"},
    "complete": {"chosen": [user("q"), reply("a")], "rejected": [user("q"), reply("b")]},
    "complete, with its prompt": {
        "prompt": "q",
        "chosen": [user("q"), reply("a")],
        "rejected": [user("q"), reply("b")],
        "messages": [user("q"), reply("a")],
    },
    "complete, with its messages": {
        "prompt": [user("q")],
        "chosen": [user("q"), reply("a")],
        "rejected": [user("q"), reply("b")],
    },
    "ShareGPT": {
        "prompt": [{"from": "human", "value": "q"}],
        "chosen": [{"from": "gpt", "value": "a"}],
        "rejected": [{"from": "gpt", "value": "b"}],
    },
}

PAIR = FORMS["texts"]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["derived", "marked"])
def test_every_form_gives_the_same_record(tmp_path: Path, template: str):
    build(tmp_path, chat_tokenizer(tmp_path / "t", template), [*FORMS.values()])
    assert texts_in(tmp_path / "shards") == [WANTED] * len(FORMS)
    manifest = ShardSet.open(tmp_path / "shards").manifest
    assert manifest.options["preferences"] == "pairs"
    assert manifest.options["chat"]["train_on"] == "last"
    assert find_problems(tmp_path / "shards") == []


@pytest.mark.parametrize("form", ["texts", "complete, with its prompt"])
@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_tables_give_the_same_record(tmp_path: Path, chat: Tokenizer, form: str, ending: str):
    build(tmp_path, chat, [FORMS[form]], ending)
    assert texts_in(tmp_path / "shards") == [WANTED]


def test_earlier_turns_system_and_tools_are_the_prompt(tmp_path: Path, chat: Tokenizer):
    turns = [user("x"), reply("y"), user("q")]
    record = {"prompt": turns, "chosen": "a", "rejected": [reply("b")], "system": "s", "tools": TOOLS}
    build(tmp_path, chat, [record])
    ((prompt, first, second),) = texts_in(tmp_path / "shards")
    assert prompt.startswith("<|im_start|>tools\n[")
    assert prompt.endswith(said("system", "s") + said("user", "x") + said("assistant", "y") + ASKED)
    assert (first, second) == WANTED[1:]


def test_texts_without_a_template_continue_each_other(tmp_path: Path, base: Tokenizer):
    records = [{"prompt": "one ", "chosen": "two", "rejected": f"three {END}"}]
    build(tmp_path, base, records)
    shards = ShardSet.open(tmp_path / "shards")
    begin, end = ("".join(map(base.piece, ids.tolist())) for ids in (base.prefix_ids, base.suffix_ids))
    assert texts_in(tmp_path / "shards") == [(f"{begin}one ", f"two{end}", f"three {END}{end}")]
    whole = np.concatenate([shards.slices([(0, 0, 99)], "source")[0], shards.document(0)[:3]])
    assert whole.tolist() == base.encode_document("one two")[: len(whole)].tolist()


def test_messages_without_a_template_are_an_error(tmp_path: Path, base: Tokenizer):
    for number, record in enumerate([FORMS["messages"], FORMS["mixed"], PAIR | {"system": "s"}]):
        assert "has no chat template" in refusal(lambda r=record, n=number: build(tmp_path / f"{n}", base, [r]))
    cells = {name: json.dumps(value) for name, value in FORMS["messages"].items()}
    assert "has no chat template" in refusal(lambda: build(tmp_path / "cells", base, [cells]))


LEFT_OUT: dict[str, tuple[dict[str, Any], str]] = {
    "equal replies": (PAIR | {"rejected": "a"}, "equal replies"),
    "an empty prompt": (PAIR | {"prompt": "  "}, "empty prompt"),
    "a prompt without text": (PAIR | {"prompt": [user("")]}, "empty prompt"),
    "no messages before it": ({"chosen": [reply("a")], "rejected": [reply("b")]}, "empty prompt"),
    "an empty reply": (PAIR | {"chosen": " \n"}, "empty reply"),
    "no reply": (PAIR | {"rejected": None}, "empty reply"),
    "a reply without text": (PAIR | {"rejected": [reply("")]}, "empty reply"),
    "a question at the end": (PAIR | {"rejected": [user("q"), reply("b"), user("c")]}, "no common prompt"),
    "another question": (
        {"chosen": [user("q"), reply("a")], "rejected": [user("r"), reply("b")]},
        "no common prompt",
    ),
    "another prompt than its messages'": (
        {"prompt": "r", "chosen": [user("q"), reply("a")], "rejected": [user("q"), reply("b")]},
        "no common prompt",
    ),
    "texts without a prompt": ({"chosen": "q a", "rejected": "q b"}, "no common prompt"),
    "more tokens than the limit": (PAIR | {"rejected": "b" * 60}, "more than 60 tokens"),
    "no weight": (PAIR | {"chosen": [{**reply("a"), "weight": 0}]}, "no token counts"),
    "no messages": (PAIR | {"chosen": [3]}, "no conversation"),
    "half a surrogate pair": (PAIR | {"chosen": "\ud800"}, "lone surrogate"),
}


def test_what_is_left_out_has_its_reason(tmp_path: Path, chat: Tokenizer):
    records = [PAIR, *(record for record, _ in LEFT_OUT.values())]
    report = build(tmp_path, chat, records, chat=ChatRule(max_tokens=60, most_left_out=1))
    lines = (tmp_path / "shards" / "left_out.jsonl").read_text().splitlines()
    found = {entry["name"]: entry["reason"] for entry in map(json.loads, lines)}
    assert found == {f"records.jsonl:{n}": reason for n, (_, reason) in enumerate(LEFT_OUT.values(), start=2)}
    assert report.skipped == Counter(found.values())
    assert texts_in(tmp_path / "shards") == [WANTED]


def test_a_template_whose_prompt_depends_on_the_reply_is_found(tmp_path: Path):
    """It writes the reasoning before the tokens that count."""
    thought = "{%- if message.reasoning_content %}{{ message.reasoning_content }}{% endif -%}"
    template = MARKED.replace("{% generation %}", f"{thought}{{% generation %}}")
    record = PAIR | {"rejected": [reply("b", reasoning_content="hm")]}
    said_by = refusal(lambda: build(tmp_path, chat_tokenizer(tmp_path / "t", template), [record]))
    assert "the template writes another prompt for each reply" in said_by


def test_a_template_that_marks_a_part_twice_is_found(tmp_path: Path):
    template = MARKED.replace("{{ '<|im_end|>' }}", "{% endgeneration %}!{% generation %}{{ '<|im_end|>' }}", 1)
    said_by = refusal(lambda: build(tmp_path, chat_tokenizer(tmp_path / "t", template), [PAIR]))
    assert "the template marks a reply in several parts" in said_by


def test_reasoning_counts_as_the_reply(tmp_path: Path):
    record = PAIR | {"chosen": [reply("a", reasoning_content="hm")]}
    build(tmp_path, chat_tokenizer(tmp_path / "t", FORGETFUL), [record])
    assert texts_in(tmp_path / "shards") == [(ASKED, f"<think>hm</think>a{END}", f"b{END}")]


def single(prompt: str, completion: str, label: Any = True) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "label": label}


def test_a_single_reply_gets_that_of_the_next_prompt(tmp_path: Path, chat: Tokenizer):
    records = [single("q", "a"), single("q", "b", label=False), single("r", "c", label=0), single("s", "d", label=1)]
    build(tmp_path, chat, records)
    shards = ShardSet.open(tmp_path / "shards")
    assert [shards.label(n) for n in range(4)] == [1, 0, 0, 1]
    assert shards.manifest.has_labelled_replies
    found = [(first, second) for _, first, second in texts_in(tmp_path / "shards")]
    # Both answers to q get that of r, and the last record the one before it.
    assert found == [(f"{a}{END}", f"{b}{END}") for a, b in (("a", "c"), ("b", "c"), ("c", "d"), ("d", "c"))]


@given(st.lists(st.integers(0, 3), max_size=30))
def test_a_mismatched_reply_never_answers_the_prompt(prompts: list[int]):
    records = [single(f"q{n}", f"a{n}") for n in prompts]
    documents = [Document(str(n), "", preference=preference_of(r, "labelled")) for n, r in enumerate(records)]
    found = list(with_mismatched_replies(documents))
    assert [one.name for one in found] == [one.name for one in documents]
    for prompt, one in zip(prompts, found, strict=True):
        assert one.preference is not None
        if len(set(prompts)) == 1:
            assert one.preference.second is None
            continue
        assert one.preference.second is not None
        asked, answered = one.preference.second.messages
        assert asked["content"] == f"q{prompt}"
        assert answered["content"] in {f"a{n}" for n in prompts} - {f"a{prompt}"}


def test_many_records_with_one_prompt_do_not_wait_for_all(tmp_path: Path, chat: Tokenizer):
    records = [single("q", f"a{n}") for n in range(300)] + [single("r", "b")]
    report = build(tmp_path, chat, records)
    assert report.skipped == {"no reply to another prompt": 44}


@pytest.mark.parametrize("label", [2, "maybe", None, 0.5, [1]])
def test_a_label_is_true_or_false(tmp_path: Path, chat: Tokenizer, label: Any):
    report = build(tmp_path, chat, [single("q", "a"), single("r", "b", label), single("s", "c", label=False)])
    assert report.skipped == {"invalid label": 1}
    source = written(tmp_path / "strict", [single("q", "a", label)])
    with pytest.raises(DataError, match="invalid label"):
        list(open_source(source, format="preferences", strict=True))


def test_a_table_of_strings_spells_labels(tmp_path: Path, chat: Tokenizer):
    records = [single("q", "a", "True"), single("r", "b", "0"), single("s", "c", "1"), single("t", "d", "false")]
    build(tmp_path, chat, records, "csv")
    shards = ShardSet.open(tmp_path / "shards")
    assert [shards.label(n) for n in range(4)] == [1, 0, 1, 0]


def test_one_record_alone_has_no_other_prompt(tmp_path: Path, chat: Tokenizer):
    said_by = refusal(lambda: build(tmp_path, chat, [single("q", "a")]))
    assert "no reply to another prompt" in said_by


def many(count: int) -> list[dict[str, Any]]:
    return [single(f"question {n // 3} " + "x " * 40, f"reply {n} " + "y " * 20, n % 2) for n in range(count)]


@pytest.mark.parametrize("kind", ["pairs", "labelled"])
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path, chat: Tokenizer, kind: str, monkeypatch):
    monkeypatch.setattr(source_parts, "PART_BYTES", 1 << 12)
    records = many(90)
    if kind == "pairs":
        records = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "no"} for r in records]
    found = []
    for workers in (1, 2):
        # Several files: a part has one or more of them.
        for number in range(3):
            written(tmp_path / f"w{workers}" / "source" / f"d{number}", records[30 * number : 30 * number + 30])
        source = open_source(tmp_path / f"w{workers}" / "source", format="preferences")
        output = tmp_path / f"w{workers}" / "shards"
        report = build_shards(
            source, chat, output, workers=workers, validation_fraction=0.2, shard_tokens=1 << 10, chat=None
        )
        assert report.parts == 3
        assert report.validation is not None
        found.append({p.relative_to(output): p.read_bytes() for p in output.rglob("*") if p.is_file()})
        assert find_problems(output) == []
    assert found[0] == found[1]


@pytest.mark.parametrize(("kind", "copies"), [("exact", 1), ("together", 2)])
def test_equal_records_are_duplicates(tmp_path: Path, chat: Tokenizer, kind: str, copies: int):
    # The last record has another label, and so another hash.
    records = [*many(12), *many(12), many(1)[0] | {"label": 1}]
    build(tmp_path, chat, records, validation_fraction=0.4, duplicates=DuplicateRule(kind=kind))
    firsts = [text[:2] for name in ("", "validation") for text in texts_in(tmp_path / "shards" / name)]
    assert sorted(Counter(firsts).values()) == [copies] * 11 + [copies + 1]


def test_the_split_depends_on_the_record_alone(tmp_path: Path, chat: Tokenizer):
    build(tmp_path / "a", chat, many(30), validation_fraction=0.3)
    build(tmp_path / "b", chat, many(45)[::-1], validation_fraction=0.3)
    held_out = [{text[:2] for text in texts_in(tmp_path / name / "shards" / "validation")} for name in "ab"]
    assert held_out[0] <= held_out[1]
    assert held_out[0]


def test_kinds_are_known_by_their_fields(tmp_path: Path, chat: Tokenizer):
    assert preference_kind_of(PAIR) == "preferences"
    assert preference_kind_of(single("q", "a")) == "labelled"
    assert preference_kind_of({"prompt": "q", "completion": "a"}) == ""
    written(tmp_path / "both" / "a", [PAIR])
    written(tmp_path / "both" / "b", [single("q", "a")])
    with pytest.raises(DataError, match="preferences of two types"):
        open_source(tmp_path / "both", format="preferences")
    texts = written(tmp_path / "texts", [{"text": "a"}])
    with pytest.raises(DataError, match="by 'chosen' and 'rejected' or by 'prompt', 'completion' and 'label'"):
        open_source(texts, format="preferences")
    with pytest.raises(DataError, match="--kind preferences"):
        open_source(written(tmp_path / "auto", [PAIR]))
    with pytest.raises(DataError, match="--text-field"):
        open_source(written(tmp_path / "auto", [PAIR]), format="preferences", text_field="chosen")
    with pytest.raises(DataError, match="--train-on all"):
        build(tmp_path, chat, [PAIR], chat=ChatRule(train_on="all"))


def test_an_existing_folder_is_up_to_date(tmp_path: Path, chat: Tokenizer):
    first, second = build(tmp_path, chat, [PAIR]), build(tmp_path, chat, [PAIR])
    assert (first.up_to_date, second.up_to_date) == (False, True)
