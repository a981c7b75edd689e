"""Messages between ranks that travel as late as they may: when somebody waits for them.

What is sent late must still be there and unchanged, and what is read early has not arrived: memory that is freed before
its message has left, and memory that a message is to fill, hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.late_copies import NOTHING, Borrowed


class _Message:
    """Memory that a message reads, or fills."""

    def __init__(self, x: Tensor, *, fills: bool) -> None:
        if fills:
            x.view(-1).view(torch.uint8).fill_(NOTHING)
        self._x, self._like, self._fills = Borrowed(x), torch.empty_like(x, device="meta"), fills

    def memory(self) -> Tensor:
        """It, when the message travels."""
        x = self._x.tensor()
        if x is not None:
            return x
        assert not self._fills, "a message fills memory that is somebody else's"
        freed = torch.empty_like(self._like, device="cpu")
        freed.view(-1).view(torch.uint8).fill_(NOTHING)
        return freed


class _Work:
    """A handle; several may be of one exchange, which the first wait carries out."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run, self.is_done = run, False

    def wait(self) -> None:
        if not self.is_done:
            self.is_done = True
            self.run()


@contextmanager
def late_messages() -> Iterator[None]:
    """Carry messages out when they are waited for. AssertionError if some are waited for by nobody."""
    works: list[_Work] = []
    exchange, gather, all_to_all = dist.batch_isend_irecv, dist.all_gather_into_tensor, dist.all_to_all_single

    def started(run: Callable[[], Any]) -> _Work:
        works.append(_Work(run))
        return works[-1]

    def late_exchange(ops: Sequence[dist.P2POp]) -> list[_Work]:
        messages = [_Message(op.tensor, fills=op.op is dist.irecv) for op in ops]
        ends = [(op.op, op.peer, op.group, op.tag) for op in ops]

        def run() -> None:
            pairs = zip(messages, ends, strict=True)
            again = [dist.P2POp(op, one.memory(), peer, group, tag) for one, (op, peer, group, tag) in pairs]
            for work in exchange(again):
                work.wait()

        return [started(run)]

    def late_collective(collective: Callable) -> Callable:
        def start(received: Tensor, sent: Tensor, *args: Any, async_op: bool = False, **options: Any) -> Any:
            if not async_op:
                return collective(received, sent, *args, **options)
            messages = _Message(received, fills=True), _Message(sent, fills=False)
            return started(lambda: collective(*(one.memory() for one in messages), *args, **options))

        return start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", late_exchange)
        patch.setattr(dist, "all_gather_into_tensor", late_collective(gather))
        patch.setattr(dist, "all_to_all_single", late_collective(all_to_all))
        yield
    assert all(work.is_done for work in works), "a message is waited for by nobody"
