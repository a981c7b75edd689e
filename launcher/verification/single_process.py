"""Reference steps in one process with PyTorch's own operators: no sharding, collectives, chunks, offloading or
recomputation.

Each step starts from the weights in the run's own step, and uses the run's expert choices; AdamW gets the run's
gradients. An error therefore comes from one part in one step, without accumulated rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from launcher.config.resolved import ResolvedConfig
from launcher.training.task_builder import objective_of
from launcher.verification.choices import RouterState, recorded_routers
from launcher.verification.compare import StepState
from launcher.verification.random_rows import micro_batch
from longctx.batch import Batch
from longctx.conversion.tensor_layouts import quantized_layouts
from longctx.kernels.quantized_weights import dequantize, quantize
from longctx.model.decoder import Decoder
from longctx.model.experts.balance import load_share, move_selection_bias_
from longctx.model.experts.replay import RoutingReplay
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.build import build_objective
from longctx.objectives.task import Counts, Task
from parallel.zero.zero_muon import Muon, matrices_of, whole_matrices


class SingleProcess:
    """Single-process model, its float32 masters, and their optimizer."""

    def __init__(self, config: ResolvedConfig, world_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Start from the run's weights on ``world_size`` ranks: rounded to its dtype, even if ``dtype`` differs."""
        self.config, self.model = config, config.model.config()
        micro_batches = config.micro_batches(world_size)
        # All data ranks' rows, micro-batch by micro-batch, as one process must compute them.
        numbers = product(range(len(micro_batches)), range(micro_batches.data_degree))
        self._rows = [micro_batches.rows(number, data_rank) for number, data_rank in numbers]
        full = replace(self.model, adapter=self.model.adapter.without_quantization())
        layouts = quantized_layouts(self.model)
        self.lm = build_objective(
            Decoder(full, seed=config.run.seed, execution=Execution(matmul_mode=config.train.products)),
            objective_of(config),
        ).to(device)
        self.device, self.masters = device, {}
        for name, p in self.lm.network.named_parameters():
            if name in layouts:
                # The run's dequantized values, as a weight in full precision: an independent way to compute with them.
                p.data = dequantize(quantize(p, layouts[name]), layouts[name], config.dtype)
            elif p.requires_grad:
                self.masters[name] = p.detach().to(config.dtype).float().requires_grad_()
            else:
                # Frozen: rounded once, like the run's.
                p.data = p.data.to(config.dtype)
        self.lm.to(dtype)
        self.optimizer = _optimizer(config, self.lm, self.masters)

    def weights(self) -> dict[str, Tensor]:
        """Return the current masters and buffers, flattened."""
        found = {name: master.detach().clone().flatten() for name, master in self.masters.items()}
        found.update((name, x.detach().float().clone().flatten()) for name, x in self.lm.network.named_buffers())
        return found

    def steps(self, run: Sequence[StepState]) -> Iterator[StepState]:
        """Yield the reference state for each step that the ``run`` has taken."""
        model, load_LE = self.model, None
        for step, run_state in enumerate(run):
            with torch.no_grad():
                weights = dict(self.lm.network.named_parameters())
                for name, master in self.masters.items():
                    # Rounded like the run's weights, whatever dtype is used here.
                    weights[name].copy_(master.to(self.config.dtype))
            streams = [micro_batch(self.config, step, rows).to(self.device) for rows in self._rows]
            batches = [self.lm.prepare(stream) for stream in streams]
            seq_len = self.config.data.seq_len
            tokens = [slice(rows.start * seq_len, rows.stop * seq_len) for rows in self._rows]
            nll, counts_LE, counts, routers = self._gradients(batches, tokens, step, load_LE, run_state.experts_LTk)
            norm = _clip(self.masters, self.config.train.clip_norm)
            gradients = {name: _gradient(master).clone().flatten() for name, master in self.masters.items()}
            # Optimizer step with the run's gradients.
            for name, master in self.masters.items():
                # A copy, because Muon overwrites it with its update.
                master.grad = run_state.gradients[name].to(master, copy=True).view_as(master)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if counts_LE is not None:
                load_LE = load_share(counts_LE)
                if model.selection_bias_rate:
                    move_selection_bias_(self.lm.network.selection_biases(), counts_LE, model.selection_bias_rate)
            yield StepState(
                loss=self.lm.mean_loss({self.lm.reported: nll}, counts),
                grad_norm=norm,
                gradients=gradients,
                weights=self.weights(),
                routers=tuple(routers),
            )
            # The next step starts from the run's weights.
            with torch.no_grad():
                for name, master in self.masters.items():
                    master.copy_(run_state.weights[name].view_as(master))

    def _gradients(
        self, batches: list[Batch], tokens: list[slice], step: int, load_LE: Tensor | None, experts_LTk: Tensor | None
    ) -> tuple[float, Tensor | None, Counts, list[RouterState]]:
        """Accumulate the step's gradients in float32. Return Σ nll, expert counts, the step's counts, and routers."""
        counts, nll, counts_LE = self.lm.count(batches), 0.0, None
        routers: list[RouterState] = []
        for batch, of_batch in zip(batches, tokens, strict=True):
            replay, chosen_LNk = None, ()
            if experts_LTk is not None:
                replay = RoutingReplay(experts_LTk[:, of_batch])
                chosen_LNk = replay.experts_LNk
            training_pass = TrainingPass(
                seed=self.config.run.seed * 0x9E3779B1 + step,
                first_tokens=(of_batch.start,),
                first_source_tokens=(of_batch.start // self.config.data.seq_len * self.config.data.source_seq_len,),
                expert_load_LE=load_LE,
                replay=replay,
            )
            # A run concatenates a micro-batch's rows; here they stay rows, each with its documents.
            with recorded_routers(self.lm, tuple(chosen_LNk), routers):
                loss = self.lm.loss_sum(self.lm(batch, training_pass))
            self.lm.loss(loss, counts).backward()
            nll += float(loss[self.lm.reported])
            if loss.counts_LE is not None:
                counts_LE = loss.counts_LE if counts_LE is None else counts_LE + loss.counts_LE
            for name, p in self.lm.network.named_parameters():
                if p.grad is None:
                    continue
                master = self.masters[name]
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                master.grad += p.grad
                p.grad = None
        return nll, counts_LE, counts, routers


def _clip(masters: dict[str, Tensor], clip_norm: float) -> float:
    """Scale the gradients down to this norm (0: never); return their norm before scaling."""
    # In float64: in float32 the sum over millions of squares is off in the fifth digit.
    squares = [_gradient(master).double().square().sum() for master in masters.values()]
    norm = float(torch.stack(squares).sum().sqrt())
    # The same epsilon as in torch's clip_grad_norm_.
    factor = clip_norm / (norm + 1e-6)
    if clip_norm and factor < 1:
        for master in masters.values():
            if master.grad is not None:
                master.grad *= factor
    return norm


def _optimizer(config: ResolvedConfig, lm: Task, masters: dict[str, Tensor]) -> torch.optim.Optimizer:
    train = config.train
    muons = matrices_of(lm.network) if train.optimizer == "muon" else {}
    rest = {name: p for name, p in masters.items() if name not in muons}
    # As in a run: weight decay only for matrices, and Muon for some of them.
    kinds = [
        ([p for p in rest.values() if p.ndim >= 2], train.weight_decay, False),
        ([p for p in rest.values() if p.ndim < 2], 0.0, False),
        ([masters[name] for name in muons], train.weight_decay, True),
    ]
    groups = [
        {"params": params, "weight_decay": decay, "matrices": is_muons} for params, decay, is_muons in kinds if params
    ]
    options = {"lr": train.lr, "betas": (train.beta1, train.beta2), "eps": train.eps, "foreach": False}
    if not muons:
        return torch.optim.AdamW(groups, **options)
    optimizer = Muon(groups, momentum=train.momentum, **options)
    optimizer.flat_buffers = whole_matrices(masters, muons, optimizer.matrix_dtype)
    return optimizer


def _gradient(master: Tensor) -> Tensor:
    if master.grad is None:
        return torch.zeros_like(master)
    return master.grad
