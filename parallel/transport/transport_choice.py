"""Choice of a transport: how keys and values reach queries, and how their gradients return to the owners."""

from __future__ import annotations

import torch

from longctx.errors import ConfigError
from parallel.mesh import Mesh
from parallel.schedule.attention_schedule import Schedule
from parallel.transport.all_gather import AllGather
from parallel.transport.kv_block import Transport
from parallel.transport.point_to_point import PointToPoint
from parallel.transport.two_level import TwoLevel

TRANSPORTS = ("auto", "p2p", "two_level", "all_gather")


def build_transport(
    name: str, schedule: Schedule, mesh: Mesh, *, communication_dtype: torch.dtype | None = None
) -> Transport:
    """Build the transport called ``name``, resolving ``auto``.

    Gradients are sent in ``communication_dtype``; by default in float32, or float64 for float64 inputs. Raise
    ConfigError for an unknown name.
    """
    name = resolve_transport(name, mesh)
    if name == "all_gather":
        return AllGather(schedule, mesh, communication_dtype)
    if name == "two_level":
        return TwoLevel(schedule, mesh, mesh.ring_ranks_in_node, communication_dtype)
    return PointToPoint(schedule, mesh, communication_dtype)


def resolve_transport(name: str, mesh: Mesh) -> str:
    """Resolve ``auto``: two_level if a ring spans nodes and has several ranks on each, otherwise p2p.

    Raise ConfigError for an unknown name, and for two_level if nodes hold unequal numbers of ranks.
    """
    if name not in TRANSPORTS:
        raise ConfigError(f"parallel.transport={name!r} is unknown. Try one of {list(TRANSPORTS)}.")
    ring, in_node = mesh.ring_degree, mesh.ring_ranks_in_node
    if name == "auto":
        # Two levels only pay off if several ranks in a node need the same rows from another node.
        if 1 < in_node < ring:
            return "two_level"
        return "p2p"
    if name == "two_level" and in_node == 1 and mesh.ranks_per_node > 1 and ring > 1:
        raise ConfigError(
            f"parallel.transport=two_level needs a ring's {ring} ranks spread evenly over nodes; with "
            f"{mesh.ranks_per_node} ranks per node they are not.\nTry parallel.transport=p2p."
        )
    return name
