"""Which call of a lane goes to which slot: permutations as tensors, known at run time only. No graph.

`passes/deal.py` puts them into one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .estimators import index_lambdas, lambdas
from .plan import Plan


def permutation(plan: Plan, times: Sequence[Tensor], u: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Which call each slot gets, the inverse, and the place of that call in the order: int64, (n,) or by row (n, B).

    times: of the n calls of a lane, all () or all (B,). u: the uniforms of the lane's groups, as `Estimator.picks`
    takes them.
    """
    stacked = torch.stack(list(times))
    slots = torch.arange(len(times), device=stacked.device).reshape(-1, *(1 for _ in stacked.shape[1:]))
    order = slots.expand(stacked.shape)
    if plan.order == "time":
        order = torch.argsort(stacked, dim=0, descending=True, stable=True)
    rest, places = list(u), []
    for group in plan.cut(range(len(times))):
        place = slots.expand(stacked.shape)[group[0] : group[-1] + 1]
        drawn = plan.estimator.drawn(len(group))
        if drawn:
            own = list(stacked.gather(0, order.gather(0, place)).unbind(0))
            lam = index_lambdas(len(group)) if plan.weights == "index" else lambdas(own)
            picks = plan.estimator.picks(lam, rest[:drawn])
            place = place.gather(0, drawn_first(plan, picks, len(group)).expand(place.shape))
            rest = rest[drawn:]
        places.append(place)
    placed = torch.cat(places)
    permuted = order.gather(0, placed)
    return permuted, torch.argsort(permuted, dim=0), placed


def drawn_first(plan: Plan, picks: Sequence[Tensor], n: int) -> Tensor:
    """Step of each slot of one group: drawn steps in the estimator's slots, the others in their order around them."""
    fixed, slots = plan.estimator.nodes(n), plan.estimator.slots(n)
    rank = torch.zeros_like(picks[0])
    target = []
    for step in range(n):
        if step in fixed:
            target.append(torch.full_like(picks[0], step))
            continue
        slot = rank
        for taken in sorted((*fixed, *slots)):
            slot = slot + (slot >= taken)
        drawn = torch.zeros_like(picks[0], dtype=torch.bool)
        for pick, at in zip(picks, slots, strict=True):
            slot = torch.where(pick == step, at, slot)
            drawn = drawn | (pick == step)
        rank = rank + ~drawn
        target.append(slot)
    order = torch.argsort(torch.stack(target), dim=0)
    return order


def taken(stack: Tensor, index: Tensor) -> Tensor:
    """stack[index], index of shape (); or row by row, index of shape (B,) and stack (n, B, ...)."""
    if index.ndim == 0:
        return stack.index_select(0, index.reshape(1)).squeeze(0)
    shape = stack.shape[1:]
    index = index.reshape(1, -1, *(1 for _ in shape[1:]))
    return stack.gather(0, index.expand(1, *shape)).squeeze(0)
