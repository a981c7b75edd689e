"""Folders that are no model yet: adapters, and names of the Hugging Face Hub, in every command that takes a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.config.model_section import find_start
from longctx.conversion import load_hf
from longctx.errors import LongCtxError
from longctx.generation.load_decoder import find_model


@pytest.mark.parametrize("open_folder", [find_model, load_hf, find_start])
def test_an_adapter_is_merged_first(tmp_path: Path, open_folder):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(LongCtxError, match=r"is a PEFT adapter[\s\S]*--from peft"):
        open_folder(str(tmp_path))


@pytest.mark.parametrize("open_folder", [find_model, load_hf, find_start])
def test_a_name_of_the_hub_is_answered_with_the_line_that_fetches_it(tmp_path: Path, monkeypatch, open_folder):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LongCtxError, match=r"hf download meta-llama/Llama-3\.1-8B --local-dir Llama-3\.1-8B"):
        open_folder("meta-llama/Llama-3.1-8B")
    # A run of this name is missing, and not a model of the Hub.
    (tmp_path / "runs").mkdir()
    for missing in ("runs/first", "/nowhere/model", "model"):
        with pytest.raises(LongCtxError) as caught:
            open_folder(missing)
        assert "hf download" not in str(caught.value)


def test_an_empty_folder_is_told_what_a_model_may_be(tmp_path: Path):
    with pytest.raises(LongCtxError, match=r"neither a checkpoint .*, nor a run .*, nor a Hugging Face folder"):
        find_model(tmp_path)
