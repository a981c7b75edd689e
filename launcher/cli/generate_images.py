"""Pictures in the verb ``generate``: their options, and what an image model draws below a picture's upper rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from launcher.cli.cli_output import print_line
from launcher.cli.evaluate_command import token_progress
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from longctx.generation.beams import Beams
    from longctx.generation.sampling import Greedy, Sampling


@dataclass(frozen=True, kw_only=True)
class ContinuedImage:
    """A picture to continue, for a model that predicts colors (Image GPT)."""

    image: Annotated[Path | None, arg(metavar="F.png")] = None
    """Picture whose upper rows are continued, scaled and cut to the model's size; --output is then a PNG file with the
    original, the given rows and the continuations."""
    data: Annotated[str | None, arg(metavar="FOLDER")] = None
    """Instead of --image: shards with images, or their URL."""
    image_number: int | None = None
    """Image in --data, from 0; default: 0."""
    image_rows: int | None = None
    """Rows of the picture that are given; default: the upper half; 0 draws a new picture."""
    samples: int | None = None
    """Number of continuations, sampled with seed, seed + 1, …; default: 1."""

    @property
    def is_used(self) -> bool:
        """True if a picture is given instead of a prompt."""
        return self.image is not None or self.data is not None

    def check_unused(self) -> None:
        """Raise ConfigError for options that need a picture."""
        given = [name for name in ("image_number", "image_rows", "samples") if getattr(self, name) is not None]
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"{names}: for pictures. Add --image FILE.png or --data FOLDER, or leave it out.")


def draw_continuations(
    images: ContinuedImage,
    strategy: Greedy | Sampling | Beams,
    unused: Sequence[str],
    *,
    checkpoint: Path,
    output: Path | None,
    **options: Any,
) -> None:
    """Continue a picture and print the file with the result; ``unused`` are given options for texts only."""
    from launcher.generation.image_generation import ImageGenerationOptions, continue_image
    from longctx.generation.beams import Beams
    from parallel.runtime.launched import environment_rank

    if isinstance(strategy, Beams):
        unused = [*unused, "--beams"]
    if unused:
        raise ConfigError(f"a picture is continued without these options for texts: {', '.join(unused)}. Omit them.")
    if output is None:
        raise ConfigError("--output is missing: the PNG file to write, such as --output continued.png.")
    assert not isinstance(strategy, Beams)
    options |= {"image": images.image, "data": images.data, "image_number": images.image_number}
    found = continue_image(
        ImageGenerationOptions(
            checkpoint=checkpoint,
            output=output,
            image_rows=images.image_rows,
            samples=1 if images.samples is None else images.samples,
            strategy=strategy,
            **options,
        ),
        token_progress,
    )
    if environment_rank()[0] == 0:
        print_line(str(found))
