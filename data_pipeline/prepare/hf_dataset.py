"""Folders that Hugging Face's ``datasets`` has saved: which of their files are data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from data_pipeline.stores.urls import Location
from longctx.untrusted.git_lfs import is_pointer

_STATE = "state.json"
_DESCRIPTIONS = (_STATE, "dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True)
class Dataset:
    """What a folder of ``save_to_disk`` or of the cache of ``datasets`` says about itself."""

    not_data: dict[str, str] = field(default_factory=dict)
    """Names of files that hold no documents, with the reason."""
    missing: list[str] = field(default_factory=list)
    """Data files that are listed and not there."""


def find_dataset(folder: Location, names: Sequence[str]) -> Dataset:
    """What a folder with files of these ``names`` says of them; nothing if it holds no data set."""
    # A Git LFS pointer describes nothing: it is listed as a file, and left out by that name.
    described = [name for name in _DESCRIPTIONS if name in names and not is_pointer(_content(folder / name))]
    tables = [name for name in names if name.endswith(".arrow")]
    if not described or not (tables or _lists_splits(folder, described)):
        return Dataset()
    not_data = dict.fromkeys(described, "description of a data set")
    data_files = _data_files(folder, described)
    # The cache of `datasets` has no state.json: each of its tables is data.
    if data_files is None:
        return Dataset(not_data, [])
    # What `map` and `filter` have cached beside the data would give its documents once more.
    not_data.update((name, "not listed in state.json") for name in tables if name not in data_files)
    return Dataset(not_data, sorted(data_files - set(names)))


def _data_files(folder: Location, described: Sequence[str]) -> set[str] | None:
    """The data files that ``state.json`` lists; None where it lists none."""
    if _STATE not in described:
        return None
    state = _read_object(folder / _STATE)
    entries = state.get("_data_files")
    if not isinstance(entries, list):
        return None
    return {
        entry["filename"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("filename"), str)
    }


def _lists_splits(folder: Location, described: Sequence[str]) -> bool:
    """Whether the folder is one of several splits, which lie in folders of their own."""
    return "dataset_dict.json" in described and "splits" in _read_object(folder / "dataset_dict.json")


def _read_object(path: Location) -> dict[str, Any]:
    """The JSON object in a file, empty if there is none."""
    try:
        value = json.loads(_content(path))
    except ValueError:
        return {}
    if isinstance(value, dict):
        return value
    return {}


def _content(path: Location) -> bytes:
    """Return a file's bytes, none if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
