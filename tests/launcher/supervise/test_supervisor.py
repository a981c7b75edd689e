"""``longctx run``: which ends are tried again, from where, on which hosts, and who is left running."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from launcher.cluster.sessions import SignalForwarder
from launcher.recipes.find import QUICKSTART
from launcher.supervise import supervisor as supervised
from launcher.supervise.attempt import attempt
from launcher.supervise.training_command import TrainingCommand
from longctx.errors import ConfigError
from tests.launcher.cli.calls import call
from tests.launcher.runs import SCREEN
from tests.launcher.supervise.trainer import Act, Trainer

NOW = ("--wait-seconds", 0)


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Do this in a thread, which has ended after the block."""
    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()


def wait_for(*paths: Path) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.01)


def test_deepspeed_is_started_without_a_ranks_number_in_its_line():
    line = ["/bin/deepspeed", "--num_gpus", "2", "launcher/pretrain.py", "--run.seed", "3"]
    command = TrainingCommand.of(line)
    assert command.started == ["/bin/deepspeed", "--no_local_rank", *line[1:]]
    assert command.words == line
    assert TrainingCommand.of(command.started).started == command.started
    other = ["torchrun", *line[1:]]
    assert TrainingCommand.of(other).started == other


def test_our_own_verb_is_a_training_command():
    """Whatever stands before it, and wherever its two options stand among the settings."""
    for program in (["/bin/longctx"], ["nohup", "longctx"], ["python", "-m", "launcher"]):
        line = [*program, "train", "--run.seed", "3", "--hostfile=hosts", "--run.resume", "auto"]
        command = TrainingCommand.of(line)
        assert command.launch_words == (*program, "train", "--hostfile", "hosts")
        assert command.arguments == ("--run.seed", "3", "--run.resume", "auto")
        assert (command.hostfile, command.resume) == (Path("hosts"), "auto")
        assert command.on_hosts(Path("fewer")).started[-4:] == list(command.arguments)
        assert "fewer" in command.on_hosts(Path("fewer")).started
    assert TrainingCommand.of(["longctx", "train", "--ranks", "2"]).words == ["longctx", "train", "--ranks", "2"]
    module = ["torchrun", "--nproc_per_node", "2", "-m", "launcher.pretrain", "--run.seed", "3"]
    assert TrainingCommand.of(module).arguments == ("--run.seed", "3")
    with pytest.raises(ConfigError, match="is not a training command"):
        TrainingCommand.of(["longctx", "tokenizer", "train"])


def test_it_goes_on_from_the_newest_good_checkpoint_until_the_run_is_done(capsys, tmp_path: Path):
    acts = (Act(steps=(1, 2, 3), saves=(2,)), Act(steps=(3, 4, 5), code=-9), Act(steps=range(5, 11), code=0))
    trainer = Trainer(tmp_path, *acts)
    code, _, err = call(capsys, "run", *NOW, "--", *trainer.words("--run.seed", 3))
    assert code == 0, err
    assert trainer.resumes() == [None, "newest-good", "newest-good"]
    assert all(arguments[-4:-2] == ["--run.seed", "3"] for arguments in trainer.calls()[1:])
    assert [(row["exit_code"], row["step"]) for row in trainer.restarts()] == [(1, 3), (137, 5)]
    assert "attempt 1 ended with exit code 1 after step 3 of 10" in err
    assert "Resuming from the newest good checkpoint" in err


def test_ranks_that_have_lost_their_launcher_are_started_again(capsys, tmp_path: Path):
    """They have saved; what an earlier attempt has said of a stop is not the next one's word."""
    acts = (Act(steps=(1, 2), saves=(2,), stop="launcher", code=75), Act(code=1), Act(steps=range(3, 11), code=0))
    trainer = Trainer(tmp_path, *acts)
    code, _, err = call(capsys, "run", *NOW, "--", *trainer.words())
    assert code == 1, "the second attempt came no further"
    assert "two attempts in a row ended after step 2" in err
    assert len(trainer.calls()) == 2


def test_without_a_checkpoint_it_begins_anew(capsys, tmp_path: Path):
    trainer = Trainer(tmp_path, Act(steps=(1,)), Act(steps=range(1, 11), code=0))
    code, _, err = call(capsys, "run", *NOW, "--", *trainer.words())
    assert code == 0, err
    assert "There is no checkpoint yet: starting from scratch" in err
    assert trainer.resumes() == [None, None]
    # What the first attempt did is kept, and out of the way of the second one's.
    assert len((trainer.run / "metrics.jsonl").read_text().splitlines()) == 10
    assert len((trainer.run / "metrics.discarded.jsonl").read_text().splitlines()) == 1


def test_a_run_that_is_done_and_not_in_its_store_is_sent_again(capsys, tmp_path: Path):
    """However often it takes: that nothing advances is no reason to stop."""
    done = Act(steps=range(1, 11), saves=(10,), code=74)
    trainer = Trainer(tmp_path, done, Act(code=74), Act(code=74), Act(code=0))
    code, _, err = call(capsys, "run", *NOW, "--", *trainer.words())
    assert code == 0, err
    assert trainer.resumes() == [None, *["newest-good"] * 3]
    (tmp_path / "never").mkdir()
    trainer = Trainer(tmp_path / "never", done, *[Act(code=74)] * 3)
    code, _, err = call(capsys, "run", *NOW, "--retries", 1, "--", *trainer.words())
    assert code == 74
    assert len(trainer.calls()) == 2
    assert "after 2 attempts its last checkpoint is not in its store" in err


def test_one_line_begins_a_run_and_goes_on_with_it(capsys, tmp_path: Path):
    trainer = Trainer(tmp_path, Act(steps=(1, 2), saves=(2,), code=2), Act(steps=range(3, 11), code=0))
    line = ("run", *NOW, "--", *trainer.words("--run.resume", "newest-good"))
    assert call(capsys, *line)[0] == 2
    assert call(capsys, *line)[0] == 0
    assert trainer.resumes() == [None, "newest-good"]


def test_a_line_that_does_it_all_is_repeated_as_it_is(capsys, tmp_path: Path):
    """``run.resume = "auto"``, on the line or in its file, begins, begins again and goes on by itself."""
    acts = (Act(), Act(steps=(1,)), Act(steps=(1, 2), saves=(2,)), Act(steps=range(3, 11), code=0))
    trainer = Trainer(tmp_path, *acts)
    assert call(capsys, "run", *NOW, "--", *trainer.words("--run.resume", "auto"))[0] == 0
    assert trainer.resumes() == ["auto"] * 4
    assert not (trainer.run / "metrics.discarded.jsonl").exists(), "the training itself sets it aside"


@pytest.mark.parametrize("resume", ["newest-good", "auto"])
def test_the_file_of_a_line_counts_as_the_line(capsys, tmp_path: Path, resume: str):
    trainer = Trainer(tmp_path, Act(steps=(1,)), Act(steps=(1, 2), saves=(2,)), Act(steps=range(3, 11), code=0))
    toml = tmp_path / "run.toml"
    toml.write_text(QUICKSTART.read_text().replace("[run]", f'[run]\nresume = "{resume}"'))
    code, _, err = call(capsys, "run", *NOW, "--", *trainer.words("--config", toml))
    assert code == 0, err
    assert trainer.resumes() == {"newest-good": ["no", "no", "newest-good"], "auto": [None] * 3}[resume]


def test_a_checkpoint_of_another_run_is_gone_on_from_until_this_one_has_its_own(capsys, tmp_path: Path):
    """Begun anew, the second attempt would have other weights than the first."""
    trainer = Trainer(tmp_path, Act(steps=(6,)), Act(steps=(6, 7), saves=(7,)), Act(steps=range(8, 11), code=0))
    other = str(tmp_path / "other" / "checkpoints" / "step_000005")
    code, _, err = call(capsys, "run", *NOW, "--", *trainer.words("--run.resume", other))
    assert code == 0, err
    assert trainer.resumes() == [other, other, "newest-good"]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("acts", "code", "said"),
    [
        ((Act(code=2),), 2, "an error in the command or its settings"),
        ((Act(code=130),), 130, "was interrupted"),
        ((Act(), Act()), 1, "two attempts in a row ended before its first step"),
        ((Act(steps=(1, 2), saves=(1,)), Act(steps=(2,))), 1, "two attempts in a row ended after step 2 of 10"),
        (
            (Act(steps=(1, 2), saves=(2,), stop="signal", code=75),),
            75,
            "was asked to stop, and saved after step 2",
        ),
        (
            (Act(steps=(1, 2), saves=(1,), wrong=(0, 1)), Act(steps=(2, 3), wrong=(0, 1))),
            1,
            "this machine computed wrong numbers in two attempts",
        ),
        ((Act(code=143),), 143, "the training was ended by SIGTERM"),
        # What a launcher says whose own launcher was killed.
        ((Act(steps=(1,), code=0), Act(steps=(1,), code=0)), 1, "two attempts in a row ended after step 1"),
        (
            (Act(steps=(1,), saves=(1,)), Act(steps=(2,)), Act(steps=(3,), code=-9)),
            137,
            "was the last one (--retries 2).\nIts output is above",
        ),
    ],
)
def test_what_cannot_help_is_not_tried(capsys, tmp_path: Path, acts, code, said):
    trainer = Trainer(tmp_path, *acts)
    found, _, err = call(capsys, "run", *NOW, "--retries", 2, "--", *trainer.words())
    assert found == code, err
    assert said in err
    assert len(trainer.calls()) == len(trainer.restarts()) == len(acts)


def test_a_launcher_that_was_killed_leaves_nobody_behind(capsys, tmp_path: Path):
    trainer = Trainer(tmp_path, Act(steps=(1,), code=-9, rank=True), Act(steps=range(1, 11), code=0))
    code, _, err = call(capsys, "run", *NOW, "--", *trainer.words())
    assert code == 0, err
    assert "ended 1 processes left by the launcher" in err
    assert not psutil.pid_exists(int((trainer.place / "rank").read_text()))


@pytest.mark.slow
def test_exit_code_0_with_ranks_that_were_still_there_is_no_end_without_the_last_checkpoint(capsys, tmp_path: Path):
    acts = (Act(steps=range(1, 11), saves=(8,), code=0, rank=True), Act(steps=(9, 10), saves=(10,), code=0, rank=True))
    trainer = Trainer(tmp_path, *acts)
    code, _, err = call(capsys, "run", *NOW, "--", *trainer.words())
    assert code == 0, err
    assert trainer.resumes() == [None, "newest-good"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_goes_to_the_training_and_ends_it_here_too(capsys, tmp_path: Path, number):
    trainer = Trainer(tmp_path, Act(steps=(1,), hangs=True, code=7))

    def tell() -> None:
        wait_for(trainer.place / "hangs")
        os.kill(os.getpid(), number)

    with meanwhile(tell):
        code, _, _ = call(capsys, "run", *NOW, "--", *trainer.words())
    # SIGTERM is one that it hears; of the others it dies.
    assert code == {signal.SIGTERM: 7, signal.SIGINT: 130, signal.SIGHUP: 129}[number]
    assert len(trainer.calls()) == 1


_FAMILY = """
import os, pathlib, signal, subprocess, sys, time

place, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
heard = lambda number, frame: (place / f"{kind}.heard").write_text(str(number))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, heard)
others = {"runner": ["rank", "worker"], "rank": ["child"]}.get(kind, [])
words = [sys.executable, __file__, str(place)]
variables = {**os.environ, "RANK": "0"}
started = [subprocess.Popen([*words, x], env=variables if x == "rank" else None) for x in others]
(place / f"{kind}.ready").touch()
end = time.monotonic() + 20
while time.monotonic() < end and not (place / "end").exists():
    time.sleep(0.01)
for process in started:
    process.wait()
"""


@pytest.mark.parametrize(
    ("number", "alone", "hear"),
    [
        (signal.SIGINT, True, {"rank"}),
        (signal.SIGTERM, True, {"rank"}),
        # Every process has a rank, and nobody can say whose it is.
        (signal.SIGINT, False, {"runner", "rank", "worker", "child"}),
    ],
)
def test_of_a_session_the_ranks_hear_a_signal(tmp_path: Path, monkeypatch, number, alone, hear):
    (tmp_path / "family.py").write_text(_FAMILY)
    if not alone:
        monkeypatch.setenv("RANK", "3")
    everyone, stop = ("runner", "rank", "worker", "child"), SignalForwarder()

    def tell() -> None:
        wait_for(*(tmp_path / f"{one}.ready" for one in everyone))
        os.kill(os.getpid(), number)
        wait_for(*(tmp_path / f"{one}.heard" for one in hear))
        # Who hears it in spite of that does so within this time.
        time.sleep(0.3)
        (tmp_path / "end").touch()

    with meanwhile(tell), stop.listening():
        attempt([sys.executable, str(tmp_path / "family.py"), str(tmp_path), "runner"], stop)
    assert {one for one in everyone if (tmp_path / f"{one}.heard").exists()} == hear


def test_whoever_waits_for_the_next_attempt_can_be_stopped(capsys, tmp_path: Path):
    trainer = Trainer(tmp_path, Act(steps=(1,)))

    def tell() -> None:
        wait_for(trainer.run / "restarts.jsonl")
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    with meanwhile(tell):
        code, _, _ = call(capsys, "run", "--wait-seconds", 60, "--", *trainer.words())
    assert code == 130
    assert len(trainer.calls()) == 1


HOSTS = "one slots=2\ntwo slots=2\nthree slots=2\n"
_STARTER = """
import os, pathlib, sys
at = next(n for n, word in enumerate(sys.argv) if word.endswith("pretrain.py"))
with pathlib.Path(__file__).with_name("started").open("a") as file:
    file.write(" ".join(sys.argv[1:at]) + "\\n")
os.execv(sys.executable, [sys.executable, *sys.argv[at:]])
"""


@pytest.mark.parametrize(
    ("silent", "wrong", "tokens", "hosts"),
    [
        ([], (), 49152, None),
        (["two"], (), 49152, "one slots=2\nthree slots=2\n"),
        # A step of 18 rows, which the four ranks that are left do not divide.
        (["one"], (), 36864, "two slots=2\n"),
        # Ranks 2 and 3 are on the second host.
        ([], (3, 6), 49152, "one slots=2\nthree slots=2\n"),
        (["one"], (3, 6), 49152, "three slots=2\n"),
        # Not the ranks of this file.
        ([], (3, 4), 49152, None),
    ],
)
def test_hosts_that_do_not_answer_or_compute_wrong_numbers_are_left_out(
    capsys, monkeypatch, tmp_path: Path, silent, wrong, tokens, hosts
):
    trainer = Trainer(tmp_path, Act(steps=(1,), saves=(1,), wrong=wrong), Act(steps=range(2, 11), code=0))
    (tmp_path / "hostfile").write_text(HOSTS)
    monkeypatch.setattr(supervised, "offline_hosts", lambda slots: [host for host in silent if host in slots])
    python, script, *settings = trainer.words(
        *("--data.seq_len", 2048, "--train.tokens_per_step", tokens),
        *("--parallel.context", 1, "--parallel.expert", 1),
    )
    starter = [python, tmp_path / "starter.py", f"--hostfile={tmp_path / 'hostfile'}", script]
    (tmp_path / "starter.py").write_text(_STARTER)
    code, _, err = call(capsys, "run", *NOW, "--", *starter, *settings)
    assert code == 0, err
    first, second = (tmp_path / "started").read_text().splitlines()
    assert first == f"--hostfile={tmp_path / 'hostfile'}"
    if hosts is None:
        assert second == first
        return
    assert second == f"--hostfile {trainer.run / 'hostfile.restart'}"
    assert (trainer.run / "hostfile.restart").read_text() == hosts
    for host in silent:
        assert f"{host} does not answer over ssh" in err
    if wrong:
        assert "two computed a wrong number and is excluded" in err


def test_hosts_that_a_filter_picks_are_left_to_it():
    words = ["deepspeed", "--hostfile", "hosts", "launcher/pretrain.py"]
    assert TrainingCommand.of(words).hostfile == Path("hosts")
    assert TrainingCommand.of([*words[:3], "--include=one@two", words[3]]).hostfile is None


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "needs the command to start"),
        (["--", "deepspeed", "--num_gpus", "2", "launcher/pretrin.py"], 2, "is not a training command"),
        (["--wait-seconds", "nan", "--", "launcher/pretrain.py"], 2, "--wait-seconds nan must be between 0 and"),
        (["--", "deepspeed", "launcher/pretrain.py", "--train.stepps", "3"], 2, "train.stepps"),
        (["--", "longctx", "train", "--hostfile", "no-file"], 1, "hostfile no-file does not exist"),
        (
            ["--", "deepspeeed", "launcher/pretrain.py", "--run.output_dir", "nowhere"],
            1,
            "deepspeeed cannot be started",
        ),
    ],
)
def test_bad_input_is_refused_on_one_screen(capsys, words, code, said):
    found, _, err = call(capsys, "run", *words)
    assert found == code
    assert said in err
    assert len(err.splitlines()) < SCREEN
