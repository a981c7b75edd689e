"""What is evaluated: a checkpoint's model and tokenizer, and the text that it is asked about. No weight is read."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.texts import read_texts
from launcher.checkpoint.tokenizers import check_vocabulary, tokenizer_of
from launcher.evaluation.options import Options
from launcher.run_folder import CONFIG_FILE
from longctx.checkpoint_format import CHECKPOINTS, CheckpointReader, model_config
from longctx.config import ModelConfig
from longctx.conversion import HfReader
from longctx.errors import ConfigError
from longctx.evaluation import Haystack, Setting
from longctx.generation.load import find_model, is_hf_folder
from longctx.tokenizer import Tokenizer

_SAMPLED_PARTS = 64
"""Parts of 4 KiB of a Hugging Face file that its fingerprint is made of."""

Reader = CheckpointReader | HfReader
"""An opened checkpoint: names, shapes and weights one at a time."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Model, tokenizer and text."""

    folder: Path
    """The checkpoint, or the Hugging Face folder."""
    reader: Reader
    model: ModelConfig
    fingerprint: str
    """Changes with the weights."""
    setting: Setting
    text_folder: Path | None
    """Where the haystack and the texts of losses come from; None where no task reads any."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own."""
        return self.setting.tokenizer

    @property
    def name(self) -> str:
        """The model in a few words: run and step, or the folder."""
        return checkpoint_name(self.folder)


def open_subject(options: Options) -> Subject:
    """Open what the options name; an error of one screen where one is missing or they do not fit one another."""
    folder = find_model(options.checkpoint)
    reader, model, fingerprint = open_reader(folder)
    _check_lengths(options, model)
    tokenizer = tokenizer_of(folder, options.tokenizer)
    check_vocabulary(tokenizer, model)
    text_folder, haystack = None, None
    tasks, measures, _ = options.chosen()
    readers = [task.name for task in tasks if task.needs_haystack]
    if readers or measures:
        text_folder = _text_folder(options, folder, (readers + measures)[0])
    if readers and text_folder is not None:
        haystack = Haystack(read_texts(text_folder), source=str(text_folder))
    setting = Setting(
        tokenizer=tokenizer,
        seed=options.seed,
        haystack=haystack,
        depths=options.depths,
        answer_tokens=options.answer_tokens,
        ruler=options.ruler,
    )
    return Subject(
        folder=folder,
        reader=reader,
        model=model,
        fingerprint=fingerprint,
        setting=setting,
        text_folder=text_folder,
    )


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


def _sampled_bytes(path: Path) -> bytes:
    """Some of a file's bytes: those of a large model take minutes to read, and training changes nearly every one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        parts = []
        for at in range(_SAMPLED_PARTS):
            file.seek(size * at // _SAMPLED_PARTS)
            parts.append(file.read(4096))
    return b"".join(parts)


def _check_lengths(options: Options, model: ModelConfig) -> None:
    """ConfigError for a length that the model has no positions for."""
    longest = max(options.lengths)
    if longest <= model.max_positions:
        return
    advice = f"Ask for {model.max_positions} or less"
    # A learned table has no row for them: there is nothing to try.
    if model.position == "learned":
        raise ConfigError(f"--lengths {longest}: the model has {model.max_positions} learned positions. {advice}.")
    if not options.beyond_positions:
        raise ConfigError(
            f"--lengths {longest}: the model is meant for {model.max_positions} positions (model.max_positions).\n"
            f"{advice}, or pass --beyond-positions to see what it does there all the same."
        )


def _text_folder(options: Options, checkpoint: Path, task: str) -> Path:
    """The folder that was named, else the validation folder of the checkpoint's run; ConfigError without either."""
    if options.haystack is not None:
        if not options.haystack.exists():
            raise ConfigError(f"--haystack {options.haystack} does not exist. Name a folder of text or of shards.")
        return options.haystack
    run = run_of(checkpoint)
    if run is not None and (run / CONFIG_FILE).is_file():
        folder = _validation_folder(run / CONFIG_FILE)
        if folder is not None and folder.is_dir():
            return folder
    raise ConfigError(
        f"task {task} needs text that the model was not trained on, and {checkpoint} is in no run whose validation "
        "folder is here.\nName a folder of text or of shards: --haystack FOLDER"
    )


def _validation_folder(config: Path) -> Path | None:
    """``data.validation`` of a run's config, else the validation split of its training data."""
    data: dict[str, Any] = tomllib.loads(config.read_text(encoding="utf-8")).get("data", {})
    if data.get("validation"):
        return Path(data["validation"])
    if data.get("train"):
        return Path(data["train"]) / "validation"
    return None
