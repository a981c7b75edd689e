"""``generate``."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from tests.launcher.cli.calls import call


def words(run: Path, **options: object) -> list[object]:
    given = {"checkpoint": run, "prompt": "def main", "max-new-tokens": 8, **options}
    return ["generate", *(f"--{name}={value}" for name, value in given.items())]


def reference(run: Path, prompt: str, num_tokens: int) -> str:
    """Greedy without a cache, begin id first."""
    from longctx.generation.load import load_model
    from longctx.generation.loop import generate
    from longctx.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(run / "checkpoints/step_000100/tokenizer.model")
    ids = [tokenizer.document_begin, *tokenizer.encode(prompt).tolist()]
    return tokenizer.decode(generate(load_model(run), ids, num_tokens, use_cache=False))


@pytest.mark.parametrize("prompt", ["def main", "", "  ä 🙂\n"])
def test_stdout_is_the_greedy_continuation_and_nothing_else(capsys, run, prompt):
    code, out, err = call(capsys, *words(run, prompt=prompt))
    assert code == 0
    assert out == reference(run, prompt, 8) + "\n"
    assert "8 tokens" in err


def test_a_run_folder_means_its_newest_checkpoint(capsys, damaged_run):
    shutil.rmtree(damaged_run / "checkpoints/step_000020")
    (damaged_run / "checkpoints/step_000020").mkdir()
    _, out, err = call(capsys, *words(damaged_run))
    assert out == reference(damaged_run, "def main", 8) + "\n"
    assert "step_000100" in err


def test_sampling_follows_its_seed(capsys, run):
    texts = [call(capsys, *words(run, temperature=1.5, seed=seed))[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    greedy = call(capsys, *words(run))[1]
    assert call(capsys, *words(run, **{"top-k": 1}))[1] == greedy
    assert call(capsys, *words(run, temperature=0))[1] == greedy


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"top-p": 2},
        {"temperature": 0, "top-k": 3},
        {"min-p": 1.5},
        {"repetition-penalty": 0},
        {"beams": 1},
        {"beams": 2, "seed": 1},
        {"length-penalty": 2},
        {"stop": ""},
        {"max-sequences": 2},
    ],
)
def test_sampling_options_out_of_range_are_wrong_usage(capsys, run, options):
    code, out, _ = call(capsys, *words(run, **options))
    assert (code, out) == (2, "")


def test_it_ends_with_the_document(capsys, run, monkeypatch):
    from longctx.generation import loop as generation

    asked = []
    monkeypatch.setattr(generation, "stream", lambda *args, **options: asked.append(options) or iter([300, 2]))
    code, _, err = call(capsys, *words(run))
    assert code == 0
    assert asked[0]["stop_ids"] == {2}
    assert "then the document ended" in err


def test_a_checkpoint_without_a_tokenizer_asks_for_one(capsys, damaged_run, world):
    for path in (damaged_run / "checkpoints/step_000100").glob("tokenizer*"):
        path.unlink()
    code, _, err = call(capsys, *words(damaged_run))
    assert (code, "--tokenizer" in err) == (1, True)
    code, out, _ = call(capsys, *words(damaged_run, tokenizer=world / "tokenizer.model"))
    assert code == 0
    assert out


def test_a_hugging_face_folder_is_taken_as_it_is(capsys, world, run):
    code, out, _ = call(capsys, *words(world / "hf"))
    assert (code, out) == (0, reference(run, "def main", 8) + "\n")


def test_a_prompt_of_any_length_comes_from_a_file(capsys, run, tmp_path, monkeypatch):
    prompt = "def main():\r\n\tpass  ä\n"
    (tmp_path / "prompt").write_bytes(prompt.encode())
    asked = from_file(run, tmp_path / "prompt")
    assert call(capsys, *asked)[1] == reference(run, prompt, 8) + "\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(prompt.encode())))
    assert call(capsys, *from_file(run, "-"))[1] == reference(run, prompt, 8) + "\n"
    assert call(capsys, *asked, "--prompt=x")[0] == 2


def test_a_prompt_file_that_is_not_text_is_refused(capsys, run, tmp_path):
    (tmp_path / "prompt").write_bytes(b"abc\xff")
    code, _, err = call(capsys, *from_file(run, tmp_path / "prompt"))
    assert (code, "not UTF-8 at byte 3" in err) == (1, True)
    assert call(capsys, *from_file(run, tmp_path / "none"))[0] == 1


def from_file(run: Path, path: object) -> list[object]:
    return ["generate", f"--checkpoint={run}", f"--prompt-file={path}", "--max-new-tokens=8"]


def test_text_comes_token_by_token(capsys, run, monkeypatch):
    """Each token is written before the next one is computed."""
    from longctx.generation import loop as generation

    written, stream = [], generation.stream
    monkeypatch.setattr("launcher.cli.generate.write", lambda text: written.append(text))

    def watched(*args, **options):
        for number, token in enumerate(stream(*args, **options)):
            assert len(written) == number
            yield token

    monkeypatch.setattr(generation, "stream", watched)
    assert call(capsys, *words(run))[0] == 0
    assert len(written) == 8


def test_the_other_ways_to_choose(capsys, run):
    from longctx.generation import Beams, Penalties, generate, load_model
    from longctx.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(run / "checkpoints/step_000100/tokenizer.model")
    ids = [tokenizer.document_begin, *tokenizer.encode("def main").tolist()]
    model = load_model(run)
    ends = {"stop_ids": tokenizer.special.stops}

    beams = generate(model, ids, 8, Beams(num_beams=3, length_penalty=2.0), **ends)
    found = call(capsys, *words(run, beams=3, **{"length-penalty": 2.0}))[1]
    assert found == tokenizer.decode(beams) + "\n"

    penalties = Penalties(repetition=1.5, presence=0.5, frequency=0.25)
    given = {"repetition-penalty": 1.5, "presence-penalty": 0.5, "frequency-penalty": 0.25}
    penalised = generate(model, ids, 8, penalties=penalties, **ends)
    assert call(capsys, *words(run, **given))[1] == tokenizer.decode(penalised) + "\n"


def test_the_text_ends_before_a_stop_string(capsys, run):
    whole = reference(run, "def main", 8)
    for start in (1, len(whole) // 2):
        stop = whole[start : start + 3]
        code, out, _ = call(capsys, *words(run), "--stop=never there", f"--stop={stop}")
        assert (code, out) == (0, whole[: whole.index(stop)] + "\n")
    assert call(capsys, *words(run), "--stop=never there")[1] == whole + "\n"


def test_many_prompts_come_from_a_file(capsys, run, tmp_path):
    prompts = ["def main", "  ä 🙂\n", "import os\n", "x"]
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": prompt, "name": f"p{n}"}, ensure_ascii=False) for n, prompt in enumerate(prompts)]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    asked = ["generate", f"--checkpoint={run}", f"--prompts-file={path}", "--max-new-tokens=8", "--max-sequences=2"]
    code, out, err = call(capsys, *asked)
    assert (code, "4 prompts" in err) == (0, True)
    results = {result["index"]: result for result in map(json.loads, out.splitlines())}
    assert sorted(results) == [0, 1, 2, 3]
    for index, prompt in enumerate(prompts):
        result = results[index]
        assert (result["prompt"], result["name"]) == (prompt, f"p{index}")
        assert result["continuation"] == reference(run, prompt, 8)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no prompt"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2"),
        ("{", "line 1 is no JSON"),
        ("[1]", "line 1"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(capsys, run, tmp_path, content, said):
    (tmp_path / "prompts.jsonl").write_text(content)
    asked = ["generate", f"--checkpoint={run}", f"--prompts-file={tmp_path}/prompts.jsonl", "--max-new-tokens=8"]
    code, out, err = call(capsys, *asked)
    assert (code, out, said in err) == (1, "", True), err
