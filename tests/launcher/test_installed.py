"""The archives of a release, installed: the whole road from an empty folder, by the commands that each step prints."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TINY = shlex.split(
    "--ranks 2 --run.output_dir first --data.seq_len 128 --train.tokens_per_step 512 --train.steps 4 "
    "--train.warmup_steps 1 --validation.rows 2"
)
"""What the printed line that trains has besides, to be done in seconds."""


def ended_well(words: list[str], folder: Path, environment: dict[str, str], seconds: float = 300.0) -> str:
    """Run a command to its end; return all that it said."""
    ended = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
    )
    assert ended.returncode == 0, f"{words}\n{ended.stdout}"
    return ended.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> Path:
    """The source archive of what git tracks, and the wheel that is built from it alone."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((REPOSITORY / name).read_bytes())
    pytest.importorskip("build")
    ended_well([sys.executable, "-m", "build", "--outdir", str(folder), str(source)], folder, dict(os.environ))
    return folder


def test_both_archives_hold_what_the_packages_read(archives: Path):
    wheel, sdist = next(archives.glob("*.whl")), next(archives.glob("*.tar.gz"))
    needed = {
        path.relative_to(REPOSITORY).as_posix()
        for package in ("launcher", "longctx", "parallel", "data_pipeline")
        for path in (REPOSITORY / package).rglob("*")
        if path.suffix in (".py", ".toml", ".html", ".typed", ".json") and "__pycache__" not in path.parts
    }
    assert needed - set(zipfile.ZipFile(wheel).namelist()) == set()
    with tarfile.open(sdist) as archive:
        members = {member.partition("/")[2] for member in archive.getnames()}
    assert needed - members == set()


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_each_command_is_copied_from_what_the_one_before_printed(archives: Path, tmp_path: Path, kind: str):
    site, folder = tmp_path / "site", tmp_path / "empty"
    (folder / "texts").mkdir(parents=True)
    for path in sorted((REPOSITORY / "data_pipeline" / "prepare").rglob("*.py")):
        (folder / "texts" / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    ended_well([*pip, str(next(archives.glob(kind)))], tmp_path, dict(os.environ))
    # Before the checkout, which the environment of the tests has installed.
    environment = {**os.environ, "PYTHONPATH": str(site), "PATH": f"{site / 'bin'}:{os.environ['PATH']}"}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

    def go(words: list[str]) -> list[list[str]]:
        said = ended_well(words, folder, environment)
        return [shlex.split(line) for line in re.findall(r"Next: (longctx .*)$", said, re.M)]

    (built,) = go(shlex.split("longctx tokenizer train --source texts --vocab-size 512 --output tokenizer.model"))
    (trained,) = go([word.replace("DIR", "shards") for word in built])
    generated, evaluated, converted = go([*trained, *TINY])
    assert [words[1] for words in (generated, evaluated, converted)] == ["generate", "evaluate", "convert"]
    for words in (generated, evaluated, converted):
        go(words)
    assert (folder / "first" / "report.html").is_file()
    where = ended_well([sys.executable, "-c", "import launcher; print(launcher.__file__)"], folder, environment)
    assert where.startswith(str(site)), "the checkout was found first"
