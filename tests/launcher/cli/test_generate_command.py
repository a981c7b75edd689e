"""``generate``."""

from __future__ import annotations

import io
import json
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launcher.cli.calls import call, refused, start, succeed


def words(run: Path, **options: object) -> list[object]:
    given = {"checkpoint": run, "prompt": "def main", "max-new-tokens": 8, **options}
    return ["generate", *(f"--{name}={value}" for name, value in given.items() if value is not None)]


def from_file(run: Path, path: object, option: str = "prompts-file", **options: object) -> list[object]:
    """The command for the prompts of a file; of one prompt with ``option="prompt-file"``."""
    return words(run, prompt=None, **{option: path, **options})


def reference(run: Path, prompt: str, num_tokens: int) -> str:
    """Greedy without a cache, begin id first."""
    from longctx.generation.load_decoder import load_model
    from longctx.tokenizer import load_tokenizer
    from tests.longctx.cached_models import without_cache

    tokenizer = load_tokenizer(run / "checkpoints/step_000100/tokenizer.model")
    ids = [tokenizer.document_begin, *tokenizer.encode(prompt).tolist()]
    return tokenizer.decode(without_cache(load_model(run), ids, num_tokens))


@pytest.mark.parametrize("prompt", ["def main", "", "  ä 🙂\n"])
def test_stdout_is_the_greedy_continuation_and_nothing_else(capsys, run, prompt):
    code, out, err = call(capsys, *words(run, prompt=prompt))
    assert code == 0
    assert out == reference(run, prompt, 8) + "\n"
    assert "8 tokens" in err


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
        {"beams": 2, "seed": 1},
        {"max-new-tokens": -1},
        {"parallel.context": 3},
        {"parallel.expert": 2},
    ],
)
def test_sampling_options_out_of_range_are_wrong_usage(capsys, run, options):
    refused(capsys, 2, *words(run, **options))


def test_it_ends_with_the_document(capsys, run, monkeypatch):
    from launcher.generation import generation_run as generation

    asked = []
    monkeypatch.setattr(
        generation, "stream", lambda model, ids, request, source: asked.append(request) or iter([300, 2])
    )
    code, _, err = call(capsys, *words(run))
    assert code == 0
    assert asked[0].stop_ids == {2}
    assert "then the document ended" in err


def test_a_checkpoint_without_a_tokenizer_asks_for_one(capsys, damaged_run, world):
    for path in (damaged_run / "checkpoints/step_000100").glob("tokenizer*"):
        path.unlink()
    assert "--tokenizer" in refused(capsys, 1, *words(damaged_run))
    out = succeed(capsys, *words(damaged_run, tokenizer=world / "tokenizer.model"))
    assert out


def test_a_hugging_face_folder_is_taken_as_it_is(capsys, world, run):
    code, out, _ = call(capsys, *words(world / "hf"))
    assert (code, out) == (0, reference(run, "def main", 8) + "\n")


def test_a_prompt_of_any_length_comes_from_a_file(capsys, run, tmp_path, monkeypatch):
    prompt = "def main():\r\n\tpass  ä\n"
    (tmp_path / "prompt").write_bytes(prompt.encode())
    asked = from_file(run, tmp_path / "prompt", "prompt-file")
    assert call(capsys, *asked)[1] == reference(run, prompt, 8) + "\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(prompt.encode())))
    assert call(capsys, *from_file(run, "-", "prompt-file"))[1] == reference(run, prompt, 8) + "\n"
    assert call(capsys, *asked, "--prompt=x")[0] == 2


def test_a_prompt_file_that_is_not_text_is_refused(capsys, run, tmp_path):
    (tmp_path / "prompt").write_bytes(b"abc\xff")
    assert "not UTF-8 at byte 3" in refused(capsys, 2, *from_file(run, tmp_path / "prompt", "prompt-file"))
    assert call(capsys, *from_file(run, tmp_path / "none", "prompt-file"))[0] == 2


def test_text_comes_token_by_token(capsys, run, monkeypatch):
    """Each token is written before the next one is computed."""
    from launcher.generation import generation_run as generation

    written, stream = [], generation.stream
    monkeypatch.setattr("launcher.cli.generate_command.write", lambda text: written.append(text))

    def watched(*args, **options):
        for number, token in enumerate(stream(*args, **options)):
            assert len(written) == number
            yield token

    monkeypatch.setattr(generation, "stream", watched)
    assert call(capsys, *words(run))[0] == 0
    assert len(written) == 9, "and the newline"


def test_the_other_ways_to_choose(capsys, run):
    from longctx.generation import Beams, Penalties, generate, load_model
    from longctx.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(run / "checkpoints/step_000100/tokenizer.model")
    ids = [tokenizer.document_begin, *tokenizer.encode("def main").tolist()]
    model = load_model(run)
    ends = {"stop_ids": tokenizer.special.stop_ids}

    beams = generate(model, ids, 8, Beams(num_beams=3, length_penalty=2.0), **ends)
    found = call(capsys, *words(run, beams=3, **{"length-penalty": 2.0}))[1]
    assert found == tokenizer.decode(beams) + "\n"

    penalties = Penalties(repetition=1.5, presence=0.5, frequency=0.25)
    given = {"repetition-penalty": 1.5, "presence-penalty": 0.5, "frequency-penalty": 0.25}
    penalised = generate(model, ids, 8, penalties=penalties, **ends)
    assert call(capsys, *words(run, **given))[1] == tokenizer.decode(penalised) + "\n"


def test_the_text_ends_before_a_stop_string(capsys, run):
    whole = reference(run, "def main", 8)
    for at in (1, len(whole) // 2):
        stop = whole[at : at + 3]
        code, out, _ = call(capsys, *words(run), "--stop=never there", f"--stop={stop}")
        assert (code, out) == (0, whole[: whole.index(stop)] + "\n")
    assert call(capsys, *words(run), "--stop=never there")[1] == whole + "\n"


def test_many_prompts_come_from_a_file(capsys, run, tmp_path):
    prompts = ["def main", "  ä 🙂\n", "import os\n", "x"]
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": prompt, "name": f"p{n}"}, ensure_ascii=False) for n, prompt in enumerate(prompts)]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    asked = from_file(run, path, **{"max-sequences": 2})
    code, out, err = call(capsys, *asked)
    assert (code, "4 prompts" in err) == (0, True)
    results = list(map(json.loads, out.splitlines()))
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert (result["prompt"], result["name"], result["index"]) == (prompt, f"p{index}", index)
        assert result["continuation"] == reference(run, prompt, 8)
    assert call(capsys, *asked, f"--output={tmp_path}/out.jsonl")[:2] == (0, "")
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == out


def test_lines_have_the_order_of_the_prompts_whichever_ends_first(capsys, run, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "def main"}\n{"prompt": "import os"}\n{"prompt": "class X:"}\n')
    whole = reference(run, "import os", 8)
    stop = next(text for text in (whole[n : n + 2] for n in range(len(whole))) if text.isascii())
    results = list(map(json.loads, call(capsys, *from_file(run, path, stop=stop))[1].splitlines()))
    assert results[1]["tokens"] < results[0]["tokens"]
    assert [result["index"] for result in results] == [0, 1, 2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no prompt"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2"),
        ('{"prompt": "a"}\n{"prompt": "\\ud83d"}', "line 2 is not JSON (it has an unpaired surrogate"),
        ('{"prompt": "a"}\n \n{"prompt": "b"}\n', "line 2 is empty"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(capsys, run, tmp_path, content, said):
    (tmp_path / "prompts.jsonl").write_text(content)
    assert said in refused(capsys, 2, *from_file(run, tmp_path / "prompts.jsonl"))


def test_the_text_may_go_to_a_file(capsys, run, tmp_path):
    path = tmp_path / "out.txt"
    assert call(capsys, *words(run, output=path))[:2] == (0, "")
    assert path.read_text() == reference(run, "def main", 8) + "\n"
    assert "already exists" in refused(capsys, 2, *words(run, output=path))
    assert "does not exist" in refused(capsys, 2, *words(run, output=tmp_path / "none/out.txt"))


@pytest.fixture
def unloaded(monkeypatch) -> None:
    """The test ends where a model is allocated."""
    monkeypatch.setattr(
        "launcher.generation.generation_run.build_decoder", lambda *_: pytest.fail("the model was loaded")
    )


@pytest.mark.usefixtures("unloaded")
def test_another_tokenizer_than_the_checkpoints_is_refused(capsys, run, small_tokenizer):
    """A model would answer, in words that it never meant."""
    err = refused(capsys, 2, *words(run, tokenizer=small_tokenizer))
    assert "differs from the tokenizer of" in err
    assert "Leave --tokenizer out" in err


def test_the_checkpoints_own_tokenizer_may_be_named(capsys, run, world):
    assert call(capsys, *words(run, tokenizer=world / "tokenizer.model"))[1] == reference(run, "def main", 8) + "\n"


@pytest.mark.usefixtures("unloaded")
def test_an_answer_beyond_the_models_positions_is_refused(capsys, run, tmp_path):
    """It used to be a warning, beside a text that may mean nothing."""
    num_positions = positions_of(run)
    err = refused(capsys, 2, *words(run, **{"max-new-tokens": num_positions}))
    assert f"limit is {num_positions} positions" in err
    length = int(re.findall(r"(\d+) tokens, ", err)[0])
    assert f"Use --max-new-tokens {num_positions - length}," in err
    assert "--beyond-positions" in err
    # Of a file the longest is named, and how many there are.
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "a b c d e f g"}\n{"prompt": "b"}\n')
    code, _, err = call(capsys, *from_file(run, path, **{"max-new-tokens": 4095}))
    assert (code, "line 2" in err, "3 of 3 prompts are too long" in err) == (2, True, True), err


def positions_of(run: Path) -> int:
    from longctx.checkpoint_format import CheckpointReader, find_checkpoint, model_config

    return model_config(CheckpointReader(find_checkpoint(run))).max_positions


def test_an_option_goes_beyond_the_positions_that_are_no_table(capsys, run, monkeypatch):
    from launcher.generation import generation_run as generation

    # Tokens are chosen elsewhere: this is about what is allowed.
    monkeypatch.setattr(generation, "stream", lambda *_, **__: iter([300, 2]))
    far = {"max-new-tokens": positions_of(run)}
    code, out, _ = call(capsys, *words(run, **far), "--beyond-positions")
    assert (code, bool(out)) == (0, True)
    monkeypatch.setattr(generation, "build_decoder", lambda *_: pytest.fail("the model was loaded"))
    opened = generation.open_model
    monkeypatch.setattr(generation, "open_model", lambda *given: with_a_table(opened(*given)))
    assert "learned positions" in refused(capsys, 2, *words(run, **far), "--beyond-positions")


def with_a_table(opened):
    model = replace(opened.model, position="learned")
    return replace(opened, model=model)


def test_a_prompt_without_an_id_is_refused(capsys, run, monkeypatch):
    """Of a tokenizer that begins no document with one."""
    monkeypatch.setattr("longctx.tokenizer.tokenizer_base.Tokenizer.encode_prompt", lambda self, text: [])
    assert "the prompt is empty" in refused(capsys, 2, *words(run, prompt=""))


@pytest.mark.slow
def test_an_interrupted_command_leaves_whole_lines(run, tmp_path):
    """After Ctrl-C, and after a kill that nothing can hear."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(f'{{"prompt": "def main{n}"}}\n' for n in range(4000)))
    asked = from_file(run, prompts, **{"max-new-tokens": 64})
    for ending, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        process = start(*asked, f"--output={output}")
        deadline = time.monotonic() + 60
        while not output.exists() or output.read_bytes().count(b"\n") < 20:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(ending)
        _, err = process.communicate(timeout=10)
        assert process.returncode == code
        assert "Traceback" not in err
        content = output.read_bytes()
        assert content.endswith(b"\n")
        assert [json.loads(line)["index"] for line in content.splitlines()] == list(range(content.count(b"\n")))
        if ending == signal.SIGINT:
            (said,) = re.findall(r"(\d+) of 4,000 prompts are written", err)
            # The signal may come between a line and its being counted.
            assert content.count(b"\n") - int(said) in (0, 1)
        output.unlink()
