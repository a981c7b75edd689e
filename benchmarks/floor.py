"""Lower bound on a training step's time: its matmuls and its attention alone.

Without norms, activations, positions, softmax over the vocabulary or gradient sums: the remaining time is what a step
with this model needs at least with this processor's libraries. Matmuls have the step's shapes, forward and for both
gradients, and the step's dtype. Operands are already in it, weights are the model's own, and results go to reused
memory. Attention uses the step's kernel.

Axes: N rows of a matmul, I input width, O output width, L layers of experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.kernels.attention.kernel_interface import KernelRequest, ScoreRules
from longctx.kernels.attention.kernel_selection import choose_kernel
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from longctx.kernels.matmul import multiplies_in_float32
from longctx.kernels.processor import fastest_matmul_mode
from longctx.model.decoder import Decoder
from longctx.model.experts.experts import Experts
from longctx.model.experts.router import Router

HEAD_ELEMENTS = 1 << 24
"""Logits per matmul; all of them at once would need new pages, and be slower."""


@dataclass(frozen=True)
class Product:
    """x · weightᵀ in a layer, with both of its gradients."""

    rows: int
    weight_OI: Tensor

    @property
    def flops(self) -> float:
        """FLOPs of all three."""
        return 6.0 * self.rows * self.weight_OI.numel()


@dataclass(frozen=True)
class Floor:
    """Lower bound for one step of a model, in two parts."""

    products: Callable[[], None]
    attention: Callable[[], None]

    @classmethod
    def build(cls, decoder: Decoder, tokens_BT: Tensor) -> Floor:
        """Build the floor of a step on one row; experts get the rows that the decoder sends them."""
        counts_LE = expert_rows(decoder, tokens_BT)
        dtype = decoder.model.embed_tokens.weight.dtype
        return cls(
            product_step(list(products(decoder, tokens_BT.numel(), counts_LE))),
            attention_step(decoder.config, tokens_BT.numel(), dtype),
        )

    def actions(self) -> dict[str, Callable[[], None]]:
        """Actions to measure, by name."""
        return {"products": self.products, "attention": self.attention}


@torch.no_grad()
def expert_rows(decoder: Decoder, tokens_BT: Tensor) -> list[list[int]]:
    """Return the token count per MoE layer and expert."""
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    _, stats = decoder(tokens_BT, positions_BT, return_stats=True)
    return [layer.counts_SE.sum(0).tolist() for layer in stats]


def products(decoder: Decoder, tokens: int, counts_LE: list[list[int]]) -> Iterator[Product]:
    """Return all of a step's matmuls, in layer order."""
    counts = iter(counts_LE)
    for module in decoder.modules():
        if isinstance(module, nn.Linear):
            yield Product(tokens, _operand(module.weight))
        elif isinstance(module, Router):
            yield Product(tokens, module.weight.detach().float())
        elif isinstance(module, Experts):
            for expert, rows in enumerate(next(counts)):
                yield Product(rows, _operand(module.gate_up_proj[expert]))
                yield Product(rows, _operand(module.down_proj[expert]))
    head = decoder.lm_head.weight
    weight_VM = _operand(decoder.model.embed_tokens.weight if head is None else head)
    chunk = HEAD_ELEMENTS // len(weight_VM)
    for start in range(0, tokens, chunk):
        yield Product(min(chunk, tokens - start), weight_VM)


def _operand(weight_OI: Tensor) -> Tensor:
    """Return the weight in its matmuls' dtype."""
    weight_OI = weight_OI.detach()
    return weight_OI.float() if multiplies_in_float32(weight_OI, fastest_matmul_mode()) else weight_OI


def product_step(wanted: list[Product]) -> Callable[[], None]:
    """Compute all matmuls forward, then both gradients of each, in memory common to matmuls of one width."""
    most: dict[int, int] = {}
    for product in wanted:
        for width in product.weight_OI.shape:
            most[width] = max(most.get(width, 0), product.rows)
    memory: dict[tuple, Tensor] = {}

    def buffer(name: str, product: Product, width: int) -> Tensor:
        key = (name, width, product.weight_OI.dtype)
        if key not in memory:
            memory[key] = torch.randn(most[width], width).to(product.weight_OI.dtype)
        return memory[key][: product.rows]

    calls = []
    for product in wanted:
        weight_OI = product.weight_OI
        width_out, width_in = weight_OI.shape
        x_NI, dx_NI = (buffer(name, product, width_in) for name in ("x", "dx"))
        y_NO, dy_NO = (buffer(name, product, width_out) for name in ("y", "dy"))
        dweight_OI = memory.setdefault((*weight_OI.shape, weight_OI.dtype), torch.zeros_like(weight_OI))
        calls.append((x_NI, weight_OI, y_NO, dy_NO, dx_NI, dweight_OI))

    def step() -> None:
        for x_NI, weight_OI, y_NO, *_ in calls:
            torch.mm(x_NI, weight_OI.T, out=y_NO)
        for x_NI, weight_OI, _, dy_NO, dx_NI, dweight_OI in reversed(calls):
            torch.mm(dy_NO, weight_OI, out=dx_NI)
            torch.mm(dy_NO.T, x_NI, out=dweight_OI)

    return step


def attention_step(config: ModelConfig, tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    """Compute causal attention over one document in every layer, forward and backward, with the selected kernel."""
    H, D, V = config.num_heads, config.head_dim, config.value_dim
    K = H if config.is_latent else config.num_kv_heads
    kernel = choose_kernel("auto", KernelRequest("cpu", dtype, D, H, K, V))
    slices, scores = slice_table([AttentionSlice(0, tokens, 0, tokens, lo=0)]), ScoreRules(scale=config.scale)
    q, k, v, dout = (torch.randn(1, tokens, *of).to(dtype) for of in ((H, D), (K, D), (K, V), (H, V)))

    def step() -> None:
        for _ in range(config.num_layers):
            out, lse = kernel.forward(q, k, v, slices, scores=scores)
            kernel.backward(dout, q, k, v, out.to(dtype), lse, slices, scores=scores)

    return step
