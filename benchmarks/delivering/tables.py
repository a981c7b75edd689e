"""Delivery tables for docs/, from ``results/KIND/delivery.json``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Lines = tuple[list[str], list[list[str]]]
"""Headings and rows."""
_MIB = 1 << 20


def of_rates(result: dict[str, Any], corpus: str) -> Lines:
    """Return the contenders over one corpus: rate, and fraction of a bare copy's rate, by row length."""
    rows = result["rates"][corpus]
    lengths = list(dict.fromkeys(row["seq_len"] for row in rows))
    head = ["", "in a row", "documents", *(f"rows of {length:,}" for length in lengths)]
    head += ["memory, MB", "state, bytes", "first row, CPU ms"]
    return head, [_rates_row(list(alike)) for alike in _by_contender(rows)]


def _by_contender(rows: list[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    for name in dict.fromkeys(row["contender"] for row in rows):
        yield [row for row in rows if row["contender"] == name]


def _rates_row(rows: list[dict[str, Any]]) -> list[str]:
    first = rows[0]
    name = first["contender"]
    problem = next((row["problem"] for row in rows if row["problem"]), "")
    if problem:
        name += f" ({problem})"
    cells = [f"{row['mtokens_a_cpu_second']:,.0f} ({row['share']:.3f})" if "share" in row else "–" for row in rows]
    memory, state, opened = (_span(rows, of) for of in ("memory_mb", "state_bytes", "first_row_cpu_ms"))
    return [name, first["gives"], first["cuts"], *cells, memory, state, opened]


def _span(rows: list[dict[str, Any]], of: str) -> str:
    """Return the range over row lengths."""
    values = [row[of] for row in rows if of in row]
    if not values:
        return "–"
    least, most = (f"{value:,.0f}" for value in (min(values), max(values)))
    if least == most:
        return least
    return f"{least} … {most}"


def of_slices(result: dict[str, Any]) -> Lines:
    """Return one rank's slice of a row, single documents, and waits."""
    rows = []
    for corpus, found in result["details"].items():
        sliced, waits = found["slices"], found["waits"]
        rows.append(
            [
                corpus,
                f"{sliced['slice_us']:,.0f} µs of {sliced['row_us']:,.0f}",
                _share_of(sliced, "page", sliced["touched_share"]),
                _share_of(sliced, "checked", sliced["checked_share"]),
                f"{found['documents']['document_us']:.2f} µs",
                f"{waits['median_ms']:.2f} / {waits['p99_ms']:.2f} ms, {waits['own_p99_ms']:.2f} ms",
            ]
        )
    head = ["corpus", "a slice, CPU", "pages with its tokens", "bytes compared with checksums", "a document, CPU"]
    return [*head, "wait: median / p99, p99 without others"], rows


def _share_of(sliced: dict[str, Any], which: str, share: float) -> str:
    part, whole = (sliced[f"{of}_{which}_bytes"] / _MIB for of in ("slice", "row"))
    if not share:
        # For a small corpus, the plan has already verified everything.
        return f"{part:.2f} of {whole:.2f} MiB"
    return f"{part:.2f} of {whole:.2f} MiB: 1 / {1 / share:.1f}"


def of_packing(result: dict[str, Any]) -> Lines:
    """Return padding, cuts and balance."""
    rows = []
    for corpus, found in result["details"].items():
        for row in found["packing"]:
            rows.append(
                [
                    corpus,
                    f"{row['seq_len']:,}",
                    f"{row['rows']:,}",
                    f"{100 * row['padding_share']:.3f} %",
                    f"{100 * row['least_padding_share']:.3f} %",
                    f"{row['documents_cut']:,} of {row['documents_longer']:,}",
                    f"{row['straggler_as_they_come']:.3f}",
                    f"**{row['straggler']:.3f}**",
                    f"{row['straggler_least']:.3f}",
                    f"{row['lockstep_as_they_come']:.3f}",
                    f"{row['lockstep']:.3f}",
                ]
            )
    head = ["corpus", "tokens of a row", "rows", "padding", "of it in the last row", "cut, of the longer ones"]
    head += ["busiest rank over the mean: as they come", "as dealt out", "least, rows equally many"]
    return [*head, "of each micro-batch: as they come", "as dealt out in lockstep"], rows


def of_build(result: dict[str, Any]) -> Lines:
    """Return a corpus build compared with SentencePiece alone."""
    rows = []
    for name, of in (("SentencePiece alone", "alone"), ("`longctx data build`", "built")):
        found = result[of]
        megabytes = found["text_bytes"] / 1e6
        memory = "–"
        if "peak_mb" in found:
            memory = f"{found['peak_mb']:,.0f}, {found['processes']} processes"
        rates = [f"{megabytes / found[seconds]:.1f}" for seconds in ("cpu_seconds", "seconds")]
        rows.append([name, f"{megabytes:,.0f}", f"{found['tokens'] / 1e6:.1f}", *rates, memory])
    ratios = [f"**{result[ratio]:.2f}**" for ratio in ("cpu_ratio", "rate_ratio")]
    rows.append(["the builder over SentencePiece", "", "", *ratios, ""])
    head = ["", "MB of text", "million tokens", "MB a second of CPU", f"MB a second, {result['threads']} cores"]
    return [*head, "memory of all, MB"], rows
