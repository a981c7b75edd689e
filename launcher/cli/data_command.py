"""The verbs ``data build|inspect|verify|pack``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from launcher.cli.chat_options import ChatOptions
from launcher.cli.cli_output import (
    Json,
    byte_rate,
    command_line,
    human_bytes,
    interruptible,
    note,
    print_json,
    print_line,
    progress,
    table,
)
from launcher.cli.corpus import CorpusOptions, Duplicates, Workers, duplicate_lines, read_so_far, say_left_out
from launcher.cli.data_rows import truncation_counts
from launcher.cli.shared_options import RepeatedValues, flatten_values
from launcher.cluster.exit import DONE, FAILED
from launcher.wording import format_count
from longctx.config import PRESETS
from longctx.errors import ConfigError, DataError

if TYPE_CHECKING:
    from data_pipeline.inspect import Description, RowView
    from data_pipeline.prepare.build_shards import BuildReport, SplitReport
    from data_pipeline.prepare.sources import TextSource
    from longctx.tokenizer import Tokenizer

_KEEP = Duplicates()
_ALL_CORES = Workers()
_DEFAULT_CHAT_OPTIONS = ChatOptions()
_NONE: list[list[str]] = []
_DEFAULT_OPTIONS = (
    CorpusOptions(),
    None,
    0.05,
    None,
    False,
    False,
    "text",
    False,
    _ALL_CORES,
    _KEEP,
    _DEFAULT_CHAT_OPTIONS,
)
"""Defaults of all other options: ``data build --without`` accepts only these."""
_MAX_SHOWN_TOKENS = 5
_ShardFolder = Annotated[Positional[str], arg(metavar="DIR")]


def build(
    corpus: OmitArgPrefixes[CorpusOptions],
    *,
    tokenizer: Annotated[Path | None, arg(metavar="TOKENIZER", help_behavior_hint="(required)")] = None,
    output: Annotated[str, arg(metavar="DIR")],
    validation_fraction: float = 0.05,
    shard_tokens: int | None = None,
    exact: bool = False,
    paragraphs: bool = False,
    special_tokens: Literal["text", "parse"] = "text",
    overwrite: bool = False,
    without: Annotated[RepeatedValues, arg(metavar="SHARD [SHARD ...]")] = _NONE,
    worker_options: OmitArgPrefixes[Workers] = _ALL_CORES,
    duplicates: OmitArgPrefixes[Duplicates] = _KEEP,
    chat_options: OmitArgPrefixes[ChatOptions] = _DEFAULT_CHAT_OPTIONS,
    json: Json = False,
) -> None:
    """Tokenize a corpus into a shard folder.

    The folder contains checksummed Arrow shards, and held-out documents in DIR/validation. One folder serves every
    sequence length. Repeating a finished build changes no file and says so. A build that was stopped or killed
    continues from its finished source parts when the same command is repeated.

    Args:
        tokenizer: SentencePiece model, tokenizer.json, Hugging Face folder, checkpoint or run.
        output: Folder to create, or its URL (s3://, gs://): it is then built in the cache and sent, the manifest last.
        validation_fraction: Share of documents to hold out; 0 disables.
        shard_tokens: Close a shard at this many tokens; default: 2^26.
        exact: Stop at a document whose ids do not decode to its exact text, instead of counting such documents.
        paragraphs: Record paragraph starts, by blank lines or otherwise by lines: with model.pair_head documents are
            cut there.
        special_tokens: Treatment of text that spells a special token: text keeps it as text and counts it; parse gives
            its id, for conversations that a chat template has rendered.
        overwrite: Replace a shard folder that was built from other inputs or is damaged.
        without: Remove these shards, such as 00007.arrow, from an existing folder, and exit.
        worker_options: Cores or nodes for the work.
        duplicates: Treatment of texts that occur in the corpus more than once.
        chat_options: How conversations are trained on.
    """
    from data_pipeline.prepare.build_shards import build_shards
    from data_pipeline.shards.shard_writer import DEFAULT_SHARD_TOKENS

    # --without edits a finished folder. Any other option would suggest a rebuild, so all must have their defaults.
    if without:
        given_options = (corpus, tokenizer, validation_fraction, shard_tokens, exact, paragraphs, special_tokens)
        others = (overwrite, worker_options, duplicates, chat_options)
        _leave_out(output, flatten_values(without), is_alone=given_options + others == _DEFAULT_OPTIONS, json=json)
        return
    if tokenizer is None:
        raise ConfigError("--tokenizer is missing. `longctx tokenizer train` makes one.")
    # Before the source is hashed, which may take minutes: errors in options and tokenizer are reported at once.
    rule, loaded = duplicates.rule(), _loaded(tokenizer)
    if shard_tokens is None:
        shard_tokens = DEFAULT_SHARD_TOKENS
    with worker_options.hired() as engine:
        source = _hashed(corpus)
        # Duplicates are found in a separate pass over the same bytes, before the encoding pass.
        passed = source.num_bytes if rule.finds else 0
        with progress(f"tokenizing {source.spec}", total=source.num_bytes + passed, rate=byte_rate) as update:
            report = build_shards(
                source,
                loaded,
                output,
                validation_fraction=validation_fraction,
                shard_tokens=shard_tokens,
                exact=exact,
                overwrite=overwrite,
                workers=worker_options.workers,
                engine=engine,
                say=note,
                duplicates=rule,
                chat=chat_options.rule(),
                paragraphs=paragraphs,
                parse_special_tokens=special_tokens == "parse",
                comparing=lambda documents, text_bytes: update(
                    source.bytes_read, note=f"comparing {read_so_far(documents, text_bytes)}", amount=text_bytes
                ),
                progress=lambda documents, text_bytes: update(
                    passed + source.bytes_read, note=read_so_far(documents, text_bytes), amount=text_bytes
                ),
            )
    _say_build(report, loaded, json=json)


def _loaded(tokenizer: Path) -> Tokenizer:
    """Load a tokenizer and print remarks if it frames documents unusually."""
    from longctx.tokenizer import load_tokenizer
    from longctx.tokenizer.tokenizer_warnings import frame_warnings

    loaded = load_tokenizer(tokenizer)
    for message in frame_warnings(loaded):
        note(f"{tokenizer}: {message}")
    return loaded


def _hashed(corpus: CorpusOptions) -> TextSource:
    """Open a corpus and hash its files, which takes minutes for a large one."""
    source = corpus.open()
    with progress(f"checking {source.spec}", total=source.num_bytes, rate=byte_rate) as update:
        source.fingerprint(progress=update)
    return source


def inspect(
    folder: _ShardFolder,
    *,
    seq_len: int | None = None,
    source_seq_len: int = 0,
    row: int | None = None,
    block: int | None = None,
    epoch: int = 0,
    seed: int = 0,
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
    """
    from data_pipeline.inspect import describe, show_row
    from data_pipeline.mixture.file import is_mixture
    from data_pipeline.shards.manifest import VALIDATION_FOLDER
    from data_pipeline.stores.urls import below, locate

    if is_mixture(folder):
        # A mixture's rows depend on the run: `data sample` shows them.
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
    if shown is not None:
        print_line(f"\n{_row_text(shown)}")


def _inspect_mixture(path: Path, *, json: bool) -> None:
    from data_pipeline.inspect import describe_mixture

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


def verify_shards(folder: _ShardFolder, *, json: Json = False) -> int:
    """Read every byte of a shard folder, or of a mixture's folders, and name all damage.

    Checks hashes, sizes, offsets, ids, the tokenizer and consistency between files, in the validation split too. The
    exit code is 1 if anything is damaged.

    Args:
        folder: Shard folder, or its URL (s3://, gs://), with every shard fetched again; or a mixture's file.
    """
    from data_pipeline.inspect import find_problems as find_problems
    from data_pipeline.mixture.file import Mixture, is_mixture
    from data_pipeline.shards.local_copies import has_folder
    from data_pipeline.shards.manifest import Manifest
    from data_pipeline.stores.urls import Location, locate

    folders: list[Location] = [locate(folder)]
    if is_mixture(folder):
        folders = [*Mixture.load(folder).folders(Path(folder).parent)]
    for place in folders:
        if not has_folder(place):
            # Raise the error for a folder without shards: it is not a damaged shard folder.
            Manifest.load(place)
    with progress(f"reading {folder}"):
        # Hashing runs in native code, during which Ctrl-C would have no effect.
        problems = interruptible(lambda: find_problems(folder))
    if json:
        print_json({"folder": folder, "problems": problems})
    elif problems:
        print_line(f"{folder} is damaged:\n" + "\n".join(indent(problem, "  ") for problem in problems))
    else:
        manifests = [Manifest.load(place) for place in folders]
        shards, tokens = sum(len(m.shards) for m in manifests), sum(m.tokens for m in manifests)
        print_line(f"{folder} is intact: {format_count(shards, 'shard')}, {tokens:,} tokens.")
    if problems:
        return FAILED
    return DONE


def pack_shards(
    folder: Annotated[Positional[Path], arg(metavar="DIR")],
    *,
    output: Annotated[str, arg(metavar="OUT")],
    level: int = 3,
    overwrite: bool = False,
    json: Json = False,
) -> None:
    """Compress a shard folder with zstd, for a store or for a transfer to another machine.

    A packed folder is read like any other: each shard is unpacked into the cache on first use, and checked before and
    after.

    Args:
        folder: Shard folder.
        output: Folder to create, or its URL (s3://, gs://).
        level: zstd level, 1 to 22: higher levels are smaller and slower.
        overwrite: Replace an existing shard folder.
    """
    from data_pipeline.prepare.publish import pack_folder as pack_folder
    from data_pipeline.shards.manifest import Manifest

    manifest = Manifest.load(folder)
    packed = pack_folder(folder, output, level=level, overwrite=overwrite, say=note)
    plain = sum(entry.bytes for entry in manifest.shards)
    held_out = folder / "validation"
    if held_out.is_dir():
        plain += sum(entry.bytes for entry in Manifest.load(held_out).shards)
    if json:
        print_json({"folder": folder, "output": output, "bytes": plain, "packed_bytes": packed})
        return
    print_line(f"{output}: {human_bytes(packed)} of {human_bytes(plain)}, {packed / max(plain, 1):.0%}.")
    print_line(f"Look at it: {command_line('data', 'inspect', output)}")


# ------------------------------------------------------------------------------------------------- output of the verbs


def _leave_out(folder: str, shards: Sequence[str], *, is_alone: bool, json: bool) -> None:
    """Remove shards from a folder's manifest and print the consequences."""
    from data_pipeline.prepare.shard_removal import remove_shards

    if not is_alone:
        raise ConfigError("--without changes a built folder: give no other option except --output.")
    found = remove_shards(folder, shards)
    if json:
        counts = {"documents": found.documents, "tokens": found.tokens}
        print_json({"folder": folder, "shards": found.shards, **counts, "manifest_hash": found.manifest.hash})
        return
    print_line(
        f"{folder}: {', '.join(found.shards)} left out, {found.tokens:,} tokens in "
        f"{format_count(found.documents, 'document')}. {format_count(len(found.manifest.shards), 'shard')} with "
        f"{found.manifest.tokens:,} tokens remain.\nA checkpoint's loader state depends on the previous manifest: a "
        "run that has read this folder cannot resume on it. Start a new run from its weights with "
        f"--run.start_from CHECKPOINT.\nVerify the others: {command_line('data', 'verify', folder)}"
    )


def _build_json(report: BuildReport) -> dict[str, Any]:
    def split(found: SplitReport | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return dataclasses.asdict(found) | {"bytes_per_token": found.bytes_per_token}

    return dataclasses.asdict(report) | {"training": split(report.training), "validation": split(report.validation)}


def _can_parse(tokenizer: Tokenizer) -> bool:
    """Return True if a tokenizer's file specifies how its special tokens are found in a text."""
    try:
        return bool(tokenizer.control_finder)
    except DataError:
        return False


def _say_build(report: BuildReport, tokenizer: Tokenizer, *, json: bool) -> None:
    if json:
        print_json(_build_json(report))
        return
    # A build without held-out documents has one split.
    splits = [("training", report.training), ("validation", report.validation)]
    rows = [
        [name, f"{s.documents:,}", f"{s.tokens:,}", f"{s.bytes_per_token:.2f}", f"{s.shards:,}", str(s.folder)]
        for name, s in splits
        if s is not None
    ]
    print_line(table(["split", "documents", "tokens", "bytes/token", "shards", "folder"], rows))
    say_left_out(report.skipped, report.left_out, report.left_out_file)
    if report.duplicates is not None:
        print_line("\n".join(duplicate_lines(report.duplicates)))
    # Normalizing tokenizers change text, which a model then cannot reproduce: name the documents concerned.
    if report.inexact:
        print_line(
            f"{format_count(report.inexact, 'document')} did not decode exactly from their ids (--exact rejects them)."
        )
        for difference in report.differences:
            print_line(f"  {difference}")
    if report.spelling:
        shown = ", ".join(f"{piece} ({count:,})" for piece, count in list(report.spelt.items())[:_MAX_SHOWN_TOKENS])
        print_line(
            f"{format_count(report.spelling, 'document')} with special tokens of the tokenizer, encoded as "
            "text: "
            f"{shown}.\n  For conversations, give the messages: the chat template renders them."
        )
        if _can_parse(tokenizer):
            print_line("  For text rendered earlier, --special-tokens parse encodes them as ids.")
    if report.up_to_date:
        print_line(
            f"{report.output} is up to date: source, tokenizer and options are unchanged, so the build was skipped."
        )
    else:
        print_line(f"{report.output} was made in {report.seconds:.1f} s.")
    train, inspect_options = ["--data.train", report.output], ["--seq-len", 4096]
    if report.training.source_tokens:
        # Any recipe with an encoder works; this one trains on any machine.
        train = ["--config", "translate-small", *train, "--model.vocab_size", tokenizer.vocab_size]
        if report.validation is None:
            train += ["--validation.rows", 0]
        else:
            train += ["--data.validation", report.validation.folder]
        inspect_options = ["--seq-len", 512, "--source-seq-len", 512]
    elif tokenizer.vocab_size != PRESETS["quickstart"].vocab_size:
        train += ["--model.vocab_size", tokenizer.vocab_size]
    print_line(f"Next: {command_line('train', *train)}")
    print_line(f"Look at it: {command_line('data', 'inspect', report.output, *inspect_options)}")


def _description_table(found: list[Description]) -> str:
    # Every split is described at the same row length and gets the same table rows: a power of two without documents in
    # one split is shown there as 0.
    exponents = sorted({int(key.removeprefix("2^")) for d in found for key in d.length_histogram})
    columns = [_description_column(d, exponents) for d in found]
    column_names = [d.split for d in found]
    column_names.insert(0, found[0].folder)
    rows: list[list[str]] = []
    for name in columns[0]:
        cells = [column.get(name, "") for column in columns]
        cells.insert(0, name)
        rows.append(cells)
    return table(column_names, rows)


def _description_column(found: Description, exponents: list[int]) -> dict[str, str]:
    """Return a split's properties keyed by table row names; documents are counted by powers of two."""
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
        column |= truncation_counts(found.packing)
    for k in exponents:
        count = found.length_histogram.get(f"2^{k}", 0)
        column[f"documents of {2**k:,} to {2 ** (k + 1) - 1:,} tokens"] = str(count)
    return column


def _of_sources(found: Description) -> dict[str, str]:
    """Return the source properties of pairs; empty without pairs."""
    if not found.source_tokens:
        return {}
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
