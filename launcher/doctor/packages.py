"""Python and package versions that a run depends on, and a hash over the project's own code."""

from __future__ import annotations

import hashlib
import platform
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

import data_pipeline
import launcher
import longctx
import parallel
from launcher.doctor.check_result import CheckResult
from longctx.kernels.attention.flash.libraries import FLASH2

DISTRIBUTION = "longctx-train"
PACKAGES = ("torch", "deepspeed", "flash-attn", "flash-attn-4", "transformers", "pyarrow", "numpy", "triton")
"""Packages reported, and compared between machines."""
_REQUIRED = ("torch", "deepspeed", "pyarrow", "numpy")
_SOURCE_ENDINGS = (".py", ".toml", ".html")


def installed_versions() -> dict[str, str | None]:
    """Return versions for ``PACKAGES``; None if a package is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def check_packages(installed: Mapping[str, str | None], requirements: list[str] | None = None) -> list[CheckResult]:
    """Report all versions, and each missing, incompatible or broken package.

    ``requirements`` defaults to ``requirements_of_longctx()``.
    """
    if requirements is None:
        requirements = requirements_of_longctx()
    shown = [f"{name} {found}" for name, found in installed.items() if found is not None]
    results = [CheckResult.of("python", platform.python_version()), CheckResult.of("packages", ", ".join(shown))]
    for name in _REQUIRED:
        if installed.get(name) is None:
            hint = "pip install longctx-train; in a checkout `make setup`, and start with .venv/bin/python"
            results.append(_failure(f"{name} is not installed", hint))
    for name, specifier in _wanted(requirements).items():
        found = installed.get(name)
        if found is not None and not _lies_in(found, specifier):
            results.append(_failure(f"{name} {found}; longctx needs {specifier}", f"pip install '{name}{specifier}'"))
    return results + _check_flash(installed.get("flash-attn"), installed.get("torch"))


def _check_flash(flash: str | None, torch: str | None) -> list[CheckResult]:
    """Report a flash-attn built for another PyTorch, unless it can still be imported."""
    # github.com/Dao-AILab/flash-attention/issues/2299 and 2425: there is no official wheel for PyTorch 2.10 and 2.11;
    # github.com/Dao-AILab/flash-attention/issues/1832: an extension built for another PyTorch misses symbols.
    if flash is None or torch is None or not _lies_in(flash, "<=2.8.3") or not _lies_in(torch, ">=2.10"):
        return []
    # A locally compiled copy works.
    if not isinstance(FLASH2.load(), str):
        return []
    value = f"flash-attn {flash} with torch {torch}: its own wheels are for older PyTorch, and this copy does not load"
    hint = "compile it here: pip install flash-attn==2.8.3 --no-build-isolation --no-binary flash-attn"
    return [_failure(value, hint)]


def requirements_of_longctx() -> list[str]:
    """Return the distribution's requirements with extras; from pyproject.toml if it is not installed."""
    try:
        return requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        path = Path(launcher.__path__[0]).parent / "pyproject.toml"
        if not path.is_file():
            return []
        project = tomllib.loads(path.read_text())["project"]
        return [*project["dependencies"], *chain(*project["optional-dependencies"].values())]


def _wanted(requirements: list[str]) -> dict[str, str]:
    """Return required versions by name. Extras count too, because only installed packages are checked."""
    wanted: dict[str, str] = {}
    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            # For example a URL instead of a version, which cannot be compared.
            continue
        # For other libraries, any version that pip chose is fine.
        if requirement.name in PACKAGES and requirement.specifier:
            wanted[requirement.name] = str(requirement.specifier)
    return wanted


def _lies_in(found: str, versions: str) -> bool:
    """Return whether a version satisfies ``versions``, allowing prereleases."""
    try:
        return SpecifierSet(versions).contains(found, prereleases=True)
    except InvalidVersion:
        # An unknown version format cannot be compared.
        return True


def _failure(value: str, hint: str) -> CheckResult:
    return CheckResult.of("packages", value, hint, "fail")


def source_hash() -> str:
    """Hash every source file in the four imported packages; return 16 hexadecimal digits."""
    folders = [Path(package.__path__[0]) for package in (data_pipeline, launcher, longctx, parallel)]
    return hash_folders(folders)


def hash_folders(folders: Iterable[Path]) -> str:
    """Hash folders by name, relative paths and contents, independently of their location."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCE_ENDINGS):
            # Hash per-file digests: moving a byte from one file to the next changes the result.
            name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name}\0{content}\0".encode())
    return digest.hexdigest()[:16]
