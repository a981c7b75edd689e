"""The Python of docs/python.md, and the notebook: run as they stand, in a reader's folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

from launcher.cli import main
from tests.docs.pages import PAGES
from tests.helpers import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PAGE = REPOSITORY / "docs" / "python.md"
CODE = dict(re.findall(r"<!-- python: (\w+) -->\n```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S))
TRAIN = (
    "train --ranks 2 --data.seq_len 256 --train.tokens_per_step 512 --train.steps 2 --train.warmup_steps 1 "
    "--model.vocab_size 512"
)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch) -> Path:
    """A folder in which somebody has followed the first tutorial."""
    for path in sorted((REPOSITORY / "data_pipeline").rglob("*.py")):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for line in (
        "tokenizer train --source text --vocab-size 512 --output runs/tokenizer.model",
        "data build --source text --tokenizer runs/tokenizer.model --output runs/data",
        f"{TRAIN} --data.train runs/data --run.output_dir runs/first --validation.rows 0",
    ):
        assert main(line.split()) == 0, line
    return tmp_path


def typed(code: str, *starter: str, folder: Path) -> str:
    (folder / "typed.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(
        [*starter, "typed.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_page_has_all_of_them():
    assert set(CODE) == {"train", "attend", "generate"}
    assert PAGE in PAGES


def test_ten_lines_train(reader: Path):
    losses = [float(line.split()[1]) for line in typed(CODE["train"], sys.executable, folder=reader).splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5


def test_ten_lines_attend_over_two_ranks_as_over_one(tmp_path: Path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    said = [typed(CODE["attend"], *torchrun, ranks, folder=tmp_path) for ranks in ("1", "2")]
    assert [text.split(") ")[0] for text in said] == ["(1, 1024, 8, 64", "(1, 512, 8, 64"]
    one, two = (float(text.split()[-1]) for text in said)
    assert two == pytest.approx(one, rel=1e-6)


def test_a_model_is_asked_and_exported(reader: Path):
    out = typed(CODE["generate"], sys.executable, folder=reader)
    assert "runs/first-exported" in out
    assert (reader / "runs" / "first-exported" / "config.json").is_file()


def test_the_notebook(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    notebook = json.loads((REPOSITORY / "docs" / "notebooks" / "first-look.ipynb").read_text())
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "outputs are the reader's"
            exec(compile("".join(cell["source"]), "first-look.ipynb", "exec"), names)
    rows = names["held_out"]
    assert isinstance(rows, list)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (tmp_path / "first-hf" / "config.json").is_file()
