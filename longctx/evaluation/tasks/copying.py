"""Copy probe: a sequence of nonsense words, followed by the start of one part to be continued."""

from __future__ import annotations

from functools import partial

from longctx.evaluation.independent_samples import Draft, PromptSpec
from longctx.evaluation.random_values import distinct, nonsense

CUE = 4
"""Words that identify the part to copy."""
COPIED = 8
"""Words to copy."""
MIN_TOKENS = CUE + COPIED


def build_copy(request: PromptSpec) -> Draft:
    """Build a sequence with ``units`` words; the part to copy starts at the requested depth."""
    # Distinct words: otherwise the cue could have two continuations.
    words = distinct(request.random, partial(nonsense, syllables=4), request.units)
    # Cue and continuation are within the sequence at any depth.
    at = round(request.depth * (len(words) - CUE - COPIED))
    cue = " ".join(words[at : at + CUE])
    copied = " ".join(words[at + CUE : at + CUE + COPIED])
    # One more for the space before the copied words.
    begin = len(" ".join(words[: at + CUE])) + 1
    return Draft(
        prompt=f"{' '.join(words)}\n\n{cue}",
        answers=(copied,),
        target=f" {copied}",
        spans=((begin, begin + len(copied)),),
    )
