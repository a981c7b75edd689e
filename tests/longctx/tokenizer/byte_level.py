"""A byte-level tokenizer.json of 261 ids, written in a moment: two special tokens, the bytes, and three merges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from longctx.conversion import save_hf
from longctx.model.decoder import Decoder
from tests.longctx.samples import dense_config, randomize

BEGIN, END = "<|begin|>", "<|end|>"
SIZE = 261


def frame(*, begins: bool = False, ends: bool = False) -> dict[str, Any]:
    """A post-processor that puts the begin token before a text, the end token after it, both or neither."""
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if begins:
        single.insert(0, {"SpecialToken": {"id": BEGIN, "type_id": 0}})
    if ends:
        single.append({"SpecialToken": {"id": END, "type_id": 0}})
    tokens = {token: {"id": token, "ids": [number], "tokens": [token]} for number, token in enumerate((BEGIN, END))}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def tokenizer_json(*added: tuple[str, int, bool], post_processor: dict[str, Any] | None = None) -> dict[str, Any]:
    """The file's content; ``added`` are further tokens: text, id, and whether it is special."""
    pieces = [BEGIN, END, *sorted(pre_tokenizers.ByteLevel.alphabet()), "de", "def", "ma"]
    tokens = [(BEGIN, 0, True), (END, 1, True), *added]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {piece: number for number, piece in enumerate(pieces)},
        "merges": [["d", "e"], ["de", "f"], ["m", "a"]],
    }  # fmt: skip
    listed = [{"id": number, "content": text, "special": special, **flags} for text, number, special in tokens]
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": byte_level,
        "added_tokens": listed, "post_processor": post_processor, "decoder": byte_level, "model": model,
    }  # fmt: skip


def write_tokenizer(folder: Path, content: dict[str, Any], **settings: Any) -> Path:
    """Write a tokenizer's two files; ``settings`` are of tokenizer_config.json, further or other ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    usual = {"bos_token": BEGIN, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(usual | settings))
    return folder


def write_model(
    folder: Path, content: dict[str, Any], *, rows: int = SIZE, ids: dict[str, Any] | None = None, **settings: Any
) -> Path:
    """Write a tiny llama of so many rows with this tokenizer; ``ids`` are further ones of its config.json."""
    config = dense_config(vocab_size=rows, qkv_bias=False, tie_embeddings=False)
    model = Decoder(config, seed=None)
    randomize(model, std=0.15, seed=0)
    save_hf(config, model.state_dict(), folder, token_ids={"bos_token_id": 0, "eos_token_id": 1})
    written = json.loads((folder / "config.json").read_text()) | (ids or {})
    (folder / "config.json").write_text(json.dumps(written))
    return write_tokenizer(folder, content, **settings)
