"""Models of images, compared with transformers: what both learn in the same steps, and CPU seconds per step.

    python -m benchmarks.images [--fashion FOLDER] [--only vit swin igpt digits] [--seeds 0 1 2] [--steps N] [--quick]

Images are Fashion-MNIST's (Debian's ``dataset-fashion-mnist``, or the folder ``--fashion`` or $LONGCTX_FASHION_MNIST)
and, for ``digits``, the 8 × 8 digits in scikit-learn; shards are built by ``data build --kind images``. ``vit``,
``swin`` and ``igpt`` train the recipes ``vit-tiny``, ``swin-tiny-28`` and ``igpt-small`` (16 colors), ``digits`` the
first with patches of 2. transformers gets the same weights, through an exported folder, and the same images in the same
order. Both take turns, step by step, in one loop on one thread: forward, backward, clipping and AdamW with the recipe's
schedule, float32; neither uses a trainer. CPU seconds per step are medians, and ratios are medians over steps.

Results are the accuracy on all test images, or bits per pixel. ``vit`` also reads the test images at 56 × 56, with
interpolated positions and without training; ``igpt`` gets a linear probe per layer, and is fine-tuned with
L_gen + L_clf, as many steps again.

``--save`` writes ``benchmarks/results/KIND/images.json``, row by row, which keeps rows of other cases and seeds. Exit
code 1 if a mean over seeds is outside its bound, 2 if data is missing for each of the cases.
"""

from __future__ import annotations

import argparse
import gzip
import math
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.machine import with_saved_rows
from longctx.batch import IGNORED_TARGET, Batch

CASES = ("vit", "swin", "digits", "igpt")
SEEDS = {"vit": range(9), "swin": range(3), "digits": range(3), "igpt": range(3)}
"""Two runs of ``vit`` whose gradients differ by rounding end up to two points apart, so three say little."""
STEPS = {"vit": 900, "swin": 900, "digits": 900, "igpt": 500}
QUICK_STEPS, QUICK_ROWS, WARMUP = 6, 2, 100
RECIPES = {"vit": "vit-tiny", "swin": "swin-tiny-28", "digits": "vit-tiny", "igpt": "igpt-small"}
CLASSES = {
    "vit": "ViTForImageClassification",
    "swin": "SwinForImageClassification",
    "digits": "ViTForImageClassification",
    "igpt": "ImageGPTForCausalImageModeling",
}
COLORS = 16
DIGITS_FLAGS = {
    "model.image.height": 8, "model.image.width": 8, "model.image.patch": 2, "model.max_positions": 17,
    "data.seq_len": 1088, "train.tokens_per_step": 1088, "data.flip": "false",
}  # fmt: skip
TEST_DIGITS, TEST_PIXEL_ROWS, PROBE_ROWS = 360, 64, 250
"""Digits held out, and rows of eight images on which bits per pixel, and linear probes, are measured."""
TUNED = {"model.classes": 10, "model.class_pool": "mean", "train.class_weight": 1.0}
LARGE = {
    "model.image.height": 56, "model.image.width": 56, "model.max_positions": 197, "data.seq_len": 12_608,
    "train.tokens_per_step": 12_608,
}  # fmt: skip
POINTS, BITS, TIME_BOUND, DIGITS_BOUND, LARGE_BOUND = 0.01, 0.01, 1.0, 0.97, 0.6
FASHION = "/usr/share/datasets/fashion-mnist"


@dataclass(frozen=True)
class Folders:
    """Shard folders."""

    train: Path
    test: Path
    large: Path | None = None
    """Test images at 56 × 56."""


class MissingDataError(Exception):
    """Data that this machine lacks."""


def prepare(folder: Path, case: str, fashion: Path) -> Folders:
    """Build a case's shards, unless they are there. Raise MissingDataError without the images."""
    if case == "digits":
        write_digits(folder / "digits-images")
        return build_folders(folder / "digits", folder / "digits-images", ("train", "test"))
    if not any(fashion.glob("train-images-idx3-ubyte*")):
        raise MissingDataError(
            f"{fashion} has no train-images-idx3-ubyte.gz. Install Debian's dataset-fashion-mnist, or name its folder "
            "with --fashion or $LONGCTX_FASHION_MNIST."
        )
    splits, colors = ("train", "t10k"), 0
    if case == "igpt":
        colors = COLORS
    folders = build_folders(folder / f"fashion-{colors}", fashion, splits, colors=colors)
    if case != "vit":
        return folders
    return replace(folders, large=build(folder / "large", fashion, splits[1], size=(56, 56)))


def build_folders(folder: Path, source: Path, splits: tuple[str, str], *, colors: int = 0) -> Folders:
    """Build shards from the training and test files that begin with ``splits``."""
    train = build(folder / "train", source, splits[0], colors=colors)
    return Folders(train, build(folder / "test", source, splits[1], like=train))


def build(output: Path, source: Path, split: str, *, like: Path | None = None, **options: Any) -> Path:
    """Build the shards of one split, in the format of the folder ``like`` if it is given."""
    from data_pipeline.prepare.build_shards import build_shards
    from data_pipeline.prepare.image_formats import ImageOptions, choose_format
    from data_pipeline.prepare.image_source import open_images
    from longctx.tokenizer import load_tokenizer

    images = open_images(source, include=[f"{split}*"])
    reused = None
    if like is not None:
        reused = load_tokenizer(like)
    made, rule = choose_format(images, ImageOptions(**options), reused=reused)
    build_shards(images, made, output, images=rule, validation_fraction=0, workers=1)
    return output


def write_digits(folder: Path) -> None:
    """Write scikit-learn's digits as IDX files. Raise MissingDataError without it."""
    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingDataError("scikit-learn is not installed. Try pip install scikit-learn.") from None
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    # Values are from 0 to 16.
    pixels = (found.images * (255 / 16)).astype(np.uint8)
    folder.mkdir(exist_ok=True)
    for split, part in (("test", order[:TEST_DIGITS]), ("train", order[TEST_DIGITS:])):
        write_idx(folder, split, pixels[part], found.target[part].astype(np.uint8))


def write_idx(folder: Path, split: str, pixels_NHW: np.ndarray, labels_N: np.ndarray) -> None:
    """Write images and labels, uint8, as MNIST's files."""
    for name, values in (("images-idx3", pixels_NHW), ("labels-idx1", labels_N)):
        head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
        (folder / f"{split}-{name}-ubyte.gz").write_bytes(gzip.compress(head + values.tobytes()))


@dataclass(frozen=True)
class Size:
    """Extent of a measurement."""

    steps: int
    test_rows: int | None = None
    """Rows of the test images; None for all that a case reads."""


class Reader:
    """A case's config, and its batches: one row of images per step."""

    def __init__(
        self, case: str, folders: Folders, size: Size, seed: int, changes: dict[str, Any] | None = None
    ) -> None:
        """Load the recipe; ``changes`` are further flags."""
        from launcher.config.load_config import load_run_config

        flags: dict[str, Any] = {"data.train": folders.train, "run.seed": seed, "train.steps": size.steps}
        flags["train.warmup_steps"] = min(WARMUP, max(1, size.steps // 4))
        if case == "digits":
            flags |= DIGITS_FLAGS
        flags |= changes or {}
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        self.config = load_run_config(["--config", RECIPES[case], *words])
        self.model = self.config.model.config()
        self.folders, self.test_rows = folders, size.test_rows

    def batches(self) -> Iterator[Batch]:
        """Yield the training batches without end."""
        from data_pipeline.loader import build_loader

        run = self.config
        sizes: dict[str, Any] = {"seq_len": run.data.seq_len, "rows_per_step": 1, "packing": run.packing}
        for batch in build_loader(self.folders.train, seed=run.run.seed, **sizes):
            yield batch.flatten_rows()

    def held_out(self, folder: Path) -> Iterator[Batch]:
        """Yield the test batches."""
        from data_pipeline.loader import build_validation_loader
        from data_pipeline.rows.pack import Packing

        rows = self.test_rows
        if rows is None and not self.model.image.patch:
            rows = TEST_PIXEL_ROWS
        packing = Packing(examples=self.config.examples)
        for batch in build_validation_loader(folder, seq_len=self.config.data.seq_len, max_rows=rows, packing=packing):
            yield batch.flatten_rows()


def start(reader: Reader, case: str, seed: int) -> tuple[Any, Any]:
    """Build our task and transformers' model, with equal weights."""
    import transformers

    from longctx.conversion import save_hf
    from longctx.model.decoder import Decoder

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    decoder = Decoder(reader.model, seed=seed)
    # transformers' Image GPT has only its own attention.
    attention = "eager" if case == "igpt" else "sdpa"
    with tempfile.TemporaryDirectory() as folder:
        save_hf(reader.model, dict(decoder.named_parameters()), Path(folder) / "hf")
        kind = getattr(transformers, CLASSES[case])
        theirs = kind.from_pretrained(Path(folder) / "hf", attn_implementation=attention)
    return task_of(reader, decoder), theirs.train()


def task_of(reader: Reader, decoder: nn.Module) -> Any:
    """Build the objective that the config names."""
    from launcher.training.task_builder import objective_of
    from longctx.objectives.build import build_objective

    return build_objective(decoder, objective_of(reader.config)).train()  # type: ignore[arg-type]


def our_loss(task: Any, batch: Batch) -> Tensor:
    """Return our loss on a batch, in its packed form."""
    if task.network.config.image.patch:
        batch = task.prepare(batch)
    return task.loss(task.loss_sum(task(batch)), task.denominators(batch))


def images_of(batch: Batch, model: Any) -> dict[str, Tensor]:
    """Return a batch in transformers' form: normalized images [N, C, H, W] and labels, or pixel ids and targets."""
    image = model.image
    if not image.patch:
        tokens, targets = (x.view(-1, image.num_tokens) for x in (batch.tokens, batch.targets))
        is_image = targets[:, 0] != IGNORED_TARGET
        return {"input_ids": tokens[is_image], "targets": targets[is_image]}
    assert batch.labels is not None
    assert batch.pixels is not None
    labels = batch.labels.view(-1, image.num_tokens)[:, 0]
    patches = batch.pixels[0].view(-1, image.num_tokens, image.pixel_bytes)[labels != IGNORED_TARGET]
    patches = patches[:, int(image.class_token) :].unflatten(2, (image.channels, image.patch, image.patch))
    grid = patches.unflatten(1, image.grid).permute(0, 3, 1, 4, 2, 5)
    pixels = grid.reshape(-1, image.channels, image.height, image.width).float()
    return {"pixel_values": pixels / 127.5 - 1, "labels": labels[labels != IGNORED_TARGET]}


def their_loss(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Return transformers' loss."""
    if "targets" not in given:
        return model(**given).loss
    # Its own loss predicts the second pixel from the first, and nothing from the begin token.
    logits = model(given["input_ids"], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), given["targets"].flatten())


@dataclass(frozen=True)
class Side:
    """One of the two models in training."""

    model: nn.Module
    loss_of: Callable[[Any], Tensor]
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, model: nn.Module, loss_of: Callable[[Any], Tensor], train: Any) -> Side:
        """Build AdamW with the recipe's settings; only matrices decay, as in our runs."""
        # A class token has axes of size 1 in transformers.
        matrices = [p for p in model.parameters() if p.squeeze().ndim > 1]
        vectors = [p for p in model.parameters() if p.squeeze().ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        betas = (train.beta1, train.beta2)
        return cls(model, loss_of, torch.optim.AdamW(groups, lr=train.lr, betas=betas, eps=train.eps))

    def step(self, given: Any, lr: float, clip_norm: float) -> tuple[float, float]:
        """Take a step; return the loss and CPU seconds."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        begun = time.process_time()
        loss = self.loss_of(given)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()), time.process_time() - begun


def learn(reader: Reader, task: Any, theirs: Any | None, steps: int) -> dict[str, Any]:
    """Train both sides in turns, or only ours; return the last losses, and median CPU seconds per step."""
    from launcher.training.learning_rate_schedule import learning_rate

    train = reader.config.train
    sides = {"longctx": Side.of(task, lambda batch: our_loss(task, batch), train)}
    if theirs is not None:
        sides["transformers"] = Side.of(theirs, lambda given: their_loss(theirs, given), train)
    found: dict[str, list[tuple[float, float]]] = {who: [] for who in sides}
    batches = reader.batches()
    for number in range(1, steps + 1):
        batch = next(batches)
        given = {"longctx": batch, "transformers": images_of(batch, reader.model)}
        # The first in a step finds the caches as the other left them, so they change places.
        for who in sorted(sides, reverse=bool(number % 2)):
            found[who].append(sides[who].step(given[who], learning_rate(number, train), train.clip_norm))
        if number % 50 == 0:
            print({"step": number, **{who: taken[-1] for who, taken in found.items()}}, flush=True)
    losses = {who: round(fmean(loss for loss, _ in taken[-20:]), 4) for who, taken in found.items()}
    # The first steps allocate.
    seconds = {who: [spent for _, spent in taken[min(2, steps - 1) :]] for who, taken in found.items()}
    result = {"losses": losses, "cpu_seconds": {who: round(median(spent), 4) for who, spent in seconds.items()}}
    if theirs is not None:
        ratios = [ours / other for ours, other in zip(*seconds.values(), strict=True)]
        result["time_ratio"] = round(median(ratios), 3)
    return result


@torch.no_grad()
def test_ours(task: Any, batches: Iterator[Batch]) -> dict[str, float]:
    """Return our accuracy over labelled images, and bits per pixel if it predicts them."""
    task.eval()
    found = {"nll": 0.0, "right_classes": 0.0}
    counts = {"labels": 0, "targets": 0}
    for batch in batches:
        if task.network.config.image.patch:
            batch = task.prepare(batch)
        sums = task.loss_sum(task(batch)).sums
        for name in found.keys() & sums.keys():
            found[name] += float(sums[name])
        counts["labels"] += batch.num_labels
        counts["targets"] += batch.num_targets
    task.train()
    result = {}
    if task.network.config.classes:
        result["accuracy"] = round(found["right_classes"] / counts["labels"], 4)
    if task.network.config.predicts_tokens:
        result["bits"] = round(found["nll"] / counts["targets"] / math.log(2), 4)
    return result


@torch.no_grad()
def test_theirs(model: Any, reader: Reader, folder: Path) -> dict[str, float]:
    """Return transformers' accuracy over labelled images, or bits per pixel."""
    model.eval()
    right = nll = count = 0.0
    for batch in reader.held_out(folder):
        given = images_of(batch, reader.model)
        if "targets" in given:
            count += given["targets"].numel()
            nll += float(their_loss(model, given)) * given["targets"].numel()
        else:
            count += len(given["labels"])
            right += float((model(given["pixel_values"]).logits.argmax(1) == given["labels"]).sum())
    model.train()
    if reader.model.image.patch:
        return {"accuracy": round(right / count, 4)}
    return {"bits": round(nll / count / math.log(2), 4)}


def test_large(task: Any, folders: Folders, size: Size, seed: int) -> float:
    """Return our accuracy on images of 56 × 56 pixels with interpolated positions, without training on them."""
    from longctx.model.decoder import Decoder
    from longctx.model.position_grid import resize_positions

    assert folders.large is not None
    reader = Reader("vit", folders, size, seed, LARGE)
    weights, name = task.network.state_dict(), "model.embed_positions.weight"
    weights[name] = resize_positions(weights[name], task.network.config.image, reader.model.image)
    decoder = Decoder(reader.model, seed=None)
    decoder.load_state_dict(weights)
    return test_ours(task_of(reader, decoder), reader.held_out(folders.large))["accuracy"]


@torch.no_grad()
def probe(task: Any, reader: Reader) -> dict[str, float]:
    """Return the accuracy of a linear classifier on the best layer's features, and that layer."""
    from launcher.evaluation.image_probe import layer_features
    from longctx.evaluation.linear_probe import fit_probe

    labelled = Reader("igpt", reader.folders, Size(1, PROBE_ROWS), 0, TUNED)
    sides = []
    for folder in (reader.folders.train, reader.folders.test):
        batches = list(labelled.held_out(folder))
        features = zip(*(layer_features(task.network, batch) for batch in batches), strict=True)
        labels = torch.cat([batch.labels[batch.labels != IGNORED_TARGET] for batch in batches])  # type: ignore[index]
        sides.append(([torch.cat(of_layer) for of_layer in features], labels))
    (fitted, labels), (measured, wanted) = sides
    classes = labelled.model.classes
    found = [fit_probe(x, labels, classes).accuracy(y, wanted) for x, y in zip(fitted, measured, strict=True)]
    best = max(range(len(found)), key=found.__getitem__)
    return {"accuracy": round(found[best], 4), "layer": best + 1}


def tune(task: Any, folders: Folders, size: Size, seed: int) -> dict[str, float]:
    """Fine-tune our Image GPT with the sum of both losses, with a new class head; return its results."""
    from longctx.model.decoder import Decoder

    reader = Reader("igpt", folders, size, seed, TUNED)
    decoder = Decoder(reader.model, seed=seed)
    decoder.load_state_dict(decoder.state_dict() | task.network.state_dict())
    tuned = task_of(reader, decoder)
    learn(reader, tuned, None, size.steps)
    return test_ours(tuned, reader.held_out(folders.test))


def measure(case: str, folders: Folders, seed: int, size: Size) -> dict[str, Any]:
    """Measure one row."""
    reader = Reader(case, folders, size, seed)
    task, theirs = start(reader, case, seed)
    row: dict[str, Any] = {"case": case, "seed": seed, "date": date.today().isoformat(), "steps": size.steps}
    row |= learn(reader, task, theirs, size.steps)
    row["longctx"] = test_ours(task, reader.held_out(folders.test))
    row["transformers"] = test_theirs(theirs, reader, folders.test)
    if case == "vit":
        row["accuracy_at_56"] = test_large(task, folders, size, seed)
    if case == "igpt":
        row["probe"] = probe(task, reader)
        row["tuned"] = tune(task, folders, size, seed)
    return row


def bounds(rows: Sequence[dict[str, Any]]) -> Iterator[Bound]:
    """Return the bounds on the results, as means over seeds."""
    for case in CASES:
        of_case = [row for row in rows if row["case"] == case]
        if not of_case:
            continue
        name, limit = ("bits", BITS) if case == "igpt" else ("accuracy", POINTS)
        difference = abs(fmean(row["longctx"][name] - row["transformers"][name] for row in of_case))
        yield Bound(f"difference of {name} after the same steps", round(difference, 4), limit, case)
        ratio = fmean(row["time_ratio"] for row in of_case)
        yield Bound("CPU seconds of a step over transformers'", round(ratio, 3), TIME_BOUND, case)
        accuracy = fmean(row["longctx"].get("accuracy", 0.0) for row in of_case)
        if case == "digits":
            yield Bound("accuracy", round(accuracy, 4), DIGITS_BOUND, case, at_least=True)
        if case == "vit":
            share = fmean(row["accuracy_at_56"] / row["longctx"]["accuracy"] for row in of_case)
            yield Bound("accuracy at 56 × 56 over that at 28 × 28", round(share, 3), LARGE_BOUND, case, at_least=True)


def judge(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> int:
    """Print the missed bounds, and merge the rows into the saved ones; return the exit code."""
    if options.save and not options.quick:
        rows = with_saved_rows("images", CASES, rows)
    return conclude("images", {"rows": list(rows)}, list(bounds(rows)), options)


def main() -> int:
    """Print and save what the models learned; return 1 if a result is outside its bound, 2 without any data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fashion = os.environ.get("LONGCTX_FASHION_MNIST", FASHION)
    parser.add_argument("--fashion", type=Path, default=Path(fashion), help="folder with Fashion-MNIST's files")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="cases to run")
    parser.add_argument(
        "--seeds", nargs="+", type=int, help="seeds of weights and order (default: nine for vit, three)"
    )
    parser.add_argument("--steps", type=int, help=f"steps of each case (default: {STEPS})")
    options = parse(parser, quick=f"{QUICK_STEPS} steps of one seed")
    torch.set_num_threads(1)  # matrices are small
    rows: list[dict[str, Any]] = []
    code = 2
    with tempfile.TemporaryDirectory() as folder:
        for case in options.only:
            try:
                folders = prepare(Path(folder), case, options.fashion)
            except MissingDataError as missing:
                print(f"{case} is left out: {missing}", flush=True)
                continue
            size = Size(options.steps or STEPS[case])
            if options.quick:
                size = Size(QUICK_STEPS, QUICK_ROWS)
            seeds = options.seeds or SEEDS[case]
            for seed in seeds[:1] if options.quick else seeds:
                rows.append(measure(case, folders, seed, size))
                print(rows[-1], flush=True)
                # Row by row, so that a later interruption keeps earlier measurements.
                code = judge(rows, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
