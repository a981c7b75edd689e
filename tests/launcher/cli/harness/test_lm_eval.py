"""A model of ours in lm-eval beside lm-eval's own class for Hugging Face models, on the same weights."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longctx.errors import ConfigError
from tests.helpers import REPOSITORY
from tests.launcher.runs import free_port

REASON = "needs lm-eval and accelerate, which set-up leaves out: pip install 'longctx-train[lm-eval]' accelerate"
pytest.importorskip("lm_eval", reason=REASON)
pytest.importorskip("accelerate", reason=REASON)

TEXTS = (
    "import os\n\n\ndef main(arguments):\n    return os.path.join(arguments)\n",
    "class Reader:\n    def __init__(self, path: str) -> None:\n        self.path = path\n",
    "# Übergröße — 你好, 12345 + 67890\nvalue = [x ** 2 for x in range(10)]\n",
)
PAIRS = [
    *((text[:cut], text[cut:]) for text in TEXTS for cut in (1, 7, 20, 33)),
    *((TEXTS[0] * 3, end) for end in (" pass", " x", "):", " -> None:\n    pass")),
    *((TEXTS[1], "x"), ("import ", "os"), ("import\n\n ", "sys"), ("", "import os"), ("", TEXTS[2])),
]
TASKS = {
    "local_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
""",
    "local_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
""",
    "local_writing": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def instances(kind: str, arguments: list[tuple]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=words, idx=0) for words in arguments]  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def theirs(world: Path, run: Path):
    """lm-eval's own class, on the folder that the run's checkpoints came from."""
    from lm_eval.models.huggingface import HFLM

    # Its cache of logits is wrong where one text is cut at several points, as here.
    folder = str(world / "hf")
    return HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1, logits_cache=False)


@pytest.fixture(scope="session")
def ours(run: Path):
    from launcher.evaluation.harness.lm_eval_model import LongctxLM

    return LongctxLM(checkpoint=str(run), batch_size=3)


def test_log_likelihoods_are_theirs(ours, theirs):
    requests = instances("loglikelihood", PAIRS)
    for one, other in zip(ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True):
        assert one[1] == other[1]
        assert one[0] == pytest.approx(other[0], abs=1e-4)


@pytest.mark.parametrize("length", [None, 16])
def test_log_likelihoods_of_whole_texts_are_theirs(ours, theirs, monkeypatch, length):
    """Also of texts that are longer than the model's window."""
    if length is not None:
        monkeypatch.setattr(ours, "_limit", length)
        monkeypatch.setattr(theirs, "_max_length", length)
    requests = instances("loglikelihood_rolling", [(text,) for text in (*TEXTS, "x", TEXTS[0] * 4)])
    wanted = theirs.loglikelihood_rolling(requests)
    assert ours.loglikelihood_rolling(requests) == pytest.approx(wanted, abs=1e-4)


def test_greedy_texts_are_theirs(ours, theirs):
    for options in (
        {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False},
        {"until": [], "max_gen_toks": 24, "temperature": 0.0},
        {"until": ["e", "\n"], "max_gen_toks": 16},
        {"until": [], "max_gen_toks": 10, "num_beams": 3, "length_penalty": 0.5},
        {"until": [], "max_gen_toks": 10, "repetition_penalty": 1.3},
    ):
        contexts = [text[:cut] for text in TEXTS for cut in (9, 40)]
        requests = instances("generate_until", [(context, dict(options)) for context in contexts])
        assert whole(ours.generate_until(requests)) == whole(theirs.generate_until(requests)), options


def whole(texts: list[str]) -> list[str]:
    """Texts as far as their bytes are characters: of the same other bytes transformers makes more marks than Python."""
    return [text.partition("\ufffd")[0] for text in texts]


def test_texts_begin_as_theirs(ours, theirs):
    for text in (*TEXTS, "x", " x", "\n\nx", ""):
        assert ours._encoder.text(text) == theirs.tok_encode(text), text
    assert ours._encoder.prefix == theirs.prefix_token_id
    assert ours.max_length == theirs.max_length


def test_windows_are_theirs(ours):
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    encoder = ours._encoder
    for text in (*TEXTS, "x"):
        ids = encoder.text(text)
        for length in (1, 3, 16, len(ids) - 1, len(ids), 500):
            cut = get_rolling_token_windows(ids, encoder.prefix, length, 1)
            wanted = [make_disjoint_window(window) for window in cut]
            assert [(list(a), list(b)) for a, b in encoder.windows(text, length)] == wanted


def test_what_is_too_long_is_refused_and_never_cut(ours, monkeypatch):
    monkeypatch.setattr(ours, "_limit", 64)
    long = TEXTS[0] * 4
    for kind, arguments in (
        ("loglikelihood", [(TEXTS[1], " x"), (long, " x")]),
        ("generate_until", [(long, {"max_gen_toks": 2})]),
        ("generate_until", [("x", {"max_gen_toks": 64})]),
    ):
        with pytest.raises(ConfigError, match="Requests are not truncated"):
            getattr(ours, kind)(instances(kind, arguments))


TURN = "{{ '[' + message.role + '] ' + message.content + eos_token }}"
TRIMMED = TURN.replace("message.content", "(message.content | trim)")
CHAT = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "TURN{% endfor %}{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
QUESTION = [{"role": "user", "content": "def main(x)</s>: "}]
ASKED = [QUESTION, [*QUESTION, {"role": "assistant", "content": "a"}, *QUESTION], [{"role": "system", "content": "s"}]]
ASKED[2] = [*ASKED[2], *QUESTION]
BEGUN = [[*QUESTION, {"role": "assistant", "content": text}] for text in ("Answer:", "Answer: ", " \n Answer:\n")]


def give_template(folder: Path, template: str) -> None:
    """As a tuned model has it: transformers reads the control tokens that the template wrote."""
    (folder / "chat_template.jinja").write_text(template)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "split_special_tokens": False}))


@pytest.mark.parametrize("template", [CHAT.replace("TURN", TURN), "{{ bos_token }}" + CHAT.replace("TURN", TRIMMED)])
def test_chats_are_theirs(world, ours, tmp_path, template):
    """Texts, ids, log-likelihoods and replies; also of a turn that goes on, and where a system turn is refused."""
    from lm_eval.models.huggingface import HFLM

    folder = Path(shutil.copytree(world / "hf", tmp_path / "hf"))
    give_template(folder, template)
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, logits_cache=False)
    ours = type(ours)(checkpoint=str(folder), batch_size=3)
    assert ours.chat_template(chat_template=True) == theirs.chat_template(chat_template=True) == template
    contexts = []
    for turns, asks in [*((turns, True) for turns in ASKED), *((turns, False) for turns in BEGUN)]:
        contexts.append(ours.apply_chat_template(copy.deepcopy(turns), asks))
        assert contexts[-1] == theirs.apply_chat_template(copy.deepcopy(turns), asks)
        assert ours._encoder.text(contexts[-1]) == theirs.tok_encode(contexts[-1])
    pairs = instances("loglikelihood", [(context, end) for context in contexts for end in (" x", "y = 1\n")])
    for one, other in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert one == (pytest.approx(other[0], abs=1e-4), other[1])
    asked = instances("generate_until", [(context, {"until": ["\n\n"], "max_gen_toks": 9}) for context in contexts])
    assert whole(ours.generate_until(asked)) == whole(theirs.generate_until(asked))


def test_a_base_model_has_no_chat_template(ours):
    assert ours.chat_template() is None
    with pytest.raises(ConfigError, match="Leave out --apply_chat_template"):
        ours.chat_template(True)


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of lm-eval on a local file."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": text, "choices": [" x = 1", " return", "\n"], "answer": n % 3} for n, text in enumerate(TEXTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, content in TASKS.items():
        source = {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")}
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {json.dumps(source)}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(head + content.strip() + "\n")
    return folder


def command(tasks: Path, output: Path, *more: str) -> list[str]:
    words = ["--tasks", ",".join(TASKS), "--include_path", str(tasks), "--output_path", str(output), "--log_samples"]
    return [*words, "--device", "cpu", *more]


def start(program: list[str], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    folder = Path(sys.executable).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    # Of lm-eval's process group or of a test's there is nothing to inherit.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return subprocess.run(
        [*program, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=250
    )


def results(folder: Path) -> dict[str, Any]:
    """The scores and the answers that lm-eval wrote."""
    (path,) = folder.rglob("results_*.json")
    found: dict[str, Any] = {"results": json.loads(path.read_text())["results"]}
    for name in TASKS:
        (path,) = folder.rglob(f"samples_{name}_*.jsonl")
        found[name] = [json.loads(line)["resps"] for line in path.read_text().splitlines()]
    return found


def numbers(value: Any) -> list[Any]:
    """All that is in lists and dictionaries, in order; names of times and counts apart."""
    if isinstance(value, dict):
        return [part for name in sorted(value) for part in numbers(value[name])]
    if isinstance(value, list):
        return [part for item in value for part in numbers(item)]
    return [float(value) if str(value).lstrip("-").replace(".", "").isdigit() else value]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_gives_what_lm_eval_gives_by_itself(world, run, tasks, tmp_path):
    """By one process, and by two ranks that deepspeed starts, beside ``lm_eval --model hf``."""
    hf = start(
        [sys.executable, "-m", "lm_eval"],
        command(tasks, tmp_path / "hf", "--model", "hf", "--model_args", f"pretrained={world / 'hf'},dtype=float32"),
    )
    assert hf.returncode == 0, hf.stdout + hf.stderr
    wanted = results(tmp_path / "hf")
    deepspeed = [f"{Path(sys.executable).parent}/deepspeed", "--num_gpus", "2", "--master_port", f"{free_port()}"]
    for name, program in (
        ("one", [sys.executable, "-m", "launcher.lm_eval"]),
        ("two", [*deepspeed, "launcher/lm_eval.py"]),
    ):
        done = start(program, command(tasks, tmp_path / name, "--model_args", f"checkpoint={run}"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("|local_choice") == 1, "one rank answers"
        found = results(tmp_path / name)
        assert numbers(found) == pytest.approx(numbers(wanted), abs=1e-4)
    refused = start(
        [*deepspeed, "launcher/lm_eval.py"],
        command(tasks, tmp_path / "no", "--model_args", f"checkpoint={run},max_length=8"),
    )
    assert refused.returncode != 0
    assert (refused.stdout + refused.stderr).count("Requests are not truncated") == 1
    assert "Traceback" not in refused.stdout + refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_applies_a_chat_template_as_lm_eval_does(run, tasks, tmp_path, monkeypatch):
    """Also to requests that lm-eval kept from an earlier call."""
    folder = Path(shutil.copytree(run.parent / "hf", tmp_path / "model"))
    give_template(folder, CHAT.replace("TURN", TURN))
    monkeypatch.setenv("LM_HARNESS_CACHE_PATH", str(tmp_path / "kept"))
    asked = ["--apply_chat_template", "--cache_requests", "true"]
    hf = start(
        [sys.executable, "-m", "lm_eval"],
        command(tasks, tmp_path / "hf", "--model", "hf", "--model_args", f"pretrained={folder},dtype=float32", *asked),
    )
    assert hf.returncode == 0, hf.stdout + hf.stderr
    wanted = results(tmp_path / "hf")
    for name in ("first", "kept requests"):
        done = start(
            [sys.executable, "-m", "launcher.lm_eval"],
            command(tasks, tmp_path / name, "--model_args", f"checkpoint={folder}", *asked),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert numbers(results(tmp_path / name)) == pytest.approx(numbers(wanted), abs=1e-4)
    assert list((tmp_path / "kept").iterdir())
