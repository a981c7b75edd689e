"""Router replay: the choices of one run, kept to be made again by another.

Axes: L expert layers, N tokens of this process, k experts a token.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from longctx.config import ModelConfig
from longctx.errors import ConfigError


class RoutingReplay:
    """Records the experts that a forward pass chooses, or makes it choose given ones; set as ``Decoder.replay``.

    Two programs that round differently choose differently where two experts score almost alike, and from there on they
    compute different functions. With the choices of one replayed in the other, what remains is rounding: for tests of
    parity, and to find where two runs part. Gates, probabilities and gradients are always the run's own.

        model.decoder.replay = RoutingReplay()  # records
        model(batch)
        other.decoder.replay = RoutingReplay(model.decoder.replay.experts_LNk)
        other(batch)  # the same tokens in the same order

    One object serves one forward pass (or several that are the same). Ids are what the router chose, before any
    capacity; −1 is nowhere, for a choice that led to no expert.
    """

    def __init__(self, experts_LNk: Tensor | Iterable[Tensor] | None = None) -> None:
        """Replay these ids, by expert layer; record when there are none."""
        self._given = None if experts_LNk is None else tuple(experts_LNk)
        self._chosen: dict[int, Tensor] = {}

    @property
    def experts_LNk(self) -> Tensor:  # noqa: N802 (a tensor's name ends in its axes)
        """The ids that were recorded, or given, int64; tokens in the order of the flattened [B, t]."""
        return torch.stack(
            [self._chosen[layer] for layer in sorted(self._chosen)] if self._given is None else self._given
        )

    def given(self, layer: int, device: torch.device) -> Tensor | None:
        """The choices to make again in the ``layer``-th expert layer [N, k]; None when recording."""
        return None if self._given is None else self._given[layer].to(device, torch.int64)

    def record(self, layer: int, experts_Nk: Tensor) -> None:
        """Keep the layer's choices, when recording."""
        if self._given is None:
            self._chosen[layer] = experts_Nk

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """ConfigError unless what is given fits the model and the tokens. Waits for the device."""
        if self._given is None:
            return
        layers = sum(config.has_experts(layer) for layer in range(config.num_layers))
        wanted = [(num_tokens, config.experts_per_token)] * layers
        if (shapes := [tuple(ids.shape) for ids in self._given]) != wanted:
            raise ConfigError(
                f"the replayed routing has {len(shapes)} layers of {sorted(set(shapes))} ids (tokens × choices); "
                f"this model and batch need {layers} of {wanted[:1]}. Record it with the same model and batches."
            )
        for layer, ids in enumerate(self._given):
            low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
            if low < -1 or high >= config.num_experts:
                raise ConfigError(
                    f"the replayed routing of expert layer {layer} has ids from {low} to {high}; experts are 0 to "
                    f"{config.num_experts - 1}, and -1 is nowhere."
                )
