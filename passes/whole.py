"""Finish the groups one after the other, inside of the step: memory does not grow with the number of timesteps.

A gradient is linear in the tangent of the loss. At the tangent 1 it can be computed together with the loss, group by
group, and only multiplied when the backward runs: no activation then crosses from the forward to the backward.

Assumes: a rewritten graph. Leaves, with activations="group" or "recompute": every gradient computed without the tangent
and handed to jagg_fx::scaled with it (`_torch.split` cuts there); nodes in the order backward by backward, each after
what it alone needs, and followed by the sums of gradients that it completes.
"""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx
import torch
from torch import fx

from jagg_fx.errors import RefusedError

from .joint import Joint, data_flow, insert, is_region, outputs, value
from .unit import one


def run(joint: Joint) -> bool:
    if joint.plan.activations == "keep":
        return False
    _at_unit_tangent(joint)
    _order(joint)
    return True


def _at_unit_tangent(joint: Joint) -> None:
    graph = joint.graph
    tangents = [n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents") and n.users]
    if len(tangents) != 1:
        raise RefusedError(
            f"activations={joint.plan.activations!r} computes the gradient together with the loss, so the loss must be "
            f"the only output with gradient; {len(tangents)} outputs have one. Detach what the loss function returns "
            "beside the loss, or use activations='keep'."
        )
    (tangent,) = tangents
    if value(tangent).numel() != 1:
        raise RefusedError(
            f"activations={joint.plan.activations!r} computes the gradient together with the loss, which must be one "
            f"number; the only output with gradient has shape {tuple(value(tangent).shape)}. Return its mean or sum, "
            "or use activations='keep'."
        )
    flow = data_flow(graph)
    last = outputs(graph)
    below = nx.descendants(flow, tangent)
    gradients = dict.fromkeys(n for n in last.all_input_nodes if n in below)
    (unit,) = insert(graph, one(value(tangent)), [], "unit")
    tangent.replace_all_uses_with(unit)
    for gradient in gradients:
        with graph.inserting_before(last):
            scaled = graph.call_function(torch.ops.jagg_fx.scaled.default, (gradient, tangent))
        scaled.meta["val"] = gradient.meta["val"]
        last.replace_input_with(gradient, scaled)


def _order(joint: Joint) -> None:
    graph = joint.graph
    position = {n: i for i, n in enumerate(graph.nodes)}
    done: dict[fx.Node, None] = {}
    for node in graph.find_nodes(op="placeholder"):
        done[node] = None

    def emit(node: fx.Node) -> None:
        """A node after its inputs; depth first, without recursion: graphs are deep."""
        todo: list[tuple[fx.Node, Iterator[fx.Node]]] = [(node, _inputs(node))]
        while todo:
            current, inputs = todo[-1]
            missing = next((i for i in inputs if i not in done), None)
            if missing is not None:
                todo.append((missing, _inputs(missing)))
                continue
            todo.pop()
            done[current] = None

    def settle(node: fx.Node) -> None:
        """What can be summed up now, so that gradients of single calls die at once."""
        todo = list(node.users)
        while todo:
            user = todo.pop(0)
            if (
                user in done
                or user.op == "output"
                or is_region(user)
                or any(i not in done for i in user.all_input_nodes)
            ):
                continue
            done[user] = None
            todo += sorted(user.users, key=position.__getitem__)

    for node in joint.backwards(graph):
        emit(node)
        settle(node)
    for node in list(graph.nodes):
        if node.op != "output":
            emit(node)
    cursor = graph._root
    for node in [*done, outputs(graph)]:
        cursor.append(node)
        cursor = node


def _inputs(node: fx.Node) -> Iterator[fx.Node]:
    """Cotangents before saved values: what a forward saves shall be there for its backward alone."""
    inputs = node.all_input_nodes
    return iter(reversed(inputs) if is_region(node) else inputs)
