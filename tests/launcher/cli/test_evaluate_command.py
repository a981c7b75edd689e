"""``evaluate``: one process and two ranks, stopping and going on, what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from data_pipeline.shards.reader import ShardSet
from longctx.errors import LongCtxError
from tests.data_pipeline.stores.conftest import fill, server, store  # noqa: F401  (fixtures)
from tests.data_pipeline.stores.s3_server import Store
from tests.helpers import run_distributed
from tests.launcher.cli.calls import call, deepspeed, refused, start, succeed
from tests.launcher.cli.conftest import train_tokenizer

LENGTHS = (320, 450)
TASKS = "niah,passkey,ppl,longppl"
SCREEN = 25


def words(run: Path, output: Path, **options: object) -> list[object]:
    given = {
        "checkpoint": run,
        "tasks": TASKS,
        "lengths": ",".join(map(str, LENGTHS)),
        "output": output,
        "samples": 2,
        "depths": "0,1",
        "haystack": run.parent / "data/validation",
        "chunk-tokens": 100,
        "longppl-truncation": 64,
        "longppl-window": 100,
        **options,
    }
    return ["evaluate", *(f"--{name}={value}" for name, value in given.items() if value is not None)]


def options_of(arguments: list[object]):
    """The values of a command line."""
    from launcher.cli.cli_commands import parse
    from launcher.cli.evaluate_command import _options

    bound = parse([str(word) for word in arguments])
    return _options(bound.args[0] if bound.args else bound.keywords["flags"])  # type: ignore[attr-defined]


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def evaluated(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished evaluation. Read-only: go on in a copy."""
    from launcher.evaluation.evaluation_run import evaluate_checkpoint

    output = tmp_path_factory.mktemp("evaluated") / "out"
    evaluate_checkpoint(options_of(words(run, output)), no_progress)
    return output


def test_every_sample_has_its_row(evaluated):
    keys = {(row["task"], row["length"], row["index"]) for row in lines(evaluated)}
    assert keys == {(task, length, n) for task in TASKS.split(",") for length in LENGTHS for n in range(2)}
    for row in lines(evaluated):
        if row["kind"] == "score":
            assert row["prompt_tokens"] <= row["length"] - 16
        elif row["task"] == "ppl":
            assert row["num_tokens"] == row["count"] == row["length"] - 1
            assert sum(part["count"] for part in row["by_position"]) == row["count"]
        else:
            assert row["num_tokens"] == row["length"] - 64


def test_outputs_are_the_models_greedy_continuations(evaluated, run):
    from longctx.evaluation import Haystack, Setting, find_tasks
    from longctx.generation.load_decoder import load_model
    from longctx.generation.loop import generate
    from longctx.tokenizer import load_tokenizer

    tokenizer, model = load_tokenizer(run), load_model(run)
    (task,) = find_tasks(["passkey"])
    setting = Setting(tokenizer=tokenizer, depths=(0.0, 1.0), haystack=Haystack(["a b. c"], source="none"))
    sample = next(task.samples(setting, LENGTHS[0], 1))
    ids = tokenizer.encode_prompt(sample.prompt)
    new = generate(model, ids, sample.answer_tokens, stop_ids=tokenizer.special.stop_ids)
    (row,) = [row for row in lines(evaluated) if (row["task"], row["length"], row["index"]) == ("passkey", 320, 0)]
    assert row["output"] == tokenizer.decode(ids + new)[len(tokenizer.decode(ids)) :]


def test_losses_are_the_models_own(evaluated, run):
    from data_pipeline.shards.reader import ShardSet
    from longctx.generation.load_decoder import load_model
    from longctx.generation.prefill import sequence_nll

    shards = ShardSet.open(run.parent / "data/validation")
    first = next(n for n in range(shards.num_documents) if len(shards.document(n)) >= 450)
    ids = shards.document(first)[:450].tolist()
    model = load_model(run)
    nll = sequence_nll(model, ids)
    rows = {row["task"]: row for row in lines(evaluated) if row["length"] == 450 and row["index"] == 0}
    assert rows["ppl"]["nll"] == pytest.approx(float(nll.double().sum()), rel=1e-6)
    # LongPPL again, token by token of one window: the last of them.
    start = range(0, 450 - 64, 100)[-1]
    near = sequence_nll(model, ids[start:])[63:]
    full = nll[start + 63 :]
    is_key = (near - full > 2) & (full < 2)
    assert int(is_key.sum()) <= rows["longppl"]["count"]


def test_two_ranks_give_the_answers_of_one_process(run, evaluated, tmp_path):
    """Two that share each prompt, two that each have samples of their own, and two of which one is refused."""
    few = {"tasks": "passkey,ppl", "lengths": "320"}
    shared = words(run, tmp_path / "shared", **few)
    own = words(run, tmp_path / "own", **few, **{"parallel.context": 1})
    refused = words(run, tmp_path / "refused", tasks="niah", lengths="40")
    run_distributed(evaluate_on_ranks, 2, [shared, own], refused, timeout=100.0)
    for name in ("shared", "own"):
        check_same_rows(tmp_path / name, evaluated, part=("passkey", "ppl"), length=320)
    assert not (tmp_path / "refused").exists()


def evaluate_on_ranks(commands: list[list[object]], refused: list[object]) -> None:
    """Rows alone: pictures take longer."""
    import launcher.evaluation.evaluation_run as module

    module.write_results = lambda folder: folder
    for arguments in commands:
        module.evaluate_checkpoint(options_of(arguments), no_progress)
    # Rank 0 alone meets it, and the other one does not wait for ever.
    with pytest.raises(LongCtxError, match="length=40"):
        module.evaluate_checkpoint(options_of(refused), no_progress)


def no_progress(*_: object) -> AbstractContextManager:
    return nullcontext(lambda *_, **__: None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_deepspeed_starts_it_on_two_ranks(run, evaluated, tmp_path):
    done = start_deepspeed(words(run, tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    check_same_rows(tmp_path / "out", evaluated)
    assert done.stdout.count("report.html") == 1
    assert start_deepspeed(["evaluate", "--list"]).stdout.count("five digits among repeated sentences") == 1
    wrong = start_deepspeed(words(run, tmp_path / "other", tasks="nihah"))
    assert wrong.returncode != 0
    assert (wrong.stdout + wrong.stderr).count("'nihah' is unknown") == 1
    assert "Traceback" not in wrong.stdout + wrong.stderr


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_interrupted_command_goes_on_where_it_stopped(capsys, run, evaluated, tmp_path):
    process = start(*words(run, tmp_path / "out"))
    path = tmp_path / "out/results.jsonl"
    deadline = time.monotonic() + 90
    while not path.exists() or len(path.read_bytes().splitlines()) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert "the same command resumes from there" in err
    assert "Traceback" not in err
    before = path.read_bytes()
    assert before.count(b"\n") < len(lines(evaluated))
    assert call(capsys, *words(run, tmp_path / "out"))[0] == 0
    assert path.read_bytes().startswith(before)
    check_same_rows(tmp_path / "out", evaluated)


def start_deepspeed(arguments: list[object]) -> subprocess.CompletedProcess[str]:
    """The command that a user types, on two ranks of this machine."""
    command, options = deepspeed("launcher/evaluate.py", *arguments[1:])
    return subprocess.run(command, capture_output=True, text=True, timeout=90, **options)


def check_same_rows(
    folder: Path, other: Path, *, part: Sequence[str] = tuple(TASKS.split(",")), length: int | None = None
) -> None:
    """Outputs and counts are equal; losses to 1e-5 of a nat a token."""
    found, wanted = ({(r["task"], r["length"], r["index"]): r for r in lines(path)} for path in (folder, other))
    wanted = {key: row for key, row in wanted.items() if key[0] in part and key[1] in (length or key[1],)}
    assert set(found) == set(wanted)
    for key, row in wanted.items():
        if row["kind"] == "score":
            assert found[key] == row
        else:
            assert found[key]["count"] == row["count"]
            assert abs(found[key]["nll"] - row["nll"]) <= 1e-5 * max(1, row["count"])


def test_going_on_equals_not_stopping(capsys, run, evaluated, tmp_path):
    """Cut in the middle of a line, as a kill leaves it."""
    shutil.copytree(evaluated, tmp_path / "out")
    path = tmp_path / "out/results.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n", len(whole) // 2) + 20])
    summary = (tmp_path / "out/summary.json").read_bytes()
    (tmp_path / "out/summary.json").unlink()
    out = succeed(capsys, *words(run, tmp_path / "out"))
    assert path.read_bytes() == whole
    assert (tmp_path / "out/summary.json").read_bytes() == summary
    assert "report.html" in out


def test_what_is_done_is_not_measured_again(capsys, run, evaluated, tmp_path, monkeypatch):
    import launcher.evaluation.evaluation_run as module

    shutil.copytree(evaluated, tmp_path / "out")
    monkeypatch.setattr(module, "build_decoder", lambda *_: pytest.fail("the model was loaded"))
    out = succeed(capsys, *words(run, tmp_path / "out"), "--json")
    assert json.loads(out)["scores"][0]["task"] == "niah"


def test_other_settings_in_the_same_folder_are_refused(capsys, run, evaluated):
    before = (evaluated / "results.jsonl").read_bytes()
    err = refused(capsys, 2, *words(run, evaluated, seed=7, dtype="bfloat16"))
    assert "seed: stored 42, requested 7" in err
    assert "dtype: stored 'float32', requested 'bfloat16'" in err
    assert "another --output" in err
    assert (evaluated / "results.jsonl").read_bytes() == before


def test_samples_together_have_the_answers_of_each_alone(run, evaluated, tmp_path, monkeypatch):
    import launcher.evaluation.evaluation_run as module

    groups = []
    monkeypatch.setattr(module, "TOGETHER_TOKENS", 320)
    monkeypatch.setattr(module, "write_results", lambda folder: folder)
    written = module.write_answers
    monkeypatch.setattr(module, "write_answers", lambda *given: groups.append(len(given[1])) or written(*given))
    module.evaluate_checkpoint(options_of(words(run, tmp_path / "out", tasks="passkey", lengths="320")), no_progress)
    check_same_rows(tmp_path / "out", evaluated, part=("passkey",), length=320)
    assert groups == [1, 1]


def test_a_hugging_face_folder_gives_the_same(capsys, world, run, evaluated, tmp_path):
    haystack = world / "data/validation"
    given = {"tasks": "passkey", "lengths": "320", "depths": "0,1,0.5,0.25"}
    arguments = words(world / "hf", tmp_path / "out", haystack=haystack, **given)
    code, _, err = call(capsys, *arguments)
    assert code == 0, err
    assert "leaves these depths without a sample: 0.25, 0.5" in err
    wanted = [row for row in lines(evaluated) if (row["task"], row["length"]) == ("passkey", 320)]
    assert lines(tmp_path / "out") == wanted


@pytest.mark.slow
def test_text_in_a_store_is_the_same_text(capsys, world, run, tmp_path, store: Store):  # noqa: F811
    fill(store, world / "data/validation", "corpora/held-out")
    fill(store, world / "corpus", "corpora/texts")
    given = {"tasks": "niah,ppl", "lengths": "320", "samples": 1}
    for number, (here, there) in enumerate(
        [(world / "data/validation", "s3://corpora/held-out"), (world / "corpus", "s3://corpora/texts")]
    ):
        outputs = [tmp_path / f"{number}_here", tmp_path / f"{number}_there"]
        for output, haystack in zip(outputs, (here, there), strict=True):
            succeed(capsys, *words(run, output, haystack=haystack, **given))
        assert lines(outputs[0]) == lines(outputs[1])
    err = refused(capsys, 2, *words(run, tmp_path / "out", haystack="s3://corpora/nowhere", **given))
    assert "--haystack s3://corpora/nowhere does not exist" in err


def test_a_folder_in_a_run_is_a_part_of_its_report(capsys, damaged_run, world):
    """The validation folder of the run's config is the haystack that nobody named."""
    (damaged_run / "config.toml").write_text(f'[data]\ntrain = "{world / "data"}"\n')
    (damaged_run / "metrics.jsonl").write_text("")
    output = damaged_run / "evaluation"
    arguments = words(damaged_run, output, tasks="niah", lengths="320", haystack=None)
    out = succeed(capsys, *arguments)
    assert out.strip().endswith(str(damaged_run.resolve() / "report.html"))
    page = (damaged_run / "report.html").read_text()
    assert "Evaluation evaluation" in page
    assert "niah by length and depth" in page
    assert not (output / "report.html").exists()


def test_teacher_forcing_is_the_same_event_as_greedy_decoding(run):
    """With the model's own continuation as the right answer every token is right, and with another one none after it
    is written."""
    from launcher.evaluation.answer import forced
    from longctx.generation.load_decoder import load_model
    from longctx.generation.loop import generate

    model, prompt = load_model(run), [1, *range(20, 90)]
    greedy = generate(model, prompt, 7)
    assert forced(model, prompt, greedy[:6], 32) == greedy
    wrong = [*greedy[:3], (greedy[3] + 1) % 600, 5, 6]
    assert forced(model, prompt, wrong, 32) == greedy[:4]


def test_teacher_forcing_is_for_tasks_whose_score_asks_for_the_target():
    from launcher.evaluation.answer import is_same_event
    from longctx.evaluation import TASKS

    exact = {name for name, task in TASKS.items() if is_same_event(task)}
    assert {"niah", "passkey", "phonebook", "copy"} <= exact
    assert not exact & {"niah_multivalue", "graphwalks_bfs", "numbered_requests", "ruler_niah_single_1", "ruler_vt"}


BAD = [
    ({"tasks": "nihah"}, 2, ["'nihah' is unknown", "Did you mean niah?"]),
    ({"lengths": "100000"}, 2, ["--lengths 100000", "positions", "--beyond-positions"]),
    ({"tasks": "niah", "lengths": "40"}, 2, ["length=40", "Try length="]),
    ({"tasks": "longppl", "longppl-truncation": 450}, 2, ["longppl", "450"]),
    ({"tasks": "passkey", "answer-tokens": 2}, 1, ["reserves 2 tokens for its answer", "answer_tokens="]),
    ({"depths": "0,2"}, 2, ["depths", "fraction"]),
    ({"checkpoint": "EMPTY"}, 1, ["neither a checkpoint"]),
    ({"haystack": "NOWHERE"}, 2, ["NOWHERE does not exist"]),
    ({"parallel.context": 3}, 2, ["parallel.context=3 does not divide the 1 rank", "--ranks 3"]),
]


@pytest.mark.parametrize(("options", "code", "said"), BAD, ids=[str(options) for options, _, _ in BAD])
def test_bad_input_is_one_screen_before_anything_is_allocated(capsys, run, tmp_path, monkeypatch, options, code, said):
    import launcher.evaluation.evaluation_run as module

    monkeypatch.setattr(module, "build_decoder", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "empty").mkdir()
    options = {name: tmp_path / "empty" if value == "EMPTY" else value for name, value in options.items()}
    err = refused(capsys, code, *words(run, tmp_path / "out", **options))
    for part in said:
        assert part in err
    assert len(err.splitlines()) < SCREEN
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_left_out_and_the_rest_is_measured(capsys, run, evaluated, tmp_path):
    shards = ShardSet.open(run.parent / "data/validation")
    beyond = max(len(shards.document(number)) for number in range(shards.num_documents)) + 1
    given = {"lengths": f"40,320,{beyond}", "beyond-positions": True}
    arguments = words(run, tmp_path / "out", tasks="niah,passkey,ppl", **given)
    arguments = [str(word).replace("--beyond-positions=True", "--beyond-positions") for word in arguments]
    code, _, err = call(capsys, *arguments)
    assert code == 0, err
    assert "the task's prompts do not fit the length: niah at 40, passkey at 40" in err
    assert f"Skipped ppl and longppl at {beyond:,}: the longest document" in err
    found = {(row["task"], row["length"]) for row in lines(tmp_path / "out")}
    wanted = {("niah", 320), ("passkey", 320), ("niah", beyond), ("passkey", beyond), ("ppl", 40), ("ppl", 320)}
    assert found == wanted
    same = [row for row in lines(evaluated) if (row["task"], row["length"]) == ("niah", 320)]
    assert [row for row in lines(tmp_path / "out") if (row["task"], row["length"]) == ("niah", 320)] == same
    page = (tmp_path / "out" / "report.html").read_text()
    assert ": failed samples" in page


def test_no_haystack_is_read_for_prompts_that_fit_nowhere(capsys, run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "launcher.evaluation.evaluated_model.read_texts", lambda folder: pytest.fail("the text was read")
    )
    err = refused(capsys, 2, *words(run, tmp_path / "out", tasks="niah,ruler_niah_single_2", lengths="40,50"))
    assert "length=40: task niah needs at least" in err


@pytest.mark.slow
def test_a_folder_of_no_run_is_asked_about_the_standard_library(capsys, world, run, tmp_path):
    assert run.parent == world, "the run's fixture writes the folder"
    given = {"tasks": "niah", "lengths": "320", "samples": 2, "haystack": None}
    code, _, err = call(capsys, *words(world / "hf", tmp_path / "out", **given))
    assert code == 0, err
    assert "available validation folder, so the text is the Python standard library's source" in err
    assert len(lines(tmp_path / "out")) == 2
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["text_folder"] == "stdlib"


def test_words_of_other_tools_are_understood(run, tmp_path):
    arguments = [
        str(word).replace("--samples", "--limit") for word in words(run, tmp_path / "out", lengths="4k,1M,512")
    ]
    options = options_of(["eval", *arguments[1:]])
    assert (options.samples, options.lengths) == (2, (512, 4096, 1_048_576))
    for wrong in ("k", "4kk", "4 096", "1e3"):
        with pytest.raises(LongCtxError, match="integer token counts"):
            options_of(words(run, tmp_path / "out", lengths=wrong))


def test_a_haystack_of_a_few_words_is_refused(capsys, run, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/one.txt").write_text("Nothing is said here.")
    for task, said in (("niah", "needs at least 16 words"), ("ppl", "the longest document")):
        code, _, err = call(capsys, *words(run, tmp_path / "out", tasks=task, haystack=tmp_path / "text"))
        assert (code, said in err, "has 0 tokens" in err) == (1, True, False), err


def test_shards_of_another_tokenizer_are_refused(capsys, run, world, small_tokenizer, tmp_path):
    built = ["--source", world / "corpus", "--tokenizer", small_tokenizer, "--output", tmp_path / "data"]
    assert call(capsys, "data", "build", *built)[0] == 0
    err = refused(capsys, 1, *words(run, tmp_path / "out", tasks="ppl", haystack=tmp_path / "data"))
    assert "different tokenizer" in err


def test_a_tokenizer_that_does_not_match_is_refused(capsys, damaged_run, world, tmp_path):
    """Beside the checkpoint's own, and where it has none."""
    tokenizer = train_tokenizer(world, tmp_path / "large.model", 700)
    given = {"haystack": world / "data/validation"}
    assert "Leave --tokenizer out" in refused(
        capsys, 2, *words(damaged_run, tmp_path / "out", tokenizer=tokenizer, **given)
    )
    # The checkpoint's own by another path is no other.
    own = words(damaged_run, tmp_path / "out", tokenizer=world / "tokenizer.model", tasks="niah", lengths=40, **given)
    assert "length=40" in call(capsys, *own)[2]
    for path in (damaged_run / "checkpoints/step_000100").glob("tokenizer*"):
        path.unlink()
    # Of another size, and with nothing to compare it with: refused as soon as a text has an id beyond the model's.
    given = {"haystack": world / "corpus"}
    assert "and the model has rows for ids 0 to 599" in refused(
        capsys, 1, *words(damaged_run, tmp_path / "out", tokenizer=tokenizer, **given)
    )
    assert "--tokenizer F" in refused(capsys, 1, *words(damaged_run, tmp_path / "out", **given))


def test_a_loss_that_is_no_number_ends_the_evaluation(capsys, world, run, tmp_path):
    """A mean with it would be no number either, or hide it. A broken weight ends it before, for scores as well."""
    import torch

    from longctx.conversion import load_hf, save_hf

    config, weights = load_hf(world / "hf")
    weights = dict(weights)
    name = next(name for name in weights if name.endswith("norm.weight"))
    for value, tasks, said in (
        (3e38, "ppl", "is not finite from token 1 on"),
        (torch.nan, "passkey", f"{name} contains non-finite values"),
    ):
        weights[name] = torch.full_like(weights[name], value)
        folder = tmp_path / tasks
        save_hf(config, weights, folder, tokenizer=world / "tokenizer.model")
        given = {"haystack": world / "data/validation", "tasks": tasks, "lengths": "320"}
        assert said in refused(capsys, 1, *words(folder, tmp_path / "out", **given))
        assert not (tmp_path / "out/results.jsonl").exists()
        shutil.rmtree(tmp_path / "out")


def test_a_folder_of_texts_that_has_changed_is_refused(capsys, run, evaluated, tmp_path):
    shutil.copytree(evaluated, tmp_path / "out")
    path = tmp_path / "out/results.jsonl"
    path.write_text(re.sub(r'"document": "[^"]*"', '"document": "another"', path.read_text(), count=1))
    assert "the text folder has changed" in refused(capsys, 1, *words(run, tmp_path / "out", samples=3))


def test_a_damaged_evaluation_leaves_the_report_of_its_run(evaluated, damaged_run):
    from launcher.report.page import write_report

    (damaged_run / "config.toml").write_text("")
    (damaged_run / "metrics.jsonl").write_text("")
    shutil.copytree(evaluated, damaged_run / "evaluation")
    (damaged_run / "evaluation/results.jsonl").write_text("{}\n")
    page = write_report(damaged_run).read_text()
    assert "results.jsonl, line 1, is not an evaluation row" in page


def test_the_group_ruler_leaves_out_what_lacks_its_file(run, tmp_path):
    tasks, measures, left_out = options_of(words(run, tmp_path / "out", tasks="ruler")).chosen()
    assert left_out == ["ruler_qa_1", "ruler_qa_2"]
    assert (len(tasks), measures) == (11, [])


def test_samples_are_dealt_to_data_ranks_once():
    from launcher.evaluation.evaluation_run import consecutive, split_evenly

    for indices in ((), (3,), (0, 1, 2, 5, 6, 9), tuple(range(11))):
        for degree in (1, 2, 3, 8):
            blocks = split_evenly(indices, degree)
            assert [index for block in blocks for index in block] == list(indices)
            assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
        assert [index for part in consecutive(indices) for index in part] == list(indices)
    assert list(consecutive((0, 1, 2, 5, 6, 9))) == [range(3), range(5, 7), range(9, 10)]
