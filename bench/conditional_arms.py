"""The arms of `bench.conditional_tokens`: the estimators of the library, and ideas that are not in it.

An inner pair extrapolates at W = 4 too and `Sometimes` begins with the other estimator: so they were run, and so they
stay; what became of them in the library are `Inner` and `Alternating`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagg_fx.estimators import (
    Base,
    Corrected,
    Debiased,
    Endpoints,
    Exact,
    Knots,
    Memory,
    Quadratic,
    Schedule,
    Subset,
    Weight,
)

# Ideas beyond the library


@dataclass(frozen=True)
class Balanced(Base):
    """Two nodes, a symmetric pair (i, n - 1 - i) drawn by row so that the leading error cancels in the mean.

    Linear interpolation from nodes at a and 1 - a errs by J'' / 2 times (lambda - a)(lambda - 1 + a), whose sum over
    the steps is n a (1 - a) - sum lambda (1 - lambda): negative for endpoints, positive for inner pairs. Drawn with
    the right chance of two neighbouring pairs, it is zero in the mean: for cotangents that are constant or linear
    along the group the estimate is then right for a Jacobian up to cubic in t, at two backwards.
    """

    name = "balanced"
    extrapolates = True

    def pairs(self, lam: Sequence[float]) -> tuple[int, float]:
        """(i, chance): pair i with that chance, else pair i + 1."""
        want = sum(x * (1 - x) for x in lam) / len(lam)
        have = [lam[i] * (1 - lam[i]) for i in range(len(lam) // 2)]
        i = max(i for i, x in enumerate(have[:-1]) if x <= want)
        return i, (have[i + 1] - want) / (have[i + 1] - have[i])

    def nodes(self, n: int) -> tuple[int, ...]:
        return () if n > 3 else tuple(range(n))

    def drawn(self, n: int) -> int:
        return 2 if n > 3 else 0

    def picks(self, lam: Sequence[Weight], u: Sequence[Tensor]) -> list[Tensor]:
        i, chance = self.pairs(lam)  # type: ignore[arg-type]
        first = torch.where(u[0] < chance, i, i + 1)
        return [first, len(lam) - 1 - first]

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor] = ()) -> list[list[Weight]]:
        if len(lam) <= 3:
            return Exact().weights(lam)
        a = torch.tensor(lam)[picks[0]]
        mu = [(x - a) / (1 - 2 * a) for x in lam]
        return [[1 - x for x in mu], mu]


@dataclass(frozen=True)
class InnerPair(Base):
    """Two nodes, the steps next to the ends: at W = 8 their leading error is 1/7 of that of endpoints."""

    name = "inner pair"
    extrapolates = True

    def nodes(self, n: int) -> tuple[int, ...]:
        return (1, n - 2)

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor] = ()) -> list[list[Weight]]:
        mu = [(x - lam[1]) / (lam[-2] - lam[1]) for x in lam]
        return [[1 - x for x in mu], mu]


@dataclass(frozen=True)
class Gauss(Base):
    """Two or three nodes off the grid of steps, at the points of the Gauss quadrature of the sum over the steps.

    Interpolation from m of them is right for a Jacobian of degree m - 1, as from any m nodes, and where cotangents are
    constant along the group its sum is right up to degree 2 m - 1. For many steps these are the Gauss-Legendre points.
    Needs a path that can be read at any t, here a straight line, and m forwards more.
    """

    points: int = 2
    name = "gauss"
    extrapolates = True

    def off_grid(self, n: int) -> tuple[float, ...]:
        centred = [k / (n - 1) - 0.5 for k in range(n)]
        second, fourth = (sum(x**power for x in centred) / n for power in (2, 4))
        if self.points == 2:
            return 0.5 - second**0.5, 0.5 + second**0.5
        return 0.5 - (fourth / second) ** 0.5, 0.5, 0.5 + (fourth / second) ** 0.5

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor] = ()) -> list[list[Weight]]:
        places = self.off_grid(len(lam))
        rows = []
        for place in places:
            others = [x for x in places if x != place]
            rows.append([math.prod((x - other) / (place - other) for other in others) for x in lam])
        return rows


@dataclass(frozen=True)
class QuadraticSometimes(Base):
    """Endpoints, and with probability p per step the quadratic's difference to endpoints, over p.

    Uses every g_k for its correction where `Debiased` uses one, but is right for a quadratic J only.
    """

    p: float = 0.25
    name = "quadratic, sometimes"
    extrapolates = True

    def variants(self) -> tuple[Any, ...]:
        return (Endpoints(), *(_Mixed(v, 1 / self.p) for v in Quadratic().variants()))

    def at(self, step: int, coin: float) -> int:
        return 0 if coin >= self.p else 1 + int(coin >= self.p / 2)


@dataclass(frozen=True)
class _Mixed(Base):
    """C of endpoints plus `times` (C of the inner less C of endpoints), nodes of the inner."""

    inner: Any
    times: float
    name = "mixed"

    def nodes(self, n: int) -> tuple[int, ...]:
        return self.inner.nodes(n)

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor] = ()) -> list[list[Weight]]:
        n = len(lam)
        ends = dict(zip(Endpoints().nodes(n), Endpoints().weights(lam), strict=True))
        rows = []
        for node, row in zip(self.nodes(n), self.inner.weights(lam), strict=True):
            plain = ends.get(node, [0.0] * n)
            rows.append([e + self.times * (c - e) for c, e in zip(row, plain, strict=True)])
        return rows


@dataclass(frozen=True)
class Sometimes(Base):
    """One estimator, and in every `every`-th step another."""

    usual: Any
    other: Any
    every: int
    name = "sometimes"
    extrapolates = True

    def variants(self) -> tuple[Any, ...]:
        return (*self.usual.variants(), *self.other.variants())

    def at(self, step: int, coin: float) -> int:
        if step % self.every:
            return self.usual.at(step, coin)
        return len(self.usual.variants()) + self.other.at(step // self.every, coin)


@dataclass(frozen=True)
class ByRow(Base):
    """`Debiased` whose coin is thrown for every row of the batch, in place of once a step."""

    p: float = 0.25
    name = "debiased by row"
    extrapolates = True

    def nodes(self, n: int) -> tuple[int, ...]:
        return (0, n - 1)

    def drawn(self, n: int) -> int:
        return 1

    def picks(self, lam: Sequence[Weight], u: Sequence[Tensor]) -> list[Tensor]:
        # Step 0 is no interior step: nothing is corrected in that row.
        chosen = Corrected(self.p).picks(lam, [(u[0] / self.p).clamp(max=1 - 1e-7)])[0]
        return [torch.where(u[0] < self.p, chosen, 0)]

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor] = ()) -> list[list[Weight]]:
        return Corrected(self.p).weights(lam, picks)


# Arms


class Arm(NamedTuple):
    """One way to compute the gradient.

    Attributes:
        make: the estimator, from W and the number of steps of the training.
        forwards, backwards: of a group of W.
        scheduled: changes in the course of a training, so that it has no value at fewer steps.
    """

    title: str
    make: Callable[[int, int], Any]
    forwards: Callable[[int], float]
    backwards: Callable[[int], float]
    scheduled: bool = False

    def cost(self, W: int) -> float:
        return self.forwards(W) + 2 * self.backwards(W)


def _arm(title: str, estimator: Any, backwards: float, forwards: float | None = None, more: float = 0) -> Arm:
    return Arm(
        title, lambda W, steps: estimator, lambda W: W + more if forwards is None else forwards, lambda W: backwards
    )


LISTED: dict[str, Arm] = {
    "exact": Arm("exact", lambda W, steps: Exact(), float, float),
    "endpoints": _arm("endpoints (the paper)", Endpoints(), 2),
    "subset2": _arm("two random steps", Subset(2), 2, forwards=2),
    "debiased1": _arm("debiased, p = 1", Debiased(1.0), 3),
    "debiased.5": _arm("debiased, p = 1/2", Debiased(0.5), 2.5),
    "debiased.25": _arm("debiased, p = 1/4", Debiased(0.25), 2.25),
    "schedule": Arm(
        "endpoints, debiased from 3/4 on",
        lambda W, steps: Schedule(((steps * 3 // 4, Endpoints()), (None, Debiased(1.0)))),
        float,
        lambda W: 2.25,
        scheduled=True,
    ),
    "quadratic": _arm("quadratic", Quadratic(), 3),
    "knots": Arm("knots, one in the middle", lambda W, steps: Knots(W // 2), float, lambda W: 3),
    "memory12": _arm("memory, every 12th, shrunk", Memory(12, 0.95, True), 2.25),
    "memory12raw": _arm("memory, every 12th", Memory(12, 0.95, False), 2.25),
    "memory6": _arm("memory, every 6th, shrunk", Memory(6, 0.95, True), 2.5),
    "memory6raw": _arm("memory, every 6th", Memory(6, 0.95, False), 2.5),
}
"""Written down before any of them was run at these settings. "Subset at equal cost" is `subset2` with more steps."""

IDEAS: dict[str, Arm] = {
    "balanced": _arm("balanced pairs", Balanced(), 2),
    "inner": _arm("inner pair", InnerPair(), 2),
    "gauss": _arm("Gauss nodes off the grid", Gauss(), 2, more=2),
    "byrow.25": _arm("debiased by row, p = 1/4", ByRow(0.25), 2.25),
    "inner+quadratic": _arm("inner pair, every 2nd step quadratic", Sometimes(InnerPair(), Quadratic(), 2), 2.5),
    "gauss3": _arm("three Gauss nodes off the grid", Gauss(3), 3, more=3),
    "gauss2+3": _arm("Gauss nodes, two and three in turn", Sometimes(Gauss(2), Gauss(3), 2), 2.5, more=2.5),
    "gauss+quadratic": _arm(
        "Gauss nodes, every 4th step quadratic", Sometimes(Gauss(), Quadratic(), 4), 2.25, more=1.5
    ),
    "gauss>quadratic": Arm(
        "Gauss nodes, quadratic from 3/4 on",
        lambda W, steps: Schedule(((steps * 3 // 4, Gauss()), (None, Quadratic()))),
        lambda W: W + 1.5,
        lambda W: 2.25,
        scheduled=True,
    ),
    "memory12quick": _arm("memory, every 12th, shrunk, beta = .8", Memory(12, 0.8, True), 2.25),
    "memory6quick": _arm("memory, every 6th, shrunk, beta = .8", Memory(6, 0.8, True), 2.5),
    "quadratic.25": _arm("quadratic with p = 1/4", QuadraticSometimes(0.25), 2.25),
}
"""Thought of while looking at results; what they show is confirmed on fresh seeds or not at all."""

ARMS = LISTED | IDEAS
