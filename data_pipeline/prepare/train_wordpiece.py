"""Trains a WordPiece vocabulary (BERT's): full words and vocabulary pieces that continue a word.

Pieces are merged within words by SentencePiece's byte-pair encoding; BERT's own trainer was never published. Texts are
split into words as in BERT's tokenizer, by the library that later encodes with the file, and each word is then encoded
from left to right as the longest known pieces. The same texts give the same file.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence

import sentencepiece as spm
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from longctx.tokenizer.text_chunks import SPACE_MARK

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""In the order used by BERT's vocabularies."""
CONTINUATION_PREFIX = "##"
"""Prefix of vocabulary pieces that continue a word."""
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 2 + 1
"""A letter, the same letter within a word, and one vocabulary piece to learn."""

_OPTIONS = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "character_coverage": 0.9999,
    "max_sentence_length": 1 << 30,
    "bos_id": -1,
    "eos_id": -1,
    "num_threads": 1,
    "minloglevel": 3,
}


class VocabularySizeError(ValueError):
    """Error for a vocabulary with more ids than the texts have vocabulary pieces, or fewer than their letters need."""

    def __init__(self, *, least: int | None = None, most: int | None = None) -> None:
        super().__init__(least, most)
        self.least, self.most = least, most
        """Ids that the texts need, or can fill; only the violated bound is set."""


def learn_wordpiece(texts: Sequence[str], vocab_size: int, *, keep_case: bool) -> bytes:
    """Learn a vocabulary from these texts and return its tokenizer.json; ``keep_case`` keeps upper case and accents.

    Raises ``VocabularySizeError`` if the texts need more ids or can fill fewer.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not keep_case, strip_accents=not keep_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    letters, pieces = _pieces(_words(tokenizer, texts), vocab_size)
    # Include every letter in both forms: any word with known letters can then be encoded, and only unseen letters give
    # [UNK].
    tokens = list(SPECIAL_TOKENS) + letters + [CONTINUATION_PREFIX + letter for letter in letters] + pieces
    least = len(SPECIAL_TOKENS) + 2 * len(letters) + 1
    if vocab_size < least:
        raise VocabularySizeError(least=least)
    if len(tokens) < vocab_size:
        raise VocabularySizeError(most=len(tokens))
    vocabulary = {token: number for number, token in enumerate(tokens[:vocab_size])}
    tokenizer.model = models.WordPiece(vocabulary, unk_token="[UNK]", continuing_subword_prefix=CONTINUATION_PREFIX)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION_PREFIX)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer.to_str(pretty=True).encode()


def _words(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[str]:
    """Yield each line's words, separated by spaces."""
    assert tokenizer.normalizer is not None
    assert tokenizer.pre_tokenizer is not None
    for text in texts:
        for line in text.splitlines():
            # The space mark would be read as a space.
            cleaned = tokenizer.normalizer.normalize_str(line.replace(SPACE_MARK, " "))
            words = " ".join(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(cleaned))
            if words:
                yield words


def _pieces(lines: Iterator[str], vocab_size: int) -> tuple[list[str], list[str]]:
    """Return the lines' letters, and the vocabulary pieces with several letters, most useful first."""
    model = io.BytesIO()
    try:
        # If there are fewer vocabulary pieces, the library takes all of them.
        spm.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=model, vocab_size=vocab_size, hard_vocab_limit=False, **_OPTIONS
        )
    except RuntimeError as error:
        if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
            # The library also counts its space mark and its unknown token.
            raise VocabularySizeError(least=len(SPECIAL_TOKENS) + 2 * (int(found[1]) - 2) + 1) from error
        raise
    learned = spm.SentencePieceProcessor(model_proto=model.getvalue())
    letters, pieces = set[str](), []
    for number in range(learned.vocab_size()):
        piece = learned.id_to_piece(number)
        if learned.is_unknown(number) or piece == SPACE_MARK:
            continue
        # SentencePiece marks vocabulary pieces that start a word, WordPiece pieces that continue one.
        text = piece.removeprefix(SPACE_MARK)
        if len(text) == 1:
            letters.add(text)
        else:
            pieces.append(text if piece.startswith(SPACE_MARK) else CONTINUATION_PREFIX + text)
    return sorted(letters), pieces
