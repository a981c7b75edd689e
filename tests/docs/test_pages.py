"""What the pages show is true: commands are run, or their flags are read and their config is checked."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.cli.cli_commands import COMMANDS as ALL_VERBS
from launcher.cli.cli_commands import parse
from launcher.config.flags import take_flag
from launcher.config.load_config import load_run_config
from launcher.config.run_config_rules import check_run
from launcher.evaluation.harness.settings import Settings
from launcher.recipes.find import find_config, recipes
from tests.docs.pages import ALL_BLOCKS, ALL_COMMANDS, PAGES, Block
from tests.helpers import REPOSITORY
from tests.launcher.runs import recipe_flags, resolved

SCRIPT, LM_EVAL, VERIFY = "launcher/pretrain.py", "launcher/lm_eval.py", "launcher/verify.py"
VERBS = {f"launcher/{verb}.py": verb for verb in ("evaluate", "generate", "score")}
"""Scripts with the options of a verb."""
RUN_PAGES = sorted({block.page for block in ALL_BLOCKS if block.is_run})


@pytest.mark.parametrize(("where", "command"), ALL_COMMANDS, ids=lambda x: x if isinstance(x, str) else x[0])
def test_every_command_is_one_that_there_is(where: str, command: tuple[str, ...], monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    program, *words = command
    if program == "longctx" and words[0] in ("train", "verify"):
        check_settings(without_ranks(words[1:]))
    elif program == "longctx":
        parse(words)
    elif program in ("deepspeed", "torchrun") and set(VERBS) & set(words):
        at = next(at for at, word in enumerate(words) if word in VERBS)
        parse([VERBS[words[at]], *words[at + 1 :]])
    elif program == "deepspeed" and LM_EVAL in words:
        # The options are lm-eval's, which need not be installed; the model's are ours.
        check_model_args(words[words.index("--model_args") + 1])
    elif program in ("deepspeed", "torchrun") or (program == "python" and words[0] == SCRIPT):
        check_start(words)
    elif program == "python":
        assert words[0] == "-m", command
        assert list(REPOSITORY.glob(f"{words[1].replace('.', '/')}*")), f"no module {words[1]}"
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.M)
        assert {word for word in words if "=" not in word} <= set(targets)
    elif program == "pip":
        check_extras(words)
    elif program == "podman" and words[0] in ("push", "run"):
        assert any(word.endswith("longctx") for word in words), "the image that the build line makes"
    elif program in ("sbatch", "kubectl", "podman"):
        # Each takes a file of ours.
        files = [word for word in words if word.startswith("docs/clusters/")]
        assert files
        assert all((REPOSITORY / file).is_file() for file in files)
        if program == "sbatch":
            check_start([SCRIPT, *words[1:]])
    else:
        assert program in ("source", "pre-commit", "git", "bash"), f"{where}: nothing checks {program}"


def check_model_args(text: str) -> None:
    """Whole numbers are numbers, as lm-eval has them."""
    pairs = [pair.split("=", 1) for pair in text.split(",")]
    Settings.of({name: int(value) if value.isdigit() else value for name, value in pairs})


def check_start(words: Sequence[str]) -> None:
    """Read the flags of a line that starts the script of training or verification."""
    script = next(word for word in words if word in (SCRIPT, VERIFY))
    check_settings(list(words[words.index(script) + 1 :]))


def without_ranks(words: Sequence[str]) -> list[str]:
    """The settings of ``longctx train``: its words without those of the verb itself."""
    settings = list(words)
    for flag in ("--ranks", "--hostfile"):
        settings, _ = take_flag(settings, flag)
    return settings


def check_settings(flags: list[str]) -> None:
    """Read the settings of a run, and check it on as many ranks as share a row."""
    if "--help" in flags:
        with pytest.raises(SystemExit) as ending:
            load_run_config(flags)
        assert ending.value.code == 0
        return
    flags = [flag for flag in flags if flag not in ("--print-config", "--probe", "leak")]
    if "--config" in flags and not is_config(flags[flags.index("--config") + 1]):
        at = flags.index("--config")  # the config of a run that the reader has and we have not
        assert Path(flags[at + 1]).parts[0] in ("runs", "run.toml"), flags
        del flags[at : at + 2]
    if "--run.start_from" in flags:  # a checkpoint that the reader has: its model is a preset of ours here
        at = flags.index("--run.start_from")
        flags[at : at + 2] = ["--run.start_from", "no", "--model.preset", "llama-2-7b"]
    if "--config" in flags:
        at = flags.index("--config")
        flags[at : at + 2] = recipe_flags(find_config(flags[at + 1]))
    config = load_run_config(flags)
    ranks = max(config.parallel.context, config.parallel.expert)
    check_run(resolved(config, native_bfloat16=True, ranks=ranks), ranks)


def is_config(given: str) -> bool:
    """Whether a value of --config is a file or a recipe that we have."""
    return given in recipes() or Path(given).is_file()


def check_extras(words: Sequence[str]) -> None:
    """Extras that a page installs are extras of the project."""
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        if match := re.fullmatch(r"longctx-train\[([a-z,-]+)\]", word):
            assert set(match[1].split(",")) <= set(known)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch) -> Path:
    """A folder as the reader's, in which the first tutorial was followed."""
    folder = tmp_path / "reader"
    folder.mkdir()
    text = folder / "my-text"
    text.mkdir()
    for path in sorted((REPOSITORY / "data_pipeline").rglob("*.py")):
        (text / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    (folder / "hostfile").write_text((REPOSITORY / "hostfile").read_text())
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_marked_commands_run_in_their_order(workspace: Path, monkeypatch, capfd):
    """Pages stand in the order of their names, so what the first tutorial made is there for the later ones."""
    monkeypatch.chdir(workspace)
    for page in RUN_PAGES:
        for block in ALL_BLOCKS:
            if block.page == page and block.is_run:
                follow(block, capfd)


def follow(block: Block, capfd) -> None:
    """Run each command to its end; it must say that it is done."""
    for program, *words in block.commands:
        assert program == "longctx"
        assert main(words) == 0, f"{block.page.name}:{block.line}: {words}\n{capfd.readouterr()}"


def test_links_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            if "://" not in target:
                linked = (page.parent / target) if target else page
                assert linked.exists(), f"{page.relative_to(REPOSITORY)} links to {target}"
                assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


def anchors(page: Path) -> list[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_files_that_pages_name_are_there():
    tracked = set(subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True).stdout.split())
    known = re.compile(r"`((?:launcher|longctx|parallel|data_pipeline|tests|benchmarks|docs)/[\w/.\-]+\.\w+)`")
    for page in PAGES:
        for name in known.findall(page.read_text()):
            assert name in tracked, f"{page.relative_to(REPOSITORY)} names {name}"


def test_functions_that_pages_name_are_there():
    """``file.py:name`` in a page is a function or class of that file."""
    known = re.compile(r"`((?:launcher|longctx|parallel|data_pipeline)/[\w/]+\.py):(\w+)`")
    for page in PAGES:
        for name, defined in known.findall(page.read_text()):
            tree = ast.parse((REPOSITORY / name).read_text())
            names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
            assert defined in names, f"{page.relative_to(REPOSITORY)} names {name}:{defined}"


def test_a_page_lists_every_file_and_folder_of_two_levels():
    """A new file or folder of a package needs its line in architecture.md, and a line needs its file."""
    shown = re.search(r"<!-- files -->\n```\n(.*?)```", (REPOSITORY / "docs/architecture.md").read_text(), re.S)
    assert shown
    listed: set[str] = set()
    package = ""
    for line in shown[1].splitlines():
        name = line.split()[0]
        if line.startswith(" "):
            listed.add(package + name.rstrip("/"))
        else:
            package = name
    packages = ["launcher", "parallel", "data_pipeline", "longctx"]
    tracked = subprocess.run(["git", "ls-files", *packages], cwd=REPOSITORY, capture_output=True, text=True).stdout
    there = {"/".join(path.split("/")[:2]) for path in tracked.split()}
    assert listed == {path for path in there if not path.rpartition("/")[2].startswith(("__", "py.typed"))}


def test_the_readme_is_short():
    assert len((REPOSITORY / "README.md").read_text().splitlines()) < 250


def test_every_verb_has_its_table_of_options():
    """That a table is in step, tests/benchmarks/test_tables.py says."""
    text = (REPOSITORY / "docs" / "commands.md").read_text()
    assert [verb for verb in ALL_VERBS if f"<!-- options: {verb} -->" not in text] == []
