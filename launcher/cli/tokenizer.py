"""The verbs ``tokenizer train|show``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from launcher.cli.console import Json, command, human_bytes, interruptible, progress, say, say_json, table
from launcher.cli.corpus import Corpus
from launcher.wording import plural
from longctx.errors import DataError


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
        overwrite: Replace the file if there is one.
    """
    if output.exists() and not overwrite:
        raise DataError(f"{output} exists. Name another file, or replace it with --overwrite.")
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


def show(
    tokenizer: Annotated[Positional[Path], arg(metavar="TOKENIZER")],
    *,
    text: Annotated[str | None, arg(metavar="TEXT")] = None,
    json: Json = False,
) -> None:
    """Show a tokenizer's kind, size, and begin and end ids, and how it cuts a text.

    Args:
        tokenizer: SentencePiece model, tokenizer.json, Hugging Face folder, checkpoint, run or shard folder.
        text: Text to encode as the beginning of a document.
    """
    from longctx.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    ids = None
    if text is not None:
        ids = loaded.encode_prompt(text)
    if json:
        found = {"kind": loaded.kind, "vocab_size": loaded.vocab_size, "begin": loaded.document_begin}
        found |= {"end": loaded.document_end, "stops": loaded.special.stops, "padding": loaded.padding}
        say_json(found | {"fingerprint": loaded.fingerprint, "files": sorted(loaded.files), "ids": ids})
        return
    say(f"{tokenizer}: {loaded.describe()}")
    say(f"Files: {', '.join(sorted(loaded.files))}")
    if ids is not None:
        say(table(["id", "piece"], [[str(token), repr(loaded.piece(token))] for token in ids]))
        if loaded.decode(ids) != text:
            say(f"The text does not come back exactly, but as {loaded.decode(ids)!r}.")
