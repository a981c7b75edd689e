"""CLI for ``longctx VERB``."""

from launcher.cli.verbs import main

__all__ = ["main"]
