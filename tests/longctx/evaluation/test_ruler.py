"""RULER is NVIDIA's: its texts, answers and scores, by hashes that both made, and beside its scripts where they are."""

from __future__ import annotations

import hashlib
import json
import runpy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import ConfigError, DataError
from longctx.evaluation import TASKS, Haystack, RulerFiles, Setting
from longctx.evaluation.ruler import word_lists
from longctx.evaluation.ruler.word_lists import JoinedWords
from longctx.evaluation.scorers import contains_all, contains_any
from tests.longctx.evaluation.nvidia import SCRIPTS, Nvidia, ruler_folder
from tests.longctx.evaluation.pieces import PieceTokenizer

COUNT = 3
LONG = ("vt", "cwe", "fwe")
"""Tasks that are compared at a longer length too: their scripts do not sort six million words first."""
LENGTHS = (1280, 4096)
GOLDEN = {
    "niah_single_1": ("105e3ae19de83dbf", "1410bc53e0a638d5"),
    "niah_single_2": ("f135e7b9e553583d", "4a5223bf2c2d417a"),
    "niah_single_3": ("2cf06368ce7604cc", "cce9f0df07ff0001"),
    "niah_multikey_1": ("51b8cdd1dc969366", "d53ff968bfee7385"),
    "niah_multikey_2": ("bff08a7bd171a4df", "4171ab9de0117de4"),
    "niah_multikey_3": ("918444af69c1977f", "cacbe0dc768121dd"),
    "niah_multivalue": ("1276631aa667ed6b", "4ca96334f1384c9c"),
    "niah_multiquery": ("8c3558e204e36a9e", "492f502343ab46ec"),
    "vt": ("8c4326d87511be25", "20e580175717d31f"),
    "cwe": ("0133c505ce0047d3", "d9b76e9369f9a904"),
    "fwe": ("fffd4e05665e3328", "35efdb7a44de72ae"),
    "qa_1": ("5657b894eaa4c145", "011098ab30c91780"),
    "qa_2": ("b4896324dfe3e2e1", "f2b246ec7006106e"),
}
"""For each task and these lengths: what NVIDIA's scripts wrote at commit c3f5e3b with wonderwords 3.0.1, hashed."""


def ours(task: str, length: int, setting: Setting, count: int = COUNT) -> list[tuple[str, list[str], int]]:
    """Prompt, answers and the tokens of both, as NVIDIA counts them: without the id that begins a document."""
    begin = len(setting.tokenizer.prefix_ids)
    return [
        (sample.prompt, list(sample.answers), sample.prompt_tokens - begin + sample.answer_tokens)
        for sample in TASKS[f"ruler_{task}"].samples(setting, length, count)
    ]


def hashed(samples: Iterable[tuple[str, list[str], int]]) -> str:
    return hashlib.sha256(json.dumps(list(samples)).encode()).hexdigest()[:16]


@pytest.mark.parametrize("task", GOLDEN)
def test_samples_have_the_hash_of_nvidias(task: str, setting: Setting):
    assert tuple(hashed(ours(task, length, setting)) for length in LENGTHS) == GOLDEN[task]


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory: pytest.TempPathFactory, text: Haystack, files: RulerFiles) -> Nvidia:
    assert files.squad is not None
    assert files.hotpotqa is not None
    folder = tmp_path_factory.mktemp("ruler")
    return Nvidia(ruler_folder(), folder, haystack=text, squad=files.squad, hotpotqa=files.hotpotqa)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("task", SCRIPTS)
def test_samples_equal_those_of_nvidias_scripts(task: str, setting: Setting, nvidia: Nvidia):
    """Every task, also those on a text or a file, at lengths on both sides of NVIDIA's own limit of 4,096."""
    plain = replace(setting, tokenizer=PieceTokenizer())
    compared = [*((setting, length) for length in LENGTHS), (replace(plain, seed=7), 8192)]
    if task in LONG:
        compared.append((replace(plain, seed=11), 32_768))
    for asked, length in compared:
        begin = len(asked.tokenizer.prefix_ids)
        theirs = [
            (line["input"] + line["answer_prefix"], line["outputs"], line["length"])
            for line in nvidia.samples(task, length, 5, seed=asked.seed, reserved=begin)
        ]
        assert ours(task, length, asked, 5) == theirs
        assert asked is not setting or GOLDEN[task][LENGTHS.index(length)] == hashed(theirs[:COUNT])


def test_scores_equal_those_of_nvidias_scripts():
    theirs = runpy.run_path(str(ruler_folder() / "eval" / "synthetic" / "constants.py"))
    random = Random(0)
    for _ in range(2000):
        count = random.randint(1, 6)
        outputs = [scribble(random, 40) for _ in range(count)]
        references = [[scribble(random, 3) for _ in range(random.randint(1, 4))] for _ in range(count)]
        for rule, name in ((contains_all, "string_match_all"), (contains_any, "string_match_part")):
            scores = [rule(output, wanted) for output, wanted in zip(outputs, references, strict=True)]
            assert round(sum(scores) / count * 100, 2) == theirs[name](outputs, references)


def scribble(random: Random, most: int) -> str:
    """Letters whose lower case is not plain are among them."""
    return "".join(random.choice("aAbB1 \nİßé") for _ in range(random.randint(0, most)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.text("ab-", max_size=4), min_size=1), st.lists(st.text("ab-", max_size=3), min_size=1))
def test_joined_words_are_the_sorted_set(firsts: list[str], seconds: list[str]):
    joined = JoinedWords(firsts, seconds)
    expected = sorted({f"{first}-{second}" for first in firsts for second in seconds})
    assert list(joined) == expected
    with pytest.raises(IndexError):
        joined[len(expected)]


def test_a_tokenizer_whose_pieces_are_too_small_for_the_worked_example_is_refused(setting: Setting):
    """NVIDIA's script never ends there, whatever the length."""
    characters = PieceTokenizer(pattern=r"(?s).")
    with pytest.raises(ConfigError, match="worked example has 500 tokens at most"):
        next(TASKS["ruler_vt"].samples(replace(setting, tokenizer=characters), 8192, 1))


def test_another_version_of_the_words_is_refused(setting: Setting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(word_lists, "version", lambda name: "2.2.0")
    with pytest.raises(ConfigError, match=r"wonderwords 3\.0\.1; installed: 2\.2\.0"):
        word_lists.read_words("nounlist.txt")


def test_common_words_beyond_the_package_ask_for_nvidias_file(setting: Setting, tmp_path: Path):
    task = TASKS["ruler_cwe"]
    with pytest.raises(ConfigError, match=r"length=131072 needs .* distinct words, and wonderwords has 8,166\. Give"):
        next(task.samples(setting, 131_072, 1))
    path = tmp_path / "english_words.json"
    path.write_text("{}")
    with pytest.raises(DataError, match="contains fewer than"):
        next(task.samples(replace(setting, ruler=RulerFiles(english_words=path)), 131_072, 1))


@pytest.mark.slow
def test_common_words_of_nvidias_file_fill_a_long_prompt(setting: Setting, tmp_path: Path):
    path = tmp_path / "english_words.json"
    path.write_text(json.dumps({str(number): f"w{number}" for number in range(60_000)}))
    task = TASKS["ruler_cwe"]
    sample = next(task.samples(replace(setting, ruler=RulerFiles(english_words=path)), 200_000, 1))
    assert 190_000 < sample.prompt_tokens + sample.answer_tokens <= 200_000


@pytest.mark.parametrize(("task", "content"), [("qa_1", "{}"), ("qa_1", "["), ("qa_2", "[]"), ("qa_2", '[{"a": 1}]')])
def test_a_file_of_another_form_is_refused(task: str, content: str, setting: Setting, tmp_path: Path):
    path = tmp_path / "file.json"
    path.write_text(content)
    files = RulerFiles(squad=path, hotpotqa=path)
    with pytest.raises(DataError, match=r"file\.json .* Give "):
        next(TASKS[f"ruler_{task}"].samples(replace(setting, ruler=files), 2048, 1))
