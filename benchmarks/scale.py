"""Cost of the host's work on one rank of 64, 512 and 4,096, and its growth compared with the necessary growth.

    python -m benchmarks.scale [--ranks 64 512 4096] [--tokens 1048576]

A step of a million tokens, in one process without a network: a training run's own layouts, schedules, transports,
manifests and plans, for one rank in the middle. A stand-in for the wire counts messages; groups are torch's fake
process group. Seconds are CPU seconds. ``growth`` is the exponent of the rank count between its first and last value;
it is compared with the exponent that the task itself needs.
"""

from __future__ import annotations

import argparse

from benchmarks.machine import offer_save, save
from benchmarks.scaling import attention, files, groups
from benchmarks.scaling.figures import Figure, Figures, as_json

MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3")
RANKS = (64, 512, 4096)
TOKENS = 2**20


def measure(
    ranks: tuple[int, ...] = RANKS, num_tokens: int = TOKENS, *, documents: int = files.DOCUMENTS, steps: int = 1000
) -> list[Figure]:
    """Return every result at each of these rank counts."""
    figures = Figures()
    # Once at a small size: first calls load code, which is not a rank's cost.
    attention.measure(Figures(), 16, 2**12, MODELS)
    for number in ranks:
        attention.measure(figures, number, num_tokens, MODELS)
        groups.measure(figures, number)
        for model in MODELS:
            if model != "llama-3.1-8b":
                groups.measure_experts(figures, number, num_tokens, model)
            files.measure_checkpoint(figures, number, model)
            files.measure_metrics(figures, number, model, steps=steps)
        files.measure_data(figures, number)
        files.measure_plan(figures, number, documents=documents)
    return figures.all


def main() -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    offer_save(parser)
    wanted = parser.parse_args()
    found = measure(tuple(wanted.ranks), wanted.tokens)
    for figure in found:
        values = " ".join(f"{value:12.4g}{figure.unit}" for value in figure.values.values())
        mark = ""
        if figure.is_too_fast:
            mark = f"  FASTER THAN {figure.needed}: {figure.why}"
        print(f"{figure.part:36} {figure.case:62} {values}  ^{figure.growth}{mark}")
    if wanted.save:
        path = save("scale", {"tokens": wanted.tokens, "figures": [as_json(figure) for figure in found]})
        print(f"saved in {path}")


if __name__ == "__main__":
    main()
