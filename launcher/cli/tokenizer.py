"""The verb ``tokenizer train``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import OmitArgPrefixes, arg

from launcher.cli.console import byte_rate, command, human_bytes, interruptible, progress, say
from launcher.cli.corpus import Corpus, read_so_far, say_left_out
from longctx.errors import DataError

if TYPE_CHECKING:
    from data_pipeline.prepare.documents import Document


def train(
    corpus: OmitArgPrefixes[Corpus],
    *,
    vocab_size: int,
    output: Annotated[Path, arg(metavar="F.model")],
    max_text_bytes: int = 256 << 20,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Train a SentencePiece BPE on a corpus.

    Its byte fallback gives every text back exactly. The same corpus gives the same file.

    Args:
        vocab_size: Number of token ids, 261 or more.
        output: File to write.
        max_text_bytes: Train on a sample of documents above this much text.
        seed: Seed of that sample.
        overwrite: Replace a file that is there.
    """
    from data_pipeline.prepare.train_tokenizer import train_tokenizer

    if output.exists() and not overwrite:
        raise DataError(f"output={output} exists. Name another file, or replace it with --overwrite.")
    source = corpus.open()
    with progress(f"training a tokenizer on {source.spec}", total=source.num_bytes, rate=byte_rate) as update:
        seen = [0, 0]

        def read(documents: int, text_bytes: int) -> None:
            seen[:] = documents, text_bytes
            update(source.bytes_read, note=read_so_far(documents, text_bytes), counted=text_bytes)

        def documents_to_the_end() -> Iterator[Document]:
            yield from source
            # Reading is over; how long the library learns nobody knows.
            learning = f"{read_so_far(seen[0], seen[1])} read, learning {vocab_size:,} pieces"
            update(source.num_bytes, note=learning, counted=seen[1])

        tokenizer = interruptible(
            lambda: train_tokenizer(
                documents_to_the_end(),
                output,
                vocab_size=vocab_size,
                max_text_bytes=max_text_bytes,
                seed=seed,
                progress=read,
            )
        )
    documents, text_bytes = seen
    sampled = ""
    if text_bytes > max_text_bytes:
        sampled = f"a sample of {human_bytes(max_text_bytes)} from "
    say(f"{output}: {tokenizer.vocab_size:,} ids, trained on {sampled}{read_so_far(documents, text_bytes)}.")
    say_left_out(source.skipped, source.left_out.examples)
    say(f"Next: {command('data', 'build', *corpus.arguments(), '--tokenizer', output, '--output', 'DIR')}")
