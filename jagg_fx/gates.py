"""Gates: formulas that decide, group by group, whether the approximation may be used.

Plain tensor code: `passes/gate.py` traces it into the graph, tests and the audit call it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .estimators import Weight

GATES = ("cosine", "cosine-mean", "head")


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


def cosines(v: Sequence[Tensor], C: Sequence[Sequence[Weight]], nodes: Sequence[int]) -> list[Tensor]:
    """c_k = <v_k, v_hat_k> / (|v_k| |v_hat_k| + 1e-8) of every step k that is no node (arXiv 2607.17572, its gate).

    v: velocities of one group, all of one shape; C: an estimator's weights for it, one row a node. v_hat_k =
    sum_j C[j][k] v_j is what the weights make of the nodes' velocities: for endpoints their interpolation. The
    whole batch is one vector. Computed in fp32 (fp64 for fp64 velocities). Returns scalars; a NaN or an infinity
    in a velocity gives NaN.
    """
    wide = _wide(v)
    out = []
    for k, x in enumerate(wide):
        if k in nodes:
            continue
        guess = _estimate(wide, C, nodes, k)
        norms = torch.sqrt((x * x).sum()) * torch.sqrt((guess * guess).sum())
        out.append((x * guess).sum() / (norms + 1e-8))
    return out


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.double() if x.dtype == torch.float64 else x.float() for x in tensors]


def _estimate(x: Sequence[Tensor], C: Sequence[Sequence[Weight]], nodes: Sequence[int], k: int) -> Tensor:
    """sum_j C[j][k] x_j: what the weights make of the nodes' values at step k."""
    total = torch.zeros_like(x[k])
    for row, j in zip(C, nodes, strict=True):
        weight = per_row(row[k], x[k])
        if isinstance(weight, Tensor):
            total = total + weight.to(x[k].dtype) * x[j]
        elif weight:
            total = total + weight * x[j]
    return total


def discrepancy(
    g: Sequence[Tensor],
    h: Sequence[Tensor],
    C: Sequence[Sequence[Weight]],
    nodes: Sequence[int],
    gradient: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """|sum_k W'(g_k, h_k - h_hat_k)| / |sum_k W'(g_k, h_k)|: the error of the last layer's weight gradient, exactly.

    h_k: input of the last layer at step k; h_hat_k = sum_j C[j][k] h_j; g_k: cotangents. gradient(g, h) is the
    gradient of the last layer's weight, g h^T for a linear layer: linear in h, so the estimator's error in it needs
    no backward. It stands for the error of the whole gradient. NaN or infinity in g or h gives NaN.
    """
    error, whole = head_error(g, h, C, nodes, gradient), sum(gradient(gk, hk) for gk, hk in zip(g, h, strict=True))
    assert isinstance(whole, Tensor)
    scale = whole.abs().max()  # squares of small gradients are 0 in fp32; where all is 0, NaN shuts the gate
    return (error / scale).square().sum().sqrt() / (whole / scale).square().sum().sqrt()


def head_error(
    g: Sequence[Tensor],
    h: Sequence[Tensor],
    C: Sequence[Sequence[Weight]],
    nodes: Sequence[int],
    gradient: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """sum_k W'(g_k, h_k - h_hat_k), as in `discrepancy`: exact less estimate, in the last layer's weight."""
    wide = _wide(h)
    error = torch.zeros(())
    for k, gk in enumerate(g):
        if k not in nodes:
            error = error + gradient(gk, wide[k] - _estimate(wide, C, nodes, k))
    return error


def is_open(gate: str, cos: Sequence[Tensor], tau: float) -> Tensor:
    """Whether the group may use the approximation: a boolean scalar. NaN shuts it (no comparison holds)."""
    stacked = torch.stack(list(cos))
    if gate == "cosine":
        return (stacked >= tau).all()
    if gate == "head":
        return (stacked <= tau).all()
    if gate == "cosine-mean":
        return stacked.mean() >= tau
    raise AssertionError(f"unknown gate {gate!r}")
