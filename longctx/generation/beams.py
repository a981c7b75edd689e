"""Beam search: find the continuation with the best score, its log-likelihood over a power of its length.

The rules follow transformers' ``generate``, in float32 and in the same order, so that the same beams win.

Axes: N beams, V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longctx.errors import ConfigError

_NEVER = -1e9
"""Score for candidates that must not be chosen."""


@dataclass(frozen=True, kw_only=True)
class Beams:
    """Beam search options."""

    num_beams: int
    length_penalty: float = 1.0
    """Scores are log-likelihoods over the number of new tokens to this power: above 0 favours long continuations."""
    early_stopping: bool | Literal["never"] = False
    """When to end the search.

    True: once as many continuations have ended as there are beams. False: once a better one is unlikely. "never": once
    it is impossible.
    """

    def __post_init__(self) -> None:
        if self.num_beams < 2:
            raise ConfigError(f"num_beams={self.num_beams} must be at least 2. For greedy decoding use Greedy().")
        if not math.isfinite(self.length_penalty):
            raise ConfigError(f"length_penalty={self.length_penalty} must be finite; 0 ignores lengths.")


class Beam(NamedTuple):
    """A beam's next step."""

    parent: int
    """Index of the beam in the previous step that it extends."""
    token: int


class BeamSearch:
    """Search state, without the model: it takes log-probabilities and returns the beams for the next step."""

    def __init__(
        self, beams: Beams, max_new_tokens: int, is_finished: Callable[[Sequence[int]], bool], num_stop_ids: int
    ) -> None:
        """Set up the search. ``is_finished`` returns True if the new tokens form a complete continuation."""
        N = beams.num_beams
        self.beams = beams
        self.running: list[list[int]] = [[] for _ in range(N)]
        """New tokens of each beam."""
        self._max_new_tokens = max_new_tokens
        self._is_finished = is_finished
        # Enough candidates that some continue even if all stop ids are among the best.
        self._num_candidates = max(2, 1 + num_stop_ids) * N
        # All beams equal the prompt at first, so only one may be extended.
        self._scores_N = torch.tensor([0.0] + [_NEVER] * (N - 1))
        self._finished: list[list[int]] = [[] for _ in range(N)]
        self._finished_scores_N = torch.full((N,), _NEVER)
        self._is_finished_N = torch.zeros(N, dtype=torch.bool)
        self._may_improve = True

    def advance(self, log_probs_NV: Tensor) -> list[Beam]:
        """Return the beams for the next step, given the next tokens' log-probabilities; empty if the search is over."""
        N, V = log_probs_NV.shape
        totals = (log_probs_NV + self._scores_N[:, None]).flatten()
        # Rank over beams and tokens together: [N · V] totals.
        scores_C, indices_C = totals.topk(min(self._num_candidates, len(totals)))
        beams = [Beam(index // V, index % V) for index in indices_C.tolist()]
        ids = [[*self.running[beam.parent], beam.token] for beam in beams]
        ends_C = torch.tensor([self._is_whole(of_one) for of_one in ids])
        self._merge_finished(ids, scores_C, ends_C)
        # An ended candidate continues only if no other is left.
        running_C = scores_C + ends_C.float() * _NEVER
        chosen = running_C.topk(N).indices
        self._scores_N = running_C[chosen]
        self.running = [ids[index] for index in chosen.tolist()]
        if not self._should_continue(bool(ends_C.all())):
            return []
        return [beams[index] for index in chosen.tolist()]

    def best(self) -> list[int]:
        """Return the continuation with the best score."""
        return self._finished[0]

    def _is_whole(self, ids: Sequence[int]) -> bool:
        return len(ids) >= self._max_new_tokens or self._is_finished(ids)

    def _merge_finished(self, ids: list[list[int]], scores_C: Tensor, ends_C: Tensor) -> None:
        """Merge the ended ones among the best N candidates into the ranking of ended continuations."""
        N = self.beams.num_beams
        ends_C = ends_C.clone()
        # The other candidates only ensure that enough beams continue.
        ends_C[N:] = False
        scores_C = scores_C / len(ids[0]) ** self.beams.length_penalty
        if self.beams.early_stopping is True and self._is_finished_N.all():
            scores_C = scores_C + _NEVER
        scores_C = scores_C + (~ends_C).float() * _NEVER
        scores, best = torch.cat((self._finished_scores_N, scores_C)).topk(N)
        candidates = self._finished + ids
        self._finished = [candidates[index] for index in best.tolist()]
        self._finished_scores_N, self._is_finished_N = scores, torch.cat((self._is_finished_N, ends_C))[best]

    def _should_continue(self, all_end: bool) -> bool:
        """Return True if a running beam may still become better than the worst ended one."""
        beams, length = self.beams, len(self.running[0])
        # A positive power divides longer continuations by more, so the best possible score is at the maximum length.
        if beams.early_stopping == "never" and beams.length_penalty > 0:
            length = self._max_new_tokens
        hoped_for = self._scores_N[0] / length**beams.length_penalty
        # A search with fewer ended continuations than beams always continues.
        worst_N = torch.where(self._is_finished_N, self._finished_scores_N.min(), torch.tensor(_NEVER))
        self._may_improve = self._may_improve and bool((hoped_for > worst_N).any())
        is_full = beams.early_stopping is True and bool(self._is_finished_N.all())
        return self._may_improve and not is_full and not all_end
