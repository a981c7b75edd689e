"""The chunked loss compared with whole logits: CPU seconds, memory, error of forward and backward.

    python -m benchmarks.loss [--quick]

One process, one thread: hidden states and the head's weight in bfloat16, including both gradients. Whole logits are
computed in float32, and in bfloat16 if the processor has instructions for it, and converted to float32 for
``cross_entropy``; autograd computes gradients. CPU seconds are the minimum over rounds in which the methods take turns
in one process; memory, from fresh processes, is the peak above the inputs; errors are relative (Frobenius), against
float64 on the first tokens. ``--save`` writes ``benchmarks/results/KIND/loss.json``; exit code 1 if our results are
outside their bounds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.ranks import alternate, run_ranks, with_resident_rise
from longctx.kernels.cross_entropy import loss_sums
from longctx.kernels.processor import fastest_matmul_mode

MEMORY_BOUND = 500
"""Megabytes (10^6 bytes) above the inputs, for 16,384 tokens."""
TIME_BOUND = 0.9
"""CPU seconds over those of the faster method with whole logits."""
LOSS_BOUND = 2e-6
"""Relative error of the loss."""
EXACT_TOKENS = 1024
"""Tokens whose loss and gradients are computed in float64 too."""
RESULTS = ("loss", "dhidden", "dweight")


@dataclass(frozen=True)
class Problem:
    """Sizes of the head, and the number of tokens with a target."""

    tokens: int = 16_384
    vocab_size: int = 32_768
    width: int = 512

    def inputs(self, tokens: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states [N, M], weight [V, M] and targets [N], the same in every process; logits have deviation
        1.
        """
        g = torch.Generator().manual_seed(0)
        weight_VM = torch.randn(self.vocab_size, self.width, generator=g).mul_(self.width**-0.5).bfloat16()
        hidden_NM = torch.randn(self.tokens, self.width, generator=g).bfloat16()
        targets_N = torch.randint(self.vocab_size, (self.tokens,), generator=g)
        return hidden_NM[:tokens], weight_VM, targets_N[:tokens]


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole_loss(hidden_NM: Tensor, weight_VM: Tensor, targets_N: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the summed loss from all logits at once, computed in ``dtype``."""
    logits_NV = hidden_NM.to(dtype) @ weight_VM.to(dtype).T
    return cross_entropy(logits_NV if dtype == torch.float64 else logits_NV.float(), targets_N, reduction="sum")


OURS = "longctx, chunked"
WAYS: dict[str, Loss] = {
    OURS: lambda *inputs: loss_sums(*inputs, matmul_mode=fastest_matmul_mode())[0],
    "whole logits, float32 products": partial(whole_loss, dtype=torch.float32),
}
if fastest_matmul_mode() == "native":  # on other processors, these three times as long as the rest
    WAYS["whole logits, bfloat16 products"] = partial(whole_loss, dtype=torch.bfloat16)


def solve(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Return the loss and its gradients for hidden states and weight."""
    hidden, weight = (x.detach().requires_grad_() for x in inputs[:2])
    value = loss(hidden, weight, inputs[2])
    value.backward()
    return [value.detach(), hidden.grad, weight.grad]  # type: ignore[list-item]


def time_rounds(asked: Problem, rounds: int) -> list[float]:
    """Measure CPU seconds of each method, in one process, by turns."""
    inputs = asked.inputs()
    for loss in WAYS.values():
        solve(loss, asked.inputs(64))  # the first use of anything is not counted
    return alternate([partial(solve, loss, inputs) for loss in WAYS.values()], rounds)


def resident_rise(asked: Problem, name: str) -> float:
    """Return the peak memory, in megabytes, of a method's first use in a process."""
    inputs = asked.inputs()
    return with_resident_rise(lambda: solve(WAYS[name], inputs))[1] * (1 << 20) / 1e6


def errors(asked: Problem) -> list[list[float]]:
    """Return each method's relative errors for the loss and both gradients."""
    inputs = asked.inputs(EXACT_TOKENS)
    wanted = solve(partial(whole_loss, dtype=torch.float64), tuple(x.double() for x in inputs[:2]) + inputs[2:])  # type: ignore[arg-type]
    return [
        [float((a.double() - b).norm() / b.norm()) for a, b in zip(solve(loss, inputs), wanted, strict=True)]
        for loss in WAYS.values()
    ]


def measure(asked: Problem, rounds: int) -> list[dict[str, Any]]:
    """Measure a row per method."""
    [seconds] = run_ranks(time_rounds, 1, asked, rounds)
    [exactness] = run_ranks(errors, 1, asked)
    fastest = min(seconds[1:])
    rows = []
    for name, cpu, found in zip(WAYS, seconds, exactness, strict=True):
        rows.append(
            {
                "way": name,
                "cpu_seconds": round(cpu, 2),
                "ratio_to_fastest_whole": round(cpu / fastest, 3),
                "resident_rise_mb": round(run_ranks(resident_rise, 1, asked, name)[0]),
                "relative_error": {n: float(f"{e:.2g}") for n, e in zip(RESULTS, found, strict=True)},
            }
        )
    return rows


def print_table(asked: Problem, rows: list[dict[str, Any]]) -> None:
    """Print the rows for the console."""
    print(f"\n{asked}\n{'':33}{'CPU s':>8}{'ratio':>8}{'MB':>7}   relative error of loss, dhidden, dweight")
    for row in rows:
        exact = "  ".join(f"{e:.1e}" for e in row["relative_error"].values())
        seconds, ratio, rise = row["cpu_seconds"], row["ratio_to_fastest_whole"], row["resident_rise_mb"]
        print(f"{row['way']:33}{seconds:8.2f}{ratio:8.3f}{rise:7}   {exact}")


def bounds(asked: Problem, rows: list[dict[str, Any]]) -> list[Bound]:
    """Return the bounds on our row."""
    ours = next(row for row in rows if row["way"] == OURS)
    limit, why = loss_error_bound(asked)
    return [
        Bound("CPU seconds over those of whole logits", ours["ratio_to_fastest_whole"], TIME_BOUND, again=()),
        Bound("megabytes above the inputs", ours["resident_rise_mb"], MEMORY_BOUND),
        Bound("relative error of the loss", ours["relative_error"]["loss"], limit, why=why),
    ]


def loss_error_bound(asked: Problem) -> tuple[float, str]:
    """Return the limit on the loss's error, and the reason."""
    if fastest_matmul_mode() == "float32":
        return LOSS_BOUND, "logits are exact: bfloat16 inputs are multiplied in float32"
    # A token's loss is at least log V, and its error that of its own logit, which is about 1.
    rounding = 2**-8 / 3**0.5
    why = "logits are rounded to bfloat16, each on its own: three deviations of the mean of so many roundings"
    return 3 * rounding / (EXACT_TOKENS**0.5 * math.log(asked.vocab_size)), why


def main() -> int:
    """Print and save the table; return 1 if our row misses a bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse(parser, quick="a quarter of the tokens")
    asked = Problem(tokens=4096) if options.quick else Problem()
    rows = measure(asked, rounds=2)
    print_table(asked, rows)
    return conclude("loss", {"problem": vars(asked), "rows": rows}, bounds(asked, rows), options)


if __name__ == "__main__":
    sys.exit(main())
