"""``Schedule``: each rank's work with each other rank's keys. Pure; needs no process.

A *ring rank* represents the ranks that hold the same rows: a single rank, or the ``ulysses`` ranks that split its
heads. For every ordered pair of ring ranks, the schedule contains the rows that the owner sends (only those that some
query on the receiver sees) and the receiver's work with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from longctx.kernels.attention.slices import AttentionSlice, shift_table, table_slices
from parallel.layout.sequence import SequenceLayout
from parallel.schedule import costs
from parallel.schedule.bands import area
from parallel.schedule.head_split import AttentionShape
from parallel.schedule.ring_work import Hop, RingWork


class Schedule(RingWork):
    """Every rank's work for one layout, one set of documents and one mask."""

    @classmethod
    def build(
        cls,
        layout: SequenceLayout,
        cu_seqlens: Sequence[int] | Tensor | PackedDocuments | None = None,
        causal: bool = True,
        window: int | None = None,
        sink_tokens: int = 0,
        key_layout: SequenceLayout | None = None,
        stride: int = 0,
        key_documents: PackedDocuments | None = None,
    ) -> Schedule:
        """Build the schedule for documents that end at ``cu_seqlens`` (default: one document).

        A query sees the keys in its document with 0 ≤ i − j (any, if not causal). With a window it sees those with 0 ≤
        i − j < window (|i − j| < window), plus the document's first ``sink_tokens`` at any distance or, if causal,
        every key a multiple of ``stride`` before it.

        With ``key_documents`` (cross attention) the keys belong to another sequence, in ``key_layout``: a query sees
        all keys in the key document with its own document's index; no keys if that document is empty.

        Raise ConfigError if the boundaries do not ascend from 0 to the layout's token count, or the mask is invalid.
        """
        documents = PackedDocuments.of(cu_seqlens, layout.num_tokens)
        if documents.prefixes:
            raise ConfigError("documents over ranks cannot share a prefix yet: give each one its own copy.")
        check_window(window, sink_tokens)
        check_stride(stride, window, sink_tokens)
        if key_layout is None:
            key_layout = layout
        if key_documents is None:
            check_key_layout(layout, key_layout, stride)
            return cls(layout, key_layout, documents.bounds, causal, window, sink_tokens, stride)
        check_key_documents(layout, documents, key_layout, key_documents)
        if causal or window is not None or sink_tokens or stride:
            raise ConfigError(
                "cross attention sees complete source documents: it has no causal mask, window, sink tokens or stride."
            )
        return cls(layout, key_layout, documents.bounds, False, None, 0, key_cu_seqlens=key_documents.bounds)

    def with_relative_positions(self) -> Schedule:
        """Return the schedule with each slice's distances, for scores that depend on them."""
        if self.relative_positions:
            return self
        return replace(self, relative_positions=True)

    @property
    def digest(self) -> str:
        """Checksum, equal on all ranks that share a sequence."""
        # `relative_positions` is excluded: it changes a rank's work, not the rows that are sent.
        layouts = [(x.kind, x.num_tokens, x.degree, x.ulysses, x.runs) for x in (self.layout, self.key_layout)]
        mask = (self.cu_seqlens, self.causal, self.window, self.sink_tokens, self.stride)
        if self.key_cu_seqlens is not None:
            mask += (self.key_cu_seqlens,)
        return blake2b(repr((layouts, mask)).encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        """Return a one-line summary with layout and mask."""
        layout = self.layout
        kind = "bidirectional"
        if self.causal:
            kind = "causal"
        summary = (
            f"{layout.kind} layout, {layout.num_tokens} tokens over {layout.degree} ranks "
            f"(ulysses {layout.ulysses}), {len(self.cu_seqlens) - 1} documents, {kind}"
        )
        if self.window is not None:
            summary += f", window {self.window}, {self.sink_tokens} sink tokens"
        if self.stride:
            summary += f", stride {self.stride}"
        if self.key_cu_seqlens is not None:
            summary += f", keys from another sequence: {self.key_layout.kind}, {self.key_layout.num_tokens} tokens"
        return summary

    def hops(self, rank: int) -> tuple[Hop, ...]:
        """Return a rank's work per hop; hop h uses the keys of the ring rank h positions before its own (hop 0: its
        own).
        """
        degree = self.layout.ring_degree
        receiver = rank // self.layout.ulysses
        # The ring's timeline: at hop h, ring rank r computes with the keys from ring rank r − h. Invariant: in each hop
        # every ring rank is the receiver once and the owner once, which balances the links.
        return tuple(self.hop(receiver, (receiver - h) % degree) for h in range(degree))

    def pairs(self, rank: int) -> tuple[tuple[AttentionSlice, ...], ...]:
        """Return each hop's slices: query rows count within the ring rank's rows, key rows as received.

        They exclude a stride's work, which counts rows in another order; see ``Hop.work``.
        """
        pairs: list[tuple[AttentionSlice, ...]] = []
        for hop in self.hops(rank):
            if not hop.work:
                pairs.append(())
                continue
            # A hop's slices count from its first query row with work.
            table = shift_table(hop.work[0].slices, queries=hop.queries[0])
            pairs.append(table_slices(table))
        return tuple(pairs)

    def rows_received(self, rank: int) -> int:
        """Return how many key/value rows a rank's ring rank receives."""
        return sum(hop.num_rows for hop in self.hops(rank)[1:])

    def work(self, rank: int) -> int:
        """Return how many query-key pairs a rank's ring rank computes per head."""
        return sum(area(work.slices.numpy()) for hop in self.hops(rank) for work in hop.work)

    def imbalance(self) -> float:
        """Return the most work on a ring rank over the mean: 1.0 if attention is even."""
        # One rank per ring rank suffices: the others split its heads and have the same pairs.
        work = [self.work(rank) for rank in range(0, self.layout.degree, self.layout.ulysses)]
        return max(work) * len(work) / sum(work)

    def flops(self, rank: int, shape: AttentionShape) -> int:
        """Return a rank's forward FLOPs, 2·(D + V) per pair and head; backward takes 2.5 × that."""
        return costs.flops(self.work(rank), shape, self.layout.ulysses, rank)

    def bytes_received(
        self, rank: int, shape: AttentionShape, transport: str = "p2p", ranks_per_node: int | None = None
    ) -> int:
        """Return the bytes that a rank receives in a forward pass: keys and values, and heads if Ulysses exchanges
        them.

        ``p2p`` delivers the needed rows, ``all_gather`` all rows. ``two_level`` delivers the needed rows plus rows that
        the rank only forwards within its node (with ``ranks_per_node`` ring ranks).
        """
        return costs.bytes_received(self, rank, shape, transport, ranks_per_node)

    def rows_by_link(self, ring_rank: int, ranks_per_node: int) -> tuple[int, int]:
        """Return (rows from this node, rows from other nodes) that a ring rank receives under ``two_level``."""
        return costs.rows_by_link(self, ring_rank, ranks_per_node)


def check_window(window: int | None, sink_tokens: int) -> None:
    """Raise ConfigError unless window and sink tokens form a valid mask."""
    if window is not None and window < 1:
        raise ConfigError(f"window={window} must be at least 1 (a query sees itself), or None for no window.")
    if sink_tokens < 0 or (sink_tokens and window is None):
        raise ConfigError(f"sink_tokens={sink_tokens} with window={window}: give a window, and at least 0 sink tokens.")


def check_stride(stride: int, window: int | None, sink_tokens: int) -> None:
    """Raise ConfigError unless the stride is compatible with the mask."""
    if stride < 0 or (stride and (window is None or sink_tokens)):
        raise ConfigError(
            f"stride={stride} (0 disables it) needs a window and no sink tokens; got window={window}, "
            f"sink_tokens={sink_tokens}."
        )


def check_key_documents(
    layout: SequenceLayout, documents: PackedDocuments, keys: SequenceLayout, key_documents: PackedDocuments
) -> None:
    """Raise ConfigError unless query and key documents correspond one to one, and both sequences share their ranks."""
    if key_documents.num_documents != documents.num_documents:
        raise ConfigError(
            f"the queries have {documents.num_documents} documents, the keys {key_documents.num_documents}: query "
            "document i sees key document i. Give both equally many; a document may be empty."
        )
    if key_documents.num_tokens != keys.num_tokens:
        raise ConfigError(f"the keys' layout has {keys.num_tokens} tokens, their documents {key_documents.num_tokens}.")
    if (keys.degree, keys.ulysses) != (layout.degree, layout.ulysses):
        raise ConfigError(
            f"the keys' layout has context {keys.degree} and ulysses {keys.ulysses}, the queries' "
            f"{layout.degree} and {layout.ulysses}; both must match."
        )


def check_key_layout(layout: SequenceLayout, keys: SequenceLayout, stride: int) -> None:
    """Raise ConfigError unless keys may have this layout."""
    if (keys.num_tokens, keys.ring_degree) != (layout.num_tokens, layout.ring_degree):
        raise ConfigError(
            f"the keys' layout has {keys.num_tokens} tokens on {keys.ring_degree} ring ranks, the queries' "
            f"{layout.num_tokens} on {layout.ring_degree}; both must match."
        )
    if stride and keys != layout:
        raise ConfigError(f"stride={stride} needs queries and keys in one layout; leave key_layout out.")
