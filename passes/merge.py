"""Merge the cotangents of a group into its nodes: G_j = sum_k C[j, k] g_k.

Assumes: groups and positions. Leaves: without a gate, every kept backward called with its merged cotangent;
with one, or with tol, the merged ones in `joint.merged`, for the branch. Sums are made in fp32 (fp64 for fp64) and
returned in the dtype of the velocity's own cotangent. An entry of C that is exactly 0 or 1 is not multiplied,
so that an infinite or NaN cotangent stays out of the sums it has no part in.

With tol, every call gets a merged cotangent, by weights that depend on which calls run; where a cotangent of the lane
is not finite, all run, each with its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from jagg_fx import control
from jagg_fx.gates import per_row
from jagg_fx.plan import Group

from .gate import fill
from .joint import Joint, insert, sort


def run(joint: Joint) -> None:
    for group in joint.groups:
        sites = [joint.sites[c] for c in group.calls]
        joint.own.update({s.call.index: s.own_cotangents() for s in sites})
        if group.exact or not group.kept:
            continue
        if joint.plan.tol is not None:
            _controlled(joint, group)
            continue
        lam = joint.positions[group.number]
        nodes = [x for x in lam if isinstance(x, fx.Node)]
        slots = len(sites[0].cotangents)
        if any(len(s.cotangents) != slots for s in sites):
            raise AssertionError("calls of one body have cotangents for the same outputs")
        merged: dict[int, dict[int, fx.Node]] = {c: {} for c in group.kept}
        for slot in range(slots):
            own = [s.own_cotangents()[slot] for s in sites]

            def merge(*tensors, n=len(sites), lam=lam, nodes_of=group.nodes):
                rows = joint.plan.estimator.weights(fill(lam, tensors[n:]), joint.plan.estimator.slots(n))
                return [weighted_sum(row, tensors[:n], tensors[j]) for j, row in zip(nodes_of, rows, strict=True)]

            for call, node in zip(group.kept, insert(joint.graph, merge, [*own, *nodes], "merged"), strict=True):
                merged[call][joint.sites[call].cotangents[slot]] = node
        joint.merged.update(merged)
        if group.number in joint.opens:
            continue
        for call, by_position in merged.items():
            for position, node in by_position.items():
                joint.sites[call].give(position, node)
    sort(joint.graph)


def _controlled(joint: Joint, group: Group) -> None:
    """Merge by the weights of what runs: `joint.runs` then says it of the actual cotangents."""
    sites = [joint.sites[c] for c in group.calls]
    n, lam = len(sites), joint.positions[group.number]
    inner = [c for c in group.calls if c in joint.runs]
    places = [group.calls.index(c) for c in inner]
    (slot,) = {tuple(s.cotangents) for s in sites}
    if len(slot) != 1:
        raise AssertionError("the velocity has one output that carries gradient")

    def merge(*tensors: torch.Tensor) -> list[torch.Tensor]:
        own, runs, rest = tensors[:n], dict(zip(places, tensors[n:], strict=False)), tensors[n + len(places) :]
        finite = torch.stack([g.isfinite().all() for g in own]).all()
        sums = weighted_sums(control.weights(fill(lam, rest), [runs.get(k) for k in range(n)]), own)
        merged = [torch.where(finite, x, g) for x, g in zip(sums, own, strict=True)]
        return [*merged, *(r | ~finite for r in runs.values())]

    nodes = [x for x in lam if isinstance(x, fx.Node)]
    inputs = [*(s.own_cotangents()[0] for s in sites), *(joint.runs[c] for c in inner), *nodes]
    found = insert(joint.graph, merge, inputs, "merged")
    joint.runs.update(zip(inner, found[n:], strict=True))
    joint.merged.update({c: {slot[0]: node} for c, node in zip(group.calls, found, strict=False)})


def weighted_sum(row, cotangents, own: torch.Tensor) -> torch.Tensor:
    """sum_k row[k] g_k, with the dtype and strides of `own`."""
    wide = torch.float64 if own.dtype == torch.float64 else torch.float32
    total = None
    for weight, g in zip(row, cotangents, strict=True):
        if isinstance(weight, float) and weight == 0.0:
            continue
        term = g.to(wide)
        if isinstance(weight, torch.Tensor):
            term = term * per_row(weight, term).to(wide)
        elif weight != 1.0:
            term = term * weight
        total = term if total is None else total + term
    assert total is not None
    return total.to(own.dtype)


def weighted_sums(C: torch.Tensor, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """sum_k C[j, k] g_k for every j, with the dtype and strides of the g_k. C: (n, n), or (n, n, B) by row."""
    own = cotangents[0]
    wide = torch.float64 if own.dtype == torch.float64 else torch.float32
    order = in_memory(own)
    back = [order.index(d) for d in range(own.ndim)]
    stack = torch.stack([g.to(wide).permute(order) for g in cotangents])
    rows = (
        C.to(wide).reshape(*C.shape, *(1 for _ in range(own.ndim + 2 - C.ndim))).permute(0, 1, *(d + 2 for d in order))
    )
    return [(row * stack).sum(0).permute(back).to(own.dtype) for row in rows.unbind(0)]


def in_memory(x: torch.Tensor) -> list[int]:
    """The dimensions in the order in which they lie in memory, the widest stride first."""
    return sorted(range(x.ndim), key=x.stride, reverse=True)
