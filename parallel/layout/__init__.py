"""Which token lives on which rank. Pure: index arithmetic without tensors of their own and without processes."""

from parallel.layout.sequence import SequenceLayout

__all__ = ["SequenceLayout"]
