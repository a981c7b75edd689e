"""Text to token ids and back, by the tokenizer that a model came with or that ``longctx tokenizer train`` made.

``load_tokenizer`` reads every form; ``Tokenizer`` is what it returns. The libraries ``sentencepiece`` and
``tokenizers`` are imported here, and where a model is trained.
"""

from longctx.tokenizer.contract import Chunk, Tokenizer
from longctx.tokenizer.load import load_tokenizer

__all__ = ["Chunk", "Tokenizer", "load_tokenizer"]
