"""``make setup``: which PyTorch it installs, and which versions it pins (``constraints/``)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers import REPOSITORY


def set_up(folder: Path, torch: str, *words: str, **environment: str) -> list[str]:
    """Return what ``make setup`` asks of pip. The programs there only note it, and say that they are ``torch``."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copyfile(REPOSITORY / name, folder / name)
    shutil.copytree(REPOSITORY / "constraints", folder / "constraints")
    target = dict(word.split("=") for word in words).get("TARGET", "")
    programs, noted = folder / {"torch2.11": ".venv-torch2.11"}.get(target, ".venv") / "bin", folder / "noted"
    programs.mkdir(parents=True)
    # Nothing is imported; the question for Python and torch is the one with "version".
    answer = f"constraints/python{torch.replace(' ', '-torch')}.txt"
    (programs / "python").write_text(
        f'#!/bin/sh\ncase "$2" in "import torch") exit 1;; *version*) echo {answer};; esac\n'
    )
    (programs / "pip").write_text(f'#!/bin/sh\necho "$*" >> {noted}\n[ "$2" != --no-index ]\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    command = ["make", "setup", f"PYTHON={sys.executable}", *words]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "TORCH_CPU_INDEX": "file:///cpu"} | environment
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=60)
    return noted.read_text().splitlines()


@pytest.mark.parametrize(("accelerator", "index"), [("cpu", True), ("cuda", False)])
def test_an_image_for_gpus_gets_torch_for_gpus(tmp_path, accelerator, index):
    """A build sees no GPU, so set-up goes by what it is told."""
    noted = set_up(tmp_path, "3.11 2.13", DS_ACCELERATOR=accelerator)
    (line,) = [line for line in noted if re.match(r"install torch==\S+( --index-url|$)", line)]
    assert line.endswith("--index-url file:///cpu") == index


@pytest.mark.parametrize(
    ("words", "torch", "asked", "pins"),
    [
        ((), "3.11 2.13", "torch==2.13.0", "constraints/python3.11-torch2.13.txt"),
        (("TARGET=torch2.11",), "3.12 2.11", "torch==2.11.0", "constraints/python3.12-torch2.11.txt"),
        ((), "3.13 2.12", "torch==2.13.0", None),
    ],
)
def test_set_up_pins_what_was_tested_and_nothing_of_other_pairs(tmp_path, words, torch, asked, pins):
    noted = set_up(tmp_path, torch, *words)
    assert any(line.startswith(f"install {asked}") for line in noted)
    (line,) = [line for line in noted if line.startswith("install -e")]
    assert line.partition(" -c ")[2] == (pins or "")


@pytest.mark.parametrize("path", sorted((REPOSITORY / "constraints").glob("*.txt")), ids=lambda path: path.stem)
def test_pins_hold_all_that_is_asked_for_and_no_torch(path):
    """A user's own torch, or its CUDA libraries, would be replaced."""
    pinned = dict(line.split("==") for line in path.read_text().splitlines())
    assert not [name for name in pinned if re.match(r"torch|triton|nvidia|cuda", name)]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = [one for extra in ("dev", "bleu", "po") for one in project["optional-dependencies"][extra]]
    versions = {canonicalize_name(name): version for name, version in pinned.items()}
    for requirement in map(Requirement, project["dependencies"] + extras):
        if requirement.name != "torch":
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
