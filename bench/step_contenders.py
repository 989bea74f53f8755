"""The ways to one gradient that `bench.step` compares: what trainers do, what one writes by hand, and ours."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

import jagg_fx
from bench.eager import backward
from bench.step_problem import Problem, checkpointed
from jagg_fx import _torch
from jagg_fx.estimators import resolve

Watch = AbstractContextManager
"""Entered around every backward of a step."""


class Cost(NamedTuple):
    """Calls of the network that one step cannot do without: forwards that keep nothing, that save, and backwards."""

    forwards: int
    saving: int
    backwards: int


@dataclass
class Contender:
    """One way to a gradient.

    Attributes:
        key, title: for the command line, and for people.
        family, W: the key is made of these; W is None where there are no groups.
        cost: what the bound is computed from.
        run: one step on the problem; leaves the gradient in `.grad`.
        exact: whether the gradient is.
        apart: whether the backwards of a step are calls of their own, so that they can be timed.
        parts: compiled networks that it uses ("grad", "no grad"): their compilation is counted in.
    """

    key: str
    title: str
    family: str
    W: int | None
    cost: Cost
    run: Callable[[Watch], Tensor]
    exact: bool
    apart: bool = True
    parts: tuple[str, ...] = ()


class Nets:
    """The network as trainers call it, eager or compiled; compiled once, for all who use it."""

    def __init__(self, problem: Problem, options: argparse.Namespace, count: Callable[[fx.GraphModule], None]) -> None:
        self.plain = problem.net
        self._options, self._count = options, count
        self._made: dict[str, Any] = {}

    def get(self, kind: str) -> Any:
        """ "eager" or "compiled", or one of them with "-checkpoint": its blocks checkpointed."""
        if kind not in self._made:
            net = checkpointed(self.plain) if kind.endswith("-checkpoint") else self.plain
            self._made[kind] = self.compile(net) if kind.startswith("compiled") else net
        return self._made[kind]

    def compile(self, fn: Any) -> Any:
        """torch.compile, with the joint graphs shown to `count`."""
        compiled = torch.compile(fn, backend=self._backend, fullgraph=True, dynamic=False)
        if self._options.mode not in ("reduce-overhead", "max-autotune"):
            return compiled

        def safe(*args: Any) -> Tensor:
            # The next replay of a CUDA graph writes over what the last one returned.
            return compiled(*args).clone()

        return safe

    def _backend(self, gm: fx.GraphModule, inputs: Any) -> Callable:
        if self._options.compiler == "eager":
            return _torch.compile_eager(gm, inputs, self._count)
        return _torch.compile_inductor(
            gm, inputs, self._count, "bench.step counts nodes", _torch.inductor_options(mode_of(self._options), None)
        )


def mode_of(options: argparse.Namespace) -> str | None:
    return None if options.mode == "default" else options.mode


@dataclass
class Maker:
    """Makes contenders by family."""

    problem: Problem
    nets: Nets
    options: argparse.Namespace

    def make(self, family: str, W: int | None) -> Contender:
        title, build, groups = FAMILIES[family]
        assert (W is not None) == groups
        parts = build(self, W) if groups else build(self)
        key = family if W is None else f"{family}-W{W}"
        return Contender(key, title if W is None else f"{title}, W={W}", family, W, **parts)

    def nodes(self, W: int) -> int:
        """Steps that keep their backward."""
        sizes = [min(W, self.problem.T - i) for i in range(0, self.problem.T, W)]
        return sum(len(resolve("endpoints").nodes(n)) for n in sizes)

    # exact

    def unrolled(self, kind: str) -> dict[str, Any]:
        loss: Callable[..., Tensor] = self.problem.loss
        if kind == "regions":
            loss = self._transform(estimator="exact")
        elif kind == "batched":
            loss = self._transform(estimator="exact", gate=None, batched=True)
        elif kind == "flat":
            loss = self.nets.compile(loss)
        return {"cost": self._exact_cost(), "run": partial(self._whole, loss, {}), "exact": True}

    def steps(self, kind: str) -> dict[str, Any]:
        T = self.problem.T
        cost = Cost(T, T, T) if kind.endswith("-checkpoint") else self._exact_cost()
        # A checkpointed network is one of its own, compiled in the first step of this contender.
        parts = ("grad",) if kind == "compiled" else ()
        return {"cost": cost, "run": partial(self._by_steps, kind, lambda: range(T)), "exact": True, "parts": parts}

    def _exact_cost(self) -> Cost:
        return Cost(0, self.problem.T, self.problem.T)

    def _whole(self, loss_fn: Callable[..., Tensor], more: dict[str, Any], watch: Watch) -> Tensor:
        loss = loss_fn(self.problem.net, *self.problem.batch, **more)
        with watch:
            loss.backward()
        return loss

    def _by_steps(self, kind: str, choose: Callable[[], Any], watch: Watch) -> Tensor:
        net, chosen = self.nets.get(kind), choose()
        total = torch.zeros((), device=self.problem.device)
        for step in chosen:
            loss = self.problem.term(net, step, len(chosen))
            with watch:
                loss.backward()
            total += loss.detach()
        return total

    # estimates

    def half(self, kind: str) -> dict[str, Any]:
        T = self.problem.T
        kept = max(1, T // 2)
        generator = torch.Generator().manual_seed(0)

        def choose() -> list[int]:
            return sorted(torch.randperm(T, generator=generator)[:kept].tolist())

        run = partial(self._by_steps, kind, choose)
        return {"cost": Cost(0, kept, kept), "run": run, "exact": False, "parts": ("grad",) * (kind == "compiled")}

    def author(self, kind: str, W: int) -> dict[str, Any]:
        p, nodes = self.problem, self.nodes(W)
        states, sigmas, _, _, y = p.batch

        def run(watch: Watch) -> Tensor:
            net = self.nets.get(kind)
            velocity = lambda z, t: net(z, t, y)  # noqa: E731
            return backward(velocity, list(states[: p.T]), list(sigmas[: p.T]), p.head, "endpoints", W, watch=watch)

        parts = ("grad", "no grad") if kind == "compiled" else ()
        return {"cost": Cost(p.T, nodes, nodes), "run": run, "exact": W <= 2, "parts": parts}

    def ours(self, W: int, cost: Callable[[int, int], Cost] | None = None, **chosen: Any) -> dict[str, Any]:
        T, nodes = self.problem.T, self.nodes(W)
        apart = chosen.get("activations", "keep") == "keep"
        more = {"velocities": self.problem.velocities} if chosen.pop("known", False) else {}
        step = self._transform(W=W, **{"gate": None, **chosen})
        counted = cost(T, nodes) if cost else Cost(T - nodes, nodes, nodes)
        exact = W <= 2 or chosen.get("tau") == SHUT
        return {"cost": counted, "run": partial(self._whole, step, more), "exact": exact, "apart": apart}

    def _transform(self, **chosen: Any) -> Callable[..., Tensor]:
        return jagg_fx.transform(
            self.problem.loss, compiler=self.options.compiler, mode=mode_of(self.options), **chosen
        )


OPEN, SHUT, HEAD_OPEN = -1, 2, 1e9
"""A cosine is never below the first and never reaches the second; the error of a last layer stays below the third."""

# How a family is made: its title, what builds it, and whether it has groups of W.
FAMILIES: dict[str, tuple[str, Callable[..., dict[str, Any]], bool]] = {
    "exact-unrolled": ("exact, unrolled, compiled", lambda m: m.unrolled("regions"), False),
    "exact-unrolled-eager": ("exact, unrolled, eager", lambda m: m.unrolled("eager"), False),
    "exact-flat": ("exact, unrolled, one flat torch.compile", lambda m: m.unrolled("flat"), False),
    "exact-batched": ("exact, batched calls", lambda m: m.unrolled("batched"), False),
    "exact-steps": ("exact, a backward per step, compiled", lambda m: m.steps("compiled"), False),
    "exact-steps-eager": ("exact, a backward per step, eager", lambda m: m.steps("eager"), False),
    "exact-checkpoint": ("exact, per step, checkpointed, compiled", lambda m: m.steps("compiled-checkpoint"), False),
    "exact-checkpoint-eager": ("exact, per step, checkpointed, eager", lambda m: m.steps("eager-checkpoint"), False),
    "author": ("written by hand, compiled", lambda m, W: m.author("compiled", W), True),
    "author-eager": ("written by hand, eager", lambda m, W: m.author("eager", W), True),
    "ours": ("ours, no gate", lambda m, W: m.ours(W), True),
    "open": ("ours, gate open", lambda m, W: m.ours(W, gate="cosine", tau=OPEN), True),
    "open-head": ("ours, head gate open", lambda m, W: m.ours(W, gate="head", tau=HEAD_OPEN), True),
    "shut": (
        "ours, gate shut",
        # Interior forwards are done again in the branch, with what their backward needs.
        lambda m, W: m.ours(W, lambda T, nodes: Cost(T - nodes, T, T), gate="cosine", tau=SHUT),
        True,
    ),
    "known": (
        "ours, known velocities",
        lambda m, W: m.ours(W, lambda T, nodes: Cost(0, nodes, nodes), known=True),
        True,
    ),
    "batched": ("ours, batched calls", lambda m, W: m.ours(W, batched=True), True),
    "known-batched": (
        "ours, known velocities, batched calls",
        lambda m, W: m.ours(W, lambda T, nodes: Cost(0, nodes, nodes), known=True, batched=True),
        True,
    ),
    "group": ("ours, group after group", lambda m, W: m.ours(W, activations="group"), True),
    "recompute": (
        "ours, activations recomputed",
        lambda m, W: m.ours(W, lambda T, nodes: Cost(T, nodes, nodes), activations="recompute"),
        True,
    ),
    "half": ("a random half of the steps, compiled", lambda m: m.half("compiled"), False),
    "half-eager": ("a random half of the steps, eager", lambda m: m.half("eager"), False),
}

OPTIONAL = ("exact-flat",)
"""Only when asked for by name: Inductor takes hours for the T calls of a deep network in one graph."""


def chosen(names: str | None, Ws: list[int], checkpoint: bool) -> list[tuple[str, int | None]]:
    """The contenders that a command line names: families, or families with a W ("ours" or "ours-W4").

    Raises:
        ValueError: an unknown name.
    """
    if names is None:
        # Where the network is checkpointed already, every contender is.
        left_out = (*OPTIONAL, *(("exact-checkpoint", "exact-checkpoint-eager") if checkpoint else ()))
        names = ",".join(f for f in FAMILIES if f not in left_out)
    found: list[tuple[str, int | None]] = []
    for name in filter(None, names.split(",")):
        family, _, width = name.partition("-W")
        if family not in FAMILIES or (width and not (FAMILIES[family][2] and width.isdecimal())):
            raise ValueError(f"there is no contender {name!r}: choose of {', '.join(FAMILIES)}, with -W4 or without.")
        groups = FAMILIES[family][2]
        found += [(family, int(width))] if width else [(family, W) for W in Ws] if groups else [(family, None)]
    return list(dict.fromkeys(found))
