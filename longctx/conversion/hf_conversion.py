"""Export to and import from Hugging Face folders; each is verified before its output appears."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.checkpoint_format import CheckpointReader, is_buffer, model_config
from longctx.config import ModelConfig
from longctx.conversion.auxiliary_files import (
    auxiliary_names,
    copy_auxiliary_files,
    find_auxiliary_files,
    has_own_tokenizer,
    is_notice,
    log_ignored_keys,
    log_skipped_files,
)
from longctx.conversion.casts import dtype_name, export_dtypes, lossy_casts, own_dtypes, read_master
from longctx.conversion.checkpoint_checks import check_checkpoint_tensors, check_folders, open_verified_checkpoint
from longctx.conversion.checkpoint_writer import save_master_weights
from longctx.conversion.hf import HfReader, save_hf
from longctx.conversion.merged_adapters import open_merged
from longctx.conversion.passthrough import PROCESSORS, PassthroughPart, passthrough_from_checkpoint
from longctx.conversion.tensor_mismatches import format_names
from longctx.conversion.tokenizer_export import config_ids, log_tokenizer_warnings, replaced_ids
from longctx.conversion.verify_conversion import (
    Fingerprints,
    LogitsCheck,
    TensorCheck,
    check_verify_mode,
    compare_logits,
    logits_skip_reason,
    transformers_supports,
)
from longctx.conversion.weights.weights_folder import has_standard_names
from longctx.errors import CheckpointError, ConfigError
from longctx.families import ALIASES, family_of
from longctx.files import staged_folder
from longctx.tokenizer import Tokenizer, load_tokenizer
from longctx.tokenizer.chat_templates import hf_path
from longctx.tokenizer.image_tokenizer import IMAGE_FILE
from longctx.tokenizer.load_tokenizer import GENERATION_CONFIG, JSON_FILE, MODEL_FILE, has_tokenizer

Progress = Callable[[str, int, int], None]
"""Callback with the action on tensors (``written``, ``verified``), the number done, and the total."""

Items = Iterable[tuple[str, Tensor]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Result of a conversion and its verification."""

    folder: Path
    dtype: torch.dtype
    """Widest dtype among the written weights; for a checkpoint, its default export dtype."""
    lossy_casts: dict[str, int]
    """Tensors that lost bits on request, by ``"float32 → bfloat16"``."""
    auxiliary_files: tuple[str, ...]
    """Files copied byte for byte along with the weights."""
    tensors: TensorCheck | None
    """None if verification was disabled."""
    logits: LogitsCheck | None
    logits_skip_reason: str | None
    """Why logits could not be compared; None also if that was not requested."""


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: str | Path | None = None,
    verify: str = "tensors",
    shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> Conversion:
    """Write a checkpoint (or a run's newest) as a Hugging Face folder, with its tokenizer.

    An import's tokenizer files are written unchanged; a standalone SentencePiece model is exported as a fast tokenizer.
    ``tokenizer`` names another one to export instead, or is "none". ``dtype`` requests a cast that may lose bits.
    Without it, a trained model is written as float32 master weights, and an imported one that was not trained since in
    its own dtypes. The checkpoint's hashes are checked first. ``verify`` (see ``verify.KINDS``) reads every parameter
    back through the table, compares its bytes with the source's, and compares logits with transformers'. The folder
    appears verified or not at all.
    """
    check_verify_mode(verify)
    check_folders(checkpoint, output)
    reader = open_merged(open_verified_checkpoint(checkpoint))
    training = reader.manifest["training"]
    config, origin, passthrough = (
        model_config(reader),
        training.get("imported", {}),
        passthrough_from_checkpoint(reader),
    )
    dtypes = export_dtypes(reader, dtype)
    written, size = _widest(dtypes), _num_values(reader)
    # A run that started from an import has the type in its own manifest.
    model_type = family_of(config, model_type=origin.get("model_type", training.get("model_type"))).model_type
    no_logits = _logits_skip_reason(verify, config, size, written, model_type)
    written_tokenizer, copied = _choose_tokenizer(reader, tokenizer)
    if written_tokenizer is not None:
        log_tokenizer_warnings(written_tokenizer, config.vocab_size)
    elif has_own_tokenizer(reader) and str(tokenizer) != "none":
        log_tokenizer_warnings(reader.folder, config.vocab_size)
    prints = Fingerprints()
    masters = partial(_masters, reader, dtypes)
    with staged_folder(Path(output), error=CheckpointError) as staging:
        save_hf(
            config,
            _recorded(masters(), prints, verify),
            staging,
            tokenizer=written_tokenizer,
            model_type=model_type,
            token_ids=_token_ids(reader, origin, copied),
            passthrough=_recorded_part(passthrough, prints, verify),
            shard_bytes=shard_bytes,
            progress=_written_callback(progress),
        )
        auxiliary = copy_auxiliary_files({name: reader.folder / name for name in copied}, staging)
        tensors, logits = None, None
        if verify != "none":
            # Read back through the table for external folders, so that a writing mistake cannot cancel itself out.
            reread = HfReader(staging, mtp=config.mtp_layers > 0)
            tensors = prints.check(
                chain(_report_verified(reread, len(dtypes), progress), reread.passthrough or ()), "the output"
            )
        # After the tensors, which are cheap: a wrong tensor's logits add no information.
        if no_logits is None:
            logits = compare_logits(config, masters, staging, num_parameters=size, dtype=written)
    return Conversion(
        folder=Path(output), dtype=written, lossy_casts=lossy_casts(own_dtypes(reader), dtypes),
        auxiliary_files=tuple(auxiliary), tensors=tensors, logits=logits, logits_skip_reason=no_logits or None,
    )  # fmt: skip


def _choose_tokenizer(reader: CheckpointReader, chosen: str | Path | None) -> tuple[Tokenizer | None, list[str]]:
    """Return the tokenizer to export, and the checkpoint's files to copy unchanged."""
    names = auxiliary_names(reader)
    notices = [name for name in names if is_notice(name) or name in PROCESSORS]
    settings = [name for name in names if name == GENERATION_CONFIG]
    if chosen is not None and str(chosen) == "none":
        return None, settings + notices
    if chosen is not None:
        return load_tokenizer(chosen), notices
    # Files that transformers reads are copied unchanged; without them, the SentencePiece model is exported.
    if has_own_tokenizer(reader):
        return None, names
    if has_tokenizer(reader.folder):
        return load_tokenizer(reader.folder), notices
    return None, settings + notices


def _token_ids(reader: CheckpointReader, origin: dict[str, Any], copied: list[str]) -> dict[str, Any] | None:
    """Return the ids for config.json: an import's own, or those in the copied tokenizer files."""
    if "token_ids" in origin:
        return origin["token_ids"]
    if any(name in copied for name in (MODEL_FILE, JSON_FILE)):
        return config_ids(load_tokenizer(reader.folder))
    return None


def _masters(reader: CheckpointReader, dtypes: dict[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
    """Yield a checkpoint's weights, each in its dtype."""
    for name, dtype in dtypes.items():
        yield name, read_master(reader, name, dtype)


def import_hf(
    folder: str | Path,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    verify: str = "tensors",
    text_only: bool = False,
    mtp: bool = False,
    shard_bytes: int = 5_000_000_000,
    source_id: str | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Write a Hugging Face folder as a step-0 checkpoint to train from.

    It holds float32 master weights without optimizer moments. ``dtype`` is its default export dtype (default: each
    tensor's own). Tokenizer files and generation settings are copied byte for byte, and so are tensors from parts that
    the decoder does not have, unless ``text_only``. With ``mtp``, multi-token prediction blocks become part of the
    decoder, to be trained. ``verify`` (see ``verify.KINDS``) reads every master weight back, compares it, cast to its
    original dtype, with the source's bytes, and compares logits with transformers'. ``source_id`` is stored in the
    manifest, so that a caller can identify the source later. The checkpoint appears verified or not at all.
    """
    check_verify_mode(verify)
    check_folders(folder, output)
    reader = HfReader(folder, mtp=mtp)
    log_ignored_keys(reader.folder, reader.ignored_keys)
    passthrough = _select_passthrough(reader, text_only=text_only)
    auxiliary = find_auxiliary_files(reader.folder, include_processors=passthrough is not None)
    log_skipped_files(reader.folder, reader.files().union(map(hf_path, auxiliary)))
    source_dtype = reader.dtype
    # Before anything is written: a conversion that cannot be verified as requested fails here.
    size = _num_values(reader)
    no_logits = _logits_skip_reason(verify, reader.config, size, source_dtype, reader.model_type_on_disk, reader=reader)
    log_tokenizer_warnings(reader.folder, reader.config.vocab_size)
    prints, dtypes = Fingerprints(), {}
    origin = {
        "from": reader.folder.name,
        "model_type": reader.model_type,
        "token_ids": reader.token_ids,
        "dtype": dtype_name(source_dtype),
        "dtypes": {},  # for tensors that have another dtype; filled as they are read
    }
    if source_id is not None:
        origin["source"] = source_id

    def source() -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, recording each dtype."""
        for name, tensor in reader:
            dtypes[name] = tensor.dtype
            if tensor.dtype != source_dtype:
                origin["dtypes"][name] = dtype_name(tensor.dtype)
            yield name, tensor

    with staged_folder(Path(output), error=CheckpointError) as staging:
        save_master_weights(
            reader.config,
            _recorded(source(), prints, verify),
            staging,
            dtype=dtype or source_dtype,
            training={"imported": origin},
            auxiliary_files=auxiliary | _image_files(reader),
            passthrough=_recorded_part(passthrough, prints, verify),
            shard_bytes=shard_bytes,
            progress=_written_callback(progress),
        )
        tensors, logits = None, None
        if verify != "none":
            # Masters are float32, but the source was hashed in its own dtypes: cast each back, which must not lose
            # bits.
            written = CheckpointReader(staging)
            check_checkpoint_tensors(written)
            reread = ((name, read_master(written, name, dtypes[name], is_exact=True)) for name in written.names())
            others = passthrough_from_checkpoint(written) or ()
            tensors = prints.check(chain(_report_verified(reread, len(dtypes), progress), others), "the output")
        if no_logits is None:
            # From the written checkpoint, so that the comparison covers the full import.
            masters = partial(_masters, CheckpointReader(staging), dict.fromkeys(dtypes, torch.float32))
            logits = compare_logits(reader.config, masters, reader.folder, num_parameters=size, dtype=source_dtype)
    return Conversion(
        folder=Path(output),
        dtype=dtype or source_dtype,
        lossy_casts={},
        auxiliary_files=tuple(map(hf_path, auxiliary)),
        tensors=tensors, logits=logits, logits_skip_reason=no_logits or None,
    )  # fmt: skip


def _image_files(reader: HfReader) -> dict[str, bytes]:
    """Return the file that takes a tokenizer's place for a model of images; empty for texts."""
    image_format = reader.image_format()
    if image_format is None:
        return {}
    return {IMAGE_FILE: image_format.content()}


def _select_passthrough(reader: HfReader, *, text_only: bool) -> PassthroughPart | None:
    """Return the parts to carry in addition to the decoder; log them, or the parts that are left out."""
    parts = reader.passthrough
    if parts is None:
        return None
    if text_only:
        log.warning(
            "%s: left out as requested, also from exports: %s.", reader.folder, format_names(parts.names, limit=6)
        )
        return None
    parts.log_tensors(reader.folder)
    return parts


def _logits_skip_reason(
    verify: str,
    config: ModelConfig,
    size: int,
    dtype: torch.dtype,
    model_type: str,
    *,
    reader: HfReader | None = None,
) -> str | None:
    """Return why logits are not compared: None if they are, empty if that was not requested.

    ``model_type`` is for the folder that transformers would load, and ``reader`` is given if we did not write it. Raise
    ConfigError if logits were requested and cannot be compared.
    """
    if verify not in ("auto", "logits"):
        return ""
    reason = logits_skip_reason(config, size, dtype)
    if reason is None and reader is not None:
        reason = _load_failure_reason(reader)
    if reason is None and not transformers_supports(model_type):
        reason = f"this version of transformers has no {model_type}"
    if reason is not None and verify == "logits":
        raise ConfigError(f"logits cannot be compared: {reason}. Try --verify tensors.")
    return reason


def _load_failure_reason(reader: HfReader) -> str | None:
    """Return why transformers cannot load a folder that we read; None if it can, as far as is known."""
    if not has_standard_names(reader.folder):
        return f"transformers does not find the weight files under their names in {reader.folder}"
    if reader.quantization is not None and find_spec("accelerate") is None:
        return "transformers loads quantised weights with accelerate, which is not installed (pip install accelerate)"
    if reader.model_type_on_disk in ALIASES:
        return f"transformers has no {reader.model_type_on_disk} class; exports are {reader.model_type}"
    rows = reader.config.vocab_size
    for key in replaced_ids(reader.token_ids, rows):
        named = f"{key}={reader.token_ids[key]}"
        return f"transformers does not load {reader.folder}: its config.json has {named} for {rows} rows"
    return None


def _recorded(items: Items, prints: Fingerprints, verify: str) -> Items:
    """Return the items; unless ``verify`` is "none", record their fingerprints on the way."""
    if verify == "none":
        return items
    return prints.record(items)


def _recorded_part(part: PassthroughPart | None, prints: Fingerprints, verify: str) -> PassthroughPart | None:
    """Return a model's other parts, recorded like its parameters."""
    if part is None or verify == "none":
        return part
    read = part.read
    return replace(part, read=lambda name: next(prints.record([(name, read(name))]))[1])


def _written_callback(progress: Progress | None) -> Callable[[int, int], None] | None:
    """Return the progress callback for the writers, bound to "written"."""
    if progress is None:
        return None
    return partial(progress, "written")


def _report_verified(items: Items, total: int, progress: Progress | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the items, and report each as verified after it was consumed."""
    for done, item in enumerate(items, start=1):
        yield item
        if progress is not None:
            progress("verified", done, total)


def _widest(dtypes: dict[str, torch.dtype]) -> torch.dtype:
    """Return the narrowest dtype that holds every parameter; a router's correction bias does not count."""
    return reduce(torch.promote_types, (dtype for name, dtype in dtypes.items() if not is_buffer(name)))


def _num_values(reader: CheckpointReader | HfReader) -> int:
    """Count the values in a model's parameters and buffers."""
    return sum(torch.Size(reader.shape(name)).numel() for name in reader.names())
