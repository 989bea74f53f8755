"""Find the velocity calls in a joint graph, and take our markers out of it.

Assumes: each call was outlined to one invoke_subgraph, its velocity marked by jagg_fx::call and its
cotangent by jagg_fx::cotangent (`outline.py`), and AOTAutograd has split each body into a forward and a
backward one. Leaves: no marker; one Site for every call whose cotangent exists. Refuses a true chain: a
velocity whose gradient runs through another call.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import networkx as nx
import torch
from torch import fx

from jagg_fx.errors import RefusedError
from jagg_fx.plan import Call

from .joint import Joint, Site, data_flow, expressions, getitems, is_call, is_region, value


def run(joint: Joint) -> None:
    graph = joint.graph
    marks = graph.find_nodes(op="call_function", target=torch.ops.jagg_fx.call.default)
    cotangents = {
        n.args[1]: n for n in graph.find_nodes(op="call_function", target=torch.ops.jagg_fx.cotangent.default)
    }
    number = expressions(graph)
    for mark in marks:
        velocity, time, index, site, where, lane, hidden, given = mark.args
        forward, part = _forward(velocity)
        if forward not in joint.forwards:
            joint.forwards.append(forward)
        if index in cotangents:
            backward, positions = _backward(cotangents[index])
            call = Call(
                index, site, number[time], where, str(forward.args[0].target) + str(backward.args[0].target), lane=lane
            )
            joint.backward_bodies.add(backward.args[0].target)
            joint.sites[index] = Site(call, forward, velocity, time, backward, positions, hidden, part, given)
    joint.counts = {
        "nodes": len(graph.nodes),
        "forwards": len(joint.forwards),
        "backwards": len({s.backward for s in joint.sites.values()}),
    }
    for mark in [*marks, *cotangents.values()]:
        mark.replace_all_uses_with(_as_marked(graph, mark))
        graph.erase_node(mark)
    _refuse_chains(joint)
    _tell_networks_apart(joint, number)


def _as_marked(graph: fx.Graph, mark: fx.Node) -> fx.Node:
    """What a marker marks, with the strides that it was taken to have.

    The cotangent of a plain sum is one number expanded; the body of a call was made for a tensor that lies in memory as
    others do, and all calls share it.
    """
    source: fx.Node = mark.args[0]  # type: ignore[assignment]
    if value(source).stride() == value(mark).stride():
        return source
    with graph.inserting_before(mark):
        dense = graph.call_function(torch.ops.aten.clone.default, (source,))
    dense.meta["val"] = value(mark)
    return dense


def _forward(velocity: fx.Node) -> tuple[fx.Node, int | None]:
    """The region call that returned a velocity, and which of its timesteps it is if it makes several."""
    forward, part = velocity.args[0], None
    if is_call(forward, torch.ops.jagg_fx.unstack.default):
        forward, part = forward.args[0].args[0], velocity.args[1]
    if not is_region(forward):
        raise AssertionError(f"{velocity} is not an output of a velocity call")
    return forward, part


def _backward(cotangent: fx.Node) -> tuple[fx.Node, list[int]]:
    """The region call that a cotangent enters, through the copies that AOTAutograd may put between."""
    node = cotangent
    while True:
        users = list(node.users)
        regions = [u for u in users if is_region(u)]
        if regions:
            backward = regions[0]
            return backward, [i for i, a in enumerate(backward.args) if a is node]
        if len(users) != 1:
            raise AssertionError(f"the cotangent {cotangent} enters no velocity call")
        node = users[0]


def _tell_networks_apart(joint: Joint, number: dict) -> None:
    """Note with each call the trained tensors that it shares with others: two networks share none.

    Two experts of one class run one body, so their name and body do not tell them apart. A tensor that one call
    alone reads is no mark of a network: it is an input of its own, which `group.py` looks at.
    """
    trained = {i: {number[s.operands[o]] for o in getitems(s.backward)} for i, s in joint.sites.items()}
    readers = Counter(n for own in trained.values() for n in own)
    for i, site in joint.sites.items():
        shared = frozenset(n for n in trained[i] if readers[n] > 1)
        site.call = dataclasses.replace(site.call, weights=shared)


def _refuse_chains(joint: Joint) -> None:
    """No gradient of a call may run through another one: then a pruned backward would be missed upstream."""
    backward: dict[fx.Node, int] = {}
    for i, site in joint.sites.items():
        backward.setdefault(site.backward, i)
    flow = data_flow(joint.graph)
    for node, later in backward.items():
        for other in nx.descendants(flow, node) & backward.keys():
            earlier = backward[other]
            a, b = joint.sites[earlier].call, joint.sites[later].call
            raise RefusedError(
                f"The input of velocity call {later} ({b.where}) is computed from the velocity of call "
                f"{earlier} ({a.where}) with gradient. Groups need the calls to be independent, as the steps of "
                f"a stored trajectory are. Store the states, or detach the velocity of step {earlier} before "
                f"step {later} uses it (`v.detach()`)."
            )
