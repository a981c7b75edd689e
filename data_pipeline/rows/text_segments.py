"""Two text segments and whether they belong together: the task for a pair head in addition to masked tokens.

    [CLS] first segment [SEP] second segment [SEP]

"nsp" (BERT, Devlin et al., 2018, arXiv 1810.04805, §3.1): half the second segments are replaced by a span from another
document. "sop" (ALBERT, Lan et al., 2019, arXiv 1909.11942, §3.1): half the pairs are swapped. A document piece is cut
at the start of a paragraph if the folder records paragraphs (`data build --paragraphs`), and otherwise at the start of
a word.

Cut, decision and replacement are functions of (seed, epoch, folder, document, position): the same for any ranks,
threads and resumption. A span from another document has as many tokens as the segment that it replaces, so an example's
length follows from its piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_pipeline.rows.examples import Example, PieceOfEpoch, check_texts, num_special_tokens, read_text_pieces
from data_pipeline.rows.pack import Piece
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shuffle import key64
from longctx.errors import ConfigError
from longctx.integer_hash import mix64_array
from longctx.tokenizer.word_starts import find_word_starts

_NUM_SPECIAL_TOKENS = 3
"""Special tokens per example."""
_CANDIDATES = 16
"""Documents tried for a replacement that is long enough; if all are too short, the segments stay together."""

# Salts; ``rows.span_corruption`` has the previous ones.
_CUT, _ORDER, _OTHER, _START = 401, 402, 403, 404


@dataclass(frozen=True)
class SegmentRule:
    """Rule for choosing the second segment."""

    kind: str
    """``nsp`` or ``sop``."""
    least_tokens, has_segments, has_labels, pixel_bytes = 2, True, True, 0

    def __str__(self) -> str:
        """Return the rule as recorded in the loader state."""
        return f"pairs of segments ({self.kind})"

    def lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Return the example lengths for pieces of these lengths."""
        return lengths + _NUM_SPECIAL_TOKENS

    def source_lengths(self, lengths: np.ndarray) -> None:
        """Return None: an example has no encoder input."""

    def most_tokens(self, seq_len: int, source_seq_len: int) -> int:
        """Return the longest piece length with an example that fits into a row; raise ConfigError if rows are too
        short.
        """
        if seq_len < _NUM_SPECIAL_TOKENS + self.least_tokens:
            raise ConfigError(
                f"data.seq_len={seq_len} cannot fit two segments: with their {_NUM_SPECIAL_TOKENS} special tokens they "
                f"need at least {_NUM_SPECIAL_TOKENS + self.least_tokens}. Try 128."
            )
        return seq_len - _NUM_SPECIAL_TOKENS


class TextSegments:
    """Segment rule applied to a folder's documents."""

    def __init__(self, rule: SegmentRule, shards: ShardSet, *, seed: int) -> None:
        """Initialize; raise ConfigError if the folder or its tokenizer does not support two segments."""
        self.rule, self.seed, self.shards = rule, seed, shards
        key = f"model.pair_head={rule.kind}"
        check_texts(shards, key, "set model.pair_head=none")
        tokenizer = shards.tokenizer()
        self._special_tokens = num_special_tokens(shards)
        if self._special_tokens != (1, 1):
            raise ConfigError(
                f"{key} requires [CLS] first [SEP] second [SEP], but {tokenizer.path} adds {self._special_tokens[0]} "
                f"tokens before a text and {self._special_tokens[1]} after it.\nTrain one with `longctx tokenizer "
                "train --kind wordpiece`, and build the shards with it."
            )
        if rule.kind == "nsp" and shards.num_documents < 2:
            raise ConfigError(
                f"{key} takes second segments from other documents, but {shards.folder} has only one.\nUse a folder "
                "with more, or set model.pair_head=sop."
            )
        self._begin, self._end = (np.array(ids, np.int32) for ids in (tokenizer.prefix_ids, tokenizer.suffix_ids))
        self._is_word_start = find_word_starts(tokenizer)
        self._key = int(shards.manifest.hash[:16], 16)

    def examples(self, pieces: Sequence[PieceOfEpoch]) -> list[Example]:
        """Return each piece's example with two segments in some order."""
        texts = read_text_pieces(self.shards, [piece for piece, _ in pieces])
        split_points = [self._cut(*piece, tokens) for piece, tokens in zip(pieces, texts, strict=True)]
        # Use the hash's top bit.
        order_labels = [self._hash(*piece, _ORDER) >> 63 for piece in pieces]
        seconds: dict[int, np.ndarray] = {}
        if self.rule.kind == "nsp":
            wanted = [number for number, order in enumerate(order_labels) if order]
            others = self._others([pieces[n] for n in wanted], [len(texts[n]) - split_points[n] for n in wanted])
            found = {n: other for n, other in zip(wanted, others, strict=True) if other is not None}
            seconds = dict(zip(found, read_text_pieces(self.shards, found.values()), strict=True))
            # If every candidate was too short, the piece stays unchanged and is labeled accordingly.
            order_labels = [int(number in seconds) for number in range(len(pieces))]
        made = []
        for number, (tokens, cut, order) in enumerate(zip(texts, split_points, order_labels, strict=True)):
            first, second = tokens[:cut], seconds.get(number, tokens[cut:])
            if order and self.rule.kind == "sop":
                first, second = second, first
            parts = (self._begin, first, self._end, second, self._end)
            # [CLS] first [SEP] second [SEP]: the second segment starts after the first one and two special tokens.
            made.append(Example(np.concatenate(parts), second=len(first) + 2, label=order))
        return made

    def _hash(self, piece: Piece, epoch: int, seed_tag: int, number: int = 0) -> int:
        document, start, _ = piece
        return key64(key64(document, self._key), self.seed, epoch, start, seed_tag, number)

    def _cut(self, piece: Piece, epoch: int, tokens: np.ndarray) -> int:
        """Return the first segment's length in tokens, drawn from the possible cuts."""
        document, start, stop = piece
        split_points = np.empty(0, np.int64)
        if self.shards.manifest.has_paragraphs:
            paragraph_starts = self.shards.paragraphs(document) - self._special_tokens[0]
            split_points = paragraph_starts[(paragraph_starts > start) & (paragraph_starts < stop)] - start
        # With a single paragraph, or a folder without paragraphs, cut between two words, or failing that between any
        # two tokens.
        if not len(split_points):
            split_points = np.flatnonzero(self._is_word_start[tokens[1:]]) + 1
        if not len(split_points):
            split_points = np.arange(1, len(tokens))
        hashes = mix64_array(split_points.astype(np.uint64) ^ np.uint64(self._hash(piece, epoch, _CUT)))
        return int(split_points[np.argmin(hashes)])

    def _others(self, pieces: Sequence[PieceOfEpoch], lengths: Sequence[int]) -> list[Piece | None]:
        """Return, for each piece, a span of the given length from another document; None if every candidate is too
        short.
        """
        count = self.shards.num_documents
        candidates = np.array(
            [[self._hash(*piece, _OTHER, number) % (count - 1) for number in range(_CANDIDATES)] for piece in pieces],
            np.int64,
        ).reshape(-1, _CANDIDATES)
        # Skip the piece's own document.
        candidates += candidates >= np.array([document for (document, _, _), _ in pieces], np.int64)[:, None]
        unique_candidates, inverse = np.unique(candidates, return_inverse=True)
        text_tokens = (self.shards.lengths_of(unique_candidates) - sum(self._special_tokens))[inverse].reshape(
            candidates.shape
        )
        found: list[Piece | None] = []
        for piece, documents, tokens, wanted in zip(pieces, candidates, text_tokens, lengths, strict=True):
            # Take the first candidate that is long enough, so short documents are used less often than long ones.
            enough = np.flatnonzero(tokens >= wanted)
            if not len(enough):
                found.append(None)
                continue
            document, slack = int(documents[enough[0]]), int(tokens[enough[0]]) - wanted
            start = self._hash(*piece, _START) % (slack + 1)
            found.append((document, start, start + wanted))
        return found
