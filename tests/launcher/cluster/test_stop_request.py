"""``StopRequest``: what asks for an end, and what ends a process that nobody launches any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from torch.torch_version import TorchVersion

from launcher.cluster import stop_request
from launcher.cluster.exit import run_to_exit_code
from launcher.cluster.stop_request import Signalled, StopRequest
from launcher.training.run_stop import SHUTDOWN_TIMEOUT, launcher_seconds
from parallel.runtime.launcher_processes import Launcher
from tests.helpers import REPOSITORY

SECONDS = 60.0


@pytest.fixture
def heard():
    """Handlers as Python has them at first, and as they were once the test is over."""
    before = {number: signal.getsignal(number) for number in stop_request.ENDING}
    # The tests may run behind a shell's &, which switches SIGINT off.
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_asks_for_a_stop_once_there_are_steps(heard, number):
    stop = StopRequest()
    stop.listen()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert not stop.is_requested()
    stop.begin_steps()
    signal.raise_signal(number)
    assert stop.is_requested()
    assert stop.reason is not None
    assert (stop.reason.kind, stop.reason.message) == ("signal", f"{number.name} came")
    # Launchers send SIGTERM after what they were sent themselves.
    signal.raise_signal(signal.SIGTERM)
    assert stop.reason.message == f"{number.name} came"


def test_sigterm_to_a_rank_without_a_launcher_is_no_wish(heard):
    """A supervisor sends it to those that are left; they are started again."""
    stop = StopRequest()
    stop.listen()
    stop.begin_steps()
    dead = subprocess.Popen(["true"])
    stop._ancestors = [Launcher(psutil.Process(dead.pid), "deepspeed's launcher", ())]
    dead.wait()
    signal.raise_signal(signal.SIGTERM)
    assert stop.reason is not None
    assert (stop.reason.kind, stop.reason.message) == ("launcher", f"deepspeed's launcher (process {dead.pid}) is gone")


def test_signals_that_were_turned_off_stay_so(heard):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest()
    stop.listen()
    stop.begin_steps()
    signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert not stop.is_requested()


def test_a_signal_before_the_first_step_is_one_line(capfd):
    def act() -> None:
        raise Signalled(signal.SIGTERM)

    assert run_to_exit_code(act) == 128 + signal.SIGTERM
    assert capfd.readouterr().err.strip() == "Ended by SIGTERM before the first step: no training state to save."


def test_a_limit_leaves_room_for_a_step_and_a_save():
    stop = StopRequest()
    stop.max_seconds = 1000.0
    stop._process_start_time = time.time() - 900.0
    assert not stop.is_requested()
    stop.step_seconds, stop.save_seconds = 40.0, 50.0
    assert not stop.is_requested()
    stop.save_seconds = 70.0
    assert stop.is_requested()
    assert stop.reason is not None
    assert stop.reason.message == "run.max_seconds=1000 is nearly over"
    assert not StopRequest().is_requested()


@pytest.fixture
def ends(monkeypatch):
    """The words that processes would end with."""
    said: list[str] = []
    monkeypatch.setattr(stop_request, "end_for", lambda text, code=1: said.append(text))
    return said


def test_orphans_that_agree_in_time_are_not_ended(ends):
    stop = StopRequest()
    stop.launcher_timeout_seconds = SECONDS
    stop.begin_steps()
    thread = threading.Thread(target=stop.on_launcher_exit, args=("deepspeed's launcher (process 7)",))
    thread.start()
    while not stop.is_requested():
        time.sleep(0.001)
    assert thread.is_alive()
    stop.set_accepted()
    thread.join(SECONDS)
    assert not ends


def test_orphans_are_ended_only_when_a_save_under_way_is_done(ends):
    stop = StopRequest()
    stop.launcher_timeout_seconds = 0.01
    stop.begin_steps()
    thread = threading.Thread(target=stop.on_launcher_exit, args=("torchrun (process 7)",))
    with stop.saving:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert not ends
    thread.join(SECONDS)
    assert len(ends) == 1
    assert ends[0].startswith("Torchrun (process 7) is gone, so rank 0 on ")
    assert "longer than run.orphan_seconds=0.01" in ends[0]


def test_orphans_before_the_first_step_are_ended_at_once(ends):
    StopRequest().on_launcher_exit("torchrun (process 7)")
    assert "before the first step: no training state to save" in ends[0]


def test_two_ctrl_c_end_a_lone_process_at_once():
    code = (
        "import signal, time; from launcher.cluster.stop_request import StopRequest\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "stop = StopRequest(); stop.listen(); stop.begin_steps(); signal.raise_signal(signal.SIGINT)\n"
        "print(stop.reason.message, flush=True); signal.raise_signal(signal.SIGINT); print('not here')"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (130, "SIGINT came\n"), done.stderr


# torchrun does not look at it before torch 2.12.
READ = 280.0 if TorchVersion(torch.__version__) >= (2, 12) else 30.0


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 30.0),
        ({"TORCHELASTIC_RUN_ID": "none"}, 30.0),
        ({"TORCHELASTIC_RUN_ID": "none", SHUTDOWN_TIMEOUT: "280"}, READ),
        # DeepSpeed's launcher does not look at it.
        ({SHUTDOWN_TIMEOUT: "280"}, 30.0),
    ],
)
def test_seconds_that_a_launcher_grants(environment, seconds):
    assert launcher_seconds(environment) == seconds
