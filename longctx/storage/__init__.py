"""Tensor files: a reader that treats them as untrusted, and writers with bounded buffers."""
