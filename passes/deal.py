"""Deal the inputs of the calls to other calls, by a permutation that is known at run time only.

Two needs, one tool: calls that are not in the order of time (`order="time"`), and estimators whose nodes are drawn
anew each step. Where the inputs of the T calls of a lane are dealt to the slots of that lane, the node that a draw
names always sits in the same slot: the passes after this one then know fixed slots alone, and a drawn step costs no
forward more than a fixed one.

Assumes: a captured forward graph whose calls were outlined. Leaves: every dealt call fed from a stack of the lane's
inputs, its mark with the dealt time and the number of its lane, and readers of the velocities reading them in the
order of the loss again. Autograd turns all of it around for the cotangents. Times of shape () give one permutation
for the batch; times per row one for each row, which needs a network that treats the rows independently: `rows_mix`
checks that, on the first batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from jagg_fx import _torch
from jagg_fx.dealing import permutation, taken
from jagg_fx.errors import RefusedError
from jagg_fx.gates import row_shape
from jagg_fx.plan import Plan

from .calls import Captured, body, differing, hoist, refuse_writes, region
from .joint import insert, subgraph, value
from .segments import carries_gradient

CURE = "or use order='call' and an estimator that draws no steps"


@dataclass
class Dealt:
    """What the step must know: the shape of the uniforms that it hands in, and rows to be checked."""

    draws: tuple[int, int] | None = None  # (numbers, rows): the shape of the uniforms, if any are drawn
    checks: list[Callable[..., bool]] = field(default_factory=list)  # `rows_mix` of each lane that is dealt by row


def run(gm: fx.GraphModule, plan: Plan) -> Dealt:
    """Deal where the plan asks for it. Raises RefusedError where the inputs cannot change places."""
    graph = gm.graph
    drawn = plan.estimator.drawn
    captured = Captured(graph, plan)
    lanes, number = captured.lanes, captured.number
    counts = [sum(drawn(len(g)) for g in plan.cut(lane)) for lane in lanes]
    dealt = [(lane, n) for lane, n in zip(lanes, counts, strict=True) if n or (plan.order == "time" and len(lane) > 2)]
    if not dealt:
        return Dealt()
    positions = [differing(lane, number) for lane, _ in dealt]
    by_row = [_by_row(lane, number) for lane, _ in dealt]
    refuse_writes(captured, [m for lane, _ in dealt for m in lane], CURE)
    found = Dealt()
    for own, (lane, _) in zip(by_row, dealt, strict=True):
        if own:
            found.checks.append(rows_mix(gm, lane[0], lane[1]))
    total = sum(n for _, n in dealt)
    u: list[fx.Node] = []
    if total:
        rows = [value(lane[0]).shape[0] for own, (lane, _) in zip(by_row, dealt, strict=True) if own]
        found.draws = (total, max(rows, default=1))
        uniforms = placeholder(graph, "jagg_uniforms", found.draws, value(captured.marks[0]))
        u = insert(graph, lambda x: list(x.unbind(0)), [uniforms], "uniform")
    made: list[fx.Node] = []
    for i, (lane, n) in enumerate(dealt):
        made += _deal(graph, plan, lane, i, by_row[i], positions[i], u[:n])
        u = u[n:]
    first = min((region(m) for lane, _ in dealt for m in lane), key=captured.order.__getitem__)
    hoist(captured, made, first, dealt[0][0][0].args[4], CURE)
    graph.lint()
    gm.recompile()
    return found


def _by_row(lane: Sequence[fx.Node], number: dict) -> bool:
    """Whether the calls of a lane are dealt row by row. Refuses what can be dealt neither so nor as a whole."""
    batch = tuple(value(lane[0]).shape[:1])
    shapes = {row_shape(value(m.args[1])) for m in lane}
    by_row = shapes == {batch} and batch not in ((), (1,))
    if not by_row and not all(value(m.args[1]).numel() == 1 for m in lane):
        raise RefusedError(
            f"The times of the velocity call at {lane[0].args[4]} have shape {tuple(value(lane[0].args[1]).shape)}: "  # type: ignore[arg-type]
            "the calls can be put into another order for the whole batch (a time of shape ()) or row by row (a time of "
            f"shape {batch}). Give such a time, or use order='call' and an estimator that draws no steps."
        )
    for position in differing(lane, number):
        for operand in (region(m).args[position] for m in lane):
            v = value(operand) if isinstance(operand, fx.Node) else None
            what = f"Input {position - 2} of the velocity call at {lane[0].args[4]} differs between calls"
            if not isinstance(v, Tensor):
                raise RefusedError(f"{what} and is no tensor ({operand}), so it cannot change places. Pass a tensor.")
            if carries_gradient(operand):
                raise RefusedError(
                    f"{what} and carries gradient. Calls stand in for each other, so this gradient would be lost. "
                    "Detach it, or compute it once before the loop, so that all calls share it."
                )
            if by_row and tuple(v.shape[:1]) != batch:
                raise RefusedError(
                    f"{what} and has shape {tuple(v.shape)}, while times are per row: rows that change places need a "
                    f"first dimension of {batch[0]} in every such input. Expand it, or give one time for the batch."
                )
    return by_row


def _move(graph: fx.Graph, index: fx.Node, nodes: Sequence[fx.Node], name: str) -> list[fx.Node]:
    """The tensors of these nodes, each in the place of the one that `index` names for it."""

    def move(index: Tensor, *tensors: Tensor) -> list[Tensor]:
        stack = torch.stack(tensors)
        return [taken(stack, index[j]) for j in range(len(tensors))]

    return insert(graph, move, [index, *nodes], name)


def _deal(
    graph: fx.Graph, plan: Plan, lane: Sequence[fx.Node], name: int, by_row: bool, positions: Sequence[int], u: list
) -> list[fx.Node]:
    """Deal one lane. Returns the velocities in the order of the loss."""

    def find(*tensors: Tensor) -> list[Tensor]:
        shape = tensors[0].shape[:1] if by_row else ()
        times, draws = tensors[: len(lane)], tensors[len(lane) :]
        return list(permutation(plan, [t.reshape(shape) for t in times], [_rows(x, sum(shape)) for x in draws]))

    order, inverse, place = insert(graph, find, [*(m.args[1] for m in lane), *u], "deal")
    regions = [region(m) for m in lane]
    times: list[Any] = [m.args[1] for m in lane]
    dealt = _move(graph, order, times, "time")
    if u and plan.weights == "index":  # then a step's place is its time
        dealt = insert(graph, lambda x: list(x.double().unbind(0)), [place], "place")
    for mark, time in zip(lane, dealt, strict=True):
        mark.update_arg(1, time)
        mark.update_arg(5, name)
    if lane[0].args[7] is not None:
        for mark, given in zip(lane, _move(graph, order, [m.args[7] for m in lane], "given"), strict=True):  # type: ignore[misc]
            mark.update_arg(7, given)
    for position in positions:
        own: list[Any] = [r.args[position] for r in regions]
        for call, x in zip(regions, _move(graph, order, own, "dealt"), strict=True):
            call.update_arg(position, x)
    back: list[fx.Node] = []
    for outputs in [lane, *_other_outputs(lane)]:
        moved = _move(graph, inverse, outputs, "velocity")
        inside = _between(outputs, moved)

        def outside(user: fx.Node, inside: set = inside) -> bool:
            return user not in inside

        for old, new in zip(outputs, moved, strict=True):
            new.meta["example_value"] = old.meta.get("example_value", old.meta.get("val"))
            old.replace_all_uses_with(new, delete_user_cb=outside)
        back += moved
    return back


def _rows(x: Tensor, rows: int) -> Tensor:
    return x[:rows] if rows else x.reshape(-1)[0]


def _between(start: Sequence[fx.Node], end: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes through which `start` reaches `end`."""
    found, todo = set(end), list(end)
    while todo:
        for n in todo.pop().all_input_nodes:
            if n not in found and n not in start:
                found.add(n)
                todo.append(n)
    return found


def _other_outputs(lane: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """What the loss reads of a call besides its velocity, by position: it must come back in order too."""
    by_position: dict[int, dict[fx.Node, fx.Node]] = {}
    for mark in lane:
        for user in list(region(mark).users):
            if user.target is operator.getitem and user not in (mark.args[0], mark.args[6]):
                by_position.setdefault(user.args[1], {})[mark] = user  # type: ignore[index]
    for found in by_position.values():
        if len(found) < len(lane):
            raise RefusedError(
                f"The loss reads an output of some of the velocity calls from {lane[0].args[4]} on, and not of the "
                "others, so their outputs cannot be put back in order. Read it of every call, or of none."
            )
    return [[found[m] for m in lane] for found in by_position.values()]


def placeholder(graph: fx.Graph, name: str, shape: tuple[int, ...], like: Tensor) -> fx.Node:
    """A new input after the others, of fp32, that no value of the user's stands behind."""
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    _torch.without_source(node)
    node.meta["example_value"] = _torch.example_input(shape, [like])
    return node


def rows_mix(gm: fx.GraphModule, mark: fx.Node, other: fx.Node) -> Callable[..., bool]:
    """A check on real inputs of the graph: does one row of a call's velocity depend on other rows' inputs?

    Runs the body on the inputs of one call, of another, and of a batch with every other row from either.
    """
    run_body = getattr(gm, body(mark))
    output = mark.args[0].args[1]  # type: ignore[union-attr]
    operands = [list(region(m).args[2:]) for m in (mark, other)]
    find = subgraph(gm, [n for n in operands[0] + operands[1] if isinstance(n, fx.Node)])

    def mix(*args: Any) -> bool:
        with torch.no_grad():
            found = iter(find(*args))
            a, b = ([next(found) if isinstance(n, fx.Node) else n for n in own] for own in operands)
            va, vb = run_body(*a)[output], run_body(*b)[output]
            first = torch.arange(va.shape[0], device=va.device) % 2 == 0
            own = [x if x is y or not isinstance(x, Tensor) or p is q else _mixed(first, x, y)
                   for x, y, p, q in zip(a, b, *operands, strict=True)]  # fmt: skip
            wide = _mixed(first, va, vb).double() - run_body(*own)[output].double()
            size = torch.maximum(va.double().abs().max(), vb.double().abs().max())
            loose = 1e-4 if va.dtype in (torch.float32, torch.float64) else 5e-2
            return bool(wide.abs().max() > loose * size)

    return mix


def _mixed(first: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(first.reshape(-1, *(1 for _ in a.shape[1:])), a, b)
