"""``Ledger``: a rank's sums of its sent and received messages since all ranks last compared theirs.

Messages do not grow for it, and no rank waits: sender and receiver each note a sum of the bytes under the message's
identity, and at the end of a step one number over all ranks tells whether every message arrived as it was sent. Only if
one did not do ranks look for it (``differences.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallel.comm.messages.kinds import Kind
from parallel.comm.messages.sums import Sum, bit_sum, mixed, stacked
from parallel.runtime.spans import DOING

_BITS_32 = (1 << 32) - 1


class Message(NamedTuple):
    """Identity of a message, the same on both sides, and further facts known on this side."""

    kind: Kind
    sender: int
    receiver: int
    ordinal: int
    """Its number among those of its kind from this sender to this receiver, since ranks last compared."""
    part: str
    """What the rank was at: forward, backward, …"""
    micro_batch: int
    layer: int
    """−1 where no layer was entered."""
    hop: int
    """−1 where there are no hops."""

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """Key that both sides know."""
        return self.kind, self.sender, self.receiver, self.ordinal

    def where(self) -> str:
        """Return its place on one line: "forward of micro-batch 0, layer 3, hop 1"."""
        text = self.part
        if self.part in ("forward", "backward"):
            text += f" of micro-batch {self.micro_batch}"
        if self.layer >= 0:
            text += f", layer {self.layer}"
        if self.hop >= 0:
            text += f", hop {self.hop}"
        return text


class Entry(NamedTuple):
    """Message and the sum of its bytes, as one side saw them."""

    message: Message
    sum: Sum


@dataclass
class Arrival:
    """Messages that a rank waits for."""

    ledger: Ledger
    messages: Sequence[Message]

    def note(self, received: Sequence[Sequence[Tensor]]) -> None:
        """Note the messages that have arrived: the tensors of each, which are contiguous in memory."""
        for message, tensors in zip(self.messages, received, strict=True):
            self.ledger.received.append(Entry(message, bit_sum(tensors)))


class Ledger:
    """Sums of the messages that this rank sent and received. Not to be shared between threads."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sent: list[Entry] = []
        self.received: list[Entry] = []
        self.sent_before: list[Entry] = []
        """What was sent until ranks last compared: a message that is late may bring it."""
        self.micro_batch = 0
        self._ordinals: Counter[tuple[Kind, int, int]] = Counter()

    def begin(self, micro_batch: int) -> None:
        """Set the micro-batch of the step that is computed from now on."""
        self.micro_batch = micro_batch

    def post(
        self,
        kind: Kind,
        sent: Mapping[int, Sequence[Tensor]],
        sources: Sequence[int],
        *,
        layer: int = -1,
        hop: int = -1,
    ) -> Arrival:
        """Note messages that are under way, by receiver; return the ``Arrival`` that notes those from ``sources``.

        Call it once messages have been started, in the order in which both sides start them. Each tensor is contiguous
        in memory, and is not written to until it has been sent. ``layer`` is by default the one entered last.
        """
        if layer < 0:
            layer = DOING.layer
        for receiver, tensors in sent.items():
            message = self._message(kind, self.rank, receiver, layer, hop)
            self.sent.append(Entry(message, bit_sum(tensors)))
        return Arrival(self, [self._message(kind, source, self.rank, layer, hop) for source in sources])

    def post_same(self, kind: Kind, tensors: Sequence[Tensor], others: Sequence[int], *, layer: int = -1) -> Arrival:
        """Note one content sent to all ``others``, each of which sends its own here: ``post`` for a gather."""
        if layer < 0:
            layer = DOING.layer
        # Summed once, whatever the number of receivers.
        total = bit_sum(tensors)
        for receiver in others:
            self.sent.append(Entry(self._message(kind, self.rank, receiver, layer, -1), total))
        return Arrival(self, [self._message(kind, source, self.rank, layer, -1) for source in others])

    def balance(self, device: torch.device) -> Tensor:
        """Return this rank's part of a number that is 0 over all ranks if every message arrived as it was sent.

        It is two float64 on ``device``, 32 bits each, so that a sum over a million ranks is exact. No host sync.
        """
        sent, received = (_digest(entries, device) for entries in (self.sent, self.received))
        difference = sent - received
        return torch.stack((difference & _BITS_32, (difference >> 32) & _BITS_32)).double()

    def settle(self) -> None:
        """Start again with an empty ledger: all ranks have compared."""
        self.sent_before, self.sent, self.received = self.sent, [], []
        self._ordinals.clear()

    def _message(self, kind: Kind, sender: int, receiver: int, layer: int, hop: int) -> Message:
        # Messages of a kind between two ranks are matched in their order, so the same number means the same message.
        pair = (kind, sender, receiver)
        ordinal = self._ordinals[pair]
        self._ordinals[pair] = ordinal + 1
        return Message(kind, sender, receiver, ordinal, DOING.what, self.micro_batch, layer, hop)


def is_balanced(sums: Tensor) -> bool:
    """Return whether the sum of ``Ledger.balance`` over all ranks is 0 modulo 2^64. Waits for the device."""
    low, high = sums.tolist()
    return (int(low) + (int(high) << 32)) % (1 << 64) == 0


def _digest(entries: Sequence[Entry], device: torch.device) -> Tensor:
    """Return the sum of all entries, each mixed with its identity, as int64 on ``device``."""
    if not entries:
        return torch.zeros((), dtype=torch.int64, device=device)
    keys = np.array([_key(entry.message) for entry in entries], dtype=np.int64)
    identities = torch.from_numpy(keys).to(device, non_blocking=True)
    # Mixed twice: swapping two messages changes the sum, and two errors do not cancel each other.
    return mixed(mixed(identities) + stacked([entry.sum for entry in entries], device)).sum()


def _key(message: Message) -> int:
    """Return an identity as a number below 2^63, for up to 2^18 ranks and 2^22 messages of a kind between two."""
    return (message.kind << 58) | (message.sender << 40) | (message.receiver << 22) | (message.ordinal & 0x3FFFFF)
