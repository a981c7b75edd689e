"""The verb ``attention``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from launcher.cli.console import progress, say
from longctx.errors import ConfigError


def attention(
    *,
    checkpoint: Annotated[Path, arg(metavar="DIR")],
    output: Annotated[Path, arg(metavar="DIR")],
    text: Annotated[Path | None, arg(metavar="F|DIR", help_behavior_hint="(required)")] = None,
    layer: Annotated[int | None, arg(help_behavior_hint="(required)")] = None,
    head: Annotated[int | None, arg(help_behavior_hint="(required)")] = None,
    length: int | None = None,
    blocks: Annotated[int | None, arg(help_behavior_hint="(default: 96)")] = None,
    cross: bool = False,
    target: Annotated[Path | None, arg(metavar="F")] = None,
    positions: bool = False,
    tokenizer: Annotated[Path | None, arg(metavar="TOKENIZER")] = None,
) -> None:
    """Draw what a head of a layer attends to, or what positions add to tokens.

    A picture shows the share of each block of keys in the attention of each block of queries, and what the mask
    forbids; its CSV stands beside it. A text of 512 tokens or fewer also gets a page on which each token shows what it
    attends to. The model runs on the CPU.

    Args:
        checkpoint: Checkpoint, run folder (its newest checkpoint), or Hugging Face folder.
        text: UTF-8 file, one document; or a folder of text or shards, whose documents are packed into one row.
        layer: Counted from 0.
        head: Query head, counted from 0.
        output: Folder for the files.
        length: Tokens of the row; the whole file unless given. With --positions so many; 512 unless given. Not with
            --cross.
        blocks: Blocks on a side of the picture, at most.
        cross: Draw cross attention of a model with an encoder, which reads the text: target against source.
        target: With --cross the text that is written of it; what the model writes unless given.
        positions: Draw what the model adds to its tokens for their positions, which needs no text, layer or head.
        tokenizer: For a folder that has none of its own: SentencePiece model, tokenizer.json, or a folder with one.
    """
    if positions:
        asked = {"--text": text, "--layer": layer, "--head": head, "--cross": cross or None, "--target": target}
        _refuse("--positions draws no attention", asked | {"--blocks": blocks, "--tokenizer": tokenizer})
        _draw_positions(checkpoint, output, length)
        return
    if text is None or layer is None or head is None:
        raise ConfigError("attention needs --text F --layer N --head N, or --positions.")
    if cross:
        _refuse("--cross draws every token of both sides", {"--length": length, "--blocks": blocks})
        _draw_cross(
            checkpoint=checkpoint,
            text=text,
            target=target,
            layer=layer,
            head=head,
            output=output,
            tokenizer=tokenizer,
        )
        return
    if target is not None:
        raise ConfigError("--target is what is written of a source: it needs --cross.")
    from launcher.evaluation.attention import AttentionOptions, draw_attention

    if blocks is None:
        blocks = AttentionOptions.blocks
    options = AttentionOptions(
        checkpoint=checkpoint,
        text=text,
        layer=layer,
        head=head,
        output=output,
        length=length,
        blocks=blocks,
        tokenizer=tokenizer,
    )
    with progress(f"reading {text}"):
        paths = draw_attention(options)
    for path in paths:
        say(str(path))


def _draw_cross(*, text: Path, **options: Any) -> None:
    """Draw cross attention; the options are those of ``CrossOptions``."""
    from launcher.evaluation.cross_attention import CrossOptions, draw_cross_attention

    asked = CrossOptions(text=text, **options)
    with progress(f"reading {text}"):
        paths = draw_cross_attention(asked)
    for path in paths:
        say(str(path))


def _refuse(why: str, options: Mapping[str, object]) -> None:
    """Raise ConfigError if any of the options is given; options that are not given are None."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"{why}: leave out {' and '.join(given)}.")


def _draw_positions(checkpoint: Path, output: Path, length: int | None) -> None:
    """Draw the position embeddings."""
    from launcher.evaluation.position_figures import PositionOptions, draw_positions

    for path in draw_positions(PositionOptions(checkpoint=checkpoint, output=output, length=length)):
        say(str(path))
