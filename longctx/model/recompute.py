"""``RecomputeCache``: results of a layer's first run, saved for its recomputation."""

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
    """Results that one layer computed or received, from its first run to its second.

    They are attention's output and log-sum-exp, the tokens' experts and the experts' output. Activation checkpointing
    runs a layer's forward a second time. Each part calls ``load`` first: in the second run it returns the results that
    the first run saved, and neither kernel nor communication is needed again.
    """

    def __init__(
        self, keep: Keep = "attention", put: Callable[[Tensor], Any] | None = None, *, by_chunks: bool = False
    ) -> None:
        """Create an empty cache.

        ``keep`` says which parts are saved, one of those that recompute. ``put`` stores a tensor and returns an object
        for ``on_device``; None keeps tensors on the device. With ``by_chunks`` the second run is a graph of its own,
        and does not fill the first one's again.
        """
        self._parts = _PARTS[keep]
        self._put = put
        self.by_chunks = by_chunks
        self._saved: dict[str, tuple[Any, ...]] = {}
        self._core = "attention"
        self.recomputing = False
        """Whether the layer is being recomputed."""

    def of_cross(self) -> RecomputeCache:
        """Return the same cache for the run of the layer's second core, which reads a source."""
        # Within one run of the layer, so that both agree on whether it is the second.
        view = copy(self)
        view._core = "cross"
        return view

    def keeps(self, of: str) -> bool:
        """Return whether a part of the layer is saved; the second run computes the others again."""
        return of in self._parts

    def load(self, of: str | None = None) -> tuple[Tensor, ...] | None:
        """Return, and hand over, the first run's results of a part of the layer; None if they must be computed.

        Without a part's name it is the calling core's. Raise ConfigError if they were loaded before: the graph is
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
        """Keep these results of a part of the layer for the second run, without history; ignore parts not kept."""
        of = of or self._core
        if not self.keeps(of) or self.recomputing:
            return
        detached = [x.detach() for x in tensors]
        if self._put is not None:
            detached = [self._put(x) for x in detached]
        self._saved[of] = tuple(detached)

    def contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Return the contexts of the first and of the second run, as ``checkpoint`` takes them from ``context_fn``."""
        return nullcontext(), self

    # May be entered again, so that a second backward meets ``load``'s own message.
    def __enter__(self) -> None:
        self.recomputing = True

    def __exit__(self, *_: object) -> None:
        self.recomputing = False  # also when checkpoint cuts the run short, which it does by an exception


def saved_values(x: Tensor, recompute_cache: RecomputeCache, *, of: str) -> Tensor:
    """Return x, and save its values in the first run.

    In the second run return the saved values, with the history of its own x.
    """
    known = recompute_cache.load(of=of)
    if known is None:
        recompute_cache.save(x, of=of)
        return x
    return _WithValues.apply(x, known[0])


class _WithValues(torch.autograd.Function):
    """Autograd function that returns the second tensor's values with the first one's history."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor):  # type: ignore[override]
        return dx, None


def recomputed(
    function: Callable[..., tuple[Tensor, ...]], *args: Any, keep: Keep = "attention", store: HostStore | None = None
) -> Any:
    """Return ``function(*args, recompute_cache)``; recompute it in backward.

    Only the arguments and the results in the recompute_cache survive until then. Under ``torch.compile`` it stays
    outside of the graphs, as ``Decoder.forward`` does.
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
