"""Continuations of a prompt, in one process."""

from longctx.generation.load import load_model
from longctx.generation.loop import generate, stream
from longctx.generation.sampling import Greedy, Sample
from longctx.generation.text import TextStream

__all__ = ["Greedy", "Sample", "TextStream", "generate", "load_model", "stream"]
