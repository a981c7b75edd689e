"""Routing files: expert choices in each step, recorded by one run and replayed by another.

A run that records (``train.record_routing``) writes ``step_NNNNNN.safetensors`` after every step: for each expert layer
the ids chosen by every token, with tokens in the loader's row order, not in any rank's. A run with other degrees,
layout, accumulation or precision can therefore make the same choices (``train.replay_routing``); the two then differ by
rounding only.

Axes: L expert layers, T tokens in the step (padding included), N tokens on this rank, k experts per token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from launcher.metrics.expert_load import expert_layers
from longctx.config import ModelConfig
from longctx.errors import ConfigError, DataError
from longctx.files import replaced_file
from longctx.model.experts.replay import RoutingReplay
from longctx.model.experts.router import NO_EXPERT
from longctx.tensor_bytes import rows_as_bytes
from longctx.untrusted.strict_json import parse_json
from parallel.comm.communicator import Communicator
from parallel.comm.process_groups import world_group
from parallel.comm.world import num_ranks, on_every_rank

FORMAT, VERSION = "longctx-routing", 1
_METADATA = "longctx"

Order = dict[str, Any]
"""Loader state before the step, which determines its rows; the same for every number of ranks."""


class RoutingFiles:
    """Routing recorder and replayer; inactive if neither is requested."""

    def __init__(self, record: str, replay: str, model: ModelConfig, tokens_per_step: int) -> None:
        """Record to and replay from these folders; "no" disables either."""
        self._record = _folder_or_none(record)
        self._replay = _folder_or_none(replay)
        self._layers, self._tokens = expert_layers(model), tokens_per_step
        self._dtype = minimum_dtype(model.num_experts)
        self._model = {
            "expert_layers": self._layers,
            "num_experts": model.num_experts,
            "experts_per_token": model.experts_per_token,
        }
        self._micro_batches: list[RoutingReplay] = []

    @property
    def active(self) -> bool:
        """True if steps record or replay."""
        return self._record is not None or self._replay is not None

    def prepare(self, steps: range, *, resumes: bool) -> None:
        """Create the folder to record to, and check that every step to replay exists. Call it on every rank.

        Raise ConfigError if the first holds another run's files, DataError if the second lacks a step.
        """
        if self._record is not None:
            _make_folder(self._record, resumes=resumes)
        if self._replay is not None:
            # Check now: the step itself may be hours away.
            _check_steps(self._replay, steps)

    def begin(self, step: int, order: Order, token_indices: Sequence[Tensor]) -> None:
        """Prepare for a step; ``token_indices`` [N] are this rank's token indices in the step, for each micro-batch.

        −1 marks padding. Collective when replaying: raise DataError on every rank if a file is damaged, or was recorded
        with another model or over other rows.
        """
        self._step, self._order, self._token_indices = step, order, list(token_indices)
        if self._replay is not None:
            # The file has all tokens in the step; each rank picks its own, so any degree can replay it.
            ids_LTk = on_every_rank(lambda: self._read(step, order))
            self._micro_batches = [RoutingReplay([_own(ids, own) for ids in ids_LTk]) for own in token_indices]
        elif self._record is not None:
            self._micro_batches = [RoutingReplay() for _ in token_indices]

    def replay(self, micro_batch: int) -> RoutingReplay | None:
        """Return the choices that a micro-batch's forward pass records or replays."""
        if not self._micro_batches:
            return None
        return self._micro_batches[micro_batch]

    def end(self) -> None:
        """Write the step's file, if this run records. Collective."""
        if self._record is None:
            return
        own_LNk = [replay.experts_LNk.to("cpu", self._dtype) for replay in self._micro_batches]
        ids_LTk = gather_tokens(torch.cat(own_LNk, dim=1), torch.cat(self._token_indices), self._tokens)
        path, metadata = _path(self._record, self._step), self._metadata(self._step, self._order)

        def write() -> None:
            if ids_LTk is not None:
                _write(path, self._names(), ids_LTk, metadata)

        # All ranks wait for the writer, so that a full disk ends the run on every rank.
        on_every_rank(write)

    def _names(self) -> list[str]:
        return [f"model.layers.{layer}.mlp.chosen_experts" for layer in self._layers]

    def _metadata(self, step: int, order: Order) -> dict[str, Any]:
        """Return the values that must match between the recording and the replaying run."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "tokens": self._tokens,
            "model": self._model,
            "data": order,
        }

    def _read(self, step: int, order: Order) -> list[Tensor]:
        """Return the step's ids by layer [T, k], as stored."""
        assert self._replay is not None
        path = _path(self._replay, step)
        try:
            with safe_open(path, framework="pt") as file:
                _check_metadata(path, (file.metadata() or {}).get(_METADATA), self._metadata(step, order))
                ids = [file.get_tensor(name) for name in self._names()]
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read: {error}.\nRecord the routing again.") from error
        shape = (self._tokens, self._model["experts_per_token"])
        for name, found in zip(self._names(), ids, strict=True):
            low, high = (int(x) for x in found.aminmax())
            # An id beyond the experts would index past the dispatcher's counts, far from the faulty file.
            if found.shape != shape or low < -1 or high >= self._model["num_experts"]:
                raise DataError(
                    f"{path} is damaged: {name} has shape {tuple(found.shape)} and ids from {low} to {high}; it needs "
                    f"{shape} and ids from -1 to {self._model['num_experts'] - 1}."
                )
        return ids


def minimum_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest integer dtype that holds all expert ids, and −1 for a dropped assignment."""
    return next(t for t in (torch.int8, torch.int16, torch.int32) if num_experts - 1 <= torch.iinfo(t).max)


def gather_tokens(ids_LNk: Tensor, token_indices_N: Tensor, num_tokens: int) -> Tensor | None:
    """Gather all ranks' ids in the step's token order: [L, T, k] on rank 0, None on the others. Collective.

    Ranks hold equally many tokens: together each of the ``num_tokens`` once, and padding with index −1.
    """
    parts_LNk, parts_N = _gather(ids_LNk), _gather(token_indices_N)
    if parts_LNk is None or parts_N is None:
        return None
    token_indices_T = torch.cat(parts_N)
    # Every rank may have padding: drop it before placing tokens by index.
    is_token_T = token_indices_T >= 0
    token_indices_T = token_indices_T[is_token_T]
    assert torch.equal(token_indices_T.sort().values, torch.arange(num_tokens)), "each token exactly once"
    out_LTk = torch.empty(len(ids_LNk), num_tokens, ids_LNk.shape[2], dtype=ids_LNk.dtype)
    out_LTk[:, token_indices_T] = torch.cat(parts_LNk, dim=1)[:, is_token_T]
    return out_LTk


def _own(ids_Tk: Tensor, token_indices_N: Tensor) -> Tensor:
    """Return the choices for one rank's tokens [N, k]; padding has no expert."""
    ids_Nk = ids_Tk[token_indices_N.clamp(min=0)]
    return ids_Nk.where(token_indices_N[:, None] >= 0, NO_EXPERT)


def _gather(own: Tensor) -> list[Tensor] | None:
    if num_ranks() == 1:
        return [own]
    # As bytes, since gloo has no 16-bit integers.
    parts = Communicator().gather(rows_as_bytes(own), world_group(), operation="gathering expert assignments to record")
    if parts is None:
        return None
    return [part.view(own.dtype) for part in parts]


def _folder_or_none(setting: str) -> Path | None:
    if setting == "no":
        return None
    return Path(setting)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.safetensors"


def _make_folder(folder: Path, *, resumes: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A resumed run continues its own recording; any other run must not add to one.
        taken = not resumes and next(folder.glob("step_*.safetensors"), None) is not None
    except OSError as error:
        raise ConfigError(f"train.record_routing={str(folder)!r} cannot be written: {error}.") from error
    if taken:
        raise ConfigError(
            f"train.record_routing={str(folder)!r} already holds a run's routing.\nChoose another folder, or replay "
            "it: --train.replay_routing."
        )


def _check_steps(folder: Path, steps: range) -> None:
    """Raise DataError unless the folder has a file for each of these steps."""
    missing = [step for step in steps if not _path(folder, step).is_file()]
    if not missing:
        return
    files = sorted(path.name for path in folder.glob("step_*.safetensors"))
    stored = "it holds no routing files"
    if files:
        stored = f"it holds {files[0]} to {files[-1]}"
    raise DataError(
        f"train.replay_routing={str(folder)!r} lacks step {missing[0]}, and this run takes steps {steps[0]} to "
        f"{steps[-1]}; {stored}.\nRecord as many steps (train.record_routing), or stop earlier (train.stop_after)."
    )


def _write(path: Path, names: Sequence[str], ids_LTk: Tensor, metadata: dict[str, Any]) -> None:
    tensors = {name: ids_Tk.contiguous() for name, ids_Tk in zip(names, ids_LTk, strict=True)}
    try:
        with replaced_file(path) as temporary:
            save_file(tensors, temporary, metadata={_METADATA: json.dumps(metadata)})
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path} could not be written: {error}.\nFree some space, or set train.record_routing=no."
        ) from error


def _check_metadata(path: Path, stored: str | None, wanted: dict[str, Any]) -> None:
    """Raise DataError unless the file belongs to this step and to a run like this one."""
    try:
        found = parse_json((stored or "").encode())
    except ValueError:
        found = None
    if not isinstance(found, dict) or (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        raise DataError(f"{path} is not a routing file from this release: record one with train.record_routing.")
    if found.get("step") != wanted["step"]:
        raise DataError(f"{path} contains step {found.get('step')}. Do not rename routing files.")
    # Without this check, ids from another model or other tokens would be replayed silently: shapes often agree.
    for mismatch, key, mend in (
        ("with another model", "model", "Replay with the recording's experts and layers."),
        ("over other rows", "data", "Replay with the same data.train, data.seq_len, run.seed and previous steps."),
    ):
        recorded, ours = found.get(key) or {}, wanted[key]
        if recorded != ours:
            mismatches = [f"{k}: file {recorded.get(k)!r}, run {v!r}" for k, v in ours.items() if recorded.get(k) != v]
            raise DataError(f"{path} was recorded {mismatch}:\n  " + "\n  ".join(mismatches) + f"\n{mend}")
    if found.get("tokens") != wanted["tokens"]:
        raise DataError(
            f"{path} has {found.get('tokens')} tokens, and this run's steps have "
            f"train.tokens_per_step={wanted['tokens']}."
        )
