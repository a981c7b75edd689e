"""Image files as arrays: what Pillow itself reads, what is refused, and other sizes by plain arithmetic."""

from __future__ import annotations

import contextlib
import io
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_pipeline.prepare.images.decode_image import FORMATS, covering_size, decode_image, fit_image
from data_pipeline.prepare.source_items import FileContentError
from tests.data_pipeline.made_images import png, random_images


def content_of(image: Image.Image, kind: str, **options) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_format_is_read_as_pillow_reads_it(kind: str, channels: int):
    (pixels,) = random_images(1, (9, 13, channels))
    image = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    content = content_of(image, kind)
    with Image.open(io.BytesIO(content)) as expected:
        # WebP has no grey, and a GIF's palette is of colors.
        mode = "L" if expected.mode == "L" else "RGB"
        wanted = np.array(expected.convert(mode)).reshape(9, 13, -1)
    found = decode_image(content)
    assert found.dtype == np.uint8
    assert (found == wanted).all()
    if kind in ("PNG", "BMP", "TIFF"):
        assert (found == pixels).all()


@pytest.mark.parametrize(
    ("mode", "channels"),
    [("1", 1), ("L", 1), ("LA", 1), ("P", 3), ("RGB", 3), ("RGBA", 3), ("CMYK", 3)],
)
def test_other_modes_become_grey_or_color(mode: str, channels: int):
    image = Image.fromarray(random_images(1)[0]).convert(mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    wanted = np.array(image.convert("L" if channels == 1 else "RGB")).reshape(5, 7, channels)
    assert (decode_image(content_of(image, kind)) == wanted).all()


def test_transparency_is_dropped_and_not_blended():
    (pixels,) = random_images(1, (4, 4, 4))
    assert (decode_image(content_of(Image.fromarray(pixels), "PNG")) == pixels[..., :3]).all()


def test_the_first_frame_of_an_animation_counts():
    frames = [Image.fromarray(pixels) for pixels in random_images(3, (6, 6, 1))[..., 0]]
    content = content_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (decode_image(content)[..., 0] == np.array(frames[0])).all()


@pytest.mark.parametrize(("orientation", "turn"), [(3, 2), (6, 3), (8, 1)])
def test_exif_orientation_is_applied(orientation: int, turn: int):
    (pixels,) = random_images(1)
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = decode_image(content_of(Image.fromarray(pixels), "PNG", exif=exif))
    assert (found == np.rot90(pixels, turn)).all()


class TestRefused:
    @pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP"])
    def test_cut_files(self, kind: str, part: float):
        content = content_of(Image.fromarray(random_images(1, (64, 64, 3))[0]), kind)
        with pytest.raises(FileContentError):
            decode_image(content[: int(part * len(content))])

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8))
    def test_damaged_files_give_an_array_or_our_error(self, kind: int, changes: list[tuple[int, int]]):
        content = bytearray(content_of(Image.fromarray(random_images(1, (16, 16, 3))[0]), FORMATS[kind]))
        for at, value in changes:
            content[at % len(content)] = value
        with contextlib.suppress(FileContentError):
            assert decode_image(bytes(content)).ndim == 3

    def test_values_of_more_than_8_bits(self):
        image = Image.fromarray(np.arange(16, dtype=np.uint16).reshape(4, 4))
        with pytest.raises(FileContentError, match=r"more than 8 bits .mode I;16"):
            decode_image(content_of(image, "PNG"))

    @pytest.mark.parametrize("most", [40, 60, 99])
    def test_a_bomb_of_pixels(self, monkeypatch: pytest.MonkeyPatch, most: int):
        """Pillow only warns up to twice its limit; no pixel is decoded in either case."""
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        content = png(np.zeros((10, 10, 1), np.uint8))
        monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("it was decoded"))
        with pytest.raises(FileContentError, match="exceeds limit"):
            decode_image(content)

    def test_formats_that_start_a_program(self, monkeypatch: pytest.MonkeyPatch):
        """Pillow gives PostScript to Ghostscript."""
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
        script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
        with pytest.raises(FileContentError, match="no image in the formats PNG"):
            decode_image(script)

    @pytest.mark.parametrize("content", [b"", b"GIF", b"a text", b"\x89PNG\r\n\x1a\n"])
    def test_other_bytes(self, content: bytes):
        with pytest.raises(FileContentError):
            decode_image(content)


class TestOtherSizes:
    @settings(max_examples=50, deadline=None)
    @given(*(st.integers(1, 40),) * 4)
    def test_the_centre_of_the_smallest_image_that_covers(self, height: int, width: int, to_height: int, to_width: int):
        (pixels,) = random_images(1, (height, width, 3))
        scale = max(to_height / height, to_width / width)
        # Rounding of the scale must not make a side of exactly 7 to 6.
        scaled = (int(height * scale + 1e-9), int(width * scale + 1e-9))
        image = Image.fromarray(pixels).resize(scaled[::-1], Image.Resampling.BICUBIC)
        left, top = (scaled[1] - to_width) // 2, (scaled[0] - to_height) // 2
        wanted = np.array(image.crop((left, top, left + to_width, top + to_height)))
        found = fit_image(pixels, size=(to_height, to_width), channels=None)
        assert covering_size(height, width, (to_height, to_width)) == scaled
        assert (found == wanted).all()

    def test_the_same_size_changes_nothing(self):
        (pixels,) = random_images(1)
        assert (fit_image(pixels, size=(5, 7), channels=3) == pixels).all()
        assert fit_image(pixels, size=None, channels=None) is pixels

    def test_channels_are_converted_before_scaling(self):
        (pixels,) = random_images(1, (20, 30, 3))
        grey = Image.fromarray(pixels).convert("L")
        assert (fit_image(pixels, size=None, channels=1)[..., 0] == np.array(grey)).all()
        wanted = np.array(grey.resize((15, 10), Image.Resampling.BICUBIC))
        assert (fit_image(pixels, size=(10, 15), channels=1)[..., 0] == wanted).all()
        colored = fit_image(wanted[..., None], size=None, channels=3)
        assert (colored == wanted[..., None]).all()
        assert colored.shape == (10, 15, 3)

    def test_a_line_is_not_scaled_to_a_bomb(self):
        with pytest.raises(FileContentError, match="too different"):
            fit_image(np.zeros((1, 16_000, 1), np.uint8), size=(100, 100), channels=None)


def test_only_one_module_of_the_package_decodes():
    from tests.helpers import REPOSITORY

    importing = [
        path.relative_to(REPOSITORY).as_posix()
        for root in ("data_pipeline", "longctx", "launcher", "parallel")
        for path in sorted(Path(REPOSITORY, root).rglob("*.py"))
        if "from PIL" in path.read_text()
    ]
    folder = "data_pipeline/prepare/images"
    assert importing == [f"{folder}/contact_sheet.py", f"{folder}/decode_image.py"]
