"""``RowReader``: reads rows as documents, as pairs, or as examples made from texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data_pipeline.rows.examples import Examples, Recipe
from data_pipeline.rows.fim import Fim
from data_pipeline.rows.fim_documents import Documents, FimDocuments
from data_pipeline.rows.images import ImageRule, Images
from data_pipeline.rows.pack import Packing, Row
from data_pipeline.rows.packing_checks import check_kind_of_texts
from data_pipeline.rows.preferences import PreferenceReplies, PreferenceRule
from data_pipeline.rows.row_batches import (
    Lengths,
    Place,
    Readable,
    Sources,
    build_batch,
    build_share,
    lengths_of,
    packed_documents,
)
from data_pipeline.rows.span_corruption import SpanRule, Spans
from data_pipeline.rows.text_segments import SegmentRule, TextSegments
from data_pipeline.rows.token_masking import Masking, MaskRule
from data_pipeline.shards.reader import Corpus, ShardSet, SourceSide
from longctx.batch import PackedDocuments
from longctx.compact_batch import CompactBatch
from longctx.errors import ConfigError


@dataclass(frozen=True)
class RowReader:
    """Reads rows, with both sides if they contain pairs."""

    documents: Documents
    seq_len: int
    masking: Masking | None = None
    source_seq_len: int = 0
    source: SourceSide | None = None
    """Source side, for pairs."""
    recipe: Recipe | None = None
    """Recipe for examples, if they are made from texts."""
    replies: PreferenceReplies | None = None
    """Records with preferences, if the folders contain them."""

    def batch(self, rows: Sequence[Row]) -> CompactBatch:
        """Return the rows as a batch [rows, seq_len]."""
        documents, rows, sources = self._resolve_sources(rows)
        return build_batch(documents, rows, self.seq_len, masking=self.masking, sources=sources)

    def share(
        self, rows: Sequence[Row], place: Place, place_source: Place | None = None
    ) -> tuple[CompactBatch, PackedDocuments, Lengths]:
        """Return one rank's portion of that batch, the documents on all ranks, and their source lengths."""
        documents, rows, sources = self._resolve_sources(rows)
        share, whole = build_share(
            documents, rows, self.seq_len, place, masking=self.masking, sources=sources, place_source=place_source
        )
        of_sources: Lengths = ()
        if sources is not None:
            of_sources = packed_documents([row.source for row in rows], sources.seq_len, of_pairs=True).lengths
        return share, whole, of_sources

    def layout(self, rows: Sequence[Row]) -> PackedDocuments:
        """Return the batch's documents without reading tokens."""
        return packed_documents(self._resolve_sources(rows)[1], self.seq_len, of_pairs=self.source_seq_len > 0)

    def lengths(self, rows: Sequence[Row]) -> Iterator[tuple[Lengths, ...]]:
        """Yield each row's document lengths, and source lengths if it has pairs, without reading tokens."""
        return lengths_of(self._resolve_sources(rows)[1], self.seq_len, self.source_seq_len)

    def segments(self, row: Row) -> list[tuple[np.ndarray, int, int]]:
        """Return a row's two-segment examples: unmasked tokens, start token of the second segment, and order label."""
        assert self.recipe is not None, "texts without a recipe have no segments"
        pieces = list(zip(row, row.epochs or [0] * len(row), strict=True))
        return [(made.tokens, made.second, made.label or 0) for made in self.recipe.examples(pieces)]

    def _resolve_sources(self, rows: Sequence[Row]) -> tuple[Readable, Sequence[Row], Sources | None]:
        # The only place that distinguishes the kinds of data: everything below sees documents, rows and optional
        # sources.
        if self.replies is not None:
            return self.replies, self.replies.rows(rows), None
        if self.recipe is not None:
            examples, rows = Examples.of_rows(self.recipe, rows)
            if not self.source_seq_len:
                return examples, rows, None
            return examples, rows, Sources(examples.sources, self.source_seq_len)
        if self.source is not None:
            return self.documents, rows, Sources(self.source, self.source_seq_len)
        return self.documents, rows, None


def reader_options_for(
    folders: Sequence[ShardSet],
    packing: Packing,
    seq_len: int,
    source_seq_len: int,
    *,
    seed: int,
    augments: bool = True,
) -> dict[str, Any]:
    """Return a folder's source side, recipe or replies as ``RowReader`` fields; empty for texts read unchanged.

    ``augments`` is False in validation, which reads the middle of every image, unflipped.
    """
    if isinstance(packing.examples, PreferenceRule):
        if source_seq_len:
            raise ConfigError(f"data.source_seq_len={source_seq_len} does not apply to preferences. Leave it out.")
        return {"replies": PreferenceReplies(packing.examples, folders)}
    check_kind_of_texts(folders[0])
    if isinstance(packing.examples, ImageRule):
        # Raises ConfigError if rows are too short for an image, before any row is read.
        packing.examples.most_tokens(seq_len, source_seq_len)
        return {"recipe": Images(replace(packing.examples, augment=augments), folders[0], seed=seed)}
    if folders[0].is_images:
        raise ConfigError(
            f"{folders[0].folder} contains images, which a model without model.image cannot read.\n"
            "Set model.image (height, width, channels, patch), or use a folder of texts."
        )
    if isinstance(packing.examples, SpanRule):
        spans = Spans(packing.examples, folders[0], seq_len=seq_len, source_seq_len=source_seq_len, seed=seed)
        return {"recipe": spans}
    if isinstance(packing.examples, SegmentRule):
        # Raises ConfigError if rows are too short for two segments, before any row is read.
        packing.examples.most_tokens(seq_len, source_seq_len)
        return {"recipe": TextSegments(packing.examples, folders[0], seed=seed)}
    if source_seq_len:
        return {"source": SourceSide(folders[0])}
    return {}


def masking_of(rule: MaskRule | None, folders: Sequence[ShardSet], *, seed: int) -> Masking | None:
    """Apply a masking rule to these folders; raise ConfigError if they do not support masking."""
    if rule is None:
        return None
    return Masking(rule, folders, seed=seed)


def documents_in(folders: Sequence[ShardSet], fim_by_folder: Sequence[Fim | None] = ()) -> Documents:
    """Return the documents in all folders under one numbering, with fill-in-the-middle according to ``fim_by_folder``.

    Raises DataError if tokenizers differ, and ConfigError for fill-in-the-middle in conversations.
    """
    documents: ShardSet | Corpus = folders[0]
    if len(folders) > 1:
        documents = Corpus(folders)
    for shards, fim in zip(folders, fim_by_folder, strict=False):
        if fim is not None and (shards.is_masked or shards.manifest.is_preferences):
            raise ConfigError(
                f"data.fim_rate requires texts, but {shards.folder} contains "
                f"{shards.manifest.kind or 'conversations'}.\n"
                "Set data.fim_rate=0 (fim_rate of a mixture's source)."
            )
    if any(fim_by_folder):
        return FimDocuments(documents, fim_by_folder)
    return documents
