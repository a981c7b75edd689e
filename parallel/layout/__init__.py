"""Placement of tokens on ranks. Pure: index arithmetic, without tensors of its own and without processes."""

from parallel.layout.sequence import SequenceLayout

__all__ = ["SequenceLayout"]
