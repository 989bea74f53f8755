"""The state that every pass of the joint graph reads and changes, and the few tools they share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import torch
from torch import fx

from jagg_fx import _torch
from jagg_fx.plan import Call, Group, Plan


@dataclass
class Site:
    """One velocity call in the joint graph."""

    call: Call
    forward: fx.Node  # invoke_subgraph of the forward body
    velocity: fx.Node  # its first output that carries gradient
    time: fx.Node
    backward: fx.Node | None = None  # invoke_subgraph of the backward body
    cotangents: list[int] = field(default_factory=list)  # which arguments of `backward` are cotangents
    hidden: fx.Node | None = None  # the input of its last layer, for gate="head"
    part: int | None = None  # which of the timesteps of its call it is, where one call is made for several
    given: fx.Node | None = None  # its velocity as the caller handed it in

    @property
    def operands(self) -> list[fx.Node]:
        return list(self.forward.args[2:])  # type: ignore[arg-type]

    def own_cotangents(self) -> list[fx.Node]:
        """Cotangents of this call alone; where it is one of several timesteps of its call, its part of the stack."""
        found = [self.backward.args[i] for i in self.cotangents] if self.backward else []
        return found if self.part is None else [stack.args[0][self.part] for stack in found]  # type: ignore[misc, union-attr, index]

    def give(self, position: int, cotangent: fx.Node) -> None:
        """Let its backward run with this cotangent, an argument at this position."""
        assert self.backward is not None
        if self.part is None:
            self.backward.update_arg(position, cotangent)
        else:
            stack: Any = self.backward.args[position]
            parts = list(stack.args[0])
            parts[self.part] = cotangent
            stack.update_arg(0, parts)


@dataclass
class Joint:
    """A joint forward-backward graph under rewriting."""

    gm: fx.GraphModule
    plan: Plan
    sites: dict[int, Site] = field(default_factory=dict)  # by call index; only calls that carry gradient
    groups: list[Group] = field(default_factory=list)
    opens: dict[int, fx.Node] = field(default_factory=dict)  # by group number: the gate's decision
    cosines: dict[int, fx.Node] = field(default_factory=dict)  # by call index
    runs: dict[int, fx.Node] = field(default_factory=dict)  # by call index, with tol: whether its backward runs
    predicted: dict[int, fx.Node] = field(default_factory=dict)  # by group number, with tol: the predicted error
    positions: dict[int, list] = field(default_factory=dict)  # by group number: lambda of every step
    merged: dict[int, dict[int, fx.Node]] = field(default_factory=dict)  # by call: argument -> cotangent
    tails: dict[int, Any] = field(default_factory=dict)  # by call index: its last layer, for gate="head"
    own: dict[int, list[fx.Node]] = field(default_factory=dict)  # by call: its cotangents, before they were merged
    forwards: list[fx.Node] = field(default_factory=list)  # of every call, with or without a backward
    backward_bodies: set[str] = field(default_factory=set)  # names of the bodies that backward calls run
    branch_bodies: set[str] = field(default_factory=set)  # names of the bodies that hold a gated group's backwards
    sums: dict[fx.Node, dict[int, int]] = field(default_factory=dict)  # by backward: argument that it adds an output to
    gated: dict[int, fx.Node] = field(default_factory=dict)  # by group number: the region with its branches
    counts: dict[str, int] = field(default_factory=dict)  # calls and nodes before, for the report

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    def backwards(self, graph: fx.Graph) -> list[fx.Node]:
        """The calls of this graph, or of a branch's, that run backwards: of one timestep, or of a gated group."""
        bodies = self.backward_bodies | self.branch_bodies
        return [n for n in graph.nodes if is_region(n) and n.args[0].target in bodies]


def is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def is_region(node: Any) -> bool:
    return is_call(node, _torch.invoke_subgraph)


def value(node: fx.Node) -> Any:
    """The example of a node's value: of a joint graph, or of one that Dynamo captured."""
    return node.meta["val"] if "val" in node.meta else node.meta["example_value"]


def body_of(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    """The body that an invoke_subgraph node calls."""
    return getattr(gm, node.args[0].target)  # type: ignore[union-attr, arg-type]


def choices(body: fx.GraphModule) -> list[tuple[fx.Node, list[fx.GraphModule]]]:
    """The torch.cond nodes of a body, each with its two branches."""
    found = body.graph.find_nodes(op="call_function", target=_torch.cond)
    return [(node, [getattr(body, a.target) for a in node.args[1:3]]) for node in found]  # type: ignore[union-attr, index]


def outputs(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def results(graph: fx.Graph) -> list[Any]:
    """What a body returns, in order."""
    return _flat(outputs(graph).args[0])


def getitems(node: fx.Node) -> dict[int, list[fx.Node]]:
    """The getitem users of a node with several outputs, by index."""
    found: dict[int, list[fx.Node]] = {}
    for user in node.users:
        if is_call(user, operator.getitem):
            found.setdefault(user.args[1], []).append(user)  # type: ignore[arg-type]
    return found


def expressions(graph: fx.Graph, reads_changed: Callable = lambda node: False) -> dict[fx.Node, int]:
    """A number for every node; two nodes share one when they compute the same thing from the same inputs.

    reads_changed: tells nodes of a graph that is not functional whose inputs are changed in place: they share none.
    """
    numbers: dict[Any, int] = {}
    of: dict[fx.Node, int] = {}
    for node in graph.nodes:
        key: Any = node.name
        pure = node.op in ("call_function", "call_method") and not _torch.is_random(node.target)
        if pure and not is_region(node) and not reads_changed(node):
            args = fx.map_arg((node.args, node.kwargs), lambda n: _Number(of[n]))
            key = (node.op, str(node.target), repr(args))
        of[node] = numbers.setdefault(key, len(numbers))
    return of


class _Number:
    """A node's number inside the arguments of another."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"


def insert(graph: fx.Graph, fn: Callable, nodes: Sequence[fx.Node], name: str = "jagg") -> list[fx.Node]:
    """Trace `fn` on the values of `nodes` and copy its operations to the end of the graph (then `sort` it).

    fn takes as many tensors as there are nodes and returns a tensor or a list of them. So formulas stay
    ordinary tensor code that tests can call. Returns the nodes of the results.
    """
    traced = _torch.trace(fn, [value(n) for n in nodes])
    traced.graph.eliminate_dead_code()
    env: dict[fx.Node, fx.Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), nodes, strict=True))
    with graph.inserting_before(outputs(graph)):
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return [env[n] for n in _flat(node.args[0])]
            if node.op == "get_attr":  # a constant: keep it as an operation, graphs may not own tensors
                constant = getattr(traced, node.target)
                env[node] = graph.call_function(
                    torch.ops.aten.full.default,
                    (list(constant.shape), constant.item()),
                    {"dtype": constant.dtype, "device": constant.device},
                )
            else:
                env[node] = graph.node_copy(node, lambda n: env[n])
            env[node]._rename(f"{name}_{node.name}")
            env[node].meta = {"val": node.meta.get("val")}
    raise AssertionError("a traced graph ends with its output")


def _flat(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def call_region(graph: fx.Graph, body: fx.GraphModule, attr: str, args: Iterable[fx.Node]) -> fx.Node:
    """Insert a call of a body, owned by the graph's module under `attr`, at the graph's insert point."""
    ref = graph.get_attr(attr)
    node = graph.call_function(_torch.invoke_subgraph, (ref, attr, *args))
    node.meta["val"] = tuple(n.meta.get("val") if isinstance(n, fx.Node) else None for n in results(body.graph))
    return node


def item(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    """Output `index` of a node with several outputs, at the graph's insert point."""
    out = graph.call_function(operator.getitem, (node, index))
    out.meta["val"] = node.meta["val"][index]
    return out


def stand_in(graph: fx.Graph, old: fx.Node, new: fx.Node, places: Mapping[int, int]) -> dict[fx.Node, fx.Node]:
    """Let what reads output i of one call read output places[i] of another, and erase the first.

    Nothing may read those of its outputs that have no place. Returns the erased outputs with what is in their place.
    """
    replaced: dict[fx.Node, fx.Node] = {}
    for index, nodes in getitems(old).items():
        if index in places:
            with graph.inserting_before(old):
                out = item(graph, new, places[index])
            for node in nodes:
                node.replace_all_uses_with(out)
                replaced[node] = out
        for node in nodes:
            graph.erase_node(node)
    graph.erase_node(old)
    return replaced


_VIEWS = {
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.view.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
}


def view_chain(node: fx.Node) -> list[fx.Node]:
    """The node that this one is a view of, then the views up to this one."""
    chain = [node]
    while isinstance(node, fx.Node) and node.op == "call_function" and node.target in _VIEWS:
        if any(isinstance(a, fx.Node) for a in node.args[1:]):
            break
        node = node.args[0]
        chain.insert(0, node)
    return chain


def data_flow(graph: fx.Graph) -> nx.DiGraph:
    """The graph's nodes with an edge from every input to its user."""
    flow: nx.DiGraph = nx.DiGraph()
    flow.add_nodes_from(graph.nodes)
    flow.add_edges_from((i, n) for n in graph.nodes for i in n.all_input_nodes)
    return flow


def subgraph(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """Only what these nodes need, as a function of the same inputs."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op != "output":
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[n] for n in nodes))
    out = _torch.graph_module(gm, graph)
    out.graph.eliminate_dead_code()
    return out


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that can be rewritten; bodies of calls are shared, since passes add bodies and change none."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
    graph.set_codegen(gm.graph._codegen)
    copy = _torch.graph_module(gm, graph)
    copy.meta = dict(gm.meta)
    _torch.keep_sources(copy, gm)
    return copy


def sort(graph: fx.Graph) -> None:
    """Put the nodes into an order in which each comes after its inputs, changing as little as possible."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    if all(order[i] < at for n, at in order.items() for i in n.all_input_nodes):
        return
    last = outputs(graph)
    order[last] = len(order) + 1
    cursor = graph._root
    for node in nx.lexicographical_topological_sort(data_flow(graph), key=order.__getitem__):
        cursor.append(node)
        cursor = node


def fresh(gm: fx.GraphModule, name: str) -> str:
    """A name for a new body of gm."""
    number = 0
    while hasattr(gm, f"{name}_{number}"):
        number += 1
    return f"{name}_{number}"
