"""Build a model on a mesh: attention and experts, then weights, then the objective."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longctx.architecture.layer_specs import mixers_of
from longctx.batch import Batch
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.model.decoder import Decoder
from longctx.model.experts.dispatch import TokenDispatcher
from longctx.model.training_pass import Execution
from longctx.objectives.build import NEXT_TOKEN, Objective, build_objective
from longctx.objectives.task import Task
from longctx.objectives.token_prediction import Shift, next_values
from parallel.attention.context_parallel_plan import ContextParallelOptions
from parallel.attention.cores import CORES, build_cores
from parallel.document_sums import document_sum
from parallel.experts.dispatcher import AllToAllDispatcher, ReplicatedExperts
from parallel.mesh import Mesh, closest_value
from parallel.schedule.document_segments import shared_documents


def build_parallel_model(
    config: ModelConfig,
    mesh: Mesh,
    *,
    layout: str,
    kernel: str = "auto",
    transport: str = "auto",
    communication_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    execution: Execution | None = None,
    dispatcher: TokenDispatcher | None = None,
    objective: Objective = NEXT_TOKEN,
    seed: int | None = 0,
    device: str | None = None,
) -> Task:
    """Build the module that ZeRO wraps: a decoder whose attention and experts span the mesh, and its objective.

    Weights depend only on ``seed`` and their names, so every mesh starts from the same model; each rank holds its local
    experts. With ``seed=None`` weights stay on the meta device without storage, and under ZeRO
    ``ZeroEngine.initialize`` or ``load`` fills each rank's partition. ``device`` places the weights (None: the CPU, or
    meta). ``dispatcher=None`` builds the mesh's. Raise ConfigError if the layers do not support this layout, or the
    experts this degree.
    """
    execution = execution or Execution()
    # 1. Attention and dispatcher first: the decoder is built around them, with this rank's local experts.
    options = ContextParallelOptions(kernel, transport, communication_dtype, deterministic, execution.matmul_mode)
    if device is None:
        device = "cpu"
        if seed is None:
            device = "meta"
    decoder = build_empty_decoder(
        config, mesh, layout=layout, options=options, execution=execution, dispatcher=dispatcher, device=device
    )
    # 2. Then weights: they depend on names and seed, not on their placement.
    if seed is not None:
        decoder.initialize(seed)
    # 3. The objective last: DeepSpeed wraps one module, and ZeRO-3 gathers weights only during that module's forward.
    return build_objective(decoder, objective, _context_sum(mesh), _shift_over(mesh), document_sum(mesh))


def build_empty_decoder(
    config: ModelConfig,
    mesh: Mesh,
    *,
    layout: str,
    options: ContextParallelOptions | None = None,
    execution: Execution | None = None,
    dispatcher: TokenDispatcher | None = None,
    device: str = "cpu",
) -> Decoder:
    """Build a decoder whose attention and experts span the mesh, with uninitialized weights for a state dict to fill.

    Weights and buffers are on ``device``, which may be ``meta``. ``dispatcher=None`` builds the mesh's. Raise
    ConfigError if the layers do not support this layout, or the experts this degree.
    """
    check_layers(config, layout, mesh.ring_degree)
    check_experts(config, mesh.expert, mesh.world_size)
    cores = build_cores(mesh, layout, options or ContextParallelOptions())
    dispatcher = dispatcher or _dispatcher(config, mesh)
    # The device context covers only weights and buffers: the decoder allocates everything more at run time.
    with torch.device(device):
        return Decoder(config, cores, dispatcher=dispatcher, execution=execution, seed=None)


def check_layers(config: ModelConfig, layout: str, ring_degree: int) -> None:
    """Raise ConfigError unless the layout supports every layer's mixer."""
    for mixer in mixers_of(config):
        if mixer.core not in CORES:
            raise ConfigError(
                f"core {mixer.core!r} in model.layers is unknown; known: {list(CORES)}. Register it in "
                "parallel/attention/cores.py, even for one rank."
            )
        CORES[mixer.core].check_layout(layout, ring_degree)


def check_experts(config: ModelConfig, degree: int, world_size: int | None = None) -> None:
    """Raise ConfigError unless every layer's experts divide equally over ``degree`` ranks.

    With ``world_size``, the message suggests only degrees that also divide the world size.
    """
    if degree > 1 and not config.num_experts:
        raise ConfigError(f"parallel.expert={degree}, but the model has no experts.\nSet parallel.expert=1.")
    if degree > 1 and config.num_experts % degree:
        both = math.gcd(config.num_experts, world_size or config.num_experts)
        fits = [n for n in range(1, both + 1) if both % n == 0]
        raise ConfigError(
            f"parallel.expert={degree} does not divide model.num_experts={config.num_experts}.\n"
            f"Try parallel.expert={closest_value(degree, fits)} (any of {fits}), or a multiple of {degree} experts."
        )


def _dispatcher(config: ModelConfig, mesh: Mesh) -> TokenDispatcher:
    if mesh.expert == 1:
        return ReplicatedExperts(mesh)
    return AllToAllDispatcher(mesh, config.num_experts)


_SHIFTING = "gathering the next token ids"


def _shift_over(mesh: Mesh) -> Shift:
    """Return ``next_values`` over the ranks that share a sequence, by gathering eight bytes per token."""

    def shift(values_Bt: Tensor, batch: Batch) -> Tensor:
        if mesh.context_group is None or batch.placement is None:
            return next_values(values_Bt, batch)
        # A layout may cut anywhere (striped: after every token), so the next token may be on any rank. Gathering all
        # token ids is cheap: an id is small compared to a hidden state.
        every = mesh.comm.all_gather(values_Bt, mesh.context_group, operation=_SHIFTING)
        whole_BT = batch.placement.join(list(every), 1)
        return batch.placement.split(whole_BT.roll(-1, 1), mesh.context_rank, 1)

    return shift


_COUNT_REDUCTION = "summing expert choices"


def _context_sum(mesh: Mesh):
    """Return a function that sums router counts over the ranks that share a sequence."""

    def reduce_counts(counts_LSE: Tensor, batch: Batch) -> Tensor:
        if mesh.context_group is None:
            return counts_LSE
        num_documents = len(batch.documents.bounds) - 1
        if batch.placement is None or counts_LSE.shape[1] != num_documents:
            mesh.comm.all_reduce(counts_LSE, mesh.context_group, operation=_COUNT_REDUCTION)
            return counts_LSE
        # A document on a single rank is complete already, and few documents in a packed batch span several ranks.
        shared = torch.from_numpy(shared_documents(batch.placement, batch.documents.bounds))
        shared = shared.to(counts_LSE.device, non_blocking=True)
        summed = counts_LSE.index_select(1, shared)
        # A token chooses an expert once, so no count exceeds the token count, and int32 halves the bytes.
        if batch.documents.num_tokens < 2**31:
            summed = summed.int()
        mesh.comm.all_reduce(summed, mesh.context_group, operation=_COUNT_REDUCTION)
        return counts_LSE.index_copy(1, shared, summed.long())

    return reduce_counts
