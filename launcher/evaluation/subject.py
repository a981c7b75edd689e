"""What is evaluated: a checkpoint's model and tokenizer, and the text that it is asked about. No weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data_pipeline.prepare.sources import open_source
from data_pipeline.shards.copies import fetch_folder, has_folder
from data_pipeline.shards.manifest import MANIFEST_FILE
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.verify import open_verified
from data_pipeline.stores.urls import Location, below, locate
from data_pipeline.texts import read_texts
from launcher.checkpoint.tokenizers import check_named_tokenizer, check_same_tokenizer
from launcher.evaluation.opened import OpenedModel, check_positions, check_reads_text, open_model, run_of
from launcher.evaluation.options import Options
from launcher.run_folder import CONFIG_FILE
from longctx.chat.questions import asking
from longctx.config import ModelConfig
from longctx.errors import ConfigError, DataError
from longctx.evaluation import Haystack, Setting
from longctx.files import read_toml
from longctx.tokenizer.rows import check_rows


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
    check_reads_text(opened, f"--tasks {','.join(options.tasks)}")
    tasks, measures, _ = options.chosen()
    if options.chat:
        opened = replace(opened, tokenizer=asking(opened.tokenizer, [task.cue for task in tasks]))
    _check_lengths(options, opened.model)
    text_folder, haystack = None, None
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
    return Subject(**vars(opened), setting=setting, text_folder=text_folder)


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
        folder, cache = validation_folder(run / CONFIG_FILE)
        if folder and locate(folder).is_dir():
            # What reads it opens a path; a split of held-out documents is small.
            return fetch_folder(folder, cache)
    raise ConfigError(
        f"task {task} needs text that the model was not trained on, and {checkpoint} is in no run whose validation "
        "folder is here.\nName a folder of text or of shards: --haystack FOLDER"
    )


def validation_folder(config: Path) -> tuple[str, str]:
    """``data.validation`` of a run's config, else the validation split of its training data; and ``data.cache``."""
    data = read_toml(config, str(config)).get("data", {})
    if not isinstance(data, dict):
        raise ConfigError(f"{config}: data is no section. Name a folder of text or of shards: --haystack FOLDER")
    folder = data.get("validation", "")
    if not folder and data.get("train"):
        folder = below(data["train"], "validation")
    return folder, data.get("cache", "")


def held_out_shards(named: str | None, run: Path | None, *, option: str) -> ShardSet | None:
    """Open the shard folder that ``option`` named, else what the run held out; None if there is neither.

    ConfigError for a folder that does not exist.
    """
    if named is not None:
        place = locate(named)
        if not place.exists():
            raise ConfigError(f"{option} {named} does not exist. Name a shard folder.")
        return open_verified(fetch_folder(place) if has_folder(place) else place)
    if run is not None and (run / CONFIG_FILE).is_file():
        folder, cache = validation_folder(run / CONFIG_FILE)
        if folder and locate(folder).is_dir():
            return open_verified(fetch_folder(folder, cache))
    return None


# Whole documents as ids, for losses: of shards the ids that they hold, of other text what the tokenizer makes.


@dataclass(frozen=True)
class Text:
    """The beginning of a document."""

    name: str
    ids: np.ndarray
    """int32: a list of a million ids takes nine times the memory, on every rank."""


Texts = dict[int, list[Text]]
"""The texts of each length, every one cut to it."""


def read_documents(options: Options, subject: Subject) -> Texts:
    """For each length the first ``options.samples`` documents that are long enough; DataError where none is.

    Documents are never joined: what stands before another document's beginning is no context of it.
    """
    assert subject.text_folder is not None, "losses without text"
    found: Texts = {length: [] for length in options.lengths}
    longest = 0
    for name, ids in _documents(options, subject, subject.text_folder):
        longest = max(longest, len(ids))
        for length, texts in found.items():
            if len(ids) >= length and len(texts) < options.samples:
                check_rows(subject.tokenizer, ids[:length], f"{name} of {subject.text_folder}")
                # A copy: a view would hold the whole document.
                texts.append(Text(name, ids[:length].astype(np.int32)))
        if all(len(texts) == options.samples for texts in found.values()):
            break
    for length, texts in found.items():
        if not texts:
            raise DataError(
                f"--lengths {length}: the longest document of {subject.text_folder} has {longest:,} tokens, and a "
                f"loss at {length:,} needs one of {length:,}. Ask for --lengths {longest} or less, leave out ppl and "
                "longppl, or name longer texts: --haystack FOLDER"
            )
    return found


def _documents(options: Options, subject: Subject, folder: Location) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and ids of each document, with the ids that frame one."""
    if (folder / MANIFEST_FILE).is_file():
        shards = open_verified(folder)
        _check_tokenizer(options, subject, shards)
        for number in range(shards.num_documents):
            shards.check_files([number])
            yield shards.name(number), shards.document(number)
        return
    shortest, longest = min(options.lengths), 0
    for document in open_source(str(folder)):
        size = len(document.text.encode())
        # A token stands for a byte at least, begin, end and a first space apart: short texts need not be encoded. The
        # longest of them are: an error says how many tokens there are.
        if size + 3 >= shortest or size > longest:
            yield document.name, subject.tokenizer.encode_document(document.text)
        longest = max(longest, size)


def _check_tokenizer(options: Options, subject: Subject, shards: ShardSet) -> None:
    """DataError unless the shards' ids mean to the model what they say."""
    if options.tokenizer is None:
        check_same_tokenizer(subject.folder, shards)
    else:
        check_named_tokenizer(subject.tokenizer, shards)
