"""Tables for ``benchmarks.audit``: detected flips, and the cost of an audited step."""

from __future__ import annotations

from typing import Any

Table = tuple[list[str], list[list[str]]]
_PARTS = {
    "float32": {"mantissa, lower half": range(12), "mantissa, upper half": range(12, 23), "exponent": range(23, 31)},
    "bfloat16": {"mantissa": range(7), "exponent": range(7, 15)},
}
_SIGN = {"float32": range(31, 32), "bfloat16": range(15, 16)}


def of_flips(result: dict[str, Any]) -> Table:
    """Return detected over flipped bits, by dtype and bit range."""
    head = ["dtype", "clean steps", "false alarms", "bits flipped in", "found of looked at", "found anywhere"]
    head.append("right rank named")
    rows = []
    for row in result["flips"]:
        dtype, by_bit = row["dtype"], row["found_by_bit"]
        common = [f"{row['clean_steps']:,}", str(row["false_alarms"])]
        for part, bits in {**_PARTS[dtype], "sign": _SIGN[dtype]}.items():
            found, flipped = (sum(by_bit[str(bit)][n] for bit in bits) for n in (0, 1))
            rows.append([dtype, *common, part, f"{found} of {flipped}", "", ""])
            dtype, common = "", ["", ""]
        looked, anywhere, named = (f"{row[name][0]} of {row[name][1]}" for name in ("looked_at", "any", "named_right"))
        rows.append(["", "", "", f"all, of {row['products_of_a_rank']} products a rank", looked, anywhere, named])
    return head, rows


def of_cost(result: dict[str, Any]) -> Table:
    """Return audited steps compared with a plain one, by audited operation."""
    cost = result["cost"]
    head = ["step", "CPU seconds", "over a plain one"]
    rows = [
        [_NAMES[kind], f"{seconds:.2f}", f"{cost['ratio'][kind]:.3f}"] for kind, seconds in cost["cpu_seconds"].items()
    ]
    rows.append([f"mean of audited steps: {100 * cost['extra_of_a_step']:.1f} % more", "", ""])
    rows.append([f"at `run.audit_every = {cost['every']}`: {100 * cost['share_at_default']:.2f} % more", "", ""])
    rows.append([f"memory at the peak: {cost['rise_mib']:.0f} MiB more", "", ""])
    return head, rows


_NAMES = {"plain": "plain", "product": "products", "attention": "attention", "update": "the update"}
