"""Trains a tokenizer on a corpus sample; a file keeps the sample during training."""

from __future__ import annotations

import contextlib
import heapq
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece as spm
import xxhash

from data_pipeline.prepare.source_items import Document, Progress
from data_pipeline.prepare.train_wordpiece import MIN_VOCAB_SIZE as SMALLEST_WORDPIECE
from data_pipeline.prepare.train_wordpiece import SPECIAL_TOKENS, VocabularySizeError, learn_wordpiece
from longctx.errors import DataError
from longctx.files import convert_write_errors, replaced_file, write_atomically
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.sentencepiece_model import DOCUMENT_BEGIN, DOCUMENT_END, PADDING
from longctx.tokenizer.special import FIM_TOKENS, MASK_TOKEN, SENTINEL
from longctx.tokenizer.text_chunks import SPACE_MARK
from longctx.tokenizer.tokenizer_base import Tokenizer

log = logging.getLogger(__name__)

FORMAT = "longctx-sample-1"


@dataclass(frozen=True, kw_only=True)
class TextSample:
    """Sampled texts, and counts taken while sampling."""

    texts: list[str]
    documents: int
    """Documents read."""
    text_bytes: int
    marked: int
    """Documents that contain U+2581, which SentencePiece uses for a space."""


def draw_sample(
    documents: Iterable[Document], *, max_text_bytes: int, seed: int, progress: Progress | None = None
) -> TextSample:
    """Sample the texts with the smallest hashes, up to ``max_text_bytes`` in total; memory holds little more.

    The sample does not depend on document order and contains at least one document.
    """
    # Bottom-k sampling: hashes are uniform, so the texts with the smallest hashes are a uniform sample. One pass
    # suffices, and equal corpora in any order give the same sample.
    # Max-heap by hash: (−hash, document index, text).
    sample: list[tuple[int, int, str]] = []
    sample_bytes = seen = seen_bytes = marked = 0
    for document in documents:
        raw = document.text.encode()
        heapq.heappush(sample, (-xxhash.xxh3_64_intdigest(raw, seed=seed), seen, document.text))
        seen += 1
        sample_bytes += len(raw)
        seen_bytes += len(raw)
        marked += SPACE_MARK in document.text
        while sample_bytes > max_text_bytes and len(sample) > 1:
            sample_bytes -= len(heapq.heappop(sample)[2].encode())
        if progress is not None:
            progress(seen, seen_bytes)
    if not sample:
        raise DataError("No documents to train a tokenizer on. Check the source and its include and exclude patterns.")
    # Restore source order, so that the same corpus gives the same model file.
    in_order = sorted(sample, key=lambda entry: entry[1])
    return TextSample(texts=[text for _, _, text in in_order], documents=seen, text_bytes=seen_bytes, marked=marked)


def sample_file(output: Path) -> Path:
    """Return the path for a model's sample, which is kept until the model is written."""
    return output.with_name(f".{output.name}.sample")


def save_sample(path: Path, sample: TextSample, recipe: dict[str, Any]) -> None:
    """Write a sample atomically, with its recipe."""
    counts = {"documents": sample.documents, "text_bytes": sample.text_bytes, "marked": sample.marked}
    digest = xxhash.xxh3_128()
    with convert_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as temporary, temporary.open("wb") as lines:
            for entry in ({"format": FORMAT, "recipe": recipe, **counts}, *sample.texts):
                line = json.dumps(entry).encode() + b"\n"
                digest.update(line)
                lines.write(line)
            lines.write(digest.hexdigest().encode())


def load_sample(path: Path, recipe: dict[str, Any]) -> TextSample | None:
    """Return the sample in a file; None if it is missing, damaged or from another recipe."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with path.open("rb") as lines:
            # Check the header first: a sample from another recipe need not be read completely.
            header = json.loads(lines.readline())
            if header.pop("format") != FORMAT or header.pop("recipe") != recipe:
                return None
        # A sample fits into memory even twice: training takes more.
        content, _, recorded = path.read_bytes().rpartition(b"\n")
        if xxhash.xxh3_128_hexdigest(content + b"\n") != recorded.decode():
            return None
        texts = [json.loads(line) for line in content.split(b"\n")[1:]]
        return TextSample(texts=texts, **header)
    return None


KINDS = ("bpe", "unigram", "word", "char")
"""SentencePiece model types."""
WORDPIECE = "wordpiece"
MIN_VOCAB_SIZE = 4 + 256 + 1
"""Unknown, begin, end and padding; one id per byte; one vocabulary piece to learn."""

_TRAINING_OPTIONS = {
    # These options make decoding exact: any text is restored, including spaces.
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
    # SentencePiece would write its progress directly to stderr.
    "minloglevel": 3,
}


_MIN_CHARACTERS = 64
"""Minimum number of characters for learning a small vocabulary if the corpus has more."""
_THREADS = {"unigram": 16}
"""Training threads; 1 for other model types, which gain nothing from more.

Never the machine's core count: Unigram training rounds its sums per thread, and the count itself ends up in the model
file. So 16 threads run on whatever cores there are.
"""


def train_tokenizer(
    documents: Iterable[Document],
    output: str | Path,
    *,
    vocab_size: int,
    kind: str = "bpe",
    fim: bool = False,
    mask: bool = False,
    sentinels: int = 0,
    keep_case: bool = False,
    max_text_bytes: int = 256 << 20,
    seed: int = 0,
    progress: Progress | None = None,
    stamp: dict[str, Any] | None = None,
    on_sample: Callable[[TextSample, bool], None] | None = None,
) -> Tokenizer:
    """Train a tokenizer on ``documents`` and write it to ``output`` atomically; the same input gives the same bytes.

    ``kind`` is a SentencePiece type (``bpe``, ``unigram``, ``word`` or ``char``) or ``wordpiece`` (BERT), which has a
    mask token and keeps upper case and accents if ``keep_case``. ``fim`` reserves three ids that mark prefix, suffix
    and middle for fill-in-the-middle, ``mask`` one for a masked token, and ``sentinels`` that many for removed spans.
    Training holds the text in memory, so above ``max_text_bytes`` it uses a sample of complete documents, drawn by a
    hash of ``seed`` and text. Raises ``DataError`` if the corpus cannot fill ``vocab_size``.

    With ``stamp``, which identifies the documents, the sample is kept next to ``output`` until the model is written:
    after a kill, the next training uses it and reads no documents. ``on_sample`` receives the sample and whether it
    came from such a file.
    """
    known = [*KINDS, WORDPIECE]
    if kind not in known:
        raise DataError(f"kind={kind} is not known. Try {', '.join(known)}.")
    _check_kind(kind, fim=fim, mask=mask, sentinels=sentinels, keep_case=keep_case)
    marks: tuple[str, ...] = ()
    if fim:
        marks = FIM_TOKENS
    if mask:
        marks += (MASK_TOKEN,)
    if sentinels < 0:
        raise DataError(f"sentinels={sentinels} must not be negative. T5 uses 100.")
    marks += tuple(SENTINEL.format(number) for number in range(sentinels))
    minimum, reserved = MIN_VOCAB_SIZE + len(marks), f"256 bytes and {4 + len(marks)} control ids"
    if kind == WORDPIECE:
        minimum, reserved = SMALLEST_WORDPIECE, f"{len(SPECIAL_TOKENS)} control ids"
    if vocab_size < minimum:
        raise DataError(f"vocab_size={vocab_size} leaves no room for text after {reserved}. Try {minimum} or more.")
    output = Path(output)
    kept = sample_file(output)
    sample, recipe = None, None
    if stamp is not None:
        # The recipe excludes kind and size: after a kill, others can be tried without reading the corpus again.
        recipe = {"source": stamp, "max_text_bytes": max_text_bytes, "seed": seed}
        sample = load_sample(kept, recipe)
    was_kept = sample is not None
    if sample is None:
        sample = draw_sample(documents, max_text_bytes=max_text_bytes, seed=seed, progress=progress)
        if recipe is not None:
            save_sample(kept, sample, recipe)
    if on_sample is not None:
        on_sample(sample, was_kept)
    try:
        if kind == WORDPIECE:
            model = _learn_wordpiece(sample, vocab_size, keep_case=keep_case)
        else:
            model = _learn(sample, vocab_size, kind, marks)
        write_atomically(output, model)
    except Exception:
        # A failed training leaves no files; an interrupt keeps the sample, as a kill does.
        with contextlib.suppress(OSError):
            kept.unlink()
        raise
    kept.unlink(missing_ok=True)
    return load_tokenizer(output)


def _check_kind(kind: str, *, fim: bool, mask: bool, sentinels: int, keep_case: bool) -> None:
    """Raise DataError for options that this kind of tokenizer does not support."""
    if kind == WORDPIECE and (fim or sentinels):
        option = "--fim" if fim else f"--sentinels {sentinels}"
        raise DataError(f"{option} requires a SentencePiece kind, but --kind {kind} is BERT's. Try --kind bpe.")
    if kind == WORDPIECE and mask:
        raise DataError(f"--kind {kind} already includes --mask. Leave it out.")
    if keep_case and kind != WORDPIECE:
        raise DataError(f"--cased requires --kind {WORDPIECE}; --kind {kind} preserves every character. Leave it out.")


def _learn_wordpiece(sample: TextSample, vocab_size: int, *, keep_case: bool) -> bytes:
    """Learn a WordPiece vocabulary from a sample and return its file content."""
    try:
        return learn_wordpiece(sample.texts, vocab_size, keep_case=keep_case)
    except VocabularySizeError as error:
        if error.most is not None:
            raise DataError(_too_large(vocab_size, error.most)) from error
        raise DataError(
            f"vocab_size={vocab_size} is too small: each letter in this corpus needs one vocabulary piece at the start "
            f"of a word and one within words.\nTry {error.least} or more."
        ) from error
    except (RuntimeError, OSError) as error:
        raise DataError(_training_error(str(error), vocab_size)) from error


def _learn(sample: TextSample, vocab_size: int, kind: str, marks: tuple[str, ...]) -> bytes:
    """Learn a model from a sample and return its file content; ``marks`` become control ids, never used for text."""
    model = io.BytesIO()
    options: dict[str, Any] = {
        "model_writer": model,
        "vocab_size": vocab_size,
        "model_type": kind,
        "control_symbols": list(marks),
        "num_threads": _THREADS.get(kind, 1),
        **_TRAINING_OPTIONS,
    }
    try:
        spm.SentencePieceTrainer.train(sentence_iterator=_sentences(sample), **options)
    except (RuntimeError, OSError) as error:
        num_characters = (vocab_size - MIN_VOCAB_SIZE - len(marks)) // 2
        if kind not in ("bpe", "unigram") or num_characters < _MIN_CHARACTERS or "required_chars" not in str(error):
            raise DataError(_training_error(str(error), vocab_size)) from error
        _learn_common(sample, num_characters, options)
    # For words and characters the library silently takes as many as exist.
    found = spm.SentencePieceProcessor(model_proto=model.getvalue()).vocab_size()
    if found != vocab_size:
        raise DataError(_too_large(vocab_size, found))
    return model.getvalue()


def _sentences(sample: TextSample) -> Iterator[str]:
    """Yield SentencePiece's training input, without its space mark, which our models encode as bytes."""
    return (part for text in sample.texts for part in text.split(SPACE_MARK) if part)


def _learn_common(sample: TextSample, num_characters: int, options: dict[str, Any]) -> None:
    """Learn a vocabulary with the ``num_characters`` most frequent characters; rarer ones are encoded as bytes."""
    counts = Counter[str]()
    for text in sample.texts:
        counts.update(text)
    del counts[SPACE_MARK]
    rare = [character for character, _ in counts.most_common()[num_characters:]]
    log.warning(
        "vocab_size=%d has room for %d of the corpus's %d characters: rarer ones are encoded as bytes.",
        options["vocab_size"],
        num_characters,
        len(counts),
    )
    # SentencePiece drops at most 1 % of a text's characters, so remove the rare ones before it sees them.
    replacements = dict.fromkeys(map(ord, rare), SPACE_MARK)
    known = TextSample(**{**vars(sample), "texts": [text.translate(replacements) for text in sample.texts]})
    try:
        spm.SentencePieceTrainer.train(sentence_iterator=_sentences(known), **options)
    except (RuntimeError, OSError) as error:
        raise DataError(_training_error(str(error), options["vocab_size"])) from error


def _training_error(message: str, vocab_size: int) -> str:
    """Translate SentencePiece's error into our words, with a size that works."""
    if found := re.search(r"too high.*<= (\d+)", message, re.DOTALL):
        return _too_large(vocab_size, int(found[1]))
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"vocab_size={vocab_size} is too small for the bytes, the control ids and this corpus's characters.\n"
            f"Try {int(found[1]) + 1} or more."
        )
    if "sentences_.empty()" in message:
        return "the corpus contains no text to train on, only white space or control marks. Name another one."
    return f"SentencePiece could not train a tokenizer of vocab_size={vocab_size}: {message}"


def _too_large(vocab_size: int, most: int) -> str:
    return f"vocab_size={vocab_size} is more than this corpus can fill. Try {most} or less, or a larger corpus."
