"""Balance of each layout's attention and number of rows sent, on packed rows of a real corpus.

    python -m benchmarks.layouts [--data runs/data] [--seq-len 65536] [--degrees 8 16] [--rows 100]

Causal attention inside each document. Imbalance is the busiest rank's work over the mean. Rows are key/value rows that
all ranks together receive if only needed ones are sent. They are compared with zigzag's; with a lower bound for any
even layout (see ``least_rows``); with zigzag within every document, which cuts each into 2·R ranges (equally even;
closed form); and with a ring that passes every row to every rank. Milliseconds are CPU time to build.

Two baselines that no training run can choose assign the token chunks of ``balanced``, most work first. ``heap`` gives
each to the rank with the least work so far, like MagiAttention's solver. ``affine heap`` allows as much imbalance as
``balanced`` and gives each to the rank that needs the fewest more rows for it, so the two can be compared at the same
balance.

The second table is the basis for ``parallel.layout = "auto"`` (``parallel/layout/layout_choice.py``): each kind of
attention layer under each layout, over one document and over packed rows.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from benchmarks.machine import offer_save, save
from data_pipeline.loader import build_loader
from parallel.layout.balanced import Chunks, WorkCost, chunk_pieces, cut_chunks
from parallel.layout.sequence import KINDS, SequenceLayout, TokenRun
from parallel.schedule.attention_schedule import Schedule

TOLERANCE = 1.05
"""Imbalance that ``least_rows`` allows."""


@dataclass(frozen=True)
class Figures:
    """One table line: sums or means over the packed rows."""

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
    """Rows received by the rank with the most, mean over packed rows."""
    runs_per_rank: float
    milliseconds: float


@dataclass(frozen=True)
class MaskFigures:
    """One kind of attention layer under one layout: means over the sequences."""

    documents: str
    mask: str
    """A window is given as a fraction of a rank's tokens."""
    layout: str
    degree: int
    imbalance: float
    rows_a_token: float
    """Rows that all ranks together receive, per token of the sequence."""


def work_and_rows(layout: SequenceLayout, cu_seqlens: np.ndarray) -> tuple[list[int], list[int]]:
    """Return, for each rank, the query-key pairs it computes and the rows it must receive."""
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
    """Return a lower bound on the rows received under any layout with equal tokens and at most ``TOLERANCE`` imbalance.

    A document's tokens after token x are on m(x) ranks, and each of these receives or owns token x, so the rows are Σ
    m(x) − tokens. No rank exceeds its equal portion of tokens, or that of work times the tolerance: m(x) is at least
    the tokens, or the work, after x divided by that portion, rounded up.
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


def heap_layout(num_tokens: int, degree: int, cu_seqlens: list[int]) -> SequenceLayout:
    """Assign equal token chunks, most work first, each to the rank with the least work among those that lack chunks."""
    chunks = cut_chunks(num_tokens, degree, np.unique(cu_seqlens))
    owner = np.empty(len(chunks.start), dtype=np.int64)
    assigned = [0] * degree
    loads = [(int(work), rank) for rank, work in enumerate(chunks.remainder_work)]
    heapq.heapify(loads)
    for chunk in np.argsort(-chunks.work, kind="stable").tolist():
        work, rank = heapq.heappop(loads)
        owner[chunk] = rank
        assigned[rank] += 1
        if assigned[rank] < chunks.per_rank:  # a rank with all its token chunks does not come back
            heapq.heappush(loads, (work + int(chunks.work[chunk]), rank))
    return _layout_of("heap", num_tokens, chunks, owner)


def affine_heap_layout(num_tokens: int, degree: int, cu_seqlens: list[int]) -> SequenceLayout:
    """Assign the same token chunks, each to the rank that needs the fewest more rows, while its work stays in the
    tolerance.
    """
    chunks = cut_chunks(num_tokens, degree, np.unique(cu_seqlens))
    owner = np.empty(len(chunks.start), dtype=np.int64)
    load = chunks.remainder_work.copy()
    limit = WorkCost.of(chunks).limit
    free = np.full(degree, chunks.per_rank)
    reach = np.zeros((degree, int(chunks.document[-1]) + 1), dtype=np.int64)  # the longest prefix that a rank needs
    for chunk in np.argsort(-chunks.work, kind="stable").tolist():
        document, prefix, work = chunks.document[chunk], chunks.prefix[chunk], chunks.work[chunk]
        candidates = np.flatnonzero(free)
        within = candidates[load[candidates] + work <= limit]
        if len(within):
            more_rows = np.maximum(prefix - reach[within, document], 0)
            rank = within[np.lexsort((load[within], more_rows))[0]]
        else:
            rank = candidates[np.argmin(load[candidates])]
        owner[chunk] = rank
        free[rank] -= 1
        load[rank] += work
        reach[rank, document] = max(reach[rank, document], prefix)
    return _layout_of("affine heap", num_tokens, chunks, owner)


def _layout_of(name: str, num_tokens: int, chunks: Chunks, owner: np.ndarray) -> SequenceLayout:
    """Return the layout in which each token chunk is on its owner."""
    runs = tuple(tuple(TokenRun(start, count, 1) for start, count in pieces) for pieces in chunk_pieces(chunks, owner))
    return SequenceLayout(name, num_tokens, chunks.degree, 1, runs)


BUILDERS: dict[str, Callable[[int, int, list[int]], SequenceLayout]] = {
    **{kind: partial(SequenceLayout.build, kind) for kind in KINDS},
    "heap": heap_layout,
    "affine heap": affine_heap_layout,
}
"""Every layout by name, and the baselines."""


def measure(name: str, degree: int, packed: list[np.ndarray], zigzag: int | None, least: int) -> Figures:
    """Measure one kind of layout over all packed rows."""
    imbalance, rows, busiest, runs, seconds = [], 0, [], [], 0.0
    for cu_seqlens in packed:
        tokens = int(cu_seqlens[-1])
        begin = time.process_time()
        layout = BUILDERS[name](tokens, degree, cu_seqlens.tolist())
        seconds += time.process_time() - begin
        work, received = work_and_rows(layout, cu_seqlens)
        imbalance.append(max(work) * degree / sum(work))
        rows += sum(received)
        busiest.append(max(received))
        runs.append(sum(len(r) for r in layout.runs) / degree)
    plain = sum(int(cu[-1]) for cu in packed) * (degree - 1)
    return Figures(
        name,
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
    """Measure every kind, zigzag first."""
    least = sum(least_rows(cu, degree) for cu in packed)
    zigzag = measure("zigzag", degree, packed, None, least)
    others = [name for name in BUILDERS if name != "zigzag"]
    return [zigzag, *(measure(name, degree, packed, zigzag.rows, least) for name in others)]


def measure_masks(degree: int, packed: list[np.ndarray]) -> Iterator[MaskFigures]:
    """Measure every mask under every layout, over one document and over the packed rows."""
    num_tokens = int(packed[0][-1])
    shard = num_tokens // degree
    masks: dict[str, dict[str, Any]] = {
        "full": {},
        "window 1/32": {"window": shard // 32},
        "window 1/8": {"window": shard // 8},
        "window 1/4": {"window": shard // 4},
        "window 1": {"window": shard},
        "sparse": {"window": 128, "stride": 64},
    }
    sequences = {"one document": [[0, num_tokens]], "packed": [bounds.tolist() for bounds in packed]}
    for (documents, rows), (mask, options), kind in product(sequences.items(), masks.items(), KINDS):
        imbalance, received = [], 0
        for bounds in rows:
            layout = SequenceLayout.build(kind, num_tokens, degree, bounds)
            schedule = Schedule.build(layout, bounds, **options)
            imbalance.append(schedule.imbalance())
            received += sum(schedule.rows_received(rank) for rank in range(degree))
        rows_a_token = received / (num_tokens * len(rows))
        yield MaskFigures(documents, mask, kind, degree, round(float(np.mean(imbalance)), 3), round(rows_a_token, 3))


def print_masks(found: Sequence[MaskFigures]) -> None:
    """Print a line per mask: imbalance and rows per token for every layout."""
    print("\nattention over " + "   ".join(f"{kind:>14}" for kind in ("", "", *KINDS)))
    for number in range(0, len(found), len(KINDS)):
        line = found[number : number + len(KINDS)]
        cells = "   ".join(f"{f.imbalance:7.2f} · {f.rows_a_token:.2f}" for f in line)
        print(f"{line[0].documents:>13} {line[0].degree:3d} {line[0].mask:>12}   {cells}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="runs/data", help="a shard folder")
    parser.add_argument("--seq-len", type=int, default=65_536)
    parser.add_argument("--degrees", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rows", type=int, default=100, help="packed rows, at most one epoch")
    offer_save(parser)
    wanted = parser.parse_args()
    loader = build_loader(wanted.data, seq_len=wanted.seq_len, rows_per_step=1)
    count = min(wanted.rows, loader.pack_report().rows)
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
    masks = [found for degree in wanted.degrees for found in measure_masks(degree, packed[:10])]
    print_masks(masks)
    result = {"seq_len": wanted.seq_len, "packed_rows": count, "layouts": [asdict(f) for f in lines]}
    if wanted.save:
        print(f"saved in {save('layouts', {**result, 'masks': [asdict(f) for f in masks]})}")


if __name__ == "__main__":
    main()
