"""Opening a checkpoint or a Hugging Face folder for evaluation or generation, without reading weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from launcher.checkpoint.tokenizer_checks import resolve_tokenizer
from longctx.checkpoint_format import CHECKPOINTS, CheckpointReader, model_config
from longctx.config import ModelConfig
from longctx.conversion import HfReader
from longctx.errors import ConfigError
from longctx.generation.load_decoder import contains_hf_model, find_model
from longctx.tokenizer import Tokenizer
from longctx.tokenizer.image_tokenizer import ImageTokenizer
from longctx.tokenizer.load_tokenizer import has_tokenizer

_SAMPLED_PARTS = 64
"""Number of 4 KiB ranges per Hugging Face file in its fingerprint."""

Reader = CheckpointReader | HfReader
"""Opened checkpoint: names, shapes and weights one at a time."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Model config and tokenizer, with a reader for the weights."""

    folder: Path
    """Checkpoint or Hugging Face folder."""
    reader: Reader
    model: ModelConfig
    fingerprint: str
    """Fingerprint that changes with the weights."""
    tokenizer: Tokenizer
    """The model's own tokenizer."""

    @property
    def name(self) -> str:
        """Model's short name: run and step, or the folder."""
        return checkpoint_name(self.folder)


def open_model(checkpoint: Path, tokenizer: Path | None) -> ModelSource:
    """Open a checkpoint, a run's newest one, or a Hugging Face folder.

    Raise a short error if it does not exist, if it has no tokenizer and none is named, or if the named tokenizer
    differs from its own.
    """
    folder = find_model(checkpoint)
    reader, model, fingerprint = open_reader(folder)
    own_tokenizer = _own_tokenizer(folder, reader, tokenizer).for_model(model.vocab_size)
    return ModelSource(folder=folder, reader=reader, model=model, fingerprint=fingerprint, tokenizer=own_tokenizer)


def _own_tokenizer(folder: Path, reader: Reader, chosen: Path | None) -> Tokenizer:
    """Return ``resolve_tokenizer``'s, or the format of images in a Hugging Face folder with an image processor."""
    if chosen is None and isinstance(reader, HfReader) and not has_tokenizer(folder):
        image_format = reader.image_format()
        if image_format is not None:
            return ImageTokenizer.of(image_format, folder)
    return resolve_tokenizer(folder, chosen)


def run_of(checkpoint: Path) -> Path | None:
    """Return a checkpoint's run folder; None if it is not in one."""
    parent = checkpoint.resolve().parent
    if parent.name == CHECKPOINTS:
        return parent.parent
    return None


def checkpoint_name(folder: Path) -> str:
    """Return a checkpoint's short name: run and step, or the folder."""
    run = run_of(folder)
    if run is None:
        return folder.resolve().name
    return f"{run.resolve().name} {folder.name}"


def open_reader(folder: Path) -> tuple[Reader, ModelConfig, str]:
    """Return the checkpoint's reader, model config and weight fingerprint."""
    if not contains_hf_model(folder):
        reader = CheckpointReader(folder)
        # A manifest's hash covers the hashes of all its files.
        return reader, model_config(reader), reader.manifest["hash"]
    # Hugging Face folders contain no hash: sample their files.
    hf = HfReader(folder)
    digest = xxhash.xxh3_128((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        digest.update(_sampled_bytes(path))
    return hf, hf.config, digest.hexdigest()


def check_reads_text(model_source: ModelSource, request: str) -> None:
    """Raise ConfigError if the model cannot read a text left to right without a source; ``stop_request`` names the
    request.
    """
    model = model_source.model
    if model.image.is_used:
        raise ConfigError(
            f"{request} needs a model of texts, and {model_source.folder} reads images (model.image).\nUse `longctx "
            "evaluate --tasks classes`, pixels or probe to score it on a folder of images."
        )
    if model.encoder_layers:
        raise ConfigError(
            f"{request} needs a model without an encoder, and {model_source.folder} has one "
            f"(model.encoder_layers={model.encoder_layers}).\nUse `longctx evaluate --tasks translation` to score "
            "held-out pairs, or `longctx generate` to decode from a source."
        )
    if not model.causal:
        raise ConfigError(
            f"{request} needs a causal model, and {model_source.folder} is bidirectional (model.causal=false).\nUse "
            "`longctx evaluate --tasks masked` for the masked token loss."
        )


def check_positions(
    model: ModelConfig,
    num_tokens: int,
    *,
    request: str,
    hint: str,
    allow_longer: bool,
    option: str | None = "pass --beyond-positions",
) -> None:
    """Raise ConfigError for more tokens than the model has positions, unless ``allow_longer`` allows it and they
    exist.

    ``stop_request`` names the request for these tokens, ``hint`` a request that fits, and ``option`` the way to exceed
    the limit (None if that is not possible).
    """
    if num_tokens <= model.max_positions:
        return
    # A learned table has no row for them, so exceeding the limit is impossible.
    if model.position == "learned":
        raise ConfigError(f"{request}: the model has {model.max_positions} learned positions. {hint}.")
    if not allow_longer:
        if option is not None:
            hint = f"{hint}, or {option} to run it anyway"
        raise ConfigError(
            f"{request}: the model's limit is {model.max_positions} positions (model.max_positions).\n{hint}."
        )


def _sampled_bytes(path: Path) -> bytes:
    """Return samples from a file: reading a large model takes minutes, and training changes almost every byte."""
    size = path.stat().st_size
    with path.open("rb") as file:
        parts = []
        for at in range(_SAMPLED_PARTS):
            file.seek(size * at // _SAMPLED_PARTS)
            parts.append(file.read(4096))
    return b"".join(parts)
