"""Continuing prompts: one at a time or batched, greedy, sampled, or by beam search."""

from longctx.generation.batch import generate_batch
from longctx.generation.beams import Beams
from longctx.generation.continuation import Request
from longctx.generation.load import load_model
from longctx.generation.loop import generate, stream
from longctx.generation.penalties import Penalties
from longctx.generation.sampling import Greedy, Sample
from longctx.generation.stop_strings import StopStrings
from longctx.generation.text import TextStream

__all__ = [
    "Beams",
    "Greedy",
    "Penalties",
    "Request",
    "Sample",
    "StopStrings",
    "TextStream",
    "generate",
    "generate_batch",
    "load_model",
    "stream",
]
