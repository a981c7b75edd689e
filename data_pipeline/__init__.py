"""Data pipeline: sources, tokenizer, checksummed Arrow shards, packed rows, a loader for any number of ranks.

This package imports ``longctx.batch``, ``longctx.tokenizer``, ``longctx.errors`` and ``longctx.files``, and none of our
other packages. pyarrow is imported here only.
"""
