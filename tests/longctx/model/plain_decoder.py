"""A dense decoder by definition in float64: every score formed, every rule written out, gradients by autograd.

None of the model's code is used, but for the frequencies of stretched rotary positions, which have tests of their own.

Axes: N tokens of all rows, M model width, H query heads, K key/value heads, D head size, P channels of relative
positions.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from longctx.config import ModelConfig
from longctx.model.decoder import Decoder


class PlainDecoder:
    """The same function of the same weights, which it takes, as float64 leaves, from a ``Decoder``."""

    def __init__(self, decoder: Decoder) -> None:
        self.config: ModelConfig = decoder.config
        self.weights = {name: p.detach().double().requires_grad_() for name, p in decoder.named_parameters()}

    def __call__(self, tokens_BT: Tensor, positions_BT: Tensor, cu_seqlens) -> Tensor:
        """Hidden states [B, T, M]."""
        config, positions_N = self.config, positions_BT.flatten()
        bounds = [int(n) for n in cu_seqlens]
        self.longest = max(b - a for a, b in pairwise(bounds))
        self.document_N = torch.cat([torch.full((b - a,), n) for n, (a, b) in enumerate(pairwise(bounds))])
        x_NM = self.weights["model.embed_tokens.weight"][tokens_BT.flatten()] * config.embedding_scale
        if config.position == "learned":
            x_NM = x_NM + self.weights["model.embed_positions.weight"][positions_N]
        if config.position.startswith("sinusoidal"):
            halves = config.position == "sinusoidal_halves"
            x_NM = x_NM + sinusoids(positions_N.double(), config.hidden_size, halves=halves)
        for layer in range(config.num_layers):
            x_NM = self.block(x_NM, positions_N, layer)
        return (x_NM if config.norm_order == "post" else self.norm(x_NM, "model.norm")).view(*tokens_BT.shape, -1)

    def block(self, x_NM: Tensor, positions_N: Tensor, layer: int, at: str = "") -> Tensor:
        at, scale = at or f"model.layers.{layer}", self.config.residual_scale

        def attend(h: Tensor) -> Tensor:
            return self.attention(h, positions_N, layer, f"{at}.self_attn")

        def feed(h: Tensor) -> Tensor:
            return self.ffn(h, f"{at}.mlp")

        def norm(h: Tensor, name: str) -> Tensor:
            return self.norm(h, f"{at}.{name}")

        if self.config.norm_order == "pre":
            x_NM = x_NM + scale * attend(norm(x_NM, "input_layernorm"))
            return x_NM + scale * feed(norm(x_NM, "post_attention_layernorm"))
        if self.config.norm_order == "post":
            x_NM = norm(x_NM + scale * attend(x_NM), "post_attention_layernorm")
            return norm(x_NM + scale * feed(x_NM), "post_feedforward_layernorm")
        x_NM = x_NM + scale * norm(attend(norm(x_NM, "input_layernorm")), "post_attention_layernorm")
        fed = feed(norm(x_NM, "pre_feedforward_layernorm"))
        return x_NM + scale * norm(fed, "post_feedforward_layernorm")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, eps = self.weights[f"{name}.weight"], self.config.norm_eps
        if self.config.norm == "layernorm":
            centred = x - x.mean(-1, keepdim=True)
            return (
                centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + self.weights[f"{name}.bias"]
            )
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + self.config.norm_offset)

    def ffn(self, x: Tensor, at: str) -> Tensor:
        up = self.linear(x, f"{at}.up_proj")
        if self.config.activation == "swiglu":
            up = functional.silu(self.linear(x, f"{at}.gate_proj")) * up
        elif self.config.activation == "gelu_tanh":
            up = functional.gelu(up, approximate="tanh")
        else:
            raise NotImplementedError(self.config.activation)
        return self.linear(up, f"{at}.down_proj")

    def attention(self, x_NM: Tensor, positions_N: Tensor, layer: int, at: str) -> Tensor:
        config = self.config
        H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
        q, k, v = (self.linear(x_NM, f"{at}.{n}_proj") for n in "qkv")
        if config.qk_norm == "full":
            q, k = self.norm(q, f"{at}.q_norm"), self.norm(k, f"{at}.k_norm")
        q, k, v = q.view(-1, H, D), k.view(-1, K, D), v.view(-1, K, D)
        if config.qk_norm == "head":
            q, k = self.norm(q, f"{at}.q_norm"), self.norm(k, f"{at}.k_norm")
        ahead = layer >= config.num_layers
        if config.position == "rope" and (ahead or config.rope_layers[layer % len(config.rope_layers)]):
            q, k = (self.rotary(h, positions_N, layer) for h in (q, k))
        k, v = (h.repeat_interleave(H // K, 1) for h in (k, v))
        if config.position == "relative":
            scores = self.relative(q, k, positions_N, f"{at}.relative")
        else:
            scores = torch.einsum("ihd,jhd->hij", q, k)
        scores = self.scaled(scores, positions_N)
        scores = scores.masked_fill(~self.seen(layer), -torch.inf)
        if config.sinks:
            sinks = self.weights[f"{at}.sinks.weight"][:, None, None].expand(H, len(x_NM), 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        heads = torch.einsum("hij,jhd->ihd", weights, v)
        return self.linear(heads.reshape(len(x_NM), -1), f"{at}.o_proj")

    def seen(self, layer: int) -> Tensor:
        """Which key (column) a query (row) sees."""
        index = torch.arange(len(self.document_N))
        apart = index[:, None] - index
        seen, kind = self.document_N[:, None] == self.document_N, self.kind(layer)
        if self.config.causal:
            seen = seen & (apart >= 0)
        if kind == "window":
            seen = seen & (apart.abs() < self.config.window)
        if kind == "sparse":
            seen = seen & ((apart.abs() < self.config.window) | (apart % self.config.sparse_stride == 0))
        return seen

    def kind(self, layer: int) -> str:
        if layer >= self.config.num_layers:
            return "full"
        return self.config.layers[layer % len(self.config.layers)]

    def scaled(self, scores_HNN: Tensor, positions_N: Tensor) -> Tensor:
        """Scale, then cap, then biases of the distance."""
        config = self.config
        scale = config.attention_scale or config.head_dim**-0.5
        if config.position == "rope" and config.rope.kind == "yarn" and config.rope.mscale_all_dim:
            scale *= (0.1 * config.rope.mscale_all_dim * math.log(config.rope.factor) + 1) ** 2
        scores_HNN = scores_HNN * scale
        if cap := config.attention_softcap:
            scores_HNN = cap * torch.tanh(scores_HNN / cap)
        apart = positions_N[:, None] - positions_N
        if config.position == "alibi":
            slopes = torch.tensor(alibi_slopes(config.num_heads), dtype=torch.float64)
            scores_HNN = scores_HNN - slopes[:, None, None] * apart.abs()
        if config.position == "t5":
            rows = t5_rows(apart, config.relative_buckets, config.relative_max_distance, causal=config.causal)
            scores_HNN = scores_HNN + self.weights["model.relative_bias.weight"][rows].permute(2, 0, 1)
        return scores_HNN

    def rotary(self, x_NHD: Tensor, positions_N: Tensor, layer: int) -> Tensor:
        """Channel pairs as complex numbers, times e^(i · angle)."""
        config, rope, factor = self.config, self.config.rope, self.config.rope.scale()
        size = int(config.head_dim * rope.partial)
        frequencies = rope.frequencies(size, self.longest)
        if config.local_rope_theta and self.kind(layer) == "window":
            factor, frequencies = 1.0, [config.local_rope_theta ** (-2 * c / size) for c in range(size // 2)]
        angles = positions_N.double()[:, None, None] * torch.tensor(frequencies, dtype=torch.float64)
        turned = x_NHD[..., :size]
        split = turned.unflatten(-1, (-1, 2)) if rope.interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
        pairs = torch.view_as_complex(split.contiguous()) * torch.polar(torch.full_like(angles, factor), angles)
        split = torch.view_as_real(pairs)
        turned = (split if rope.interleaved else split.transpose(-1, -2)).flatten(-2)
        return torch.cat((turned, x_NHD[..., size:]), -1)

    def relative(self, q_NHD: Tensor, k_NHD: Tensor, positions_N: Tensor, at: str) -> Tensor:
        """(q + u)·k + (q + v)·W r(i − j), arXiv 1901.02860 §3.3, with r formed for every pair of tokens."""
        size = self.config.hidden_size
        apart_NN = (positions_N[:, None] - positions_N).double()
        speeds = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = apart_NN[..., None] * speeds
        r_NNP = torch.cat((angles.sin(), angles.cos()), -1)
        keys_NNHD = torch.einsum("hdp,ijp->ijhd", self.weights[f"{at}.weight"], r_NNP)
        of_content = torch.einsum("ihd,jhd->hij", q_NHD + self.weights[f"{at}.content_bias"], k_NHD)
        of_place = torch.einsum("ihd,ijhd->hij", q_NHD + self.weights[f"{at}.position_bias"], keys_NNHD)
        return of_content + of_place


def sinusoids(positions_N: Tensor, size: int, *, halves: bool = False) -> Tensor:
    """[N, size] of arXiv 1706.03762 §3.5: sin(p / 10000^(2c / size)) in channel 2c, the cosine in 2c + 1.

    In halves, as Marian has them, the sine is in channel c and the cosine in c + size/2.
    """
    rows = [
        [f(p / 10_000 ** (2 * c / size)) for c in range(size // 2) for f in (math.sin, math.cos)]
        for p in positions_N.tolist()
    ]
    table = torch.tensor(rows, dtype=torch.float64)
    return torch.cat((table[:, 0::2], table[:, 1::2]), dim=1) if halves else table


def alibi_slopes(num_heads: int) -> list[float]:
    """2^(−8/n), 2^(−16/n), … for n heads, a power of two; else those of the power below, then every other of 2n."""

    def geometric(n: int) -> list[float]:
        return [2 ** (-8 * h / n) for h in range(1, n + 1)]

    below = 2 ** math.floor(math.log2(num_heads))
    return (geometric(below) + geometric(2 * below)[::2])[:num_heads]


def t5_rows(apart: Tensor, num_buckets: int, max_distance: int, *, causal: bool) -> Tensor:
    """The row of the bias table for each distance; of both sides, the second half of the table looks ahead."""
    if causal:
        return t5_buckets(apart.clamp(min=0), num_buckets, max_distance)
    return num_buckets // 2 * (apart < 0) + t5_buckets(apart.abs(), num_buckets // 2, max_distance)


def t5_buckets(apart: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """The row of the bias table for each distance back; logarithms in float32, as T5's code has them."""
    exact = num_buckets // 2
    ratio = torch.log(apart.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = exact + (ratio * (num_buckets - exact)).long()
    return torch.where(apart < exact, apart, wide.clamp(max=num_buckets - 1))
