"""The objects below a URL, listed by the rules of a folder's files. A store has no links and no devices."""

from __future__ import annotations

from dataclasses import dataclass, field

from data_pipeline.prepare.hf_dataset import find_dataset
from data_pipeline.prepare.listing import Listing, Walk
from data_pipeline.prepare.selection import Selection
from data_pipeline.stores.client import list_objects, size_of
from data_pipeline.stores.urls import ObjectPath


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
        _enter(walk, selection, root, "", _tree(list_objects(root)))
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


def _enter(walk: Walk, selection: Selection, path: ObjectPath, prefix: str, folder: _Folder) -> None:
    """Take what a folder holds, or say why it is left out."""
    # Its descriptions are small objects, read here as from a folder.
    dataset = find_dataset(path, list(folder.sizes))
    for name, size in folder.sizes.items():
        if dataset is not None and name in dataset.not_data:
            walk.leave_out(prefix + name, dataset.not_data[name])
        elif name.startswith("."):
            walk.leave_out(prefix + name, "hidden")
        else:
            walk.add_file(path / name, prefix + name, size)
    if dataset is not None:
        for missing in dataset.missing:
            walk.leave_out(prefix + missing, "missing", "state.json lists it", is_fault=True)
    for name, below in folder.folders.items():
        if name.startswith("."):
            walk.leave_out(f"{prefix}{name}/", "hidden")
        elif selection.excludes_folder(prefix + name):
            walk.leave_out(f"{prefix}{name}/", "excluded")
        else:
            _enter(walk, selection, path / name, f"{prefix}{name}/", below)
