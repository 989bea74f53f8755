"""Turn the velocity calls of a captured forward graph into calls of one shared body.

Assumes: a graph captured by Dynamo and the segments of its calls. Leaves: one invoke_subgraph per call, one
body per kind of call, and on each velocity a jagg_fx::call marker with its number and time. So a joint graph
holds T forward and T backward calls however deep the network is, and each body is compiled once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from jagg_fx import _torch
from jagg_fx.errors import CaptureError, RefusedError

from . import head
from .segments import Segment, carries_gradient, example


def run(gm: fx.GraphModule, segments: Sequence[Segment], heads: bool = False) -> dict[int, Tail]:
    """heads: let each call return the input of its last layer too, and return what is computed from it."""
    exits = _exits(segments)
    tails: dict[int, Tail] = {}
    bodies: dict[str, str] = {}
    for index, (segment, leaves) in enumerate(zip(segments, exits, strict=True)):
        if segment.time is None:
            raise CaptureError(f"the velocity call at {segment.where} has no time")
        hidden = None
        if heads and _is_region(segment):
            raise RefusedError(
                f"gate='head' must see into the velocity call at {segment.where}, which is a nested compile region. "
                "Take torch.compiler.nested_compile_region off, or use gate='cosine'."
            )
        if not _is_region(segment):  # else it is a user's nested compile region already
            if heads:
                last = head.find(segment, _velocity(segment, leaves))
                hidden = _detached(gm, segment, last.hidden)
                if hidden in segment.nodes:
                    leaves = [*leaves, hidden]
            form, inputs = canonical(gm, segment.nodes, leaves)
            if heads:
                tails[index] = Tail(last.tail, [inputs.index(n) for n in last.operands])
            if form not in bodies:
                bodies[form] = f"velocity_{len(bodies)}"
                setattr(gm, bodies[form], _body(gm, segment.nodes, inputs, leaves))
            replaced = _replace(gm, segment, inputs, leaves, bodies[form])
            if hidden in leaves:
                hidden = replaced[leaves.index(hidden)]
            leaves = replaced
        _mark(gm, segment, leaves, index, hidden)
    gm.graph.lint()
    gm.recompile()
    return tails


@dataclass
class Tail:
    """The last layer of a call: graph(h, W, ...), and which of the call's inputs W and the rest are."""

    graph: fx.GraphModule
    operands: list[int]


def _detached(gm: fx.GraphModule, segment: Segment, hidden: fx.Node) -> fx.Node:
    """The hidden state without its gradient, as a node of the call where it is made there."""
    with gm.graph.inserting_after(hidden if hidden in segment.nodes else segment.nodes[0].prev):
        node = gm.graph.call_method("detach", (hidden,))
    node.meta = {"example_value": example(hidden).detach()}
    if hidden in segment.nodes:
        segment.nodes.insert(segment.nodes.index(hidden) + 1, node)
    return node


def _is_region(segment: Segment) -> bool:
    first, *rest = segment.nodes
    return first.target is _torch.invoke_subgraph and all(n.target is operator.getitem for n in rest)


def _exits(segments: Sequence[Segment]) -> list[list[fx.Node]]:
    """What each call returns: the positions that any of the alike calls uses outside."""
    used: dict[int, set[int]] = {}
    for s in segments:
        at = {n: i for i, n in enumerate(s.nodes)}
        used.setdefault(len(s.nodes), set()).update(at[n] for n in s.outputs())
    return [[s.nodes[i] for i in sorted(used[len(s.nodes)])] for s in segments]


def canonical(gm: fx.GraphModule, nodes: Sequence[fx.Node], leaves: Sequence[fx.Node]) -> tuple[str, list[fx.Node]]:
    """A text that two runs of nodes share exactly when one body serves both, and the inputs of this one.

    Inputs are numbered in the order of their first use; shapes, dtypes, strides and gradient flags of inputs
    belong to the text, since a body is traced once for all of its calls.
    """
    number = {n: f"%{i}" for i, n in enumerate(nodes)}
    inputs: list[fx.Node] = []
    lines: list[str] = []

    def name(n: fx.Node) -> _Text:
        if n in number:
            return _Text(number[n])
        if n.op == "get_attr" and isinstance(getattr(gm, str(n.target), None), fx.GraphModule):
            inner = getattr(gm, str(n.target))
            return _Text("{" + canonical(inner, list(inner.graph.nodes), [])[0] + "}")
        if n not in inputs:
            inputs.append(n)
        return _Text(f"${inputs.index(n)}")

    for n in nodes:
        args = fx.map_arg((n.args, n.kwargs), name)
        target = n.target if isinstance(n.target, str) else f"{getattr(n.target, '__module__', '')}.{n.target}"
        lines.append(f"{n.op} {target if n.op != 'placeholder' else ''} {args}")
    lines += [_look(i) for i in inputs] + [number[n] for n in leaves]
    return "\n".join(lines), inputs


class _Text:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _look(node: fx.Node) -> str:
    v = example(node)
    if isinstance(v, torch.Tensor):
        return f"{tuple(v.shape)} {v.stride()} {v.dtype} {v.device} {v.requires_grad}"
    return str(v)


def _body(
    gm: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], leaves: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for i, n in enumerate(inputs):
        env[n] = graph.placeholder(f"x{i}")
        env[n].meta = {k: v for k, v in n.meta.items() if k in ("example_value", "val")}

    def look_up(n: fx.Node) -> fx.Node:
        if n not in env and n.op == "get_attr":
            env[n] = graph.get_attr(str(n.target))
        return env[n]

    for n in nodes:
        # Attributes (bodies of nested operators) are copied first: node_copy needs them in place.
        for i in n.all_input_nodes:
            look_up(i)
        env[n] = graph.node_copy(n, look_up)
    graph.output(tuple(env[n] for n in leaves))
    return _torch.graph_module(gm, graph)


def _replace(
    gm: fx.GraphModule, segment: Segment, inputs: Sequence[fx.Node], leaves: Sequence[fx.Node], attr: str
) -> list[fx.Node]:
    """Call the body in place of the nodes. Returns the nodes of its outputs."""
    graph = gm.graph
    outs = []
    with graph.inserting_before(segment.nodes[-1].next):
        ref = graph.get_attr(attr)
        node = graph.call_function(_torch.invoke_subgraph, (ref, f"jagg_fx_{attr}", *inputs))
        for position, leaf in enumerate(leaves):
            out = graph.call_function(operator.getitem, (node, position))
            out.meta = {k: v for k, v in leaf.meta.items() if k in ("example_value", "val", "stack_trace")}
            leaf.replace_all_uses_with(out)
            outs.append(out)
    for n in reversed(segment.nodes):
        graph.erase_node(n)
    return outs


def _velocity(segment: Segment, leaves: Sequence[fx.Node]) -> fx.Node:
    """The one output that carries gradient."""
    trained = [n for n in leaves if carries_gradient(n)]
    if len(trained) > 1:
        raise RefusedError(
            f"The loss reads {len(trained)} outputs with gradient of the velocity call at {segment.where}; one output "
            "is supported. Detach the others, or return one tensor (stacked or concatenated) from the velocity."
        )
    return trained[0]


def _mark(
    gm: fx.GraphModule, segment: Segment, leaves: Sequence[fx.Node], index: int, hidden: fx.Node | None = None
) -> None:
    """Put the call's number and time on its velocity."""
    velocity = _velocity(segment, [n for n in leaves if n.target is operator.getitem])
    with gm.graph.inserting_after(leaves[-1]):
        args = (velocity, segment.time, index, segment.site, segment.where, -1, hidden, None)
        mark = gm.graph.call_function(torch.ops.jagg_fx.call.default, args)
    mark.meta = dict(velocity.meta)
    velocity.replace_all_uses_with(mark, delete_user_cb=lambda user: user is not mark)
