"""Attention over a sequence that is spread over ranks."""

from parallel.attention.softmax import attend

__all__ = ["attend"]
