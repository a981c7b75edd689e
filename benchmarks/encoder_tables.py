"""Tables for encoders, pairs of sequences and images, compared with transformers: steps, written texts, accuracy."""

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


_IMAGES = {
    "vit": "ViT, Fashion-MNIST",
    "swin": "Swin, Fashion-MNIST",
    "digits": "ViT, digits of 8 × 8",
    "igpt": "Image GPT, Fashion-MNIST",
}


def of_images(result: dict[str, Any]) -> Table:
    """Return test accuracy or bits per pixel by seed, CPU seconds per step, and results that only ours have."""
    head = ["", "seed", "steps", "transformers", "ours", "CPU ms a step, theirs → ours", "ratio", "further, ours"]
    lines = []
    for row in result["rows"]:
        results = [_image_result(row[who]) for who in ("transformers", "longctx")]
        times = " → ".join(f"{1000 * row['cpu_seconds'][who]:,.0f}" for who in ("transformers", "longctx"))
        line = [_IMAGES[row["case"]], str(row["seed"]), f"{row['steps']:,}", *results, times]
        lines.append([*line, f"{row['time_ratio']:.2f} ×", _further(row)])
    return head, lines


def _image_result(found: dict[str, float]) -> str:
    if "bits" in found:
        return f"{found['bits']:.3f} bits"
    return f"{100 * found['accuracy']:.1f} %"


def _further(row: dict[str, Any]) -> str:
    if "accuracy_at_56" in row:
        return f"{100 * row['accuracy_at_56']:.1f} % at 56 × 56"
    if "probe" not in row:
        return "–"
    probe, tuned = row["probe"], row["tuned"]
    return (
        f"{100 * probe['accuracy']:.1f} % by a probe on layer {probe['layer']}, {100 * tuned['accuracy']:.1f} % and "
        f"{tuned['bits']:.3f} bits with both losses"
    )
