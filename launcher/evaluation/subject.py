"""What is evaluated: a checkpoint's model and tokenizer, and the text that it is asked about. No weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data_pipeline.shards.copies import fetch_folder, has_folder
from data_pipeline.stores.urls import Location, below, locate
from data_pipeline.texts import read_texts
from launcher.evaluation.opened import OpenedModel, check_positions, open_model, run_of
from launcher.evaluation.options import Options
from launcher.run_folder import CONFIG_FILE
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.evaluation import Haystack, Setting
from longctx.files import read_toml


@dataclass(frozen=True, kw_only=True)
class Subject(OpenedModel):
    """Model, tokenizer and text."""

    setting: Setting
    text_folder: Location | None
    """Where the haystack and the texts of losses come from, of shards in a store their copy; None where no task reads
    any."""


def open_subject(options: Options) -> Subject:
    """Open what the options name; an error of one screen where one is missing or they do not fit one another."""
    opened = open_model(options.checkpoint, options.tokenizer)
    _check_lengths(options, opened.model)
    text_folder, haystack = None, None
    tasks, measures, _ = options.chosen()
    readers = [task.name for task in tasks if task.needs_haystack]
    if readers or measures:
        text_folder = _text_folder(options, opened.folder, (readers + measures)[0])
    if readers and text_folder is not None:
        haystack = Haystack(read_texts(text_folder), source=options.haystack or str(text_folder))
    setting = Setting(
        tokenizer=opened.tokenizer,
        seed=options.seed,
        haystack=haystack,
        depths=options.depths,
        answer_tokens=options.answer_tokens,
        ruler=options.ruler,
    )
    return Subject(
        folder=opened.folder,
        reader=opened.reader,
        model=opened.model,
        fingerprint=opened.fingerprint,
        tokenizer=opened.tokenizer,
        setting=setting,
        text_folder=text_folder,
    )


def _check_lengths(options: Options, model: ModelConfig) -> None:
    """ConfigError for a length that the model has no positions for."""
    longest = max(options.lengths)
    check_positions(
        model,
        longest,
        asked=f"--lengths {longest}",
        advice=f"Ask for {model.max_positions} or less",
        beyond=options.beyond_positions,
    )


def _text_folder(options: Options, checkpoint: Path, task: str) -> Location:
    """The folder that was named, else the validation folder of the checkpoint's run; ConfigError without either."""
    if options.haystack is not None:
        named = locate(options.haystack)
        if not named.exists():
            raise ConfigError(f"--haystack {options.haystack} does not exist. Name a folder of text or of shards.")
        return fetch_folder(named) if has_folder(named) else named
    run = run_of(checkpoint)
    if run is not None and (run / CONFIG_FILE).is_file():
        folder, cache = _validation_folder(run / CONFIG_FILE)
        if folder and locate(folder).is_dir():
            # What reads it opens a path; a split of held-out documents is small.
            return fetch_folder(folder, cache)
    raise ConfigError(
        f"task {task} needs text that the model was not trained on, and {checkpoint} is in no run whose validation "
        "folder is here.\nName a folder of text or of shards: --haystack FOLDER"
    )


def _validation_folder(config: Path) -> tuple[str, str]:
    """``data.validation`` of a run's config, else the validation split of its training data; and ``data.cache``."""
    data = read_toml(config, str(config)).get("data", {})
    if not isinstance(data, dict):
        raise ConfigError(f"{config}: data is no section. Name a folder of text or of shards: --haystack FOLDER")
    folder = data.get("validation", "")
    if not folder and data.get("train"):
        folder = below(data["train"], "validation")
    return folder, data.get("cache", "")
