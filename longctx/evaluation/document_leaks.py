"""Leak probe: check that no document in a packed row depends on another one.

It works with any trainer, by four forward passes of its model in evaluation mode::

    from longctx.evaluation.document_leaks import find_leaks

    found = find_leaks(lambda tokens, ids: model(tokens, ids), tokens_BT, document_ids_BT, vocab_size=32_000)
    print(f"{found.outside_share:.1%} of the outputs in other documents have changed")

First one token in the first document is changed: its first, then its last. The model's outputs in other documents must
stay bitwise equal, because all their inputs are unchanged. A mask that lets documents see each other changes half the
outputs or all, and so does a convolution or a state that continues across a boundary.

Then the first document loses its first token, and all later tokens in its row move up. This changes the outputs in
other documents only if positions continue across a boundary. Rounding may depend on the position in a row, so this
change is measured by size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_PADDING = -1


class Leaks(NamedTuple):
    """Changes in other documents caused by the first one, as shares of their tokens."""

    leaked_share: float
    """Share of changed tokens in other documents after changing one token in the first: 0 if nothing leaks."""
    inside_share: float
    """Share of changed tokens in the first document after changing its first token: near 1 if the probe works."""
    largest: float
    """Largest change outside."""
    num_other_tokens: int
    """Tokens compared in other documents, per change."""
    moved: float | None
    """Largest output change in documents that moved by a token, in standard deviations over all outputs there.

    About rounding size if positions restart; 0 if the first document is the last in its row; None if documents have a
    fixed length.
    """


@torch.no_grad()
def find_leaks(
    outputs_of: Callable[[Tensor, Tensor], Tensor],
    tokens_BT: Tensor,
    document_ids_BT: Tensor,
    *,
    vocab_size: int,
    tolerance: float = 0.0,
    skipped: int = 0,
    has_fixed_length: bool = False,
) -> Leaks:
    """Change the first document, first one token and then its length, and compare the model's outputs in the others.

    ``outputs_of`` maps tokens and document ids [B, T] to outputs [B, T, …] of any kind: logits, hidden states,
    likelihoods. Document ids are unique over all rows, and negative for padding, which is not compared. Differences up
    to ``tolerance`` do not count: use 0 except for experts, where rounding in matmuls depends on the row count. A
    document's first tokens may have no input to change, such as an image's class token: ``skipped`` counts them. With
    ``has_fixed_length`` the first document is not shortened. Raise ValueError if it has only one token to change.
    """
    documents_N = document_ids_BT.flatten()
    first = int(documents_N[documents_N >= 0][0])
    inside_N = documents_N == first
    others_N = (documents_N >= 0) & ~inside_N
    token_indices = inside_N.nonzero().flatten().tolist()[skipped:]
    if len(token_indices) < 2:
        raise ValueError("the first document has one token: give rows that begin with a longer one")

    def outputs(tokens: Tensor, ids: Tensor = document_ids_BT) -> Tensor:
        return outputs_of(tokens, ids).flatten(0, 1).flatten(1)

    before = outputs(tokens_BT)
    leaked_N, changed_inside, largest = torch.zeros_like(inside_N), torch.zeros_like(inside_N), 0.0
    # The first token comes last: ``changed_inside`` keeps its result.
    for place in (token_indices[-1], token_indices[0]):
        other_BT = tokens_BT.clone()
        other_BT.view(-1)[place] = (tokens_BT.view(-1)[place] + 1) % vocab_size
        difference_N = (outputs(other_BT) - before).abs().amax(1)
        # NaN counts as a change too: the comparison is negated.
        changed_N = ~(difference_N <= tolerance)
        leaked_N |= changed_N & others_N
        changed_inside = changed_N & inside_N
        largest = max(largest, float(torch.where(others_N, difference_N, 0).max()))
    # All tokens after the removed one move up by one.
    row, at = divmod(token_indices[0], tokens_BT.shape[1])
    moved_N = others_N & (torch.arange(len(documents_N)) // tokens_BT.shape[1] == row)
    moved = None if has_fixed_length else 0.0
    if moved_N.any() and not has_fixed_length:
        after = outputs(_remove_entry(tokens_BT, row, at, 0), _remove_entry(document_ids_BT, row, at, _PADDING))
        differences = after.roll(1, 0)[moved_N] - before[moved_N]
        moved = float(differences.abs().amax() / before[moved_N].std())
    return Leaks(
        leaked_share=int(leaked_N.sum()) / max(1, int(others_N.sum())),
        inside_share=int(changed_inside.sum()) / int(inside_N.sum()),
        largest=largest,
        num_other_tokens=int(others_N.sum()),
        moved=moved,
    )


def _remove_entry(values_BT: Tensor, row: int, at: int, fill: int) -> Tensor:
    """Return the rows with one entry removed from one row, and ``fill`` appended to that row."""
    changed_BT = values_BT.clone()
    changed_BT[row, at:-1] = values_BT[row, at + 1 :]
    changed_BT[row, -1] = fill
    return changed_BT
