"""Images in the verbs ``data build`` and ``data inspect``: their options, the build, and the tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from launcher.cli.cli_output import byte_rate, command_line, note, print_json, print_line, progress, table
from launcher.cli.corpus import CorpusOptions, Workers, hash_source, say_left_out
from launcher.cli.shared_options import flatten_values
from launcher.wording import format_count
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from data_pipeline.image_contents import ImageContents
    from data_pipeline.inspect import Description
    from data_pipeline.prepare.build_shards import BuildReport
    from data_pipeline.prepare.image_formats import ImageOptions
    from longctx.images.image_format import ImageFormat

_APPLY_TO_IMAGES = ("source", "include", "exclude", "strict")
"""Options in ``CorpusOptions`` that images have too."""
_SHOWN_CLASSES = 12
_IMAGES_PER_ROW = 8
"""Images of a palette in a row of the run that the message after a build suggests."""


@dataclass(frozen=True, kw_only=True)
class ImageFlags:
    """How images become tokens; all need --kind images."""

    image_size: Annotated[str, arg(metavar="N|HxW")] = ""
    """Scale every image until it covers N x N or H x W pixels, and cut out its centre. Default: all images must have
    the size of the first."""
    channels: Annotated[int | None, arg(metavar="{1,3}")] = None
    """Convert every image to 1 channel (grey) or 3 (color). Default: all images must have those of the first."""
    palette: Annotated[int | None, arg(metavar="N")] = None
    """One token per pixel: the nearest of N colors, chosen by k-means, as for Image GPT. Default: the pixels' values,
    for patches."""
    image_field: str = "image"
    """Parquet column with the images: bytes of a file, or Hugging Face's struct of bytes and path."""
    label_field: str = "label"
    """Parquet column with the labels: numbers or texts. '' reads any images without labels."""

    def options(self) -> ImageOptions:
        """Build the choices about the format; raise ConfigError or DataError for an invalid value."""
        from data_pipeline.prepare.image_formats import ImageOptions
        from data_pipeline.prepare.images.fit_palette import check_colors

        if self.palette is not None:
            check_colors(self.palette)
        if not self.image_field:
            raise ConfigError("--image-field is empty. Name the column with the images, such as image.")
        return ImageOptions(size=_size(self.image_size), channels=self.channels, colors=self.palette or 0)


def _size(given: str) -> tuple[int, int] | None:
    """Parse N or HxW."""
    if not given:
        return None
    found = re.fullmatch(r"([0-9]{1,6})(?:x([0-9]{1,6}))?", given)
    if found is None:
        raise ConfigError(f"--image-size {given} is not N or HxW, such as 32 or 32x48.")
    return int(found[1]), int(found[2] or found[1])


def changed_options(options: Any, keep: Sequence[str] = ()) -> list[str]:
    """Return the flags in an options group that differ from their defaults, except those to ``keep``."""
    defaults = type(options)()
    changed = [f.name for f in fields(options) if getattr(options, f.name) != getattr(defaults, f.name)]
    return [f"--{name.replace('_', '-')}" for name in changed if name not in keep]


def check_no_image_flags(flags: ImageFlags) -> None:
    """Raise ConfigError for image options in a build of texts."""
    given = changed_options(flags)
    if given:
        raise ConfigError(f"Only images have these options: {', '.join(given)}. Add --kind images, or leave them out.")


def check_no_text_options(corpus: CorpusOptions, groups: Sequence[Any], others: Mapping[str, bool]) -> None:
    """Raise ConfigError for options without effect on images; ``others`` are further flags, True if given."""
    given = changed_options(corpus, _APPLY_TO_IMAGES)
    for group in groups:
        given += changed_options(group)
    given += [name for name, is_given in others.items() if is_given]
    if given:
        raise ConfigError(
            f"These options have no effect on images (--kind images): {', '.join(given)}. Leave them out."
        )


def build_images(
    corpus: CorpusOptions,
    tokenizer: Path | None,
    output: str,
    *,
    flags: ImageFlags,
    workers: Workers,
    json: bool,
    **options: Any,
) -> None:
    """Build a folder of images and print the report; ``options`` go to ``build_shards``."""
    from data_pipeline.prepare.build_shards import build_shards
    from data_pipeline.prepare.image_formats import choose_format
    from data_pipeline.prepare.image_source import open_images
    from longctx.tokenizer import load_tokenizer

    # Errors in options are reported before the source is read, which may take minutes.
    image_options, reused = flags.options(), None
    if tokenizer is not None:
        reused = load_tokenizer(tokenizer)
    if not corpus.source:
        raise ConfigError("--source is missing: a folder of images, an IDX or Parquet file, or its URL.")
    with workers.hired() as engine:
        source = open_images(
            corpus.source,
            image_field=flags.image_field,
            label_field=flags.label_field,
            include=flatten_values(corpus.include),
            exclude=flatten_values(corpus.exclude),
            strict=corpus.strict,
        )
        hash_source(source)
        if image_options.colors and reused is None:
            with progress(f"choosing {image_options.colors} colors", total=source.num_bytes, rate=byte_rate) as update:
                made, rule = choose_format(source, image_options, say=note, reading=update)
        else:
            made, rule = choose_format(source, image_options, reused=reused, say=note)
        note(f"{corpus.source}: images of {made.format.describe()}")
        with progress(f"reading images in {source.spec}", total=source.num_bytes, rate=byte_rate) as update:
            report = build_shards(
                source,
                made,
                output,
                images=rule,
                workers=workers.workers,
                engine=engine,
                say=note,
                progress=lambda images, _: update(source.bytes_read, note=format_count(images, "image")),
                **options,
            )
    _say_build(report, made.format, json=json)


def _say_build(report: BuildReport, found: ImageFormat, *, json: bool) -> None:
    import dataclasses

    if json:
        shape = {"height": found.height, "width": found.width, "channels": found.channels}
        shape |= {"classes": list(found.classes), "colors": found.num_colors}
        print_json(dataclasses.asdict(report) | {"image_format": shape})
        return
    rows = []
    for name, split in (("training", report.training), ("validation", report.validation)):
        if split is not None:
            rows.append([name, f"{split.documents:,}", f"{found.num_tokens:,}", f"{split.shards:,}", str(split.folder)])
    print_line(table(["split", "images", "tokens per image", "shards", "folder"], rows))
    say_left_out(report.skipped, report.left_out, report.left_out_file)
    if report.up_to_date:
        print_line(
            f"{report.output} is up to date: source, format and options are unchanged, so the build was skipped."
        )
    else:
        print_line(f"{report.output} was made in {report.seconds:.1f} s.")
    if found.num_colors or found.classes:
        print_line(f"Next: {command_line('train', *_run_flags(report, found))}")
    else:
        print_line(
            "A run reads patches with labels: sort the images into one folder per class, or build with --palette."
        )
    print_line(f"Look at it: {command_line('data', 'inspect', report.output, '--picture', 'images.png')}")


def _run_flags(report: BuildReport, found: ImageFormat) -> list[object]:
    """Return flags for a small run on a new folder: a recipe, the data, and the shape where it is not the recipe's."""
    from launcher.config.load_config import load_run_config

    shape = {f"model.image.{side}": getattr(found, side) for side in ("height", "width", "channels")}
    if found.num_colors:
        recipe, tokens = "igpt-small", found.num_tokens
        shape |= {"model.vocab_size": found.num_colors + 1, "model.output_vocab_size": found.num_colors}
        shape |= {"model.max_positions": tokens, "data.seq_len": _IMAGES_PER_ROW * tokens}
        shape |= {"train.tokens_per_step": _IMAGES_PER_ROW * tokens}
    else:
        recipe = "vit-tiny"
        patch = max(side for side in (1, 2, 3, 4) if not found.height % side and not found.width % side)
        num_tokens = found.height // patch * (found.width // patch) + 1
        shape |= {"model.image.patch": patch, "model.max_positions": num_tokens, "model.classes": len(found.classes)}
    config = load_run_config(["--config", recipe])
    flags: list[object] = ["--config", recipe, "--data.train", report.output]
    if report.validation is None:
        flags += ["--validation.rows", 0]
    else:
        flags += ["--data.validation", report.validation.folder]
    for name, value in shape.items():
        if attrgetter(name)(config) != value:
            flags += [f"--{name}", value]
    return flags


def image_rows(found: Description, images: ImageContents) -> dict[str, str]:
    """Return a split's properties keyed by table row names, with the first classes' counts."""
    rows = {
        "images": f"{found.documents:,}",
        "height x width, pixels": f"{images.height:,} x {images.width:,}",
        "channels": str(images.channels),
        "palette colors": f"{images.colors:,}" if images.colors else "none: pixel values",
        "tokens per image": f"{images.tokens_per_image:,}",
        "classes": f"{len(images.classes):,}" if images.classes else "none",
    }
    named = list(zip(images.classes, images.images_per_class, strict=True))
    for number, (name, count) in enumerate(named[:_SHOWN_CLASSES]):
        rows[f"images in class {number}, {name}"] = f"{count:,}"
    if named[_SHOWN_CLASSES:]:
        rest = [count for _, count in named[_SHOWN_CLASSES:]]
        rows[f"images in {len(rest):,} more classes"] = f"{sum(rest):,}"
    return rows
