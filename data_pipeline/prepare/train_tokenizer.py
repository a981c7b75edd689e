"""Train a SentencePiece model on a corpus."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import sentencepiece as spm

from data_pipeline.prepare.documents import Document, Progress
from data_pipeline.prepare.sample import Sample, draw_sample, load_sample, sample_file, save_sample
from longctx.errors import DataError
from longctx.files import write_atomically
from longctx.tokenizer.chunks import SPACE_MARK
from longctx.tokenizer.sentencepiece_model import DOCUMENT_BEGIN, DOCUMENT_END, PADDING, SentencePieceTokenizer
from longctx.tokenizer.special import FIM_TOKENS

KINDS = ("bpe", "unigram", "word", "char")
SMALLEST_VOCAB_SIZE = 4 + 256 + 1
"""Unknown, begin, end and padding; one id for each byte; one piece to learn."""

_TRAINING_OPTIONS = {
    # These options make decoding exact: any text comes back, spaces included.
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "character_coverage": 0.9999,
    "max_sentence_length": 1 << 30,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": 3,
    "bos_piece": DOCUMENT_BEGIN,
    "eos_piece": DOCUMENT_END,
    "pad_piece": PADDING,
    # SentencePiece would write its progress straight to stderr.
    "minloglevel": 3,
}


_THREADS = {"unigram": 16}
"""Of the training; 1 of other kinds, which gain nothing from more.

Never the machine's number of cores: the sums of Unigram's training are rounded by thread, and the number itself ends up
in the model's file. So 16 threads share whatever cores there are.
"""


def train_tokenizer(
    documents: Iterable[Document],
    output: str | Path,
    *,
    vocab_size: int,
    kind: str = "bpe",
    fim: bool = False,
    max_text_bytes: int = 256 << 20,
    seed: int = 0,
    progress: Progress | None = None,
    stamp: dict[str, Any] | None = None,
    on_sample: Callable[[Sample, bool], None] | None = None,
) -> SentencePieceTokenizer:
    """Train a model on ``documents`` and write it to ``output``, all at once; the same input gives the same bytes.

    ``kind`` is ``bpe``, ``unigram``, ``word`` or ``char``. With ``fim`` three of the ids stand before the parts of a
    document whose middle is to be filled in. Training holds the text in memory. Above ``max_text_bytes``
    it therefore uses a sample of whole documents, drawn by a hash of ``seed`` and text. Raises ``DataError`` for a
    ``vocab_size`` that the corpus cannot fill.

    With ``stamp``, which says what the documents are, the sample is kept beside ``output`` until the model is there: a
    training that was killed takes it from there, and reads no document. ``on_sample`` is told the sample and whether it
    was kept.
    """
    if kind not in KINDS:
        raise DataError(f"kind={kind} is not known. Try {', '.join(KINDS)}.")
    marks: tuple[str, ...] = ()
    if fim:
        marks = FIM_TOKENS
    smallest = SMALLEST_VOCAB_SIZE + len(marks)
    if vocab_size < smallest:
        raise DataError(
            f"vocab_size={vocab_size} leaves no room beside 256 bytes and {4 + len(marks)} control ids. "
            f"Try {smallest} or more."
        )
    output = Path(output)
    kept = sample_file(output)
    drawing = {"max_text_bytes": max_text_bytes, "seed": seed, "progress": progress}
    sample = _find_sample(documents, kept, drawing, stamp=stamp, on_sample=on_sample)
    try:
        model = _learn(sample, vocab_size, kind, marks)
        write_atomically(output, model)
    except Exception:
        # Nothing is left of what cannot be; an interrupt leaves the sample, as a kill does.
        with contextlib.suppress(OSError):
            kept.unlink()
        raise
    kept.unlink(missing_ok=True)
    return SentencePieceTokenizer(model, path=output)


def _find_sample(
    documents: Iterable[Document],
    kept: Path,
    drawing: dict[str, Any],
    *,
    stamp: dict[str, Any] | None,
    on_sample: Callable[[Sample, bool], None] | None,
) -> Sample:
    """The sample that a killed training has left, else a new one."""
    # Neither kind nor size: who tries another one after a kill need not read the corpus again.
    sample, recipe = None, None
    if stamp is not None:
        recipe = {"source": stamp, "max_text_bytes": drawing["max_text_bytes"], "seed": drawing["seed"]}
        sample = load_sample(kept, recipe)
    was_kept = sample is not None
    if sample is None:
        sample = draw_sample(documents, **drawing)
        if recipe is not None:
            save_sample(kept, sample, recipe)
    if on_sample is not None:
        on_sample(sample, was_kept)
    return sample


def _learn(sample: Sample, vocab_size: int, kind: str, marks: tuple[str, ...]) -> bytes:
    """The model file that the library learns from a sample; ``marks`` are control ids, which no text becomes."""
    # Without spaces' own mark, which SentencePiece would learn as a space (our models spell it in bytes).
    sentences = (part for text in sample.texts for part in text.split(SPACE_MARK) if part)
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=sentences,
            model_writer=model,
            vocab_size=vocab_size,
            model_type=kind,
            control_symbols=list(marks),
            num_threads=_THREADS.get(kind, 1),
            **_TRAINING_OPTIONS,
        )
    except (RuntimeError, OSError) as error:
        raise DataError(_explain_training(str(error), vocab_size)) from error
    # Of words and characters the library takes as many as there are, without a word.
    found = spm.SentencePieceProcessor(model_proto=model.getvalue()).vocab_size()
    if found != vocab_size:
        raise DataError(_too_large(vocab_size, found))
    return model.getvalue()


def _explain_training(message: str, vocab_size: int) -> str:
    """SentencePiece's complaint in our words, with the size that works."""
    if found := re.search(r"too high.*<= (\d+)", message, re.DOTALL):
        return _too_large(vocab_size, int(found[1]))
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"vocab_size={vocab_size} is less than the bytes, control ids and characters of this corpus need.\n"
            f"Try {int(found[1]) + 1} or more."
        )
    return f"SentencePiece could not train a tokenizer of vocab_size={vocab_size}: {message}"


def _too_large(vocab_size: int, most: int) -> str:
    return f"vocab_size={vocab_size} is more than this corpus can fill. Try {most} or less, or a larger corpus."
