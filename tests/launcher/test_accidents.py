"""What befalls one rank of a run ends all of its ranks, with that rank's message, at any place and of any kind.

``python -m tests.launcher.test_accidents`` runs the drill by itself and prints the table of ``docs/measured.md``.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from launcher.cluster.exit import STOPPED
from launcher.cluster.launch_commands import torchrun
from tests.helpers import REPOSITORY
from tests.launcher.runs import flags, free_port

pytestmark = pytest.mark.timeout(1700)

ACCIDENTS = Path(__file__).with_name("accidents")
RANKS, DRAWS = 4, 40
BOUND_SECONDS = 60.0
"""From the accident to the end of the last rank. It takes a few seconds; a machine that others use takes longer."""


class Place(NamedTuple):
    """A function of the product, and one of its calls."""

    part: str
    module: str
    function: str
    call: int = 1
    rank: int | None = None
    """The rank that alone comes there."""


PLACES = [
    Place("start", "parallel.mesh", "Mesh.build"),
    Place("start", "launcher.training.run_preparation", "prepare_folder"),
    Place("start", "launcher.training.setup", "find_origin"),
    Place("start", "launcher.training.setup", "open_data"),
    Place("start", "launcher.training.setup", "say_start", rank=0),
    Place("start", "launcher.training.setup", "build_engine"),
    Place("start", "parallel.zero.partition", "Wrapping.start"),
    Place("start", "launcher.training.trainer", "Trainer._open_folder"),
    Place("step", "launcher.training.setup", "TrainingRun.place", call=2),
    Place("step", "launcher.training.train_step", "sum_counts", call=2),
    Place("step", "launcher.training.train_step", "TrainStep.forward_backward", call=2),
    Place("step", "parallel.transport.point_to_point", "PointToPoint.forward", call=3),
    Place("step", "parallel.transport.point_to_point", "PointToPoint.backward", call=3),
    Place("step", "parallel.zero.zero_engine", "ZeroEngine.backward", call=2),
    Place("step", "parallel.zero.zero_engine", "ZeroEngine.step", call=2),
    Place("step", "launcher.metrics.metrics_writer", "RecordWriter.write", call=2),
    Place("save", "launcher.training.trainer", "Trainer._save"),
    Place("save", "launcher.checkpoint.background_saver", "HostCopy.fill"),
    Place("save", "launcher.checkpoint.background_saver", "write_rank_file"),
    Place("save", "launcher.checkpoint.checkpoint_files", "read_back"),
    Place("save", "launcher.checkpoint.checkpoint_files", "_manifest", rank=0),
    Place("save", "launcher.checkpoint.background_saver", "commit", rank=0),
    Place("validation", "launcher.training.trainer", "Trainer._validate"),
    Place("validation", "launcher.training.trainer", "validate"),
    Place("validation", "launcher.training.validation", "sum_over_ranks"),
]
KINDS = {
    **dict.fromkeys(("MemoryError", "RuntimeError", "TypeError", "AssertionError", "OutOfMemoryError"), 1),
    **dict.fromkeys(("OSError", "disk full", "DataError", "CheckpointError", "ClusterError"), 1),
    **{"ConfigError": 2, "SIGINT": 130, "SystemExit": 3, "SIGKILL": 1, "exit": 1},
}
"""What happens, and the exit code of the ranks then."""
DEADLY = ("SIGKILL", "exit")
LAUNCHERS = ("none", "none", "torchrun", "none", "none", "none", "deepspeed", "none")
"""How the accidents of the drill are started. Without a launcher nobody but the ranks themselves ends them, as between
two machines: that is the harder case, and here it is the cheaper one."""


@dataclass(frozen=True, kw_only=True)
class Accident:
    """What happens where, on which rank."""

    rank: int
    place: Place
    kind: str
    launcher: str = "none"
    stalling: bool = False
    """Whether groups block for ever where another rank is gone, as NCCL's."""
    ranks: int = RANKS
    script: str = "launcher/pretrain.py"
    step: int = 0
    """Calls count from this step on."""
    file: str = ""
    """Calls count whose first argument is a file of this name; every call where it is empty."""
    after: float = 0.5
    """Seconds from the call to the accident: the other ranks are inside of a collective by then."""
    command: str = ""
    """Of the kind "command": what a shell then does."""
    seconds: float = 3.0
    """Of the kind "pause": how long it lasts."""

    def words(self) -> str:
        """What the user must read."""
        if self.kind in DEADLY:
            return "died without a message"
        if self.kind == "SIGINT":
            return "Interrupted."
        if self.kind == "SystemExit":
            return ""
        return "an accident for the drill"

    def __str__(self) -> str:
        return f"{self.kind} on rank {self.rank} in {self.place.function} ({self.place.part}), {self.launcher}"


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    codes: list[int | None]
    """Of the ranks without a launcher, else of the launcher; None where one had to be killed."""
    text: str
    seconds: float
    """From the accident to the end of the last rank."""


def environment_of(accident: Accident, happened: Path) -> dict[str, str]:
    told = {
        **{"rank": accident.rank, "module": accident.place.module, "function": accident.place.function},
        **{"call": accident.place.call, "kind": accident.kind, "after": accident.after, "happened": str(happened)},
        **{"step": accident.step, "file": accident.file, "command": accident.command, "seconds": accident.seconds},
    }
    added = {
        "PYTHONPATH": f"{ACCIDENTS}:{REPOSITORY}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LONGCTX_ACCIDENT": json.dumps(told),
        **{"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    }
    if accident.stalling:
        added["LONGCTX_STALLING"] = "1"
    return {**os.environ, **added}


def command_of(accident: Accident, arguments: list[str]) -> list[str]:
    """The launcher's command line."""
    if accident.launcher == "torchrun":
        return torchrun(*arguments, ranks=accident.ranks, script=accident.script).split()
    launch = ["deepspeed", "--num_gpus", str(accident.ranks), "--master_port", str(free_port())]
    return [*launch, accident.script, *arguments]


def run(accident: Accident, shards: Path, folder: Path) -> Outcome:
    """A tiny run that meets the accident."""
    changed = {"train.steps": 4, "checkpoint.every_steps": 2, "validation.every_steps": 2, "run.hostfile": "none"}
    return start(accident, flags(shards, folder / "run", {**changed, "run.timeout_seconds": 600.0}), folder)


def start(accident: Accident, arguments: list[str], folder: Path, *, limit: float = 240.0) -> Outcome:
    """The accident's script with these arguments, to its end; ``folder`` is for notes."""
    happened, output = folder / "happened", folder / "output"
    environment = environment_of(accident, happened)
    if accident.launcher == "none":
        codes, ended = _fork(accident, arguments, environment, output, limit)
    else:
        with output.open("w") as file:
            command = command_of(accident, arguments)
            started = psutil.Popen(command, cwd=REPOSITORY, env=environment, stdout=file, stderr=subprocess.STDOUT)
            ended = _end_of_ranks(started, happened, limit)
        codes = [started.returncode]
    seconds = float("inf")
    if happened.exists():
        seconds = ended - float(happened.read_text())
    # Last words come once a launcher has ended.
    deadline = time.monotonic() + 5.0
    while accident.launcher != "none" and accident.words() not in output.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    return Outcome(codes, output.read_text(), seconds)


@cache
def _forker() -> subprocess.Popen:
    """The process that forks ranks; it ends when its standard input closes."""
    command, pipe = [sys.executable, str(ACCIDENTS / "forked.py")], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdin=pipe, stdout=pipe, text=True)


def _fork(
    accident: Accident, arguments: list[str], environment: dict[str, str], output: Path, limit: float
) -> tuple[list[int | None], float]:
    """Ranks without a launcher, as the members of one machine; their exit codes, and when the last one ended."""
    ranks = str(accident.ranks)
    met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks}
    request = {
        **{"ranks": accident.ranks, "script": accident.script, "arguments": arguments, "output": str(output)},
        **{"environment": {**environment, **met}, "seconds": limit},
    }
    forker = _forker()
    assert forker.stdin is not None
    assert forker.stdout is not None
    forker.stdin.write(json.dumps(request) + "\n")
    forker.stdin.flush()
    answer = json.loads(forker.stdout.readline())
    return answer["codes"], answer["ended"]


def _end_of_ranks(started: psutil.Popen, happened: Path, limit: float) -> float:
    """When no rank of a launcher was left; those that do not end are killed."""
    deadline, ranks = time.monotonic() + limit, {}
    while started.poll() is None and time.monotonic() < deadline:
        # A process may end while it is asked.
        with suppress(psutil.NoSuchProcess):
            ranks.update({child.pid: child for child in started.children(recursive=True)})
        if happened.exists() and not any(_is_rank(process) for process in ranks.values()):
            break
        time.sleep(0.02)
    ended = time.time()
    _, alive = psutil.wait_procs([started], timeout=60.0)
    for process in [*alive, *(child for child in ranks.values() if child.is_running())]:
        process.kill()
    psutil.wait_procs([started], timeout=10.0)
    return ended


def _is_rank(process: psutil.Process) -> bool:
    """Whether this is a rank of the run that still runs."""
    try:
        words = process.cmdline()
        return (
            process.status() != psutil.STATUS_ZOMBIE
            and any(word.startswith("launcher/") for word in words)
            and not any(word.endswith(("torchrun", "deepspeed")) or "deepspeed.launcher" in word for word in words)
        )
    except psutil.Error:
        return False


def check(accident: Accident, outcome: Outcome) -> None:
    """Every rank ended in time, with one message: that of the rank which met the accident."""
    text = outcome.text
    assert outcome.seconds < BOUND_SECONDS, f"{accident}: {outcome.seconds:.1f} s, {outcome.codes}\n{text}"
    if accident.kind == "SIGINT" and accident.place.part != "start":
        check_stop(accident, outcome)
        return
    code = KINDS[accident.kind]
    own = {"SIGKILL": -9, "exit": 7}.get(accident.kind, code)
    if accident.launcher == "none":
        expected = [code] * accident.ranks
        expected[accident.rank] = own
        assert outcome.codes == expected, f"{accident}: {outcome.codes}\n{text}"
    else:
        assert outcome.codes != [0], f"{accident}\n{text}"
    # What torchrun itself says comes when the ranks have ended.
    ours = text.partition("elastic/multiprocessing")[0]
    words = accident.words()
    if words and not (accident.kind in DEADLY and accident.launcher != "none"):
        assert text.count(words) == 1, f"{accident}: said {text.count(words)} times\n{text}"
    assert ours.count("Traceback (most recent call last)") <= 1, f"{accident}\n{text}"
    assert "lost contact" not in ours, f"{accident}\n{text}"


def check_stop(accident: Accident, outcome: Outcome) -> None:
    """Once there are steps, Ctrl-C asks all ranks to save and stop; behind the last step there is nothing to stop."""
    said = outcome.text.count("Stopped after step")
    if accident.launcher == "none":
        assert outcome.codes == [STOPPED * said] * accident.ranks, f"{accident}: {outcome.codes}\n{outcome.text}"
    assert said <= 1, f"{accident}\n{outcome.text}"
    assert said or "Done: 4 steps" in outcome.text, f"{accident}\n{outcome.text}"
    assert "Traceback" not in outcome.text.partition("elastic/multiprocessing")[0], f"{accident}\n{outcome.text}"


def draw(count: int, seed: int) -> list[Accident]:
    """Random accidents, the places in turn."""
    generator = random.Random(seed)
    places = [PLACES[number % len(PLACES)] for number in range(count)]
    generator.shuffle(places)
    drawn = []
    for number, place in enumerate(places):
        rank = generator.randrange(RANKS)
        if place.rank is not None:
            rank = place.rank
        drawn.append(
            Accident(
                rank=rank,
                place=place,
                kind=generator.choice(list(KINDS)),
                launcher=LAUNCHERS[number % len(LAUNCHERS)],
                stalling=generator.random() < 0.5,
            )
        )
    return drawn


def drill(shards: Path, accidents: list[Accident], folder: Path) -> list[float]:
    """Run all accidents one after the other; returns the seconds that each took to end."""
    seconds = []
    for number, accident in enumerate(accidents):
        place = folder / str(number)
        place.mkdir()
        outcome = run(accident, shards, place)
        sys.stderr.write(f"{number + 1:2d}/{len(accidents)} {outcome.seconds:5.2f} s  {accident}\n")
        check(accident, outcome)
        seconds.append(outcome.seconds)
    return seconds


STEP = Place("step", "launcher.training.train_step", "TrainStep.forward_backward", call=2)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.function)
def test_every_place_is_there(place):
    """A rank in which the accident cannot be planted would never meet the others."""
    found = importlib.import_module(place.module)
    for name in place.function.split("."):
        assert name in vars(found)
        found = getattr(found, name)


@pytest.mark.slow
def test_a_failing_rank_ends_all_where_collectives_block_as_those_of_nccl(shards, tmp_path):
    """The failing rank says so and does not wait in its own clean-up; the other one hears neither error nor signal."""
    accident = Accident(rank=1, place=STEP, kind="MemoryError", stalling=True, ranks=2)
    check(accident, run(accident, shards, tmp_path))


@pytest.mark.slow
def test_a_run_on_groups_that_block_ends_as_any_other(shards, tmp_path):
    never = Accident(rank=0, place=STEP._replace(call=10_000), kind="MemoryError", stalling=True)
    outcome = run(never, shards, tmp_path)
    assert outcome.codes == [0] * RANKS, outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["MemoryError", "SIGKILL", "DataError"])
def test_commands_that_compute_with_a_checkpoint_end_alike(kind, finished, tmp_path):
    checkpoint = ["--checkpoint", str(finished.folder), "--run.hostfile", "none"]
    place = Place("start", "launcher.evaluation.evaluation_run", "build_decoder")
    accident = Accident(rank=1, place=place, kind=kind, ranks=2, script="launcher/evaluate.py", stalling=True)
    (tmp_path / "evaluate").mkdir()
    options = [*checkpoint, "--tasks", "ppl", "--lengths", "128", "--output", str(tmp_path / "output")]
    check(accident, start(accident, options, tmp_path / "evaluate"))
    place = Place("start", "launcher.generation.generation_run", "build_mesh")
    accident = replace(accident, place=place, script="launcher/generate.py")
    (tmp_path / "generate").mkdir()
    check(accident, start(accident, [*checkpoint, "--prompt", "def", "--max-new-tokens", "4"], tmp_path / "generate"))


@pytest.mark.slow
def test_forty_random_accidents(shards, tmp_path):
    seconds = drill(shards, draw(DRAWS, seed=15), tmp_path)
    assert len(seconds) == DRAWS


def main() -> None:
    """Make a corpus, run the drill, print the table."""
    from tests.launcher.conftest import build_tiny_shards

    count = int(sys.argv[1]) if len(sys.argv) > 1 else DRAWS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = build_tiny_shards(folder)
        accidents = draw(count, seed=15)
        seconds = drill(shards, accidents, folder)
    lines = ["| part | accidents | median | worst |", "|---|---|---|---|"]
    parts = [*dict.fromkeys(place.part for place in PLACES), "all"]
    for part in parts:
        of_part = [s for s, a in zip(seconds, accidents, strict=True) if part in (a.place.part, "all")]
        if of_part:
            lines.append(f"| {part} | {len(of_part)} | {statistics.median(of_part):.1f} s | {max(of_part):.1f} s |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
