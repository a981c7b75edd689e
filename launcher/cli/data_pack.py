"""The verb ``data pack``: a shard folder made small for the way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from launcher.cli.console import Json, command, human_bytes, note, say, say_json


def pack(
    folder: Annotated[Positional[Path], arg(metavar="DIR")],
    *,
    output: Annotated[str, arg(metavar="OUT")],
    level: int = 3,
    overwrite: bool = False,
    json: Json = False,
) -> None:
    """Compress a shard folder with zstd, for a store or for the way to another machine.

    A packed folder is read like any other: each shard is unpacked into the cache when it is first used, and checked
    before and after.

    Args:
        folder: Shard folder.
        output: Folder to make, or its URL (s3://, gs://).
        level: Level of zstd, 1 to 22: higher ones are smaller and slower.
        overwrite: Replace a shard folder that is there.
    """
    from data_pipeline.prepare.publish import pack as pack_folder
    from data_pipeline.shards.manifest import Manifest

    manifest = Manifest.load(folder)
    packed = pack_folder(folder, output, level=level, overwrite=overwrite, say=note)
    plain = sum(entry.bytes for entry in manifest.shards)
    held_out = folder / "validation"
    if held_out.is_dir():
        plain += sum(entry.bytes for entry in Manifest.load(held_out).shards)
    if json:
        say_json({"folder": folder, "output": output, "bytes": plain, "packed_bytes": packed})
        return
    say(f"{output}: {human_bytes(packed)} of {human_bytes(plain)}, {packed / max(plain, 1):.0%}.")
    say(f"Look at it: {command('data', 'inspect', output)}")
