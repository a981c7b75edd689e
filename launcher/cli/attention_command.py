"""The verb ``attention``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from launcher.cli.cli_output import print_line, progress
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
    """Draw one head's attention in one layer, or the effect of positions on tokens.

    A picture shows each key block's share in each query block's attention, and the masked area; a CSV file with the
    numbers is written next to it. A text with at most 512 tokens also gets a page that shows, for each token, the
    tokens it attends to. The model runs on the CPU.

    Args:
        checkpoint: Checkpoint, run folder (its newest checkpoint), or Hugging Face folder.
        text: UTF-8 file, read as one document; or a folder with text or shards, packed into one row.
        layer: Layer index, from 0.
        head: Query head index, from 0.
        output: Folder for the files.
        length: Row length in tokens; default: the full file. With --positions, positions to draw; default: 512. Not
            with --cross.
        blocks: Maximum blocks per side of the picture.
        cross: Draw cross attention in a model with an encoder, which reads the text: target against source.
        target: With --cross, a file with the target text; default: the model's own output.
        positions: Draw the vectors that the model adds to tokens for their positions; needs no text, layer or head.
        tokenizer: For a folder without its own: SentencePiece model, tokenizer.json, or a folder with one.
    """
    # An option that the chosen picture does not depend on is rejected, so that no user misreads the result.
    if positions:
        given_options = {"--text": text, "--layer": layer, "--head": head, "--cross": cross or None, "--target": target}
        _refuse("--positions plots no attention", given_options | {"--blocks": blocks, "--tokenizer": tokenizer})
        _draw_positions(checkpoint, output, length)
        return
    if text is None or layer is None or head is None:
        raise ConfigError("attention needs --text F --layer N --head N, or --positions.")
    if cross:
        _refuse("--cross plots all tokens on both sides", {"--length": length, "--blocks": blocks})
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
        raise ConfigError("--target is the source's target text: it needs --cross.")
    from launcher.evaluation.attention_map import AttentionMapOptions, draw_attention

    # Applied late: None shows that --blocks was left out, which the other pictures require.
    if blocks is None:
        blocks = AttentionMapOptions.blocks
    options = AttentionMapOptions(
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
        print_line(str(path))


def _draw_cross(*, text: Path, **options: Any) -> None:
    """Draw cross attention; the options are the fields of ``CrossOptions``."""
    from launcher.evaluation.cross_attention import CrossOptions, draw_cross_attention

    cross_options = CrossOptions(text=text, **options)
    with progress(f"reading {text}"):
        paths = draw_cross_attention(cross_options)
    for path in paths:
        print_line(str(path))


def _refuse(why: str, options: Mapping[str, object]) -> None:
    """Raise ConfigError if any of the options is set."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"{why}: leave out {' and '.join(given)}.")


def _draw_positions(checkpoint: Path, output: Path, length: int | None) -> None:
    from launcher.evaluation.position_plots import PositionOptions, draw_positions

    for path in draw_positions(PositionOptions(checkpoint=checkpoint, output=output, length=length)):
        print_line(str(path))
