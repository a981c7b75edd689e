"""Included recipes, by name."""

from __future__ import annotations

from pathlib import Path

from launcher.wording import did_you_mean
from longctx.errors import ConfigError

_FOLDER = Path(__file__).parent
QUICKSTART = _FOLDER / "quickstart.toml"
"""The recipe for a command line without ``--config``."""


def recipes() -> dict[str, Path]:
    """Map each included recipe's name to its file."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def recipe_summary(recipe: Path) -> str:
    """Return a recipe's first line, which describes the training."""
    with recipe.open() as file:
        return file.readline().removeprefix("# ").strip()


def find_config(given: str) -> Path:
    """Find the file for ``--config``, by path or by recipe name; raise ConfigError if it is neither."""
    path, known = Path(given), recipes()
    if path.is_file() and path.suffix in (".yaml", ".yml", ".json"):
        raise ConfigError(
            f"--config {given} is not TOML: write YAML's `lr: 1e-4` under `train:` as `lr = 1e-4` under `[train]`."
            "\n`longctx train --print-config` prints a full config to start from."
        )
    if path.is_file():
        return path
    # With or without the suffix; a recipe takes precedence over a folder with the same name, such as its run's.
    name = given.removesuffix(".toml")
    if name in known:
        return known[name]
    if path.exists():
        raise ConfigError(f"--config {given} cannot be read: it is not a file.")
    question = did_you_mean(path.stem, list(known), most=1)
    raise ConfigError(f"--config {given} is neither a file nor a recipe.{question}\nRecipes: {', '.join(known)}.")
