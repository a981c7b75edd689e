"""Subject of an evaluation: a checkpoint's model and tokenizer, and the evaluated text, without reading weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data_pipeline.prepare.sources import open_source
from data_pipeline.rows.packing_checks import check_kind_of_texts
from data_pipeline.shards.local_copies import fetch_folder, has_folder
from data_pipeline.shards.manifest import MANIFEST_FILE
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_verification import open_validated
from data_pipeline.stores.urls import Location, below, locate
from data_pipeline.texts import read_texts
from launcher.checkpoint.tokenizer_checks import check_checkpoint_tokenizer, check_given_tokenizer
from launcher.evaluation.cells import STAND_IN, Cell, find_skipped_cells, is_feasible
from launcher.evaluation.evaluation_options import EvaluationOptions
from launcher.evaluation.model_source import ModelSource, check_positions, check_reads_text, open_model, run_of
from launcher.run_folder import CONFIG_FILE
from longctx.chat.chat_prompts import with_chat_prompts
from longctx.chat.template_files import find_chat_templates, has_template, hash_templates
from longctx.config import ModelConfig
from longctx.errors import ConfigError, DataError
from longctx.evaluation import Haystack, Setting
from longctx.files import read_toml
from longctx.tokenizer.embedding_rows import check_rows
from parallel.comm.world import own_rank

log = logging.getLogger(__name__)

BUILT_IN = "stdlib"
"""Text available in every Python: its standard library's source."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel(ModelSource):
    """Model and tokenizer with their evaluation text."""

    setting: Setting
    text_folder: Location | str | None
    """Source for haystack and loss texts (for shards in a store, their local copy); None if no task reads text."""
    skipped_cells: frozenset[Cell]
    """Cells too short for their shortest prompt, as far as known before the haystack is read."""
    chat: str | None
    """Hash over the chat templates, if they render prompts."""


def open_evaluated_model(options: EvaluationOptions) -> EvaluatedModel:
    """Open model and text from the options; raise a short error if one is missing or they do not fit."""
    model_source = open_model(options.checkpoint, options.tokenizer)
    check_reads_text(model_source, f"--tasks {','.join(options.tasks)}")
    tasks, text_metrics, _ = options.chosen()
    template = None
    if options.chat_template == "auto" and find_chat_templates(
        model_source.tokenizer.files, model_source.tokenizer.path
    ):
        template = hash_templates(model_source.tokenizer.files, model_source.tokenizer.path)
        model_source = replace(
            model_source, tokenizer=with_chat_prompts(model_source.tokenizer, [task.cue for task in tasks])
        )
    # A chat model answers worse without its template: suggest it.
    elif own_rank() == 0 and tasks and all(task.cue for task in tasks) and has_template(model_source.tokenizer):
        log.warning("%s has a chat template. --chat-template auto applies it, as in a chat.", model_source.folder)
    _check_lengths(options, model_source.model)
    setting = Setting(
        tokenizer=model_source.tokenizer,
        seed=options.seed,
        haystack=Haystack([STAND_IN], source="a few words"),
        depths=options.depths,
        answer_tokens=options.answer_tokens,
        ruler=options.ruler,
    )
    # A haystack may be large, and unnecessary: find the tasks that have room for one first.
    skipped_cells = find_skipped_cells(setting, tasks, options.lengths, keep_one=not text_metrics)
    text_folder, haystack = None, None
    readers = [
        task.name for task in tasks if task.needs_haystack and is_feasible(task.name, options.lengths, skipped_cells)
    ]
    if readers or text_metrics:
        text_folder = _text_folder(options, model_source.folder)
    if readers and text_folder is not None:
        haystack = Haystack(read_texts(text_folder), source=options.haystack or str(text_folder))
    setting = replace(setting, haystack=haystack)
    return EvaluatedModel(
        **vars(model_source),
        setting=setting,
        text_folder=text_folder,
        skipped_cells=frozenset(skipped_cells),
        chat=template,
    )


def _check_lengths(options: EvaluationOptions, model: ModelConfig) -> None:
    """Raise ConfigError for a length greater than the model's positions."""
    longest = max(options.lengths)
    check_positions(
        model,
        longest,
        request=f"--lengths {longest}",
        hint=f"Ask for {model.max_positions} or less",
        allow_longer=options.beyond_positions,
    )


def _text_folder(options: EvaluationOptions, checkpoint: Path) -> Location | str:
    """Return the named folder, or the run's validation folder, or Python's standard library.

    Raise ConfigError for a named folder that does not exist.
    """
    if options.haystack == BUILT_IN:
        return BUILT_IN
    if options.haystack is not None:
        named = locate(options.haystack)
        if not named.exists():
            raise ConfigError(f"--haystack {options.haystack} does not exist. Name a folder with texts or shards.")
        return fetch_folder(named) if has_folder(named) else named
    run = run_of(checkpoint)
    if run is not None and (run / CONFIG_FILE).is_file():
        folder, cache = validation_folder(run / CONFIG_FILE)
        if folder and locate(folder).is_dir():
            # Readers need a local path; a held-out split is small.
            return fetch_folder(folder, cache)
    if own_rank() == 0:
        log.warning(
            "%s is not in a run with an available validation folder, so the text is the Python standard library's "
            "source code. --haystack FOLDER names a held-out text instead.",
            checkpoint,
        )
    return BUILT_IN


def validation_folder(config: Path) -> tuple[str, str]:
    """Return a run's ``data.validation``, by default its training data's held-out split, and its ``data.cache``."""
    data = read_toml(config, str(config)).get("data", {})
    if not isinstance(data, dict):
        raise ConfigError(f"{config}: data must be a section. Name a folder with texts or shards: --haystack FOLDER")
    folder = data.get("validation", "")
    if not folder and data.get("train"):
        folder = below(data["train"], "validation")
    return folder, data.get("cache", "")


def held_out_shards(named: str | None, run: Path | None, *, option: str) -> ShardSet | None:
    """Open the shard folder ``named`` by ``option``, by default the run's held-out one; None without either.

    Raise ConfigError for a folder that does not exist.
    """
    if named is not None:
        place = locate(named)
        if not place.exists():
            raise ConfigError(f"{option} {named} does not exist. Name a shard folder.")
        return open_validated(fetch_folder(place) if has_folder(place) else place)
    if run is not None and (run / CONFIG_FILE).is_file():
        folder, cache = validation_folder(run / CONFIG_FILE)
        if folder and locate(folder).is_dir():
            return open_validated(fetch_folder(folder, cache))
    return None


# Full documents as ids, for losses: stored ids from shards, or tokenized ids from other text.


@dataclass(frozen=True)
class DocumentPrefix:
    """Document prefix."""

    name: str
    ids: np.ndarray
    """int32: a list with a million ids takes nine times the memory, on every rank."""


Texts = dict[int, list[DocumentPrefix]]
"""Texts by length, each truncated to it."""


def read_documents(options: EvaluationOptions, evaluated: EvaluatedModel) -> Texts:
    """Return, for each length, the first ``options.samples`` documents that are long enough.

    Documents are never joined: text before a document's start is not its context. A length without any document is left
    out with a warning; raise DataError if no length is left.
    """
    assert evaluated.text_folder is not None, "losses without text"
    found: Texts = {length: [] for length in options.lengths}
    longest = 0
    for name, ids in _documents(options, evaluated, evaluated.text_folder):
        longest = max(longest, len(ids))
        for length, texts in found.items():
            if len(ids) >= length and len(texts) < options.samples:
                check_rows(evaluated.tokenizer, ids[:length], f"{name} of {evaluated.text_folder}")
                # A copy: a view would keep the full document in memory.
                texts.append(DocumentPrefix(name, ids[:length].astype(np.int32)))
        # Stop early: a folder may hold far more text than needed.
        if all(len(texts) == options.samples for texts in found.values()):
            break
    short = [length for length, texts in found.items() if not texts]
    if short:
        missing = (
            f"the longest document in {evaluated.text_folder} has {longest:,} tokens, and a loss at {short[0]:,} needs "
            f"{short[0]:,}. Use --lengths {longest} or less, leave out ppl and longppl, or name longer texts: "
            "--haystack FOLDER"
        )
        tasks, _, _ = options.chosen()
        if len(short) == len(found) and not any(
            is_feasible(t.name, options.lengths, evaluated.skipped_cells) for t in tasks
        ):
            raise DataError(f"--lengths {short[0]}: {missing}")
        log.warning("Skipped ppl and longppl at %s: %s", " and ".join(f"{length:,}" for length in short), missing)
    return found


def _documents(
    options: EvaluationOptions, evaluated: EvaluatedModel, folder: Location | str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each document's name and ids, including begin and end ids."""
    if not isinstance(folder, str) and (folder / MANIFEST_FILE).is_file():
        shards = open_validated(folder)
        check_kind_of_texts(shards)
        _check_tokenizer(options, evaluated, shards)
        for number in range(shards.num_documents):
            shards.check_files([number])
            yield shards.name(number), shards.document(number)
        return
    shortest, longest = min(options.lengths), 0
    for document in open_source(str(folder)):
        size = len(document.text.encode())
        # A token has at least one byte, except begin, end and a first space, so short texts need no encoding. The
        # longest ones still do, because an error reports their token count.
        if size + 3 >= shortest or size > longest:
            yield document.name, evaluated.tokenizer.encode_document(document.text)
        longest = max(longest, size)


def _check_tokenizer(options: EvaluationOptions, evaluated: EvaluatedModel, shards: ShardSet) -> None:
    """Raise DataError unless the shards' ids mean the same text to the model."""
    if options.tokenizer is None:
        check_checkpoint_tokenizer(evaluated.folder, shards)
    else:
        check_given_tokenizer(evaluated.tokenizer, shards)
