"""Estimators of one group of W steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import OptionError
from .base import Base, Weight, by_row, check_int, check_number, identity, where_picked, within


@dataclass(frozen=True)
class Exact(Base):
    """Every step keeps its own backward: C is the identity."""

    name: str = "exact"

    def nodes(self, n: int) -> tuple[int, ...]:
        return tuple(range(n))

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor | int] = ()) -> list[list[Weight]]:
        return identity(len(lam))

    def usable(self, lam: Sequence[Weight]) -> None:
        return None


@dataclass(frozen=True)
class Endpoints(Base):
    """The first and last step of a group, by linear interpolation (JAGG, arXiv 2607.17572).

    C[a, k] = 1 - lambda_k and C[b, k] = lambda_k with lambda_k = (t_k - t_a) / (t_b - t_a).
    Two backwards. Exact for groups of one or two steps with any network, and for any group when the velocity is
    affine in (z, t) and the states lie on a line in t; else its error grows with the square of the span.
    """

    name: str = "endpoints"

    def nodes(self, n: int) -> tuple[int, ...]:
        return tuple(range(n)) if n <= 2 else (0, n - 1)

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor | int] = ()) -> list[list[Weight]]:
        n = len(lam)
        if n <= 2:
            return identity(n)
        inner = lam[1:-1]
        return [[1.0, *(1.0 - x for x in inner), 0.0], [0.0, *inner, 1.0]]


def _chances(lam: Sequence[Weight]) -> list[Weight]:
    """q_k of the interior steps, proportional to lambda_k (1 - lambda_k); one number a row."""
    rows = [by_row(x) if isinstance(x, Tensor) else x for x in lam[1:-1]]
    sizes = [x * (1.0 - x) for x in rows]
    total = sum(sizes[1:], sizes[0])
    return [s / total for s in sizes]


def _interior(lam: Sequence[Weight], u: Tensor) -> Tensor:
    """The interior step m with probability q_m, from a uniform u: how many partial sums of q do not exceed u."""
    u = by_row(u)
    pick = torch.ones_like(u, dtype=torch.int64)
    total: Weight = 0.0
    for q in _chances(lam)[:-1]:
        total = total + q
        pick = pick + (u >= total).to(torch.int64)
    return pick


def _correction(lam: Sequence[Weight], pick: Tensor | int, p: float) -> tuple[list[Weight], list[Weight], list[Weight]]:
    """What a drawn step adds to the interior columns of C: at the first, the last and the drawn node.

    With h_k = 1 / (p q_k) at k = m and 0 elsewhere: -(1 - lambda_k) h_k, -lambda_k h_k and h_k. Its mean over m
    is the difference of the identity and linear interpolation, over p.
    """
    inner = lam[1:-1]
    sizes = [1.0 / (p * q) for q in _chances(lam)]
    h = [where_picked(pick, k, size, x) for k, (size, x) in enumerate(zip(sizes, inner, strict=True), 1)]
    pairs = list(zip(inner, h, strict=True))
    return [(x - 1.0) * y for x, y in pairs], [-x * y for x, y in pairs], list(h)


@dataclass(frozen=True)
class Corrected(Base):
    """Endpoints, and one interior step m drawn with probability q_m proportional to lambda_m (1 - lambda_m).

    The drawn step has cotangent g_m / (p q_m), and the endpoints give back (1 - lambda_m) / (p q_m) g_m and
    lambda_m / (p q_m) g_m. Three backwards. Used with probability p, and endpoints otherwise, C is the identity in
    the mean (`Debiased`), for any network. Where endpoints are exact the draw changes nothing, so that there is no
    variance either. Groups of one or two steps are exact; so is a group of three where p = 1.
    """

    p: float = 1.0
    name = "corrected"
    gated = False
    extrapolates = True

    def __post_init__(self) -> None:
        _check_p(self.p)

    def _draws(self, n: int) -> bool:
        return n > 3 or (n == 3 and self.p < 1)

    def nodes(self, n: int) -> tuple[int, ...]:
        return (0, n - 1) if self._draws(n) else tuple(range(n))

    def drawn(self, n: int) -> int:
        return int(self._draws(n))

    def picks(self, lam: Sequence[Weight], u: Sequence[Tensor]) -> list[Tensor]:
        return [_interior(lam, u[0])] if self._draws(len(lam)) else []

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor | int] = ()) -> list[list[Weight]]:
        if not self._draws(len(lam)):
            return identity(len(lam))
        first, last, own = _correction(lam, picks[0], self.p)
        inner = lam[1:-1]
        return [
            [1.0, *((1.0 - x) + c for x, c in zip(inner, first, strict=True)), 0.0],
            [0.0, *(x + c for x, c in zip(inner, last, strict=True)), 1.0],
            [0.0, *own, 0.0],
        ]

    def usable(self, lam: Sequence[Weight]) -> Tensor | None:
        """A step at the time of an end is never drawn. The others may be in any order: they are dealt."""
        return within(lam) if self._draws(len(lam)) else None


@dataclass(frozen=True)
class Correction(Base):
    """C of `Corrected(1)` less C of `Endpoints`: in the mean, exact less endpoints, the bias of endpoints.

    Three backwards of its own, of which two are at the endpoints. The weights of a step sum to 0. Groups of one or
    two steps need none: no nodes.
    """

    name = "correction"
    partial = True
    gated = False
    sums_to_one = False
    extrapolates = True

    def nodes(self, n: int) -> tuple[int, ...]:
        return (0, n - 1) if n > 2 else ()

    def drawn(self, n: int) -> int:
        return int(n > 2)

    def picks(self, lam: Sequence[Weight], u: Sequence[Tensor]) -> list[Tensor]:
        return [_interior(lam, u[0])] if len(lam) > 2 else []

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor | int] = ()) -> list[list[Weight]]:
        return [[0.0, *row, 0.0] for row in _correction(lam, picks[0], 1.0)] if len(lam) > 2 else []

    def usable(self, lam: Sequence[Weight]) -> Tensor | None:
        return within(lam)


@dataclass(frozen=True)
class Subset(Base):
    """k random steps of a group of n: the honest baseline that knows nothing of Jacobians.

    The group is cut into k strata of consecutive steps, as equal as can be; of each, one step is drawn uniformly
    and weighed with the size of the stratum, the others get nothing. C is the identity in the mean. k backwards
    (default: half of the steps, rounded up), exact for k >= n. The noise is the difference of neighbouring steps'
    gradients: small for flow matching, about as large as the gradient for policy gradients.
    """

    k: int | None = None
    name = "subset"
    gated = False
    sums_to_one = False
    extrapolates = True

    def __post_init__(self) -> None:
        if self.k is not None:
            check_int("k", self.k, 1, "a number of steps to keep of each group: 1 or more, or None for half of them")

    def _strata(self, n: int) -> list[range]:
        k = min(n, (n + 1) // 2 if self.k is None else self.k)
        return [range(i * n // k, (i + 1) * n // k) for i in range(k)]

    def _random(self, n: int) -> list[range]:
        return [s for s in self._strata(n) if len(s) > 1]

    def slots(self, n: int) -> tuple[int, ...]:
        return tuple(s[0] for s in self._random(n))

    def nodes(self, n: int) -> tuple[int, ...]:
        """Strata of one step."""
        return tuple(s[0] for s in self._strata(n) if len(s) == 1)

    def drawn(self, n: int) -> int:
        return len(self._random(n))

    def picks(self, lam: Sequence[Weight], u: Sequence[Tensor]) -> list[Tensor]:
        strata = self._random(len(lam))
        # u * size can round up to size
        return [
            s[0] + (by_row(x) * len(s)).to(torch.int64).clamp(max=len(s) - 1) for s, x in zip(strata, u, strict=True)
        ]

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor | int] = ()) -> list[list[Weight]]:
        n = len(lam)
        rows: list[list[Weight]] = [[float(j == k) for k in range(n)] for j in self.nodes(n)]
        for stratum, pick in zip(self._random(n), picks, strict=True):
            size = float(len(stratum))
            rows.append([where_picked(pick, k, size, 0.0) if k in stratum else 0.0 for k in range(n)])
        return rows

    def usable(self, lam: Sequence[Weight]) -> None:
        return None


SIDES = ("left", "right")


@dataclass(frozen=True)
class Inner(Base):
    """Two nodes, the steps next to the ends of the group: linear through them, extrapolated to the ends.

    C[a, k] = 1 - mu and C[b, k] = mu with mu = (lambda_k - lambda_a) / (lambda_b - lambda_a), a = 1 and b = n - 2.
    Two backwards. Where J is quadratic in t and cotangents are alike along the group its error is sum_k (lambda_k -
    lambda_a)(lambda_k - lambda_b), against sum_k lambda_k (lambda_k - 1) of endpoints: 1/7 of it for eight even steps.
    Groups of less than five steps take their ends. Exact where endpoints are.
    """

    name = "inner"
    extrapolates = True

    def nodes(self, n: int) -> tuple[int, ...]:
        return (1, n - 2) if n > 4 else Endpoints().nodes(n)

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor | int] = ()) -> list[list[Weight]]:
        n = len(lam)
        if n <= 4:
            return Endpoints().weights(lam)
        a, b = lam[1], lam[n - 2]
        mu: list[Weight] = [(x - a) / (b - a) for x in lam]
        mu[1], mu[n - 2] = 0.0, 1.0
        return [[1.0 - x for x in mu], mu]


@dataclass(frozen=True)
class Lagrange(Base):
    """The quadratic through the Jacobians of the first, a middle and the last step of a group.

    With m the middle: C[a, k] = (m - x)(1 - x) / m, C[m, k] = x (1 - x) / (m (1 - m)), C[b, k] = x (x - m) / (1 - m)
    for x = lambda_k and m = lambda_m. Three backwards. Exact for groups of three steps, and where J is quadratic in
    t; else the error grows with the third power of the span. Weights lie outside of [0, 1], and far outside where
    the middle step is close to an end in time.

    side: which of the two middle steps of an even group.
    """

    side: str = "left"
    name = "lagrange"
    extrapolates = True

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise OptionError(
                f"side={self.side!r} is not known. Use 'left' or 'right': the middle step of even groups."
            )

    def _middle(self, n: int) -> int:
        return (n - 1) // 2 if self.side == "left" else n // 2

    def nodes(self, n: int) -> tuple[int, ...]:
        return tuple(range(n)) if n <= 3 else (0, self._middle(n), n - 1)

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor | int] = ()) -> list[list[Weight]]:
        n = len(lam)
        if n <= 3:
            return identity(n)
        at = self._middle(n)
        m = lam[at]
        rows: list[list[Weight]] = [[], [], []]
        for k, x in enumerate(lam):
            own = [float(k == j) for j in (0, at, n - 1)]
            column = [(m - x) * (1.0 - x) / m, x * (1.0 - x) / (m * (1.0 - m)), x * (x - m) / (1.0 - m)]
            for row, c in zip(rows, own if any(own) else column, strict=True):
                row.append(c)
        return rows


def _check_p(p: object) -> None:
    hint = "a probability above 0 and up to 1, of correcting a step. Use estimator='endpoints' for never"
    check_number("p", p, 0, 1, hint, open_low=True)
