"""Refuse other packages that have the names of ours, then start: the entry of the command ``longctx``.

PyPI has unrelated distributions that provide ``longctx``, ``launcher`` and ``parallel``. This module has the name of
our own distribution, so Python finds it whatever else is installed, and it needs none of our packages to say so.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import os
import runpy
import sys
import time
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

DISTRIBUTION = "longctx-train"
PACKAGES = ("launcher", "parallel", "data_pipeline", "longctx")
FAILED = 1
HEAD_START_SECONDS = 5.0
"""How long the other ranks leave the word to rank 0."""
FIRST_PARENT = os.getppid()
"""What started this process. Imports take seconds, in which it may end, and another one becomes the parent."""


def main() -> None:
    """The command ``longctx``: ``python -m launcher``, once its name is known to be ours. Ends the process."""
    end_if_names_clash()
    runpy.run_module("launcher", run_name="__main__")


def end_if_names_clash() -> None:
    """End the process with one screen and exit code 1 where an import would bring another's package."""
    problem = next(find_clashes(), None)
    if problem is None:
        return
    # Every rank finds the same, and one screen is enough. A launcher ends all ranks as soon as one has failed.
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"\n{problem}\n\n")
        sys.stderr.flush()
    else:
        time.sleep(HEAD_START_SECONDS)
    raise SystemExit(FAILED)


def find_clashes() -> Iterator[str]:
    """What is wrong with each of our names, as this process imports them: they shall stand beside this file.

    Nothing is imported, and one file of each package is read at most: a few milliseconds.
    """
    packages, installed = Path(__file__).resolve().parent, _installed_hashes()
    for name in PACKAGES:
        found = _folder_of(name)
        expected = packages / name
        if found != expected:
            yield _found_elsewhere(name, found, expected)
            continue
        # Two distributions in one folder: the later one has overwritten files of the earlier one.
        digest = installed.get(f"{name}/__init__.py")
        if digest is not None and digest != _hash(expected / "__init__.py"):
            others = _owners(name, packages)
            yield (
                f"{expected}/__init__.py is not the file that {DISTRIBUTION} installed: {_versions(others)} has "
                f"written over it.\nTry: {sys.executable} -m pip uninstall {' '.join(others)} {DISTRIBUTION}, then "
                f"install {DISTRIBUTION} again."
            )


def find_other_owners() -> Iterator[str]:
    """A line for each installed distribution but ours that provides a package of one of our names."""
    # Reads the file list of every distribution, which takes a tenth of a second: for set-up, not for each start.
    owners = packages_distributions()
    for name in PACKAGES:
        for other in sorted(set(owners.get(name, [])) - {DISTRIBUTION}):
            yield (
                f"{other} {distribution(other).version}, which is not a part of {DISTRIBUTION}, provides the package "
                f"{name} too.\nTry: {sys.executable} -m pip uninstall {other}, or another virtual environment."
            )


def _folder_of(name: str) -> Path | None:
    """The folder that ``import name`` would take the package from; None where there is no such package."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent


def _found_elsewhere(name: str, found: Path | None, expected: Path) -> str:
    """The message about a package that is not ours."""
    if found is None:
        return f"the package {name} of {DISTRIBUTION} is not at {expected}.\nTry: make setup"
    message = (
        f"`import {name}` finds {found}, not {expected}.\n"
        f"PyPI has unrelated packages named longctx, launcher and parallel; the name of this one is {DISTRIBUTION}.\n"
    )
    others = _owners(name, found.parent)
    if others:
        return f"{message}{_versions(others)} provides it. Try: {sys.executable} -m pip uninstall {' '.join(others)}"
    return f"{message}Start from another folder, or take {found.parent} out of PYTHONPATH."


def _owners(name: str, site: Path) -> list[str]:
    """The distributions but ours that have installed a package of this name in the folder ``site``."""
    others = sorted(set(packages_distributions().get(name, [])) - {DISTRIBUTION})
    return [other for other in others if Path(str(distribution(other).locate_file(""))).resolve() == site]


def _versions(names: list[str]) -> str:
    """Distributions with their versions; "something" where there is none."""
    return " and ".join(f"{name} {distribution(name).version}" for name in names) or "something"


def _installed_hashes() -> dict[str, str]:
    """Hash of the first file of each of our packages, as pip wrote them; empty where it installed links or nothing."""
    try:
        ours: Distribution = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return {}
    # Not Distribution.files, which makes an object of each of our files.
    rows = csv.reader((ours.read_text("RECORD") or "").splitlines())
    first_files = {f"{name}/__init__.py" for name in PACKAGES}
    return {row[0]: row[1].removeprefix("sha256=") for row in rows if row and row[0] in first_files}


def _hash(path: Path) -> str:
    """A file's hash as RECORD has it."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


if __name__ == "__main__":
    # After an installation: what `pip install` itself does not say.
    clashes = list(find_other_owners())
    sys.stderr.write("".join(f"{clash}\n" for clash in clashes))
    sys.exit(FAILED if clashes else 0)
