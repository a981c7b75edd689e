"""The demos: a rank for each GPU, and two where there is none; ``make demo-recall`` learns to find needles."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
from pathlib import Path
from statistics import fmean

import pytest

from data_pipeline.texts import read_texts
from longctx.evaluation import Haystack, Setting, find_tasks
from longctx.tokenizer import load_tokenizer
from tests.helpers import REPOSITORY


def starts_of(script: str, folder: Path, gpus: int) -> list[str]:
    """The commands over ranks of a demo on a machine with so many GPUs; nothing is run."""
    # Functions of the shell come before programs: python tells the number of GPUs.
    functions = {"python": f"echo {gpus}", "longctx": ":"}
    environment = {**os.environ, **{f"BASH_FUNC_{name}%%": f"() {{ {body}; }}" for name, body in functions.items()}}
    command = ["bash", str(REPOSITORY / "launcher/demos" / script), str(folder / "run")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    return re.findall(r"^ +\$ longctx ((?:train|evaluate) --ranks .*)$", ran.stdout, re.M)


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 1), (2, 2), (3, 2), (8, 8)])
@pytest.mark.parametrize(("script", "trainings"), [("quickstart.sh", 2), ("recall.sh", 3), ("chat.sh", 4)])
def test_a_demo_starts_a_rank_for_each_gpu(tmp_path, script, trainings, gpus, ranks):
    starts = starts_of(script, tmp_path, gpus)
    assert len(starts) >= trainings
    assert all(f"--ranks {ranks} " in start for start in starts)
    shared = [start for start in starts if f" --parallel.context {ranks}" in start]
    assert len(shared) == trainings, "a row is shared by all ranks"


TRAINED, LONGEST, SAMPLES = 1024, 2048, 22


def grid(evaluation: Path) -> dict[int, float]:
    """The mean score of each length."""
    cells: dict[int, list[float]] = {}
    for row in csv.DictReader((evaluation / "depth_niah_word.csv").read_text().splitlines()):
        cells.setdefault(int(row["length"]), []).append(float(row["mean"]))
    return {length: fmean(means) for length, means in cells.items()}


def outputs(evaluation: Path) -> dict[tuple[int, int], str]:
    """What the model wrote, by length and sample."""
    rows = (json.loads(line) for line in (evaluation / "results.jsonl").read_text().splitlines())
    return {(row["length"], row["index"]): row["output"] for row in rows}


def needles(text: Path) -> set[str]:
    """The sentences with the codes that an evaluation asks for."""
    setting = Setting(
        tokenizer=load_tokenizer(text / "tokenizer.model"),
        haystack=Haystack(read_texts(text / "haystack.jsonl"), source="haystack"),
    )
    (task,) = find_tasks(["niah_word"])
    found = set()
    for length in (TRAINED, LONGEST):
        for sample in task.samples(setting, length, SAMPLES):
            ((_, stop),) = sample.spans
            begin = sample.prompt.rindex("The secret code of", 0, stop)
            found.add(sample.prompt[begin:stop])
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_learns_to_find_needles_across_ranks(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    command = ["bash", str(REPOSITORY / "launcher/demos/recall.sh"), str(tmp_path / "recall")]
    with (tmp_path / "log").open("w") as log:
        ended = subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=1700, check=False
        )
    assert ended.returncode == 0, (tmp_path / "log").read_text()[-4000:]
    run = tmp_path / "recall"
    model = run / "3-long"
    one, two, yarn = (grid(model / name) for name in ("one-process", "ranks", "ranks-with-yarn"))
    for scores in (one, two, yarn):
        assert min(score for length, score in scores.items() if length <= TRAINED) >= 0.95
    assert yarn[LONGEST] - max(one[LONGEST], two[LONGEST]) >= 0.25
    # Beyond its training the model guesses, and a guess may hang on the last bit of a float.
    first, second = outputs(model / "one-process"), outputs(model / "ranks")
    assert first.keys() == second.keys()
    assert all(first[key] == second[key] for key in first if key[0] <= TRAINED)
    for picture in ("needles.html", "needles_niah_word.svg", "3-long/report.html"):
        assert (run / picture).stat().st_size > 10_000

    text = tmp_path / "recall-data"
    read = "".join((text / f"{name}.jsonl").read_text() for name in ("short", "middle", "long"))
    asked = needles(text)
    assert len(asked) == 2 * SAMPLES
    assert not [needle for needle in asked if needle in read]
