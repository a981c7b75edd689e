"""Searched settings as words, and as flags."""

from __future__ import annotations

from typing import Any

from launcher.wording import plural


def words(settings: dict[str, Any]) -> str:
    """Settings in few words; what is off is left out."""
    s = {key.partition(".")[2]: value for key, value in settings.items()}
    if "tokens_per_rank" in s:
        parts = [f"{s['tokens_per_rank']:,} tokens a rank"]
    else:
        parts = [f"context {s['context']}"]
    parts += [f"{name} {s[name]}" for name in ("ulysses", "expert") if s[name] > 1]
    if s.get("micro_batch_rows", 1) > 1:
        parts.append(f"{s['micro_batch_rows']} rows at once")
    parts.append(f"ZeRO {s['stage']}")
    if s["offload"] != "none":
        parts.append(f"optimizer on {s['offload']}")
    if s["offload_parameters"] != "none":
        parts.append(f"weights on {s['offload_parameters']}")
    parts.append(f"keep {s['keep']} on {s['store']}")
    if s["chunk_tokens"]:
        parts.append(f"chunks of {s['chunk_tokens']:,}, {plural(s['head_groups'], 'group')} of heads")
    return ", ".join(parts)


def flags(settings: dict[str, Any]) -> str:
    """The same as flags of pretrain."""
    return " ".join(f"--{key} {value}" for key, value in settings.items())
