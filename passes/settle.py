"""Take apart and put together with torch's own operators what one call returns for several timesteps.

Assumes: every other pass done. Leaves: no operator of ours but those that check, or mark where to split.
"""

from __future__ import annotations

import torch
from torch import fx

from .joint import Joint, insert, sort

UNSTACK, RESTACK = torch.ops.jagg_fx.unstack.default, torch.ops.jagg_fx.restack.default


def run(joint: Joint) -> bool:
    if not joint.plan.batched:
        return False
    for node in joint.graph.find_nodes(op="call_function", target=RESTACK):
        (stacked,) = insert(joint.graph, lambda *parts: torch.stack(parts), node.args[0], "stacked")
        _swap(joint.graph, node, stacked)
    for node in joint.graph.find_nodes(op="call_function", target=UNSTACK):
        if node.users:
            parts = insert(joint.graph, lambda x: list(x.unbind(0)), [node.args[0]], "part")
            for user in list(node.users):
                _swap(joint.graph, user, parts[user.args[1]])
        joint.graph.erase_node(node)
    sort(joint.graph)
    return True


def _swap(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    graph.erase_node(old)
