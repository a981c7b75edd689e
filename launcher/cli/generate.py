"""The verb ``generate``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg, create_mutex_group

from launcher.cli.console import note, progress, say, write
from longctx.errors import ConfigError, DataError

if TYPE_CHECKING:
    from longctx.generation.sampling import Greedy, Sample
    from longctx.model.decoder import Decoder
    from longctx.tokenizer import Tokenizer

_PROMPT = create_mutex_group(required=True, title="prompt")


def generate(
    *,
    checkpoint: Annotated[Path, arg(metavar="DIR")],
    prompt: Annotated[str | None, _PROMPT, arg(metavar="TEXT")] = None,
    prompt_file: Annotated[Path | None, _PROMPT, arg(metavar="F|-")] = None,
    max_new_tokens: int,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    tokenizer: Annotated[Path | None, arg(metavar="TOKENIZER")] = None,
) -> None:
    """Continue a prompt.

    The model runs on the CPU, until --max-new-tokens or the document's end.
    Standard output gets the continuation, as it comes, and a newline, nothing else.
    The continuation is greedy unless an option of sampling is given.

    Args:
        checkpoint: Checkpoint, run folder (its newest checkpoint), or Hugging Face folder.
        prompt: The document's beginning; may be empty; --prompt=TEXT if it begins with a dash.
        prompt_file: UTF-8 file with the prompt, to its last newline, of any length; - is standard input.
        max_new_tokens: Tokens to add at most.
        temperature: Below 1 sharper, above 1 flatter, 0 greedy; 1 where another option of sampling is given.
        top_k: Draw from this many likeliest tokens.
        top_p: Draw from the likeliest tokens that reach this probability together.
        seed: The same seed draws the same tokens; 0 unless given.
        dtype: Of the weights and of the computation; bfloat16 takes half the memory.
        tokenizer: For a folder that has none of its own: SentencePiece model, tokenizer.json, or a folder with one.
    """
    strategy = _strategy(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    text = _read_prompt(prompt, prompt_file)
    import torch

    from launcher.checkpoint.tokenizers import check_vocabulary, tokenizer_of
    from longctx.generation.load import find_model, load_model
    from longctx.generation.loop import stream

    folder = find_model(checkpoint)
    own_tokenizer = tokenizer_of(folder, tokenizer)
    with progress(f"loading {folder}"):
        model = load_model(folder, getattr(torch, dtype))
    prompt_ids = own_tokenizer.encode_prompt(text)
    if not prompt_ids:
        raise ConfigError("the prompt is empty, and the tokenizer begins no document with an id. Give a prompt.")
    check_vocabulary(own_tokenizer, model.config)
    _warn_beyond(model, len(prompt_ids) + max_new_tokens)
    ends = set(own_tokenizer.special.stops)
    started = time.monotonic()
    tokens = stream(model, prompt_ids, max_new_tokens, strategy, stop_ids=ends)
    # A bar and the text would share the terminal's last line: the bar is gone when the first token is there.
    with progress(f"reading {len(prompt_ids):,} tokens"):
        first = list(_take(tokens, 1))
    read_seconds = time.monotonic() - started
    ids = _write_text(own_tokenizer, prompt_ids, first, tokens)
    _summarise(ids, ends, read_seconds, time.monotonic() - started)


def _read_prompt(prompt: str | None, path: Path | None) -> str:
    """The prompt's text; DataError for a file that is not there, or not UTF-8."""
    if path is None:
        return prompt or ""
    try:
        if str(path) == "-":
            content = sys.stdin.buffer.read()
        else:
            content = path.read_bytes()
        return content.decode()
    except OSError as error:
        raise DataError(f"--prompt-file {path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"--prompt-file {path} is not UTF-8 at byte {error.start:,}. Convert it first: iconv -t utf-8."
        ) from error


def _take(tokens: Iterator[int], count: int) -> Iterator[int]:
    """Yield at most so many."""
    for _, token in zip(range(count), tokens, strict=False):
        yield token


def _write_text(tokenizer: Tokenizer, prompt_ids: list[int], first: list[int], tokens: Iterator[int]) -> list[int]:
    """Write the text of these tokens as it becomes certain, and a newline; returns all ids.

    Ids that the tokenizer does not have are left out and reported.
    """
    from longctx.generation.text import TextStream

    text = TextStream(tokenizer.decode, prompt_ids)
    ids: list[int] = []
    num_unknown = 0
    for part in (first, tokens):
        for token in part:
            ids.append(token)
            # A model's vocabulary may be padded beyond its tokenizer's.
            if token >= tokenizer.vocab_size:
                num_unknown += 1
            else:
                write(text.add(token))
    say(text.finish())
    if num_unknown:
        note(f"warning: left out {num_unknown} ids that the tokenizer does not have.")
    return ids


def _summarise(ids: list[int], ends: set[int], read_seconds: float, seconds: float) -> None:
    """Say how many tokens came, in what time, and why they ended."""
    rate = ""
    if len(ids) > 1 and seconds > read_seconds:
        rate = f" ({(len(ids) - 1) / (seconds - read_seconds):.1f} a second after the first)"
    end = ""
    if ids and ids[-1] in ends:
        end = ", then the document ended"
    note(f"{len(ids):,} tokens in {seconds:.1f} s{rate}{end}.")


def _strategy(**options: float | None) -> Greedy | Sample:
    """Greedy, or sampling as soon as an option of it is given; ConfigError where an option would do nothing."""
    from longctx.generation.sampling import Greedy, Sample

    given = {name: value for name, value in options.items() if value is not None}
    if given.get("temperature") == 0:
        without_effect = [f"--{name.replace('_', '-')}" for name in given if name != "temperature"]
        if without_effect:
            raise ConfigError(
                f"--temperature 0 is greedy, so {', '.join(without_effect)} would do nothing. Leave one out."
            )
        return Greedy()
    if not given:
        return Greedy()
    return Sample(**given)  # type: ignore[arg-type]


def _warn_beyond(model: Decoder, num_tokens: int) -> None:
    """Warn beyond the model's positions."""
    if num_tokens > model.config.max_positions:
        note(f"warning: up to {num_tokens:,} tokens, but the model is meant for {model.config.max_positions:,}.")
