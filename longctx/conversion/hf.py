"""Hugging Face folders: ``HfReader`` streams one in, ``save_hf`` streams one out, by the tables in ``families``.

Memory holds one parameter at a time and its tensors on disk. A writer also holds parameters that wait for others in the
same tensor on disk (GPT-2's queries, keys and values).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.checkpoint_format import check_model_size, is_buffer
from longctx.checkpoint_manifest import check_token_ids, reject_other_formats, where_to_get
from longctx.config import ModelConfig
from longctx.conversion.casts import dtype_name
from longctx.conversion.image_processor import (
    PROCESSOR,
    image_format_of_folder,
    label_names,
    model_of_folder,
    processor_json,
)
from longctx.conversion.passthrough import PassthroughPart, passthrough_from_folder
from longctx.conversion.tensor_layouts import (
    EMBEDDINGS,
    DiskLayout,
    TensorSpec,
    assemble_parameter,
    disassemble_layout,
    each_once,
    is_passthrough,
    matches,
    mtp_duplicates,
    tensor_specs,
)
from longctx.conversion.tensor_mismatches import format_names, raise_mismatches
from longctx.conversion.tokenizer_export import check_tokenizer, export_tokenizer, is_qwen, replaced_ids
from longctx.conversion.weights.json_files import read_checkpoint_json, write_json
from longctx.conversion.weights.quantized import DequantizedFolder
from longctx.conversion.weights.weights_folder import INDEX, WeightsFolder
from longctx.conversion.weights.wrapped_folder import WrappedFolder
from longctx.errors import CheckpointError, ConfigError
from longctx.families import FAMILIES, config_to_hf, dropped_training_fields, ignored_keys, unwrap_config, wrapper_of
from longctx.families.quantization import quantization_of
from longctx.families.spec import START_KEY, TARGET_ID_KEYS
from longctx.files import staged_folder
from longctx.images.image_format import ImageFormat
from longctx.storage.safetensors import SafetensorsShardWriter
from longctx.tokenizer import Tokenizer, load_tokenizer
from longctx.tokenizer.hard_texts import HARD_TEXTS
from longctx.tokenizer.image_tokenizer import ImageTokenizer

Progress = Callable[[int, int], None]
"""Callback with the number of parameters done, and the total."""

log = logging.getLogger(__name__)

TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


class HfReader:
    """Hugging Face model as the decoder's parameters, one at a time, in their dtypes on disk.

    Opening checks that each tensor on disk belongs to exactly one parameter, and has its shape.
    """

    def __init__(self, folder: str | Path, *, mtp: bool = False) -> None:
        """Open the folder; ``mtp`` adds its multi-token prediction blocks, or raises ConfigError without them."""
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} is not a folder. Give the folder that contains config.json.{where_to_get(self.folder)}"
            )
        if not (self.folder / "config.json").exists():
            reject_other_formats(self.folder)
        hf_config = read_checkpoint_json(self.folder / "config.json")
        self.config = model_of_folder(self.folder, hf_config, mtp=mtp)
        self._hf_config = hf_config
        text = unwrap_config(hf_config)
        _check_has_mtp(self.folder, self.config, requested=mtp)
        self.model_type: str = text["model_type"]
        """The text model's type, if there are other parts; if a network has several names, the one that is written."""
        self.model_type_on_disk: str = hf_config["model_type"]
        self.ignored_keys = ignored_keys(hf_config)
        """Keys in config.json that other tools left there, and that no network reads."""
        # As transformers' classes do, fill in defaults for absent token ids.
        named = {**FAMILIES[self.model_type].default_ids, **text}
        self.token_ids = {key: _token_id(key, named.get(key)) for key in _token_id_keys(self.config)}
        self.quantization = quantization_of(text)
        """Scheme for quantised weights, which are read as bfloat16; None without quantisation."""
        self._disk = WeightsFolder(self.folder)
        if self.quantization is not None:
            self._disk = DequantizedFolder(self._disk, self.quantization)
            log.info("%s: quantised weights (%s) are read as bfloat16.", self.folder, self.quantization)
        wrapper = wrapper_of(hf_config)
        if wrapper is not None:
            self._disk = WrappedFolder(self._disk, wrapper)
        # Names and shapes come from the headers: a mismatched folder is rejected before any value is read.
        on_disk, passthrough_names = self._names_on_disk(text)
        self.passthrough = passthrough_from_folder(self._disk, hf_config, passthrough_names)
        """Parts that the decoder does not have, if any."""
        # Before the specs: the files bound the model size that the config may claim.
        check_model_size(self.config, [self._disk.shape(name) for name in on_disk], str(self.folder))
        self._specs = {spec.name: spec for spec in tensor_specs(self.config, model_type=self.model_type)}
        self._layouts = {name: self._choose_layout(spec, on_disk) for name, spec in self._specs.items()}
        self._check_names(on_disk)
        if self.config.has_constant_gates:
            log.warning(
                "%s: experts_per_token=1 with normalised gates. Each gate is 1: the loss does not train the routers.",
                self.folder,
            )

    @property
    def dtype(self) -> torch.dtype:
        """Narrowest lossless dtype for every parameter; a router's correction bias, always float32, does not count."""
        layouts = (layout for name, layout in self._layouts.items() if not is_buffer(name))
        return reduce(torch.promote_types, {self._disk.dtype(part.name) for layout in layouts for part in layout.parts})

    def files(self) -> set[str]:
        """Return the folder's files that the model is read from."""
        files = self._disk.files() | {"config.json"}
        if FAMILIES[self.model_type].image_processor:
            files.add(PROCESSOR)
        return files

    def image_format(self) -> ImageFormat | None:
        """Return the format of the model's images, with classes and palette; None for texts and without a palette."""
        return image_format_of_folder(self.folder, self._hf_config, self.config)

    def names(self) -> list[str]:
        """Return the decoder's parameter names, in model order."""
        return list(self._specs)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a parameter's shape."""
        return self._specs[name].shape

    def read(self, name: str) -> Tensor:
        """Return one parameter, assembled from its tensors on disk."""
        layout = self._layouts[name]
        if not layout.parts:
            return torch.zeros(self._specs[name].shape, dtype=self.dtype)
        return assemble_parameter(self._specs[name], layout, self._disk)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._specs:
            yield name, self.read(name)

    def _names_on_disk(self, text: dict[str, Any]) -> tuple[set[str], set[str]]:
        """Return the disk tensors that belong to parameters, and those of other parts; warn about omitted heads."""
        names = self._disk.names()
        family = FAMILIES[self.model_type]
        count = 0
        if family.mtp is not None:
            count = text.get(family.mtp.key, 0)
        names = {name for name in names if not matches(family.ignored_tensors, name)}
        # Before heads: a multi-token prediction layer has its own head.
        passthrough_names = {name for name in names if is_passthrough(name, family, self.config, count)}
        if isinstance(self._disk, WrappedFolder):
            passthrough_names |= {name for name in names if self._disk.name_map.is_other(name)}
        heads = set[str]()
        if self.config.pair_head == "none" and not self.config.classes:
            heads = {name for name in names if matches(family.other_heads, name)}
        if heads:
            log.warning(
                "%s: tensors of unused heads are left out: %s",
                self.folder,
                format_names(heads, limit=4),
            )
        return names - passthrough_names - heads, passthrough_names

    def _choose_layout(self, spec: TensorSpec, on_disk: set[str]) -> DiskLayout:
        """Return the first layout that is complete on disk, preferably with the right shapes; otherwise the one we
        write.
        """
        # Layouts on disk depend on the transformers version, or on the maker.
        complete = [layout for layout in spec.layouts if all(part.name in on_disk for part in layout.parts)]
        for layout in complete:
            if all(self._disk.shape(part.name) == part.shape for part in layout.parts):
                return layout
        return next(iter(complete), spec.layouts[0])

    def _check_names(self, on_disk: set[str]) -> None:
        """Raise CheckpointError unless the tensors on disk are exactly the parameters', with the same shapes."""
        parts = {part.name: part.shape for layout in self._layouts.values() for part in layout.parts}
        # Some tools also save a tied model's head; a copy of the embeddings is not a separate parameter.
        family = FAMILIES[self.model_type]
        copies = dict(family.copies)
        if self.config.tie_embeddings and self.config.predicts_tokens:
            copies[family.head] = self._embeddings
        # A multi-token prediction block may repeat tensors that it shares with the model.
        for copy, parameter in mtp_duplicates(family, self.config).items():
            copies[copy] = self._layouts[parameter].parts[0].name
        for copy, original in copies.items():
            if {copy, original} <= on_disk:
                self._check_copy(copy, original)
                on_disk = on_disk - {copy}
        shapes = {n: (self._disk.shape(n), parts[n]) for n in on_disk & set(parts)}
        mismatched = [f"{n} {found} instead of {wanted}" for n, (found, wanted) in shapes.items() if found != wanted]
        raise_mismatches(
            str(self.folder), missing=set(parts) - on_disk, unexpected=on_disk - set(parts), mismatched=mismatched
        )

    @property
    def _embeddings(self) -> str:
        """Embedding table's name on disk."""
        return self._layouts[EMBEDDINGS].parts[0].name

    def _check_copy(self, copy: str, original: str) -> None:
        """Raise CheckpointError if a tensor differs from the one that it should copy."""
        first, second = self._disk.read(copy), self._disk.read(original)
        if first.dtype == second.dtype and torch.equal(first, second):
            return
        hint = "Export the model again."
        family = FAMILIES[self.model_type]
        if copy == family.head and not family.copies:
            hint = "Set tie_word_embeddings to false to keep both."
        if copy in mtp_duplicates(family, self.config):
            hint = "Leave out --mtp (train.mtp_weight): then MTP blocks are carried along unchanged."
        raise CheckpointError(
            f"{self.folder}: {copy} differs from {original}, but must be its copy (tie_word_embeddings="
            f"{str(self.config.tie_embeddings).lower()}).\n{hint}"
        )


def _check_has_mtp(folder: Path, config: ModelConfig, *, requested: bool) -> None:
    # Requested explicitly: importing a folder without them would leave a loss weight without effect.
    if requested and not config.mtp_layers:
        raise ConfigError(
            f"{folder} has no multi-token prediction blocks, according to its config.json. Leave out --mtp, and "
            "keep train.mtp_weight=0."
        )


def load_hf(folder: str | Path, *, mtp: bool = False) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return a Hugging Face folder's config and weights, ready for ``Decoder(config).load_state_dict``.

    Weights keep their dtype; with ``mtp`` they include multi-token prediction blocks. Raise ConfigError or
    CheckpointError if this decoder cannot be the model.
    """
    reader = HfReader(folder, mtp=mtp)
    return reader.config, dict(reader)


def save_hf(
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    model_type: str | None = None,
    token_ids: Mapping[str, Any] | None = None,
    passthrough: PassthroughPart | None = None,
    shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> Path:
    """Write a model as a folder that transformers loads, and read every tensor back.

    ``tensors`` are the decoder's parameters under their own names, in any order, each exactly once; from an iterator,
    memory holds one at a time. ``dtype`` casts them (default: no cast). ``tokenizer`` is written by
    ``export_tokenizer`` and compared with the result in transformers; it also provides the special token ids, which
    otherwise come from ``token_ids``. An ``ImageTokenizer`` becomes class names and an image processor. ``model_type``
    selects one family if several have the model's shape. ``passthrough`` holds the imported model's other parts,
    written with it. The folder appears complete or not at all.
    """
    folder = Path(folder)
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer)
    image_format: ImageFormat | None = None
    if isinstance(tokenizer, ImageTokenizer):
        image_format, tokenizer = tokenizer.format, None
    own_tokenizer = tokenizer is not None and not is_qwen(tokenizer)
    hf_config = config_to_hf(config, model_type=model_type, own_tokenizer=own_tokenizer)
    _check_kind(config, tokenizer)
    processor = processor_json(config, hf_config["model_type"], image_format)
    if image_format is not None and processor is None:
        log.warning(
            "a %s folder has no image processor: shape, palette and class names are left out.", hf_config["model_type"]
        )
    hf_config |= label_names(config, image_format)
    dropped_fields = dropped_training_fields(config, hf_config)
    if dropped_fields:
        log.warning(
            "a %s config.json has no keys for these training-only settings: %s. They do not affect model outputs.",
            hf_config["model_type"],
            ", ".join(f"model.{name}={value!r}" for name, value in dropped_fields.items()),
        )
    items: Any = tensors
    if isinstance(tensors, Mapping):
        items = tensors.items()
    with staged_folder(folder, error=CheckpointError) as staging:
        writer = SafetensorsShardWriter(staging, "model", shard_bytes)
        # A wrapped model's tensors keep their original names.
        add = writer.add
        if passthrough is not None and passthrough.name_map is not None:
            name_map = passthrough.name_map
            add = lambda name, tensor: writer.add(name_map.wrapped(name), tensor)  # noqa: E731
        dtypes = _write_parameters(
            config, items, add, model_type=hf_config["model_type"], dtype=dtype, progress=progress
        )
        for name, tensor in passthrough or ():
            add(name, tensor)
        file_of = writer.finish()
        # transformers looks for an index only if there is no model.safetensors.
        if len(set(file_of.values())) > 1:
            write_json(staging / INDEX, {"metadata": {"total_size": writer.total_bytes}, "weight_map": file_of})
        if tokenizer is not None:
            _check_padding(tokenizer, hf_config)
            token_ids = export_tokenizer(tokenizer, staging, max_positions=config.max_positions)
        ids = _written_ids(token_ids or {}, config)
        # RoBERTa's padding id determines its first position, independent of the tokenizer's padding.
        ids = _loadable_ids(ids, config.vocab_size) | {key: hf_config[key] for key in ids if key in hf_config}
        name = dtype_name(reduce(torch.promote_types, dtypes))
        # transformers 5 reads dtype, 4 reads torch_dtype; a null id suppresses a class default (llama's 1 and 2).
        hf_config |= ids | {"dtype": name, "torch_dtype": name}
        if config.vocab_size:
            hf_config["use_cache"] = True
        if passthrough is not None:
            hf_config = passthrough.full_config(hf_config)
        write_json(staging / "config.json", hf_config)
        # A tokenizer that came with a model may have brought this file.
        if config.predicts_tokens and not (staging / "generation_config.json").exists():
            write_json(staging / "generation_config.json", {k: v for k, v in ids.items() if v is not None})
        if processor is not None:
            write_json(staging / PROCESSOR, processor)
        if tokenizer is not None:
            check_tokenizer(tokenizer, staging, HARD_TEXTS)
    return folder


def _check_kind(config: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError for a text tokenizer with a model of patches."""
    if tokenizer is not None and not config.vocab_size:
        raise ConfigError(
            f"tokenizer={tokenizer.path} encodes texts, but this model reads patches of images. Leave it out, or give "
            "an image.json."
        )


def _check_padding(tokenizer: Tokenizer, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError if transformers would mistake a text token for padding, and count positions differently."""
    expected_id = hf_config.get("pad_token_id")
    if expected_id is None or expected_id == tokenizer.padding:
        return
    raise ConfigError(
        f"transformers' {hf_config['model_type']} skips id {expected_id} when it counts positions (model."
        f"position_offset={expected_id + 1}), which is {tokenizer.describe_token(expected_id)} here, but this "
        "tokenizer pads with "
        f"{tokenizer.padding}. A model for it needs model.position_offset={tokenizer.padding + 1}."
    )


def _loadable_ids(ids: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return ids for config.json with which transformers loads the model; log those that it would reject."""
    replaced = replaced_ids(ids, rows)
    for key, value in replaced.items():
        log.warning(
            "config.json gets %s=%s instead of %s, because transformers would not load that id with %d embedding rows.",
            key,
            json.dumps(value),
            json.dumps(ids[key]),
            rows,
        )
    return ids | replaced


def _token_id_keys(config: ModelConfig) -> tuple[str, ...]:
    """Return the config.json keys for a model's token ids; a model of patches has none."""
    if not config.vocab_size:
        return ()
    if config.encoder_layers:
        return TOKEN_ID_KEYS + TARGET_ID_KEYS
    return TOKEN_ID_KEYS


def _written_ids(token_ids: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return every id that config.json names.

    Null suppresses a class default; the id that starts a target is never null.
    """
    ids = {key: token_ids.get(key) for key in _token_id_keys(config)}
    if START_KEY in ids and ids[START_KEY] is None:
        # As for T5 and Marian, which have no begin token; 0 if no special token is known.
        named = (ids[key] for key in ("bos_token_id", "pad_token_id") if isinstance(ids[key], int))
        ids[START_KEY] = next(named, 0)
    return ids


def _token_id(key: str, value: Any) -> Any:
    """Return the value for a token-id key in config.json; raise ConfigError if it is not a valid id."""
    try:
        check_token_ids(value, key)
    except ValueError as error:
        raise ConfigError(f"config.json: {error}.") from error
    return value


def _write_parameters(
    config: ModelConfig,
    items: Iterable[tuple[str, Tensor]],
    add: Callable[[str, Tensor], None],
    *,
    model_type: str,
    dtype: torch.dtype | None,
    progress: Progress | None,
) -> set[torch.dtype]:
    """Pass every parameter's disk tensors to ``add``; return the written dtypes, without those of buffers."""
    specs = {spec.name: spec for spec in tensor_specs(config, model_type=model_type)}
    # Multi-token prediction blocks may store shared tensors a second time, for readers that expect them.
    copies: dict[str, list[str]] = {}
    for copy, parameter in mtp_duplicates(FAMILIES[model_type], config).items():
        copies.setdefault(specs[parameter].layouts[0].parts[0].name, []).append(copy)
    dtypes: set[torch.dtype] = set()
    pending: dict[str, Tensor] = {}
    for done, (name, tensor) in enumerate(each_once(items, {n: spec.shape for n, spec in specs.items()}), start=1):
        tensor = _cast(name, tensor, dtype)
        # config.json names one dtype, the parameters'; buffers are float32 in any model.
        if not is_buffer(name):
            dtypes.add(tensor.dtype)
        # A disk tensor is written once all its members have arrived.
        pending[name] = tensor
        layout = specs[name].layouts[0]
        if all(member in pending for member in layout.members):
            for part, values in disassemble_layout(layout, [pending.pop(member) for member in layout.members]):
                add(part, values)
                for copy in copies.get(part, ()):
                    add(copy, values)
        if progress is not None:
            progress(done, len(specs))
    return dtypes


def _cast(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the tensor in its export dtype; a router's correction bias keeps its own."""
    if dtype is None or is_buffer(name):
        dtype = tensor.dtype
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(f"dtype={dtype} of {name} cannot be exported. Choose float32, bfloat16 or float16.")
    cast = tensor.detach().to(dtype)
    # Only float16 has a smaller range than the others: rounding was requested, overflow to infinity was not.
    if dtype == torch.float16 and not torch.equal(cast.isfinite(), tensor.isfinite()):
        raise CheckpointError(f"{name} has values beyond float16's 65504. Export it in bfloat16 or float32.")
    return cast
