"""Costs per rank: FLOPs, and the rows and bytes that it receives. Pure."""

from __future__ import annotations

from longctx.errors import ConfigError
from parallel.schedule.head_split import AttentionShape, HeadSplit
from parallel.schedule.ring_work import RingWork


def flops(work: int, shape: AttentionShape, ulysses: int, rank: int) -> int:
    """Return forward FLOPs: 2·(D + V) for each of ``work`` query-key pairs and each local head."""
    start, stop = HeadSplit.build(shape.num_heads, shape.num_kv_heads, ulysses).queries[rank % ulysses]
    return 2 * (stop - start) * shape.key_and_value_dim * work


def bytes_received(ring: RingWork, rank: int, shape: AttentionShape, transport: str, ranks_per_node: int | None) -> int:
    """Return the bytes that a rank receives in a forward pass; see ``Schedule.bytes_received``."""
    ring_rank, ulysses_rank = divmod(rank, ring.layout.ulysses)
    split = HeadSplit.build(shape.num_heads, shape.num_kv_heads, ring.layout.ulysses)
    start, stop = split.keys[ulysses_rank]
    rows = _rows_received(ring, ring_rank, transport, ranks_per_node)
    # Ring and Ulysses traffic add up: the ring moves other rows for this rank's heads, Ulysses other heads for its
    # rows.
    keys_and_values = rows * (stop - start) * shape.key_and_value_dim * shape.bytes_per_value
    heads = split.bytes_received(ulysses_rank, ring.layout.num_local(rank), shape.bytes_per_value, shape)
    return keys_and_values + heads


def rows_by_link(ring: RingWork, ring_rank: int, ranks_per_node: int) -> tuple[int, int]:
    """Return (rows from this node, rows from other nodes) that a ring rank receives under ``two_level``."""
    node, local_rank = divmod(ring_rank, ranks_per_node)
    ranks_in_node = range(node * ranks_per_node, (node + 1) * ranks_per_node)
    within = across = 0
    for owner in range(ring.layout.ring_degree):
        owner_node, owner_local_rank = divmod(owner, ranks_per_node)
        if owner == ring_rank:
            continue
        if owner_node != node and owner_local_rank == local_rank:  # this rank receives them for its node
            across += ring.rows_to_node(owner, ranks_in_node).num_rows
        else:  # from a rank in this node: its own rows, or rows that it received for the node
            within += ring.hop(ring_rank, owner).num_rows
    return within, across


def _rows_received(ring: RingWork, ring_rank: int, transport: str, ranks_per_node: int | None) -> int:
    # A ring rank's own rows are never sent, under any transport.
    degree = ring.layout.ring_degree
    if transport == "p2p":
        return sum(ring.hop(ring_rank, owner).num_rows for owner in range(degree) if owner != ring_rank)
    if transport == "all_gather":
        return ring.key_layout.num_tokens - ring.key_layout.num_ring(ring_rank)
    if transport != "two_level":
        raise ConfigError(f"parallel.transport={transport!r} is unknown. Try p2p, two_level or all_gather.")
    return sum(rows_by_link(ring, ring_rank, ranks_per_node or degree))
