"""What `bench.grpo` runs, arm by arm, and what it measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.compare import Paired, paired, rounded
from jagg_fx.estimators import (
    Base,
    Causal,
    Debiased,
    Endpoints,
    Exact,
    Inner,
    Knots,
    Memory,
    Quadratic,
    Subset,
    Weight,
)

GROUP, ETA = 8, 0.7
BATCHES = (32, 128)
SAMPLES = 1000
CURVE_EVERY = 10
"""Steps from one score of exact on held-out noise to the next."""


@dataclass(frozen=True)
class Fraction(Base):
    """The timestep fraction of trainers: of each row a random half of all steps, in any order."""

    name = "timestep fraction"
    whole = True
    sums_to_one = False
    extrapolates = True

    def nodes(self, n: int) -> tuple[int, ...]:
        return ()

    def drawn(self, n: int) -> int:
        return n // 2

    def picks(self, lam: Sequence[Weight], u: Sequence[Tensor]) -> list[Tensor]:
        order = torch.arange(len(lam)).repeat(len(u[0]), 1)
        row = torch.arange(len(u[0]))
        for i, x in enumerate(u):
            j = i + (x * (len(lam) - i)).long().clamp(max=len(lam) - i - 1)
            order[row, i], order[row, j] = order[row, j], order[row, i]
        return list(order[:, : len(u)].T)

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor] = ()) -> list[list[Weight]]:
        n = len(lam)
        return [[torch.where(pick == k, n / len(picks), 0.0) for k in range(n)] for pick in picks]


class Arm(NamedTuple):
    """One way to compute the gradient, and what its learning rates are multiplied by."""

    title: str
    estimator: Any
    W: int = 4
    lr_factor: float = 1.0

    def backwards(self, T: int) -> float:
        """Full backwards of a trajectory, the mean over draws and steps."""
        if self.estimator.whole:
            return self.estimator.expected_backwards(T)
        return sum(self.estimator.expected_backwards(min(self.W, T - i)) for i in range(0, T, self.W))

    def forwards(self, T: int) -> float:
        """Of the loss: all steps, but for a subset, whose other steps are not needed."""
        return self.backwards(T) if isinstance(self.estimator, (Subset, Fraction)) else T

    def cost(self, T: int) -> float:
        """Forward 1, backward 2, and the rollout with its T forwards."""
        return T + self.forwards(T) + 2 * self.backwards(T)


ARMS: dict[str, Arm] = {
    "exact": Arm("exact", Exact()),
    "endpoints4": Arm("endpoints W=4", Endpoints()),
    "causal1.5": Arm("causal, 1.5", Causal(1.5)),
    "subset": Arm("random half, one of each two steps", Subset(2)),
    "endpoints8": Arm("endpoints W=8", Endpoints(), 8),
    "knots": Arm("knots, every 3rd", Knots(3)),
    "memory": Arm("memory W=4, every 12th, shrunk", Memory(12, 0.95, True)),
    "debiased1": Arm("debiased W=4, p = 1", Debiased(1.0)),
    "causal1": Arm("causal, 1", Causal(1.0)),
    "quadratic": Arm("quadratic W=4", Quadratic()),
    "fraction": Arm("timestep fraction 1/2", Fraction()),
    "debiased.25": Arm("debiased W=4, p = 1/4", Debiased(0.25)),
    "endpoints4 x1.1": Arm("endpoints W=4, lr x 1.1", Endpoints(), lr_factor=1.1),
    "exact x1.1": Arm("exact, lr x 1.1", Exact(), lr_factor=1.1),
    "inner8": Arm("inner pair, W=8 *", Inner(), 8),
    "endpoints2": Arm("endpoints W=2 (exact but for rounding)", Endpoints(), 2),
}
"""Written down before any of them was run at these settings; * is an idea beyond the library's estimators."""

MAIN = ("exact", "endpoints4", "causal1.5", "subset", "endpoints8", "knots")
"""Run for every T."""


class Job(NamedTuple):
    T: int
    batch: int
    arm: str

    @property
    def key(self) -> str:
        return f"T{self.T}/B{self.batch}/{self.arm}"


def jobs() -> list[Job]:
    """Of the default run, the most telling first."""
    small, large = BATCHES
    found = [Job(16, small, arm) for arm in ARMS]
    found += [Job(16, large, arm) for arm in ARMS if arm != "endpoints2"]
    found += [Job(T, large, arm) for T in (10, 32) for arm in MAIN]
    return found


class Results:
    """What was measured, kept in a JSON file that is written after every arm."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.content = path, {"settings": settings, "notes": [], "runs": {}}
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["settings"] == settings:
                self.content = content
        self.runs: dict[str, Any] = self.content["runs"]

    def add(self, job: Job, result: dict[str, Any]) -> None:
        self.runs[job.key] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(rounded(self.content, 5)) + "\n", encoding="utf-8")

    def of(self, job: Job) -> dict[str, Any] | None:
        return self.runs.get(job.key)

    def best_lr(self, T: int, batch: int) -> int:
        """Where exact has its highest mean reward."""
        exact = self.runs[Job(T, batch, "exact").key]
        return int(np.nan_to_num(np.mean(exact["reward"], axis=1), nan=-1).argmax())

    def compare(self, job: Job, what: str, lr: int) -> Paired | None:
        """`what` of an arm minus that of exact, at the same learning rate."""
        arm, exact = self.of(job), self.of(job._replace(arm="exact"))
        if arm is None or exact is None:
            return None
        return paired(arm[what][lr], exact[what][lr], lower_is_better=what == "frechet", relative=False)

    def at_equal(self, job: Job, cost: Callable[[Arm, int], float], lr: int) -> Paired | None:
        """Final held-out reward minus that of exact after as many steps as cost the same, on the same noise."""
        arm, exact = self.of(job), self.of(job._replace(arm="exact"))
        if arm is None or exact is None:
            return None
        share = cost(ARMS[job.arm], job.T) / cost(ARMS["exact"], job.T)
        steps = [point["step"] for point in exact["curve"]]
        rewards = np.array([point["reward"][lr] for point in exact["curve"]])
        before = [np.interp(share * steps[-1], steps, own) for own in rewards.T]
        return paired(arm["reward"][lr], before, lower_is_better=False, relative=False)
