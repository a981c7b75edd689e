"""The verbs ``data build|verify|pack``."""

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
from launcher.cli.corpus import (
    CorpusOptions,
    Duplicates,
    Workers,
    duplicate_lines,
    hash_source,
    read_so_far,
    say_left_out,
)
from launcher.cli.image_options import (
    ImageFlags,
    build_images,
    check_no_image_flags,
    check_no_text_options,
)
from launcher.cli.shared_options import RepeatedValues, ShardFolder, flatten_values
from launcher.cluster.exit import DONE, FAILED
from launcher.wording import format_count
from longctx.config import PRESETS
from longctx.errors import ConfigError, DataError

if TYPE_CHECKING:
    from data_pipeline.prepare.build_shards import BuildReport, SplitReport
    from longctx.tokenizer import Tokenizer

_KEEP = Duplicates()
_ALL_CORES = Workers()
_DEFAULT_CHAT_OPTIONS = ChatOptions()
_DEFAULT_IMAGE_FLAGS = ImageFlags()
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
    "text",
    _DEFAULT_IMAGE_FLAGS,
)
"""Defaults of all other options: ``data build --without`` accepts only these."""
_MAX_SHOWN_TOKENS = 5


def build(
    corpus: OmitArgPrefixes[CorpusOptions],
    *,
    tokenizer: Annotated[Path | None, arg(metavar="TOKENIZER")] = None,
    output: Annotated[str, arg(metavar="DIR")],
    kind: Literal["text", "images", "preferences"] = "text",
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
    image_flags: OmitArgPrefixes[ImageFlags] = _DEFAULT_IMAGE_FLAGS,
    json: Json = False,
) -> None:
    """Tokenize a corpus, or store images, in a shard folder.

    The folder contains checksummed Arrow shards, and held-out documents in DIR/validation. One folder serves every
    sequence length. Repeating a finished build changes no file and says so. A build that was stopped or killed
    continues from its finished source parts when the same command is repeated.

    Args:
        tokenizer: Required for text: SentencePiece model, tokenizer.json, Hugging Face folder, checkpoint or run. For
            images: folder with the classes, size and palette to reuse.
        output: Folder to create, or its URL (s3://, gs://): it is then built in the cache and sent, the manifest last.
        kind: images reads .png, .jpg, .bmp, .gif, .webp and .tif files, with the first folder as class, IDX files as
            of MNIST, or Parquet. preferences reads records with 'chosen' and 'rejected' replies to a 'prompt', or with
            'prompt', 'completion' and 'label'.
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
        image_flags: How images become tokens.
    """
    from data_pipeline.shards.shard_writer import DEFAULT_SHARD_TOKENS

    # --without edits a finished folder. Any other option would suggest a rebuild, so all must have their defaults.
    if without:
        given_options = (corpus, tokenizer, validation_fraction, shard_tokens, exact, paragraphs, special_tokens)
        others = (overwrite, worker_options, duplicates, chat_options, kind, image_flags)
        _leave_out(output, flatten_values(without), is_alone=given_options + others == _DEFAULT_OPTIONS, json=json)
        return
    if shard_tokens is None:
        shard_tokens = DEFAULT_SHARD_TOKENS
    options = {
        "validation_fraction": validation_fraction,
        "shard_tokens": shard_tokens,
        "overwrite": overwrite,
    }
    if kind == "images":
        given = {"--exact": exact, "--paragraphs": paragraphs, "--special-tokens": special_tokens != "text"}
        check_no_text_options(corpus, (duplicates, chat_options), given)
        build_images(corpus, tokenizer, output, flags=image_flags, workers=worker_options, json=json, **options)
        return
    check_no_image_flags(image_flags)
    if tokenizer is None:
        raise ConfigError("--tokenizer is missing. `longctx tokenizer train` makes one.")
    options |= {"exact": exact, "paragraphs": paragraphs, "parse_special_tokens": special_tokens == "parse"}
    if kind == "preferences" and (exact or paragraphs or special_tokens != "text"):
        raise ConfigError("--exact, --paragraphs and --special-tokens apply to texts, not to preferences.")
    options["preferences"] = kind == "preferences"
    _build_texts(corpus, tokenizer, output, duplicates, chat_options, workers=worker_options, json=json, **options)


def _build_texts(
    corpus: CorpusOptions,
    tokenizer: Path,
    output: str,
    duplicates: Duplicates,
    chat_options: ChatOptions,
    *,
    workers: Workers,
    json: bool,
    preferences: bool,
    **options: Any,
) -> None:
    """Build a folder of texts or preferences and print the report; ``options`` go to ``build_shards``."""
    from data_pipeline.prepare.build_shards import build_shards

    # Before the source is hashed, which may take minutes: errors in options and tokenizer are reported at once.
    rule, loaded = duplicates.rule(), _loaded(tokenizer)
    with workers.hired() as engine:
        source = corpus.open(preferences=preferences)
        hash_source(source)
        # Duplicates are found in a separate pass over the same bytes, before the encoding pass.
        passed = source.num_bytes if rule.finds else 0
        with progress(f"tokenizing {source.spec}", total=source.num_bytes + passed, rate=byte_rate) as update:
            report = build_shards(
                source,
                loaded,
                output,
                workers=workers.workers,
                engine=engine,
                say=note,
                duplicates=rule,
                chat=chat_options.rule(),
                comparing=lambda documents, text_bytes: update(
                    source.bytes_read, note=f"comparing {read_so_far(documents, text_bytes)}", amount=text_bytes
                ),
                progress=lambda documents, text_bytes: update(
                    passed + source.bytes_read, note=read_so_far(documents, text_bytes), amount=text_bytes
                ),
                **options,
            )
    _say_build(report, loaded, json=json, preferences=preferences)


def _loaded(tokenizer: Path) -> Tokenizer:
    """Load a tokenizer and print remarks if it frames documents unusually."""
    from longctx.tokenizer import load_tokenizer
    from longctx.tokenizer.tokenizer_warnings import frame_warnings

    loaded = load_tokenizer(tokenizer)
    if loaded.kind == "images":
        raise ConfigError(f"--tokenizer {tokenizer} is the format of images. Add --kind images, or name another one.")
    for message in frame_warnings(loaded):
        note(f"{tokenizer}: {message}")
    return loaded


def verify_shards(folder: ShardFolder, *, json: Json = False) -> int:
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


def _say_build(report: BuildReport, tokenizer: Tokenizer, *, json: bool, preferences: bool = False) -> None:
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
    if preferences:
        print_line(f"Look at it: {command_line('data', 'inspect', report.output)}")
        return
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
