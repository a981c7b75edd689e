"""Mixture-of-experts FFN: router, routed experts and a shared expert.

Axes: B rows, t tokens of this rank, N = B·t, M model width, E experts, k experts per token, S documents in the
micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.kernels.dtypes import as_dtype
from longctx.model.experts.capacity import Capacity
from longctx.model.experts.dispatch import ExpertRun
from longctx.model.experts.experts import Experts
from longctx.model.experts.replay import RoutingOfTokens, RoutingReplay
from longctx.model.experts.router import Router, Routing, route, router_stats
from longctx.model.layers.dropout import Jitter
from longctx.model.layers.linear import Linear
from longctx.model.layers.mlp import FeedForward
from longctx.model.recompute import RecomputeCache, saved_values


class Admitted(NamedTuple):
    """A layer's choices, and those that a capacity admits."""

    chosen_Btk: Tensor
    experts_Btk: Tensor

    def of_tokens(self, tokens: slice) -> Admitted:
        """Return the choices for some tokens."""
        return Admitted(self.chosen_Btk[:, tokens], self.experts_Btk[:, tokens])


@dataclass(frozen=True, eq=False)
class MoECall:
    """Arguments for all expert layers in a forward pass."""

    run: ExpertRun = field(default_factory=ExpertRun)
    documents_Bt: Tensor | None = None
    """Each token's document, negative for padding; None disables statistics."""
    num_documents: int = 0
    jitter: Jitter | None = None
    capacity: Capacity | None = None
    replay: RoutingReplay | RoutingOfTokens | None = None
    accepted: Admitted | None = None
    """Choices made before for all tokens; None if the layer makes them."""

    def of_tokens(self, tokens: slice, num_tokens: int) -> MoECall:
        """Return the arguments for some of the tokens [B, t].

        With a capacity the choices must exist already, or come from a first forward: they depend on all tokens.
        """
        documents_Bt, jitter, replay, accepted = self.documents_Bt, self.jitter, self.replay, self.accepted
        if documents_Bt is not None:
            documents_Bt = documents_Bt[:, tokens]
        if jitter is not None:
            jitter = jitter.of_tokens(tokens)
        if isinstance(replay, RoutingReplay):
            replay = RoutingOfTokens(replay, tokens, num_tokens)
        if accepted is not None:
            accepted = accepted.of_tokens(tokens)
        return replace(self, documents_Bt=documents_Bt, jitter=jitter, replay=replay, accepted=accepted)

    def admit(self, chosen_Btk: Tensor) -> MoECall:
        """Return the arguments for a layer in which all tokens [B, t] chose these experts. Collective if capacity is
        set.
        """
        experts_Btk = chosen_Btk
        if self.capacity is not None:
            admitted_Nk = self.capacity.admit(chosen_Btk.flatten(0, 1), self.run.dispatcher.gather)
            experts_Btk = admitted_Nk.view_as(chosen_Btk)
        return replace(self, accepted=Admitted(chosen_Btk, experts_Btk))


class MixtureOfExperts(nn.Module):
    """FFN that routes every token to its k experts, whatever the load, unless a capacity is set."""

    def __init__(self, config: ModelConfig, local_experts: slice = slice(None), *, layer: int = 0) -> None:
        """Build the model's ``layer``-th expert layer, with weights for ``local_experts``."""
        super().__init__()
        self.config, self.layer = config, layer
        self.gate = Router(config)
        self.experts = Experts(config, local_experts)
        # A norm's backward reads its input; a sum's or dropout's does not.
        self.output_is_read = config.norm_order != "pre"
        self.has_shared_expert = config.shared_ffn_size > 0
        if self.has_shared_expert:
            self.shared_expert = FeedForward(config, config.shared_ffn_size)
        self.has_shared_gate = self.has_shared_expert and config.shared_gate
        if self.has_shared_gate:
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def forward(
        self, x_BtM: Tensor, call: MoECall | None = None, recompute_cache: RecomputeCache | None = None
    ) -> tuple[Tensor, ...]:
        """Compute output [B, t, M], followed by ``RouterStats.tensors`` if the call requests them.

        A ``recompute_cache`` saves the choices in a layer that backward will recompute, and the output if the rest of
        the layer reads it in backward. The recomputation computes gates again, but neither chooses nor counts.
        """
        call = call or MoECall()
        x_NM = x_BtM.flatten(0, 1)

        logits_NE = self._logits(x_BtM, call)
        routing, chosen_Nk = self._route(logits_NE, call, recompute_cache)

        out_NM = self.experts(
            x_NM,
            routing.gates_Nk,
            routing.experts_Nk,
            call.run,
            recompute_cache,
            values_again=self.output_is_read and not _keeps_output(recompute_cache),
        )
        if self.has_shared_expert:
            out_NM = out_NM + self._shared(x_NM, recompute_cache)

        out_BtM = as_dtype(out_NM, x_BtM.dtype).view_as(x_BtM)
        if self.output_is_read and recompute_cache is not None and _keeps_output(recompute_cache):
            # Rounded, and with the shared expert included, as the norm reads it.
            out_BtM = saved_values(out_BtM, recompute_cache, of="experts")
        if call.documents_Bt is None:
            return (out_BtM,)
        # The first forward has counted these tokens already.
        count_tokens = recompute_cache is None or not recompute_cache.recomputing
        stats = router_stats(
            logits_NE,
            routing,
            chosen_Nk,
            call.documents_Bt.flatten(),
            call.num_documents,
            count_tokens=count_tokens,
            z_gradient=self.config.router_z_loss_weight > 0,
        )
        return out_BtM, *stats.tensors()

    @torch.no_grad()
    def choose(self, x_BtM: Tensor, call: MoECall) -> Tensor:
        """Return the experts [B, t, k] that the router chooses, before any capacity; for ``MoECall.admit``."""
        return self._choose(self._logits(x_BtM, call), call).experts_Nk.unflatten(0, x_BtM.shape[:2])

    def _logits(self, x_BtM: Tensor, call: MoECall) -> Tensor:
        """Compute the router's logits, [N, E]."""
        # Jitter reaches only the router; experts see the tokens unchanged.
        if call.jitter is not None:
            x_BtM = call.jitter(x_BtM, self.layer)
        return self.gate(x_BtM.flatten(0, 1))

    def _route(
        self, logits_NE: Tensor, call: MoECall, recompute_cache: RecomputeCache | None
    ) -> tuple[Routing, Tensor]:
        """Choose experts once; return the routing, and the choices before a capacity drops some."""
        known: tuple[Tensor, ...] | None = None
        if recompute_cache is not None:
            known = recompute_cache.load(of="routing")
        if known is None and call.accepted is not None:
            known = tuple(ids_Btk.flatten(0, 1) for ids_Btk in call.accepted)
        if known is not None:
            # Gates are computed again but the choice is kept: rounding could flip it, and backward would fit another
            # forward.
            chosen_Nk, experts_Nk = known
            routing = self._weigh(logits_NE, chosen_Nk)
        else:
            routing = self._choose(logits_NE, call)
            chosen_Nk = experts_Nk = routing.experts_Nk
            if call.capacity is not None:
                experts_Nk = call.capacity.admit(chosen_Nk, call.run.dispatcher.gather)
        if recompute_cache is not None:
            recompute_cache.save(chosen_Nk, experts_Nk, of="routing")
        if call.capacity is not None:
            # The other gates are not rescaled: dropped choices are missing.
            gates_Nk = routing.gates_Nk.masked_fill(experts_Nk < 0, 0)
            routing = Routing(experts_Nk, gates_Nk, routing.probs_NE)
        return routing, chosen_Nk

    def _choose(self, logits_NE: Tensor, call: MoECall) -> Routing:
        """Route by new choices, or by those that a replay supplies; a replay records them."""
        replay_Nk: Tensor | None = None
        if call.replay is not None:
            replay_Nk = call.replay.given(self.layer, logits_NE.device)
        routing = self._weigh(logits_NE, replay_Nk)
        if call.replay is not None:
            call.replay.record(self.layer, routing.experts_Nk)
        return routing

    def _weigh(self, logits_NE: Tensor, replay_Nk: Tensor | None) -> Routing:
        """Route these logits, with new choices or those in ``replay_Nk``."""
        return route(logits_NE, self.config, bias_E=self.gate.e_score_correction_bias, replay_Nk=replay_Nk)

    def _shared(self, x_NM: Tensor, recompute_cache: RecomputeCache | None) -> Tensor:
        again = recompute_cache is not None and recompute_cache.by_chunks and recompute_cache.recomputing
        # A norm or a gate would read its values.
        only_graph = again and not self.output_is_read and not self.has_shared_gate
        shared_NM = self.shared_expert(x_NM, only_graph=only_graph)
        if self.has_shared_gate:
            shared_NM = torch.sigmoid(self.shared_expert_gate(x_NM)) * shared_NM
        return shared_NM


def _keeps_output(recompute_cache: RecomputeCache | None) -> bool:
    """Return whether a recomputed layer gets its experts' output from its first forward."""
    return recompute_cache is not None and recompute_cache.keeps("experts")
