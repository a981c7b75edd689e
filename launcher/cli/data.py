"""The verbs ``tokenizer train`` and ``data build|inspect|verify``."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from launcher.cli.console import command, human_bytes, interruptible, plural, progress, say, say_json, table
from launcher.cluster.exit import DONE, FAILED
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from data_pipeline.inspect import Description, RowView
    from data_pipeline.prepare.build import BuildReport, SplitReport
    from data_pipeline.prepare.sources import Source

_SOURCE_HELP = (
    'folder, text file, .jsonl (.gz, .zst) or .parquet; or "stdlib", the Python source of the standard library'
)
_JSON_HELP = "print JSON instead of a table"


# ------------------------------------------------------------------------------------------------------------- help


def add_verbs(verbs: Any, name: str) -> None:
    """Add the verbs of this module; ``name`` is what stands before a verb on the command line."""
    tokenizer = verbs.add_parser("tokenizer", help="train a tokenizer", description="Train a tokenizer.")
    _add_tokenizer_train(tokenizer.add_subparsers(title="verbs", metavar="VERB", required=True), name)
    data = verbs.add_parser(
        "data", help="build, look at and verify shards", description="Build, look at and verify shards."
    )
    inner = data.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_build(inner, name)
    _add_inspect(inner, name)
    _add_verify(inner, name)


def _add_tokenizer_train(verbs: Any, name: str) -> None:
    parser = verbs.add_parser(
        "train",
        help="train a SentencePiece BPE on a corpus",
        description="Train a SentencePiece BPE with byte fallback, which gives every text back exactly.\n"
        "The same corpus gives the same file.",
        epilog=f"example:\n  {name} tokenizer train --source stdlib --vocab-size 4096 --output runs/tokenizer.model",
    )
    _add_source_options(parser)
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="number of token ids, 261 or more")
    parser.add_argument("--output", type=Path, required=True, metavar="F.model", help="file to write")
    parser.add_argument(
        "--max-text-bytes",
        type=int,
        default=256 << 20,
        metavar="N",
        help="train on a sample of documents above this much text (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of that sample (%(default)s)")
    parser.set_defaults(verb=train)


def _add_build(verbs: Any, name: str) -> None:
    parser = verbs.add_parser(
        "build",
        help="tokenize a corpus into a shard folder",
        description="Tokenize a corpus into checksummed Arrow shards, held-out documents in DIR/validation.\n"
        "One folder serves every sequence length. Building the same again does nothing and says so.",
        epilog=f"example:\n  {name} data build --source stdlib --tokenizer runs/tokenizer.model --output runs/data",
    )
    _add_source_options(parser)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="F.model", help="SentencePiece model")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.05,
        metavar="X",
        help="share of documents to hold out, 0 for none (%(default)s)",
    )
    parser.add_argument(
        "--shard-tokens", type=int, metavar="N", help="close a shard at this many tokens (default: 2^26)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a shard folder built from other things")
    parser.add_argument("--json", action="store_true", help=_JSON_HELP)
    parser.set_defaults(verb=build)


def _add_inspect(verbs: Any, name: str) -> None:
    parser = verbs.add_parser(
        "inspect",
        help="what a shard folder holds, what packing costs, what a row looks like",
        description="Show what a shard folder holds; with --seq-len what packing at that length costs;\n"
        "with --row what stands in a row of the first epoch (seed 0).",
        epilog=f"example:\n  {name} data inspect runs/data --seq-len 4096 --row 0",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="shard folder")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens of a row")
    parser.add_argument("--row", type=int, metavar="K", help="row to show, from 0; needs --seq-len")
    parser.add_argument("--json", action="store_true", help=_JSON_HELP)
    parser.set_defaults(verb=inspect)


def _add_verify(verbs: Any, name: str) -> None:
    parser = verbs.add_parser(
        "verify",
        help="read every byte of a shard folder and name what is damaged",
        description="Read every byte of a shard folder and its validation split: hashes, sizes, offsets, ids,\n"
        "tokenizer. Exit code 1 when anything is damaged.",
        epilog=f"example:\n  {name} data verify runs/data",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="shard folder")
    parser.add_argument("--json", action="store_true", help="print JSON: folder and problems")
    parser.set_defaults(verb=verify)


def _add_source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", required=True, metavar="PATH", help=_SOURCE_HELP)
    parser.add_argument(
        "--exclude",
        nargs="+",
        action="extend",
        default=[],
        metavar="GLOB",
        help="leave out relative paths that match, e.g. 'test/*'; may be repeated (quote it for the shell)",
    )
    parser.add_argument(
        "--text-field", default="text", metavar="NAME", help="field with the text in JSON Lines and Parquet (text)"
    )


# ------------------------------------------------------------------------------------------------------------ verbs


def train(arguments: argparse.Namespace) -> None:
    """``tokenizer train``."""
    from data_pipeline.prepare.train_tokenizer import train_tokenizer

    source = _open_source(arguments)
    with progress(f"training a tokenizer on {source.spec}") as update:
        seen = [0, 0]

        def read(documents: int, text_bytes: int) -> None:
            seen[:] = documents, text_bytes
            update(documents, note=f"{documents:,} documents, {human_bytes(text_bytes)}")

        tokenizer = interruptible(
            lambda: train_tokenizer(
                source,
                arguments.output,
                vocab_size=arguments.vocab_size,
                max_text_bytes=arguments.max_text_bytes,
                seed=arguments.seed,
                progress=read,
            )
        )
    documents, text_bytes = seen
    corpus = f"{plural(documents, 'document')}, {human_bytes(text_bytes)}"
    sampled = (
        f"a sample of {human_bytes(arguments.max_text_bytes)} from " if text_bytes > arguments.max_text_bytes else ""
    )
    say(f"{arguments.output}: {tokenizer.vocab_size:,} ids, trained on {sampled}{corpus}.")
    options = ["--tokenizer", arguments.output, "--output", "DIR"]
    say(f"Next: {command('data', 'build', *_source_words(arguments), *options)}")


def build(arguments: argparse.Namespace) -> None:
    """``data build``."""
    from data_pipeline.prepare.build import build_shards
    from data_pipeline.shards.writer import DEFAULT_SHARD_TOKENS
    from data_pipeline.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(arguments.tokenizer)
    source = _open_source(arguments)
    with progress(f"tokenizing {source.spec}", total=source.num_bytes) as update:
        report = build_shards(
            source,
            tokenizer,
            arguments.output,
            validation_fraction=arguments.validation_fraction,
            shard_tokens=DEFAULT_SHARD_TOKENS if arguments.shard_tokens is None else arguments.shard_tokens,
            overwrite=arguments.overwrite,
            progress=lambda documents, done: update(done, note=f"{documents:,} documents, {human_bytes(done)}"),
        )
    if arguments.json:
        say_json(_build_json(report))
    else:
        _say_build(report)


def inspect(arguments: argparse.Namespace) -> None:
    """``data inspect``."""
    from data_pipeline.inspect import describe, show_row
    from data_pipeline.prepare.build import VALIDATION_FOLDER

    if arguments.row is not None and arguments.seq_len is None:
        raise ConfigError("--row needs --seq-len: rows are packed when they are read. Try --seq-len 4096.")
    folders = [arguments.folder, arguments.folder / VALIDATION_FOLDER]
    found = [
        describe(folder, seq_len=arguments.seq_len) for folder in folders if folder == folders[0] or folder.is_dir()
    ]
    row = None
    if arguments.row is not None:
        row = show_row(arguments.folder, seq_len=arguments.seq_len, row=arguments.row)
    if arguments.json:
        held_out = dataclasses.asdict(found[1]) if len(found) > 1 else None
        shown = {} if row is None else {"row": dataclasses.asdict(row)}
        say_json({**dataclasses.asdict(found[0]), "validation": held_out, **shown})
        return
    say(_description_table(found))
    if row is not None:
        say(f"\n{_row_text(row)}")


def verify(arguments: argparse.Namespace) -> int:
    """``data verify``."""
    from data_pipeline.inspect import verify as find_problems
    from data_pipeline.shards.manifest import MANIFEST_FILE, Manifest

    folder = arguments.folder
    if not (folder / MANIFEST_FILE).is_file():
        Manifest.load(folder)  # says what a shard folder is: this one is not damaged, it is none
    with progress(f"reading {folder}"):
        problems = interruptible(lambda: find_problems(folder))
    if arguments.json:
        say_json({"folder": folder, "problems": problems})
    elif problems:
        say(f"{folder} is damaged:\n" + "\n".join(indent(problem, "  ") for problem in problems))
    else:
        manifest = Manifest.load(folder)
        say(f"{folder} is whole: {plural(len(manifest.shards), 'shard')}, {manifest.tokens:,} tokens.")
    return FAILED if problems else DONE


# --------------------------------------------------------------------------------------------------- what they print


def _open_source(arguments: argparse.Namespace) -> Source:
    from data_pipeline.prepare.sources import open_source

    return open_source(arguments.source, text_field=arguments.text_field, exclude=arguments.exclude)


def _source_words(arguments: argparse.Namespace) -> list[str]:
    """The options that name the corpus, as they were given."""
    excluded = ["--exclude", *arguments.exclude] if arguments.exclude else []
    field = ["--text-field", arguments.text_field] if arguments.text_field != "text" else []
    return ["--source", arguments.source, *excluded, *field]


def _build_json(report: BuildReport) -> dict[str, Any]:
    def split(found: SplitReport | None) -> dict[str, Any] | None:
        return None if found is None else dataclasses.asdict(found) | {"bytes_per_token": found.bytes_per_token}

    return dataclasses.asdict(report) | {"training": split(report.training), "validation": split(report.validation)}


def _say_build(report: BuildReport) -> None:
    splits = [("training", report.training), ("validation", report.validation)]
    rows = [
        [name, f"{s.documents:,}", f"{s.tokens:,}", f"{s.bytes_per_token:.2f}", f"{s.shards:,}", str(s.folder)]
        for name, s in splits
        if s is not None
    ]
    say(table(["split", "documents", "tokens", "bytes/token", "shards", "folder"], rows))
    if report.skipped:
        say("Left out: " + ", ".join(f"{count:,} {reason}" for reason, count in report.skipped.items()) + ".")
    if report.up_to_date:
        say(f"{report.output} is up to date: built from the same source, tokenizer and options, so nothing was done.")
    else:
        say(f"{report.output} was made in {report.seconds:.1f} s.")
    say(f"Next: deepspeed --hostfile hostfile launcher/pretrain.py --data.train {report.output}")
    say(f"Look at it: {command('data', 'inspect', report.output, '--seq-len', 4096)}")


def _description_table(found: list[Description]) -> str:
    """One column a split."""
    rows = [
        ["documents", *(f"{d.documents:,}" for d in found)],
        ["tokens", *(f"{d.tokens:,}" for d in found)],
        ["bytes per token", *(f"{d.bytes_per_token:.2f}" for d in found)],
        ["mean tokens a document", *(f"{d.mean_tokens:,.0f}" for d in found)],
        ["longest document, tokens", *(f"{d.longest_tokens:,}" for d in found)],
        ["vocabulary", *(f"{d.vocab_size:,}" for d in found)],
        ["shards", *(f"{d.shards:,}" for d in found)],
        ["size on disk", *(human_bytes(d.shard_bytes) for d in found)],
        *_packing_rows(found),
        *_histogram_rows(found),
    ]
    return table([found[0].folder, *(d.split for d in found)], rows)


def _packing_rows(found: list[Description]) -> list[list[str]]:
    packings = [d.packing for d in found if d.packing is not None]
    if not packings:
        return []
    return [
        ["rows of an epoch", *(f"{p.rows:,}" for p in packings)],
        ["padding", *(f"{100 * p.padding_share:.2f}%" for p in packings)],
        ["documents longer than a row", *(f"{p.documents_cut:,}" for p in packings)],
        ["truncated tokens", *(f"{p.truncated_tokens:,}" for p in packings)],
    ]


def _histogram_rows(found: list[Description]) -> list[list[str]]:
    """Documents by length: one row a power of two."""
    exponents = sorted({int(key.removeprefix("2^")) for d in found for key in d.length_histogram})
    return [
        [
            f"documents of {2**k:,} to {2 ** (k + 1) - 1:,} tokens",
            *(str(d.length_histogram.get(f"2^{k}", 0)) for d in found),
        ]
        for k in exponents
    ]


def _row_text(row: RowView) -> str:
    lines = [f"row {row.row} of {row.num_rows:,}: {row.tokens:,} tokens, {row.padding_tokens:,} of padding"]
    for piece in row.pieces:
        part = f"tokens {piece.start:,} to {piece.stop:,} of {piece.document_tokens:,}"
        lines.append(f"\n  {piece.name}: {part}")
        lines.append(f"    {piece.head!r}" + (f"\n    … {piece.tail!r}" if piece.tail else ""))
    return "\n".join(lines)
