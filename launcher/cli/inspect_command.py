"""The verb ``data inspect``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from launcher.cli.cli_output import Json, human_bytes, print_json, print_line, table
from launcher.cli.data_rows import truncation_counts
from launcher.cli.image_options import image_rows
from launcher.cli.shared_options import ShardFolder
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from data_pipeline.inspect import Description, RowView
    from data_pipeline.preference_contents import PreferenceContents


def inspect(
    folder: ShardFolder,
    *,
    seq_len: int | None = None,
    source_seq_len: int = 0,
    row: int | None = None,
    block: int | None = None,
    epoch: int = 0,
    seed: int = 0,
    picture: Annotated[Path | None, arg(metavar="F.png")] = None,
    json: Json = False,
) -> None:
    """Show a shard folder's contents, the cost of packing, and a row; for a mixture, its sources and shares.

    Args:
        folder: Shard folder, or its URL (s3://, gs://; shards are fetched into the cache); or a mixture's file.
        seq_len: Tokens per row; also shows the cost of packing at that length.
        source_seq_len: Maximum source tokens per row, for pairs.
        row: Row to show in the epoch, from 0; needs --seq-len. Takes a second per million documents before it.
        block: Count --row from the start of this epoch block instead, which takes less than a second.
        epoch: Epoch of the row, from 0.
        seed: run.seed of the run that reads it.
        picture: Write a picture of some images from all classes.
    """
    from data_pipeline.image_contents import write_sheet
    from data_pipeline.inspect import describe, show_row
    from data_pipeline.mixture.file import is_mixture
    from data_pipeline.shards.manifest import VALIDATION_FOLDER
    from data_pipeline.stores.urls import below, locate

    if is_mixture(folder):
        # A mixture's rows depend on the run: `data sample` shows them.
        if picture is not None:
            raise ConfigError(f"--picture shows one folder's images: name a folder of {folder}.")
        _inspect_mixture(Path(folder), json=json)
        return
    if row is not None and seq_len is None:
        raise ConfigError("--row needs --seq-len: rows are packed when they are read. Try --seq-len 4096.")
    if row is None and (block is not None or epoch or seed):
        raise ConfigError("--block, --epoch and --seed select a row: they need --row. Try --row 0.")
    lengths = {"seq_len": seq_len, "source_seq_len": source_seq_len}
    found = [describe(folder, **lengths)]
    held_out = below(folder, VALIDATION_FOLDER)
    if locate(held_out).is_dir():
        found.append(describe(held_out, **lengths))
    shown = None
    if row is not None and seq_len is not None:
        which = {"row": row, "block": block, "epoch": epoch, "seed": seed}
        shown = show_row(folder, seq_len=seq_len, source_seq_len=source_seq_len, **which)
    if picture is not None:
        write_sheet(folder, picture)
    if json:
        out: dict[str, Any] = dataclasses.asdict(found[0]) | {"validation": None}
        if len(found) > 1:
            out["validation"] = dataclasses.asdict(found[1])
        if shown is not None:
            out["row"] = dataclasses.asdict(shown)
        print_json(out)
        return
    print_line(_description_table(found))
    if found[0].conversation:
        print_line(f"\nThe first conversation, with loss tokens between ⟦ and ⟧:\n\n{found[0].conversation}")
    if found[0].pair:
        print_line("\nThe first pair, source and target:\n\n" + "\n⇒\n".join(found[0].pair))
    if found[0].preferences is not None:
        print_line(_preference_text(found[0].preferences))
    if shown is not None:
        print_line(f"\n{_row_text(shown)}")
    if picture is not None:
        print_line(f"\n{picture} shows some images.")


def _inspect_mixture(path: Path, *, json: bool) -> None:
    from data_pipeline.mixture.description import describe_mixture

    found = describe_mixture(path)
    if json:
        print_json(dataclasses.asdict(found))
        return
    head = ["source", "folder", "documents", "tokens", "epochs at most", "from the beginning"]
    head += [f"from {stage.from_tokens:,} tokens" for stage in found.stages]
    rows = []
    for number, source in enumerate(found.sources):
        row = [source.name, source.folder, f"{source.documents:,}", f"{source.tokens:,}", str(source.epochs or "–")]
        rows.append([*row, *(f"{shares[number]:.1%}" for shares in found.shares)])
    print_line(table(head, rows))
    for stage in found.stages:
        if stage.row_tokens is not None:
            print_line(f"From {stage.from_tokens:,} tokens on: rows of {stage.row_tokens:,} tokens.")
    print_line(f"\nRows as text: longctx data sample {path} --seq-len N")


def _description_table(found: list[Description]) -> str:
    # Every split is described at the same row length and gets the same table rows: a power of two without documents in
    # one split is shown there as 0.
    powers = sorted({int(key.removeprefix("2^")) for d in found for key in d.length_histogram})
    columns = [_description_column(d, powers) for d in found]
    column_names = [d.split for d in found]
    column_names.insert(0, found[0].folder)
    rows: list[list[str]] = []
    for name in columns[0]:
        cells = [column.get(name, "") for column in columns]
        cells.insert(0, name)
        rows.append(cells)
    return table(column_names, rows)


def _description_column(found: Description, powers: list[int]) -> dict[str, str]:
    """Return a split's properties keyed by table row names; documents are counted by powers of two."""
    if found.images is not None:
        rows = image_rows(found, found.images)
        return rows | {"shards": f"{found.shards:,}", "size on disk": human_bytes(found.shard_bytes)}
    column = {
        "documents": f"{found.documents:,}",
        "tokens": f"{found.tokens:,}",
        "tokens that count": f"{found.counted_tokens:,}",
        "bytes per token": f"{found.bytes_per_token:.2f}",
        "mean tokens per document": f"{found.mean_tokens:,.0f}",
        "longest document, tokens": f"{found.longest_tokens:,}",
        **_of_sources(found),
        "vocabulary": f"{found.vocab_size:,}",
        "shards": f"{found.shards:,}",
        "size on disk": human_bytes(found.shard_bytes),
    }
    # These cover the full source, and only the training split reports them.
    for name, value in found.duplicates.items():
        shown = f"{value:,}"
        if name.endswith("_bytes"):
            shown = human_bytes(value)
        column[f"duplicates, {name.replace('_', ' ')}"] = shown
    if found.packing is not None:
        prefix = sample = ""
        if not found.packing.exact:
            prefix, sample = "about ", f", estimated from {found.packing.planned_documents:,} documents"
        column["rows per epoch"] = f"{prefix}{found.packing.rows:,}{sample}"
        column["padding"] = f"{prefix}{100 * found.packing.padding_share:.2f}%"
        if found.preferences is not None:
            column["records left out, longer than a row"] = f"{prefix}{found.packing.pairs_left_out or 0:,}"
        else:
            column |= truncation_counts(found.packing)
    for k in powers:
        count = found.length_histogram.get(f"2^{k}", 0)
        column[f"documents of {2**k:,} to {2 ** (k + 1) - 1:,} tokens"] = str(count)
    return column


def _preference_text(shown: PreferenceContents) -> str:
    """Format the first record with preferences: the prompt, and its replies below titles."""
    titles = ["chosen", "rejected"]
    if shown.has_labels:
        titles = ["undesirable", "reply to another prompt"]
        if shown.label:
            titles[0] = "desirable"
    parts = [f"\nThe first record:\n\n{shown.prompt}"]
    parts += [f"── {title}\n{reply}" for title, reply in zip(titles, (shown.first, shown.second), strict=True)]
    return "\n".join(parts)


def _of_sources(found: Description) -> dict[str, str]:
    """Return the properties of sources in pairs, or of prompts in preferences; empty without both."""
    if not found.source_tokens:
        return {}
    if found.preferences is not None:
        column = {
            "tokens of prompts": f"{found.source_tokens:,}",
            "longest prompt, tokens": f"{found.longest_source_tokens:,}",
        }
        if found.preferences.has_labels:
            column["undesirable replies"] = f"{found.preferences.undesirable:,}"
        origin = found.preferences.reference
        column["reference model"] = "none"
        if origin is not None:
            column["reference model"] = ", ".join(f"{name} {value}" for name, value in origin.items())
        return column
    return {
        "tokens of sources": f"{found.source_tokens:,}",
        "longest source, tokens": f"{found.longest_source_tokens:,}",
    }


def _row_text(row: RowView) -> str:
    """Format a packed row as lines: each document's piece with its start and end."""
    where = ""
    if row.num_blocks > 1:
        where = f" of epoch block {row.block} of {row.num_blocks:,}"
    lines = [f"row {row.row} of {row.num_rows:,}{where}: {row.tokens:,} tokens, {row.padding_tokens:,} of padding"]
    for piece in row.pieces:
        part = f"tokens {piece.start:,} to {piece.stop:,} of {piece.document_tokens:,}"
        if piece.source_tokens:
            part += f", source {piece.source_tokens:,}"
        lines.append(f"\n  {piece.name}: {part}")
        if piece.source:
            lines.append(f"    {piece.source!r} ⇒")
        lines.append(f"    {piece.head!r}")
        if piece.tail:
            lines.append(f"    … {piece.tail!r}")
    return "\n".join(lines)
