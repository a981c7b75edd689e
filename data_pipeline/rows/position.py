"""Where a loader stands, and its state: read strictly, because a wrong row is trained on without an error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.rows.blocks import PLAN_VERSION
from data_pipeline.rows.pack import BEST_FIT
from data_pipeline.rows.stream import BEGINNING, StreamPosition
from longctx.errors import DataError
from longctx.untrusted.reading import shown
from longctx.untrusted.schema import MOST_WHOLE

STATE_FORMAT = "longctx-loader"

_OF_STREAM = ("epoch", "epoch_row", "block", "block_row")

_IDENTITY = ("format", "plan_version", "manifest_hash", "seed", "seq_len", "shuffle", "packing", "num_blocks")
"""Row numbers mean the same rows only where all of these are equal."""


@dataclass(frozen=True)
class Position:
    """Where a loader of one shard folder stands between two steps."""

    rows_consumed: int = 0
    """Of all steps and ranks."""
    tokens_consumed: int = 0
    """Without padding."""
    stream: StreamPosition = BEGINNING

    @property
    def epoch(self) -> int:
        """The epoch of the next row."""
        return self.stream.epoch

    @property
    def counters(self) -> dict[str, int]:
        """The numbers that make it up, by name."""
        own = {"rows_consumed": self.rows_consumed, "tokens_consumed": self.tokens_consumed}
        return own | {name: getattr(self.stream, name) for name in _OF_STREAM}


def refuse_exclusions(state: Any) -> None:
    """DataError for the state of a run whose folder had a list of excluded shards: its rows can be read no more."""
    if isinstance(state, dict) and state.get("excluded"):
        raise DataError(
            "The loader state is that of a run with excluded shards, a list that this release does not read.\n"
            "Leave the shards out by `longctx data build --without`, and start a new run from the weights "
            "(run.start_from)."
        )


def read_position(state: dict[str, Any], own: dict[str, Any], folder: Path) -> Position:
    """Return the position that a state names, for a loader of ``folder`` whose state is ``own``.

    DataError for a state of other data or of another order.
    """
    if isinstance(state, dict) and state.get("plan_version") == 1:
        state = _in_blocks(state, own["num_blocks"], folder)
    if isinstance(state, dict):
        # Releases that packed in one way alone did not name it.
        state = {"packing": str(BEST_FIT)} | state
    refuse_exclusions(state)
    # A missing field would be a silent default, and a field too many belongs to another release.
    if not isinstance(state, dict) or set(state) != set(own):
        raise DataError(f"This is not a loader state: it needs exactly the fields {', '.join(own)}.")
    for name in _IDENTITY:
        if state[name] != own[name]:
            raise DataError(
                f"The loader state has {name}={shown(state[name])}, this run {own[name]!r} ({folder}).\n"
                "Resume with the same shard folder, seed, seq_len, packing and shuffle, or start a new run from the "
                "weights (run.start_from)."
            )
    counters = {name: state[name] for name in Position().counters}
    check_counters(counters)
    stream = StreamPosition(
        **{name: counters[name] for name in _OF_STREAM},
        row_tokens=own["seq_len"],
    )
    position = Position(counters["rows_consumed"], counters["tokens_consumed"], stream)
    block, epoch_row = stream.block, stream.epoch_row
    row = stream.block_row
    # The rows of earlier blocks are not counted again: that would be to plan them all.
    if epoch_row < row or (block == 0 and epoch_row != row):
        raise DataError(f"The loader state is damaged: row {row} of block {block} is not row {epoch_row} of its epoch.")
    return position


def check_counters(counters: dict[str, Any]) -> None:
    """DataError unless all are whole numbers of at least 0."""
    # type(), not isinstance(): in Python True is an int.
    if not all(type(value) is int and 0 <= value <= MOST_WHOLE for value in counters.values()):
        raise DataError(
            f"The loader state is damaged: {', '.join(counters)} must be whole numbers of at least 0, at most 2^53."
        )


def _in_blocks(state: dict[str, Any], num_blocks: int, folder: Path) -> dict[str, Any]:
    """A state of plan version 1, which had no blocks, as one of today; DataError where it was another order."""
    if num_blocks > 1:
        raise DataError(
            f"The loader state is of plan version 1: it ordered the whole corpus at once. This release orders {folder} "
            f"in {num_blocks} blocks, so it cannot find the rows that are left.\n"
            "Finish the run with the release that began it, or start a new one from the weights (run.start_from)."
        )
    # One block is ordered as version 1 ordered everything.
    return state | {"plan_version": PLAN_VERSION, "num_blocks": 1, "block": 0, "block_row": state.get("epoch_row")}
