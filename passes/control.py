"""With tol: decide per step of a trajectory whether its backward runs, from the predicted error of every span.

Assumes: groups formed, one for each lane, whose nodes always keep their backward. Leaves: in `joint.runs` a boolean
node for every other call (true for all of a lane whose times are out of order); in `joint.predicted` the predicted
error; the values where the step reads them. Lanes of one network are decided together: their errors add up in the
same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from jagg_fx import control, gates
from jagg_fx.estimators import Endpoints
from jagg_fx.plan import Group

from .gate import fill, head_of, publish, weight_gradient
from .joint import Joint, expressions, insert, sort


def run(joint: Joint) -> bool:
    if joint.plan.tol is None:
        return False
    slots = joint.graph.find_nodes(op="call_function", target=torch.ops.jagg_fx.gates.default)
    number = expressions(joint.graph)
    networks: dict[int, list[Group]] = {}
    for group in joint.groups:
        if not group.exact:
            site, tail = joint.sites[group.calls[0]], joint.tails[group.calls[0]]
            networks.setdefault(number[site.operands[tail.operands[0]]], []).append(group)
    values: dict[int, fx.Node] = {}
    for groups in networks.values():
        values.update(_decide(joint, groups, slots[0].args[2]))
    publish(joint, values, joint.runs)
    sort(joint.graph)
    return True


def _decide(joint: Joint, groups: list[Group], limit: fx.Node) -> dict[int, fx.Node]:
    """Decide for the lanes of one network. Returns the error of each span, by the call in its middle."""
    trees = [control.spans(g.nodes) for g in groups]
    heads = [head_of(joint, g) for g in groups]
    lams = [joint.positions[g.number] for g in groups]
    times = [[x for x in lam if isinstance(x, fx.Node)] for lam in lams]
    counts = [(len(g.calls), len(head.operands), len(t)) for g, head, t in zip(groups, heads, times, strict=True)]

    def decide(limit: Tensor, *tensors: Tensor) -> list[Tensor]:
        errors: list[Tensor] = []
        orders: list[Tensor] = []  # by span: of its lane
        whole: Tensor | None = None
        for (n, m, l), tree, head, lam in zip(counts, trees, heads, lams, strict=True):
            g, h, w, rest = tensors[:n], tensors[n : 2 * n], tensors[2 * n : 2 * n + m], tensors[2 * n + m :][:l]
            tensors = tensors[2 * n + m + l :]
            gradient = lambda g, h, w=w, tail=head.tail: weight_gradient(tail, g, h, w)  # noqa: E731
            filled = fill(lam, rest)
            order = joint.plan.estimator.usable(filled)
            order = torch.ones((), dtype=torch.bool, device=limit.device) if order is None else order
            orders += [order for _ in tree]
            for k in range(n):
                own = gradient(g[k], h[k])
                whole = own if whole is None else whole + own
            for span in tree:
                own = slice(span.a, span.b + 1)
                place = control.positions(filled, span)
                C = Endpoints().weights(place)
                errors.append(gates.head_error(g[own], h[own], C, (0, span.b - span.a), gradient))
        assert whole is not None
        halved, predicted = control.choose(errors, control.joined(trees), whole, limit)
        runs = [x | ~order for x, order in zip(halved, orders, strict=True)]
        return [predicted, *runs, *control.relative(errors, whole)]

    inputs: list[fx.Node] = [limit]
    for head, own in zip(heads, times, strict=True):
        inputs += [*head.cotangents, *head.hidden, *head.operands, *own]
    predicted, *found = insert(joint.graph, decide, inputs, "control")
    middles = [g.calls[s.middle] for g, tree in zip(groups, trees, strict=True) for s in tree]
    joint.runs.update(zip(middles, found, strict=False))
    joint.predicted.update({g.number: predicted for g in groups})
    return dict(zip(middles, found[len(middles) :], strict=True))
