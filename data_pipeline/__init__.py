"""Text into batches: sources, tokenizer, checksummed Arrow shards, packed rows, an elastic loader.

Knows ``longctx.batch`` and ``longctx.errors`` and nothing else of ours; the one place where pyarrow and sentencepiece
are imported.
"""
