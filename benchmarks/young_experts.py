"""Whether the default mixture of experts stays even and learns, on five corpora, and what it owes to each part.

    python -m benchmarks.young_experts [--only python perl …] [--quick]

The quickstart as a newcomer starts it, over two ranks, with a tokenizer of each corpus's own: 150 steps of its 175. The
first 64 steps then with one part of the recipe taken away, on two corpora. Corpora are Python's standard library and
four folders of Debian; one that is not here is left out and said.

max/mean is the load of the busiest expert over the mean, of the least even layer of a step: 1 is even, 4 the worst
there is with two experts of eight. Saved in ``benchmarks/results/KIND/young_experts.json``; exit code 1 when its mean
from step 40 on is above 1.5, or a held-out loss at step 150 is not below the entropy of the token frequencies.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.tuning import run

LIBRARY = ("--exclude", "test", "*/test", "*/tests", "idlelib", "encodings", "pydoc_data")
CORPORA: dict[str, tuple[str, ...]] = {
    "python": ("stdlib", *LIBRARY),
    "docs": ("/usr/share/doc",),
    "c": ("/usr/include",),
    "perl": ("/usr/share/perl",),
    "locales": ("/usr/share/i18n/locales",),
}
"""Sources of ``data build``: code, prose and change logs, headers, code of another kind, tables of many scripts."""
TIED = ("--model.tie_embeddings", "true", "--model.embedding_std", "0")
ADAMW = ("--train.optimizer", "adamw", "--train.lr", "5e-3")
FEWER = ("--train.tokens_per_step", "2048")
STEADY = ("--model.router_jitter", "0")
VARIANTS: dict[str, tuple[str, ...]] = {
    "the quickstart": (),
    "AdamW": ADAMW,
    "tied embeddings of 0.02": TIED,
    "no jitter": STEADY,
    "a row of 2,048 tokens a step": FEWER,
    "none of the four": (*ADAMW, *TIED, *STEADY, *FEWER),
}
"""What is taken away, as flags."""
VARIED = ("c", "perl")
STEPS, VARIED_STEPS, SETTLED = 150, 64, 40
RANKS = 2
WORST = 1.5


def build(folder: Path, corpus: str) -> Path:
    """Train a tokenizer of a corpus, and write its shards."""
    tokenizer, shards = folder / f"{corpus}.model", folder / corpus
    source = ("--source", *CORPORA[corpus])
    run(["longctx", "tokenizer", "train", *source, "--vocab-size", 4096, "--output", tokenizer])
    run(["longctx", "data", "build", *source, "--tokenizer", tokenizer, "--output", shards])
    return shards


def measure(shards: Path, variant: str, steps: int) -> dict[str, Any]:
    """Train so many steps, and return the loads of experts and the held-out loss less the frequencies' entropy."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--data.train", shards, "--run.output_dir", folder, "--train.stop_after", steps]
        words += ["--validation.every_steps", steps, "--checkpoint.every_steps", 0, *VARIANTS[variant]]
        run(["longctx", "train", "--ranks", RANKS, *words])
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    uneven = {
        record["step"]: max(max(loads) * len(loads) / sum(loads) for loads in record["expert_load"])
        for record in records
        if record["kind"] == "train"
    }
    settled = [value for step, value in uneven.items() if step >= min(SETTLED, steps)]
    last = [record for record in records if record["kind"] == "validation"][-1]
    return {
        "steps": steps,
        "mean": round(fmean(settled), 3),
        "worst": round(max(settled), 3),
        "uneven": {str(step): round(value, 3) for step, value in uneven.items()},
        "loss": round(last["loss"], 4),
        "over_frequencies": round(last["loss"] - last["unigram_entropy"], 4),
    }


def rows(corpora: list[str], *, quick: bool) -> list[dict[str, Any]]:
    """Measure all cases; a line is printed behind each."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for corpus in corpora:
            shards = build(Path(folder), corpus)
            for variant in VARIANTS:
                if variant != "the quickstart" and corpus not in VARIED:
                    continue
                steps = STEPS if variant == "the quickstart" else VARIED_STEPS
                row = measure(shards, variant, 3 if quick else steps)
                found.append({"corpus": corpus, "variant": variant} | row)
                print(
                    f"{corpus}, {variant}: max/mean {row['mean']:.2f}, at worst {row['worst']:.2f}; "
                    f"{row['over_frequencies']:+.3f} nats beside the frequencies at step {row['steps']}",
                    flush=True,
                )
    return found


def bounds(found: list[dict[str, Any]]) -> list[Bound]:
    """What the quickstart as it is must hold."""
    whole = [row for row in found if row["variant"] == "the quickstart"]
    even = [Bound("mean max/mean from step 40", row["mean"], WORST, row["corpus"]) for row in whole]
    return even + [Bound("nats over the token frequencies", row["over_frequencies"], 0, row["corpus"]) for row in whole]


def main() -> int:
    """Print the figures, save them, and fail when one is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CORPORA), default=list(CORPORA), help="corpora")
    options = parse(parser, "three steps of each, which hold no bound")
    here = [name for name in options.only if not CORPORA[name][0].startswith("/") or Path(CORPORA[name][0]).is_dir()]
    for name in options.only:
        if name not in here:
            print(f"{name}: there is no {CORPORA[name][0]} here; it is left out.")
    found = rows(here, quick=options.quick)
    held = [] if options.quick else bounds(found)
    return conclude("young_experts", {"rows": found}, held, options, whole=here == list(CORPORA))


if __name__ == "__main__":
    sys.exit(main())
