"""The torch.compile backend: from a captured loss to a compiled step with the rewritten gradient."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from . import _ops, _torch
from .errors import CaptureError, JaggWarning
from .marking import name_of
from .options import Options, check
from .passes import Joint, outline, refuse, regions, repeats, rewrite, segments
from .stats import Stats

__all__ = ["Backend", "backend"]

_KEPT_ALIVE = _ops  # the operators must be registered before any graph is made


class Done(BaseException):
    """Raised by a backend that only looks, in place of running the step. No failure: handlers must not see it."""


class Backend:
    """Compiles the graphs that Dynamo captures from one loss. Use `backend(...)` to make one."""

    def __init__(self, options: Options, watch: Callable | None = None) -> None:
        self.options = options
        self.stats = Stats()
        self._watch = watch

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        regions.run(gm)
        found = segments.find(gm, [name_of(f) for f in self.options.velocity])
        if not found:
            found = self._repeated(gm)
        if not _differentiable(gm):  # under no_grad, or nothing trains: there is no gradient to rewrite
            return self._compile(gm, inputs)
        _check_calls(found)
        segments.find_time(found)
        refuse.run(gm, found)
        outline.run(gm, found)
        if self.options.plan.gate is None or self.options.plan.estimator.name == "exact":
            return self._compile(gm, inputs)
        return self._with_stats(gm, inputs, len(found))

    def _repeated(self, gm: fx.GraphModule) -> list[segments.Segment]:
        """A plain function's calls, if what repeats looks like a velocity: it has a time."""
        found = repeats.find(gm)
        try:
            segments.find_time(found)
        except CaptureError:
            return []
        return found

    def _with_stats(self, gm: fx.GraphModule, inputs: Sequence[Any], calls: int) -> Callable:
        """Let the graph return the gates' values too, and keep them from the caller."""
        output = gm.graph.output_node()
        mark = gm.graph.find_nodes(op="call_function", target=torch.ops.jagg_fx.call.default)[-1]
        with gm.graph.inserting_before(output):
            detached = gm.graph.call_method("detach", (mark.args[0],))
            slot = gm.graph.call_function(torch.ops.jagg_fx.gates.default, (detached, calls))
        output.args = ((*output.args[0], slot),)  # type: ignore[misc]
        gm.recompile()
        compiled = self._compile(gm, inputs)

        def run(*args: Tensor) -> Any:
            *out, table = compiled(*args)
            self.stats.record(table)
            return tuple(out)

        return run

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        o = self.options

        def go(joint: fx.GraphModule) -> None:
            _warn_if_useless(rewrite(joint, o.plan, self._watch))

        if o.compiler == "eager":
            return _torch.compile_eager(gm, inputs, go)
        return _torch.compile_inductor(gm, inputs, go, cache_key(o), _torch.inductor_options(o.mode, o.options))


def backend(W: int = 4, **options: Any) -> Backend:
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
    return Backend(check(W, **options))


def cache_key(options: Options) -> str:
    """All that the compile cache must tell apart: our sources, the plan, torch's version."""
    return hashlib.sha256((_sources() + options.plan.key() + torch.__version__).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    import jagg_fx.passes

    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(jagg_fx.passes.__file__).parent):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _warn_if_useless(joint: Joint | None) -> None:
    if joint is None or joint.plan.estimator.name == "exact" or joint.plan.W <= 2:
        return
    if not any(g.pruned for g in joint.groups):
        warnings.warn(
            f"{len(joint.sites)} velocity calls form no group of more than two timesteps, so every backward is kept: "
            "the gradient is exact and nothing is saved. JAGG needs windows of three timesteps or "
            "more, better of four.",
            JaggWarning,
            stacklevel=2,
        )


def _differentiable(gm: fx.GraphModule) -> bool:
    outs = gm.graph.output_node().args[0]
    return any(isinstance(n, fx.Node) and segments.carries_gradient(n) for n in outs)  # type: ignore[union-attr]


def _check_calls(found: list[segments.Segment]) -> None:
    if len(found) >= 2:
        return
    cure = (
        "Group gradients need one velocity called once per timestep, in a Python loop. If the velocity is a plain "
        "function, or is called for all timesteps at once, say which call is a timestep: jagg_fx.velocity(f, z, t), "
        "or velocity=... in transform."
    )
    if not found:
        raise CaptureError(f"No velocity call that carries gradient was found in this loss. {cure}")
    raise CaptureError(f"Only one velocity call that carries gradient was found, at {found[0].where}. {cure}")
