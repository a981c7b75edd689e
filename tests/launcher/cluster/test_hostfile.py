"""Hostfiles: what is read, what is refused, and what the launcher itself would have let through."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from launcher.cluster.hostfile import check_hostfile, read_hostfile
from longctx.errors import ClusterError


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "hostfile"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_hosts_comments_blank_lines_and_windows_line_ends(tmp_path):
    path = written(tmp_path, "# the cluster\n\nnode-01 slots=8 # a comment\r\n  10.0.0.2   slots=4\r\n")
    assert read_hostfile(path) == {"node-01": 8, "10.0.0.2": 4}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-oProxyCommand=x slots=1", "a letter or digit at both ends"),
        ("$(id) slots=1", "a letter or digit at both ends"),
        ("a;id slots=1", "a letter or digit at both ends"),
        ("localhost slots=two", "HOST slots=N"),
        ("localhost slots=-1", "HOST slots=N"),
        ("localhost slots=2 slots=3", "HOST slots=N"),
        ("localhost slots=0", "between 1 and"),
        ("localhost slots=99999", "between 1 and"),
        ("nöde slots=1", "letters, digits"),
        ("localhost slots=٣", "HOST slots=N"),
        ("localhost slots=2;id", "HOST slots=N"),
        ("user@host slots=2", "letters, digits"),
        ("../a slots=2", "letters, digits"),
        ("a- slots=2", "letters, digits"),
    ],
)
def test_a_line_that_is_no_host_is_shown_with_its_number(tmp_path, text, said):
    with pytest.raises(ClusterError) as caught:
        read_hostfile(written(tmp_path, f"good slots=1\n{text}\n"))
    assert f":2: {text!r}" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=1\na slots=2\n", ":2: host 'a' is listed twice"),
        ("", "lists no host"),
        ("# nothing\n\n", "lists no host"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_file_that_names_no_hosts(tmp_path, text, said):
    with pytest.raises(ClusterError, match=said):
        read_hostfile(written(tmp_path, text))
    with pytest.raises(ClusterError, match="cannot be read"):
        read_hostfile(tmp_path)


@pytest.mark.parametrize("text", ["\ufeffa slots=1\n", "\ufeff# comment\na slots=1\n"])
def test_a_byte_order_mark_is_named(tmp_path, text):
    """deepspeed's own reader makes it a part of the first host's name."""
    from deepspeed.launcher.runner import _parse_hostfile

    with pytest.raises(ClusterError, match="byte order mark"):
        read_hostfile(written(tmp_path, text))
    with contextlib.suppress(ValueError):
        assert "a" not in _parse_hostfile(text.splitlines(keepends=True)[:1])


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_as_deepspeed_reads_them(tmp_path, end):
    from deepspeed.launcher.runner import fetch_hostfile

    path = written(tmp_path, end.join(["# nodes", "a slots=2", "", "b slots=3", ""]))
    assert read_hostfile(path) == dict(fetch_hostfile(str(path))) == {"a": 2, "b": 3}


@pytest.mark.parametrize("character", ["\0", "\x0b", "\x0c", "\x1b", "\x1c", "\x85", "\u2028"])
def test_characters_that_split_lines_for_some_readers(tmp_path, character):
    with pytest.raises(ClusterError, match=r":1: .* contains the character"):
        read_hostfile(written(tmp_path, f"a slots=1{character}b slots=2\n"))


def test_what_is_no_small_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ClusterError, match="not a plain file"):
        read_hostfile(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10 * 2**30)
    with pytest.raises(ClusterError, match="the limit is"):
        read_hostfile(tmp_path / "large")
    with pytest.raises(ClusterError) as caught:
        read_hostfile(written(tmp_path, "x" * 1_000_000))
    assert len(str(caught.value)) < 600


def test_the_one_that_deepspeed_takes_when_it_is_given_none(tmp_path, monkeypatch):
    path = written(tmp_path, "a slots=2\n$(id) slots=2\n")
    monkeypatch.setattr("launcher.cluster.hostfile.DEFAULT_HOSTFILE", path)
    from deepspeed.launcher.runner import DLTS_HOSTFILE

    assert DLTS_HOSTFILE == "/job/hostfile"
    with pytest.raises(ClusterError, match=r":2: '\$\(id\) slots=2'"):
        check_hostfile("launcher", 2, ["deepspeed", "train.py"])
    check_hostfile("launcher", 2, [])  # no deepspeed started this
    check_hostfile("none", 2, ["deepspeed", "train.py"])


def test_a_missing_one_is_found_in_the_launchers_command_line(tmp_path):
    missing = str(tmp_path / "missing")
    for flag in (["--hostfile", missing], ["-H", missing], [f"--hostfile={missing}"]):
        with pytest.raises(ClusterError, match="does not exist"):
            check_hostfile("launcher", 1, ["python", "deepspeed", *flag])


def test_slots_are_held_against_the_ranks_that_came_up(tmp_path):
    path = written(tmp_path, "a slots=2\nb slots=2\n")
    command = ["python", "deepspeed", "--hostfile", str(path)]
    check_hostfile("launcher", 4, command)
    check_hostfile(str(path), 4, [])
    with pytest.raises(ClusterError, match=r"1 ranks were started, but .* has 4 slots \(a slots=2, b slots=2\)"):
        check_hostfile("launcher", 1, command)
    with pytest.raises(ClusterError, match="4 slots"):
        check_hostfile(str(path), 2, [])


def test_hosts_that_were_filtered_and_opting_out(tmp_path):
    path = written(tmp_path, "a slots=2\nb slots=2\n")
    check_hostfile("launcher", 2, ["deepspeed", "--hostfile", str(path), "--include", "a"])
    check_hostfile("launcher", 2, ["deepspeed", "--hostfile", str(path), "--exclude=b"])
    check_hostfile("none", 1, ["deepspeed", "--hostfile", "missing"])
    check_hostfile("launcher", 1, [])
