"""The true error of an estimator on one batch, beside the exact gradient.

The captured joint graph is run node by node: every backward once with its own cotangent (the exact gradient),
the nodes of the estimator once more with the merged ones. Costs one exact step without code generation, two
more backwards per group, and the memory of an exact step; changes no state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from . import _torch
from .backend import Backend, Done
from .control import Ratio
from .passes import Joint, prepare
from .plan import Group, Plan
from .stats import listed

__all__ = ["Audit", "GroupAudit"]


@dataclass(frozen=True)
class GroupAudit:
    """One group: error of its gradient relative to its exact one; share: its exact norm over the whole one."""

    number: int
    calls: tuple[int, ...]
    relative_error: float
    cosine: float
    share: float
    gate: tuple[float, ...]  # the values that a gate would see
    open: bool | None


@dataclass(frozen=True)
class Audit:
    """The estimated gradient against the exact one, as if every gate were open; with tol, as the step chooses it.

    relative_error: |estimate - exact| / |exact| over all parameters; cosine between them. groups: the same per
    group. parameters: name -> (relative error, share of the squared error), largest share first. predicted: with tol,
    the error that the choice predicted from the last layer (of several networks the largest); None without. gate: whose
    values the groups hold; where a step has no gate, the cosine's.
    """

    relative_error: float
    cosine: float
    groups: list[GroupAudit]
    parameters: dict[str, tuple[float, float]]
    predicted: float | None = None
    gate: str = "cosine"

    @property
    def ratio(self) -> float | None:
        """With gate="head": true error over the gate's value, the median of the groups; else None.

        tau = tol / ratio opens most groups whose error is below tol; how many others, docs/bench/gates.md tells.
        """
        if self.gate != "head":
            return None
        found = [g.relative_error / max(g.gate) for g in self.groups if g.gate and max(g.gate) > 0]
        found = [x for x in found if math.isfinite(x)]
        return statistics.median(found) if found else None

    def __str__(self) -> str:
        what = "every gate open" if self.predicted is None else f"last layer: {self.predicted:.4g}"
        seen = "error of the last layer" if self.gate == "head" else "smallest cosine"
        lines = [
            f"relative error {self.relative_error:.4g}, cosine {self.cosine:.6f} ({what})",
            "",
            f"  group  calls    error     cosine    |g|/|sum|  gate ({seen})",
        ]
        for g in self.groups:
            state = {True: "open", False: "shut: this step was exact here", None: "no gate"}[g.open]
            gate = f"{min(g.gate):.5f} {state}" if g.gate else "" if g.relative_error else "exact"
            calls = listed(g.calls)
            lines.append(
                f"  {g.number:5d}  {calls:7s}  {g.relative_error:8.2e}  {g.cosine:8.6f}  {g.share:9.1%}  {gate}"
            )
        if ratio := self.ratio:
            lines += ["", f"  error / gate: median {ratio:.3g}; for a tolerance tol use tau = tol / {ratio:.3g}"]
        lines += ["", "  share of the error, by parameter (own relative error)"]
        for name, (error, share) in list(self.parameters.items())[:8]:
            lines.append(f"  {share:6.1%}  {name} ({error:.2e})")
        return "\n".join(lines)


class _Auditor(Backend):
    """A backend that runs the joint graph itself, once, and stops."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.result: tuple[list[dict], list[dict], Joint, dict] | None = None

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any], plan: Plan) -> Callable:
        seen: list[fx.GraphModule] = []
        _torch.compile_eager(gm, inputs, lambda joint: None, lambda joint, *_: seen.append(joint))
        joint = prepare(seen[-1], dataclasses.replace(plan, gate=plan.gate or "cosine"), self.tails)

        def run(*args: Tensor) -> Any:
            self.result = _run(joint, args)
            raise Done

        return run


class Auditor:
    """Audits the batches of one loss: captured once, and again only where the step would be."""

    def __init__(self, loss_fn: Callable, options: Any, ratio: Ratio) -> None:
        from .transform import Step

        # Each call by itself: the gradient does not depend on how calls are made, or on what is kept.
        plain = dataclasses.replace(options.plan, batched=False, activations="keep")
        options = dataclasses.replace(options, plan=plain)
        self._backend = _Auditor(options)
        self._backend.ratio = ratio
        self._step = Step(loss_fn, options, self._backend)

    def __call__(self, args: tuple, kwargs: dict, step: int, added: Sequence[tuple[Tensor, Tensor]] = ()) -> Audit:
        """step: whose draws and variant are audited. added: parameters, and what is added to their gradients."""
        from .report import trainable

        self._backend.clock.step = step
        with torch.enable_grad(), contextlib.suppress(Done):
            self._step._once(trainable(args), kwargs)
        result, self._backend.result = self._backend.result, None
        if result is None:
            raise RuntimeError("nothing to audit: no argument requires grad")
        return _compared(args, result, self._step.options.plan.gate, {_key(p): b for p, b in added})


def _key(x: Tensor) -> tuple:
    """Of a parameter, whatever alias of it is at hand."""
    return x.data_ptr(), tuple(x.shape)


def _compared(args: tuple, result: tuple, gate: str | None, added: dict[tuple, Tensor]) -> Audit:
    exact, estimate, joint, values = result
    names = _names(args, values)
    everything = _sum(exact)
    total = _norm(everything)
    groups = []
    for group, a, b in zip(joint.groups, exact, estimate, strict=True):
        seen = tuple(float(values[joint.cosines[c]]) for c in group.calls if c in joint.cosines)
        is_open = bool(values[joint.opens[group.number]]) if gate and group.number in joint.opens else None
        share = _norm(a) / total if total else 0.0
        groups.append(GroupAudit(group.number, group.calls, *_compare(b, a), share, seen, is_open))
    guess = {
        k: g + added[_key(values[k])].to(g.dtype) if _key(values[k]) in added else g for k, g in _sum(estimate).items()
    }
    squared = {k: float((guess[k] - everything[k]).double().square().sum()) for k in everything}
    whole = sum(squared.values())
    parameters = {
        names.get(k, str(k)): (
            math.sqrt(squared[k]) / max(float(everything[k].double().norm()), 1e-300) if squared[k] else 0.0,
            squared[k] / whole if whole else 0.0,
        )
        for k in sorted(squared, key=lambda k: -squared[k])
    }
    predicted = [float(values[n]) for n in joint.predicted.values()]
    return Audit(*_compare(guess, everything), groups, parameters, max(predicted, default=None), gate or "cosine")


def _run(joint: Joint, args: Sequence[Tensor]) -> tuple[list[dict], list[dict], Joint, dict]:
    """Gradients per group, exact and estimated, by operand node; and the values of all nodes."""
    with torch.no_grad():
        interpreter = fx.Interpreter(joint.gm, garbage_collect_values=False)
        placeholders = joint.graph.find_nodes(op="placeholder")
        likes = [n.meta["val"] for n in placeholders[len(args) :]]
        tangents = [torch.ones(v.shape, dtype=v.dtype, device=v.device) for v in likes]
        interpreter.run(*args, *tangents, enable_io_processing=False)
        env = interpreter.env
        exact, estimate = [], []
        for group in joint.groups:
            exact.append(_gradients(joint, group, env, group.calls, {}))
            kept = [c for c in group.calls if (bool(env[joint.runs[c]]) if c in joint.runs else c in group.kept)]
            estimate.append(_gradients(joint, group, env, kept, joint.merged) if not group.exact else exact[-1])
    return exact, estimate, joint, env


def _gradients(joint: Joint, group: Group, env: dict, calls: Sequence[int], merged: dict) -> dict:
    """Sum of the gradients of these calls' backwards, with merged cotangents where there are some."""
    total: dict = {}
    for call in calls:
        site = joint.sites[call]
        if call in merged:
            args = [env[merged[call].get(i, a)] if isinstance(a, fx.Node) else a for i, a in _numbered(site.backward)]
            out = getattr(joint.gm, site.backward.args[0].target)(*args)  # type: ignore[union-attr, arg-type]
        else:
            out = env[site.backward]
        for operand, gradient in zip(site.operands, out, strict=False):
            if isinstance(gradient, Tensor):
                total[operand] = total[operand] + gradient if operand in total else gradient
    return total


def _numbered(node: Any) -> list[tuple[int, Any]]:
    return list(enumerate(node.args[2:], start=2))


def _names(args: tuple, env: dict) -> dict:
    """Names of the parameters, by the node that holds them: found by their storage."""
    if isinstance(args[0], nn.Module):
        named: dict[str, Tensor] = dict(args[0].named_parameters())
    else:
        named = {pytree.keystr(k): v for k, v in pytree.tree_flatten_with_path(args[0])[0] if isinstance(v, Tensor)}
    by_storage = {_key(v): n for n, v in named.items()}
    return {node: by_storage.get(_key(v), node.name) for node, v in env.items() if isinstance(v, Tensor)}


def _sum(groups: list[dict]) -> dict:
    total: dict = {}
    for gradients in groups:
        for k, g in gradients.items():
            total[k] = total[k] + g if k in total else g
    return total


def _norm(gradients: dict) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def _compare(a: dict, b: dict) -> tuple[float, float]:
    """Relative error of a against b, and their cosine."""
    error = math.sqrt(sum(float((a[k] - b[k]).double().square().sum()) for k in b))
    dot = sum(float((a[k].double() * b[k].double()).sum()) for k in b)
    na, nb = _norm(a), _norm(b)
    return (error / nb if nb else error), (dot / (na * nb) if na and nb else 1.0)
