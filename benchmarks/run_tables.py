"""Tables for everything around training steps: start, corpus, saves, silent errors; and for tuning beside TRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.hybrids import name_of

Table = tuple[list[str], list[list[str]]]
"""Headings and rows."""
_FIRST = 256
"""Positions in a table's first bin."""
_ORIGINS = {"new": "new", "weights": "weights of a checkpoint", "resumed": "resumed, with moments"}


def of_starts(result: dict[str, Any]) -> Table:
    """Return a start's memory and time by stage, before and now."""
    before = {_start_case(row): row for row in result["before"]}
    lines = []
    for row in result["rows"]:
        old = before.get(_start_case(row), {})
        size, limit = f"{row['model']}, {row['billions']} billion", f"{2 * row['share'] + 1:.1f}"
        figures = [_start_change(old, row, of) for of in ("peak", "cpu_seconds")]
        stage = f"{row['stage']}, {row['dtype']}"
        lines.append([size, _ORIGINS[row["origin"]], stage, f"{row['share']:.1f}", limit, *figures])
    head = ["parameters", "begins", "ZeRO", "shard, GiB", "limit, GiB", "peak, GiB", "CPU s, each rank"]
    return head, lines


def _start_case(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "billions", "origin", "stage"))


def _start_change(old: dict[str, Any], row: dict[str, Any], of: str) -> str:
    """Return today's value, after the earlier one if there is one."""
    if of in old:
        return f"{old[of]:.1f} → **{row[of]:.1f}**"
    return f"{row[of]:.1f}"


def of_corpora(result: dict[str, Any]) -> Table:
    """Return seconds and memory to a first batch, by document count."""
    head = ["documents", "shards", "first batch", "of it CPU", "memory", "not of files"]
    head += ["middle of an epoch", "plan alone, files not in the cache"]
    return head, [_corpus_row(row) for row in result["starts"]]


def _corpus_row(row: dict[str, Any]) -> list[str]:
    first = row["first"]
    return [
        f"{row['documents'] / 1e6:,.0f} million",
        f"{row['shards']:,}",
        f"{first['seconds']:.2f} s",
        f"{first['cpu_seconds']:.2f} s",
        f"{first['peak_mb']:.0f} MB",
        f"{first['anonymous_mb']:.0f} MB",
        f"{row['resumed']['seconds']:.2f} s, {row['resumed']['peak_mb']:.0f} MB",
        f"{row['cold']['plan_seconds']:.2f} s",
    ]


def of_blocks(result: dict[str, Any]) -> Table:
    """Return an epoch block's contents and cost, by row length."""
    head = [
        "tokens of a row",
        "epoch blocks",
        "documents of an epoch block",
        "its rows",
        "padding",
        "planned a second of CPU",
    ]
    return head, [_blocks_row(row) for row in result["blocks"]]


def _blocks_row(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['seq_len']:,}",
        f"{row['blocks']:,}",
        f"{row['documents_per_block']:,.0f}",
        f"{row['rows_per_block']:,.0f}",
        f"{100 * row['padding_share']:.2f} %",
        f"{row['documents_per_second'] / 1e6:.2f} million documents",
    ]


def of_saves(result: dict[str, Any]) -> Table:
    """Return each contender's wall seconds, in the order in which they took turns."""
    head = ["", "saved, s", "loaded, s"]
    seconds = result["files"]["seconds"]
    return head, [[name, f"{of['save']:.2f}", f"{of['load']:.2f}"] for name, of in seconds.items()]


def of_sums(result: dict[str, Any]) -> Table:
    """Return the cost per step of message checksums and replica comparisons."""
    head = ["case", "step, CPU s", "messages", "MiB summed", "predicted, s", "measured, s", "share", "replicas, s"]
    return [*head, "every 20"], [_sums_row(row) for row in result["rows"]]


def _sums_row(row: dict[str, Any]) -> list[str]:
    return [
        row["case"],
        f"{row['step']:.2f}",
        f"{row['messages']:.0f}",
        f"{row['bytes'] / 2**20:.1f}",
        f"{row['predicted']:.4f}",
        f"{row['of_messages']:.4f}",
        f"{row['messages_share']:.2%}",
        f"{row['of_replicas']:.3f}",
        f"{row['replicas_share']:.2%}",
    ]


def of_tuning(result: dict[str, Any]) -> Table:
    """Return the losses of twenty tuning steps, and CPU seconds per step, compared with TRL's."""
    bounds, seconds = result["bounds"], result["seconds"]["cpu_seconds"]
    rows = [[bound["case"] or "a row each", f"{bound['figure']:.1e}", f"{bound['limit']:.0e}"] for bound in bounds[:-2]]
    rows = [[f"losses, {case}", *figures] for case, *figures in rows]
    for whose, bound in zip(("padded", "packed"), bounds[-2:], strict=True):
        figure = f"{seconds['ours']:.1f} / {seconds[whose]:.1f} = **{bound['figure']:.2f}**"
        rows.append([f"CPU seconds over TRL's, {whose}", figure, f"{bound['limit']:.1f}"])
    return ["beside TRL", "result", "bound"], rows


def of_preferences(result: dict[str, Any]) -> Table:
    """Return differences from TRL's losses, gradients and rewards, and CPU seconds per step over TRL's."""
    head = ["", "loss differs by", "gradients", "rewards", "CPU s a step, TRL → ours", "ratio", "reference stored"]
    lines = []
    for row in result["rows"]:
        values, seconds = row["values"], row["cpu_seconds"]
        line = [
            row["case"].upper(),
            *(f"{values[f'{what}_difference']:.0e}" for what in ("loss", "gradient", "reward")),
        ]
        stored = f"{row['ratio_stored']:.2f} ×" if "ratio_stored" in row else "–"
        times = f"{seconds['reference']:.2f} → {seconds['longctx']:.2f}"
        lines.append([*line, times, f"{row['ratio_reference']:.2f} ×", stored])
    return head, lines


def of_quantized(result: dict[str, Any]) -> Table:
    """Return imports of quantized folders."""
    head = ["scheme", "on disk", "seconds", "memory rises by", "a tensor in float32", "equal to the formula"]
    lines = []
    for row in result["rows"]:
        memory = [f"{row[key] / 1e6:.0f} MB" for key in ("risen", "largest")]
        equal = f"{row['equal']} of {row['quantized']} tensors"
        lines.append([row["scheme"], f"{row['bytes'] / 1e9:.2f} GB", f"{row['seconds']:.0f}", *memory, equal])
    return head, lines


def of_delta(result: dict[str, Any]) -> Table:
    """Return the gated delta rule compared with transformers', and over two ranks."""
    head = ["", "tokens", "transformers, or two processes apart", "ours, or two ranks", "ratio", "bytes sent a pass"]
    lines = []
    for row in result["rows"]:
        if row["case"] == "layer":
            seconds = [f"{row[who]:.2f} CPU s" for who in ("transformers", "longctx")]
            lines.append([row["kind"], f"{row['tokens']:,}", *seconds, f"{row['ratio']:.2f} ×", "–"])
            continue
        seconds = [f"{row[who]:.2f} s" for who in ("apart", "two")]
        sent = f"{row['bytes'] // 2:,}"
        lines.append(["two ranks", f"{row['tokens']:,}", *seconds, f"{row['scaling']:.2f} of perfect", sent])
    return head, lines


def of_hybrids(result: dict[str, Any]) -> Table:
    """Return needles found, and losses by position, for full attention and the hybrid."""
    lines = []
    rows = {name_of(row): row for row in result["rows"]}
    for row in result["rows"]:
        if row["model"] != "full":
            continue
        other = rows.get(name_of(row | {"model": "hybrid"}))
        if other is None:
            continue
        if row["case"] == "recall":
            for length, score in row["scores"].items():
                case = f"needles found in {int(length):,} tokens, seed {row['seed']}"
                lines.append([case, f"{score:.2f}", f"{other['scores'][length]:.2f}"])
            continue
        lines.append([f"loss, rows of {row['length']:,} tokens", f"{row['loss']:.3f}", f"{other['loss']:.3f}"])
        for full, hybrid in zip(_wide_bins(row["bins"]), _wide_bins(other["bins"]), strict=True):
            case = f"tokens {int(full['start']):,} to {int(full['stop']) - 1:,} of them"
            lines.append([case, f"{full['loss']:.3f}", f"{hybrid['loss']:.3f}"])
    return ["", "full attention", "hybrid"], lines


def of_young_experts(result: dict[str, Any]) -> Table:
    """Return the quickstart's expert loads, and its held-out loss relative to the token frequencies, by corpus and
    variant.
    """
    lines = []
    for row in result["rows"]:
        without = "–" if row["variant"] == "the quickstart" else row["variant"]
        nats = f"{row['over_frequencies']:+.2f}"
        lines.append([row["corpus"], without, str(row["steps"]), f"{row['mean']:.2f}", f"{row['worst']:.2f}", nats])
    return ["corpus", "instead", "steps", "max/mean from step 40", "worst step", "nats over frequencies"], lines


def _wide_bins(bins: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Return the bins with one for all positions up to ``_FIRST``: rows have the same length, so each counts by its
    width.
    """
    first = [one for one in bins if one["stop"] <= _FIRST]
    loss = sum(one["loss"] * (one["stop"] - one["start"]) for one in first) / _FIRST
    return [{"start": 0, "stop": _FIRST, "loss": loss}, *(one for one in bins if one["stop"] > _FIRST)]
