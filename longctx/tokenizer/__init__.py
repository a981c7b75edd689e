"""Text to token ids and back, by the tokenizer of a model or one trained by ``longctx tokenizer train``.

``load_tokenizer`` reads every form and returns a ``Tokenizer``. The libraries ``sentencepiece`` and ``tokenizers`` are
only imported here, and for training.
"""

from longctx.tokenizer.contract import Chunk, Tokenizer
from longctx.tokenizer.load import load_tokenizer

__all__ = ["Chunk", "Tokenizer", "load_tokenizer"]
