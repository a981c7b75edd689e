"""``RecomputeCache``: what a layer computed once, saved for its recomputation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longctx.errors import ConfigError
from longctx.model.kept import HostStore, Keep, on_device

_PARTS = {"attention": ("attention", "cross", "routing", "experts"), "inputs": ("routing",)}
"""What each way to recompute saves of a layer beside its input. Tokens' experts are few bytes, and must be the same in
both runs, however their scores are rounded."""


class RecomputeCache(AbstractContextManager):
    """What one layer computed or received, from its first run to its second.

    That is attention's output and log-sum-exp, tokens' experts and what these gave.
    Activation checkpointing runs a layer's forward a second time. Each part asks ``load`` first: in the second run it
    returns what the first run saved, and neither kernel nor communication is needed again.
    """

    def __init__(
        self, keep: Keep = "attention", put: Callable[[Tensor], Any] | None = None, *, by_chunks: bool = False
    ) -> None:
        """``keep`` says which parts are saved, one of those that recompute; ``put`` where: makes of each what
        ``on_device`` takes back; None keeps them on the device.

        ``by_chunks``: the second run is a graph of its own, and not the first one's that is filled again.
        """
        self._parts = _PARTS[keep]
        self._put = put
        self.by_chunks = by_chunks
        self._saved: dict[str, tuple[Any, ...]] = {}
        self._core = "attention"
        self.recomputing = False
        """Whether the layer is being recomputed."""

    def of_cross(self) -> RecomputeCache:
        """The same cache for the run of the layer's second core, which reads a source."""
        # Within one run of the layer, so that both say alike whether it is the second.
        view = copy(self)
        view._core = "cross"
        return view

    def keeps(self, of: str) -> bool:
        """Whether a part of the layer is saved; the second run computes the others again."""
        return of in self._parts

    def load(self, of: str | None = None) -> tuple[Tensor, ...] | None:
        """What the first run saved of a part of the layer, then the caller's alone; None where it has to be computed.

        Without a part's name it is the core's that asks. ConfigError when it was recalled before: the graph is
        differentiated a second time.
        """
        of = of or self._core
        if not self.recomputing or not self.keeps(of):
            return None
        if of not in self._saved:
            raise ConfigError(
                f"recomputation keeps {of}'s results for one backward pass, and this is a second one through the "
                "same graph. Run forward again, or set keep='all' to use retain_graph=True."
            )
        # Handed over and not held: the graph of the second run frees the tensors as backward passes them.
        return tuple(on_device(x) for x in self._saved.pop(of))

    def save(self, *tensors: Tensor, of: str | None = None) -> None:
        """Keep these of a part of the layer for the second run, without their history; nothing of other parts."""
        of = of or self._core
        if not self.keeps(of) or self.recomputing:
            return
        detached = [x.detach() for x in tensors]
        if self._put is not None:
            detached = [self._put(x) for x in detached]
        self._saved[of] = tuple(detached)

    def contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Around the first run, and around the second: what ``checkpoint`` asks its ``context_fn`` for."""
        return nullcontext(), self

    # May be entered again, so that a second backward meets ``load``'s own message.
    def __enter__(self) -> None:
        self.recomputing = True

    def __exit__(self, *_: object) -> None:
        self.recomputing = False  # also when checkpoint cuts the run short, which it does by an exception


def saved_values(x: Tensor, recompute_cache: RecomputeCache, *, of: str) -> Tensor:
    """x, whose values the first run saves; in the second run those values, with the history of its own x."""
    known = recompute_cache.load(of=of)
    if known is None:
        recompute_cache.save(x, of=of)
        return x
    return _WithValues.apply(x, known[0])


class _WithValues(torch.autograd.Function):
    """The second tensor's values, the first one's history."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor):  # type: ignore[override]
        return dx, None


def recomputed(
    function: Callable[..., tuple[Tensor, ...]], *args: Any, keep: Keep = "attention", store: HostStore | None = None
) -> Any:
    """``function(*args, recompute_cache)``, of which only the arguments and what the recompute_cache keeps survive
    until backward.

    Under ``torch.compile`` it stays outside of the graphs, as ``Decoder.forward`` does.
    """
    recompute_cache = RecomputeCache(keep, store.put if store is not None else None)
    # A layer draws no random numbers, so there is no generator state to carry to the second run.
    return checkpoint(
        function,
        *args,
        recompute_cache,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=recompute_cache.contexts,
    )
