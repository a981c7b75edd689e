"""The benchmark's corpora, each as plain tokens and as our shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.delivering.contender import OFFSETS_FILE, TOKENS_FILE, Tokens
from benchmarks.delivering.contenders import SHARDS
from benchmarks.delivering.peers import END, VOCABULARY
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.sources import open_source
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_writer import EncodedDocument, ShardWriter

TOKENS = 100_000_000
MEAN_LOG, SIGMA_LOG = 7.03, 1.8
"""Mean and deviation of the lengths' logarithms: 5,700 tokens on average, half of the documents below 1,130, the
longest above a million-token row.
"""
SAMPLE_BYTES = 4 << 20
"""Text to train the default corpus's tokenizer: enough for its benchmark, and quickly done."""


def draw_lengths(tokens: int, seed: int = 0) -> np.ndarray:
    """Draw log-normal document lengths, int64, with this many tokens in total; each is at least 2."""
    random = np.random.default_rng(seed)
    lengths = np.empty(0, np.int64)
    while lengths.sum() < tokens:
        more = np.exp(random.normal(MEAN_LOG, SIGMA_LOG, 1024)).astype(np.int64) + 2
        lengths = np.concatenate([lengths, more])
    ends = np.cumsum(lengths)
    count = int(np.searchsorted(ends, tokens)) + 1
    lengths = lengths[:count]
    # The last one ends with the corpus.
    lengths[-1] -= ends[count - 1] - tokens
    if lengths[-1] < 2:
        lengths = np.append(lengths[:-2], lengths[-2] + lengths[-1])
    return lengths


def make_synthetic(folder: Path, tokens: int = TOKENS, seed: int = 0) -> Path:
    """Write random ids; each document ends with ``END``, which occurs only there."""
    folder.mkdir()
    lengths = draw_lengths(tokens, seed)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    ids = np.random.default_rng(seed + 1).integers(END + 1, VOCABULARY, tokens, dtype=np.uint16)
    ids[offsets[1:] - 1] = END
    _save(folder, ids, offsets)
    shards = folder / SHARDS
    shards.mkdir()
    writer = ShardWriter(shards, vocab_size=VOCABULARY)
    for number, document in enumerate(Tokens.load(folder).documents()):
        writer.add(EncodedDocument(tokens=document, hash=number, name=str(number), text_bytes=4 * len(document)))
    writer.close()
    manifest = Manifest(
        split="training",
        vocab_size=VOCABULARY,
        padding=0,
        tokenizer="none",
        sources=[],
        options={},
        shards=writer.shards,
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        text_bytes=writer.text_bytes,
        length_histogram=writer.length_histogram,
        skipped={},
    )
    manifest.save(shards)
    return folder


def make_default(folder: Path, source: str = "stdlib") -> Path:
    """Write the default corpus, or another source, with a tokenizer trained on a prefix of it."""
    folder.mkdir()
    tokenizer = train_tokenizer(
        open_source(source), folder / "tokenizer.model", vocab_size=VOCABULARY // 4, max_text_bytes=SAMPLE_BYTES
    )
    build_shards(open_source(source), tokenizer, folder / SHARDS, validation_fraction=0.0)
    shards = ShardSet.open(folder / SHARDS)
    documents = [shards.document(number) for number in range(shards.num_documents)]
    offsets = np.zeros(len(documents) + 1, np.int64)
    np.cumsum([len(document) for document in documents], out=offsets[1:])
    ids = np.concatenate(documents)
    assert (ids[offsets[1:] - 1] == END).all(), "documents of the default corpus end with another id"
    _save(folder, ids, offsets)
    return folder


def _save(folder: Path, ids: np.ndarray, offsets: np.ndarray) -> None:
    ids.tofile(folder / TOKENS_FILE)
    np.save(folder / OFFSETS_FILE, offsets)
