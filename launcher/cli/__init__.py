"""CLI for ``longctx VERB``."""

from launcher.cli.cli_commands import main

__all__ = ["main"]
