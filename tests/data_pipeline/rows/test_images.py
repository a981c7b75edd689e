"""Rows of images: patches and colors against plain loops, on any rank, flipped and cropped by hashes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.loader import Loader, build_loader, build_validation_loader
from data_pipeline.rows.images import ImageRule, Images
from data_pipeline.rows.pack import Packing
from data_pipeline.rows.row_batches import Share
from data_pipeline.rows.token_masking import MaskRule
from data_pipeline.shards.reader import ShardSet
from longctx.batch import IGNORED_TARGET, Batch, PackedDocuments
from longctx.errors import ConfigError
from longctx.images.image_format import ImageFormat
from parallel.layout.sequence import KINDS, SequenceLayout
from tests.data_pipeline.shards.test_image_shards import write_images

STORED = ImageFormat(height=6, width=8, channels=3, classes=("cat", "dog", "owl"))
COUNT = 7
LABELS = [0, 2, 1, 1, 0, 2, 2]
WHOLE = ImageRule(height=6, width=8, channels=3, patch=2, class_token=True, has_labels=True)
CUT = ImageRule(height=4, width=4, channels=3, patch=2, flip=True, has_labels=True)
COLORS = dataclasses.replace(STORED, channels=1, palette=tuple((x,) for x in np.linspace(-1, 1, 5).tolist()))
NEXT = ImageRule(height=6, width=8, channels=1, begin=True)
ROW = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    random = np.random.default_rng(0)
    rows = [random.integers(0, 256, STORED.num_tokens) for _ in range(COUNT)]
    write_images(tmp_path_factory.mktemp("images") / "f", STORED, rows, LABELS, shard_tokens=3 * STORED.num_tokens)
    return next(tmp_path_factory.getbasetemp().glob("images*/f"))


@pytest.fixture(scope="module")
def colors(tmp_path_factory) -> Path:
    random = np.random.default_rng(1)
    folder = tmp_path_factory.mktemp("colors") / "f"
    write_images(folder, COLORS, [random.integers(0, 5, COLORS.num_tokens) for _ in range(COUNT)], LABELS)
    return folder


def loader_of(folder: Path, rule: ImageRule, *, seq_len: int = ROW, **options: Any) -> Loader:
    sizes = {"seq_len": seq_len, "rows_per_step": 2, "micro_batch_rows": 2}
    return build_loader(folder, **sizes, packing=Packing(examples=rule), **options)


def stored_image(folder: Path, number: int) -> np.ndarray:
    return ShardSet.open(folder).document(number).reshape(STORED.height, STORED.width, -1)


def patches_of(image: np.ndarray, rule: ImageRule) -> np.ndarray:
    """The tokens of an image [H, W, C]: by row, column, channel, row and column in the patch."""
    found = [np.zeros(rule.pixel_bytes, np.uint8)] * rule.class_token
    for top in range(0, rule.height, rule.patch):
        for left in range(0, rule.width, rule.patch):
            square = image[top : top + rule.patch, left : left + rule.patch]
            found.append(np.array([square[y, x, c] for c, y, x in np.ndindex(rule.channels, rule.patch, rule.patch)]))
    return np.stack(found)


def images_of(batch: Batch) -> list[tuple[torch.Tensor, int]]:
    """Each image's pixels and label."""
    assert batch.pixels is not None
    assert batch.labels is not None
    flat, found = batch.flatten_rows(), []
    for number, (start, stop) in enumerate(zip(flat.documents.bounds, flat.documents.bounds[1:], strict=False)):
        if number not in (flat.documents.padding or ()):
            found.append((flat.pixels[0, start:stop], int(flat.labels[0, start])))
    return found


def test_patches_are_those_of_plain_loops_and_come_with_their_classes(folder: Path):
    batches = list(build_validation_loader(folder, seq_len=ROW, packing=Packing(examples=WHOLE)))
    found = [image for batch in batches for image in images_of(batch)]
    assert sorted(label for _, label in found) == sorted(LABELS)
    wanted = {patches_of(stored_image(folder, number), WHOLE).tobytes(): LABELS[number] for number in range(COUNT)}
    assert {pixels.numpy().tobytes(): label for pixels, label in found} == wanted
    padding = batches[0].document_ids < 0
    assert padding.any()
    assert not batches[0].pixels[padding].any()
    assert (batches[0].labels[padding] == IGNORED_TARGET).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rule", "of_colors"), [(WHOLE, False), (CUT, False), (NEXT, True)])
def test_ranks_read_equal_bytes_and_a_run_goes_on_to_them(folder: Path, colors: Path, kind: str, rule, of_colors):
    source, degree = colors if of_colors else folder, 2

    def place(rank: int):
        def of(documents: PackedDocuments) -> Share:
            layout = SequenceLayout.build(kind, documents.num_tokens, degree, documents, causal=False)
            return Share(documents, layout.rank_runs(rank), layout)

        return of

    whole, ranks = loader_of(source, rule), [loader_of(source, rule) for _ in range(degree)]
    names = ["tokens", "targets", "positions", *([] if of_colors else ["pixels", "labels"])]
    for _ in range(9):
        state = whole.state_dict()
        batch = next(whole)
        again = loader_of(source, rule)
        again.load_state_dict(state)
        repeated, flat = next(again), batch.flatten_rows()
        labels = 0
        for name in names:
            assert torch.equal(getattr(repeated, name), getattr(batch, name)), name
        for rank, loader in enumerate(ranks):
            share = loader.take(place(rank)).share
            got = share.unpack()
            for name in names:
                assert torch.equal(getattr(got, name), got.placement.split(getattr(flat, name), rank, 1)), name
            labels += share.num_labels
        assert labels == batch.num_labels


def test_views_differ_by_epoch_and_seed_and_lie_within_the_image(folder: Path):
    shards = ShardSet.open(folder)
    recipes = [Images(CUT, shards, seed=seed) for seed in (0, 0, 1)]
    views: dict[int, set[bytes]] = {number: set() for number in range(COUNT)}
    for number in range(COUNT):
        image = stored_image(folder, number)
        possible = {
            patches_of(view, CUT).tobytes()
            for top in range(3)
            for left in range(5)
            for view in (
                image[top : top + 4, left : left + 4],
                image[top : top + 4, left : left + 4][:, ::-1],
            )
        }
        for epoch in range(12):
            first, same, other = (recipe.pixels(((number, 0, 1), epoch), 0, 4, 1).tobytes() for recipe in recipes)
            assert first == same
            assert {first, other} <= possible
            views[number] |= {first, other}
    assert min(len(seen) for seen in views.values()) > 8
    middle = Images(dataclasses.replace(CUT, augment=False), shards, seed=5)
    wanted = patches_of(stored_image(folder, 3)[1:5, 2:6], CUT)
    assert (middle.pixels(((3, 0, 1), 7), 0, 4, 1) == wanted).all()


def test_the_next_pixel_is_the_target_and_the_last_pixel_is_no_input(colors: Path):
    batch = next(loader_of(colors, NEXT, seq_len=48)).flatten_rows()
    assert batch.documents.bounds == (0, 48, 96)
    for start in (0, 48):
        assert batch.tokens[0, start] == 5, "the begin token follows the colors"
        assert torch.equal(batch.tokens[0, start + 1 : start + 48], batch.targets[0, start : start + 47])
        assert batch.targets[0, start + 47] < 5
    assert batch.num_targets == 96


def test_masked_pixels_keep_their_colors_as_targets(colors: Path):
    rule = dataclasses.replace(NEXT, begin=False)
    batch = next(loader_of(colors, rule, seq_len=48, mask=MaskRule(0.4)))
    chosen = batch.targets != IGNORED_TARGET
    assert 20 < chosen.sum() < 60
    assert (batch.targets[chosen] < 5).all()
    assert (batch.tokens[chosen] == 5).any()
    assert (batch.tokens[~chosen] < 5).all()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"height": 10}, "model.image.height=10, but the images .* are 6 × 8 pixels.\nTry --model.image.height 6"),
        ({"channels": 1}, "model.image.channels=1, but the images .* have 3.\nTry --model.image.channels 3"),
        ({"patch": 0}, "model.image.patch=0 reads palette colors, but .* holds raw pixels"),
    ],
)
def test_images_of_another_format_are_refused(folder: Path, changes: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        loader_of(folder, dataclasses.replace(WHOLE, **changes), seq_len=200)


def test_other_rows_and_folders_are_refused(folder: Path, colors: Path, tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"data\.seq_len=12 cannot hold an image of 13 tokens .*\nTry data\.seq_len=13"
    ):
        loader_of(folder, WHOLE, seq_len=12)
    with pytest.raises(ConfigError, match=r"reads raw pixels, but .* holds colors of a palette of 5"):
        loader_of(colors, dataclasses.replace(WHOLE, channels=1))
    with pytest.raises(ConfigError, match="contains images, which a model without"):
        build_loader(folder, seq_len=144, rows_per_step=1)
    unlabelled = dataclasses.replace(STORED, classes=())
    write_images(tmp_path / "f", unlabelled, [np.zeros(STORED.num_tokens, int)], [-1])
    with pytest.raises(ConfigError, match="have no classes"):
        loader_of(tmp_path / "f", WHOLE)
