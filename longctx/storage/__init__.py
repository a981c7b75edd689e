"""Tensor files: a reader that treats them as untrusted, and writers that buffer a single block."""
