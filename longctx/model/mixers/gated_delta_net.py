"""Gated delta rule layers: their projections, and their single-process core.

Axes: B rows, t tokens of this rank, M model width, K key heads, G value heads per key head, H = K·G, D key head size, V
value head size, R preceding tokens that the convolution reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from longctx.architecture.layer_specs import LayerSpec
from longctx.architecture.mixers.mixer import Mixer
from longctx.batch import PackedDocuments
from longctx.config import ModelConfig
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.gated_delta.front import GatedDeltaWeights, ProjectedTokens, StateSpaceWeights, weights_of
from longctx.kernels.gated_delta.gated_delta_call import CHUNK, GatedDeltaOptions, InitialStates
from longctx.kernels.gated_delta.gated_delta_rule import gated_delta
from longctx.kernels.linear_attention import StateSegments
from longctx.model.attention.core import AttentionCore, AttentionShapes
from longctx.model.attention.kv_cache import LayerCache
from longctx.model.attention.mask import AttentionMask
from longctx.model.layers.linear import Linear, Weight
from longctx.model.mixers.network import Heads
from longctx.model.recompute import RecomputeCache
from longctx.model.rotary import RotaryTable


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet (arXiv 2412.06464; Qwen3-Next): one decay per head, and a SiLU gate on the normed output.

    The core takes each key head's query, key and values, with the inputs to decay and β appended to the values.
    Positions are up to the core: there is no rotary table.
    """

    gates_output = True

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        M, self.sizes = config.hidden_size, config.delta_sizes
        H, values = self.sizes.value_heads, self.sizes.value_heads * self.sizes.value_dim
        self.in_proj_qkv = Linear(M, self.sizes.channels, bias=False)
        self.in_proj_z = Linear(M, values, bias=False)
        self.in_proj_a = Linear(M, H, bias=False)
        self.in_proj_b = Linear(M, H, bias=False)
        self.conv1d = Weight(self.sizes.channels, 1, self.sizes.conv)
        self.A_log = Weight(H)
        self.dt_bias = Weight(H)
        self.norm = GatedNorm(self.sizes.value_dim, config.delta_norm_eps or config.norm_eps, functional.silu)
        self.out_proj = Linear(values, M, bias=False)

    def core_weights(self) -> tuple[Tensor, ...]:
        """Return the rule's ``GatedDeltaWeights``, heads first."""
        K, D = self.sizes.key_heads, self.sizes.key_dim
        conv_CR = self.conv1d().squeeze(1)
        # On disk all query channels come first, then all key channels; the core takes them by key head.
        parts = conv_CR.split((K * D, K * D, len(conv_CR) - 2 * K * D))
        conv_KCR = torch.cat([part.unflatten(0, (K, -1)) for part in parts], dim=1)
        rates = self.A_log().unflatten(0, (K, -1))
        return GatedDeltaWeights(conv_KCR, rates, self.dt_bias().view(K, rates.shape[1], -1))

    @staticmethod
    def heads(config: ModelConfig, mixer: Mixer, *, cached: bool) -> Heads:
        """Return the head counts and sizes that ``project`` produces."""
        K, H, D, V, _ = config.delta_sizes
        return Heads(K, K, D, H // K * (V + 2))

    def project(
        self, x_BtM: Tensor, table: RotaryTable | None, *, cached: bool, only_graph: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries and keys [B, t, K, D], and values [B, t, K, G·V] followed by the inputs to decay and β."""
        K = self.sizes.key_heads
        q, k, v = self._channels(x_BtM, only_graph=only_graph)
        # They travel with the values, so that code that stores or sends values needs no further tensor.
        a, b = (f(x_BtM, only_graph=only_graph).unflatten(-1, (K, -1)) for f in (self.in_proj_a, self.in_proj_b))
        return q, k, torch.cat((v, a, b), dim=-1)

    def _channels(self, x_BtM: Tensor, *, only_graph: bool) -> list[Tensor]:
        """Project to queries and keys [B, t, K, D], and values [B, t, K, G·V]."""
        K, D = self.sizes.key_heads, self.sizes.key_dim
        channels = self.in_proj_qkv(x_BtM, only_graph=only_graph)
        parts = channels.split((K * D, K * D, channels.shape[-1] - 2 * K * D), dim=-1)
        return [part.unflatten(-1, (K, -1)) for part in parts]

    def output(self, heads_BtHV: Tensor, input_BtM: Tensor | None, *, cached: bool) -> Tensor:
        """Norm and gate the values' outputs [B, t, K, G·V], and mix them back to the model width [B, t, M]."""
        assert input_BtM is not None
        # From the input, not from the projections: a stored gate would be as wide as the values.
        gate_BtHV = self.in_proj_z(input_BtM).unflatten(-1, (self.sizes.value_heads, -1))
        return self.out_proj(self.norm(heads_BtHV.reshape(gate_BtHV.shape), gate_BtHV).flatten(-2))


class KimiDeltaAttention(GatedDeltaNet):
    """Kimi Delta Attention (arXiv 2510.26692): one decay per channel, and a sigmoid gate, both from narrow latents."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        # Other projections than in the base class, around the same core.
        nn.Module.__init__(self)
        M, self.sizes = config.hidden_size, config.delta_sizes
        K, D = self.sizes.key_heads, self.sizes.key_dim
        self.q_proj = Linear(M, K * D, bias=False)
        self.k_proj = Linear(M, K * D, bias=False)
        self.v_proj = Linear(M, K * D, bias=False)
        self.conv1d = Weight(self.sizes.channels, 1, self.sizes.conv)
        self.f_a_proj = Linear(M, D, bias=False)
        self.f_b_proj = Linear(D, K * D, bias=False)
        self.A_log = Weight(K)
        self.dt_bias = Weight(K * D)
        self.b_proj = Linear(M, K, bias=False)
        self.g_a_proj = Linear(M, D, bias=False)
        self.g_b_proj = Linear(D, K * D, bias=False)
        self.o_norm = GatedNorm(D, config.delta_norm_eps or config.norm_eps, torch.sigmoid)
        self.o_proj = Linear(K * D, M, bias=False)

    @staticmethod
    def heads(config: ModelConfig, mixer: Mixer, *, cached: bool) -> Heads:
        K, _, D, V, _ = config.delta_sizes
        return Heads(K, K, D, V + D + 1)

    def project(
        self, x_BtM: Tensor, table: RotaryTable | None, *, cached: bool, only_graph: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        K = self.sizes.key_heads
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (f(x_BtM, only_graph=only_graph).unflatten(-1, (K, -1)) for f in projections)
        a = self.f_b_proj(self.f_a_proj(x_BtM), only_graph=only_graph).unflatten(-1, (K, -1))
        b = self.b_proj(x_BtM, only_graph=only_graph).unsqueeze(-1)
        return q, k, torch.cat((v, a, b), dim=-1)

    def output(self, heads_BtHV: Tensor, input_BtM: Tensor | None, *, cached: bool) -> Tensor:
        assert input_BtM is not None
        gate_BtKV = self.g_b_proj(self.g_a_proj(input_BtM)).view(heads_BtHV.shape)
        return self.o_proj(self.o_norm(heads_BtHV, gate_BtKV).flatten(-2))


class Mamba2(GatedDeltaNet):
    """Mamba-2 (arXiv 2405.21060): its C, B and x are queries, keys and values; dt is the input to decay and β."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        nn.Module.__init__(self)
        M, self.sizes = config.hidden_size, config.delta_sizes
        H, values = self.sizes.value_heads, self.sizes.value_heads * self.sizes.value_dim
        self.in_proj_qkv = Linear(M, self.sizes.channels, bias=False)
        self.in_proj_z = Linear(M, values, bias=False)
        self.in_proj_dt = Linear(M, H, bias=False)
        self.conv1d = Weight(self.sizes.channels, 1, self.sizes.conv)
        self.conv_bias = Weight(self.sizes.channels)
        self.A_log = Weight(H)
        self.dt_bias = Weight(H)
        self.skip = Weight(H)
        eps = config.delta_norm_eps or config.norm_eps
        self.norm = GateThenNorm(values, values // self.sizes.key_heads, eps)
        self.out_proj = Linear(values, M, bias=False)

    def core_weights(self) -> tuple[Tensor, ...]:
        K, D = self.sizes.key_heads, self.sizes.key_dim
        bias_C = self.conv_bias()
        parts = bias_C.split((K * D, K * D, len(bias_C) - 2 * K * D))
        bias_KC = torch.cat([part.unflatten(0, (K, -1)) for part in parts], dim=1)
        conv, rates, rate_bias = super().core_weights()
        return StateSpaceWeights(conv, rates, rate_bias, bias_KC, self.skip().unflatten(0, (K, -1)))

    def project(
        self, x_BtM: Tensor, table: RotaryTable | None, *, cached: bool, only_graph: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._channels(x_BtM, only_graph=only_graph)
        dt = self.in_proj_dt(x_BtM, only_graph=only_graph).unflatten(-1, (self.sizes.key_heads, -1))
        return q, k, torch.cat((v, dt, dt), dim=-1)

    def output(self, heads_BtHV: Tensor, input_BtM: Tensor | None, *, cached: bool) -> Tensor:
        assert input_BtM is not None
        return self.out_proj(self.norm(heads_BtHV.flatten(-2), self.in_proj_z(input_BtM)))


class GateThenNorm(nn.Module):
    """x · silu(gate), normed per channel group, times the weight; in float32 (float64 for float64 inputs)."""

    def __init__(self, size: int, group: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.group, self.eps = group, eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        dtype = accumulate_dtype(x.dtype)
        gated = (x.to(dtype) * functional.silu(gate.to(dtype))).unflatten(-1, (-1, self.group))
        normed = functional.rms_norm(gated, (self.group,), eps=self.eps).flatten(-2)
        return (normed * self.weight.to(dtype)).to(x.dtype)


class GatedNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight · f(gate) over the last axis, in float32 (float64 for float64 inputs)."""

    def __init__(self, size: int, eps: float, function: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.function = eps, function

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        dtype = accumulate_dtype(x.dtype)
        normed = functional.rms_norm(x.to(dtype), (x.shape[-1],), self.weight.to(dtype), self.eps)
        return (normed * self.function(gate.to(dtype))).to(x.dtype)


@dataclass(frozen=True, eq=False)
class LocalDeltaPlan:
    """Segments that states pass through, and the factor on β."""

    segments: StateSegments
    beta_scale: float


class LocalGatedDelta(AttentionCore):
    """Gated delta rule in one process, which holds every token: its documents are segments.

    A cache holds a layer's states and the tokens that its convolution reads again, for any number of past tokens.
    """

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None, key_placement: Any = None
    ) -> LocalDeltaPlan:
        """Return the documents as segments; with a cache one segment, which continues the cached tokens."""
        if shapes.cached_tokens is None:
            shapes.check_whole(mask.documents)
            return LocalDeltaPlan(StateSegments(mask.documents), shapes.beta_scale)
        # Before the first token there is no state to take.
        received: tuple[int, ...] = ()
        if shapes.cached_tokens:
            received = (0,)
        return LocalDeltaPlan(
            StateSegments(PackedDocuments.of([0, shapes.tokens]), received, sent=(0,)), shapes.beta_scale
        )

    def __call__(
        self,
        q_BtKD: Tensor,
        k_BtKD: Tensor,
        v_BtKX: Tensor,
        *,
        plan: LocalDeltaPlan,
        cache: LayerCache | None = None,
        scores: ScoreRules | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Compute the output [B, t, K, G·V]; there are no ``scores``."""
        B, T, K = q_BtKD.shape[:3]
        given = weights_of(weights)
        if cache is None:
            # Rows are laid end to end: documents are boundaries in the flattened tokens.
            q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q_BtKD, k_BtKD, v_BtKX))
            options = GatedDeltaOptions(segments=plan.segments, beta_scale=plan.beta_scale, saved=recompute_cache)
            out, _ = gated_delta(as_tokens(q, k, v, given), given, options)
            return out.view(B, T, K, -1)
        # Short chunks for few tokens: a generated token would otherwise cost as much as sixty-four.
        tokens, initial_states = as_tokens(q_BtKD, k_BtKD, v_BtKX, given), cache.state
        options = GatedDeltaOptions(segments=plan.segments, beta_scale=plan.beta_scale, chunk=min(T, CHUNK))
        out, states = gated_delta(tokens, given, options, initial_states)
        cache.set_state(InitialStates(states, newest(tokens, given, initial_states)), T)
        return out.unflatten(2, (K, -1)).flatten(3)


def as_tokens(
    q_BtKD: Tensor, k_BtKD: Tensor, v_BtKX: Tensor, weights: GatedDeltaWeights | StateSpaceWeights
) -> ProjectedTokens:
    """Split ``GatedDeltaNet.project``'s results into the fields of ``ProjectedTokens``."""
    G, X = weights.rate_bias_KGX.shape[1:]
    v, a, b = v_BtKX.split((v_BtKX.shape[-1] - G * X - G, G * X, G), dim=-1)
    return ProjectedTokens(q_BtKD, k_BtKD, v.unflatten(-1, (G, -1)), a.unflatten(-1, (G, X)), b)


def newest(
    tokens: ProjectedTokens, weights: GatedDeltaWeights | StateSpaceWeights, initial_states: InitialStates | None
) -> Tensor:
    """Return the last tokens' channels, which the next tokens' convolution reads, [1, B, R, K, C]."""
    lookback = weights.conv_KCR.shape[-1] - 1
    num_tokens = tokens.q_BtKD.shape[1]
    own = tokens.channels(slice(max(0, num_tokens - lookback), num_tokens))
    # In the states' dtype, so that a cache has a single one.
    own = own.to(accumulate_dtype(own.dtype))
    missing = lookback - own.shape[1]
    if not missing:
        return own.unsqueeze(0)
    if initial_states is None:
        return functional.pad(own, (0, 0) * 2 + (missing, 0)).unsqueeze(0)
    return torch.cat((initial_states.conv_state_sBRKC[:, :, -missing:], own.unsqueeze(0)), dim=2)
