"""``longctx VERB``: all commands around a run that need no process group.

A verb is a typed function: its signature defines its options, its docstring their help. Each verb imports its
dependencies when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import difflib
import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import tyro

from launcher.cli import (
    attention,
    checkpoint,
    convert,
    data,
    data_rows,
    doctor,
    evaluate,
    generate,
    measure,
    plan,
    practice,
    report,
    run,
    score,
    tokenizer,
)
from launcher.cli.console import (
    has_abandoned_work,
    note,
    program,
    say,
    table,
    unframed,
    warnings_on_stderr,
    write,
)
from launcher.cluster.exit import DONE, INTERRUPTED, WRONG_USAGE, run_to_exit_code
from launcher.cluster.scheduler import check_tasks
from longctx import __version__
from longctx.errors import LongCtxError


@dataclass(frozen=True)
class Verb:
    """Function of the command line, with the options of its examples."""

    run: Callable[..., int | None]
    examples: tuple[str, ...]
    takes_settings: bool = False
    """Whether other flags are a run's settings, which it gets as ``settings``."""


VERBS = {
    "tokenizer train": Verb(tokenizer.train, ("--source stdlib --vocab-size 4096 --output runs/tokenizer.model",)),
    "tokenizer show": Verb(tokenizer.show, ('runs/tokenizer.model --text "def main("',)),
    "data build": Verb(
        data.build,
        (
            "--source stdlib --tokenizer runs/tokenizer.model --output runs/data",
            "--without 00007.arrow --output runs/data",
        ),
    ),
    "data inspect": Verb(data.inspect, ("runs/data --seq-len 4096 --row 0",)),
    "data verify": Verb(data.verify, ("runs/data",)),
    "data pack": Verb(data.pack, ("runs/data --output s3://bucket/data",)),
    "data plan": Verb(data_rows.plan, ("--config quickstart", "--config run.toml --ranks 64"), takes_settings=True),
    "data sample": Verb(data_rows.sample, ("runs/data --seq-len 4096 --rows 8 --output rows.txt",)),
    "data practice": Verb(
        practice.practice,
        (
            "--output runs/recall.jsonl --documents 10000",
            "--output runs/haystack.jsonl --documents 100 --words 500 500 --pairs 0 0",
        ),
    ),
    "convert": Verb(
        convert.convert,
        (
            "--to hf runs/first exported",
            "--to hf runs/first exported --dtype bfloat16 --verify logits",
            "--from hf exported imported",
            "--upcycle 8,2 imported upcycled",
        ),
    ),
    "checkpoint list": Verb(checkpoint.list_checkpoints, ("runs/first", "runs/first --check", "s3://bucket/first")),
    "checkpoint prune": Verb(
        checkpoint.prune, ("runs/first --keep-last 2 --keep-every 1000", "runs/first --keep-last 1 --dry-run")
    ),
    "checkpoint export": Verb(checkpoint.export, ("runs/first exported --dtype bfloat16",)),
    "checkpoint verify": Verb(checkpoint.verify, ("runs/first/checkpoints/step_000100",)),
    "generate": Verb(generate.generate, ('--checkpoint runs/first --prompt "def main(" --max-new-tokens 40',)),
    "evaluate": Verb(
        evaluate.evaluate,
        (
            "--checkpoint runs/first --tasks niah,ppl --lengths 512,1024 --output runs/first/evaluation",
            "--list",
        ),
    ),
    "score": Verb(score.score, ("--checkpoint runs/first --data runs/data/validation --output runs/scores",)),
    "attention": Verb(
        attention.attention,
        ("--checkpoint runs/first --text README.md --length 1024 --layer 1 --head 0 --output runs/first/attention",),
    ),
    "plan": Verb(
        plan.plan,
        (
            "--trace --config llama-3.1-8b-128k --ranks 16",
            "--trace --config quickstart --model.preset llama-3.1-8b --data.seq_len 32768 --zero.stage 2",
        ),
        takes_settings=True,
    ),
    "measure": Verb(measure.measure, ("--output hardware.toml", "--ranks 2 --cpu-time --output two.toml")),
    "doctor": Verb(doctor.doctor, ("--folder runs", "--hostfile hostfile")),
    "run": Verb(
        run.run,
        (
            "--retries 5 -- deepspeed --num_gpus 2 launcher/pretrain.py --config run.toml",
            "-- deepspeed --hostfile hostfile launcher/pretrain.py --config run.toml --run.resume auto",
        ),
    ),
    "report": Verb(report.report, ("runs/first", "runs/first runs/second --output comparison.html")),
}

ELSEWHERE = {
    "verify": (
        "A run is verified over its ranks: `deepspeed --hostfile hostfile launcher/verify.py --config run.toml` "
        "compares it with one process. For files there are `data verify DIR` and `checkpoint verify DIR`."
    ),
}
"""Names that are no verbs of one process, and what to start in their place."""

_OVERVIEW = """\
usage: {program} VERB [OPTIONS]

Prepare data, look after checkpoints, try and evaluate models.

Training itself is started by DeepSpeed, on one machine (torchrun works too) or on those of a hostfile:
  deepspeed --num_gpus 2 launcher/pretrain.py --config run.toml
  deepspeed --hostfile hostfile launcher/pretrain.py --config run.toml

verbs:
{verbs}

the whole road:
  {program} tokenizer train --source stdlib --vocab-size 4096 --output runs/tokenizer.model
  {program} data build --source stdlib --tokenizer runs/tokenizer.model --output runs/data
  deepspeed --num_gpus 2 launcher/pretrain.py --data.train runs/data --run.output_dir runs/first
  {program} report runs/first
  {program} generate --checkpoint runs/first --prompt "def main" --max-new-tokens 40
  {program} evaluate --checkpoint runs/first --tasks niah,ppl --lengths 512,1024 --output runs/first/evaluation
  {program} convert --to hf runs/first exported

Exit codes: 0 done, 1 it failed and said why, 2 wrong usage. `{program} VERB --help` shows a verb's options."""
_OUR_PACKAGES = ("launcher", "parallel", "data_pipeline", "longctx")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code. Never raises for an error that a user can cause."""
    if argv is None:
        argv = sys.argv[1:]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without UTF-8 must not cause an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        verb = parse(list(argv))
    except SystemExit as end:
        # Flush tyro's output.
        write("")
        if isinstance(end.code, int):
            return end.code
        return DONE
    except BrokenPipeError:
        # `… --help | head`: the reader has closed the pipe.
        write("")
        return DONE
    with warnings_on_stderr():
        code = run_to_exit_code(lambda: explained(verb), interrupted="Interrupted. Nothing half-written is left.")
    if code == INTERRUPTED and has_abandoned_work():
        # A library still computes in its thread; after Ctrl-C do not wait for it.
        os._exit(code)
    return code


def main_over_ranks(verb: str, argv: Sequence[str]) -> int:
    """Run a verb on every rank that deepspeed or torchrun started; rank 0 prints. The verb's script calls this."""
    # Imported here: torch is slow to import, and the single-process help must not wait for it.
    from launcher.config.flags import take_flag, without_local_rank
    from parallel.runtime.launched import environment_rank

    rank, _ = environment_rank()
    arguments = without_local_rank(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with ExitStack() as stack:
        nowhere = stack.enter_context(Path(os.devnull).open("w"))
        # Results, help and command line errors are the same on every rank.
        if rank != 0:
            stack.enter_context(redirect_stdout(nowhere))
        with ExitStack() as parsing:
            if rank != 0:
                parsing.enter_context(redirect_stderr(nowhere))
            bound = parse([verb, *arguments])
        _, hostfile = take_flag(arguments, "--run.hostfile")
        check_tasks(hostfile or "launcher", arguments, script=f"launcher/{verb}.py")
        with warnings_on_stderr():
            return explained(bound)


def parse(arguments: Sequence[str]) -> Callable[[], int | None]:
    """Return the verb of a command line with its options bound. After printing help or an error, raise SystemExit."""
    # Try two words before one: `data verify` is not the verb `data`.
    for length in (2, 1):
        name = " ".join(arguments[:length])
        if name in ELSEWHERE:
            note(ELSEWHERE[name])
            raise SystemExit(WRONG_USAGE)
        if name in VERBS:
            return _bind(name, arguments[len(name.split()) :])
    # No verb: help, the version or a mistake, for the full command or a group such as `data`.
    group, length = "", 1
    if arguments and _verbs_of(arguments[0]):
        group, length = arguments[0], 2
    if arguments[length - 1 : length] in (["-h"], ["--help"]):
        say(overview(group))
        raise SystemExit(DONE)
    if arguments == ["--version"]:
        say(f"longctx {__version__}")
        raise SystemExit(DONE)
    _complain_of_verb(group, " ".join(arguments[:length]))


def overview(group: str = "") -> str:
    """Return the help of the full command, or of the verbs that begin with the word ``group``."""
    rows = [[f"  {name}", (VERBS[name].run.__doc__ or "").splitlines()[0]] for name in _verbs_of(group)]
    verbs = "\n".join(table(["", ""], rows).splitlines()[1:])
    if group:
        return f"usage: {program()} {group} VERB [OPTIONS]\n\nverbs:\n{verbs}"
    return _OVERVIEW.format(program=program(), verbs=verbs)


def _verbs_of(group: str) -> list[str]:
    """Return the two-word verbs that begin with ``group``; all verbs if it is empty."""
    return [name for name in VERBS if not group or name.startswith(f"{group} ")]


def _bind(name: str, arguments: Sequence[str]) -> Callable[[], int | None]:
    """Return the verb with its options bound. After printing its help or an error, raise SystemExit."""
    verb = VERBS[name]

    # tyro calls the function it parses for. The verb must run later, outside of the handling of wrong usage.
    @functools.wraps(verb.run)
    def bound(*positional, **options) -> functools.partial[int | None]:
        return functools.partial(verb.run, *positional, **options)

    called = f"{program()} {name}"
    # tyro wraps its messages, which would split a long path to Python, so only the help shows it.
    shown = name
    if {"-h", "--help"} & set(arguments):
        shown = called
    markers = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            if not verb.takes_settings:
                return tyro.cli(bound, prog=shown, args=arguments, config=markers)
            call, settings = tyro.cli(bound, prog=shown, args=arguments, config=markers, return_unknown_args=True)
            # Arguments that are not options of the verb are settings, which are checked when all settings are read.
            return functools.partial(call.func, **{**call.keywords, "settings": tuple(settings)})
    except SystemExit as end:
        if not end.code:
            # tyro has printed the verb's help.
            say("examples:")
            for example in verb.examples:
                say(f"  {called} {example}")
            raise
        message = unframed(complaint.getvalue()).replace(f" from {name}", "")
        _complain(called, message, "shows what it takes, with an example.")


def _complain_of_verb(group: str, given: str) -> NoReturn:
    """Report a missing or unknown verb, and list the known ones."""
    known = _verbs_of(group)
    close = difflib.get_close_matches(given, known, cutoff=0.5)
    if given == group:
        complaint = f"which verb? {', '.join(known)}."
    elif close:
        complaint = f"there is no verb {given!r}. Did you mean {' or '.join(close)}?"
    else:
        complaint = f"there is no verb {given!r}. The verbs are {', '.join(known)}."
    _complain(f"{program()} {group}".rstrip(), complaint, "tells what each does.")


def _complain(called: str, complaint: str, offer: str) -> NoReturn:
    """Report an error in a command line and exit with the code of wrong usage."""
    note(f"{called}: {complaint}\n`{called} --help` {offer}")
    raise SystemExit(WRONG_USAGE)


def explained(verb: Callable[[], int | None]) -> int:
    """Run a verb; turn a missing package or a file system error into a short LongCtxError."""
    try:
        return verb() or DONE
    except ModuleNotFoundError as error:
        # A missing module of our own is a bug, and keeps its traceback.
        if (error.name or "").partition(".")[0] in _OUR_PACKAGES:
            raise
        raise LongCtxError(
            f"{error.name} is not installed for {sys.executable}.\nRun `make setup` and use .venv/bin/python."
        ) from error
    except OSError as error:
        # Without a file name it is not a user's mistake that we could explain.
        if error.filename is None:
            raise
        raise LongCtxError(f"{error.filename}: {error.strerror}.") from error
