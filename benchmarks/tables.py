"""Generates the tables in docs/: results from ``benchmarks/results``, and options from ``--help``.

    python -m benchmarks.tables [--check]

In a page of docs/ the text between ``<!-- table: NAME -->`` and ``<!-- end -->`` is replaced by the table with that
name, with rows for every kind of processor that was measured. The text between ``<!-- options: VERB -->`` and ``<!--
end -->`` is replaced by a verb's options. ``--check`` writes nothing; exit code 1 if a page would change.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import audit_tables, encoder_tables, endurance, faults, option_tables, plan_tables, run_tables
from benchmarks.computed_tables import chunks_table, kept_table, recipe_table
from benchmarks.delivering import tables as delivery
from benchmarks.first_gpu import figures as first_gpu
from benchmarks.machine import KINDS, RESULTS
from benchmarks.scaling import table as scale

MARKDOWN_COLUMNS = 100
DOCS = Path(__file__).parent.parent / "docs"
Result = dict[str, Any]
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rewritten(text: str, results: Path = RESULTS) -> str:
    """Return a page with new tables."""
    text = option_tables.rewritten(text)
    return _MARKED.sub(lambda found: f"{found[1]}\n{section(found[2], results)}\n\n{found[3]}", text)


def section(name: str, results: Path = RESULTS) -> str:
    """Return the captions and the table with this name. KeyError for an unknown table, ValueError for different
    columns.
    """
    if name in GPU_TABLES:
        return GPU_TABLES[name](results)
    if name in COMPUTED:
        return COMPUTED[name]()
    benchmark, table = TABLES[name]
    captions, parts = [], {}
    for kind in KINDS:
        path = results / kind / f"{benchmark}.json"
        if path.exists():
            result = json.loads(path.read_text())
            captions.append(caption(benchmark, kind, result["machine"]))
            parts[kind] = table(result)
    return "\n\n".join([*captions, joined(parts)]) if parts else ""


def joined(parts: dict[str, str]) -> str:
    """Join the tables of all kinds of processors; rows get a kind column if there are several."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    lines: list[str] = []
    for kind, part in parts.items():
        head, rule, *rows = part.splitlines()
        if not lines:
            lines = [f"| on {head}", f"| --- {rule}"]
        if lines[0] != f"| on {head}":
            raise ValueError(f"{kind} has the columns {head}, and others {lines[0]}; measure it again")
        lines += [f"| {kind} {row}" for row in rows]
    return "\n".join(lines)


def caption(benchmark: str, kind: str, machine: dict[str, Any]) -> str:
    """Return the caption: command, machine and date."""
    name = re.sub(r"\(R\)|\(TM\)|Processor|CPU|@", " ", machine["processor"])
    name = re.sub(r"(\d\.\d)0? ?GHz", r"\1 GHz", " ".join(name.split()))
    versions = [
        f"{library} {machine[library]}" for library in ("torch", "transformers", "deepspeed") if library in machine
    ]
    line = (
        f"{kind}: `python -m benchmarks.{benchmark}`, {name}, {machine['cores']} cores, {KINDS[kind]}, "
        f"{', '.join(versions)}, {machine['date']}."
    )
    return textwrap.fill(line, MARKDOWN_COLUMNS, break_long_words=False, break_on_hyphens=False)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- a training step ----------------------------------------------------------------------------------------

_SHAPES = {
    "llama": "Llama",
    "mixtral": "Mixtral, 16 experts, 2 a token",
    "qwen3-fine": "Qwen3-MoE, 64 experts, 8 a token",
    "deepseek-v3": "DeepSeek-V3, 32 experts, 4 a token, latent attention",
}


def decoder(result: Result) -> str:
    """Return a step's time compared with its floor and transformers, and its memory."""
    head = ("shape", "floor: products + attention", "ours, × floor", "transformers, × floor", "ours / theirs",
            "activation MiB, theirs → ours")  # fmt: skip
    return markdown(head, (_decoder_row(row) for row in result["rows"]))


def _decoder_row(row: dict[str, Any]) -> list[str]:
    seconds, mib = row["cpu_seconds"], row["activation_mib"]
    floor, over = "–", {}
    if "floor" in seconds:
        floor = f"{seconds['products']:.2f} + {seconds['attention']:.2f} = {seconds['floor']:.2f} s"
        over = {who: f" ({ratio:.2f} ×)" for who, ratio in row["over_floor"].items()}
    times = [f"{seconds[who]:.2f} s{over.get(who, '')}" for who in ("longctx", "transformers")]
    memory = f"{mib['transformers']} → {mib['longctx']} ({row['memory_ratio']:.2f} ×)"
    return [_SHAPES[row["shape"]], floor, *times, f"{row['time_ratio']:.2f} ×", memory]


def compiled(result: Result) -> str:
    """Return compiled steps compared with eager ones and the floor, and the operations that stay eager, compiled or
    not.
    """
    head = ("case", "floor", "eager, × floor", "compiled, × floor", "compiled / eager", "losses differ by")
    rows = []
    for row in result["rows"]:
        seconds, over = row["cpu_seconds"], row["over_floor"]
        times = [f"{seconds[who]:.2f} s ({over[who]:.2f} ×)" for who in ("eager", "compiled")]
        ratio, difference = f"**{row['compiled_over_eager']:.2f}**", _power(row["loss_difference"])
        rows.append([f"step, {row['dtype']}", f"{seconds['floor']:.2f} s", *times, ratio, difference])
    for part, seconds in result["parts"].items():
        eager = f"{1000 * seconds['eager']:.0f} ms"
        if "fused" in seconds:
            eager += f", fused {1000 * seconds['fused']:.0f} ms"
        least = min(seconds[who] for who in seconds if who != "compiled")
        ratio = f"**{seconds['compiled'] / least:.2f}**"
        rows.append([part, "", eager, f"{1000 * seconds['compiled']:.0f} ms", ratio, ""])
    return markdown(head, rows)


def loss(result: Result) -> str:
    """Return the chunked loss compared with whole logits."""
    rows = [
        [
            row["way"].removeprefix("longctx, "),
            f"{row['cpu_seconds']:.1f}",
            f"{row['ratio_to_fastest_whole']:.2f}",
            str(row["resident_rise_mb"]),
            *(_power(row["relative_error"][of]) for of in ("loss", "dhidden", "dweight")),
        ]
        for row in result["rows"]
    ]
    return markdown(("", "CPU s", "ratio", "MB", "loss", "dhidden", "dweight"), rows)


def generation(result: Result) -> str:
    """Return greedy continuations compared with transformers'."""
    head = ("case", "CPU s", "transformers", "tokens/s over theirs", "ms a token", "transformers", "same ids")
    rows = [
        [
            row["case"],
            *(f"{row['cpu_seconds'][who]:.2f}" for who in ("longctx", "transformers")),
            f"**{row['speed_ratio']:.2f}**",
            *(f"{row['milliseconds_a_token'][who]:.1f}" for who in ("longctx", "transformers")),
            f"{row['same_ids']} of {result['new_tokens']}",
        ]
        for row in result["rows"]
    ]
    return markdown(head, rows)


def generation_batch(result: Result) -> str:
    """Return several prompts at once compared with transformers'."""
    head = ("shape and prompts", "tokens a CPU second", "transformers, dynamic", "static", "over both", "same prompts")
    rows = [
        [
            row["case"],
            *(f"{row['tokens_a_cpu_second'][who]:.0f}" for who in ("longctx", "dynamic", "static")),
            f"**{row['speed_ratio']:.2f}**",
            str(row["same_prompts"]),
        ]
        for row in result["rows"]
    ]
    return markdown(head, rows)


def chunks(result: Result) -> str:
    """Return layers by chunks compared with whole ones: one row length in each way, then the long rows."""
    whole = {row["tokens"]: row["cpu_seconds"] for row in result["table"] if row["way"] == "whole"}
    head = ("tokens, layers", "way", "CPU s", "× whole", "s", "MiB above the model", "KiB a token")
    return markdown(head, (_chunks_row(row, whole) for row in result["table"] + result["longest"]))


def _chunks_row(row: dict[str, Any], whole: dict[int, float]) -> list[str]:
    case, ratio = f"{row['tokens']:,}, {row['layers']}", "–"
    if "date" in row:
        case += f" ({row['date']})"
    if row["tokens"] in whole:
        ratio = f"{row['cpu_seconds'] / whole[row['tokens']]:.3f}"
    seconds = [f"{row['cpu_seconds']:,.1f}", ratio, f"{row['seconds']:,.1f}"]
    return [case, row["way"], *seconds, f"{row['rise_mib']:,.0f}", f"{row['kib_a_token']:.1f}"]


def long_prompt(result: Result) -> str:
    """Return a long prompt and a short answer, on one rank and on two."""
    head = ("prompt and new tokens", "ranks", "CPU s, each rank", "resident rise, each rank", "cache alone")
    rows = [
        [
            f"{row['tokens']:,} + {row['new_tokens']}",
            str(row["ranks"]),
            f"{row['cpu_seconds']:.1f}",
            f"{row['rise_mib']:.0f} MiB",
            f"{row['cache_mib']:.0f} MiB",
        ]
        for row in result["pair"]
    ]
    return markdown(head, rows)


def prompt_growth(result: Result) -> str:
    """Return the costs that grow with the prompt on two ranks, with full attention and with windows."""
    head = (
        "prompt",
        "cache, each rank",
        "beside it",
        "CPU ms a new token",
        "windows: beside the cache",
        "CPU ms a token",
    )
    rows = [
        [
            f"{full['tokens']:,}",
            f"{full['cache_mib']:.0f} MiB",
            f"{full['beside_cache_mib']:.1f} MiB",
            f"{full['cpu_ms_a_later_token']:.1f}",
            f"{window['beside_cache_mib']:.1f} MiB",
            f"{window['cpu_ms_a_later_token']:.1f}",
        ]
        for full, window in zip(result["growth"], result["windows"], strict=True)
    ]
    return markdown(head, rows)


# --- attention across ranks ---------------------------------------------------------------------------------

_ERRORS = ("out", "dq", "dk", "dv")


def ring(result: Result) -> str:
    """Return one document on two ranks."""
    head = ("case", "SDPA, each core", "ring, each rank", "worst rank over its half", "resident memory")
    rows = [
        [
            row["case"],
            _seconds(row["one_process_cpu_seconds"]),
            _seconds(row["cpu_seconds_per_rank"]),
            f"**{row['ratio_to_share']:.3f}**",
            f"+{row['resident_rise_mib']} MiB" if "resident_rise_mib" in row else "–",
        ]
        for row in result["ring"] + result.get("both-sides", [])
    ]
    return markdown(head, rows)


def packed(result: Result) -> str:
    """Return many documents on two ranks, by layout."""
    layouts = list(dict.fromkeys(_layout(row) for row in result["packed"]))
    cells = {(row["case"], _layout(row)): f"{row['ratio_to_share']:.3f} ×" for row in result["packed"]}
    cases = dict.fromkeys(row["case"] for row in result["packed"])
    return markdown(("case", *layouts), ([case, *(cells[case, layout] for layout in layouts)] for case in cases))


def _layout(row: dict[str, Any]) -> str:
    return row["method"].rsplit(", ", 1)[-1]


def exactness(result: Result) -> str:
    """Return errors by degree, and those of one process."""
    rows = result["exactness"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    found = {(row["case"], row["degree"]): _errors(row["relative_error"]) for row in rows}
    lines = [
        [str(degree), *(found[case, degree] for case in cases)]
        for degree in dict.fromkeys(row["degree"] for row in rows)
    ]
    alone = {row["case"]: _errors(row["one_process_relative_error"]) for row in rows if row["degree"] == 1}
    lines.append(["one process's SDPA", *(alone[case] for case in cases)])
    return markdown(("degree", *(f"{case}: {' / '.join(_ERRORS)}" for case in cases)), lines)


def peers(result: Result) -> str:
    """Return our transports compared with DeepSpeed's."""
    rows = result["rows"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    cells = {
        (row["case"], row["method"]): f"{row['ratio_to_share']:.3f} · {row['resident_rise_mib']} · "
        f"{_power(row['relative_error']['dk'])}"
        for row in rows
    }
    lines = [
        [method.removeprefix("longctx "), *(cells[case, method] for case in cases)]
        for method in dict.fromkeys(row["method"] for row in rows)
    ]
    return markdown(("", *(f"{case}: over half · MiB · dk error" for case in cases)), lines)


def degrees(result: Result) -> str:
    """Return rows placed in parallel, and with fixed degrees."""
    head = ("rows of", "ranks", "tokens a rank", "rows at once", "attention: mean, worst", "ranks a document (fewest)",
            "keys received a token", "all ranks a row", "fewest ranks a row: keys, attention")  # fmt: skip
    return markdown(head, (_degrees_row(row) for row in result["rows"]))


def _degrees_row(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['seq_len']:,}",
        str(row["context"]),
        f"{row['tokens_per_rank']:,}",
        str(row["rows"]),
        f"**{row['attention_mean']:.3f}**, {row['attention_worst']:.3f}",
        f"{row['ranks']:.2f} ({row['fewest']:.2f})",
        f"{row['rows_a_token']:.2f}",
        f"{row['wide_rows_a_token']:.2f}",
        f"{row['narrow_degree']}: {row['narrow_rows_a_token']:.2f}, {row['narrow_attention_mean']:.2f}",
    ]


# --- experts ------------------------------------------------------------------------------------------------


def experts(result: Result) -> str:
    """Return one layer compared with transformers, DeepSpeed and dense matmuls."""
    head = ("", "time, × transformers", "× DeepSpeed", "rate, of dense", "memory, × transformers")
    return markdown(head, (_expert_row(case, rows) for case, rows in _by_load(result["layer"]).items()))


def _expert_row(case: str, rows: list[dict[str, Any]]) -> list[str]:
    def each(name: str) -> str:
        return " / ".join(f"{row[name]:.2f}" for row in rows)

    seconds = rows[0]["cpu_seconds"]
    beside = f"{seconds['longctx'] / seconds['DeepSpeed']:.2f}" if "DeepSpeed" in seconds else ""
    return [case, each("time_ratio"), beside, each("share_of_dense_rate"), each("memory_ratio")]


def _by_load(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group rows that differ only in their expert loads, by their common text."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["case"].rsplit(", ", 1)[0], []).append(row)
    return {f"{case}, {' / '.join(_load(row) for row in alike)}": alike for case, alike in found.items()}


def _load(row: dict[str, Any]) -> str:
    return row["case"].rsplit(", ", 1)[-1]


def expert_ranks(result: Result) -> str:
    """Return the same layers with experts across ranks."""
    rows = result["ranks"]
    degrees = list(dict.fromkeys(row["ranks"] for row in rows))
    by_case = {row["case"]: [of for of in rows if of["case"] == row["case"]] for row in rows}
    lines = [
        [
            case,
            *(f"{row['ratio_to_share']:.2f}, {row['ratio_to_share_worst']:.2f}" for row in alike),
            ", ".join(f"{row['bytes_over_least']:.3f}" for row in alike),
            ", ".join(f"{row['row_a_choice_over_least']:.2f}" for row in alike),
        ]
        for case, alike in by_case.items()
    ]
    head = ("", *(f"{degree} ranks" for degree in degrees), "bytes, × least", "a row for each choice, × least")
    return markdown(head, lines)


# --- numbers ------------------------------------------------------------------------------------------------


def _seconds(of: Iterable[float]) -> str:
    return ", ".join(f"{seconds:.2f} s" for seconds in of)


def _errors(of: dict[str, float]) -> str:
    return " / ".join(_power(of[name]) for name in _ERRORS)


def _power(value: float) -> str:
    """Format two digits and the power of ten, as in 1.6e-3."""
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "decoder": ("decoder", decoder),
    "compiled": ("compiled", compiled),
    "loss": ("loss", loss),
    "generation": ("generation", generation),
    "generation-batch": ("generation_batch", generation_batch),
    "chunks": ("chunks", chunks),
    "long-prompt": ("long_prompt", long_prompt),
    "prompt-growth": ("long_prompt", prompt_growth),
    "ring": ("attention", ring),
    "packed": ("attention", packed),
    "exactness": ("attention", exactness),
    "peers": ("peers", peers),
    "degrees": ("degrees", degrees),
    "experts": ("moe", experts),
    "expert-ranks": ("moe", expert_ranks),
    "scale-attention": ("scale", scale.table_of(scale.ATTENTION)),
    "scale-experts": ("scale", scale.table_of(scale.EXPERTS)),
    "scale-files": ("scale", scale.table_of(scale.FILES)),
    "scale-start": ("scale", scale.table_of(scale.START)),
    "plan-bytes": ("plan_bytes", lambda result: markdown(*plan_tables.of_bytes(result))),
    "image-plan": ("image_plan", lambda result: markdown(*plan_tables.of_images(result))),
    "plan-memory": ("plan_memory", lambda result: markdown(*plan_tables.of_memory(result))),
    "plan-seconds": ("plan_seconds", lambda result: markdown(*plan_tables.of_seconds(result))),
    "start-memory": ("start_memory", lambda result: markdown(*run_tables.of_starts(result))),
    "saving": ("saving", lambda result: markdown(*run_tables.of_saves(result))),
    "silent-errors": ("silent_errors", lambda result: markdown(*run_tables.of_sums(result))),
    "endurance": ("endurance", lambda result: markdown(*endurance.table(result))),
    "delivery": ("delivery", lambda result: markdown(*delivery.of_rates(result, "synthetic"))),
    "delivery-default": ("delivery", lambda result: markdown(*delivery.of_rates(result, "default"))),
    "delivery-slices": ("delivery", lambda result: markdown(*delivery.of_slices(result))),
    "delivery-packing": ("delivery", lambda result: markdown(*delivery.of_packing(result))),
    "data-build": ("build", lambda result: markdown(*delivery.of_build(result))),
    "audit-flips": ("audit", lambda result: markdown(*audit_tables.of_flips(result))),
    "audit-cost": ("audit", lambda result: markdown(*audit_tables.of_cost(result))),
    "data-start": ("data_plan", lambda result: markdown(*run_tables.of_corpora(result))),
    "data-blocks": ("data_plan", lambda result: markdown(*run_tables.of_blocks(result))),
    "preferences": ("preferences", lambda result: markdown(*run_tables.of_preferences(result))),
    "tuning": ("tuning", lambda result: markdown(*run_tables.of_tuning(result))),
    "gated-delta": ("gated_delta", lambda result: markdown(*run_tables.of_delta(result))),
    "hybrids": ("hybrids", lambda result: markdown(*run_tables.of_hybrids(result))),
    "young-experts": ("young_experts", lambda result: markdown(*run_tables.of_young_experts(result))),
    "quantized": ("quantized", lambda result: markdown(*run_tables.of_quantized(result))),
    "encoders": ("encoders", lambda result: markdown(*encoder_tables.of_steps(result))),
    "translation": ("translation", lambda result: markdown(*encoder_tables.of_translation(result))),
    "pretraining": ("pretraining", lambda result: markdown(*encoder_tables.of_pretraining(result))),
    "images": ("images", lambda result: markdown(*encoder_tables.of_images(result))),
    "faults": ("faults", lambda result: markdown(*faults.table(result))),
}
"""By name: the benchmark with the results, and a function that formats them."""
GPU_TABLES: dict[str, Callable[[Path], str]] = {
    "gpu-steps": lambda results: markdown(*first_gpu.steps_table(results)),
    "gpu-figures": lambda results: markdown(*first_gpu.figures_table(results)) + f"\n\n{first_gpu.source_lines()}",
}
"""By name: tables from all cards' results, with "waiting" for missing ones."""
COMPUTED: dict[str, Callable[[], str]] = {"recipes": recipe_table, "kept": kept_table, "chunks-planned": chunks_table}
"""By name: computed tables, without measurements."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the pages, or with --check list those that are not up to date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page would change")
    options = parser.parse_args(arguments)
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        wanted = rewritten(text)
        if wanted != text:
            stale.append(page.name)
            if not options.check:
                page.write_text(wanted)
    print(f"{'not in step' if options.check else 'rewritten'}: {', '.join(stale) or 'no page'}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
