"""Put finished parts together: shards under their final names, one list of what was left out, one manifest a split."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Sequence
from typing import Any

from data_pipeline.prepare.documents import Skip
from data_pipeline.prepare.duplicates.outcome import DUPLICATES_FILE, Outcome
from data_pipeline.prepare.left_out import LEFT_OUT_FILE, LeftOutFile
from data_pipeline.prepare.parts.record import SPLITS, PartRecord
from data_pipeline.prepare.parts.staging import Staging, move_shard
from data_pipeline.shards.manifest import Manifest, ShardEntry, sorted_histogram
from longctx.tokenizer.contract import Tokenizer


def assemble(
    staging: Staging,
    records: list[PartRecord],
    *,
    not_listed: Sequence[Skip],
    skipped: dict[str, int],
    tokenizer: Tokenizer,
    sources: list[dict[str, Any]],
    options: dict[str, Any],
    outcome: Outcome | None = None,
) -> None:
    """Make ``staging.whole`` the shard folder of all parts, in their order. Shards are moved, not copied.

    ``outcome`` is what was found of duplicates, where they were looked for.
    """
    staging.whole.mkdir()
    left_out = LeftOutFile(staging.whole)
    for skip in not_listed:
        left_out.add(skip)
    for number, record in enumerate(records):
        if record.left_out:
            left_out.append(staging.part_folder(number) / LEFT_OUT_FILE)
    left_out_hash = left_out.close()
    found = _copy_duplicates(staging, outcome)
    entries: dict[str, list[ShardEntry]] = {split: [] for split in SPLITS}
    for split, entry, home in staging.moves(records):
        folder = staging.split_folder(split)
        folder.mkdir(exist_ok=True)
        # Within one file system: terabytes cost nothing here.
        move_shard(home, folder / entry.file)
        entries[split].append(entry)
    for split in SPLITS:
        # An empty split gets no folder.
        if not entries[split]:
            continue
        tokenizer.save(staging.split_folder(split))
        # The list belongs to the source: it lies once in the folder, beside the training split.
        listed = ""
        duplicates: dict[str, Any] = {}
        if split == "training":
            listed = left_out_hash
            duplicates = found
        manifest = Manifest(
            split=split,
            vocab_size=tokenizer.vocab_size,
            padding=tokenizer.padding,
            tokenizer=tokenizer.fingerprint,
            sources=sources,
            options=options,
            shards=entries[split],
            skipped=skipped,
            left_out=listed,
            duplicates=duplicates,
            **_sums(records, split),
        )
        manifest.save(staging.split_folder(split))


def _copy_duplicates(staging: Staging, outcome: Outcome | None) -> dict[str, Any]:
    """Put the list of removed duplicates into the whole; what the manifest says of them."""
    if outcome is None:
        return {}
    found: dict[str, Any] = dataclasses.asdict(outcome.counts)
    if DUPLICATES_FILE in outcome.files:
        # Not moved: an assembly that is killed is undone by removing the whole.
        shutil.copyfile(staging.decisions / DUPLICATES_FILE, staging.whole / DUPLICATES_FILE)
        found["list"] = outcome.files[DUPLICATES_FILE]
    return found


def _sums(records: list[PartRecord], split: str) -> dict[str, Any]:
    """What the manifest of a split counts, over all parts."""
    # Sums, and no lists of documents: of a large corpus those would fill the memory.
    parts = [record.splits[split] for record in records]
    lengths: Counter[str] = Counter()
    for part in parts:
        lengths.update(part.length_histogram)
    return {
        "documents": sum(part.documents for part in parts),
        "tokens": sum(part.tokens for part in parts),
        "text_bytes": sum(part.text_bytes for part in parts),
        "length_histogram": sorted_histogram(lengths),
        "inexact_documents": sum(part.inexact for part in parts),
    }
