"""Placement of tokens on ranks: pure index arithmetic, without tensors or processes."""

from parallel.layout.sequence import SequenceLayout

__all__ = ["SequenceLayout"]
