"""Put the backwards of a gated group behind its gate: merged if it is open, exact if it is shut.

Assumes: gates and merged cotangents. Leaves: one region call per gated group in place of its backward calls,
with a torch.cond inside. The first node of a group stays outside, before its region: it has a backward either way, and
only its cotangent is chosen. So there is a sum of gradients before the first region, and `accumulate.py` can hand it to
all of them, which stay one. The shut branch computes the forward of a pruned timestep again, so that nothing of it is
kept for a branch that seldom runs. All groups of one size share one region.

With tol, every call that may be skipped gets a region of its own: its backward, or zeros. Which of them run is known
only when the step runs, so what their forwards saved is kept.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from jagg_fx import _torch
from jagg_fx.plan import Group

from .joint import Joint, Site, body_of, call_region, fresh, getitems, insert, is_call, item, results, sort, stand_in
from .merge import in_memory
from .prune import remove, vanish


def run(joint: Joint) -> None:
    made: dict[tuple, str] = {}
    for group in joint.groups:
        if group.number in joint.opens:
            _branch(joint, group, made)
    if joint.plan.tol is not None:
        for call, merged in joint.merged.items():
            if call in joint.runs:
                _skip(joint, joint.sites[call], made)
                continue
            for position, node in merged.items():
                joint.sites[call].backward.update_arg(position, node)
    sort(joint.graph)


class _Operands:
    """Nodes of the joint graph that a branch reads, and the placeholders that stand for them inside."""

    def __init__(self) -> None:
        self.nodes: list[fx.Node] = []

    def slot(self, node: fx.Node) -> int:
        if node not in self.nodes:
            self.nodes.append(node)
        return self.nodes.index(node)


def _branch(joint: Joint, group: Group, made: dict[tuple, str]) -> None:
    sites = [joint.sites[c] for c in group.calls]
    finite = insert(
        joint.graph,
        lambda is_open, *g: is_open & torch.stack([x.isfinite().all() for x in g]).all(),
        [joint.opens[group.number], *(s.backward.args[i] for s in sites for i in s.cotangents)],
        "finite",
    )
    place = finite[0]
    if len(group.kept) > 1:
        first = joint.sites[group.kept[0]]
        place = _choose(joint, first, finite[0])
        sites.remove(first)
    wanted = sorted({i for s in sites for i in getitems(s.backward)})
    operands = _Operands()
    merged = [_recipe(s, operands, joint.merged[s.call.index]) for s in sites if s.call.index in group.kept]
    exact = [_recipe(s, operands, None if s.call.index in group.kept else {}) for s in sites]
    key = (repr(merged), repr(exact), tuple(wanted), len(operands.nodes))
    if key not in made:
        made[key] = fresh(joint.gm, f"jagg_group_of_{len(group.calls)}")
        body = _group_body(joint, operands.nodes, merged, exact, wanted, finite[0])
        joint.gm.register_module(made[key], body)
        joint.branch_bodies.add(made[key])
    attr = made[key]
    with joint.graph.inserting_after(place):
        node = call_region(joint.graph, getattr(joint.gm, attr), attr, [finite[0], *operands.nodes])
    joint.gated[group.number] = node
    with joint.graph.inserting_after(node):
        gradients = {i: item(joint.graph, node, o) for o, i in enumerate(wanted)}
    for site in sites:
        for index, nodes in getitems(site.backward).items():
            for old in nodes:
                if index in gradients:  # the first call to hold this gradient hands it on; the others vanish
                    old.replace_all_uses_with(gradients[index])
                    joint.graph.erase_node(old)
                else:
                    vanish(joint.graph, old)
            gradients.pop(index, None)
        remove(joint.graph, site.backward)
        site.backward = None


def _choose(joint: Joint, site: Site, flag: fx.Node) -> fx.Node:
    """Run a backward with its merged cotangents where the flag is set, else with its own. Moves and returns it."""
    backward = site.backward
    assert backward is not None
    for position, merged in joint.merged[site.call.index].items():
        both = [flag, merged, backward.args[position]]
        (chosen,) = insert(joint.graph, torch.where, both, "chosen")  # type: ignore[arg-type]
        backward.update_arg(position, chosen)
        chosen.append(backward)
    return backward


def _skip(joint: Joint, site: Site, made: dict[tuple, str]) -> None:
    """Put one backward behind its flag; skipped, its gradients are zero."""
    wanted = sorted(getitems(site.backward))
    operands, runs = _Operands(), joint.runs[site.call.index]
    recipe = _recipe(site, operands, joint.merged[site.call.index])
    key = (repr(recipe), tuple(wanted), len(operands.nodes))
    if key not in made:
        made[key] = fresh(joint.gm, "jagg_step")
        root = torch.nn.Module()
        root.runs = _backwards(joint, operands.nodes, [recipe], wanted)
        root.skipped = _zeros(operands.nodes, results(root.runs.graph))  # type: ignore[arg-type]
        joint.gm.register_module(made[key], _choice(root, ("runs", "skipped"), operands.nodes, runs))
    with joint.graph.inserting_before(site.backward):
        node = call_region(joint.graph, getattr(joint.gm, made[key]), made[key], [runs, *operands.nodes])
    stand_in(joint.graph, site.backward, node, {index: o for o, index in enumerate(wanted)})  # type: ignore[arg-type]
    site.backward = None


def _zeros(nodes: Sequence[fx.Node], likes: Sequence[fx.Node]) -> fx.GraphModule:
    """A branch that computes nothing: zeros with the shapes and strides of these values."""
    graph = fx.Graph()
    for i, n in enumerate(nodes):
        _placeholder(graph, f"x{i}", n)
    zeros = []
    for v in (n.meta["val"] for n in likes):
        order = in_memory(v)
        options = {"dtype": v.dtype, "device": v.device}
        full = graph.call_function(torch.ops.aten.full.default, ([v.shape[d] for d in order], 0.0), options)
        full.meta["val"] = v.permute(order)
        zeros.append(
            graph.call_function(torch.ops.aten.permute.default, (full, [order.index(d) for d in range(v.ndim)]))
        )
        zeros[-1].meta["val"] = v
    graph.output(tuple(zeros))
    return _torch.graph_module(torch.nn.Module(), graph)


def _recipe(site: Site, operands: _Operands, merged: dict[int, fx.Node] | None) -> tuple:
    """How to run one backward inside a branch, as plain data.

    merged: cotangents by argument position, for the open branch; None: with its own, from saved values;
    {}: with its own, the forward computed again.
    """
    again = merged == {}
    args = []
    for position, arg in enumerate(site.backward.args[2:], start=2):
        if position in site.cotangents:
            args.append(("operand", operands.slot(merged[position] if merged else arg)))
        elif again and is_call(arg, operator.getitem) and arg.args[0] is site.forward:
            args.append(("saved", arg.args[1]))
        else:
            args.append(("operand", operands.slot(arg)))
    forward = (site.forward.args[0].target, tuple(operands.slot(n) for n in site.operands)) if again else None
    return (site.backward.args[0].target, tuple(args), forward)


def _group_body(
    joint: Joint,
    nodes: Sequence[fx.Node],
    merged: list[tuple],
    exact: list[tuple],
    wanted: list[int],
    gate: fx.Node,
) -> fx.GraphModule:
    root = torch.nn.Module()
    root.merged = _backwards(joint, nodes, merged, wanted)
    root.exact = _backwards(joint, nodes, exact, wanted)
    return _choice(root, ("merged", "exact"), nodes, gate)


def _choice(root: torch.nn.Module, names: tuple[str, str], nodes: Sequence[fx.Node], flag: fx.Node) -> fx.GraphModule:
    """A body that runs one of two branches of root, on these nodes: the first where the flag is true."""
    graph = fx.Graph()
    first = _placeholder(graph, "is_open", flag)
    inputs = tuple(_placeholder(graph, f"x{i}", n) for i, n in enumerate(nodes))
    choice = graph.call_function(_torch.cond, (first, *map(graph.get_attr, names), inputs))
    choice.meta["val"] = tuple(n.meta["val"] for n in results(getattr(root, names[0]).graph))
    graph.output(tuple(item(graph, choice, i) for i in range(len(choice.meta["val"]))))
    return _torch.graph_module(root, graph)


def _backwards(joint: Joint, nodes: Sequence[fx.Node], recipes: list[tuple], wanted: list[int]) -> fx.GraphModule:
    """A branch: run the backwards of the recipes one after the other and add up their gradients."""
    root = torch.nn.Module()
    graph = fx.Graph()
    inputs = [_placeholder(graph, f"x{i}", n) for i, n in enumerate(nodes)]

    def region(attr: str, args: list[fx.Node]) -> fx.Node:
        body = getattr(joint.gm, attr)
        if not hasattr(root, attr):
            root.add_module(attr, body)
        return call_region(graph, body, attr, args)

    total: list[fx.Node] = []
    for backward, args, forward in recipes:
        again = region(forward[0], [inputs[i] for i in forward[1]]) if forward else None
        values = [inputs[i] if kind == "operand" else item(graph, again, i) for kind, i in args]  # type: ignore[arg-type]
        node = region(backward, values)
        gradients = [item(graph, node, i) for i in wanted]
        total = [_add(graph, a, b) for a, b in zip(total, gradients, strict=True)] if total else gradients
    graph.output(tuple(total))
    return _torch.graph_module(root, graph)


def _placeholder(graph: fx.Graph, name: str, like: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = like.meta["val"]
    return node


def _add(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    node = graph.call_function(torch.ops.aten.add.Tensor, (a, b))
    node.meta["val"] = a.meta["val"]
    return node


__all__ = ["body_of", "run"]
