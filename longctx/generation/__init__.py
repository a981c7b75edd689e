"""Continuing prompts: one at a time or batched, greedy, sampled, or by beam search."""

from longctx.generation.beams import Beams
from longctx.generation.continuation import GenerationOptions
from longctx.generation.continuous_batching import generate_batch
from longctx.generation.detokenize import TextStream
from longctx.generation.load_decoder import load_model
from longctx.generation.loop import generate, stream
from longctx.generation.penalties import Penalties
from longctx.generation.sampling import Greedy, Sampling
from longctx.generation.stop_strings import StopStrings

# Names before 0.1, kept for one release.
Request, Sample = GenerationOptions, Sampling

__all__ = [
    "Beams",
    "GenerationOptions",
    "Greedy",
    "Penalties",
    "Request",
    "Sample",
    "Sampling",
    "StopStrings",
    "TextStream",
    "generate",
    "generate_batch",
    "load_model",
    "stream",
]
