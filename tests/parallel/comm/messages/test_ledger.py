"""Ledgers: no false alarm over layouts, transports and odd sizes; each fault of a message is found and named."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from parallel.comm.messages.kinds import Kind
from parallel.comm.messages.ledger import Ledger, is_balanced
from parallel.comm.messages.message_errors import find_differences
from parallel.comm.world import sum_over_ranks
from parallel.mesh import Mesh
from parallel.runtime.activity import enter_layer
from tests.helpers import on_ranks, run_distributed
from tests.parallel.attention.attention_cases import Case, spread
from tests.parallel.comm.messages import faults

CPU = torch.device("cpu")
WAYS: dict[str, dict[str, Any]] = {
    "p2p": {},
    "two_level": {"transport": "two_level", "ranks_per_node": 2},
    "all_gather": {"transport": "all_gather"},
    "hybrid": {"ulysses": 2},
    "ulysses": {"ulysses": 4},
}
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")


def mesh_of(case: Case) -> Mesh:
    world = torch.distributed.get_world_size()
    return Mesh.build(context=world, ulysses=case.ulysses, ranks_per_node=case.ranks_per_node, check_rows=True)


def all_arrived(ledger: Ledger) -> bool:
    return is_balanced(sum_over_ranks(ledger.balance(CPU)))


def settle(ledger: Ledger) -> None:
    assert all_arrived(ledger), find_differences(ledger)
    ledger.reset()


# A clean run: no false alarm.


def attend_many(ways: list[str], layouts: tuple[str, ...], documents: list[str], masks: list[str]) -> None:
    """Attention of every kind, compared after each few calls."""
    for way in ways:
        mesh = mesh_of(Case(**WAYS[way]))
        assert mesh.comm.ledger is not None
        cases = itertools.product(layouts, documents, masks)
        for number, (layout, document, mask) in enumerate(cases):
            if layout == "striped" and way in ("hybrid", "ulysses") and mask == "sparse":
                continue
            case = Case(layout=layout, documents=document, mask=mask, dtype=torch.float32, **WAYS[way])
            enter_layer(number % 3)
            spread(case, mesh)
            if number % 3 == 2:
                settle(mesh.comm.ledger)
        settle(mesh.comm.ledger)


def test_nothing_is_found_where_nothing_is_wrong():
    run_distributed(attend_many, 4, list(WAYS), ("balanced",), ["packed"], ["causal"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_nothing_is_found_over_all_layouts_transports_documents_and_masks(world_size):
    ways = [way for way in WAYS if world_size == 4 or way in ("p2p", "all_gather")]
    masks = ["causal", "bidirectional", "window", "sinks", "near", "sparse"]
    run_distributed(attend_many, world_size, ways, LAYOUTS, ["one", "packed", "short"], masks, timeout=500.0)


@on_ranks(3)
def test_ranks_that_differ_and_send_nothing() -> None:
    """Messages of one value or none, ranks that send nothing, and more to some ranks than to others."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ledger, draw = Ledger(rank), random.Random(0)
    for step in range(100):
        for _ in range(draw.randrange(4)):
            kind, sizes = draw.choice(list(Kind)), {}
            for sender, receiver in itertools.permutations(range(world), 2):
                # Rank 0 never sends in odd steps.
                if draw.random() < 0.6 and (step % 2 or sender):
                    sizes[sender, receiver] = draw.choice([0, 1, 3, 130])
            content = {pair: torch.arange(n) * pair[0] + step for pair, n in sizes.items()}
            sent = {to: [content[rank, to]] for sender, to in content if sender == rank}
            sources = [sender for sender, to in content if to == rank]
            ledger.post(kind, sent, sources).note([[content[source, rank].clone()] for source in sources])
        settle(ledger)
    assert not ledger.sent


def balanced(sender: Ledger, receiver: Ledger) -> bool:
    return is_balanced(sender.balance(CPU) + receiver.balance(CPU))


def test_messages_that_changed_places_are_found_though_all_bytes_came():
    """Without a process: two ledgers of a sender and a receiver."""
    a, b = torch.arange(6.0), torch.arange(6.0).flip(0)
    for order in ((a, b), (b, a)):
        sender, receiver = Ledger(0), Ledger(1)
        arrivals = []
        for sent in (a, b):
            sender.post(Kind.KEYS, {1: [sent]}, [])
            arrivals.append(receiver.post(Kind.KEYS, {}, [0]))
        for arrival, received in zip(arrivals, order, strict=True):
            arrival.note([[received]])
        assert balanced(sender, receiver) == (order[0] is a)
    # Of another kind, or to another rank, the same bytes are another message.
    for kind, source in ((Kind.GRADIENTS, 0), (Kind.KEYS, 2)):
        sender, receiver = Ledger(0), Ledger(1)
        sender.post(Kind.KEYS, {1: [a]}, [])
        receiver.post(kind, {}, [source]).note([[a]])
        assert not balanced(sender, receiver)


# Faults.


def find_any_bit(count: int) -> None:
    """One bit of one exchange, drawn: of every byte of a float, and in any place."""
    mesh, case = Mesh.build(context=2, check_rows=True), Case(dtype=torch.float32, documents="one")
    assert mesh.comm.ledger is not None
    draw = random.Random(0)
    for number in range(count):
        bit = 32 * draw.randrange(64) + number % 32
        seen, exchange = faults.Seen(), draw.randrange(3)
        with faults.exchanges_changed(
            faults.wrong_bytes(bit, exchange, seen) if mesh.rank == 1 else faults.nothing_injected()
        ):
            spread(case, mesh)
        assert not all_arrived(mesh.comm.ledger), f"bit {bit} of exchange {exchange}"
        assert find_differences(mesh.comm.ledger).startswith("Rank 1 got ")
        mesh.comm.ledger.reset()


def test_each_bit_of_a_float_is_found():
    run_distributed(find_any_bit, 2, 32)


@pytest.mark.parametrize(
    ("name", "call", "way", "kind"),
    [
        # The first gather is that of the ranks' agreement.
        ("all_gather_into_tensor", 1, {"transport": "all_gather"}, "all ranks' keys and values"),
        ("all_to_all_single", 0, {"transport": "all_gather"}, "gradients for all ranks' keys and values"),
        ("all_to_all_single", 0, {"ulysses": 2}, "heads (Ulysses)"),
    ],
)
@on_ranks(2)
def test_a_bit_of_a_collective_is_found(name: str, call: int, way: dict[str, Any], kind: str) -> None:
    """A bit in what the last rank's message brings to rank 0."""
    case = Case(dtype=torch.float32, documents="one", **way)
    mesh, seen = mesh_of(case), faults.Seen()
    assert mesh.comm.ledger is not None
    enter_layer(1)
    if mesh.rank == 0:
        with faults.collective_spoilt(name, call, -5, seen):
            spread(case, mesh)
    else:
        spread(case, mesh)
    assert not all_arrived(mesh.comm.ledger)
    said, last = find_differences(mesh.comm.ledger), mesh.world_size - 1
    assert said.startswith(f"Rank 0 got {kind} from rank {last} ("), said
    assert "layer 1" in said, said
    assert "Mismatched messages" not in said, said


@on_ranks(2)
def test_a_message_that_the_other_side_does_not_know_is_told() -> None:
    ledger = Ledger(torch.distributed.get_rank())
    if ledger.rank == 0:
        ledger.post(Kind.KEYS, {1: [torch.ones(3)]}, [])
    assert not all_arrived(ledger)
    assert find_differences(ledger).startswith("Rank 1 did not get keys and values from rank 0")
    ledger.reset()
    if ledger.rank == 0:
        ledger.post(Kind.KEYS, {}, [1]).note([[torch.ones(3)]])
    assert not all_arrived(ledger)
    assert "which that rank did not send" in find_differences(ledger)
