"""Cross attention of one head: each target token against each source token.

Axes: T target tokens, S source tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from launcher.checkpoint.tokenizer_checks import resolve_tokenizer
from launcher.evaluation.attention_map import token_texts
from launcher.evaluation.model_source import check_positions, checkpoint_name, open_reader
from launcher.report.evaluation.evaluation_plots import write_caption
from launcher.report.evaluation.evaluation_tables import write_csv
from launcher.report.report_plots import new_fig, standalone, styled, to_svg
from longctx.batch import PackedDocuments, Stream
from longctx.config import ModelConfig
from longctx.errors import ConfigError, DataError
from longctx.files import write_atomically
from longctx.generation import generate
from longctx.generation.load_decoder import find_model, load_model
from longctx.model.attention.observed import ObservedAttention
from longctx.tokenizer import Tokenizer
from longctx.tokenizer.pair_ids import source_ids, start_of_targets

MOST_TOKENS = 128
"""Maximum tokens per side: the plot labels each one."""


@dataclass(frozen=True, kw_only=True)
class CrossOptions:
    """Options for one ``attention --cross`` call."""

    checkpoint: Path
    text: Path
    """Source text."""
    target: Path | None
    """Target text; if unset, the model generates it."""
    layer: int
    head: int
    output: Path
    tokenizer: Path | None = None


def draw_cross_attention(options: CrossOptions) -> list[Path]:
    """Write plot and CSV; return their paths."""
    folder = find_model(options.checkpoint)
    _, model, _ = open_reader(folder)
    _check(model, options, folder)
    tokenizer = resolve_tokenizer(folder, options.tokenizer).for_model(model.vocab_size)
    source = source_ids(tokenizer, _read(options.text, "--text"))
    _check_side(model, source, f"--text {options.text}")
    target = _target(options, folder, model, tokenizer, source)
    weights_TS = compute_cross_attention(folder, source, target, layer=options.layer, head=options.head)
    caption = (
        f"{checkpoint_name(folder)} · cross attention, layer {options.layer}, head {options.head} · "
        f"{datetime.now(UTC):%Y-%m-%d} · {len(target)} target tokens, {len(source)} source tokens"
    )
    name = f"cross_attention_layer{options.layer}_head{options.head}"
    token_labels = [token_texts(tokenizer, ids) for ids in (target, source)]
    plot_file = (options.output / name).with_suffix(".svg")
    write_atomically(
        plot_file,
        standalone(plot_cross_attention(weights_TS, token_labels[0], token_labels[1], caption, name)).encode(),
    )
    rows = [
        {
            "target": t,
            "source": s,
            "target_text": token_labels[0][t],
            "source_text": token_labels[1][s],
            "share": float(share),
        }
        for (t, s), share in np.ndenumerate(weights_TS)
    ]
    return [plot_file, write_csv(plot_file.with_suffix(".csv"), rows)]


def _check(model: ModelConfig, options: CrossOptions, folder: Path) -> None:
    """Raise ConfigError for a model without cross attention, or for an invalid layer or head."""
    if not model.encoder_layers:
        raise ConfigError(
            f"{folder} has no encoder (model.encoder_layers=0), so it has no cross attention. Leave out --cross."
        )
    for name, value, count in (("layer", options.layer, model.num_layers), ("head", options.head, model.num_heads)):
        if not 0 <= value < count:
            raise ConfigError(f"--{name} {value}: the model has {name}s 0 to {count - 1}.")


def _check_side(model: ModelConfig, ids: list[int], name: str) -> None:
    """Raise ConfigError if a side has more tokens than fit the plot or the model's positions."""
    if len(ids) > MOST_TOKENS:
        max_tokens = min(MOST_TOKENS, model.max_positions)
        raise ConfigError(
            f"{name}: {len(ids)} tokens, but the plot has room for {MOST_TOKENS}. Shorten it to {max_tokens} tokens."
        )
    hint = f"Shorten it to {model.max_positions} tokens"
    check_positions(model, len(ids), request=f"{name}: {len(ids)} tokens", hint=hint, allow_longer=False, option=None)


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{option} {path} cannot be read as UTF-8 text ({error}).") from error


def _target(
    options: CrossOptions, folder: Path, model: ModelConfig, tokenizer: Tokenizer, source: list[int]
) -> list[int]:
    """Return the target as the decoder reads it: start token, then the given text or the model's output."""
    start = [start_of_targets(tokenizer)]
    if options.target is not None:
        target = start + tokenizer.encode(_read(options.target, "--target")).tolist()
        _check_side(model, target, f"--target {options.target}, with its start token")
        return target
    decoder = load_model(folder)
    # Leave room for the start token.
    most = min(MOST_TOKENS, model.max_positions) - 1
    written = generate(decoder, start, most, source_ids=source, stop_ids=tokenizer.special.stop_ids)
    return start + written


@torch.no_grad()
def compute_cross_attention(folder: Path, source: list[int], target: list[int], *, layer: int, head: int) -> np.ndarray:
    """Return each source token's share in the head's attention for each target token, [T, S]."""
    # One group per source token keeps the keys separate.
    core = ObservedAttention(call=layer, head=head, groups_T=torch.arange(len(source)))
    model = load_model(folder, cores={"cross": core})
    count = len(source)
    encoded = model.encode(
        Stream(
            tokens=torch.tensor([source]),
            positions=torch.arange(count)[None],
            document_ids=torch.zeros(1, count, dtype=torch.int64),
            documents=PackedDocuments.of_lengths([count]),
        )
    )
    model(torch.tensor([target]), torch.arange(len(target))[None], source=encoded)
    assert core.weights_TG is not None, "the layer did not run"
    return core.weights_TG.numpy()


@styled
def plot_cross_attention(weights_TS: np.ndarray, target: list[str], source: list[str], caption: str, name: str) -> str:
    """Draw target tokens down and source tokens across, with attention as each square's color."""
    height = 2.2 + 0.19 * len(target)
    fig, (axes,) = new_fig(1, height=height)
    image = axes.imshow(weights_TS, cmap="viridis", vmin=0.0, vmax=1.0, interpolation="nearest", aspect="auto")
    axes.grid(False)
    axes.set_xticks(range(len(source)), source, rotation=90, fontsize=7)
    axes.set_yticks(range(len(target)), target, fontsize=7)
    axes.set_xlabel("source")
    axes.set_ylabel("target (decoder input)")
    bar = fig.colorbar(image, ax=axes, pad=0.015, fraction=0.04)
    bar.set_label("attention weight per source token")
    write_caption(fig, caption)
    return to_svg(fig, name)
