"""Shard folder inspection as plain values: contents, one packed row, and problems."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_pipeline.image_contents import ImageContents, image_contents
from data_pipeline.loader import open_order
from data_pipeline.mixture.file import Mixture, is_mixture
from data_pipeline.preference_contents import PreferenceContents, preference_contents
from data_pipeline.prepare.duplicates.outcome import DUPLICATES_FILE
from data_pipeline.prepare.left_out import LEFT_OUT_FILE
from data_pipeline.rows.epoch_blocks import BlockPlanner, PackReport
from data_pipeline.rows.fim_documents import Documents
from data_pipeline.rows.pack import BEST_FIT, Packing, Piece
from data_pipeline.rows.preferences import PreferenceRule
from data_pipeline.rows.row_reader import documents_in
from data_pipeline.shards.local_copies import LocalCopy, copies_folder, open_folder
from data_pipeline.shards.manifest import MANIFEST_FILE, VALIDATION_FOLDER, Manifest
from data_pipeline.shards.marked import marked_text, mask_of
from data_pipeline.shards.problems import shard_problems
from data_pipeline.shards.reader import Corpus, ShardSet, SourceSide, manifest_tokenizer
from data_pipeline.shards.references import read_references
from data_pipeline.shards.shard_compression import PACKED_FILE
from data_pipeline.stores.urls import Location, locate
from longctx.errors import ConfigError, DataError
from longctx.files import convert_write_errors
from longctx.tokenizer import Tokenizer
from longctx.tokenizer.image_tokenizer import ImageTokenizer
from longctx.tokenizer.load_tokenizer import has_tokenizer

PLANNED_DOCUMENTS = 1 << 20
"""Documents that ``describe`` plans, in about a second; for a larger corpus, rows and padding are extrapolated."""

_WHOLE = 1 << 62
"""End offset beyond any document."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """Shard folder statistics."""

    folder: str
    split: str
    documents: int
    tokens: int
    text_bytes: int
    bytes_per_token: float
    longest_tokens: int
    mean_tokens: float
    length_histogram: dict[str, int]
    """Documents by length: key ``2^k`` counts lengths from 2^k to 2^(k+1) - 1 tokens."""
    vocab_size: int
    shards: int
    shard_bytes: int
    tokenizer: str
    manifest_hash: str
    sources: list[dict[str, Any]]
    skipped: dict[str, int]
    duplicates: dict[str, Any]
    """Duplicate counts from the build; empty if it did not look for duplicates, and in the validation split."""
    counted_tokens: int
    """Target tokens: those whose prediction contributes to the loss. All tokens, except in conversation folders."""
    conversation: str
    """Start of the first conversation with target tokens between ⟦ and ⟧; empty in a folder of texts."""
    source_tokens: int
    """Source tokens over all pairs; 0 without pairs."""
    longest_source_tokens: int
    pair: list[str]
    """Source and target from the first pair; empty without pairs."""
    packing: PackReport | None
    """Packing in epoch 0 with seed 0 at the requested ``seq_len``; estimated beyond ``PLANNED_DOCUMENTS`` documents."""
    images: ImageContents | None = None
    """Shape and classes of images; None for texts."""
    preferences: PreferenceContents | None = None
    """Labels and the first record of preferences; None for other documents."""


@dataclass(frozen=True, kw_only=True)
class PieceView:
    """One document piece in a packed row."""

    document: int
    name: str
    start: int
    stop: int
    document_tokens: int
    head: str
    """Text at the start."""
    tail: str
    """Text at the end; empty if ``head`` covers the full piece."""
    source_tokens: int = 0
    """Source tokens, for a pair."""
    source: str = ""
    """Text at the start of the source."""


@dataclass(frozen=True, kw_only=True)
class RowView:
    """One packed row, decoded at both ends of every piece."""

    row: int
    """Row index within the epoch block; ``num_rows`` counts the block's rows."""
    num_rows: int
    block: int
    num_blocks: int
    """Epoch blocks in an epoch."""
    tokens: int
    padding_tokens: int
    pieces: list[PieceView]


def describe(folder: str | Path, *, seq_len: int | None = None, source_seq_len: int = 0) -> Description:
    """Return a shard folder's statistics; with ``seq_len`` also the cost of packing at that length.

    Checksums are not verified. Packing pairs also requires ``source_seq_len``. All document offsets, 8 bytes each, are
    read to find the longest document.
    """
    if source_seq_len and seq_len is None:
        raise ConfigError(
            f"source_seq_len={source_seq_len} limits the source tokens per row and requires seq_len.\n"
            f"Try --seq-len {source_seq_len} --source-seq-len {source_seq_len}."
        )
    shards = ShardSet.open(folder)
    manifest = shards.manifest
    packing = None
    if seq_len is not None:
        _check_seq_len(seq_len)
        rule = BEST_FIT
        if shards.manifest.is_preferences:
            rule = Packing(examples=PreferenceRule())
        else:
            _check_texts(shards)
        planner = BlockPlanner(shards, seq_len, source_seq_len=source_seq_len, packing=rule)
        packing = planner.report(documents=PLANNED_DOCUMENTS)
    return Description(
        folder=str(folder),
        split=manifest.split,
        documents=manifest.documents,
        tokens=manifest.tokens,
        text_bytes=manifest.text_bytes,
        bytes_per_token=manifest.text_bytes / max(manifest.tokens, 1),
        longest_tokens=shards.longest_document(),
        mean_tokens=manifest.tokens / max(manifest.documents, 1),
        length_histogram=manifest.length_histogram,
        vocab_size=manifest.vocab_size,
        shards=len(manifest.shards),
        shard_bytes=sum(entry.bytes for entry in manifest.shards),
        tokenizer=manifest.tokenizer,
        manifest_hash=manifest.hash,
        sources=manifest.sources,
        skipped=manifest.skipped,
        duplicates={name: value for name, value in manifest.duplicates.items() if name != "list"},
        counted_tokens=manifest.num_targets or manifest.tokens,
        conversation=_first_conversation(shards),
        source_tokens=manifest.source_tokens,
        longest_source_tokens=shards.longest_document("source") if manifest.source_tokens else 0,
        pair=_first_pair(shards),
        packing=packing,
        images=image_contents(shards) if shards.is_images else None,
        preferences=preference_contents(shards) if manifest.is_preferences else None,
    )


def _first_conversation(shards: ShardSet) -> str:
    """Return the start of the first conversation as text, with target tokens marked; empty without conversations."""
    if not shards.is_masked or not shards.num_documents:
        return ""
    ids, bounds = shards.document(0), shards.target_runs(0)
    assert bounds is not None
    text = marked_text(ids[:_SHOWN_TOKENS], shards.tokenizer(), mask_of(bounds, len(ids))[:_SHOWN_TOKENS])
    if len(ids) > _SHOWN_TOKENS:
        text += " …"
    return text


def _first_pair(shards: ShardSet) -> list[str]:
    """Return the start of the first pair's source and target; an empty list without pairs."""
    if not shards.manifest.has_sources or not shards.num_documents:
        return []
    tokenizer = shards.tokenizer()
    target = tokenizer.decode(shards.slice(0, 0, _SHOWN_TOKENS))
    return [_source_text(shards, 0, tokenizer, _SHOWN_TOKENS), target]


def show_row(
    folder: str | Path,
    *,
    seq_len: int,
    row: int,
    seed: int = 0,
    epoch: int = 0,
    block: int | None = None,
    shuffle: bool = True,
    preview_tokens: int = 32,
    source_seq_len: int = 0,
) -> RowView:
    """Return row ``row`` in an epoch as the loader packs it, with both ends of each piece decoded.

    ``preview_tokens`` are decoded at each end. ``block`` makes ``row`` an index within that epoch block, and only that
    block is planned; otherwise all blocks up to the row are planned, at about a second per million documents. Raises
    ConfigError if the row does not exist.
    """
    _check_seq_len(seq_len)
    shards = ShardSet.open(folder)
    _check_texts(shards)
    tokenizer = shards.tokenizer()
    planner = BlockPlanner(shards, seq_len, seed=seed, shuffle=shuffle, source_seq_len=source_seq_len)
    if block is None:
        block, row = _find_row(planner, epoch, row, seq_len)
    if not 0 <= block < planner.num_blocks:
        raise ConfigError(
            f"block={block} is out of range: an epoch has blocks 0 to {planner.num_blocks - 1} at seq_len={seq_len}."
        )
    plan = planner.plan(epoch, block)
    if not 0 <= row < plan.num_rows:
        raise ConfigError(
            f"row={row} is out of range: block {block} has rows 0 to {plan.num_rows - 1} at seq_len={seq_len}."
        )
    pieces = [_piece_view(shards, tokenizer, piece, preview_tokens) for piece in plan.row(row)]
    tokens = int(plan.row_tokens[row])
    return RowView(
        row=row,
        num_rows=plan.num_rows,
        block=block,
        num_blocks=planner.num_blocks,
        tokens=tokens,
        padding_tokens=seq_len - tokens,
        pieces=pieces,
    )


def decode_rows(
    data: str | Path,
    *,
    seq_len: int,
    rows: int,
    first_row: int = 0,
    seed: int = 0,
    packing: Packing = BEST_FIT,
    source_seq_len: int = 0,
) -> Iterator[str]:
    """Yield ``rows`` rows as text, starting at row ``first_row``, with a header line above each row and document.

    Stops at the epoch's end. ``data`` is a shard folder or a mixture file; rows before the first are planned but not
    read. Raises ConfigError for sizes below 1, and DataError if a folder cannot be read or a mixture is used up.
    """
    _check_seq_len(seq_len)
    if rows < 1:
        raise ConfigError(f"rows={rows} must be at least 1.")
    if first_row < 0:
        raise ConfigError(f"first_row={first_row} must be at least 0: row numbers start at 0.")
    folders, order = open_order(
        data,
        seq_len,
        seed=seed,
        packing=packing,
        source_seq_len=source_seq_len,
        open_folder=partial(ShardSet.open, verify=False),
    )
    first_folder = folders[0]
    _check_texts(first_folder)
    corpus, tokenizer = Corpus(folders), first_folder.tokenizer()
    documents = documents_in(folders, order.fim_by_folder)
    # Positions can only be advanced row by row, so skip in batches that bound the memory for skipped rows.
    at = order.start()
    for first in range(0, first_row, _SKIPPED_AT_ONCE):
        _, at = order.rows(at, min(_SKIPPED_AT_ONCE, first_row - first))
    epoch = at.epoch
    for number in range(first_row, first_row + rows):
        if at.epoch != epoch:
            return
        (row,), at = order.rows(at, 1)
        tokens = sum(stop - start for _, start, stop in row)
        source_usage = ""
        if source_seq_len:
            source_usage = f", sources {sum(row.source_lengths):,} of {source_seq_len:,}"
        text = [f"════ row {number} ({tokens:,} of {seq_len:,} tokens{source_usage})"]
        for document, start, stop in row:
            size = int(documents.lengths_of(np.array([document]))[0])
            name = corpus.name(document)
            if len(folders) > 1:
                name = f"{folders[corpus.folder_of(document)].folder.name}: {name}"
            text.append(f"──── {name} (tokens {start:,} to {stop:,} of {size:,})")
            if source_seq_len:
                text.append(_source_text(first_folder, document, tokenizer))
                text.append("⇒")
            text.append(_text_of(documents, (document, start, stop), tokenizer))
        yield "\n".join(text) + "\n"


def _source_text(shards: ShardSet, document: int, tokenizer: Tokenizer, most: int = _WHOLE) -> str:
    """Return the text of a pair's source, or its first ``most`` tokens."""
    (ids,) = SourceSide(shards).slices([(document, 0, most)])
    return _with_marks(ids, tokenizer)


def _text_of(documents: Documents, piece: Piece, tokenizer: Tokenizer) -> str:
    """Return a piece as text, with target tokens marked in conversations."""
    document, start, stop = piece
    ids = documents.slice(document, start, stop)
    bounds = documents.target_runs(document)
    if bounds is None:
        return _with_marks(ids, tokenizer)
    # Bounds are positions in the full document: build its mask, then cut out the piece.
    return marked_text(ids, tokenizer, mask_of(bounds, max(stop, int(bounds[-1:].sum())))[start : start + len(ids)])


def _with_marks(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """Decode tokens to text and spell out fill-in-the-middle marks, which the tokenizer's decoder drops."""
    text = ""
    # Split at the marks, so that each span is one mark followed by ordinary tokens.
    marks = np.flatnonzero(np.isin(ids, tokenizer.special.fim or ()))
    for part in np.split(ids, marks):
        if len(part) and len(marks) and part[0] in ids[marks]:
            text += tokenizer.piece(int(part[0]))
            part = part[1:]
        text += tokenizer.decode(part)
    return text


_SHOWN_TOKENS = 512
_SKIPPED_AT_ONCE = 1024
"""Rows planned at once while skipping; their pieces are in memory together."""


def _find_row(planner: BlockPlanner, epoch: int, row: int, seq_len: int) -> tuple[int, int]:
    """Return the epoch block that contains an epoch's row, and the row's index in it; raise ConfigError if there is
    none.
    """
    # Row counts are known only after planning, so plan blocks in order until the row is reached.
    first = 0
    for block in range(planner.num_blocks):
        num_rows = planner.plan(epoch, block).num_rows
        if first <= row < first + num_rows:
            return block, row - first
        first += num_rows
    if not first:
        raise planner.no_rows_error()
    raise ConfigError(f"row={row} is out of range: this epoch has rows 0 to {first - 1} at seq_len={seq_len}.")


def find_problems(folder: str | Location) -> list[str]:
    """Return every problem in a shard folder and its ``validation`` split, one sentence each; empty if both are sound.

    For a mixture file, check all its sources' folders. Reads every byte and checks: the manifest's hash, types and file
    names; sizes, checksums and block checksums of shards; document offsets, lengths, names, and ids against vocabulary
    and padding; the tokenizer; and unlisted files. Every shard in a packed or remote folder is fetched again, whatever
    the cache contains.
    """
    place = locate(folder)
    if isinstance(place, Path) and is_mixture(place):
        sources = Mixture.load(place).folders(place.parent)
        return [problem for source in sources for problem in find_problems(source)]
    problems = list(_problems(place))
    if (place / VALIDATION_FOLDER).is_dir():
        problems += _problems(place / VALIDATION_FOLDER)
    return problems


def _problems(place: Location) -> Iterator[str]:
    # A plain local folder is checked in place; packed and remote folders need a fresh copy, because a cached one would
    # hide damage at the source.
    if isinstance(place, Path) and not (place / PACKED_FILE).is_file():
        try:
            _, manifest, _ = open_folder(place)
        except DataError as error:
            yield str(error)
            return
        yield from _content_problems(place, place, manifest, None)
        return
    home = copies_folder()
    with convert_write_errors(home):
        home.mkdir(parents=True, exist_ok=True)
    # Use the cache's disk, which has room for shards.
    with tempfile.TemporaryDirectory(prefix=".verify-", dir=home) as temporary:
        try:
            folder, manifest, copy = open_folder(place, temporary)
        except DataError as error:
            yield str(error)
            return
        for problem in _content_problems(place, folder, manifest, copy):
            # Messages name the user's path, not our temporary copy.
            yield problem.replace(str(folder), str(place))


def _content_problems(place: Location, folder: Path, manifest: Manifest, copy: LocalCopy | None) -> Iterator[str]:
    """Yield problems other than an unreadable manifest; ``folder`` contains shards that can be mapped."""
    if manifest.left_out:
        yield from _list_problems(place / LEFT_OUT_FILE, manifest.left_out)
    if manifest.duplicates.get("list"):
        yield from _list_problems(place / DUPLICATES_FILE, manifest.duplicates["list"])
    tokenizer = None
    problem = f"{folder}: the tokenizer is missing (no tokenizer.model, tokenizer.json or image.json)."
    if has_tokenizer(folder):
        try:
            tokenizer = manifest_tokenizer(folder, manifest)
        except DataError as error:
            problem = str(error)
    padding = None
    if tokenizer is not None:
        padding = _padding_alone(tokenizer)
        # Ids are later checked against the manifest, so it must not allow more ids than the tokenizer has.
        own = (tokenizer.vocab_size, tokenizer.padding)
        if own != (manifest.vocab_size, manifest.padding):
            yield (
                f"{place / MANIFEST_FILE} has vocab_size={manifest.vocab_size} and padding={manifest.padding}, but "
                f"its tokenizer has {own[0]} and {own[1]}. Build the folder again."
            )
    image_format = None
    if isinstance(tokenizer, ImageTokenizer):
        image_format = tokenizer.format
    elif tokenizer is not None and manifest.is_images:
        yield f"{place / MANIFEST_FILE} lists images, but the folder has a text tokenizer. Build the folder again."
    yield from shard_problems(folder, manifest, padding=padding, image_format=image_format, copy=copy)
    if manifest.is_preferences:
        try:
            read_references(place, manifest)
        except DataError as error:
            yield str(error)
    # Reported last, because shards are checked without a tokenizer too.
    if tokenizer is None:
        yield problem


def _padding_alone(tokenizer: Tokenizer) -> int | None:
    """Return the padding id if it has no other meaning, so that documents never contain it; None otherwise."""
    padding, special = tokenizer.padding, tokenizer.special
    if padding != special.padding or padding in (special.begin, special.end) or tokenizer.decode([padding]):
        return None
    return padding


def _list_problems(path: Location, hash: str) -> Iterator[str]:
    """Yield problems in a list stored with the shards (skipped records or duplicates)."""
    digest = xxhash.xxh3_128()
    if isinstance(path, Path) and path.exists() and not path.is_file():
        # Opening a pipe without a writer would hang.
        yield f"{path} is not a regular file."
        return
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 22):
                digest.update(piece)
    except FileNotFoundError:
        yield f"{path} is missing."
        return
    if digest.hexdigest() != hash:
        yield f"{path} was changed after it was written."


def _piece_view(shards: ShardSet, tokenizer: Tokenizer, piece: tuple[int, int, int], preview: int) -> PieceView:
    """Decode a piece at both ends, or completely if the two ends would meet."""
    document, start, stop = piece
    # Show only the source's start: rows always contain the complete source, even if its target is cut.
    source_tokens, source = 0, ""
    if shards.manifest.has_sources:
        source_tokens = int(shards.lengths_of(np.array([document]), "source")[0])
        source = _source_text(shards, document, tokenizer, 2 * preview)
    head, tail = (start, stop), (stop, stop)
    if stop - start > 2 * preview:
        head, tail = (start, start + preview), (stop - preview, stop)
    return PieceView(
        document=document,
        name=shards.name(document),
        start=start,
        stop=stop,
        document_tokens=len(shards.document(document)),
        head=_text_of(shards, (document, *head), tokenizer),
        tail=_text_of(shards, (document, *tail), tokenizer),
        source_tokens=source_tokens,
        source=source,
    )


def _check_texts(shards: ShardSet) -> None:
    """Raise DataError for a folder of images or preferences: a row's documents are made as it is read."""
    if shards.manifest.is_preferences:
        raise DataError(
            f"{shards.folder} contains preferences: rows depend on the objective, so they are not shown here.\n"
            f"Look at the first record: longctx data inspect {shards.folder}"
        )
    if shards.is_images:
        raise DataError(
            f"{shards.folder} contains images: a model's patches or pixels fill the rows, so they are not known here.\n"
            f"Look at the images: longctx data inspect {shards.folder} --picture images.png"
        )


def _check_seq_len(seq_len: int) -> None:
    if seq_len < 1:
        raise ConfigError(f"seq_len={seq_len} must be at least 1.")
