"""The verb: what it refuses, and what it says where nothing can be traced."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from launcher.config.load_config import load_run_config
from tests.fake_cuda.process import variables
from tests.helpers import REPOSITORY
from tests.launcher.cli.calls import call, refused, succeed

pytestmark = pytest.mark.timeout(600)
QUICK = ("--config", "quickstart", "--data.seq_len", "64", "--train.tokens_per_step", "64")


def test_a_plan_is_one_screen(capsys):
    code, out, err = call(capsys, "plan", *QUICK)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) < 45
    for said in ("It fits", "memory per rank", "time per step", "tokens per second", "longest row", "MFU"):
        assert said in out


def test_the_json_of_a_plan_has_bytes_and_seconds_of_each_rank(capsys):
    words = ("--parallel.context", "2", "--ranks", "4", "--train.tokens_per_step", "128")
    out = succeed(capsys, "plan", *QUICK, *words, "--json")
    told = json.loads(out)
    assert told["world"] == {"ranks": 4, "ranks_per_node": 4}
    assert told["fits"] is True
    assert told["device_hours"] == pytest.approx(4 * told["run_hours"])
    for rank in told["ranks"]:
        assert rank["bytes"]["peak"] == told["peak_bytes"]
        assert 0 < rank["seconds"]["total"] <= told["step_seconds"]


def test_a_search_writes_a_config_that_a_run_takes(capsys, tmp_path):
    path = tmp_path / "found.toml"
    words = ("--search", "--ranks", "2", "--output", str(path), "--train.keep", "attention")
    out = succeed(capsys, "plan", *QUICK, *words)
    assert "->" in out
    found = load_run_config(["--config", str(path)])
    assert found.train.keep == "attention", "a flag is never changed"
    assert found.data.seq_len == 64
    err = refused(capsys, 2, "plan", *QUICK, *words)
    assert "--overwrite" in err


def test_where_nothing_fits_it_says_what_would(capsys):
    rows = ("--data.seq_len", "16777216", "--train.tokens_per_step", "16777216")
    words = ("--model.preset", "llama-3.1-8b", "--parallel.expert", "1", "--parallel.ulysses", "1", "--ranks", "2")
    err = refused(capsys, 2, "plan", "--config", "quickstart", *rows, *words, "--search")
    assert "No settings fit 2 ranks" in err
    assert "ranks: context" in err
    assert len(err.splitlines()) < 15


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--search", "--trace"], "Use --trace on a setting"),
        (["--ranks", "3", "--parallel.context", "2"], "parallel.context=2 does not divide the 3 ranks"),
    ],
)
def test_wrong_words_are_refused_on_one_screen(capsys, words, says):
    err = refused(capsys, 2, "plan", *QUICK, *words)
    assert says.lower() in err.lower()
    assert err.count("\n") < 12


@pytest.mark.slow
def test_a_degree_that_is_offered_is_a_run(capsys):
    """12 ranks: 6 and 12 divide them, and no row of 131,072 tokens."""
    words = ["plan", "--config", "llama-3.1-8b-128k", "--ranks", 12, "--train.tokens_per_step", 1_572_864]
    err = refused(capsys, 2, *words)
    offered = re.search(r"Try parallel\.context=(\d+) \(any of \[([\d, ]+)\]\)", err)
    assert offered, err
    assert (offered[1], offered[2]) == ("4", "1, 2, 4")
    for degree in offered[2].split(", "):
        code, _, err = call(capsys, *words, "--parallel.context", degree)
        assert code in (0, 1), err


@pytest.mark.slow
def test_one_question_has_one_answer_and_the_exit_code_says_whether_it_fits(capsys):
    """Seconds of a step of 1,048,576 tokens in one row: as longer rows of one plan, and as another plan."""
    words = ["plan", "--config", "llama-3.1-8b-128k", "--ranks", 8]
    shorter = succeed(capsys, *words)
    found = re.search(r"Rows of 1,048,576 tokens fit with: .* \((.*), (.*) s per step of 1,048,576 tokens\)", shorter)
    assert found, shorter
    code, _, _ = call(capsys, *words, "--data.seq_len", 1048576, "--train.tokens_per_step", 1048576)
    assert code == 1, "not with the recipe's own settings"
    asked = ["--data.seq_len", 1048576, "--train.tokens_per_step", 1048576, "--parallel.ulysses", 1, "--search"]
    longer = succeed(capsys, *words, *asked)
    assert f"{found[2]} s" in longer


def plan(python: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "launcher", "plan", *words]
    return subprocess.run(command, cwd=REPOSITORY, env=variables(), capture_output=True, text=True, timeout=580)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--capability", "hopper"], "--capability 'hopper' is not a compute capability"),
        (["--data.seqlen", "64"], "seqlen"),
    ],
)
def test_bad_input_is_refused_on_one_screen(words, says, cuda_python):
    done = plan(cuda_python, "--trace", *QUICK, *words)
    assert done.returncode != 0
    assert says in done.stderr
    assert len(done.stderr.splitlines()) < 12


@pytest.mark.slow
def test_json_has_every_kind_of_rank(tmp_path, cuda_python):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("a slots=2\nb slots=2\n")
    done = plan(cuda_python, "--trace", *QUICK, "--parallel.context", "4", "--run.hostfile", str(hostfile), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["world"] == {"ranks": 4, "ranks_per_node": 2}
    assert [rank["rank"] for rank in told["ranks"]] == [0, 2, 3]
    assert [rank["rank"] for rank in told["planned"]] == [0, 2, 3]
    for rank in told["ranks"]:
        assert rank["host_waits"] == []
        assert rank["bytes"]["peak"] > rank["bytes"]["held"] > 0
        assert {link["link"] for link in rank["links"]} == {"within a node", "between nodes"}
