"""Ranks that are forked by a process which has imported what they need: a tenth of the time of starting each anew.

``python forked.py`` reads one request a line: ranks, script, arguments, environment, a file for what they write, and
seconds. It answers each with the ranks' exit codes and the time at which the last one ended.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

PRELOADED = ("torch._dynamo", "deepspeed.module_inject", "launcher.training.trainer", "launcher.run_folder")


def be_rank(request: dict, rank: int) -> None:
    """Run the script as this rank; never returns."""
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(request["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    spec = importlib.util.spec_from_file_location("accident", Path(__file__).with_name("sitecustomize.py"))
    accident = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(accident)
    # What is imported already is broken now, in the place of at its import.
    for finder in [finder for finder in sys.meta_path if isinstance(finder, accident.AfterImport)]:
        if finder.module in sys.modules:
            sys.meta_path.remove(finder)
            finder.act(sys.modules[finder.module])
    sys.argv = [request["script"], *request["arguments"]]
    code = 1
    try:
        runpy.run_path(request["script"], run_name="__main__")
        code = 0
    except SystemExit as ending:
        code = ending.code or 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def lead(request: dict) -> dict:
    """Fork the ranks and wait for their end."""
    children = {}
    for rank in range(request["ranks"]):
        child = os.fork()
        if child == 0:
            be_rank(request, rank)
        children[child] = rank
    codes, ended = [None] * request["ranks"], time.time()
    deadline = time.monotonic() + request["seconds"]
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            ended = time.time()
            codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            for child in children:
                os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.005)
    return {"codes": codes, "ended": ended}


def main() -> None:
    """Answer requests until standard input ends."""
    for module in PRELOADED:
        importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(lead(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
