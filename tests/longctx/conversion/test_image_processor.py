"""Image processors in folders: normalization, palettes and class names in both directions, against transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from longctx.checkpoint_format import CheckpointReader, model_config
from longctx.config import ModelConfig
from longctx.conversion import export_checkpoint, import_hf, load_hf, save_hf
from longctx.conversion.image_processor import PROCESSOR, model_of_folder
from longctx.conversion.verify_images import RandomImages
from longctx.errors import CheckpointError, ConfigError
from longctx.images.image_format import ImageFormat
from longctx.model.decoder import Decoder
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.image_tokenizer import IMAGE_FILE, ImageTokenizer
from tests.longctx.families import hf_models
from tests.longctx.families.hf_models import VISION
from tests.longctx.tokenizer.byte_level import tokenizer_json, write_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
COLORS = np.random.default_rng(0).uniform(-1, 1, (12, 3)).astype(np.float32).astype(np.float64).tolist()


def folder_of(name: str, output: Path, processor: dict[str, Any] | None = None, **keys: Any) -> Path:
    """transformers' folder of a tiny model, with these settings and keys in its config.json."""
    hf_models.save(hf_models.build(VISION[name]), output)
    if processor is not None:
        (output / PROCESSOR).write_text(json.dumps(processor))
    edited = read(output / "config.json") | keys
    (output / "config.json").write_text(json.dumps(edited))
    return output


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def settings_of(values: dict[str, Any], tmp_path: Path, name: str = "vit", **keys: Any) -> ModelConfig:
    """The model of a folder with these settings; no weights are read."""
    (tmp_path / PROCESSOR).write_text(json.dumps(values))
    return model_of_folder(tmp_path, VISION[name].config_json() | keys)


class TestNormalization:
    @pytest.mark.parametrize(
        ("values", "mean", "std"),
        [
            ({}, (0.5,), (0.5,)),
            ({"feature_extractor_type": "ViTFeatureExtractor", "size": 224, "resample": 2}, (0.5,), (0.5,)),
            ({"image_processor_type": "ViTImageProcessorFast", "do_center_crop": True}, (0.5,), (0.5,)),
            (IMAGENET, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ({"image_mean": [0.25] * 3, "image_std": 2}, (0.25,), (2.0,)),
            (IMAGENET | {"do_normalize": False, "rescale_factor": 0.00392156862745098}, (0.0,), (1.0,)),
        ],
    )
    def test_settings_become_mean_and_std(self, values, mean, std, tmp_path):
        for name in ("vit", "swin"):
            image = settings_of(values, tmp_path, name).image
            assert (image.mean, image.std) == (mean, std)

    @pytest.mark.parametrize("kind", ["vit", "swin"])
    def test_without_the_file_they_are_those_of_transformers_class(self, kind, tmp_path):
        config = VISION[kind].config_json()
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / PROCESSOR).write_text("{}")
        theirs = transformers.AutoImageProcessor.from_pretrained(str(tmp_path))
        (tmp_path / PROCESSOR).unlink()
        image = model_of_folder(tmp_path, config).image
        assert (image.mean * 3, image.std * 3) == (tuple(theirs.image_mean), tuple(theirs.image_std))

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"rescale_factor": 1 / 127.5}, "rescale_factor=0.00784.* not supported; supported: pixel values times"),
            ({"do_rescale": False}, "do_rescale=False and rescale_factor=.* not supported"),
            ({"rescale_factor": "1/255"}, "rescale_factor='1/255'"),
            ({"image_processor_type": "BeitImageProcessor"}, "no image_mean, and its class 'BeitImageProcessor' may"),
            ({"image_mean": [0.5, 0.4]}, r"image_mean=\[0.5, 0.4\] .* one for each of num_channels=3"),
            ({"image_mean": ["0.5"] * 3}, "image_mean=.* must be a number"),
            ({"image_std": []}, "image_std=.* must be a number"),
            ({"image_std": 0}, r"image.std=\[0.0\] must be positive"),
            ({"do_flip_channel_order": True}, "do_flip_channel_order=True .* changes the pixels' values"),
        ],
    )
    def test_settings_that_change_pixels_otherwise_are_refused(self, values, said, tmp_path):
        with pytest.raises(ConfigError, match=said):
            settings_of(values, tmp_path)

    def test_a_file_that_is_no_object_or_leads_out_of_the_folder(self, tmp_path):
        (tmp_path / PROCESSOR).write_text("[1]")
        with pytest.raises(CheckpointError, match="is not a JSON object"):
            model_of_folder(tmp_path, VISION["vit"].config_json())
        (tmp_path / PROCESSOR).unlink()
        (tmp_path / PROCESSOR).symlink_to("/etc/hostname")
        with pytest.raises(CheckpointError, match="outside"):
            model_of_folder(tmp_path, VISION["vit"].config_json())

    @pytest.mark.parametrize("name", ["vit", "vit, gray", "swin", "swin, one stage"])
    def test_an_export_normalizes_pixels_as_the_model_does(self, name, tmp_path):
        config, tensors = load_hf(folder_of(name, tmp_path / "hf"))
        mean, std = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)) if config.image.channels == 3 else ((0.25,), (0.3,))
        config = replace(config, image=replace(config.image, mean=mean, std=std))
        save_hf(config, tensors, tmp_path / "back")
        assert load_hf(tmp_path / "back")[0] == config
        images = RandomImages.of(config, 100)
        theirs = transformers.AutoImageProcessor.from_pretrained(str(tmp_path / "back"))
        pictures = [Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()) for image in images.pixels_NCHW]
        found = theirs(pictures, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(found, images.normalized(torch.float32), rtol=0, atol=1e-6)

    def test_the_model_computes_with_them(self, tmp_path):
        """Logits of the whole model in transformers, which gets normalized pixels."""
        folder = folder_of("vit", tmp_path / "hf", IMAGENET)
        done = import_hf(folder, tmp_path / "ours", verify="logits")
        assert done.logits is not None
        assert model_config(CheckpointReader(tmp_path / "ours")).image.mean == (0.485, 0.456, 0.406)


_NAMES = {str(n): name for n, name in enumerate(["Katze", "犬", "crane", "crane", "a\nb", "LABEL_4", "x" * 400])}


class TestClasses:
    def test_names_become_the_format_of_images_and_come_back(self, tmp_path, caplog):
        folder = folder_of("vit", tmp_path / "hf", id2label=_NAMES)
        import_hf(folder, tmp_path / "ours", verify="none")
        found = load_tokenizer(tmp_path / "ours").format
        assert (found.shape, found.palette) == ((12, 20, 3), ())
        # What cannot be printed, and the second of two equal ones, has a name of its own.
        names = ("Katze", "犬", "crane", "crane (3)", "LABEL_4", "LABEL_4 (5)", "x" * 400)
        assert found.classes == names
        assert "class names that are not unique or not printable" in caplog.text
        export_checkpoint(tmp_path / "ours", tmp_path / "back", verify="tensors")
        hf = read(tmp_path / "back" / "config.json")
        assert hf["id2label"] == {str(n): name for n, name in enumerate(names)}
        assert hf["label2id"] == {name: n for n, name in enumerate(names)}
        assert not (tmp_path / "back" / IMAGE_FILE).exists()
        assert transformers.AutoConfig.from_pretrained(str(tmp_path / "back")).id2label[1] == "犬"
        import_hf(tmp_path / "back", tmp_path / "again", verify="none")
        files = [(tmp_path / at / IMAGE_FILE).read_bytes() for at in ("ours", "again")]
        assert files[0] == files[1]

    @pytest.mark.parametrize("name", ["swin", "imagegpt, classes"])
    def test_without_names_they_are_numbered_as_in_transformers(self, name, tmp_path):
        processor = {"clusters": COLORS} if "imagegpt" in name else None
        folder = folder_of(name, tmp_path / "hf", processor)
        import_hf(folder, tmp_path / "ours", verify="none")
        classes = load_tokenizer(tmp_path / "ours").format.classes
        assert classes == tuple(f"LABEL_{number}" for number in range(len(classes)))
        export_checkpoint(tmp_path / "ours", tmp_path / "back", tokenizer="none", verify="none")
        assert tuple(read(tmp_path / "back" / "config.json")["label2id"]) == classes

    def test_a_headless_model_has_none(self, tmp_path):
        import_hf(folder_of("swin, no head", tmp_path / "hf"), tmp_path / "ours", verify="none")
        assert load_tokenizer(tmp_path / "ours").format.classes == ()
        export_checkpoint(tmp_path / "ours", tmp_path / "back", verify="none")
        assert "id2label" not in read(tmp_path / "back" / "config.json")

    def test_a_text_tokenizer_is_no_image_format(self, tmp_path):
        import_hf(folder_of("vit", tmp_path / "hf"), tmp_path / "ours", verify="none")
        text = write_model(tmp_path / "text", tokenizer_json())
        with pytest.raises(ConfigError, match="encodes texts, but this model reads patches of images"):
            export_checkpoint(tmp_path / "ours", tmp_path / "back", tokenizer=text)
        assert not (tmp_path / "back").exists()


class TestPalette:
    @pytest.mark.parametrize(
        ("size", "shape"), [(32, (6, 6, 3)), ({"height": 4, "width": 9}, (4, 9, 3)), ({"shortest_edge": 6}, (6, 6, 3))]
    )
    def test_clusters_become_a_palette_and_come_back(self, size, shape, tmp_path):
        folder = folder_of("imagegpt, classes", tmp_path / "hf", {"clusters": COLORS, "size": size, "resample": 3})
        import_hf(folder, tmp_path / "ours", verify="logits")
        found = load_tokenizer(tmp_path / "ours")
        assert isinstance(found, ImageTokenizer)
        assert (found.format.shape, [list(color) for color in found.format.palette]) == (shape, COLORS)
        image = model_config(CheckpointReader(tmp_path / "ours")).image
        assert (image.height, image.width, image.channels) == shape
        export_checkpoint(tmp_path / "ours", tmp_path / "back", verify="logits")
        written = read(tmp_path / "back" / PROCESSOR)
        assert written["clusters"] == COLORS
        assert written["size"] == {"height": shape[0], "width": shape[1]}
        self.check_ids(tmp_path / "back", found.format)
        import_hf(tmp_path / "back", tmp_path / "again", verify="none")
        assert (tmp_path / "again" / IMAGE_FILE).read_bytes() == (tmp_path / "ours" / IMAGE_FILE).read_bytes()

    def check_ids(self, folder: Path, image_format: ImageFormat) -> None:
        """Compare the colors of random pixels with those of transformers' class."""
        theirs = transformers.AutoImageProcessor.from_pretrained(str(folder))
        pixels = np.random.default_rng(1).integers(0, 256, (3, *image_format.shape), dtype=np.uint8)
        found = theirs([Image.fromarray(image.squeeze()) for image in pixels], return_tensors="np")["input_ids"]
        assert np.array_equal(found, image_format.quantize(pixels).reshape(3, -1))
        assert len(np.unique(found)) > 5

    def test_gray_colors_are_written_as_rgb(self, tmp_path):
        config, tensors = load_hf(folder_of("imagegpt, classes", tmp_path / "hf"))
        palette = tuple((color[0],) for color in COLORS)
        gray = ImageFormat(height=4, width=9, channels=1, palette=palette, classes=tuple("abcde"))
        tokenizer = ImageTokenizer.of(gray, tmp_path)
        save_hf(config, tensors, tmp_path / "back", model_type="imagegpt", tokenizer=tokenizer)
        assert read(tmp_path / "back" / PROCESSOR)["clusters"] == [[color[0]] * 3 for color in COLORS]
        self.check_ids(tmp_path / "back", gray)
        import_hf(tmp_path / "back", tmp_path / "ours", verify="none")
        assert load_tokenizer(tmp_path / "ours").fingerprint == tokenizer.fingerprint

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"clusters": COLORS[:5]}, "must be a list of 12 colors, one less than vocab_size=13"),
            ({"clusters": [[0.5, 0.5]] * 12}, r"\[0.5, 0.5\] among the clusters .* must be three numbers"),
            ({"clusters": [["a", 0, 0]] * 12}, "must be three numbers"),
            ({"clusters": COLORS, "do_normalize": False}, "do_normalize and do_color_quantize .* must be true"),
            ({"clusters": COLORS, "do_color_quantize": False}, "must be true"),
            ({"clusters": COLORS, "image_mean": [0.4] * 3}, r"image_mean=.* not supported with a palette"),
            ({"clusters": COLORS, "rescale_factor": 1}, "rescale_factor=1 .* not supported"),
        ],
    )
    def test_palettes_that_mean_something_else_are_refused(self, values, said, tmp_path):
        with pytest.raises(ConfigError, match=said):
            settings_of(values, tmp_path, "imagegpt, classes")

    def test_without_a_palette_there_is_no_format(self, tmp_path, caplog):
        import_hf(folder_of("imagegpt, classes", tmp_path / "hf"), tmp_path / "ours", verify="none")
        assert "has no palette (clusters in preprocessor_config.json)" in caplog.text
        assert not (tmp_path / "ours" / IMAGE_FILE).exists()
        export_checkpoint(tmp_path / "ours", tmp_path / "back", verify="none")
        assert not (tmp_path / "back" / PROCESSOR).exists()

    def test_a_family_without_an_image_processor_says_what_it_leaves_out(self, tmp_path, caplog):
        """A GPT-2 of palette colors, whose head has a row for the begin token too."""
        values = hf_models.CASES["gpt2 untied"].config_json() | {"vocab_size": 13, "n_positions": 36}
        config = ModelConfig.from_hf(values)
        config = ModelConfig.from_dict(vars(config) | {"image": {"height": 6, "width": 6}})
        palette = tuple(map(tuple, COLORS))
        tokenizer = ImageTokenizer.of(ImageFormat(height=6, width=6, channels=3, palette=palette), tmp_path)
        save_hf(config, Decoder(config).state_dict(), tmp_path / "hf", tokenizer=tokenizer)
        assert "a gpt2 folder has no image processor: shape, palette and class names are left out" in caplog.text
        assert not (tmp_path / "hf" / PROCESSOR).exists()
