"""Masked tokens: some tokens in a document are chosen, replaced, and predicted from the remaining ones.

"BERT" (Devlin et al., 2018, arXiv 1810.04805, §3.1): 80 % of the chosen tokens become the mask token, 10 % a random
vocabulary token, 10 % stay unchanged. Choice and replacements are functions of (seed, epoch, folder, document,
position): the same for any ranks, threads and resumption. They differ in each epoch ("dynamic", RoBERTa, arXiv
1907.11692, §4.1) unless the rule is ``static``.

With whole words, a word is chosen or kept as a unit, by a draw for its first token. To find that token, up to
``CONTEXT`` − 1 tokens before a span are read with it; a longer word, or a text without word boundaries, is cut there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_pipeline.shards.reader import ShardSet
from data_pipeline.shuffle import fall_below, key64
from longctx.errors import ConfigError
from longctx.integer_hash import mix64_array
from longctx.tokenizer.word_starts import find_word_starts

MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
"""Fractions of the chosen tokens that become the mask token and a random token."""
CONTEXT = 32
"""Maximum tokens per word for whole-word masking."""

# Salts; ``rows.fim`` and ``rows.pack`` have the other salts.
_CHOSEN, _KINDS, _RANDOM = 201, 202, 203


@dataclass(frozen=True)
class MaskRule:
    """Rule that sets the fraction of masked tokens."""

    rate: float = 0.15
    """Fraction of tokens, or of words with ``whole_words``."""
    whole_words: bool = False
    static: bool = False
    """True if every epoch masks the same tokens."""

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ConfigError(f"data.mask_rate={self.rate} must be above 0 and below 1. BERT uses 0.15.")


class Masking:
    """Masking rule applied to a run's folders, which have the same tokenizer."""

    def __init__(self, rule: MaskRule, folders: Sequence[ShardSet], *, seed: int) -> None:
        """Initialize; raise ConfigError if the tokenizer or a folder does not support masking."""
        self.rule, self.seed = rule, seed
        tokenizer = folders[0].tokenizer()
        if tokenizer.special.mask is None:
            raise ConfigError(
                f"train.objective=masked needs a tokenizer with a mask token; {tokenizer.path} lacks it.\n"
                "Train one with `longctx tokenizer train --mask`, and build the shards with it."
            )
        for shards in folders:
            if shards.is_masked:
                raise ConfigError(
                    f"train.objective=masked requires texts, but {shards.folder} contains conversations.\n"
                    "Use folders of texts, or set train.objective=causal with model.causal=true."
                )
        self._mask = tokenizer.special.mask
        self._is_control = tokenizer.is_control
        self._random_ids = np.flatnonzero(~tokenizer.is_control).astype(np.int32)
        # Only whole words read it, and an image's colors have none.
        self._is_word_start = np.ones(tokenizer.vocab_size, bool)
        if rule.whole_words:
            self._is_word_start = find_word_starts(tokenizer)
        if not self._is_word_start[~tokenizer.is_control].any():
            raise ConfigError(
                f"data.mask_whole_words=true needs a tokenizer with vocabulary pieces that mark word starts; "
                f"those in {tokenizer.path} do not. Set data.mask_whole_words=false."
            )
        # Keyed by manifest hash, so a folder's tokens are masked in the same way in any mixture.
        self._folders = [int(shards.manifest.hash[:16], 16) for shards in folders]

    @property
    def context(self) -> int:
        """Number of preceding tokens that must be read with a span."""
        if self.rule.whole_words:
            return CONTEXT - 1
        return 0

    def draw(
        self, folder: int, document: int, epoch: int, first: int, tokens: np.ndarray, before: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the chosen indices [n] in ``tokens`` and their replacements [n].

        ``first`` is the position of ``tokens`` in the document, ``document`` the number within its folder, and
        ``before`` the ``context`` preceding tokens, or fewer at the document's start.
        """
        if self.rule.static:
            epoch = 0
        place = np.arange(first, first + len(tokens))
        parts = (key64(document, self._folders[folder]), self.seed, epoch)
        # Draws depend on the position in the document, not on the span that is read, so spans read by different ranks
        # agree where they overlap. Control tokens are never masked.
        selected = fall_below(self._units(place, tokens, before), self.rule.rate, *parts, _CHOSEN)
        chosen = np.flatnonzero(selected & ~self._is_control[tokens])
        place, read_as = place[chosen], tokens[chosen].astype(np.int32)
        is_mask = fall_below(place, MASK_SHARE, *parts, _KINDS)
        is_random = fall_below(place, MASK_SHARE + RANDOM_SHARE, *parts, _KINDS) & ~is_mask
        keys = mix64_array(place.astype(np.uint64) ^ np.uint64(key64(*parts, _RANDOM)))
        random_ids = self._random_ids[keys % np.uint64(len(self._random_ids))]
        return chosen, np.where(is_mask, self._mask, np.where(is_random, random_ids, read_as)).astype(np.int32)

    def _units(self, place: np.ndarray, tokens: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Return the position that seeds each token's draw: its own, or that of its word's first token."""
        if not self.rule.whole_words or not len(place):
            return place
        # Without a word start among the last ``CONTEXT`` tokens, fixed windows of ``CONTEXT`` positions serve as words:
        # their bounds depend on the position only, not on the span that is read.
        begin = place[0] - len(before)
        positions = np.arange(begin, place[-1] + 1)
        is_word_start = self._is_word_start[np.concatenate([before, tokens])]
        # Position of the word's first token, by a running maximum; a document starts with one.
        last = np.maximum.accumulate(np.where(is_word_start | (positions == 0), positions, -1))[len(before) :]
        found = (last >= 0) & (place - last < CONTEXT)
        return np.where(found, last, place // CONTEXT * CONTEXT)
