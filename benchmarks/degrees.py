"""Rows placed in parallel with ``parallel.tokens_per_rank``, and with fixed degrees, on rows of a real corpus.

    python -m benchmarks.degrees [--data runs/data] [--seq-lens 2048 8192 32768] [--contexts 2 3 4 5 7 8 16]
                                 [--tokens-per-rank 8192] [--micro-batches 20]

Causal attention inside each document; layouts and schedules are those of training runs, and nothing is sent. If the
ranks cannot hold a row, each takes as many tokens as it needs. For each number of ranks:

* ``attention`` of the busiest rank over the mean, and the same ratio for tokens without padding. With padding every
  rank holds equally many; the last rows of an epoch are mostly padding.
* ``ranks a document``, compared with the fewest that hold its tokens, and the fewest that hold its tokens and at most
  1.05 of the mean attention.
* key/value rows that all ranks receive, per token.

Two fixed degrees are measured on the same rows: all ranks, one row at a time (``wide``), and the fewest ranks that hold
a row and divide the total, as data ranks (``narrow``), which wait for the busiest of all. Exit code 1 if a rank has
more than 1.05 of the mean attention in any micro-batch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.machine import offer_save, save
from data_pipeline.loader import build_loader
from longctx.batch import PADDING_DOCUMENT, Batch
from parallel.layout.sequence import SequenceLayout
from parallel.layout.tokens_per_rank import rows_at_once, tokens_on_ranks
from parallel.schedule.attention_schedule import Schedule
from parallel.schedule.degrees import degrees_of

LIMIT = 1.05
"""Maximum attention per rank over the mean."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One micro-batch on its ranks."""

    work: list[int]
    """Query-key pairs per rank."""
    tokens: list[int]
    """Tokens per rank without padding."""
    received: int
    """Key/value rows that all ranks receive."""
    ranks: int
    """Ranks, summed over documents."""
    fewest: int
    fewest_even: int
    """Fewest ranks with attention within ``LIMIT``."""
    documents: int
    padding: int
    """Tokens after the last row."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Results for one number of ranks: means over micro-batches, and the worst of them."""

    seq_len: int
    context: int
    """Ranks."""
    tokens_per_rank: int
    rows: int
    micro_batches: int
    padding: float
    """Fraction of all tokens."""
    tokens_mean: float
    attention_mean: float
    attention_worst: float
    ranks: float
    fewest: float
    fewest_even: float
    rows_a_token: float
    wide_rows_a_token: float
    narrow_degree: int
    narrow_attention_mean: float
    narrow_rows_a_token: float


def place(batch: Batch, ranks: int, tokens_per_rank: int) -> Placed:
    """Place a micro-batch's rows in parallel on this many ranks."""
    given = batch.documents.num_tokens
    padded = batch.padded(tokens_on_ranks(given, ranks, ulysses=1, tokens_per_rank=tokens_per_rank))
    layout = SequenceLayout.build("balanced", padded.documents.num_tokens, ranks, padded.documents)
    schedule, degrees = Schedule.build(layout, padded.documents), degrees_of(layout, padded.documents)
    work = [schedule.work(rank) for rank in range(ranks)]
    shards = [layout.split(padded.document_ids, rank, 1) for rank in range(ranks)]
    padding = batch.documents.padding or ()
    lengths = np.array([n for number, n in enumerate(batch.documents.lengths) if n and number not in padding])
    even = np.ceil(lengths * (lengths + 1) / 2 / (LIMIT * sum(work) / ranks))
    return Placed(
        work=work,
        tokens=[int((shard != PADDING_DOCUMENT).sum()) for shard in shards],
        received=sum(schedule.rows_received(rank) for rank in range(ranks)),
        ranks=sum(degrees.ranks),
        fewest=sum(degrees.min_ranks),
        fewest_even=int(np.maximum(even, degrees.min_ranks).sum()),
        documents=len(lengths),
        padding=padded.documents.num_tokens - given,
    )


def busiest(values: Sequence[int]) -> float:
    """Return the maximum over the mean."""
    return max(values) * len(values) / sum(values)


def batches(data: str, seq_len: int, rows: int, count: int, groups: int = 1) -> Iterator[list[Batch]]:
    """Yield each step's micro-batches with this many rows, one per group; at most an epoch, at least one step."""
    loaders = [
        build_loader(
            data,
            seq_len=seq_len,
            rows_per_step=rows * groups,
            micro_batch_rows=rows,
            data_rank=group,
            data_degree=groups,
            verify=False,
        )
        for group in range(groups)
    ]
    steps = max(1, min(count, loaders[0].pack_report().rows // (rows * groups)))
    for _ in range(steps):
        yield [next(loader) for loader in loaders]


def wide(data: str, seq_len: int, context: int, count: int) -> float:
    """Return the rows received per token with a fixed degree of all ranks, one row at a time."""
    placed = [place(batch, context, seq_len) for (batch,) in batches(data, seq_len, 1, count)]
    return sum(p.received for p in placed) / (len(placed) * seq_len)


def narrow(data: str, seq_len: int, context: int, tokens_per_rank: int, count: int) -> tuple[int, float, float]:
    """Return (degree, mean imbalance over all ranks, rows received per token) for the fewest ranks per row, in
    parallel.
    """
    needed = -(-seq_len // tokens_per_rank)
    degree = min(n for n in range(needed, context + 1) if context % n == 0)
    rows = rows_at_once(seq_len, degree, tokens_per_rank)
    imbalance, received, tokens = [], 0, 0
    for step in batches(data, seq_len, rows, count, context // degree):
        placed = [place(batch, degree, tokens_per_rank) for batch in step]
        imbalance.append(busiest([work for p in placed for work in p.work]))
        received += sum(p.received for p in placed)
        tokens += rows * seq_len * len(placed)
    return degree, float(np.mean(imbalance)), received / tokens


def measure(data: str, seq_len: int, context: int, tokens_per_rank: int, count: int) -> Figures:
    """Measure this many ranks over their micro-batches, and the same rows with fixed degrees."""
    # Round to a kernel's full tiles.
    most = max(tokens_per_rank, -(-seq_len // context // 128) * 128)
    if most * context < seq_len:
        most += 128
    rows = rows_at_once(seq_len, context, most)
    placed = [place(batch, context, most) for (batch,) in batches(data, seq_len, rows, count)]
    documents = sum(p.documents for p in placed)
    attention = [busiest(p.work) for p in placed]
    degree, narrow_mean, narrow_rows = narrow(data, seq_len, context, most, count)
    return Figures(
        seq_len=seq_len,
        context=context,
        tokens_per_rank=most,
        rows=rows,
        micro_batches=len(placed),
        padding=round(sum(p.padding for p in placed) / (len(placed) * rows * seq_len), 5),
        tokens_mean=round(float(np.mean([busiest(p.tokens) for p in placed])), 4),
        attention_mean=round(float(np.mean(attention)), 4),
        attention_worst=round(max(attention), 4),
        ranks=round(sum(p.ranks for p in placed) / documents, 3),
        fewest=round(sum(p.fewest for p in placed) / documents, 3),
        fewest_even=round(sum(p.fewest_even for p in placed) / documents, 3),
        rows_a_token=round(sum(p.received for p in placed) / (len(placed) * rows * seq_len), 4),
        wide_rows_a_token=round(wide(data, seq_len, context, len(placed) * rows), 4),
        narrow_degree=degree,
        narrow_attention_mean=round(narrow_mean, 4),
        narrow_rows_a_token=round(narrow_rows, 4),
    )


def line(f: Figures) -> str:
    """Format one number of ranks for the console."""
    return (
        f"{f.seq_len:6d} {f.context:5d} {f.tokens_per_rank:7d} {f.rows:5d} {f.micro_batches:4d}"
        f" {100 * f.padding:7.2f} %"
        f" {f.tokens_mean:7.3f} {f.attention_mean:7.3f} {f.attention_worst:6.3f} {f.ranks:7.2f} {f.fewest:5.2f}"
        f" {f.fewest_even:5.2f} {f.rows_a_token:9.3f} {f.wide_rows_a_token:6.3f} {f.narrow_rows_a_token:6.3f}"
        f" {f.narrow_degree:4d} {f.narrow_attention_mean:6.3f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if attention is uneven."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="runs/data", help="a shard folder")
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[2048, 8192, 32_768])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2, 3, 4, 5, 7, 8, 16])
    parser.add_argument("--tokens-per-rank", type=int, default=8192)
    parser.add_argument("--micro-batches", type=int, default=20, help="of each number of ranks, at most an epoch")
    offer_save(parser)
    wanted = parser.parse_args(arguments)
    print(
        "seq_len ranks  tokens  rows    n    padding  tokens  attention: mean, worst  ranks, fewest, even "
        "   rows a token, wide, narrow  narrow degree, attention"
    )
    found = []
    for seq_len in wanted.seq_lens:
        for context in wanted.contexts:
            found.append(measure(wanted.data, seq_len, context, wanted.tokens_per_rank, wanted.micro_batches))
            print(line(found[-1]), flush=True)
    if wanted.save:
        print(f"saved in {save('degrees', {'limit': LIMIT, 'rows': [asdict(f) for f in found]})}")
    return int(any(f.attention_worst > LIMIT for f in found))


if __name__ == "__main__":
    sys.exit(main())
