"""Copy probe: a sequence of nonsense words, followed by the beginning of one part of it, to be continued."""

from __future__ import annotations

from functools import partial

from longctx.evaluation.fitted import Draft, Request
from longctx.evaluation.values import distinct, nonsense

CUE = 4
"""Words that say which part is to be copied."""
COPIED = 8
"""Words to copy."""
SMALLEST = CUE + COPIED


def build_copy(request: Request) -> Draft:
    """Build a sequence of ``units`` words; the part to copy begins at the requested depth.

    No word occurs twice, so the cue is unambiguous.
    """
    # Distinct words, or the cue would have two continuations.
    words = distinct(request.random, partial(nonsense, syllables=4), request.units)
    # The cue and its continuation are within the sequence at any depth.
    at = round(request.depth * (len(words) - CUE - COPIED))
    cue = " ".join(words[at : at + CUE])
    copied = " ".join(words[at + CUE : at + CUE + COPIED])
    begin = len(" ".join(words[: at + CUE])) + 1
    return Draft(
        prompt=f"{' '.join(words)}\n\n{cue}",
        answers=(copied,),
        target=f" {copied}",
        spans=((begin, begin + len(copied)),),
    )
