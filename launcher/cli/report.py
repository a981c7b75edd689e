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
    """Write a run's report.html, or several runs or evaluations side by side.

    One self-contained page holds a run folder's numbers and curves. It can be made while the run goes on.
    Of several runs the page compares key figures, losses and configs.
    Of several evaluations it compares scores, and draws their needles in panels of one picture, which stands beside it.

    Args:
        folders: Run folders, or folders that evaluate has written.
        output: File to write; DIR/report.html unless given, and comparison.html here for several folders.
    """
    if not folders:
        raise ConfigError("report needs a run folder: report DIR, or report DIR DIR to compare runs.")
    from launcher.report.comparison import is_evaluation, write_comparison, write_evaluations

    evaluations = [folder for folder in folders if is_evaluation(folder)]
    # Runs and evaluations have no figures in common.
    if evaluations and len(evaluations) < len(folders):
        raise ConfigError(f"{evaluations[0]} is an evaluation, and others are not. Compare runs, or evaluations.")
    if len(evaluations) > 1:
        with progress(f"comparing {plural(len(folders), 'evaluation')}"):
            path = write_evaluations(folders, output)
    elif len(folders) == 1:
        from launcher.report.page import write_report

        with progress(f"drawing {folders[0]}"):
            path = write_report(folders[0], output)
    else:
        with progress(f"comparing {plural(len(folders), 'run')}"):
            path = write_comparison(folders, output)
    say(str(path))
