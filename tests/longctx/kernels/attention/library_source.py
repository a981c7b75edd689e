"""Source packages of kernel libraries, from the package index that pip is configured for. Nothing of them is kept here.

pip can fetch a source package only by building its metadata, which flash-attn does not do without a CUDA compiler. So
pip's own finder says where the file is and pip's own session fetches it, with all settings of pip's (index, proxy,
certificates). A hash makes sure that it is the file these tests were written for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest


class Source(NamedTuple):
    """A file on a package index."""

    project: str
    version: str
    sha256: str
    is_wheel: bool = False


FLASH2_SOURCE = Source("flash-attn", "2.8.3", "1e71dd64a9e0280e0447b8a0c2541bad4bf6ac65bdeaa2f90e51a9e57de0370d")
"""8 MB; carries flash-attn 3's Python layer too, in ``hopper/``."""
FLASH4_WHEEL = Source(
    "flash-attn-4", "4.0.0b36", "b6f0e2a264334cb1b59289ddd309c7c76d3a8d184268316b43403e51ba8795d2", is_wheel=True
)

_FETCH = """
import hashlib, sys
from pip._internal.commands import create_command
from pip._vendor.packaging.specifiers import SpecifierSet
project, version, sha256, is_wheel, target = sys.argv[1:]
command = create_command("download")
with command.main_context():
    options, _ = command.parse_args(["--pre"] if is_wheel else ["--pre", "--no-binary", ":all:"])
    session = command.get_default_session(options)
    finder = command._build_package_finder(options, session)
    found = finder.find_best_candidate(project, SpecifierSet("==" + version)).best_candidate
    if found is None:
        sys.exit(f"no index has {project} {version}")
    content = session.get(found.link.url_without_fragment).content
if hashlib.sha256(content).hexdigest() != sha256:
    sys.exit(f"the file of {project} {version} has another hash")
with open(target, "wb") as file:
    file.write(content)
"""


def unpacked(source: Source, cache: Path, names: tuple[str, ...]) -> Path:
    """A folder with these files of the package, fetched once into ``cache``. Skips the test where no index has it."""
    folder = cache / f"{source.project}-{source.version}"
    if all((folder / name).is_file() for name in names):
        return folder
    # Processes that run these tests at once fetch it each: a file is renamed when it is whole.
    archive = cache / f"{source.project}-{source.version}-{os.getpid()}.archive"
    arguments = (source.project, source.version, source.sha256, "wheel" if source.is_wheel else "", str(archive))
    try:
        run = subprocess.run(
            [sys.executable, "-c", _FETCH, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{source.project} {source.version} did not come within 120 s: its own Python layer is NOT tested")
    if run.returncode:
        reason = (run.stderr.strip().splitlines() or ["no reason"])[-1]
        pytest.skip(f"{source.project} {source.version} cannot be fetched ({reason}): its Python layer is NOT tested")
    _unpack(source, archive, folder, names)
    archive.unlink()
    return folder


def _unpack(source: Source, archive: Path, folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if source.is_wheel:
            with zipfile.ZipFile(archive) as wheel:
                content = wheel.read(name)
        else:
            with tarfile.open(archive) as package:
                member = package.extractfile(f"{source.project.replace('-', '_')}-{source.version}/{name}")
                assert member is not None
                content = member.read()
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_name(f"{path.name}.{os.getpid()}")
        whole.write_bytes(content)
        whole.replace(path)
