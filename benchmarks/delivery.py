"""Reading rows from a corpus: our loader compared with bare copies from a memory map and other projects' loaders.

    python -m benchmarks.delivery [--quick]

Two corpora: one of 100 million random tokens with log-normal lengths, and the default one (this Python's own source).
Each contender has a process with one thread and its own format of the corpus in a temporary folder; they take turns,
and each contender's minimum CPU seconds over rounds count, over all threads. A turn opens the corpus and takes an epoch
of rows, or a quarter of a second of them; pages are in memory. Memory is a process's memory beyond its imports, without
file pages. Then follow measurements of our loader alone: one context rank's slice of a row, waits during computation,
random documents, padding and balance.

Other projects are no dependencies: they are found in ``.venv-peers`` in this repository, or in its own environment, and
missing ones are reported. To install them, without CUDA packages:

    python -m venv .venv-peers
    .venv-peers/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    .venv-peers/bin/pip install megatron-core==0.16.1 grain==0.2.18 datasets==5.2.0 brotli zstd python-snappy catalogue
    .venv-peers/bin/pip install boto3 obstore tifffile lightning-utilities requests
    .venv-peers/bin/pip install --no-deps litdata==0.2.76 mosaicml-streaming==0.13.0

``--save`` writes ``benchmarks/results/KIND/delivery.json``; exit code 1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.delivering import details
from benchmarks.delivering.contenders import OURS
from benchmarks.delivering.contest import compete
from benchmarks.delivering.corpus import TOKENS, make_default, make_synthetic
from benchmarks.delivering.peers import PEERS
from data_pipeline.shards.manifest import Manifest

SYNTHETIC, DEFAULT = "synthetic", "default"
SEQ_LENS = (8192, 65_536, 262_144, 1_048_576)
ROUNDS = 2
SAME_WORK = tuple(
    peer.name for peer in PEERS if peer.name.endswith("documents reset") or peer.name.startswith("Grain best fit")
)
"""Peers that keep documents apart as we do."""
SAME_WORK_RATE = 2.0
"""Our rate over theirs, the minimum over row lengths; at 65,536 tokens it is seven times theirs."""
SLICE_TIME, SLICE_SHARE = 0.4, 1 / 14
"""Upper limits over a full row: a slice has a sixteenth of its tokens, but its complete plan and boundaries."""
DOCUMENT_VIEWS, WAIT_MS = 16.0, 2.0
"""Microseconds over a plain array's view: each view requires a lookup in the shard's offsets and a check of the
document's boundaries. Then the wait's limit.
"""
PADDING, STRAGGLER = 0.005, 1.05


def measure(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Measure both corpora."""
    tokens, seq_lens, rounds = TOKENS, SEQ_LENS, ROUNDS
    if quick:
        tokens, seq_lens, rounds = TOKENS // 5, SEQ_LENS[::2], 1
    corpora = {SYNTHETIC: make_synthetic(folder / SYNTHETIC, tokens), DEFAULT: make_default(folder / DEFAULT)}
    result: dict[str, Any] = {"rounds": rounds, "corpora": {}, "rates": {}, "details": {}}
    for name, corpus in corpora.items():
        manifest = Manifest.load(corpus / "shards")
        result["corpora"][name] = {"documents": manifest.documents, "tokens": manifest.tokens}
        print(f"\n{name}: {manifest.documents:,} documents, {manifest.tokens:,} tokens", flush=True)
        result["details"][name] = {
            "slices": details.measure_slices(corpus),
            "waits": details.measure_waits(corpus),
            "documents": details.measure_documents(corpus),
            "packing": [details.measure_packing(corpus, seq_len) for seq_len in seq_lens],
        }
        print(result["details"][name], flush=True)
        result["rates"][name] = compete(corpus, seq_lens, manifest.tokens, rounds)
    return result


def bounds_of(result: dict[str, Any]) -> list[Bound]:
    """Return the bounds on the results."""
    bounds: list[Bound] = []
    for name, rows in result["rates"].items():
        bounds += _bounds_of_rates(name, rows)
    for name, found in result["details"].items():
        bounds += _bounds_of_details(name, found)
    return bounds


def _bounds_of_rates(corpus: str, rows: list[dict[str, Any]]) -> Iterator[Bound]:
    """Return the bounds on our rate compared with a copy's and with peers that do the same work."""
    rates = {(row["contender"], row["seq_len"]): row.get("mtokens_a_cpu_second") for row in rows}
    for row in rows:
        if row["contender"] != OURS:
            continue
        seq_len = row["seq_len"]
        case = f"{corpus}, rows of {seq_len:,}"
        for peer in SAME_WORK:
            # A missing peer sets no bound; the table reports it.
            theirs = rates.get((peer, seq_len))
            if theirs:
                ratio = row["mtokens_a_cpu_second"] / theirs
                what = f"rate over that of {peer}"
                yield Bound(what, round(ratio, 2), SAME_WORK_RATE, case, at_least=True, again=())


def _bounds_of_details(corpus: str, found: dict[str, Any]) -> Iterator[Bound]:
    """Return the bounds on the measurements of our loader alone."""
    slices = found["slices"]
    case = f"{corpus}, a rank of {slices['degree']}, rows of {slices['seq_len']:,}"
    yield Bound(
        "CPU seconds of a slice over its row's", slices["slice_us"] / slices["row_us"], SLICE_TIME, case, again=()
    )
    yield Bound("pages of a slice's tokens over those of its row", slices["touched_share"], SLICE_SHARE, case)
    document = found["documents"]
    views = document["document_us"] / document["view_us"]
    yield Bound("CPU seconds to a random document over those of a view", views, DOCUMENT_VIEWS, corpus, again=())
    why = "time in which other programs had the cores is left out"
    yield Bound(
        "ms that the 99th of 100 steps is waited for", found["waits"]["own_p99_ms"], WAIT_MS, corpus, why, again=()
    )
    for row in found["packing"]:
        case = f"{corpus}, rows of {row['seq_len']:,}"
        beyond = row["padding_share"] - row["least_padding_share"]
        why = "the last row of a corpus is as full as its tokens make it, whatever packs it"
        yield Bound("padding beyond the last row's", beyond, PADDING, case, why)
        cut = row["documents_cut"] - row["documents_longer"]
        yield Bound("documents cut that fit a row", cut, 0, case)
        # Few long rows cannot be balanced: the longest one alone may exceed the mean.
        straggler = row["straggler"] / row["straggler_least"]
        yield Bound("work of the busiest data rank over the least that these rows allow", straggler, STRAGGLER, case)


def main() -> int:
    """Print and save the results; return 1 if one is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse(parser, "a fifth of the synthetic corpus, two lengths of rows, one round")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="longctx-delivery-") as folder:
        result = measure(Path(folder), quick=options.quick)
    return conclude("delivery", result, bounds_of(result), options)


if __name__ == "__main__":
    sys.exit(main())
