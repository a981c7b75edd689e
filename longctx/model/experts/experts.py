"""Routed experts: gated FFNs over a layer's tokens, with experts on any process.

Axes: N tokens of this process, k experts per token, M model width, F FFN width of one expert (gate and up together:
2F), E experts, e local experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.architecture.adapter import FACTORS, AdapterShape
from longctx.config import ModelConfig
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.quantized_weights import PackedLayout, empty_parameter
from longctx.model.experts.compute_cpu import forward_few
from longctx.model.experts.dispatch import ExpertRun, tiles_of
from longctx.model.experts.experts_call import DispatchedTokens, ExpertsCall, ExpertWeights, Needs
from longctx.model.experts.tiled_experts import Routed, backward_tiles, computes_in_blocks, forward_tiles, is_decoding
from longctx.model.recompute import RecomputeCache

MATRICES = ("gate_up_proj", "down_proj")
"""The matrices, which are parameters of one module."""
_UPDATES = tuple(f"{matrix}_{factor}" for matrix in MATRICES for factor in FACTORS)
"""Parameters of the low-rank updates, in the order of ``ExpertWeights``."""


class Experts(nn.Module):
    """One layer's experts, fused as Hugging Face keeps them in memory: gate rows first, then up rows.

    This process holds the weights for ``local_experts``: e consecutive ones among the layer's E.
    """

    def __init__(self, config: ModelConfig, local_experts: slice = slice(None)) -> None:
        super().__init__()
        e, M, F = len(range(config.num_experts)[local_experts]), config.hidden_size, config.expert_ffn_size
        self.local_experts, self.num_experts = local_experts, config.num_experts
        self.activation = config.activation
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * F, M))
        self.down_proj = nn.Parameter(torch.empty(e, M, F))
        self.gate_up_proj_bias: nn.Parameter | None = None
        self.down_proj_bias: nn.Parameter | None = None
        if config.expert_bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(e, 2 * F))
            self.down_proj_bias = nn.Parameter(torch.empty(e, M))
        self.layouts: dict[str, PackedLayout] = {}
        """Layouts of quantized matrices; the parameters then hold bytes."""
        self.adapter_scale = 0.0
        # Low-rank updates, one per expert (``add_adapter``).
        for name in _UPDATES:
            self.register_parameter(name, None)

    def add_adapter(self, matrix: str, adapter: AdapterShape) -> None:
        """Add low-rank updates to ``gate_up_proj`` or ``down_proj``."""
        e, outer, inner = getattr(self, matrix).shape
        a, b = (f"{matrix}_{factor}" for factor in FACTORS)
        self.register_parameter(a, nn.Parameter(torch.empty(e, adapter.rank, inner)))
        self.register_parameter(b, nn.Parameter(torch.empty(e, outer, adapter.rank)))
        self.adapter_scale = adapter.scale

    def quantize_weight(self, matrix: str, kind: str) -> PackedLayout:
        """Store a frozen matrix in 4 or 8 bits, without values yet, each expert by itself; return its layout."""
        weight = getattr(self, matrix)
        self.layouts[matrix] = PackedLayout(kind, tuple(weight.shape))
        setattr(self, matrix, empty_parameter(self.layouts[matrix], weight.device))
        return self.layouts[matrix]

    def forward(
        self,
        x_NM: Tensor,
        gates_Nk: Tensor,
        experts_Nk: Tensor,
        run: ExpertRun | None = None,
        recompute_cache: RecomputeCache | None = None,
        *,
        values_again: bool = False,
    ) -> Tensor:
        """Compute Σ gate · expert(x) over each token's k experts, [N, M] in float32 (float64 for float64).

        Id −1 is no expert: it adds 0, and x and gate get a gradient of exactly 0 through it. With a ``recompute_cache``
        the layer is recomputed, and backward needs only x, gates and ids: the recomputation neither computes nor sends,
        and its result is NaN, unless ``values_again`` says that its values are read. Collective if experts are
        distributed.
        """
        run = run or ExpertRun()
        assert run.dispatcher.local_experts == self.local_experts
        if run.recompute != "all" and (recompute_cache is not None or not self._is_trained(x_NM, gates_Nk)):
            run = replace(run, recompute="all")  # only the inputs are saved
        without_backward = recompute_cache is None and not torch.is_grad_enabled()
        only_graph = recompute_cache is not None and recompute_cache.recomputing and not values_again
        call = ExpertsCall(
            self.activation,
            run,
            without_backward=without_backward,
            only_graph=only_graph,
            layouts=(self.layouts.get(MATRICES[0]), self.layouts.get(MATRICES[1])),
        )
        parameters = self._parameters_in_order()
        if without_backward and not run.dispatcher.is_distributed:
            weights = ExpertWeights.of(parameters, call.layouts, x_NM.dtype)
            if computes_in_blocks(x_NM) and is_decoding(experts_Nk, call):
                # Without messages and saved tensors, the code around a tile takes longer than computing so few tokens.
                return forward_few(DispatchedTokens(x_NM, gates_Nk, experts_Nk, None), weights, call)[0]
            return forward_tiles(Routed(x_NM, gates_Nk, experts_Nk), weights, call)[0]
        return _Experts.apply(x_NM, gates_Nk, experts_Nk, call, *parameters)

    def _parameters_in_order(self) -> list[Tensor | None]:
        """Return the parameters in the order of ``ExpertWeights``."""
        weights: list[Tensor | None] = [self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias]
        for name in _UPDATES:
            factor = self._parameters[name]
            # The scale goes into A, which is small.
            if factor is not None and name.endswith(FACTORS[0]):
                factor = factor * self.adapter_scale
            weights.append(factor)
        return weights

    def _is_trained(self, x_NM: Tensor, gates_Nk: Tensor) -> bool:
        """Return whether a backward pass will follow."""
        if not torch.is_grad_enabled():
            return False
        return x_NM.requires_grad or gates_Nk.requires_grad or any(w.requires_grad for w in self.parameters())


def is_expert_weight(name: str) -> bool:
    """Return whether a parameter's first axis is experts, which ranks may shard."""
    return ".mlp.experts." in name


class _Experts(torch.autograd.Function):
    """Autograd function that saves parameters, not views: ZeRO-3 frees a weight by emptying it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NM: Tensor,
        gates_Nk: Tensor,
        experts_Nk: Tensor,
        call: ExpertsCall,
        *of_experts: Tensor | None,
    ) -> Tensor:
        routed, weights = Routed(x_NM, gates_Nk, experts_Nk), ExpertWeights.of(of_experts, call.layouts, x_NM.dtype)
        ctx.call, ctx.sizes, ctx.num_saved = call, None, []
        saved: list[Tensor] = []
        if call.only_graph:
            # Backward must exchange sizes again, unless it gets the first forward's context.
            ctx.num_saved = [0] * len(tiles_of(len(x_NM), call.run.tile_tokens))
            # NaN makes any use of it visible.
            out_NM = x_NM.new_full((), torch.nan, dtype=accumulate_dtype(x_NM.dtype)).expand(x_NM.shape)
        else:
            out_NM, of_tiles, ctx.sizes = forward_tiles(routed, weights, call)
            saved = [tensor for of_tile in of_tiles for tensor in of_tile]
            ctx.num_saved = [len(of_tile) for of_tile in of_tiles]
        ctx.save_for_backward(*routed, *of_experts, *saved)
        return out_NM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_NM: Tensor):  # type: ignore[override]
        tensors = ctx.saved_tensors  # ZeRO-3 has gathered the weights again by now
        stop = 3 + len(ExpertWeights._fields)
        routed, saved = Routed._make(tensors[:3]), list(tensors[stop:])
        weights = ExpertWeights.of(tensors[3:stop], ctx.call.layouts, routed.x_NM.dtype)
        del tensors
        flags = ctx.needs_input_grad
        needs = Needs._make(flags[:2] + flags[4:])
        # The saved tensors may be freed from here, unless the graph is kept for another backward pass.
        ctx.maybe_clear_saved_tensors()
        of_tiles = []
        # Moved, not copied: a second list would keep every tensor alive to the end.
        for count in ctx.num_saved:
            of_tiles.append(saved[:count])
            del saved[:count]
        grads = backward_tiles(dout_NM, routed, weights, of_tiles, ctx.sizes, ctx.call, needs)
        # The gates' gradients are computed in any case; PyTorch expects None for inputs without a gradient.
        wanted = list(grads)
        for index, is_needed in enumerate(needs):
            if not is_needed:
                wanted[index] = None
        # The ids, and the call.
        wanted[2:2] = [None, None]
        return tuple(wanted)
