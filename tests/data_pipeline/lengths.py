"""Documents by their lengths: of a shard folder, and a shard folder of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from data_pipeline.loader import Loader
from data_pipeline.rows.pack import Parts, RowPlan, plan_parts
from data_pipeline.shards.manifest import hash_json
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_writer import EncodedDocument, ShardWriter, runs_of
from longctx.tokenizer import Tokenizer


def lengths_of(shards: ShardSet) -> np.ndarray:
    """Tokens of all documents."""
    return shards.lengths_of(np.arange(shards.num_documents))


def read_all(shards: ShardSet) -> list[object]:
    """Everything that a reader gives of its documents: lengths, names and tokens."""
    documents = [(shards.name(number), shards.document(number).tolist()) for number in range(shards.num_documents)]
    return [lengths_of(shards).tolist(), shards.longest_document(), *documents]


def strip_sums(folder: Path) -> Path:
    """Make a folder what releases without sums of blocks wrote, its manifest's hash included."""
    body = json.loads((folder / "manifest.json").read_text())
    for entry in body["shards"]:
        del entry["sums"]
        (folder / entry["file"]).with_suffix(".sums").unlink()
    del body["hash"]
    (folder / "manifest.json").write_text(json.dumps({**body, "hash": hash_json(body)}, indent=2) + "\n")
    return folder


def write_lengths(
    folder: Path, tokenizer: Tokenizer, lengths: list[int], *, shard_tokens: int = 1 << 26, masked: bool = False
) -> ShardSet:
    """A shard folder of documents of these lengths; the ids of each tell it from its neighbours.

    With ``masked`` some runs of each count, of every other one all tokens or none.
    """
    folder.mkdir()
    writer = ShardWriter(folder, vocab_size=tokenizer.vocab_size, shard_tokens=shard_tokens, masked=masked)
    for number, length in enumerate(lengths):
        ids = (np.arange(length) * 7 + number * 13) % tokenizer.vocab_size
        counted = None
        if masked:
            draws = np.random.default_rng(number).random(length // 5 + 1).repeat(5)[:length]
            counted = runs_of(draws < (0.5, 0.0, 0.8, 1.0)[number % 4])
        document = EncodedDocument(tokens=ids, hash=number, name=f"d{number}", text_bytes=length, target_runs=counted)
        writer.add(document)
    writer.finish(split="training", tokenizer=tokenizer, sources=[], options={}, skipped={})
    tokenizer.save(folder)
    return ShardSet.open(folder)


def plan_rows(lengths: np.ndarray, seq_len: int, **options) -> RowPlan:
    """Pack documents of these lengths, numbered from 0, each once."""
    return plan_parts(Parts.whole(np.arange(len(lengths)), np.asarray(lengths, np.int64)), seq_len, **options)


def global_rows(ranks: list[Loader], steps: int) -> torch.Tensor:
    """Tokens, targets and positions of whole steps' rows in their global order, from all ranks, [rows, 3, T]."""
    rows = []
    for _ in range(steps * ranks[0].micro_batches_per_step):
        for rank in ranks:
            batch = next(rank)
            rows.append(torch.stack([batch.tokens, batch.targets, batch.positions], dim=1))
    return torch.cat(rows or [torch.empty(0)])


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """In place, as a disk does it."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
