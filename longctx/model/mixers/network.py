"""``MixerNetwork``: the projections around a core: queries, keys and values with their positions, and the way back.

The block calls the core, which it is handed, in between. ``project`` and ``output`` are told whether a cache is to
store the keys: those of latent attention are then the latents.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from longctx.architecture.layers import LayerSpec
from longctx.config import ModelConfig
from longctx.model.layers.linear import Weight
from longctx.model.rotary import RotaryTable


class Heads(NamedTuple):
    """Keys and values as the core has them."""

    num_kv_heads: int
    head_dim: int
    """Size of a query and a key head."""
    value_dim: int
    values_in_keys: bool = False
    """Whether values are the first channels of the keys, which a cache then stores once."""


class MixerNetwork(Protocol):
    """A module with the weights of a layer's mixer."""

    sinks: Weight | None
    """A learned logit for each query head; None if it has none."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None: ...

    @staticmethod
    def heads(config: ModelConfig, *, cached: bool) -> Heads:
        """The heads of what ``project`` gives."""
        ...

    def project(
        self, x_BtM: Tensor, table: RotaryTable | None, *, cached: bool, only_graph: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the tokens. With ``only_graph`` what no backward reads is NaN."""
        ...

    def output(self, heads_BtHV: Tensor, *, cached: bool) -> Tensor:
        """The heads' outputs mixed back to the model width [B, t, M]."""
        ...
