"""Text into batches: sources, tokenizer, checksummed Arrow shards, packed rows, a loader for any number of ranks.

This package knows ``longctx.batch``, ``longctx.tokenizer``, ``longctx.errors`` and ``longctx.files``, and nothing else
of ours. pyarrow is imported here only.
"""
