"""Decision on one audited call, from several ranks' results: which rank was wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.audit.bits import BitDifference
from parallel.audit.call_sample import Place


@dataclass(frozen=True, kw_only=True)
class Case:
    """One rank's call, and its repetition on the same rank."""

    rank: int
    host: str
    number: int
    """Index among the rank's audited calls in this step."""
    place: Place
    own: BitDifference | None
    """Difference between the step's result and the repeated one; None if equal."""
    second: str
    """Digest of the repeated result; empty if only the full call was repeated, not the part that was sent."""


@dataclass(frozen=True, kw_only=True)
class RepeatedResult:
    """Result from another rank that repeated the call."""

    rank: int
    host: str
    of: int
    """Rank that made the call."""
    number: int
    """Index among that rank's audited calls."""
    digest: str
    """Digest of its result; meaningless if the rank computes other bits."""
    difference: BitDifference | None
    """Difference between the step's result and its own; None if equal, or equal up to rounding."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Wrong value, and the ranks that may have computed it."""

    place: Place
    of: int
    """Rank that made the call."""
    candidate_ranks: Sequence[int]
    """Ranks of which one computed it; a single rank if it is known."""
    hosts: Sequence[str]
    """Hosts of these ranks."""
    difference: BitDifference
    evidence: str
    """Which ranks computed which result, in a sentence."""

    @property
    def is_named(self) -> bool:
        """True if the wrong rank is known."""
        return len(self.candidate_ranks) == 1

    def describe(self, step: int) -> str:
        """Return the first lines of the message that ends the run."""
        if self.is_named:
            who = f"rank {self.candidate_ranks[0]} on {self.hosts[0]} computed a wrong number in step {step}"
        else:
            who = f"ranks {_list(self.candidate_ranks)} disagree about a number in step {step}"
        difference_text = _sentence(self.difference.describe())
        return f"{who}: {self.place.describe()} on rank {self.of}.\n{difference_text}.\n{self.evidence}"


# Majority vote. The step's result, the rank's own repetition and the other ranks' repetitions are votes; two equal
# results outvote a third. Invariant: a rank is named only if a majority excludes it, or if it contradicts itself.
def find_mismatch(case: Case, answers: Sequence[RepeatedResult]) -> Mismatch | None:
    """Decide on a call; return None if all ranks that made it agree.

    Two equal results outvote a third. A rank's repetition counts like another rank's: a fault rarely gives the same
    wrong result twice.
    """
    disagreeing = [answer for answer in answers if answer.difference is not None]
    if not disagreeing:
        return _of_own(case, answers)
    difference = disagreeing[0].difference
    assert difference is not None
    if len(disagreeing) < len(answers):
        # Another rank reproduced the step's result.
        return _mismatch(
            case,
            difference,
            disagreeing,
            f"{_agreeing(case, answers)}; only rank {disagreeing[0].rank} got a different one.",
        )
    # No other rank reproduced the step's result, so compare their results with one another.
    others = {answer.digest for answer in answers}
    names = _ranks(answers)
    all_results: list[Case | RepeatedResult] = [case]
    all_results += answers
    if case.own is not None and case.second in others:
        text = (
            f"{names} recomputed it, and so did rank {case.rank}: all results are equal, but differ from its first "
            "one. The fault did not repeat."
        )
        return _mismatch(case, difference, [case], text)
    # Two against one.
    if len(answers) > 1 and len(others) == 1:
        again = "Its own recomputation gives the wrong result again: the fault repeats."
        if case.own is not None:
            again = "Its own recomputation gives a third result."
        return _mismatch(case, difference, [case], f"{names} recomputed it and agree. {again}")
    if len(answers) > 1:
        return _mismatch(case, difference, all_results, "All three results differ.")
    if case.own is not None:
        return _mismatch(
            case,
            difference,
            [case],
            f"Rank {case.rank} recomputed it with a different result, and {names.lower()} got a third one.",
        )
    return _mismatch(case, difference, all_results, "Each reproduces its own result, and two results give no majority.")


def _of_own(case: Case, answers: Sequence[RepeatedResult]) -> Mismatch | None:
    """Return the decision if only the rank's own repetition mismatches, otherwise None."""
    if case.own is None:
        return None
    if answers and case.second:
        text = (
            f"{_ranks(answers)} reproduced the step's result; rank {case.rank} itself got a different one when it "
            "recomputed it."
        )
    else:
        text = f"Rank {case.rank} repeated the call and got a different result."
    return _mismatch(case, case.own, [case], text)


def _mismatch(
    case: Case, difference: BitDifference, candidates: Sequence[Case | RepeatedResult], evidence: str
) -> Mismatch:
    return Mismatch(
        place=case.place,
        of=case.rank,
        candidate_ranks=[x.rank for x in candidates],
        hosts=[x.host for x in candidates],
        difference=difference,
        evidence=evidence,
    )


def _agreeing(case: Case, answers: Sequence[RepeatedResult]) -> str:
    agreeing = [case.rank] + [answer.rank for answer in answers if answer.difference is None]
    return f"Ranks {_list(agreeing)} got the same result"


def _ranks(answers: Sequence[RepeatedResult]) -> str:
    if len(answers) == 1:
        return f"Rank {answers[0].rank}"
    return f"Ranks {_list([answer.rank for answer in answers])}"


def _list(ranks: Sequence[int]) -> str:
    return " and ".join(map(str, ranks))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
