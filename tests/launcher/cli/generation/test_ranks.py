"""``generate`` over ranks: what one process writes, written once, whoever continues which prompt."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from longctx.errors import LongCtxError
from parallel.mesh import Mesh
from tests.helpers import run_distributed
from tests.launcher.cli.calls import call, deepspeed, hear_interrupts

SCREEN = 25
CHOOSING = {
    "greedy": [],
    "drawn": ["--temperature=1.3", "--top-k=40", "--top-p=0.95", "--seed=3"],
    "beams": ["--beams=3", "--length-penalty=0.5"],
    "penalties": ["--repetition-penalty=1.4", "--presence-penalty=0.5", "--frequency-penalty=0.25"],
    "stops": ["--stop=e", "--stop=\n", "--temperature=2", "--seed=1"],
}
PROMPTS = ("def main", "x", "import os\n\n\nclass Reader:\n    def read(self, path):\n", "  ä 🙂\n", "return")
Written = tuple[list[str], str]
"""Arguments, and what one process writes for them."""


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [json.dumps({"prompt": prompt, "name": number}) for number, prompt in enumerate(PROMPTS)]
    path.write_text("\n".join(lines) + "\n")
    return path


def arguments(run: Path, *more: object) -> list[str]:
    return [f"--checkpoint={run}", "--max-new-tokens=8", "--chunk-tokens=7", *map(str, more)]


def written(capsys, words: list[str]) -> Written:
    """With what one process writes."""
    code, out, err = call(capsys, "generate", *words)
    assert (code, bool(out)) == (0, True), err
    return words, out


def test_two_ranks_write_what_one_process_does(capsys, run, prompts_file):
    """One prompt and many by two ranks that share each, and many by two that have prompts each."""
    many, one = f"--prompts-file={prompts_file}", f"--prompt={PROMPTS[2]}"
    cases = [
        written(capsys, arguments(run, one, *CHOOSING["stops"])),
        written(capsys, arguments(run, many, *CHOOSING["drawn"])),
    ]
    for how in ("penalties", "drawn", "beams"):
        words, out = written(capsys, arguments(run, many, *CHOOSING[how]))
        cases.append(([*words, "--parallel.context=1"], out))
    run_distributed(check_all, 2, cases, timeout=100.0)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_way_to_choose_on_every_mesh(capsys, run, prompts_file, world_size):
    """All ranks a prompt, groups of some, one rank a prompt; experts over the ranks of a prompt."""
    cases: list[Written] = []
    for how in CHOOSING.values():
        cases.append(written(capsys, arguments(run, f"--prompt={PROMPTS[2]}", *how)))
        words, out = written(capsys, arguments(run, f"--prompts-file={prompts_file}", *how))
        for mesh in (
            ["--parallel.context=1"],
            ["--parallel.context=2"],
            ["--parallel.context=2", "--parallel.expert=2"],
            [],
        ):
            cases.append(([*words, *mesh], out))
    run_distributed(check_all, world_size, cases, timeout=180.0)


def check_all(cases: list[Written]) -> None:
    for words, wanted in cases:
        code, out, err = type_in(words)
        assert code == 0, err
        if dist.get_rank() == 0:
            assert out == wanted, words
        else:
            assert (out, err) == ("", ""), f"rank 0 speaks for all: {out!r} {err!r}"


def type_in(words: list[str]) -> tuple[int, str, str]:
    """Exit code and output of this rank, as the script has them."""
    from launcher.cli.cli_commands import main_over_ranks
    from launcher.cluster import exit as ending

    # Another rank leaves the report to rank 0, and there is no launcher here that ends them all.
    ending.HEAD_START_SECONDS = 0.0
    # As a process group that we start has it.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = ending.run_to_exit_code(lambda: main_over_ranks("generate", words))
    return code, out.getvalue(), err.getvalue()


def test_bad_input_is_one_screen_and_the_same_code_on_all_ranks(run, prompts_file, tmp_path):
    """Before the model is allocated."""
    (tmp_path / "empty").write_text("")
    (tmp_path / "gap").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    many, file = f"--prompts-file={prompts_file}", "--prompts-file="
    cases = [
        ([f"--checkpoint={tmp_path}/none", "--max-new-tokens=2", "--prompt=x"], "none does not exist"),
        (arguments(run, "--prompt=x", "--max-new-tokens=4096"), "--beyond-positions"),
        (arguments(run, many, "--max-new-tokens=4090"), "line 3"),
        (arguments(run, "--prompt=x", "--parallel.context=3"), "parallel.context=3 does not divide the 2 ranks"),
        (arguments(run, f"{file}{tmp_path}/gap"), "line 2 is empty"),
        (arguments(run, many, f"--output={prompts_file}"), "already exists"),
    ]
    run_distributed(check_refusals, 2, cases, timeout=60.0)


def check_refusals(cases: list[tuple[list[str], str]]) -> None:
    import launcher.generation.generation_run as module

    module.build_decoder = lambda *_: pytest.fail("the model was loaded")
    for words, said in cases:
        code, out, err = type_in(words)
        assert (code, out) == (2, ""), (words, err)
        if dist.get_rank() == 0:
            assert said in err, err
            assert "Traceback" not in err
            assert len(err.splitlines()) < SCREEN
        else:
            assert err == ""


# --- shares ---------------------------------------------------------------------------------------------------------


def mesh(*, data: int = 1) -> Mesh:
    return Mesh(rank=0, world_size=data, context=1)


def test_prompts_come_in_their_order_as_soon_as_they_can():
    from launcher.generation.generation_run import Shares

    shares = Shares(mesh(), [1] * 4)
    taken: list[int] = []

    def continued() -> Iterator[tuple[int, list[int]]]:
        """Looks at what was taken before the next one ends."""
        for index, before in ((2, []), (0, []), (1, [0]), (3, [0, 1, 2])):
            assert taken == before
            yield index, [index]

    for index, ids in shares.in_order(continued()):
        assert ids == [index]
        taken.append(index)
    assert taken == [0, 1, 2, 3]


def test_groups_that_end_in_any_order_and_one_that_fails(tmp_path):
    run_distributed(take_turns, 3, timeout=60.0)


def take_turns() -> None:
    from launcher.generation.generation_run import Shares

    rank = dist.get_rank()
    groups = Mesh.build(context=1)
    for slow in range(3):
        shares = Shares(groups, [5, 1, 1, 9, 2, 2, 4])
        assert shares.mine, "each has something"
        found = list(shares.in_order(wait_and_yield(shares.mine, seconds=0.05 * (rank == slow))))
        assert found == ([(index, [index, 7]) for index in range(7)] if rank == 0 else [])
    # What the others have is written all the same, then all ranks raise.
    shares, seen = Shares(groups, [1] * 6), []
    with pytest.raises(LongCtxError, match="broken"):
        seen.extend(shares.in_order(fail_after_one(shares.mine, fails=rank == 1)))
    if rank == 0:
        assert len(seen) == 5
    else:
        assert seen == []


def wait_and_yield(indices: list[int], *, seconds: float) -> Iterator[tuple[int, list[int]]]:
    for index in reversed(indices):
        time.sleep(seconds)
        yield index, [index, 7]


def fail_after_one(indices: list[int], *, fails: bool) -> Iterator[tuple[int, list[int]]]:
    for number, index in enumerate(indices):
        if number and fails:
            raise LongCtxError("broken")
        yield index, [index]


# --- as a user types it ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_text_streams_from_two_ranks_and_ctrl_c_ends_them(run):
    """The terminal sends Ctrl-C to every process that runs in its foreground."""
    words = [*arguments(run, "--prompt=def main", "--max-new-tokens=4000", "--temperature=1.5"), "--seed=1"]
    process = start_deepspeed(words)
    assert process.stdout is not None
    seen = b""
    # After what the launcher says of each rank.
    started = b"spawned with command"
    while seen.count(started) < 2 or len(seen.rpartition(started)[2].partition(b"\n")[2]) < 50:
        seen += os.read(process.stdout.fileno(), 4096)
        assert process.poll() is None, seen
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finished(process, timeout=20)
    assert code != 0
    assert "4,000 tokens" not in err, "it came before the end"
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def start_deepspeed(words: list[str]) -> subprocess.Popen[bytes]:
    """The command that a user types, on two ranks of this machine, in a terminal of its own."""
    command, options = deepspeed("launcher/generate.py", *words)
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=hear_interrupts,
        **options,
    )  # fmt: skip


def finished(process: subprocess.Popen[bytes], timeout: float = 90.0) -> tuple[int, str, str]:
    """Exit code and what was written."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")
