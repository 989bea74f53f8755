"""`explain`: what the rewrite finds in a loss and does to its graph, without running the loss."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from . import _torch
from .backend import Backend, Done
from .errors import CaptureError
from .estimators import Exact, index_lambdas, lambdas
from .options import WIDTH, check, known
from .passes import Joint, copied, rewrite, subgraph, view_chain
from .plan import Call, Group, Plan
from .transform import Step

__all__ = ["Report", "explain"]


@dataclass(frozen=True)
class Side:
    """One graph, before or after the rewrite, in numbers."""

    forward_calls: int
    backward_calls: int
    nodes: int
    saved_bytes: int


@dataclass
class Report:
    """What `explain` returns; print it.

    sites: the velocity calls that carry gradient, with file and line. times: their times, as tensors. groups:
    groups of consecutive timesteps, with the calls that keep their backward (`kept`) and those that do not
    (`pruned`). weights: per group the matrix C, one row for each kept call. before, after: joint
    forward-backward graphs (`print(report.after.code)`). saved_bytes_before, saved_bytes_after: bytes of
    activations kept between forward and backward, parameters and inputs not counted. passes: what each pass
    left, (name, calls, backwards, nodes).
    """

    name: str
    plan: Plan
    sites: list[Call]
    times: list[Tensor]
    groups: list[Group]
    weights: list[list[list[Any]]]
    before: fx.GraphModule
    after: fx.GraphModule
    sides: tuple[Side, Side]
    passes: list[tuple[str, int, int]]

    @property
    def saved_bytes_before(self) -> int:
        return self.sides[0].saved_bytes

    @property
    def saved_bytes_after(self) -> int:
        return self.sides[1].saved_bytes

    @property
    def speed_bound(self) -> float:
        """How much faster a step can be at most, if a forward costs 1 and a backward 2 and the head nothing."""
        a, b = self.sides
        return (a.forward_calls + 2 * a.backward_calls) / (b.forward_calls + 2 * b.backward_calls)

    def __str__(self) -> str:
        p, (a, b) = self.plan, self.sides
        gate = "no gate" if p.gate is None else f"gate {p.gate} {'<=' if p.gate == 'head' else '>='} {p.tau:g}"
        if p.tol is not None:
            gate = f"more of them where the predicted error would pass tol={p.tol:g}"
        lines = [
            f"{self.name}: {len(self.sites)} velocity calls of {', '.join(sorted({c.site for c in self.sites}))}",
            f"  first at {self.sites[0].where}",
            f"  W={p.W}, {p.estimator.name}, weights by {p.weights}, {gate}",
            "",
            "  call  time        group  backward",
        ]
        for call, time in zip(self.sites, self.times, strict=True):
            group = next(g for g in self.groups if call.index in g.calls)
            lines.append(f"  {call.index:4d}  {_short(time):10s}  {group.number:5d}  {self._role(call, group)}")
        share = f" ({b.saved_bytes / a.saved_bytes:.0%})" if a.saved_bytes else ""
        lines += [
            "",
            "                          before      after",
            f"  forward calls       {a.forward_calls:12d} {b.forward_calls:10d}",
            f"  backward calls      {a.backward_calls:12d} {b.backward_calls:10d}",
            f"  graph nodes         {a.nodes:12d} {b.nodes:10d}",
            f"  saved activations   {_bytes(a.saved_bytes):>12s} {_bytes(b.saved_bytes):>10s}{share}",
        ]
        cost = f"  cost (forward 1, backward 2){3.0:10.2f} {3 / self.speed_bound:10.2f}"
        lines.append(f"{cost}   at most {self.speed_bound:.2f}x faster")
        if any(g.pruned for g in self.groups) and p.gate is not None:
            lines.append(
                "  (an open gate runs the backward calls above; a shut one runs the exact ones)"
                if p.tol is None
                else "  (the fewest backward calls that a step can run; it runs up to all of them)"
            )
        return "\n".join(lines)

    def _role(self, call: Call, group: Group) -> str:
        if call.index not in group.kept:
            return "<pruned>"
        row = self.weights[group.number][group.kept.index(call.index)]
        terms = [
            f"{'' if _short(w) == '1' else _short(w) + ' '}g{k}"
            for w, k in zip(row, group.calls, strict=True)
            if not (isinstance(w, float) and w == 0)
        ]
        return f"of {' + '.join(terms)}"


class _Inspector(Backend):
    """A backend that looks at the graphs and stops."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.seen: dict[str, Any] = {}

    def _plans(self) -> list[Plan]:
        return super()._plans()[:1]

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any], plan: Plan) -> Callable:
        marks = gm.graph.find_nodes(op="call_function", target=torch.ops.jagg_fx.call.default)
        times = subgraph(gm, [m.args[1] for m in marks])

        def look(joint: fx.GraphModule, joint_inputs: Any, num_fwd_outputs: int) -> None:
            exact = dataclasses.replace(plan, estimator=Exact())
            for name, wanted in (("before", exact), ("after", plan)):
                graph = copied(joint)
                passes: list[tuple[str, int, int]] = []
                state = rewrite(
                    graph,
                    wanted,
                    lambda n, j, p=passes: p.append((n, _backwards(j), len(j.graph.nodes))),
                    self.tails,
                )
                if state is not None:
                    self.seen[name] = (graph, state, _saved(graph, joint_inputs, num_fwd_outputs), passes)

        _torch.compile_eager(gm, inputs, lambda joint: None, look)

        def run(*args: Any) -> Any:
            self.seen["times"] = [t.detach().cpu() for t in times(*args)]
            raise Done

        return run


def explain(loss_fn: Callable, *example_args: Any, W: int = WIDTH, **options: Any) -> Report:
    """What `transform(loss_fn, W, **options)` will do to this loss: calls, groups, weights, graphs, memory.

    Captures and rewrites the graph on the example arguments; nothing is run or compiled. Takes the options of
    `transform`; raises its errors.
    """
    known(options)
    chosen = check(W, **{**options, "compiler": "eager"})
    inspector = _Inspector(chosen)
    step = Step(loss_fn, chosen, inspector)
    with torch.enable_grad(), contextlib.suppress(Done):
        step(*trainable(example_args))
    if "after" not in inspector.seen:
        raise CaptureError("No gradient was found to rewrite: nothing among the arguments requires grad.")
    before, exact, saved_before, _ = inspector.seen["before"]
    after, state, saved_after, passes = inspector.seen["after"]
    calls = [s.call for _, s in sorted(state.sites.items())]
    all_times = inspector.seen["times"]
    times = {c.index: all_times[c.index] for c in calls}
    return Report(
        getattr(loss_fn, "__name__", "loss_fn"),
        chosen.plan,
        calls,
        list(times.values()),
        state.groups,
        [_weights(state.plan, [times[c] for c in g.calls]) for g in state.groups],
        before,
        after,
        (_side(exact, saved_before), _side(state, saved_after)),
        passes,
    )


def trainable(args: tuple) -> tuple:
    """torch.func style parameters need not require grad: explain as grad_and_value would see them."""
    from torch.utils import _pytree as pytree

    if not args or isinstance(args[0], torch.nn.Module):
        return args
    leaves = pytree.tree_leaves(args[0])
    if any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
        return args
    grow = lambda x: x.detach().requires_grad_() if x.is_floating_point() else x  # noqa: E731
    return (pytree.tree_map_only(Tensor, grow, args[0]), *args[1:])


def _weights(plan: Plan, times: list[Tensor]) -> list[list[Any]]:
    n = len(times)
    lam = index_lambdas(n) if plan.weights == "index" else lambdas(times)
    if len(plan.estimator.nodes(n)) == n:  # every step is a node
        return Exact().weights([0.0] * n)
    return plan.estimator.weights(lam, plan.estimator.slots(n))


def _saved(gm: fx.GraphModule, inputs: Any, num_fwd_outputs: int) -> int:
    forward, _ = _torch.min_cut(copied(gm), inputs, num_fwd_outputs=num_fwd_outputs)
    kept: Any = forward.graph.output_node().args[0]
    # Parameters and inputs are kept anyway, and so are views of them.
    own = [n for n in dict.fromkeys(kept[num_fwd_outputs:]) if view_chain(n)[0].op != "placeholder"]
    tensors = [n.meta["val"] for n in own]
    return sum(v.numel() * v.element_size() for v in tensors if isinstance(v, Tensor))


def _backwards(joint: Joint) -> int:
    """Backward calls that run if every gate is open."""
    gated = [g for g in joint.groups if g.number in joint.opens]
    direct = sum(s.backward is not None for s in joint.sites.values())
    return direct + sum(joint.sites[c].backward is None for g in gated for c in g.kept)


def _side(joint: Joint, saved: int) -> Side:
    return Side(len(joint.forwards), _backwards(joint), len(joint.graph.nodes), saved)


def _short(x: Any) -> str:
    if isinstance(x, Tensor):
        if x.numel() > 1:
            return f"{x.min().item():.4g}..{x.max().item():.4g}"
        x = x.item()
    return f"{x:.4g}"


def _bytes(n: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024  # type: ignore[assignment]
    raise AssertionError
