"""The command line as a user meets it: results, what goes to which stream, exit codes, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from launcher.cli import console as cli_console
from launcher.cli import verbs as cli
from launcher.cli.verbs import UNBUILT, main
from tests.helpers import REPOSITORY

VOCAB_SIZE = 600
VERBS = [
    ("tokenizer", "train"),
    ("data", "build"),
    ("data", "inspect"),
    ("data", "verify"),
    ("convert",),
    ("checkpoint", "list"),
    ("checkpoint", "verify"),
    ("generate",),
    ("report",),
]


# --------------------------------------------------------------------------------------- a small world, made by verbs


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, a tokenizer, shards, a Hugging Face folder and a run. Read-only: damage copies."""
    folder = tmp_path_factory.mktemp("world")
    stdlib = Path(sysconfig.get_path("stdlib"))
    (folder / "corpus").mkdir()
    for path in [path for path in sorted(stdlib.glob("*.py")) if 2_000 < path.stat().st_size < 12_000][:24]:
        shutil.copyfile(path, folder / "corpus" / path.name)
    corpus, tokenizer = str(folder / "corpus"), str(folder / "tokenizer.model")
    assert main(["tokenizer", "train", "--source", corpus, "--vocab-size", str(VOCAB_SIZE), "--output", tokenizer]) == 0
    options = ["--validation-fraction", "0.3", "--shard-tokens", "20000"]
    assert (
        main(["data", "build", "--source", corpus, "--tokenizer", tokenizer, "--output", f"{folder}/data", *options])
        == 0
    )
    return folder


@pytest.fixture(scope="module")
def run(world: Path) -> Path:
    """A run folder with checkpoints of two steps: a random model, through a Hugging Face folder of its own."""
    import torch

    from longctx.conversion import save_hf
    from longctx.model.decoder import Decoder
    from tests.longctx.samples import randomize, tiny_config

    torch.set_num_threads(1)
    model = Decoder(tiny_config(vocab_size=VOCAB_SIZE), seed=None)
    randomize(model, std=0.15, seed=0)
    save_hf(model.config, model.state_dict(), world / "hf", tokenizer=world / "tokenizer.model")
    for step in (20, 100):
        output = world / f"run/checkpoints/step_{step:06d}"
        assert main(["convert", "--from", "hf", str(world / "hf"), str(output)]) == 0
    return world / "run"


@pytest.fixture
def damaged_run(run: Path, tmp_path: Path) -> Path:
    """A copy of ``run`` to break."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one verb."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def start(*words: object, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "launcher", *map(str, words)]
    pipe = subprocess.PIPE

    def hear_interrupts() -> None:  # a shell's background jobs, and so perhaps these tests, ignore them
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    options = {"preexec_fn": hear_interrupts, **options}
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True, **options)


# --------------------------------------------------------------------------------------------------------------- help


class TestHelp:
    @pytest.mark.parametrize("verb", VERBS, ids=" ".join)
    def test_every_verb_teaches_with_an_example_that_parses(self, capsys, verb):
        code, out, _ = call(capsys, *verb, "--help")
        assert code == 0
        name = cli.program()
        examples = [line.strip() for line in out.splitlines() if line.startswith(f"  {name} ")]
        assert examples
        for example in examples:
            words = cli_console.shlex.split(example.removeprefix(name))
            assert words[: len(verb)] == list(verb)
            assert callable(cli.build_parser().parse_args(words).verb)

    def test_examples_of_the_overview_parse(self, capsys):
        code, out, _ = call(capsys, "--help")
        name = cli.program()
        examples = [line.strip() for line in out.splitlines() if line.startswith(f"  {name} ")]
        assert code == 0
        assert len(examples) == 5
        for example in examples:
            cli.build_parser().parse_args(cli_console.shlex.split(example.removeprefix(name)))

    def test_help_imports_nothing_heavy_and_comes_at_once(self):
        program = (
            "import sys; from launcher.cli import main; code = main(['--help']);"
            "heavy = {'torch', 'deepspeed', 'pyarrow', 'numpy', 'rich', 'matplotlib'} & set(sys.modules);"
            "sys.exit(f'{heavy}' if heavy else code)"
        )
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert time.monotonic() - started < 2  # 0.1 s on an idle machine

    @pytest.mark.parametrize("name", UNBUILT, ids=" ".join)
    def test_unbuilt_names_are_not_advertised_and_say_so(self, capsys, name):
        _, overview, _ = call(capsys, *name[:-1], "--help")
        listed = {line.split()[0] for line in overview.partition("VERB")[2].splitlines() if re.match(r" {4}\w", line)}
        assert name[-1] not in listed
        code, out, err = call(capsys, *name, "--anything", "goes")
        assert (code, out) == (2, "")
        assert "not built yet" in err
        assert err.count("\n") == 1


# ------------------------------------------------------------------------------------------------------- wrong usage


class TestWrongUsage:
    @pytest.mark.parametrize(
        "words",
        [
            [],
            ["frobnicate"],
            ["data"],
            ["data", "inspect"],
            ["data", "build", "--source", "stdlib"],
            ["data", "inspect", "x", "--seq-len", "many"],
            ["data", "inspect", "x", "--row", "1"],
            ["data", "inspect", "x", "--seq", "64"],
            ["convert", "a", "b"],
            ["convert", "--to", "hf", "--from", "hf", "a", "b"],
            ["convert", "--to", "gguf", "a", "b"],
            ["convert", "--to", "hf", "a", "b", "--dtype", "int8"],
            ["convert", "--to", "hf", "a", "b", "--verify", "most"],
            ["convert", "--to", "hf", "a"],
            ["generate", "--checkpoint", "x", "--prompt", "y"],
        ],
        ids=" ".join,
    )
    def test_ends_with_2_and_words(self, capsys, words):
        code, out, err = call(capsys, *words)
        assert (code, out) == (2, "")
        assert 1 <= len(err.strip().splitlines()) <= 4

    @pytest.mark.parametrize(
        ("words", "names"),
        [
            (["tokenizer", "train", "--source", "NO", "--vocab-size", 600, "--output", "OUT"], "does not exist"),
            (["data", "build", "--source", "stdlib", "--tokenizer", "NO", "--output", "OUT"], "tokenizer train"),
            (["data", "inspect", "NO"], "data build"),
            (["data", "verify", "NO"], "data build"),
            (["data", "verify", "EMPTY"], "not a shard folder"),
            (["convert", "--to", "hf", "EMPTY", "OUT"], "neither a checkpoint"),
            (["convert", "--from", "hf", "EMPTY", "OUT"], "config.json"),
            (["convert", "--to", "hf", "NO", "OUT"], "does not exist"),
            (["convert", "--from", "hf", "NO", "OUT"], "does not exist"),
            (["convert", "--from", "hf", "EMPTY", "WITHIN"], "lies inside of"),
            (["checkpoint", "list", "EMPTY"], "not a run folder"),
            (["checkpoint", "verify", "NO"], "does not exist"),
            (["generate", "--checkpoint", "EMPTY", "--prompt", "", "--max-new-tokens", 1], "neither a checkpoint"),
            (["report", "EMPTY"], "not a run folder"),
        ],
        ids=lambda value: " ".join(map(str, value[:3])) if isinstance(value, list) else None,
    )
    def test_missing_things_end_with_1_and_leave_nothing(self, capsys, tmp_path, words, names):
        (tmp_path / "empty").mkdir()
        places = {"NO": tmp_path / "no", "EMPTY": tmp_path / "empty", "OUT": tmp_path / "out"}
        places["WITHIN"] = places["EMPTY"] / "out"
        code, out, err = call(capsys, *(places.get(word, word) for word in words))
        assert (code, out) == (1, "")
        assert names in err
        assert "Traceback" not in err
        assert [path.name for path in tmp_path.iterdir()] == ["empty"]

    def test_a_file_system_that_refuses_is_no_traceback(self, capsys, monkeypatch):
        def refuse(arguments):
            Path("/proc/version/x").read_text()

        monkeypatch.setattr("launcher.cli.convert.report", refuse)
        code, _, err = call(capsys, "report", "x")
        assert code == 1
        assert "/proc/version/x: Not a directory." in err
        assert "Traceback" not in err

    def test_a_missing_package_is_named_and_ours_is_a_fault(self, capsys, monkeypatch):
        for name, fault in (("pyarrow.parquet", False), ("longctx.nothing", True)):

            def fail(arguments, name=name):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

            monkeypatch.setattr("launcher.cli.convert.report", fail)
            code, _, err = call(capsys, "report", "x")
            assert code == 1
            assert ("Traceback" in err) is fault
            assert ("make setup" in err) is not fault


# ------------------------------------------------------------------------------------------------- tokenizer and data


class TestData:
    def test_tokenizer_says_what_it_made_and_what_comes_next(self, capsys, world, tmp_path):
        output = tmp_path / "f.model"
        words = ["tokenizer", "train", "--source", world / "corpus", "--vocab-size", VOCAB_SIZE, "--output", output]
        code, out, _ = call(capsys, *words, "--exclude", "*.txt")
        assert code == 0
        assert output.read_bytes() == (world / "tokenizer.model").read_bytes()
        made, following = out.splitlines()
        assert made.startswith(f"{output}: 600 ids, trained on 24 documents, ")
        assert following.startswith("Next: ")
        assert (
            f"data build --source {world / 'corpus'} --exclude '*.txt' --tokenizer {output} --output DIR" in following
        )

    def test_tokenizer_of_a_sample_says_so(self, capsys, world, tmp_path):
        words = ["--source", world / "corpus", "--vocab-size", 400, "--output", tmp_path / "f"]
        _, out, _ = call(capsys, "tokenizer", "train", *words, "--max-text-bytes", 30_000)
        assert "a sample of 29.3 KiB from 24 documents" in out

    def test_a_vocabulary_that_cannot_be_is_refused(self, capsys, world, tmp_path):
        words = ["tokenizer", "train", "--source", world / "corpus", "--output", tmp_path / "f", "--vocab-size"]
        code, _, err = call(capsys, *words, 100_000)
        assert code == 1
        assert re.search(r"Try \d+ or less", err)
        assert list(tmp_path.iterdir()) == []

    def test_build_prints_its_splits_and_does_nothing_twice(self, capsys, world):
        words = ["data", "build", "--source", world / "corpus", "--tokenizer", world / "tokenizer.model"]
        options = ["--output", world / "data", "--validation-fraction", "0.3", "--shard-tokens", "20000"]
        code, out, _ = call(capsys, *words, *options)
        assert code == 0
        assert "up to date" in out
        assert f"--data.train {world / 'data'}" in out
        rows = [line.split() for line in out.splitlines()[1:3]]
        assert [row[0] for row in rows] == ["training", "validation"]
        assert sum(int(row[1]) for row in rows) == 24

    def test_build_json_is_all_of_stdout(self, capsys, world, tmp_path):
        corpus = world / "corpus"
        two = sorted(path.name for path in corpus.iterdir())[:2]
        words = ["data", "build", "--source", corpus, "--tokenizer", world / "tokenizer.model", "--json"]
        code, out, err = call(
            capsys, *words, "--output", tmp_path / "d", "--exclude", two[0], "--exclude", two[1], "nope/*"
        )
        found = json.loads(out)
        assert code == 0
        assert found["skipped"] == {"excluded": 2}
        assert found["training"]["documents"] + (found["validation"] or {"documents": 0})["documents"] == 22
        assert found["training"]["bytes_per_token"] > 1
        assert "'nope/*' matches no file" in err

    def test_build_refuses_a_folder_made_of_other_things_until_told(self, capsys, world, tmp_path):
        words = ["data", "build", "--source", world / "corpus", "--tokenizer", world / "tokenizer.model", "--output"]
        assert call(capsys, *words, tmp_path / "d")[0] == 0
        code, _, err = call(capsys, *words, tmp_path / "d", "--validation-fraction", "0.2")
        assert (code, "another options" in err) == (1, True)
        assert call(capsys, *words, tmp_path / "d", "--validation-fraction", "0.2", "--overwrite")[0] == 0

    def test_inspect_shows_packing_and_a_row(self, capsys, world):
        code, out, err = call(capsys, "data", "inspect", world / "data", "--seq-len", 512, "--row", 0)
        assert (code, err) == (0, "")
        assert re.search(r"^truncated tokens +0 +0$", out, re.MULTILINE)
        assert "row 0 of" in out
        assert ".py: tokens" in out

    def test_inspect_json_parses(self, capsys, world):
        code, out, _ = call(capsys, "data", "inspect", world / "data", "--json", "--seq-len", 512, "--row", 1)
        found = json.loads(out)
        assert code == 0
        assert found["split"] == "training"
        assert found["validation"]["split"] == "validation"
        assert found["packing"]["truncated_tokens"] == 0
        assert found["row"]["tokens"] + found["row"]["padding_tokens"] == 512
        assert "row" not in json.loads(call(capsys, "data", "inspect", world / "data", "--json")[1])

    def test_a_row_beyond_the_epoch_is_wrong_usage(self, capsys, world):
        code, _, err = call(capsys, "data", "inspect", world / "data", "--seq-len", 512, "--row", 10**6)
        assert code == 2
        assert "rows 0 to" in err

    def test_verify_names_every_damaged_shard(self, capsys, world, tmp_path):
        assert call(capsys, "data", "verify", world / "data")[0] == 0
        folder = Path(shutil.copytree(world / "data", tmp_path / "d"))
        flip_a_byte(folder / "00000.arrow")
        (folder / "validation" / "00000.arrow").unlink()
        code, out, _ = call(capsys, "data", "verify", folder)
        assert code == 1
        assert str(folder / "00000.arrow") in out
        assert str(folder / "validation" / "00000.arrow") in out
        code, out, _ = call(capsys, "data", "verify", folder, "--json")
        assert code == 1
        assert len(json.loads(out)["problems"]) == 2


# ---------------------------------------------------------------------------------------------------------- the model


class TestConvert:
    def test_there_and_back_are_the_same_bytes(self, capsys, run, world, tmp_path):
        code, out, _ = call(capsys, "convert", "--to", "hf", run, tmp_path / "hf")
        assert code == 0
        assert "from_pretrained" in out
        weights = "model.safetensors"
        assert (tmp_path / "hf" / weights).read_bytes() == (world / "hf" / weights).read_bytes()
        assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == (world / "tokenizer.model").read_bytes()

    def test_dtype_reaches_the_files(self, capsys, run, tmp_path):
        checkpoint = run / "checkpoints/step_000020"
        assert call(capsys, "convert", "--to", "hf", checkpoint, tmp_path / "hf", "--dtype", "bfloat16")[0] == 0
        assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"

    def test_it_reports_what_was_verified(self, capsys, world, run, tmp_path):
        words = ("convert", "--to", "hf", run, tmp_path / "tensors", "--dtype", "bfloat16", "--verify", "tensors")
        code, out, _ = call(capsys, *words)
        assert code == 0
        assert re.search(r"Cast as asked: \d+ tensors float32 → bfloat16, which loses bits", out)
        assert re.search(r"Verified: \d+ tensors, .* read back: names, dtypes, shapes and hashes are equal", out)
        assert "logits" not in out.lower()
        assert "Not verified" in call(capsys, "convert", "--to", "hf", run, tmp_path / "none", "--verify", "none")[1]
        code, out, _ = call(capsys, "convert", "--from", "hf", world / "hf", tmp_path / "ours", "--verify")
        assert code == 0
        assert len(out.splitlines()) <= 6
        assert re.search(r"256 tokens in float32: logits at most \S+ apart .* KL at most \S+ nats a token", out)
        assert "tokenizer.json" in out

    def test_an_occupied_output_is_left_alone(self, capsys, run, tmp_path):
        (tmp_path / "mine").write_text("x")
        code, _, err = call(capsys, "convert", "--to", "hf", run, tmp_path)
        assert code == 1
        assert "already exists" in err
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]


class TestCheckpoint:
    def test_list_is_by_step(self, capsys, run):
        code, out, _ = call(capsys, "checkpoint", "list", run)
        assert code == 0
        assert [line.split()[0] for line in out.splitlines()] == ["step", "20", "100"]
        code, out, _ = call(capsys, "checkpoint", "list", run, "--json")
        rows = json.loads(out)
        assert [row["step"] for row in rows] == [20, 100]
        assert rows[1]["folder"] == str(run / "checkpoints/step_000100")
        assert rows[0]["bytes"] > 100_000
        assert rows[0]["problem"] is None

    def test_list_of_a_run_without_any(self, capsys, tmp_path):
        (tmp_path / "config.toml").touch()
        (tmp_path / "checkpoints/.step_000010.partial").mkdir(parents=True)
        assert call(capsys, "checkpoint", "list", tmp_path)[:2] == (
            0,
            f"{tmp_path} holds no committed checkpoint yet.\n",
        )
        assert json.loads(call(capsys, "checkpoint", "list", tmp_path, "--json")[1]) == []
        assert call(capsys, "checkpoint", "verify", tmp_path)[0] == 1

    def test_list_goes_on_past_a_damaged_manifest(self, capsys, damaged_run):
        (damaged_run / "checkpoints/step_000020/manifest.json").write_text("{")
        code, out, err = call(capsys, "checkpoint", "list", damaged_run)
        assert code == 0
        assert "step_000100" in out
        assert "step_000020" in err

    def test_verify_names_every_damaged_file(self, capsys, damaged_run):
        assert call(capsys, "checkpoint", "verify", damaged_run)[0] == 0
        newest = damaged_run / "checkpoints/step_000100"
        flip_a_byte(newest / "master.safetensors")
        (newest / "tokenizer.model").unlink()
        code, out, _ = call(capsys, "checkpoint", "verify", damaged_run)
        assert code == 1
        assert "step_000020 is whole" in out
        assert "master.safetensors is damaged" in out
        assert "tokenizer.model is missing" in out
        assert "newest-good" in out
        code, out, _ = call(capsys, "checkpoint", "verify", newest, "--json")
        assert code == 1
        assert [len(row["problems"]) for row in json.loads(out)] == [2]

    def test_verify_says_when_the_manifest_is_damaged(self, capsys, damaged_run):
        manifest = damaged_run / "checkpoints/step_000100/manifest.json"
        manifest.write_text(manifest.read_text().replace('"step": 0', '"step": 1'))
        code, out, _ = call(capsys, "checkpoint", "verify", damaged_run)
        assert code == 1
        assert "its hash does not match" in out
        assert "step_000020 is whole" in out


class TestGenerate:
    def words(self, run: Path, **options: object) -> list[object]:
        given = {"checkpoint": run, "prompt": "def main", "max-new-tokens": 8, **options}
        return ["generate", *(f"--{name}={value}" for name, value in given.items())]

    def reference(self, run: Path, prompt: str, num_tokens: int) -> str:
        """Greedy without a cache, begin id first."""
        from data_pipeline.tokenizer import Tokenizer
        from longctx.generation.load import load_model
        from longctx.generation.loop import generate

        tokenizer = Tokenizer.load(run / "checkpoints/step_000100/tokenizer.model")
        ids = [tokenizer.document_begin, *tokenizer.encode(prompt).tolist()]
        return tokenizer.decode(generate(load_model(run), ids, num_tokens, use_cache=False))

    @pytest.mark.parametrize("prompt", ["def main", "", "  ä 🙂\n"])
    def test_stdout_is_the_greedy_continuation_and_nothing_else(self, capsys, run, prompt):
        code, out, err = call(capsys, *self.words(run, prompt=prompt))
        assert code == 0
        assert out == self.reference(run, prompt, 8) + "\n"
        assert "8 tokens" in err

    def test_a_run_folder_means_its_newest_checkpoint(self, capsys, damaged_run):
        shutil.rmtree(damaged_run / "checkpoints/step_000020")
        (damaged_run / "checkpoints/step_000020").mkdir()
        _, out, err = call(capsys, *self.words(damaged_run))
        assert out == self.reference(damaged_run, "def main", 8) + "\n"
        assert "step_000100" in err

    def test_sampling_follows_its_seed(self, capsys, run):
        texts = [call(capsys, *self.words(run, temperature=1.5, seed=seed))[1] for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]
        greedy = call(capsys, *self.words(run))[1]
        assert call(capsys, *self.words(run, **{"top-k": 1}))[1] == greedy
        assert call(capsys, *self.words(run, temperature=0))[1] == greedy

    @pytest.mark.parametrize("options", [{"temperature": -1}, {"top-p": 2}, {"temperature": 0, "top-k": 3}])
    def test_sampling_options_out_of_range_are_wrong_usage(self, capsys, run, options):
        code, out, _ = call(capsys, *self.words(run, **options))
        assert (code, out) == (2, "")

    def test_it_ends_with_the_document(self, capsys, run, monkeypatch):
        from longctx.generation import loop as generation

        asked = []
        monkeypatch.setattr(generation, "generate", lambda *args, **options: asked.append(options) or [300, 2])
        code, _, err = call(capsys, *self.words(run))
        assert code == 0
        assert asked[0]["stop_ids"] == {2}
        assert "then the document ended" in err

    def test_a_checkpoint_without_a_tokenizer_asks_for_one(self, capsys, damaged_run, world):
        (damaged_run / "checkpoints/step_000100/tokenizer.model").unlink()
        code, _, err = call(capsys, *self.words(damaged_run))
        assert (code, "--tokenizer" in err) == (1, True)
        code, out, _ = call(capsys, *self.words(damaged_run, tokenizer=world / "tokenizer.model"))
        assert code == 0
        assert out

    def test_a_hugging_face_folder_is_told_the_way_in(self, capsys, world, run):
        code, _, err = call(capsys, *self.words(world / "hf"))
        assert code == 1
        assert "convert --from hf" in err


def test_report_prints_where(capsys, tmp_path):
    from launcher.metrics.writer import MetricsWriter

    (tmp_path / "config.toml").write_text("[train]\nsteps = 4\n")
    with MetricsWriter(tmp_path) as writer:
        writer.write({"kind": "train", "step": 1, "loss": 8.0, "lr": 1e-3, "grad_norm": 1.0, "tokens": 64})
    code, out, _ = call(capsys, "report", tmp_path)
    assert (code, out) == (0, f"{tmp_path / 'report.html'}\n")
    assert (tmp_path / "report.html").stat().st_size > 1000


# ------------------------------------------------------------------------------------------------ streams and signals


class TestProcess:
    def test_a_reader_that_leaves_ends_quietly(self, world):
        process = start("data", "inspect", world / "data", "--json")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=30) == 0

    def test_interrupted_training_of_a_tokenizer_leaves_nothing(self, tmp_path):
        options = ["--source", "stdlib", "--vocab-size", 8000, "--output", tmp_path / "f.model"]
        process = start("tokenizer", "train", *options)
        assert process.stderr.readline() == "training a tokenizer on stdlib …\n"
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=5)  # training itself would take several times as long
        assert process.returncode == 130
        assert err.strip() == "Interrupted. Nothing half-written is left."
        assert list(tmp_path.iterdir()) == []
