"""Read a checkpoint's manifest as untrusted input.

Its hash proves that it is complete, but anyone can compute one. So everything that affects memory, time or paths is
checked here, from the manifest alone: types and ranges, file names, and that the slices cover each tensor exactly once,
with bytes that the files are declared to have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from longctx.errors import CheckpointError, DataError
from longctx.files import MANIFEST, read_manifest_json
from longctx.storage.hashed_blocks import HASH_HEX_LENGTH, num_blocks
from longctx.untrusted.strict_json import parse_json, read_bounded, shown
from longctx.untrusted.untrusted_schema import (
    FILE_NAME,
    HASH,
    MOST_WHOLE,
    NAME,
    Check,
    anything,
    choice_of,
    integer_between,
    list_of,
    mapping,
    nullable,
    number,
    record,
    text,
)

FORMAT = "longctx-checkpoint"
VERSION = 1
ROLES = ("master", "exp_avg", "exp_avg_sq")
DTYPES = ("float32", "bfloat16", "float16")
"""Compute dtypes for a run, and source dtypes for an import."""

VALUE_BYTES = 4
"""Bytes per float32 in a file."""
_HINT = "Use a checkpoint written by a training run or `longctx convert`."


@dataclass(frozen=True, kw_only=True)
class CheckpointPiece:
    """Flat range from one tensor in one role, and the safetensors entry that holds it."""

    file: str
    key: str
    start: int
    numel: int


Pieces = dict[str, dict[str, list[CheckpointPiece]]]
"""Keyed by tensor and role."""


def canonical_hash(manifest: dict[str, Any]) -> str:
    """Hash the manifest's canonical JSON without its own ``hash`` entry, as xxh3-128."""
    body = {k: v for k, v in manifest.items() if k != "hash"}
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def is_buffer(name: str) -> bool:
    """Return whether a tensor is a buffer, without gradient and moments.

    Buffers are a router's selection bias, which is float32 in a model with any dtype, and a layer's output scale.
    """
    return name.endswith((".e_score_correction_bias", ".layer_scalar"))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a folder's manifest and check its format, version, hash, and each value's type and range."""
    path = folder / MANIFEST
    try:
        manifest = read_manifest_json(folder)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    except FileNotFoundError as error:
        reject_other_formats(folder)
        raise CheckpointError(f"{folder} is not a checkpoint: {MANIFEST} is missing.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    return check_manifest(manifest, path)


def check_manifest(manifest: Any, path: object) -> dict[str, Any]:
    """Return the manifest read from ``path``; raise CheckpointError unless it is complete and every value is valid."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a longctx checkpoint's manifest.")
    version = manifest.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(f"{path} has format version {shown(version)}; this release reads {VERSION}.")
    if manifest.get("hash") != canonical_hash(manifest):
        raise CheckpointError(f"{path} is damaged: its hash does not match. Use another checkpoint of the run.")
    try:
        _MANIFEST(manifest, "")
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}.\n{_HINT}") from error
    return manifest


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def where_to_get(folder: Path) -> str:
    """Return a download hint if a missing folder looks like a model name on the Hugging Face Hub; otherwise ""."""
    name = folder.as_posix()
    if not _HUB_NAME.fullmatch(name) or folder.parent.exists() or name.startswith("runs/"):
        return ""
    return f"\nDownload a Hugging Face Hub model first: hf download {name} --local-dir {folder.name}"


def reject_other_formats(folder: Path) -> None:
    """Raise CheckpointError for a PEFT adapter or a DeepSpeed ``save_checkpoint`` folder, without opening any file."""
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} is a PEFT adapter (adapter_config.json), which needs its base model. Convert both, and use OUT "
            "here:\n"
            "  longctx convert --from hf BASE CHECKPOINT\n"
            f"  longctx convert --from peft {folder} OUT --base CHECKPOINT"
        )
    for pattern in ("", "*/"):
        for name in ("mp_rank_*_model_states.pt", "*zero_pp_rank_*_states.pt", "layer_*-model_states.pt"):
            found = next(folder.glob(pattern + name), None)
            if found is not None:
                raise CheckpointError(
                    f"{folder} is a DeepSpeed checkpoint (it has {found.relative_to(folder)}). Its files are "
                    "pickles, which can execute code when loaded: longctx does not open them.\n"
                    "If you trust the checkpoint's author with your account's permissions, put the model's\n"
                    "config.json into DIR, the folder that contains `latest`, and extract the weights with DeepSpeed:\n"
                    "  longctx convert --from deepspeed DIR OUT --execute-pickles\n"
                    "Otherwise run this command on an isolated machine, and copy OUT here."
                )


def read_pieces(manifest: dict[str, Any], path: Path) -> Pieces:
    """Return each tensor's slices; raise CheckpointError unless every role is covered exactly once.

    Every slice must be in a listed file with enough bytes. ``path`` is the manifest's path, for messages.
    """
    pieces = {
        name: {role: [CheckpointPiece(**piece) for piece in found] for role, found in entry["roles"].items()}
        for name, entry in manifest["tensors"].items()
    }
    for problem in _problems(manifest, pieces):
        raise CheckpointError(f"{path.parent}: {problem}.\n{_HINT}")
    return pieces


def _problems(manifest: dict[str, Any], pieces: Pieces) -> Iterator[str]:
    """Yield the problems with the slices; the first may hide others."""
    held: dict[str, int] = dict.fromkeys(manifest["files"], 0)
    seen: set[tuple[str, str]] = set()
    for name, roles in pieces.items():
        size = num_values(manifest["tensors"][name]["shape"])
        if size > MOST_WHOLE:
            yield f"tensors.{name} has shape {shown(manifest['tensors'][name]['shape'])}, too many values for a file"
        for role, found in roles.items():
            at = 0
            # In order, each slice must start at the previous one's end: no gap and no overlap.
            for piece in sorted(found, key=lambda p: (p.start, p.numel)):
                if piece.start != at:
                    yield f"{name} ({role}) has a gap or an overlap at value {at}"
                # bytes in a file without a hash cannot be trusted
                if piece.file not in held:
                    yield f"{name} ({role}) is stored in the unlisted file {piece.file}"
                    continue
                # Two tensors sharing one entry would be trained separately and saved as two.
                if (piece.file, piece.key) in seen:
                    yield f"{name} ({role}) shares {shown(piece.key)} in {piece.file} with another slice"
                seen.add((piece.file, piece.key))
                at += piece.numel
                held[piece.file] += VALUE_BYTES * piece.numel
            if at != size:
                yield f"{name} ({role}) ends at value {at} of {size}"
    # This bounds all allocations based on these numbers: file sizes are compared with the manifest.
    for file, num_bytes in held.items():
        entry = manifest["files"][file]
        if num_bytes > entry["bytes"]:
            yield f"{file} has {entry['bytes']} bytes, but its slices {num_bytes}"
        # unless every checksum block has a hash, some bytes would be used unchecked
        if "blocks" in entry and len(entry["blocks"]) != HASH_HEX_LENGTH * num_blocks(entry["bytes"]):
            yield f"{file} has {entry['bytes']} bytes, but {len(entry['blocks']) // HASH_HEX_LENGTH} block hashes"


def num_values(shape: list[int] | tuple[int, ...]) -> int:
    """Return the exact number of values in a tensor with this shape, however large."""
    product = 1
    for size in shape:
        product *= size
    return product


# ------------------------------------------------------------------------------------------------------------ schema

_TENSOR_FILE = text(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,187}\.safetensors", ".safetensors file name in this folder")
_PIECE = record({"file": _TENSOR_FILE, "key": NAME, "start": integer_between(), "numel": integer_between()})
_TENSOR = record(
    {"shape": list_of(integer_between(), most=8), "roles": mapping(choice_of(ROLES), list_of(_PIECE))},
)


def check_token_ids(value: Any, where: str) -> None:
    """Check a token id, a list of ids, or null, as used in config.json for begin, end and padding."""
    if type(value) is list:
        list_of(integer_between(-1, 2**32), most=1024)(value, where)
    else:
        nullable(integer_between(-1, 2**32))(value, where)


_IMPORTED = record(
    {},
    {
        "model_type": nullable(NAME),
        "dtype": choice_of(DTYPES),
        "dtypes": mapping(NAME, choice_of(DTYPES)),
        "token_ids": mapping(NAME, check_token_ids),
        "source": NAME,
    },
    allow_extra=True,
)


def _loads(value: Any, where: str) -> None:
    """Check the tokens per expert: null, or a list of equally long lists of numbers."""
    list_of(list_of(number, least=1))(value, where)
    if len({len(row) for row in value}) > 1:
        raise ValueError(f"{where} has rows of different lengths")


_HISTORY = record(
    {
        "losses": list_of(number, most=1024),
        "norms": list_of(number, most=1024),
        "skipped": integer_between(),
        "in_row": integer_between(),
    }
)
"""History for detecting loss spikes; the consumer checks it more closely."""

_TRAINING = record(
    {},
    {
        "step": integer_between(),
        # the loader checks its own state strictly
        "loader": mapping(NAME, anything),
        "world_size": integer_between(1),
        "zero_stage": integer_between(0, 3),
        "expert_load": _loads,
        "optimizer_steps": integer_between(),
        "history": nullable(_HISTORY),
        "model_type": nullable(NAME),
        "config": mapping(NAME, mapping(NAME, anything)),
        "imported": _IMPORTED,
        "upcycled": mapping(NAME, anything),
    },
    allow_extra=True,
)


def _no_manifest(value: Any, where: str) -> None:
    """Check a file name, which must not be the manifest itself."""
    FILE_NAME(value, where)
    if value == MANIFEST:
        raise ValueError(f"{where} is {MANIFEST}, which cannot list itself")


_BLOCK_HASHES = text(r"([0-9a-f]{32})*", "sequence of 32-digit hex checksums")

_MANIFEST: Check = record(
    {
        "format": anything,
        "version": anything,
        "step": integer_between(),
        "dtype": choice_of(DTYPES),
        # ModelConfig checks its own fields strictly
        "model": mapping(NAME, anything),
        "files": mapping(_no_manifest, record({"bytes": integer_between(), "hash": HASH}, {"blocks": _BLOCK_HASHES})),
        "tensors": mapping(NAME, _TENSOR, least=1),
        "training": _TRAINING,
        "hash": HASH,
    },
    {"versions": mapping(NAME, NAME), "base": record({"folder": NAME, "hash": HASH})},
)


PROOF_FILE = "proved.json"
"""Stored next to the manifest, outside its hash: the later loss that proved the checkpoint."""
_MOST_PROOF_BYTES = 4096
_WITHOUT_PROOF = "Remove it: the checkpoint is complete without it."
_PROOF = record(
    {"manifest": HASH, "by": choice_of(("step", "validation")), "step": integer_between(), "loss": number, "hash": HASH}
)


def seal_proof(manifest_hash: str, proof: dict[str, Any]) -> bytes:
    """Encode a ``PROOF_FILE`` file: the proof for the checkpoint with this manifest, under its own hash."""
    content = {"manifest": manifest_hash, **proof}
    return json.dumps(content | {"hash": canonical_hash(content)}).encode()


def read_proof(folder: Path) -> dict[str, Any] | None:
    """Read a checkpoint's proof, None if there is no file; raise CheckpointError if the file was changed."""
    path = folder / PROOF_FILE
    if not path.exists():
        return None
    try:
        return parse_proof(read_bounded(path, _MOST_PROOF_BYTES))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{PROOF_FILE} cannot be read: {error}. {_WITHOUT_PROOF}") from error


def parse_proof(text: bytes) -> dict[str, Any]:
    """Parse a ``PROOF_FILE`` file; raise CheckpointError if it was changed."""
    try:
        content = parse_json(text)
        if not isinstance(content, dict) or content.get("hash") != canonical_hash(content):
            raise ValueError("its hash does not match")
        _PROOF(content, "")
    except ValueError as error:
        raise CheckpointError(f"{PROOF_FILE} is damaged: {error}. {_WITHOUT_PROOF}") from error
    return content
