"""An expert layer, forward and backward, compared with transformers, DeepSpeed, and dense matmuls with the same FLOPs.

    python -m benchmarks.moe [--quick] [--only layer ranks] [--case "16 experts top-2, 4096 tokens, fp32, Zipf" …]

* layer: one process, one thread, width 512; 16 experts of 1024 with top-2, and 64 of 256 with top-8. Every token's
  experts follow from its direction, equally in every library: uniform loads, or Zipf's law. Results of the first
  tokens, including gradients, are compared. transformers runs ``grouped_mm``. DeepSpeed's ``MoE`` drops no token and
  pads every expert to the most loaded one, so it runs only with uniform loads (4096 tokens). Dense is six matmuls of an
  FFN as wide as a token's experts together. Memory, from fresh processes, is the peak above weights and gradients.
* ranks: the same tokens on 2 and 4 ranks × 1 thread, experts across ranks: a rank's CPU seconds over its part of
  one process's (the mean over ranks, and the worst), and bytes sent over the minimum: a token's row once to each other
  rank that has one of its experts, and once back, both again in backward. ``naive`` is one row per expert choice over
  the same.

CPU seconds are the minimum over rounds in which all take turns in the same processes. ``--save`` writes
``benchmarks/results/KIND/moe.json``; exit code 1 if a row is outside its bounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bounds import Bound, conclude, of_kind, parse
from benchmarks.moe_layers import (
    COARSE,
    DEEPSPEED,
    DTYPES,
    FINE,
    LAYERS,
    OURS,
    PRELOAD,
    THEIRS,
    TOLERANCE,
    Case,
    Layer,
    dense_products,
    longctx_layer,
    step,
)
from benchmarks.ranks import alternate, run_ranks, with_resident_rise
from longctx.kernels.processor import fastest_matmul_mode
from parallel.experts.dispatcher import AllToAllDispatcher
from parallel.mesh import Mesh

TIME_BOUND, MEMORY_BOUND = 0.85, 0.70
"""Limits over transformers' CPU seconds and memory."""
SLOW_BFLOAT16 = 0.45
"""Limit over transformers' CPU seconds in bf16 on processors without bfloat16 instructions."""
BYTES_BOUND = 1.05
"""Limit over the minimum bytes: ids and gates are sent too."""
FAST_BFLOAT16 = 1.10
"""Limit over transformers' CPU seconds in bf16 with 16 experts and few tokens, on processors that multiply bfloat16. On
an EPYC with AVX512-BF16 0.87 to 1.04 was measured in six processes, with the code of 2026-11-26 and with today's.
"""
LONG_BFLOAT16 = of_kind(plain=SLOW_BFLOAT16, bf16=0.90, amx=TIME_BOUND)
"""Limit over transformers' CPU seconds in all other bf16 cases: 0.65 to 0.89 on that EPYC."""
FEW_TOKENS = of_kind(plain=TIME_BOUND, bf16=0.90, amx=0.90)
"""Limit over transformers' CPU seconds in fp32 with 16 experts and few tokens. On one Sapphire Rapids 0.83 to 0.88 was
measured in five processes with Zipf's loads: the matmuls alone are four fifths of our time there, and their time varies
by 7 % with the weights' memory addresses. On an EPYC with AVX512-BF16 it was 0.85 to 0.87, of which the matmuls are
nine tenths.
"""
RATE_BOUND = 0.80
"""Minimum fraction of the dense matmuls' rate, with 16 experts."""
FEW_TOKENS_RATE = of_kind(plain=RATE_BOUND, bf16=RATE_BOUND, amx=0.75)
"""The same in fp32 with few tokens: 0.78 to 0.84 in those five processes."""
FAST_BFLOAT16_RATE = 0.33
"""Minimum fraction of the dense matmuls' rate in bf16, on processors with bfloat16 instructions."""
COMPARED_TOKENS = 1024
SHORT, LONG = 4096, 16_384


@dataclass(frozen=True)
class Options:
    """How much to measure."""

    cases: tuple[Case, ...]
    spread: tuple[Case, ...]
    """Cases whose experts are spread over ranks."""
    degrees: tuple[int, ...]

    def restricted(self, names: Sequence[str]) -> Options:
        """Return the options with only the named cases."""
        cases = tuple(case for case in self.cases if str(case) in names)
        spread = tuple(case for case in self.spread if str(case) in names)
        return Options(cases, spread, self.degrees)


FULL = Options(
    tuple(Case(*of) for of in product((COARSE, FINE), (SHORT, LONG), DTYPES, (False, True))),
    tuple(Case(shape, SHORT, "fp32", skewed) for shape in (COARSE, FINE) for skewed in (False, True))
    + tuple(Case(shape, SHORT, "bf16", False) for shape in (COARSE, FINE)),
    (2, 4),
)
QUICK = Options(
    tuple(Case(shape, SHORT, "fp32", False) for shape in (COARSE, FINE)),
    (Case(FINE, SHORT, "fp32", False),),
    (2,),
)


# --- one process --------------------------------------------------------------------------------------------


def libraries(case: Case) -> tuple[str, ...]:
    """Return the libraries with which a case is run."""
    return (OURS, THEIRS, DEEPSPEED) if case.tokens == SHORT and not case.skewed else (OURS, THEIRS)


def fresh_step(layer: Layer, x: torch.Tensor, dout: torch.Tensor) -> None:
    """Run a step without earlier gradients."""
    layer.module.zero_grad(set_to_none=True)
    step(layer, x, dout)


def time_layers(case: Case, rounds: int) -> dict[str, Any]:
    """Measure CPU seconds of every library's step and of the dense matmuls, by turns, and the difference between
    results.

    All get the same number of rounds, because the minimum over more would be lower. Ours and the dense matmuls, which
    are closest to their bound, take some more turns between the two of them: ``beside_dense``.
    """
    layers = {name: LAYERS[name](case) for name in libraries(case)}
    apart = compare(case, layers)
    x, dout = case.inputs()
    actions: dict[str, Callable[[], Any]] = {n: partial(fresh_step, layer, x, dout) for n, layer in layers.items()}
    actions["dense"] = dense_products(case)
    pair = (OURS, "dense")
    for name in pair:
        actions[name]()  # the first use of anything is not counted: of code by ``compare``, of memory by these
    seconds = dict(zip(actions, alternate(list(actions.values()), rounds), strict=True))
    again = dict(zip(pair, alternate([actions[name] for name in pair], 1), strict=True))
    return {
        "cpu_seconds": {name: round(s, 3) for name, s in seconds.items()},
        "beside_dense": {name: round(min(again[name], seconds[name]), 3) for name in pair},
        "apart": apart,
    }


def rounds_of(case: Case) -> int:
    """Return fewer rounds if a step is so long that noise averages out within it."""
    emulated = case.dtype == "bf16" and fastest_matmul_mode() == "float32"
    if emulated:
        return 2 if case.tokens == LONG else 4
    return 5 if case.tokens == LONG else 8


def compare(case: Case, layers: dict[str, Layer]) -> dict[str, float]:
    """Return the largest relative difference between our output and gradients and each other library's on the first
    tokens.

    AssertionError unless every library's tokens visit the intended experts.
    """
    x, dout = (of[:COMPARED_TOKENS] for of in case.inputs())
    meant_E = case.chosen()[:COMPARED_TOKENS].flatten().bincount(minlength=case.shape.num_experts)
    results: dict[str, list[torch.Tensor]] = {}
    for name, layer in layers.items():
        with torch.no_grad():
            assert torch.equal(layer.counts(x).long(), meant_E), f"{case}: {name} chooses other experts"
        layer.module.zero_grad(set_to_none=True)
        results[name] = [*step(layer, x, dout), *layer.gradients().values()]
    ours = results.pop(OURS)
    return {name: max(map(_relative, of, ours)) for name, of in results.items()}


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(f"{float((a.double() - b.double()).norm() / b.double().norm()):.2g}")


def layer_memory(case: Case, name: str) -> float:
    """Return a process's peak memory in its first step, in MiB over weights and gradients."""
    layer = LAYERS[name](case)
    x, dout = case.inputs()
    # the first use of code takes memory too: in bfloat16 oneDNN keeps up to a megabyte per row count
    step(layer, x, dout)
    for parameter in layer.module.parameters():
        parameter.grad = torch.zeros_like(parameter).contiguous()
        parameter.grad.fill_(1)  # zeros may be pages that do not exist yet
    return with_resident_rise(lambda: step(layer, x, dout))[1]


def layer(options: Options) -> tuple[list[dict], list[Bound]]:
    """Measure one row per case; return them with their bounds."""
    print(
        f"{'':40}CPU s: {'ours':>7}{'theirs':>8}{'× theirs':>10}{'of dense':>10}  MiB: {'ours':>6}{'theirs':>8}{'×':>7}"
    )
    rows, bounds = [], []
    for case in options.cases:
        [timed] = run_ranks(time_layers, 1, case, rounds_of(case), preload=PRELOAD)
        with ThreadPoolExecutor(2) as pool:  # memory is unaffected by concurrent processes
            measured = pool.map(lambda name, c=case: run_ranks(layer_memory, 1, c, name)[0], libraries(case))
            mib = dict(zip(libraries(case), measured, strict=True))
        row = layer_row(case, timed, mib)
        rows.append(row)
        print_layer_row(case, row)
        bounds += layer_bounds(case, row)
    return rows, bounds


def layer_row(case: Case, timed: dict[str, Any], mib: dict[str, float]) -> dict[str, Any]:
    """Return a case's results and ratios."""
    seconds, beside = timed["cpu_seconds"], timed["beside_dense"]
    return {
        "case": str(case),
        "cpu_seconds": seconds,
        "time_ratio": round(seconds[OURS] / seconds[THEIRS], 3),
        "beside_dense": beside,
        "share_of_dense_rate": round(beside["dense"] / beside[OURS], 3),
        "gflops": round(case.flops / seconds[OURS] / 1e9, 1),
        "peak_mib": {name: round(of) for name, of in mib.items()},
        "memory_ratio": round(mib[OURS] / mib[THEIRS], 3),
        "apart": timed["apart"],
    }


def print_layer_row(case: Case, row: dict[str, Any]) -> None:
    """Print one row for the console."""
    seconds, mib = row["cpu_seconds"], row["peak_mib"]
    print(
        f"{case!s:47}{seconds[OURS]:7.2f}{seconds[THEIRS]:8.2f}{row['time_ratio']:10.3f}"
        f"{row['share_of_dense_rate']:10.3f}{mib[OURS]:13}{mib[THEIRS]:8}{row['memory_ratio']:7.3f}",
        flush=True,
    )
    if DEEPSPEED in seconds:
        ratio = seconds[OURS] / seconds[DEEPSPEED]
        print(f"{'':20}DeepSpeed {seconds[DEEPSPEED]:.2f} CPU s, ours {ratio:.3f} × it; {mib[DEEPSPEED]} MiB")


def layer_bounds(case: Case, row: dict[str, Any]) -> Iterator[Bound]:
    """Return a row's bounds."""
    name = str(case)
    again = ("--only", "layer", "--case", name)
    limit, why = time_bound(case)
    yield Bound(f"{case.dtype} CPU seconds over transformers'", row["time_ratio"], limit, name, why, again=again)
    if case.shape == COARSE:
        least, why = rate_bound(case)
        rate = row["share_of_dense_rate"]
        yield Bound("rate over that of dense products", rate, least, name, why, at_least=True, again=again)
    why = "transformers' own peak differs by a fifth between processes"
    yield Bound("memory over transformers'", row["memory_ratio"], MEMORY_BOUND, name, why, again=again)
    for library, apart in row["apart"].items():
        yield Bound(f"{case.dtype} difference from {library}'s results", apart, TOLERANCE[case.dtype], name)


def time_bound(case: Case) -> tuple[float, str]:
    """Return the limit on our time over transformers', and the reason."""
    if case.dtype == "fp32":
        limit = FEW_TOKENS if case.shape == COARSE and case.tokens == SHORT else TIME_BOUND
        return limit, "rows stay in the cache from the first product to the last"
    if case.shape == COARSE and case.tokens == SHORT:
        # so few tokens stay in the cache in any library
        why = "the same products take two thirds of both times; without bfloat16 instructions transformers' are slow"
        return of_kind(plain=SLOW_BFLOAT16, bf16=FAST_BFLOAT16), why
    why = "the same, and without bfloat16 instructions transformers' bfloat16 products are slow"
    return LONG_BFLOAT16, why


def rate_bound(case: Case) -> tuple[float, str]:
    """Return the minimum rate over that of dense matmuls, and the reason."""
    why = "everything beside the products is a fifth of the time"
    if case.dtype == "fp32":
        return FEW_TOKENS_RATE if case.tokens == SHORT else RATE_BOUND, why
    # eight times the dense matmuls' weights to read and gradients to write, for as many FLOPs
    why += "; with bfloat16 instructions it is the memory of all experts' weights and gradients that takes the time"
    return of_kind(plain=RATE_BOUND, bf16=FAST_BFLOAT16_RATE), why


# --- experts across ranks -----------------------------------------------------------------------------------


class Sent:
    """Bytes that this process sends to others by ``all_to_all_single`` while it is entered."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> Sent:
        self._single = dist.all_to_all_single
        dist.all_to_all_single = self._counted
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single = self._single

    def _counted(
        self, output: Any, given: Any, out_sizes: Any = None, sizes: Any = None, group: Any = None, **options: Any
    ) -> Any:
        ranks, own = dist.get_world_size(group), dist.get_rank(group)
        parts = sizes or [len(given) // ranks] * ranks
        others = sum(parts) - parts[own]
        self.bytes += others * given[:1].numel() * given.element_size() if len(given) else 0
        return self._single(output, given, out_sizes, sizes, group, **options)


def share_of_step(case: Case, degree: int, rounds: int) -> dict[str, Any]:
    """Measure a rank's CPU seconds for the full step and for its part, by turns; bytes sent; and the difference between
    results.
    """
    rank, dispatcher = dist.get_rank(), AllToAllDispatcher(Mesh.build(expert=degree), case.shape.num_experts)
    alone, shared = longctx_layer(case), longctx_layer(case, dispatcher)
    whole = case.inputs()
    mine = tuple(of.chunk(degree)[rank].contiguous() for of in whole)
    fresh_step(alone, *(of[:64] for of in whole))  # the first use of anything is not counted
    fresh_step(shared, *(of[:64] for of in mine))
    with Sent() as sent:
        fresh_step(shared, *mine)
    once = sent.bytes
    seconds = alternate([partial(fresh_step, alone, *whole), partial(fresh_step, shared, *mine)], rounds)
    names = ("gate_up", "down")
    pairs = [(shared.gradients()[name], alone.gradients()[name][dispatcher.local_experts]) for name in names]
    with torch.no_grad():
        pairs.append((shared.forward(mine[0]), alone.forward(whole[0]).chunk(degree)[rank]))
    return {"seconds": seconds, "bytes": once, "apart": max(_relative(a, b) for a, b in pairs)}


def least_bytes(case: Case, degree: int) -> tuple[int, int]:
    """Return the minimum bytes sent in a step, and the bytes with one row per expert choice.

    Four rows for each token and each other rank that has one of its experts: token and sum, and both gradients.
    """
    owner_Nk = case.chosen() // (case.shape.num_experts // degree)
    home_N1 = torch.arange(case.tokens).unsqueeze(1) // (case.tokens // degree)
    is_away = owner_Nk != home_N1
    visits_NE = torch.zeros(case.tokens, degree, dtype=torch.bool).scatter_(1, owner_Nk, True)
    visits = int(visits_NE.sum() - visits_NE.gather(1, home_N1).sum())
    row = 4 * case.shape.hidden_size * DTYPES[case.dtype].itemsize
    return row * visits, row * int(is_away.sum())


def ranks(options: Options) -> tuple[list[dict], list[Bound]]:
    """Measure one row per case and degree; return them with their bounds."""
    print(
        f"\n{'':47}{'ranks':>6}{'CPU s, whole':>14}{'× share':>9}{'worst':>7}{'MB sent':>9}{'× least':>9}{'naive':>8}"
    )
    rows, bounds = [], []
    for case in options.spread:
        for degree in options.degrees:
            found = run_ranks(share_of_step, degree, case, degree, 2, preload=PRELOAD)
            row = ranks_row(case, degree, found)
            rows.append(row)
            print(
                f"{case!s:47}{degree:6}{row['one_process_cpu_seconds'][0]:14.2f}{row['ratio_to_share']:9.3f}"
                f"{row['ratio_to_share_worst']:7.3f}{row['bytes_sent'] / 1e6:9.1f}{row['bytes_over_least']:9.3f}"
                f"{row['row_a_choice_over_least']:8.2f}",
                flush=True,
            )
            bounds += ranks_bounds(case, row)
    return rows, bounds


def ranks_row(case: Case, degree: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each rank's time over its part of its own time for the full step: the mean, and the worst rank's.

    With uneven expert loads the worst rank has more work than an equal part; the mean gives the cost of spreading
    experts.
    """
    ratios = [of["seconds"][1] / (of["seconds"][0] / degree) for of in found]
    sent, (least, a_choice) = sum(of["bytes"] for of in found), least_bytes(case, degree)
    owner = case.chosen().flatten() // (case.shape.num_experts // degree)
    load = owner.bincount(minlength=degree).max().item() / (len(owner) / degree)
    return {
        "case": str(case),
        "ranks": degree,
        "cpu_seconds_per_rank": [round(of["seconds"][1], 3) for of in found],
        "one_process_cpu_seconds": [round(of["seconds"][0], 3) for of in found],
        "ratio_to_share": round(sum(ratios) / degree, 3),
        "ratio_to_share_worst": round(max(ratios), 3),
        "load_worst": round(load, 3),
        "bytes_sent": sent,
        "bytes_over_least": round(sent / least, 3),
        "row_a_choice_over_least": round(a_choice / least, 3),
        "apart": max(of["apart"] for of in found),
    }


def ranks_bounds(case: Case, row: dict[str, Any]) -> Iterator[Bound]:
    """Return a row's bounds."""
    name = f"{case}, {row['ranks']} ranks"
    yield Bound("bytes sent over the least", row["bytes_over_least"], BYTES_BOUND, name)
    yield Bound(f"{case.dtype} difference from one process's results", row["apart"], TOLERANCE[case.dtype], name)


TABLES: dict[str, Callable[[Options], tuple[list[dict], list[Bound]]]] = {"layer": layer, "ranks": ranks}


def main() -> int:
    """Print and save the tables; return 1 if a row is outside its bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES), help="tables to measure")
    names = [str(case) for case in FULL.cases]
    parser.add_argument("--case", nargs="+", choices=names, default=names, metavar="NAME", help="rows to measure")
    options = parse(parser, quick="two cases, in fp32")
    content: dict[str, Any] = {}
    bounds: list[Bound] = []
    asked = (QUICK if options.quick else FULL).restricted(options.case)
    for name in options.only:
        content[name], stated = TABLES[name](asked)
        bounds += stated
    whole = set(options.only) == set(TABLES) and asked == FULL
    return conclude("moe", content, bounds, options, whole=whole)


if __name__ == "__main__":
    sys.exit(main())
