"""Hugging Face folders: ``HfReader`` streams one in, ``save_hf`` streams one out, by the tables in ``families``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.config import ModelConfig
from longctx.conversion.families import EMBEDDINGS, HEAD, Part, TensorSpec, config_from_hf, config_to_hf, tensor_specs
from longctx.conversion.files import (
    INDEX,
    SafetensorsFolder,
    ShardWriter,
    listing,
    read_json,
    staged_folder,
    write_json,
)
from longctx.conversion.tokenizer import NASTY_TEXTS, check_tokenizer, export_tokenizer
from longctx.errors import CheckpointError, ConfigError

Progress = Callable[[int, int], None]
"""Called with the parameters done so far and their number."""

TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


class HfReader:
    """A Hugging Face model as the decoder's parameters, one at a time, in the dtype they have on disk.

    Everything is checked on opening: each tensor on disk belongs to exactly one parameter, and has its shape.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is no folder. Give the one that holds config.json.")
        hf_config = read_json(self.folder / "config.json")
        self.config = config_from_hf(hf_config)
        self.model_type: str = hf_config["model_type"]
        self.token_ids = {key: hf_config.get(key) for key in TOKEN_ID_KEYS}
        self._disk = SafetensorsFolder(self.folder)
        self._specs = {spec.name: spec for spec in tensor_specs(self.config)}
        self._layouts = {name: _choose_layout(spec, self._disk.names()) for name, spec in self._specs.items()}
        self._check_names()

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every tensor without loss (theirs, when they all have the same)."""
        parts = (part for layout in self._layouts.values() for part in layout)
        return reduce(torch.promote_types, (self._disk.dtype(part.name) for part in parts))

    def names(self) -> list[str]:
        """The decoder's parameters, in the model's order."""
        return list(self._specs)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter."""
        return self._specs[name].shape

    def read(self, name: str) -> Tensor:
        """One parameter, put together from its parts."""
        parts = [self._disk.read(part.name) for part in self._layouts[name]]
        if len(parts) == 1:
            return parts[0].view(self.shape(name))
        return torch.cat([part.reshape(-1) for part in parts]).view(self.shape(name))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._specs:
            yield name, self.read(name)

    def _check_names(self) -> None:
        parts = {part.name: part.shape for layout in self._layouts.values() for part in layout}
        on_disk = self._disk.names()
        if self.config.tie_embeddings and HEAD in on_disk and EMBEDDINGS in on_disk:
            self._check_tied_head()
            on_disk.remove(HEAD)
        shapes = {n: (self._disk.shape(n), parts[n]) for n in on_disk & set(parts)}
        wrong = [f"{n} {found} instead of {wanted}" for n, (found, wanted) in shapes.items() if found != wanted]
        raise_differences(str(self.folder), missing=set(parts) - on_disk, unexpected=on_disk - set(parts), wrong=wrong)

    def _check_tied_head(self) -> None:
        head, embeddings = self._disk.read(HEAD), self._disk.read(EMBEDDINGS)
        if head.dtype != embeddings.dtype or not torch.equal(head, embeddings):
            raise CheckpointError(
                f"{self.folder}: config.json says tie_word_embeddings=true, yet {HEAD} differs from {EMBEDDINGS}.\n"
                "Set tie_word_embeddings to false to keep both."
            )


def load_hf(folder: str | Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The config and the weights of a Hugging Face folder, ready for ``Decoder(config).load_state_dict``.

    Weights keep their dtype. ConfigError or CheckpointError for anything but a model that this decoder can be.
    """
    reader = HfReader(folder)
    return reader.config, dict(reader)


def save_hf(
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: str | Path | None = None,
    model_type: str | None = None,
    token_ids: Mapping[str, Any] | None = None,
    shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> Path:
    """Write a model as a folder that transformers loads, and read every tensor back.

    ``tensors`` are the decoder's parameters under their own names, in any order, each exactly once; they may be an
    iterator, and memory holds about one shard. ``dtype`` casts them (default: as they come). ``tokenizer`` is a
    SentencePiece model, exported as a fast tokenizer and compared with it; it also gives the begin, end and padding
    ids, which ``token_ids`` gives otherwise. ``model_type`` chooses where several families have the model's shape.
    The folder appears complete or not at all.
    """
    folder = Path(folder)
    hf_config = config_to_hf(config, model_type=model_type, own_tokenizer=tokenizer is not None)
    items: Any = tensors.items() if isinstance(tensors, Mapping) else tensors
    with staged_folder(folder) as staging:
        writer = ShardWriter(staging, "model", shard_bytes)
        dtypes = _write_parameters(config, items, writer, dtype, progress)
        file_of = writer.finish()
        if len(set(file_of.values())) > 1:
            write_json(staging / INDEX, {"metadata": {"total_size": writer.total_bytes}, "weight_map": file_of})
        ids = {key: (token_ids or {}).get(key) for key in TOKEN_ID_KEYS}
        if tokenizer is not None:
            ids = export_tokenizer(
                tokenizer, staging, max_vocab_size=config.vocab_size, max_positions=config.max_positions
            )
        name = str(reduce(torch.promote_types, dtypes)).removeprefix("torch.")
        # transformers 5 reads dtype, 4 reads torch_dtype; a null id keeps a class default (llama's 1 and 2) out
        write_json(staging / "config.json", hf_config | ids | {"dtype": name, "torch_dtype": name, "use_cache": True})
        write_json(staging / "generation_config.json", {k: v for k, v in ids.items() if v is not None})
        if tokenizer is not None:
            check_tokenizer(tokenizer, staging, NASTY_TEXTS)
    return folder


def raise_differences(
    where: str, *, missing: Iterable[str], unexpected: Iterable[str], wrong: Iterable[str] = ()
) -> None:
    """CheckpointError that lists what does not fit; nothing when all three are empty."""
    found = {"missing": list(missing), "unexpected": list(unexpected), "of the wrong shape": list(wrong)}
    if any(found.values()):
        lines = [f"  {kind} ({len(names)}): {listing(names)}" for kind, names in found.items() if names]
        raise CheckpointError("\n".join([f"the tensors of {where} are not those of its config:", *lines]))


def _choose_layout(spec: TensorSpec, on_disk: set[str]) -> tuple[Part, ...]:
    """The first layout that is there in full. When none is, the one we would write: its absent parts get reported."""
    complete = (layout for layout in spec.layouts if all(part.name in on_disk for part in layout))
    return next(complete, spec.layouts[0])


def _write_parameters(
    config: ModelConfig,
    items: Iterable[tuple[str, Tensor]],
    writer: ShardWriter,
    dtype: torch.dtype | None,
    progress: Progress | None,
) -> set[torch.dtype]:
    """Hand every parameter's parts to the writer; the set of dtypes written."""
    remaining = {spec.name: spec for spec in tensor_specs(config)}
    total, dtypes = len(remaining), set()
    for done, (name, tensor) in enumerate(items, start=1):
        if name not in remaining:
            raise_differences("the model", missing=(), unexpected=[f"{name} (unknown, or given twice)"])
        spec = remaining.pop(name)
        if tuple(tensor.shape) != spec.shape:
            wrong = [f"{name} {tuple(tensor.shape)} instead of {spec.shape}"]
            raise_differences("the model", missing=(), unexpected=(), wrong=wrong)
        tensor = _cast(name, tensor, dtype)
        dtypes.add(tensor.dtype)
        for part, values in zip(spec.layouts[0], _split(tensor, spec.layouts[0]), strict=True):
            writer.add(part.name, values)
        if progress is not None:
            progress(done, total)
    raise_differences("the model", missing=remaining, unexpected=())
    return dtypes


def _split(tensor: Tensor, parts: tuple[Part, ...]) -> Iterator[Tensor]:
    """The flattened tensor cut into its parts; each is a copy, so that a shard does not keep the whole alive."""
    if len(parts) == 1:
        yield tensor.reshape(parts[0].shape)
        return
    sizes = [torch.Size(part.shape).numel() for part in parts]
    for part, values in zip(parts, tensor.reshape(-1).split(sizes), strict=True):
        yield values.reshape(part.shape).clone()


def _cast(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    dtype = dtype or tensor.dtype
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(f"dtype={dtype} of {name} cannot be exported. Choose float32, bfloat16 or float16.")
    cast = tensor.detach().to(dtype)
    if dtype == torch.float16 and not torch.equal(cast.isfinite(), tensor.isfinite()):
        raise CheckpointError(f"{name} has values beyond float16's 65504. Export it in bfloat16 or float32.")
    return cast
