"""``generate``."""

from __future__ import annotations

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


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top-p": 2}, {"temperature": 0, "top-k": 3}])
def test_sampling_options_out_of_range_are_wrong_usage(capsys, run, options):
    code, out, _ = call(capsys, *words(run, **options))
    assert (code, out) == (2, "")


def test_it_ends_with_the_document(capsys, run, monkeypatch):
    from longctx.generation import loop as generation

    asked = []
    monkeypatch.setattr(generation, "generate", lambda *args, **options: asked.append(options) or [300, 2])
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


def test_a_hugging_face_folder_is_told_the_way_in(capsys, world, run):
    code, _, err = call(capsys, *words(world / "hf"))
    assert code == 1
    assert "convert --from hf" in err
