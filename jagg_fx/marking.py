"""Marking the velocity calls: by hand with `velocity`, or by putting a marking forward on a module for a while."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from . import _ops
from .errors import CaptureError

_KEPT_ALIVE = _ops
TIME_NAMES = ("t", "timestep", "timesteps", "time", "sigma")


def velocity(f: Callable, z: Any, t: Any, *more: Any, **kwargs: Any) -> Any:
    """f(z, t, *more, **kwargs), marked as one timestep's velocity call.

    Use it in a loss where the calls cannot be found by themselves: a plain function, or one of two networks.
    z: the state; t: its time, a tensor of shape () or (B,), in the unit that f takes; f returns the velocity
    as a tensor, a tuple, a dict or an object, as models do. Outside of a capture it just calls f.
    """
    if not torch.compiler.is_dynamo_compiling():
        _count.marks = count_marks() + 1
        return f(z, t, *more, **kwargs)
    return _marked(f, t, name_of(f), (z, t, *more), kwargs)


_count = threading.local()


def count_marks() -> int:
    """How many marked calls ran outside of a capture in this thread."""
    return getattr(_count, "marks", 0)


def _marked(f: Callable, t: Any, site: str, args: tuple, kwargs: dict) -> Any:
    if not isinstance(t, torch.Tensor):
        t = torch.tensor(t)
    torch.ops.jagg_fx.begin.default(t, site)
    out = f(*args, **kwargs)
    torch.ops.jagg_fx.end.default(t)
    return out


def time_argument(f: Callable, time: str | int | None) -> tuple[str | None, int]:
    """Name and position of the time among the arguments of a velocity. Raises CaptureError if there is none."""
    forward = f.forward if isinstance(f, nn.Module) else f
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return (time, -1) if isinstance(time, str) else (None, 1 if time is None else time)
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    anything = len(names) < len(parameters)  # *args or **kwargs
    by_name_given = time is not None
    if time is None:
        by_name = [n for n in TIME_NAMES if n in names]
        time = by_name[0] if by_name else 1
    at = names.index(time) if time in names else time
    if isinstance(at, int) and 0 <= at < len(names):
        return names[at], at
    if anything:
        return (at, -1) if isinstance(at, str) else (None, at)
    if not by_name_given and at == 1:
        raise CaptureError(
            f"The velocity {name_of(f)} takes ({', '.join(names)}): none of these can be its time. Groups are made in "
            "time: let the velocity take it as an argument, or call it through jagg_fx.velocity(f, z, t)."
        )
    raise CaptureError(
        f"time={time!r} is not an argument of the velocity {name_of(f)}, which takes ({', '.join(names)}). Give the "
        "name or position of the argument that holds the time: time=..."
    )


def takes_time(f: Callable, time: str | int | None) -> bool:
    """Whether an argument of f is a time by its name, or is the one that the user named."""
    try:
        name, _ = time_argument(f, time)
    except CaptureError:
        return False
    return name in TIME_NAMES if time is None else True


def name_of(f: Any) -> str:
    return type(f).__name__ if isinstance(f, nn.Module) else getattr(f, "__name__", type(f).__name__)


def marking_call(f: Callable, time: str | int | None) -> Callable:
    """What stands in for a function, or for a module's forward, while a loss is captured: it marks each call.

    Made once per transform, since guards compare its identity. Each call is traced on its own: Dynamo's nested
    regions would be faster to capture, but in torch 2.13 they take a call for an earlier one that differs in a
    Python value or in what requires grad.
    """
    original = f.forward if isinstance(f, nn.Module) else f
    site = name_of(f)
    name, position = time_argument(f, time)
    missing = (
        f"!The velocity {site} is called without its time ({name if name is not None else f'argument {position}'}): "
        "say which argument is the time with time=..."
    )

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return original(*args, **kwargs)
        if name is not None and name in kwargs:
            return _marked(original, kwargs[name], site, args, kwargs)
        if 0 <= position < len(args):
            return _marked(original, args[position], site, args, kwargs)
        return _marked(original, 0.0, missing, args, kwargs)

    return forward


def places(f: Callable, loss_fn: Callable) -> list[tuple[Any, Any]]:
    """Where a loss finds its velocity: (dictionary, key) or (cell, None) pairs that a marking call is put into."""
    if isinstance(f, nn.Module):
        return [(f.__dict__, "forward")]
    inner = getattr(loss_fn, "__func__", getattr(loss_fn, "func", loss_fn))
    spaces = [getattr(inner, "__globals__", {}), vars(sys.modules.get(getattr(f, "__module__", ""), object))]
    found: list[tuple[Any, Any]] = []
    for space in spaces:
        found += [(space, k) for k, v in dict(space).items() if v is f and (space, k) not in found]
    for cell in getattr(inner, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            if cell.cell_contents is f:
                found.append((cell, None))
    return found


_lock = threading.RLock()
_users: dict[tuple[int, Any], tuple[int, Any]] = {}
_MISSING = object()


@contextlib.contextmanager
def installed(marking: list[tuple[list[tuple[Any, Any]], Callable]]) -> Iterator[None]:
    """Put marking calls into their places for a while; several threads may overlap, the last one restores."""
    with _lock:
        for where, call in marking:
            for place, key in where:
                count, saved = _users.get((id(place), key), (0, _read(place, key)))
                _users[id(place), key] = (count + 1, saved)
                _write(place, key, call)
    try:
        yield
    finally:
        with _lock:
            for where, _ in marking:
                for place, key in where:
                    count, saved = _users.pop((id(place), key))
                    if count > 1:
                        _users[id(place), key] = (count - 1, saved)
                    else:
                        _write(place, key, saved)


def _read(place: Any, key: Any) -> Any:
    return place.get(key, _MISSING) if isinstance(place, dict) else place.cell_contents


def _write(place: Any, key: Any, value: Any) -> None:
    if not isinstance(place, dict):
        place.cell_contents = value
    elif value is _MISSING:
        place.pop(key, None)
    else:
        place[key] = value
