"""Help, wrong usage, exit codes and streams, whatever the verb."""

from __future__ import annotations

import functools
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.chat_options import ChatOptions
from launcher.cli.cli_commands import COMMANDS, CliCommand, parse
from launcher.cli.cli_output import program
from launcher.cli.corpus import Duplicates, Workers
from launcher.cli.image_options import ImageFlags
from longctx import __version__
from tests.helpers import REPOSITORY
from tests.launcher.cli.calls import call, refused, start, succeed


def examples_in(text: str) -> list[list[str]]:
    """The words of every example line, without the name of the program."""
    name = program()
    lines = [line.strip() for line in text.splitlines() if line.startswith(f"  {name} ")]
    return [shlex.split(line.removeprefix(name)) for line in lines]


def listed_in(overview: str) -> set[str]:
    """The verbs of an overview."""
    lines = overview.partition("verbs:\n")[2].partition("\n\n")[0].splitlines()
    return {line.strip().partition("  ")[0] for line in lines}


class TestHelp:
    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_verb_teaches_with_an_example_that_parses(self, capsys, name):
        verb = name.split()
        out = succeed(capsys, *verb, "--help")
        examples = examples_in(out)
        assert examples
        for words in examples:
            assert words[: len(verb)] == verb
            assert callable(parse(words))

    def test_the_overview_lists_every_verb_and_its_examples_parse(self, capsys):
        out = succeed(capsys, "--help")
        assert listed_in(out) == set(COMMANDS)
        examples = examples_in(out)
        assert len(examples) == 7
        for words in examples:
            assert callable(parse(words))

    def test_options_reach_the_function_with_their_types(self):
        joined = shlex.split(
            "--text-field body --format text --strict --join directory --join-depth 1 --join-bytes 9 --join-header h"
        )
        words = ["data", "build", "--source", "s", "--exclude", "a", "b", "--exclude", "c", *joined]
        words += shlex.split("--tokenizer t --output o --validation-fraction 0.5 --exact --overwrite --json")
        words += ["--duplicates", "near"]
        bound = parse(words)
        assert isinstance(bound, functools.partial)
        corpus = bound.args[0] if bound.args else bound.keywords["corpus"]
        assert corpus.arguments() == ["--source", "s", "--exclude", "a", "b", "c", *joined]
        options = {name: value for name, value in bound.keywords.items() if name != "corpus"}
        assert options == {
            "tokenizer": Path("t"),
            "output": "o",
            "validation_fraction": 0.5,
            "shard_tokens": None,
            "duplicates": Duplicates(duplicates="near"),
            "worker_options": Workers(),
            "chat_options": ChatOptions(),
            "kind": "text",
            "image_flags": ImageFlags(),
            "exact": True,
            "paragraphs": False,
            "special_tokens": "text",
            "overwrite": True,
            "without": [],
            "json": True,
        }

    def test_the_version(self, capsys):
        assert call(capsys, "--version")[:2] == (0, f"longctx {__version__}\n")

    @pytest.mark.parametrize(
        ("typed", "offered"),
        [
            (["tok"], {"tokenizer"}),
            (["data", "p"], {"pack", "plan", "practice"}),
            (["data", "build", "--tok"], {"--tokenizer"}),
            (["convert", "--fr"], {"--from"}),
            (["train", "--config", "run.toml", "--train.war"], {"--train.warmup_steps"}),
            (["report", "runs/fir"], set()),
        ],
    )
    def test_bash_completes(self, capsys, tmp_path, typed, offered):
        (tmp_path / "completion").write_text(succeed(capsys, "--completion"))
        words = shlex.join(["longctx", *typed])
        script = f"COMP_WORDS=({words}); COMP_CWORD={len(typed)}; source completion; _longctx; echo ${{COMPREPLY[@]}}"
        out = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert set(out.split()) == offered

    def test_help_imports_nothing_heavy_and_comes_at_once(self):
        script = (
            "import sys; from launcher.cli import main; code = main(['--help']);"
            "heavy = {'torch', 'deepspeed', 'pyarrow', 'numpy', 'rich', 'matplotlib', 'pydantic'} & set(sys.modules);"
            "sys.exit(f'{heavy}' if heavy else code)"
        )
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        # Processor time, which a busy machine does not stretch: 0.1 s.
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


class TestWrongUsage:
    @pytest.mark.parametrize(
        "words",
        [
            [],
            ["frobnicate"],
            ["data"],
            ["data", "inspect", "x", "--seq", "64"],
            ["convert", "a", "b"],
            ["convert", "--to", "hf", "--from", "hf", "a", "b"],
            ["convert", "--to", "hf", "a", "b", "--dtype", "int8"],
        ],
        ids=" ".join,
    )
    def test_ends_with_2_and_words(self, capsys, words):
        err = refused(capsys, 2, *words)
        assert 1 <= len(err.strip().splitlines()) <= 4

    @pytest.mark.parametrize(
        ("words", "nearest"),
        [
            (["data", "inspct", "x"], "data inspect"),
            (["trian"], "train"),
            (["tokenizer", "train", "--source", "stdlib"], "--vocab-size INT, --output F.model"),
            (["convert", "--to", "gguf", "a", "b"], "'hf'"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else None,
    )
    def test_names_what_would_work_on_any_terminal(self, capsys, monkeypatch, words, nearest):
        monkeypatch.setenv("COLUMNS", "40")
        _, _, err = call(capsys, *words)
        assert nearest in err
        assert not set(err) & set("╭│╰─")
        assert err.splitlines()[1].startswith(f"`{program()}")

    @pytest.mark.parametrize(
        ("words", "names"),
        [
            (["tokenizer", "train", "--source", "NO", "--vocab-size", 600, "--output", "OUT"], "does not exist"),
            (["data", "build", "--source", "stdlib", "--tokenizer", "NO", "--output", "OUT"], "tokenizer train"),
            (["data", "verify", "EMPTY"], "not a shard folder"),
            (["convert", "--to", "hf", "EMPTY", "OUT"], "neither a checkpoint"),
            (["convert", "--from", "hf", "EMPTY", "OUT"], "config.json"),
            (["convert", "--from", "hf", "EMPTY", "WITHIN"], "is inside of"),
            (["checkpoint", "list", "EMPTY"], "not a run folder"),
            (["generate", "--checkpoint", "EMPTY", "--prompt", "", "--max-new-tokens", 1], "neither a checkpoint"),
            (["report", "EMPTY"], "not a run folder"),
        ],
        ids=lambda value: " ".join(map(str, value[:3])) if isinstance(value, list) else None,
    )
    def test_missing_things_end_with_1_and_leave_nothing(self, capsys, tmp_path, words, names):
        (tmp_path / "empty").mkdir()
        places = {"NO": tmp_path / "no", "EMPTY": tmp_path / "empty", "OUT": tmp_path / "out"}
        places["WITHIN"] = places["EMPTY"] / "out"
        err = refused(capsys, 1, *(places.get(word, word) for word in words))
        assert names in err
        assert [path.name for path in tmp_path.iterdir()] == ["empty"]

    def test_a_file_system_that_refuses_is_no_traceback(self, capsys, monkeypatch):
        def refuse():
            Path("/proc/version/x").read_text()

        monkeypatch.setitem(COMMANDS, "report", CliCommand(refuse, ()))
        err = refused(capsys, 1, "report")
        assert "/proc/version/x: Not a directory." in err
        assert "Traceback" not in err

    def test_a_missing_package_is_named_and_ours_is_a_fault(self, capsys, monkeypatch):
        for name, fault in (("pyarrow.parquet", False), ("longctx.nothing", True)):

            def fail(*, name: str = name):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

            monkeypatch.setitem(COMMANDS, "report", CliCommand(fail, ()))
            code, _, err = call(capsys, "report")
            assert code == 1
            assert ("Traceback" in err) is fault
            assert ("make setup" in err) is not fault


class TestProcess:
    def test_a_reader_that_leaves_ends_quietly(self, world):
        process = start("data", "inspect", world / "data", "--json")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=30) == 0
