"""What ``fingerprint.py`` hashes of attention across ranks: layouts, schedules and ``attend``."""

from __future__ import annotations

import functools
import os
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from fingerprint_checks import Line, digest, guarded, values_line  # loaded by fingerprint.py


def schedules(work: Path, *, degrees: Sequence[int], masks: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Which tokens each rank holds, and what it computes and receives: pure facts."""
    from parallel.layout import SequenceLayout

    lines = []
    bounds = [0, 1, 70, 71, 600, 1500, 1501, 2048]
    for kind in ("contiguous", "zigzag", "striped", "balanced"):
        for degree in degrees:
            for ulysses in (1, 2):
                layout = SequenceLayout.build(kind, 2048, degree, bounds, ulysses)
                name = f"{kind}/ranks{degree}/ulysses{ulysses}"
                lines += guarded(f"layout/{name}", functools.partial(_layout_lines, layout))
                for mask, options in masks.items():
                    compute = functools.partial(_schedule_lines, layout, bounds, options)
                    lines += guarded(f"schedule/{name}/{mask}", compute)
    return lines


def _layout_lines(layout: Any, name: str) -> Iterator[Line]:
    import torch

    parts = [layout.split(torch.arange(2048), rank, 0) for rank in range(layout.degree)]
    assert torch.equal(layout.join(parts, 0), torch.arange(2048))
    yield Line(name, digest(*parts), f"{parts[0][:4].tolist()}... of rank 0")


def _schedule_lines(layout: Any, bounds: list[int], options: Mapping[str, Any], name: str) -> Iterator[Line]:
    from parallel.schedule import Schedule

    schedule = Schedule.build(layout, bounds, **options)
    shape = typing.get_type_hints(Schedule.flops)["shape"](4, 2, 64, 4)
    ranks = range(layout.degree)
    facts: dict[str, Callable[[], Any]] = {
        "rows_received": lambda: [schedule.rows_received(rank) for rank in ranks],
        "work": lambda: [schedule.work(rank) for rank in ranks],
        "imbalance": lambda: schedule.imbalance(),
        "flops": lambda: [schedule.flops(rank, shape) for rank in ranks],
        "bytes": lambda: [[schedule.bytes_received(rank, shape, t) for rank in ranks] for t in ("p2p", "all_gather")],
    }
    for fact, compute in facts.items():
        yield from guarded(f"{name}/{fact}", lambda line, compute=compute: [values_line(line, compute())])


def attend_across(
    work: Path, *, cases: Sequence[Mapping[str, Any]], ulysses: int, ranks_per_node: int | None, tokens: int
) -> list[Line]:
    """Output and gradients of ``attend`` for each case, every rank's; rank 0 returns the lines."""
    import torch.distributed as dist

    from parallel.mesh import Mesh

    rank, degree = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=degree, timeout=timedelta(seconds=90))
    mesh = Mesh.build(context=degree, ulysses=ulysses, ranks_per_node=ranks_per_node)
    lines = []
    for case in cases:
        every: list[Any] = [None] * degree
        dist.all_gather_object(every, _attend(case, mesh, tokens))
        sums = [sum(facts[n][1] for facts in every) ** 0.5 for n in range(4)]
        hashes = [digest([facts[n][0] for facts in every]) for n in range(4)]
        value = " ".join(
            f"{tensor}={one[:6]} ({norm:.7g})"
            for tensor, one, norm in zip(("out", "dq", "dk", "dv"), hashes, sums, strict=True)
        )
        lines.append(Line(f"attend/ranks{degree}/ulysses{ulysses}/{case['name']}", digest(hashes), value))
    dist.destroy_process_group()
    return lines


def _attend(case: Mapping[str, Any], mesh: Any, tokens: int) -> list[tuple[str, float]]:
    """Hash and squared norm of this rank's out, dq, dk and dv."""
    import torch

    from parallel.attention import attend
    from parallel.layout import SequenceLayout
    from parallel.schedule import Schedule

    layout = SequenceLayout.build(case["layout"], tokens, mesh.context, case["bounds"], mesh.ulysses)
    schedule = Schedule.build(layout, case["bounds"], **case["mask"])
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case["dtype"])
    made = [torch.randn(1, tokens, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    q, k, v, dout = (layout.split(x.to(dtype), mesh.context_rank, 1) for x in made)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, schedule=schedule, mesh=mesh, transport=case["transport"], kernel=case["kernel"])
    grads = torch.autograd.grad(out, leaves, dout)
    return [(digest(x), float(x.detach().double().square().sum())) for x in (out, *grads)]
