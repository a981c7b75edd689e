"""A small SentencePiece model with the settings of the data pipeline, trained on a few modules of Python itself."""

from __future__ import annotations

import io
import random
import string
import textwrap
from pathlib import Path

import sentencepiece


def corpus() -> list[str]:
    """A few source files, and lines of characters that code has little of."""
    files = (string.__file__, textwrap.__file__, random.__file__)
    return [*(Path(f).read_text(encoding="utf-8") for f in files), "Grüße, 日本語 🙂 é\r\n\t\t  \n" * 20]


def train_tokenizer(path: Path, vocab_size: int = 600, texts: list[str] | None = None, **options) -> Path:
    """Train on ``texts`` (default: ``corpus``) and write the model; ``options`` override the pipeline's."""
    model = io.BytesIO()
    pipeline = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "max_sentence_length": 1 << 30,
        "pad_id": 3,
        "bos_piece": "<|document_begin|>",
        "eos_piece": "<|document_end|>",
        "pad_piece": "<|padding|>",
        "num_threads": 1,
        "minloglevel": 3,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts or corpus()), model_writer=model, vocab_size=vocab_size, **(pipeline | options)
    )
    path.write_bytes(model.getvalue())
    return path
