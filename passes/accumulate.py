"""Add every gradient to the sum of the earlier ones inside of the backward that makes it.

Autograd adds up the gradients of single calls between the calls. A compiler puts such additions off, until the
gradients of several calls lie in memory side by side; of a large network with few rows that costs more time than its
matrix products. Inside of a backward each product is added to its sum as soon as it is there, and two sets of
gradients are alive at a time, whatever the number of timesteps.

Assumes: pruned and slimmed, sorted. Leaves: backward calls, and calls of gated groups, that take the sums so far as
further operands (`Joint.sums`) and return them with their own gradients added, in the order in which the calls run; in
the branches of a gate the same. Sums are regrouped for that, which changes their rounding. Gradients that are cast on
their way to a sum, or read by something else, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from jagg_fx import _torch

from .joint import Joint, body_of, call_region, choices, fresh, getitems, is_call, stand_in, value

ADD = torch.ops.aten.add.Tensor


@dataclass
class Sum:
    """Additions whose result is `root`: of at most one output of each of some calls, and of other terms."""

    root: fx.Node
    outputs: dict[fx.Node, int] = field(default_factory=dict)  # by call: which of its outputs
    others: list[fx.Node] = field(default_factory=list)
    total: fx.Node | None = None  # of the calls seen so far; at first an input of the graph, if that is a term


def run(joint: Joint) -> bool:
    made: dict[tuple, str] = {}
    replaced = _add_up(joint, joint.gm, made)
    for site in joint.sites.values():
        site.backward = replaced.get(site.backward, site.backward)  # type: ignore[arg-type]
    called = [body_of(joint.gm, n) for n in joint.backwards(joint.graph)]
    branches = {branch: None for body in called for _, both in choices(body) for branch in both}
    inside = [_add_up(joint, branch, made) for branch in branches]
    return bool(replaced or any(inside))


def _add_up(joint: Joint, gm: fx.GraphModule, made: dict[tuple, str]) -> dict[fx.Node, fx.Node]:
    """Hand the sums in a graph from call to call. Returns the calls, old and new."""
    calls = joint.backwards(gm.graph)
    alone = {nodes[0]: (c, i) for c in calls for i, nodes in getitems(c).items() if len(nodes) == 1}
    found = [_sum(root, alone) for root in _roots(gm.graph)]
    sums = [s for s in found if len(s.outputs) + (s.total is not None) > 1]
    swapped: dict[fx.Node, fx.Node] = {}
    for call in calls:
        own = {s.outputs[call]: s for s in sums if call in s.outputs}
        known = {i: s for i, s in own.items() if s.total is not None}
        node = call
        if known:
            node, erased = _add_inside(joint, gm, call, known, made)
            for s in sums:
                s.others = [erased.get(n, n) for n in s.others]
            swapped[call] = node
        items = getitems(node)
        for index, s in own.items():
            (s.total,) = items[index]
    for i, s in enumerate(sums):
        total = _finish(gm.graph, s)
        for later in sums[i + 1 :]:  # a sum may be a term of another
            later.others = [total if n is s.root else n for n in later.others]
    if swapped:
        gm.recompile()
    return swapped


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


def _sum(root: fx.Node, alone: dict[fx.Node, tuple[fx.Node, int]]) -> Sum:
    """alone: outputs of calls that are taken out once, with their call and place."""
    found, todo = Sum(root), [root]
    while todo:
        node = todo.pop()
        terms = _terms(node) if node is root or len(node.users) == 1 else None
        if terms:
            todo += reversed(terms)
            continue
        call, index = alone.get(node, (None, 0)) if len(node.users) == 1 else (None, 0)
        if _look(node) != _look(root):
            found.others.append(node)
        elif call is not None and call not in found.outputs:
            found.outputs[call] = index
        elif node.op == "placeholder" and found.total is None:
            found.total = node
        else:
            found.others.append(node)
    return found


def _add_inside(
    joint: Joint, gm: fx.GraphModule, call: fx.Node, known: dict[int, Sum], made: dict[tuple, str]
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Let a call add its gradients to the sums so far. Returns the call in its place, and its outputs, old and new."""
    name: str = call.args[0].target  # type: ignore[union-attr, assignment]
    key = (name, *known)
    if key not in made:
        made[key] = fresh(joint.gm, f"{name}_sum")
        joint.gm.register_module(made[key], _with_sums(body_of(gm, call), list(known)))
        (joint.branch_bodies if name in joint.branch_bodies else joint.backward_bodies).add(made[key])
    attr = made[key]
    if not hasattr(gm, attr):  # a branch holds the bodies that it calls itself
        gm.register_module(attr, getattr(joint.gm, attr))
    args = (*call.args[2:], *(s.total for s in known.values()))
    with gm.graph.inserting_before(call):
        node = call_region(gm.graph, getattr(gm, attr), attr, args)  # type: ignore[arg-type]
    joint.sums[node] = dict(zip(range(len(node.args) - len(known), len(node.args)), known, strict=True))
    return node, stand_in(gm.graph, call, node, {i: i for i in getitems(call)})


def _with_sums(body: fx.GraphModule, indices: list[int]) -> fx.GraphModule:
    """A copy of a body that takes the sums so far as its last inputs, and returns the new ones."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    returned: Any = graph.graph_copy(body.graph, env)
    out, last = list(returned), env[body.graph.find_nodes(op="placeholder")[-1]]
    so_far = []
    for index in indices:
        with graph.inserting_after(last):
            last = graph.placeholder(f"so_far_{index}")  # a name of its own: an argument is known by its target
        last.meta["val"] = value(out[index])
        so_far.append(last)
    root: torch.nn.Module = body
    for choice, branches in choices(body):  # both branches add them
        root = torch.nn.Module()
        for ref, branch in zip(choice.args[1:3], branches, strict=True):
            root.register_module(ref.target, _with_sums(branch, indices))  # type: ignore[union-attr, arg-type]
        env[choice].update_arg(3, (*env[choice].args[3], *so_far))  # type: ignore[misc]
    if root is body:
        for index, before in zip(indices, so_far, strict=True):
            out[index] = graph.call_function(ADD, (before, out[index]))
            out[index].meta["val"] = value(before)
    graph.output(tuple(out))
    made = _torch.graph_module(root, graph)
    made.meta = dict(body.meta)
    return made


def _finish(graph: fx.Graph, s: Sum) -> fx.Node:
    """Put the sum of the last backward, and what else there is to add, in place of the old additions. Returns it."""
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
    return total
