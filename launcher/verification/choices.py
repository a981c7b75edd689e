"""Check that a run's routers choose experts that a correct program may choose.

Two correct programs choose differently if two experts have almost equal scores, and compute different functions from
there on. The run's choices are therefore recorded and replayed in one process: gradients then differ by rounding only,
and the choices are checked here, against one process's logits. Each logit may be off by a bound; a choice is explained
if the logits, moved by that bound in its favour, lead to it.

Axes: N tokens, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.model.experts.router import Router, route


@dataclass(frozen=True)
class RouterState:
    """One router in one micro-batch: logits, selection bias, and the choices it was given."""

    logits_NE: Tensor
    bias_E: Tensor | None
    chosen_Nk: Tensor


@contextmanager
def recorded_routers(model: nn.Module, chosen_LNk: Sequence[Tensor], into: list[RouterState]) -> Iterator[None]:
    """Append each router's state, in layer order, during a forward pass through ``model`` with these choices."""
    # Routers run in layer order, so each hook call takes the next layer's choices.
    ids = iter(chosen_LNk)

    def record(router: Router, _: Any, logits_NE: Tensor) -> None:
        bias_E = router.e_score_correction_bias
        if bias_E is not None:
            bias_E = bias_E.clone()
        into.append(RouterState(logits_NE.detach(), bias_E, next(ids).to(logits_NE.device, torch.int64)))

    handles = [part.register_forward_hook(record) for part in model.modules() if isinstance(part, Router)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def unexplained_share(state: RouterState, slack: float, model: ModelConfig) -> float:
    """Return the share of tokens with experts that no logits within ``slack`` of these would choose."""
    logits_NE, ids_Nk = state.logits_NE, state.chosen_Nk
    if not len(ids_Nk):
        return 0.0
    # The most favourable logits: raise the chosen experts and lower all others by ``slack``, then route again.
    is_chosen_NE = torch.zeros_like(logits_NE, dtype=torch.bool).scatter_(1, ids_Nk, True)
    favourable_NE = torch.where(is_chosen_NE, logits_NE + slack, logits_NE - slack)
    again_Nk = route(favourable_NE, model, bias_E=state.bias_E).experts_Nk
    mismatch_N = (again_Nk.sort(-1).values != ids_Nk.sort(-1).values).any(-1)
    return float(mismatch_N.double().mean())
