"""Attention over a sequence that is sharded across ranks."""

from parallel.attention.context_parallel_softmax import context_parallel_attention

attend = context_parallel_attention  # the name before 0.1, kept for one release

__all__ = ["attend", "context_parallel_attention"]
