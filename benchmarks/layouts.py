"""How even the layouts' attention is and how many rows travel, on packed rows of a real corpus.

    python -m benchmarks.layouts [--data runs/data] [--seq-len 65536] [--degrees 8 16] [--rows 100]

Causal attention inside each document. Imbalance is the busiest rank's work over the mean. Rows are key/value rows that
all ranks together receive when only needed ones travel. They are held against zigzag's; against the least that any even
layout could do (see ``least_rows``); against zigzag within every document, which cuts each into 2·R parts (even as
well; closed form); and against a ring that passes every row to every rank. Milliseconds are CPU time to build.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.machine import save
from data_pipeline.loader import build_loader
from parallel.layout.sequence import KINDS, SequenceLayout

TOLERANCE = 1.05
"""Imbalance that ``least_rows`` allows."""


@dataclass(frozen=True)
class Figures:
    """One line of the table: sums or means over the packed rows."""

    layout: str
    degree: int
    imbalance_mean: float
    imbalance_worst: float
    rows: int
    rows_of_zigzag: float
    rows_of_least: float
    rows_of_document_zigzag: float
    rows_of_plain_ring: float
    busiest_receiver: int
    """Rows that the rank with the most receives, mean over packed rows."""
    runs_per_rank: float
    milliseconds: float


def work_and_rows(layout: SequenceLayout, cu_seqlens: np.ndarray) -> tuple[list[int], list[int]]:
    """For each rank the query-key pairs it computes and the rows it must receive."""
    work, rows = [], []
    for rank in range(layout.degree):
        tokens = layout.indices(rank).numpy()
        document = np.searchsorted(cu_seqlens, tokens, side="right") - 1
        seen = tokens - cu_seqlens[document] + 1  # keys that each query sees
        last = np.append(document[1:] != document[:-1], True)
        work.append(int(seen.sum()))
        rows.append(int(seen[last].sum()) - len(tokens))
    return work, rows


def least_rows(cu_seqlens: np.ndarray, degree: int) -> int:
    """A bound from below on the rows received under any layout of equal tokens and at most ``TOLERANCE`` imbalance.

    The tokens of a document behind place x lie on m(x) ranks, and each of these receives or owns the token at x, so
    the rows are Σ m(x) − tokens. No rank has more than its share of tokens or work: m(x) is at least what lies behind
    x, divided by either, rounded up.
    """
    lengths = np.diff(cu_seqlens).astype(np.int64)
    share = int(lengths.sum()) // degree
    most = TOLERANCE * float((lengths * (lengths + 1) // 2).sum()) / degree
    total = 0
    for length in lengths.tolist():
        x = np.arange(length, dtype=np.int64)
        behind = (length * (length + 1) - x * (x + 1)) / 2
        ranks = np.maximum(np.ceil((length - x) / share), np.ceil(behind / most - 1e-9))
        total += int(ranks.sum()) - length
    return total


def measure(kind: str, degree: int, packed: list[np.ndarray], zigzag: int | None, least: int) -> Figures:
    """One kind of layout over all packed rows."""
    imbalance, rows, busiest, runs, seconds = [], 0, [], [], 0.0
    for cu_seqlens in packed:
        tokens = int(cu_seqlens[-1])
        begin = time.process_time()
        layout = SequenceLayout.build(kind, tokens, degree, cu_seqlens.tolist())
        seconds += time.process_time() - begin
        work, received = work_and_rows(layout, cu_seqlens)
        imbalance.append(max(work) * degree / sum(work))
        rows += sum(received)
        busiest.append(max(received))
        runs.append(sum(len(r) for r in layout.runs) / degree)
    plain = sum(int(cu[-1]) for cu in packed) * (degree - 1)
    return Figures(
        kind,
        degree,
        round(float(np.mean(imbalance)), 4),
        round(max(imbalance), 4),
        rows,
        round(rows / (zigzag or rows), 3),
        round(rows / max(least, 1), 3),
        round(rows / (0.75 * plain), 3),
        round(rows / plain, 3),
        int(np.mean(busiest)),
        round(float(np.mean(runs)), 2),
        round(1e3 * seconds / len(packed), 2),
    )


def table(degree: int, packed: list[np.ndarray]) -> list[Figures]:
    """Every kind, zigzag first."""
    least = sum(least_rows(cu, degree) for cu in packed)
    zigzag = measure("zigzag", degree, packed, None, least)
    return [zigzag, *(measure(kind, degree, packed, zigzag.rows, least) for kind in KINDS if kind != "zigzag")]


def main() -> None:
    """Print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="runs/data", help="a shard folder")
    parser.add_argument("--seq-len", type=int, default=65_536)
    parser.add_argument("--degrees", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rows", type=int, default=100, help="packed rows, at most one epoch")
    wanted = parser.parse_args()
    loader = build_loader(wanted.data, seq_len=wanted.seq_len, rows_per_step=1)
    count = min(wanted.rows, loader.num_rows)
    packed = [next(loader).cu_seqlens.numpy() for _ in range(count)]
    documents = sum(len(cu) - 1 for cu in packed) / count
    print(f"{count} rows of {wanted.seq_len:,} tokens, {documents:.0f} documents in each")
    print(
        "            ranks   imbalance: mean  worst   rows: ×zigzag ×least ×by document ×plain ring   most  runs     ms"
    )
    lines = [line for degree in wanted.degrees for line in table(degree, packed)]
    for f in lines:
        print(
            f"{f.layout:>11} {f.degree:5d} {f.imbalance_mean:17.3f} {f.imbalance_worst:6.3f} {f.rows_of_zigzag:15.2f}"
            f" {f.rows_of_least:6.2f} {f.rows_of_document_zigzag:12.2f} {f.rows_of_plain_ring:11.2f}"
            f" {f.busiest_receiver:6d} {f.runs_per_rank:5.1f} {f.milliseconds:6.1f}"
        )
    path = save("layouts", {"seq_len": wanted.seq_len, "packed_rows": count, "layouts": [asdict(f) for f in lines]})
    print(f"saved in {path}")


if __name__ == "__main__":
    main()
