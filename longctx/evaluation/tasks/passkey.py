"""Passkey retrieval: five digits in a text that repeats the same few sentences."""

from __future__ import annotations

from longctx.evaluation.haystack import insert_sentences
from longctx.evaluation.independent_samples import Draft, PromptSpec

_FILLER = (
    "The river runs past the old mill.",
    "A boat waits at the bank.",
    "The wind turns the leaves over.",
    "Nobody is on the road today.",
    "Soon the lamps will be lit.",
)
_HEADER = "One sentence of this text holds a pass key. Find it and remember it.\n\n"


def build_passkey(request: PromptSpec) -> Draft:
    """Build the prompt with ``units`` sentences of filler."""
    key = str(request.random.randint(10_000, 99_999))
    # Repeated text is easy to distinguish from the needle: the task is about distance, not about reading.
    filler = [_FILLER[at % len(_FILLER)] for at in range(request.units)]
    needle = f"The pass key is {key}."
    context, (start,) = insert_sentences(filler, [(request.depth, needle)])
    begin = len(_HEADER) + start + needle.index(key)
    return Draft(
        prompt=f"{_HEADER}{context}\n\nWhat is the pass key? The pass key is",
        answers=(key,),
        target=f" {key}.",
        spans=((begin, begin + len(key)),),
    )
