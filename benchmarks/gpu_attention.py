"""Attention kernels on one GPU: rates, memory, errors, the cost of a ring of KV blocks, and when transfers can be
hidden.

    python -m benchmarks.gpu_attention [--minutes 7.5] [--output FILE.json]

Needs PyTorch and a CUDA device, and uses flash-attn if installed. Four tables, also saved as JSON:

1. TFLOP/s and peak memory of each kernel on KV blocks, forward and backward, 2K to 64K tokens per KV block, 32 query
   and
   8 key heads of 128, bfloat16. Memory is the call's own, without its inputs.
2. A ring on one device: every rank's hops, one after the other, with merges and additions but without transfers,
   compared with one call of the same kernel over the full sequence. ``efficiency`` is the full call over the sum of the
   ranks (goal 0.97); ``slowest`` is the full call over (ranks × slowest rank), which counts imbalance too.
3. Relative (Frobenius) errors in bfloat16 against float64.
4. Tokens a rank needs so that computing a hop takes as long as its transfer, from the measured rates and *assumed*
   bandwidths: n ≥ 2·(Hk/Hq)·F/B forward, 12/5 instead of 2 backward with float32 gradients between ranks,
   8/5 with bfloat16, for two-byte keys and values and half-computed KV blocks.

``--device cpu --tiny`` runs the same code on the CPU's kernels at tiny sizes, to check the script without measuring.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu
from longctx.kernels.attention.kernel_interface import AttentionKernel, KernelRequest, ScoreRules, merge_
from longctx.kernels.attention.kernel_selection import device_generation, order_of_auto
from longctx.kernels.attention.reference import ReferenceKernel
from longctx.kernels.attention.slices import Q_STOP, AttentionSlice, slice_table
from longctx.kernels.dtypes import accumulate_dtype
from parallel.layout.sequence import SequenceLayout
from parallel.schedule.attention_schedule import Schedule
from parallel.schedule.bands import area

BANDWIDTHS = {"NVLink (assumed 350 GB/s)": 350e9, "InfiniBand NDR (assumed 45 GB/s)": 45e9}
"""Bytes per second that a rank receives, by link: assumptions, not measurements."""
NOT_MEASURED = ("reference", "blockwise")
"""Kernels whose speed on a GPU does not matter."""
_PARTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Setting:
    """Measurements and their device."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_tokens: tuple[int, ...]
    ring_tokens: int
    degrees: tuple[int, ...]
    error_tokens: int
    rounds: int

    @property
    def scores(self) -> ScoreRules:
        return ScoreRules(scale=self.head_dim**-0.5)

    def kernels(self, *, window: bool = True) -> dict[str, AttentionKernel]:
        """Return the kernels available on this device, the preferred one first; ``window`` leaves out those without
        windows.
        """
        D, H, K = self.head_dim, self.num_heads, self.num_kv_heads
        request = KernelRequest(self.device.type, self.dtype, D, H, K, window=window)
        slow = NOT_MEASURED if self.device.type == "cuda" else NOT_MEASURED[:1]
        in_order = order_of_auto(device_generation())
        wanted = [k for k in in_order if k.name not in slow and not k.name.endswith("_deterministic")]
        return {kernel.name: kernel for kernel in wanted if kernel.supports(request) is None}

    def tensors(self, tokens: int) -> list[Tensor]:
        """Return q, k, v and the output's gradient, [1, tokens, heads, D]."""
        g = torch.Generator(self.device).manual_seed(0)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        shapes = ((1, tokens, h, self.head_dim) for h in heads)
        return [torch.randn(s, generator=g, device=self.device).to(self.dtype) for s in shapes]

    def flops(self, slices: Tensor) -> float:
        """Return the FLOPs of forward; backward takes 2.5 times that."""
        return 4.0 * self.num_heads * self.head_dim * area(slices.numpy())


def full_setting() -> Setting:
    """Return the setting that the module docstring describes."""
    sizes = tuple(1024 * 2**n for n in range(1, 7))
    return Setting(torch.device("cuda"), torch.bfloat16, 32, 8, 128, sizes, 65536, (2, 4, 8), 1024, 3)


def tiny_setting(device: str) -> Setting:
    """Return a setting that measures everything once, in seconds on a CPU."""
    return Setting(torch.device(device), torch.bfloat16, 4, 2, 16, (64, 128), 512, (2,), 96, 1)


# --- measuring ----------------------------------------------------------------------------------------------


def measure_blocks(setting: Setting, deadline: float) -> Iterator[dict[str, Any]]:
    """Measure rates and memory of each kernel on KV blocks."""
    for name, kernel in setting.kernels(window=False).items():
        for tokens in setting.block_tokens:
            for mask, lo in (("full", None), ("causal", 0)):
                if time.monotonic() > deadline:
                    print(f"out of time before {name} at {tokens} tokens", file=sys.stderr)
                    return
                slices = slice_table([AttentionSlice(0, tokens, 0, tokens, lo)])
                yield {"kernel": name, "tokens": tokens, "mask": mask, **measure_block(setting, kernel, slices)}


def measure_block(setting: Setting, kernel: AttentionKernel, slices: Tensor) -> dict[str, float | None]:
    """Measure TFLOP/s and MiB of one kernel on one set of attention slices, forward and backward."""
    q, k, v, dout = setting.tensors(int(slices[-1, Q_STOP]))
    out, lse = kernel.forward(q, k, v, slices, scores=setting.scores)
    out = out.to(q.dtype)

    def forward() -> object:
        return kernel.forward(q, k, v, slices, scores=setting.scores)

    def backward() -> object:
        return kernel.backward(dout, q, k, v, out, lse, slices, scores=setting.scores)

    work = setting.flops(slices) / 1e12
    return {
        "forward_tflops": work / gpu.seconds(forward, setting),
        "backward_tflops": 2.5 * work / gpu.seconds(backward, setting),
        "forward_mib": _peak_mib(forward, setting),
        "backward_mib": _peak_mib(backward, setting),
    }


def _peak_mib(run: Callable[[], Any], setting: Setting) -> float | None:
    peak = gpu.peak_bytes(run, setting.device)
    return None if peak is None else peak / 2**20


# --- a ring on one device -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hop:
    """One kernel call of a rank: some of its queries, and keys as if received from their owner."""

    queries: slice
    slices: Tensor
    owner: int
    rows: tuple[tuple[int, int], ...]
    """Ranges of the owner's tokens that arrive, end to end."""
    k: Tensor
    v: Tensor


class RankWork:
    """One rank's part of a ring, without transfers."""

    def __init__(
        self, setting: Setting, kernel: AttentionKernel, schedule: Schedule, rank: int, inputs: Sequence[Tensor]
    ) -> None:
        """Initialize; ``inputs`` are q, k, v and the output's gradient of the full row."""
        layout = schedule.layout
        q, k, v, dout = inputs
        self.kernel, self.scores = kernel, setting.scores
        self.q, self.dout = (layout.split(x, rank, 1) for x in (q, dout))
        self.hops: list[Hop] = []
        for hop in schedule.hops(rank):
            for work in hop.work:  # one entry, or an empty list if there is nothing to compute
                theirs = (layout.split(x, hop.owner, 1) for x in (k, v))
                arrived = (torch.cat([x[:, start:stop] for start, stop in hop.rows], 1) for x in theirs)
                rows = tuple((start, stop) for start, stop in hop.rows)
                self.hops.append(Hop(slice(*hop.queries), work.slices, hop.owner, rows, *arrived))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp for this rank's queries: every hop, merged as in the ring."""
        first, *rest = self.hops
        out, lse = self.kernel.forward(self.q, first.k, first.v, first.slices, scores=self.scores)
        for hop in rest:
            part = self.kernel.forward(self.q[:, hop.queries], hop.k, hop.v, hop.slices, scores=self.scores)
            merge_(out[:, hop.queries], lse[:, hop.queries], *part)
        return out.to(self.q.dtype), lse

    def backward(self, out: Tensor, lse: Tensor, owners: Sequence[tuple[Tensor, Tensor]] = ()) -> Tensor:
        """Return the gradient of this rank's queries, given ``forward``'s result.

        Gradients of keys and values are added to ``kv_ranks``, dk and dv of every rank; without it to a buffer, which
        takes as long.
        """
        dq = torch.zeros_like(self.q, dtype=accumulate_dtype(self.q.dtype))
        for hop in self.hops:
            mine = (self.dout[:, hop.queries], self.q[:, hop.queries], hop.k, hop.v)
            grads = self.kernel.backward(
                *mine, out[:, hop.queries], lse[:, hop.queries], hop.slices, scores=self.scores
            )
            dq[:, hop.queries] += grads.dq_BtHD
            for number, part in enumerate((grads.dk_BsKD, grads.dv_BsKV)):
                if not owners:
                    torch.zeros_like(part).add_(part)
                    continue
                widths = [stop - start for start, stop in hop.rows]
                for (start, stop), rows in zip(hop.rows, part.split(widths, 1), strict=True):
                    owners[hop.owner][number][:, start:stop] += rows
        return dq


LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")


def compare_rings(setting: Setting, kernel: AttentionKernel) -> Iterator[dict[str, Any]]:
    """Return a row per layout, degree and packing: the largest relative error against float64, and its tensor."""
    tokens = setting.ring_tokens
    inputs = setting.tensors(tokens)
    # Documents with one token, on several ranks, and in the middle of one rank.
    cases = {"one document": [0, tokens], "packed": [0, 1, 2 * tokens // 5, tokens // 2 + 1, tokens]}
    for documents, bounds in cases.items():
        slices = slice_table(AttentionSlice(a, b, a, b, 0) for a, b in pairwise(bounds))
        q, k, v, dout = (x.cpu().double() for x in inputs)
        exact = _attention(ReferenceKernel(), q, k, v, dout, slices, setting.scores)
        for degree in setting.degrees:
            for kind in LAYOUTS:
                layout = SequenceLayout.build(kind, tokens, degree, bounds)
                found = ring_results(setting, kernel, Schedule.build(layout, bounds), inputs)
                errors = {of: _relative(found[of].cpu(), want) for of, want in zip(_PARTS, exact, strict=True)}
                of = max(errors, key=lambda name: errors[name])
                row = {"kernel": kernel.name, "documents": documents, "layout": kind, "ranks": degree}
                yield row | {"worst": errors[of], "of": of}


def ring_results(
    setting: Setting, kernel: AttentionKernel, schedule: Schedule, inputs: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return output and gradients of the full row, assembled from all ranks' results."""
    layout = schedule.layout
    ranks = [RankWork(setting, kernel, schedule, rank, inputs) for rank in range(layout.degree)]
    results = [rank.forward() for rank in ranks]
    wide = accumulate_dtype(setting.dtype)
    owners = []
    for rank in range(layout.degree):
        shares = (layout.split(x, rank, 1) for x in inputs[1:3])
        owners.append(tuple(torch.zeros_like(x, dtype=wide) for x in shares))
    dq = [rank.backward(*result, owners) for rank, result in zip(ranks, results, strict=True)]
    parts = ([out for out, _ in results], dq, [dk for dk, _ in owners], [dv for _, dv in owners])
    return {name: layout.join(shares, 1) for name, shares in zip(_PARTS, parts, strict=True)}


def packed_documents(tokens: int, mean: int) -> list[int]:
    """Return boundaries of documents with very different lengths."""
    draw, bounds = random.Random(0), [0]
    while bounds[-1] < tokens:
        bounds.append(min(tokens, bounds[-1] + 1 + int(draw.expovariate(1 / mean))))
    return bounds


def measure_rings(setting: Setting, deadline: float) -> Iterator[dict[str, Any]]:
    """Measure each layout's efficiency at each degree, for one document and for a packed row."""
    name, kernel = next(iter(setting.kernels().items()))
    tokens = setting.ring_tokens
    cases = {"one document": [0, tokens], "packed": packed_documents(tokens, tokens // 16)}
    for documents, bounds in cases.items():
        slices = slice_table(AttentionSlice(a, b, a, b, 0) for a, b in pairwise(bounds))
        q, k, v, dout = setting.tensors(tokens)
        out, lse = kernel.forward(q, k, v, slices, scores=setting.scores)
        whole = [q, k, v, dout, out.to(q.dtype), lse]
        alone = [gpu.seconds(run, setting) for run in _whole_runs(setting, kernel, slices, whole)]
        for degree in setting.degrees:
            for layout in ("zigzag", "striped", "balanced"):
                if time.monotonic() > deadline:
                    print(f"out of time before {layout} over {degree} ranks, {documents}", file=sys.stderr)
                    return
                schedule = Schedule.build(SequenceLayout.build(layout, tokens, degree, bounds), bounds)
                found = ring_seconds(setting, kernel, schedule, whole[:4])
                row = {"kernel": name, "documents": documents, "layout": layout, "ranks": degree}
                yield row | {"calls": _most_hops(schedule)} | ratios(alone, found)


def _whole_runs(setting: Setting, kernel: AttentionKernel, slices: Tensor, whole: list[Tensor]):
    q, k, v, dout, out, lse = whole
    yield lambda: kernel.forward(q, k, v, slices, scores=setting.scores)[0].to(q.dtype)
    yield lambda: kernel.backward(dout, q, k, v, out, lse, slices, scores=setting.scores)


def _most_hops(schedule: Schedule) -> int:
    return max(sum(len(hop.work) for hop in schedule.hops(rank)) for rank in range(schedule.layout.degree))


def ring_seconds(
    setting: Setting, kernel: AttentionKernel, schedule: Schedule, inputs: list[Tensor]
) -> list[tuple[float, float]]:
    """Return (forward, backward) seconds for every rank."""
    found = []
    for rank in range(schedule.layout.degree):
        work = RankWork(setting, kernel, schedule, rank, inputs)
        runs = (work.forward, partial(work.backward, *work.forward()))
        found.append(tuple(gpu.seconds(run, setting) for run in runs))
    return found


def ratios(alone: Sequence[float], ranks: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return a ring's efficiencies, from its ranks' (forward, backward) seconds and those of one call."""
    found = {}
    for n, direction in enumerate(("forward", "backward")):
        times = [rank[n] for rank in ranks]
        found[f"{direction}_efficiency"] = alone[n] / sum(times)
        found[f"{direction}_slowest"] = alone[n] / (len(times) * max(times))
    both = [sum(rank) for rank in ranks]
    return found | {"efficiency": sum(alone) / sum(both), "slowest": sum(alone) / (len(both) * max(both))}


# --- errors and thresholds ----------------------------------------------------------------------------------


def measure_errors(setting: Setting) -> Iterator[dict[str, Any]]:
    """Measure each kernel's relative Frobenius errors against float64 on the same inputs."""
    tokens = setting.error_tokens
    slices = slice_table([AttentionSlice(0, tokens, 0, tokens, 0)])
    q, k, v, dout = setting.tensors(tokens)
    inputs = (q.double(), k.double(), v.double(), dout.double())
    exact = _attention(ReferenceKernel(), *inputs, slices, setting.scores)
    for name, kernel in setting.kernels().items():
        found = _attention(kernel, q, k, v, dout, slices, setting.scores)
        errors = {n: _relative(a, b) for n, a, b in zip(_PARTS, found, exact, strict=True)}
        yield {"kernel": name, "tokens": tokens, **errors}


def _attention(
    kernel: AttentionKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    slices: Tensor,
    scores: ScoreRules,
) -> list[Tensor]:
    """Return output and gradients."""
    out, lse = kernel.forward(q, k, v, slices, scores=scores)
    return [out, *kernel.backward(dout, q, k, v, out.to(q.dtype), lse, slices, scores=scores)[:3]]


def _relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def thresholds(setting: Setting, blocks: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Return the tokens a rank needs to hide a hop's transfer, at each kernel's rate on its largest KV block."""
    share = setting.num_kv_heads / setting.num_heads
    largest = {row["kernel"]: row for row in blocks if row["mask"] == "full"}  # rows come in ascending size
    for name, row in largest.items():
        for link, bandwidth in BANDWIDTHS.items():
            forward, backward = (share * row[f"{d}_tflops"] * 1e12 / bandwidth for d in ("forward", "backward"))
            yield {
                "kernel": name,
                "link": link,
                "forward": round(2 * forward),
                "backward_float32": round(12 / 5 * backward),
                "backward_bfloat16": round(8 / 5 * backward),
            }


# --- the report ---------------------------------------------------------------------------------------------


def run(setting: Setting, minutes: float) -> dict[str, Any]:
    """Measure all tables, print each as it is complete, and return them."""
    begun = time.monotonic()
    print(f"kernels: {', '.join(setting.kernels())}")
    blocks = list(measure_blocks(setting, begun + 60 * minutes * 0.6))
    heads = f"{setting.num_heads}/{setting.num_kv_heads} heads of {setting.head_dim}, {setting.dtype}"
    gpu.show(f"KV blocks ({heads}): TFLOP/s and MiB", blocks)
    rings = list(measure_rings(setting, begun + 60 * minutes))
    gpu.show(f"A ring's KV blocks compared with one call over {setting.ring_tokens} tokens (goal 0.97)", rings)
    errors = list(measure_errors(setting))
    gpu.show("Relative errors against float64", errors)
    hidden = list(thresholds(setting, blocks))
    gpu.show("Tokens a rank needs to hide a hop's transfer (bandwidths assumed)", hidden)
    return {
        "heads": heads,
        "blocks": blocks,
        "rings": rings,
        "errors": errors,
        "thresholds": hidden,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 without a device."""
    return gpu.main(
        "gpu_attention", __doc__, full=full_setting, tiny=tiny_setting, run=run, minutes=7.5, arguments=arguments
    )


if __name__ == "__main__":
    sys.exit(main())
