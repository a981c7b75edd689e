"""Attention over a sequence that is sharded across ranks."""

from parallel.attention.softmax import attend

__all__ = ["attend"]
