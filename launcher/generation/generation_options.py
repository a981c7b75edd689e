"""Options for ``generate``, checked for consistency before any file is opened."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from launcher.evaluation.computation import Computation
from launcher.evaluation.model_source import ModelSource, check_positions
from longctx.errors import ConfigError, DataError
from longctx.generation.beams import Beams
from longctx.generation.penalties import Penalties
from longctx.generation.sampling import Greedy, Sampling
from longctx.generation.stop_strings import check_strings
from longctx.tokenizer.pair_ids import source_ids
from longctx.untrusted.strict_json import parse_json


@dataclass(frozen=True, kw_only=True)
class GenerationCommandOptions(Computation):
    """Options for one ``generate`` call."""

    checkpoint: Path
    prompts: PromptSource
    max_new_tokens: int
    strategy: Greedy | Sampling | Beams = field(default_factory=Greedy)
    penalties: Penalties = field(default_factory=Penalties)
    stop_strings: tuple[str, ...] = ()
    """Stop strings: a text ends before the first one."""
    max_sequences: int | None = None
    """Maximum prompts from a file to continue together; by default as many as memory holds, up to a limit."""
    output: Path | None = None
    """Output file; standard output if unset."""
    tokenizer: Path | None = None
    beyond_positions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_strings(self.stop_strings)
        if self.prompts.system and not self.prompts.chat:
            raise ConfigError("--system sets a chat's first turn, so it needs --chat.")
        if self.prompts.is_missing and not self.prompts.chat:
            raise ConfigError(
                "no prompt is given. Give --prompt TEXT, --prompt-file F or --prompts-file F; --chat without these "
                "options reads one turn per line from standard input. A model of images needs --image FILE.png."
            )
        if self.talks and self.max_new_tokens == 0:
            raise ConfigError("--max-new-tokens 0: a chat needs replies. Give --max-new-tokens 256.")
        if self.max_new_tokens < 0:
            raise ConfigError(f"--max-new-tokens {self.max_new_tokens} must not be negative.")
        if not self.has_many and self.max_sequences is not None:
            raise ConfigError("--max-sequences is for --prompts-file: a single prompt has no batch. Leave it out.")
        if self.max_sequences is not None and isinstance(self.strategy, Beams):
            raise ConfigError("--beams searches one prompt at a time, so --max-sequences would have no effect.")
        if self.max_sequences is not None and self.max_sequences < 1:
            raise ConfigError(f"--max-sequences {self.max_sequences} must be at least 1.")
        # Check the path now: hours of generation must not fail at the first write.
        if self.output is not None:
            check_new_file(self.output)

    @property
    def has_many(self) -> bool:
        """True if the prompts come from a file with one prompt per line."""
        return self.prompts.lines is not None

    @property
    def talks(self) -> bool:
        """True if a user types the turns of a chat."""
        return self.prompts.is_missing


def check_new_file(path: Path) -> None:
    """Raise ConfigError unless a new file can be created there."""
    if path.exists():
        raise ConfigError(f"--output {path} already exists. Name another file, or remove it.")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: the folder {path.parent} does not exist. Create it first.")


_EXAMPLE = 'Write lines like {"prompt": "def main("}.'


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """Prompt source: exactly one of the first three fields, or no field for a chat typed by a user."""

    text: str | None = None
    file: Path | None = None
    """Text file, read to its last newline; - is standard input."""
    lines: Path | None = None
    """JSON lines with one "prompt" each, or for a chat with "messages"; - is standard input."""
    chat: bool = False
    """Treat a text as a user's turn and render it by the model's chat template."""
    system: str = ""
    """System turn for a chat."""

    @property
    def is_missing(self) -> bool:
        """True if no text, file or lines are given."""
        return self.text is None and self.file is None and self.lines is None

    def read(self) -> list[PromptLine]:
        """Read the prompts; raise ConfigError for a file that is missing, not UTF-8, or has a line without a prompt."""
        if self.lines is not None:
            return _read_lines(self.lines, chat=self.chat)
        if self.file is not None:
            return [PromptLine(_read_text(self.file, "--prompt-file"), {})]
        if self.text is not None:
            return [PromptLine(self.text, {})]
        return []


@dataclass(frozen=True)
class PromptLine:
    """Prompt with the other fields from its line."""

    text: str
    fields: dict[str, Any]
    """All fields from its line, returned with the continuation."""


def encode_prompts(source: PromptSource, prompts: Sequence[PromptLine], model_source: ModelSource) -> list[array[int]]:
    """Return each prompt's ids, in four bytes each; raise ConfigError for a prompt without ids, or invalid text."""
    # Encode each text once: a file may repeat a prompt, and a long one takes a while.
    encode: Callable[[str], list[int]] = model_source.tokenizer.encode_prompt
    if model_source.model.encoder_layers:
        # The encoder reads a complete text.
        encode = partial(source_ids, model_source.tokenizer)
    found: dict[str, array[int]] = {}
    for index, prompt in enumerate(prompts):
        if prompt.text not in found:
            try:
                found[prompt.text] = array("i", encode(prompt.text))
            except DataError as error:
                raise ConfigError(f"{prompt_place(source, index)}: {error}") from error
        if not found[prompt.text]:
            raise ConfigError(
                f"{prompt_place(source, index)} is empty, and the tokenizer has no begin token. Give a prompt."
            )
    return [found[prompt.text] for prompt in prompts]


def check_space(
    source: PromptSource,
    lengths: Sequence[int],
    max_new_tokens: int,
    model_source: ModelSource,
    *,
    allow_longer: bool,
) -> None:
    """Raise ConfigError if a prompt with its answer has more tokens than the model has positions."""
    num_positions = model_source.model.max_positions
    if model_source.model.encoder_layers:
        # The source is a separate sequence, and the answer starts with one id.
        lengths = [max(length - max_new_tokens, 1) for length in lengths]
    too_long = [index for index, length in enumerate(lengths) if length + max_new_tokens > num_positions]
    if not too_long:
        return
    # Report the longest prompt: an answer limit that fits it fits all.
    longest = max(too_long, key=lambda index: lengths[index])
    length = lengths[longest]
    many = ""
    if len(lengths) > 1:
        many = f" ({len(too_long)} of {len(lengths)} prompts are too long; this is the longest)"
    shorter = "begin a new chat" if source.is_missing else "give a shorter prompt"
    hint = shorter.capitalize()
    if length < num_positions:
        hint = f"Use --max-new-tokens {num_positions - length}, or {shorter}"
    check_positions(
        model_source.model,
        length + max_new_tokens,
        request=f"{prompt_place(source, longest)}: {length:,} tokens, {length + max_new_tokens:,} with its "
        f"answer{many}",
        hint=hint,
        allow_longer=allow_longer,
    )


def prompt_place(source: PromptSource, index: int) -> str:
    """Return a prompt's name for messages."""
    if source.lines is not None:
        return f"--prompts-file {source.lines}, line {index + 1}"
    if source.file is not None:
        return f"--prompt-file {source.file}"
    if source.is_missing:
        return "the chat"
    return "the prompt"


def _read_lines(path: Path, *, chat: bool) -> list[PromptLine]:
    """Read one prompt per line, ``{"prompt": TEXT, …}``; raise ConfigError with an invalid line's number."""
    # Ignore empty lines at the end. One in between may be a lost prompt.
    content = _read_text(path, "--prompts-file").rstrip()
    if not content:
        raise ConfigError(f'--prompts-file {path} has no prompt. Write one per line: {{"prompt": "def main("}}')
    # splitlines() would also split at characters that JSON text may contain.
    lines = content.split("\n")
    line_names = [f"--prompts-file {path}, line {number}" for number in range(1, len(lines) + 1)]
    return [_prompt(line, where, chat=chat) for line, where in zip(lines, line_names, strict=True)]


def _prompt(line: str, where: str, *, chat: bool) -> PromptLine:
    if not line.strip():
        raise ConfigError(f"{where} is empty. {_EXAMPLE}")
    try:
        fields = parse_json(line.encode())
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}). {_EXAMPLE}") from error
    if isinstance(fields, dict) and "messages" in fields:
        if not chat:
            raise ConfigError(f'{where} has "messages", which need a chat template: give --chat.')
        # The messages replace the prompt text.
        return PromptLine("", fields)
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise ConfigError(f'{where} has no text under "prompt". {_EXAMPLE}')
    return PromptLine(fields["prompt"], fields)


def _read_text(path: Path, option: str) -> str:
    try:
        # Read bytes from standard input too: its text layer may not be UTF-8.
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
