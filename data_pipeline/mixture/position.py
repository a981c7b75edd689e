"""Where a loader stands in a mixture, and the state of each source: read strictly, as that of one folder is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_pipeline.rows.blocks import Stretch
from data_pipeline.rows.position import check_counters, refuse_exclusions
from data_pipeline.rows.stream import BEGINNING, StreamPosition
from longctx.errors import DataError
from longctx.untrusted.reading import shown

_OF_STREAM = ("epoch", "epoch_row", "block", "block_row", "row_tokens")
_COUNTERS = ("tokens", "counted", *_OF_STREAM)


@dataclass(frozen=True)
class SourcePosition:
    """Where a mixture stands in one source."""

    stream: StreamPosition = BEGINNING
    tokens: int = 0
    """Taken in all, without padding."""
    counted: int = 0
    """Those that were taken since the shares are what they are."""


@dataclass(frozen=True)
class MixedPosition:
    """Where a loader of a mixture stands between two steps."""

    sources: tuple[SourcePosition, ...]
    rows_consumed: int = 0
    shares: tuple[int, ...] = ()
    """Those by which the last row was chosen; none before the first."""

    @property
    def tokens_consumed(self) -> int:
        """Of all steps, without padding."""
        return sum(source.tokens for source in self.sources)

    @property
    def epoch(self) -> int:
        """That of the source which is least far."""
        return min(source.stream.epoch for source in self.sources)


def source_state(position: SourcePosition, identity: dict[str, Any], share: int | None) -> dict[str, Any]:
    """One source's part of a state. ``identity``: what must be the same for it to mean the same rows."""
    return {
        **identity,
        "share": share,
        "tokens": position.tokens,
        "counted": position.counted,
        **{name: getattr(position.stream, name) for name in _OF_STREAM},
        "before": [[stretch.row_tokens, stretch.rows] for stretch in position.stream.before],
    }


def read_source(entry: Any, identity: dict[str, Any], where: str) -> tuple[SourcePosition, int | None]:
    """A source's position and its share then; DataError for one of other data or of another order, or a damaged one."""
    known = source_state(SourcePosition(), identity, None)
    refuse_exclusions(entry)
    if isinstance(entry, dict):
        # States of releases without it do not name it.
        entry = {"fim": None} | entry
    if not isinstance(entry, dict) or set(entry) != set(known):
        raise DataError(f"The loader state of {where} is damaged: it needs exactly the fields {', '.join(known)}.")
    for name, value in identity.items():
        if entry[name] != value:
            raise DataError(
                f"The loader state of {where} has {name}={shown(entry[name])}, the file {value!r}: its rows would be "
                "others.\nPut back what it was, or give the source another name: it then begins anew."
            )
    counters = {name: entry[name] for name in _COUNTERS}
    if entry["share"] is not None:
        counters["share"] = entry["share"]
    check_counters(counters)
    stream = StreamPosition(
        **{name: counters[name] for name in _OF_STREAM}, before=_read_stretches(entry["before"], where)
    )
    return SourcePosition(stream, entry["tokens"], entry["counted"]), entry["share"]


def _read_stretches(values: Any, where: str) -> tuple[Stretch, ...]:
    """Return what a state says was taken of the block before; DataError if it is damaged."""
    is_list = isinstance(values, list) and all(isinstance(value, list) and len(value) == 2 for value in values)
    if not is_list or not all(type(count) is int and count >= 1 for value in values for count in value):
        raise DataError(
            f"The loader state of {where} is damaged: before={shown(values)} must be pairs of a length and rows."
        )
    return tuple(Stretch(row_tokens, rows) for row_tokens, rows in values)
