"""The verb ``generate``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from launcher.cli.console import command, note, progress, say
from longctx.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from longctx.generation.sampling import Greedy, Sample
    from longctx.model.decoder import Decoder
    from longctx.tokenizer import Tokenizer


def generate(
    *,
    checkpoint: Annotated[Path, arg(metavar="DIR")],
    prompt: Annotated[str, arg(metavar="TEXT")],
    max_new_tokens: int,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    tokenizer: Annotated[Path | None, arg(metavar="TOKENIZER")] = None,
) -> None:
    """Continue a prompt.

    The model runs on the CPU in float32, until --max-new-tokens or the document's end.
    Standard output gets the continuation and a newline, nothing else.
    The continuation is greedy unless an option of sampling is given.

    Args:
        checkpoint: Checkpoint, or run folder: its newest checkpoint.
        prompt: The document's beginning; may be empty; --prompt=TEXT if it begins with a dash.
        max_new_tokens: Tokens to add at most.
        temperature: Below 1 sharper, above 1 flatter, 0 greedy; 1 where another option of sampling is given.
        top_k: Draw from this many likeliest tokens.
        top_p: Draw from the likeliest tokens that reach this probability together.
        seed: The same seed draws the same tokens; 0 unless given.
        tokenizer: For a checkpoint that has none of its own: SentencePiece model, tokenizer.json, or a folder with one.
    """
    strategy = _strategy(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    from longctx.checkpoint_format import find_checkpoint
    from longctx.generation.load import load_model
    from longctx.generation.loop import generate as continue_ids

    _refuse_hf_folder(checkpoint)
    folder = find_checkpoint(checkpoint)
    own_tokenizer = _load_tokenizer(folder, tokenizer)
    with progress(f"loading {folder}"):
        model = load_model(folder)
    prompt_ids = own_tokenizer.encode_prompt(prompt)
    if not prompt_ids:
        raise ConfigError("the prompt is empty, and the tokenizer begins no document with an id. Give a prompt.")
    _check_limits(model, own_tokenizer, len(prompt_ids) + max_new_tokens)
    started = time.monotonic()
    with progress(f"continuing {len(prompt_ids):,} tokens"):
        ids = continue_ids(model, prompt_ids, max_new_tokens, strategy, stop_ids=set(own_tokenizer.special.stops))
    seconds = time.monotonic() - started
    say(_continuation(own_tokenizer, prompt_ids, ids))
    end = ""
    if ids and ids[-1] in own_tokenizer.special.stops:
        end = ", then the document ended"
    note(f"{len(ids):,} tokens in {seconds:.1f} s{end}.")


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


def _refuse_hf_folder(folder: Path) -> None:
    """Raise CheckpointError for a Hugging Face folder, with the way in."""
    from longctx.checkpoint_format import MANIFEST

    if (folder / "config.json").is_file() and not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} is a Hugging Face folder, not a checkpoint.\n"
            f"Convert it first: {command('convert', '--from', 'hf', folder, 'OUT')}"
        )


def _load_tokenizer(checkpoint: Path, chosen: Path | None) -> Tokenizer:
    """The chosen tokenizer, else the checkpoint's own."""
    from longctx.tokenizer import load_tokenizer
    from longctx.tokenizer.load import has_tokenizer

    if chosen is not None:
        return load_tokenizer(chosen)
    if not has_tokenizer(checkpoint):
        raise CheckpointError(f"{checkpoint} has no tokenizer of its own. Name one: --tokenizer F")
    return load_tokenizer(checkpoint)


def _check_limits(model: Decoder, tokenizer: Tokenizer, num_tokens: int) -> None:
    """Raise ConfigError for a tokenizer with more ids than the model; warn beyond the model's positions."""
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model only {model.config.vocab_size}. "
            "Take the tokenizer that the model was trained with."
        )
    if num_tokens > model.config.max_positions:
        note(f"warning: up to {num_tokens:,} tokens, but the model is meant for {model.config.max_positions:,}.")


def _continuation(tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int]) -> str:
    """The text that follows the prompt's; ids that the tokenizer does not have are left out and reported."""
    # A model's vocabulary may be padded beyond its tokenizer's.
    known = [i for i in ids if i < tokenizer.vocab_size]
    if len(known) < len(ids):
        note(f"warning: left out {len(ids) - len(known)} ids that the tokenizer does not have.")
    # Decoded together: some tokenizers drop the first space of whatever they are given.
    prompt, whole = tokenizer.decode(prompt_ids), tokenizer.decode(prompt_ids + known)
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    # The last character of the prompt may be completed by the first new byte.
    return tokenizer.decode(known)
