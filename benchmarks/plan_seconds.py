"""Seconds of a step by ``plan --device measured`` beside those of real runs, for ten runs on one, two and four ranks.

    python -m benchmarks.plan_seconds [--cpu-time] [--quick] [--only NAME …]

For each number of ranks the machine is measured by that many processes (``longctx measure --ranks N``) right before
its runs. A run is ``pretrain``'s own loop on as many gloo ranks with a thread each: after two steps the median of
five. The plan knows the config, the lengths of documents and that profile; nothing was fitted to these runs, and three
of them (``held out``) were first planned when it stood. A step of the slowest rank may be 15 % off the plan.

Time is what passes. ``--cpu-time`` counts CPU seconds of the busiest rank instead, as often as ranks share a core, in
profile and runs alike: for a machine on which other programs run. Saved in
``benchmarks/results/KIND/plan_seconds.json``; exit code 1 when a figure is outside its bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.ranks import run_ranks
from launcher.config.load import load_run_config
from launcher.config.sections import RunConfig
from launcher.plan.estimate import RunEstimate, estimate_run
from launcher.plan.hardware import Hardware
from launcher.plan.world import World

BOUND = 0.15
WARM_UP_STEPS, STEPS = 2, 5
_VOCABULARY = 512
_TOKENS_OF_DATA = 1 << 18
_COMMON = {
    "run.hostfile": "none",
    "run.device": "cpu",
    "model.preset": "none",
    "data.verify": "off",
    "train.steps": 100_000,
    "train.lr": 1e-4,
    "parallel.layout": "auto",
    "checkpoint.every_steps": 0,
    "validation.rows": 0,
}


@dataclass(frozen=True)
class Case:
    """A run."""

    name: str
    ranks: int
    width: int
    row_tokens: int
    document_tokens: int
    settings: dict[str, Any]
    """Keys of the config beside those that follow from the fields above."""
    layers: int = 4
    vocabulary: int = 8192
    experts: bool = False
    rows: int = 1
    """Of a step."""
    held_out: bool = False
    """Whether it was first planned when the arithmetic stood."""

    @property
    def keys(self) -> dict[str, Any]:
        """All keys of its config but for folders."""
        heads = self.width // 64
        model = {
            "hidden_size": self.width,
            "num_layers": self.layers,
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": 64,
            "ffn_size": self.width * 11 // 4,
            "vocab_size": self.vocabulary,
        }
        if self.experts:
            model |= {"num_experts": 8, "experts_per_token": 2, "expert_ffn_size": self.width, "shared_ffn_size": 0}
        keys = {f"model.{name}": value for name, value in model.items()}
        keys |= {"data.seq_len": self.row_tokens, "train.tokens_per_step": self.rows * self.row_tokens}
        return _COMMON | {"parallel.context": 1} | keys | self.settings


def _of(dtype: str, stage: int, keep: str = "all", **more: Any) -> dict[str, Any]:
    settings = {"train.dtype": dtype, "zero.stage": stage, "train.keep": keep}
    return settings | {name.replace("__", "."): value for name, value in more.items()}


CASES = (
    Case("width 256, float32, short rows", 1, 256, 2048, 2048, _of("float32", 0), rows=2),
    Case("width 512, bfloat16, one document", 1, 512, 4096, 4096, _of("bfloat16", 1, "attention"), layers=2),
    Case("width 768, float32, packed", 1, 768, 2048, 256, _of("float32", 2, "inputs"), layers=2, held_out=True),
    Case(
        "width 256, bfloat16, chunks, 32K packed",
        1,
        256,
        32768,
        1024,
        _of("bfloat16", 1, "attention", train__chunk_tokens=4096),
        layers=2,
        vocabulary=2048,
    ),
    Case("experts, width 512, bfloat16, packed", 1, 512, 2048, 512, _of("bfloat16", 2), experts=True, rows=2),
    Case(
        "experts, width 256, bfloat16, ring of 2",
        2,
        256,
        8192,
        8192,
        _of("bfloat16", 1, parallel__context=2),
        layers=2,
        experts=True,
    ),
    Case(
        "width 512, float32, ulysses 2",
        2,
        512,
        4096,
        4096,
        _of("float32", 2, parallel__context=2, parallel__ulysses=2),
        layers=3,
    ),
    Case(
        "experts on 2 ranks, width 384, float32",
        2,
        384,
        2048,
        2048,
        _of("float32", 1, "attention", parallel__expert=2),
        experts=True,
        rows=2,
        held_out=True,
    ),
    Case(
        "width 384, bfloat16, ring of 4, packed",
        4,
        384,
        16384,
        2048,
        _of("bfloat16", 3, "attention", parallel__context=4),
        layers=3,
        held_out=True,
    ),
    Case(
        "width 256, float32, ring 2 × ulysses 2",
        4,
        256,
        8192,
        8192,
        _of("float32", 3, "inputs", parallel__context=4, parallel__ulysses=2),
        layers=3,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Seconds of the steps of a rank."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def write_shards(folder: Path, length: int) -> Path:
    """A shard folder of documents of one length, of random tokens."""
    from data_pipeline.prepare.sources import open_source
    from data_pipeline.prepare.train_tokenizer import train_tokenizer
    from data_pipeline.shards.writer import EncodedDocument, ShardWriter
    from longctx.tokenizer import load_tokenizer

    model = folder / "tokenizer.model"
    if not model.exists():
        corpus = folder / "corpus"
        corpus.mkdir()
        files = [p for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if 2000 < p.stat().st_size < 9000]
        for path in files[:30]:
            shutil.copyfile(path, corpus / path.name)
        train_tokenizer(open_source(corpus), model, vocab_size=_VOCABULARY)
    output, tokenizer = folder / f"documents_{length}", load_tokenizer(model)
    if output.exists():
        return output
    output.mkdir()
    writer, random = ShardWriter(output, vocab_size=tokenizer.vocab_size), np.random.default_rng(length)
    for number in range(_TOKENS_OF_DATA // length):
        tokens = random.integers(3, _VOCABULARY - 8, length).astype(np.uint16)
        writer.add(EncodedDocument(tokens=tokens, hash=number, name=f"{number}", text_bytes=length))
    tokenizer.save(output)
    writer.finish(split="training", tokenizer=tokenizer, sources=[], options={}, skipped={})
    return output


def config_of(case: Case, data: str = "", output: str = "") -> RunConfig:
    """Its config."""
    keys = case.keys | {"data.train": data or "nothing", "run.output_dir": output or "nowhere"}
    return load_run_config([word for key, value in keys.items() for word in (f"--{key}", str(value))])


def take_steps(case: Case, data: str, output: str, steps: int) -> Steps:
    """Steps of the run on this rank, after a few that prepare it."""
    import torch

    from launcher.training.setup import build_run
    from launcher.training.trainer import Trainer
    from longctx.kernels.processor import has_native_bfloat16

    config = config_of(case, data, output).resolve(native_bfloat16=has_native_bfloat16())
    run = build_run(config, torch.device("cpu"))
    trainer, found = Trainer(run), Steps()
    for _ in range(WARM_UP_STEPS):
        trainer.take_step()
    for _ in range(steps):
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.take_step()
        found.wall.append(time.perf_counter() - wall)
        found.cpu.append(time.process_time() - cpu)
    run.feed.close()
    return found


def planned(case: Case, hardware: Hardware) -> RunEstimate:
    """The plan's estimate."""
    world = World(ranks=case.ranks, ranks_per_node=case.ranks)
    return estimate_run(config_of(case), world, hardware, document_tokens=case.document_tokens)


def measured_seconds(of_ranks: Sequence[Steps], *, cpu_time: bool) -> float:
    """A step of the slowest rank, the median of several."""
    if not cpu_time:
        return max(statistics.median(steps.wall) for steps in of_ranks)
    share = max(1.0, len(of_ranks) / len(os.sched_getaffinity(0)))
    return share * max(statistics.median(steps.cpu) for steps in of_ranks)


def measure(cases: Sequence[Case], *, cpu_time: bool, steps: int) -> Iterator[dict[str, Any]]:
    """A row for each case; the profile first, for each number of ranks."""
    from launcher.measure.run import MeasureOptions, measure_machine

    with tempfile.TemporaryDirectory() as place:
        folder, hardware = Path(place), None
        for ranks in sorted({case.ranks for case in cases}):
            options = MeasureOptions(ranks=ranks, device="cpu", cpu_time=cpu_time)
            begun = time.perf_counter()
            text, hardware = measure_machine(options, folder, lambda _: None)
            (folder / f"profile_{ranks}.toml").write_text(text)
            print(f"{ranks} ranks measured in {time.perf_counter() - begun:.0f} s", flush=True)
            for number, case in enumerate(case for case in cases if case.ranks == ranks):
                data = write_shards(folder, case.document_tokens)
                output = folder / f"run_{ranks}_{number}"
                found = run_ranks(take_steps, ranks, case, str(data), str(output), steps)
                shutil.rmtree(output, ignore_errors=True)
                yield _row(case, planned(case, hardware), found, cpu_time=cpu_time)


def _row(case: Case, run: RunEstimate, found: Sequence[Steps], *, cpu_time: bool) -> dict[str, Any]:
    of_plan, of_run = run.seconds.total, measured_seconds(found, cpu_time=cpu_time)
    return {
        "name": case.name,
        "ranks": case.ranks,
        "held_out": case.held_out,
        "planned_seconds": of_plan,
        "measured_seconds": of_run,
        "error": of_plan / of_run - 1,
        "parts": dataclasses.asdict(run.seconds),
        "steps": [dataclasses.asdict(steps) for steps in found],
    }


def main() -> int:
    """Measure, run, compare, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds in place of time that passes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="runs whose names begin so; nothing is saved")
    options = parse(parser, "three steps of a run in place of five")
    cases = [case for case in CASES if options.only is None or case.name.startswith(tuple(options.only))]
    rows, bounds = [], []
    for row in measure(cases, cpu_time=options.cpu_time, steps=3 if options.quick else STEPS):
        rows.append(row)
        print(
            f"{row['name']:<44} planned {row['planned_seconds']:7.3f} s  measured {row['measured_seconds']:7.3f} s  "
            f"{row['error']:+.1%}",
            flush=True,
        )
        bounds.append(Bound("error of the plan", abs(row["error"]), BOUND, case=row["name"]))
    content = {"cpu_time": options.cpu_time, "rows": rows}
    return conclude("plan_seconds", content, bounds, options, whole=options.only is None)


if __name__ == "__main__":
    sys.exit(main())
