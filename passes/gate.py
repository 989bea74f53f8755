"""Decide per group whether the approximation may be used.

Assumes: groups formed. Leaves: with a gate, one boolean node per approximated group in `joint.opens`, and the
gates' values where the step reads them; without a gate, positions that raise when they cannot be used. Equal
end times and steps out of order shut the gate: such a group goes exact. With tol, `control.py` decides instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from jagg_fx import gates
from jagg_fx.errors import RefusedError
from jagg_fx.plan import Group

from .joint import Joint, insert, sort, value
from .unit import at_unit_tangent


def run(joint: Joint) -> None:
    if joint.plan.tol is not None:
        return
    cosines: dict[int, fx.Node] = {}
    for group in joint.groups:
        if group.exact:
            continue
        if joint.plan.gate is None:
            _check_positions(joint, group)
            continue
        lam = joint.positions[group.number]
        nodes = [x for x in lam if isinstance(x, fx.Node)]
        cos = (_discrepancy if joint.plan.gate == "head" else _cosines)(joint, group, lam, nodes)
        cosines.update(zip(group.pruned, cos, strict=True))

        def decide(*tensors, lam=lam, n=len(cos)):
            good = (
                gates.is_open(joint.plan.gate, tensors[:n], joint.plan.tau) if n else torch.ones((), dtype=torch.bool)
            )
            order = joint.plan.estimator.usable(fill(lam, tensors[n:]))
            return good if order is None else good & order

        (joint.opens[group.number],) = insert(joint.graph, decide, [*cos, *nodes], "open")
    joint.cosines = cosines
    publish(
        joint, cosines, {c: joint.opens[g.number] for g in joint.groups for c in g.calls if g.number in joint.opens}
    )
    sort(joint.graph)


def _cosines(joint: Joint, group: Group, lam: list, nodes: list[fx.Node]) -> list[fx.Node]:
    """The cosine of every pruned call."""
    velocities = [joint.sites[c].velocity for c in group.calls]

    def cosine(*tensors: Tensor) -> list[Tensor]:
        n = len(velocities)
        C = joint.plan.estimator.weights(fill(lam, tensors[n:]), joint.plan.estimator.slots(n))
        return gates.cosines(tensors[:n], C, group.nodes)

    return insert(joint.graph, cosine, [*velocities, *nodes], "cosine")


def _discrepancy(joint: Joint, group: Group, lam: list, nodes: list[fx.Node]) -> list[fx.Node]:
    """The head discrepancy of the group, once for each pruned call."""
    head = head_of(joint, group)

    def discrepancy(*tensors: Tensor) -> Tensor:
        n, m = len(head.hidden), len(head.operands)
        g, h, w, rest = tensors[:n], tensors[n : 2 * n], tensors[2 * n : 2 * n + m], tensors[2 * n + m :]
        C = joint.plan.estimator.weights(fill(lam, rest), joint.plan.estimator.slots(n))
        return gates.discrepancy(g, h, C, group.nodes, lambda g, h: weight_gradient(head.tail, g, h, w))

    (found,) = insert(joint.graph, discrepancy, [*head.cotangents, *head.hidden, *head.operands, *nodes], "head")
    return [found for _ in group.pruned]


@dataclass
class HeadNodes:
    """What the error of a group's last layer is made from: by call, cotangents at the tangent 1 and the layer's inputs;
    its weight and whatever else it takes; the layer itself, tail(h, W, ...)."""

    cotangents: list[fx.Node]
    hidden: list[fx.Node]
    operands: list[fx.Node]
    tail: fx.GraphModule


def head_of(joint: Joint, group: Group) -> HeadNodes:
    sites = [joint.sites[c] for c in group.calls]
    tail = joint.tails[group.calls[0]]
    hidden = [s.hidden for s in sites if s.hidden is not None]
    times = [x for x in joint.positions[group.number] if isinstance(x, fx.Node)]
    by_row = any(value(x).numel() > 1 for x in times)
    if by_row and value(hidden[0]).shape[0] != value(sites[0].velocity).shape[0]:
        raise RefusedError(
            "The error of the last layer (gate='head' or tol=), with times per row, needs a last layer whose input has "
            f"a row for each row of the batch; that of {sites[0].call.where} has shape "
            f"{tuple(value(hidden[0]).shape)}. Use gate='cosine', or one time."
        )
    cotangents = at_unit_tangent(joint, [s.own_cotangents()[0] for s in sites])
    return HeadNodes(cotangents, hidden, [sites[0].operands[i] for i in tail.operands], tail.graph)


def weight_gradient(tail: fx.GraphModule, g: Tensor, h: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Gradient of <g, tail(h, W, ...)> in W, in fp32 (fp64 for fp64)."""
    kind = torch.float64 if g.dtype == torch.float64 else torch.float32
    w, *rest = [x.to(kind) if x.is_floating_point() else x for x in operands]
    pull: Callable = torch.func.vjp(lambda w: tail(h.to(kind), w, *rest).to(kind), w)[1]
    return pull(g.to(kind))[0]


def fill(lam: list, tensors: tuple) -> list:
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
        good = joint.plan.estimator.usable(fill(lam, tensors))
        return list(tensors) if good is None else [torch.ops.jagg_fx.checked(t, good, what) for t in tensors]

    checked = iter(insert(joint.graph, check, nodes, "checked") if nodes else ())
    joint.positions[group.number] = [next(checked) if isinstance(x, fx.Node) else x for x in lam]


def publish(joint: Joint, values: Mapping[int, fx.Node], decisions: Mapping[int, fx.Node]) -> None:
    """Put the gates' values into the output that the step reads.

    A table of five rows, one column a call: its value (inf: none), its group, its decision, its time, and the
    predicted error of its group (NaN where there is none).
    """
    slots = joint.graph.find_nodes(op="call_function", target=torch.ops.jagg_fx.gates.default)
    for slot in slots:
        calls = slot.args[1]
        group_of = {c: g.number for g in joint.groups for c in g.calls if not g.exact}
        made = (values, decisions, joint.predicted)

        def table(v, *tensors, made=made, group_of=group_of, calls=calls):
            nan = torch.full((), float("nan"), device=v.device)
            rest = iter(tensors)
            value_of, decision, predicted = ({k: next(rest) for k in d} for d in made)
            times = {c: next(rest).to(v.device, torch.float32).mean() for c in joint.sites}
            rows = [
                [value_of[c].float() if c in value_of else torch.full_like(nan, float("inf")) for c in range(calls)],
                [nan + 0 if c not in group_of else torch.full_like(nan, group_of[c]) for c in range(calls)],
                [decision[c].float() if c in decision else nan for c in range(calls)],
                [times.get(c, nan) for c in range(calls)],
                [predicted[group_of[c]].float() if group_of.get(c) in predicted else nan for c in range(calls)],
            ]
            return torch.stack([torch.stack(row) for row in rows])

        inputs = [slot.args[0], *(x for d in made for x in d.values()), *(s.time for s in joint.sites.values())]
        (node,) = insert(joint.graph, table, inputs, "gates")
        slot.replace_all_uses_with(node)
        joint.graph.erase_node(slot)
