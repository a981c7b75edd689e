"""Hybrids compared with full attention: recall after the same steps, and loss by position in rows of 8K and 16K tokens.

    python -m benchmarks.hybrids [--only recall positions] [--seeds 0 1] [--quick]

The model is that of ``make demo-recall``, once unchanged, and once with three gated delta layers per full one.

* recall: the demo's three training runs, the same documents and steps, over two ranks; then the needles of
  ``niah_word`` at 512 and 1,024 tokens, 22 of each.
* positions: Python's standard library in rows of 8,192 and of 16,384 tokens, the same steps for both models; then the
  loss of held-out texts of that length by token position.

Saved in ``benchmarks/results/KIND/hybrids.json``, which keeps rows of other cases and seeds; exit code 1 if the hybrid
finds less than 0.99 of the needles, or its loss over a full length exceeds that of full attention by more than 0.02.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.machine import RESULTS, processor_kind
from benchmarks.tuning import run
from launcher.cluster.launch_commands import torchrun

CASES = ("recall", "positions")
HYBRID = ("gated_delta", "gated_delta", "gated_delta", "full")
MODELS: dict[str, tuple[str, ...]] = {
    "full": (),
    "hybrid": ("--model.layers", *HYBRID, "--model.attention_gate", "true"),
}
# As in launcher/demos/recall.sh: text, and settings in addition to the recipe's.
STAGES = {
    "short": (("12000", "--words", "0", "30", "--mentions", "2", "5", "--seed", "0"), {}),
    "middle": (
        ("4000", "--words", "10", "380", "--mentions", "1", "5", "--seed", "1"),
        {"train.steps": 400, "train.lr": 2e-3},
    ),
    "long": (
        ("2800", "--words", "300", "830", "--mentions", "1", "3", "--seed", "2"),
        {"train.steps": 800, "train.lr": 2e-3, "train.final_lr_ratio": 0.05},
    ),
}
RANKS = 2
NEEDLE_LENGTHS, SAMPLES = (512, 1024), 22
LENGTHS = {8192: 240, 16_384: 120}
"""Steps with one row each, by row length."""
RECALL_BOUND, LOSS_BOUND = 0.99, 0.02
_CORPUS = ("--source", "stdlib", "--exclude", "test", "*/test", "*/tests", "idlelib", "encodings", "pydoc_data")


def longctx(*words: object) -> None:
    """Run a command of ``longctx``."""
    run(["longctx", *words])


def pretrain(folder: Path, model: str, output: Path, settings: dict[str, Any]) -> None:
    """Train over two ranks with the demo's recipe and these settings."""
    words = ["--config", "recall", "--run.output_dir", output, "--parallel.context", RANKS, "--run.hostfile", "none"]
    words += [word for key, value in settings.items() for word in (f"--{key}", value)]
    run(torchrun(*words, *MODELS[model], ranks=RANKS).split())


def practice(folder: Path, *, quick: bool) -> None:
    """Write the documents of the three training runs and the haystack, train the tokenizer, and build the shards."""
    for stage, ((count, *options), _) in STAGES.items():
        fewer = int(count) // 20 if quick else count
        output = folder / f"{stage}.jsonl"
        words = ["--documents", fewer, *options, "--pairs", 1, 1, "--questions", 1, 1]
        longctx("data", "practice", "--output", output, *words)
    haystack = ("--documents", 60, "--words", 500, 500, "--pairs", 0, 0, "--seed", 3)
    longctx("data", "practice", "--output", folder / "haystack.jsonl", *haystack)
    tokenizer = folder / "tokenizer.model"
    longctx("tokenizer", "train", "--source", folder / "short.jsonl", "--vocab-size", 1152, "--output", tokenizer)
    for stage in STAGES:
        source = folder / f"{stage}.jsonl"
        longctx("data", "build", "--source", source, "--tokenizer", tokenizer, "--output", folder / stage)


def measure_recall(folder: Path, model: str, seed: int, *, quick: bool) -> dict[str, Any]:
    """Train a model as the demo does, and search for needles; return the mean score by length."""
    origin: dict[str, Any] = {}
    output = folder
    for stage, (_, settings) in STAGES.items():
        output = folder / f"{model}-{seed}-{stage}"
        steps = {"train.steps": 3, "train.warmup_steps": 1} if quick else {}
        given = {"data.train": folder / stage, "run.seed": seed, **settings, **steps, **origin}
        pretrain(folder, model, output, given)
        origin = {"run.start_from": output}
    found = output / "needles"
    words = ["--tasks", "niah_word", "--lengths", ",".join(map(str, NEEDLE_LENGTHS)), "--samples", SAMPLES]
    words += ["--haystack", folder / "haystack.jsonl", "--output", found]
    longctx("evaluate", "--checkpoint", output, *words)
    scores = json.loads((found / "summary.json").read_text())["scores"]
    row = {"case": "recall", "model": model, "seed": seed}
    return row | {"scores": {str(cell["length"]): cell["mean"] for cell in scores}}


def measure_positions(folder: Path, model: str, length: int, *, quick: bool) -> dict[str, Any]:
    """Train a model on rows of one length; return the loss of held-out texts, in total and by position."""
    shards = folder / "library"
    if not shards.exists():
        tokenizer = folder / "library.model"
        longctx("tokenizer", "train", *_CORPUS, "--vocab-size", 4096, "--output", tokenizer)
        words = ("--validation-fraction", 0.25, "--tokenizer", tokenizer, "--output", shards)
        longctx("data", "build", *_CORPUS, *words)
    output = folder / f"{model}-{length}"
    settings: dict[str, Any] = {
        "data.train": shards,
        "data.seq_len": length,
        "model.max_positions": length,
        "model.rope.theta": 100_000,
        "model.vocab_size": 4096,
        "train.tokens_per_step": length,
        "train.micro_batch_rows": 1,
        "train.steps": 2 if quick else LENGTHS[length],
        "train.warmup_steps": 1 if quick else 20,
        "validation.every_steps": 0,
        "validation.rows": 0,
    }
    pretrain(folder, model, output, settings)
    found = output / "losses"
    longctx("evaluate", "--checkpoint", output, "--tasks", "ppl", "--lengths", length, "--output", found)
    summary = json.loads((found / "summary.json").read_text())
    with (found / "loss_by_position.csv").open() as file:
        bins = [{name: float(bin_[name]) for name in ("start", "stop", "loss")} for bin_ in csv.DictReader(file)]
    [whole] = summary["losses"]
    return {"case": "positions", "model": model, "length": length, "loss": whole["loss"], "bins": bins}


def name_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify a row."""
    return tuple(row.get(key) for key in ("case", "model", "seed", "length"))


def bounds(rows: Sequence[dict[str, Any]]) -> list[Bound]:
    """Return the bounds on the results."""
    found = []
    losses = {(row["model"], row["length"]): row["loss"] for row in rows if row["case"] == "positions"}
    for row in rows:
        if row["model"] != "hybrid":
            continue
        if row["case"] == "recall":
            case = f"hybrid, seed {row['seed']}"
            found.append(Bound("needles found", min(row["scores"].values()), RECALL_BOUND, case, at_least=True))
        elif ("full", row["length"]) in losses:
            above = row["loss"] - losses["full", row["length"]]
            found.append(Bound("loss above full attention's", above, LOSS_BOUND, f"{row['length']:,} tokens"))
    return found


def main() -> int:
    """Print and save what the models learned; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="these cases alone")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of recall")
    options = parse(parser, quick="a few steps of the first length")
    path, rows = RESULTS / processor_kind() / "hybrids.json", []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "recall" in options.only:
            practice(folder, quick=options.quick)
            for seed in options.seeds[:1] if options.quick else options.seeds:
                for model in MODELS:
                    rows.append(measure_recall(folder, model, seed, quick=options.quick))
                    print(rows[-1], flush=True)
        if "positions" in options.only:
            for length in list(LENGTHS)[:1] if options.quick else LENGTHS:
                for model in MODELS:
                    rows.append(measure_positions(folder, model, length, quick=options.quick))
                    print(rows[-1], flush=True)
    if path.exists() and not options.quick:
        new = {name_of(row) for row in rows}
        rows = [row for row in json.loads(path.read_text())["rows"] if name_of(row) not in new] + rows
    return conclude("hybrids", {"rows": rows}, bounds(rows), options)


if __name__ == "__main__":
    sys.exit(main())
