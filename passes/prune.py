"""Remove the backward of every pruned timestep, and the gradient accumulation that it fed.

Assumes: endpoints merged. Leaves: no pruned backward. Gated groups are not touched: `branch.py` has put their
exact backward behind the gate, and with tol each backward behind its flag.
"""

from __future__ import annotations

import torch
from torch import fx

from .joint import Joint, getitems, insert, is_call, outputs, sort, value

aten = torch.ops.aten

# Operations of one tensor that map zero to zero: a pruned gradient may pass through them on its way to the
# accumulation (a cast of a parameter outside the call, say).
_LINEAR = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.expand.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.sum.dim_IntList,
    aten.neg.default,
    torch.ops.prims.convert_element_type.default,
}


def run(joint: Joint) -> None:
    gone: set[fx.Node] = set()
    for group in joint.groups:
        if group.number in joint.opens:
            continue
        for call in (c for c in group.pruned if c not in joint.runs):
            backward = joint.sites[call].backward
            if backward not in gone:  # one call may be made for several timesteps
                remove(joint.graph, backward)
                gone.add(backward)
            joint.sites[call].backward = None
    sort(joint.graph)


def remove(graph: fx.Graph, backward: fx.Node) -> None:
    """Erase a backward call: its gradients become zero, and every sum loses that term."""
    for nodes in getitems(backward).values():
        for node in nodes:
            vanish(graph, node)
    if not backward.users:
        graph.erase_node(backward)


def vanish(graph: fx.Graph, node: fx.Node) -> None:
    """Treat a node as zero, and erase it."""
    for user in list(node.users):
        if is_call(user, aten.add.Tensor) and not user.kwargs:
            other = user.args[0] if user.args[1] is node else user.args[1]
            if other is node:
                vanish(graph, user)
            elif isinstance(other, fx.Node) and _alike(value(other), value(user)):
                user.replace_all_uses_with(other)
                graph.erase_node(user)
        elif user.op == "call_function" and user.target in _LINEAR:
            vanish(graph, user)
    if node.users:  # something else reads it: give it a true zero
        v = value(node)

        def zero():
            return torch.zeros(v.shape, dtype=v.dtype, device=v.device)

        (zeros,) = insert(graph, zero, [], "pruned")
        node.replace_all_uses_with(zeros)
    graph.erase_node(node)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


__all__ = ["outputs", "remove", "run", "vanish"]
