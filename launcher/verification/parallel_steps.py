"""Steps as a run takes them: with its mesh, layout, transport and ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from launcher.config.resolved import ResolvedConfig
from launcher.training.routing_files import gather_tokens
from launcher.training.setup import build_engine
from launcher.training.task_builder import shard_batch
from launcher.verification.compare import StepState
from launcher.verification.random_rows import micro_batch
from longctx.batch import Batch
from longctx.checkpoint_format import ROLES
from longctx.model.experts.balance import load_share, move_selection_bias_
from longctx.model.experts.replay import RoutingReplay
from longctx.model.training_pass import TrainingPass
from parallel.comm.world import gather_on_rank_0, sum_over_ranks
from parallel.loss import count_step
from parallel.mesh import Mesh
from parallel.zero.zero_engine import ZeroEngine

_MASTER, _FIRST_MOMENT = ROLES[0], ROLES[1]
_STEPS = 3


def steps_together(config: ResolvedConfig, mesh: Mesh, device: torch.device) -> Iterator[StepState]:
    """Yield every step's state, on rank 0; other ranks get states without tensors. Collective."""
    train, model = config.train, config.model.config()
    micro_batches = config.micro_batches(mesh.world_size)
    engine = build_engine(config, mesh, accumulation=len(micro_batches))
    engine.initialize(config.run.seed)
    moments: dict[str, Tensor] = {}
    load_LE: Tensor | None = None
    for step in range(_STEPS):
        rows = [micro_batches.rows(number, mesh.data_rank) for number in range(len(micro_batches))]
        streams = [shard_batch(micro_batch(config, step, own), config, mesh) for own in rows]
        # As in a run: count the stream first, then let the objective build a batch from the rank's own tokens.
        counts = count_step(engine.model, streams)
        shards = [engine.model.prepare(stream.to(device)) for stream in streams]
        nll, counts_LE = torch.zeros((), dtype=torch.float64, device=device), None
        replay_list: list[RoutingReplay] = []
        for own, shard in zip(rows, shards, strict=True):
            replay = None
            if model.num_experts:
                replay = RoutingReplay()
                replay_list.append(replay)
            training_pass = TrainingPass(
                seed=config.run.seed * 0x9E3779B1 + step,
                first_tokens=(own.start * config.data.seq_len,),
                first_source_tokens=(own.start * config.data.source_seq_len,),
                expert_load_LE=load_LE,
                replay=replay,
            )
            loss = engine.forward(shard, training_pass)
            engine.backward(engine.model.loss(loss, counts))
            nll += loss[engine.model.reported].double()
            if loss.counts_LE is not None:
                counts_LE = loss.counts_LE if counts_LE is None else counts_LE + loss.counts_LE
        norm = engine.step(train.lr)
        if counts_LE is not None:
            counts_LE = sum_over_ranks(counts_LE)
            load_LE = load_share(counts_LE)
            if model.selection_bias_rate:
                move_selection_bias_(engine.model.network.selection_biases(), counts_LE, model.selection_bias_rate)
        weights, new = _gather(engine)
        # Muon's only moment has the same form, with its own decay.
        decay = {name: train.beta1 if len(roles) > 2 else train.momentum for name, roles in engine.roles.items()}
        gradients = {name: _gradient(x, moments.get(name), decay[name]) for name, x in new.items()}
        moments = new
        total = float(sum_over_ranks(nll))
        experts_LTk = None
        if replay_list:
            # The layout permutes tokens: gather the choices in the order of the step's tokens.
            indices = [_token_indices(own, shard, config, mesh) for own, shard in zip(rows, shards, strict=True)]
            own_LNk = torch.cat([replay.experts_LNk.cpu() for replay in replay_list], dim=1)
            experts_LTk = gather_tokens(own_LNk, torch.cat(indices), train.tokens_per_step)
        yield StepState(
            loss=engine.model.mean_loss({engine.model.reported: total}, counts),
            grad_norm=norm,
            gradients=gradients,
            weights=weights,
            experts_LTk=experts_LTk,
        )


def _token_indices(rows: range, shard: Batch, config: ResolvedConfig, mesh: Mesh) -> Tensor:
    """Return indices in the step for this rank's tokens from a micro-batch's rows; -1 for padding."""
    seq_len, layout = config.data.seq_len, shard.placement
    index_T = torch.arange(layout.num_tokens)
    index_T = (index_T + rows.start * seq_len).where(index_T < len(rows) * seq_len, -1)
    return layout.split(index_T, mesh.context_rank, 0)


def _gather(engine: ZeroEngine) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gather flat masters and first moments for the full model on rank 0; other ranks get empty dicts. Collective."""
    own = []
    for name, role, start, values in engine.owned_ranges():
        if role in (_MASTER, _FIRST_MOMENT):
            own.append((name, role, start, values.detach().float().cpu().clone()))
    # NaN marks values that no rank owns, so a gap in the ownership cannot pass as a zero.
    whole: dict[str, dict[str, Tensor]] = {_MASTER: {}, _FIRST_MOMENT: {}}
    for of_rank in gather_on_rank_0(own):
        for name, role, start, values in of_rank:
            if name not in whole[role]:
                whole[role][name] = torch.full((engine.shapes[name].numel(),), torch.nan)
            whole[role][name][start : start + len(values)] = values
    return whole[_MASTER], whole[_FIRST_MOMENT]


def _gradient(new: Tensor, old: Tensor | None, beta1: float) -> Tensor:
    """Return the gradient that changed an optimizer's first moment from ``old`` (None: zero) to ``new``."""
    # Solve new = beta1 * old + (1 - beta1) * gradient.
    if old is not None:
        new = new - beta1 * old
    return new / (1 - beta1)
