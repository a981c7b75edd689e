"""A checkpoint or a Hugging Face folder that is opened to be evaluated or continued. No weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from launcher.checkpoint.tokenizers import tokenizer_of
from longctx.checkpoint_format import CHECKPOINTS, CheckpointReader, model_config
from longctx.config import ModelConfig
from longctx.conversion import HfReader
from longctx.errors import ConfigError
from longctx.generation.load import find_model, is_hf_folder
from longctx.tokenizer import Tokenizer

_SAMPLED_PARTS = 64
"""Parts of 4 KiB of a Hugging Face file that its fingerprint is made of."""

Reader = CheckpointReader | HfReader
"""An opened checkpoint: names, shapes and weights one at a time."""


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model's config, its tokenizer, and where its weights are."""

    folder: Path
    """The checkpoint, or the Hugging Face folder."""
    reader: Reader
    model: ModelConfig
    fingerprint: str
    """Changes with the weights."""
    tokenizer: Tokenizer
    """The model's own."""

    @property
    def name(self) -> str:
        """The model in a few words: run and step, or the folder."""
        return checkpoint_name(self.folder)


def open_model(checkpoint: Path, tokenizer: Path | None) -> OpenedModel:
    """Open a checkpoint, a run's newest one, or a Hugging Face folder.

    An error of one screen where there is none, where it has no tokenizer and none is named, or where the one that is
    named is another than its own.
    """
    folder = find_model(checkpoint)
    reader, model, fingerprint = open_reader(folder)
    own_tokenizer = tokenizer_of(folder, tokenizer).for_model(model.vocab_size)
    return OpenedModel(folder=folder, reader=reader, model=model, fingerprint=fingerprint, tokenizer=own_tokenizer)


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint is in; None where it stands by itself."""
    parent = checkpoint.resolve().parent
    if parent.name == CHECKPOINTS:
        return parent.parent
    return None


def checkpoint_name(folder: Path) -> str:
    """A checkpoint in a few words: run and step, or the folder."""
    run = run_of(folder)
    if run is None:
        return folder.resolve().name
    return f"{run.resolve().name} {folder.name}"


def open_reader(folder: Path) -> tuple[Reader, ModelConfig, str]:
    """The checkpoint, its model, and what its weights are told from others by."""
    if not is_hf_folder(folder):
        reader = CheckpointReader(folder)
        return reader, model_config(reader), reader.manifest["hash"]
    hf = HfReader(folder)
    digest = xxhash.xxh3_128((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        digest.update(_sampled_bytes(path))
    return hf, hf.config, digest.hexdigest()


def check_reads_text(opened: OpenedModel, asked: str) -> None:
    """Raise ConfigError if the model cannot read a text by itself, from left to right. ``asked`` names what would."""
    model = opened.model
    if model.encoder_layers:
        raise ConfigError(
            f"{asked} reads a text by itself, and the decoder of {opened.folder} reads a source beside it "
            f"(model.encoder_layers={model.encoder_layers}).\nTake `longctx evaluate --tasks translation` for scores "
            "of held-out pairs, or `longctx generate` for what the model writes of a source."
        )
    if not model.causal:
        raise ConfigError(
            f"{asked} asks for each token given those before it, and {opened.folder} sees both sides of a token "
            "(model.causal=false).\nTake `longctx evaluate --tasks masked` for the loss of masked tokens."
        )


def check_positions(
    model: ModelConfig,
    num_tokens: int,
    *,
    asked: str,
    advice: str,
    beyond: bool,
    option: str | None = "pass --beyond-positions",
) -> None:
    """ConfigError for more tokens than the model has positions for, unless ``beyond`` allows what there is.

    ``asked`` says what takes so many tokens, ``advice`` what fits, ``option`` how to go beyond, None if that is not
    possible.
    """
    if num_tokens <= model.max_positions:
        return
    # A learned table has no row for them: there is nothing to try.
    if model.position == "learned":
        raise ConfigError(f"{asked}: the model has {model.max_positions} learned positions. {advice}.")
    if not beyond:
        if option is not None:
            advice = f"{advice}, or {option} to see what it does there all the same"
        raise ConfigError(
            f"{asked}: the model is meant for {model.max_positions} positions (model.max_positions).\n{advice}."
        )


def _sampled_bytes(path: Path) -> bytes:
    """Some of a file's bytes: those of a large model take minutes to read, and training changes nearly every one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        parts = []
        for at in range(_SAMPLED_PARTS):
            file.seek(size * at // _SAMPLED_PARTS)
            parts.append(file.read(4096))
    return b"".join(parts)
