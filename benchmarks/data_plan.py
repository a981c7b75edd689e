"""Opening a corpus and planning its rows, by document count: time, memory, padding.

    python -m benchmarks.data_plan [--quick]

Corpora of 1, 10 and 100 million documents are shard folders whose tokens are holes in sparse files: they take 8 bytes
per document on disk, and all lengths are real. A separate process opens one and reads its first batch: results are its
time, and its peak memory beyond imports, including file pages; another process starts in the middle of an epoch. The
time to the plan alone is also measured with the files dropped from the page cache. Then come epoch blocks: documents
planned per CPU second, and padding by row length. ``--save`` writes ``benchmarks/results/KIND/data_plan.json``; exit
code 1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.ranks import run_ranks
from data_pipeline.shards.manifest import Manifest, ShardEntry, length_histogram

MILLION = 1_000_000
CORPORA = (MILLION, 10 * MILLION, 100 * MILLION)
SHARD_DOCUMENTS = 1 << 16
"""Documents per shard: 75M tokens, about the size at which ``data build`` closes one."""
SEQ_LEN = 131_072
PADDING = {8192: 0.005, 131_072: 0.005, 1_048_576: 0.005, 10_485_760: 0.01}
"""Maximum padding by row length. An epoch block has a hundred of the longest rows, and the last of them is half full.
"""
ROUNDS = 3
PRELOAD = ("data_pipeline.loader",)
MOST_SECONDS, MOST_MB, LEAST_RATE = 1.0, 200, MILLION // 2


class Sparse(io.FileIO):
    """A file with holes for written zeros, so that a corpus without content takes no disk space."""

    def write(self, data: Any) -> int:
        """Write some bytes, or skip them."""
        view = memoryview(data).cast("B")
        # Anything larger than a shard's offsets is its tokens, all of them zeros.
        if len(view) > 9 * SHARD_DOCUMENTS or not np.frombuffer(view, np.uint8).any():
            self.seek(len(view), os.SEEK_CUR)
        else:
            super().write(view)
        return len(view)


def make_corpus(folder: Path, documents: int) -> Path:
    """Write a shard folder with this many documents, lengths log-normal: 1,150 tokens on average, up to some hundred
    thousand.
    """
    folder.mkdir()
    random = np.random.default_rng(0)
    entries: list[ShardEntry] = []
    histogram: dict[str, int] = {}
    for first in range(0, documents, SHARD_DOCUMENTS):
        count = min(SHARD_DOCUMENTS, documents - first)
        lengths = np.exp(random.normal(6.2, 1.3, count)).astype(np.int64) + 1
        entries.append(_write_shard(folder / f"{len(entries):05d}.arrow", lengths))
        for power, number in length_histogram(lengths).items():
            histogram[power] = histogram.get(power, 0) + number
    tokens = sum(entry.tokens for entry in entries)
    manifest = Manifest(
        split="training",
        vocab_size=32_000,
        padding=0,
        tokenizer="none",
        sources=[],
        options={},
        shards=entries,
        documents=documents,
        tokens=tokens,
        text_bytes=4 * tokens,
        length_histogram=histogram,
        skipped={},
    )
    manifest.save(folder)
    return folder


def _write_shard(path: Path, lengths: np.ndarray) -> ShardEntry:
    """Write one file in ``ShardWriter``'s layout."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    tokens = int(offsets[-1])
    zeros = np.zeros(len(lengths), np.int64)
    batch = pa.record_batch(
        {
            "tokens": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(tokens, np.uint16))),
            "source": pa.array(zeros.astype(np.int16)),
            "hash": pa.array(zeros.astype(np.uint64)),
            "name": pa.array([""] * len(lengths), pa.string()),
        }
    )
    with Sparse(path, "wb") as file:
        with pa.ipc.new_file(pa.PythonFile(file, mode="w"), batch.schema) as writer:
            writer.write_batch(batch)
        file.truncate()
        os.fsync(file.fileno())
    return ShardEntry(
        file=path.name, bytes=path.stat().st_size, xxh3_128="0" * 32, documents=len(lengths), tokens=tokens
    )


def drop_from_cache(folder: Path) -> None:
    """Drop these files from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ------------------------------------------------------------------------------------- in a process of its own


def _memory(name: str) -> int:
    """Return a line from /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def start(folder: Path, share: float) -> dict[str, float]:
    """Open a corpus and read one batch, starting at the fraction ``share`` of an epoch; return time and memory."""
    from data_pipeline.loader import build_loader

    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, anonymous = _memory("VmRSS"), _memory("RssAnon")
    began, cpu_began = time.perf_counter(), time.process_time()
    loader = build_loader(folder, seq_len=SEQ_LEN, rows_per_step=1, verify=False)
    state = loader.state_dict()
    if share:
        block = int(share * state["num_blocks"])
        loader.load_state_dict(state | {"block": block, "block_row": 7, "epoch_row": 7 + 500 * block})
    else:
        loader.pack_report()
    planned = time.perf_counter() - began
    next(loader)
    return {
        "plan_seconds": planned,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
        "peak_mb": (_memory("VmHWM") - before) / 1e6,
        "anonymous_mb": (_memory("RssAnon") - anonymous) / 1e6,
    }


def plan_blocks(folder: Path, seq_len: int, documents: int) -> dict[str, float]:
    """Plan the first epoch blocks of an epoch, with at least this many documents; return CPU seconds and statistics."""
    from data_pipeline.rows.epoch_blocks import BlockPlanner, PackReport
    from data_pipeline.shards.reader import ShardSet

    planner = BlockPlanner(ShardSet.open(folder, verify=False), seq_len)
    plans, began = [], time.process_time()
    while sum(plan.num_documents for plan in plans) < documents and len(plans) < planner.num_blocks:
        plans.append(planner.plan(0, len(plans)))
    seconds = time.process_time() - began
    report = PackReport.of(plans, seq_len)
    return {
        "seq_len": seq_len,
        "blocks": planner.num_blocks,
        "documents_per_block": report.planned_documents / len(plans),
        "rows_per_block": report.rows / len(plans),
        "documents_per_second": report.planned_documents / seconds,
        "padding_share": report.padding_share,
    }


# ------------------------------------------------------------------------------------------------------------- all


def fastest(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the row with the minimum time, with the highest memory of all."""
    return min(rows, key=lambda row: row["seconds"]) | {
        name: max(row[name] for row in rows) for name in ("peak_mb", "anonymous_mb")
    }


def measure(corpora: Sequence[int]) -> dict[str, Any]:
    """Measure each corpus, and each row length over the second largest corpus."""
    starts, blocks = [], []
    with tempfile.TemporaryDirectory(prefix="longctx-plan-") as name:
        for documents in corpora:
            folder = make_corpus(Path(name) / str(documents), documents)
            row: dict[str, Any] = {"documents": documents, "shards": len(list(folder.glob("*.arrow")))}
            # Once without measuring: the files were just written, and may still be on their way to the disk.
            for case, share in (("", 0.0), ("first", 0.0), ("resumed", 0.5)):
                row[case] = fastest([run_ranks(start, 1, folder, share, preload=PRELOAD)[0] for _ in range(ROUNDS)])
            del row[""]
            drop_from_cache(folder)
            row["cold"] = run_ranks(start, 1, folder, 0.0, preload=PRELOAD)[0]
            starts.append(row)
            print(row, flush=True)
            if documents == min(corpora[-1], 10 * MILLION):
                for seq_len in PADDING:
                    rounds = [
                        run_ranks(plan_blocks, 1, folder, seq_len, MILLION, preload=PRELOAD)[0] for _ in range(ROUNDS)
                    ]
                    blocks.append(max(rounds, key=lambda found: found["documents_per_second"]))
                    print(blocks[-1], flush=True)
    return {"seq_len": SEQ_LEN, "starts": starts, "blocks": blocks}


def bounds_of(content: dict[str, Any]) -> list[Bound]:
    """Return the bounds on the results."""
    bounds = []
    for row in content["starts"]:
        case = f"{row['documents'] // MILLION} million documents"
        for name in ("first", "resumed"):
            bounds.append(Bound(f"CPU seconds to the {name} batch", row[name]["cpu_seconds"], MOST_SECONDS, case))
            bounds.append(Bound(f"MB to the {name} batch", row[name]["peak_mb"], MOST_MB, case))
    for row in content["blocks"]:
        bounds.append(Bound("padding", row["padding_share"], PADDING[row["seq_len"]], f"rows of {row['seq_len']}"))
        rate = row["documents_per_second"]
        bounds.append(
            Bound("documents planned a second of CPU", rate, LEAST_RATE, f"rows of {row['seq_len']}", at_least=True)
        )
    return bounds


def main() -> int:
    """Print and save the results; return 1 if one is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse(parser, "no more than 10 million documents")
    corpora = CORPORA
    if options.quick:
        corpora = CORPORA[:2]
    content = measure(corpora)
    return conclude("data_plan", content, bounds_of(content), options)


if __name__ == "__main__":
    sys.exit(main())
