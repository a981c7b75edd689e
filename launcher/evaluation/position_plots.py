"""Position embedding plots: values for some positions, values for some channels, and similarities.

Axes: P positions, M channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from launcher.evaluation.model_source import checkpoint_name, open_reader
from launcher.report.evaluation.evaluation_plots import write_caption
from launcher.report.evaluation.evaluation_tables import write_csv
from launcher.report.report_plots import new_fig, standalone, styled, to_svg
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.files import write_atomically
from longctx.generation.load_decoder import find_model, load_model
from longctx.model.rotary import sinusoidal_embedding

POSITIONS = 512
"""Default number of positions to draw."""
_LINES = 4


@dataclass(frozen=True, kw_only=True)
class PositionOptions:
    """Options for one ``attention --positions`` call."""

    checkpoint: Path
    output: Path
    length: int | None = None
    """Positions to draw."""

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 2:
            raise ConfigError(f"--length {self.length}: a plot over positions needs at least 2.")


def draw_positions(options: PositionOptions) -> list[Path]:
    """Write the plot, and the values as CSV; return their paths."""
    folder = find_model(options.checkpoint)
    _, model, _ = open_reader(folder)
    length = _length(options, model, folder)
    values_PM = position_values(folder, model, length)
    caption = (
        f"{checkpoint_name(folder)} · model.position = {model.position} · {datetime.now(UTC):%Y-%m-%d} · "
        f"{length} positions, {values_PM.shape[1]} channels"
    )
    plot_file = options.output / "positions.svg"
    write_atomically(plot_file, standalone(plot_position_values(values_PM, caption)).encode())
    rows = [
        {"position": position, "channel": channel, "value": float(value)}
        for (position, channel), value in np.ndenumerate(values_PM)
    ]
    return [plot_file, write_csv(plot_file.with_suffix(".csv"), rows)]


def _length(options: PositionOptions, model: ModelConfig, folder: Path) -> int:
    """Return how many positions to draw; raise ConfigError for a model without position embeddings, or with too few."""
    if model.position not in ("learned", "sinusoidal", "sinusoidal_halves"):
        raise ConfigError(
            f"{folder} has no position embeddings (model.position={model.position}), so there is nothing to plot. "
            "Leave out --positions: attention maps show how positions act."
        )
    # Sinusoidal positions have no limit; a learned table ends at ``max_positions``.
    if options.length is None:
        return min(POSITIONS, model.max_positions)
    if model.position == "learned" and options.length > model.max_positions:
        raise ConfigError(
            f"--length {options.length}: the model has {model.max_positions} learned positions. Use --length "
            f"{model.max_positions} or less."
        )
    return options.length


@torch.no_grad()
def position_values(folder: Path, model: ModelConfig, length: int) -> np.ndarray:
    """Return the values added to a token at each position, [P, M]."""
    positions_1P = torch.arange(length)[None]
    if model.position == "learned":
        table = load_model(folder).model.embed_positions
        # Some families reserve the table's first rows.
        return table(positions_1P + model.position_offset)[0].float().numpy()
    halves = model.position == "sinusoidal_halves"
    return sinusoidal_embedding(positions_1P, model.embedding_dim, torch.float32, halves=halves)[0].numpy()


def similarities(values_PM: np.ndarray) -> np.ndarray:
    """Return the cosine similarity for each pair of positions, [P, P]."""
    norms_P1 = np.linalg.norm(values_PM, axis=1, keepdims=True)
    # The smallest normal float avoids 0 / 0 for an untrained all-zero position.
    unit_PM = values_PM / np.maximum(norms_P1, np.finfo(np.float32).tiny)
    return unit_PM @ unit_PM.T


@styled
def plot_position_values(values_PM: np.ndarray, caption: str) -> str:
    """Draw three panels: channels for some positions, positions for some channels, and similarities."""
    count, channels = values_PM.shape
    fig, (of_position, of_channel, similarity_axes) = new_fig(1, rows=3, height=13.0)
    for position in np.unique(np.linspace(0, count - 1, _LINES).astype(int)):
        of_position.plot(values_PM[position], label=f"position {position:,}", linewidth=1.2)
    for channel in np.unique(np.linspace(0, channels - 1, _LINES).astype(int)):
        of_channel.plot(values_PM[:, channel], label=f"channel {channel:,}", linewidth=1.2)
    for axes, across in ((of_position, "channel"), (of_channel, "position")):
        axes.set_xlabel(across)
        axes.set_ylabel("value")
        axes.legend(loc="upper right")
    image = similarity_axes.imshow(
        similarities(values_PM), cmap="viridis", vmin=-1.0, vmax=1.0, interpolation="nearest"
    )
    similarity_axes.grid(False)
    similarity_axes.set_xlabel("position")
    similarity_axes.set_ylabel("position")
    fig.colorbar(image, ax=similarity_axes, pad=0.015, fraction=0.04).set_label(
        "cosine similarity between the two positions' embeddings"
    )
    write_caption(fig, caption)
    return to_svg(fig, "positions")
