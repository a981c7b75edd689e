"""All settings of a run: defaults, then a TOML file, then flags. Strict, frozen, checked once."""

from launcher.config.load import load_run_config
from launcher.config.sections import RunConfig

__all__ = ["RunConfig", "load_run_config"]
