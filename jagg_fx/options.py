"""The options of transform and backend, checked where they are given."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .errors import OptionError, warn
from .estimators import Estimator, Knots, resolve
from .gates import GATES
from .plan import Plan

COMPILERS = ("inductor", "eager")
WEIGHTS = ("time", "index")
TAU = {"cosine": 0.995, "head": 0.1}  # a smallest cosine; a largest relative error
_OWN: Any = object()  # not given: tau is the gate's own, audits are those of tol
AUDIT_EVERY = 100  # with tol


class Unsaid(int):
    """A default that can be told from the same number said by a user."""


WIDTH = Unsaid(4)
TOL_WIDTH = 8
ORDERS = ("call", "time")
ACTIVATIONS = ("keep", "group", "recompute")


@dataclass(frozen=True)
class Options:
    """Validated options. `plan` shapes the graph; the rest says how to find the calls and how to compile."""

    plan: Plan
    velocity: tuple[nn.Module | Callable, ...] = ()
    time: str | int | None = None
    has_aux: bool = False
    compiler: str = "inductor"
    mode: str | None = None
    options: dict[str, Any] | None = field(default=None, hash=False)
    dynamic: bool | None = False
    audit_every: int | None = None
    seed: int = 0


def known(options: dict[str, Any]) -> None:
    """Raises OptionError for an option that does not exist."""
    names = list(inspect.signature(check).parameters)
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f" Did you mean {close[0]}=?" if close else ""
            raise OptionError(f"{name}= is not an option.{hint} There are {', '.join(names)}.")


def warn_of_unused(given: dict[str, Any], chosen: Options) -> None:
    """Warn of options that were given and that others among them leave without effect."""
    plan = chosen.plan
    if given.get("gate") is not None and not plan.estimator.gated:
        warn(
            f"gate={plan.gate!r} is not used: estimator={plan.estimator.name!r} has no gate, since sending some groups "
            "to exact would change what it estimates. Leave gate= out, or take an estimator with a gate."
        )
    elif "tau" in given and (plan.gate is None or not plan.estimator.gated):
        without = "gate=None" if plan.gate is None else f"estimator={plan.estimator.name!r}"
        warn(f"tau={plan.tau:g} is not used: {without} has no gate that could reach it. Leave tau= out, or use a gate.")
    if chosen.compiler == "eager" and (chosen.mode or chosen.options):
        warn(
            "mode= and options= are not used: they are Inductor's, and compiler='eager' generates no code. Leave them "
            "out, or use compiler='inductor'."
        )


def check(
    W: Any = WIDTH,
    *,
    estimator: Any = "endpoints",
    tau: Any = _OWN,
    gate: Any = "cosine",
    weights: Any = "time",
    velocity: Any = None,
    time: Any = None,
    has_aux: Any = False,
    compiler: Any = "inductor",
    mode: Any = None,
    options: Any = None,
    dynamic: Any = False,
    order: Any = "call",
    lane: Any = None,
    audit_every: Any = _OWN,
    seed: Any = 0,
    activations: Any = "keep",
    batched: Any = False,
    tol: Any = None,
) -> Options:
    """Options from keyword arguments. Raises OptionError (a ValueError) for a value that cannot be taken."""
    if tol is not None:
        W, estimator, gate = _controlled(tol, W, estimator, gate, tau)
    if isinstance(W, bool) or not isinstance(W, int):
        raise OptionError(f"W must be an int, the number of steps per group; found {W!r}. Use W=4, say.")
    if W < 1:
        raise OptionError(f"W={W}: a group has at least one step. Use W=1 for exact, W=4 for two backwards of four.")
    if tau is _OWN:
        tau = TAU["head" if gate == "head" else "cosine"]
    if isinstance(tau, bool) or not isinstance(tau, (int, float)) or math.isnan(tau):
        raise OptionError(
            f"tau must be a number: the cosine from which a group is merged (or the error up to it); found {tau!r}."
        )
    _one_of("gate", gate, (*GATES, None))
    _one_of("weights", weights, WEIGHTS)
    _one_of("compiler", compiler, COMPILERS)
    _one_of("order", order, ORDERS)
    _one_of("activations", activations, ACTIVATIONS)
    velocities = () if velocity is None else tuple(velocity) if isinstance(velocity, (list, tuple)) else (velocity,)
    if not all(map(callable, velocities)) or (velocity is not None and not velocities):
        raise OptionError(
            "velocity must be the nn.Module or function whose calls are the timesteps, or a list of several (two "
            f"experts, say); found {velocity!r}."
        )
    if lane is not None:
        lane = _lane(lane)
    if audit_every is _OWN:
        audit_every = None if tol is None else AUDIT_EVERY
    if audit_every is not None and (
        isinstance(audit_every, bool) or not isinstance(audit_every, int) or audit_every < 1
    ):
        raise OptionError(
            f"audit_every must be an int >= 1, the steps between two audits, or None; found {audit_every!r}."
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise OptionError(f"seed must be an int, from which random steps are drawn; found {seed!r}.")
    if time is not None and (isinstance(time, bool) or not isinstance(time, (str, int))):
        raise OptionError(f"time must be the position or name of the velocity's time argument; found {time!r}.")
    if not isinstance(has_aux, bool):
        raise OptionError(f"has_aux must be True or False; found {has_aux!r}.")
    chosen: Estimator = resolve(estimator)
    if not isinstance(batched, bool):
        raise OptionError(f"batched must be True or False; found {batched!r}.")
    if batched and ((gate is not None and chosen.gated and chosen.name != "exact") or chosen.name == "memory"):
        raise OptionError(
            "batched=True runs many calls as one, and has no exact backward of one group to fall back to, nor a part "
            "of a gradient to measure. Use gate=None and another estimator than 'memory', or batched=False."
        )
    if batched and activations != "keep":
        raise OptionError(
            f"batched=True runs the nodes of all groups as one call, activations={activations!r} one after the other. "
            "Choose one: batched=False, or activations='keep'."
        )
    if tol is not None and (batched or activations != "keep"):
        raise OptionError(
            "tol= looks at all forwards before it chooses which backwards to run, so their activations are kept, and "
            "each backward is its own. Leave batched= and activations= out, or tol=."
        )
    return Options(
        Plan(
            int(W),
            chosen,
            gate,
            float(tau),
            weights,
            order,
            lane,
            activations,
            batched,
            None if tol is None else float(tol),
        ),
        velocities,
        time,
        has_aux,
        compiler,
        mode,
        options,
        dynamic,
        audit_every,
        seed,
    )


def _controlled(tol: Any, W: Any, estimator: Any, gate: Any, tau: Any) -> tuple[Any, Estimator, str]:
    """W, estimator and gate of error control: knots at most W steps apart, and between them as many as are needed."""
    if isinstance(tol, bool) or not isinstance(tol, (int, float)) or not 0 < tol < 1:
        raise OptionError(
            "tol must be a number between 0 and 1, the relative error of a step's gradient to stay below; found "
            f"{tol!r}."
        )
    default = inspect.signature(check).parameters
    for name, found in (("estimator", estimator), ("gate", gate), ("tau", tau)):
        if found is not default[name].default and found != default[name].default:
            raise OptionError(
                f"tol={tol} chooses which steps keep their backward by itself, so {name}={found!r} has no meaning "
                "beside it. Leave one of the two out."
            )
    W = TOL_WIDTH if isinstance(W, Unsaid) else W
    fits = isinstance(W, int) and not isinstance(W, bool) and W >= 1
    return W, Knots(W) if fits else Knots(), "head"  # W is checked where all are


def _lane(lane: Any) -> int | tuple[int, ...]:
    if isinstance(lane, int) and not isinstance(lane, bool) and lane >= 1:
        return lane
    if isinstance(lane, (list, tuple)) and lane and all(isinstance(x, int) and not isinstance(x, bool) for x in lane):
        return tuple(lane)
    raise OptionError(
        f"lane must be the number of velocity calls per timestep (taken in turn), or the lane of every call as a list "
        f"of ints; found {lane!r}."
    )


def _one_of(name: str, found: Any, allowed: tuple) -> None:
    if not any(found is a or (isinstance(found, str) and found == a) for a in allowed):
        raise OptionError(f"{name}={found!r} is not known. Use one of {', '.join(map(repr, allowed))}.")
