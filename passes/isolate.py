"""Keep of the gradient only what came through the groups.

For an estimator that is a part of a gradient rather than an estimate of it (`Correction`): what reaches a parameter
past the velocity calls (a penalty on the weights, another network) is exact already, and would be counted twice.

Assumes: cotangents merged, no gate. Leaves: every gradient a sum over backward calls of groups, or zero.
"""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import torch

from .joint import Joint, data_flow, insert, outputs, sort, value


def run(joint: Joint) -> bool:
    if not joint.plan.estimator.partial:
        return False
    flow = data_flow(joint.graph)
    tangents = [n for n in joint.graph.find_nodes(op="placeholder") if n.name.startswith("tangents")]
    derived = set().union(*(nx.descendants(flow, t) for t in tangents), tangents)
    calls = {s.backward for s in joint.sites.values() if s.backward is not None}
    through = set().union(*(nx.descendants(flow, c) for c in calls)) if calls else set()
    past = derived - through - calls
    last = outputs(joint.graph)
    for node in list(joint.graph.nodes):
        readers = [u for u in node.users if u is last or (u in through and u not in calls)] if node in past else []
        if readers:
            (zero,) = insert(joint.graph, _zero_like(value(node)), [], "past")
            for user in readers:
                user.replace_input_with(node, zero)
    sort(joint.graph)
    return True


def _zero_like(v: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(v.shape, dtype=v.dtype, device=v.device)
