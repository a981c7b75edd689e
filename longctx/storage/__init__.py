"""Tensor files: one reader that treats them as untrusted, and writers that buffer one block."""
