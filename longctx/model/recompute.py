"""RecomputeCache: results from a layer's first forward, saved for its recomputation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longctx.errors import ConfigError
from longctx.model.activation_offload import HostStore, Keep, on_device

_PARTS = {"attention": ("attention", "cross", "routing", "experts"), "inputs": ("routing",)}
"""Parts that each recompute mode saves in addition to a layer's input. Expert ids take few bytes, and must be equal in
forward and recomputation however the scores are rounded."""


# Selective activation checkpointing (Chen et al., arXiv 1604.06174; Korthikanti et al., arXiv 2205.05198).
# Checkpointing runs a layer's forward a second time in backward. Attention, router and experts call ``load`` first: the
# second forward receives the first one's results, so that it repeats neither kernels nor communication. Invariant: the
# first forward saves each kept part once, and one backward pass takes it once.
class RecomputeCache(AbstractContextManager):
    """Results that one layer computed or received, from its first forward to its recomputation.

    They are attention's output and log-sum-exp, the tokens' expert ids and the experts' output.
    """

    def __init__(
        self, keep: Keep = "attention", put: Callable[[Tensor], Any] | None = None, *, by_chunks: bool = False
    ) -> None:
        """Create an empty cache.

        ``keep`` selects the saved parts, among the modes that recompute. ``put`` stores a tensor and returns an object
        for ``on_device``; None keeps tensors on the device. With ``by_chunks`` the recomputation is a graph of its own,
        and does not refill the first forward's.
        """
        self._parts = _PARTS[keep]
        self._put = put
        self.by_chunks = by_chunks
        self._saved: dict[str, tuple[Any, ...]] = {}
        self._core = "attention"
        self.recomputing = False
        """True while the layer is being recomputed."""

    def of_cross(self) -> RecomputeCache:
        """Return a view of this cache for the layer's second core, which reads a source."""
        # Made within one forward of the layer, so both agree on whether it is the recomputation.
        view = copy(self)
        view._core = "cross"
        return view

    def keeps(self, of: str) -> bool:
        """Return whether a part's results are saved; the recomputation computes the others again."""
        return of in self._parts

    def load(self, of: str | None = None) -> tuple[Tensor, ...] | None:
        """Pop the first forward's results for a part; return None if they must be computed.

        Without a part's name the calling core's is used. Raise ConfigError if they were popped before: the graph is
        differentiated a second time.
        """
        of = of or self._core
        if not self.recomputing or not self.keeps(of):
            return None
        if of not in self._saved:
            raise ConfigError(
                f"recomputation saves {of}'s results for one backward pass, and this is a second one through the "
                "same graph. Run forward again, or set keep='all' to use retain_graph=True."
            )
        # Popped, not held: the recomputation's graph frees the tensors as backward passes them.
        return tuple(on_device(x) for x in self._saved.pop(of))

    def save(self, *tensors: Tensor, of: str | None = None) -> None:
        """Save a part's results for the recomputation, detached; ignore parts that are not kept."""
        of = of or self._core
        if not self.keeps(of) or self.recomputing:
            return
        detached = [x.detach() for x in tensors]
        if self._put is not None:
            detached = [self._put(x) for x in detached]
        self._saved[of] = tuple(detached)

    def contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Return contexts for the first forward and the recomputation, for ``checkpoint``'s ``context_fn``."""
        return nullcontext(), self

    # May be entered again, so that a second backward reaches ``load``'s own message.
    def __enter__(self) -> None:
        self.recomputing = True

    def __exit__(self, *_: object) -> None:
        self.recomputing = False  # also after the exception by which checkpoint stops a recomputation early


def saved_values(x: Tensor, recompute_cache: RecomputeCache, *, of: str) -> Tensor:
    """Return x, and save its values in the first forward.

    The recomputation returns the saved values with the history of its own x.
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
    outside graphs, like ``Decoder.forward``.
    """
    recompute_cache = RecomputeCache(keep, store.put if store is not None else None)
    # Layers use no random generator (dropout hashes token indices), so there is no state to restore.
    return checkpoint(
        function,
        *args,
        recompute_cache,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=recompute_cache.contexts,
    )
