"""A format of images in a tokenizer's place: ids, and files in folders beside others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from longctx.errors import DataError
from longctx.images.image_format import ImageFormat
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.image_tokenizer import IMAGE_FILE, ImageTokenizer
from longctx.tokenizer.load_tokenizer import fingerprints, has_tokenizer, is_tokenizer_file, load_files, same_files
from tests.longctx.conversion.tiny_tokenizer import train_tokenizer

PIXELS = ImageFormat(height=2, width=3, channels=1, classes=("a", "b"))
COLORS = ImageFormat(height=2, width=3, channels=1, palette=((-1.0,), (0.0,), (1.0,)))


def test_ids_of_pixels_and_of_colors():
    pixels, colors = (ImageTokenizer.of(found, Path("made")) for found in (PIXELS, COLORS))
    assert (pixels.vocab_size, colors.vocab_size) == (256, 4)
    assert not pixels.is_control.any()
    assert pixels.special.mask is pixels.special.bos is None
    assert colors.is_control.tolist() == [False, False, False, True]
    assert colors.special.mask == colors.special.bos == 3
    for tokenizer in (pixels, colors):
        assert len(tokenizer.prefix_ids) == len(tokenizer.suffix_ids) == 0
        assert tokenizer.decode([0, 1, 2, 3]) == ""
    assert [colors.piece(token) for token in (1, 3)] == ["color 1 (128)", "begin"]
    assert pixels.piece(17) == "value 17"


def test_images_have_no_text():
    tokenizer = ImageTokenizer.of(PIXELS, Path("made"))
    for encode in (tokenizer.encode, tokenizer.encode_document, tokenizer.encode_prompt):
        with pytest.raises(DataError, match="image format, which encodes no text"):
            encode("a text")
    with pytest.raises(DataError, match="id 256 is not in the vocabulary"):
        tokenizer.decode([256])


def test_a_folder_and_a_file_of_any_name_are_loaded(tmp_path: Path):
    made = ImageTokenizer.of(COLORS, Path("made"))
    (tmp_path / "run").mkdir()
    assert [path.name for path in made.save(tmp_path / "run")] == [IMAGE_FILE]
    shutil.copy(tmp_path / "run" / IMAGE_FILE, tmp_path / "other.txt")
    for path in (tmp_path / "run", tmp_path / "run" / IMAGE_FILE, tmp_path / "other.txt"):
        loaded = load_tokenizer(path)
        assert isinstance(loaded, ImageTokenizer)
        assert (loaded.format, loaded.fingerprint) == (COLORS, made.fingerprint)
    assert has_tokenizer(tmp_path / "run")
    assert is_tokenizer_file(IMAGE_FILE)
    assert list(fingerprints(tmp_path / "run").values()) == [made.fingerprint]
    assert load_files(made.files, tmp_path).fingerprint == made.fingerprint


def test_the_fingerprint_covers_the_format_and_not_its_spelling(tmp_path: Path):
    made = ImageTokenizer.of(PIXELS, Path("made"))
    spaced = json.dumps(PIXELS.to_json(), indent=4).encode()
    assert ImageTokenizer(spaced, path=Path("spaced")).fingerprint == made.fingerprint
    others = [
        ImageFormat(height=3, width=2, channels=1, classes=("a", "b")),
        ImageFormat(height=2, width=3, channels=3, classes=("a", "b")),
        ImageFormat(height=2, width=3, channels=1, classes=("b", "a")),
        ImageFormat(height=2, width=3, channels=1, classes=("a", "b"), palette=((0.0,),)),
    ]
    found = {ImageTokenizer.of(other, Path("made")).fingerprint for other in others}
    assert len(found | {made.fingerprint}) == 5


def test_folders_are_compared_by_their_format(tmp_path: Path):
    for name, found in (("a", PIXELS), ("same", PIXELS), ("b", COLORS)):
        (tmp_path / name).mkdir()
        ImageTokenizer.of(found, Path("made")).save(tmp_path / name)
    assert same_files(tmp_path / "a", tmp_path / "same")
    assert not same_files(tmp_path / "a", tmp_path / "b")


def test_another_programs_image_json_does_not_replace_a_tokenizer(tmp_path: Path):
    train_tokenizer(tmp_path / "tokenizer.model")
    (tmp_path / IMAGE_FILE).write_text('{"format": "longctx-image"}')
    assert load_tokenizer(tmp_path).encode("a text").size


def test_a_damaged_format_is_refused_with_its_place(tmp_path: Path):
    (tmp_path / IMAGE_FILE).write_bytes(PIXELS.content()[:-20])
    with pytest.raises(DataError, match=f"{tmp_path} is not an image format"):
        load_tokenizer(tmp_path)
