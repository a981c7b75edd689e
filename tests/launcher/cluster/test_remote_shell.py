"""What a shell of another machine would run is refused before anything is started, by every starter of ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.cluster.remote_shell import check_deepspeed_line
from longctx.errors import ClusterError, ConfigError
from tests.launcher.cli.calls import call

SCRIPT = "launcher/pretrain.py"
TWO = "node-01 slots=2\nnode-02 slots=2\n"
HOSTS = ("-oProxyCommand=touch${IFS}$RAN", "$(touch $RAN)", "node;touch $RAN", "node'", "@node")
"""Those of each kind; the rest is in ``test_hostfile.py``."""
ASSIGNMENTS = (
    "X=$(touch $RAN)",
    "X=`touch $RAN`",
    "X=a; touch $RAN",
    "X=a & touch $RAN",
    "X=a | touch $RAN",
    "X='a",
    'X="a',
    'X="$(touch $RAN)"',
    "X='a'$(touch $RAN)",
    "X=a\\",
    "X=${Y:-$(touch $RAN)}",
    "X=<(touch $RAN)",
    "X=a b",
    "X$(touch $RAN)=1",
    "export X=1",
    "# X=1",
    "",
    "X",
    "X=%n",
    "X=a > /tmp/x",
    "X=*",
    "X={a,b}",
    "X=~root",
    "X=a#b",
    "X=!!",
)
ARGUMENTS = (
    "$(touch $RAN)",
    "`touch $RAN`",
    "--run.output_dir=$(touch $RAN)",
    "a b $(touch $RAN)",
    "a;touch",
    "a && touch",
    "a'b",
    'a"b',
    "a\\",
    "a\nb",
    "",
    "*",
    "~/run",
    "%h",
    "{a,b}",
    "a#b",
    "<in",
    ">out",
)
OPTIONS = (
    ("--master_addr", "-oProxyCommand=x"),
    ("--master_addr", "$(touch $RAN)"),
    ("--ssh_port", "22 -oProxyCommand=$(touch)"),
    ("--include", "-oProxyCommand=x"),
    ("--include", "node-01@-oProxyCommand=x"),
    ("-e", "node-01@$(touch $RAN)"),
    ("--venv_script", "x;touch"),
    ("--launcher_args", "-R exec $(touch)"),
)


@pytest.fixture
def start(tmp_path: Path, monkeypatch, capsys):
    """``longctx run`` on a line that starts ``deepspeed``, which leaves a file behind should it be started."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("deepspeed", "pdsh", "ssh"):
        (programs / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, hostfile: str = TWO, options: tuple[str, ...] = ()) -> tuple[int, str]:
        (tmp_path / "hostfile").write_text(hostfile)
        # What else a run needs is right, so that the check alone can refuse it.
        words = ("deepspeed", "--hostfile", "hostfile", *options, SCRIPT, "--data.train", "data", *arguments)
        code, _, said = call(capsys, "run", "--retries", 0, "--wait-seconds", 0, "--", *words)
        return code, said

    return run


def check_refused(tmp_path: Path, code: int, said: str) -> None:
    assert code in (1, 2), said
    assert not (tmp_path / "ran").exists(), said
    assert "Traceback" not in said
    assert "attempt" not in said, "it is not tried again"
    assert len(said.splitlines()) < 8, said


def test_a_right_line_is_started(start, tmp_path):
    (tmp_path / ".deepspeed_env").write_text("PATH=/opt/bin:$PATH\nA='b c'\nB=\"x $HOME\"\nC=\n")
    code, said = start(
        "--run.output_dir", "runs/a b", options=("--master_addr", "10.0.0.1", "--include", "node-01:0,1")
    )
    assert (tmp_path / "ran").exists(), said
    assert code == 1


@pytest.mark.parametrize("host", HOSTS)
def test_hosts(start, tmp_path, host):
    check_refused(tmp_path, *start(hostfile=f"{TWO}{host} slots=2\n"))


@pytest.mark.parametrize("line", ASSIGNMENTS)
@pytest.mark.parametrize("folder", ["home", "here"])
def test_environment_files(start, tmp_path, monkeypatch, line, folder):
    if folder == "here":
        (tmp_path / "work").mkdir()
        monkeypatch.setenv("HOME", str(tmp_path / "work"))
    (tmp_path / ".deepspeed_env").write_text(f"A=1\n{line}\nB=1\n")
    code, said = start()
    check_refused(tmp_path, code, said)
    assert ".deepspeed_env:2" in said


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_arguments(start, tmp_path, argument):
    check_refused(tmp_path, *start("--run.output_dir", argument))


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_deepspeed(start, tmp_path, option):
    check_refused(tmp_path, *start(options=option))


def test_variables_and_folders(start, tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "$(touch $RAN)")
    check_refused(tmp_path, *start())
    monkeypatch.delenv("NCCL_DEBUG")
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    with pytest.raises(ConfigError, match=r"the working directory .* contains characters"):
        check_deepspeed_line(["deepspeed", "--hostfile", str(tmp_path / "hostfile"), SCRIPT], [])


def test_one_machine_has_no_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("no assignment")
    check_deepspeed_line(["deepspeed", "--num_gpus", "2", SCRIPT], ["--run.name", "$(x)"])
    check_deepspeed_line(["torchrun", "--standalone", SCRIPT], ["$(x)"])
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    check_deepspeed_line(["deepspeed", "--hostfile", "hostfile", SCRIPT], ["$(x)"])
    with pytest.raises(ConfigError):
        check_deepspeed_line(["deepspeed", "--hostfile", "hostfile", "--force_multi", SCRIPT], ["$(x)"])
    (tmp_path / "hostfile").write_text("-oProxyCommand=x slots=2\n")
    with pytest.raises(ClusterError):
        check_deepspeed_line(["deepspeed", "-H", "hostfile", SCRIPT], [])
    # As argparse reads it: the beginning of a name, and a value without a space.
    for option in (["--hostf", "hostfile"], ["--host=hostfile"], ["-Hhostfile"], ["-H=hostfile"]):
        with pytest.raises(ClusterError):
            check_deepspeed_line(["deepspeed", *option, SCRIPT], [])
