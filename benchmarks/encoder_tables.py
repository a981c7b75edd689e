"""Tables for encoders and for pairs of sequences, compared with transformers: steps, written texts, and accuracy."""

from __future__ import annotations

from typing import Any

from benchmarks.run_tables import Table

_CASES = {
    "marian": "Marian, 6 + 6 layers, 64 pairs",
    "bert": "BERT, 8 layers, 32 pages",
    "writing": "Marian, 64 texts written, 8 at a time",
}


def of_steps(result: dict[str, Any]) -> Table:
    """Return CPU seconds and memory per step, and CPU seconds for writing."""
    head = ["", "CPU s, transformers → ours", "ratio", "padding there", "activation MiB, theirs → ours", "ratio"]
    return head, [_step_row(row) for row in result["rows"]]


def _step_row(row: dict[str, Any]) -> list[str]:
    seconds = row["cpu_seconds"]
    ratio = seconds["longctx"] / seconds["transformers"]
    line = [_CASES[row["case"]], f"{seconds['transformers']:.2f} → {seconds['longctx']:.2f}", f"{ratio:.2f} ×"]
    if "activation_mib" not in row:
        return [*line, "–", "–", "–"]
    mib = row["activation_mib"]
    memory = f"{mib['transformers']:,} → {mib['longctx']:,}"
    return [*line, f"{100 * row['padding_share']:.0f} %", memory, f"{row['memory_ratio']:.2f} ×"]


def of_translation(result: dict[str, Any]) -> Table:
    """Return BLEU by seed for both after the same steps, for ours with beams, and CPU seconds of training."""
    head = ["seed", "BLEU, transformers", "BLEU, ours", "ours, 4 beams", "CPU s, transformers", "CPU s, ours"]
    lines = []
    for row in result["rows"]:
        theirs, ours = row["transformers"][-1], row["longctx"][-1]
        bleu = [f"{figure:.2f}" for figure in (theirs["bleu"], ours["bleu"], row["beams"])]
        lines.append([str(row["seed"]), *bleu, f"{theirs['cpu_seconds']:,.0f}", f"{ours['cpu_seconds']:,.0f}"])
    return head, lines


def of_pretraining(result: dict[str, Any]) -> Table:
    """Return the accuracy on masked tokens and on pairs, on held-out rows, by seed."""
    head = ["", "seed", "masked tokens right", "pairs right", "by common words", "CPU s"]
    names = {"nsp": "BERT, next sentence", "sop": "ALBERT, sentence order", "masks": "masks of ten epochs"}
    lines = []
    for row in result["rows"]:
        for who in [name for name in row if name not in ("case", "seed", "date")]:
            last = row[who][-1]
            pairs = [f"{100 * last[key]:.1f} %" if key in last else "–" for key in ("pair_accuracy", "word_overlap")]
            name, masked = f"{names[row['case']]}, {who}", f"{100 * last['masked_accuracy']:.1f} %"
            lines.append([name, str(row["seed"]), masked, *pairs, f"{last['cpu_seconds']:,.0f}"])
    return head, lines
