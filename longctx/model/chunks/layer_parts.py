"""LayerParts: a layer's computations for one token chunk, or for one head group.

Axes: B rows, c tokens in a chunk, M model width, H query heads, D head size, V value head size, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.block import Block, LayerCall, ResidualDropout
from longctx.model.experts.moe_layer import MixtureOfExperts, MoECall
from longctx.model.recompute import RecomputeCache
from longctx.model.rotary import RotaryTable

_AFTER_CORE = ("mlp.", "self_attn.o_proj.", "self_attn.out_proj.", "self_attn.gate_proj.", "self_attn.in_proj_z.")
"""Name prefixes for parameters that only a block's part after its core reads."""


class LayerParts:
    """One layer's parts in one forward pass."""

    def __init__(self, block: Block, table: RotaryTable | None, call: LayerCall, num_tokens: int) -> None:
        """Set up the parts; this rank has ``num_tokens`` tokens per row."""
        self.block, self.table, self.call, self.num_tokens = block, table, call, num_tokens
        self.residual_dropout = call.residual_dropout()
        names = [name for name, _ in block.named_parameters()]
        self.weights_after_core = [number for number, name in enumerate(names) if name.startswith(_AFTER_CORE)]
        """Indices of the block's parameters to which attention's backward adds no gradient."""

    def project(self, x_BcM: Tensor, tokens: slice, *, only_graph: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Compute a chunk's queries, keys and values for all heads; with ``only_graph`` for their backward only."""
        table = self.table
        if table is not None:
            table = table.of_tokens(tokens)
        return self.call.run(Block.before_core, self.block, x_BcM, table, False, only_graph)

    def run_core(self, group: int, qkv: Sequence[Tensor], scores: ScoreRules, cache: RecomputeCache | None) -> Tensor:
        """Compute attention for one head group, over all tokens."""
        q, k, v = qkv
        heads = slice(group * q.shape[2], (group + 1) * q.shape[2])
        return self.call.core(
            q,
            k,
            v,
            plan=self.call.plan,
            scores=scores.of_heads(heads.start, heads.stop),
            weights=[weight[heads] for weight in self.block.self_attn.core_weights()],
            recompute_cache=cache,
        )

    @property
    def admits_together(self) -> bool:
        """True if all tokens must choose their experts before the first one is dispatched."""
        return isinstance(self.block.mlp, MixtureOfExperts) and self.call.experts.capacity is not None

    def choose_experts(self, x_BcM: Tensor, heads_BcHV: Tensor, tokens: slice) -> Tensor:
        """Return the experts [B, c, k] that a chunk's tokens choose, before any capacity."""
        assert isinstance(self.block.mlp, MixtureOfExperts)
        residual_dropout = self.chunk_dropout(tokens)
        _, normed_BcM = self.call.run(Block.join_attention, self.block, x_BcM, heads_BcHV, residual_dropout, False)
        return self.block.mlp.choose(normed_BcM, self.call.experts.of_tokens(tokens, self.num_tokens))

    def finish(
        self,
        x_BcM: Tensor,
        heads: Sequence[Tensor],
        tokens: slice,
        experts: MoECall,
        cache: RecomputeCache | None,
    ) -> tuple[Tensor, ...]:
        """Compute a chunk's layer output and router statistics; ``experts`` holds the arguments for all tokens.

        ``heads`` [B, c, H, V] are self attention's, followed by cross attention's if the layer has it.
        """
        again = cache is not None and cache.recomputing
        call = replace(self.call, experts=experts.of_tokens(tokens, self.num_tokens), only_graph=again)
        residual_dropout = self.chunk_dropout(tokens)
        if len(heads) > 1:
            x_BcM = self.call.run(Block.add_attention, self.block, x_BcM, heads[0], residual_dropout[0], False)
        return self.block.finish(x_BcM, heads[-1], residual_dropout, call, cache)

    def chunk_dropout(self, tokens: slice) -> ResidualDropout:
        """Return a chunk's dropout draws for the residual sums."""
        attention, ffn, cross = (None if draw is None else draw.of_tokens(tokens) for draw in self.residual_dropout)
        return attention, ffn, cross


class WeightSums:
    """Gradients for some weights, summed in float32 (float64 for float64) and rounded once."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights
        self._sums: list[Tensor | None] = [None] * len(weights)
        self._finished: set[int] = set()

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one chunk's gradients, None for unused weights. This object takes ownership of the tensors."""
        for n, gradient in enumerate(gradients):
            if gradient is None:
                continue
            assert n not in self._finished, "gradient for a weight after its sum was finished"
            total = self._sums[n]
            # The first one becomes the sum: no zeros are allocated for weights that no chunk uses.
            if total is None:
                self._sums[n] = gradient.to(accumulate_dtype(gradient.dtype))
            else:
                total += gradient

    def finish(self, weights: Sequence[Tensor]) -> None:
        """Round the sums for weights that get no further gradients: they take half the memory."""
        finished = set(map(id, weights))
        for n, (weight, total) in enumerate(zip(self._weights, self._sums, strict=True)):
            if id(weight) in finished and total is not None:
                self._sums[n] = total.to(weight.dtype)
                self._finished.add(n)

    def results(self) -> list[Tensor | None]:
        """Return the gradients in the weights' dtypes; None for a weight without contributions."""
        results = []
        for weight, total in zip(self._weights, self._sums, strict=True):
            if total is not None:
                total = total.to(weight.dtype)
            results.append(total)
        self._sums.clear()
        return results


# ``torch.autograd.grad`` fills no ``.grad`` and runs no hook. The layer's autograd function returns the sums over
# chunks as its own gradients, so that ZeRO reduces each weight once, as without chunks.
class ChunkBackward:
    """Callable that differentiates a layer's parts, and sums the weight gradients over all calls."""

    def __init__(self, weights: Sequence[Tensor | None]) -> None:
        """Start sums for ``weights``; frozen ones, and None, get no gradient."""
        trained = {n: weight for n, weight in enumerate(weights) if weight is not None and weight.requires_grad}
        self._trained, self._weights = list(trained), list(trained.values())
        self._number, self._sums = len(weights), WeightSums(self._weights)

    def __call__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor]:
        """Compute gradients for ``inputs``, all of which affect the outputs; entries in ``gradients`` may be None."""
        differentiable, known = [], []
        # Autograd rejects outputs without a graph, such as expert ids.
        for output, gradient in zip(outputs, gradients, strict=True):
            if gradient is not None and output.requires_grad:
                differentiable.append(output)
                known.append(gradient)
        found = torch.autograd.grad(differentiable, list(inputs) + self._weights, known, allow_unused=True)
        self._sums.add(found[len(inputs) :])
        return found[: len(inputs)]

    def finish(self, weights: Sequence[Tensor]) -> None:
        """Round the sums for weights that get no further gradients."""
        self._sums.finish(weights)

    def results(self) -> list[Tensor | None]:
        """Return the weights' gradients in their order."""
        found: list[Tensor | None] = [None] * self._number
        for n, gradient in zip(self._trained, self._sums.results(), strict=True):
            found[n] = gradient
        return found


def leaves(values: Sequence[Tensor]) -> list[Tensor]:
    """Detach the values as leaves of a new graph."""
    return [x.detach().requires_grad_() for x in values]
