"""``python -m launcher VERB``, or ``longctx VERB``: everything around a run that needs no process group.

Each verb imports what it needs when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from launcher.cli import convert as cli_model
from launcher.cli import data as cli_data
from launcher.cli.console import flush_results, has_abandoned_work, note, program, warnings_on_stderr
from launcher.cluster.exit import DONE, INTERRUPTED, WRONG_USAGE, run_guarded
from longctx import __version__
from longctx.errors import LongCtxError

DESCRIPTION = """\
Prepare data, look after checkpoints, try models.

Training itself is started by DeepSpeed:
  deepspeed --hostfile hostfile launcher/pretrain.py --config run.toml
"""
EXAMPLES = """\
the whole road:
  {program} tokenizer train --source stdlib --vocab-size 4096 --output runs/tokenizer.model
  {program} data build --source stdlib --tokenizer runs/tokenizer.model --output runs/data
  deepspeed --hostfile hostfile launcher/pretrain.py --data.train runs/data --run.output_dir runs/first
  {program} report runs/first
  {program} generate --checkpoint runs/first --prompt "def main" --max-new-tokens 40
  {program} convert --to hf runs/first exported

Exit codes: 0 done, 1 it failed and said why, 2 wrong usage. `{program} VERB --help` shows a verb's options.
"""
UNBUILT = {
    ("evaluate",): "The loss by position stands in `report DIR`; `generate` shows what a checkpoint says.",
    ("plan",): "`data inspect DIR --seq-len N` tells rows and padding; pretrain.py checks a config before it starts.",
    ("doctor",): "pretrain.py checks hostfile, device and ranks before it allocates anything.",
    ("run",): "Start `deepspeed … launcher/pretrain.py`, and after a failure again with --run.resume newest-good.",
    ("verify",): "For files use `data verify DIR` and `checkpoint verify DIR`.",
    ("data", "plan"): "Use `data inspect DIR --seq-len N`: rows, padding and cut documents at that length.",
    ("data", "sample"): "Use `data inspect DIR --seq-len N --row K`: what a packed row holds.",
    ("checkpoint", "prune"): "Set checkpoint.keep_last in the run's config, or delete a step_NNNNNN folder whole.",
    ("checkpoint", "export"): "Use `convert --to hf RUN OUT`.",
}
"""Names that are promised but not built, and what to use until they are."""


OUR_PACKAGES = ("launcher", "parallel", "data_pipeline", "longctx")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps our line breaks, and gives long flags room beside their text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


class Parser(argparse.ArgumentParser):
    """argparse whose complaints end with where to read on."""

    def __init__(self, *args, **kwargs) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USAGE, f"{self.prog}: {message}\n`{self.prog} --help` shows what it takes, with an example.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; never raises for what a user can cause."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 is no reason to fail
    if (refusal := unbuilt(words)) is not None:
        note(refusal)
        return WRONG_USAGE
    try:
        arguments = build_parser().parse_args(words)
    except SystemExit as end:
        flush_results()
        return end.code if isinstance(end.code, int) else WRONG_USAGE
    with warnings_on_stderr():
        code = run_guarded(lambda: _run_verb(arguments), interrupted="Interrupted. Nothing half-written is left.")
    if code == INTERRUPTED and has_abandoned_work():
        os._exit(code)  # a library computes on in its thread; waiting for it is what Ctrl-C was against
    return code


def build_parser() -> argparse.ArgumentParser:
    """All verbs with their help."""
    name = program()
    parser = Parser(prog=name, description=DESCRIPTION, epilog=EXAMPLES.format(program=name))
    parser.add_argument("--version", action="version", version=f"longctx {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    cli_data.add_verbs(verbs, name)
    cli_model.add_verbs(verbs, name)
    return parser


def unbuilt(words: Sequence[str]) -> str | None:
    """What to tell someone who calls a promised verb that does not exist yet; None for every other command line."""
    for name in (tuple(words[:1]), tuple(words[:2])):
        if name in UNBUILT:
            return f"`{program()} {' '.join(name)}` is not built yet. {UNBUILT[name]}"
    return None


def _run_verb(arguments: argparse.Namespace) -> int:
    try:
        return arguments.verb(arguments) or DONE
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OUR_PACKAGES:
            raise
        raise LongCtxError(
            f"{error.name} is not installed for {sys.executable}.\n"
            "Run `make setup` and use .venv/bin/python, or pip install longctx."
        ) from error
    except OSError as error:
        if error.filename is None:
            raise
        raise LongCtxError(f"{error.filename}: {error.strerror}.") from error


if __name__ == "__main__":
    sys.exit(main())
