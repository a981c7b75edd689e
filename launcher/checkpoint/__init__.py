"""A run's checkpoints: save, find, load and set aside on all ranks. Format: ``longctx/checkpoint_format.py``."""
