"""Hostfiles: what is read, what is refused, and what the launcher itself would have let through."""

from __future__ import annotations

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
        ("-oProxyCommand=x slots=1", "starts with no dash"),
        ("$(id) slots=1", "letters, digits, dots and dashes"),
        ("a;id slots=1", "letters, digits, dots and dashes"),
        ("a b slots=1", "HOST slots=N"),
        ("localhost", "HOST slots=N"),
        ("localhost slots=two", "HOST slots=N"),
        ("localhost slots=-1", "HOST slots=N"),
        ("localhost slots=2 slots=3", "HOST slots=N"),
        ("localhost slots=0", "between 1 and"),
        ("localhost slots=99999", "between 1 and"),
        ("localhost slots=9999999999", "HOST slots=N"),
        ("nöde slots=1", "letters, digits"),
    ],
)
def test_a_line_that_is_no_host_is_shown_with_its_number(tmp_path, text, said):
    with pytest.raises(ClusterError) as caught:
        read_hostfile(written(tmp_path, f"good slots=1\n{text}\n"))
    assert f":2: {text!r}" in str(caught.value)
    assert said in str(caught.value)


def test_a_host_on_two_lines(tmp_path):
    with pytest.raises(ClusterError, match=r":2: host 'a' stands there twice"):
        read_hostfile(written(tmp_path, "a slots=1\na slots=2\n"))


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_no_host_at_all(tmp_path, text):
    with pytest.raises(ClusterError, match="names no host"):
        read_hostfile(written(tmp_path, text))


def test_not_text_and_not_a_file(tmp_path):
    with pytest.raises(ClusterError, match="cannot be read"):
        read_hostfile(written(tmp_path, b"\xff\xfe\x00"))
    with pytest.raises(ClusterError, match="cannot be read"):
        read_hostfile(tmp_path)


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
