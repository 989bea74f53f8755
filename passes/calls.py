"""The velocity calls of a captured forward graph, for passes that move them: what they read, and where they may stand.

Assumes: calls that were outlined and marked. A pass that stacks the inputs of several calls moves all of these calls to
the place of the first one; that is right where nothing between them changes what they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import networkx as nx
import torch
from torch import fx

from jagg_fx.errors import RefusedError
from jagg_fx.plan import Call, Plan

from .joint import data_flow, expressions
from .refuse import storage, storages_written
from .regions import contexts
from .segments import carries_gradient, example


class Captured:
    """The marked calls of a graph that carry gradient, in the lanes of a plan."""

    def __init__(self, graph: fx.Graph, plan: Plan) -> None:
        self.graph = graph
        marks = graph.find_nodes(op="call_function", target=torch.ops.jagg_fx.call.default)
        self.marks = [m for m in marks if carries_gradient(m)]
        self.changed = storages_written(graph.nodes)
        self.order = {n: i for i, n in enumerate(graph.nodes)}

        def reads_changed(node: fx.Node) -> bool:
            return any(_storage(i) in self.changed for i in node.all_input_nodes)

        self.number = expressions(graph, reads_changed)
        by_index = {m.args[2]: m for m in self.marks}
        found = plan.lanes(_calls(self.marks, self.number, self.changed))
        self.lanes = [[by_index[i] for i in lane] for lane in found]


def _calls(marks: Sequence[fx.Node], number: dict, changed: set) -> list[Call]:
    """The calls as the plan sees them: by their network, time and body. A time that is refilled is a new one."""
    trained = {m: {number[n] for n in operands(m) if carries_gradient(n)} for m in marks}
    shared = {n for m in marks for n in trained[m] if sum(n in t for t in trained.values()) > 1}

    def call(mark: Any) -> Call:
        _, time, index, site, where, lane, *_ = mark.args
        at = ("changed", index) if _storage(time) in changed else number[time]
        return Call(index, site, at, where, body(mark), frozenset(trained[mark] & shared), lane)

    return list(map(call, marks))


def body(mark: fx.Node) -> str:
    return region(mark).args[0].target  # type: ignore[union-attr, return-value]


def region(mark: fx.Node) -> fx.Node:
    return mark.args[0].args[0]  # type: ignore[union-attr, return-value]


def operands(mark: fx.Node) -> list[fx.Node]:
    return [a for a in region(mark).args[2:] if isinstance(a, fx.Node)]


def differing(lane: Sequence[fx.Node], number: dict) -> list[int]:
    """Positions of the inputs that are not one and the same for all calls."""
    regions = [region(m) for m in lane]
    if len({(body(m), len(region(m).args)) for m in lane}) > 1:
        raise RefusedError(
            f"The velocity calls from {lane[0].args[4]} on differ in the shapes or dtypes of their inputs, so they "
            "cannot change places. Make them alike, or use order='call' and an estimator that draws no steps."
        )
    return [
        p
        for p in range(2, len(regions[0].args))
        if len({number[r.args[p]] if isinstance(r.args[p], fx.Node) else repr(r.args[p]) for r in regions}) > 1
    ]


def hoist(captured: Captured, made: Sequence[fx.Node], first: fx.Node, where: Any, cure: str) -> None:
    """Move what was made, and what it needs, to the place of `first`, a node of the graph as it was captured."""
    order = captured.order
    flow = data_flow(captured.graph)
    needed = set(made) | {a for m in made for a in nx.ancestors(flow, m)}
    needed = {n for n in needed if order.get(n, len(order)) >= order[first] and n.op != "placeholder"}
    context = contexts(captured.graph)
    try:
        sorted_ = list(nx.lexicographical_topological_sort(flow.subgraph(needed), lambda n: order.get(n, len(order))))
    except nx.NetworkXUnfeasible:
        raise RefusedError(
            f"An input of a velocity call is computed from another call's velocity ({where}), so the calls cannot "
            f"change places. Use stored states, {cure}."
        ) from None
    strayed = [n for n in needed if n in order and context[n] != context[first]]
    if strayed:
        raise RefusedError(
            f"The velocity calls from {where} on, and what they read, are made under different grad "
            f"modes or autocast ({strayed[0].name}), so they cannot change places. Put one context around all of them."
        )
    cursor = first.prev
    while cursor in needed:
        cursor = cursor.prev
    for node in sorted_:
        cursor.append(node)
        cursor = node


def refuse_writes(captured: Captured, marks: Sequence[fx.Node], cure: str) -> None:
    """An input that is changed in place between two calls has another value where it is stacked, or is not stacked."""
    graph, changed = captured.graph, captured.changed
    inputs: list[Any] = [n for m in marks for n in (m.args[1], *operands(m))]
    flow, nodes = data_flow(graph), list(graph.nodes)
    later = storages_written(nodes[min(nodes.index(region(m)) for m in marks) :])
    behind = {a for n in inputs for a in nx.ancestors(flow, n)}
    found = [n for n in inputs if _storage(n) in changed] or [n for n in nodes if n in behind and _storage(n) in later]
    if found:
        raise RefusedError(
            f"An input of the velocity calls ({found[0].name}) is changed in place in the loss, so the calls "
            f"cannot change places. Make a new tensor in place of changing it, {cure}."
        )


def _storage(node: fx.Node) -> int | None:
    return storage(example(node))
