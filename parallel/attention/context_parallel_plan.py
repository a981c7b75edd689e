"""ContextParallelPlan: shared by all layers of one kind in one forward pass; ranks compare it when they build it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.kernel_interface import AttentionKernel, KernelRequest
from longctx.kernels.attention.kernel_selection import choose_kernel
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.processor import MatmulMode
from longctx.model.attention.core import AttentionCore, AttentionShapes
from longctx.model.attention.mask import AttentionMask
from parallel.attention.agreement import degree_problem, verify_across_ranks
from parallel.attention.sharded_kv_cache import ShardedKVCache
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule.attention_schedule import Schedule
from parallel.transport.kv_block import Transport
from parallel.transport.transport_choice import build_transport
from parallel.transport.ulysses import HeadExchange


@dataclass(frozen=True)
class ContextParallelOptions:
    """Attention options, independent of the layer."""

    kernel: str = "auto"
    transport: str = "auto"
    """p2p, two_level, all_gather or auto."""
    communication_dtype: torch.dtype | None = None
    """Dtype for gradients in flight; None: float32, or float64 for float64 inputs."""
    deterministic: bool = False
    """Whether the kernel's backward must be bitwise reproducible."""
    matmul_mode: MatmulMode | None = None
    """How a CPU multiplies bfloat16; None: the faster way on this CPU."""


@dataclass(frozen=True)
class CoreOverRanks(AttentionCore):
    """Core for a layer with a sequence sharded over the mesh's context ranks."""

    mesh: Mesh
    layout: str
    """Layout kind for batches without a placement."""
    options: ContextParallelOptions = field(default_factory=ContextParallelOptions)

    @classmethod
    def check_layout(cls, layout: str, ring_degree: int) -> None:
        """Raise ConfigError if the core does not support this layout over ``ring_degree`` ranks."""

    def new_cache(self) -> ShardedKVCache:
        """Return an empty cache for the mesh's context ranks."""
        return ShardedKVCache(self.mesh, self.layout)


@dataclass(frozen=True, eq=False)
class ContextParallelPlan:
    """A batch's schedule, with the transport and kernel that execute it on this rank.

    Each batch has its own plan, with its own mesh and layout: the context degree may change between batches.
    """

    mesh: Mesh
    """Ranks that share this batch's sequence."""
    schedule: Schedule
    """Its layout places the batch's tokens."""
    shapes: AttentionShapes
    """Shapes of this rank's shard; a flattened micro-batch counts as the one sequence that the layout covers."""
    heads: HeadExchange
    transport: Transport
    kernel: AttentionKernel

    @classmethod
    def build(
        cls,
        schedule: Schedule,
        mesh: Mesh,
        shapes: AttentionShapes,
        options: ContextParallelOptions,
        *,
        problem: str | None = None,
    ) -> ContextParallelPlan:
        """Build a schedule's plan for these shapes. Collective.

        ``problem`` is an error that the caller found on this rank. Raise ConfigError on every rank if one has a
        problem, ClusterError if ranks mismatch or one times out.
        """
        # Segments that are neighbours on a rank may be far apart in their document, so biases need each segment's
        # distance. The flag is set before the comparison, but excluded from the digest: it changes no message.
        if {"alibi", "relative_bias"} & set(shapes.rules):
            schedule = schedule.with_relative_positions()
        plan = None
        # In this order: a shard size exists only if the layout fits the mesh.
        problem = problem or degree_problem(schedule.layout, mesh)
        if problem is None:
            num_local = schedule.layout.num_local(mesh.context_rank)
            shapes = flattened(shapes, num_local)
            problem = tokens_problem(shapes, num_local, mesh)
        if problem is None:
            # Report a local error to the other ranks before raising it: otherwise they would wait for this rank.
            try:
                plan = _assemble(schedule, mesh, shapes, options)
            except ConfigError as error:
                problem = str(error)
        # Synchronisation point: a cheap comparison here turns a mismatch, which would hang or corrupt a hop, into an
        # error.
        verify_across_ranks(schedule, mesh, call_signature(shapes, options, plan and plan.kernel), problem)
        assert plan is not None, "a problem that the ranks did not exchange"
        return plan

    def as_shard(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reshape this rank's rows to sequences in the layout. Raise ValueError if the queries' shapes mismatch."""
        B = self.shapes.batch
        q, k, v = (x.reshape(B, -1, x.shape[2], x.shape[3]) for x in (q, k, v))
        self.shapes.check_call(q, None)
        return q, k, v


def flattened(shapes: AttentionShapes, num_local: int) -> AttentionShapes:
    """Return a flattened micro-batch's shapes as one sequence, as in its layout; leave others unchanged."""
    if shapes.tokens == num_local or shapes.batch * shapes.tokens != num_local:
        return shapes
    return replace(shapes, batch=1, tokens=num_local)


def tokens_problem(shapes: AttentionShapes, num_local: int, mesh: Mesh) -> str | None:
    """Return an error message if this rank's token count differs from its shard's, otherwise None."""
    if shapes.tokens == num_local:
        return None
    return (
        f"rank {mesh.rank} received {shapes.tokens} queries; its layout shard has {num_local} tokens. "
        "Pass each tensor through SequenceLayout.split."
    )


def build_sequence_layout(kind: str, mesh: Mesh, mask: AttentionMask) -> SequenceLayout:
    """Build a layout of the given kind for a micro-batch's documents over the mesh."""
    documents = mask.documents
    return SequenceLayout.build(kind, documents.num_tokens, mesh.context, documents, mesh.ulysses, causal=mask.causal)


def call_signature(shapes: AttentionShapes, options: ContextParallelOptions, kernel: AttentionKernel | None) -> str:
    """Return the arguments that, with the schedule, all ranks must share. ``kernel`` is None without a plan."""
    # Include the kernel, although ranks with different kernels could exchange rows: if one lacks a library, the others
    # would wait for its slower kernel in every hop, without an error that gives the reason.
    name = kernel.name if kernel else "none"
    communication_dtype = options.communication_dtype or accumulate_dtype(shapes.dtype)
    return (
        f"{shapes.batch} × {shapes.num_heads}/{shapes.num_kv_heads} heads of {shapes.head_dim} (values "
        f"{shapes.value_dim}), {shapes.dtype}, scale {shapes.scale:.6g}, soft cap {shapes.softcap}, transport "
        f"{options.transport}, gradients as {communication_dtype}, kernel {name}"
    )


def tensor_problem(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, schedule: Schedule, mesh: Mesh) -> str | None:
    """Return an error message if this rank's tensors do not fit; None if they do, or for another mesh's layout."""
    if degree_problem(schedule.layout, mesh) is not None:
        return None
    num_queries = schedule.layout.num_local(mesh.context_rank)
    num_keys = schedule.key_layout.num_local(mesh.context_rank)
    if q.shape[1] != num_queries and q.shape[0] * q.shape[1] == num_queries:  # a flattened micro-batch
        q, k, v = (x.reshape(1, -1, x.shape[2], x.shape[3]) for x in (q, k, v))
    if (q.shape[1], k.shape[1], v.shape[1]) != (num_queries, num_keys, num_keys):
        return (
            f"rank {mesh.rank} received {q.shape[1]} queries, {k.shape[1]} keys and {v.shape[1]} values; its "
            f"layout shard has {num_queries} tokens. Pass each tensor through SequenceLayout.split."
        )
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0] or k.shape[2] != v.shape[2] or k.shape[3] != q.shape[3]:
        return (
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} do not match: batch "
            "sizes must be equal, keys and values need equal head counts, queries and keys equal head sizes."
        )
    if not q.dtype == k.dtype == v.dtype:
        return f"queries are {q.dtype}, keys {k.dtype}, values {v.dtype}; all must have one dtype."
    if q.shape[2] % k.shape[2]:
        return f"{k.shape[2]} key heads do not divide {q.shape[2]} query heads."
    if sinks is not None and sinks.shape != (q.shape[2],):
        return f"sinks_H has shape {tuple(sinks.shape)}; it needs one logit for each of {q.shape[2]} query heads."
    return None


def _assemble(
    schedule: Schedule, mesh: Mesh, shapes: AttentionShapes, options: ContextParallelOptions
) -> ContextParallelPlan:
    """Build this rank's plan. Raise ConfigError if a kernel, a transport or the heads do not support it."""
    heads = HeadExchange.build(mesh, shapes.num_heads, shapes.num_kv_heads)
    transport = build_transport(options.transport, schedule, mesh, communication_dtype=options.communication_dtype)
    # The kernel sees only this rank's heads, after Ulysses has exchanged rows for them.
    request = KernelRequest(
        shapes.device_type,
        shapes.dtype,
        shapes.head_dim,
        heads.query_heads.stop - heads.query_heads.start,
        heads.num_kernel_key_heads,
        value_dim=shapes.value_dim,
        window=schedule.window is not None,
        rules=shapes.rules,
        deterministic=options.deterministic,
        matmul_mode=options.matmul_mode,
    )
    kernel = choose_kernel(options.kernel, request)
    return ContextParallelPlan(mesh, schedule, shapes, heads, transport, kernel)
