"""One decoder layer, one token chunk at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.model.activation_offload import Keep
from longctx.model.block import Block, LayerCall
from longctx.model.chunks.chunk_store import Stored, in_turn
from longctx.model.chunks.chunked_cross import ChunkedCross
from longctx.model.chunks.group_attention import Attended, Projected, backward_by_groups, forward_by_groups
from longctx.model.chunks.head_groups import ByGroups
from longctx.model.chunks.layer_parts import ChunkBackward, LayerParts, leaves
from longctx.model.chunks.residual_stream import ResidualStream
from longctx.model.experts.moe_layer import MoECall
from longctx.model.experts.router import RouterStats
from longctx.model.recompute import RecomputeCache
from longctx.model.rotary import RotaryTable

_KEPT_OF_EXPERTS: dict[Keep, Keep] = {"all": "attention", "attention": "attention", "inputs": "inputs"}
"""Backward recomputes a chunk in any case, so "all" keeps no more here than "attention"."""


def chunked_layer(
    stream: ResidualStream, block: Block, handle: Tensor, table: RotaryTable | None, call: LayerCall
) -> tuple[Tensor, ...]:
    """Run the stream through a layer; return the next handle, followed by router statistics if it has experts."""
    parts = LayerParts(block, table, call, stream.num_tokens)
    layer = ChunkedLayer(stream, parts, needs_grad=torch.is_grad_enabled())
    bias, table_NH, source_BsM = call.scores.relative_bias, None, None
    if bias is not None:
        table_NH = bias.table_NH
    if call.cross is not None:
        source_BsM = call.cross.source.hidden_BsM
    return _Layer.apply(handle, layer, table_NH, source_BsM, *block.parameters())


class _Layer(torch.autograd.Function):
    """Autograd function for the layer; each weight is an argument and gets its gradient once, after the last chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: Tensor,
        layer: ChunkedLayer,
        table_NH: Tensor | None,
        source_BsM: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        # Saved although the layer holds them: autograd detects an in-place write in between.
        ctx.save_for_backward(table_NH, source_BsM, *weights)
        stats = layer.forward()
        if stats:
            # By default all outputs of a custom function have a gradient.
            router_stats = RouterStats.from_tensors(stats)
            ctx.mark_non_differentiable(router_stats.counts_SE, *router_stats.diagnostics)
        return handle.new_empty(0), *stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dhandle: Tensor, *dstats: Tensor | None):  # type: ignore[override]
        inputs = list(ctx.saved_tensors)
        # The bias table and the source have a history, which the layer's own graphs must not enter.
        for number in range(2):
            if inputs[number] is not None:
                inputs[number] = inputs[number].detach().requires_grad_()
        chunk_backward = ChunkBackward(inputs)
        scores = _with_table(ctx.layer.parts.call.scores, inputs[0])
        after_core = [inputs[2 + number] for number in ctx.layer.parts.weights_after_core]
        ctx.layer.backward(dstats, chunk_backward, scores, inputs[1], after_core)
        return dhandle, None, *chunk_backward.results()


def _with_table(scores: ScoreRules, table_NH: Tensor | None) -> ScoreRules:
    """Return the scores with this learned bias table, if they have one."""
    if scores.relative_bias is None or table_NH is None:
        return scores
    return replace(scores, relative_bias=replace(scores.relative_bias, table_NH=table_NH))


# A layer by chunks, with activations in a store (compare FPDT, arXiv 2408.16978). Results on the right cover all tokens
# and are in the store, so the device holds one chunk, or one head group.
#
#     forward     chunks: norm, projections        ->  queries, keys, values
#                 head groups: attention           ->  heads' outputs
#                 chunks: projection, FFN          ->  the layer's output
#     backward    chunks: FFN again, its backward  ->  gradients of the heads' outputs
#                 chunks: projections again        ->  queries, keys, values
#                 head groups: attention's backward
#                 chunks: projections' backward    ->  the gradient of the layer's input
#
# Attention uses the same core and schedule as without chunks, with fewer heads per call.
class ChunkedLayer:
    """One layer in one forward pass and its backward."""

    def __init__(self, stream: ResidualStream, parts: LayerParts, *, needs_grad: bool) -> None:
        self.stream, self.parts, self.needs_grad = stream, parts, needs_grad
        self.store, self.chunks = stream.store, stream.chunks
        self.keep: Keep = parts.call.keep
        self.x: Stored | None = None
        self.projected: Projected | None = None
        self.attended: Attended | None = None
        self.cross: ChunkedCross | None = None
        if parts.call.cross is not None:
            self.cross = ChunkedCross(stream, parts, parts.call.cross, needs_grad=needs_grad)
        self.crossed: Attended | None = None
        self.routing: list[RecomputeCache] = []
        """One per chunk: its tokens go to the same experts in forward and recomputation."""

    def forward(self) -> list[Tensor]:
        """Run the residual stream through the layer; return the router statistics."""
        x = self.stream.take_values()
        projected = self._project(x)
        attended = self._self_attention(projected, release_inputs=self.keep != "all")
        crossed = self._cross(x, attended)
        self.stream.values, stats = self._finish(x, _outs(attended, crossed))
        if self.needs_grad:
            self.x = x
            if self.keep == "all":
                self.projected = projected
            if self.keep != "inputs":
                self.attended, self.crossed = attended, crossed
        return stats

    def backward(
        self,
        dstats: Sequence[Tensor | None],
        chunk_backward: ChunkBackward,
        scores: ScoreRules,
        source_BsM: Tensor | None,
        after_core: Sequence[Tensor],
    ) -> None:
        """Run the residual stream's gradient back through the layer; ``source_BsM`` is a leaf, if there is a source."""
        x, projected, attended, crossed = self.x, self.projected, self.attended, self.crossed
        # Used values make room for the next ones.
        self.x = self.projected = self.attended = self.crossed = None
        assert x is not None, "second backward pass through one graph"
        # Only with keep="inputs": the ring runs a second time.
        if attended is None:
            projected = projected or self._project(x)
            attended = self._self_attention(projected, release_inputs=False)
            crossed = self._cross(x, attended)
        dx, douts = self._finish_backward(x, _outs(attended, crossed), dstats, chunk_backward)
        if self.cross is not None and crossed is not None and source_BsM is not None:
            self.cross.backward(x, attended, crossed, source_BsM, dx, douts, chunk_backward)
        # Projections follow the FFN's backward, so that their memory does not add up; only its gradients are left.
        chunk_backward.finish(after_core)
        projected = projected or self._project(x)
        run_core = partial(self._run_core, scores=scores)
        dprojected = backward_by_groups(self.store, projected, attended, douts[0], chunk_backward, run_core)
        self._project_backward(x, dprojected, dx, chunk_backward)
        self.stream.gradient = dx

    def _project(self, x: Stored) -> Projected:
        projected: Projected | None = None
        for tokens, (x_BcM,) in in_turn(self.chunks, [x]):
            values = self.parts.project(x_BcM, tokens)
            projected = projected or Projected._make(map(self._empty_by_groups, values))
            for place, of_chunk in zip(projected, values, strict=True):
                place.write(tokens, of_chunk)
        assert projected is not None
        return projected

    def _run_core(
        self, group: int, qkv: Sequence[Tensor], cache: RecomputeCache | None, scores: ScoreRules | None = None
    ) -> Tensor:
        return self.parts.run_core(group, qkv, scores or self.parts.call.scores, cache)

    def _cross(self, x: Stored, attended: Attended) -> Attended | None:
        """Compute cross attention, if the layer has it."""
        if self.cross is None:
            return None
        return self.cross.forward(x, attended)

    def _self_attention(self, projected: Projected, *, release_inputs: bool) -> Attended:
        return forward_by_groups(
            self.store, projected, self._run_core, needs_grad=self.needs_grad, release_inputs=release_inputs
        )

    def _finish(self, x: Stored, outs: Sequence[ByGroups]) -> tuple[Stored, list[Tensor]]:
        """Compute the layer's output and the router statistics."""
        y: Stored | None = None
        stats: list[Tensor] = []
        experts = _admitted(self.parts, self.chunks, x, outs[0])
        for tokens, (x_BcM, *heads) in in_turn(self.chunks, [x, *outs]):
            y_BcM, *of_chunk = self.parts.finish(x_BcM, heads, tokens, experts, self._new_routing())
            y = y or self.store.empty_chunks(self.stream.num_tokens, y_BcM)
            y.write(tokens, y_BcM)
            # Statistics are sums over tokens.
            if stats:
                of_chunk = [total + part for total, part in zip(stats, of_chunk, strict=True)]
            stats = of_chunk
        assert y is not None
        return y, stats

    def _finish_backward(
        self, x: Stored, outs: Sequence[ByGroups], dstats: Sequence[Tensor | None], chunk_backward: ChunkBackward
    ) -> tuple[Stored, list[ByGroups]]:
        """Compute gradients for the layer's input, except those through attention, and for the attention outputs."""
        # Each chunk of the output's gradient makes room for the input's.
        dx = self.stream.take_gradient()
        douts: list[ByGroups] = []
        chunk_values = in_turn(self.chunks, [dx, x, *outs])
        for cache, (tokens, (dy_BcM, x_BcM, *heads)) in zip(self.routing, chunk_values, strict=True):
            with torch.enable_grad(), cache:
                inputs = leaves([x_BcM, *heads])
                # The cache holds the tokens' expert ids.
                outputs = self.parts.finish(inputs[0], inputs[1:], tokens, self.parts.call.experts, cache)
                dx_BcM, *dheads = chunk_backward(outputs, inputs, [dy_BcM, *dstats])
            dx.write(tokens, dx_BcM)
            douts = douts or [self._empty_by_groups(x) for x in dheads]
            for dout, x_BcHV in zip(douts, dheads, strict=True):
                dout.write(tokens, x_BcHV)
        self.routing.clear()
        return dx, douts

    def _project_backward(self, x: Stored, dprojected: Projected, dx: Stored, chunk_backward: ChunkBackward) -> None:
        """Add the gradient through queries, keys and values to ``dx``."""
        stored = [dx, x, dprojected.q, dprojected.k, dprojected.v]
        for tokens, (dx_BcM, x_BcM, dq, dk, dv) in in_turn(self.chunks, stored):
            with torch.enable_grad():
                inputs = leaves([x_BcM])
                outputs = self.parts.project(inputs[0], tokens, only_graph=True)
                (through_attention,) = chunk_backward(outputs, inputs, [dq, dk, dv])
            # In place: the tensor is not used elsewhere.
            dx.write(tokens, through_attention.add_(dx_BcM))

    def _empty_by_groups(self, like: Tensor) -> ByGroups:
        return ByGroups.empty(self.store, self.stream.num_tokens, like, self.stream.head_groups)

    def _new_routing(self) -> RecomputeCache | None:
        """Create the cache for the next chunk's routing; return None without training."""
        if not self.needs_grad:
            return None
        self.routing.append(RecomputeCache(_KEPT_OF_EXPERTS[self.keep], self.store.put, by_chunks=True))
        return self.routing[-1]


def _outs(attended: Attended, crossed: Attended | None) -> list[ByGroups]:
    if crossed is None:
        return [attended.out]
    return [attended.out, crossed.out]


def _admitted(parts: LayerParts, chunks: Sequence[slice], x: Stored, out: ByGroups) -> MoECall:
    """Build the experts' arguments; with a capacity all tokens choose before the first is dispatched."""
    call = parts.call.experts
    if not parts.admits_together:
        return call
    chosen = []
    for tokens, (x_BcM, heads_BcHV) in in_turn(chunks, [x, out]):
        chosen.append(parts.choose_experts(x_BcM, heads_BcHV, tokens))
    # One collective per layer, as without chunks.
    return call.admit(torch.cat(chosen, dim=1))
