"""The gated delta rule compared with transformers, and over two ranks: CPU seconds, wall time, bytes.

    python -m benchmarks.gated_delta [--quick]

* layer: convolution, gates and rule, forward and backward, one thread: ours over transformers' (Qwen3-Next's chunked
  rule, and Kimi Linear's for decays by channel), in CPU seconds; both in float32, with 4 key heads of 128.
* ranks: one document over two ranks with one thread each, in a contiguous layout, with 16 key heads (Qwen3.5's number).
  Wall time is compared with two concurrent processes, each with half the tokens as its own document, the best of
  rounds (cores that share resources make one process's time a poor reference; its time over twice theirs is printed
  too). The bytes that a rank sends per pass are compared with those computed from the sizes. The second rank waits for
  the first head's state, so with h heads at most h / (h + 1) is possible.

Exit code 1 if a row is outside its bounds; ``benchmarks/results/KIND/gated_delta.json`` keeps the results.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.ranks import run_ranks
from longctx.batch import PackedDocuments
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.gated_delta.front import GatedDeltaWeights, ProjectedTokens
from longctx.kernels.gated_delta.gated_delta_call import GatedDeltaOptions
from longctx.kernels.gated_delta.gated_delta_rule import gated_delta
from longctx.kernels.linear_attention import StateSegments
from longctx.model.attention.core import AttentionShapes
from parallel.attention.context_parallel_gated_delta import ContextParallelGatedDelta
from parallel.attention.state_plans import StatesOfBatch
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule.states import StatePlan

KEY_HEADS, DIM, CONV, ROUNDS = 4, 128, 4, 3
LAYERS = {"gated_delta": (2048, 8192), "kda": (2048,)}
"""Tokens. transformers' Kimi Linear computes decays for all pairs in a token chunk, channel by channel."""
RANK_TOKENS, RANK_HEADS = 8192, 16
TIME_BOUND, SCALING_BOUND = 0.6, 0.9


def problem(kind: str, tokens: int, K: int = KEY_HEADS) -> tuple[ProjectedTokens, GatedDeltaWeights, Tensor]:
    """Return inputs as leaves, and the output's gradient."""
    D = DIM
    G, X = (1, D) if kind == "kda" else (2, 1)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    given = ProjectedTokens(
        normal(1, tokens, K, D), normal(1, tokens, K, D), normal(1, tokens, K, G, D), normal(1, tokens, K, G, X),
        normal(1, tokens, K, G),
    )  # fmt: skip
    return (
        given,
        GatedDeltaWeights(normal(K, (2 + G) * D, CONV), normal(K, G), normal(K, G, X)),
        normal(1, tokens, K * G, D),
    )


def theirs(kind: str, given: ProjectedTokens, weights: GatedDeltaWeights) -> Tensor:
    """Return transformers' functions, as its layer calls them."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

    K, D = KEY_HEADS, DIM
    parts = weights.conv_KCR.split((D, D, weights.conv_KCR.shape[1] - 2 * D), 1)
    flat = [given.q_BtKD.flatten(2), given.k_BtKD.flatten(2), given.v_BtKGV.flatten(2)]
    conv = torch.cat([part.flatten(0, 1) for part in parts])
    x = _plain(causal_conv1d_fn)(torch.cat(flat, -1).transpose(1, 2), conv, None, activation="silu").transpose(1, 2)
    q, k, v = (part.unflatten(-1, (-1, D)) for part in x.split((K * D, K * D, x.shape[-1] - 2 * K * D), -1))
    g = -weights.log_rate_KG.exp().unsqueeze(-1) * functional.softplus(given.a_BtKGX + weights.rate_bias_KGX)
    beta = given.b_BtKG.flatten(2).sigmoid()
    if kind == "kda":
        rule, g = chunk_kimi_delta_attention, g.flatten(2, 3)
    else:
        rule, g = torch_chunk_gated_delta_rule, g.flatten(2)
    return _plain(rule)(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def _plain(function: Any) -> Any:
    """Return the undecorated function, because a decorator may fetch a kernel for it."""
    return getattr(function, "__wrapped__", function)


def seconds(run: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor, clock: Callable[[], float]) -> float:
    """Time forward and backward."""
    start = clock()
    torch.autograd.grad(run(), leaves, dout)
    return clock() - start


def measure_layer(kind: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Measure CPU seconds of both, the minimum over rounds in which they take turns."""
    given, weights, dout = problem(kind, tokens)
    leaves = [*given, *weights]
    options = GatedDeltaOptions(segments=StateSegments(PackedDocuments.of([0, tokens])))
    ways = {
        "longctx": lambda: gated_delta(given, weights, options)[0],
        "transformers": lambda: theirs(kind, given, weights),
    }
    torch.testing.assert_close(ways["longctx"](), ways["transformers"](), rtol=1e-3, atol=1e-4)
    found = {name: [seconds(run, leaves, dout, time.process_time) for _ in range(rounds)] for name, run in ways.items()}
    best = {name: min(values) for name, values in found.items()}
    row = {"case": "layer", "kind": kind, "tokens": tokens, **best, "ratio": best["longctx"] / best["transformers"]}
    print(row, flush=True)
    return row


def on_rank(tokens: int, context: int, rounds: int) -> dict[str, Any]:
    """Return wall seconds of a rank's layer, and the bytes that it sends in forward and backward."""
    mesh = Mesh.build(context=context)
    given, weights, dout = problem("gated_delta", tokens, RANK_HEADS)
    layout = SequenceLayout.build("contiguous", tokens, mesh.context)
    values = torch.cat((given.v_BtKGV.flatten(3), given.a_BtKGX.flatten(3), given.b_BtKG), -1)
    q, k, v = (
        layout.split(x.detach(), mesh.context_rank, 1).requires_grad_() for x in (given.q_BtKD, given.k_BtKD, values)
    )
    mine = layout.split(dout.detach(), mesh.context_rank, 1).unflatten(2, (RANK_HEADS, -1)).flatten(3)
    shapes = AttentionShapes.of(q, k, v, ScoreRules(scale=1.0))
    plan = StatesOfBatch.build(StatePlan.build(layout), mesh, shapes, layer_kind="gated delta rule")
    core = ContextParallelGatedDelta(mesh, "contiguous")
    gather, sent = dist.all_gather_into_tensor, []

    def counting(out: Tensor, x: Tensor, *group: Any, **options: Any) -> Any:
        sent.append(x.numel() * x.element_size())
        return gather(out, x, *group, **options)

    found = []
    for _ in range(rounds):
        dist.barrier()
        sent.clear()
        with mock.patch.object(dist, "all_gather_into_tensor", counting):
            found.append(seconds(lambda: core(q, k, v, plan=plan, weights=weights), [q, k, v], mine, time.perf_counter))
        dist.barrier()
    return {"seconds": min(found), "bytes": sum(sent)}


def measure_ranks(tokens: int, rounds: int) -> dict[str, Any]:
    """Compare two ranks with two processes that have half the tokens each, and with one that has all of them."""
    alone = run_ranks(on_rank, 1, tokens, 1, rounds)[0]["seconds"]
    apart = max(process["seconds"] for process in run_ranks(on_rank, 2, tokens // 2, 1, rounds))
    ranks = run_ranks(on_rank, 2, tokens, 2, rounds)
    slowest = max(rank["seconds"] for rank in ranks)
    # One pair (U, M) per value head and the last tokens, forward and backward.
    states = 2 * RANK_HEADS * DIM * (DIM + DIM)
    wanted = 2 * 4 * (states + (CONV - 1) * RANK_HEADS * 4 * DIM)
    row = {"case": "ranks", "tokens": tokens, "alone": alone, "apart": apart, "two": slowest}
    row |= {"of_one": alone / (2 * slowest), "scaling": apart / slowest}
    row |= {"bytes": ranks[0]["bytes"], "bytes_computed": wanted}
    print(row, flush=True)
    return row


def main() -> int:
    """Print and save the rows; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse(parser, quick="512 tokens, once")
    torch.set_num_threads(1)
    rows, bounds = [], []
    for kind, lengths in LAYERS.items():
        for tokens in [512] if options.quick else lengths:
            row = measure_layer(kind, tokens, 1 if options.quick else ROUNDS)
            rows.append(row)
            bounds.append(
                Bound("CPU seconds over transformers'", row["ratio"], TIME_BOUND, f"{kind}, {tokens:,} tokens")
            )
    row = measure_ranks(512 if options.quick else RANK_TOKENS, 1 if options.quick else ROUNDS)
    rows.append(row)
    bounds.append(Bound("share of perfect scaling", row["scaling"], SCALING_BOUND, "two ranks", at_least=True))
    bounds.append(Bound("bytes sent over those computed", row["bytes"] / row["bytes_computed"], 1.0, "two ranks"))
    return conclude("gated_delta", {"rows": rows}, bounds, options)


if __name__ == "__main__":
    sys.exit(main())
