"""Estimators as plain data: which steps of a group keep their backward, and with which weights.

Every estimator has one form (`n` steps in a group, cotangents g_k, Jacobians J_j):

    gradient of a group = sum over nodes j of  J_j^T  sum over steps k of  C[j, k] g_k

so an estimator is a list of nodes and a weight matrix C. Nothing here knows a graph: weights are computed
from the times by ordinary tensor code, which `passes/merge.py` traces into the graph and tests call as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .errors import OptionError

# An entry of C: a number known in advance (exact zeros and ones keep an infinite or NaN cotangent of one step
# out of the sums it has no part in), or a tensor with the shape of the times, () or (B,).
Weight = float | Tensor

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Estimator(Protocol):
    """What a rewrite needs to know of an estimator."""

    @property
    def name(self) -> str: ...

    def nodes(self, n: int) -> tuple[int, ...]:
        """Steps (0 .. n-1) of a group of n that keep their backward."""
        ...

    def weights(self, lam: Sequence[Weight]) -> list[list[Weight]]:
        """C[j][k] for every node j and step k of the group, from lambda_k, the position of step k in it."""
        ...


@dataclass(frozen=True)
class Exact:
    """Every step keeps its own backward: C is the identity."""

    name: str = "exact"

    def nodes(self, n: int) -> tuple[int, ...]:
        return tuple(range(n))

    def weights(self, lam: Sequence[Weight]) -> list[list[Weight]]:
        n = len(lam)
        return [[float(j == k) for k in range(n)] for j in range(n)]


@dataclass(frozen=True)
class Endpoints:
    """The first and last step of a group, by linear interpolation (JAGG, arXiv 2607.17572).

    C[a, k] = 1 - lambda_k and C[b, k] = lambda_k with lambda_k = (t_k - t_a) / (t_b - t_a).
    Exact for groups of one or two steps with any network, and for any group when the velocity is affine in
    (z, t) and the states lie on a line in t.
    """

    name: str = "endpoints"

    def nodes(self, n: int) -> tuple[int, ...]:
        return tuple(range(n)) if n <= 2 else (0, n - 1)

    def weights(self, lam: Sequence[Weight]) -> list[list[Weight]]:
        n = len(lam)
        if n <= 2:
            return Exact().weights(lam)
        inner = lam[1:-1]
        return [[1.0, *(1.0 - x for x in inner), 0.0], [0.0, *inner, 1.0]]


def lambdas(times: Sequence[Tensor]) -> list[Weight]:
    """Position of each step between the two ends of its group, `(t - t_a) / (t_b - t_a)`.

    times: one tensor a step, shape () or (B,) (or any shape that broadcasts to the front of the velocity's),
    floating or integer, in any unit: sigma, 1000 sigma, rising or falling, since only ratios of differences
    enter. Returns floats 0 and 1 for the ends and tensors (float64 for integer or float64 times, else
    float32) between them; not finite where t_a == t_b.
    """
    n = len(times)
    if n == 1:
        return [0.0]
    wide = [t.to(torch.float32 if t.dtype in _NARROW else torch.float64) for t in times]
    span = wide[-1] - wide[0]
    return [0.0, *((t - wide[0]) / span for t in wide[1:-1]), 1.0]


def index_lambdas(n: int) -> list[Weight]:
    """Positions by index, j / (n - 1): what the probable author code uses in place of the times."""
    return [0.0] if n == 1 else [j / (n - 1) for j in range(n)]


ESTIMATORS: dict[str, type] = {"endpoints": Endpoints, "exact": Exact}


def resolve(estimator: str | Estimator) -> Estimator:
    """The estimator of that name, or the object itself. Raises OptionError for anything else."""
    if isinstance(estimator, str):
        if estimator not in ESTIMATORS:
            raise OptionError(
                f"estimator={estimator!r} is not known. Use one of {sorted(ESTIMATORS)}, "
                "or an object with nodes(n) and weights(lam)."
            )
        return ESTIMATORS[estimator]()
    if callable(getattr(estimator, "nodes", None)) and callable(getattr(estimator, "weights", None)):
        return estimator
    raise OptionError(
        f"estimator must be a name {sorted(ESTIMATORS)} or an object with nodes(n) and weights(lam); "
        f"found {type(estimator).__name__}."
    )
