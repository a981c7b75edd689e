"""Checkpoints of a run: saved by all ranks, found, loaded, set aside. The format: ``longctx/checkpoint_format.py``."""
