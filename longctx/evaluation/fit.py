"""How much filler a prompt takes: the number of units (words, lines, edges) that fills a budget of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable


def largest_fitting(tokens_of: Callable[[int], int], *, smallest: int, most: int | None, budget: int) -> int:
    """The number of units that fits and with one more does not; ``most`` where all of those fit.

    ``smallest`` must fit. Tokens grow about evenly with units, so the search guesses on a straight line between a
    number that fits and one that does not, and halves the range where guesses do not. Each call of ``tokens_of`` may
    encode a whole prompt: there are about a dozen of them for a million units.
    """
    low, high, low_tokens, high_tokens = _bracket(tokens_of, smallest=smallest, most=most, budget=budget)
    halve = False
    above = True
    while high - low > 1:
        width = high - low
        # Where guesses do not help, plain bisection ends the search all the same.
        middle = low + width // 2
        if not halve:
            guess = low + width * (budget - low_tokens) / max(1, high_tokens - low_tokens)
            # On both sides of the guess in turn: two probes then leave a narrow range around it.
            margin = math.isqrt(width)
            middle = int(guess) - margin
            if above:
                middle = int(guess) + margin
            above = not above
            # A number outside of the range is known already and would teach nothing.
            middle = min(max(middle, low + 1), high - 1)
        tokens = tokens_of(middle)
        if tokens <= budget:
            low, low_tokens = middle, tokens
        else:
            high, high_tokens = middle, tokens
        # More than half is left: the tokens are uneven here, and the next guess would be no better.
        halve = (high - low) * 2 > width and not halve
    return low


def _bracket(
    tokens_of: Callable[[int], int], *, smallest: int, most: int | None, budget: int
) -> tuple[int, int, int, int]:
    """A number of units that fits, one that does not, and their tokens. ``most`` fits if the second is one above it."""
    low, low_tokens = smallest, tokens_of(smallest)
    # The first step is as long as the shortest prompt, so that its slope is one of filler.
    step = max(1, smallest)
    while most is None or low < most:
        high = low + step
        if most is not None:
            high = min(high, most)
        high_tokens = tokens_of(high)
        if high_tokens > budget:
            return low, high, low_tokens, high_tokens
        slope = (high_tokens - low_tokens) / (high - low)
        # Twice as far each time: where the slope misleads, few probes still reach the budget.
        step *= 2
        # A straight line through both numbers says how far the budget is, and a little more.
        if slope > 0:
            step = max(step, int(1.02 * (budget - high_tokens) / slope) + 1)
        low, low_tokens = high, high_tokens
    return low, low + 1, low_tokens, low_tokens
