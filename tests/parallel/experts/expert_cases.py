"""Training with experts shared out over ranks, and the same by definition in one process: what tests compare.

Axes: L expert layers, E experts, k experts a token, T tokens of a row, t of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch
from longctx.config import ModelConfig
from longctx.kernels.processor import MatmulMode
from longctx.model.activation_offload import Keep, Store
from longctx.model.decoder import Decoder
from longctx.model.experts.balance import load_share, move_selection_bias_
from longctx.model.experts.replay import RoutingReplay
from longctx.model.training_pass import Execution, TrainingPass
from parallel.comm.world import sum_over_ranks
from parallel.layout.sequence import SequenceLayout
from parallel.loss import count_step
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.zero.optimizer import OptimizerOptions
from parallel.zero.zero_engine import ZeroEngine
from parallel.zero.zero_state import OwnedRange
from tests.oracles import MaskedAttention, packed_batch

ROWS, LENGTH, LR, CLIP, EPS = 4, 48, 1e-3, 0.25, 1e-4
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    ffn_size=40,
    dense_layers=(0,),
    num_experts=8,
    experts_per_token=2,
    expert_ffn_size=24,
    expert_bias=True,
    shared_ffn_size=16,
    score_function="sigmoid",
    router_bias=True,
    selection_bias=True,
    selection_bias_rate=1e-2,
    balance_loss_weight=0.05,
    router_z_loss_weight=0.01,
)
EXPERT_LAYERS = 2

State = dict[tuple[str, str], Tensor]
"""Flattened tensors of a whole model by name and role."""

Routing = list[list[Tensor]]
"""The experts that tokens are sent to, by step and row: ids [L, T, k], −1 for nowhere."""


@dataclass
class Run:
    """What a training run shows at each step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    """Tokens by layer and expert, [L, E]."""
    states: list[State] = field(default_factory=list)
    """Masters, moments and buffers (of a run in one process)."""


def rows_of_step(step: int) -> list[Batch]:
    """The rows that a step trains on: documents down to one token, padding in every second row."""
    return [packed_batch(rows=1, seq_len=LENGTH, vocab_size=CONFIG.vocab_size, seed=9 * step + n) for n in range(ROWS)]


def fixed_routing(steps: int) -> Routing:
    """Random choices, uneven; in the first step an expert that nobody chose, in the second ranks that get no token,
    in the third choices that lead nowhere."""
    g = torch.Generator().manual_seed(3)
    E, shape = CONFIG.num_experts, (EXPERT_LAYERS, LENGTH)
    routing = []
    for step in range(steps):
        weights_E = torch.rand(E, generator=g) ** 3 + 0.02
        if step == 0:
            weights_E[5] = 0
        if step == 1:
            weights_E[2:] = 0
        ids = [torch.multinomial(weights_E.expand(*shape, E).flatten(0, 1), 2, generator=g) for _ in range(ROWS)]
        if step == 2:
            ids = [row.where(torch.rand(row.shape, generator=g) < 0.8, -1) for row in ids]
        routing.append([row.view(*shape, 2) for row in ids])
    return routing


def train_by_definition(config: ModelConfig, steps: int, routing: Routing | None = None) -> Run:
    """One process, float32: full masks, whole logits, plain AdamW; live routing when none is given."""
    decoder, run = Decoder(config, {"softmax": MaskedAttention()}, seed=0), Run()
    groups = [
        {"params": [p for p in decoder.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in decoder.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    share_LE = torch.ones(EXPERT_LAYERS, config.num_experts)
    for step in range(steps):
        rows = rows_of_step(step)
        targets = sum(row.num_targets for row in rows)
        tokens = sum(int((row.document_ids != PADDING_DOCUMENT).sum()) for row in rows)
        nll_sum, loss, counts_LE = 0.0, torch.zeros(()), torch.zeros(EXPERT_LAYERS, config.num_experts)
        for number, row in enumerate(rows):
            replay = RoutingReplay(routing[step][number]) if routing else None
            nll, balance, z, row_counts_LE = _sums(decoder, row, share_LE, replay)
            loss = loss + nll / targets
            loss = loss + (config.balance_loss_weight * balance + config.router_z_loss_weight * z) / tokens
            nll_sum, counts_LE = nll_sum + nll.item(), counts_LE + row_counts_LE
        optimizer.zero_grad()
        loss.backward()
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(decoder.parameters(), CLIP)))
        optimizer.step()
        for bias_E, counts_E in zip(decoder.buffers(), counts_LE, strict=True):
            step_E = config.selection_bias_rate * torch.sign(counts_E.mean() - counts_E)
            bias_E += step_E - step_E.mean()
        share_LE = counts_LE / counts_LE.mean(-1, keepdim=True)
        run.losses.append(nll_sum / targets)
        run.counts.append(counts_LE)
        run.states.append(_state(decoder, optimizer))
    return run


def _sums(
    decoder: Decoder, row: Batch, share_LE: Tensor, replay: RoutingReplay | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ nll, Σ balance loss in the config's scope, Σ squared log-sum-exp of the logits, tokens by layer and expert."""
    config = decoder.config
    hidden, stats = decoder(
        row.tokens,
        row.positions,
        row.cu_seqlens,
        document_ids=row.document_ids,
        training_pass=TrainingPass(replay=replay),
        return_stats=True,
    )
    logits, targets = decoder.logits(hidden).flatten(0, 1), row.targets.flatten()
    nll = functional.cross_entropy(logits, targets, ignore_index=IGNORED_TARGET, reduction="sum")
    balance = torch.zeros(())
    for layer, share_E in zip(stats, share_LE, strict=True):
        whole = config.balance_scope == "micro_batch"
        counts_SE, probs_SE = (x.sum(0, keepdim=True) if whole else x for x in (layer.counts_SE, layer.prob_sums_SE))
        for counts_E, probs_E in zip(counts_SE, probs_SE, strict=True):
            if config.balance_scope == "global_batch":
                balance = balance + (share_E * probs_E).sum()
            elif counts_E.sum():
                balance = balance + config.num_experts * (counts_E * probs_E).sum() / counts_E.sum()
    z_sum = torch.stack([layer.z_sum for layer in stats]).sum()
    return nll, balance, z_sum, torch.stack([layer.counts_SE.sum(0) for layer in stats])


def _state(decoder: Decoder, optimizer: torch.optim.Optimizer) -> State:
    state = {(name, "master"): b.flatten().clone() for name, b in decoder.named_buffers()}
    for name, p in decoder.named_parameters():
        state[name, "master"] = p.detach().flatten().clone()
        for moment in ("exp_avg", "exp_avg_sq"):
            state[name, moment] = optimizer.state[p][moment].flatten().clone()
    return state


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How ranks share the work of a run."""

    context: int = 1
    expert: int = 1
    stage: int = 1
    layout: str = "zigzag"
    tile_tokens: int = 0
    keep: Keep = "all"
    store: Store = "device"
    recompute_experts: str = "activation"
    dtype: torch.dtype = torch.float32
    products: MatmulMode = "native"
    seed: int = 0


class RanksRun:
    """A model under ZeRO over the ranks of this process group, stepped as a trainer does."""

    def __init__(self, config: ModelConfig, spread: Spread) -> None:
        """Each rank draws what it holds."""
        self.config, self.spread, self.run = config, spread, Run()
        self.mesh = Mesh.build(context=spread.context, expert=spread.expert)
        model = build_parallel_model(
            config,
            self.mesh,
            layout=spread.layout,
            execution=Execution(
                spread.keep,
                spread.store,
                recompute_experts=spread.recompute_experts,
                expert_tile_tokens=spread.tile_tokens,
                matmul_mode=spread.products,
            ),
            seed=None,
        )
        self.load_LE: Tensor | None = None
        self.engine = ZeroEngine(
            model,
            stage=spread.stage,
            dtype=spread.dtype,
            accumulation=ROWS // self.mesh.data,
            options=OptimizerOptions(betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip_norm=CLIP),
        )
        self.engine.initialize(spread.seed)

    def step(self, number: int, routing: Routing | None = None) -> None:
        """One step, the ``number``-th of the data; its choices are ``routing``'s where that is given."""
        mesh, config, decoder = self.mesh, self.config, self.engine.model.network
        numbers = [a * mesh.data + mesh.data_rank for a in range(ROWS // mesh.data)]
        rows = [rows_of_step(number)[n] for n in numbers]
        layouts = [SequenceLayout.build(self.spread.layout, LENGTH, mesh.context, row.cu_seqlens) for row in rows]
        mine = [
            row.map_tokens(lambda x, layout=layout: layout.split(x, mesh.context_rank, 1))
            for row, layout in zip(rows, layouts, strict=True)
        ]
        counts = count_step(self.engine.model, mine)
        nll_sum, routed_LE = torch.zeros((), dtype=torch.float64), torch.zeros(1, 1)
        for n, row, layout in zip(numbers, mine, layouts, strict=True):
            ids = layout.split(routing[number][n], mesh.context_rank, 1) if routing else None
            replay = None if ids is None else RoutingReplay(ids)
            loss = self.engine.forward(row, TrainingPass(expert_load_LE=self.load_LE, replay=replay))
            self.engine.backward(self.engine.model.loss(loss, counts))
            nll_sum = nll_sum + loss["nll"].double()
            if loss.counts_LE is not None:  # of a dense model there are none
                routed_LE = routed_LE + loss.counts_LE
        sum_over_ranks(routed_LE)
        self.run.norms.append(self.engine.step(LR))
        if config.selection_bias:
            move_selection_bias_(decoder.selection_biases(), routed_LE, config.selection_bias_rate)
        self.load_LE = load_share(routed_LE)
        self.run.losses.append(float(sum_over_ranks(nll_sum)) / counts["targets"])
        self.run.counts.append(routed_LE)

    def owned(self) -> list[OwnedRange]:
        """Copies of this rank's ranges."""
        return [OwnedRange(name, role, start, x.clone()) for name, role, start, x in self.engine.owned_ranges()]


def gather_whole(ranges: Sequence[OwnedRange], shapes: dict[str, torch.Size]) -> State:
    """The whole model's flattened tensors from every rank's ranges; each value must be there exactly once."""
    everyone: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, [tuple(r) for r in ranges])
    whole: State = {}
    for name, role, start, values in (r for own in everyone for r in own):
        tensor = whole.setdefault((name, role), torch.full((shapes[name].numel(),), torch.nan))
        assert start + len(values) <= len(tensor), f"{name} {role} ends before its range"
        assert tensor[start : start + len(values)].isnan().all(), f"{name} {role} is given twice at {start}"
        tensor[start : start + len(values)] = values
    missing = [key for key, tensor in whole.items() if tensor.isnan().any()]
    assert not missing, f"nobody gives all of {missing}"
    return whole
