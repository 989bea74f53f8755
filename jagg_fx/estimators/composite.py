"""Estimators that change from optimiser step to optimiser step, and how an estimator is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import OptionError
from .base import Base, Estimator, Weight, check_int, check_number
from .groups import SIDES, Corrected, Correction, Endpoints, Exact, Inner, Lagrange, Subset, _check_p
from .lanes import Causal, Knots


class Composite(Base):
    """An estimator that is one of its variants at each step; nodes and weights are those of a variant."""

    @property
    def whole(self) -> bool:  # type: ignore[override]
        return any(v.whole for v in self.variants())

    @property
    def sums_to_one(self) -> bool:  # type: ignore[override]
        return all(v.sums_to_one for v in self.variants())

    @property
    def extrapolates(self) -> bool:  # type: ignore[override]
        return any(v.extrapolates for v in self.variants())

    def nodes(self, n: int) -> tuple[int, ...]:
        return self._only().nodes(n)

    def drawn(self, n: int) -> int:
        return self._only().drawn(n)

    def picks(self, lam: Sequence[Weight], u: Sequence[Tensor]) -> list[Tensor]:
        return self._only().picks(lam, u)

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor | int] = ()) -> list[list[Weight]]:
        return self._only().weights(lam, picks)

    def usable(self, lam: Sequence[Weight]) -> Tensor | None:
        return self._only().usable(lam)

    def expected_backwards(self, n: int) -> float:
        return self._only().expected_backwards(n)

    def _only(self) -> Estimator:
        """The variant, where there is one: which of several is meant, only a step can say."""
        variants = self.variants()
        if len(variants) > 1:
            raise AssertionError(f"{self} changes from step to step: ask variants()[at(step, coin)]")
        return variants[0]


@dataclass(frozen=True)
class Debiased(Composite):
    """Endpoints, corrected with probability p by one random interior step: unbiased for any network.

    E[C] is the identity over the coin and the draw (`Corrected`). 2 + p backwards; no variance where endpoints are
    exact. Elsewhere the noise falls with the square of the span, and at p = 1 with its third power where J is smooth
    and the cotangents of a group are alike: q makes the correction of a quadratic J the same for every m.
    """

    p: float = 1.0
    name = "debiased"
    gated = False

    def __post_init__(self) -> None:
        _check_p(self.p)

    def variants(self) -> tuple[Estimator, ...]:
        return (Corrected(self.p),) if self.p == 1 else (Endpoints(), Corrected(self.p))

    def at(self, step: int, coin: float) -> int:
        return int(self.p < 1 and coin < self.p)

    def expected_backwards(self, n: int) -> float:
        with_it = Corrected(self.p).expected_backwards(n)
        return self.p * with_it + (1 - self.p) * Endpoints().expected_backwards(n)


@dataclass(frozen=True)
class Quadratic(Composite):
    """Three nodes, the middle one alternating between the two middle steps of an even group (`Lagrange`).

    Three backwards, exact for groups of three. Alternating averages the two errors out, which differ in sign where
    the third derivative of J does not.
    """

    name = "quadratic"

    def variants(self) -> tuple[Estimator, ...]:
        return tuple(Lagrange(side) for side in SIDES)

    def at(self, step: int, coin: float) -> int:
        return step % 2

    def expected_backwards(self, n: int) -> float:
        return Lagrange().expected_backwards(n)


@dataclass(frozen=True)
class Alternating(Composite):
    """One estimator, and another in every `every`-th step: `Alternating("inner", "quadratic", every=2)`.

    For errors of opposite signs, or for a costlier estimate now and then. The mean cost of the two.
    """

    usual: Estimator
    other: Estimator
    every: int = 2
    name = "alternating"

    def __post_init__(self) -> None:
        check_int("every", self.every, 2, "a number of steps from one use of the other estimator to the next")
        for field in ("usual", "other"):
            found = resolve(getattr(self, field))
            if isinstance(found, Memory):
                raise OptionError("memory cannot alternate: its state would grow old meanwhile. Use it alone.")
            object.__setattr__(self, field, found)

    @property
    def gated(self) -> bool:  # type: ignore[override]
        return self.usual.gated and self.other.gated

    def variants(self) -> tuple[Estimator, ...]:
        own = self.usual.variants()
        return (*own, *(v for v in self.other.variants() if v not in own))

    def at(self, step: int, coin: float) -> int:
        turn = step % self.every == self.every - 1
        one = self.other if turn else self.usual
        # each counts its own steps, so that what alternates inside does not fall into step with this
        own = step // self.every if turn else step - step // self.every
        return self.variants().index(one.variants()[one.at(own, coin)])

    def expected_backwards(self, n: int) -> float:
        rest = (self.every - 1) * self.usual.expected_backwards(n)
        return (rest + self.other.expected_backwards(n)) / self.every


@dataclass(frozen=True)
class Memory(Composite):
    """Endpoints plus a running estimate b of their bias, one tensor a parameter (`jagg_fx.memory.BiasMemory`).

    Every `every`-th step measures a fresh unbiased correction c besides (`Correction`), and b <- beta b +
    (1 - beta) c. The measurement has three backwards of its own, so that a group costs 2 + 3 / every: 2.25 at
    every = 12. What is left is the noise of b and its lag behind the training.

    shrink: scale b by the running regression slope of c on b, clamped to [0, 1]: the part of b that is no noise.
    """

    every: int = 12
    beta: float = 0.95
    shrink: bool = True
    name = "memory"
    gated = False

    def __post_init__(self) -> None:
        check_int("every", self.every, 1, "a number of steps from one measurement to the next. Use 12, say")
        check_number("beta", self.beta, 0, 1, "a decay from 0 up to, but not, 1. Use 0.95, say")
        if self.beta == 1:
            raise OptionError("beta=1 would never take a measurement in. Use 0.95, say.")
        if not isinstance(self.shrink, bool):
            raise OptionError(f"shrink={self.shrink!r} is not True or False: whether b is scaled by its slope.")

    def variants(self) -> tuple[Estimator, ...]:
        return Endpoints(), Correction()

    def measures(self, step: int) -> bool:
        return step % self.every == 0

    def expected_backwards(self, n: int) -> float:
        return Endpoints().expected_backwards(n) + Correction().expected_backwards(n) / self.every


ESTIMATORS: dict[str, type] = {
    "endpoints": Endpoints,
    "exact": Exact,
    "debiased": Debiased,
    "subset": Subset,
    "knots": Knots,
    "causal": Causal,
    "inner": Inner,
    "quadratic": Quadratic,
    "memory": Memory,
}


@dataclass(frozen=True)
class Custom(Base):
    """An object of a user with nodes(n) and weights(lam), and whatever else of `Base` it has."""

    inner: Any

    def __post_init__(self) -> None:
        own = [a for a in dir(Base) if not a.startswith("_") and a not in ("weights", "variants")]
        self.__dict__["name"] = type(self.inner).__name__
        self.__dict__.update({a: getattr(self.inner, a) for a in own if hasattr(self.inner, a)})

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor | int] = ()) -> list[list[Weight]]:
        return self.inner.weights(lam, picks) if len(picks) else self.inner.weights(lam)

    def variants(self) -> tuple[Estimator, ...]:
        if not hasattr(self.inner, "variants"):
            return (self,)
        return tuple(self if v is self.inner else resolve(v) for v in self.inner.variants())


def resolve(estimator: str | Estimator | Any) -> Estimator:
    """The estimator of that name, or the object itself. Raises OptionError for anything else."""
    if isinstance(estimator, str):
        if estimator not in ESTIMATORS:
            raise OptionError(
                f"estimator={estimator!r} is not known. Use one of {sorted(ESTIMATORS)}, "
                "or an object with nodes(n) and weights(lam)."
            )
        return ESTIMATORS[estimator]()
    if isinstance(estimator, Base):
        return estimator
    if isinstance(estimator, type):
        raise OptionError(f"estimator={estimator.__name__} is a class: make one of it, {estimator.__name__}().")
    if callable(getattr(estimator, "nodes", None)) and callable(getattr(estimator, "weights", None)):
        return Custom(estimator)
    raise OptionError(
        f"estimator must be a name {sorted(ESTIMATORS)} or an object with nodes(n) and weights(lam); "
        f"found {type(estimator).__name__}."
    )


@dataclass(frozen=True)
class Schedule(Composite):
    """One estimator after another: `Schedule(((900, "endpoints"), (None, "debiased")))` for 900 steps and the rest.

    stages: pairs (until, estimator): the first whose `until` is above the number of the optimiser step, or None, is
    used, and the last one goes on for ever. `expected_backwards` is the mean over the steps up to the last `until`;
    with None there, that of the last stage.
    """

    stages: tuple[tuple[int | None, Estimator], ...]
    name = "schedule"

    def __post_init__(self) -> None:
        form = 'Use, say, Schedule(((900, "endpoints"), (None, "debiased"))).'
        try:
            stages = tuple((until, resolve(estimator)) for until, estimator in self.stages)
        except (TypeError, ValueError) as e:
            if isinstance(e, OptionError):
                raise
            raise OptionError(f"stages={self.stages!r} are not pairs (until, estimator). {form}") from e
        before = 0
        for i, (until, estimator) in enumerate(stages):
            if until is not None or i + 1 < len(stages):
                check_int("until", until, before + 1, f"a step after {before}, up to which stage {i} goes. {form}")
                before = until or 0
            if isinstance(estimator, Memory):
                raise OptionError("memory cannot be a stage: its state would grow old in the others. Use it alone.")
        if not stages:
            raise OptionError(f"A schedule needs a stage. {form}")
        object.__setattr__(self, "stages", stages)

    @property
    def gated(self) -> bool:  # type: ignore[override]
        return all(estimator.gated for _, estimator in self.stages)

    def variants(self) -> tuple[Estimator, ...]:
        found: list[Estimator] = []
        for _, estimator in self.stages:
            found += [v for v in estimator.variants() if v not in found]
        return tuple(found)

    def at(self, step: int, coin: float) -> int:
        fitting = (e for until, e in self.stages if until is None or step < until)
        estimator = next(fitting, self.stages[-1][1])
        return self.variants().index(estimator.variants()[estimator.at(step, coin)])

    def expected_backwards(self, n: int) -> float:
        end, last = self.stages[-1]
        if end is None:
            return last.expected_backwards(n)
        total, before = 0.0, 0
        for until, estimator in self.stages:
            assert until is not None
            total += (until - before) * estimator.expected_backwards(n)
            before = until
        return total / end
