"""All workers, asked at the same time; those that do not answer are noted, and not waited for again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from launcher.doctor.network.session import Session
from longctx.errors import ClusterError

T = TypeVar("T")
Order = dict[str, Any]
"""One JSON object; ``do`` in it says what is to be done."""


class Panel:
    """The workers of all hosts, by name."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        """Workers that have been started."""
        self._sessions = {session.name: session for session in sessions}
        self.silent: dict[str, str] = {}
        """Of the hosts without an answer, why."""

    def ask(self, orders: Mapping[str, Order], seconds: float, read: Callable[[dict[str, Any]], T]) -> dict[str, T]:
        """What hosts answer to their orders, all at the same time. One without an answer is silent from then on."""

        def ask(name: str) -> T | ClusterError:
            try:
                return read(self._sessions[name].ask(seconds, **orders[name]))
            except ClusterError as error:
                return error

        # A host that did not answer once is not waited for again.
        names = [name for name in orders if name not in self.silent]
        answers: dict[str, T] = {}
        # All at once, however many there are: ranks of NCCL wait for one another.
        with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
            for name, answer in zip(names, pool.map(ask, names), strict=True):
                if isinstance(answer, ClusterError):
                    self.silent[name] = str(answer)
                else:
                    answers[name] = answer
        return answers
