"""Random values that do not occur in texts by chance: numbers, word pairs, UUIDs, names."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from random import Random

from longctx.errors import DataError

_ADJECTIVES = (
    "amber ancient brave bright calm careful clever cold copper crimson curious dark eager early emerald fearless "
    "fierce frozen gentle giant golden grand grey happy hidden hollow humble iron jolly kind large late light lively "
    "lonely lucky mellow merry mighty misty narrow nimble noble northern orange pale patient plain proud purple quick "
    "quiet rapid restless round royal rustic scarlet secret silent silver sleepy small smooth solemn southern steady "
    "stormy strong subtle sunny swift tall tender tiny velvet vivid warm western white wild wise witty yellow young"
)

_NOUNS = (
    "acorn anchor anvil apple arrow badger barrel basket beacon bell birch bridge brook button cabin candle canyon "
    "castle cedar chapel cherry circle cliff clock cloud comet compass coral cradle crane crown desert dolphin dragon "
    "drum eagle ember falcon feather fern ferry field flute forest fountain fox garden gate glacier glove hammer "
    "harbor harp hawk hazel heron hill island ivy jacket jungle kettle kite ladder lagoon lantern leaf lemon lion "
    "lizard magnet maple marble meadow mill mirror moon moth mountain needle oak ocean olive orchard otter owl paper "
    "pebble pepper piano pigeon planet pond puzzle quarry rabbit raven reef ribbon river rocket saddle sail salmon "
    "shadow shell ship sparrow spring star stone summit temple thistle tiger tower tunnel valley violin walnut whale "
    "willow"
)

ADJECTIVES = _ADJECTIVES.split()
NOUNS = _NOUNS.split()

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def random_number(random: Random) -> str:
    """Return seven digits."""
    return str(random.randint(1_000_000, 9_999_999))


def word(random: Random) -> str:
    """Return an adjective and a noun, joined by a hyphen."""
    return f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}"


def uuid4(random: Random) -> str:
    """Return a version 4 UUID."""
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def telephone(random: Random) -> str:
    """Return ten digits, formatted as 555-014-2237."""
    return f"{random.randint(200, 999)}-{random.randint(200, 999)}-{random.randint(1000, 9999)}"


def nonsense(random: Random, syllables: int) -> str:
    """Return a nonsense word made from syllables such as ``ta`` and ``vo``."""
    return "".join(random.choices(_SYLLABLES, k=syllables))


def name(random: Random) -> str:
    """Return a nonsense first and last name."""
    return f"{nonsense(random, 2).title()} {nonsense(random, 4).title()}"


KINDS: dict[str, Callable[[Random], str]] = {"number": random_number, "word": word, "uuid": uuid4}
"""Kinds of needle values."""

MAX_ATTEMPTS = 50
"""Attempts per value in ``distinct`` before raising an error."""


def distinct(random: Random, draw: Callable[[Random], str], count: int) -> list[str]:
    """Return ``count`` distinct values; a smaller count gives a prefix of the list."""
    # A dictionary serves as an ordered set: values keep their sampling order.
    values: dict[str, None] = {}
    # Sampling all of n values takes about n ln n attempts; with fewer values than requested it would never end.
    for _ in range(MAX_ATTEMPTS * (count + 1)):
        if len(values) >= count:
            break
        values[draw(random)] = None
    if len(values) < count:
        raise DataError(
            f"{count:,} distinct values are needed, and only {len(values):,} were found. Choose a shorter length or "
            "another task."
        )
    return list(values)
