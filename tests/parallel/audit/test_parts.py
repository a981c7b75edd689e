"""Copies that lie as they lay, differences by bit, who looks at whom, who was wrong, and bounds of rounding."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from benchmarks.flips import flip_bit
from parallel.audit.adamw import is_elementwise
from parallel.audit.audit_decision import Case, RepeatedResult, find_mismatch
from parallel.audit.bits import BitDifference, difference, matmul_difference, update_difference
from parallel.audit.call_sample import Place
from parallel.audit.matmul_tiles import tile_side
from parallel.audit.rank_comparison import RankProfile, assign_auditing_ranks
from parallel.audit.tensor_copies import Copied, MemoryLayout, extract_tensors, from_bytes, insert_tensors, joined_bytes

CPU = torch.device("cpu")
PLACE = Place("product", "aten::mm", "forward", 3, "")


def test_a_copy_lies_as_the_original_did():
    base = torch.arange(600, dtype=torch.float32)
    views = [
        base.view(20, 30).T,
        base[3:].as_strided((5, 7), (40, 2)),
        base[:4].expand(6, 4),
        base[:3].view(3, 1).expand(3, 5),
        base[:0],
        base.bfloat16()[1:],
        base.double().view(10, 60)[:, 7:9],
        torch.tensor(3),
        torch.empty(0, 5),
    ]
    copies = [Copied.of(x).values for x in views]
    layouts = [MemoryLayout.of(x) for x in views]
    values = from_bytes(joined_bytes(copies), [x.to("meta") for x in copies])
    for x, layout, of_bytes in zip(views, layouts, values, strict=True):
        again = Copied(layout, of_bytes).laid_out(CPU)
        assert torch.equal(again, x)
        assert MemoryLayout.of(again) == layout or not x.numel()


def test_arguments_come_together_again():
    a, b, c = (torch.tensor(n) for n in range(3))
    tensors: list[Tensor] = []
    args = extract_tensors([a, [b, None, c], {"x": 1.5, "out": b}, (2, "y")], tensors)
    assert len(tensors) == 4
    assert insert_tensors(args, tensors) == [a, [b, None, c], {"x": 1.5, "out": b}, [2, "y"]]


@pytest.mark.parametrize(
    ("dtype", "bit", "part"),
    [
        (torch.float32, 0, "mantissa"),
        (torch.float32, 22, "mantissa"),
        (torch.float32, 23, "exponent"),
        (torch.float32, 31, "sign"),
        (torch.bfloat16, 6, "mantissa"),
        (torch.bfloat16, 7, "exponent"),
        (torch.float64, 63, "sign"),
    ],
)
def test_a_flipped_bit_is_told_by_its_place(dtype, bit, part):
    x = torch.linspace(-2, 3, 35).to(dtype)
    y = x.clone()
    flip_bit(y.view(5, 7).T, 12, bit)
    found = difference([x[:0], y, x], [x[:0], x, x])
    assert found is not None
    assert (found.values, found.total, found.bits, found.parts) == (1, 70, (bit,), (part,))
    assert difference([x, torch.tensor([torch.nan])], [x, torch.tensor([torch.nan])]) is None
    # Equal in value, and not the same.
    assert difference([torch.tensor([0.0])], [torch.tensor([-0.0])]) is not None


def ranks(*machines: str, hosts: str) -> list[RankProfile]:
    return [RankProfile(host, machine, "", True, True) for host, machine in zip(hosts, machines, strict=True)]


def test_ranks_are_looked_at_by_others_like_them_on_other_hosts():
    assert [x.auditors for x in assign_auditing_ranks(ranks(*"aaaa", hosts="xxxx"))] == [(1, 2), (2, 3), (3, 0), (0, 1)]
    across = assign_auditing_ranks(ranks(*"aaaa", hosts="xxyy"))
    assert [x.auditors[0] for x in across] == [2, 3, 1, 0], "the next one is on the other host"
    assert all(x.exact and len(x.auditors) == 2 for x in across)
    mixed = assign_auditing_ranks(ranks(*"aaab", hosts="xxxx"))
    assert [x.exact for x in mixed] == [True, True, True, False]
    assert not any(3 in x.auditors for x in mixed[:3])
    assert [x.auditors for x in assign_auditing_ranks(ranks("a", hosts="x"))] == [()]
    assert [x.auditors for x in assign_auditing_ranks(ranks("a", "b", hosts="xy"))] == [(1,), (0,)]


WRONG = BitDifference(1, 8, (3,), ("mantissa",), (1.0, 2.0))


def case(*, own: bool = False, second: str = "step") -> Case:
    return Case(rank=0, host="h0", number=0, place=PLACE, own=WRONG if own else None, second=second)


def answers(*digests: str) -> list[RepeatedResult]:
    """Of ranks 1 and so on; "step" is what the step went on with."""
    return [
        RepeatedResult(rank=n, host=f"h{n}", of=0, number=0, digest=of, difference=None if of == "step" else WRONG)
        for n, of in enumerate(digests, start=1)
    ]


@pytest.mark.parametrize(
    ("own", "second", "others", "suspects"),
    [
        (False, "step", ("step", "step"), None),
        (False, "step", ("right", "right"), [0]),
        (True, "right", ("right", "right"), [0]),
        (True, "else", ("right", "right"), [0]),
        (False, "step", ("step", "other"), [2]),
        (False, "step", ("other", "step"), [1]),
        (False, "step", ("other", "another"), [0, 1, 2]),
        (True, "step2", ("step", "step"), [0]),
        (False, "step", ("right",), [0, 1]),
        (True, "right", ("right",), [0]),
        (True, "else", ("right",), [0]),
        (False, "step", (), None),
        (True, "right", (), [0]),
        (True, "", ("step", "step"), [0]),
    ],
)
def test_two_that_agree_outvote_a_third(own: bool, second: str, others: Sequence[str], suspects: list[int] | None):
    finding = find_mismatch(case(own=own, second=second), answers(*others))
    assert (finding and list(finding.candidate_ranks)) == suspects
    if finding is not None:
        assert finding.hosts == [f"h{rank}" for rank in finding.candidate_ranks]
        text = finding.describe(12)
        assert "step 12" in text
        assert len(text.splitlines()) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_within_its_bound_and_a_flipped_exponent_is_not(dtype):
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((40, 700), (700, 30)))
    # In another order: by halves of the terms, the second one first.
    product = (a.double() @ b.double()).to(dtype)
    halves = (a[:, 350:].float() @ b[350:].float() + a[:, :350].float() @ b[:350].float()).to(dtype)
    assert matmul_difference(a, b, product, halves) is None
    wrong = halves.clone()
    flip_bit(wrong, 77, {torch.float32: 23, torch.bfloat16: 7}[dtype])
    found = matmul_difference(a, b, wrong, product)
    assert found is not None
    assert (found.values, found.total) == (1, 1200)
    nothing = halves.clone()
    nothing[3, 3] = torch.nan
    assert matmul_difference(a, b, nothing, product) is not None


def test_an_update_is_one_formula_for_every_value():
    assert is_elementwise(CPU)
    before = torch.linspace(-1, 1, 50)
    found = before - 1e-3
    assert update_difference(before, found, torch.nextafter(found, before)) is None
    wrong = found.clone()
    flip_bit(wrong, 9, 20)
    assert update_difference(before, wrong, found) is not None


def test_tiles_fit_in_their_bytes():
    for terms, values in ((1024, 1 << 22), (1, 10), (1 << 20, 1 << 22), (1 << 23, 1 << 22)):
        side = tile_side(terms, values)
        assert 2 * side * terms + side * side <= values < 2 * (side + 1) * terms + (side + 1) ** 2
