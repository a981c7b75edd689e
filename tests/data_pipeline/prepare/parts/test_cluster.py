"""What can be shown of a cluster without one: the look at a node, its worker, and what is refused before Ray starts."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_pipeline.prepare.parts import node
from data_pipeline.prepare.parts.cluster import _sweep, _Worker, open_cluster
from data_pipeline.prepare.parts.node import NodeCheck, NodeWorker, library_versions
from data_pipeline.prepare.parts.part_record import PartRecord
from data_pipeline.prepare.parts.part_work import EncodeJob, encode_part
from data_pipeline.prepare.parts.source_parts import SourcePart, split_into_parts
from data_pipeline.prepare.parts.worker_messages import Advanced, Failed, PartTask, Setup
from data_pipeline.prepare.sources import TextSource
from longctx.errors import ClusterError, ConfigError, DataError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.prepare.parts.conftest import content


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeCheck:
    """A look at a folder that is there."""
    monkeypatch.setattr(node, "_VISIBILITY_TIMEOUT_SECONDS", 0.2)
    (tmp_path / "seen-1").write_text("seen-1")
    return NodeCheck(folder=tmp_path, token="seen-1", versions=library_versions())


class TestLook:
    def test_a_node_that_sees_the_folder_answers(self, look: NodeCheck):
        assert not look.has_answer("a")
        assert look.problem("a") is None
        assert look.has_answer("a")

    def test_a_folder_that_is_not_there(self, look: NodeCheck):
        problem = replace(look, folder=look.folder / "elsewhere").problem("a")
        assert problem is not None
        assert problem.startswith(f"does not see {look.folder / 'elsewhere'}.")
        assert "--output on a file system that every node mounts" in problem

    def test_another_folder_of_the_same_name(self, look: NodeCheck):
        (look.folder / look.token).write_text("seen-2")
        assert "does not see" in str(look.problem("a"))

    def test_a_folder_that_may_only_be_read(self, look: NodeCheck, monkeypatch: pytest.MonkeyPatch):
        def refuse(path: Path, content: bytes) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(node, "write_synced", refuse)
        assert str(look.problem("a")).startswith(f"cannot write to {look.folder} (Read-only file system).")

    def test_another_version_of_a_library(self, look: NodeCheck):
        other = replace(look, versions=dict(look.versions) | {"pyarrow": "1.0"})
        assert "has pyarrow" in str(other.problem("a"))
        assert "this machine has 1.0: shards could differ.\nInstall the same version." in str(other.problem("a"))


class TestNodeWorker:
    @pytest.fixture
    def job(self, source: TextSource) -> EncodeJob:
        return EncodeJob(read_as=source.read_as, validation_fraction=0.2, shard_tokens=20_000, exact=False)

    @pytest.fixture
    def part(self, source: TextSource) -> SourcePart:
        return split_into_parts(source.pieces(), 1 << 30)[0]

    def test_its_stream_ends_in_the_record(
        self, job: EncodeJob, part: SourcePart, tokenizer: Tokenizer, tmp_path: Path
    ):
        worker = NodeWorker(Setup.of(job, tokenizer, threads=1))
        *before, record = worker.carry_out(PartTask(part=part, folder=tmp_path / "there"))
        assert before
        assert all(isinstance(report, Advanced) for report in before)
        assert isinstance(record, PartRecord)
        here = encode_part(part, tmp_path / "here", job=job, tokenizer=tokenizer, advance=lambda *counts: None)
        assert record == here
        assert content(tmp_path / "there") == content(tmp_path / "here")

    def test_its_errors_are_reports(self, job: EncodeJob, part: SourcePart, tokenizer: Tokenizer, tmp_path: Path):
        first = part.pieces[0]
        gone = replace(first.file, path=tmp_path / "gone.py")
        worker = NodeWorker(Setup.of(job, tokenizer, threads=1))
        order = PartTask(part=replace(part, pieces=(replace(first, file=gone),)), folder=tmp_path / "out")
        (report,) = worker.carry_out(order)
        assert isinstance(report, Failed)
        with pytest.raises(DataError, match=r"gone.py cannot be read \(No such file(.|\n)*Seen by process 7 on a\.$"):
            report.at("process 7 on a").reraise(part)
        with pytest.raises(RuntimeError, match="failed in its worker"):
            Failed.of(ZeroDivisionError()).at("process 7 on a").reraise(part)


def test_each_attempt_at_a_part_has_a_folder_of_its_own(look: NodeCheck, source: TextSource, tmp_path: Path):
    """A worker that was taken for lost writes on, while another one makes the same part."""
    sent: list[PartTask] = []
    carry_out = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=sent.append))
    handle = SimpleNamespace(check_node=SimpleNamespace(remote=lambda *arguments: None), carry_out=carry_out)
    order = PartTask(part=split_into_parts(source.pieces(), 1 << 30)[0], folder=tmp_path / "parts" / "00003")
    workers = [_Worker(None, handle, look, name) for name in "ab"]
    for worker in workers:
        worker.begin(order)
    late, other = (attempt.folder for attempt in sent)
    for folder in (late, other):
        folder.mkdir(parents=True)
        (folder / "shard").write_text("half")
    (other / "shard").write_text("whole")
    workers[1].deliver()
    (late / "shard").write_text("half again")
    assert content(order.folder) == {"shard": b"whole"}
    # As a build that goes on after a kill does.
    _sweep([order])
    assert [path.name for path in order.folder.parent.iterdir()] == ["00003"]
    assert not late.exists()


class TestRefused:
    @pytest.fixture
    def ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stands in for Ray, of which nothing is asked."""
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
        monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def test_no_ray(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(ConfigError, match=r'pip install "longctx-train\[scale\]"'), open_cluster():
            pass

    def test_a_client_address(self, ray: None, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
        with pytest.raises(ConfigError, match=r"--ray-address ray://head:10001 is a Ray Client"), open_cluster():
            pass

    def test_nobody_listens(self, ray: None):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{unused.getsockname()[1]}"
            match = f"--ray-address {address}: no Ray cluster responds .*refused(.|\n)*ray start --head"
            with pytest.raises(ClusterError, match=match), open_cluster(address):
                pass
