"""Cross attention in a layer that processes its tokens by chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longctx.architecture.layer_specs import groups_of
from longctx.model.chunks.chunk_store import Stored, in_turn
from longctx.model.chunks.group_attention import Attended, Projected, backward_by_groups, forward_by_groups
from longctx.model.chunks.head_groups import ByGroups
from longctx.model.chunks.layer_parts import ChunkBackward, LayerParts, leaves
from longctx.model.chunks.residual_stream import ResidualStream
from longctx.model.cross_block import CrossBlock
from longctx.model.mixers.cross_projections import CrossCall
from longctx.model.recompute import RecomputeCache


# Parts, and their results over all tokens:
#
#     forward     chunks: attention added, norm, projection  ->  queries
#                 the full source: projections               ->  keys, values
#                 head groups: attention                     ->  heads' outputs
#     backward    head groups: attention's backward
#                 chunks: the queries' backward              ->  added to the layer input's and attention's gradients
#                 the full source: its projections'          ->  its gradient
class ChunkedCross:
    """One layer's cross attention in one forward pass and its backward."""

    def __init__(self, stream: ResidualStream, parts: LayerParts, call: CrossCall, *, needs_grad: bool) -> None:
        assert isinstance(parts.block, CrossBlock), "a layer without cross attention"
        self.stream, self.parts, self.call, self.needs_grad = stream, parts, call, needs_grad
        self.block: CrossBlock = parts.block

    def forward(self, x: Stored, attended: Attended) -> Attended:
        """Compute cross attention from the layer's input and its self attention's output."""
        projected = self._project(x, attended, self.call.source.hidden_BsM.detach())
        return forward_by_groups(
            self.stream.store, projected, self._run_core, needs_grad=self.needs_grad, release_inputs=True
        )

    def backward(
        self,
        x: Stored,
        attended: Attended,
        crossed: Attended,
        source_BsM: Tensor,
        dx: Stored,
        douts: Sequence[ByGroups],
        chunk_backward: ChunkBackward,
    ) -> None:
        """Add the gradient through cross attention's queries to ``dx`` and to self attention's output gradient.

        ``douts`` holds both attentions' output gradients. The gradient through keys and values is added to the
        source's, a leaf that ``chunk_backward`` knows, and to the weights'.
        """
        stream = self.stream
        projected = self._project(x, attended, source_BsM.detach())
        dq, dk, dv = backward_by_groups(stream.store, projected, crossed, douts[1], chunk_backward, self._run_core)
        stored = [dx, douts[0], x, attended.out, dq]
        for tokens, (dx_BcM, dheads_BcHV, x_BcM, heads_BcHV, dq_BcHD) in in_turn(stream.chunks, stored):
            with torch.enable_grad():
                inputs = leaves([x_BcM, heads_BcHV])
                q_BcHD = self._queries(inputs[0], inputs[1], tokens)
                extra_dx, extra_dheads = chunk_backward([q_BcHD], inputs, [dq_BcHD])
            dx.write(tokens, extra_dx.add_(dx_BcM))
            douts[0].write(tokens, extra_dheads.add_(dheads_BcHV))
        # The chunks are freed by now: only the source's backward is left, once for all of them.
        with torch.enable_grad():
            chunk_backward(self.block.source_keys(source_BsM), [], [dk.whole().wait(), dv.whole().wait()])

    def _run_core(self, group: int, qkv: Sequence[Tensor], cache: RecomputeCache | None) -> Tensor:
        # All heads have the same scores.
        return self.call.core(*qkv, plan=self.call.plan, scores=self.call.scores, recompute_cache=cache)

    def _queries(self, x_BcM: Tensor, heads_BcHV: Tensor, tokens: slice) -> Tensor:
        """Compute a chunk's queries for all heads."""
        residual_dropout, run = self.parts.chunk_dropout(tokens), self.parts.call.run
        return run(CrossBlock.before_cross, self.block, x_BcM, heads_BcHV, residual_dropout, False)[1]

    def _project(self, x: Stored, attended: Attended, source_BsM: Tensor) -> Projected:
        """Project the tokens to queries, and the source to keys and values."""
        stream, q = self.stream, None
        for tokens, (x_BcM, heads_BcHV) in in_turn(stream.chunks, [x, attended.out]):
            q_BcHD = self._queries(x_BcM, heads_BcHV, tokens)
            q = q or ByGroups.empty(stream.store, stream.num_tokens, q_BcHD, stream.head_groups)
            q.write(tokens, q_BcHD)
        assert q is not None
        keys_values: list[ByGroups] = []
        # The source is complete here, as the encoder left it: its keys and values are split by heads only.
        for x_BsKD in self.block.source_keys(source_BsM):
            groups = x_BsKD.chunk(groups_of(x_BsKD.shape[2], stream.head_groups), dim=2)
            keys_values.append(ByGroups([stream.store.put(group.contiguous()) for group in groups]))
        k, v = keys_values
        return Projected(q, k, v)
