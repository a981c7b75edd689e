"""Lists a folder's files, or objects below a URL; links are followed once, and skipped files recorded with a reason."""

from __future__ import annotations

import fnmatch
import heapq
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.prepare.source_items import File, Skip, find_format
from data_pipeline.stores.client import list_objects, size_of
from data_pipeline.stores.urls import Location, ObjectPath
from longctx.untrusted.git_lfs import is_pointer


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Glob patterns; ``*`` also crosses folders, and a folder's own path stands for everything below it."""

    include: Sequence[str] = ()
    """Read only files that match one of these; empty: all files."""
    exclude: Sequence[str] = ()
    as_text: Sequence[str] = ()
    """Files read as plain text, whatever their suffix."""
    as_json: Sequence[str] = ()
    """Files read as JSON (lines, an array or values), unless they are read as text."""
    _used: set[str] = field(default_factory=set, init=False, compare=False)
    _excluded_folders: list[str] = field(default_factory=list, init=False, compare=False)

    def includes(self, name: str) -> bool:
        """Return whether ``include`` selects the file."""
        return not self.include or self._matches(name, self.include)

    def excludes(self, name: str) -> bool:
        """Return whether ``exclude`` matches the file."""
        return self._matches(name, self.exclude)

    def excludes_folder(self, name: str) -> bool:
        """Return whether ``exclude`` matches the folder and so everything below it."""
        is_excluded = self._matches(name, self.exclude)
        if is_excluded:
            self._excluded_folders.append(name)
        return is_excluded

    def read_as(self, name: str) -> str:
        """Return the format for the file, ``text`` or ``json``; empty if its suffix decides."""
        if self._matches(name, self.as_text):
            return "text"
        if self._matches(name, self.as_json):
            return "json"
        return ""

    def unused(self) -> list[str]:
        """Return the patterns without a match so far, usually typing errors."""
        patterns = (*self.include, *self.exclude, *self.as_text, *self.as_json)
        return [pattern for pattern in patterns if pattern not in self._used and not self._is_inside_excluded(pattern)]

    def _matches(self, name: str, patterns: Sequence[str]) -> bool:
        """Return whether a pattern matches a file or a folder above it, and record the match."""
        found = [pattern for pattern in patterns if _match(name, pattern)]
        self._used.update(found)
        return bool(found)

    def _is_inside_excluded(self, pattern: str) -> bool:
        """Return whether the pattern may match inside an excluded folder, which was never listed."""
        return any(pattern.startswith(("*", f"{folder}/")) for folder in self._excluded_folders)


def _match(name: str, pattern: str) -> bool:
    # fnmatchcase, because matches must not depend on the platform's case rules.
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern.rstrip("/") + "/*")


_NEVER = {"site-packages", "dist-packages", "__pycache__"}

Identity = tuple[int, int]
"""Device and inode: identifies a folder whatever path leads to it."""


@dataclass(frozen=True)
class Listing:
    """Files below a path, and skipped entries."""

    files: list[File] = field(default_factory=list)
    left_out: list[Skip] = field(default_factory=list)

    def in_order(self) -> Listing:
        """Return the listing sorted by relative path: documents must not depend on the file system's order."""
        files = sorted(self.files, key=lambda file: (file.name, os.fsencode(str(file.path))))
        return Listing(files, sorted(self.left_out, key=lambda skip: (skip.name, skip.reason)))


def list_files(root: Path, selection: Selection, *, python_only: bool) -> Listing:
    """List the files below ``root`` by relative path; if ``root`` is a file, the list contains only that file.

    A link to a folder is followed unless that folder is already read under another name. Real folders come first, then
    links by their relative path, so cycles end and each file is read once. ``python_only`` takes only ``.py`` files and
    follows no links to folders.
    """
    walk = Walk(selection, python_only=python_only)
    if root.is_dir():
        walk.enter(root, "", is_linked=False)
        walk.follow_links()
    elif root.is_file():
        walk.add_file(root, _shown(root.name), root.stat().st_size)
    else:
        walk.leave_out(_shown(root.name), "not a regular file")
    return walk.found.in_order()


class Walk:
    """A listing under construction."""

    def __init__(self, selection: Selection, *, python_only: bool) -> None:
        self.found = Listing()
        self._selection = selection
        self._python_only = python_only
        self._entered: set[Identity] = set()
        self._links: list[tuple[str, Path]] = []

    def enter(self, folder: Path, name: str, *, is_linked: bool) -> None:
        """List a folder and everything below it. If a link led here, skip folders that were already entered."""
        # Iterative: folders may nest deeper than Python's recursion limit.
        pending = [(folder, name)]
        while pending:
            folder, name = pending.pop()
            try:
                identity = _identity(folder)
                # Only for linked folders: some file systems give every folder the same inode.
                if is_linked and identity in self._entered:
                    self.leave_out(name, "linked folder that is read already")
                    continue
                self._entered.add(identity)
                pending += self._list(folder, name)
            except OSError as error:
                self.leave_out(name or "/", "cannot be read", error.strerror or "", is_fault=True)

    def follow_links(self) -> None:
        """Enter the folders that links lead to, including links found there."""
        # Smallest path first: which of several links to a folder wins does not depend on the directory order.
        while self._links:
            name, folder = heapq.heappop(self._links)
            self.enter(folder, name, is_linked=True)

    def add_file(self, path: Location, name: str, size: int) -> None:
        """Add a file unless the patterns exclude it."""
        if self._selection.excludes(name):
            self.leave_out(name, "excluded")
        elif not self._selection.includes(name):
            self.leave_out(name, "not included")
        else:
            read_as = self._selection.read_as(name)
            if self._python_only:
                read_as = "text"
            self.found.files.append(File(path, name, size, find_format(name, read_as=read_as)))

    def _list(self, folder: Path, prefix: str) -> list[tuple[Path, str]]:
        """Process one folder's entries and return its real subfolders."""
        folders: list[tuple[Path, str]] = []
        with os.scandir(folder) as entries:
            # Read all entries first: a metadata file decides about the others.
            dir_entries = list(entries)
        not_data = {}
        if not self._python_only:
            not_data = self._not_data(folder, prefix, [entry.name for entry in dir_entries])
        for entry in dir_entries:
            path, name = Path(entry.path), prefix + _shown(entry.name)
            if entry.name in not_data:
                self.leave_out(name, not_data[entry.name])
            # is_dir follows links, so linked folders are handled here too.
            elif _try_test(entry.is_dir):
                if self._python_only and (entry.name in _NEVER or entry.is_symlink()):
                    continue
                if self._should_enter(entry.name, name):
                    if entry.is_symlink():
                        heapq.heappush(self._links, (f"{name}/", path))
                    else:
                        folders.append((path, f"{name}/"))
            else:
                self._list_file(entry, path, name)
        return folders

    def enter_objects(self, path: ObjectPath, prefix: str, folder: _Folder) -> None:
        """Add a store folder's contents, or record why they are skipped. A store has no links and no devices."""
        # Metadata files are small objects, read here as in a local folder.
        not_data = self._not_data(path, prefix, list(folder.sizes))
        for name, size in folder.sizes.items():
            if name in not_data:
                self.leave_out(prefix + name, not_data[name])
            elif name.startswith("."):
                self.leave_out(prefix + name, "hidden")
            else:
                self.add_file(path / name, prefix + name, size)
        for name, below in folder.folders.items():
            if self._should_enter(name, prefix + name):
                self.enter_objects(path / name, f"{prefix}{name}/", below)

    def _not_data(self, folder: Location, prefix: str, names: list[str]) -> dict[str, str]:
        """Return the files without documents according to ``datasets`` metadata, each with the reason."""
        dataset = find_dataset(folder, names)
        for missing in dataset.missing:
            self.leave_out(prefix + missing, "missing", "state.json lists it", is_fault=True)
        return dataset.not_data

    def _should_enter(self, own_name: str, name: str) -> bool:
        """Return whether the patterns and its name permit entering a folder."""
        if own_name.startswith(".") and not self._python_only:
            self.leave_out(f"{name}/", "hidden")
            return False
        # Check before entering it: an excluded folder may be huge or unreadable.
        if self._selection.excludes_folder(name):
            self.leave_out(f"{name}/", "excluded")
            return False
        return True

    def _list_file(self, entry: os.DirEntry[str], path: Path, name: str) -> None:
        """Add a non-folder entry, or record why it is skipped."""
        if self._python_only and path.suffix != ".py":
            return
        if entry.name.startswith(".") and not self._python_only:
            self.leave_out(name, "hidden")
        elif _try_test(entry.is_file):
            self.add_file(path, name, path.stat().st_size)
        elif self._selection.excludes(name):
            self.leave_out(name, "excluded")
        elif entry.is_symlink() and not path.exists():
            self.leave_out(name, "broken link", is_fault=True)
        else:
            self.leave_out(name, "not a regular file")

    def leave_out(self, name: str, reason: str, detail: str = "", *, is_fault: bool = False) -> None:
        """Record an entry that gives no document."""
        self.found.left_out.append(Skip(name, reason, detail, is_fault))


def _try_test(test: Callable[[], bool]) -> bool:
    """Call ``is_dir`` or ``is_file``; return False for a link cycle."""
    try:
        return test()
    except OSError:
        return False


def _identity(folder: Path) -> Identity:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _shown(name: str) -> str:
    """Decode a file name to text: its bytes are usually but not always UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


@dataclass
class _Folder:
    """Contents of one store folder."""

    sizes: dict[str, int] = field(default_factory=dict)
    folders: dict[str, _Folder] = field(default_factory=dict)


def list_source(root: ObjectPath, selection: Selection) -> Listing:
    """List the objects below ``root`` by relative path; if ``root`` is an object, the list contains only it."""
    walk = Walk(selection, python_only=False)
    # A store may have both an object and a prefix with this name; the object takes precedence.
    size = size_of(root)
    if size is not None:
        walk.add_file(root, root.name, size)
    else:
        walk.enter_objects(root, "", _tree(list_objects(root)))
    return walk.found.in_order()


def _tree(sizes: dict[str, int]) -> _Folder:
    """Build the folder tree, which a store has only as name prefixes."""
    top = _Folder()
    for path, size in sizes.items():
        folder = top
        above, _, name = path.rpartition("/")
        for part in above.split("/") if above else ():
            folder = folder.folders.setdefault(part, _Folder())
        folder.sizes[name] = size
    return top


_STATE = "state.json"
_DESCRIPTIONS = (_STATE, "dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True)
class Dataset:
    """Metadata in a folder written by ``save_to_disk``, or in a ``datasets`` cache folder."""

    not_data: dict[str, str] = field(default_factory=dict)
    """Files without documents, with the reason."""
    missing: list[str] = field(default_factory=list)
    """Data files that are listed but missing."""


def find_dataset(folder: Location, names: Sequence[str]) -> Dataset:
    """Return a folder's ``datasets`` metadata, given its file names; empty if it contains no data set."""
    # A Git LFS pointer contains no metadata: it is listed as a file and skipped as a pointer.
    metadata_files = [name for name in _DESCRIPTIONS if name in names and not is_pointer(_content(folder / name))]
    tables = [name for name in names if name.endswith(".arrow")]
    # A metadata file alone does not make a data set.
    if not metadata_files or not (tables or _lists_splits(folder, metadata_files)):
        return Dataset()
    not_data = dict.fromkeys(metadata_files, "description of a data set")
    data_files = _data_files(folder, metadata_files)
    # The `datasets` cache has no state.json: each of its tables is data.
    if data_files is None:
        return Dataset(not_data, [])
    # `map` and `filter` caches next to the data would repeat its documents.
    not_data.update((name, "not listed in state.json") for name in tables if name not in data_files)
    return Dataset(not_data, sorted(data_files - set(names)))


def _data_files(folder: Location, metadata_files: Sequence[str]) -> set[str] | None:
    """Return the data files that ``state.json`` lists, if it exists and is valid."""
    if _STATE not in metadata_files:
        return None
    state = _read_object(folder / _STATE)
    entries = state.get("_data_files")
    if not isinstance(entries, list):
        return None
    return {
        entry["filename"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("filename"), str)
    }


def _lists_splits(folder: Location, metadata_files: Sequence[str]) -> bool:
    """Return whether the folder's metadata lists several splits, which are in separate folders."""
    return "dataset_dict.json" in metadata_files and "splits" in _read_object(folder / "dataset_dict.json")


def _read_object(path: Location) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is not one."""
    try:
        value = json.loads(_content(path))
    except ValueError:
        return {}
    if isinstance(value, dict):
        return value
    return {}


def _content(path: Location) -> bytes:
    """Return a file's bytes; empty if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
