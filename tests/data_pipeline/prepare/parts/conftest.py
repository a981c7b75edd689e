"""Builds of the mixed corpus in many small parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline.prepare import sources
from data_pipeline.prepare.build_shards import BuildReport, build_shards
from data_pipeline.prepare.parts import source_parts, worker_messages
from data_pipeline.prepare.sources import open_source
from longctx.tokenizer import Tokenizer

PART_BYTES = 30_000
OPTIONS = {"validation_fraction": 0.2, "shard_tokens": 4000}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the test, parts and pieces are small."""
    monkeypatch.setattr(source_parts, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(sources, "CUT_BYTES", PART_BYTES)


Build = Callable[..., BuildReport]


@pytest.fixture
def build(mixed: Path, tokenizer: Tokenizer, small_parts: None) -> Build:
    """Builds the mixed corpus into a folder."""

    def run(output: Path, workers: int = 1, **options) -> BuildReport:
        return build_shards(open_source(mixed), tokenizer, output, workers=workers, **(OPTIONS | options))

    return run


@pytest.fixture(scope="module")
def expected_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("expected") / "out"


@pytest.fixture
def expected(build: Build, expected_folder: Path) -> dict[str, bytes]:
    """Every file of an undisturbed build in one process."""
    if not expected_folder.exists():
        build(expected_folder)
    return content(expected_folder)


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Stop(BaseException):
    """Stands for a kill: nothing catches it."""


def stop_at(function: Callable | None, *, call: int) -> Callable:
    """A function that raises at its n-th call and after it."""
    calls = 0

    def stopping(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls >= call:
            raise Stop
        assert function is not None
        return function(*arguments, **options)

    return stopping


def watch_parts(monkeypatch: pytest.MonkeyPatch, step: str) -> list[int]:
    """The numbers of the parts that ``order``'s step is called for from now on."""
    done: list[int] = []
    function = getattr(worker_messages, step)
    monkeypatch.setattr(
        worker_messages, step, lambda part, *a, **o: done.append(part.number) or function(part, *a, **o)
    )
    return done
