"""The verb ``data exclude``: leave a bad shard out of every run to come, on purpose and on record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from launcher.cli.console import Json, command, say, say_json
from launcher.wording import plural
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from data_pipeline.shards.exclusions import Exclusions


def exclude(
    folder: Annotated[Positional[str], arg(metavar="DIR")],
    shards: Annotated[Positional[tuple[str, ...]], arg(metavar="SHARD…")] = (),
    *,
    reason: str = "",
    undo: bool = False,
    json: Json = False,
) -> None:
    """Leave shards out of a folder, without building it again: a bad shard need not end a run.

    The list stands in DIR/exclusions.json, beside the manifest, and vouches for itself. A shard on it is neither
    opened nor checked, and may be damaged or gone; no row has its documents, and all others keep their order. A run
    that goes on from a checkpoint of another list refuses that unless data.changed_exclusions says it is meant. A run
    that is under way takes no notice before its next start. Without SHARD it shows the list.

    Args:
        folder: Shard folder, or its URL (s3://, gs://); of held-out documents the folder DIR/validation.
        shards: Names as the manifest has them, such as 00007.arrow.
        reason: Why, a line for the logs and reports of all runs to come.
        undo: Take the shards from the list; without SHARD all of them.
    """
    from data_pipeline.shards.copies import open_folder
    from data_pipeline.shards.exclude import exclude as put_on_list
    from data_pipeline.shards.exclude import include
    from data_pipeline.shards.exclusions import Exclusions
    from data_pipeline.stores.urls import locate

    if undo and reason:
        raise ConfigError("--undo takes no --reason: what was left out is read again.")
    if shards and not undo and not reason:
        raise ConfigError('--reason is missing: say why, as in --reason "disk 3 of node 12 has bad blocks".')
    if not undo and shards:
        found = put_on_list(folder, shards, reason=reason)
    else:
        # The manifest alone is read.
        _, manifest, _ = open_folder(folder)
        found = Exclusions.load(locate(folder), manifest)
        if undo and (shards or found.shards):
            found = include(folder, shards or [exclusion.shard for exclusion in found.shards])
    if json:
        say_json({"folder": folder, "hash": found.hash, "excluded": found.records()})
        return
    say("\n".join(excluded_lines(folder, found)) or f"{folder}: no shard is excluded.")
    if shards and not undo:
        unknown = [exclusion.shard for exclusion in found.shards if exclusion.shard in shards and not exclusion.lengths]
        if unknown:
            say(
                f"\nThe lengths of the documents in {', '.join(unknown)} could not be read any more: a run that stands "
                "in the middle of a block has to go on at the next one."
            )
    if shards or undo:
        say(
            "\nA run goes on from its checkpoint with --data.changed_exclusions go_on (what is left of its block is "
            "packed anew) or next_block (the rest of the block is left out)."
        )
        say(f"Check the others: {command('data', 'verify', folder)}")


def excluded_lines(folder: str, found: Exclusions) -> list[str]:
    """What is left out of a folder, so that nobody overlooks it; no line where nothing is."""
    if not found.shards:
        return []
    of_all = plural(len(found.manifest.shards), "shard")
    head = f"EXCLUDED from {folder}: {len(found.shards)} of {of_all}, {found.tokens:,} tokens."
    return [head, *(f"  {line}" for line in found.lines())]
