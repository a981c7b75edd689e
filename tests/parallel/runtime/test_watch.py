"""The watch over all ranks: what ends one ends all, with one message, also where the others can hear no signal."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import pytest

from parallel.runtime.watch.failure import Failure, MessageStream, encode_message
from parallel.runtime.watch.key import KEY_VARIABLE, WatchKey, read_key
from parallel.runtime.watch.processes import RankProcess
from parallel.runtime.watch.rank_monitor import RankMonitor
from parallel.runtime.watch.watch_coordinator import Coordinator
from parallel.runtime.watch.watch_options import WatchOptions
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
    "TypeError": ("raise TypeError('a bug')", 1, "this is a bug in longctx"),
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
    assert text.count("Traceback") == int("this is a bug in longctx" in text), ended
    assert len(text.splitlines()) < 25, ended


def test_rank_0_is_the_last_to_hear_that_all_have_met():
    """It may die at once, and what tells the others with it: two of them would speak for it."""
    told: list[int] = []
    overseer = RankMonitor(
        WatchOptions(rank=0, world_size=4, timeout=60.0),
        send=lambda rank, _: told.append(rank),
        fail=lambda failure: pytest.fail(failure.text),
    )
    for rank in (2, 0, 3, 1):
        assert not overseer.arrive(RankProcess.own(rank))
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
    watch_is_late = "active_watch().line._on_failure = lambda failure: None; meet('late'); "
    lost = watch_is_late + "raise RuntimeError('Connection closed by peer')"
    ended = Ranks(tmp_path, [lost, "meet('late'); os.kill(os.getpid(), signal.SIGKILL)"]).wait()
    assert (ended.codes[0], ended.said[0].count("rank 1 on")) == (1, 1), ended


def test_what_all_ranks_meet_is_said_by_rank_0_however_late_it_comes(tmp_path):
    acts = ["time.sleep(0.5 * (RANK == 0)); raise ConfigError(f'x=1 ({RANK})')"] * RANKS
    ended = Ranks(tmp_path, acts).wait()
    assert (ended.codes, ended.said) == ([2] * RANKS, ["\nConfigError: x=1 (0)\n\n", "", ""])


def test_rank_0_does_not_say_again_what_its_watch_has_said(tmp_path):
    late = "active_watch().line.wait(60.0); active_watch().may_report(); active_watch().line.reported()\n"
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
    defers = "active_watch().signals.deferred = True; meet('defers'); "
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


KEY = WatchKey("k" * 32)
FAILED = encode_message("failed", **Failure(rank=1, code=1, text="no").to_values())


def hello(of_rank: int, **values: Any) -> bytes:
    """What a rank says after its key."""
    process = {**vars(RankProcess.own(of_rank)), "machine": f"machine {of_rank}", **values}
    return encode_message("hello", process=process)


def open_hub(ranks: int = 2, key: WatchKey = KEY) -> Coordinator:
    return Coordinator(
        WatchOptions(rank=0, world_size=ranks, timeout=60.0, rendezvous_seconds=60.0), host="127.0.0.1", key=key
    )


@contextmanager
def connected(hub: Coordinator, *sent: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(hub.address, timeout=20.0) as connection:
        for data in sent:
            connection.sendall(data)
        yield connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the hub closes it, within its time-out."""
    try:
        return connection.recv(65_536) == b""
    except ConnectionError:
        return True


def heard_until(connection: socket.socket, wanted: bytes) -> None:
    received = b""
    while wanted not in received:
        data = connection.recv(65_536)
        assert data, received
        received += data


RANK_1 = KEY.value.encode() + b"\n"
STRANGE = {
    "web": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "brackets": b"[" * 60_000 + b"\n",
    "another key": b"l" * 32 + b"\n" + hello(1),
    "a message in place of the key": hello(1) + FAILED,
    "no rank": RANK_1 + FAILED,
    "brackets behind the key": RANK_1 + b"[" * 60_000 + b"]" * 60_000 + b"\n",
    "rank Infinity": RANK_1 + hello(1, rank=float("inf")),
    "rank NaN": RANK_1 + hello(1, rank=float("nan")),
    "a rank of many digits": RANK_1 + b'{"kind": "hello", "process": {"rank": ' + b"9" * 5_000 + b"}}\n",
    "no object": RANK_1 + b"[1, 2]\n",
    "no JSON": RANK_1 + b"\xff\xfe\n",
    "no kind": RANK_1 + b"{}\n",
    "zeros": bytes(70_000),
}


@pytest.mark.parametrize("sent", STRANGE.values(), ids=STRANGE)
def test_what_strangers_say_is_dropped_and_the_ranks_meet(sent):
    hub = open_hub()
    with connected(hub, RANK_1, hello(0)) as first:
        with connected(hub, sent) as stranger:
            assert is_closed(stranger)
        with connected(hub, RANK_1, hello(1)) as second:
            for line in (first, second):
                heard_until(line, b'"kind": "met"')
    hub.stop()


def test_any_bytes_are_dropped_and_the_ranks_meet():
    hub, random = open_hub(), Random(0)
    with connected(hub, RANK_1, hello(0)) as first:
        for number in range(400):
            data = random.randbytes(random.randint(1, 200))
            # Every second one knows the key, as no stranger does.
            if number % 2:
                data = RANK_1 + data
            with connected(hub, data + b"\n" * 40):
                pass
        with connected(hub, RANK_1, hello(1)):
            heard_until(first, b'"kind": "met"')
    hub.stop()


def test_a_part_of_the_key_is_no_hint():
    """It is compared once it is whole: a wrong part looks like a right one."""
    hub = open_hub()
    for part in (KEY.value[:7].encode(), b"x" * 7):
        with connected(hub, part) as stranger:
            stranger.settimeout(0.3)
            with pytest.raises(TimeoutError):
                stranger.recv(1)
    hub.stop()


def test_a_bounded_number_may_wait_and_none_once_all_have_come():
    hub, ranks = open_hub(), ExitStack()
    with ExitStack() as strangers:
        idle = [strangers.enter_context(connected(hub)) for _ in range(1_500)]
        first = ranks.enter_context(connected(hub, RANK_1, hello(0)))
        # The oldest went as the newest came.
        assert is_closed(idle[0])
        assert len(hub._acceptor._clients) < 100
        ranks.enter_context(connected(hub, RANK_1, hello(1)))
        heard_until(first, b'"kind": "met"')
        assert is_closed(idle[-1])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(hub.address)
    ranks.close()
    hub.stop()


def test_a_hub_that_fails_ends_the_run_by_its_own_name(monkeypatch):
    def look(self) -> None:
        raise OverflowError("a bug")

    hub = open_hub()
    with connected(hub, RANK_1, hello(0)) as first, connected(hub, RANK_1, hello(1)) as second:
        heard_until(first, b'"kind": "met"')
        monkeypatch.setattr(RankMonitor, "check", look)
        for line in (first, second):
            heard_until(line, b"the watch coordinator failed: OverflowError('a bug')")


def test_the_store_never_has_the_key_and_the_file_goes(tmp_path):
    environment = {"LOCAL_SIZE": str(RANKS), "TMPDIR": str(tmp_path)}
    ended = Ranks(tmp_path / "store", ["meet('looked')"] * RANKS, environment).wait()
    assert (ended.codes, ended.said) == ([0] * RANKS, [""] * RANKS)
    assert not list(tmp_path.glob("watch-*"))
    assert (tmp_path / "store" / "longctx_watch").read_text() == "{}"


@pytest.mark.parametrize("handed", [None, "a" * 32])
def test_ranks_without_a_folder_in_common_ask_unless_they_were_handed_the_key(handed, tmp_path):
    environment = {"HOME": "/dev/null/home", "LOCAL_SIZE": "1"}
    if handed:
        environment[KEY_VARIABLE] = handed
    ended = Ranks(tmp_path, ["meet('looked')"] * RANKS, environment).wait()
    assert (ended.codes, ended.said) == ([0] * RANKS, [""] * RANKS)
    assert (tmp_path / "longctx_watch_asked").exists() == (handed is None)
    assert not (tmp_path / "longctx_watch_told").exists()


def test_a_file_of_the_key_is_private_and_holds_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr("parallel.runtime.watch.key._POLL_SECONDS", 0.0)
    file = tmp_path / "key"
    file.write_text("k" * 32)
    file.chmod(0o600)
    (tmp_path / "link").symlink_to(file)
    assert read_key(str(file)) == "k" * 32
    assert read_key(str(tmp_path / "link")) is None
    file.chmod(0o644)
    assert read_key(str(file)) is None
    # A stranger may name any file of this user's: nothing but a key leaves it.
    file.write_text("-----BEGIN OPENSSH PRIVATE KEY-----")
    file.chmod(0o600)
    for path in (file, tmp_path, tmp_path / "none", "", "/dev/zero", "\0"):
        assert read_key(str(path)) is None


def test_hundreds_of_ranks_hear_at_once():
    ranks = 300
    hub = open_hub(ranks)
    failed = encode_message("failed", **Failure(rank=7, code=1, text="x" * 8_000).to_values())
    with ExitStack() as stack:
        lines = [stack.enter_context(connected(hub, RANK_1, hello(rank))) for rank in range(ranks)]
        lines[7].sendall(failed)
        for line in lines:
            heard_until(line, failed)
    hub.stop()


def test_messages_arrive_whole_however_they_are_cut():
    sent = [Failure(rank=rank, code=1, text=f"é\n{rank}").to_values() for rank in range(3)]
    data = b"".join(encode_message("failed", **values) for values in sent)
    for size in (1, 7, len(data)):
        lines, found = MessageStream(), []
        for start in range(0, len(data), size):
            found += lines.add(data[start : start + size])
        assert [{k: v for k, v in message.items() if k != "kind"} for message in found] == sent


def test_a_long_message_loses_its_middle():
    text = Failure(rank=0, code=1, text="a" * 50_000 + "b" * 50_000).to_values()["text"]
    assert len(text) < 20_000
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    with pytest.raises(ValueError, match="unterminated"):
        MessageStream().add(b"x" * 200_000)
