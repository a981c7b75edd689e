"""``trace_rank``: one rank's step, on tensors without data.

Forward and backward are the run's own. DeepSpeed's work around them is not traced: bytes held by a ZeRO stage are
arithmetic (``launcher/plan/zero_bytes.py``), and AdamW is traced on the parameters that a rank updates.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from launcher.config.resolved import ResolvedConfig
from launcher.plan.planned_world import World
from launcher.plan.synthetic_documents import synthetic_batch
from launcher.plan.zero_bytes import partition_bytes
from launcher.trace.assumed import EvenRouting, join_world
from launcher.trace.link_traffic import Links
from launcher.trace.rank_trace import RankTrace
from launcher.trace.recorder import Recorder, StoppedAtWaitError
from launcher.training.task_builder import build_task, shard_batch
from longctx.batch import Stream
from longctx.kernels.attention.flash.varlen import VarlenKernel
from longctx.kernels.attention.kernel_selection import KERNELS
from longctx.model.training_pass import TrainingPass
from longctx.objectives.task import Task
from parallel.loss import count_step
from parallel.mesh import Mesh
from parallel.zero.optimizer import AdamW
from parallel.zero.zero_options import uses_fused_adamw

DEVICE = torch.device("cuda", 0)


def trace_rank(
    config: ResolvedConfig, world: World, rank: int, *, document_tokens: int = 0, capability: tuple[int, int] = (9, 0)
) -> RankTrace:
    """Trace one step on a rank. This process becomes that rank, and cannot be reused.

    ``config`` is fully resolved. ``document_tokens`` (0: full rows) is the length of the documents packed into rows;
    kernels are chosen for a GPU with this compute ``capability``.
    """
    started = time.perf_counter()
    join_world(rank, world)
    parallel = config.parallel
    mesh = Mesh.build(
        context=parallel.context,
        ulysses=parallel.ulysses,
        expert=parallel.expert,
        ranks_per_node=world.ranks_per_node,
    )
    # Kernel choice depends on the capability, but there may be no device to query.
    for kernel in KERNELS.values():
        if isinstance(kernel, VarlenKernel):
            kernel.capability = capability
    batch = synthetic_batch(config, document_tokens)
    recorder = Recorder(_links(rank, world, mesh))
    # CPU tensors stay real among fake ones: the host computes schedules and slices with them.
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        module = _build(config, mesh, recorder)
        step = _Step(config, mesh, module, recorder)
        try:
            step.run(batch)
        except StoppedAtWaitError:
            step.end_early()
    return step.result(rank, seconds=time.perf_counter() - started)


def _links(rank: int, world: World, mesh: Mesh) -> Links:
    links = Links(rank, world.ranks_per_node)
    links.name(mesh.expert_group, "of tokens to experts")
    links.name(mesh.ulysses_group, "of heads")
    links.name(mesh.ring_group, "over the sequence")
    # Windows of images move tokens between the ranks that share them.
    links.name(mesh.context_group, "over the sequence")
    return links


def _build(config: ResolvedConfig, mesh: Mesh, recorder: Recorder) -> Task:
    """Build a run's module, with weights in the run's dtype and allocated gradients."""
    dispatcher = None
    if config.parallel.expert > 1:
        dispatcher = EvenRouting(mesh, config.model.config(), recorder.waits)
    with DEVICE:
        module = build_task(config, mesh, dispatcher=dispatcher, device=str(DEVICE))
    _convert(module, config.dtype)
    # Allocated before the step: DeepSpeed's own gradient memory is arithmetic.
    for p in module.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    return module


def _convert(module: Task, dtype: torch.dtype) -> None:
    """Convert all floating-point weights and buffers to this dtype, as DeepSpeed does."""
    # By hand, since ``Module.to`` swaps tensors in place, which tensors without data do not support.
    for part in module.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            if p.is_floating_point():
                setattr(part, name, torch.nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(part, name, buffer.to(dtype))


class _Step:
    def __init__(self, config: ResolvedConfig, mesh: Mesh, module: Task, recorder: Recorder) -> None:
        self.config, self.mesh, self.module, self.recorder = config, mesh, module, recorder
        self.is_whole = True
        """True if the trace reached the end of the step."""
        self.kept = self.kept_on_host = self.peak = self.optimizer_peak = 0
        self.peak_operator = self.peak_place = ""

    def run(self, stream: Stream) -> None:
        """Run forward, backward and the optimizer step."""
        live = self.recorder.live
        held = [x for p in self.module.parameters() for x in (p, p.grad) if x is not None]
        live.ignore(*held, *self.module.buffers())
        self._begin()
        stream = shard_batch(stream, self.config, self.mesh)
        # Counted on the CPU before the first forward, as in a run.
        counts = count_step(self.module, [stream])
        shard = self.module.prepare(stream)
        training_pass = TrainingPass(seed=self.config.run.seed)
        loss = self.module.loss_sum(self.module(shard.to(DEVICE), training_pass))
        self.kept, self.kept_on_host = live.now, self.recorder.pinned.now
        # DeepSpeed averages over all ranks; undo it, as a run does.
        (self.module.loss(loss, counts) * self.mesh.world_size).backward()
        self._note_peak()
        self._update()

    def end_early(self) -> None:
        """End a trace that cannot continue, with the memory recorded so far."""
        self.is_whole = False
        self._note_peak()

    def _note_peak(self) -> None:
        live = self.recorder.live
        self.peak, self.peak_operator, self.peak_place = live.peak, live.peak_operator, live.peak_place

    def _begin(self) -> None:
        """Start counting here: building the model allocated memory before."""
        live, links = self.recorder.live, self.recorder.links
        live.now = 0
        live.restart_peak()
        self.recorder.operators.clear()
        links.sums.clear()

    def _update(self) -> None:
        """Apply AdamW to this rank's float32 masters, unless they are offloaded."""
        if self.config.zero.offload != "none":
            return
        live, train = self.recorder.live, self.config.train
        masters = [self._master(numel) for numel in _partition(self.module, self.config, self.mesh)]
        fused = uses_fused_adamw(DEVICE.type, None)
        optimizer = AdamW(
            masters, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, foreach=False, fused=fused
        )
        # The first step creates the moments, which count as held; the second one represents all later steps.
        optimizer.step()
        before = live.now
        live.restart_peak()
        optimizer.step()
        self.optimizer_peak = live.peak - before

    def _master(self, numel: int) -> Tensor:
        master = torch.zeros(numel, dtype=torch.float32, device=DEVICE).requires_grad_()
        master.grad = torch.zeros_like(master)
        return master

    def result(self, rank: int, *, seconds: float) -> RankTrace:
        """Return the step's results."""
        recorder = self.recorder
        held = partition_bytes(self.config, self.module, self.mesh)
        return RankTrace(
            rank=rank,
            bytes=held.in_step(
                kept=self.kept,
                passing=max(0, self.peak - self.kept),
                kept_on_host=self.kept_on_host,
                optimizer_step=self.optimizer_peak,
            ),
            peak_operator=self.peak_operator,
            peak_place=self.peak_place,
            operators=recorder.operators.total(),
            host_waits=recorder.waits.found,
            copies=recorder.waits.copies,
            copied_bytes=recorder.waits.copied_bytes,
            copied_to_host_bytes=recorder.waits.copied_to_host_bytes,
            links=recorder.links.link_bytes(),
            is_whole=self.is_whole,
            seconds=seconds,
            most_called=recorder.operators.most_common(8),
        )


def _partition(module: Task, config: ResolvedConfig, mesh: Mesh) -> list[int]:
    """Return the sizes of this rank's flat masters: matrices, then norms and biases."""
    ranks = mesh.world_size
    if config.zero.stage == 0:
        ranks = 1
    # Weight decay separates matrices from the rest, so the optimizer has two flat masters.
    sizes: dict[bool, int] = {True: 0, False: 0}
    for p in module.parameters():
        if p.requires_grad:
            sizes[p.ndim >= 2] += p.numel()
    return [-(-size // ranks) for size in sizes.values() if size]
