"""Estimators that take all T steps of a lane as one group."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import OptionError
from .base import Base, Weight, check_int, check_number


@dataclass(frozen=True)
class Knots(Base):
    """Linear interpolation between knots, each shared by the two pieces that it ends.

    Between the knots a and b: C[a, k] = 1 - mu and C[b, k] = mu with mu = (lambda_k - lambda_a) /
    (lambda_b - lambda_a). One backward a knot, 1 + T / stride of them, where disjoint groups of the same span need
    2 T / (stride + 1): 6 against 8 at T = 16. The error is that of endpoints. Exact where endpoints are.

    stride: steps from knot to knot (None: 3); W - 1 has the span of groups of W.
    phase: of the first knot after step 0. The first and last step are always knots.
    """

    stride: int | None = None
    phase: int = 0
    name = "knots"
    whole = True

    def __post_init__(self) -> None:
        if self.stride is not None:
            check_int("stride", self.stride, 1, "a number of steps between two knots. Use W - 1 for the span of W")
        check_int("phase", self.phase, 0, f"a number of steps from 0 to stride - 1 = {self._stride - 1}")
        if self.phase >= self._stride:
            raise OptionError(f"phase={self.phase} is not below the stride, {self._stride}: knots repeat after it.")

    @property
    def _stride(self) -> int:
        return 3 if self.stride is None else self.stride

    def nodes(self, n: int) -> tuple[int, ...]:
        return tuple(sorted({0, n - 1, *range(self.phase, n, self._stride)}))

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor | int] = ()) -> list[list[Weight]]:
        nodes = self.nodes(len(lam))
        rows: list[list[Weight]] = [[0.0] * len(lam) for _ in nodes]
        for j, node in enumerate(nodes):
            rows[j][node] = 1.0
        for k, j, mu in self._between(lam):
            rows[j][k], rows[j + 1][k] = 1.0 - mu, mu
        return rows

    def _between(self, lam: Sequence[Weight]) -> list[tuple[int, int, Weight]]:
        """For each step that is no knot: the step, the number of the knot before it, and mu."""
        nodes, found = self.nodes(len(lam)), []
        for k in range(len(lam)):
            j = bisect_left(nodes, k)
            if nodes[j] != k:
                a, b = lam[nodes[j - 1]], lam[nodes[j]]
                found.append((k, j - 1, (lam[k] - a) / (b - a)))
        return found


@dataclass(frozen=True)
class Causal(Base):
    """Nodes at or before a step in sampling order only, by extrapolation from the two latest ones.

    Step k after the nodes a < b: J_k ~ J_b + e (J_b - J_a), e = factor (lambda_k - lambda_b) / (lambda_b -
    lambda_a), so C[b, k] = 1 + e and C[a, k] = -e. On stochastic trajectories a later state has seen the noise of
    step k, so that an interpolation from both sides keeps a bias however large the batch: this one does not.

    factor: 1 is exact for affine networks; 0 holds the Jacobian of the latest node. 1.5 was best in early trials with
    policy gradients; in `bench/grpo.py` neither is told from the other.
    stride: nodes are steps 0 and 1, which a step after them needs both, and then every `stride`-th: 0, 1, 3, 5, ...
    (1 + T / 2 backwards).
    last: the last step is a node too. No step is extrapolated from it, so this can only take an error away, for at
    most one backward more; late steps have the largest gradients on SDE trajectories.
    """

    factor: float = 1.5
    stride: int = 2
    last: bool = True
    name = "causal"
    whole = True
    extrapolates = True

    def __post_init__(self) -> None:
        check_number("factor", self.factor, 0, math.inf, "a number from 0 on: 1 extrapolates in full, 1.5 by half more")
        check_int("stride", self.stride, 1, "a number of steps between two nodes. Use 2 for every other step")
        if not isinstance(self.last, bool):
            raise OptionError(f"last={self.last!r} is not True or False: whether the last step is always a node.")

    def nodes(self, n: int) -> tuple[int, ...]:
        end = {n - 1} if self.last else set()
        return tuple(sorted({0, *range(1, n, self.stride), *end}))

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor | int] = ()) -> list[list[Weight]]:
        nodes = self.nodes(len(lam))
        rows: list[list[Weight]] = [[0.0] * len(lam) for _ in nodes]
        for k, x in enumerate(lam):
            j = bisect_left(nodes, k)
            if j < len(nodes) and nodes[j] == k:
                rows[j][k] = 1.0
                continue
            a, b = lam[nodes[j - 2]], lam[nodes[j - 1]]
            e = self.factor * ((x - b) / (b - a))
            rows[j - 1][k], rows[j - 2][k] = 1.0 + e, -e
        return rows
