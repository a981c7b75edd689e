"""Hugging Face conversion: one table per family (``families``), strict and streaming in both directions."""

from longctx.conversion.deepspeed_folder import import_deepspeed
from longctx.conversion.hf import HfReader, load_hf, save_hf
from longctx.conversion.hf_conversion import Conversion, export_checkpoint, import_hf
from longctx.conversion.tokenizer_export import check_tokenizer, export_tokenizer

__all__ = [
    "Conversion",
    "HfReader",
    "check_tokenizer",
    "export_checkpoint",
    "export_tokenizer",
    "import_deepspeed",
    "import_hf",
    "load_hf",
    "save_hf",
]
