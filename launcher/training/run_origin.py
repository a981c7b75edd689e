"""A run's origin: the checkpoint that it resumes from, or the model and weights that it starts with."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from launcher.checkpoint.checkpoint_files import StaticFiles
from launcher.checkpoint.checkpoint_store import CheckpointStore, check_unused, store_at
from launcher.checkpoint.load_checkpoint import check_same_model, check_start_from, check_training
from launcher.checkpoint.resume import find_resume
from launcher.config.config_sections import AUTO, NEWEST, RunConfig
from launcher.config.model_section import find_start, is_hf_model_folder, started_model
from launcher.metrics.record import METRICS_FILE
from launcher.run_folder import IMPORTED
from longctx.architecture.size import count_parameters
from longctx.checkpoint_format import MANIFEST, CheckpointReader, base_entry, list_checkpoints, model_config
from longctx.config import ModelConfig
from longctx.conversion.checkpoint_checks import check_checkpoint_tensors
from longctx.conversion.passthrough import passthrough_files
from longctx.errors import CheckpointError, ConfigError
from longctx.tokenizer.chat_templates import find_template_files
from parallel.comm.world import broadcast_object, on_every_rank, on_rank_0
from parallel.runtime.launched import environment_rank

log = logging.getLogger(__name__)

Kind = Literal["new", "resumed", "started"]
"""A run starts with initial weights, resumes from its own checkpoint, or takes weights from another source."""

SECONDS_BETWEEN_NOTES = 10.0
"""Interval between a conversion's progress messages."""


@dataclass(frozen=True, kw_only=True)
class RunOrigin:
    """A run's starting point."""

    kind: Kind
    folder: Path | None = None
    """Checkpoint, or for a start also a Hugging Face folder; None in a new run."""
    model: ModelConfig | None = None
    """The checkpoint's model, before the run's config changes it."""
    step: int = 0
    """Steps taken before."""
    settings: dict[str, Any] | None = None
    """Config from the resumed run's checkpoint; None if it was imported."""
    order: dict[str, Any] | None = None
    """Loader state; None if the checkpoint has none."""
    restarts: bool = False
    """True if an earlier start of the run has recorded results, and ended before its first checkpoint."""

    @property
    def continues(self) -> bool:
        """True if the run's folder holds results from an earlier start."""
        return self.kind == "resumed" or self.restarts


def find_origin(config: RunConfig, model: ModelConfig, run_folder: Path) -> RunOrigin:
    """Find the run's origin and check that its model matches the run's; read only manifests. Collective.

    Raise CheckpointError on every rank if there is no such checkpoint, or its model differs too much.
    """

    def find_on_rank_0() -> tuple[Path | None, bool] | None:
        # Only rank 0 searches and hashes, so that a warning about a skipped checkpoint is printed once.
        if environment_rank()[0] != 0:
            return None
        store = None
        if config.checkpoint.store:
            store = store_at(config.checkpoint.store)
            if _is_new(config.run.resume, run_folder, store):
                check_unused(store)
        found = find_resume(run_folder, config.run.resume, store)
        if found is None and store is not None and config.run.resume == AUTO:
            # A checkpoint store that could not be read may have checkpoints.
            check_unused(store)
        return found, (run_folder / METRICS_FILE).exists()

    found = broadcast_object(on_every_rank(find_on_rank_0))
    assert found is not None, "rank 0 has looked"
    resume_from, has_records = found
    if resume_from is not None:
        return on_every_rank(lambda: _resumed(resume_from, model))
    origin = on_every_rank(lambda: _started(config.run.start_from, model))
    return dataclasses.replace(origin, restarts=has_records)


def _is_new(resume: str, run_folder: Path, store: CheckpointStore) -> bool:
    """Return True if the run begins here, with new or another run's weights, so its store must be unused."""
    if resume in NEWEST or resume.startswith(str(store)):
        return False
    return not list_checkpoints(run_folder)


def _resumed(folder: Path, model: ModelConfig) -> RunOrigin:
    reader = CheckpointReader(folder)
    check_same_model(reader, model)
    check_checkpoint_tensors(reader)
    check_training(reader)
    training = reader.manifest["training"]
    # A converted or upcycled checkpoint has no loader state: it starts at step 0 in this run's data.
    step = 0
    if "loader" in training:
        step = training["step"]
    return RunOrigin(
        kind="resumed",
        folder=folder,
        model=model_config(reader),
        step=step,
        settings=training.get("config"),
        order=training.get("loader"),
    )


def _started(start_from: str, model: ModelConfig) -> RunOrigin:
    """Return the checkpoint or Hugging Face folder to start with; a new run if there is none."""
    if start_from == "no":
        if model.adapter.is_used:
            raise ConfigError(
                f"model.adapter.rank={model.adapter.rank} trains adapters on a model's frozen weights, and there are "
                "none: run.start_from=no.\nTry --run.start_from with a checkpoint or a downloaded Hugging Face model, "
                "or --model.adapter.rank 0."
            )
        return RunOrigin(kind="new")
    folder, mtp = find_start(start_from), model.mtp_layers > 0
    if is_hf_model_folder(folder):
        if environment_rank()[0] == 0:
            from longctx.conversion.hf import HfReader

            # Opening it checks all tensors' names and shapes, so a folder that cannot be converted is rejected here.
            HfReader(folder, mtp=mtp)
        return RunOrigin(kind="started", folder=folder, model=started_model(start_from, mtp=mtp))
    reader = CheckpointReader(folder)
    check_start_from(reader, model)
    check_checkpoint_tensors(reader)
    return RunOrigin(kind="started", folder=folder, model=model_config(reader))


def find_extra_files(origin: RunOrigin) -> StaticFiles | None:
    """Return the imported model's extra files in the checkpoint that a run continues from; None if there are none."""
    if origin.folder is None:
        return None
    files = CheckpointReader(origin.folder).manifest["files"]
    found = {name: files[name] for name in passthrough_files(files)}
    if not found:
        return None
    return StaticFiles(origin=origin.folder, files=found)


def find_base_entry(origin: RunOrigin, model: ModelConfig, run_folder: Path) -> dict[str, str] | None:
    """Return the manifest entry for the checkpoint with a run's frozen weights; None if it trains all weights."""
    if not model.adapter.is_used:
        return None
    assert origin.folder is not None, "resolve_model asks for a base"
    reader = CheckpointReader(origin.folder)
    # Another run's adapters go on from the same base.
    return base_entry(reader.base or reader, run_folder)


def hf_type(origin: RunOrigin) -> str | None:
    """Return the Hugging Face model type that the weights were imported from, before any training since."""
    if origin.folder is None:
        return None
    training = CheckpointReader(origin.folder).manifest["training"]
    return training.get("imported", training).get("model_type")


# --------------------------------------------------------------------------------------------------------- conversion


def converted(origin: RunOrigin, run_folder: Path) -> RunOrigin:
    """Return the origin as a checkpoint, after converting a Hugging Face folder into the run's folder. Collective.

    Rank 0 converts, and the others wait without a timeout. An earlier start's conversion from the same files is reused.
    """
    if origin.folder is None or not is_hf_model_folder(origin.folder):
        return origin
    source, output = origin.folder, run_folder / IMPORTED
    mtp = origin.model is not None and origin.model.mtp_layers > 0
    on_rank_0(lambda: _convert(source, output, mtp=mtp))
    return dataclasses.replace(origin, folder=output)


def _convert(source: Path, output: Path, *, mtp: bool) -> None:
    """Write a Hugging Face folder as a checkpoint, unless that was already done from the same files."""
    mark = _mark_of(source)
    if mtp:
        # With MTP the same files give another model.
        mark += "-mtp"
    if _is_converted(output, mark):
        log.info("%s is already converted: using %s.", source, output)
        return
    # Imported only for a conversion, to spare other runs the time.
    from longctx.conversion import import_hf

    # From another source, and written by us: it holds no other files.
    shutil.rmtree(output, ignore_errors=True)
    _check_disk(source, output, mtp=mtp)
    started = last_note = time.monotonic()

    def note(action: str, done: int, total: int) -> None:
        nonlocal last_note
        if time.monotonic() - last_note > SECONDS_BETWEEN_NOTES:
            last_note = time.monotonic()
            log.info("Converting %s: %d of %d tensors %s.", source, done, total, action)

    import_hf(source, output, verify="tensors", mtp=mtp, source_id=mark, progress=note)
    log.info("Converted %s into %s in %.1f s; every tensor was read back.", source, output, time.monotonic() - started)


def _is_converted(output: Path, mark: str) -> bool:
    if not (output / MANIFEST).is_file():
        return False
    try:
        imported = CheckpointReader(output).manifest["training"].get("imported", {})
    except CheckpointError:
        return False
    return imported.get("source") == mark


def _mark_of(source: Path) -> str:
    """Hash the folder's files by name, size and modification time: new weights under old names change the hash."""
    # Hashing the contents would take about as long as converting them.
    paths = [*source.iterdir(), *find_template_files(source).values()]
    stats = {str(path.relative_to(source)): path.stat() for path in sorted(paths) if path.is_file()}
    files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()]
    return xxhash.xxh3_128_hexdigest(json.dumps(files).encode())


def _check_disk(source: Path, output: Path, *, mtp: bool) -> None:
    """Raise CheckpointError if the model's float32 masters would fill the disk."""
    needed = 4 * sum(count_parameters(started_model(str(source), mtp=mtp)).values())
    output.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output.parent).free
    if needed > free:
        raise CheckpointError(
            f"run.start_from={str(source)!r} is converted into {output} first: its float32 masters take "
            f"{needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there.\nChoose another run.output_dir."
        )
