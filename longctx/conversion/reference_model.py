"""transformers' model in a folder, for comparisons with the decoder; no code from the folder is executed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from longctx.errors import CheckpointError


def load_reference(folder: Path, dtype: torch.dtype, *, auto_class: str) -> Any:
    """Load a folder's model by transformers' ``auto_class``, with attention by its definition.

    Raise CheckpointError if transformers cannot load it.
    """
    import transformers

    try:
        return (
            getattr(transformers, auto_class)
            .from_pretrained(
                str(folder),
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                attn_implementation="eager",
            )
            .eval()
        )
    except Exception as error:
        # A library with hundreds of models may raise any exception.
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"transformers cannot load {folder}: {first_line}") from error


def switch_attention(model: Any) -> bool:
    """Switch transformers' model from eager attention to sdpa; return False if it has no other implementation."""
    try:
        model.set_attn_implementation("sdpa")
    except (ValueError, ImportError):
        return False
    # Some old classes, such as Image GPT's, keep their own without an error.
    return model.config._attn_implementation == "sdpa"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings within the ``with`` block."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    had_bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()
