"""Chunks of packed documents dealt to ring indices: equal tokens, even causal attention, few rows that travel.

What a ring index receives of a document are the tokens before its last one there, less its own. All indices together own
all tokens, so the rows that travel are Σ reach − tokens, over every (ring index, document) with reach the place of the
index's last token in the document. A document on one index costs nothing; each cut at place x costs x rows, whoever
takes the head. So: cut few documents, cut them near their heads, and give an index that takes a deep tail light tokens
to go with it.

The search takes two ring indices at a time, lays their chunks on a circle, document after document, and halves the
circle anew: every half has the same number of chunks, some half has half of the work, and its two ends say what it cuts.
All halves of several circles are tried for every pair at once. Everything is integers and there is no randomness but a
fixed hash, so every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

GRAIN = 128
"""Tokens that runs are multiples of, where a ring index's share is: a tile of the attention kernels."""
MOST_CHUNKS = 64
"""Chunks of a ring index: longer shares are cut more coarsely."""
TOLERANCE = 0.02
"""Work above the mean that a ring index may be given for the sake of fewer rows."""
ROUNDS = 45
CIRCLES = 8
BANK = 48

Pieces = list[tuple[int, int]]
"""Start and count of each piece of a ring index, ascending."""


def deal(num_tokens: int, degree: int, cu_seqlens: Sequence[int]) -> list[Pieces]:
    share = num_tokens // degree
    bounds = np.unique(np.asarray(cu_seqlens, dtype=np.int64))
    if degree == 1:
        return [[(0, num_tokens)]]
    if len(bounds) == 2 and share % 2 == 0 and (share % (2 * GRAIN) == 0 or share % GRAIN):
        part = share // 2
        return [[(p * part, part) for p in (r, 2 * degree - 1 - r)] for r in range(degree)]
    chunks = cut(num_tokens, degree, bounds)
    owner = improve(chunks, start_of(chunks))
    return _pieces(chunks, owner)


@dataclass(frozen=True)
class Chunks:
    degree: int
    starts: np.ndarray
    ends: np.ndarray
    document: np.ndarray
    work: np.ndarray
    reach: np.ndarray
    first: int
    extra: np.ndarray
    grain: int


def cut(num_tokens, degree, bounds):
    share = num_tokens // degree
    aim = GRAIN if share >= 8 * GRAIN or share % GRAIN == 0 else max(1, share // 8)
    grain = next((g for g in range(aim, aim // 2, -1) if share % g == 0), aim)
    grain *= -(-(share // grain) // MOST_CHUNKS)
    rest = share % grain
    first = rest * degree
    starts = np.concatenate(
        [np.arange(0, first, rest) if rest else np.zeros(0, np.int64), np.arange(first, num_tokens, grain)]
    )
    ends = np.append(starts[1:], num_tokens)
    cuts = np.union1d(starts, bounds)
    begin = bounds[np.searchsorted(bounds, cuts[:-1], side="right") - 1]
    a, b = cuts[:-1] - begin, cuts[1:] - begin
    summed = np.concatenate([[0], np.cumsum((b * (b + 1) - a * (a + 1)) // 2)])
    work = np.diff(summed[np.searchsorted(cuts, np.append(starts, num_tokens))])
    doc = np.searchsorted(bounds, starts, side="right") - 1
    reach = np.minimum(ends, bounds[doc + 1]) - bounds[doc]
    k = degree if rest else 0
    extra = work[:k] if rest else np.zeros(degree, np.int64)
    return Chunks(degree, starts[k:], ends[k:], doc[k:], work[k:], reach[k:], first, extra, grain)


START = "length"


def start_of(c):
    n = len(c.starts)
    s = n // c.degree
    if START == "contiguous":
        return np.arange(n) // s
    line = np.lexsort((np.arange(n), np.bincount(c.document)[c.document]))
    owner = np.empty(n, np.int64)
    r = np.arange(c.degree)
    lo, hi = (s + 1) // 2, s // 2
    # head-tail; odd shares alternate
    heads = np.where(r % 2 == 0, lo, hi)
    own = np.concatenate([np.repeat(r, heads), np.repeat(r[::-1], (s - heads)[::-1])])
    owner[line] = own
    return owner


def mix(x):
    x = x.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))


def circles(c, bank):
    n = len(c.starts)
    doc = c.document
    D = int(doc[-1]) + 1
    h = mix(np.arange(bank * D)).reshape(bank, D)
    rank = np.argsort(np.argsort(h, axis=1), axis=1)  # order of docs
    size = np.bincount(doc, minlength=D)
    rank[0] = np.argsort(np.lexsort((np.arange(D), size)))
    rank[1] = np.arange(D)
    back = (h & np.uint64(1)).astype(bool)
    back[:2] = False
    flip = back[:, doc]
    key = rank[:, doc] * n + np.where(flip, n - 1 - np.arange(n), np.arange(n))
    order = np.argsort(key, axis=1)
    return order, np.take_along_axis(flip, order, 1)


def pairings(degree) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    m = degree + degree % 2
    turn = np.arange(m - 1)
    while True:
        for t in range(m - 1):
            seats = np.concatenate([[m - 1], (turn + t) % (m - 1)])
            a, b = seats[: m // 2], seats[::-1][: m // 2]
            keep = (a < degree) & (b < degree)
            yield a[keep], b[keep]


HIST = None
MU = 128
LAM = 64


def improve(c, owner):
    n, R = len(c.starts), c.degree
    S = n // R
    mean = (int(c.work.sum()) + int(c.extra.sum())) // R
    cap = mean + int(mean * TOLERANCE)
    unit = max(1, mean // (LAM * S * c.grain))
    order, flip = circles(c, BANK)
    idle = 0
    for t, (a, b) in zip(range(ROUNDS), pairings(R)):
        P = len(a)
        pick = (np.arange(CIRCLES) + t * CIRCLES) % BANK
        if t % 2 == 0:
            pick[:2] = (0, 1)
        od, fl = order[pick], flip[pick]
        pair = np.full(R, P, np.int16)
        pair[a] = np.arange(P)
        pair[b] = np.arange(P)
        side = np.zeros(R, np.int64)
        side[b] = 1
        po = pair[owner]
        # circles of pairs
        place = np.argsort(po[od], axis=1, kind="stable")[:, : 2 * S * P]
        ch = np.take_along_axis(od, place, 1).reshape(CIRCLES, P, 2 * S)
        back = np.take_along_axis(fl, place, 1).reshape(CIRCLES, P, 2 * S)
        d, w, e = c.document[ch], c.work[ch], c.reach[ch]
        inside = d[..., 1:] == d[..., :-1]
        cost = np.zeros(ch.shape, np.int64)
        cost[..., 1:] = np.where(inside, np.where(back[..., 1:], e[..., 1:], e[..., :-1]), 0)
        c0, c1 = cost[..., :S], cost[..., S:]
        same = d[..., :S] == d[..., S:]
        same[..., 1:] &= inside[..., : S - 1]
        same[..., 0] = False
        # both cuts in same doc: doc[i-1]==doc[i] (c0>0), doc[i+S-1]==doc[i+S], doc[i]==doc[i+S]
        rows = np.where(same & (c1 > 0), np.maximum(c0, c1), c0 + c1)
        cw = np.zeros((CIRCLES, P, 2 * S + 1), np.int64)
        np.cumsum(w, -1, out=cw[..., 1:])
        W = cw[..., S : 2 * S] - cw[..., :S]
        T = cw[..., -1:]
        # two ways to give halves if extra differ: only a gets window
        xa, xb = c.extra[a][:, None], c.extra[b][:, None]
        pen = (np.maximum(W + xa - cap, 0) + np.maximum(T - W + xb - cap, 0)) // unit
        score = rows + pen
        t_best = np.argmin(score, -1)  # K,P
        s_best = np.take_along_axis(score, t_best[..., None], -1)[..., 0]
        # runs
        i = np.arange(2 * S)
        inwin = ((i - t_best[..., None]) % (2 * S)) < S
        sides = np.zeros((CIRCLES, n), bool)
        np.put_along_axis(sides, ch.reshape(CIRCLES, -1), (~inwin).reshape(CIRCLES, -1), 1)
        link = po[1:] == po[:-1]
        idx = np.nonzero(link & (po[1:] < P))[0]
        diff = sides[:, idx] != sides[:, idx + 1]
        sw = np.zeros((CIRCLES, P + 1), np.int64)
        for k in range(CIRCLES):
            sw[k] = np.bincount(po[idx], diff[k], minlength=P + 1)
        s_best = s_best + MU * sw[:, :P]
        # current
        lists = np.argsort(owner, kind="stable").reshape(R, S)
        ld = c.document[lists]
        deep = np.ones(ld.shape, bool)
        deep[:, :-1] = ld[:, 1:] != ld[:, :-1]
        rr = (c.reach[lists] * deep).sum(1)
        wr = c.work[lists].sum(1) + c.extra
        D0, B0, E0 = d[0], back[0], e[0]
        new = np.ones(D0.shape, bool)
        new[:, 1:] = ~inside[0]
        last = np.ones(D0.shape, bool)
        last[:, :-1] = ~inside[0]
        base = (E0 * np.where(B0, new, last)).sum(1)
        cursw = np.bincount(po[idx], owner[idx] != owner[idx + 1], minlength=P + 1)[:P].astype(np.int64)
        cur = rr[a] + rr[b] - base + (np.maximum(wr[a] - cap, 0) + np.maximum(wr[b] - cap, 0)) // unit + MU * cursw
        k_best = np.argmin(s_best, 0)
        gain = cur - s_best[k_best, np.arange(P)]
        better = gain > 0
        if HIST is not None:
            HIST.append(int(rr.sum()) - n * c.grain)
        idle = 0 if better.any() else idle + 1
        if idle >= 2 * (R - 1):
            break
        upd = better[np.minimum(po, P - 1)] & (po < P)
        newside = sides[k_best[np.minimum(po, P - 1)], np.arange(n)]
        cand = np.where(newside, b[np.minimum(po, P - 1)], a[np.minimum(po, P - 1)])
        owner = np.where(upd, cand, owner)
    return owner


def _pieces(c, owner):
    starts = np.concatenate([np.arange(c.degree) * (c.first // c.degree), c.starts]) if c.first else c.starts
    ends = np.append(starts[1:], c.ends[-1])
    owner = np.concatenate([np.arange(c.degree), owner]) if c.first else owner
    first = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
    stops = np.append(starts[first[1:]], ends[-1])
    pieces: list[Pieces] = [[] for _ in range(c.degree)]
    for s, e, r in zip(starts[first].tolist(), stops.tolist(), owner[first].tolist(), strict=True):
        pieces[r].append((s, e - s))
    return pieces
