"""``Conversation``: messages and tools, read from a record in one of the common formats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longctx.untrusted.strict_json import MOST_JSON_VALUES, printable, shown

Message = dict[str, Any]

ASSISTANT = "assistant"
FIELDS = {"messages": ("messages",), "conversations": ("conversations",), "prompt": ("prompt", "completion")}
"""Conversation record kinds, and the fields that each needs."""
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "model": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Role names under ``from``, as in ShareGPT files and formats derived from them."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys for a message's reasoning. Templates read the first one; gpt-oss's reads the second."""
_TURNS = re.compile(r"""\s*\[\s*\{[^{}\[\]]*"(role|from)"\s*:""")
"""Start of a JSON list of messages."""
_CONTENT_KEYS = {"content", "value", "tool_calls"}
_MAX_MESSAGES = 1 << 20
MEDIA = ("image", "image_url", "video", "audio", "input_audio", "images", "videos", "audios")


class NoConversationError(ValueError):
    """Error for a record that is not a conversation, with a short reason; ``turn`` counts from 0, −1 is the record."""

    def __init__(self, reason: str, turn: int = -1) -> None:
        super().__init__(reason)
        self.turn = turn


@dataclass(frozen=True)
class Conversation:
    """Input for a chat template."""

    messages: tuple[Message, ...]
    """Each with ``role`` and the other fields in its record; fields that are None are left out."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas for the functions that the model may call."""
    weights: tuple[bool, ...] = ()
    """True for each message with tokens that may count; False if the record has ``weight: 0``."""

    def part(self, turns: Iterable[int]) -> Conversation:
        """Return a conversation with only these messages."""
        numbers = list(turns)
        messages = tuple(self.messages[turn] for turn in numbers)
        return Conversation(messages, self.tools, tuple(self.weights[turn] for turn in numbers))


def kind_of(record: Mapping[str, Any]) -> str:
    """Return a record's conversation field: ``messages``, ``conversations`` or ``prompt``; "" if it has none."""
    for kind in ("messages", "conversations"):
        value = record.get(kind)
        # A table of strings stores lists as JSON. Any other text is not a conversation.
        if isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("[")):
            return kind
    if "prompt" in record and "completion" in record:
        return "prompt"
    return ""


def conversation_of(record: Mapping[str, Any], kind: str) -> Conversation:
    """Read a record's conversation. Raise NoConversationError with the reason and its turn."""
    if kind == "prompt":
        turns = _turns(record, "prompt", "user") + _turns(record, "completion", ASSISTANT)
    else:
        turns = _turns(record, kind, "")
    if not turns:
        raise NoConversationError("it has no messages")
    if len(turns) > _MAX_MESSAGES:
        raise NoConversationError(f"it has {len(turns):,} messages; the limit is {_MAX_MESSAGES:,}")
    # A media column may be empty, as in text-only records from a dataset with pictures.
    for name in MEDIA:
        if record.get(name):
            raise NoConversationError(f"it has {name!r}, which training does not support")
    _check_calls(turns)
    messages, weights = [], []
    for turn, entry in enumerate(turns):
        message = _message(entry, turn)
        weights.append(_weight(message.pop("weight", 1), turn))
        messages.append(message)
    # Last, because error messages count turns as in the record.
    if system := _system(record, messages[0]):
        messages.insert(0, {"role": "system", "content": system})
        weights.insert(0, True)
    return Conversation(tuple(messages), tuple(_tools(record.get("tools"))), tuple(weights))


def conversation_text(conversation: Conversation) -> str:
    """Return a conversation as one string: each message's role on a line, followed by its content.

    Reasoning, tools and their calls become JSON lines with sorted keys, so that equal ones give equal text. Messages
    that do not count are included.
    """
    lines: list[str] = []
    for message in conversation.messages:
        lines.append(message["role"])
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(map(part_text, content))
        if content is not None:
            lines.append(content)
        # JSON instead of plain text: these are not spoken content.
        for name in ("reasoning_content", "tool_calls"):
            if name in message:
                lines.append(json.dumps(message[name], ensure_ascii=False, sort_keys=True))
    if conversation.tools:
        lines.append(json.dumps(conversation.tools, ensure_ascii=False, sort_keys=True))
    if not all(conversation.weights):
        lines.append(json.dumps(conversation.weights))
    return "\n".join(lines)


def part_text(part: Any) -> str:
    """Return the text in one content part."""
    if isinstance(part, str):
        return part
    return part["text"]


def _turns(record: Mapping[str, Any], field: str, role: str) -> list[Any]:
    """Return the messages in a field: a list, a text that is one message, or a JSON list."""
    value = record.get(field)
    if isinstance(value, str) and role and not is_json_messages(value, field):
        return [{"role": role, "content": value}]
    if isinstance(value, str):
        value = _parse_json(value, field)
    if not isinstance(value, list):
        raise NoConversationError(f"{field} is {shown(value)}, not a list of messages")
    return value


def is_json_messages(text: str, field: str) -> bool:
    """Return True if a text is a JSON list of messages, and not just a text that begins like one."""
    # The regex avoids parsing every text; the checks below avoid taking a text about JSON for messages.
    if not _TURNS.match(text):
        return False
    _check_values(text, field)
    try:
        turns = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(turns, list) and all(isinstance(turn, Mapping) and turn.keys() & _CONTENT_KEYS for turn in turns)


def _system(record: Mapping[str, Any], first: Message) -> str:
    """Return the text from a separate ``system`` field; "" if it is missing, or if the messages begin with it."""
    system = record.get("system")
    if not isinstance(system, str) or not system:
        return ""
    if first["role"] != "system":
        return system
    if first.get("content") != system:
        raise NoConversationError("its system field differs from its first message, a system turn")
    return ""


def _check_calls(turns: Sequence[Any]) -> None:
    """Raise NoConversationError if JSON tool calls have too many values in total."""
    # Check all before parsing the first: each alone may be small.
    calls = (turn.get("tool_calls") for turn in turns if isinstance(turn, Mapping))
    if sum(_num_values(call) for call in calls if isinstance(call, str)) > MOST_JSON_VALUES:
        raise NoConversationError(f"its tool_calls have more than {MOST_JSON_VALUES:,} values")


def _message(entry: Any, turn: int) -> Message:
    """Return a message with ``role`` and ``content``. Raise NoConversationError if the entry is not a message."""
    if not isinstance(entry, Mapping):
        raise NoConversationError(f"it is {shown(entry)}, not a message", turn)
    # Drop nulls: some templates only test whether a part has the key ``image``. In arguments and schemas a null is a
    # value.
    kept = {key: copy_json(value, nulls=key == "tool_calls") for key, value in entry.items()}
    message = {str(key): value for key, value in kept.items() if value is not None}
    if "role" not in message and "from" in message:
        sender = message.pop("from")
        if not isinstance(sender, str) or sender not in _ROLES:
            raise NoConversationError(f"from={shown(sender)} is not one of {', '.join(_ROLES)}", turn)
        message["role"] = _ROLES[sender]
        if "content" not in message and "value" in message:
            message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise NoConversationError(f"role={shown(role)} is not a role name", turn)
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:
        # Set both keys, so that every template finds the reasoning.
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], turn)
    content = message.get("content")
    if isinstance(content, list):
        for part in _media(content):
            raise NoConversationError(
                f"it has a content part of type {printable(part)}, which training does not support", turn
            )
        for part in content:
            if isinstance(part, Mapping) and not isinstance(part.get("text"), str):
                raise NoConversationError(f"it has a content part {shown(part)} without text", turn)
    elif not isinstance(content, str) and not (content is None and "tool_calls" in message):
        raise NoConversationError(f"content={shown(content)} is not text", turn)
    return message


def _media(parts: Sequence[Any]) -> Iterator[str]:
    """Yield the types of non-text content parts."""
    for part in parts:
        kind = "text"
        if isinstance(part, Mapping):
            kind = str(part.get("type", "text"))
        elif not isinstance(part, str):
            kind = type(part).__name__
        if kind != "text":
            yield kind


def _tool_calls(value: Any, turn: int) -> list[Any]:
    """Return a message's tool calls, parsed if they are JSON text. Arguments keep their spelling."""
    if isinstance(value, str):
        value = _parse_json(value, "tool_calls", turn)
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise NoConversationError(f"tool_calls={shown(value)} is not a list of calls", turn)
    return [copy_json(call, nulls=True) for call in value]


def _tools(value: Any) -> list[dict[str, Any]]:
    """Return a record's tools, parsed if they are JSON text."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        value = _parse_json(value, "tools")
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise NoConversationError(f"tools={shown(value)} is not a list of schemas")
    return [copy_json(tool, nulls=True) for tool in value]


def copy_json(value: Any, *, nulls: bool) -> Any:
    """Copy a JSON value; without ``nulls``, drop keys with the value null.

    A table has such keys in every row as soon as one row has a value. Raise RecursionError if nesting is too deep.
    """
    if isinstance(value, Mapping):
        return {str(key): copy_json(item, nulls=nulls) for key, item in value.items() if nulls or item is not None}
    if isinstance(value, list):
        return [copy_json(item, nulls=nulls) for item in value]
    return value


def _weight(value: Any, turn: int) -> bool:
    """Return True if a message counts in the loss."""
    if type(value) not in (int, float, bool) or value not in (0, 1):
        raise NoConversationError(f"weight={shown(value)} is neither 0 nor 1", turn)
    return bool(value)


def _parse_json(value: str, field: str, turn: int = -1) -> Any:
    _check_values(value, field, turn)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise NoConversationError(f"{field} is {shown(value)}, which is not JSON", turn) from error


def _check_values(text: str, field: str, turn: int = -1) -> None:
    if _num_values(text) > MOST_JSON_VALUES:
        raise NoConversationError(f"{field} has more than {MOST_JSON_VALUES:,} values", turn)


def _num_values(text: str) -> int:
    """Return an upper bound on the number of values in a JSON text; parsed, each takes 50 to 100 bytes.

    Commas inside strings count too.
    """
    return sum(map(text.count, ",[{"))
