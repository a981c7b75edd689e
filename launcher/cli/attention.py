"""The verb ``attention``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from launcher.cli.console import progress, say


def attention(
    *,
    checkpoint: Annotated[Path, arg(metavar="DIR")],
    text: Annotated[Path, arg(metavar="F|DIR")],
    layer: int,
    head: int,
    output: Annotated[Path, arg(metavar="DIR")],
    length: int | None = None,
    blocks: int = 96,
    tokenizer: Annotated[Path | None, arg(metavar="TOKENIZER")] = None,
) -> None:
    """Draw what a head of a layer attends to.

    A picture shows the share of each block of keys in the attention of each block of queries, and what the mask
    forbids; its CSV stands beside it. A text of 512 tokens or fewer also gets a page on which each token shows what it
    attends to. The model runs on the CPU.

    Args:
        checkpoint: Checkpoint, run folder (its newest checkpoint), or Hugging Face folder.
        text: UTF-8 file, one document; or a folder of text or shards, whose documents are packed into one row.
        layer: Counted from 0.
        head: Query head, counted from 0.
        output: Folder for the files.
        length: Tokens of the row; the whole file unless given.
        blocks: Blocks on a side of the picture, at most.
        tokenizer: For a folder that has none of its own: SentencePiece model, tokenizer.json, or a folder with one.
    """
    from launcher.evaluation.attention import AttentionOptions, draw_attention

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
