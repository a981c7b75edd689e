"""The files of a folder, or the objects below a URL: links followed once, what is left out listed with its reason."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from data_pipeline.prepare.documents import File, Skip, find_format
from data_pipeline.prepare.hf_dataset import find_dataset
from data_pipeline.prepare.selection import Selection
from data_pipeline.stores.client import list_objects, size_of
from data_pipeline.stores.urls import Location, ObjectPath

_NEVER = {"site-packages", "dist-packages", "__pycache__"}

Identity = tuple[int, int]
"""Device and inode: what a folder is, whatever path leads to it."""


@dataclass(frozen=True)
class Listing:
    """What was found below a path."""

    files: list[File] = field(default_factory=list)
    left_out: list[Skip] = field(default_factory=list)

    def in_order(self) -> Listing:
        """The same by relative path: file systems list in any order, and documents must not depend on it."""
        files = sorted(self.files, key=lambda file: (file.name, os.fsencode(str(file.path))))
        return Listing(files, sorted(self.left_out, key=lambda skip: (skip.name, skip.reason)))


def list_files(root: Path, selection: Selection, *, python_only: bool) -> Listing:
    """The files below ``root`` by relative path; a file given itself is the whole list.

    A link to a folder is followed, unless that folder is read under another name already: real folders come first, then
    links by their relative path, so cycles end and nothing is read twice. ``python_only`` takes ``.py`` files alone,
    and follows no link to a folder.
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
    """One listing as it grows."""

    def __init__(self, selection: Selection, *, python_only: bool) -> None:
        self.found = Listing()
        self._selection = selection
        self._python_only = python_only
        self._entered: set[Identity] = set()
        self._links: list[tuple[str, Path]] = []

    def enter(self, folder: Path, name: str, *, is_linked: bool) -> None:
        """List a folder and all below it. Where a link led here, folders that were entered already are left out."""
        pending = [(folder, name)]
        while pending:
            folder, name = pending.pop()
            try:
                identity = _identity(folder)
                # Only behind a link: some file systems give every folder the same inode.
                if is_linked and identity in self._entered:
                    self.leave_out(name, "linked folder that is read already")
                    continue
                self._entered.add(identity)
                pending += self._list(folder, name)
            except OSError as error:
                self.leave_out(name or "/", "cannot be read", error.strerror or "", is_fault=True)

    def follow_links(self) -> None:
        """Enter the folders that links lead to, links found there included."""
        while self._links:
            name, folder = heapq.heappop(self._links)
            self.enter(folder, name, is_linked=True)

    def add_file(self, path: Location, name: str, size: int) -> None:
        """Take a file, unless the patterns leave it out."""
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
        """Sort the entries of one folder; its real folders are returned."""
        folders: list[tuple[Path, str]] = []
        with os.scandir(folder) as entries:
            listed = list(entries)
        not_data = {}
        if not self._python_only:
            not_data = self._not_data(folder, prefix, [entry.name for entry in listed])
        for entry in listed:
            path, name = Path(entry.path), prefix + _shown(entry.name)
            if entry.name in not_data:
                self.leave_out(name, not_data[entry.name])
            elif _holds(entry.is_dir):
                if self._python_only and (entry.name in _NEVER or entry.is_symlink()):
                    continue
                if self._takes_folder(entry.name, name):
                    if entry.is_symlink():
                        heapq.heappush(self._links, (f"{name}/", path))
                    else:
                        folders.append((path, f"{name}/"))
            else:
                self._list_file(entry, path, name)
        return folders

    def enter_objects(self, path: ObjectPath, prefix: str, folder: _Folder) -> None:
        """Take what a folder of a store holds, or say why it is left out. A store has no links and no devices."""
        # Its descriptions are small objects, read here as from a folder.
        not_data = self._not_data(path, prefix, list(folder.sizes))
        for name, size in folder.sizes.items():
            if name in not_data:
                self.leave_out(prefix + name, not_data[name])
            elif name.startswith("."):
                self.leave_out(prefix + name, "hidden")
            else:
                self.add_file(path / name, prefix + name, size)
        for name, below in folder.folders.items():
            if self._takes_folder(name, prefix + name):
                self.enter_objects(path / name, f"{prefix}{name}/", below)

    def _not_data(self, folder: Location, prefix: str, names: list[str]) -> dict[str, str]:
        """Return the files that hold no documents by what ``datasets`` has written there, with the reason of each."""
        dataset = find_dataset(folder, names)
        for missing in dataset.missing:
            self.leave_out(prefix + missing, "missing", "state.json lists it", is_fault=True)
        return dataset.not_data

    def _takes_folder(self, own_name: str, name: str) -> bool:
        """Whether the patterns and its name let us into a folder."""
        if own_name.startswith(".") and not self._python_only:
            self.leave_out(f"{name}/", "hidden")
            return False
        # Before walking into it: what is excluded may be huge, or refuse to be read.
        if self._selection.excludes_folder(name):
            self.leave_out(f"{name}/", "excluded")
            return False
        return True

    def _list_file(self, entry: os.DirEntry[str], path: Path, name: str) -> None:
        """Take an entry that is no folder, or say why it is left out."""
        if self._python_only and path.suffix != ".py":
            return
        if entry.name.startswith(".") and not self._python_only:
            self.leave_out(name, "hidden")
        elif _holds(entry.is_file):
            self.add_file(path, name, path.stat().st_size)
        elif self._selection.excludes(name):
            self.leave_out(name, "excluded")
        elif entry.is_symlink() and not path.exists():
            self.leave_out(name, "broken link", is_fault=True)
        else:
            self.leave_out(name, "not a regular file")

    def leave_out(self, name: str, reason: str, detail: str = "", *, is_fault: bool = False) -> None:
        """Note what gives no document."""
        self.found.left_out.append(Skip(name, reason, detail, is_fault))


def _holds(test: Callable[[], bool]) -> bool:
    """The answer of ``is_dir`` or ``is_file``; False for a link that leads in a circle."""
    try:
        return test()
    except OSError:
        return False


def _identity(folder: Path) -> Identity:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _shown(name: str) -> str:
    """A file's name as text: its bytes are most often UTF-8, but need not be."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


@dataclass
class _Folder:
    """What lies in one folder of a store."""

    sizes: dict[str, int] = field(default_factory=dict)
    folders: dict[str, _Folder] = field(default_factory=dict)


def list_source(root: ObjectPath, selection: Selection) -> Listing:
    """The objects below ``root`` by relative path; an object given itself is the whole list."""
    walk = Walk(selection, python_only=False)
    size = size_of(root)
    if size is not None:
        walk.add_file(root, root.name, size)
    else:
        walk.enter_objects(root, "", _tree(list_objects(root)))
    return walk.found.in_order()


def _tree(sizes: dict[str, int]) -> _Folder:
    """Folders, which a store knows as beginnings of names alone."""
    top = _Folder()
    for path, size in sizes.items():
        folder = top
        above, _, name = path.rpartition("/")
        for part in above.split("/") if above else ():
            folder = folder.folders.setdefault(part, _Folder())
        folder.sizes[name] = size
    return top
