"""Text to token ids and back, by a model's tokenizer or one trained by ``longctx tokenizer train``.

``load_tokenizer`` reads every form and returns a ``Tokenizer``. Only this package, and training, import the libraries
``sentencepiece`` and ``tokenizers``.
"""

from longctx.tokenizer.load_tokenizer import load_tokenizer
from longctx.tokenizer.tokenizer_base import Chunk, Tokenizer

__all__ = ["Chunk", "Tokenizer", "load_tokenizer"]
