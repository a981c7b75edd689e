"""Conversations as people have them: every format gives the same messages, and what is none is left out by name."""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
import json
import random
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.prepare.joining import Join
from data_pipeline.prepare.readers import nested
from data_pipeline.prepare.readers.plain_text import JSON_WITHOUT_SUFFIX
from data_pipeline.prepare.sources import TextSource, open_source
from longctx.chat.conversation import Conversation, conversation_of, conversation_text, kind_of
from longctx.errors import DataError

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add é", "parameters": {"type": "object"}}}]
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi\n"}, {"role": "assistant", "content": "Hello. 😀"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": "Really."},
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": "", "reasoning_content": "a sum", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"},
            {"role": "assistant", "content": "3", "weight": 0},
            {"role": "user", "content": "Thanks"},
            {"role": "assistant", "content": "", "weight": 1},
        ],
        "tools": json.dumps(TOOLS),
    },
]
SHARE_GPT = [
    {
        "system": "Be brief.",
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "weight": 0}],
    },
    {
        "system": "",
        "conversations": [{"from": "function", "value": "{}"}, {"from": "observation", "value": "3"}],
    },
]
PROMPTS = [{"prompt": "Hi", "completion": " there"}, {"prompt": "", "completion": ""}]
PROMPT_MESSAGES = [
    {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi"}],
        "completion": [{"role": "assistant", "content": "Hello"}],
    }
]


def lines(records: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def array(records: Sequence[Any]) -> bytes:
    return json.dumps(records, indent=1).encode()


def table(records: Sequence[Any]) -> pa.Table:
    names = dict.fromkeys(key for record in records for key in record)
    return pa.table({name: [record.get(name) for record in records] for name in names})


def parquet(records: Sequence[Any]) -> bytes:
    out = io.BytesIO()
    pq.write_table(table(records), out, row_group_size=2)
    return out.getvalue()


def arrow(records: Sequence[Any]) -> bytes:
    out, content = io.BytesIO(), table(records)
    with pa.ipc.new_stream(out, content.schema) as writer:
        writer.write_table(content, max_chunksize=1)
    return out.getvalue()


def separated(records: Sequence[Any]) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, sorted({key for record in records for key in record}))
    writer.writeheader()
    for record in records:
        writer.writerow({k: v if isinstance(v, str | None) else json.dumps(v) for k, v in record.items()})
    return out.getvalue().encode()


FORMATS: dict[str, Callable[[Sequence[Any]], bytes]] = {
    "jsonl": lines,
    "jsonl.zst": lambda records: zstandard.compress(lines(records)),
    "json": array,
    "lines.json": lines,
    "parquet": parquet,
    "arrow": arrow,
    "arrow.zst": lambda records: zstandard.compress(arrow(records)),
    "csv": separated,
}


def source_of(folder: Path, records: Sequence[Any], ending: str = "jsonl", **options: Any) -> TextSource:
    (folder / f"chats.{ending}").write_bytes(FORMATS[ending](records))
    return open_source(folder, **options)


def conversations(source: TextSource) -> list[Conversation]:
    found = [document.conversation for document in source]
    assert None not in found
    return found  # type: ignore[return-value]


def left_out(folder: Path, records: Sequence[Any], ending: str = "jsonl", **options: Any) -> list[str]:
    """What is said of records beside a good one."""
    source = source_of(folder, [CHATS[0], *records], ending, **options)
    assert len(list(source)) == 1
    return [example for examples in source.left_out.examples.values() for example in examples]


class TestFormats:
    @pytest.mark.parametrize("ending", FORMATS)
    def test_all_roles_calls_and_tools_are_the_same_in_each(self, ending: str, tmp_path: Path):
        source = source_of(tmp_path, CHATS, ending, strict=True)
        first, second = conversations(source)
        assert source.fields.kind == "messages"
        assert first.messages == tuple(CHATS[0]["messages"])
        assert [message["role"] for message in second.messages] == [m["role"] for m in CHATS[1]["messages"]]
        assert second.messages[3]["tool_calls"] == [CALL]
        assert "tool_calls" not in second.messages[0]
        assert second.messages[3]["thinking"] == second.messages[3]["reasoning_content"] == "a sum"
        assert second.messages[4] == CHATS[1]["messages"][4]
        assert second.weights == (True,) * 5 + (False, True, True)
        assert (first.tools, second.tools) == ((), tuple(TOOLS))

    @pytest.mark.parametrize("ending", FORMATS)
    def test_share_gpt(self, ending: str, tmp_path: Path):
        source = source_of(tmp_path, SHARE_GPT, ending, strict=True)
        first, second = conversations(source)
        assert source.fields.kind == "conversations"
        assert [(m["role"], m["content"]) for m in first.messages] == [
            ("system", "Be brief."),
            ("user", "Hi"),
            ("assistant", "Hello"),
        ]
        assert first.weights == (True, True, False)
        assert [message["role"] for message in second.messages] == ["tool", "tool"]

    @pytest.mark.parametrize("ending", FORMATS)
    def test_prompt_and_completion_as_texts(self, ending: str, tmp_path: Path):
        source = source_of(tmp_path, PROMPTS, ending, strict=True)
        first, _ = conversations(source)
        assert source.fields.kind == "prompt"
        assert first.messages == ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": " there"})

    @pytest.mark.parametrize("ending", [ending for ending in FORMATS if ending != "csv"])
    def test_prompt_and_completion_as_messages(self, ending: str, tmp_path: Path):
        (found,) = conversations(source_of(tmp_path, PROMPT_MESSAGES, ending, strict=True))
        assert [message["role"] for message in found.messages] == ["system", "user", "assistant"]

    @pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow"])
    def test_parts_of_text_and_what_a_table_leaves_empty(self, ending: str, tmp_path: Path):
        parts = [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b", "image": None}]
        records = [{"messages": [{"role": "user", "content": parts, "name": None}]}]
        (document,) = source_of(tmp_path, records, ending, strict=True)
        assert document.text == "user\nab"
        assert document.conversation is not None
        expected = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
        assert document.conversation.messages == (expected,)

    def test_names_of_documents_and_what_is_read_beside(self, tmp_path: Path):
        records = [chat | {"id": number, "images": None} for number, chat in enumerate(CHATS)]
        names = {}
        for ending in ("jsonl", "json", "parquet", "arrow", "csv"):
            (tmp_path / ending).mkdir()
            names[ending] = [document.name for document in source_of(tmp_path / ending, records, ending)]
        assert names.pop("jsonl") == ["chats.jsonl:1", "chats.jsonl:2"]
        assert names == {ending: [f"chats.{ending}:0", f"chats.{ending}:1"] for ending in names}

    def test_what_arrow_may_call_a_text(self, tmp_path: Path):
        messages = CHATS[0]["messages"]
        plain = [pa.array([message[name] for message in messages]) for name in ("role", "content")]
        kinds = [[part.cast(kind) for part in plain] for kind in (pa.large_string(), pa.string_view())]
        kinds.append([part.dictionary_encode() for part in plain])
        for parts in kinds:
            inner = pa.StructArray.from_arrays(parts, ["role", "content"])
            for column in (pa.ListArray.from_arrays([0, 2], inner), pa.LargeListArray.from_arrays([0, 2], inner)):
                batch = pa.record_batch({"messages": column})
                with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as out, pa.ipc.new_file(out, batch.schema) as writer:
                    writer.write_batch(batch)
                (found,) = conversations(open_source(tmp_path, strict=True))
                assert list(found.messages) == messages

    def test_rows_of_many_groups_and_dictionaries_that_end(self, tmp_path: Path):
        """Beyond 1 MB of texts a column goes on without its dictionary, in the midst of a list."""
        chats = [
            {
                "messages": [{"role": "user", "content": f"{n} " * 400}, {"role": "assistant", "content": "ok"}]
                * (n % 4 + 1)
            }
            for n in range(1500)
        ]
        path = tmp_path / "a.parquet"
        for compression in ("none", "zstd"):
            pq.write_table(pa.Table.from_pylist(chats), path, row_group_size=700, compression=compression)
            source = open_source(path, strict=True)
            assert [list(found.messages) for found in conversations(source)] == [chat["messages"] for chat in chats]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT},
    optional={"name": TEXT, "weight": st.sampled_from([0, 1]), "reasoning_content": TEXT},
)


@given(chats=st.lists(st.lists(MESSAGE, min_size=1, max_size=4), min_size=1, max_size=6))
def test_every_format_gives_the_same_conversations(chats: list[list[dict]]):
    records = [{"messages": chat} for chat in chats]
    found = []
    for ending in ("jsonl", "json", "parquet", "arrow", "csv"):
        with tempfile.TemporaryDirectory() as folder:
            found.append(conversations(source_of(Path(folder), records, ending, strict=True)))
    assert found == [found[0]] * len(found)
    assert [len(one.messages) for one in found[0]] == list(map(len, chats))


class TestSpoken:
    def test_roles_texts_reasoning_and_calls(self, tmp_path: Path):
        document = list(source_of(tmp_path, CHATS))[1]
        assert document.conversation is not None
        assert document.text == conversation_text(document.conversation)
        call = json.dumps([CALL], sort_keys=True)
        assert document.text.startswith(
            f'system\nBe brief.\ndeveloper\nReally.\nuser\n1 + 2?\nassistant\n\n"a sum"\n{call}'
        )

    @pytest.mark.parametrize("ending", ["jsonl", "parquet"])
    def test_the_order_of_keys_says_nothing(self, ending: str, tmp_path: Path):
        calls = [CALL, dict(reversed(CALL.items()))]
        messages = [[{"role": "assistant", "tool_calls": [call]}] for call in calls]
        first, second = source_of(tmp_path, [{"messages": m} for m in messages], ending)
        assert first.text == second.text
        assert first.text.startswith("assistant\n[{")


WRONG = {
    "no list": ({"messages": 3}, r"messages is 3, not a list of messages"),
    "no JSON": ({"messages": "[hello"}, r"messages is '\[hello', which is not JSON"),
    "no messages": ({"messages": []}, "it has no messages"),
    "a text": ({"messages": ["hello"]}, "message 0: it is 'hello', not a message"),
    "no role": ({"messages": [*CHATS[0]["messages"], {"content": "x"}]}, "message 2: role=None is not a role name"),
    "no content": ({"messages": [{"role": "user"}]}, "message 0: content=None is not text"),
    "a number": ({"messages": [{"role": "user", "content": 3}]}, "message 0: content=3 is not text"),
    "a stranger": (
        {"messages": [{"from": "alien", "value": "x"}]},
        "message 0: from='alien' is not one of human, user",
    ),
    "a list of one": ({"messages": [{"from": ["gpt"], "value": "x"}]}, r"message 0: from=\['gpt'\] is not one of"),
    "a weight": (
        {"messages": [{"role": "user", "content": "x", "weight": 2}]},
        "message 0: weight=2 is neither 0 nor 1",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "0: it has a content part of type image",
    ),
    "a part": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "message 0: it has a content part .* without text",
    ),
    "images": (CHATS[0] | {"images": ["a.png"]}, "it has 'images', which training does not support"),
    "calls": (
        {"messages": [{"role": "assistant", "tool_calls": "{}"}]},
        "message 0: tool_calls={} is not a list of calls",
    ),
    "tools": (CHATS[0] | {"tools": "{}"}, "tools={} is not a list of schemas"),
    "nested": ({"messages": [{"role": "user", "content": "x", "a": json.loads("[" * 900 + "]" * 900)}]}, "too deep"),
    "not a number": ({"messages": [{"role": "user", "content": "x", "a": float("nan")}]}, "Out of range float"),
}


class TestFaults:
    @pytest.mark.parametrize("name", WRONG)
    def test_the_record_is_named_and_strict_ends_there(self, name: str, tmp_path: Path):
        record, said = WRONG[name]
        (example,) = left_out(tmp_path, [record])
        assert example.startswith("chats.jsonl:2 (")
        assert re.search(said, example), example
        with pytest.raises(DataError, match=r"chats\.jsonl:2: no conversation"):
            list(open_source(tmp_path, strict=True))

    @pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
    def test_half_of_a_surrogate_pair_anywhere(self, ending: str, tmp_path: Path):
        half = json.loads('"\\ud800"')
        records = [
            {"messages": [{"role": "user", "content": half}]},
            {"messages": [{"role": "user", "content": "x", "name": half}]},
            CHATS[0] | {"tools": [{"name": half}]},
        ]
        for record in records:
            content = FORMATS[ending]([CHATS[0], record])
            (tmp_path / f"chats.{ending}").write_bytes(content)
            source = open_source(tmp_path)
            assert len(list(source)) == 1
            assert source.skipped == {"lone surrogate": 1}

    def test_nulls_and_missing_fields(self, tmp_path: Path):
        examples = left_out(tmp_path, [{"messages": None}, {"id": "x"}, ["messages"]])
        assert examples[0] == "chats.jsonl:2"
        assert examples[1] == "chats.jsonl:3 (fields: 'id'; with text: 'id')"
        assert examples[2] == "chats.jsonl:4 (it is a list)"

    def test_bytes_that_are_no_utf8_cost_their_row_alone(self, tmp_path: Path):
        texts = pa.array([b"good", b"\xff", b"fine"], pa.binary()).view(pa.string())
        roles = pa.array(["user"] * 3)
        inner = pa.StructArray.from_arrays([roles, texts], ["role", "content"])
        batch = pa.record_batch({"messages": pa.ListArray.from_arrays([0, 1, 2, 3], inner)})
        with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as out, pa.ipc.new_file(out, batch.schema) as writer:
            writer.write_batch(batch)
        pq.write_table(pa.table(batch), tmp_path / "b.parquet")
        source = open_source(tmp_path)
        assert [document.name for document in source] == ["a.arrow:0", "a.arrow:2", "b.parquet:0", "b.parquet:2"]
        assert source.skipped == {"not UTF-8": 2}

    def test_what_no_json_has(self, tmp_path: Path):
        when = datetime.datetime(2026, 1, 1)
        records = [{"messages": [{"role": "user", "content": "x", "at": when}]}]
        path = tmp_path / "a.parquet"
        path.write_bytes(parquet(records))
        (tmp_path / "b.parquet").write_bytes(parquet(CHATS))
        source = open_source(tmp_path)
        assert len(list(source)) == 2
        assert "datetime" in source.left_out.examples["no conversation"][0]

    def test_columns_of_odd_types_are_refused_by_name(self, tmp_path: Path):
        (tmp_path / "b.parquet").write_bytes(parquet(CHATS * 200))
        odd = pa.array([[("role", "user")]], pa.map_(pa.string(), pa.string()))
        pq.write_table(
            pa.table({"messages": pa.array([[[("role", "user")]]], pa.list_(odd.type))}), tmp_path / "a.parquet"
        )
        twice = pa.array([chat["messages"] for chat in CHATS[:1]])
        batch = pa.RecordBatch.from_arrays([twice, twice], ["messages", "messages"])
        with pa.OSFile(str(tmp_path / "c.arrow"), "wb") as out, pa.ipc.new_file(out, batch.schema) as writer:
            writer.write_batch(batch)
        source = open_source(tmp_path)
        assert len(list(source)) == 400
        shown = " ".join(source.left_out.examples["no conversation"])
        assert "a.parquet (column 'messages' holds a list<element: map<" in shown
        assert "c.arrow (there are several columns 'messages')" in shown


class TestRecognition:
    def test_texts_are_read_as_ever(self, tmp_path: Path):
        (tmp_path / "a.jsonl").write_bytes(lines([{"text": "one"}, {"text": "two"}]))
        source = open_source(tmp_path)
        assert [(document.text, document.conversation) for document in source] == [("one", None), ("two", None)]
        assert source.fields.kind == "text"
        assert set(source.fingerprint()) == {"kind", "text_field", "exclude", "files", "bytes", "files_xxh3_128"}
        assert open_source(tmp_path, format="text").fingerprint() == source.fingerprint()

    def test_the_kind_is_part_of_the_fingerprint(self, tmp_path: Path):
        found = source_of(tmp_path, CHATS).fingerprint()
        assert found["format"] == "messages"
        assert open_source(tmp_path, format="messages").fingerprint() == found

    @pytest.mark.parametrize("length", [1, 10_000])
    def test_a_readme_beside_chats_is_left_out(self, length: int, tmp_path: Path):
        (tmp_path / "README.md").write_text("What this is." * length)
        source = source_of(tmp_path, CHATS)
        assert [document.name for document in source] == ["chats.jsonl:1", "chats.jsonl:2"]
        assert source.skipped == {"no conversation": 1}
        assert source.left_out.examples["no conversation"] == ["README.md (plain text)"]
        assert len(list(open_source(tmp_path, strict=True))) == 2

    def test_pictures_beside_chats_are_no_texts(self, tmp_path: Path):
        (tmp_path / "a.png").write_bytes(b"\x89PNG\0" * 10_000)
        source = source_of(tmp_path, CHATS)
        assert len(list(source)) == 2
        assert source.skipped == {"binary": 1}

    def test_a_text_and_a_conversation_in_one_record_is_a_doubt(self, tmp_path: Path):
        records = [chat | {"text": "rendered"} for chat in CHATS]
        for ending in ("jsonl", "json", "parquet", "arrow", "csv"):
            (tmp_path / ending).mkdir()
            with pytest.raises(DataError, match="text in 'text', and conversations by 'messages'") as caught:
                source_of(tmp_path / ending, records, ending)
            assert "--format text or --format messages" in str(caught.value)
            texts = [document.text for document in open_source(tmp_path / ending, format="text")]
            assert texts == ["rendered"] * 2
            assert len(conversations(open_source(tmp_path / ending, format="messages"))) == 2

    @pytest.mark.parametrize("text", [None, ""])
    def test_an_empty_text_field_is_no_doubt(self, text: str | None, tmp_path: Path):
        assert len(conversations(source_of(tmp_path, [chat | {"text": text} for chat in CHATS]))) == 2

    def test_two_kinds_are_a_doubt_that_names_a_file_of_each(self, tmp_path: Path):
        (tmp_path / "b.jsonl").write_bytes(lines(SHARE_GPT))
        with pytest.raises(DataError, match=r"b\.jsonl: conversations by 'conversations'\nchats\.jsonl: .* 'messages'"):
            source_of(tmp_path, CHATS)
        assert len(conversations(open_source(tmp_path, include=["b.jsonl"]))) == 2
        # Who says the kind has what is of another one left out, as any record without the field.
        source = open_source(tmp_path, format="messages")
        assert len(conversations(source)) == 2
        assert source.skipped == {"no field 'messages'": 1}

    @pytest.mark.parametrize("name", ["b.jsonl", "b.txt"])
    def test_texts_that_outweigh_conversations_are_a_doubt(self, name: str, tmp_path: Path):
        (tmp_path / name).write_bytes(lines([{"text": "word " * 1000}]) if name == "b.jsonl" else b"word " * 1000)
        with pytest.raises(
            DataError, match=rf"chats\.jsonl: conversations by 'messages'\n{name}: text\n.* bytes of conv"
        ):
            source_of(tmp_path, CHATS)
        source = open_source(tmp_path, format="messages")
        assert len(conversations(source)) == 2
        assert [document.name[:5] for document in open_source(tmp_path, format="text")] == [name[:5]]

    @pytest.mark.parametrize("name", ["b.jsonl", "b.txt"])
    def test_a_stray_file_of_conversations_is_left_out(self, name: str, tmp_path: Path):
        text = "word " * 100_000
        (tmp_path / name).write_bytes(lines([{"text": text}]) if name == "b.jsonl" else text.encode())
        source = source_of(tmp_path, CHATS)
        assert [document.text for document in source] == [text]
        assert source.skipped == {"no field 'text'": 1}

    def test_a_text_field_that_is_given_says_that_there_are_texts(self, tmp_path: Path):
        records = [chat | {"body": "text"} for chat in CHATS]
        assert [document.text for document in source_of(tmp_path, records, text_field="body")] == ["text"] * 2

    def test_a_field_of_that_name_that_is_no_list_is_none(self, tmp_path: Path):
        assert kind_of({"messages": "hello", "conversations": 3, "prompt": "x"}) == ""
        (document,) = source_of(tmp_path, [{"text": "x", "messages": "hello"}])
        assert document.conversation is None

    def test_options_that_make_no_sense_together(self, tmp_path: Path):
        with pytest.raises(DataError, match="--join directory joins texts"):
            source_of(tmp_path, CHATS, join=Join())
        with pytest.raises(DataError, match="--text-field body selects texts, but --format messages selects conv"):
            open_source(tmp_path, format="messages", text_field="body")
        with pytest.raises(DataError, match="format='chat' must be one of auto, text, messages, conversations, prompt"):
            open_source(tmp_path, format="chat")

    @pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
    def test_another_kind_than_the_one_that_is_asked_for(self, ending: str, tmp_path: Path):
        with pytest.raises(DataError, match="has no conversations by 'conversations'") as caught:
            source_of(tmp_path, CHATS, ending, format="conversations")
        assert "'messages'" in str(caught.value)
        assert "--format" in str(caught.value)

    def test_a_folder_of_texts_alone_has_no_conversations(self, tmp_path: Path):
        (tmp_path / "a.txt").write_text("text")
        with pytest.raises(DataError, match=r"no usable text:\n *1 no conversation: a\.txt"):
            list(open_source(tmp_path, format="messages"))

    @pytest.mark.parametrize("records", [CHATS, SHARE_GPT, PROMPTS])
    def test_json_that_is_not_named_so(self, records: list[dict], tmp_path: Path):
        (tmp_path / "part-0").write_bytes(lines(records[:1]))
        with pytest.raises(DataError, match="--as-json part-0 reads its records"):
            open_source(tmp_path)
        assert len(conversations(open_source(tmp_path, as_json=["part-*"]))) == 1
        (tmp_path / "good.jsonl").write_bytes(lines(records * 9))
        source = open_source(tmp_path)
        assert len(list(source)) == 9 * len(records)
        assert source.skipped == {JSON_WITHOUT_SUFFIX: 1}

    def test_json_that_is_not_named_so_and_long(self, tmp_path: Path):
        chat = {"messages": [{"role": "user", "content": "x" * (3 << 20)}]}
        (tmp_path / "part-0").write_bytes(lines([chat]))
        with pytest.raises(DataError, match="--as-json part-0 reads its records"):
            open_source(tmp_path)

    def test_a_dataset_that_was_saved(self, tmp_path: Path):
        (tmp_path / "data-00000-of-00001.arrow").write_bytes(arrow(CHATS))
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
        (tmp_path / "dataset_info.json").write_text("{}")
        assert len(conversations(open_source(tmp_path, strict=True))) == 2


class TestDamage:
    def test_a_part_that_is_shorter_than_what_it_is_a_part_of(self, tmp_path: Path):
        content = arrow([{"messages": [{"role": "user", "content": str(n)} for n in range(12345)]}])
        length = (12345).to_bytes(8, "little") + bytes(8)
        # Of the messages, their roles and their contents.
        assert content.count(length) == 3
        at = content.rindex(length)
        (tmp_path / "a.arrow").write_bytes(content[:at] + (7).to_bytes(8, "little") + content[at + 8 :])
        (tmp_path / "b.jsonl").write_bytes(lines(CHATS))
        source = open_source(tmp_path, format="messages")
        assert len(list(source)) == 2
        assert source.skipped == {"damaged": 1}

    def test_no_flipped_bit_is_an_error_that_has_no_name(self, tmp_path: Path):
        noise = random.Random(0)
        for ending in ("parquet", "arrow"):
            content, path = FORMATS[ending](CHATS * 3), tmp_path / f"a.{ending}"
            for _ in range(150):
                damaged = bytearray(content)
                for _ in range(noise.choice([1, 1, 3])):
                    damaged[noise.randrange(len(damaged))] ^= 1 << noise.randrange(8)
                path.write_bytes(damaged)
                with contextlib.suppress(DataError):
                    list(open_source(path, format="messages"))
            path.unlink()

    def test_rows_are_the_same_one_by_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        source = source_of(tmp_path, CHATS * 9, "parquet")
        together = list(source)
        monkeypatch.setattr(nested, "_BYTES_TOGETHER", 10)
        assert list(source) == together


def test_a_null_in_an_argument_is_a_value_in_json_and_none_in_a_table(tmp_path):
    """transformers renders it; a table has such a key in every row, if one row has a value there."""
    calls = [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
    record = {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}], "tools": tools}
    found = conversation_of(record, "messages")
    assert found.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}
    assert "content" not in found.messages[0]
    assert found.tools[0]["function"]["parameters"] == {"default": None}
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "rows.parquet")
    (document,) = open_source(str(tmp_path))
    assert document.conversation.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_a_prompt_may_be_messages_in_a_cell(tmp_path):
    turns = [json.dumps([{"role": "user", "content": "a"}]), json.dumps([{"role": "assistant", "content": "b"}])]
    found = conversation_of({"prompt": turns[0], "completion": turns[1]}, "prompt")
    assert [message["content"] for message in found.messages] == ["a", "b"]
    text = conversation_of({"prompt": "[{1}]", "completion": '[{"a": 1}]'}, "prompt")
    assert [message["content"] for message in text.messages] == ["[{1}]", '[{"a": 1}]']
    for begun in ('[{"role": "admin", "level": 3}]', '[{"role": "user", "content": "a"}]\nMake a table of this.'):
        assert conversation_of({"prompt": begun, "completion": "b"}, "prompt").messages[0]["content"] == begun


def test_what_is_said_is_not_the_same_with_other_tools_or_weights():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    others = [{}, {"tools": [{"type": "function", "function": {"name": "f"}}]}]
    texts = {conversation_text(conversation_of({"messages": messages, **other}, "messages")) for other in others}
    texts.add(conversation_text(conversation_of({"messages": [messages[0], {**messages[1], "weight": 0}]}, "messages")))
    assert len(texts) == 3
