"""``longctx VERB``: all commands around a run that need no process group.

A verb is a typed function: its signature defines its options, its docstring their help. Each verb imports its
dependencies when it runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import difflib
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import tyro

from launcher.cli import (
    attention_command,
    benchmark_command,
    checkpoint,
    convert_command,
    data_command,
    data_rows,
    doctor,
    evaluate_command,
    generate_command,
    inspect_command,
    plan_command,
    practice_command,
    report_command,
    run_command,
    score_command,
    tokenizer_command,
    train,
)
from launcher.cli.cli_output import (
    has_abandoned_work,
    note,
    print_line,
    program,
    table,
    unframed,
    warnings_on_stderr,
    write,
)
from launcher.cli.completion import completion_script
from launcher.cluster.exit import ABORTED, DONE, USAGE_ERROR, run_to_exit_code
from launcher.cluster.scheduler import check_tasks
from launcher.config.flags import requested_help, take_flag
from longctx import __version__
from longctx.errors import ConfigError, LongCtxError
from longctx.untrusted.strict_json import shown


@dataclass(frozen=True)
class CliCommand:
    """CLI function with example options."""

    run_command: Callable[..., int | None]
    examples: tuple[str, ...]
    is_over_ranks: bool = False
    """True if the verb's script, which has the same name, also runs over ranks: it then takes --ranks and --hostfile.
    """
    accepts_settings: bool = False
    """True if other flags are a run's settings, passed as ``settings``."""


COMMANDS = {
    "tokenizer train": CliCommand(
        tokenizer_command.train_new_tokenizer, ("--source stdlib --vocab-size 4096 --output runs/tokenizer.model",)
    ),
    "tokenizer show": CliCommand(tokenizer_command.show, ('runs/tokenizer.model --text "def main("',)),
    "data build": CliCommand(
        data_command.build,
        (
            "--source stdlib --tokenizer runs/tokenizer.model --output runs/data",
            "--without 00007.arrow --output runs/data",
            "--kind images --source photos --image-size 32 --output runs/images",
        ),
    ),
    "data inspect": CliCommand(inspect_command.inspect, ("runs/data --seq-len 4096 --row 0",)),
    "data verify": CliCommand(data_command.verify_shards, ("runs/data",)),
    "data pack": CliCommand(data_command.pack_shards, ("runs/data --output s3://bucket/data",)),
    "data plan": CliCommand(
        data_rows.plan_rows, ("--config quickstart", "--config run.toml --ranks 64"), accepts_settings=True
    ),
    "data sample": CliCommand(data_rows.sample_rows, ("runs/data --seq-len 4096 --rows 8 --output rows.txt",)),
    "data practice": CliCommand(
        practice_command.practice,
        (
            "--output runs/recall.jsonl --documents 10000",
            "--output runs/haystack.jsonl --documents 100 --words 500 500 --pairs 0 0",
        ),
    ),
    "train": CliCommand(
        train.train,
        (
            "--config run.toml",
            "--ranks 2 --data.train runs/data --run.output_dir runs/first",
            "--hostfile hostfile --config run.toml --run.resume auto",
        ),
        accepts_settings=True,
    ),
    "verify": CliCommand(
        train.verify_ranks, ("--ranks 2 --config run.toml", "--probe leak --config run.toml"), accepts_settings=True
    ),
    "convert": CliCommand(
        convert_command.convert,
        (
            "--to hf runs/first exported",
            "--to hf runs/first exported --dtype bfloat16 --verify logits",
            "--from hf exported imported",
            "--upcycle 8,2 imported upcycled",
        ),
    ),
    "checkpoint list": CliCommand(
        checkpoint.list_run_checkpoints, ("runs/first", "runs/first --check", "s3://bucket/first")
    ),
    "checkpoint prune": CliCommand(
        checkpoint.prune, ("runs/first --keep-last 2 --keep-every 1000", "runs/first --keep-last 1 --dry-run")
    ),
    "checkpoint export": CliCommand(checkpoint.export, ("runs/first exported --dtype bfloat16",)),
    "checkpoint verify": CliCommand(checkpoint.verify_checkpoints, ("runs/first/checkpoints/step_000100",)),
    "generate": CliCommand(
        generate_command.generate_text,
        (
            '--checkpoint runs/first --prompt "def main(" --max-new-tokens 40',
            "--checkpoint runs/igpt --image boot.png --temperature 1 --samples 4 --output continued.png",
        ),
        is_over_ranks=True,
    ),
    "evaluate": CliCommand(
        evaluate_command.run_evaluation,
        (
            "--checkpoint runs/first --tasks niah,ppl --lengths 512,1024 --output runs/first/evaluation",
            "--checkpoint runs/vit --tasks classes --data runs/fashion-test --output runs/vit/classes",
            "--list",
        ),
        is_over_ranks=True,
    ),
    "score": CliCommand(
        score_command.score_tokens,
        ("--checkpoint runs/first --data runs/data/validation --output runs/scores",),
        is_over_ranks=True,
    ),
    "attention": CliCommand(
        attention_command.attention,
        ("--checkpoint runs/first --text README.md --length 1024 --layer 1 --head 0 --output runs/first/attention",),
    ),
    "plan": CliCommand(
        plan_command.plan,
        (
            "--trace --config llama-3.1-8b-128k --ranks 16",
            "--trace --config quickstart --model.preset llama-3.1-8b --data.seq_len 32768 --zero.stage 2",
        ),
        accepts_settings=True,
    ),
    "measure": CliCommand(
        benchmark_command.benchmark_hardware, ("--output hardware.toml", "--ranks 2 --cpu-time --output two.toml")
    ),
    "doctor": CliCommand(doctor.doctor, ("--folder runs", "--hostfile hostfile")),
    "run": CliCommand(
        run_command.supervise_run,
        (
            "--retries 5 -- longctx train --ranks 2 --config run.toml",
            "-- longctx train --hostfile hostfile --config run.toml --run.resume auto",
        ),
    ),
    "report": CliCommand(report_command.report_runs, ("runs/first", "runs/first runs/second --output comparison.html")),
}

_ALIASES = {"eval": "evaluate", "pretrain": "train"}
"""Verb names from other tools."""

_OVERVIEW = """\
usage: {program} VERB [OPTIONS]

Prepare data, train, manage checkpoints, generate and evaluate.

verbs:
{verbs}

an end-to-end example:
  {program} tokenizer train --source stdlib --vocab-size 4096 --output runs/tokenizer.model
  {program} data build --source stdlib --tokenizer runs/tokenizer.model --output runs/data
  {program} train --data.train runs/data --run.output_dir runs/first
  {program} report runs/first
  {program} generate --checkpoint runs/first --prompt "def main" --max-new-tokens 40
  {program} evaluate --checkpoint runs/first --tasks niah,ppl --lengths 512,1024 --output runs/first/evaluation
  {program} convert --to hf runs/first exported

deepspeed, torchrun and srun can also start training: launcher/pretrain.py, or -m launcher.pretrain.
Exit codes: 0 done, 1 failed with an error message, 2 wrong usage, 75 stopped on request and saved.
`{program} VERB --help` shows a verb's options.
`source <({program} --completion)` completes verbs and options in bash and zsh."""
_OUR_PACKAGES = ("launcher", "parallel", "data_pipeline", "longctx")


def main(argv: Sequence[str] | None = None) -> int:
    """Execute one verb and return its exit code. Never raise for an error that a user can cause."""
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
        code = run_to_exit_code(
            lambda: run_reporting_errors(verb), abort_message="Interrupted. No partial file is left."
        )
    if code == ABORTED and has_abandoned_work():
        # A library still computes in its thread; after Ctrl-C do not wait for it.
        os._exit(code)
    return code


def main_over_ranks(verb: str, argv: Sequence[str]) -> int:
    """Execute a verb on every rank that deepspeed or torchrun started; rank 0 prints. The verb's script calls this."""
    # Deferred: torch is slow to import, and the single-process help must not wait for it.
    from launcher.config.flags import take_flag, without_local_rank
    from parallel.runtime.launched import environment_rank

    rank, _ = environment_rank()
    arguments = without_local_rank(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with ExitStack() as stack:
        nowhere = stack.enter_context(Path(os.devnull).open("w"))
        # Results, help and command line errors are the same on every rank, so only rank 0 prints them.
        if rank != 0:
            stack.enter_context(redirect_stdout(nowhere))
        with ExitStack() as parsing:
            if rank != 0:
                parsing.enter_context(redirect_stderr(nowhere))
            bound = parse([verb, *arguments])
        _, hostfile = take_flag(arguments, "--run.hostfile")
        check_tasks(hostfile or "launcher", arguments, script=f"launcher/{verb}.py")
        with warnings_on_stderr():
            return run_reporting_errors(bound)


def parse(arguments: Sequence[str]) -> Callable[[], int | None]:
    """Parse a command line into a verb with bound options. After printing help or an error, raise SystemExit."""
    arguments = [_ALIASES.get(arguments[0], arguments[0]), *arguments[1:]] if arguments else []
    # Try two words before one: `data verify` is not the verb `data`.
    for length in (2, 1):
        name = " ".join(arguments[:length])
        if name in COMMANDS:
            return _bind(name, arguments[len(name.split()) :])
    # No verb: print help, the version or an error, for the full command or for a group such as `data`.
    group, length = "", 1
    if arguments and _commands_in(arguments[0]):
        group, length = arguments[0], 2
    if arguments[length - 1 : length] in (["-h"], ["--help"]):
        print_line(overview(group))
        raise SystemExit(DONE)
    if arguments == ["--version"]:
        print_line(f"longctx {__version__}")
        raise SystemExit(DONE)
    if arguments == ["--completion"]:
        print_line(completion_script({name: _flags_of(name) for name in COMMANDS}))
        raise SystemExit(DONE)
    _complain_of_verb(group, " ".join(arguments[:length]))


def overview(group: str = "") -> str:
    """Return help for the full command, or for the verbs in ``group``."""
    rows = [[f"  {name}", (COMMANDS[name].run_command.__doc__ or "").splitlines()[0]] for name in _commands_in(group)]
    listing = "\n".join(table(["", ""], rows).splitlines()[1:])
    if group:
        return f"usage: {program()} {group} VERB [OPTIONS]\n\nverbs:\n{listing}"
    return _OVERVIEW.format(program=program(), verbs=listing)


def _flags_of(name: str) -> list[str]:
    """List the options in a verb's help, and the settings it takes."""
    # The help lists exactly the flags that tyro accepts.
    with redirect_stdout(io.StringIO()) as out, suppress(SystemExit):
        _bind(name, ["--help"])
    found = re.findall(r"^\W*(--[a-z][\w.-]*)", out.getvalue(), re.M)
    if COMMANDS[name].is_over_ranks:
        found += ["--ranks", "--hostfile"]
    if name == "verify":
        found.append("--probe")
    if COMMANDS[name].accepts_settings:
        from launcher.config.load_config import known_keys

        found += [f"--{key}" for key in known_keys()]
    return list(dict.fromkeys(found))


def _commands_in(group: str) -> list[str]:
    """Return the two-word verbs in ``group``; all verbs if it is empty."""
    return [name for name in COMMANDS if not group or name.startswith(f"{group} ")]


def _bind(name: str, arguments: Sequence[str]) -> Callable[[], int | None]:
    """Return the verb with its options bound. After printing its help or an error, raise SystemExit."""
    verb = COMMANDS[name]

    # tyro calls the function it parses for. This one only binds: the verb must run later, outside the handling of usage
    # errors.
    @functools.wraps(verb.run_command)
    def bound(*positional, **options) -> functools.partial[int | None]:
        return functools.partial(verb.run_command, *positional, **options)

    called = f"{program()} {name}"
    if verb.is_over_ranks and "RANK" not in os.environ:
        try:
            rest, ranks = take_flag(list(arguments), "--ranks")
            rest, hostfile = take_flag(rest, "--hostfile")
            count = _number("--ranks", ranks)
        except ConfigError as error:
            _complain(called, str(error), "shows its options, with an example.")
        if ranks is not None or hostfile is not None:
            # Report usage errors here, once, before any rank starts.
            _bind(name, rest)
            return functools.partial(train.start, name, f"{name}.py", rest, ranks=count, hostfile=hostfile or "")
    # tyro wraps its messages, which would split a long path to Python, so only the help shows it.
    prog = name
    if {"-h", "--help"} & set(arguments):
        prog = called
    help_key = requested_help(list(arguments))
    if verb.accepts_settings and help_key:
        from launcher.config.load_config import load_run_config

        settings = ["--help", help_key]
        if (config := _config_of(arguments)) is not None:
            settings += ["--config", config]

        def print_help() -> None:
            load_run_config(settings)

        return functools.partial(print_help)
    markers = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            if not verb.accepts_settings:
                return tyro.cli(bound, prog=prog, args=arguments, config=markers)
            call, settings = tyro.cli(bound, prog=prog, args=arguments, config=markers, return_unknown_args=True)
            # Arguments that are not options of the verb are settings, validated when all settings are read.
            return functools.partial(call.func, **{**call.keywords, "settings": tuple(settings)})
    except SystemExit as end:
        if not end.code:
            # tyro has printed the verb's help.
            if verb.accepts_settings:
                from launcher.config.help import first_settings
                from launcher.config.load_config import load_run_config

                print_line(f"{first_settings(load_run_config([]))}\n")
            print_line("examples:")
            for example in verb.examples:
                print_line(f"  {called} {example}")
            raise
        message = unframed(complaint.getvalue()).replace(f" from {name}", "")
        _complain(called, message, "shows its options, with an example.")


def _config_of(arguments: Sequence[str]) -> str | None:
    """Return the file or recipe given by ``--config``, or None."""
    named = [arguments[at + 1] for at, word in enumerate(arguments[:-1]) if word == "--config"]
    named += [word.partition("=")[2] for word in arguments if word.startswith("--config=")]
    return next(iter(named), None)


def _number(flag: str, value: str | None) -> int:
    """Parse a flag's value; 0 if unset. Raise ConfigError unless it is a number."""
    if value is None:
        return 0
    if not value.isdecimal():
        raise ConfigError(f"{flag} {shown(value)} must be a number.")
    return int(value)


def _complain_of_verb(group: str, given: str) -> NoReturn:
    """Report a missing or unknown verb and list the known ones."""
    known = _commands_in(group)
    close = difflib.get_close_matches(given, known, cutoff=0.5)
    if given == group:
        complaint = f"a verb is missing. The verbs are {', '.join(known)}."
    elif close:
        complaint = f"unknown verb {given!r}. Did you mean {' or '.join(close)}?"
    else:
        complaint = f"unknown verb {given!r}. The verbs are {', '.join(known)}."
    _complain(f"{program()} {group}".rstrip(), complaint, "describes them.")


def _complain(called: str, complaint: str, offer: str) -> NoReturn:
    """Report a command line error and exit with the usage error code."""
    note(f"{called}: {complaint}\n`{called} --help` {offer}")
    raise SystemExit(USAGE_ERROR)


def run_reporting_errors(verb: Callable[[], int | None]) -> int:
    """Execute a verb; turn a missing package or a file system error into a short LongCtxError."""
    try:
        return verb() or DONE
    except ModuleNotFoundError as error:
        # A missing module in our own packages is a bug and keeps its traceback.
        if (error.name or "").partition(".")[0] in _OUR_PACKAGES:
            raise
        raise LongCtxError(
            f"{error.name} is not installed for {sys.executable}.\nTry: pip install longctx-train, or in a checkout "
            "`make setup` and .venv/bin/python."
        ) from error
    except OSError as error:
        # Without a file name it is no user mistake, so keep the traceback.
        if error.filename is None:
            raise
        raise LongCtxError(f"{error.filename}: {error.strerror}.") from error
