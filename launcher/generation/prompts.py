"""Prompts of ``generate``: of the command line, of a text file, or many of a file of JSON lines."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.evaluation.opened import OpenedModel, check_positions
from longctx.chat.conversation import Conversation, Message, NoConversationError, conversation_of
from longctx.chat.encode import ChatEncoder, NotCountedError
from longctx.errors import ConfigError, DataError
from longctx.untrusted.reading import parse_json

_EXAMPLE = 'Write lines like {"prompt": "def main("}.'


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """Where prompts come from: one of the three."""

    text: str | None = None
    file: Path | None = None
    """A text, to its last newline; - is standard input."""
    lines: Path | None = None
    """JSON lines with a "prompt" each, or for a chat with "messages"; - is standard input."""
    chat: bool = False
    """Whether a text is what a user says, and the model's chat template renders it."""
    system: str = ""
    """The system turn of a chat."""

    def read(self) -> list[Prompt]:
        """The prompts; ConfigError for a file that is not there, is not UTF-8, or has a line without a prompt."""
        if self.lines is not None:
            return _read_lines(self.lines, chat=self.chat)
        if self.file is not None:
            return [Prompt(_read_text(self.file, "--prompt-file"), {})]
        return [Prompt(self.text or "", {})]


@dataclass(frozen=True)
class Prompt:
    """One of many prompts."""

    text: str
    fields: dict[str, Any]
    """All that its line says: it comes back with the continuation."""


def encode_chats(
    source: PromptSource, prompts: Sequence[Prompt], opened: OpenedModel
) -> tuple[list[array[int]], set[int]]:
    """The ids of each conversation with the prompt for a reply, and the ids that end one.

    ConfigError for a conversation that is none, or that the chat template refuses; DataError for a model without one.
    """
    encoder = ChatEncoder(opened.tokenizer)
    system: tuple[Message, ...] = ()
    if source.system:
        system = ({"role": "system", "content": source.system},)
    found = []
    try:
        for index, prompt in enumerate(prompts):
            try:
                if "messages" in prompt.fields:
                    conversation = conversation_of(prompt.fields, "messages")
                else:
                    conversation = Conversation(({"role": "user", "content": prompt.text},))
                conversation = replace(conversation, messages=system + conversation.messages)
                found.append(array("i", encoder.encode_prompt(conversation).tolist()))
            except (NoConversationError, NotCountedError) as error:
                raise ConfigError(f"{_named(source, index)}: {error}.") from error
        return found, encoder.turn_ends()
    finally:
        encoder.close()


def encode_prompts(source: PromptSource, prompts: Sequence[Prompt], opened: OpenedModel) -> list[array[int]]:
    """The ids of each prompt, in four bytes each; ConfigError for one without any, or that is no text."""
    # A file may say one prompt many times, and a long prompt takes a while.
    encode = opened.tokenizer.encode_prompt
    found: dict[str, array[int]] = {}
    for index, prompt in enumerate(prompts):
        if prompt.text not in found:
            try:
                found[prompt.text] = array("i", encode(prompt.text))
            except DataError as error:
                raise ConfigError(f"{_named(source, index)}: {error}") from error
        if not found[prompt.text]:
            raise ConfigError(
                f"{_named(source, index)} is empty, and the tokenizer begins no document with an id. Give a prompt."
            )
    return [found[prompt.text] for prompt in prompts]


def check_space(
    source: PromptSource, lengths: Sequence[int], max_new_tokens: int, opened: OpenedModel, *, beyond: bool
) -> None:
    """ConfigError where a prompt and its answer have more tokens than the model has positions."""
    num_positions = opened.model.max_positions
    too_long = [index for index, length in enumerate(lengths) if length + max_new_tokens > num_positions]
    if not too_long:
        return
    longest = max(too_long, key=lambda index: lengths[index])
    length = lengths[longest]
    many = ""
    if len(lengths) > 1:
        many = f" ({len(too_long)} of {len(lengths)} prompts are too long; this is the longest)"
    advice = "Give a shorter prompt"
    if length < num_positions:
        advice = f"Take --max-new-tokens {num_positions - length}, or a shorter prompt"
    check_positions(
        opened.model,
        length + max_new_tokens,
        asked=f"{_named(source, longest)}: {length:,} tokens, {length + max_new_tokens:,} with its answer{many}",
        advice=advice,
        beyond=beyond,
    )


def _named(source: PromptSource, index: int) -> str:
    """What a message calls a prompt."""
    if source.lines is not None:
        return f"--prompts-file {source.lines}, line {index + 1}"
    if source.file is not None:
        return f"--prompt-file {source.file}"
    return "the prompt"


def _read_lines(path: Path, *, chat: bool) -> list[Prompt]:
    """One prompt a line, ``{"prompt": TEXT, …}``; ConfigError for a line that is none, by its number."""
    # Empty lines at the end are no lines. One in between may be a prompt that was lost.
    content = _read_text(path, "--prompts-file").rstrip()
    if not content:
        raise ConfigError(f'--prompts-file {path} has no prompt. Write one a line: {{"prompt": "def main("}}')
    # Not splitlines: a JSON text may hold the other characters that it takes for the end of a line.
    lines = content.split("\n")
    places = [f"--prompts-file {path}, line {number}" for number in range(1, len(lines) + 1)]
    return [_prompt(line, where, chat=chat) for line, where in zip(lines, places, strict=True)]


def _prompt(line: str, where: str, *, chat: bool) -> Prompt:
    if not line.strip():
        raise ConfigError(f"{where} is empty. {_EXAMPLE}")
    try:
        fields = parse_json(line.encode())
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error}). {_EXAMPLE}") from error
    if isinstance(fields, dict) and "messages" in fields:
        if not chat:
            raise ConfigError(f'{where} has "messages": a chat template renders these, with --chat.')
        return Prompt("", fields)
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise ConfigError(f'{where} has no text under "prompt". {_EXAMPLE}')
    return Prompt(fields["prompt"], fields)


def _read_text(path: Path, option: str) -> str:
    try:
        if str(path) == "-":
            content = sys.stdin.buffer.read()
        else:
            content = path.read_bytes()
        return content.decode()
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{option} {path} is not UTF-8 at byte {error.start:,}. Convert it first: iconv -t utf-8."
        ) from error
