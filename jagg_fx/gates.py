"""Gates: formulas that decide, group by group, whether the approximation may be used.

Plain tensor code: `passes/gate.py` traces it into the graph, tests and the audit call it as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .estimators import Weight

GATES = ("cosine", "cosine-mean")


def per_row(x: Weight, like: Tensor) -> Weight:
    """A weight per row of the batch, shape (B,) or (B, 1, ...), as (B, 1, ..., 1): it multiplies `like` by rows."""
    if not isinstance(x, Tensor):
        return x
    if x.numel() == 1:
        return x.reshape(())
    shape = row_shape(x)
    return x.reshape(shape + (1,) * (like.ndim - len(shape)))


def row_shape(x: Tensor) -> tuple[int, ...]:
    """The shape of a tensor without the ones at its end."""
    shape = tuple(x.shape)
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def cosines(v: Sequence[Tensor], lam: Sequence[Weight]) -> list[Tensor]:
    """c_k = <v_k, v_hat_k> / (|v_k| |v_hat_k| + 1e-8) of every interior step (arXiv 2607.17572, its gate).

    v: velocities of one group, all of one shape; lam: their positions. v_hat_k is the interpolation between
    the first and last velocity. The whole batch is one vector. Computed in fp32 (fp64 for fp64 velocities).
    Returns scalars; a NaN or an infinity in a velocity gives NaN.
    """
    wide = [x.double() if x.dtype == torch.float64 else x.float() for x in v]
    first, last = wide[0], wide[-1]
    out = []
    for x, lam_k in zip(wide[1:-1], lam[1:-1], strict=True):
        row = per_row(lam_k, x)
        if isinstance(row, Tensor):
            row = row.to(x.dtype)
        guess = first + row * (last - first)
        norms = torch.sqrt((x * x).sum()) * torch.sqrt((guess * guess).sum())
        out.append((x * guess).sum() / (norms + 1e-8))
    return out


def is_open(gate: str, cos: Sequence[Tensor], tau: float) -> Tensor:
    """Whether the group may use the approximation: a boolean scalar. NaN shuts it (no comparison holds)."""
    stacked = torch.stack(list(cos))
    if gate == "cosine":
        return (stacked >= tau).all()
    if gate == "cosine-mean":
        return stacked.mean() >= tau
    raise AssertionError(f"unknown gate {gate!r}")


def times_in_order(lam: Sequence[Weight]) -> Tensor | None:
    """Whether the times of a group strictly rise or strictly fall, in every row (None: known in advance).

    False for equal end times (the division gives NaN or infinity), for a step outside of its group's ends (the
    weights would extrapolate, which can diverge), for steps out of order, and for two equal times, which are
    two lanes rather than two steps.
    """
    if not any(isinstance(x, Tensor) for x in lam):
        return None
    return torch.stack([(a < b).all() for a, b in itertools.pairwise(lam) if isinstance(a < b, Tensor)]).all()
