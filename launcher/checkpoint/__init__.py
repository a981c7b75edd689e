"""Checkpoints of a run: saved by all ranks, found, loaded, set aside. The format: ``longctx/checkpoint_format.py``."""

from launcher.checkpoint.folder import find_resume
from launcher.checkpoint.load import load_checkpoint, load_weights
from launcher.checkpoint.saver import save_checkpoint

__all__ = ["find_resume", "load_checkpoint", "load_weights", "save_checkpoint"]
