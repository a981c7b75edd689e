"""``Ledger``: checksums over a rank's sent and received messages since the last comparison.

The scheme adds no bytes to messages and no wait: sender and receiver each record a checksum under the message's
identity. At the end of a step one number, reduced over all ranks, tells whether every message arrived unchanged. Only
on a mismatch do ranks search for the message (``message_errors.py``).
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
from parallel.comm.messages.message_checksum import Sum, bit_sum, mixed, stacked
from parallel.runtime.activity import ACTIVITY

_BITS_32 = (1 << 32) - 1


class Message(NamedTuple):
    """Message identity, equal on both sides, and further facts known on this side."""

    kind: Kind
    sender: int
    receiver: int
    ordinal: int
    """Index among messages of this kind from this sender to this receiver, since the last comparison."""
    part: str
    """Current phase: forward, backward, …"""
    micro_batch: int
    layer: int
    """−1 outside a layer."""
    hop: int
    """−1 without hops."""

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """Key known to both sides."""
        return self.kind, self.sender, self.receiver, self.ordinal

    def where(self) -> str:
        """Return a one-line position: "forward of micro-batch 0, layer 3, hop 1"."""
        text = self.part
        if self.part in ("forward", "backward"):
            text += f" of micro-batch {self.micro_batch}"
        if self.layer >= 0:
            text += f", layer {self.layer}"
        if self.hop >= 0:
            text += f", hop {self.hop}"
        return text


class LedgerEntry(NamedTuple):
    """Message and checksum, as seen by one side."""

    message: Message
    sum: Sum


@dataclass
class Arrival:
    """Messages that a rank expects."""

    ledger: Ledger
    messages: Sequence[Message]

    def note(self, received: Sequence[Sequence[Tensor]]) -> None:
        """Record the received messages; each message's tensors must be contiguous in memory."""
        for message, tensors in zip(self.messages, received, strict=True):
            self.ledger.received.append(LedgerEntry(message, bit_sum(tensors)))


class Ledger:
    """Checksums for this rank's sent and received messages. Not thread-safe."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sent: list[LedgerEntry] = []
        self.received: list[LedgerEntry] = []
        self.sent_before: list[LedgerEntry] = []
        """Messages sent before the last comparison: a late message may deliver their bytes."""
        self.micro_batch = 0
        self._ordinals: Counter[tuple[Kind, int, int]] = Counter()

    def begin(self, micro_batch: int) -> None:
        """Set the micro-batch to which the following messages belong."""
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
        """Record started messages by receiver; return the ``Arrival`` that records those from ``sources``.

        Call it after starting the messages, in the order in which both sides start them. Tensors must be contiguous and
        must not be written to until they are sent. ``layer`` defaults to the one entered last.
        """
        if layer < 0:
            layer = ACTIVITY.layer
        for receiver, tensors in sent.items():
            message = self._message(kind, self.rank, receiver, layer, hop)
            self.sent.append(LedgerEntry(message, bit_sum(tensors)))
        return Arrival(self, [self._message(kind, source, self.rank, layer, hop) for source in sources])

    def post_same(self, kind: Kind, tensors: Sequence[Tensor], others: Sequence[int], *, layer: int = -1) -> Arrival:
        """Record one content sent to all ``others``, each of which sends its own: ``post`` for an all-gather."""
        if layer < 0:
            layer = ACTIVITY.layer
        # One checksum, however many receivers.
        total = bit_sum(tensors)
        for receiver in others:
            self.sent.append(LedgerEntry(self._message(kind, self.rank, receiver, layer, -1), total))
        return Arrival(self, [self._message(kind, source, self.rank, layer, -1) for source in others])

    def balance(self, device: torch.device) -> Tensor:
        """Return this rank's summand; over all ranks the sum is 0 if every message arrived unchanged.

        The result is two float64 on ``device``, 32 bits each, so that a sum over a million ranks is exact. No host
        sync.
        """
        sent, received = (_digest(entries, device) for entries in (self.sent, self.received))
        difference = sent - received
        return torch.stack((difference & _BITS_32, (difference >> 32) & _BITS_32)).double()

    def reset(self) -> None:
        """Start with an empty ledger after all ranks have compared."""
        self.sent_before, self.sent, self.received = self.sent, [], []
        self._ordinals.clear()

    def _message(self, kind: Kind, sender: int, receiver: int, layer: int, hop: int) -> Message:
        # Two ranks exchange messages of one kind in order, so equal ordinals mean the same message.
        pair = (kind, sender, receiver)
        ordinal = self._ordinals[pair]
        self._ordinals[pair] = ordinal + 1
        return Message(kind, sender, receiver, ordinal, ACTIVITY.phase, self.micro_batch, layer, hop)


def is_balanced(sums: Tensor) -> bool:
    """Return True if ``Ledger.balance`` summed over all ranks is 0 modulo 2^64. Synchronizes with the device."""
    low, high = sums.tolist()
    return (int(low) + (int(high) << 32)) % (1 << 64) == 0


def _digest(entries: Sequence[LedgerEntry], device: torch.device) -> Tensor:
    """Sum all entries, each mixed with its identity, as int64 on ``device``."""
    if not entries:
        return torch.zeros((), dtype=torch.int64, device=device)
    keys = np.array([_key(entry.message) for entry in entries], dtype=np.int64)
    identities = torch.from_numpy(keys).to(device, non_blocking=True)
    # Mixed twice: swapped messages change the sum, and two errors do not cancel out.
    return mixed(mixed(identities) + stacked([entry.sum for entry in entries], device)).sum()


def _key(message: Message) -> int:
    """Pack an identity into a number below 2^63, for up to 2^18 ranks and 2^22 messages per kind and pair."""
    return (message.kind << 58) | (message.sender << 40) | (message.receiver << 22) | (message.ordinal & 0x3FFFFF)
