"""``MixerNetwork``: the projections around a core: queries, keys and values with their positions, and the way back.

The block calls the core in between. ``cached`` tells ``project`` and ``output`` whether a cache stores the keys: those
of latent attention are then the latents.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from longctx.architecture.layers import LayerSpec
from longctx.architecture.mixers.mixer import Mixer
from longctx.config import ModelConfig
from longctx.model.rotary import RotaryTable


class Heads(NamedTuple):
    """Numbers and sizes of the heads that the core takes."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    """Size of a query and a key head."""
    value_dim: int
    values_in_keys: bool = False
    """Whether values are the first channels of the keys, which a cache then stores once."""


class MixerNetwork(Protocol):
    """Module with the weights of a layer's mixer."""

    gates_output: bool
    """Whether ``output`` reads the layer's normed input as well."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None: ...

    def core_weights(self) -> tuple[Tensor, ...]:
        """Return the weights that the core computes with, heads first."""
        ...

    @staticmethod
    def heads(config: ModelConfig, mixer: Mixer, *, cached: bool) -> Heads:
        """Return the heads of the results of ``project`` in layers with this mixer."""
        ...

    def project(
        self, x_BtM: Tensor, table: RotaryTable | None, *, cached: bool, only_graph: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the tokens. With ``only_graph`` values that no backward reads are NaN."""
        ...

    def output(self, heads_BtHV: Tensor, input_BtM: Tensor | None, *, cached: bool) -> Tensor:
        """Mix the heads' outputs back to the model width [B, t, M]; ``input_BtM`` is given if ``gates_output``."""
        ...
