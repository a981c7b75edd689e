"""Parts of an imported model that the decoder does not have: vision towers, multi-token prediction layers.

A checkpoint keeps their tensors unchanged (``carried*.safetensors``), with the config.json that describes them
(``imported_config.json``). Training does not read them; an export includes them.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from longctx.checkpoint_format import CheckpointReader
from longctx.conversion.tensor_mismatches import format_names
from longctx.conversion.weights.json_files import read_checkpoint_json, write_json
from longctx.conversion.weights.weights_folder import WeightsFolder
from longctx.errors import CheckpointError, ConfigError
from longctx.families import FAMILIES, rewrap_config, unwrap_config, wrapper_of
from longctx.families.wrapped import NameMap
from longctx.storage.safetensors import SafetensorsFile, SafetensorsShardWriter

log = logging.getLogger(__name__)

IMPORTED_CONFIG = "imported_config.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Settings that turn images into inputs for such a part, or into the tokens of a model for images."""
_FILE_PREFIX = "carried"
_WEIGHTS = re.compile(rf"{_FILE_PREFIX}(-\d{{5}}-of-\d{{5}})?\.safetensors")


@dataclass(frozen=True, kw_only=True)
class PassthroughPart:
    """Tensors with the names that they have next to a standalone text model, and the full model's config.json."""

    config: Mapping[str, Any]
    names: tuple[str, ...]
    num_bytes: int
    read: Callable[[str], Tensor]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names:
            yield name, self.read(name)

    @property
    def name_map(self) -> NameMap | None:
        """Tensor naming in the full model; None for a standalone text model."""
        wrapper = wrapper_of(self.config)
        if wrapper is None:
            return None
        return wrapper.select_name_map(self.names)

    def full_config(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json for all parts, with ``text`` for the text model.

        Raise ConfigError if the model type differs from the imported one.
        """
        imported_text = unwrap_config(self.config)
        if text["model_type"] != imported_text["model_type"]:
            raise ConfigError(
                f"the model was imported as {imported_text['model_type']} with other parts, but is a "
                f"{text['model_type']} now, which does not support them.\n"
                "Import it with --text-only to leave them out."
            )
        # Keys for layers that only the carried tensors have: the decoder's own config.json omits them.
        family = FAMILIES[text["model_type"]]
        merged = _with_keys(text, imported_text, family.passthrough_keys)
        if wrapper_of(self.config) is None:
            return merged
        return rewrap_config(self.config, merged)

    def write(self, folder: Path, shard_bytes: int) -> None:
        """Write the tensors next to a checkpoint's own files."""
        write_json(folder / IMPORTED_CONFIG, dict(self.config))
        # Without other tensors, only config.json shows that the model is wrapped.
        if not self.names:
            return
        writer = SafetensorsShardWriter(folder, _FILE_PREFIX, shard_bytes)
        for name, tensor in self:
            writer.add(name, tensor)
        writer.finish()

    def log_tensors(self, folder: Path) -> None:
        """Log the carried tensors."""
        if self.names:
            log.warning(
                "%s: %d tensors (%.2f GiB) do not belong to the decoder: they are not trained, and exported "
                "unchanged: %s",
                folder, len(self.names), self.num_bytes / 2**30, format_names(self.names, limit=3),
            )  # fmt: skip


def passthrough_files(names: Mapping[str, Any]) -> list[str]:
    """Return a checkpoint's files that belong to carried parts."""
    small = {IMPORTED_CONFIG}.union(PROCESSORS)
    return sorted(name for name in names if name in small or _WEIGHTS.fullmatch(name))


def passthrough_from_folder(
    disk: WeightsFolder, hf_config: Mapping[str, Any], names: Collection[str]
) -> PassthroughPart | None:
    """Return a folder's part with these tensors, if there is one.

    Raise CheckpointError for a tensor with a dtype that cannot be written.
    """
    # A wrapped model without its other parts is still written as a wrapped one.
    if not names and wrapper_of(hf_config) is None:
        return None
    sizes, unknown = [], []
    for name in names:
        dtype = disk.stored_dtype(name)
        if dtype is None:
            unknown.append(name)
        else:
            sizes.append(math.prod(disk.shape(name)) * dtype.itemsize)
    if unknown:
        raise CheckpointError(f"{disk.folder}: dtypes that cannot be carried along: {format_names(unknown)}.")
    return PassthroughPart(config=hf_config, names=tuple(sorted(names)), num_bytes=sum(sizes), read=disk.read_stored)


def passthrough_from_checkpoint(reader: CheckpointReader) -> PassthroughPart | None:
    """Return a checkpoint's carried part, if it has one."""
    manifest_files = reader.manifest["files"]
    if IMPORTED_CONFIG not in manifest_files:
        return None
    # Only files listed in the manifest, not others that happen to be in the folder.
    files = [SafetensorsFile(reader.folder / name) for name in sorted(manifest_files) if _WEIGHTS.fullmatch(name)]
    file_of = {name: file for file in files for name in file.names()}
    entries = [file.entry(name) for name, file in file_of.items()]
    return PassthroughPart(
        config=read_checkpoint_json(reader.folder / IMPORTED_CONFIG),
        names=tuple(sorted(file_of)),
        num_bytes=sum(entry.stop - entry.start for entry in entries if entry is not None),
        read=lambda name: file_of[name].read_stored(name),
    )


def _with_keys(text: Mapping[str, Any], original: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return ``text`` with these keys from the original."""
    # A deep copy, so that the caller's tables stay unchanged.
    found: dict[str, Any] = json.loads(json.dumps(text))
    for key in keys:
        # Dots separate nested tables and the key.
        *tables, last = key.split(".")
        source, target = original, found
        for table in tables:
            source, target = source.get(table) or {}, target.setdefault(table, {})
        if last in source:
            target[last] = source[last]
    return found
