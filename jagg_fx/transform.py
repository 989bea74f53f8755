"""`transform`: a loss in, a step with the rewritten gradient out."""

from __future__ import annotations

import contextlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import _torch, functorch
from .audit import Audit, Auditor
from .backend import Backend, Given
from .discover import discover
from .errors import CaptureError, JaggError, OptionError, RefusedError, warn
from .estimators import Memory
from .marking import installed, marking_call, places
from .memory import BiasMemory, Remembered
from .options import WIDTH, Options, check, known, warn_of_unused
from .stats import Stats

__all__ = ["Step", "transform"]


def transform(loss_fn: Callable, W: int = WIDTH, **options: Any) -> Step:
    """A step that computes the loss as it is, and its gradient with two backwards per group of W timesteps.

    loss_fn(params, *args), with a pytree of tensors that it hands to torch.func.functional_call, or
    loss_fn(net, *args) with an nn.Module. It returns a scalar loss, or `(loss, aux)` with has_aux, and calls
    the velocity once per timestep in a Python loop on stored states. It is not edited.

    Options (method: arXiv 2607.17572; formulas in `jagg_fx.estimators`, `jagg_fx.gates`):
      W          steps per group, an int >= 1; 1 and 2 are exact.
      estimator  "endpoints" (the paper), "exact", "debiased", "memory", "quadratic", "knots", "causal", "subset",
                 an object of `jagg_fx.estimators`, or one of your own with nodes(n) and weights(lam).
      gate, tau  "cosine": the smallest cosine of a group must reach tau; "cosine-mean": the mean must; None:
                 no gate and no branch in the graph.
      tol        a number in (0, 1): error control. Runs as many backwards as keep the predicted relative error of
                 the step's gradient below tol, from every W-th (8) to all. In place of estimator, gate and tau.
      weights    "time": lambda from the times, in any unit; "index": j / (W - 1).
      order      "call": timesteps in the order of the calls; "time": in the order of falling time, by row.
      lane       calls per timestep, taken in turn, or a list with the lane of every call; by default calls at
                 equal times are lanes.
      velocity   the nn.Module or function whose calls are the timesteps, or a list of several networks; found
                 by itself where modules are called several times with gradient.
      time       which argument of the velocity is the time: position or name; by default the one named t,
                 timestep, timesteps, time or sigma, else the second.
      has_aux    loss_fn returns (loss, aux).
      activations  "keep"; "group", "recompute": groups one after the other inside the step, for less memory.
      batched    True: the calls that keep a backward run as one, the pruned ones as another (gate=None only).
      seed       an int: random steps of an estimator are drawn from it, the same on every rank.
      audit_every  N: audit every N-th step, into step.stats.audits. An audit costs more than an exact step.
      compiler   "inductor", or "eager": the same rewritten graph, run without code generation.
      mode, options, dynamic   handed on to torch.compile and Inductor.

    Errors: OptionError (a ValueError) at once for a bad option. At the first step: CaptureError if the calls
    are not found or the loss cannot be captured, RefusedError if the rewrite would be wrong.
    """
    if not callable(loss_fn):
        raise TypeError(f"transform takes a loss function; found {type(loss_fn).__name__}.")
    known(options)
    chosen = check(W, **options)
    warn_of_unused(options, chosen)
    _warn_if_useless(chosen)
    return Step(loss_fn, chosen)


def _warn_if_useless(options: Options) -> None:
    plan = options.plan
    if plan.estimator.name != "endpoints":
        return
    if plan.W == 2:
        warn(
            "W=2 keeps both backwards of every group: the gradient is exact and nothing is saved. "
            "Use W=4 or more to save."
        )
    if plan.W == 3:
        warn(
            "W=3 prunes one backward of three: a step is at most 1.29x faster (9 units of cost become 7). "
            "Use W=4 (1.5x) or more to save."
        )


class Step:
    """What `transform` returns. Call it like the loss; see `transform` for the options.

    step(*args) -> loss, or (loss, aux): `loss.backward()` then fills `.grad`, so hooks, scalers and
    optimisers work. step.grad_and_value(*args) -> (gradients, loss) in the order of torch.func; with an
    nn.Module first, gradients are a dict by parameter name, None where eager gives None. torch.func.grad(step)
    gives the same gradient. step.stats: the gates of the last step.

    step(*args, velocities=...) : what the network returns for the calls with gradient, in their order, if that is known
    already (a rollout's, while the parameters are still those): T tensors, or one with a first dimension of T. The
    forwards of pruned timesteps are then left out. Those of the others are compared with what is handed in: StaleError
    if they differ by more than rounding. A loss with an argument of that name keeps it to itself.
    """

    def __init__(self, loss_fn: Callable, options: Options, backend: Backend | None = None) -> None:
        self.loss_fn = loss_fn
        self.options = options
        self.backend = backend or Backend(options)
        self._compiled = self._compile(self.backend)
        self._with_given: tuple[Given, Callable] | None = None  # made at the first need
        # Raised at the first need: the switch costs some milliseconds a call.
        self._limit: Callable[[], Any] = contextlib.nullcontext
        self._calls: dict[int, tuple[Callable, list, Callable]] = {}
        self._looked_for: set[tuple] = set()
        self._auditor: Auditor | None = None
        e = options.plan.estimator
        self.memory = BiasMemory(e.beta, e.shrink) if isinstance(e, Memory) else None
        self._now = threading.local()  # what this thread runs in place of the plain step
        self._reached: list[bool] | None = None  # parameters that the loss reaches: the others keep a gradient of None
        self._velocities: tuple[Callable, ...] = options.velocity
        self.__name__ = f"jagg_fx.transform({getattr(loss_fn, '__name__', 'loss_fn')})"

    def _compile(self, backend: Backend) -> Callable:
        """Compiled once for each set of parameters that train.

        Dynamo's guards of a module's parameters may be skipped as long as the module's dictionaries are the same: torch
        2.11 then misses that one was frozen or thawed, and gives it no gradient.
        """
        made: dict[tuple, Callable] = {}

        def run(*args: Any, **kwargs: Any) -> Any:
            modules = [m for m in (*args, *kwargs.values(), *self._velocities) if isinstance(m, nn.Module)]
            trains = tuple(p.requires_grad for m in modules for p in m.parameters())
            if trains not in made:
                code = _own_code(self.loss_fn, self.options.has_aux)
                made[trains] = torch.compile(code, backend=backend, fullgraph=True, dynamic=self.options.dynamic)
            return made[trains](*args, **kwargs)

        return run

    def __reduce__(self) -> tuple:
        # A copy captures anew: compiled code and guards belong to one process.
        return type(self), (self.loss_fn, self.options)

    @property
    def stats(self) -> Stats:
        return self.backend.stats

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        transforms = _torch.inside_functorch()
        if transforms:
            return functorch.call(self, transforms, args, kwargs)
        return self._run(args, kwargs)

    def grad_and_value(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """(gradients, loss), or (gradients, (loss, aux)) with has_aux, for the first argument.

        A pytree of tensors gives gradients of the same structure, zeros where the loss does not depend on a
        tensor, as torch.func.grad_and_value does. An nn.Module gives a dict by parameter name, None for frozen
        and unused parameters. `.grad` is left as it is.
        """
        first, *rest = args
        if isinstance(first, nn.Module):
            named = {n: p for n, p in first.named_parameters() if p.requires_grad}
            with torch.enable_grad():
                out = self._run(args, kwargs)
            loss = out[0] if self.options.has_aux else out
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            by_name = dict(zip(named, found, strict=True))
            grads: Any = {n: by_name.get(n) for n, _ in first.named_parameters()}
        else:
            leaves, spec = pytree.tree_flatten(first)
            fresh = [_leaf(x) for x in leaves]
            trained = [x for x in fresh if isinstance(x, Tensor) and x.requires_grad]
            with torch.enable_grad():
                out = self._run((pytree.tree_unflatten(fresh, spec), *rest), kwargs)
            loss = out[0] if self.options.has_aux else out
            found = torch.autograd.grad(loss, trained, allow_unused=True)
            given = iter(torch.zeros_like(x) if g is None else g for g, x in zip(found, trained, strict=True))
            grads = pytree.tree_unflatten(
                [next(given) if isinstance(x, Tensor) and x.requires_grad else None for x in fresh], spec
            )
        return grads, pytree.tree_map(functorch.detached, out)

    def audit(self, *args: Any, **kwargs: Any) -> Audit:
        """The true error of the estimator on this batch, against exact: in all, per group, per parameter.

        Takes the arguments of the step. Runs one exact step and two more backwards per group without code
        generation, with the memory of an exact step; `.grad`, parameters and `stats` stay as they are. Compares
        as if every gate were open, and says which were. With a memory, its bias as it stands is part of the estimate
        (not of the groups', which it does not belong to).
        """
        return self._audit(args, kwargs, self.backend.clock.step, _torch.random_state())

    def _audit(self, args: tuple, kwargs: dict, step: int, noise: Any) -> Audit:
        if self._auditor is None:
            self._auditor = Auditor(self.loss_fn, self.options, self.backend.ratio)
        bias = self.memory.value() if self.memory is not None else None
        added = [] if bias is None else [*zip(_trained(args[0]), self._where_reached(bias), strict=True)]
        with _torch.replayed(noise):
            return self._auditor(args, kwargs, step, [(p, b) for p, b in added if b is not None])

    def state_dict(self) -> dict[str, Any]:
        """The step count, from which random steps are drawn; the memory of estimator="memory"; what tol measured."""
        memory = None if self.memory is None else self.memory.state_dict()
        state: dict[str, Any] = {"step": self.backend.clock.step, "memory": memory, "reached": self._reached}
        if self.options.plan.tol is not None:
            state["ratios"] = list(self.backend.ratio.measured)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`. Raises OptionError for another object, or for a memory that this step has not."""
        if not isinstance(state, dict) or state.keys() != self.state_dict().keys():
            raise OptionError(
                f"This is no state of a step, which has {', '.join(self.state_dict())}; found {state!r:.80}."
            )
        if (state["memory"] is None) != (self.memory is None):
            raise OptionError(
                "The state and this step differ in having a memory: one of the two was made with estimator='memory', "
                "the other was not. Load it into a step with the same estimator."
            )
        self.backend.clock.step = state["step"]
        if "ratios" in state:
            self.backend.ratio.measured.clear()
            self.backend.ratio.measured.extend(state["ratios"])
        if self.memory is not None:
            self.memory.load_state_dict(state["memory"])
            self._reached = state["reached"]

    def _run(self, args: tuple, kwargs: dict) -> Any:
        """One step, with what belongs to it besides the compiled graph: known velocities, the memory, an audit."""
        if "velocities" in kwargs and "velocities" not in _names(self.loss_fn):
            kwargs = dict(kwargs)
            velocities = kwargs.pop("velocities")
            if velocities is not None:
                with self._handing(velocities):
                    return self._run(args, kwargs)
        before = self.backend.clock.step
        every = self.options.audit_every
        twice = self.memory is not None or every is not None
        noise = _torch.random_state() if twice else None  # a loss may draw noise: what runs it again sees the same
        out = self._once(args, kwargs)
        if self.backend.clock.step == before:  # no gradient
            return out
        if self.memory is not None:
            out = self._remembered(out, before, args, kwargs, noise)
        if every is not None and _due(before, every, self.options.plan.tol is not None):
            audit = self._audit(args, kwargs, before, noise)
            self.stats.audits.append((before, audit))
            if audit.predicted is not None:
                self.backend.ratio.update(audit.relative_error, audit.predicted)
        return out

    @contextlib.contextmanager
    def _handing(self, velocities: Any) -> Iterator[None]:
        """Steps run here take these velocities in place of the forwards that serve for nothing else."""
        if not isinstance(velocities, (Tensor, list, tuple)):
            raise OptionError(
                "velocities= takes one tensor for each call with gradient, in a list or stacked; found "
                f"{velocities!r:.80}."
            )
        if self.options.plan.gate == "head":
            raise OptionError(
                "velocities= leaves out the forwards between a group's nodes; gate='head' and tol= need the last "
                "layer's input in each of them. Use gate=None or 'cosine', or leave velocities= out."
            )
        if self._with_given is None:
            backend = Backend(self.options, like=self.backend)
            assert backend.given is not None
            self._with_given = backend.given, self._compile(backend)
        given, compiled = self._with_given
        with given.handed(velocities):
            self._now.compiled = compiled
            try:
                yield
            finally:
                del self._now.compiled

    def _run_now(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._now, "compiled", self._compiled)(*args, **kwargs)

    def _remembered(self, out: Any, step: int, args: tuple, kwargs: dict, noise: Any) -> Any:
        """The loss, with the memory's estimate of the bias added to the gradients that its backward computes."""
        assert self.memory is not None
        trained = _trained(args[0])
        elsewhere = [p for f in self._velocities if isinstance(f, nn.Module) for p in f.parameters() if p.requires_grad]
        if not trained or (isinstance(args[0], nn.Module) and not {*map(id, elsewhere)} <= {*map(id, trained)}):
            raise RefusedError(
                "estimator='memory' keeps one tensor for each parameter of the first argument of the loss, and the "
                "velocity has parameters that are not there. Pass the network, or its parameters, as that argument."
            )
        if self.options.plan.estimator.measures(step):
            with self.backend.clock.forced(1, step), _torch.replayed(noise):
                again = self._once(args, kwargs)
            loss = again[0] if self.options.has_aux else again
            found = torch.autograd.grad(loss, trained, allow_unused=True)
            self.memory.update([torch.zeros_like(p) if g is None else g for g, p in zip(found, trained, strict=True)])
            self._reached = [g is not None for g in found]
        bias = self.memory.value()
        if bias is None:
            return out
        loss = out[0] if self.options.has_aux else out
        corrected = Remembered.apply(loss, self._where_reached(bias), *trained)
        return (corrected, out[1]) if self.options.has_aux else corrected

    def _where_reached(self, bias: Sequence[Tensor]) -> list[Tensor | None]:
        """None for parameters that the loss does not reach."""
        reached = self._reached or [True] * len(bias)
        return [b if here else None for b, here in zip(bias, reached, strict=True)]

    def _once(self, args: tuple, kwargs: dict) -> Any:
        self._find_velocity(args, kwargs)
        args = _aliased(args)
        try:
            with installed(self._marking()), self._limit():
                out = self._run_now(*args, **kwargs)
        except JaggError:
            raise
        except Exception as error:
            inner = _torch.unwrap_backend_error(error)
            if isinstance(inner, JaggError):
                raise inner from error
            if _torch.is_recompile_limit(error) and self._limit is contextlib.nullcontext:
                self._limit = _torch.many_captures
            elif isinstance(error, _torch.capture_errors()):
                raise _explained(error) from error
            else:
                raise
            return self._once(args, kwargs)
        if isinstance(out, tuple) and isinstance(out[0], str) and out[0] == _WRONG:
            raise CaptureError(out[1])
        if self.options.has_aux:
            return _torch.once_differentiable(out[0]), out[1]
        return _torch.once_differentiable(out)

    def _marking(self) -> list[tuple[list, Callable]]:
        """Where to put the marking call of each velocity, and that call: one object for ever (guards compare it)."""
        for f in self._velocities:
            if id(f) not in self._calls:
                self._calls[id(f)] = (f, places(f, self.loss_fn), marking_call(f, self.options.time))
        return [self._calls[id(f)][1:] for f in self._velocities]

    def _find_velocity(self, args: tuple, kwargs: dict) -> None:
        """Once for each set of modules among the arguments."""
        if self.options.velocity:
            return
        modules = tuple(id(a) for a in args if isinstance(a, nn.Module))
        if modules in self._looked_for:
            return
        self._velocities = discover(self.loss_fn, args, kwargs, self.options.time)
        self._looked_for = {modules}


def _due(step: int, every: int, early: bool) -> bool:
    """Whether a step is audited. early: the first ones too, at 0, 1, 2, 4, 8, ..., so that little rests on a guess."""
    return step % every == 0 or (early and step & (step - 1) == 0)


def _own_code(loss_fn: Callable, has_aux: bool) -> Callable:
    """A caller of loss_fn with a code object of its own: Dynamo counts recompiles per code object, and several
    transforms of one loss must not share that count.

    What is no loss is taken for what is wrong with it, so that nothing is left in the graph to compile.
    """

    def traced(*args: Any, **kwargs: Any) -> Any:
        out = loss_fn(*args, **kwargs)
        wrong = _wrong(out, has_aux)
        return out if wrong is None else (_WRONG, wrong)

    return types.FunctionType(
        traced.__code__.replace(co_name=getattr(loss_fn, "__name__", "loss_fn")),
        traced.__globals__,
        "traced",
        None,
        traced.__closure__,
    )


def _names(f: Callable) -> list[str]:
    """Names of a function's arguments, as far as it shows them."""
    try:
        return list(inspect.signature(f).parameters)
    except (TypeError, ValueError):
        return []


_WRONG = "jagg_fx: no loss"  # a constant, which Dynamo need not keep


def _wrong(out: Any, has_aux: bool) -> str | None:
    """What is wrong with what a loss returned. Dynamo traces this."""
    if has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
        return f"With has_aux=True the loss must return (loss, aux); it returned {_shape(out)}."
    loss = out[0] if has_aux else out
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return None
    cure = "." if has_aux else ", or use has_aux=True if the function returns (loss, aux)."
    return f"The loss must be a scalar tensor; it is {_shape(loss)}. Take its mean or sum{cure}"


def _aliased(args: tuple) -> tuple:
    """The arguments with new tensor objects in the first one, if it is a pytree of tensors.

    Dynamo takes a parameter that is also an attribute of the module for that attribute, and misses that a later
    call hands in another tensor (seen in torch 2.13): the gradient would be that of stale weights. An alias keeps the
    strides, those of dimensions of size one too, which kernels of channels-last weights look at; a view does not.
    """
    if not args or isinstance(args[0], nn.Module):
        return args
    made: dict[int, Tensor] = {}  # a tensor under two names stays one tensor
    first = pytree.tree_map_only(Tensor, lambda x: made.setdefault(id(x), torch.ops.aten.alias(x)), args[0])
    return (first, *args[1:])


def _trained(first: Any) -> list[Tensor]:
    """Parameters that a gradient is asked for: of a module, or the tensors of a pytree."""
    every = first.parameters() if isinstance(first, nn.Module) else pytree.tree_leaves(first)
    return [p for p in every if isinstance(p, Tensor) and p.requires_grad]


def _leaf(x: Any) -> Any:
    if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
        return x.detach().requires_grad_()
    return x


def _shape(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _explained(error: BaseException) -> BaseException:
    """What a failed capture means for the user."""
    if _torch.is_recompile_limit(error):
        return CaptureError(
            "The loss was captured too often: its shapes, or Python numbers that it reads, change "
            "from call to call. Pad "
            "to few shapes, pass numbers as tensors, use dynamic=True, or raise torch._dynamo.config.recompile_limit. "
            f"What torch says:\n{_torch.short_message(error)}"
        )
    text = _torch.short_message(error)
    if "failed to bind arguments" in text or "fake tensor call" in text:
        return CaptureError(
            "The loss itself fails on these arguments, it seems: a shape, a dtype, or an argument too few. Call the "
            f"loss without jagg_fx to see it plainly. What torch says:\n{text}"
        )
    return CaptureError(
        "The loss could not be captured as one graph, which the rewrite needs. Usually a Python branch or an index "
        "depends on a tensor's value (`if tensor:`, `x[int(tensor)]`); compute it outside of the loss and pass "
        f"it in. What torch says, with the line:\n{_torch.short_message(error)}"
    )
