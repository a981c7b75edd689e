"""The verb ``generate``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, arg, create_mutex_group

from launcher.cli.choosing import Choosing
from launcher.cli.console import note, progress, say, write
from launcher.cli.prompts import Prompt, read_prompt, read_prompts
from launcher.wording import plural
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from longctx.model.decoder import Decoder
    from longctx.tokenizer import Tokenizer

_PROMPT = create_mutex_group(required=True, title="prompt")


def generate(
    *,
    checkpoint: Annotated[Path, arg(metavar="DIR")],
    prompt: Annotated[str | None, _PROMPT, arg(metavar="TEXT")] = None,
    prompt_file: Annotated[Path | None, _PROMPT, arg(metavar="F|-")] = None,
    prompts_file: Annotated[Path | None, _PROMPT, arg(metavar="F|-")] = None,
    max_new_tokens: int,
    choosing: OmitArgPrefixes[Choosing],
    max_sequences: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    tokenizer: Annotated[Path | None, arg(metavar="TOKENIZER")] = None,
) -> None:
    """Continue a prompt, or many.

    The model runs on the CPU, until --max-new-tokens or the document's end.
    Standard output gets the continuation, as it comes, and a newline, nothing else.
    The continuation is greedy unless an option of sampling or --beams is given.

    Args:
        checkpoint: Checkpoint, run folder (its newest checkpoint), or Hugging Face folder.
        prompt: The document's beginning; may be empty; --prompt=TEXT if it begins with a dash.
        prompt_file: UTF-8 file with the prompt, to its last newline, of any length; - is standard input.
        prompts_file: JSON lines with a "prompt" each; a JSON line comes out for each as soon as it has ended.
        max_new_tokens: Tokens to add at most.
        choosing: How tokens are chosen.
        max_sequences: Prompts of --prompts-file under way together; 8 unless given.
        dtype: Of the weights and of the computation; bfloat16 takes half the memory.
        tokenizer: For a folder that has none of its own: SentencePiece model, tokenizer.json, or a folder with one.
    """
    if max_sequences is not None and prompts_file is None:
        raise ConfigError("--max-sequences is for --prompts-file: one prompt has no other beside it. Leave it out.")
    options: dict[str, Any] = {"strategy": choosing.strategy(), "penalties": choosing.penalties()}
    if prompts_file is not None:
        prompts = read_prompts(prompts_file)
    else:
        prompts = [Prompt(read_prompt(prompt, prompt_file), {})]
    import torch

    from launcher.checkpoint.tokenizers import check_vocabulary, known_decoder, tokenizer_of
    from longctx.generation.load import find_model, load_model
    from longctx.generation.stop_strings import StopStrings, check_strings

    # Before the model is loaded, which may take minutes.
    check_strings(choosing.stop)
    folder = find_model(checkpoint)
    own_tokenizer = tokenizer_of(folder, tokenizer)
    with progress(f"loading {folder}"):
        model = load_model(folder, getattr(torch, dtype))
    prompt_ids = [_encode(own_tokenizer, of_one.text) for of_one in prompts]
    check_vocabulary(own_tokenizer, model.config)
    _warn_beyond(model, max(map(len, prompt_ids)) + max_new_tokens)
    options["stop_ids"] = set(own_tokenizer.special.stops)
    if choosing.stop:
        options["stop_strings"] = StopStrings(known_decoder(own_tokenizer), choosing.stop)
    if prompts_file is None:
        _continue_one(model, own_tokenizer, prompt_ids[0], max_new_tokens, choosing.stop, options)
    else:
        if max_sequences is not None:
            options["max_sequences"] = max_sequences
        _continue_all(model, own_tokenizer, prompts, prompt_ids, max_new_tokens, choosing.stop, options)


def _continue_one(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    max_new_tokens: int,
    stops: Sequence[str],
    options: dict[str, Any],
) -> None:
    """Write one continuation as it comes."""
    from longctx.generation.loop import stream

    started = time.monotonic()
    tokens = stream(model, prompt_ids, max_new_tokens, **options)
    # A bar and the text would share the terminal's last line: the bar is gone when the first token is there.
    with progress(f"reading {len(prompt_ids):,} tokens"):
        first = list(_take(tokens, 1))
    read_seconds = time.monotonic() - started
    ids = _write_text(tokenizer, prompt_ids, first, tokens, stops)
    _summarise(ids, options["stop_ids"], read_seconds, time.monotonic() - started)


def _continue_all(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    prompt_ids: list[list[int]],
    max_new_tokens: int,
    stops: Sequence[str],
    options: dict[str, Any],
) -> None:
    """Write a JSON line for each prompt as soon as its continuation has ended."""
    from longctx.generation.batch import generate_batch

    started, num_tokens, num_unknown = time.monotonic(), 0, 0
    note(f"continuing {plural(len(prompts), 'prompt')} …")
    for index, ids in generate_batch(model, prompt_ids, max_new_tokens, **options):
        text = _Text(tokenizer, prompt_ids[index], stops)
        continuation = "".join([text.add(token) for token in ids]) + text.finish()
        result = {**prompts[index].fields, "index": index, "continuation": continuation, "tokens": len(ids)}
        say(json.dumps(result, ensure_ascii=False))
        num_tokens += len(ids)
        num_unknown += text.num_unknown
    _warn_of_unknown(num_unknown)
    note(f"{plural(len(prompts), 'prompt')}, {num_tokens:,} tokens in {time.monotonic() - started:.1f} s.")


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    prompt_ids = tokenizer.encode_prompt(text)
    if not prompt_ids:
        raise ConfigError("the prompt is empty, and the tokenizer begins no document with an id. Give a prompt.")
    return prompt_ids


def _take(tokens: Iterator[int], count: int) -> Iterator[int]:
    """Yield at most so many."""
    for _, token in zip(range(count), tokens, strict=False):
        yield token


def _write_text(
    tokenizer: Tokenizer, prompt_ids: list[int], first: list[int], tokens: Iterator[int], stops: Sequence[str]
) -> list[int]:
    """Write the text of these tokens as it becomes certain, and a newline; returns all ids."""
    text = _Text(tokenizer, prompt_ids, stops)
    ids: list[int] = []
    for part in (first, tokens):
        for token in part:
            ids.append(token)
            write(text.add(token))
    say(text.finish())
    _warn_of_unknown(text.num_unknown)
    return ids


class _Text:
    """The text of a continuation's tokens, to its first stop string. What ``add`` and ``finish`` return is, joined, it.

    Ids that the tokenizer does not have are left out and counted.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], stops: Sequence[str]) -> None:
        from longctx.generation.stop_strings import TextBeforeStop
        from longctx.generation.text import TextStream

        self._vocab_size = tokenizer.vocab_size
        self._text = TextStream(tokenizer.decode, prompt_ids)
        self._gate = TextBeforeStop(stops)
        self.num_unknown = 0

    def add(self, token: int) -> str:
        """What this token made certain."""
        # A model's vocabulary may be padded beyond its tokenizer's.
        if token >= self._vocab_size:
            self.num_unknown += 1
            return ""
        return self._gate.add(self._text.add(token))

    def finish(self) -> str:
        """What is left."""
        return self._gate.add(self._text.finish()) + self._gate.finish()


def _warn_of_unknown(count: int) -> None:
    if count:
        note(f"warning: left out {count} ids that the tokenizer does not have.")


def _summarise(ids: list[int], ends: set[int], read_seconds: float, seconds: float) -> None:
    """Say how many tokens came, in what time, and why they ended."""
    rate = ""
    if len(ids) > 1 and seconds > read_seconds:
        rate = f" ({(len(ids) - 1) / (seconds - read_seconds):.1f} a second after the first)"
    end = ""
    if ids and ids[-1] in ends:
        end = ", then the document ended"
    note(f"{len(ids):,} tokens in {seconds:.1f} s{rate}{end}.")


def _warn_beyond(model: Decoder, num_tokens: int) -> None:
    """Warn beyond the model's positions."""
    if num_tokens > model.config.max_positions:
        note(f"warning: up to {num_tokens:,} tokens, but the model is meant for {model.config.max_positions:,}.")
