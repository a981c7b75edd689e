"""Text to token ids and back, by a model's tokenizer or one trained by ``longctx tokenizer train``.

``load_tokenizer`` reads every form and returns a ``Tokenizer``. Only this package, and training, import the libraries
``sentencepiece`` and ``tokenizers``.
"""

from longctx.tokenizer.contract import Chunk, Tokenizer
from longctx.tokenizer.load import load_tokenizer

__all__ = ["Chunk", "Tokenizer", "load_tokenizer"]
