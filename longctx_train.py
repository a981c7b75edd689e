"""Reject foreign packages that share our names, then start: the entry point for the ``longctx`` command.

PyPI has unrelated distributions that provide ``longctx``, ``launcher`` and ``parallel``. This module has our own
distribution's name, so Python finds it whatever is installed, and the check needs none of our packages.
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
"""How long other ranks wait before exiting, so that rank 0 reports first."""
FIRST_PARENT = os.getppid()
"""The process that started this one. Imports take seconds; if it exits meanwhile, another process becomes the parent.
"""


def main() -> None:
    """Run the ``longctx`` command as ``python -m launcher``, after checking its name; end the process."""
    end_if_names_clash()
    runpy.run_module("launcher", run_name="__main__")


def end_if_names_clash() -> None:
    """End the process with one screen and exit code 1 if an import would load a foreign package."""
    problem = next(find_clashes(), None)
    if problem is None:
        return
    # Every rank finds the same problem, and one screen is enough. A launcher ends all ranks as soon as one has failed.
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"\n{problem}\n\n")
        sys.stderr.flush()
    else:
        time.sleep(HEAD_START_SECONDS)
    raise SystemExit(FAILED)


def find_clashes() -> Iterator[str]:
    """Yield a problem for each of our package names that would not import from this file's folder.

    Imports nothing and reads at most one file per package: a few milliseconds.
    """
    packages, installed = Path(__file__).resolve().parent, _installed_hashes()
    for name in PACKAGES:
        found = _folder_of(name)
        expected = packages / name
        if found != expected:
            yield _found_elsewhere(name, found, expected)
            continue
        # Two distributions in one folder: the later one has overwritten files from the earlier one.
        digest = installed.get(f"{name}/__init__.py")
        if digest is not None and digest != _hash(expected / "__init__.py"):
            others = _owners(name, packages)
            yield (
                f"{expected}/__init__.py is not the file that {DISTRIBUTION} installed: {_versions(others)} "
                f"overwrote it.\nTry: {sys.executable} -m pip uninstall {' '.join(others)} {DISTRIBUTION}, then "
                f"install {DISTRIBUTION} again."
            )


def find_other_owners() -> Iterator[str]:
    """Yield a line for each other installed distribution that provides a package with one of our names."""
    # Reads every distribution's file list, which takes a tenth of a second: for set-up, not for each start.
    owners = packages_distributions()
    for name in PACKAGES:
        for other in sorted(set(owners.get(name, [])) - {DISTRIBUTION}):
            yield (
                f"{other} {distribution(other).version}, which does not belong to {DISTRIBUTION}, also provides the "
                f"package {name}.\nTry: {sys.executable} -m pip uninstall {other}, or use another virtual environment."
            )


def _folder_of(name: str) -> Path | None:
    """Return the folder that ``import name`` would load the package from; None if there is no such package."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent


def _found_elsewhere(name: str, found: Path | None, expected: Path) -> str:
    """Build the message about a foreign package."""
    if found is None:
        return f"{DISTRIBUTION}'s package {name} is missing at {expected}.\nTry: make setup"
    message = (
        f"`import {name}` finds {found}, not {expected}.\n"
        f"PyPI has unrelated packages named longctx, launcher and parallel; this one is named {DISTRIBUTION}.\n"
    )
    others = _owners(name, found.parent)
    if others:
        return f"{message}{_versions(others)} provides it. Try: {sys.executable} -m pip uninstall {' '.join(others)}"
    return f"{message}Start from another folder, or remove {found.parent} from PYTHONPATH."


def _owners(name: str, site: Path) -> list[str]:
    """Return other distributions that installed a package with this name in the folder ``site``."""
    others = sorted(set(packages_distributions().get(name, [])) - {DISTRIBUTION})
    return [other for other in others if Path(str(distribution(other).locate_file(""))).resolve() == site]


def _versions(names: list[str]) -> str:
    """Join distributions with their versions; "something" if the list is empty."""
    return " and ".join(f"{name} {distribution(name).version}" for name in names) or "something"


def _installed_hashes() -> dict[str, str]:
    """Return pip's hash for each of our packages' first file; empty for an editable install or without installation."""
    try:
        ours: Distribution = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return {}
    # not Distribution.files, which creates an object per file
    rows = csv.reader((ours.read_text("RECORD") or "").splitlines())
    first_files = {f"{name}/__init__.py" for name in PACKAGES}
    return {row[0]: row[1].removeprefix("sha256=") for row in rows if row and row[0] in first_files}


def _hash(path: Path) -> str:
    """Hash a file as RECORD does."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


if __name__ == "__main__":
    # after an installation: report conflicts that `pip install` itself does not
    clashes = list(find_other_owners())
    sys.stderr.write("".join(f"{clash}\n" for clash in clashes))
    sys.exit(FAILED if clashes else 0)
