"""What ``pretrain.py`` takes besides settings: a recipe's name, ``--print-config``, and ``--help`` of all or a part."""

from __future__ import annotations

import dataclasses
import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from launcher.cluster.exit import DONE, USAGE_ERROR, run_to_exit_code
from launcher.config.config_sections import RunConfig, TrainSection
from launcher.config.flags import take_flag
from launcher.config.help import _EXAMPLES, _FIRST, CHOICES_OF, first_settings
from launcher.config.load_config import config_from_values, load_run_config
from launcher.pretrain import main
from launcher.recipes.find import QUICKSTART, find_config, recipes
from longctx.architecture.rope import Rope
from longctx.errors import ConfigError

SECTIONS = [f.name for f in dataclasses.fields(RunConfig)]


def said(argv: list[str], capfd, monkeypatch, rank: int = 0) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``pretrain.py`` on one rank."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    code = run_to_exit_code(lambda: main(argv))
    return code, *capfd.readouterr()


class TestRecipes:
    @pytest.mark.parametrize("name", recipes())
    def test_are_found_by_name_from_any_folder(self, name, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / name).mkdir()  # the folder of a run of that name
        assert find_config(name) == find_config(f"{name}.toml") == QUICKSTART.with_name(f"{name}.toml")

    def test_a_file_goes_before_a_recipe(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "quickstart.toml").write_text('[model]\npreset = "quickstart"\n[train]\nsteps = 3\n')
        assert load_run_config(["--config", "quickstart.toml"]).train.steps == 3
        assert load_run_config(["--config", "quickstart"]).train.steps == 175

    @pytest.mark.parametrize("file", [[], ["--config", "quickstart"]])
    def test_the_quickstarts_rates_are_for_its_own_models(self, file):
        own = load_run_config([*file, "--model.preset", "quickstart-dense"]).train
        assert (own.optimizer, own.lr) == ("muon", 7e-3)
        other = load_run_config([*file, "--model.preset", "llama-3.1-8b"]).train
        assert (other.optimizer, other.lr, other.steps) == (TrainSection.optimizer, TrainSection.lr, own.steps)
        assert load_run_config([*file, "--model.preset", "llama-3.1-8b", "--train.optimizer", "muon"]).train.lr == 3e-4

    @pytest.mark.parametrize("given", ["quikstart", "missing/quickstrat.toml"])
    def test_another_name_is_answered_with_the_list_and_the_nearest(self, given):
        with pytest.raises(ConfigError, match=rf"--config {given} .*mean quickstart\?") as caught:
            load_run_config(["--config", given])
        assert all(name in str(caught.value) for name in recipes())


class TestPrintedConfig:
    def test_is_the_resolved_one_and_reads_back(self, capfd, monkeypatch):
        argv = ["--config", "llama-3.1-8b-128k", "--train.steps", "9", "--print-config"]
        code, out, err = said(argv, capfd, monkeypatch)
        assert (code, err) == (DONE, "")
        config = config_from_values(tomllib.loads(out))
        assert config == load_run_config(argv[:-1])
        assert config.train.steps == 9

    def test_comes_from_rank_0_alone(self, capfd, monkeypatch):
        assert said(["--print-config"], capfd, monkeypatch, rank=1) == (DONE, "", "")

    def test_a_wrong_flag_is_an_error_all_the_same(self, capfd, monkeypatch):
        code, out, err = said(["--print-config", "--train.nonsense", "1"], capfd, monkeypatch)
        assert (code, out) == (USAGE_ERROR, "")
        assert "--train.nonsense" in err


class TestSchema:
    def test_describes_every_key_and_what_it_takes(self, capfd, monkeypatch):
        schema = json.loads(said(["--print-schema"], capfd, monkeypatch)[1])
        assert set(schema["properties"]) == set(SECTIONS)
        train = schema["$defs"]["TrainSection"]
        assert train["additionalProperties"] is False
        assert set(train["properties"]) == {f.name for f in dataclasses.fields(RunConfig().train)}
        assert all(entry["description"] for entry in train["properties"].values())
        assert train["properties"]["lr"]["type"] == "number"
        assert train["properties"]["keep"]["enum"] == ["all", "attention", "inputs"]
        assert "quickstart" in schema["$defs"]["ModelSection"]["properties"]["preset"]["enum"]

    @pytest.mark.parametrize("name", recipes())
    def test_takes_every_recipe_and_refuses_what_the_reader_refuses(self, name, capfd, monkeypatch):
        jsonschema = pytest.importorskip("jsonschema")
        validator = jsonschema.Draft202012Validator(json.loads(said(["--print-schema"], capfd, monkeypatch)[1]))
        values = tomllib.loads(find_config(name).read_text())
        assert list(validator.iter_errors(values)) == []
        for section, key, value in (("train", "lr", "1e-3"), ("train", "stepps", 3), ("trian", "lr", 1.0)):
            wrong = {**values, section: {**values.get(section, {}), key: value}}
            assert list(validator.iter_errors(wrong)), (section, key)


def keys_of(section: Any, prefix: str) -> list[str]:
    """The dotted names of a section's keys."""
    names = []
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        name = f"{prefix}.{f.name}"
        names += keys_of(value, name) if dataclasses.is_dataclass(value) else [name]
    return names


class TestHelp:
    def test_of_everything_names_every_key_and_ends_with_recipes_and_an_example(self, capfd, monkeypatch):
        code, out, _ = said(["--help"], capfd, monkeypatch)
        assert code == DONE
        for section in SECTIONS:
            for name in keys_of(getattr(RunConfig(), section), section):
                assert f"  --{name} " in out
        assert all(f"  {name} " in out for name in recipes())
        assert out.splitlines()[-1].strip() in _EXAMPLES[""]
        assert said(["--help"], capfd, monkeypatch, rank=1) == (DONE, "", "")

    @pytest.mark.parametrize("section", SECTIONS)
    def test_of_a_section_teaches_it_alone(self, section, capfd, monkeypatch):
        code, out, _ = said(["--help", section], capfd, monkeypatch)
        assert code == DONE
        shown = {line.split()[0] for line in out.splitlines() if line.startswith("  --")}
        assert shown == {f"--{name}" for name in keys_of(getattr(RunConfig(), section), section)}
        assert f"--{section}." in out.splitlines()[-1]

    def test_the_first_settings_are_those_of_the_long_help(self, capfd, monkeypatch):
        out, first = said(["--help", "all"], capfd, monkeypatch)[1], first_settings(load_run_config([]))
        assert [line.split()[0] for line in first.splitlines() if line.startswith("  --")][: len(_FIRST)] == [
            f"--{name}" for name in _FIRST
        ]
        for paragraph in first.split("\n\n")[0].splitlines()[1:]:
            assert paragraph in out

    def test_of_a_key_and_of_a_table_within_a_section(self, capfd, monkeypatch):
        assert "--train.lr NUMBER  (default: 0.007)" in said(["--help", "train.lr"], capfd, monkeypatch)[1]
        out = said(["--help", "model.rope"], capfd, monkeypatch)[1]
        assert out.count("  --model.") == out.count("  --model.rope.") == len(dataclasses.fields(Rope))

    def test_defaults_are_those_of_the_recipe_that_is_named(self, capfd, monkeypatch):
        out = said(["--config", "extend-yarn", "-h", "train"], capfd, monkeypatch)[1]
        assert "--train.steps INTEGER  (default: 400)" in out
        assert "--train.keep {all,attention,inputs}  (default: attention)" in out

    @pytest.mark.few(2)
    @pytest.mark.parametrize("name", CHOICES_OF)
    def test_closed_sets_are_choices_and_each_is_known(self, name, capfd, monkeypatch):
        out = said(["--help", name], capfd, monkeypatch)[1]
        assert "{" + ",".join(str(choice) for choice in CHOICES_OF[name]) + "}" in out
        # What is wrong with a choice elsewhere in the config is another matter: none may be unknown.
        for choice in CHOICES_OF[name]:
            problem = ""
            try:
                load_run_config([f"--{name}", str(choice)])
            except ConfigError as error:
                problem = str(error)
            assert "unknown" not in problem

    @pytest.mark.parametrize("line", [line for lines in _EXAMPLES.values() for line in lines])
    def test_every_example_parses(self, line, tmp_path, monkeypatch):
        (tmp_path / "run.toml").write_text(Path(QUICKSTART).read_text())
        monkeypatch.chdir(tmp_path)
        program, verb, *arguments = shlex.split(line)
        assert (program, verb) == ("longctx", "train")
        arguments, _ = take_flag(arguments, "--ranks")
        load_run_config([word for word in arguments if word != "--print-config"])
