"""MixerNetwork: the projections around a core: to queries, keys and values with their positions, and back.

The block calls the core in between. ``cached`` tells ``project`` and ``output`` whether a cache stores the keys: latent
attention then stores latents.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from longctx.architecture.layer_specs import LayerSpec
from longctx.architecture.mixers.mixer import Mixer
from longctx.config import ModelConfig
from longctx.model.rotary import RotaryTable


class Heads(NamedTuple):
    """Head counts and sizes that the core takes."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    """Size per query and key head."""
    value_dim: int
    values_in_keys: bool = False
    """True if values are the keys' first channels, which a cache then stores once."""


class MixerNetwork(Protocol):
    """Module with a layer's mixer weights."""

    gates_output: bool
    """True if ``output`` also reads the layer's normed input."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None: ...

    def core_weights(self) -> tuple[Tensor, ...]:
        """Return the weights that the core computes with, heads first."""
        ...

    @staticmethod
    def heads(config: ModelConfig, mixer: Mixer, *, cached: bool) -> Heads:
        """Return the head counts and sizes that ``project`` produces in layers with this mixer."""
        ...

    def project(
        self, x_BtM: Tensor, table: RotaryTable | None, *, cached: bool, only_graph: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries, keys and values. With ``only_graph`` values that no backward reads are NaN."""
        ...

    def output(self, heads_BtHV: Tensor, input_BtM: Tensor | None, *, cached: bool) -> Tensor:
        """Mix the heads' outputs back to the model width [B, t, M]; ``input_BtM`` is given if ``gates_output``."""
        ...
