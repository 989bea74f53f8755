"""Find velocity calls that nothing names: repeated subgraphs over the same parameters.

For a plain function in a torch.compile pipeline. If the loss calls one function T times, every parameter has T
(or a multiple of T) consumers, in the order of the calls. The call then reaches from these consumers to the
nearest node that every path from them to the loss runs through (their common post-dominator), and upstream
as far as all calls look alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import networkx as nx
from torch import fx

from .joint import data_flow
from .segments import Segment, carries_gradient, where


def find(gm: fx.GraphModule) -> list[Segment]:
    """The repeated calls, in order; empty where the graph has no such repetition."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    weights = [n for n in gm.graph.find_nodes(op="placeholder") if carries_gradient(n)]
    consumers = [sorted(n.users, key=order.__getitem__) for n in weights if n.users]
    calls = math.gcd(*map(len, consumers)) if consumers else 0
    if calls < 2:
        return []
    seeds: list[set[fx.Node]] = [set() for _ in range(calls)]
    for users in consumers:
        share = len(users) // calls
        for i in range(calls):
            seeds[i].update(users[i * share : (i + 1) * share])
    flow = data_flow(gm.graph)
    exits = _exits(flow, gm.graph.output_node(), seeds)
    regions = [_between(flow, s, e) for s, e in zip(seeds, exits, strict=True)]
    if any(regions[i] & regions[j] for i in range(calls) for j in range(i)):
        return []
    inside = [sorted(r, key=order.__getitem__) for r in regions]
    _grow(inside)
    site = "a repeated function"
    return [Segment(site, sorted(r, key=order.__getitem__), None, where(r[0])) for r in inside]


def _exits(flow: nx.DiGraph, output: fx.Node, seeds: Sequence[set[fx.Node]]) -> list[fx.Node]:
    """For each call the nearest node that all paths from its seeds to the output run through."""
    parent = nx.immediate_dominators(flow.reverse(copy=False), output)
    parent.pop(output, None)  # newer networkx gives the root no parent

    def line(node: fx.Node) -> list[fx.Node]:
        way = [node]
        while way[-1] in parent:
            way.append(parent[way[-1]])
        return way

    found = []
    for group in seeds:
        lines = [line(s) for s in group]
        common = set.intersection(*map(set, lines))
        found.append(next((n for n in lines[0] if n in common), output))
    return found


def _between(flow: nx.DiGraph, seeds: set[fx.Node], end: fx.Node) -> set[fx.Node]:
    below = set(seeds)
    for s in seeds:
        below |= nx.descendants(flow, s)
    return (below & (nx.ancestors(flow, end) | {end})) - {n for n in below if n.op == "output"}


def _grow(regions: list[list[fx.Node]]) -> None:
    """Take in inputs that only this call reads, as long as every call has the same operation there."""
    while True:
        inputs = [Segment("", r, None, "").inputs() for r in regions]
        if len({len(i) for i in inputs}) != 1:
            return
        for row in zip(*inputs, strict=True):
            if _alike(row) and all(set(n.users) <= set(r) for n, r in zip(row, regions, strict=True)):
                for n, r in zip(row, regions, strict=True):
                    r.insert(0, n)
                break
        else:
            return


def _alike(nodes: Sequence[fx.Node]) -> bool:
    def look(n: fx.Node) -> str:
        return repr((n.op, n.target, fx.map_arg((n.args, n.kwargs), lambda _: None)))

    first = nodes[0]
    if first.op not in ("call_function", "call_method") or len(set(nodes)) < len(nodes):
        return False
    return all(look(n) == look(first) for n in nodes)
