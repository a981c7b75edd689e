"""Continuations of a prompt, in one process."""

from longctx.generation.load import load_model
from longctx.generation.loop import generate
from longctx.generation.sampling import Greedy, Sample

__all__ = ["Greedy", "Sample", "generate", "load_model"]
