"""The watch over all ranks: what ends one ends all, with one message, also where the others can hear no signal."""

from __future__ import annotations

import json
import signal
import socket
import time
from contextlib import ExitStack

import pytest

from parallel.runtime.watch.failure import Failure, Lines, line_of
from parallel.runtime.watch.hub import Hub
from parallel.runtime.watch.options import WatchOptions
from parallel.runtime.watch.overseer import Overseer
from parallel.runtime.watch.processes import RankProcess
from tests.parallel.runtime.watched import STARTED, Ended, Ranks

pytestmark = pytest.mark.timeout(400)

RANKS = 3
OTHERS_BLOCK = "block()"


@pytest.fixture(autouse=True)
def _leave_none_behind():
    yield
    while STARTED:
        STARTED.pop().kill()


def acts_of(rank: int, act: str, others: str = OTHERS_BLOCK) -> list[str]:
    """One rank acts, and the others do something else."""
    acts = [others] * RANKS
    acts[rank] = act
    return acts


ERRORS = {
    "MemoryError": ("raise MemoryError('too much')", 1, "MemoryError: too much"),
    "TypeError": ("raise TypeError('a bug')", 1, "this is a fault of longctx"),
    "full": ("raise OSError(28, 'No space left on device')", 1, "could not write"),
    "DataError": ("raise DataError('a damaged shard')", 1, "DataError: a damaged shard"),
    "ConfigError": ("raise ConfigError('x=1')", 2, "ConfigError: x=1"),
    "SystemExit": ("sys.exit(3)", 3, ""),
    "interrupt": ("signal.raise_signal(signal.SIGINT)", 130, "It was interrupted."),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", 1, "died without a message"),
    "left": ("os._exit(7)", 1, "died without a message"),
}


def check_error(ended: Ended, rank: int, code: int, words: str) -> None:
    dead = {"killed": -9, "left": 7}
    assert all(c == code for r, c in enumerate(ended.codes) if r != rank), ended
    assert ended.codes[rank] in (code, *dead.values()), ended
    text = "".join(ended.said)
    if words:
        assert text.count(words) == 1, ended
        assert text.count("Error") <= 3, ended
    assert text.count("Traceback") == int("fault of longctx" in text), ended
    assert len(text.splitlines()) < 25, ended


def test_rank_0_is_the_last_to_hear_that_all_have_met():
    """It may die at once, and what tells the others with it: two of them would speak for it."""
    told: list[int] = []
    overseer = Overseer(
        WatchOptions(rank=0, world_size=4, timeout=60.0),
        tell=lambda rank, _: told.append(rank),
        fail=lambda failure: pytest.fail(failure.text),
    )
    for rank in (2, 0, 3, 1):
        assert not overseer.arrive(RankProcess.own(rank), "")
    assert sorted(told) == [0, 1, 2, 3]
    assert told[-1] == 0


# Rank 0 is the one that all others are connected to.
@pytest.mark.parametrize(
    ("rank", "names"),
    [
        (0, ("TypeError", "ConfigError", "killed")),
        pytest.param(1, tuple(ERRORS), marks=pytest.mark.slow),
        pytest.param(0, tuple(ERRORS), marks=pytest.mark.slow),
    ],
)
def test_whatever_ends_one_rank_ends_all_with_its_message(rank, names, tmp_path):
    """The others are in a call that never returns: no exception and no signal reaches them."""
    runs = {name: Ranks(tmp_path / name, acts_of(rank, ERRORS[name][0])) for name in names}
    for name, ranks in runs.items():
        _, code, words = ERRORS[name]
        check_error(ranks.wait(), rank, code, words)


def test_the_dead_are_named_once_and_the_last_act_is_done(tmp_path):
    ended = Ranks(tmp_path, acts_of(2, "os.kill(os.getpid(), signal.SIGKILL)")).wait()
    assert f"ClusterError: rank 2 on {socket.gethostname()} died without a message." in ended.said[0]
    assert "A remark." in ended.said[0]
    assert ended.said[1:] == ["", ""]
    assert sorted(path.name for path in tmp_path.glob("last_act_*")) == ["last_act_0", "last_act_1"]


def test_a_main_thread_that_ends_before_the_watch_has_spoken_speaks_in_its_place(tmp_path):
    watch_is_late = "watching().line._on_failure = lambda failure: None; meet('late'); "
    lost = watch_is_late + "raise RuntimeError('Connection closed by peer')"
    ended = Ranks(tmp_path, [lost, "meet('late'); os.kill(os.getpid(), signal.SIGKILL)"]).wait()
    assert (ended.codes[0], ended.said[0].count("rank 1 on")) == (1, 1), ended


def test_what_all_ranks_meet_is_said_by_rank_0_however_late_it_comes(tmp_path):
    acts = ["time.sleep(0.5 * (RANK == 0)); raise ConfigError(f'x=1 ({RANK})')"] * RANKS
    ended = Ranks(tmp_path, acts).wait()
    assert (ended.codes, ended.said) == ([2] * RANKS, ["\nConfigError: x=1 (0)\n\n", "", ""])


def test_rank_0_does_not_say_again_what_its_watch_has_said(tmp_path):
    late = "watching().line.wait(60.0); watching().may_report(); watching().line.reported()\n"
    late += "raise RuntimeError('Connection closed by peer')"
    ended = Ranks(tmp_path, acts_of(0, late, others="raise ConfigError('x=1')")).wait()
    assert (ended.codes, ended.said) == ([2] * RANKS, [""] * RANKS)


def test_an_error_of_all_ranks_that_was_not_foreseen_is_told_by_one(tmp_path):
    ended = Ranks(tmp_path, ["raise KeyError('a bug')"] * RANKS).wait()
    assert ended.codes == [1] * RANKS
    assert "".join(ended.said).count("Traceback") == 1


def test_a_rank_that_lost_another_one_leaves_the_word_to_it(tmp_path):
    lost = "time.sleep(0.3); raise {}"
    late = "time.sleep(0.6); raise ValueError('the cause')"
    acts = [
        lost.format("RuntimeError('gloo: Connection closed by peer [127.0.0.1]')"),
        late,
        "try:\n    raise RuntimeError('Connection reset by peer')\n"
        "except RuntimeError as error:\n    raise ClusterError('sending keys') from error",
    ]
    ended = Ranks(tmp_path, acts).wait()
    assert ended.codes == [1, 1, 1]
    assert "ValueError: the cause" in ended.said[1]
    assert (ended.said[0], ended.said[2]) == ("", "")


def test_a_main_thread_that_can_be_stopped_cleans_up(tmp_path):
    cleaning = "\ntry:\n    meet('trying')\n    while True: time.sleep(0.01)\nfinally:\n    print('cleaned up')"
    ended = Ranks(tmp_path, acts_of(1, "meet('trying'); raise TypeError('a bug')", others=cleaning)).wait()
    assert ended.codes == [1] * RANKS
    assert [ended.said[0], ended.said[2]] == ["cleaned up\n"] * 2


def test_clean_up_that_waits_for_other_ranks_does_not_keep_a_rank(tmp_path):
    waiting = "\ntry:\n    meet('trying')\n    while True: time.sleep(0.01)\nfinally:\n    block()"
    ended = Ranks(tmp_path, acts_of(1, "meet('trying'); raise TypeError('a bug')", others=waiting)).wait()
    assert ended.codes == [1] * RANKS
    assert ended.said[0] == ""


def interrupt(ranks: Ranks) -> None:
    for process in ranks.processes:
        process.send_signal(signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_reaches_ranks_that_hear_no_signal(tmp_path):
    once, twice = (Ranks(tmp_path / name, [OTHERS_BLOCK] * RANKS) for name in ("once", "twice"))
    for ranks in (once, twice):
        ranks.wait_until_met()
        interrupt(ranks)
    started = time.monotonic()
    time.sleep(0.2)
    interrupt(twice)
    was_quick = time.monotonic() - started < 1.0
    ended = twice.wait()
    assert ended.codes == [130] * RANKS
    if was_quick:
        assert ended.said == [""] * RANKS, "the second one ends at once"
    ended = once.wait()
    assert ended.codes == [130] * RANKS
    assert ended.said[0].startswith("\nIt was interrupted.\n")
    assert "interrupted" not in "".join(ended.said[1:])


@pytest.mark.slow
def test_a_first_signal_may_be_the_main_threads_to_see_to(tmp_path):
    """It does so once its step is over; a second Ctrl-C it cannot keep."""
    defers = "watching().signals.deferred = True; meet('defers'); "
    ranks = Ranks(tmp_path, [defers + OTHERS_BLOCK] * RANKS)
    ranks.wait_until_met()
    while len(list(tmp_path.glob("defers_*"))) < RANKS:
        time.sleep(0.01)
    interrupt(ranks)
    time.sleep(2.5)  # longer than its time of grace
    assert [process.poll() for process in ranks.processes] == [None] * RANKS
    interrupt(ranks)
    ended = ranks.wait()
    assert (ended.codes, ended.said) == ([130] * RANKS, [""] * RANKS)


def test_a_death_after_ctrl_c_is_an_interruption(tmp_path):
    """A second Ctrl-C ends each rank without a word, and one of them is the first."""
    ranks = Ranks(tmp_path, [OTHERS_BLOCK] * RANKS)
    ranks.wait_until_met()
    interrupt(ranks)
    time.sleep(1.0)  # all have heard it, and none ends before its time of grace
    ranks.processes[1].kill()
    ended = ranks.wait()
    assert (ended.codes[0], ended.codes[2]) == (130, 130)
    assert "died" not in "".join(ended.said)


def test_ranks_that_are_done_leave_in_any_order(tmp_path):
    for order in ("RANK", f"{RANKS} - RANK"):
        ended = Ranks(tmp_path / order, [f"time.sleep(0.3 * ({order}))"] * RANKS).wait()
        assert (ended.codes, ended.said) == ([0] * RANKS, [""] * RANKS)


def test_strangers_are_not_listened_to(tmp_path):
    ranks = Ranks(tmp_path, ["time.sleep(1.5)"] * RANKS)
    ranks.wait_until_met()
    port, token = json.loads((tmp_path / "longctx_watch").read_text())
    failed = line_of("failed", **Failure(rank=1, code=1, text="no").to_values())
    greeting = line_of("hello", token=f"{token}x", process=vars(RankProcess.own(1)), version="")
    for data in (b"GET / HTTP/1.1\r\n\r\n", failed, greeting + failed, b"[1, 2]\n", b"\xff\xfe\n", b"{}\n", b""):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(data)
    ended = ranks.wait()
    assert (ended.codes, ended.said) == ([0] * RANKS, [""] * RANKS)


def test_hundreds_of_ranks_hear_at_once():
    ranks = 300
    hub = Hub(WatchOptions(rank=0, world_size=ranks, timeout=60.0, meet=60.0))
    failed = line_of("failed", **Failure(rank=7, code=1, text="x" * 8_000).to_values())
    with ExitStack() as stack:
        lines = [stack.enter_context(socket.create_connection(("127.0.0.1", hub.port))) for _ in range(ranks)]
        for rank, line in enumerate(lines):
            process = {**vars(RankProcess.own(rank)), "machine": f"machine {rank}"}
            line.sendall(line_of("hello", token=hub.token, process=process, version=""))
        lines[7].sendall(failed)
        for line in lines:
            received = b""
            while failed not in received:
                received += line.recv(65_536)
    hub.stop()


def test_messages_arrive_whole_however_they_are_cut():
    sent = [Failure(rank=rank, code=1, text=f"é\n{rank}").to_values() for rank in range(3)]
    data = b"".join(line_of("failed", **values) for values in sent)
    for size in (1, 7, len(data)):
        lines, found = Lines(), []
        for start in range(0, len(data), size):
            found += lines.add(data[start : start + size])
        assert [{k: v for k, v in message.items() if k != "kind"} for message in found] == sent


def test_a_long_message_loses_its_middle():
    text = Failure(rank=0, code=1, text="a" * 50_000 + "b" * 50_000).to_values()["text"]
    assert len(text) < 20_000
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    with pytest.raises(ValueError, match="without end"):
        Lines().add(b"x" * 200_000)
