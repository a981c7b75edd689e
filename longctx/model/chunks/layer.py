"""One decoder layer, a chunk of its tokens at a time.

    forward     chunks: norm, projections        ->  queries, keys, values
                head groups: attention           ->  heads' outputs
                chunks: projection, FFN          ->  the layer's output
    backward    chunks: FFN again, its backward  ->  gradients of the heads' outputs
                chunks: projections again        ->  queries, keys, values
                head groups: attention's backward
                chunks: projections' backward    ->  the gradient of the layer's input

What passes between these lines are values of all tokens: they lie in a store. On the device are those of one chunk, or
of one group of heads. Attention is the same core with the same schedule as for a whole layer, with fewer heads.

Axes: B rows, t tokens of this rank, c of a chunk, M model width, H query heads, K key heads, h and g those of a group,
D head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx.kernels.attention.contract import Scores
from longctx.kernels.graphs import outside_graphs
from longctx.model.chunks.store import PutOnce, Stored, in_turn
from longctx.model.chunks.weight_sums import WeightSums
from longctx.model.experts.router import RouterStats
from longctx.model.kept import Keep
from longctx.model.recompute import RecomputeCache
from longctx.model.rotary import RotaryTable

if TYPE_CHECKING:
    from longctx.model.block import Block, Call, Draws


class HeadGroup(NamedTuple):
    """Queries, keys and values of the heads of one group, or their gradients."""

    q: Stored
    k: Stored
    v: Stored


class Attended(NamedTuple):
    """Attention of one group of heads."""

    out: Stored
    cache: RecomputeCache | None
    """What backward needs besides; None where there is no backward."""


@outside_graphs  # values move, and weights' gradients are summed
def chunked_layer(block: Block, handle: Tensor, table: RotaryTable | None, call: Call) -> tuple[Tensor, ...]:
    """The handle for the next layer, and the statistics of the layer's router (a dense layer has none)."""
    layer = ChunkedLayer(block, table, call, trains=torch.is_grad_enabled())
    bias, table_NH = call.scores.relative_bias, None
    if bias is not None:
        table_NH = bias.table_NH
    return _Layer.apply(handle, layer, table_NH, *block.parameters())


class _Layer(torch.autograd.Function):
    """The layer's weights are arguments: each gets its gradient once a backward pass, when the last chunk is through."""

    @staticmethod
    def forward(
        ctx: Any, handle: Tensor, layer: ChunkedLayer, table_NH: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        # Saved although the layer knows them: autograd notices that one was written to in between.
        ctx.save_for_backward(table_NH, *weights)
        stats = layer.forward()
        if stats:
            # In a custom function's place all outputs would have a gradient.
            counted = RouterStats.from_tensors(stats)
            ctx.mark_non_differentiable(counted.counts_SE, *counted.diagnostics)
        return handle.new_empty(0), *stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dhandle: Tensor, *dstats: Tensor | None):  # type: ignore[override]
        table_NH, *weights = ctx.saved_tensors
        inputs = [*weights]
        if table_NH is not None:
            table_NH = table_NH.detach().requires_grad_()
            inputs.insert(0, table_NH)
        wanted = [x for x in inputs if x.requires_grad]
        sums = WeightSums(wanted)
        ctx.layer.backward(dstats, Differentiated(wanted, sums), table_NH)
        found = dict(zip(map(id, wanted), sums.results(), strict=True))
        dtable = None
        if table_NH is not None:
            dtable = found[id(table_NH)]
        return dhandle, None, dtable, *(found.get(id(w)) for w in weights)


class Differentiated:
    """Differentiates parts of the layer, and sums what they give to its weights."""

    def __init__(self, weights: Sequence[Tensor], sums: WeightSums) -> None:
        self._weights, self._sums = weights, sums

    def __call__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The gradients of ``inputs``, every one of which has a share in the outputs."""
        pairs = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if dy is not None and y.requires_grad]
        outputs, gradients = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, [*inputs, *self._weights], gradients, allow_unused=True)
        self._sums.add(found[len(inputs) :])
        return list(found[: len(inputs)])


class ChunkedLayer:
    """One layer in one forward pass and its backward."""

    def __init__(self, block: Block, table: RotaryTable | None, call: Call, *, trains: bool) -> None:
        assert call.chunked is not None
        self.block, self.table, self.call, self.trains = block, table, call, trains
        self.chunked = call.chunked
        self.draws: Draws = block.draws(call.dropout)
        self.x: Stored | None = None
        self.projected: list[HeadGroup] | None = None
        self.attended: list[Attended] | None = None
        # Tokens go to the same experts in both runs.
        self.routing: list[RecomputeCache] = []

    def forward(self) -> list[Tensor]:
        """Run the residual stream through the layer. Returns the router's statistics."""
        x = self.chunked.take_values()
        projected = self._project(x)
        attended = self._attend(projected)
        y, stats = self._finish(x, attended)
        self.chunked.values = y
        if self.trains:
            self.x = x
        if self.trains and self.call.keep == "all":
            self.projected = projected
        if self.trains and self.call.keep != "inputs":
            self.attended = attended
        return stats

    def backward(
        self, dstats: Sequence[Tensor | None], differentiate: Differentiated, table_NH: Tensor | None
    ) -> None:
        """Run the gradient of the residual stream back through the layer."""
        x, projected, attended = self.x, self.projected, self.attended
        # Ours to free: what is used up makes room for what comes.
        self.x = self.projected = self.attended = None
        assert x is not None, "a second backward pass through one graph"
        if attended is None:
            projected = projected or self._project(x)
            attended = self._attend(projected)
        dx, douts = self._finish_backward(x, attended, self.chunked.take_gradient(), dstats, differentiate)
        projected = projected or self._project(x)
        dprojected = self._attend_backward(projected, attended, douts, differentiate, table_NH)
        self._project_backward(x, dprojected, dx, differentiate)
        self.chunked.gradient = dx

    def _project(self, x: Stored) -> list[HeadGroup]:
        """Queries, keys and values of all tokens, by groups of heads."""
        places: list[list[Stored]] = []
        for tokens, (x_BcM,) in in_turn(self.chunked.chunks, x):
            for n, values in enumerate(self._run_projections(x_BcM, tokens)):
                parts = values.chunk(self.chunked.head_groups, dim=2)
                if len(places) == n:
                    places.append([self.chunked.store.empty(self.chunked.num_tokens, part) for part in parts])
                for place, part in zip(places[n], parts, strict=True):
                    place.write(tokens, part)
        return [HeadGroup(*of_group) for of_group in zip(*places, strict=True)]

    def _attend(self, projected: list[HeadGroup]) -> list[Attended]:
        """Attention of all tokens, one group of heads after another."""
        attended = []
        for group, places in enumerate(projected):
            store, cache = PutOnce(self.chunked.store), None
            if self.trains:
                cache = RecomputeCache("attention", store, by_chunks=True)
            arriving = [values.whole() for values in places]
            out = self._run_core(group, [values.wait() for values in arriving], self.call.scores, cache)
            attended.append(Attended(store.put(out), cache))
            store.forget()
        return attended

    def _finish(self, x: Stored, attended: list[Attended]) -> tuple[Stored, list[Tensor]]:
        """The layer's output, and the router's statistics summed over chunks."""
        y: Stored | None = None
        stats: list[Tensor] = []
        for tokens, (x_BcM, *outs) in in_turn(self.chunked.chunks, x, *(group.out for group in attended)):
            cache = None
            if self.trains:
                cache = RecomputeCache(self._keeps_beside, self.chunked.store, by_chunks=True)
                self.routing.append(cache)
            y_BcM, *of_chunk = self._run_rest(x_BcM, torch.cat(outs, dim=2), tokens, cache)
            y = y or self.chunked.store.empty(self.chunked.num_tokens, y_BcM)
            y.write(tokens, y_BcM)
            # Statistics are sums over tokens.
            if stats:
                of_chunk = [total + part for total, part in zip(stats, of_chunk, strict=True)]
            stats = of_chunk
        assert y is not None
        return y, stats

    def _finish_backward(
        self,
        x: Stored,
        attended: list[Attended],
        dy: Stored,
        dstats: Sequence[Tensor | None],
        differentiate: Differentiated,
    ) -> tuple[Stored, list[Stored]]:
        """The gradients of the layer's input, but for what goes through attention, and of attention's outputs."""
        places: list[Stored] = []
        arriving = in_turn(self.chunked.chunks, dy, x, *(group.out for group in attended))
        for cache, (tokens, (dy_BcM, x_BcM, *outs)) in zip(self.routing, arriving, strict=True):
            with torch.enable_grad(), cache.contexts()[1]:
                inputs = x_BcM, out = _leaves(x_BcM, torch.cat(outs, dim=2))
                outputs = self._run_rest(x_BcM, out, tokens, cache)
                dx_BcM, dout = differentiate(outputs, inputs, [dy_BcM, *dstats])
            gradients = [dx_BcM, *dout.chunk(self.chunked.head_groups, dim=2)]
            if not places:
                places = [self.chunked.store.empty(self.chunked.num_tokens, gradient) for gradient in gradients]
            for place, gradient in zip(places, gradients, strict=True):
                place.write(tokens, gradient)
        self.routing.clear()
        return places[0], places[1:]

    def _attend_backward(
        self,
        projected: list[HeadGroup],
        attended: list[Attended],
        douts: list[Stored],
        differentiate: Differentiated,
        table_NH: Tensor | None,
    ) -> list[HeadGroup]:
        """The gradients of queries, keys and values. What a group has used is freed before the next one's turn."""
        scores = self.call.scores
        if scores.relative_bias is not None and table_NH is not None:
            scores = replace(scores, relative_bias=replace(scores.relative_bias, table_NH=table_NH))
        gradients = []
        for group in range(self.chunked.head_groups):
            arriving = [values.whole() for values in (*projected.pop(0), douts.pop(0))]
            *arrived, dout = (values.wait() for values in arriving)
            cache = attended.pop(0).cache
            assert cache is not None
            with torch.enable_grad(), cache.contexts()[1]:
                inputs = _leaves(*arrived)
                out = self._run_core(group, inputs, scores, cache)
                found = differentiate([out], inputs, [dout])
            del arriving, arrived, inputs, out, dout
            gradients.append(HeadGroup(*(self.chunked.store.put(gradient) for gradient in found)))
        return gradients

    def _project_backward(
        self, x: Stored, dprojected: list[HeadGroup], dx: Stored, differentiate: Differentiated
    ) -> None:
        """Add to ``dx`` what goes through queries, keys and values."""
        by_kind = [gradient for gradients in zip(*dprojected, strict=True) for gradient in gradients]
        for tokens, (dx_BcM, x_BcM, *parts) in in_turn(self.chunked.chunks, dx, x, *by_kind):
            groups = self.chunked.head_groups
            gradients = [torch.cat(parts[n : n + groups], dim=2) for n in range(0, len(parts), groups)]
            with torch.enable_grad():
                inputs = _leaves(x_BcM)
                (through_attention,) = differentiate(
                    self._run_projections(inputs[0], tokens, only_graph=True), inputs, gradients
                )
            dx.write(tokens, dx_BcM + through_attention)

    def _run_projections(
        self, x_BcM: Tensor, tokens: slice, *, only_graph: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a chunk, of all heads; with ``only_graph`` for their backward alone."""
        table = self.table
        if table is not None:
            table = table.of_tokens(tokens)
        block = self.block
        return self.call.run(type(block).before_core, block, x_BcM, table, False, only_graph)

    def _run_core(
        self, group: int, qkv: Sequence[Tensor], scores: Scores, cache: RecomputeCache | None
    ) -> Tensor:
        """Attention of one group's heads, for all tokens."""
        q, k, v = qkv
        heads, sinks_H = slice(group * q.shape[2], (group + 1) * q.shape[2]), None
        if self.block.self_attn.sinks is not None:
            sinks_H = self.block.self_attn.sinks()[heads]
        return self.call.core(
            q,
            k,
            v,
            plan=self.call.plan,
            scores=scores.of_heads(heads.start, heads.stop),
            sinks_H=sinks_H,
            recompute_cache=cache,
        )

    def _run_rest(
        self, x_BcM: Tensor, heads_BcHV: Tensor, tokens: slice, cache: RecomputeCache | None
    ) -> tuple[Tensor, ...]:
        """The layer's output for a chunk, and the router's statistics."""
        call = replace(self.call, experts=self.call.experts.of_tokens(tokens, self.chunked.num_tokens))
        attention, ffn = self.draws
        if attention is not None and ffn is not None:
            attention, ffn = attention.of_tokens(tokens), ffn.of_tokens(tokens)
        only_graph = cache is not None and cache.recomputing
        return self.block.finish(x_BcM, heads_BcHV, (attention, ffn), call, cache, only_graph=only_graph)

    @property
    def _keeps_beside(self) -> Keep:
        """What a chunk keeps of its experts."""
        if self.call.keep == "inputs":
            return "inputs"
        return "attention"


def _leaves(*values: Tensor) -> tuple[Tensor, ...]:
    """The same values as inputs of a graph of their own."""
    return tuple(x.detach().requires_grad_() for x in values)
