"""Run all contenders over one corpus in turns, so that other load on the machine affects all of them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.delivering.contender import Contender
from benchmarks.delivering.contenders import COPY, HERE
from benchmarks.delivering.peers import PEERS

ROOT = Path(__file__).parents[2]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
"""Python with the other projects, unless they are installed with this one."""
PATIENCE_SECONDS = 1200.0
MOST_SECONDS = 0.25
"""Maximum CPU seconds per turn: a slow contender does not deliver the full corpus."""


class Seat:
    """A contender's process, from the parent's side."""

    def __init__(self, contender: Contender, corpus: Path) -> None:
        self.contender = contender
        python = sys.executable
        if contender in PEERS and PEERS_PYTHON.exists():
            python = str(PEERS_PYTHON)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.delivering.worker", contender.name, str(corpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment,
            text=True,
        )
        answer = self._answer()
        self.problem = ""
        """Reason for not taking part; empty if it does."""
        if answer.get("missing"):
            self.problem = f"{answer['missing']} is not installed"
        elif "error" in answer:
            self.problem = answer["error"]

    def ask(self, what: str, **of: Any) -> dict[str, Any]:
        """Send an order and return the answer; {} for a contender that no longer takes part."""
        if self.problem:
            return {}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **of}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            self.problem = answer["error"]
            print(f"{self.contender.name}: {self.problem}\n{self._last_words()}", flush=True)
            return {}
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_SECONDS)
        if not ready:
            return {"error": f"no answer in {PATIENCE_SECONDS:.0f} s"}
        line = self._process.stdout.readline()
        if not line:
            return {"error": f"it ended with code {self._process.wait()}"}
        return json.loads(line)

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")[-2000:]


def compete(
    corpus: Path, seq_lens: Sequence[int], tokens: int, rounds: int, contenders: Sequence[Contender] = (*HERE, *PEERS)
) -> list[dict[str, Any]]:
    """Return a row per contender and row length: the best time over rounds, and the maximum memory.

    A turn is an epoch of ``tokens``, or ``MOST_SECONDS`` if that is less.
    """
    seats = [Seat(contender, corpus) for contender in contenders]
    try:
        rows = []
        with tempfile.TemporaryDirectory(prefix="longctx-contest-") as folder:
            for seq_len in seq_lens:
                rows += _compete_at(seats, Path(folder) / str(seq_len), seq_len, tokens, rounds)
    finally:
        for seat in seats:
            seat.close()
    return rows


def _compete_at(seats: Sequence[Seat], folder: Path, seq_len: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Measure rows of one length."""
    own = {seat.contender.name: str(folder / str(number)) for number, seat in enumerate(seats)}
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in own}
    for seat in seats:
        seat.ask("prepare", own=own[seat.contender.name], seq_len=seq_len)
    for _ in range(rounds):
        for seat in seats:
            name = seat.contender.name
            turn = seat.ask("measure", own=own[name], seq_len=seq_len, most_tokens=tokens, most_seconds=MOST_SECONDS)
            if turn:
                turns[name].append(turn)
    for seat in seats:
        seat.ask("drop", own=own[seat.contender.name])
    rows = []
    for seat in seats:
        rows.append(_row(seat, seq_len, turns[seat.contender.name]))
    _add_shares(rows)
    for row in rows:
        print({name: value for name, value in row.items() if name not in ("gives", "cuts")}, flush=True)
    return rows


def _row(seat: Seat, seq_len: int, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a contender's results as a row."""
    contender = seat.contender
    row: dict[str, Any] = {"seq_len": seq_len, "contender": contender.name, "gives": contender.gives}
    row |= {"cuts": contender.cuts, "problem": seat.problem}
    if turns and not seat.problem:
        row |= {
            "mtokens_a_cpu_second": round(max(turn["tokens"] / turn["cpu_seconds"] for turn in turns) / 1e6, 1),
            "first_row_cpu_ms": round(1000 * min(turn["first_cpu_seconds"] for turn in turns), 2),
            "memory_mb": round(max(turn["memory_bytes"] for turn in turns) / 1e6, 1),
            "state_bytes": max(turn["state_bytes"] for turn in turns),
        }
    return row


def _add_shares(rows: list[dict[str, Any]]) -> None:
    """Add each contender's rate as a fraction of a bare copy's."""
    rates = {row["contender"]: row.get("mtokens_a_cpu_second") for row in rows}
    floor = rates.get(COPY)
    for row in rows:
        if floor and "mtokens_a_cpu_second" in row:
            row["share"] = round(row["mtokens_a_cpu_second"] / floor, 3)
