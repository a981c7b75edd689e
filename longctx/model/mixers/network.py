"""``MixerNetwork``: the projections around a core: queries, keys and values with their positions, and the way back.

The block calls the core, which it is handed, in between. ``project`` and ``output`` are told whether a cache is to
store the keys: those of latent attention are then the latents.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from longctx.architecture.layers import LayerSpec
from longctx.architecture.mixers.mixer import Mixer
from longctx.config import ModelConfig
from longctx.model.rotary import RotaryTable


class Heads(NamedTuple):
    """Keys and values as the core has them."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    """Size of a query and a key head."""
    value_dim: int
    values_in_keys: bool = False
    """Whether values are the first channels of the keys, which a cache then stores once."""


class MixerNetwork(Protocol):
    """A module with the weights of a layer's mixer."""

    gates_output: bool
    """Whether ``output`` reads the layer's normed input as well."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None: ...

    def core_weights(self) -> tuple[Tensor, ...]:
        """The weights that the core computes with, heads first."""
        ...

    @staticmethod
    def heads(config: ModelConfig, mixer: Mixer, *, cached: bool) -> Heads:
        """The heads of what ``project`` gives in layers with this mixer."""
        ...

    def project(
        self, x_BtM: Tensor, table: RotaryTable | None, *, cached: bool, only_graph: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the tokens. With ``only_graph`` what no backward reads is NaN."""
        ...

    def output(self, heads_BtHV: Tensor, input_BtM: Tensor | None, *, cached: bool) -> Tensor:
        """The heads' outputs mixed back to the model width [B, t, M]; ``input_BtM`` if ``gates_output``."""
        ...
