"""The leak probe: does a document of a packed row depend on another one?

It asks any trainer, by two passes of its model in evaluation mode::

    from longctx.evaluation.leaks import find_leaks

    found = find_leaks(lambda tokens: model(tokens, cu_seqlens=...), tokens_BT, document_ids_BT, vocab_size=32_000)
    print(f"{found.outside_share:.1%} of what other documents say has changed")

One token of the first document is changed, its first one and then its last one. What the model says in other documents
must stay as it is, bit by bit: nothing of what is computed there has another value. A mask that lets documents see each
other changes half of it or all; so do positions that go on, a convolution or a state that is carried over a boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Leaks(NamedTuple):
    """What changed, as shares of tokens, with one token of the first document."""

    outside_share: float
    """Of tokens of other documents: 0 if nothing leaks."""
    inside_share: float
    """Of the first document's tokens, with its first token: near 1, or the probe looks at what says nothing."""
    largest: float
    """The largest change outside."""
    num_outside: int
    """Tokens of other documents that were compared, for each change."""


@torch.no_grad()
def find_leaks(
    outputs_of: Callable[[Tensor], Tensor],
    tokens_BT: Tensor,
    document_ids_BT: Tensor,
    *,
    vocab_size: int,
    tolerance: float = 0.0,
) -> Leaks:
    """Change a token of the first document, and compare what a model says of the others.

    ``outputs_of`` takes tokens [B, T] to outputs [B, T, …] of any kind: logits, hidden states, likelihoods. Ids of
    documents differ over all rows, and are negative for padding, which is not compared. A change of at most
    ``tolerance`` is none: 0 but for experts, whose products change in rounding with the rows that they get.
    """
    documents_N = document_ids_BT.flatten()
    first = int(documents_N[documents_N >= 0][0])
    inside_N = documents_N == first
    outside_N = (documents_N >= 0) & ~inside_N
    before = outputs_of(tokens_BT).flatten(0, 1).flatten(1)
    places = inside_N.nonzero().flatten()
    changed_outside, changed_inside, largest = torch.zeros_like(inside_N), torch.zeros_like(inside_N), 0.0
    for place in (places[0], places[-1]):
        other_BT = tokens_BT.clone()
        other_BT.view(-1)[place] = (tokens_BT.view(-1)[place] + 1) % vocab_size
        difference_N = (outputs_of(other_BT).flatten(0, 1).flatten(1) - before).abs().amax(1)
        # Not-a-number is a change too.
        changed_N = ~(difference_N <= tolerance)
        changed_outside |= changed_N & outside_N
        largest = max(largest, float(difference_N[outside_N].amax()) if outside_N.any() else 0.0)
        if place == places[0]:
            changed_inside = changed_N & inside_N
    num_outside = int(outside_N.sum())
    return Leaks(
        outside_share=int(changed_outside.sum()) / max(1, num_outside),
        inside_share=int(changed_inside.sum()) / len(places),
        largest=largest,
        num_outside=num_outside,
    )
