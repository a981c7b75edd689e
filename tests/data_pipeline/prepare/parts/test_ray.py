"""Builds on a real Ray cluster of two workers' nodes, each with processes of its own on this machine.

Needs Ray: ``pip install "longctx-train[scale]"``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule
from data_pipeline.prepare.parts import source_parts
from data_pipeline.prepare.parts.staging import staging_folder
from data_pipeline.prepare.sources import open_source
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.prepare.parts.conftest import content
from tests.data_pipeline.prepare.parts.test_kills import (
    PART_BYTES,
    PARTS,
    Start,
    finished_parts,
    inodes,
    start_build,
    write_parts,
)

pytest.importorskip("ray", reason='builds on a Ray cluster are NOT tested: pip install "longctx-train[scale]"')
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = {"shard_tokens": 20_000, "validation_fraction": 0.3}
SECONDS = 300


class Cluster:
    """A head without a CPU and two nodes with one each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayCluster  # type: ignore[import-not-found]

        self._cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = [self.add_node(), self.add_node()]

    @property
    def address(self) -> str:
        return self._cluster.address

    def add_node(self) -> Any:
        for _ in range(4):
            # Ray gives a node half a minute, which may be too little on a busy machine.
            with contextlib.suppress(Exception):
                return self._cluster.add_node(num_cpus=1)
        return self._cluster.add_node(num_cpus=1)

    def workers(self, *nodes: Any) -> list[psutil.Process]:
        """Processes that encode or hash a part at this moment, of some nodes or of all."""
        found = []
        for node in nodes or self.nodes:
            for process in psutil.Process(raylet(node).pid).children(recursive=True):
                try:
                    if process.name().startswith("ray::NodeWorker") or "ray::NodeWorker" in process.cmdline()[0]:
                        found.append(process)
                except (psutil.Error, IndexError):
                    continue
        return found

    def replace_node(self, node: Any) -> None:
        """Have a new one instead of one whose raylet was killed."""
        self._cluster.remove_node(node, allow_graceful=False)
        self.nodes[self.nodes.index(node)] = self.add_node()

    def shutdown(self) -> None:
        self._cluster.shutdown()


def raylet(node: Any) -> subprocess.Popen[bytes]:
    return node.all_processes["raylet"][0].process


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def large(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that take some tenths of a second each, a part a file; two of them are nearly the same."""
    folder = tmp_path_factory.mktemp("large")
    write_parts(corpus, folder)
    (folder / f"{PARTS - 1}.txt").write_text((folder / "03.txt").read_text() + "once more")
    return folder


def built_here(large: Path, tokenizer: Tokenizer, output: Path, **options) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_parts, "PART_BYTES", PART_BYTES)
        build_shards(open_source(large), tokenizer, output, workers=1, **OPTIONS, **options)
    return content(output)


@pytest.fixture(scope="module")
def expected(large: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return built_here(large, tokenizer, tmp_path_factory.mktemp("here") / "out")


@pytest.fixture
def start(cluster: Cluster, large: Path, tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Start]:
    """Starts ``data build --engine ray`` of the large files into ``out``."""
    started: list[subprocess.Popen[str]] = []

    def run(*more: object, source: Path = large) -> subprocess.Popen[str]:
        cluster_words = ["--engine", "ray", "--ray-address", cluster.address]
        process = start_build(source, tokenizer, tmp_path / "out", *cluster_words, *more)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)


def attempts(output: Path) -> list[Path]:
    """Folders of parts that are not finished."""
    return list(staging_folder(output).glob("parts/*.*"))


def succeeds(process: subprocess.Popen[str], output: Path, expected: dict[str, bytes]) -> str:
    """Wait for the end; what was said on standard error."""
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert content(output) == expected
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    return err


@pytest.mark.parametrize("duplicates", ["keep", "near"])
def test_the_bytes_are_those_of_one_machine(
    start: Start, large: Path, tokenizer: Tokenizer, expected: dict[str, bytes], tmp_path: Path, duplicates: str
):
    if duplicates == "near":
        expected = built_here(large, tokenizer, tmp_path / "here" / "out", duplicates=DuplicateRule(kind="near"))
        assert "duplicates.jsonl" in expected
        shutil.rmtree(tmp_path / "here")
    err = succeeds(start("--duplicates", duplicates), tmp_path / "out", expected)
    assert re.search(r"Ray cluster at \S+ \(CPUs: \d, nodes with CPUs: \d\)", err), err


def test_a_node_that_is_killed_is_replaced_by_the_others(
    start: Start, cluster: Cluster, expected: dict[str, bytes], tmp_path: Path
):
    output, node = tmp_path / "out", cluster.nodes[0]
    process = start()
    wait_until(lambda: finished_parts(output) and len(attempts(output)) == 2, process)
    # In the middle of a part, whatever the machine is busy with.
    for worker in cluster.workers(node):
        worker.suspend()
    raylet(node).kill()
    try:
        err = succeeds(process, output, expected)
    finally:
        cluster.replace_node(node)
    assert re.search(r"was lost while it encoded part \d+ .* retrying the part, attempt 2 of 3", err), err


def test_a_node_that_is_only_taken_for_lost_spoils_nothing(
    start: Start, cluster: Cluster, expected: dict[str, bytes], tmp_path: Path
):
    output, node = tmp_path / "out", cluster.nodes[0]
    process = start()
    wait_until(lambda: finished_parts(output) and attempts(output) and cluster.workers(node), process)
    # Nothing is heard of it for so long that the cluster gives it up.
    workers = cluster.workers(node)
    for worker in workers:
        worker.suspend()
    raylet(node).send_signal(signal.SIGSTOP)
    try:
        assert process.stderr is not None
        while "retrying the part, attempt 2 of 3" not in (line := process.stderr.readline()):
            assert line, "the build has ended without a loss"
        # Here it comes back, in the middle of a part that another worker has begun.
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()
        succeeds(process, output, expected)
    finally:
        raylet(node).send_signal(signal.SIGCONT)
        cluster.replace_node(node)
    assert content(output) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_part_that_loses_every_worker_ends_the_build(
    start: Start, cluster: Cluster, expected: dict[str, bytes], tmp_path: Path
):
    process = start()
    ended = threading.Event()

    def harm() -> None:
        while not ended.wait(0.02):
            for worker in cluster.workers():
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()

    wait_until(lambda: attempts(tmp_path / "out"), process)
    harming = threading.Thread(target=harm)
    harming.start()
    try:
        _, err = process.communicate(timeout=SECONDS)
    finally:
        ended.set()
        harming.join()
    assert process.returncode == 1
    assert re.search(r"ClusterError: 3 workers (were lost while they encoded part|exited during startup)", err), err
    assert "Traceback" not in err
    succeeds(start(), tmp_path / "out", expected)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_ends_leaves_its_finished_parts(
    start: Start, cluster: Cluster, expected: dict[str, bytes], tmp_path: Path, sent: signal.Signals
):
    output = tmp_path / "out"
    process = start()
    wait_until(lambda: len(finished_parts(output)) >= 3 and attempts(output), process)
    os.killpg(process.pid, sent)
    _, err = process.communicate(timeout=60)
    if sent == signal.SIGINT:
        assert process.returncode == 130, err
        assert "Traceback" not in err
        assert "Finished parts are kept" in err
        assert not attempts(output)
    before = {name for name in finished_parts(output) if "." not in name}
    kept = {inode for name in before for inode in inodes(staging_folder(output) / "parts" / name)}
    # At once, while workers of the first build may still write.
    err = succeeds(start(), output, expected)
    assert f"resuming: {len(before)} of {PARTS} parts are finished" in err
    assert kept <= inodes(output)
    assert cluster.workers() == []


def test_a_bad_document_ends_all_on_one_screen(start: Start, cluster: Cluster, tmp_path: Path):
    source = tmp_path / "bad"
    source.mkdir()
    for name in "ab":
        (source / f"{name}.jsonl").write_text(
            '{"text": "good"}\n' * 10_000 + "no JSON\n" + '{"text": "more"}\n' * 10_000
        )
    process = start("--strict", source=source)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert re.search(r"DataError: .*/bad: [ab].jsonl:10001: not JSON", err), err
    assert "Seen by process" in err
    assert "Traceback" not in err
    assert len(err.splitlines()) < 20
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]
    assert cluster.workers() == []


def can_mount() -> bool:
    return shutil.which("unshare") is not None and subprocess.run(["unshare", "-m", "true"]).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount")
def test_a_node_with_another_file_system_is_refused(
    start: Start, cluster: Cluster, expected: dict[str, bytes], tmp_path: Path
):
    ray = Path(sys.executable).with_name("ray")
    node = [ray, "start", f"--address={cluster.address}", "--num-cpus=1", "--node-name=blind", "--block"]
    # What it has in the place of the output's folder is its own.
    hidden = f'mount -t tmpfs none {tmp_path} && exec "$@"'
    blind = subprocess.Popen(["unshare", "-m", "sh", "-c", hidden, "sh", *node], stdout=subprocess.PIPE, text=True)
    try:
        assert blind.stdout is not None
        while "Ray runtime started" not in (line := blind.stdout.readline()):
            assert line
        process = start()
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 1
        assert re.search(rf"ClusterError: node \S+ \(blind\) does not see {tmp_path}", err), err
        assert "Choose an --output on a file system that every node mounts" in err
        assert "Traceback" not in err
        assert not list(tmp_path.iterdir())
    finally:
        blind.terminate()
        blind.wait()
