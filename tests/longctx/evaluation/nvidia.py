"""NVIDIA's RULER scripts, run as they are in a process of their own. They are not part of this repository.

``RULER_DIR`` names a clone of https://github.com/NVIDIA/RULER. The scripts are copied to a temporary folder, because
they read essays and questions from beside themselves. Stand-ins replace what they import: the tokenizer (ours), nltk's
sentences (ours), and scipy's zeta function where scipy is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longctx.evaluation import Haystack
from longctx.evaluation.ruler import prompt_templates
from tests.longctx.evaluation.pieces import PATTERN

VARIABLE = "RULER_DIR"

SCRIPTS = {
    "niah_single_1": ("niah", "--type_haystack noise"),
    "niah_single_2": ("niah", "--type_haystack essay"),
    "niah_single_3": ("niah", "--type_haystack essay --type_needle_v uuids"),
    "niah_multikey_1": ("niah", "--type_haystack essay --num_needle_k 4"),
    "niah_multikey_2": ("niah", "--type_haystack needle"),
    "niah_multikey_3": ("niah", "--type_haystack needle --type_needle_k uuids --type_needle_v uuids"),
    "niah_multivalue": ("niah", "--type_haystack essay --num_needle_v 4"),
    "niah_multiquery": ("niah", "--type_haystack essay --num_needle_q 4"),
    "vt": ("variable_tracking", "--type_haystack noise --num_chains 1 --num_hops 4"),
    "cwe": ("common_words_extraction", "--freq_cw 30 --freq_ucw 3 --num_cw 10"),
    "fwe": ("freq_words_extraction", "--alpha 2.0"),
    "qa_1": ("qa", "--dataset squad"),
    "qa_2": ("qa", "--dataset hotpotqa"),
}
"""Script and arguments of each task, as scripts/synthetic.yaml has them."""

_TEMPLATES = {
    "niah": prompt_templates.NIAH,
    "variable_tracking": prompt_templates.VARIABLE_TRACKING,
    "common_words_extraction": prompt_templates.COMMON_WORDS,
    "freq_words_extraction": prompt_templates.CODED_WORDS,
    "qa": prompt_templates.QUESTION_ANSWERING,
}

_TOKENIZER = f"""
import re
class Pieces:
    def text_to_tokens(self, text):
        return re.findall({PATTERN!r}, text)
def select_tokenizer(kind, path):
    return Pieces()
"""
_SENTENCES = r"""
import re
def sent_tokenize(text):
    return [sentence for sentence in re.split(r"(?<=[.!?])\s+", text.strip()) if sentence]
"""
_ZETA = """
def zeta(alpha):
    assert alpha == 2.0
    return 1.6449340668482264
"""


def ruler_folder() -> Path:
    """The clone that RULER_DIR names; the test is skipped without."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} is not set: NOT compared with NVIDIA's scripts. Set it to a clone of NVIDIA/RULER.")
    scripts = Path(folder) / "scripts"
    assert (scripts / "data" / "synthetic" / "niah.py").is_file(), f"{VARIABLE}={folder} is no clone of NVIDIA/RULER"
    return scripts


class Nvidia:
    """A copy of the scripts with what they need beside them."""

    def __init__(self, scripts: Path, folder: Path, *, haystack: Haystack, squad: Path, hotpotqa: Path) -> None:
        self._folder = folder
        data = folder / "data"
        shutil.copytree(scripts / "data", data)
        beside = data / "synthetic" / "json"
        (beside / "PaulGrahamEssays.json").write_text(json.dumps({"text": " ".join(haystack.sentences)}))
        (beside / "english_words.json").write_text("{}")
        shutil.copy(squad, beside / "squad.json")
        shutil.copy(hotpotqa, beside / "hotpotqa.json")
        stand_ins = folder / "stand_ins"
        _write(stand_ins / "tokenizer.py", _TOKENIZER)
        _write(stand_ins / "nltk" / "__init__.py", "")
        _write(stand_ins / "nltk" / "tokenize.py", _SENTENCES)
        _write(stand_ins / "tqdm.py", "def tqdm(items):\n    return items\n")
        if importlib.util.find_spec("scipy") is None:
            _write(stand_ins / "scipy" / "__init__.py", "")
            _write(stand_ins / "scipy" / "special.py", _ZETA)

    def samples(self, task: str, length: int, count: int, *, seed: int = 42, reserved: int = 0) -> list[dict[str, Any]]:
        """What the script of a task writes; ``reserved`` is its --model_template_token."""
        script, arguments = SCRIPTS[task]
        template = _TEMPLATES[script]
        command = [sys.executable, str(self._folder / "data" / "synthetic" / f"{script}.py"), *arguments.split()]
        command += ["--save_dir", str(self._folder), "--save_name", task, "--tokenizer_path", "none"]
        command += ["--max_seq_length", str(length), "--tokens_to_generate", str(template.answer_tokens)]
        command += ["--num_samples", str(count), "--random_seed", str(seed), "--template", template.text]
        command += ["--model_template_token", str(reserved)]
        environment = {**os.environ, "PYTHONPATH": str(self._folder / "stand_ins")}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert ended.returncode == 0, ended.stderr[-2000:]
        lines = (self._folder / task / "validation.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
