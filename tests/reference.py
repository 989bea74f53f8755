"""The method of "JAGG: Jacobian-Aggregated Group Gradient" (arXiv 2607.17572), in plain autograd.

Nothing here knows a graph, a compiler or the library under test.  Everything is one formula:

    gradient = sum_j  J_j^T  sum_k  C[j, k] * g_k            J_k = d v_k / d params,  g_k = d loss / d v_k

with a weight matrix C per lane and per row of the batch.  ``C = identity`` is the exact gradient, and the
paper's estimator has two non-zero rows in each group, ``1 - lambda`` at its first and ``lambda`` at its last
step.  The velocities of the loss are detached leaves, so every g_k is the cotangent of the *whole* loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Call:
    """One velocity call of the loss: its inputs, its time, and its velocity as a detached leaf."""

    args: tuple
    kwargs: dict
    time: Tensor
    v: Tensor
    autocast: tuple[bool, torch.dtype]


@dataclass
class Group:
    """One group of one lane: which calls, the paper's cosines, and whether JAGG was used."""

    calls: list[int]
    cosines: list[float]
    row_cosines: list[list[float]]
    open: bool


@dataclass
class Reference:
    loss: Tensor
    aux: Any
    grads: dict[str, Tensor | None]
    calls: list[Call]
    cotangents: list[Tensor | None]
    merged: dict[int, Tensor]
    groups: list[Group] = field(default_factory=list)

    @property
    def nodes(self) -> list[int]:
        """Calls that get a backward pass."""
        return sorted(self.merged)

    @property
    def open_share(self) -> float:
        return sum(g.open for g in self.groups) / max(1, len(self.groups))

    def decisive(self, tau: float, margin: float) -> bool:
        """Every way of reading "the cosine of the group" says the same about tau, by a margin.

        The endpoints' own cosine is 1 by construction; whether it enters a mean, and whether a cosine
        is taken over the batch or row by row, must not matter to a test that does not test that.
        """
        for group in self.groups:
            if len(group.calls) < 3:
                continue
            readings = [min(group.cosines[1:-1]), sum(group.cosines) / len(group.cosines)]
            readings.append(sum(group.cosines[1:-1]) / (len(group.cosines) - 2))
            rows = [r for step in group.row_cosines[1:-1] for r in step]
            readings += [min(rows), max(rows)]
            if any(abs(r - tau) < margin for r in readings) or len({r >= tau for r in readings}) != 1:
                return False
        return True


def _output(out: Any) -> Tensor:
    """The velocity inside whatever a network returns: a tensor, ``.sample``, a tuple, a dict."""
    if isinstance(out, Tensor):
        return out
    if isinstance(out, Mapping):
        return out["sample"]
    return out.sample if hasattr(out, "sample") else out[0]


def _with_output(out: Any, v: Tensor) -> Any:
    if isinstance(out, Tensor):
        return v
    if isinstance(out, Mapping):
        new = copy.copy(out)
        new["sample"] = v
        return new
    if isinstance(out, tuple) and hasattr(out, "_replace"):
        return out._replace(**{out._fields[0]: v})
    if isinstance(out, tuple):
        return (v, *out[1:])
    new = copy.copy(out)
    new.sample = v
    return new


def _autocast_now() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


class Recorder:
    """Stands in for the velocity inside the loss: computes v without a graph and hands out a leaf."""

    def __init__(self, function: Callable, params: Mapping[str, Tensor], time: int | str):
        self.function, self.params, self.time = function, params, time
        self.calls: list[Call] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            # a reference or replay call: data to the loss, not a timestep
            return self.function(self.params, *args, **kwargs)
        with torch.no_grad():
            out = self.function(self.params, *args, **kwargs)
        v = _output(out).detach().requires_grad_()
        t = kwargs[self.time] if isinstance(self.time, str) else args[self.time]
        t = t.detach() if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64)
        self.calls.append(Call(args, kwargs, t, v, _autocast_now()))
        return _with_output(out, v)


def group_indices(n: int, W: int) -> list[list[int]]:
    """Consecutive groups of W, in call order; the last one ragged."""
    return [list(range(a, min(a + W, n))) for a in range(0, n, W)]


def lambdas(times: Tensor, weights: str) -> Tensor:
    """``lambda`` of each step of a group; ``times`` is (n, R): step, row of the batch."""
    n = times.shape[0]
    if weights == "index":
        return (torch.arange(n, dtype=torch.float64) / (n - 1)).reshape(n, 1).expand_as(times)
    return (times - times[0]) / (times[-1] - times[0])


def group_matrix(times: Tensor, weights: str, degenerate: str = "row") -> Tensor:
    """C of one group, (n, n, R).  Groups of one or two steps are exact.

    A row whose endpoint times are equal, or whose interior times lie outside them, has no lambda in
    [0, 1]: it is exact.  ``degenerate="group"`` makes the whole group exact for it, which is as right.
    """
    n, rows = times.shape
    exact = torch.eye(n, dtype=torch.float64).unsqueeze(-1).expand(n, n, rows).clone()
    if n <= 2:
        return exact
    lam = lambdas(times, weights)
    bad = ~((lam >= 0) & (lam <= 1)).all(0)
    if degenerate == "group":
        bad = bad.any().expand_as(bad)
    C = torch.zeros_like(exact)
    C[0], C[-1] = 1 - lam, lam
    return torch.where(bad, exact, C)


def _rows(time: Tensor, v: Tensor) -> Tensor:
    """The times of a call as a vector over rows: one entry, or one per row of the batch."""
    t = time.to(torch.float64).reshape(-1)
    assert t.numel() in (1, v.shape[0]), "a time is a scalar or one per row of the batch"
    return t


def _cosines(vs: Sequence[Tensor], lam: Tensor) -> tuple[list[float], list[list[float]]]:
    """c_t over the whole batch, and row by row."""
    batch, rows = [], []
    for v, l in zip(vs, lam, strict=True):
        l = l.reshape(-1, *[1] * (v.dim() - 1))
        hat = ((1 - l) * vs[0].double() + l * vs[-1].double()).flatten(1)
        v = v.double().flatten(1)
        batch.append(float((v * hat).sum() / (v.norm() * hat.norm() + 1e-8)))
        rows.append(((v * hat).sum(1) / (v.norm(dim=1) * hat.norm(dim=1) + 1e-8)).tolist())
    return batch, rows


def _gate_open(cosines: list[float], gate: str, tau: float) -> bool:
    c = torch.tensor(cosines, dtype=torch.float64)
    value = c.min() if gate == "cosine" else c.mean()  # torch's min and mean propagate NaN
    return bool(value >= tau)  # and a NaN is never >= tau


def reference(
    core: Callable,
    function: Callable,
    params: Mapping[str, Tensor],
    args: Sequence[Any],
    *,
    W: int = 4,
    estimator: str = "endpoints",
    weights: str = "time",
    gate: str | None = None,
    tau: float = 0.995,
    lanes: Callable[[int], Any] | None = None,
    time: int | str = 1,
    has_aux: bool = False,
    matrix: Callable[[Tensor], Tensor] | None = None,
    degenerate: str = "row",
) -> Reference:
    """Loss, cotangents and estimated gradient of ``core(velocity, *args)``.

    ``function(params, *inputs)`` is the network; ``lanes`` maps the number of a call to its lane;
    ``matrix`` gives C (n, n, R) for all steps of a lane at once, in place of the groups.
    """
    recorder = Recorder(function, params, time)
    result = core(recorder, *args)
    loss, aux = result if has_aux else (result, None)
    calls = recorder.calls

    leaves = [p for p in params.values() if p.requires_grad]
    names = [k for k, p in params.items() if p.requires_grad]
    wanted = [c.v for c in calls] + leaves
    found: list[Tensor | None] = [None] * len(wanted)
    if loss.requires_grad:
        found = list(torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True))
    cotangents, total = found[: len(calls)], found[len(calls) :]

    by_lane: dict[Any, list[int]] = {}
    for k in range(len(calls)):
        if cotangents[k] is not None:  # a detached call is no timestep
            by_lane.setdefault(lanes(k) if lanes else None, []).append(k)

    groups: list[Group] = []
    merged: dict[int, Tensor] = {}
    for members in by_lane.values():
        times = [_rows(calls[k].time, calls[k].v) for k in members]
        rows = max(t.numel() for t in times)
        table = torch.stack([t.expand(rows) for t in times])
        if matrix is not None:
            plan = [(list(range(len(members))), matrix(table))]
        elif estimator == "exact":
            plan = [([i], torch.ones(1, 1, rows, dtype=torch.float64)) for i in range(len(members))]
        else:
            plan = [
                (index, group_matrix(table[index], weights, degenerate)) for index in group_indices(len(members), W)
            ]
        for index, C in plan:
            inside = [members[i] for i in index]
            n = len(inside)
            group = Group(inside, [1.0] * n, [[1.0]] * n, True)
            if gate is not None and matrix is None and n > 2:
                vs = [calls[k].v.detach() for k in inside]
                lam = lambdas(table[index], weights)
                group.cosines, group.row_cosines = _cosines(vs, lam)
                finite = all(bool(cotangents[k].isfinite().all()) for k in inside)
                group.open = finite and _gate_open(group.cosines, gate, tau)
                if not group.open:
                    C = torch.eye(n, dtype=torch.float64).unsqueeze(-1).expand(n, n, rows)
            groups.append(group)
            for j, node in enumerate(inside):
                # skip where the weight is zero everywhere: 0 * inf is not "no contribution"
                used = [(k, C[j, i]) for i, k in enumerate(inside) if bool((C[j, i] != 0).any())]
                if not used:
                    continue
                v = calls[node].v
                wide = torch.promote_types(v.dtype, torch.float32)
                G = torch.zeros_like(v, dtype=wide)
                for k, c in used:
                    c = c.to(wide).reshape(-1, *[1] * (v.dim() - 1))
                    G = G + torch.where(c != 0, c * cotangents[k].to(wide), torch.zeros((), dtype=wide))
                merged[node] = G.to(v.dtype)

    for node, G in merged.items():
        call = calls[node]
        with torch.autocast("cpu", dtype=call.autocast[1], enabled=call.autocast[0]):
            v = _output(function(params, *call.args, **call.kwargs))
        if not v.requires_grad:
            continue
        # an input may have a graph of its own (a trained prompt), shared by the calls: keep it
        part = torch.autograd.grad(v, leaves, G, allow_unused=True, retain_graph=True)
        total = [a if b is None else b if a is None else a + b for a, b in zip(total, part, strict=True)]

    grads: dict[str, Tensor | None] = {k: None for k in params}
    grads.update(zip(names, total, strict=True))
    return Reference(loss.detach(), aux, grads, calls, cotangents, merged, groups)


def eager(
    core: Callable,
    function: Callable,
    params: Mapping[str, Tensor],
    args: Sequence[Any],
    *,
    has_aux: bool = False,
) -> tuple[dict[str, Tensor | None], Tensor, Any]:
    """Gradient, loss and aux of ordinary autograd, the thing every exact path must equal."""

    def velocity(*inputs: Any, **kwargs: Any) -> Any:
        return function(params, *inputs, **kwargs)

    result = core(velocity, *args)
    loss, aux = result if has_aux else (result, None)
    names = [k for k, p in params.items() if p.requires_grad]
    found = torch.autograd.grad(loss, [params[k] for k in names], allow_unused=True)
    grads: dict[str, Tensor | None] = {k: None for k in params}
    grads.update(zip(names, found, strict=True))
    return grads, loss.detach(), aux


def relative_error(got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None]) -> float:
    """|got - want| / |want| over all parameters at once; None counts as zero."""
    difference = norm = 0.0
    for name, w in want.items():
        g = got.get(name)
        if w is None and g is None:
            continue
        zero = torch.zeros((), dtype=torch.float64)
        g64 = zero if g is None else g.detach().double()
        w64 = zero if w is None else w.detach().double()
        difference += float(((g64 - w64) ** 2).sum())
        norm += float((w64**2).sum())
    if norm == 0.0:
        return difference**0.5
    return (difference / norm) ** 0.5
