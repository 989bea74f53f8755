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
        if group.exact:
            continue
        if joint.plan.gate is None:
            _check_positions(joint, group)
            continue
        sites = [joint.sites[c] for c in group.calls]
        lam = joint.positions[group.number]
        nodes = [x for x in lam if isinstance(x, fx.Node)]
        velocities = [s.velocity for s in sites]

        def cosine(*tensors, lam=lam, n=len(sites), kept=group.nodes):
            C = joint.plan.estimator.weights(_fill(lam, tensors[n:]), joint.plan.estimator.slots(n))
            return gates.cosines(tensors[:n], C, kept)

        cos = insert(joint.graph, cosine, [*velocities, *nodes], "cosine")
        cosines.update(zip(group.pruned, cos, strict=True))

        def decide(*tensors, lam=lam, n=len(cos)):
            good = (
                gates.is_open(joint.plan.gate, tensors[:n], joint.plan.tau) if n else torch.ones((), dtype=torch.bool)
            )
            order = joint.plan.estimator.usable(_fill(lam, tensors[n:]))
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
        f"Group {group.number} (velocity calls {first.index} to {last.index}, {first.where}): two of its times are "
        "equal, or they neither rise nor fall from step to step, so that no interpolation weights exist. Sort the "
        "timesteps or use order='time'; if the loss calls the velocity several times per timestep, say lane=2, say; or "
        "use a gate (such a group then goes exact), or weights='index'."
    )
    lam = joint.positions[group.number]
    nodes = [x for x in lam if isinstance(x, fx.Node)]

    def check(*tensors):
        good = joint.plan.estimator.usable(_fill(lam, tensors))
        return list(tensors) if good is None else [torch.ops.jagg_fx.checked(t, good, what) for t in tensors]

    checked = iter(insert(joint.graph, check, nodes, "checked") if nodes else ())
    joint.positions[group.number] = [next(checked) if isinstance(x, fx.Node) else x for x in lam]


def _publish(joint: Joint, cosines: dict[int, fx.Node]) -> None:
    """Put the gates' values into the output that the step reads: per call its cosine, group, decision, time."""
    slots = joint.graph.find_nodes(op="call_function", target=torch.ops.jagg_fx.gates.default)
    for slot in slots:
        calls = slot.args[1]
        group_of = {c: g.number for g in joint.groups for c in g.calls if not g.exact}
        order = sorted(cosines)
        shut = sorted(joint.opens)

        def table(v, *tensors, order=order, shut=shut, group_of=group_of, calls=calls):
            nan = torch.full((), float("nan"), device=v.device)
            rest = iter(tensors)
            cos = {c: next(rest) for c in order}
            opens = {g: next(rest) for g in shut}
            times = {c: next(rest).to(v.device, torch.float32).mean() for c in joint.sites}
            rows = [
                [cos[c].float() if c in cos else torch.full_like(nan, float("inf")) for c in range(calls)],
                [nan + 0 if c not in group_of else torch.full_like(nan, group_of[c]) for c in range(calls)],
                [opens[group_of[c]].float() if group_of.get(c) in opens else nan for c in range(calls)],
                [times.get(c, nan) for c in range(calls)],
            ]
            return torch.stack([torch.stack(row) for row in rows])

        inputs = [slot.args[0], *(cosines[c] for c in order), *(joint.opens[g] for g in shut)]
        inputs += [site.time for site in joint.sites.values()]
        (node,) = insert(joint.graph, table, inputs, "gates")
        slot.replace_all_uses_with(node)
        joint.graph.erase_node(slot)
