"""The verbs ``tokenizer train|show``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from launcher.cli.cli_output import (
    Json,
    byte_rate,
    command_line,
    human_bytes,
    interruptible,
    note,
    print_json,
    print_line,
    progress,
    table,
)
from launcher.cli.corpus import CorpusOptions, read_so_far, say_left_out
from launcher.wording import format_count
from longctx.errors import DataError

if TYPE_CHECKING:
    from data_pipeline.prepare.train_tokenizer import TextSample


def train_new_tokenizer(
    corpus: OmitArgPrefixes[CorpusOptions],
    *,
    vocab_size: int,
    output: Annotated[Path, arg(metavar="F.model")],
    kind: Literal["bpe", "unigram", "word", "char", "wordpiece"] = "bpe",
    fim: bool = False,
    mask: bool = False,
    sentinels: int = 0,
    cased: bool = False,
    max_text_bytes: int = 256 << 20,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Train a tokenizer on a corpus: a SentencePiece model, or BERT's WordPiece.

    SentencePiece kinds use byte fallback, which returns every text exactly; WordPiece does not. The same corpus gives
    the same file. Training that is stopped or killed after the corpus was read continues from there with the same
    command.

    Args:
        vocab_size: Number of token ids, 261 or more (wordpiece: 8 or more).
        output: File to write.
        fim: Add three ids for prefix, suffix and middle, required by data.fim_rate.
        mask: Add an id for a masked token, required by train.objective=masked.
        sentinels: Add this many ids for spans removed from a text, required by train.objective=spans.
        kind: bpe for most models; unigram takes thirty times as long to train; word and char for study; wordpiece for
            BERT: a tokenizer.json with [CLS], [SEP] and [MASK].
        cased: With wordpiece, keep upper case and accents.
        max_text_bytes: Train on a sample of documents if the corpus has more text than this.
        seed: Seed for that sample.
        overwrite: Replace an existing file.
    """
    from data_pipeline.prepare.train_tokenizer import train_tokenizer

    if output.exists() and not overwrite:
        raise DataError(f"output={output} exists. Name another file, or replace it with --overwrite.")
    source = corpus.open()
    with progress(f"training a tokenizer on {source.spec}", total=source.num_bytes, rate=byte_rate) as update:
        found: list[tuple[TextSample, bool]] = []

        def read(documents: int, text_bytes: int) -> None:
            update(source.bytes_read, note=read_so_far(documents, text_bytes), amount=text_bytes)

        def learning(sample: TextSample, was_kept: bool) -> None:
            found.append((sample, was_kept))
            # Reading is finished; the library does not report how long its training takes.
            amount = read_so_far(sample.documents, sample.text_bytes)
            update(source.num_bytes, note=f"{amount} read, learning {vocab_size:,} tokens", amount=sample.text_bytes)
            if was_kept:
                note(f"resuming: {amount} of {source.spec} already read")

        tokenizer = interruptible(
            lambda: train_tokenizer(
                source,
                output,
                vocab_size=vocab_size,
                kind=kind,
                fim=fim,
                mask=mask,
                sentinels=sentinels,
                keep_case=cased,
                max_text_bytes=max_text_bytes,
                seed=seed,
                progress=read,
                # Not the fingerprint, which would read every byte again.
                stamp=source.stamp(),
                on_sample=learning,
            )
        )
    ((sample, was_kept),) = found
    _say_trained(output, tokenizer.vocab_size, sample, max_text_bytes)
    # Omitted files are known only if the corpus was read in this process.
    if not was_kept:
        say_left_out(source.skipped, source.left_out.examples)
    print_line(f"Next: {command_line('data', 'build', *corpus.arguments(), '--tokenizer', output, '--output', 'DIR')}")


def _say_trained(output: Path, vocab_size: int, sample: TextSample, max_text_bytes: int) -> None:
    sampled = ""
    if sample.text_bytes > max_text_bytes:
        sampled = f"a sample of {human_bytes(max_text_bytes)} from "
    trained_on = f"{sampled}{read_so_far(sample.documents, sample.text_bytes)}"
    print_line(f"{output}: {vocab_size:,} ids, trained on {trained_on}.")
    if sample.marked:
        print_line(
            f"{format_count(sample.marked, 'document')} with U+2581, SentencePiece's mark for a space: "
            "this tokenizer "
            "encodes it as three bytes, so it decodes exactly."
        )


def show(
    tokenizer: Annotated[Positional[Path], arg(metavar="TOKENIZER")],
    *,
    text: Annotated[str | None, arg(metavar="TEXT")] = None,
    json: Json = False,
) -> None:
    """Show a tokenizer's kind, size, begin and end ids, and how it splits a text.

    Args:
        tokenizer: SentencePiece model, tokenizer.json, Hugging Face folder, checkpoint, run or shard folder.
        text: Text to encode as the start of a document.
    """
    from longctx.tokenizer import load_tokenizer
    from longctx.tokenizer.tokenizer_warnings import frame_warnings

    loaded = load_tokenizer(tokenizer)
    ids = None
    if text is not None:
        ids = loaded.encode_prompt(text)
    if json:
        found = {"kind": loaded.kind, "vocab_size": loaded.vocab_size, "begin": loaded.document_begin}
        found |= {"end": loaded.document_end, "stops": loaded.special.stop_ids, "padding": loaded.padding}
        found |= {"remarks": list(frame_warnings(loaded))}
        print_json(found | {"fingerprint": loaded.fingerprint, "files": sorted(loaded.files), "ids": ids})
        return
    print_line(f"{tokenizer}: {loaded.describe()}")
    print_line(f"Files: {', '.join(sorted(loaded.files))}")
    for message in frame_warnings(loaded):
        print_line(f"Note: {message}")
    if ids is not None:
        print_line(table(["id", "piece"], [[str(token), repr(loaded.piece(token))] for token in ids]))
        if loaded.decode(ids) != text:
            print_line(f"The text does not decode exactly, but to {loaded.decode(ids)!r}.")
