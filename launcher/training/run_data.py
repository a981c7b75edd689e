"""A run's data: opened, and checked to be undamaged, equal on all ranks, and built with the model's tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.loader import Loader, ValidationLoader, build_loader, build_validation_loader, held_out_mixture
from data_pipeline.mixture.file import Mixture, is_mixture
from data_pipeline.rows.pack import Packing
from data_pipeline.shards.manifest import VALIDATION_FOLDER
from data_pipeline.shards.reader import ShardSet, check_outputs, open_for_model
from data_pipeline.stores.urls import below, locate
from launcher.checkpoint.tokenizer_checks import (
    check_checkpoint_tokenizer,
    check_palette,
    check_validation_tokenizer,
    tokenizer_files_from_data,
)
from launcher.config.data_section import DataSection
from launcher.config.resolved import ResolvedConfig
from launcher.metrics.throughput import training_flops
from launcher.training.data_check import check_data, fetch_data
from launcher.training.reply_checks import check_replies
from launcher.training.run_origin import Kind, RunOrigin
from longctx.chat.template_files import find_chat_templates, hash_templates
from longctx.chat.tuned_chat_files import tuned_files
from longctx.config import ModelConfig
from longctx.conversion.auxiliary_files import read_notices
from longctx.errors import ConfigError
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.load_tokenizer import has_tokenizer
from parallel.comm.world import on_every_rank
from parallel.mesh import Mesh

log = logging.getLogger(__name__)


def open_data(
    config: ResolvedConfig, model: ModelConfig, mesh: Mesh, origin: RunOrigin
) -> tuple[Loader, ValidationLoader | None, dict[str, bytes]]:
    """Open a run's data, fetch and check the files, and continue at the position in ``origin``. Collective.

    Return the loaders for training and for validation, None if the run does not validate, and on rank 0 the tokenizer's
    files for the run's checkpoints.

    Raise ConfigError if the model's vocabulary is too small; DataError if files are damaged, differ between ranks, or
    were built with another tokenizer than the weights that the run continues from.
    """
    loader, validation = on_every_rank(lambda: _open_loaders(config, model, mesh, origin.kind))
    folders = list(loader.folders)
    if validation is not None:
        folders += validation.folders
    fetch_data(folders)
    check_data(folders, config.data.verify)
    files = on_every_rank(lambda: _tokenizer_files(origin, loader, validation, mesh))
    if origin.order is not None:
        order = origin.order
        on_every_rank(lambda: loader.load_state_dict(order))
    return loader, validation, files


def _open_loaders(
    config: ResolvedConfig, model: ModelConfig, mesh: Mesh, origin: Kind
) -> tuple[Loader, ValidationLoader | None]:
    """Return the training and validation loaders; raise ConfigError if the model's vocabulary is too small."""
    common: dict[str, Any] = {
        "seq_len": config.data.seq_len,
        "source_seq_len": config.data.source_seq_len,
        "micro_batch_rows": config.train.micro_batch_rows,
        "data_rank": mesh.data_rank,
        "data_degree": mesh.data,
    }
    # Files that need complete reading are not read here, by every rank: ``check_data`` divides them among ranks.
    open_options: dict[str, Any] = {"verify": config.data.verify != "off", "cache": config.data.cache}
    open_folder = partial(ShardSet.open, **open_options)
    # Patches have no ids.
    if origin != "new" and model.vocab_size:
        open_folder = partial(open_for_model, vocab_size=model.vocab_size, **open_options)
    # Ranks in a context group get the same rows: each cuts out its own shard (``Run.place``).
    cost = None
    if config.data.balance:
        cost = partial(training_flops, model)
    loader = build_loader(
        config.data.train,
        rows_per_step=config.rows_per_step,
        seed=config.run.seed,
        packing=config.packing,
        cost=cost,
        sync_per_micro_batch=config.sync_micro_batches,
        mask=config.mask,
        open_folder=open_folder,
        **common,
    )
    vocab_size = loader.shards.manifest.vocab_size
    if vocab_size > model.vocab_size > 0 and origin == "new":
        raise ConfigError(
            f"data.train={config.data.train!r} holds token ids below {vocab_size}, but "
            f"model.vocab_size={model.vocab_size}.\nTry --model.vocab_size {vocab_size}."
        )
    _check_classes(config.data.train, model, loader.folders)
    _check_outputs(config, model, loader.folders)
    check_replies(config, loader.folders, origin)
    validation, held_out = _validation_data(config.data)
    if not config.validation.rows or validation is None:
        return loader, None
    options = {"even": config.parallel.tokens_per_rank > 0, "open_folder": open_folder, "held_out": held_out}
    options["mask"] = config.mask
    if config.examples is not None:
        options["packing"] = Packing(examples=config.examples)
    validation_loader = build_validation_loader(validation, max_rows=config.validation.rows, **options, **common)
    _check_classes(str(validation), model, validation_loader.folders)
    _check_outputs(config, model, validation_loader.folders)
    check_replies(config, validation_loader.folders, origin)
    return loader, validation_loader


def _check_classes(data: str, model: ModelConfig, folders: Sequence[ShardSet]) -> None:
    """Raise ConfigError unless the class head has a class for each of the images' labels."""
    if not model.classes:
        return
    for shards in folders:
        found = len(shards.image_format.classes)
        if found != model.classes:
            raise ConfigError(
                f"model.classes={model.classes}, but the images in {data} have {found} classes.\n"
                f"Try --model.classes {found}, or build the data with the classes of another folder (--tokenizer DIR)."
            )


def _check_outputs(config: ResolvedConfig, model: ModelConfig, folders: Sequence[ShardSet]) -> None:
    """Raise DataError or ConfigError if a token that the model has no output for may become a target."""
    if not model.output_vocab_size or not model.predicts_tokens:
        return
    for shards in folders:
        check_outputs(shards, model.head_rows)
    special = folders[0].tokenizer().special
    key, added_ids = "", tuple[int, ...]()
    fim_rates = [config.data.fim_rate]
    if is_mixture(config.data.train):
        fim_rates += [source.fim_rate or 0 for source in Mixture.load(config.data.train).sources]
    # Tokens that no shard holds.
    if config.train.objective == "spans":
        key, added_ids = "train.objective=spans", special.sentinels
    elif any(fim_rates):
        key, added_ids = f"fim_rate={max(fim_rates):g}", special.fim or ()
    if added_ids and max(added_ids) >= model.head_rows:
        raise ConfigError(
            f"{key} adds special tokens up to id {max(added_ids)}, but the model predicts ids 0 to "
            f"{model.head_rows - 1} only (model.output_vocab_size={model.output_vocab_size}).\nTrain a model with "
            "model.output_vocab_size=0, or without this key."
        )


def _validation_data(data: DataSection) -> tuple[str | Path | None, bool]:
    """Return the validation folder or mixture, None without one; and True if it is held out from the mixture."""
    if data.validation:
        return data.validation, False
    if is_mixture(data.train):
        if held_out_mixture(data.train).sources:
            return data.train, True
        return None, False
    folder = below(data.train, VALIDATION_FOLDER)
    if locate(folder).exists():
        return folder, False
    return None, False


def _tokenizer_files(
    origin: RunOrigin, loader: Loader, validation: ValidationLoader | None, mesh: Mesh
) -> dict[str, bytes]:
    """Return the tokenizer's files for the run's checkpoints, read by rank 0 only.

    If the run continues from a checkpoint, they are its files and licences, otherwise the data's. Conversations add the
    data's chat template, which the model learns. A run that starts with other images or classes than the checkpoint's
    has the data's format. Raise DataError unless checkpoint and data have the same tokenizer, or for images the same
    palette; log it if there is none to compare with.
    """
    if mesh.rank != 0:
        return {}
    if validation is not None:
        check_validation_tokenizer(loader.shards, validation.shards)
    folder = origin.folder
    if folder is None:
        return _with_chat_template(loader.shards.tokenizer().files, loader.folders)
    if not has_tokenizer(folder):
        files = tokenizer_files_from_data(folder, loader.shards.tokenizer())
    elif loader.shards.is_images and origin.kind == "started":
        check_palette(folder, loader.shards)
        files = loader.shards.tokenizer().files
    else:
        check_checkpoint_tokenizer(folder, loader.shards)
        files = load_tokenizer(folder).files
    # Licences go with the weights; a model card would describe the model before training.
    return _with_chat_template(files, loader.folders) | read_notices(folder)


def _with_chat_template(files: dict[str, bytes], folders: Sequence[ShardSet]) -> dict[str, bytes]:
    """Add the chat template from the data's conversations or preferences, if any, to a tokenizer's files."""
    chat_tokenizers = [folder.tokenizer() for folder in folders if folder.is_masked or folder.manifest.is_preferences]
    # Preferences may be plain texts, built without a template.
    chat_tokenizers = [chat for chat in chat_tokenizers if find_chat_templates(chat.files, chat.path)]
    if not chat_tokenizers:
        return files
    first = chat_tokenizers[0]
    if len({hash_templates(chat.files, chat.path) for chat in chat_tokenizers}) > 1:
        log.warning("Conversations use several chat templates: checkpoints store the one from %s.", first.path)
    return tuned_files(files, first.files, first.path)


_MAX_DOCUMENTS_READ = 1 << 16
"""Documents whose lengths are read if the manifest does not tell whether rows are packed."""


def leaves_remainders(folders: Sequence[ShardSet], seq_len: int) -> bool:
    """Return True if any document's length is not a multiple of the row: its remainder shares a row, or is padded.

    Depends only on the data, so a resumed run gets the same answer.
    """
    # One such source in a mixture is enough: all rows get the same layout.
    return any(_leaves_remainders(shards, seq_len) for shards in folders)


def _leaves_remainders(shards: ShardSet, seq_len: int) -> bool:
    # Records share rows, and are never cut.
    if shards.manifest.is_preferences:
        return True
    if sum(entry.tokens for entry in shards.manifest.shards) % seq_len:
        return True
    # Longest document per histogram bin: a bin below the row length has a remainder.
    longest = [2 ** (int(power.removeprefix("2^")) + 1) - 1 for power in shards.manifest.length_histogram]
    if min(longest, default=seq_len) < seq_len:
        return True
    # If the first documents fill complete rows, assume that all are cut to this length: reading every document would
    # slow down the start. If that is wrong, the layout is slower, but still correct.
    first = shards.lengths_of(np.arange(min(shards.num_documents, _MAX_DOCUMENTS_READ)))
    return bool((first % seq_len).any())
