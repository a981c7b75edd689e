"""Ids and masks beside ``apply_chat_template`` of transformers, for our templates and for published ones.

``LONGCTX_CHAT_TEMPLATES`` names folders with ``*.jinja`` files, separated as in PATH: those of the wheels of TRL and
Axolotl, unpacked. For each template and conversation we are equal, or we refuse and say why.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longctx.chat.conversation import conversation_of
from longctx.chat.encode import ChatEncoder, NotCountedError
from longctx.tokenizer import load_tokenizer
from tests.longctx.chat.templates import FORGETFUL, MARKED, PLAIN, STRICT
from tests.longctx.tokenizer.byte_level import BEGIN, END, tokenizer_json, write_tokenizer

transformers = pytest.importorskip("transformers")

OWN = {"plain": PLAIN, "marked": MARKED, "forgetful": FORGETFUL, "strict": STRICT}
PLACES = [Path(place) for place in os.environ.get("LONGCTX_CHAT_TEMPLATES", "").split(os.pathsep) if place]
PUBLISHED = {str(path): path for place in PLACES for path in sorted(place.rglob("*.jinja"))}

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]


def turns(*texts: str, first: str = "user", **fields: Any) -> list[dict[str, Any]]:
    """Turns of user and assistant one after the other; ``fields`` are of every reply."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    found: list[dict[str, Any]] = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    for message in found:
        if message["role"] == "assistant":
            message.update(fields)
    return found


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": turns("Hi", "Hello."),
    "several turns": turns("Hi", "Hello.", "How?", "Well.", "Why?", "So."),
    "system": [{"role": "system", "content": "Be kind."}, *turns("Hi", "Hello.", "a", "b")],
    "two replies": [*turns("Hi", "One."), {"role": "assistant", "content": "Two."}],
    "empty reply": turns("Hi", ""),
    "not Latin": turns("Привет 你好", "مرحبا 👋🏽 नमस्ते"),
    "system in the middle": [*turns("Hi", "a"), {"role": "system", "content": "Be brief."}, *turns("b", "c")],
    "reasoning": turns("Hi", "Hello.", reasoning_content="They greet."),
    "reasoning in turns": turns("Hi", "Hello.", "b", "c", reasoning_content="hm"),
    "spaces": turns("  Hi \n", "  Hello. \n\n"),
    "reply first": turns("Hello.", "x", "y", first="assistant"),
    "question last": turns("Hi", "Hello.", "x"),
    "newline first": turns("Hi", "\nHello."),
    "tools": [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "3."},
    ],
}
_CONTROL = re.compile(r"<\|[A-Za-z0-9_▁｜\- ]+\|>|<｜[^｜<>]+｜>|</?[a-z_]+>|\[/?[A-Z_]+\]")
_NOT_SPECIAL = re.compile(r"</?(think|tool_call|tool_response|tools)>")


def outcomes(template: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each conversation, and how we stand beside transformers."""
    found = sorted(set(_CONTROL.findall(template)) - {BEGIN, END})
    added = [(text, 261 + n, _NOT_SPECIAL.fullmatch(text) is None) for n, text in enumerate(found)]
    write_tokenizer(folder, tokenizer_json(*added))
    (folder / "chat_template.jinja").write_text(template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    encoder = ChatEncoder(load_tokenizer(folder))
    for name, messages in CONVERSATIONS.items():
        tools = TOOLS if name == "tools" else None
        wanted = ours = error = None
        try:
            wanted = theirs.apply_chat_template(
                messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as raised:
            error = raised
        try:
            ours = encoder.encode(conversation_of({"messages": messages, "tools": tools}, "messages"))
        except NotCountedError as refused:
            reason = refused.reason
            yield name, "both refuse" if error is not None else f"refused: {reason}"
            continue
        if wanted is None:
            yield name, f"only theirs refuses: {error}"
        elif ours.ids.tolist() != wanted["input_ids"]:
            yield name, "other ids"
        elif not encoder.marks_replies:
            yield name, "equal, mask derived"
        elif ours.counted.astype(int).tolist() != wanted["assistant_masks"]:
            yield name, "another mask"
        else:
            yield name, "equal, mask as theirs"
    encoder.close()


ALLOWED = {
    "both refuse",
    "equal, mask derived",
    "equal, mask as theirs",
    "refused: the template changes a turn when others follow",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OWN)
def test_our_templates_as_transformers_renders_them(tmp_path: Path, name: str):
    found = dict(outcomes(OWN[name], tmp_path))
    assert set(found.values()) <= ALLOWED, found
    assert found["several turns"].startswith("equal")


@pytest.mark.filterwarnings("ignore")
def test_published_templates_as_transformers_renders_them(tmp_path: Path):
    if not PUBLISHED:
        pytest.skip("LONGCTX_CHAT_TEMPLATES names no folder of templates: published ones are NOT compared")
    counts: Counter[str] = Counter()
    wrong = []
    for number, (path, file) in enumerate(PUBLISHED.items()):
        for name, outcome in outcomes(file.read_text(), tmp_path / str(number)):
            counts[outcome] += 1
            if outcome not in ALLOWED:
                wrong.append(f"{path}, {name}: {outcome}")
    assert not wrong, (dict(counts), wrong[:20])
    assert counts["equal, mask derived"] > counts["refused: the template changes a turn when others follow"]
