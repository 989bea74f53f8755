"""Error control: which steps keep their backward, so that the predicted error of the step's gradient stays below tol.

A trajectory is cut into spans of at most W steps, each halved down to single steps: a binary tree. A span that is
merged keeps the backwards of its two ends, shared with its neighbours, and interpolates linearly between them; a span
that is halved keeps that of its middle step too. So an ODE solver refines its step where the local error is large.

Plain tensor code and plain data: `passes/control.py` traces it into the graph, tests call it as it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .estimators import Weight
from .gates import row_shape


@dataclass(frozen=True)
class Span:
    """Steps a to b of a lane, b - a > 1. middle: the step that halving it keeps. parent: the span it is a half of."""

    a: int
    b: int
    middle: int
    parent: int | None  # its place in the list of spans

    @property
    def inner(self) -> range:
        return range(self.a + 1, self.b)


def spans(nodes: Sequence[int]) -> list[Span]:
    """All spans between the steps that always keep their backward, each before its halves.

    Every step between two nodes is the middle of exactly one span.
    """
    found: list[Span] = []

    def cut(a: int, b: int, parent: int | None) -> None:
        if b - a < 2:
            return
        own, middle = len(found), (a + b) // 2
        found.append(Span(a, b, middle, parent))
        cut(a, middle, own)
        cut(middle, b, own)

    for a, b in pairwise(nodes):
        cut(a, b, None)
    return found


def joined(trees: Sequence[Sequence[Span]]) -> list[Span]:
    """The spans of several lanes as one list."""
    found: list[Span] = []
    for tree in trees:
        first = len(found)
        found += [s if s.parent is None else dataclasses.replace(s, parent=first + s.parent) for s in tree]
    return found


def positions(lam: Sequence[Weight], span: Span) -> list[Weight]:
    """Place of each step of a span between its ends, 0 and 1 for the ends; lam: places in the lane."""
    a, b = lam[span.a], lam[span.b]
    return [0.0, *((lam[k] - a) / (b - a) for k in span.inner), 1.0]


def choose(errors: Sequence[Tensor], tree: Sequence[Span], whole: Tensor, limit: Tensor) -> tuple[list[Tensor], Tensor]:
    """Which spans are halved, and the predicted error of what is left.

    errors: E of each span, the error in the last layer's weight gradient if it is merged (`gates.head_error`). whole:
    that gradient H of the whole step. limit: the largest predicted error, relative, a scalar. One price per saved
    backward holds for all spans: a span is merged if |E|^2 / (backwards saved) is at most the price, and its parent
    is not; the price is the one that saves most while

        predicted = max(|sum of E|, sqrt(sum of |E|^2)) / |H| <= limit       over the merged spans

    (the first is the true error of that layer; the second does not rely on errors that happen to cancel). Only the
    spans' own prices make a difference, so that all are tried at once. NaN or infinity anywhere halves every span.
    Returns ([bool scalar for each span], predicted).
    """
    scale = whole.abs().max().clamp_min(torch.finfo(whole.dtype).tiny)  # squares of small gradients are 0 in fp32
    E = torch.stack([(e / scale).flatten() for e in errors])
    gram, size = E @ E.T, (whole / scale).square().sum()
    squares = gram.diagonal()
    own = torch.stack([squares[i] / len(s.inner) for i, s in enumerate(tree)])
    price = torch.cat([-torch.ones_like(own[:1]), own])  # the first merges nothing
    halved: list[Tensor] = []
    merged: list[Tensor] = []
    for i, span in enumerate(tree):
        here = torch.ones_like(price, dtype=torch.bool) if span.parent is None else halved[span.parent]
        halved.append(here & ~(own[i] <= price))
        merged.append(here & (own[i] <= price))
    M = torch.stack(merged).to(gram.dtype)
    total = torch.maximum(((gram @ M) * M).sum(0), squares @ M)
    saved = torch.stack([float(len(s.inner)) * m for s, m in zip(tree, M.unbind(0), strict=True)]).sum(0)
    fits = (total <= limit.to(total.dtype).square() * size) & size.isfinite()
    best = torch.where(fits, saved, torch.zeros_like(saved)).argmax().reshape(1)  # the first saves 0, and is the first
    chosen = torch.stack(halved).index_select(1, best).squeeze(1)
    predicted = (total.index_select(0, best).squeeze(0) / size.clamp_min(torch.finfo(size.dtype).tiny)).sqrt()
    return list(chosen.unbind(0)), predicted


def relative(errors: Sequence[Tensor], whole: Tensor) -> list[Tensor]:
    """|E| / |H| of every span."""
    scale = whole.abs().max().clamp_min(torch.finfo(whole.dtype).tiny)
    size = (whole / scale).square().sum().sqrt()
    return [(e / scale).square().sum().sqrt() / size for e in errors]


def weights(lam: Sequence[Weight], runs: Sequence[Tensor | None]) -> Tensor:
    """C[j, k] of every step j of a lane, where step j runs its backward if runs[j] says so (None: always).

    Linear interpolation between the steps that run: C[a, k] = 1 - mu and C[b, k] = mu for the last one a and the first
    one b around step k, mu = (lambda_k - lambda_a) / (lambda_b - lambda_a). Shape (n, n), or (n, n, B) where places
    are by row. Rows of steps that do not run are zero; zeros and ones are exact. The first and the last step run.
    """
    flag = next(r for r in runs if r is not None)
    place = torch.arange(len(lam), device=flag.device)
    here = torch.stack([torch.ones_like(flag) if r is None else r for r in runs])
    a = torch.where(here & (place <= place[:, None]), place, 0).amax(1)
    b = torch.where(here & (place >= place[:, None]), place, len(lam) - 1).amin(1)
    places = [
        x.reshape(row_shape(x)) if isinstance(x, Tensor) else torch.full_like(flag, x, dtype=torch.float64) for x in lam
    ]
    where = torch.stack(torch.broadcast_tensors(*(x.double() for x in places)))

    def by_row(x: Tensor) -> Tensor:
        return x.reshape(*x.shape, *(1 for _ in where.shape[1:]))

    at_a, at_b = where.index_select(0, a), where.index_select(0, b)
    mu = torch.where(by_row(a == b), 0.0, (where - at_a) / (at_b - at_a))
    first, last = (by_row(place[:, None] == x) for x in (a, b))
    return torch.where(first, 1.0 - mu, 0.0) + torch.where(last, mu, 0.0)


class Ratio:
    """Of true errors to predicted ones: what a prediction is multiplied with, from the audited steps.

    The largest of the last n <= 19 measured ratios, times 1 + 1/n: were ratios exchangeable, a new one would exceed
    the largest of 19 in one step of 20, so that the error stays below tol in 95 %; the factor stands for the ratios not
    seen yet (it makes the largest of n uniform numbers an unbiased estimate of their bound).
    """

    FIRST = 2.0  # before anything is measured; docs/bench/frontier.md has 1.5 to 2.9, frontier-dit.md 1.1 to 8.3
    KEPT = 19

    def __init__(self) -> None:
        self.measured: deque[float] = deque(maxlen=self.KEPT)

    @property
    def value(self) -> float:
        return max(self.measured) * (1 + 1 / len(self.measured)) if self.measured else self.FIRST

    def limit(self, tol: float) -> float:
        """The largest predicted error for a true one of tol."""
        return tol / self.value

    def update(self, error: float, predicted: float) -> None:
        """Takes in an audited step.

        One that was exact measures nothing, and the oldest ratio is forgotten: else one outlier could make every
        step exact for ever. One with numbers that are not finite says nothing.
        """
        if not (math.isfinite(error) and math.isfinite(predicted)):
            return
        if predicted > 1e-6:
            self.measured.append(error / predicted)
        elif len(self.measured) > 1:
            self.measured.popleft()
