"""Cotangents at the tangent one, computed beside those of the backward.

A gradient is linear in the tangent of the loss, so whether a group may be approximated does not depend on it. From
these copies a gate can decide with the forward, where its decision can be reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import networkx as nx
import torch
from torch import fx

from .joint import Joint, data_flow, insert, outputs, value


def at_unit_tangent(joint: Joint, wanted: Sequence[fx.Node]) -> list[fx.Node]:
    """The same cotangents with 1 for the tangent of every scalar output, and 0 for the others. Then `sort`."""
    flow = data_flow(joint.graph)
    needed = set(wanted) | {a for n in wanted for a in nx.ancestors(flow, n)}
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(joint.graph.nodes):
        if node.op == "placeholder" and node.name.startswith("tangents"):
            (copies[node],) = insert(joint.graph, one(value(node)), [], "unit")
        elif node in needed and any(i in copies for i in node.all_input_nodes):
            with joint.graph.inserting_before(outputs(joint.graph)):
                copies[node] = joint.graph.node_copy(node, lambda n: copies.get(n, n))
            copies[node].meta = {"val": node.meta["val"]}
            copies[node]._rename(f"unit_{node.name}")
    return [copies.get(n, n) for n in wanted]


def one(v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The tangent of a gradient: 1 for a scalar output, 0 for another."""
    return lambda: torch.full(v.shape, float(v.numel() == 1), dtype=v.dtype, device=v.device)
