"""Both parts' steps as values: command, time limit, concurrency, and expected results with their sources.

Expected results are for an H100 SXM unless a card is named; this project measured none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A result's expected value."""

    figure: float
    source: str
    at_most: bool = False
    """True if less is better."""
    cards: Mapping[str, float] = field(default_factory=dict)
    """Values for other cards, by a substring of their name."""

    def on(self, card: str) -> float:
        """Return the value for this card."""
        return next((figure for name, figure in self.cards.items() if name in card), self.figure)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One process of the programme."""

    name: str
    module: str
    """Module in this folder."""
    which: tuple[str, ...] = ()
    """The module's arguments."""
    seconds: float
    """Time limit."""
    least: float = 0.0
    """Seconds that must remain for it to begin; 0 is half of its limit."""
    cores: int = 1
    alone: bool = False
    """True if no other step may run at the same time, and no later step before it."""
    after: tuple[str, ...] = ()
    """Steps that must have ended, with any verdict."""
    shows: str = ""
    """The check whose result is in the step's line."""
    expected: Mapping[str, Expected] = field(default_factory=dict)
    """Expected results by check name."""


_SEEN = "reported by other programs on such cards"
_FORWARD = "FlashAttention-3's paper, arXiv 2407.08608, figure 5: causal, heads of 128, H100 SXM"
_BACKWARD = "assumed, the middle of what users report: FlashAttention-2 270 to 310, cuDNN 420 to 480, 3 470 to 550"
_FLEX = "assumed: 0.85 to 0.9 of FlashAttention-2's; its backward recomputes a forward"
_SLICE = (
    "arithmetic: weights at 650 TFLOP/s with recomputation 2.7 us a token and layer, elementwise 0.6, attention by the "
    "rates of the step attention"
)
_MFU = f"{_SLICE}; as a share of 989 TFLOP/s"

_RATES = {
    "matmul": Expected(figure=770, source=f"TFLOP/s, {_SEEN}: 770 to 800"),
    "copy": Expected(figure=3.0, source=f"TB/s read and written, {_SEEN}", cards={"H200": 4.3}),
    "host link": Expected(figure=25, source="GB/s a direction, both at once: half of 64 GB/s, assumed"),
}


def _attention() -> dict[str, Expected]:
    """Return each kernel's expected rates, by length and direction."""
    found = {}
    fa2 = (333, 335, 290, (_FORWARD, _BACKWARD))
    rows = {
        "cuda_flash": fa2,
        "flash2": fa2,
        "sdpa": fa2,  # PyTorch's call of the same kernel
        "cudnn": (529, 539, 450, (_FORWARD, _BACKWARD)),
        "flash3": (602, 616, 510, (_FORWARD, _BACKWARD)),
        "flex": (340, 340, 250, (_FLEX, _FLEX)),
    }
    for kernel, (short, long, backward, sources) in rows.items():
        for length, forward in (("8K", short), ("32K", long), ("128K", long)):
            for direction, rate, source in zip(("forward", "backward"), (forward, backward), sources, strict=True):
                found[f"{kernel} {length} {direction}"] = Expected(figure=rate, source=f"TFLOP/s; {source}")
    return found


def _slices(rows: Mapping[str, tuple[float, float]]) -> dict[str, Expected]:
    """Return the expected tokens per second (thousands) and MFU (%) of some training runs."""
    found = {}
    for run, (thousands, mfu) in rows.items():
        found[f"{run}, tokens/s"] = Expected(figure=1000 * thousands, source=_SLICE)
        found[f"{run}, MFU"] = Expected(figure=mfu, source=_MFU)
    return found


PART_1: tuple[Step, ...] = (
    Step(name="machine", module="machine", seconds=30, cores=16, alone=True, shows="matmul", expected=_RATES),
    # Correctness steps run in parallel: most of their time is process startup and comparison on the CPU.
    Step(name="contact", module="contact", seconds=75, cores=3),
    Step(name="data", module="data", which=("corpus", "rows"), seconds=60),
    Step(name="tests", module="gpu_tests", which=("other",), seconds=75, cores=3, shows="passed"),
    Step(name="parity", module="parity", seconds=75, cores=2),
    Step(name="verify", module="verify", seconds=75, cores=3),
    Step(name="flex", module="gpu_tests", which=("flex",), seconds=110, cores=2, shows="passed"),
    Step(name="trace", module="trace", seconds=60),
    Step(name="demo", module="demo", seconds=80, cores=3, after=("data",)),
    # Ranks on the same GPU take turns on it: they wait least while no other step computes there.
    Step(name="ring", module="ring", seconds=110, cores=6, after=("contact", "tests", "parity", "verify")),
    Step(
        name="attention", module="attention", seconds=60, cores=16, alone=True, shows="cudnn 32K forward",
        expected=_attention(),
    ),
    Step(
        name="slices", module="slices", which=("lengths",), seconds=100, cores=16, alone=True,
        shows="32K auto, tokens/s",
        expected=_slices({"32K auto": (79, 34), "128K auto": (33, 30), "32K cudnn": (94, 40), "128K cudnn": (44, 41)}),
    ),
    Step(
        name="compiled", module="slices", which=("compiled",), seconds=60, cores=16, alone=True,
        shows="32K compiled, tokens/s",
        expected=_slices({"32K compiled": (83, 36)})
        | {"32K compiled, first step": Expected(figure=90, source="assumed: 30 to 90 s", at_most=True)},
    ),
)  # fmt: skip
PART_2: tuple[Step, ...] = (
    Step(name="machine2", module="machine", seconds=25, cores=16, alone=True, shows="matmul", expected=_RATES),
    Step(name="rows", module="data", which=("rows",), seconds=20, cores=16, alone=True),
    Step(
        name="store", module="slices", which=("store",), seconds=75, cores=16, alone=True,
        shows="128K host / device",
        expected={
            "128K host / device": Expected(
                figure=0.9,
                source="arithmetic: attention takes 12 us a token and layer, in which each link carries 4 KiB a token",
            ),
        },
    ),
    Step(
        name="loss", module="loss", seconds=30, cores=16, alone=True, shows="compiled",
        expected={
            "eager": Expected(
                figure=260, at_most=True,
                source="ms; arithmetic: 1.03e14 FLOP at 650 TFLOP/s are 160 ms, elementwise passes 60 to 100",
            ),
            "compiled": Expected(
                figure=200, at_most=True, source="ms; arithmetic: the same with 20 to 40 for fused elementwise passes"
            ),
        },
    ),
    Step(
        name="experts", module="experts", seconds=50, cores=16, alone=True, shows="Mixtral-8x7B share",
        expected={
            "Mixtral-8x7B share": Expected(figure=0.85, source="goal of benchmarks/gpu_moe.py"),
            "Qwen3-30B-A3B share": Expected(figure=0.6, source="assumed: 1,024 rows an expert, 0.55 to 0.65"),
        },
    ),
    Step(
        name="profile", module="slices", which=("profile",), seconds=40, cores=16, alone=True, shows="busy",
        expected={
            "busy": Expected(figure=95, source="%; of a step at 32K, assumed: no host wait stands in it"),
            "host waits": Expected(figure=5, source="of a step, assumed: where a number is logged", at_most=True),
        },
    ),
    Step(
        name="rings", module="rings", seconds=40, cores=16, alone=True, shows="least efficiency",
        expected={"least efficiency": Expected(figure=0.97, source="goal of benchmarks/gpu_attention.py")},
    ),
    Step(
        name="long", module="slices", which=("long",), seconds=130, least=105, cores=16, alone=True,
        shows="1M, tokens/s",
        expected={"1M, tokens/s": Expected(figure=15_000, source=f"{_SLICE}; cuDNN, one layer")},
    ),
)  # fmt: skip
PARTS: dict[str, tuple[Step, ...]] = {"1": PART_1, "2": PART_2}
PART_SECONDS = {"1": 410.0, "2": 250.0}
"""Time limits per part; with some seconds for the archive they become 420 and 260."""


def named(names: Sequence[str]) -> list[Step]:
    """Return steps of any part by name; KeyError for an unknown name."""
    known = {step.name: step for part in PARTS.values() for step in part}
    return [known[name] for name in names]
