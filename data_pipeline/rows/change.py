"""Exclusions in a loader's state: how it names them, and what becomes of a position when they have changed since."""

from __future__ import annotations

import logging
from typing import Any, Literal

from data_pipeline.rows.blocks import BlockPlanner, Stretch
from data_pipeline.rows.stream import StreamPosition
from longctx.errors import DataError
from longctx.untrusted.reading import shown

log = logging.getLogger(__name__)

WhenChanged = Literal["refuse", "go_on", "next_block"]
"""What a loader does with a state of other exclusions: refuse it; pack what is left of the block under way anew; or
leave that out and begin with the next block, which needs to know nothing of the shards."""


def exclusions_of(stream: StreamPosition) -> dict[str, Any]:
    """The part of a state that says which shards were excluded; nothing where none ever was in this block."""
    if stream.excluded:
        return {"excluded": list(stream.excluded)}
    # States of runs without exclusions stay what they were.
    return {}


def stretches_of(stream: StreamPosition) -> list[list[Any]]:
    """What was taken of the block before, as plain JSON: length, rows, and excluded shards if there were any."""
    found: list[list[Any]] = []
    for stretch in stream.before:
        values: list[Any] = [stretch.row_tokens, stretch.rows]
        if stretch.excluded:
            values.append(list(stretch.excluded))
        found.append(values)
    return found


def read_stretches(values: Any, num_shards: int, where: str) -> tuple[Stretch, ...]:
    """``stretches_of`` backwards; DataError for a damaged state of ``where``."""
    if not isinstance(values, list) or not all(isinstance(value, list) and len(value) in (2, 3) for value in values):
        raise _damaged(values, where)
    if not all(type(count) is int and count >= 1 for value in values for count in value[:2]):
        raise _damaged(values, where)
    return tuple(Stretch(value[0], value[1], read_excluded([*value, []][2], num_shards, where)) for value in values)


def read_excluded(values: Any, num_shards: int, where: str) -> tuple[int, ...]:
    """Numbers of excluded shards; DataError for a damaged state of ``where``."""
    is_list = isinstance(values, list) and all(type(value) is int for value in values)
    if not is_list or values != sorted(set(values) & set(range(num_shards))):
        raise DataError(
            f"The loader state of {where} is damaged: excluded={shown(values)} must be ascending numbers of its "
            f"{num_shards} shards."
        )
    return tuple(values)


def settled(stream: StreamPosition, planner: BlockPlanner, when_changed: WhenChanged) -> StreamPosition:
    """The position for the shards that are excluded now; DataError where they may not have changed."""
    if stream.excluded == planner.excluded:
        return stream
    change = _change(stream, planner)
    if when_changed == "refuse":
        raise DataError(
            f"{change} since the checkpoint was written, so the rows to come are others.\nTo go on with them, no other "
            "document lost or repeated: data.changed_exclusions=go_on. To go on as before: `longctx data exclude` puts "
            "a shard on the folder's list, and with --undo takes it from there."
        )
    if when_changed == "next_block" and (stream.block_row or stream.before):
        epoch, block = planner.next_block(stream.epoch, stream.block)
        log.warning(
            "%s: the run goes on at block %d of epoch %d. Left out is what block %d of %d of epoch %d had behind its "
            "row %d (data.changed_exclusions=next_block).",
            *(change, block, epoch, stream.block, planner.num_blocks, stream.epoch, stream.block_row),
        )
        return stream.at_block(epoch, block).without(planner.excluded)
    log.warning("%s: from epoch %d, row %d on (data.changed_exclusions).", change, stream.epoch, stream.epoch_row)
    return stream.without(planner.excluded)


def _change(stream: StreamPosition, planner: BlockPlanner) -> str:
    """Which shards are excluded now and were not, and the other way round."""
    now, before = set(planner.excluded), set(stream.excluded)
    parts = []
    if now - before:
        parts.append(f"{_shown(now - before, planner)} came onto the list of excluded shards")
    if before - now:
        parts.append(f"{_shown(before - now, planner)} went from the list of excluded shards")
    return f"{planner.folder}: {' and '.join(parts)}"


_SHOWN = 8
"""Shards that a message names."""


def _shown(numbers: set[int], planner: BlockPlanner) -> str:
    names = [planner.shard_files[number] for number in sorted(numbers)]
    if len(names) > _SHOWN:
        return f"{', '.join(names[:_SHOWN])} and {len(names) - _SHOWN} more"
    return ", ".join(names)


def _damaged(values: Any, where: str) -> DataError:
    return DataError(
        f"The loader state of {where} is damaged: before={shown(values)} must be pairs of a length and rows, some with "
        "excluded shards behind them."
    )
