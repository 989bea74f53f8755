"""Swap forward calls for ones that compute no more than what is still used.

Assumes: pruned. Leaves: a pruned timestep's forward returns its velocity alone, so that nothing of it is kept
for a backward; what a body would hand through from its operands (parameters, mostly) is read from them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from jagg_fx import _torch

from .joint import Joint, body_of, call_region, fresh, getitems, item, results, stand_in, view_chain

SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def run(joint: Joint) -> None:
    made: dict[tuple, str] = {}
    for forward in joint.forwards:
        _pass_through(joint, forward)
    swapped = {forward: slim(joint, forward, made) for forward in joint.forwards}
    joint.forwards = list(swapped.values())
    for site in joint.sites.values():
        site.forward = swapped.get(site.forward, site.forward)  # else it is gone: its velocity was known


def _pass_through(joint: Joint, forward: fx.Node) -> None:
    """Read outputs that are a body's own inputs, or views of them, from the operands; and those that are one value from
    one output.

    Weights and their transposes, mostly: as outputs of a call they would count, and might be copied, once per call.
    And the input of the last layer, which a gate reads and a backward too: as two outputs that share memory, Inductor
    takes them for two buffers, and writes over one after its last use while the other is still to be read.
    """
    body = body_of(joint.gm, forward)
    inputs = {n: i for i, n in enumerate(body.graph.find_nodes(op="placeholder"))}
    returned = results(body.graph)
    chains = [view_chain(r) for r in returned]
    whole = {c[0]: i for i, c in reversed([*enumerate(chains)]) if all(v.target in SAME for v in c[1:])}
    for index, nodes in getitems(forward).items():
        chain = chains[index]
        if chain[0] not in inputs and whole.get(chain[0], index) == index:
            continue
        for node in nodes:
            with joint.graph.inserting_before(node):
                if chain[0] in inputs:
                    here = forward.args[2 + inputs[chain[0]]]
                else:
                    here = item(joint.graph, forward, whole[chain[0]])
                for view in chain[1:]:
                    here = joint.graph.call_function(view.target, (here, *view.args[1:]), dict(view.kwargs))
                    here.meta["val"] = view.meta["val"]
            node.replace_all_uses_with(here)
            joint.graph.erase_node(node)


def slim(joint: Joint, forward: fx.Node, made: dict[tuple, str]) -> fx.Node:
    """Call a narrower body in place of this one, if some of its outputs are not used. Returns the call."""
    read = getitems(forward)
    used = tuple(sorted(i for i, nodes in read.items() if any(n.users for n in nodes)))
    body = body_of(joint.gm, forward)
    if len(used) == len(results(body.graph)) or not used:
        return forward
    key = (forward.args[0].target, used)  # type: ignore[union-attr]
    if key not in made:
        made[key] = fresh(joint.gm, f"{key[0]}_slim")
        joint.gm.register_module(made[key], narrowed(body, used))
    attr = made[key]
    with joint.graph.inserting_before(forward):
        node = call_region(joint.graph, getattr(joint.gm, attr), attr, forward.args[2:])
    stand_in(joint.graph, forward, node, {old: new for new, old in enumerate(used)})
    return node


def narrowed(body: fx.GraphModule, used: tuple[int, ...]) -> fx.GraphModule:
    """A copy of a body that returns only these outputs."""
    graph = fx.Graph()
    returned: Any = graph.graph_copy(body.graph, {})
    graph.output(tuple(returned[i] for i in used))
    graph.eliminate_dead_code()
    out = _torch.graph_module(body, graph)
    out.meta = dict(body.meta)
    return out
