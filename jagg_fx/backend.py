"""The torch.compile backend: from a captured loss to a compiled step with the rewritten gradient."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from . import _ops, _torch
from .control import Ratio
from .errors import CaptureError, OptionError, RefusedError, warn
from .marking import name_of
from .options import WIDTH, Options, check, warn_of_unused
from .options import known as check_names
from .passes import Joint, batch, copied, deal, keep, known, outline, refuse, regions, repeats, rewrite, segments
from .passes.joint import value
from .plan import Plan
from .stats import Stats

__all__ = ["Backend", "backend"]

_KEPT_ALIVE = _ops  # the operators must be registered before any graph is made


class Done(BaseException):
    """Raised by a backend that only looks, in place of running the step. No failure: handlers must not see it."""


class Backend:
    """Compiles the graphs that Dynamo captures from one loss. Use `backend(...)` to make one."""

    def __init__(self, options: Options, watch: Callable | None = None, like: Backend | None = None) -> None:
        """like: a backend whose steps these are too; the velocities of all calls are then handed in (`given`)."""
        self.options = options
        own = Stats(watch_spans=options.plan.estimator.name == "endpoints", plan=options.plan)
        self.stats: Stats = own if like is None else like.stats
        self.clock: Clock = Clock(options.seed) if like is None else like.clock
        self.ratio: Ratio = Ratio() if like is None else like.ratio  # with tol: of true errors to predicted ones
        self.given = None if like is None else Given()
        self.tails: dict[int, Any] = {}
        self._watch = watch

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        regions.run(gm)
        if not gm.graph.output_node().args[0]:  # no loss, as `transform` will say: not worth compiling
            return torch.no_grad()(gm)
        found = segments.find(gm, [name_of(f) for f in self.options.velocity])
        if not found:
            found = self._repeated(gm)
        if not _differentiable(gm):  # under no_grad, or nothing trains: there is no gradient to rewrite
            return self._compile(gm, inputs, self.options.plan)
        _check_calls(found, self.options.plan.lane)
        segments.find_time(found)
        refuse.run(gm, found)
        self.tails = outline.run(gm, found, heads=any(p.gate == "head" for p in self._plans()))
        runs = [self._variant(copied(gm), inputs, plan) for plan in self._plans()]  # Dynamo reads its own graph again

        def run(*args: Tensor) -> Any:
            return runs[self.clock.variant(self.options.plan.estimator)](*args)

        return run if len(runs) > 1 else runs[0]

    def _plans(self) -> list[Plan]:
        """One plan for each estimator that the chosen one alternates between: they share the capture."""
        return self.options.plan.variants()

    def _repeated(self, gm: fx.GraphModule) -> list[segments.Segment]:
        """A plain function's calls, if what repeats looks like a velocity: it has a time."""
        found = repeats.find(gm)
        try:
            segments.find_time(found)
        except CaptureError:
            return []
        return found

    def _variant(self, gm: fx.GraphModule, inputs: Sequence[Any], plan: Plan) -> Callable:
        """One compiled graph. It returns the gates' values too, which are kept from the caller."""
        if plan.estimator.name == "exact":
            if plan.batched:
                batch.run(gm, plan)
            keep.run(gm)
            exact = self._compile(gm, inputs, plan)

            def run_exact(*args: Tensor) -> Any:
                self.clock.tick()
                return exact(*args)

            return run_exact
        velocities = [] if self.given is None else known.add(gm)
        dealt = deal.run(gm, plan)  # calls that change places have no input that is changed in place
        if plan.batched:
            batch.run(gm, plan)
        keep.run(gm)
        more: list[tuple[Tensor, Callable]] = []  # inputs of our own: an example, and what gives the value
        if dealt.draws:
            more.append((_torch.example_input(dealt.draws, inputs), self.clock.uniforms))
        _add_stats(gm, plan.tol is not None)
        if plan.tol is not None:
            more.append((_torch.example_input((), inputs), self._limit))
        compiled = self._compile(gm, [*inputs, *velocities, *(x for x, _ in more)], plan)

        def run(*args: Tensor) -> Any:
            handed = self.given.like(velocities) if self.given is not None else []
            while dealt.checks:  # once, on the first batch
                if dealt.checks[-1](*args, *handed):
                    raise RefusedError(
                        "The velocity mixes the rows of a batch (a row of its output depends on others' inputs), so "
                        "rows cannot be dealt to other calls, as times per row need with order='time' or with an "
                        "estimator that draws steps. Give one time for the whole batch (shape ()), or use "
                        "order='call' and estimator='endpoints'."
                    )
                dealt.checks.pop()
            *out, table = compiled(*args, *handed, *(make(x) for x, make in more))
            self.stats.record(table, self.ratio.value)
            self.clock.tick()
            return tuple(out)

        return run

    def _limit(self, like: Tensor) -> Tensor:
        """The predicted error that this step may have, an input of the graph: nothing is compiled anew for it."""
        assert self.options.plan.tol is not None
        return torch.full((), self.ratio.limit(self.options.plan.tol), device=like.device)

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any], plan: Plan) -> Callable:
        o, tails = self.options, self.tails

        def go(joint: fx.GraphModule) -> None:
            _warn_if_useless(rewrite(joint, plan, self._watch, tails))

        if o.compiler == "eager":
            return _torch.compile_eager(gm, inputs, go)
        settings = _torch.inductor_options(o.mode, o.options)
        return _torch.compile_inductor(gm, inputs, go, cache_key(plan), settings, plan.activations != "keep")


class Clock:
    """Counts the steps of one transform, and draws what its estimator draws: the same on every rank, new each step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self._forced = threading.local()

    def variant(self, estimator: Any) -> int:
        """Which variant this step runs."""
        forced = self._part()
        if forced is not None:
            return forced[0]
        return estimator.at(self.step, float(torch.rand((), generator=self._generator(0))))

    @contextlib.contextmanager
    def forced(self, variant: int, step: int) -> Iterator[None]:
        """Run this variant, as a part of this step, in place of the one whose turn it is."""
        self._forced.part = (variant, step)
        try:
            yield
        finally:
            self._forced.part = None

    def _part(self) -> tuple[int, int] | None:
        return getattr(self._forced, "part", None)

    def tick(self) -> None:
        """One more step was run; one that was forced is a part of another."""
        self.step += self._part() is None

    def uniforms(self, like: Tensor) -> Tensor:
        """Numbers in [0, 1) of shape (draws, rows), stratified over the rows of each draw."""
        numbers, rows = like.shape
        generator = self._generator(1)
        cells = torch.stack([torch.randperm(rows, generator=generator) for _ in range(numbers)])
        u = (cells + torch.rand(numbers, rows, generator=generator)) / rows
        return u.to(like.device, non_blocking=True)

    def _generator(self, stream: int) -> torch.Generator:
        part = self._part()
        step = self.step if part is None else part[1]
        return torch.Generator().manual_seed(hash((self.seed, step, stream)) % 2**63)


class Given:
    """The velocities that the caller of a step hands in, on their way into its graph."""

    def __init__(self) -> None:
        self._now = threading.local()

    @contextlib.contextmanager
    def handed(self, velocities: Tensor | Sequence[Tensor]) -> Iterator[None]:
        self._now.velocities = list(velocities)
        try:
            yield
        finally:
            self._now.velocities = None

    def like(self, examples: Sequence[Tensor]) -> list[Tensor]:
        """Those of this step, in the dtype and on the device of the network's own. Refuses other shapes."""
        found = self._now.velocities
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in found]
        if shapes != [tuple(x.shape) for x in examples]:
            raise OptionError(
                f"velocities= holds {len(shapes)} velocities of shapes {sorted(set(map(str, shapes)))}; the loss makes "
                f"{len(examples)} calls with gradient, of shapes {sorted({str(tuple(x.shape)) for x in examples})}. "
                "Hand in one tensor for each call, in the order of the loss, or one tensor of all with a first "
                "dimension for the calls."
            )
        return [x.detach().to(e.device, e.dtype).contiguous() for x, e in zip(found, examples, strict=True)]


def _add_stats(gm: fx.GraphModule, limited: bool) -> None:
    """Hold a place among the outputs for a table of the gates' values, `passes/gate.py` fills it.

    limited: with a new input, the limit of error control, which `passes/control.py` finds there.
    """
    output = gm.graph.output_node()
    marks = gm.graph.find_nodes(op="call_function", target=torch.ops.jagg_fx.call.default)
    limit = deal.placeholder(gm.graph, "jagg_limit", (), value(marks[0])) if limited else None
    with gm.graph.inserting_before(output):
        detached = gm.graph.call_method("detach", (marks[-1].args[0],))
        slot = gm.graph.call_function(torch.ops.jagg_fx.gates.default, (detached, len(marks), limit))
    output.args = ((*output.args[0], slot),)  # type: ignore[misc]
    gm.recompile()


def backend(W: int = WIDTH, **options: Any) -> Backend:
    """A backend for torch.compile that rewrites the gradient of the loss it is given.

    Use: `compiled = torch.compile(loss_fn, backend=jagg_fx.backend(W=4), fullgraph=True)`. Takes the options
    of `jagg_fx.transform` (has_aux aside) and gives the same gradient. The velocity calls are found in the
    captured graph: by markers of `jagg_fx.velocity`, else as the repeated calls of one module, else as
    repeated subgraphs over the same parameters. The time of a call is then its one input that differs between
    calls and is a scalar or has one entry per row; where that is not so, mark the call.

    Errors: OptionError at once for a bad option. While compiling: CaptureError, RefusedError, wrapped by
    torch in BackendCompilerFailed (the original is its `inner_exception`).
    """
    if "has_aux" in options:
        raise TypeError("backend() takes no has_aux: torch.compile keeps whatever the loss returns.")
    if "audit_every" in options:
        raise TypeError(
            "backend() takes no audit_every: a graph alone has no loss to run again. Use jagg_fx.transform."
        )
    check_names(options)
    chosen = check(W, **options)
    if chosen.plan.estimator.name == "memory":
        raise OptionError(
            "estimator='memory' keeps a state beside the graph and adds it in the loss's backward, which a backend of "
            "torch.compile does not see. Use jagg_fx.transform(loss_fn, estimator='memory')."
        )
    if chosen.time is not None:
        raise OptionError(
            f"time={chosen.time!r} names an argument of the velocity, and a captured graph has no arguments' names, so "
            "that backend() cannot use it. Call the velocity through jagg_fx.velocity(f, z, t), or use "
            "jagg_fx.transform."
        )
    warn_of_unused(options, chosen)
    return Backend(chosen)


def cache_key(plan: Plan) -> str:
    """All that the compile cache must tell apart: our sources, the plan, torch's version."""
    return hashlib.sha256((_sources() + plan.key() + torch.__version__).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    import jagg_fx.passes

    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(jagg_fx.passes.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _warn_if_useless(joint: Joint | None) -> None:
    if joint is None or joint.plan.estimator.name == "exact" or joint.plan.W <= 2:
        return
    longest = max((len(g.calls) for g in joint.groups), default=1)
    text = f"{len(joint.sites)} velocity calls form no group of more than {longest} timesteps, so "
    if not any(g.pruned for g in joint.groups):
        text += "every backward is kept: the gradient is exact and nothing is saved."
    elif longest == 3 and joint.plan.W > 3:
        text += "one backward of three is pruned: a step is at most 1.29x faster."
    else:
        return
    if longest == 1 and len(joint.sites) > 2:
        text += (
            " Each call is a lane of its own, as calls at one time are: is the right argument taken for the time? Say "
            "which it is with time=... (its position or name). And pass times as tensors: a Python number is a part of "
            "the code, not a time that can be read."
        )
    warn(f"{text} JAGG needs windows of three timesteps or more, better of four.")


def _differentiable(gm: fx.GraphModule) -> bool:
    outs = gm.graph.output_node().args[0]
    return any(isinstance(n, fx.Node) and segments.carries_gradient(n) for n in outs)  # type: ignore[union-attr]


def _check_calls(found: list[segments.Segment], lane: int | tuple[int, ...] | None) -> None:
    if isinstance(lane, tuple) and len(lane) != len(found):
        raise RefusedError(
            f"lane={lane} names the lanes of {len(lane)} calls; this loss makes {len(found)} with gradient, "
            f"the first at {found[0].where if found else 'no line'}. Give one lane for each, in their order, or "
            "the number of calls per timestep."
        )
    if len(found) >= 2:
        return
    cure = (
        "Group gradients need one velocity called once per timestep, in a Python loop. If the velocity is a plain "
        "function, or is called for all timesteps at once, say which call is a timestep: jagg_fx.velocity(f, z, t), "
        "or velocity=... in transform."
    )
    if not found:
        raise CaptureError(
            "No velocity that is called more than once with gradient was found in this loss. With one timestep there "
            f"is nothing to group: differentiate that loss without jagg_fx. {cure}"
        )
    raise CaptureError(f"Only one velocity call that carries gradient was found, at {found[0].where}. {cure}")
