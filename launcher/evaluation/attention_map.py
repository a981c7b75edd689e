"""Attention map of one head over a text: each key block's share in each query block's attention.

Drawn as a heat map over blocks and, for a short text, also as a page of tokens.

Axes: T tokens, N query blocks, G key blocks; both block kinds have the same size.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter

from data_pipeline.texts import read_texts
from launcher.checkpoint.tokenizer_checks import resolve_tokenizer
from launcher.evaluation.model_source import checkpoint_name, open_reader
from launcher.report.evaluation.evaluation_plots import write_caption
from launcher.report.evaluation.evaluation_tables import Rows, write_csv
from launcher.report.html import fill_template
from launcher.report.report_plots import RED, new_fig, standalone, styled, to_svg
from longctx.architecture.layer_specs import layer_specs
from longctx.config import ModelConfig
from longctx.errors import ConfigError, DataError
from longctx.files import write_atomically
from longctx.generation.detokenize import TextStream
from longctx.generation.load_decoder import find_model, load_model
from longctx.model.attention.observed import ObservedAttention
from longctx.tokenizer import Tokenizer

PAGE_TOKENS = 512
"""Maximum tokens for a page that shows each token's attention."""
LEAST = 1e-4
"""Share with the darkest color; smaller shares get the same."""
_STEPS = 65535
"""Quantization steps for a share on the page: two bytes each."""


@dataclass(frozen=True, kw_only=True)
class AttentionMapOptions:
    """Options for one ``attention`` call."""

    checkpoint: Path
    text: Path
    layer: int
    head: int
    output: Path
    length: int | None = None
    blocks: int = 96
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        if self.blocks < 2:
            raise ConfigError(f"--blocks {self.blocks}: a plot has at least 2 blocks per side. The default is 96.")
        if self.length is not None and self.length < 2:
            raise ConfigError(f"--length {self.length}: attention needs at least 2 tokens.")


@dataclass(frozen=True, kw_only=True)
class AttentionMap:
    """Mean share of each key block in each query block's attention."""

    share_NG: np.ndarray
    is_seen_NG: np.ndarray
    """True if the mask lets any query in the block see any key in the other block."""
    block_tokens: int
    bounds: list[int]
    """Document boundaries, in tokens."""


def draw_attention(options: AttentionMapOptions) -> list[Path]:
    """Write plot and CSV, for a short text also the page; return their paths."""
    folder = find_model(options.checkpoint)
    _, model, _ = open_reader(folder)
    call = softmax_call(model, options.layer, options.head)
    tokenizer = resolve_tokenizer(folder, options.tokenizer).for_model(model.vocab_size)
    documents = read_packed(options.text, tokenizer, options.length)
    _check_positions(model, documents)
    num_tokens = sum(map(len, documents))
    caption = (
        f"{checkpoint_name(folder)} · layer {options.layer}, head {options.head} · length {num_tokens:,} · "
        f"{datetime.now(UTC):%Y-%m-%d} · n = {num_tokens:,} queries"
    )
    # Round up: the plot never has more blocks than requested.
    block_tokens = -(-num_tokens // options.blocks)
    found = compute_attention_map(folder, documents, call=call, head=options.head, block_tokens=block_tokens)
    name = f"attention_layer{options.layer}_head{options.head}"
    paths = _write_plot(options.output / name, found, caption)
    if num_tokens <= PAGE_TOKENS:
        by_token = compute_attention_map(folder, documents, call=call, head=options.head, block_tokens=1)
        page = token_page(by_token, [token_texts(tokenizer, ids) for ids in documents], caption)
        paths.append(options.output / f"{name}.html")
        write_atomically(paths[-1], page.encode())
    return paths


def softmax_call(model: ModelConfig, layer: int, head: int) -> int:
    """Return the layer's index among softmax attention layers; raise ConfigError for an invalid layer or head."""
    if model.encoder_layers:
        raise ConfigError(
            "this model has an encoder, and its decoder attends to the encoder's output: plot cross attention with "
            "--cross."
        )
    if not 0 <= layer < model.num_layers:
        raise ConfigError(f"--layer {layer}: the model has layers 0 to {model.num_layers - 1}.")
    if not 0 <= head < model.num_heads:
        raise ConfigError(f"--head {head}: the model has heads 0 to {model.num_heads - 1}.")
    softmax = [number for number, spec in enumerate(layer_specs(model)) if spec.mixer.has_scores]
    if layer not in softmax:
        raise ConfigError(
            f"--layer {layer} has a state instead of attention weights. Softmax attention layers: {softmax}."
        )
    return softmax.index(layer)


def read_packed(path: Path, tokenizer: Tokenizer, length: int | None) -> list[list[int]]:
    """Read a file as one document, or pack a folder's documents into one row with ``length`` tokens."""
    if path.is_file():
        try:
            documents = [tokenizer.encode_prompt(path.read_text(encoding="utf-8"))]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--text {path} cannot be read as UTF-8 text ({error}).") from error
        found = list(_cut(documents, length or len(documents[0])))
    elif not path.exists():
        raise ConfigError(f"--text {path} does not exist. Name a text file, or a folder with texts or shards.")
    elif length is None:
        raise ConfigError(f"--text {path} is a folder: set the packed sequence's length in tokens, --length N.")
    else:
        found = list(_cut((tokenizer.encode_document(text).tolist() for text in read_texts(path)), length))
    # A plot over fewer tokens than requested would be misread.
    num_tokens = sum(map(len, found))
    if num_tokens < max(2, length or 2):
        raise DataError(f"--text {path} has {num_tokens:,} tokens, but {max(2, length or 2):,} are requested.")
    return found


def _cut(documents: Iterator[list[int]] | Sequence[list[int]], length: int) -> Iterator[list[int]]:
    """Yield documents up to ``length`` tokens in total, truncating the last one."""
    for ids in documents:
        if length <= 0:
            return
        if ids:
            yield ids[:length]
        length -= len(ids)


def _check_positions(model: ModelConfig, documents: list[list[int]]) -> None:
    longest = max(map(len, documents))
    if longest > model.max_positions:
        raise ConfigError(
            f"a document has {longest:,} tokens, and the model's limit is {model.max_positions:,} positions "
            f"(model.max_positions). Use --length {model.max_positions} or less."
        )


@torch.no_grad()
def compute_attention_map(
    folder: Path, documents: list[list[int]], *, call: int, head: int, block_tokens: int
) -> AttentionMap:
    """Read the documents packed in one row and average the head's attention per query block."""
    ids = [token for document in documents for token in document]
    # The kernel sums over key groups, so memory grows with T × G instead of T × T.
    core = ObservedAttention(call=call, head=head, groups_T=torch.arange(len(ids)) // block_tokens)
    # The core runs in every softmax layer and records a single call.
    model = load_model(folder, cores={"softmax": core})
    # Positions restart in each document, as in training.
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    bounds = np.cumsum([0, *map(len, documents)]).tolist()
    model(torch.tensor([ids]), positions[None], bounds)
    assert core.weights_TG is not None, "the layer did not run"
    assert core.is_seen_TG is not None, "the layer did not run"
    return AttentionMap(
        share_NG=_by_block(core.weights_TG, block_tokens, "mean"),
        is_seen_NG=_by_block(core.is_seen_TG.float(), block_tokens, "amax") > 0,
        block_tokens=block_tokens,
        bounds=bounds,
    )


def _by_block(values_TG: torch.Tensor, block_tokens: int, how: str) -> np.ndarray:
    """Reduce each block's queries by mean or maximum, [N, G]."""
    num_tokens, num_blocks = values_TG.shape
    block_T = (torch.arange(num_tokens) // block_tokens)[:, None].expand(-1, num_blocks)
    result_NG = values_TG.new_zeros(num_blocks, num_blocks)
    # include_self=False: the zeros are placeholders, not values.
    return result_NG.scatter_reduce(0, block_T, values_TG, how, include_self=False).numpy()


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Return each token's text; a character split over several tokens belongs to the last one."""
    stream = TextStream(tokenizer.decode, ids[:1])
    parts = [tokenizer.decode(ids[:1]) or tokenizer.piece(ids[0])]
    return parts + [stream.add(token) or _token_placeholder(tokenizer, token) for token in ids[1:]]


def _token_placeholder(tokenizer: Tokenizer, token: int) -> str:
    """Return a placeholder for a token without text: a control token's name, or a dot inside a character."""
    if tokenizer.decode([token]):
        return "·"
    return tokenizer.piece(token)


def _write_plot(path: Path, found: AttentionMap, caption: str) -> list[Path]:
    plot_file = path.with_suffix(".svg")
    write_atomically(plot_file, standalone(plot_attention_map(found, caption, path.name)).encode())
    return [plot_file, write_csv(path.with_suffix(".csv"), csv_rows(found))]


def csv_rows(found: AttentionMap) -> Rows:
    """Return one row per block pair that the mask allows."""
    size, num_tokens = found.block_tokens, found.bounds[-1]
    return [
        {
            "query_start": int(n) * size,
            "query_stop": min((int(n) + 1) * size, num_tokens),
            "key_start": int(g) * size,
            "key_stop": min((int(g) + 1) * size, num_tokens),
            "share": float(found.share_NG[n, g]),
        }
        for n, g in np.argwhere(found.is_seen_NG)
    ]


@styled
def plot_attention_map(found: AttentionMap, caption: str, name: str) -> str:
    """Draw queries down and keys across on a fixed log scale; masked blocks are blank, and lines separate documents."""
    num_tokens, size = found.bounds[-1], found.block_tokens
    fig, (axes,) = new_fig(1, height=7.6)
    # Blank, not dark: a masked key differs from a key without attention.
    shares = np.ma.masked_where(~found.is_seen_NG, np.maximum(found.share_NG, LEAST))
    # An image, not a mesh: ten thousand shapes would take a megabyte of text.
    end = len(shares) * size
    image = axes.imshow(
        shares,
        cmap=matplotlib.colormaps["viridis"],
        norm=LogNorm(LEAST, 1.0),
        extent=(0, end, end, 0),
        interpolation="nearest",
        aspect="equal",
    )
    axes.set_xlim(0, num_tokens)
    axes.set_ylim(num_tokens, 0)
    axes.grid(False)
    for bound in found.bounds[1:-1]:
        axes.axhline(bound, color=RED, linewidth=0.6)
        axes.axvline(bound, color=RED, linewidth=0.6)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("key (token in the packed sequence)")
    axes.set_ylabel("query (token in the packed sequence)")
    bar = fig.colorbar(image, ax=axes, pad=0.015, fraction=0.04)
    bar.set_label(f"share of a query's attention per block of {size:,} keys; {LEAST:g} or less is darkest")
    write_caption(fig, caption)
    return to_svg(fig, name)


def token_page(found: AttentionMap, documents: list[list[str]], caption: str) -> str:
    """Return a page with the text that shows attention for the token under the pointer; each block is one token."""
    # Two bytes per share: as text, each would take ten.
    shares = np.rint(found.share_NG.clip(0, 1) * _STEPS).astype("<u2")
    starts = accumulate((len(tokens) for tokens in documents), initial=0)
    return fill_template(
        "attention.html",
        caption=caption,
        documents=[list(enumerate(tokens, start)) for start, tokens in zip(starts, documents, strict=False)],
        shares=base64.b64encode(shares.tobytes()).decode(),
        steps=_STEPS,
        num_tokens=found.bounds[-1],
    )
