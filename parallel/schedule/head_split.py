"""Heads per rank: HeadSplit, AttentionShape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from longctx.errors import ConfigError

HeadRange = tuple[int, int]
"""Heads [start, stop)."""


@dataclass(frozen=True)
class HeadSplit:
    """Heads that each of ``ulysses`` ranks computes."""

    queries: tuple[HeadRange, ...]
    """Query heads per rank: disjoint; together all heads."""
    keys: tuple[HeadRange, ...]
    """Key/value heads that each rank's query heads use; ranks may share one."""
    group_size: int
    """Query heads that share a key head."""

    @classmethod
    def build(cls, num_heads: int, num_kv_heads: int, ulysses: int) -> HeadSplit:
        """Build the split. Raise ConfigError if there are fewer query heads than ranks, or if key heads do not divide
        them.
        """
        check_heads(num_heads, num_kv_heads, ulysses)
        group = num_heads // num_kv_heads
        # Rounded cuts differ by at most one head. A rank needs the key heads from its first to its last query head.
        queries = [(num_heads * r // ulysses, num_heads * (r + 1) // ulysses) for r in range(ulysses)]
        keys = [(start // group, (stop - 1) // group + 1) for start, stop in queries]
        return cls(tuple(queries), tuple(keys), group)

    def key_of_query(self, rank: int) -> list[int] | None:
        """Return the rank-local key head for each of the rank's query heads; None if they group evenly."""
        (start, stop), (first, last) = self.queries[rank], self.keys[rank]
        wanted = [head // self.group_size - first for head in range(start, stop)]
        # Kernels group query heads evenly over key heads; if the local heads do so too, keys need no expansion.
        even, rest = divmod(stop - start, last - first)
        if not rest and wanted == [head // even for head in range(stop - start)]:
            return None
        return wanted

    def bytes_received(self, rank: int, num_local: int, bytes_per_value: int, shape: AttentionShape) -> int:
        """Return the bytes that a rank receives in the forward all-to-alls: its heads for all rows, and its rows'
        outputs.
        """
        (start, stop), (first, last) = self.queries[rank], self.keys[rank]
        value_dim = shape.key_and_value_dim - shape.head_dim
        # Before attention: queries, keys and values for this rank's heads. After it: outputs for its rows' other heads.
        row = (stop - start) * shape.head_dim + (last - first) * shape.key_and_value_dim
        others = num_local * (len(self.queries) - 1) * row
        back = num_local * (shape.num_heads - (stop - start)) * value_dim
        return (others + back) * bytes_per_value


def check_heads(num_heads: int, num_kv_heads: int, ulysses: int) -> None:
    """Raise ConfigError unless ``ulysses`` ranks can share the heads."""
    if num_heads % num_kv_heads:
        raise ConfigError(f"{num_kv_heads} key heads do not divide {num_heads} query heads.")
    if ulysses > num_heads:
        raise ConfigError(
            f"parallel.ulysses={ulysses} exceeds the {num_heads} query heads that it splits.\n"
            f"Try parallel.ulysses={num_heads} or less; parallel.context may stay, and the other ranks form the ring."
        )


class AttentionShape(NamedTuple):
    """Sizes that convert rows to bytes, and query-key pairs to FLOPs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_value: int
    value_dim: int | None = None
    """Head size for values; None if equal to ``head_dim``."""

    @property
    def key_and_value_dim(self) -> int:
        """Sum over both head sizes."""
        if self.value_dim is None:
            return 2 * self.head_dim
        return self.head_dim + self.value_dim
