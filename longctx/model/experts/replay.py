"""Router replay: record one forward pass's choices, and repeat them in another.

Axes: L expert layers, N tokens of this process, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from longctx.config import ModelConfig
from longctx.errors import ConfigError


class RoutingReplay:
    """Record of the experts that a forward pass chooses, or given ones that it must choose: ``TrainingPass.replay``.

    Two programs that round differently choose differently if two experts score almost equally, and from there on they
    compute different functions. With one program's choices replayed in the other, only rounding differs: for parity
    tests, and to find the point at which two programs diverge. Gates, probabilities and gradients are always the
    program's own.

        recorded = RoutingReplay()
        model(batch, TrainingPass(replay=recorded))
        replayed = RoutingReplay(recorded.experts_LNk)
        other(batch, TrainingPass(replay=replayed))  # the same tokens in the same order

    One object serves one forward pass (or several equal ones). Ids are the router's choices before any capacity; −1 is
    no expert.
    """

    def __init__(self, experts_LNk: Tensor | Iterable[Tensor] | None = None) -> None:
        """Replay these ids, by expert layer; record if they are omitted."""
        self._given: tuple[Tensor, ...] | None = None
        if experts_LNk is not None:
            self._given = tuple(experts_LNk)
        self._chosen: dict[int, Tensor] = {}

    @property
    def experts_LNk(self) -> Tensor:  # noqa: N802 (a tensor's name ends in its axes)
        """Recorded or given ids, int64; tokens are ordered as in the flattened [B, t]."""
        if self._given is not None:
            return torch.stack(self._given)
        # Sorted by layer, whatever order they ran in.
        return torch.stack([self._chosen[layer] for layer in sorted(self._chosen)])

    def given(self, layer: int, device: torch.device) -> Tensor | None:
        """Return the choices to repeat in the ``layer``-th expert layer [N, k]; None when recording."""
        if self._given is None:
            return None
        return self._given[layer].to(device, torch.int64)

    def record(self, layer: int, experts_Nk: Tensor) -> None:
        """Record the layer's choices, unless choices were given."""
        if self._given is None:
            self._chosen[layer] = experts_Nk

    def record_tokens(self, layer: int, experts_nk: Tensor, tokens: slice, num_tokens: int) -> None:
        """Record choices for some ``tokens`` in rows of ``num_tokens``, unless choices were given."""
        if self._given is not None:
            return
        of_rows = experts_nk.unflatten(0, (-1, len(range(num_tokens)[tokens])))
        rows, k = len(of_rows), experts_nk.shape[1]
        if layer not in self._chosen:
            self._chosen[layer] = experts_nk.new_empty(rows * num_tokens, k)
        self._chosen[layer].view(rows, num_tokens, k)[:, tokens] = of_rows

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Raise ConfigError unless the given ids fit the model and the tokens; this waits for the device."""
        if self._given is None:
            return
        layers = sum(map(config.has_experts, range(config.depth)))
        wanted = [(num_tokens, config.experts_per_token)] * layers
        shapes = [tuple(ids.shape) for ids in self._given]
        if shapes != wanted:
            raise ConfigError(
                f"the replayed routing has {len(shapes)} layers with ids {sorted(set(shapes))} (tokens × choices); "
                f"this model and batch need {layers} with {wanted[:1]}. Record it with the same model and batches."
            )
        for layer, ids in enumerate(self._given):
            if not ids.numel():
                continue  # without tokens there is no smallest id
            low, high = int(ids.min()), int(ids.max())
            if low < -1 or high >= config.num_experts:
                raise ConfigError(
                    f"expert layer {layer}: the replayed routing has ids from {low} to {high}; experts are 0 to "
                    f"{config.num_experts - 1}, and -1 means no expert."
                )


class RoutingOfTokens:
    """Replay for some tokens in each row, for a layer that runs by chunks."""

    def __init__(self, replay: RoutingReplay, tokens: slice, num_tokens: int) -> None:
        """Restrict a replay to ``tokens`` in rows of ``num_tokens``."""
        self._replay, self._tokens, self._num_tokens = replay, tokens, num_tokens

    def given(self, layer: int, device: torch.device) -> Tensor | None:
        """Return ``RoutingReplay.given`` for these tokens."""
        given_Nk = self._replay.given(layer, device)
        if given_Nk is None:
            return None
        return given_Nk.unflatten(0, (-1, self._num_tokens))[:, self._tokens].flatten(0, 1)

    def record(self, layer: int, experts_Nk: Tensor) -> None:
        """Record these tokens' choices, like ``RoutingReplay.record``."""
        self._replay.record_tokens(layer, experts_Nk, self._tokens, self._num_tokens)
