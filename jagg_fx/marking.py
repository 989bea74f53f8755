"""Marking the velocity calls: by hand with `velocity`, or by putting a marking forward on a module for a while."""

from __future__ import annotations

import contextlib
import inspect
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
    return _marked(f, t, getattr(f, "__name__", type(f).__name__), (z, t, *more), kwargs)


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
        names = [
            p.name
            for p in inspect.signature(forward).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
    except (TypeError, ValueError):
        names = []
    if isinstance(time, int):
        return (names[time] if time < len(names) else None), time
    if time is not None:
        if names and time not in names:
            raise CaptureError(
                f"time={time!r} is not an argument of the velocity {_name(f)}, which takes {', '.join(names)}. "
                "Give the name or position of the argument that holds the time."
            )
        return time, names.index(time) if names else -1
    for name in TIME_NAMES:
        if name in names:
            return name, names.index(name)
    return (names[1] if len(names) > 1 else None), 1


def _name(f: Any) -> str:
    return type(f).__name__ if isinstance(f, nn.Module) else getattr(f, "__name__", repr(f))


_lock = threading.RLock()
_installed: dict[int, tuple[nn.Module, int, Any]] = {}


def marking_forward(module: nn.Module, time: str | int | None) -> Callable:
    """A forward for this module that marks each call. Made once per transform: guards compare its identity."""
    original, site = module.forward, _name(module)
    name, position = time_argument(module, time)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return original(*args, **kwargs)
        if name is not None and name in kwargs:
            t = kwargs[name]
        else:
            t = args[position]
        return _marked(original, t, site, args, kwargs)

    return forward


@contextlib.contextmanager
def installed(module: nn.Module | None, forward: Callable | None) -> Iterator[None]:
    """Put a forward on one module instance for the time of a call; several threads may overlap."""
    if module is None:
        yield
        return
    key = id(module)
    with _lock:
        before = module.__dict__.get("forward", _MISSING)
        _, users, saved = _installed.get(key, (module, 0, before))
        _installed[key] = (module, users + 1, saved)
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        with _lock:
            _, users, saved = _installed[key]
            if users > 1:
                _installed[key] = (module, users - 1, saved)
            else:
                del _installed[key]
                if saved is _MISSING:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = saved


_MISSING = object()
