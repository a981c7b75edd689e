"""Train a SentencePiece model on a corpus."""

from __future__ import annotations

import heapq
import io
import re
from collections.abc import Iterable
from pathlib import Path

import sentencepiece as spm
import xxhash

from data_pipeline.prepare.documents import Document, Progress
from longctx.errors import DataError
from longctx.files import write_atomically
from longctx.tokenizer.chunks import SPACE_MARK
from longctx.tokenizer.sentencepiece_model import DOCUMENT_BEGIN, DOCUMENT_END, PADDING, SentencePieceTokenizer

SMALLEST_VOCAB_SIZE = 4 + 256 + 1
"""Unknown, begin, end and padding; one id for each byte; one piece to learn."""

_TRAINING_OPTIONS = {
    "model_type": "bpe",
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
    # BPE training gains nothing from more, and the number would end up in the model file's bytes.
    "num_threads": 1,
    # SentencePiece would write its progress straight to stderr.
    "minloglevel": 3,
}


def train_tokenizer(
    documents: Iterable[Document],
    output: str | Path,
    *,
    vocab_size: int,
    max_text_bytes: int = 256 << 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> SentencePieceTokenizer:
    """Train a BPE on ``documents`` and write it to ``output``, all at once; the same input gives the same bytes.

    Training holds the text in memory. Above ``max_text_bytes`` it therefore uses a sample of whole documents, drawn by
    a hash of ``seed`` and text. Raises ``DataError`` for a ``vocab_size`` that the corpus cannot fill.
    """
    if vocab_size < SMALLEST_VOCAB_SIZE:
        raise DataError(
            f"vocab_size={vocab_size} leaves no room beside 256 bytes and 4 control ids. "
            f"Try {SMALLEST_VOCAB_SIZE} or more."
        )
    texts = _sample(documents, max_text_bytes=max_text_bytes, seed=seed, progress=progress)
    # Without spaces' own mark, which SentencePiece would learn as a space (our models spell it in bytes).
    sentences = (part for text in texts for part in text.split(SPACE_MARK) if part)
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=sentences, model_writer=model, vocab_size=vocab_size, **_TRAINING_OPTIONS
        )
    except (RuntimeError, OSError) as error:
        raise DataError(_explain_training(str(error), vocab_size)) from error
    write_atomically(Path(output), model.getvalue())
    return SentencePieceTokenizer(model.getvalue(), path=Path(output))


def _sample(documents: Iterable[Document], *, max_text_bytes: int, seed: int, progress: Progress | None) -> list[str]:
    """Texts of at most ``max_text_bytes`` together, those with the smallest hash; memory never holds much more.

    The choice does not depend on the order of the documents. One document is always in it.
    """
    # A heap with the largest hash first: (−hash, number of the document, text).
    sample: list[tuple[int, int, str]] = []
    sample_bytes = seen_bytes = 0
    for number, document in enumerate(documents):
        raw = document.text.encode()
        heapq.heappush(sample, (-xxhash.xxh3_64_intdigest(raw, seed=seed), number, document.text))
        sample_bytes += len(raw)
        seen_bytes += len(raw)
        while sample_bytes > max_text_bytes and len(sample) > 1:
            sample_bytes -= len(heapq.heappop(sample)[2].encode())
        if progress is not None:
            progress(number + 1, seen_bytes)
    if not sample:
        raise DataError("There are no documents to train a tokenizer on. Check the source and what it excludes.")
    # Back in the source's order: the same corpus gives the same model file.
    in_order = sorted(sample, key=lambda entry: entry[1])
    return [text for _, _, text in in_order]


def _explain_training(message: str, vocab_size: int) -> str:
    """SentencePiece's complaint in our words, with the size that works."""
    if found := re.search(r"too high.*<= (\d+)", message, re.DOTALL):
        return f"vocab_size={vocab_size} is more than this corpus can fill. Try {found[1]} or less, or a larger corpus."
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"vocab_size={vocab_size} is less than the bytes, control ids and characters of this corpus need.\n"
            f"Try {int(found[1]) + 1} or more."
        )
    return f"SentencePiece could not train a tokenizer of vocab_size={vocab_size}: {message}"
