"""The thread that prepares a step's rows while the step before is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from data_pipeline.loader import LocalMicroBatch
from data_pipeline.rows.row_batches import Place, Share
from launcher.training import step_prefetch as feed_module
from launcher.training.step_prefetch import StepPrefetcher
from longctx.batch import PackedDocuments
from longctx.compact_batch import CompactBatch, TokenSpan
from longctx.errors import DataError

WAIT = 30.0
"""Seconds that a test waits for what must happen."""


class NumberedLoader:
    """Rows that hold their own number; what is asked of it is recorded, and it can be held up or fail."""

    micro_batches_per_step = 2

    def __init__(self, fail_at: int | None = None) -> None:
        self.asked, self.fail_at = 0, fail_at
        self.prepared = [threading.Event() for _ in range(10)]
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[str] = set()

    @property
    def tokens_consumed(self) -> int:
        return 4 * (self.asked // 2)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": 2 * (self.asked // 2)}

    def claim(self) -> Callable[[Place], LocalMicroBatch]:
        self.asked += 1
        return partial(self.read, self.asked - 1)

    def read(self, number: int, place: Place) -> LocalMicroBatch:
        assert self.gate.wait(WAIT)
        self.threads.add(threading.current_thread().name)
        if number == self.fail_at:
            raise DataError(f"row {number} cannot be read")
        ids = torch.full((3,), number, dtype=torch.int32)
        if number % 2 == 1:
            self.prepared[number // 2].set()
        documents = PackedDocuments.of_rows(1, 2)
        share = place(documents)
        assert share.documents == documents
        batch = CompactBatch(
            ids=ids,
            spans=torch.tensor([TokenSpan(0, 2, 1, 0)]),
            ends=torch.zeros(1, dtype=torch.uint8),
            bounds=documents.cu_seqlens,
            documents=documents,
            shape=(1, 2),
            num_targets=1,
            num_tokens=2,
        )
        return LocalMicroBatch(batch, documents, (number % 2,))


def all_of_it(documents: PackedDocuments) -> Share:
    return Share(documents, [(0, documents.num_tokens, 1)], None)


def feed_of(loader: NumberedLoader, num_steps: int = 4, device: str = "cpu", **options: int) -> StepPrefetcher:
    return StepPrefetcher(loader, all_of_it, num_steps=num_steps, device=torch.device(device), **options)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "longctx-prefetch"]


def test_the_next_step_is_prepared_while_this_one_is_computed():
    loader = NumberedLoader()
    feed = feed_of(loader)
    assert threads() == [], "none before the first step"
    for step in range(3):
        data, _ = feed.next_step()
        assert [int(shard.unpack().tokens[0, 0]) for shard in data.shards] == [2 * step, 2 * step + 1]
        # The main thread is here, as in a forward pass, and asks for nothing.
        assert loader.prepared[step + 1].wait(WAIT)
    assert loader.threads == {"longctx-prefetch"}
    feed.close()
    assert threads() == []


@pytest.mark.parametrize("ahead", [1, 3])
def test_it_reads_as_many_steps_ahead_as_it_is_told_and_none_beyond_the_last(ahead):
    loader = NumberedLoader()
    feed = feed_of(loader, num_steps=ahead + 2, prefetch_steps=ahead)
    feed.next_step()
    assert loader.prepared[ahead].wait(WAIT)
    assert not loader.prepared[ahead + 1].wait(0.2)
    for _ in range(ahead + 1):
        feed.next_step()
    assert not loader.prepared[ahead + 2].wait(0.2)
    feed.close()
    assert loader.asked == 2 * (ahead + 2)
    assert threads() == []


def test_without_prefetching_the_main_thread_reads():
    loader = NumberedLoader()
    feed = feed_of(loader, prefetch_steps=0)
    assert [feed.next_step()[0].order["rows"] for _ in range(3)] == [0, 2, 4]
    assert loader.asked == 6
    assert loader.threads == {threading.current_thread().name}
    feed.close()


def test_several_threads_read_a_step_in_its_order():
    both = threading.Barrier(2, timeout=WAIT)
    loader = NumberedLoader()
    read = loader.read

    def read_together(number: int, place: Place) -> LocalMicroBatch:
        # Neither goes on before the other has begun.
        both.wait()
        return read(number, place)

    loader.read = read_together
    feed = feed_of(loader, workers=4)
    for step in range(3):
        data, _ = feed.next_step()
        assert [int(shard.unpack().tokens[0, 0]) for shard in data.shards] == [2 * step, 2 * step + 1]
        assert data.after == {"rows": 2 * step + 2}
    feed.close()
    assert len(loader.threads) >= 2


def test_a_caller_that_goes_on_beyond_the_last_step_is_served():
    loader = NumberedLoader()
    feed = feed_of(loader, num_steps=1)
    steps = [feed.next_step()[0] for _ in range(3)]
    assert [step.order["rows"] for step in steps] == [0, 2, 4]
    feed.close()


def test_the_state_is_that_of_the_steps_that_were_given():
    loader = NumberedLoader()
    feed = feed_of(loader)
    assert (feed.state_dict(), feed.tokens_consumed) == ({"rows": 0}, 0)
    data, _ = feed.next_step()
    assert loader.prepared[1].wait(WAIT)
    assert (data.order, feed.state_dict(), feed.tokens_consumed) == ({"rows": 0}, {"rows": 2}, 4)
    data, _ = feed.next_step()
    assert (data.order, feed.state_dict(), feed.tokens_consumed) == ({"rows": 2}, {"rows": 4}, 8)
    assert (data.lengths, data.rows) == ([(2,), (2,)], [(0,), (1,)])
    feed.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_thread_is_the_main_threads_with_its_words(workers):
    feed = feed_of(NumberedLoader(fail_at=3), workers=workers)
    feed.next_step()
    with pytest.raises(DataError, match="row 3 cannot be read"):
        feed.next_step()
    assert threads() == []


def test_the_wait_is_counted_and_only_the_wait():
    loader = NumberedLoader()
    feed = feed_of(loader)
    feed.next_step()
    assert loader.prepared[1].wait(WAIT)
    loader.gate.clear()
    _, ready = feed.next_step()
    threading.Timer(0.5, loader.gate.set).start()
    _, late = feed.next_step()
    assert late > 0.2
    assert ready < late
    feed.close()


def test_for_a_gpu_memory_is_pinned_by_a_thread_that_works_with_that_gpu(monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: done.append("pinned") or x)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(f"{device} {threads()}"))
    for device in ("cpu", "cuda:3"):
        feed = feed_of(NumberedLoader(), num_steps=1, device=device)
        feed.next_step()
        feed.close()
    assert done == ["cuda:3 ['longctx-prefetch']"] + ["pinned"] * 4 * NumberedLoader.micro_batches_per_step


class OneBuffer(NumberedLoader):
    """Ids lie in one buffer, which the next row is read into."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = torch.zeros(3, dtype=torch.int32)

    def read(self, number: int, place: Place) -> LocalMicroBatch:
        taken = super().read(number, place)
        return replace(taken, share=replace(taken.share, ids=self.ids.copy_(taken.share.ids)))


def test_what_a_gpu_copies_late_is_what_was_read(monkeypatch):
    """The copies of a step to the device may run when the thread has read the steps behind it."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # a copy, page-locked on a machine with GPUs
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    feed = feed_of(OneBuffer(), device="cuda:3", prefetch_steps=2)
    given = [feed.next_step()[0].shards for _ in range(4)]
    feed.close()
    late = [shard.unpack_by_lookup("cpu")["tokens"].unique().tolist() for shards in given for shard in shards]
    assert late == [[number] for number in range(8)]


def test_a_reader_that_hangs_does_not_keep_the_end_waiting(monkeypatch):
    monkeypatch.setattr(feed_module, "_CLOSE_TIMEOUT_SECONDS", 0.1)
    loader = NumberedLoader()
    feed = feed_of(loader)
    feed.next_step()
    assert loader.prepared[1].wait(WAIT)
    loader.gate.clear()
    feed.next_step()
    feed.close()
    loader.gate.set()
