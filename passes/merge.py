"""Merge the cotangents of a group into its nodes: G_j = sum_k C[j, k] g_k.

Assumes: groups and positions. Leaves: without a gate, every kept backward called with its merged cotangent;
with one, the merged cotangents in `joint.merged`, for the branch. Sums are made in fp32 (fp64 for fp64) and
returned in the dtype of the velocity's own cotangent. An entry of C that is exactly 0 or 1 is not multiplied,
so that an infinite or NaN cotangent stays out of the sums it has no part in.
"""

from __future__ import annotations

import torch
from torch import fx

from jagg_fx.gates import per_row

from .joint import Joint, insert, sort


def run(joint: Joint) -> None:
    for group in joint.groups:
        sites = [joint.sites[c] for c in group.calls]
        joint.own.update({s.call.index: s.own_cotangents() for s in sites})
        if group.exact or not group.kept:
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
                rest = iter(tensors[n:])
                filled = [next(rest) if isinstance(x, fx.Node) else x for x in lam]
                rows = joint.plan.estimator.weights(filled, joint.plan.estimator.slots(n))
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
