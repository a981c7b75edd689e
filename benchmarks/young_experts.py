"""Balance and learning of the default mixture of experts on five corpora, and the effect of each part of the recipe.

    python -m benchmarks.young_experts [--only python perl …] [--quick]

The quickstart as a newcomer starts it, over two ranks, with a tokenizer per corpus: 150 of its 175 steps. Then its
first 64 steps with one part of the recipe removed, on two corpora. Corpora are Python's standard library and four
Debian folders; a missing one is reported and left out.

max/mean is the busiest expert's load over the mean, in the least even layer of a step: 1 is even, 4 the worst case with
two experts of eight. Saved in ``benchmarks/results/KIND/young_experts.json``; exit code 1 if its mean from step 40 on
is above 1.5, or a held-out loss at step 150 is not below the entropy of the token frequencies.
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
"""Sources for ``data build``: code, prose and change logs, headers, other code, tables in many scripts."""
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
"""Flags that remove one part of the recipe."""
VARIED = ("c", "perl")
STEPS, VARIED_STEPS, SETTLED = 150, 64, 40
RANKS = 2
WORST = 1.5


def build(folder: Path, corpus: str) -> Path:
    """Train a corpus's tokenizer, and write its shards."""
    tokenizer, shards = folder / f"{corpus}.model", folder / corpus
    source = ("--source", *CORPORA[corpus])
    run(["longctx", "tokenizer", "train", *source, "--vocab-size", 4096, "--output", tokenizer])
    run(["longctx", "data", "build", *source, "--tokenizer", tokenizer, "--output", shards])
    return shards


def measure(shards: Path, variant: str, steps: int) -> dict[str, Any]:
    """Train this many steps; return the expert loads, and the held-out loss minus the frequencies' entropy."""
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
    """Measure all cases, and print a line after each."""
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
    """Return the bounds on the unchanged quickstart."""
    whole = [row for row in found if row["variant"] == "the quickstart"]
    even = [Bound("mean max/mean from step 40", row["mean"], WORST, row["corpus"]) for row in whole]
    return even + [Bound("nats over the token frequencies", row["over_frequencies"], 0, row["corpus"]) for row in whole]


def main() -> int:
    """Print and save the results; return 1 if one is outside its bound."""
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
