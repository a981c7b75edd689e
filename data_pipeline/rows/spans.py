"""Corrupted spans: of a text an encoder reads what is left of it, and the decoder writes what is missing.

"T5" (Raffel et al., 2019, arXiv 1910.10683, §3.1.4 and §3.3.4): of a piece of n tokens a share is taken out, in spans
of some tokens on average. Each span leaves a sentinel of its own, in their order; the target is each sentinel and what
stood there, and the end. Spans and what is left between them begin with what is left and alternate, each cut at random
places, as T5's own ``random_spans_noise_mask`` does.

    text      Thank you for inviting me to your party last week
    source    Thank you <0> me to your party <1> week
    target    <0> for inviting <1> last

Where a piece is cut is a function of (seed, epoch, folder, document, position): the same for any ranks, threads and
resumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_pipeline.rows.examples import Example, PieceOfEpoch, check_texts, read_texts
from data_pipeline.rows.pack import Piece
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shuffle import key64
from longctx.errors import ConfigError
from longctx.mixing import mix64_array
from longctx.tokenizer.sides import start_of_targets

# Salts; ``rows.mask`` has the ones before.
_TAKEN, _LEFT = 301, 302


@dataclass(frozen=True)
class SpanRule:
    """How much of a text is taken out."""

    rate: float = 0.15
    """Share of the tokens."""
    length: float = 3.0
    """Tokens of a span, on average."""
    least_tokens, has_segments = 1, False

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ConfigError(f"data.mask_rate={self.rate} must be a share above 0 and below 1. T5 has 0.15.")
        if not self.length >= 1:
            raise ConfigError(f"data.span_length={self.length} must be at least 1 token. T5 has 3.")

    def __str__(self) -> str:
        """As a loader's state has it."""
        return f"spans of {self.length:g}, {self.rate:g} of the tokens"

    def taken(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens that are taken out of pieces of these lengths; of one token none."""
        wanted = np.rint(lengths * self.rate).astype(np.int64)
        return np.minimum(np.maximum(wanted, 1), np.maximum(lengths - 1, 0))

    def spans(self, lengths: np.ndarray) -> np.ndarray:
        """Spans that these tokens are in; as many parts are left."""
        taken = self.taken(lengths)
        found = np.maximum(np.rint(taken / self.length).astype(np.int64), np.minimum(taken, 1))
        return np.minimum(found, lengths - taken)

    def source_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens of the sources: what is left, a sentinel for each span, and the end."""
        return lengths - self.taken(lengths) + self.spans(lengths) + 1

    def lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens of the targets: a start, each span behind its sentinel, and the end."""
        return self.taken(lengths) + self.spans(lengths) + 2

    def most_tokens(self, seq_len: int, source_seq_len: int) -> int:
        """Tokens of the longest piece of which both sides fit a row; ConfigError where none does."""
        lengths = np.arange(1, 2 * (seq_len + source_seq_len) + 2)
        fits = (self.lengths(lengths) <= seq_len) & (self.source_lengths(lengths) <= source_seq_len)
        if not fits.any():
            raise ConfigError(
                f"data.seq_len={seq_len} and data.source_seq_len={source_seq_len} hold not one token whose text is "
                "corrupted: a target has 2 tokens around it, a source 1. Try 128 and 512."
            )
        return int(lengths[fits].max())


class Spans:
    """A rule, for the documents of a folder."""

    def __init__(self, rule: SpanRule, shards: ShardSet, *, seq_len: int, source_seq_len: int, seed: int) -> None:
        """ConfigError for a folder whose texts cannot be corrupted, and for more spans than there are sentinels."""
        self.rule, self.seed, self.shards = rule, seed, shards
        tokenizer = shards.tokenizer()
        self.sentinels = np.array(tokenizer.special.sentinels, np.int32)
        self.start, self.end = start_of_targets(tokenizer), int(tokenizer.ends_with[-1])
        check_texts(shards, "train.objective=spans", "use train.objective=causal")
        longest = rule.most_tokens(seq_len, source_seq_len)
        needed = int(rule.spans(np.array([longest]))[0])
        if needed > len(self.sentinels):
            have = f"{len(self.sentinels)} sentinels"
            if not len(self.sentinels):
                have = "no sentinels"
            raise ConfigError(
                f"rows of {seq_len} and {source_seq_len} tokens hold pieces of {longest} with {needed} spans, and "
                f"{tokenizer.path} has {have}.\nTrain one with `longctx tokenizer train --sentinels {needed}` and "
                "build the shards with it, or take a larger data.span_length."
            )
        self._key = int(shards.manifest.hash[:16], 16)

    def examples(self, pieces: Sequence[PieceOfEpoch]) -> list[Example]:
        """What is missing of each piece, and as its source what is left of it."""
        texts = read_texts(self.shards, [piece for piece, _ in pieces])
        return [self.corrupt(*piece, tokens) for piece, tokens in zip(pieces, texts, strict=True)]

    def corrupt(self, piece: Piece, epoch: int, tokens: np.ndarray) -> Example:
        """The example of a piece with these tokens, int32."""
        document, start, _ = piece
        count = len(tokens)
        taken, spans = (int(of(np.array([count]))[0]) for of in (self.rule.taken, self.rule.spans))
        sentinels = self.sentinels[:spans, None]
        parts = (key64(document, self._key), self.seed, epoch, start)
        # What is left comes first, and then in turns.
        sizes = np.stack([_segments(count - taken, spans, parts, _LEFT), _segments(taken, spans, parts, _TAKEN)], 1)
        cut = np.split(tokens, np.cumsum(sizes.ravel())[:-1])
        # A piece too short for a span is copied: nothing is missing in its source, and its target is empty.
        left, out = (cut[0::2], cut[1::2]) if spans else ([tokens], [])
        source = [part for pair in zip(left, sentinels, strict=False) for part in pair] or left
        target = [part for pair in zip(sentinels, out, strict=True) for part in pair]
        end, begin = np.array([self.end], np.int32), np.array([self.start], np.int32)
        return Example(np.concatenate([begin, *target, end]), np.concatenate([*source, end]))


def _segments(count: int, parts: int, key: tuple[int, ...], salt: int) -> np.ndarray:
    """Lengths [parts] of at least 1 that add up to ``count``: cut where the hashes of places are smallest."""
    if parts <= 1:
        return np.array([count] * parts, np.int64)
    # Every choice of places is as likely as any other: their hashes are in any order.
    places = np.arange(1, count)
    hashes = mix64_array(places.astype(np.uint64) ^ np.uint64(key64(*key, salt)))
    cuts = np.sort(places[np.argsort(hashes, kind="stable")[: parts - 1]])
    return np.diff(cuts, prepend=0, append=count)
