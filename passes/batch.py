"""Run many velocity calls as one: the nodes of all groups in one call, and all pruned timesteps in another.

The calls are independent, so one call of the network under vmap, over the stacked inputs, gives all of their
velocities; rows of a batch may depend on each other, as they do in the loss. The gradient of a weight is then summed
over the timesteps inside of its matrix product: no pass over memory of the size of the parameters is made to add up the
gradients of single calls. With few rows and large weights this decides the time of a step.

Assumes: a captured forward graph whose calls were marked; no gates. Leaves: at most two calls for each lane, whose
velocities jagg_fx::unstack takes apart, and marks that name their lanes. All nodes' activations are alive at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from jagg_fx import _torch
from jagg_fx.errors import RefusedError
from jagg_fx.plan import Plan

from .calls import Captured, body, differing, hoist, refuse_writes, region
from .joint import copied, fresh, results, value
from .segments import carries_gradient

CURE = "or use batched=False"


def run(gm: fx.GraphModule, plan: Plan) -> None:
    """Raises RefusedError where the calls cannot be made as one."""
    captured = Captured(gm.graph, plan)
    refuse_writes(captured, captured.marks, CURE)
    for number, lane in enumerate(captured.lanes):
        for mark in lane:
            mark.update_arg(5, number)
        kept, pruned = _roles(plan, lane)
        for calls in (kept, pruned):
            if len(calls) > 1:
                _one_call(gm, captured, calls)
    gm.graph.lint()
    gm.recompile()


def _roles(plan: Plan, lane: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The calls that keep their backward, and those that do not."""
    kept: list[fx.Node] = []
    for group in plan.cut(range(len(lane))):
        n, e = len(group), plan.estimator
        nodes = range(n) if len(e.nodes(n)) == n else (*e.nodes(n), *e.slots(n))
        kept += [lane[group[j]] for j in sorted(nodes)]
    return kept, [m for m in lane if m not in kept]


def _one_call(gm: fx.GraphModule, captured: Captured, calls: Sequence[fx.Node]) -> None:
    graph, where = gm.graph, calls[0].args[4]
    stacked = differing(calls, captured.number)
    regions = [region(m) for m in calls]
    first = min(regions, key=captured.order.__getitem__)
    for position in stacked:
        for own in (r.args[position] for r in regions):
            if not isinstance(own, fx.Node) or not isinstance(value(own), Tensor):
                raise RefusedError(
                    f"Input {position - 2} of the velocity call at {where} differs between calls and is no tensor "
                    f"({own}), so the calls cannot be made as one. Pass a tensor, {CURE}."
                )
            if carries_gradient(own):
                raise RefusedError(
                    f"Input {position - 2} of the velocity call at {where} differs between calls and carries gradient: "
                    f"made as one, the calls would give a gradient to steps that are pruned. Detach it, {CURE}."
                )
    with graph.inserting_before(first):
        operands: list[Any] = []
        for position in range(2, len(first.args)):
            own = [r.args[position] for r in regions]
            if position not in stacked:
                operands.append(own[0])
                continue
            operands.append(graph.call_function(torch.stack, (own,)))
            with _torch.fake_mode([value(n) for n in own]):  # type: ignore[arg-type]
                operands[-1].meta["example_value"] = torch.stack([value(n) for n in own])  # type: ignore[arg-type]
        dims = tuple(0 if p in stacked else None for p in range(2, len(first.args)))
        attr = _batched_body(gm, body(calls[0]), dims, operands, where)
        made = graph.call_function(_torch.invoke_subgraph, (graph.get_attr(attr), f"jagg_fx_{attr}", *operands))
        read = sorted({u.args[1] for r in regions for u in r.users})  # type: ignore[type-var]
        last = []
        for index in read:
            whole = graph.call_function(operator.getitem, (made, index))
            parts = graph.call_function(torch.ops.jagg_fx.unstack.default, (whole, len(calls)))
            for i, own in enumerate(regions):
                old = [u for u in own.users if u.args[1] == index]
                part = graph.call_function(operator.getitem, (parts, i))
                last.append(part)
                for user in old:
                    part.meta = dict(user.meta)
                    user.replace_all_uses_with(part)
                    graph.erase_node(user)
    hoist(captured, last, first, where, CURE)
    for own in regions:
        graph.erase_node(own)


def _batched_body(gm: fx.GraphModule, name: str, dims: tuple, operands: Sequence[Any], where: Any) -> str:
    """The body of a call for many calls. Tried once, to say what cannot be done before AOTAutograd does."""
    attr = fresh(gm, f"{name}_batched")
    root = nn.Module()
    root.many = _Many(getattr(gm, name), dims)
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(dims))]
    for node, operand in zip(inputs, operands, strict=True):
        node.meta = {"example_value": value(operand) if isinstance(operand, fx.Node) else operand}
    made = graph.call_module("many", tuple(inputs))
    graph.output(
        tuple(graph.call_function(operator.getitem, (made, i)) for i in range(len(results(root.many.one.graph))))
    )
    many = _torch.graph_module(root, graph)
    try:
        _torch.trace(_outputs(many), [n.meta["example_value"] for n in inputs])
    except Exception as error:
        raise RefusedError(
            f"The velocity call at {where} cannot be made for many timesteps at once: {error} Use batched=False."
        ) from error
    setattr(gm, attr, many)
    return attr


class _Many(nn.Module):
    """A body under vmap, over the inputs that are stacked."""

    def __init__(self, one: fx.GraphModule, dims: tuple) -> None:
        super().__init__()
        self.one, self.dims = copied(one), dims
        for node in self.one.graph.find_nodes(op="call_function", target=_torch.attention):
            node.target = _torch.folded_attention
        self.one.recompile()

    def forward(self, *inputs: Any) -> Any:
        return torch.func.vmap(self.one, in_dims=self.dims)(*inputs)


def _outputs(many: Callable) -> Callable:
    return lambda *values: [x for x in many(*values) if isinstance(x, Tensor)]
