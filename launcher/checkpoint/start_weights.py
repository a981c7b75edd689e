"""``StartWeights``: a checkpoint's weights in the shapes of a run that starts from it with other images or classes."""

from __future__ import annotations

import logging
from functools import cached_property

from torch import Size, Tensor

from longctx.architecture.adapter import is_adapter
from longctx.checkpoint_format import CheckpointReader, model_config
from longctx.config import ModelConfig
from longctx.errors import CheckpointError
from longctx.model.layers.initialize import InitialTensor
from longctx.model.position_grid import resize_positions

log = logging.getLogger(__name__)

_POSITIONS = "model.embed_positions.weight"
_CLASS_HEAD, _HEADS = "class_head.", ("class_head.", "lm_head.")
"""Name prefixes for a head that may be new, and for heads that may be left out."""


class StartWeights:
    """Weights for a run's model: learned positions of patches are interpolated, and a new class head is initialized."""

    def __init__(
        self, reader: CheckpointReader, model: ModelConfig, shapes: dict[str, tuple[int, ...]], seed: int
    ) -> None:
        """Read from ``reader`` for a model with these parameter ``shapes``; ``seed`` is for new weights."""
        self._reader, self._model, self._shapes, self._seed = reader, model, shapes, seed
        self._saved = model_config(reader)
        stored = {name: reader.shape(name) for name in reader.names()}
        may_be_new = [name for name in shapes if name.startswith(_CLASS_HEAD) or is_adapter(name)]
        self.new = [name for name in may_be_new if stored.get(name) != shapes[name]]
        """Parameters that the checkpoint lacks, or has for other classes."""
        heads = [name for name in self.new if not is_adapter(name)]
        if heads and model.adapter.is_used:
            raise CheckpointError(
                f"{reader.folder} has no class head for model.classes={model.classes}, and with adapters "
                f"(model.adapter.rank={model.adapter.rank}) a new one would stay as it is.\nTrain it first, with "
                "model.adapter.rank=0."
            )
        self.unused = [name for name in stored if name not in shapes and name.startswith(_HEADS)]
        """The checkpoint's parameters for heads that the model lacks."""
        self.resizes = (
            bool(model.image.patch)
            and self._saved.image.num_tokens > 0
            and ((self._saved.image.height, self._saved.image.width) != (model.image.height, model.image.width))
        )
        """True if learned positions are interpolated."""

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint's shapes as ``read_into`` reads them."""
        found = {name: self._reader.shape(name) for name in self._reader.names() if name not in self.unused}
        found |= {name: self._shapes[name] for name in self.new}
        if self.resizes and _POSITIONS in found:
            found[_POSITIONS] = (self._model.image.num_tokens, *found[_POSITIONS][1:])
        return found

    def read_into(self, name: str, role: str, start: int, out: Tensor) -> None:
        """Fill ``out`` as ``CheckpointReader.read_into`` does."""
        if name in self.new:
            whole = Size(self._shapes[name]).numel()
            InitialTensor(name, whole, self._model, self._seed).copy_to(out, start)
        elif self.resizes and name == _POSITIONS:
            out.copy_(self._positions[start : start + len(out)])
        else:
            self._reader.read_into(name, role, start, out)

    def log_changes(self) -> None:
        """Log which weights are not the checkpoint's own."""
        if self.resizes:
            saved, image = self._saved.image, self._model.image
            log.info(
                "Positions were interpolated from images of %d × %d pixels to %d × %d.",
                saved.height,
                saved.width,
                image.height,
                image.width,
            )
        heads = [name for name in self.new if not is_adapter(name)]
        if heads:
            log.info("The class head is new (%d classes): %s.", self._model.classes, ", ".join(heads))
        if self.unused:
            log.info("Not read from the checkpoint, because the model has no such head: %s.", ", ".join(self.unused))

    @cached_property
    def _positions(self) -> Tensor:
        return resize_positions(self._reader.read(_POSITIONS), self._saved.image, self._model.image).flatten()
