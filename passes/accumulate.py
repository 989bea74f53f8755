"""Add every gradient to the sum of the earlier ones inside of the backward that makes it.

Autograd adds up the gradients of single calls between the calls. A compiler puts such additions off, until the
gradients of several calls lie in memory side by side; of a large network with few rows that costs more time than its
matrix products. Inside of a backward each product is added to its sum as soon as it is there, and two sets of
gradients are alive at a time, whatever the number of timesteps.

Assumes: pruned and slimmed, sorted. Leaves: backward calls that take the sums so far as further operands (`Site.sums`)
and return them with their own gradients added, in the order in which the calls run. Sums are regrouped for that, which
changes their rounding. Gradients that are cast on their way to a sum, or read by something else, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from .joint import Joint, body_of, call_region, fresh, getitems, is_call, stand_in, value

ADD = torch.ops.aten.add.Tensor


@dataclass
class Sum:
    """Additions whose result is `root`: of at most one output of each of some backwards, and of other terms."""

    root: fx.Node
    outputs: dict[fx.Node, int] = field(default_factory=dict)  # by backward: which of its outputs
    others: list[fx.Node] = field(default_factory=list)
    total: fx.Node | None = None  # of the backwards seen so far


def run(joint: Joint) -> bool:
    order = {n: i for i, n in enumerate(joint.graph.nodes)}
    backwards = sorted({s.backward for s in joint.sites.values() if s.backward in order}, key=order.__getitem__)  # type: ignore[type-var, arg-type]
    found = [_sum(root, {*backwards}) for root in _roots(joint.graph)]  # type: ignore[arg-type]
    sums = [s for s in found if len(s.outputs) > 1]
    made: dict[tuple, str] = {}
    for backward in backwards:
        own = {s.outputs[backward]: s for s in sums if backward in s.outputs}
        replaced = _add_inside(joint, backward, own, made)  # type: ignore[arg-type]
        for s in sums:
            s.others = [replaced.get(n, n) for n in s.others]
    for s in sums:
        _finish(joint.graph, s)
    return bool(sums)


def _terms(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors that a node adds, if it does nothing but that."""
    if not is_call(node, ADD) or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    a, b = node.args
    return (a, b) if _look(a)[:2] == _look(b)[:2] == _look(node)[:2] else None


def _look(node: fx.Node) -> tuple:
    v = value(node)
    return v.shape, v.dtype, v.device, v.stride()


def _roots(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in graph.find_nodes(op="call_function", target=ADD):
        if _terms(node) and not (len(node.users) == 1 and _terms(next(iter(node.users)))):
            yield node


def _sum(root: fx.Node, backwards: set[fx.Node]) -> Sum:
    found, todo = Sum(root), [root]
    while todo:
        node = todo.pop()
        terms = _terms(node) if node is root or len(node.users) == 1 else None
        if terms:
            todo += reversed(terms)
            continue
        source = node.args[0] if is_call(node, getitem) else None
        alone = source in backwards and len(node.users) == 1 and len(getitems(source)[node.args[1]]) == 1  # type: ignore[arg-type, index]
        if alone and source not in found.outputs and _look(node) == _look(root):
            found.outputs[source] = node.args[1]  # type: ignore[index, assignment]
        else:
            found.others.append(node)
    return found


def _add_inside(joint: Joint, backward: fx.Node, own: dict[int, Sum], made: dict[tuple, str]) -> dict[fx.Node, fx.Node]:
    """Let a backward add its gradients to the sums of those that ran before it. Returns its outputs, old and new."""
    replaced: dict[fx.Node, fx.Node] = {}
    known = {i: s for i, s in own.items() if s.total is not None}
    if known:
        name = backward.args[0].target  # type: ignore[union-attr]
        key = (name, *known)
        if key not in made:
            made[key] = fresh(joint.gm, f"{name}_sum")
            joint.gm.register_module(made[key], _with_sums(body_of(joint.gm, backward), list(known)))
            joint.backward_bodies.add(made[key])
        attr, args = made[key], (*backward.args[2:], *(s.total for s in known.values()))
        with joint.graph.inserting_before(backward):
            node = call_region(joint.graph, getattr(joint.gm, attr), attr, args)  # type: ignore[arg-type]
        replaced = stand_in(joint.graph, backward, node, {i: i for i in getitems(backward)})
        for site in joint.sites.values():
            if site.backward is backward:
                site.backward, site.sums = node, list(range(2 + len(args) - len(known), 2 + len(args)))
        backward = node
    items = getitems(backward)
    for index, s in own.items():
        (s.total,) = items[index]
    return replaced


def _with_sums(body: fx.GraphModule, indices: list[int]) -> fx.GraphModule:
    """A copy of a backward's body that takes the sums so far as its last inputs, and returns the new ones."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    returned: Any = graph.graph_copy(body.graph, env)
    out, last = list(returned), env[body.graph.find_nodes(op="placeholder")[-1]]
    for index in indices:
        with graph.inserting_after(last):
            last = graph.placeholder(f"so_far_{index}")  # a name of its own: an argument is known by its target
        last.meta["val"] = value(out[index])
        out[index] = graph.call_function(ADD, (last, out[index]))
        out[index].meta["val"] = value(last)
    graph.output(tuple(out))
    new = fx.GraphModule(body, graph)
    new.meta = dict(body.meta)
    return new


def _finish(graph: fx.Graph, s: Sum) -> None:
    """Put the sum of the last backward, and what else there is to add, in place of the old additions."""
    assert s.total is not None
    total = s.total
    for other in s.others:
        with graph.inserting_before(s.root):
            total = graph.call_function(ADD, (total, other))
        total.meta["val"] = value(s.root)
    s.root.replace_all_uses_with(total)
    todo = [s.root]
    while todo:
        node = todo.pop()
        if not node.users and _terms(node):
            inputs = node.all_input_nodes
            graph.erase_node(node)
            todo += inputs
