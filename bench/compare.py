"""Paired comparisons of two arms that share their seeds, and how they are written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

SHUFFLES = 20_000


class Paired(NamedTuple):
    """Of an arm against a baseline, pair by pair.

    Attributes:
        gap: mean of the differences arm - baseline, over the mean of the baseline where `relative`.
        low, high: 95 % t-interval of the gap.
        wins: pairs in which the arm is better.
        pairs: number of pairs.
        p: of a two-sided sign-flip test of the mean difference; exact where all flips are fewer than the
            shuffles, so never below 2 / 2^pairs.
    """

    gap: float
    low: float
    high: float
    wins: int
    pairs: int
    p: float


def paired(arm: Sequence[float], baseline: Sequence[float], *, lower_is_better: bool, relative: bool) -> Paired:
    """Compares run i of the arm with run i of the baseline.

    Raises:
        ValueError: fewer than two pairs, or unequal numbers.
    """
    if len(arm) != len(baseline) or len(arm) < 2:
        raise ValueError(f"{len(arm)} runs against {len(baseline)}: pairs need as many, and at least two.")
    a, b = np.asarray(arm, float), np.asarray(baseline, float)
    difference = a - b
    wins = int((difference < 0).sum() if lower_is_better else (difference > 0).sum())
    scale = abs(b.mean()) if relative else 1.0
    mean, error = difference.mean(), stats.sem(difference)
    if not np.isfinite(difference).all():
        nan = float("nan")
        return Paired(nan, nan, nan, wins, len(a), nan)
    half = error * stats.t.ppf(0.975, len(a) - 1)
    test = stats.permutation_test(
        (difference,),
        lambda x, axis: np.mean(x, axis=axis),
        permutation_type="samples",
        n_resamples=SHUFFLES,
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return Paired(
        float(mean / scale),
        float((mean - half) / scale),
        float((mean + half) / scale),
        wins,
        len(a),
        float(test.pvalue),
    )


def rounded(x: Any, digits: int) -> Any:
    """Every number of a result to that many significant digits."""
    if isinstance(x, float):
        return float(f"{x:.{digits}g}")
    if isinstance(x, dict):
        return {k: rounded(v, digits) for k, v in x.items()}
    return [rounded(v, digits) for v in x] if isinstance(x, (list, tuple)) else x


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
