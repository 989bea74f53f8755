"""Find the velocity calls in a captured forward graph, as runs of nodes.

Three sources, the surest first: the markers that `transform` and `jagg_fx.velocity` put around a call; the
module stack that Dynamo records (a repeated call has the suffix @1, @2); repeated isomorphic subgraphs over
the same parameters (`repeats.py`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from jagg_fx.errors import CaptureError


@dataclass
class Segment:
    """The nodes of one velocity call, in the order of the graph."""

    site: str
    nodes: list[fx.Node]
    time: fx.Node | None
    where: str

    def inputs(self) -> list[fx.Node]:
        inside = set(self.nodes)
        return list(dict.fromkeys(i for n in self.nodes for i in n.all_input_nodes if i not in inside))

    def outputs(self) -> list[fx.Node]:
        inside = set(self.nodes)
        return [n for n in self.nodes if any(u not in inside for u in n.users)]


def example(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def carries_gradient(node: fx.Node) -> bool:
    v = example(node)
    if isinstance(v, (tuple, list)):
        return any(isinstance(x, torch.Tensor) and x.requires_grad for x in v)
    return isinstance(v, torch.Tensor) and v.requires_grad


_FRAME = re.compile(r'File "(?P<file>.*?)", line (?P<line>\d+), in (?P<name>\S+)\n\s*(?P<code>.*)')


def where(node: fx.Node, inner: bool = False) -> str:
    """File, line and text of the user's code that made a node: of the loss, or the innermost line."""
    frames = [m.groupdict() for m in _FRAME.finditer(node.meta.get("stack_trace") or "")]
    frames = [f for f in frames if not re.search(r"[/\\](jagg_fx|torch)[/\\]", f["file"])] or frames
    if not frames:
        return "an unknown line"
    f = frames[-1 if inner else 0]
    return f"{f['file']}:{f['line']}: {f['code'].strip()}"


def find(gm: fx.GraphModule, named: Sequence[str] = ()) -> list[Segment]:
    """The velocity calls of a captured loss that carry gradient, in order.

    named: the velocities that the user named, whose calls are marked. Raises CaptureError if unclear.
    """
    marked = from_markers(gm)
    if marked is None and named:
        raise CaptureError(
            f"velocity={', '.join(named)} was given, but the loss never called it. Give the module or function "
            "that the loss itself calls, or call it through jagg_fx.velocity(f, z, t)."
        )
    found = marked if marked is not None else from_module_stack(gm)
    return [s for s in found if any(carries_gradient(n) for n in s.outputs())]


_BEGIN, _END = torch.ops.jagg_fx.begin.default, torch.ops.jagg_fx.end.default


def from_markers(gm: fx.GraphModule) -> list[Segment] | None:
    """Calls between jagg_fx::begin and jagg_fx::end (the outermost pair); the markers leave the graph.

    A call under torch.utils.checkpoint stands in the body of an operator: that operator is then the call.
    """
    found: list[Segment] = []
    markers: list[fx.Node] = []
    depth = 0
    for node in gm.graph.nodes:
        if is_marker(node):
            markers.append(node)
            if node.target is _BEGIN:
                if depth == 0:
                    found.append(Segment(_site(node), [], node.args[0], where(node)))
                depth += 1
            else:
                depth -= 1
        elif depth and node.op not in ("placeholder", "get_attr"):
            found[-1].nodes.append(node)
        elif wrapped := _wrapped_call(gm, node):
            found.append(wrapped)
            markers.append(node)
    for node in markers:
        if is_marker(node):
            gm.graph.erase_node(node)
    return found if markers else None


def is_marker(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (_BEGIN, _END)


def _site(begin: fx.Node) -> str:
    site = str(begin.args[1])
    if site.startswith("!"):
        raise CaptureError(f"{site[1:]} The call is at {where(begin)}.")
    return site


def _wrapped_call(gm: fx.GraphModule, node: fx.Node) -> Segment | None:
    """The call inside the body of a higher-order operator (activation checkpointing around a velocity)."""
    for arg in node.all_input_nodes if node.op == "call_function" else ():
        body = getattr(gm, str(arg.target), None) if arg.op == "get_attr" else None
        if not isinstance(body, fx.GraphModule):
            continue
        markers = [n for n in body.graph.nodes if is_marker(n)]
        begins = [n for n in markers if n.target is _BEGIN]
        if not begins:
            continue
        inputs = body.graph.find_nodes(op="placeholder")
        if len(begins) > 1 or begins[0].args[0] not in inputs:
            raise CaptureError(
                f"An operator around the velocity ({node.target}) at {where(node)} holds {len(begins)} calls, or makes "
                "the time itself. Wrap each call on its own, and hand the time to it as an argument."
            )
        nodes = list(body.graph.nodes)
        ended = nodes.index([n for n in markers if n.target is _END][-1])
        returned = [n for n in nodes[-1].all_input_nodes if nodes.index(n) > ended]
        if returned:
            raise CaptureError(
                f"An operator around the velocity ({node.target}) at {where(node)} computes something from the "
                f"velocity before it returns ({returned[0].name}), so that the velocity itself cannot be seen. "
                "Put the operator (activation checkpointing, say) around the velocity call alone."
            )
        operands = list(node.args[node.args.index(arg) + 1 :])
        segment = Segment(_site(begins[0]), [node], operands[inputs.index(begins[0].args[0])], where(node))  # type: ignore[arg-type]
        segment.nodes += [u for u in node.users if u.target is operator.getitem]
        for marker in markers:
            body.graph.erase_node(marker)
        body.recompile()
        return segment
    return None


def from_module_stack(gm: fx.GraphModule) -> list[Segment]:
    """Calls of the one module that is called several times with gradient, outermost if nested."""
    calls: dict[str, dict[str, list[fx.Node]]] = {}
    depth: dict[str, int] = {}
    names: dict[str, str] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        for level, (key, (path, kind)) in enumerate((node.meta.get("nn_module_stack") or {}).items()):
            module = key.split("@")[0]
            calls.setdefault(module, {}).setdefault(key, []).append(node)
            depth[module] = min(level, depth.get(module, level))
            names[module] = f"{path} ({getattr(kind, '__name__', kind)})"
    live = {
        m: {k: nodes for k, nodes in by_call.items() if any(map(carries_gradient, nodes))}
        for m, by_call in calls.items()
    }
    repeated = {m for m, by_call in live.items() if len(by_call) > 1 and _has_parameters(by_call)}
    outer = [m for m in live if m in repeated and not any(
        depth[o] < depth[m] and _inside(live[m], live[o]) for o in repeated - {m})]  # fmt: skip
    found = [[Segment(names[m], nodes, None, where(nodes[0])) for nodes in live[m].values()] for m in outer]
    for segments in found if len(found) > 1 else ():
        try:
            find_time(segments)
        except CaptureError as error:
            listed = ", ".join(f"{s[0].site}, {len(s)} calls" for s in found)
            raise CaptureError(
                f"Several modules are called more than once with gradient in this loss: {listed}. Not all of them "
                f"take a time, so it is not clear which are velocities. Say so with velocity=..., or call each through "
                f"jagg_fx.velocity(net, z, t). ({error})"
            ) from error
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    return sorted((s for segments in found for s in segments), key=lambda s: order[s.nodes[0]])


def _has_parameters(by_call: dict[str, list[fx.Node]]) -> bool:
    """Whether the calls share an input that carries gradient: weights, not an activation passing through."""
    shared: set[fx.Node] | None = None
    for nodes in by_call.values():
        inputs = {i for i in Segment("", nodes, None, "").inputs() if carries_gradient(i)}
        shared = inputs if shared is None else shared & inputs
    return bool(shared)


def _inside(inner: dict[str, list[fx.Node]], outer: dict[str, list[fx.Node]]) -> bool:
    every = {n for nodes in outer.values() for n in nodes}
    return all(n in every for nodes in inner.values() for n in nodes)


def find_time(segments: list[Segment]) -> None:
    """Fill in the time of calls found without markers: the one small input that differs between calls of a network."""
    for site in {s.site for s in segments if s.time is None}:
        _find_time([s for s in segments if s.site == site])


def _find_time(segments: list[Segment]) -> None:
    shared = set.intersection(*(set(s.inputs()) for s in segments))
    for segment in segments:
        own = [i for i in segment.inputs() if i not in shared and isinstance(example(i), torch.Tensor)]
        small = [i for i in own if example(i).ndim <= 1]
        named = [i for i in small if re.search(r"(^|_)(t|ts|times?|timesteps?|sigmas?)(_|\d|$)", i.name)]
        for choice in (small, named):
            if len(choice) == 1:
                segment.time = choice[0]
        if segment.time is None:
            raise CaptureError(
                f"The time of the velocity call at {segment.where} could not be told: of its inputs that differ "
                f"between calls, {_shapes(own)}, exactly one should be a scalar or have one entry per row. Call it "
                "through jagg_fx.velocity(net, z, t), or use jagg_fx.transform, which sees the arguments."
            )


def _shapes(nodes: Iterable[fx.Node]) -> str:
    return ", ".join(f"{n.name} {tuple(example(n).shape)}" for n in nodes) or "none"
