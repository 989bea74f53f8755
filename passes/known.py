"""Velocities that the caller already has, in place of the forwards of pruned timesteps.

Right after a rollout, and in a replay, the velocities of the current parameters are at hand. The forward of a pruned
timestep serves for nothing else, so it goes: a group of W costs 2 forwards and 2 backwards, whatever W is.

`add` assumes a captured forward graph whose calls were marked, and leaves one more input for each of them. `run`
assumes a pruned joint graph. It leaves no reader of a pruned velocity, and a comparison at every call that is still
computed: it is there already, so stale velocities are caught for nothing.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from jagg_fx import _torch

from .joint import Joint, Site, insert, sort, value
from .segments import carries_gradient

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""|given - v| / |v| up to which a velocity counts as the same: kernels, batches and autocast of a rollout differ."""


def add(gm: fx.GraphModule) -> list[Tensor]:
    """Inputs for the velocities of all calls with gradient, in their order. Returns examples of them."""
    marks = gm.graph.find_nodes(op="call_function", target=torch.ops.jagg_fx.call.default)
    marks = sorted((m for m in marks if carries_gradient(m)), key=lambda m: m.args[2])  # type: ignore[arg-type, return-value]
    last = gm.graph.find_nodes(op="placeholder")[-1]
    examples: list[Tensor] = []
    for mark in marks:
        v = value(mark)
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"jagg_velocity_{len(examples)}")
        _torch.without_source(last)
        last.meta["example_value"] = _torch.example_input(tuple(v.shape), [v], v.dtype)
        examples.append(last.meta["example_value"])
        mark.update_arg(7, last)
    gm.recompile()
    return examples


def run(joint: Joint) -> bool:
    pruned = {c for g in joint.groups for c in g.pruned}
    known = {i: s for i, s in joint.sites.items() if s.given is not None}
    if not known:
        return False
    for index, site in known.items():
        if index in pruned:
            site.velocity.replace_all_uses_with(site.given)
        else:
            _compare(joint, site)
    for forward in {s.forward: None for i, s in known.items() if i in pruned}:
        if _unread(forward):
            _erase(joint.graph, forward)
            joint.forwards.remove(forward)
    sort(joint.graph)
    return True


def _compare(joint: Joint, site: Site) -> None:
    what = (
        f"velocities[{site.call.index}] is not what the network returns for this call ({site.call.where}): the "
        "velocities were made with other parameters, states or times, or stand in another order. Hand in those of the "
        "current parameters (only the first step after a rollout has them), or leave velocities= out."
    )
    tolerance = TOLERANCE.get(value(site.velocity).dtype, 1e-3)
    users = set(site.velocity.users)

    def check(v: Tensor, given: Tensor) -> Tensor:
        return torch.ops.jagg_fx.fresh(v, given, tolerance, what)

    (checked,) = insert(joint.graph, check, [site.velocity, site.given], "fresh")  # type: ignore[list-item]
    site.velocity.replace_all_uses_with(checked, delete_user_cb=lambda user: user in users)


def _unread(node: fx.Node) -> bool:
    return all(_taken_apart(u) and _unread(u) for u in node.users)


def _taken_apart(node: fx.Node) -> bool:
    return node.target in (operator.getitem, torch.ops.jagg_fx.unstack.default)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)
