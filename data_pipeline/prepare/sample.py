"""The texts that a tokenizer is trained on: a sample of a corpus, and the file that keeps it while training goes on."""

from __future__ import annotations

import contextlib
import heapq
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.prepare.documents import Document, Progress
from longctx.errors import DataError
from longctx.files import explained_writes, replaced_file
from longctx.tokenizer.chunks import SPACE_MARK

FORMAT = "longctx-sample-1"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Texts of a corpus, and what was seen while they were drawn."""

    texts: list[str]
    documents: int
    """Documents that were read."""
    text_bytes: int
    marked: int
    """Documents among them that hold U+2581, which SentencePiece writes for a space."""


def draw_sample(
    documents: Iterable[Document], *, max_text_bytes: int, seed: int, progress: Progress | None = None
) -> Sample:
    """Texts of at most ``max_text_bytes`` together, those with the smallest hash; memory never holds much more.

    The choice does not depend on the order of the documents. One document is always in it.
    """
    # A heap with the largest hash first: (−hash, number of the document, text).
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
        raise DataError("There are no documents to train a tokenizer on. Check the source and what it excludes.")
    # Back in the source's order: the same corpus gives the same model file.
    in_order = sorted(sample, key=lambda entry: entry[1])
    return Sample(texts=[text for _, _, text in in_order], documents=seen, text_bytes=seen_bytes, marked=marked)


def sample_file(output: Path) -> Path:
    """Where the sample for a model lies until the model is there."""
    return output.with_name(f".{output.name}.sample")


def save_sample(path: Path, sample: Sample, recipe: dict[str, Any]) -> None:
    """Write a sample, all at once, with what it was drawn from."""
    counts = {"documents": sample.documents, "text_bytes": sample.text_bytes, "marked": sample.marked}
    digest = xxhash.xxh3_128()
    with explained_writes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as temporary, temporary.open("wb") as lines:
            for entry in ({"format": FORMAT, "recipe": recipe, **counts}, *sample.texts):
                line = json.dumps(entry).encode() + b"\n"
                digest.update(line)
                lines.write(line)
            lines.write(digest.hexdigest().encode())


def load_sample(path: Path, recipe: dict[str, Any]) -> Sample | None:
    """The sample in a file; None where there is none, or one of something else, or one that is not whole."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with path.open("rb") as lines:
            # First alone: a sample of something else need not be read whole.
            header = json.loads(lines.readline())
            if header.pop("format") != FORMAT or header.pop("recipe") != recipe:
                return None
        # A sample fits into memory, twice too: training takes more.
        content, _, recorded = path.read_bytes().rpartition(b"\n")
        if xxhash.xxh3_128_hexdigest(content + b"\n") != recorded.decode():
            return None
        texts = [json.loads(line) for line in content.split(b"\n")[1:]]
        return Sample(texts=texts, **header)
    return None
