"""CrossBlock: a decoder layer that attends to a source between its self attention and its FFN.

Axes: B rows, t tokens of this rank, s source tokens on it, M model width, H query heads, K key/value heads, D head
size, V value head size.
"""

from __future__ import annotations

from torch import Tensor

from longctx.config import ModelConfig
from longctx.model.block import Block, LayerCall, ResidualDropout
from longctx.model.layers.norms import build_norm
from longctx.model.mixers.cross_projections import CrossAttention
from longctx.model.recompute import RecomputeCache
from longctx.model.rotary import RotaryTable


class CrossBlock(Block):
    """Attention, cross attention and FFN, each added to the residual stream, with norms before or after them."""

    def __init__(self, config: ModelConfig, layer: int, experts: slice = slice(None)) -> None:
        super().__init__(config, layer, experts)
        self.cross_attn = CrossAttention(config)
        self.cross_layernorm = build_norm(config, config.hidden_size)

    def _run(
        self, x_BtM: Tensor, table: RotaryTable | None, call: LayerCall, recompute_cache: RecomputeCache | None
    ) -> tuple[Tensor, ...]:
        cross, residual_dropout = call.cross, call.residual_dropout()
        assert cross is not None, "a layer that reads a source was told of none"
        heads_BtHV = self._run_core(x_BtM, table, call, recompute_cache)
        x_BtM, q = call.run(CrossBlock.before_cross, self, x_BtM, heads_BtHV, residual_dropout, call.cache is not None)
        k, v = self._source_keys(call)
        # Both attentions save their results, under separate names.
        if recompute_cache is not None:
            recompute_cache = recompute_cache.of_cross()
        heads_BtHV = cross.core(q, k, v, plan=cross.plan, scores=cross.scores, recompute_cache=recompute_cache)
        return self.finish(x_BtM, heads_BtHV, residual_dropout, call, recompute_cache)

    def before_cross(
        self, x_BtM: Tensor, heads_BtHV: Tensor, residual_dropout: ResidualDropout, cached: bool
    ) -> tuple[Tensor, Tensor]:
        """Add self attention to the residual stream; return the stream and cross attention's queries [B, t, H, D]."""
        x_BtM = self.add_attention(x_BtM, heads_BtHV, residual_dropout[0], cached)
        return x_BtM, self.cross_attn.queries(self.before(x_BtM, "cross_layernorm"))

    def source_keys(self, source_BsM: Tensor) -> tuple[Tensor, Tensor]:
        """Project a source to cross attention's keys and values [B, s, K, D]."""
        return self.cross_attn.keys_and_values(source_BsM)

    def join_attention(
        self, x_BtM: Tensor, heads_BtHV: Tensor, residual_dropout: ResidualDropout, cached: bool
    ) -> tuple[Tensor, Tensor]:
        """Add cross attention to the residual stream; return the stream and the FFN's input.

        The stream includes self attention already.
        """
        x_BtM = self.add(x_BtM, self.cross_attn.output(heads_BtHV), residual_dropout[2])
        if self.order == "post":
            x_BtM = self.cross_layernorm(x_BtM)
        return x_BtM, self.before(x_BtM, "post_attention_layernorm")

    def _source_keys(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        """Return the source's keys and values, computed only once if the source caches them."""
        assert call.cross is not None, "a layer that reads a source was told of none"
        source = call.cross.source
        # Training reads them once, and their gradient needs them in this graph.
        if source.keys is None:
            return call.run(CrossBlock.source_keys, self, source.hidden_BsM)
        if call.layer not in source.keys:
            source.keys[call.layer] = self.source_keys(source.hidden_BsM)
        return source.keys[call.layer]
