"""Decide per group whether the approximation may be used.

Assumes: groups formed. Leaves: with a gate, one boolean node per approximated group in `joint.opens`, and the
gates' values where the step reads them; without a gate, positions that raise when they cannot be used. Equal
end times and steps out of order shut the gate: such a group goes exact.
"""

from __future__ import annotations

import torch
from torch import fx

from jagg_fx import gates

from .joint import Joint, insert, sort


def run(joint: Joint) -> None:
    cosines: dict[int, fx.Node] = {}
    for group in joint.groups:
        if not group.pruned:
            continue
        if joint.plan.gate is None:
            _check_positions(joint, group)
            continue
        sites = [joint.sites[c] for c in group.calls]
        lam = joint.positions[group.number]
        nodes = [x for x in lam if isinstance(x, fx.Node)]
        velocities = [s.velocity for s in sites]

        def cosine(*tensors, lam=lam, n=len(sites)):
            return gates.cosines(tensors[:n], _fill(lam, tensors[n:]))

        cos = insert(joint.graph, cosine, [*velocities, *nodes], "cosine")
        cosines.update(zip(group.calls[1:-1], cos, strict=True))

        def decide(*tensors, lam=lam, n=len(cos)):
            good = gates.is_open(joint.plan.gate, tensors[:n], joint.plan.tau)
            order = gates.times_in_order(_fill(lam, tensors[n:]))
            return good if order is None else good & order

        (joint.opens[group.number],) = insert(joint.graph, decide, [*cos, *nodes], "open")
    joint.cosines = cosines
    _publish(joint, cosines)
    sort(joint.graph)


def _fill(lam: list, tensors: tuple) -> list:
    """The positions with their nodes replaced by the tensors that a trace gives for them."""
    rest = iter(tensors)
    return [next(rest) if isinstance(x, fx.Node) else x for x in lam]


def _check_positions(joint: Joint, group) -> None:
    first, last = (joint.sites[c].call for c in (group.calls[0], group.calls[-1]))
    what = (
        f"Group {group.number} (velocity calls {first.index} to {last.index}, {first.where}): its first and last "
        "time are equal, or a step lies outside of them, so that no interpolation weights exist. Sort the "
        "timesteps, or use a gate (such a group then goes exact), or weights='index'."
    )
    lam = joint.positions[group.number]
    for i, x in enumerate(lam):
        if isinstance(x, fx.Node):
            (lam[i],) = insert(joint.graph, lambda t: torch.ops.jagg_fx.checked(t, what), [x], "checked")


def _publish(joint: Joint, cosines: dict[int, fx.Node]) -> None:
    """Put the gates' values into the output that the step reads: per call its cosine, group, and decision."""
    slots = joint.graph.find_nodes(op="call_function", target=torch.ops.jagg_fx.gates.default)
    for slot in slots:
        calls = slot.args[1]
        group_of = {c: g.number for g in joint.groups for c in g.calls if g.pruned}
        order = sorted(cosines)
        shut = sorted(joint.opens)

        def table(v, *tensors, order=order, shut=shut, group_of=group_of, calls=calls):
            out = torch.full((3, calls), float("nan"), device=v.device)
            cos = dict(zip(order, tensors, strict=False))
            opens = dict(zip(shut, tensors[len(order) :], strict=True))
            nan = out[0, 0]
            rows = [
                [cos.get(c, nan).float() for c in range(calls)],
                [nan + 0 if c not in group_of else torch.full_like(nan, group_of[c]) for c in range(calls)],
                [opens[group_of[c]].float() if group_of.get(c) in opens else nan for c in range(calls)],
            ]
            return torch.stack([torch.stack(row) for row in rows])

        inputs = [slot.args[0], *(cosines[c] for c in order), *(joint.opens[g] for g in shut)]
        (node,) = insert(joint.graph, table, inputs, "gates")
        slot.replace_all_uses_with(node)
        joint.graph.erase_node(slot)
