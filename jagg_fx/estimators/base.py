"""What every estimator answers, and positions of steps in their group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import OptionError

# An entry of C: a number known in advance (exact zeros and ones keep an infinite or NaN cotangent of one step
# out of the sums it has no part in), or a tensor with the shape of the times, () or (B,).
Weight = float | Tensor

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Estimator(Protocol):
    """What a rewrite needs to know of an estimator. `Base` has a default for all but the first three.

    `lam[k]` is the position of step k in its group, `lambdas` or `index_lambdas`.
    """

    @property
    def name(self) -> str: ...

    def nodes(self, n: int) -> tuple[int, ...]:
        """Steps (0 .. n-1) of a group of n that always keep their backward, ascending.

        All n of them: C is the identity, the group is exact. None, and none drawn: the estimate is zero.
        """
        ...

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor | int] = ()) -> list[list[Weight]]:
        """C[j][k] for every step k of the group and every node j: those of `nodes`, then the drawn ones."""
        ...

    @property
    def whole(self) -> bool:
        """One group is the whole lane, all its T steps; W is not used to cut it."""
        ...

    @property
    def sums_to_one(self) -> bool:
        """The weights of a step over all nodes sum to 1, in every draw."""
        ...

    @property
    def extrapolates(self) -> bool:
        """The weights of a step may lie outside of [0, 1]."""
        ...

    @property
    def gated(self) -> bool:
        """A gate may send a group to exact. Not where that would bias an estimate that is unbiased over many steps."""
        ...

    @property
    def partial(self) -> bool:
        """A part of a gradient, to be added to another estimate: only what came through the groups belongs to it."""
        ...

    def drawn(self, n: int) -> int:
        """How many more steps are drawn at random, anew each time."""
        ...

    def picks(self, lam: Sequence[Weight], u: Sequence[Tensor]) -> list[Tensor]:
        """The drawn steps, int64, all distinct. u: drawn(n) uniforms in [0, 1), of shape () or, by row, (B,)."""
        ...

    def slots(self, n: int) -> tuple[int, ...]:
        """Where the drawn steps are put: a rewrite deals the steps so that each draw is found in a fixed place.

        Steps that are not drawn fill the other places in their order; `weights` with these places as picks then
        holds for the dealt steps.
        """
        ...

    def usable(self, lam: Sequence[Weight]) -> Tensor | None:
        """Whether the times of all rows are fit for the weights, a boolean scalar. None: known in advance."""
        ...

    def variants(self) -> tuple[Estimator, ...]:
        """The estimators it changes between from step to step. Alone: itself."""
        ...

    def at(self, step: int, coin: float) -> int:
        """Which variant optimiser step `step` uses; coin is uniform in [0, 1)."""
        ...

    def measures(self, step: int) -> bool:
        """Whether optimiser step `step` also measures a correction, with the last variant."""
        ...

    def expected_backwards(self, n: int) -> float:
        """Full backwards of a group of n, the mean over draws and steps."""
        ...


class Base:
    """Defaults: a group of W, nothing drawn, weights in [0, 1] that sum to one, one variant."""

    name: str = ""
    whole: bool = False
    sums_to_one: bool = True
    extrapolates: bool = False
    gated: bool = True
    partial: bool = False

    def nodes(self, n: int) -> tuple[int, ...]:
        raise NotImplementedError

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor | int] = ()) -> list[list[Weight]]:
        raise NotImplementedError

    def drawn(self, n: int) -> int:
        return 0

    def picks(self, lam: Sequence[Weight], u: Sequence[Tensor]) -> list[Tensor]:
        return []

    def slots(self, n: int) -> tuple[int, ...]:
        free = [k for k in range(n) if k not in self.nodes(n)]
        return tuple(free[: self.drawn(n)])

    def usable(self, lam: Sequence[Weight]) -> Tensor | None:
        """Times strictly rise or fall: two equal ones are two lanes rather than two steps."""
        return ascending(lam)

    def variants(self) -> tuple[Estimator, ...]:
        return (self,)

    def at(self, step: int, coin: float) -> int:
        return 0

    def measures(self, step: int) -> bool:
        return False

    def expected_backwards(self, n: int) -> float:
        return float(len(self.nodes(n)) + self.drawn(n))


def identity(n: int) -> list[list[Weight]]:
    return [[float(j == k) for k in range(n)] for j in range(n)]


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


def within(lam: Sequence[Weight]) -> Tensor | None:
    """Whether all positions that are tensors lie between the ends, in any order: drawn steps are dealt."""
    inner = [((x > 0) & (x < 1)).all() for x in lam if isinstance(x, Tensor)]
    return torch.stack(inner).all() if inner else None


def ascending(lam: Sequence[Weight]) -> Tensor | None:
    """Whether each position is larger than the one before, in every row. NaN is not: no comparison with it holds."""
    pairs = [(a, b) for a, b in pairwise(lam) if isinstance(a, Tensor) or isinstance(b, Tensor)]
    return torch.stack([torch.as_tensor(a < b).all() for a, b in pairs]).all() if pairs else None


# Draws are per row of the batch, shape () or (B,), where positions may have ones behind it, or a time per token.


def by_row(x: Tensor) -> Tensor:
    """One number for each row: ones at the end of the shape are dropped, other dimensions after the first averaged."""
    while x.ndim and x.shape[-1] == 1:
        x = x.squeeze(-1)
    return x.flatten(1).mean(1) if x.ndim > 1 else x


def where_picked(pick: Tensor | int, k: int, value: Weight, lam: Weight) -> Weight:
    """`value` in the rows whose pick is step k, else 0; multiplies `lam` by rows. value: () or (B,)."""
    if isinstance(pick, int):
        return shaped(value, lam) if pick == k else 0.0
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=torch.float64, device=pick.device)
    found = torch.where(pick == k, value, torch.zeros_like(value))
    return shaped(found, lam)


def shaped(value: Weight, lam: Weight) -> Weight:
    """A number for each row, in a shape that multiplies `lam`."""
    if isinstance(lam, Tensor) and lam.ndim > 1 and isinstance(value, Tensor) and value.ndim:
        return value.reshape(value.shape + (1,) * (lam.ndim - 1))
    return value


# Options.


def check_number(what: str, value: Any, low: float, high: float, hint: str, open_low: bool = False) -> None:
    """Raises OptionError unless value is a number in [low, high], or (low, high] with open_low."""
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not low <= value <= high or (open_low and value == low):
        raise OptionError(f"{what}={value!r} is not {hint}.")


def check_int(what: str, value: Any, low: int, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise OptionError(f"{what}={value!r} is not {hint}.")
