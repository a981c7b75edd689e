"""The verb ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from launcher.cli.console import progress, say


def report(
    folder: Annotated[Positional[Path], arg(metavar="DIR")],
    *,
    output: Annotated[Path | None, arg(metavar="F.html")] = None,
) -> None:
    """Write a run's report.html.

    One self-contained page holds the run folder's numbers and curves. It can be made while the run goes on.

    Args:
        folder: Run folder.
        output: File to write, DIR/report.html unless given.
    """
    from launcher.report.page import write_report

    with progress(f"drawing {folder}"):
        path = write_report(folder, output)
    say(str(path))
