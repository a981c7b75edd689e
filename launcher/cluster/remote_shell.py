"""Check the command line that ``deepspeed`` passes to shells on other machines, before it is started.

Over several hosts ``deepspeed`` joins the full line with spaces and gives it to ``pdsh``, which gives it to a shell on
every host: the working directory, the exported variables, the script and its arguments, all unquoted (0.19.8,
``multinode_runner.py``; an argument with a space is put in double quotes, in which ``$(…)`` still runs). On one machine
it starts ranks without a shell. Text that a shell would not read literally is therefore rejected here, and input from
files is parsed strictly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.cluster.hostfile import DEFAULT_HOSTFILE, check_host_name, read_hostfile
from longctx.errors import ConfigError
from longctx.untrusted.strict_json import read_bounded, shown

# No tilde or brace, which a shell may expand, and no "%", which pdsh expands.
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_PLAIN_WORDS = re.compile(r"[A-Za-z0-9_@+=:,./ -]+")
_REFERENCE = r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})"
# A variable's value: plain characters, $NAME or ${NAME}, and quoted text. Command substitution is excluded, as is %.
_VALUE = re.compile(
    rf"""(?:[A-Za-z0-9_@+=:,./-]|{_REFERENCE}|'[^'%\x00-\x1f]*'|"(?:[^"%`$\\\x00-\x1f]|{_REFERENCE})*")*""", re.ASCII
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "NEBULA")
"""Name prefixes of variables that ``deepspeed`` exports to other machines."""
_MOST_BYTES = 2**20
_VALIDATED_OPTIONS = {
    "--master_addr": "the name or address of a host",
    "--master_port": "a number",
    "--ssh_port": "a number",
    "--include": "hosts and slots, such as node-01@node-02:0,2",
    "-i": "hosts and slots, such as node-01@node-02:0,2",
    "--exclude": "hosts and slots, such as node-01@node-02:0,2",
    "-e": "hosts and slots, such as node-01@node-02:0,2",
    "--venv_script": "a path",
    "--launcher_args": "options of pdsh",
}
"""``deepspeed`` options with values that a shell or ssh reads, and each value's expected form."""


def check_deepspeed_line(launch_words: Sequence[str], arguments: Sequence[str]) -> None:
    """Check a line that starts with ``deepspeed``: hosts, environment files, and text that a shell would read.

    ``launch_words`` is everything up to and including the script; ``arguments`` are the script's. Other launchers are
    not checked: torchrun and srun start ranks without a shell.

    Raise ClusterError for an unusable hostfile, and ConfigError for text that a remote shell would not read literally.
    Call this before any process is started.
    """
    if not any(Path(word).name in ("deepspeed", "ds") or word == "deepspeed.launcher.runner" for word in launch_words):
        return
    options = _options(launch_words)
    hostfile = options.get("--hostfile", options.get("-H"))
    if hostfile is None and DEFAULT_HOSTFILE.is_file():
        hostfile = str(DEFAULT_HOSTFILE)
    hosts = 1
    if hostfile is not None:
        hosts = len(read_hostfile(Path(hostfile)))
    for option, expected in _VALIDATED_OPTIONS.items():
        _check_option(option, options.get(option), expected)
    # With one host deepspeed uses no shell, unless --force_multi, or a prefix of it, is given.
    if hosts == 1 and not any(len(word) > 2 and "--force_multi".startswith(word) for word in launch_words):
        return
    for path in environment_files():
        check_environment_file(path)
    for name, value in os.environ.items():
        if name.startswith(_EXPORTED) and not _VALUE.fullmatch(value):
            raise _unsafe_text_error(f"the value of the variable {name}", "Change it, or unset it.")
    _check_plain(str(Path.cwd()), "the working directory", "Start from a folder without them.", _PLAIN)
    _check_plain(launch_words[-1], "the script", "Give its path without them.", _PLAIN)
    for word in arguments:
        # deepspeed puts an argument with a space into double quotes.
        hint = "Put the value into the --config file, which no shell reads."
        _check_plain(word, "the argument", hint, _PLAIN_WORDS)


def environment_files(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the files with ``KEY=VALUE`` lines that deepspeed reads, in its order: later ones win."""
    name = environment.get("DS_ENV_FILE", ".deepspeed_env")
    found: list[Path] = []
    for folder in (Path.home(), Path.cwd()):
        path = folder / name
        if path.is_file() and path not in found:
            found.append(path)
    return found


def check_environment_file(path: Path) -> None:
    """Raise ConfigError unless each line in a file is ``KEY=VALUE`` with a value in which a shell runs no command."""
    try:
        text = read_bounded(path, _MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    for number, line in enumerate(text.splitlines(), 1):
        check_assignment(line, f"{path}:{number}")


def check_assignment(line: str, where: str) -> None:
    """Raise ConfigError unless a line is ``KEY=VALUE`` with a value in which a shell runs no command."""
    name, equals, value = line.strip().partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where} is not KEY=VALUE.\n"
            "deepspeed reads every line as an assignment: remove empty lines, comments and `export`."
        )
    if not _VALUE.fullmatch(value):
        # Do not show the value: it may be a secret.
        raise _unsafe_text_error(
            f"{where}: the value of {name}",
            "A value may be in single quotes, and may contain variables, as in PATH=/opt/bin:$PATH.",
        )


def _options(launch_words: Sequence[str]) -> dict[str, str]:
    """Parse the starter's checked options and their values: after a space, after a ``=``, or ``-Hvalue``.

    As in Python's argparse, a prefix stands for the full option name.
    """
    found: dict[str, str] = {}
    for word, next_word in zip(launch_words, [*launch_words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        for name in ("--hostfile", "-H", *_VALIDATED_OPTIONS):
            if name.startswith("--") and len(flag) > 2 and name.startswith(flag):
                found[name] = value if equals else next_word
            elif not name.startswith("--") and word.startswith(name):
                found[name] = word.removeprefix(name).removeprefix("=") or next_word
    return found


def _check_option(option: str, value: str | None, expected: str) -> None:
    if value is None:
        return
    if option == "--master_addr" and ":" not in value:
        check_host_name(value)
    # ssh and pdsh would read a host that begins with a dash as an option.
    is_host = expected.startswith("hosts")
    if not _PLAIN_WORDS.fullmatch(value) or (is_host and re.search(r"(^|[@,:])-", value)):
        raise ConfigError(f"{option} {shown(value)} must be {expected}.")


def _check_plain(word: str, subject: str, hint: str, rule: re.Pattern[str]) -> None:
    if not rule.fullmatch(word):
        raise _unsafe_text_error(f"{subject} {shown(word)}", hint)


def _unsafe_text_error(subject: str, hint: str) -> ConfigError:
    return ConfigError(
        f"{subject} contains characters that a shell does not read literally. With several hosts, deepspeed passes "
        f"the full command line to a shell on each.\n{hint}"
    )
