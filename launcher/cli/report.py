"""The verb ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from launcher.cli.console import progress, say
from launcher.wording import plural
from longctx.errors import ConfigError


def report(
    folders: Annotated[Positional[list[Path]], arg(metavar="DIR [DIR …]")],
    *,
    output: Annotated[Path | None, arg(metavar="F.html")] = None,
) -> None:
    """Write a run's report.html, or several runs side by side.

    One self-contained page holds a run folder's numbers and curves. It can be made while the run goes on.
    Of several folders the page compares figures, curves, sample texts and configs.

    Args:
        folders: Run folders.
        output: File to write; DIR/report.html unless given, and comparison.html here for several runs.
    """
    if not folders:
        raise ConfigError("report needs a run folder: report DIR, or report DIR DIR to compare runs.")
    if len(folders) == 1:
        from launcher.report.page import write_report

        with progress(f"drawing {folders[0]}"):
            path = write_report(folders[0], output)
    else:
        from launcher.report.comparison import write_comparison

        with progress(f"comparing {plural(len(folders), 'run')}"):
            path = write_comparison(folders, output)
    say(str(path))
