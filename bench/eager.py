"""The gradient of an estimator without a graph: what one writes by hand in an eager training loop.

The velocities of a stored trajectory are computed without gradient, the loss gives their cotangents g_k, and each
node is computed again, with gradient, and gets one backward with its merged cotangent sum_k C[j, k] g_k. Costs of a
group of W (forward 1, backward 2): W + 3 a node, so W + 6 for endpoints, where a rewritten graph has W + 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from jagg_fx.estimators import Estimator, Exact, Weight, index_lambdas, lambdas, resolve
from jagg_fx.gates import per_row

Velocity = Callable[[Tensor, Tensor], Tensor]
Head = Callable[[Sequence[Tensor]], Tensor]


def backward(
    velocity: Velocity,
    states: Sequence[Tensor],
    times: Sequence[Tensor],
    head: Head,
    estimator: str | Estimator = "endpoints",
    W: int = 4,
    *,
    weights: str = "time",
    step: int = 0,
    generator: torch.Generator | None = None,
    velocities: Sequence[Tensor] | None = None,
    watch: AbstractContextManager = nullcontext(),
) -> Tensor:
    """Adds the estimate to the parameters' `.grad`, as `loss.backward()` would, and returns the loss.

    Args:
        velocity: (z, t) -> v.
        states, times: of each step: (B, ...) and () or (B,). They carry no gradient.
        head: the loss, of the velocities of all steps.
        estimator, W, weights: as in `jagg_fx.transform`, without a gate; a group whose times do not fit goes exact.
        step: number of the optimiser step, for estimators that alternate.
        generator: of the draws, on the states' device.
        velocities: if known already (a rollout's): nothing but the nodes is computed then.
        watch: entered around every backward.
    """
    if velocities is None:
        with torch.no_grad():
            velocities = [velocity(z, t) for z, t in zip(states, times, strict=True)]
    leaves = [v.detach().requires_grad_() for v in velocities]
    loss = head(leaves)
    with watch:
        loss.backward()
    cotangents = [torch.zeros_like(v) if v.grad is None else v.grad for v in leaves]

    family = resolve(estimator)
    chosen = family.variants()[family.at(step, _uniform(states[0], generator, 1).item())]
    n = len(states)
    size = n if chosen.whole else W
    for i in range(0, n, size):
        group = slice(i, i + size)
        _group(velocity, states[group], times[group], cotangents[group], chosen, weights, generator, watch)
    return loss.detach()


def _group(
    velocity: Velocity,
    states: Sequence[Tensor],
    times: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    estimator: Estimator,
    weights: str,
    generator: torch.Generator | None,
    watch: AbstractContextManager,
) -> None:
    n = len(states)
    lam = index_lambdas(n) if weights == "index" else lambdas(times)
    usable = estimator.usable(lam)
    if usable is not None and not usable:
        estimator = Exact()
    picks = estimator.picks(lam, [_uniform(states[0], generator) for _ in range(estimator.drawn(n))])
    rows = estimator.weights(lam, picks)
    for row, node in zip(rows, [*estimator.nodes(n), *picks], strict=True):
        v = velocity(_step(states, node), _step(times, node))
        with watch:
            v.backward(merge(row, cotangents).to(v.dtype))


def merge(row: Sequence[Weight], cotangents: Sequence[Tensor]) -> Tensor:
    """sum_k row[k] g_k, at least in fp32."""
    wide = torch.promote_types(cotangents[0].dtype, torch.float32)
    total = torch.zeros_like(cotangents[0], dtype=wide)
    for weight, g in zip(row, cotangents, strict=True):
        if isinstance(weight, Tensor):
            total = total + per_row(weight, g).to(wide) * g
        elif weight:
            total = total + weight * g
    return total


def _step(values: Sequence[Tensor], node: int | Tensor) -> Tensor:
    """The value of a step; a drawn one is another step for each row of the batch."""
    if isinstance(node, int):
        return values[node]
    stacked = torch.stack(list(values))
    if node.ndim == 0 or stacked.ndim == 1:  # one step for all rows, or one time for all rows of a step
        return stacked[node]
    return stacked[node, torch.arange(stacked.shape[1], device=node.device)]


def _uniform(like: Tensor, generator: torch.Generator | None, rows: int | None = None) -> Tensor:
    """A uniform number for each row, one in each of as many equal parts of [0, 1)."""
    rows = like.shape[0] if rows is None else rows
    order = torch.randperm(rows, generator=generator, device=like.device)
    return (order + torch.rand(rows, generator=generator, device=like.device)) / rows
