"""ImageStages: a hierarchical image model (Swin): stacks of window layers, with patches merged between them.

Axes: B rows, t tokens of this process, M model width of a stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx.architecture.image_stages import stage_configs
from longctx.architecture.layer_specs import layer_specs
from longctx.architecture.mixers.image_window_mixer import ImageWindowMixer
from longctx.batch import PackedDocuments
from longctx.config import ModelConfig
from longctx.model.attention.image_windows import ImageWindowCore, Mover, PatchOrder, num_images, window_order
from longctx.model.layers.linear import Linear
from longctx.model.layers.norms import build_norm
from longctx.model.stack import Stack, StackInput


class PatchMerging(nn.Module):
    """Norm and projection of four neighbouring patches, which become one of twice the width."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        M = config.hidden_size
        self.norm = build_norm(config, 4 * M)
        self.reduction = Linear(4 * M, 2 * M, bias=False)

    def forward(self, x_BtM: Tensor) -> Tensor:
        """Merge every four consecutive tokens."""
        return self.reduction(self.norm(x_BtM.unflatten(1, (-1, 4)).flatten(2)))


class ImageStages(nn.Module):
    """Stages of a model, and the merging of patches after each but the last."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        configs, self.norm, self.mtp = stage_configs(config), None, ()
        last = len(configs) - 1
        self.stages = nn.ModuleList(
            Stack(stage, owns_front=number == 0, has_norm=number == last) for number, stage in enumerate(configs)
        )
        self.merges = nn.ModuleList(PatchMerging(stage) for stage in configs[:-1])

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """Blocks of all stages."""
        stages: Any = self.stages
        return tuple(layer for stage in stages for layer in stage.layers)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return next(self.parameters()).dtype


class ImageHidden(NamedTuple):
    """Hidden states of a hierarchical model, whose tokens are not the batch's."""

    hidden_BtM: Tensor
    images_t: Tensor
    """Image of each token, int64, counted over all tokens of the batch with its padding."""


def run_stages(
    model: ImageStages, given: StackInput, core: ImageWindowCore, run_stack: Callable[[Stack, StackInput], Tensor]
) -> ImageHidden:
    """Run images through all stages; ``run_stack`` runs a stage's layers.

    Tokens enter in the batch's order, and from then on are in window order: a layer with shifted windows and a merging
    need another one, and ``core`` moves the tokens there.
    """
    stages: Any = model.stages
    # Boundaries are global: this process may have part of the tokens.
    num_tokens = None if given.cu_seqlens is not None else given.tokens_Bt.numel()
    documents = PackedDocuments.of(given.cu_seqlens, num_tokens)
    images = num_images(documents, stages[0].config.image.num_tokens)
    order = _stage_order(stages[0].config, images)
    x_BtM = stages[0].embed_images(given.pixels, given.positions_Bt)
    x_BtM = _moved(x_BtM, core.mover(replace(order, kind="reading", side=0), order, given.placement))
    for number, stage in enumerate(stages):
        tokens_Bt = given.tokens_Bt.new_zeros(x_BtM.shape[:2])
        documents = PackedDocuments.of_rows(images, stage.config.image.num_tokens)
        of_stage = StackInput(
            tokens_Bt=tokens_Bt, positions_Bt=tokens_Bt, cu_seqlens=documents, document_ids=tokens_Bt, hidden=x_BtM
        )
        x_BtM = run_stack(stage, of_stage)
        if number < len(model.merges):
            next_order = _stage_order(stages[number + 1].config, images)
            merged = PatchOrder(images, order.rows, order.columns, "merge", next_order.side)
            x_BtM, order = model.merges[number](_moved(x_BtM, core.mover(order, merged))), next_order
    groups = core.local_groups(order)
    tokens = torch.arange(groups.start * order.group, groups.stop * order.group, device=x_BtM.device)
    return ImageHidden(x_BtM, tokens // order.tokens_per_image)


def hidden_in_reading_order(config: ModelConfig, hidden: Tensor | ImageHidden) -> Tensor:
    """Return a model's hidden states for complete images, image after image in reading order [t, M]."""
    if not isinstance(hidden, ImageHidden):
        return hidden.flatten(0, 1)
    last = stage_configs(config)[-1]
    windows_tM = hidden.hidden_BtM[0]
    order = _stage_order(last, len(windows_tM) // last.image.num_tokens)
    reading_tM = torch.empty_like(windows_tM)
    reading_tM[torch.from_numpy(order.indices())] = windows_tM
    return reading_tM


def _stage_order(config: ModelConfig, images: int) -> PatchOrder:
    """Return the order in which a stage's tokens are stored: window by window, without a shift."""
    mixer = layer_specs(config)[0].mixer
    assert isinstance(mixer, ImageWindowMixer)
    return replace(window_order(mixer, images), shift=0)


def _moved(x_BtM: Tensor, mover: Mover | None) -> Tensor:
    if mover is None:
        return x_BtM
    (moved,) = mover([x_BtM])
    return moved
