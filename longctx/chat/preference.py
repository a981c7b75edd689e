"""``Preference``: a prompt with two replies to compare, read from a record in one of the common formats.

A record has a chosen and a rejected reply, or one reply with a label (KTO): its second reply then comes from another
record, so that it does not answer the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from longctx.chat.conversation import (
    ASSISTANT,
    Conversation,
    Message,
    conversation_of,
    conversation_text,
    is_json_messages,
    part_text,
)

COMPARED, LABELLED = "preferences", "labelled"
"""Record kinds: two replies, or one with a label."""
PREFERENCE_FIELDS = {COMPARED: ("chosen", "rejected"), LABELLED: ("prompt", "completion", "label")}
"""Fields that each kind needs; ``prompt`` is optional beside two replies with all their messages."""
_PROMPT = "prompt"
_LABELS = {"1": 1, "true": 1, "0": 0, "false": 0}

EMPTY_PROMPT = "empty prompt"
EMPTY_REPLY = "empty reply"
EQUAL_REPLIES = "equal replies"
NO_COMMON_PROMPT = "no common prompt"
INVALID_LABEL = "invalid label"
NO_OTHER_PROMPT = "no reply to another prompt"


class NoPreferenceError(ValueError):
    """Error for a record without a prompt and two replies to compare, with a short reason."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Preference:
    """A prompt with two replies, as conversations that end with one reply each."""

    first: Conversation
    second: Conversation | None
    """None for a single reply, until ``with_second``."""
    label: int = 1
    """1, or 0 for an undesirable single reply."""
    is_text: bool = False
    """True if prompt and replies are plain texts."""

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Messages before the replies."""
        return self.first.messages[:-1]

    @property
    def text(self) -> str:
        """Prompt, replies and label as one string, the same for equal records."""
        lines = [conversation_text(self.first)]
        if self.second is None:
            lines.append(str(self.label))
        else:
            lines.append(conversation_text(self.second.part([len(self.second.messages) - 1])))
        return "\n".join(lines)

    @property
    def reply_bytes(self) -> int:
        """UTF-8 bytes in both replies' texts."""
        replies = [one.messages[-1] for one in (self.first, self.second) if one is not None]
        return sum(len(_content(reply).encode()) for reply in replies)

    def with_second(self, other: Preference) -> Preference:
        """Return the record with another single reply as its second one."""
        messages = (*self.prompt, other.first.messages[-1])
        second = replace(self.first, messages=messages, weights=(*self.first.weights[:-1], other.first.weights[-1]))
        return replace(self, second=second, is_text=self.is_text and other.is_text)


def preference_kind_of(record: Mapping[str, Any]) -> str:
    """Return a record's kind: ``preferences``, ``labelled``, or "" if it lacks their fields."""
    return next((kind for kind, names in PREFERENCE_FIELDS.items() if all(name in record for name in names)), "")


def preference_of(record: Mapping[str, Any], kind: str) -> Preference:
    """Read a record. Raise NoPreferenceError, or NoConversationError for messages that are none."""
    label, names = 1, PREFERENCE_FIELDS[kind]
    if kind == LABELLED:
        label, names = _label(record["label"]), ("completion",)
    conversations = [_conversation(record, name) for name in names]
    prompts = [conversation.messages[:-1] for conversation in conversations]
    if prompts[0] != prompts[-1]:
        raise NoPreferenceError(NO_COMMON_PROMPT, "the messages before the last one differ")
    if not any(map(_content, prompts[0])):
        raise NoPreferenceError(EMPTY_PROMPT)
    for name, conversation in zip(names, conversations, strict=True):
        reply = conversation.messages[-1]
        if reply["role"] != ASSISTANT:
            raise NoPreferenceError(EMPTY_REPLY, f"{name!r} ends with a message of role {reply['role']!r}")
        if not _content(reply) and "tool_calls" not in reply:
            raise NoPreferenceError(EMPTY_REPLY, f"{name!r} is empty")
    if kind == COMPARED and conversations[0].messages[-1] == conversations[1].messages[-1]:
        raise NoPreferenceError(EQUAL_REPLIES)
    # Not with a system field, which is a message, and not if a text is a JSON list of messages.
    is_text = all(
        [message.get("content") for message in conversation.messages] == [record.get(_PROMPT), record[name]]
        and isinstance(record[name], str)
        for name, conversation in zip(names, conversations, strict=True)
    )
    second = None
    if kind == COMPARED:
        second = conversations[1]
    return Preference(conversations[0], second, label, is_text)


def _conversation(record: Mapping[str, Any], name: str) -> Conversation:
    """Return the messages up to a reply: the prompt and the reply, or the reply's field if it contains both."""
    reply, prompt = record[name], record.get(_PROMPT)
    if reply is None or (isinstance(reply, str) and not reply.strip()):
        raise NoPreferenceError(EMPTY_REPLY, f"{name!r} is empty")
    is_messages = isinstance(reply, list) or (isinstance(reply, str) and is_json_messages(reply, name))
    if is_messages:
        own = conversation_of({"messages": reply}, "messages").messages
        if prompt is None or any(message["role"] not in (ASSISTANT, "tool") for message in own):
            conversation = conversation_of({**record, "messages": reply}, "messages")
            _check_prompt(prompt, conversation)
            return conversation
    if prompt is None:
        raise NoPreferenceError(NO_COMMON_PROMPT, f"without a prompt, {name!r} must be a list of messages")
    if isinstance(prompt, str) and not prompt.strip():
        raise NoPreferenceError(EMPTY_PROMPT)
    return conversation_of({**record, "completion": reply}, _PROMPT)


def _check_prompt(prompt: Any, conversation: Conversation) -> None:
    """Raise NoPreferenceError unless a complete conversation contains its record's prompt."""
    if prompt is None:
        return
    messages = conversation.messages[:-1]
    if isinstance(prompt, str) and not is_json_messages(prompt, _PROMPT):
        found = any(_content(message) == prompt.strip() for message in messages)
    else:
        # A reply's field may repeat the messages with a system message before them.
        wanted = conversation_of({"messages": prompt}, "messages").messages
        found = messages[len(messages) - len(wanted) :] == wanted
    if not found:
        raise NoPreferenceError(NO_COMMON_PROMPT, "the messages do not contain the prompt")


def _content(message: Message) -> str:
    """Return a message's text without surrounding white space."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(map(part_text, content))
    return content.strip()


def _label(value: Any) -> int:
    """Return a label as 0 or 1; tables of strings spell them."""
    if isinstance(value, str):
        value = _LABELS.get(value.strip().lower())
    if type(value) not in (int, float, bool) or value not in (0, 1):
        raise NoPreferenceError(INVALID_LABEL, "it is neither true nor false")
    return int(value)
