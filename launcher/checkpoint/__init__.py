"""Checkpoints of a run: save, find, load and set aside on all ranks. The format: ``longctx/checkpoint_format.py``."""
