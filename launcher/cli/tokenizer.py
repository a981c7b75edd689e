"""The verb ``tokenizer train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from launcher.cli.console import command, human_bytes, interruptible, progress, say
from launcher.cli.corpus import Corpus
from launcher.wording import plural


def train(
    corpus: OmitArgPrefixes[Corpus],
    *,
    vocab_size: int,
    output: Annotated[Path, arg(metavar="F.model")],
    max_text_bytes: int = 256 << 20,
    seed: int = 0,
) -> None:
    """Train a SentencePiece BPE on a corpus.

    Its byte fallback gives every text back exactly. The same corpus gives the same file.

    Args:
        vocab_size: Number of token ids, 261 or more.
        output: File to write.
        max_text_bytes: Train on a sample of documents above this much text.
        seed: Seed of that sample.
    """
    from data_pipeline.prepare.train_tokenizer import train_tokenizer

    source = corpus.open()
    with progress(f"training a tokenizer on {source.spec}") as update:
        seen = [0, 0]

        def read(documents: int, text_bytes: int) -> None:
            seen[:] = documents, text_bytes
            update(documents, note=f"{documents:,} documents, {human_bytes(text_bytes)}")

        tokenizer = interruptible(
            lambda: train_tokenizer(
                source, output, vocab_size=vocab_size, max_text_bytes=max_text_bytes, seed=seed, progress=read
            )
        )
    documents, text_bytes = seen
    sampled = ""
    if text_bytes > max_text_bytes:
        sampled = f"a sample of {human_bytes(max_text_bytes)} from "
    read_text = f"{plural(documents, 'document')}, {human_bytes(text_bytes)}"
    say(f"{output}: {tokenizer.vocab_size:,} ids, trained on {sampled}{read_text}.")
    say(f"Next: {command('data', 'build', *corpus.arguments(), '--tokenizer', output, '--output', 'DIR')}")
