"""``parallel.layout = "auto"``: what it comes to, case by case, and that it always fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.errors import ConfigError
from parallel.attention.cores import CORES
from parallel.layout.layout_choice import check_choice, choose_layout
from parallel.layout.sequence import SequenceLayout
from parallel.schedule import Schedule

TOKENS = 65_536
USUAL = {"num_tokens": TOKENS, "degree": 8, "ulysses": 1, "packed": True, "reaches": (None,)}


@pytest.mark.parametrize(
    ("changed", "layout", "reason"),
    [
        ({}, "balanced", "packed documents"),
        ({"packed": False}, "zigzag", "one document"),
        ({"degree": 2}, "balanced", "2 ring ranks"),
        ({"degree": 1}, "zigzag", "all layouts are equal"),
        ({"ulysses": 8}, "zigzag", "all layouts are equal"),
        ({"ulysses": 4}, "balanced", "2 ring ranks"),
        ({"ulysses": 4, "packed": False}, "zigzag", "2 ring ranks"),
        ({"packed": False, "num_tokens": 8 * 4097}, "balanced", "the 16 equal parts of zigzag"),
        # Windows: small beside a shard of 8,192 tokens, and not.
        ({"reaches": (1024,)}, "contiguous", "window 1024 is small relative to 8192 tokens per rank"),
        ({"reaches": (1024,), "packed": False}, "contiguous", "neighbours"),
        ({"reaches": (1025,)}, "balanced", "packed"),
        ({"reaches": (4096,), "packed": False}, "contiguous", "neighbours"),
        ({"reaches": (4097,), "packed": False}, "zigzag", "one document"),
        ({"reaches": (128, None)}, "balanced", "packed"),
        ({"reaches": (None, 0), "packed": False}, "zigzag", "one document"),
        # Linear layers.
        ({"reaches": (0,)}, "contiguous", "stateful layers"),
        ({"reaches": (0, 128)}, "contiguous", "window"),
        ({"reaches": (0, None)}, "balanced", "packed"),
        ({"image_windows": True}, "contiguous", "windows in order"),
        # Both sides.
        ({"causal": False}, "balanced", "packed"),
        ({"causal": False, "packed": False}, "contiguous", "bidirectional attention over one document"),
        ({"causal": False, "packed": False, "side_by_side": True}, "balanced", "a short row"),
    ],
)
def test_what_auto_comes_to(changed, layout, reason):
    chosen, why = choose_layout(**{**USUAL, **changed})
    assert chosen == layout
    assert reason in why


@given(
    ring=st.integers(1, 8),
    ulysses=st.integers(1, 4),
    tokens_per_rank=st.integers(1, 200),
    packed=st.booleans(),
    reaches=st.lists(st.none() | st.integers(0, 300), min_size=1, max_size=4),
)
def test_what_is_chosen_can_be_built_and_serves_every_layer(ring, ulysses, tokens_per_rank, packed, reaches):
    degree = ring * ulysses
    num_tokens = degree * tokens_per_rank
    check_choice("auto", num_tokens, degree, ulysses)
    layout, reason = choose_layout(
        num_tokens=num_tokens, degree=degree, ulysses=ulysses, packed=packed, reaches=reaches
    )
    SequenceLayout.build(layout, num_tokens, degree, [0, num_tokens // 3, num_tokens], ulysses)
    for kind in CORES.values():
        kind.check_layout(layout, ring)
    assert reason
    assert not reason.endswith("."), "a clause, which the log ends"


@pytest.mark.parametrize("bounds", [[0, 16_384], [0, 100, 9_000, 9_500, 12_000, 16_384]])
@pytest.mark.parametrize("window", [None, 128, 1024])
@pytest.mark.parametrize("degree", [2, 8])
def test_the_choice_is_even_and_sends_few_rows(bounds, window, degree):
    num_tokens = bounds[-1]

    def figures(kind: str) -> tuple[float, int]:
        schedule = Schedule.build(SequenceLayout.build(kind, num_tokens, degree, bounds), bounds, window=window)
        return schedule.imbalance(), sum(schedule.rows_received(rank) for rank in range(degree))

    chosen, _ = choose_layout(num_tokens=num_tokens, degree=degree, ulysses=1, packed=len(bounds) > 2, reaches=[window])
    imbalance, rows = figures(chosen)
    others = [figures("zigzag"), figures("balanced")]
    assert imbalance <= 1.05 * min(even for even, _ in others)
    assert rows <= 1.1 * min((sent for even, sent in others if even <= imbalance), default=rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("auto", 8 * 100 + 1, 8), "Try 800 or 808 tokens"),
        (("auto", 4096, 6, 4), "parallel.ulysses=4 does not divide"),
        (("zagzig", 4096, 8), "['auto', 'contiguous', 'zigzag', 'striped', 'balanced']"),
        (("zigzag", 8 * 101, 8), "Try 800 or 816 tokens"),
    ],
)
def test_what_no_layout_fits_is_refused_before_the_data_are_read(arguments, message):
    with pytest.raises(ConfigError) as error:
        check_choice(*arguments)
    assert message in str(error.value)


def test_auto_is_no_layout_itself():
    with pytest.raises(ConfigError, match="'auto' is unknown"):
        SequenceLayout.build("auto", 64, 2)
