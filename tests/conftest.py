"""Properties: equal examples each time in `make test`, new ones in `make faults`. And parts of the suite, by name."""

from __future__ import annotations

import gc
import os
import re
import signal
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

from tests.cuda_builds import cuda_builds
from tests.faults import FaultRows

# Importing torch, DeepSpeed and 500 test modules makes millions of objects, none of them garbage.
gc.disable()
# Tests run side by side, one on each core; tiny tensors are slower with more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONGEST = (
    "tests/launcher/test_pretrain.py",
    "tests/launcher/checkpoint/test_checkpoint.py",
    "tests/launcher/training/test_degrees.py",
    "tests/parallel/attention/test_attention.py",
    "tests/parallel/zero/test_zero.py",
    "tests/data_pipeline/prepare/parts/test_kills.py",
    "tests/data_pipeline/prepare/parts/test_parts.py",
    "tests/longctx/model/test_regions.py",
    "tests/launcher/cli/test_evaluate_command.py",
    "tests/launcher/training/test_non_finite.py",
    "tests/launcher/measure/test_measure.py",
    "tests/parallel/runtime/test_watch.py",
    "tests/parallel/zero/test_nvme.py",
    "tests/parallel/zero/test_zero_experts.py",
    "tests/launcher/checkpoint/test_expert_checkpoint.py",
    "tests/parallel/attention/test_decoding.py",
    "tests/launcher/verification/test_verification.py",
)
"""Files that take longest, in `make test`: a worker that begins one of them last lets the others wait for it."""

settings.register_profile("repeatable", derandomize=True, deadline=None)  # a loaded machine is no reason to fail
settings.register_profile("search", deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--part 2/3`` runs the second of three parts; ``--fault-rows FILE`` keeps what the fault suite measures.

    ``--core`` runs one case of each promise.
    """
    parser.addoption("--part", default="1/1", metavar="K/N", help="run the K-th of N parts of the selected tests")
    parser.addoption("--core", action="store_true", help="one case of each quick test that the README's promises name")
    parser.addoption("--fault-rows", type=Path, metavar="FILE", help="append the rows of the fault suite to a file")


@pytest.fixture(scope="session")
def fault_rows(request: pytest.FixtureRequest) -> FaultRows:
    """Where a test of the fault suite puts its rows."""
    return FaultRows(request.config.getoption("--fault-rows"))


@pytest.fixture(scope="session", params=cuda_builds())
def cuda_python(request: pytest.FixtureRequest) -> str:
    """An interpreter whose PyTorch is built for CUDA; a test runs under each that there is."""
    return request.param


# Before pytest reads -m.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the part that was asked for, the longest files first.

    A test's part follows from its name, so it never changes. Of the cases of a test that is marked ``few(n)``, n run in
    ``make test``, chosen by their names; the others are slow.
    """
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", config.getoption("--part"))
    if match is None or int(match[1]) > int(match[2]):
        raise pytest.UsageError(f"--part={config.getoption('--part')} must be K/N with 1 <= K <= N, such as 2/3.")
    for item in items:
        # Whatever records a row is one of the suite, directly or by another fixture.
        if "fault_rows" in getattr(item, "fixturenames", ()):
            item.add_marker("fault")
    _mark_other_cases_slow(items)
    part, parts = int(match[1]), int(match[2])
    kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part - 1]
    if config.getoption("--core"):
        kept = _core(kept, config.rootpath)
    deselected = set(items) - set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in deselected])
    place = {file: number for number, file in enumerate(LONGEST)}
    items[:] = sorted(kept, key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def _core(items: list[pytest.Item], root: Path) -> list[pytest.Item]:
    """Return one case of each quick test in the files that the README's table of promises names."""
    promised = set(re.findall(r"`(tests/[\w/]+\.py)`", (root / "README.md").read_text()))
    of_test: dict[str, pytest.Item] = {}
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        if item.nodeid.partition("::")[0] in promised and not item.get_closest_marker("slow"):
            of_test.setdefault(item.nodeid.partition("[")[0], item)
    return list(of_test.values())


def _mark_other_cases_slow(items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one_test in cases.values():
        marker = of_one_test[0].get_closest_marker("few")
        assert marker is not None
        for item in sorted(of_one_test, key=lambda item: zlib.crc32(item.nodeid.encode()))[marker.args[0] :]:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later collection of garbage, which would look at all of it each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config) -> None:
    """Before any test's own settings are read, and before any process is started."""
    # What runs remember of the shards they have read must not end up in the developer's own cache.
    os.environ["LONGCTX_CACHE"] = str(Path(tempfile.gettempdir()) / f"longctx-tests-{os.getuid()}")
    # A shell's & leaves Ctrl-C off, and nohup the hang-up: every run that a test starts and stops would have it so.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    settings.load_profile("search" if config.option.markexpr.startswith("slow") else "repeatable")
