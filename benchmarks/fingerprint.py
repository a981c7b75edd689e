"""One line for each result that holds numbers, to compare two states of the code: what must a refactoring not change?

    cd STATE && .venv/bin/python /path/to/benchmarks/fingerprint.py [--quick] [--work DIR] [--only PREFIX] > STATE.txt
    python benchmarks/fingerprint.py --compare A.txt B.txt

Each line is ``name  sha256-prefix  value``: the hash is of exact bits, the value is for readers. ``--compare`` prints
the lines that differ and exits with 1 if there are any. The current directory is the code that is measured; this file
and its siblings may lie in another checkout. Only commands and documented Python names are used, so one script
measures any arrangement of files and folders. Lines that start with ``#`` tell the machine and are not compared:
hashes agree on one machine with one version of torch, hardly on two.

Covered: tokenizer, shards and loader; runs of a few steps over 2 and 4 ranks (ZeRO stages, layouts, transports,
Ulysses, experts, kinds of layers, dtypes, resumed and started from another) with their metrics and checkpoints;
conversion both ways; logits and gradients of every model and preset in one process; attention across ranks; schedules;
greedy generation. Not covered: timings, memory, the words of logs and reports, CUDA.

All processes are forked from one that has imported torch and DeepSpeed and run no tensor operation; each has one
thread. A result that cannot be computed is a line with FAILED, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import pkgutil
import platform
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

PACKAGES = ("longctx", "parallel", "data_pipeline", "launcher")
PRELOADED = (
    *("torch", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.utils.tensorboard"),
    *("deepspeed.module_inject", "deepspeed.runtime.zero.muon.muon_optimizer", "matplotlib.pyplot", "transformers"),
)
"""What every process would otherwise import anew, seconds in each."""
SLOTS = 2
"""Processes that compute at the same time, unless one job alone has more."""
TIMEOUT_SECONDS = 400.0
_FAILED = "FAILED"


def _sibling(name: str) -> ModuleType:
    """A module beside this file, whatever the current directory is."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).resolve().with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, kw_only=True)
class Job:
    """A function of ``fingerprint_checks`` with its arguments, on so many forked ranks."""

    name: str
    function: Callable[..., list[Any]]
    phase: int
    """Jobs of a phase begin when those of the one before have ended."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    local_size: int | None = None
    """Ranks of one machine, where these are to be several."""


def main() -> int:
    """Compute and print all lines, or compare two files of them."""
    options = _parse()
    if options.compare:
        return compare(*options.compare)
    state = Path.cwd()
    if not (state / "longctx").is_dir():
        sys.exit(f"fingerprint: {state} has no longctx/. Change into the checkout that is to be measured.")
    sys.path[0] = str(state)
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    started = time.monotonic()
    work = Path(options.work or tempfile.mkdtemp(prefix="fingerprint-")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    if any(work.iterdir()):
        sys.exit(f"fingerprint: --work {work} is not empty. Name an empty folder.")
    try:
        preload(state)
        failed = _print_results(plan(quick=options.quick, only=options.only), work)
    finally:
        if not options.work:
            shutil.rmtree(work, ignore_errors=True)
    _note(f"{time.monotonic() - started:.0f} s")
    return int(failed)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", metavar="DIR", help="empty folder for runs and logs, kept (default: a temporary one)")
    parser.add_argument("--quick", action="store_true", help="fewer cases, in half the time")
    parser.add_argument(
        "--only",
        metavar="PREFIX",
        default="",
        help="jobs whose name begins so (train/four, attend, ...), and those that they may need",
    )
    parser.add_argument("--compare", nargs=2, metavar=("A.txt", "B.txt"), help="print the lines that differ")
    return parser.parse_args()


def _print_results(jobs: Sequence[Job], work: Path) -> bool:
    """Print each job's lines in the jobs' order; whether one failed."""
    import torch

    print(f"# python {platform.python_version()}, torch {torch.__version__}, {_processor()}")
    failed = False
    for line in run_jobs(jobs, work):
        failed |= line[1] == _FAILED
        print(f"{line[0]:<64}  {line[1][:16]:<16}  {line[2]}", flush=True)
    return failed


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# What is computed.


def plan(*, quick: bool, only: str) -> list[Job]:
    """All jobs; with ``quick`` those that find most."""
    cases, checks = _sibling("fingerprint_cases"), _sibling("fingerprint_checks")
    attention = _sibling("fingerprint_attention")  # imports from the one before
    data = Job(name="data", function=checks.build_data, phase=0)
    jobs = [
        *_training_jobs(cases, checks, quick=quick),
        Job(name="loader", function=checks.load_batches, phase=1),
        *_attention_jobs(cases, attention, quick=quick),
        *_model_jobs(cases, checks, quick=quick),
    ]
    wanted = [job for job in jobs if job.name.startswith(only)]
    last = max((job.phase for job in wanted), default=0)
    needed = [job for job in jobs if job.function is checks.train and job.phase < last]
    return [data, *(job for job in jobs if job in wanted or job in needed)]


def _training_jobs(cases: ModuleType, checks: ModuleType, *, quick: bool) -> Iterator[Job]:
    for phase, runs in ((1, cases.RUNS), (2, cases.LATER_RUNS)):
        for name, changes in runs.items():
            if quick and name not in cases.QUICK_RUNS:
                continue
            yield Job(
                name=f"train/{name}",
                function=checks.train,
                phase=phase,
                arguments={"name": name, "settings": run_settings(cases, changes)},
                ranks=changes.get("ranks", 2),
                local_size=changes.get("local_size"),
            )
    for name in cases.EXPORTED[: 1 if quick else None]:
        arguments = {"name": name, "generates": name == cases.EXPORTED[0]}
        yield Job(name=f"export/{name}", function=checks.export_run, phase=2, arguments=arguments)


def run_settings(cases: ModuleType, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The whole config of a run."""
    settings: dict[str, Any] = {"model": {"preset": "quickstart-dense", **cases.BASE, **changes["model"]}}
    # A run that starts from a checkpoint has its model, but for what changes; older states wanted all of it typed.
    if "start_from" in changes.get("run", {}) and Path("launcher/config/model.py").exists():
        settings["model"] = dict(changes["model"])
    for section, values in cases.TRAINING.items():
        settings[section] = {**values, **changes.get(section, {})}
    settings["run"]["output_dir"] = "{folder}"
    settings["data"]["train"] = "{runs}/../data"
    known = {
        key.name for key in fields(get_type_hints(importlib.import_module("launcher.config").RunConfig)["parallel"])
    }
    settings["parallel"] = {
        key if key in known else cases.OLD_NAMES.get(key, key): value for key, value in settings["parallel"].items()
    }
    return settings


def _attention_jobs(cases: ModuleType, attention: ModuleType, *, quick: bool) -> Iterator[Job]:
    degrees = (4,) if quick else (2, 4, 8)
    yield Job(
        name="schedule", function=attention.schedules, phase=1, arguments={"degrees": degrees, "masks": cases.MASKS}
    )
    spreads = ((2, 1, None), (4, 2, None)) if quick else ((2, 1, None), (2, 2, None), (4, 1, 2), (4, 2, None))
    for ranks, ulysses, ranks_per_node in spreads:
        yield Job(
            name=f"attend/ranks{ranks}-ulysses{ulysses}",
            function=attention.attend_across,
            phase=1,
            arguments={
                "cases": _attention_cases(cases, two_level=ranks_per_node is not None),
                "ulysses": ulysses,
                "ranks_per_node": ranks_per_node,
                "tokens": cases.NUM_TOKENS,
            },
            ranks=ranks,
        )


def _attention_cases(cases: ModuleType, *, two_level: bool) -> list[dict[str, Any]]:
    """Layouts × masks × documents × transports in float32, and a few in other dtypes."""
    found = []
    transports = ("p2p", "all_gather", "two_level") if two_level else ("p2p", "all_gather")
    for layout in cases.LAYOUTS:
        for mask, options in cases.MASKS.items():
            common = {"layout": layout, "mask": options}
            for documents, bounds in cases.DOCUMENTS.items():
                for transport in transports:
                    name = f"{layout}/{mask}/{documents}/{transport}"
                    more = {"bounds": bounds, "transport": transport, "dtype": "float32", "kernel": "auto"}
                    found.append({"name": name, **common, **more})
            for dtype, kernel in (("bfloat16", "auto"), ("float64", "blockwise")):
                more = {"bounds": cases.DOCUMENTS["packed"], "transport": "p2p", "dtype": dtype, "kernel": kernel}
                found.append({"name": f"{layout}/{mask}/packed/p2p/{dtype}", **common, **more})
    return found


def _model_jobs(cases: ModuleType, checks: ModuleType, *, quick: bool) -> Iterator[Job]:
    names = cases.QUICK_MODELS if quick else tuple(cases.MODELS)
    models = {name: {**cases.BASE, "vocab_size": 97, **cases.MODELS[name]} for name in names}
    dtypes = ("float32",) if quick else ("float32", "bfloat16", "float64")
    arguments = {"models": models, "dtypes": dtypes, "presets": True}
    yield Job(name="decoder", function=checks.decode, phase=1, arguments=arguments)
    yield Job(name="generate", function=checks.generate_ids, phase=1, arguments={"models": models})
    families = {n: s for n, s in cases.FAMILIES.items() if not quick or n in cases.QUICK_FAMILIES}
    yield Job(name="family", function=checks.convert_families, phase=1, arguments={"families": families})


# Processes.


def preload(state: Path) -> None:
    """Import what the processes need; the project's packages must be those of ``state``."""
    for name in PRELOADED:
        _try_import(name)
    for name in PACKAGES:
        package = importlib.import_module(name)
        if not str(package.__file__).startswith(f"{state}{os.sep}"):
            sys.exit(f"fingerprint: {name} comes from {package.__file__}, not from {state}.")
        for module in pkgutil.walk_packages(package.__path__, f"{name}.", onerror=lambda _: None):
            if not module.name.endswith("__main__"):
                _try_import(module.name)


def _try_import(name: str) -> None:
    """Import a module, to save time alone: GPU kernels are not everywhere, and who needs a broken one will say so."""
    try:
        importlib.import_module(name)
    except Exception as error:
        _note(f"not imported beforehand: {name} ({error})")


def run_jobs(jobs: Sequence[Job], work: Path) -> Iterator[Any]:
    """The lines of all jobs, in order; a failed job is one line that says so."""
    for phase in sorted({job.phase for job in jobs}):
        waiting = [job for job in jobs if job.phase == phase]
        running: dict[str, _Running] = {}
        shown = list(waiting)
        ended: dict[str, list[Any]] = {}
        while shown:
            while waiting and _fits(waiting[0], running):
                job = waiting.pop(0)
                running[job.name] = _Running(job, work)
            for name, started in list(running.items()):
                if started.has_ended():
                    ended[name] = started.lines()
                    _note(f"{name}: {time.monotonic() - started.began:.1f} s")
                    del running[name]
            while shown and shown[0].name in ended:
                yield from ended.pop(shown.pop(0).name)
            time.sleep(0.02)


def _fits(job: Job, running: Mapping[str, _Running]) -> bool:
    return not running or sum(r.job.ranks for r in running.values()) + job.ranks <= SLOTS


class _Running:
    """The forked ranks of a job."""

    def __init__(self, job: Job, work: Path) -> None:
        self.job, self._work, self.began = job, work, time.monotonic()
        self._deadline = self.began + TIMEOUT_SECONDS
        self._folder = work / "jobs" / job.name.replace("/", "-")
        self._folder.mkdir(parents=True)
        self._failed = False
        port = _free_port()
        sys.stdout.flush()
        self._children = [self._fork(rank, port) for rank in range(job.ranks)]

    def has_ended(self) -> bool:
        """Whether all ranks are gone; the others are killed a while after one failed, or when time is up."""
        for child in list(self._children):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                self._children.remove(child)
                if status and not self._failed:
                    self._failed, self._deadline = True, time.monotonic() + 5
        if self._children and time.monotonic() > self._deadline:
            self._failed = True
            for child in self._children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            self._children.clear()
        return not self._children

    def lines(self) -> list[Any]:
        """What rank 0 returned."""
        if not self._failed:
            return json.loads((self._folder / "lines.json").read_text())
        said = [path.read_text().strip() for path in sorted(self._folder.glob("failed.*"))]
        for text in said:
            _note(f"{self.job.name}: {text}")
        return [[self.job.name, _FAILED, said[0].splitlines()[-1] if said else "killed, or out of time"]]

    def _fork(self, rank: int, port: int) -> int:
        child = os.fork()
        if child:
            return child
        try:
            self._compute(rank, port)
        except BaseException:
            (self._folder / f"failed.{rank}").write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)

    def _compute(self, rank: int, port: int) -> None:
        import torch

        torch.set_num_threads(1)
        log = os.open(self._folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if self.job.ranks > 1:
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.job.ranks, "MASTER_PORT": port}
            ranks["LOCAL_SIZE"] = self.job.local_size or self.job.ranks
            os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1")
        lines = self.job.function(self._work, **self.job.arguments)
        if rank == 0:
            (self._folder / "lines.json").write_text(json.dumps(lines))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# Comparison.


def compare(first: str, second: str) -> int:
    """Print what differs between two outputs; 1 if anything does, or if there is nothing to compare."""
    old, new = (_read(Path(path)) for path in (first, second))
    names = list(dict.fromkeys((*old, *new)))
    different = [name for name in names if old.get(name, ("", ""))[0] != new.get(name, ("", ""))[0]]
    for name in different:
        for sign, found in (("-", old), ("+", new)):
            if name in found:
                print(f"{sign} {name}  {'  '.join(found[name])}")
    print(f"{len(names) - len(different)} lines are equal, {len(different)} differ.")
    return int(bool(different) or not names)


def _read(path: Path) -> dict[str, tuple[str, str]]:
    """Hash and value by name."""
    rows = [line.split(None, 2) for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {row[0]: (row[1], row[2] if len(row) > 2 else "") for row in rows}


if __name__ == "__main__":
    sys.exit(main())
