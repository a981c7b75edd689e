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
import transformers

from longctx.chat.chat_encoder import PROMPT_MISMATCH, ChatEncoder, ChatEncodingError
from longctx.chat.conversation import Conversation, conversation_of, kind_of, part_text
from longctx.tokenizer import load_tokenizer
from tests.longctx.chat.cases import CASES, reply, user
from tests.longctx.chat.templates import FORGETFUL, MARKED, PLAIN, STRICT
from tests.longctx.tokenizer.byte_level import BEGIN, END, tokenizer_json, write_tokenizer

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
MORE: dict[str, dict[str, Any]] = {
    "three turns": {"messages": [message for text in "abc" for message in (user(text), reply(text.upper()))]},
    "a system turn, two turns": {
        "messages": [{"role": "system", "content": "Be kind."}, user("a"), reply("b"), user("c"), reply("d")],
    },
    "a line first": {"messages": [user("Hi"), reply("\nHello.")]},
    "a called tool": {
        "messages": [
            user("1+2?"),
            reply("", tool_calls=[CALL]),
            {"role": "tool", "name": "add", "content": "3"},
            reply("3."),
        ],
        "tools": TOOLS,
    },
}
SPELT = "control tokens in a question"
"""Those of the template itself."""
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
    special = [text for text, _, is_special in added if is_special]
    spelt = {"messages": [user("\n".join(("Say", *special, "now."))), reply("No.")]}
    records = {**{name: record for name, (record, _) in CASES.items()}, **MORE, SPELT: spelt}
    for name, record in records.items():
        conversation = conversation_of(record, kind_of(record))
        wanted = ours = error = None
        try:
            wanted = theirs.apply_chat_template(
                list(conversation.messages),
                tools=list(conversation.tools) or None,
                return_dict=True,
                return_assistant_tokens_mask=name != SPELT,
                sanitize_control_tokens=name == SPELT,
            )
        except Exception as raised:
            error = raised
        try:
            ours = encoder.encode(conversation)
        except ChatEncodingError as refused:
            reason = refused.reason
            yield name, "both refuse" if error is not None else f"refused: {reason}"
            continue
        if wanted is None and list(conversation.messages) == joined(conversation):
            yield name, f"only theirs refuses: {error}"
        elif wanted is None or ours.ids.tolist() != wanted["input_ids"]:
            # A template that knows no parts fails, leaves them out, or writes them as a list; ours gives it their text.
            wanted = theirs.apply_chat_template(joined(conversation), return_dict=True)
            yield name, "equal, parts joined" if ours.ids.tolist() == wanted["input_ids"] else "other ids"
        elif not encoder.has_reply_marks or "assistant_masks" not in wanted or not all(conversation.weights):
            yield name, "equal, mask derived"
        elif ours.loss_mask.astype(int).tolist() != wanted["assistant_masks"]:
            yield name, "another mask"
        else:
            yield name, "equal, mask as theirs"
    encoder.close()


def joined(conversation: Conversation) -> list[dict[str, Any]]:
    """The messages with contents that are one text each."""
    lists = [isinstance(message.get("content"), list) for message in conversation.messages]
    return [
        {**message, "content": "".join(map(part_text, message["content"]))} if is_list else message
        for message, is_list in zip(conversation.messages, lists, strict=True)
    ]


ALLOWED = {
    "both refuse",
    "equal, parts joined",
    "equal, mask derived",
    "equal, mask as theirs",
    "refused: the template changes a turn when others follow",
    f"refused: {PROMPT_MISMATCH}",
    "refused: the template writes the prompt for a reply behind each",
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
