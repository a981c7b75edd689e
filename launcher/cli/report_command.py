"""The verb ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from launcher.cli.cli_output import print_line, progress
from launcher.wording import format_count
from longctx.errors import ConfigError


def report_runs(
    folders: Annotated[Positional[list[Path]], arg(metavar="DIR [DIR …]")],
    *,
    output: Annotated[Path | None, arg(metavar="F.html")] = None,
) -> None:
    """Write a run's report.html, or compare several runs or evaluations.

    One self-contained page shows a run folder's numbers and curves. It can be written while the run continues. For
    several runs the page compares key metrics, losses and configs. For several evaluations it compares scores and draws
    their needle results as panels in one picture, saved next to the page.

    Args:
        folders: Run folders, or folders written by evaluate.
        output: File to write. Default: DIR/report.html, or comparison.html in the working folder for several folders.
    """
    if not folders:
        raise ConfigError("report needs a run folder: report DIR, or report DIR DIR to compare runs.")
    from launcher.report.comparison import is_evaluation, write_comparison, write_evaluation_comparison

    evaluations = [folder for folder in folders if is_evaluation(folder)]
    # Runs and evaluations share no metrics.
    if evaluations and len(evaluations) < len(folders):
        raise ConfigError(
            f"{evaluations[0]} is an evaluation, but not all folders are. Compare only runs or only evaluations."
        )
    if len(evaluations) > 1:
        with progress(f"comparing {format_count(len(folders), 'evaluation')}"):
            path = write_evaluation_comparison(folders, output)
    elif len(folders) == 1:
        from launcher.report.page import write_report

        with progress(f"drawing {folders[0]}"):
            path = write_report(folders[0], output)
    else:
        with progress(f"comparing {format_count(len(folders), 'run')}"):
            path = write_comparison(folders, output)
    print_line(str(path))
