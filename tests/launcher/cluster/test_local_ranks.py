"""``run_ranks``: what each rank is told, whose exit code counts, signals, and that nobody is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from launcher.cli import train
from launcher.cluster import local_ranks as local
from launcher.cluster.exit import STOPPED
from launcher.cluster.local_ranks import run_ranks
from longctx.errors import ClusterError, ConfigError
from tests.helpers import REPOSITORY
from tests.launcher.cli.calls import hear_interrupts, refused

STUB = """\
import json, os, signal, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
heard = []
signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
told = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}
(folder / f"{rank}.part").write_text(json.dumps({"told": told, "arguments": sys.argv[2:], "pid": os.getpid()}))
(folder / f"{rank}.part").rename(folder / f"{rank}.json")
act = sys.argv[2 + rank]
while act == "stays" and not heard:
    time.sleep(0.01)
time.sleep(0.2)
sys.exit(len(heard) + 74 if act == "stays" else int(act))
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch) -> Path:
    """A folder in whose ``launcher`` a script tells what its ranks were told, and does what they are told."""
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "stub.py").write_text(STUB)
    monkeypatch.setattr(local, "ROOT", tmp_path)
    return tmp_path


def found(folder: Path) -> list[dict]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_every_rank_is_told_who_it_is(stub):
    assert run_ranks("longctx train", "stub.py", [str(stub), "0", "0", "--run.output_dir", "a run"], 2) == 0
    for rank, one in enumerate(found(stub)):
        assert one["told"] == {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        }  # fmt: skip
        assert one["arguments"] == ["0", "0", "--run.output_dir", "a run"]


@pytest.mark.timeout(120)
def test_the_first_failure_counts_and_ends_the_others(stub, monkeypatch):
    monkeypatch.setattr(local, "HEAD_START_SECONDS", 0.2)
    assert run_ranks("longctx train", "stub.py", [str(stub), "stays", "3"], 2) == 3
    assert not any(psutil.pid_exists(one["pid"]) for one in found(stub))


@pytest.mark.timeout(120)
def test_ctrl_c_reaches_each_rank_once(stub):
    """The exit code is that of ranks that heard one signal."""
    script = (
        "import sys; from pathlib import Path; from launcher.cluster import local_ranks; "
        f"local_ranks.ROOT = Path({str(stub)!r}); "
        f"sys.exit(local_ranks.run_ranks('longctx train', 'stub.py', [{str(stub)!r}, 'stays', 'stays'], 2))"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPOSITORY, preexec_fn=hear_interrupts, start_new_session=True
    )
    while not all((stub / f"{rank}.json").exists() for rank in range(2)):
        assert started.poll() is None
        time.sleep(0.01)
    # As a terminal does: to the group in its foreground, which the ranks are not in.
    os.killpg(started.pid, signal.SIGINT)
    assert started.wait(60) == STOPPED


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--parallel.context", "2"), 2),
        (("--parallel.context", "2", "--parallel.expert", "4"), 4),
        (("--parallel.context", "2", "--ranks", "6"), 6),
    ],
)
def test_as_many_ranks_as_the_settings_need(words, wanted, monkeypatch):
    started = []
    monkeypatch.setattr(local, "run_ranks", lambda *given: started.append(given) or 0)
    monkeypatch.setattr(local, "num_gpus", lambda: 0)
    options = dict(zip(words[::2], words[1::2], strict=True))
    ranks = int(options.pop("--ranks", 0))
    settings = tuple(word for pair in options.items() for word in pair)
    assert train.train(ranks=ranks, settings=settings) == 0
    [(called, script, arguments, count)] = started
    assert (called.split()[-1], script, tuple(arguments), count) == ("train", "pretrain.py", settings, wanted)


@pytest.mark.parametrize(
    ("words", "gpus", "ranks", "context"),
    [
        ((), 8, 8, None),
        ((), 1, 1, "1"),
        ((), 3, 3, "1"),
        (("--parallel.context", "1"), 1, 1, None),
        (("--config", "quickstart"), 4, 4, None),
        (("--run.device", "cpu"), 8, 2, None),
        (("--ranks", "1"), 8, 1, "1"),
    ],
)
def test_a_rank_for_each_gpu(words, gpus, ranks, context, monkeypatch):
    """The quickstart's context degree gives way where it does not divide them, unless it was asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    started = []
    monkeypatch.setattr(local, "run_ranks", lambda *given: started.append(given) or 0)
    settings, asked = list(words), 0
    if "--ranks" in settings:
        settings, asked = [], int(settings[1])
    assert train.train(ranks=asked, settings=tuple(settings)) == 0
    _, _, arguments, count = started[0]
    assert count == ranks
    assert list(arguments) == settings + ([] if context is None else ["--parallel.context", context])


def test_a_hostfile_of_this_machine_needs_no_ssh(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(local, "run_ranks", lambda *given: started.append(given) or 0)
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    assert train.start("train", "pretrain.py", [], ranks=0, hostfile=str(tmp_path / "hosts")) == 0
    assert started[0][3] == 3


def test_hosts_that_do_not_answer_are_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.supervise.host_selection._answers", lambda host: host == "node-a")
    (tmp_path / "hosts").write_text("node-a slots=1\nnode-b slots=1\n")
    with pytest.raises(ClusterError, match=r"node-b of .*hosts does not answer over ssh.*\n.*doctor --hostfile"):
        train.start("train", "pretrain.py", [], ranks=0, hostfile=str(tmp_path / "hosts"))


def test_ranks_and_hosts_are_two_answers_to_one_question():
    with pytest.raises(ConfigError, match="--ranks 2 is for this machine only, and --hostfile hosts sets all ranks"):
        train.start("train", "pretrain.py", [], ranks=2, hostfile="hosts")
    with pytest.raises(ConfigError, match="--ranks -1 must be 1 to"):
        train.start("train", "pretrain.py", [], ranks=-1, hostfile="")


def test_a_rank_and_a_schedulers_task_start_no_ranks(monkeypatch):
    """Each of them would start all of a run's."""
    monkeypatch.setattr(local, "run_ranks", lambda *_: pytest.fail("a rank was started"))
    # The check sets RANK: it shall be gone again afterwards.
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(ClusterError, match=r"srun started 8 tasks[\s\S]*launcher/evaluate.py --tasks niah"):
        train.start("evaluate", "evaluate.py", ["--tasks", "niah"], ranks=2, hostfile="")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"longctx train starts ranks itself[\s\S]*launcher/pretrain.py"):
        train.start("train", "pretrain.py", [], ranks=2, hostfile="")


def test_wrong_usage_is_reported_once_before_any_rank(capsys, monkeypatch):
    monkeypatch.setattr(local, "run_ranks", lambda *_: pytest.fail("a rank was started"))
    assert "lr" in refused(capsys, 2, "train", "--ranks", 2, "--train.lr", "fast")
    assert "--max-new-tokens" in refused(
        capsys, 2, "generate", "--ranks", 2, "--checkpoint", "x", "--prompt", "y", "--max-new-tokens", "z"
    )
    assert "--ranks 'two' must be a number" in refused(
        capsys, 2, "score", "--ranks", "two", "--checkpoint", "x", "--data", "y", "--output", "z"
    )


def test_a_start_on_this_machine_does_without_torch():
    """Its import takes longer than all that stands before the ranks."""
    code = (
        "import sys, launcher.cluster.local_ranks as ranks\n"
        "ranks.run_ranks = lambda *_: print('torch' in sys.modules) or 0\n"
        "sys.argv = ['longctx', 'train', '--ranks', '2']\n"
        "from launcher.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["False"], ended.stderr
