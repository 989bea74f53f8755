"""Find the velocity of a loss before it is captured: run it once on tensors without data, and watch the modules.

The run costs no arithmetic and no memory for activations. It tells which module is called several times with
gradient, from which lines.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import operator
import sys
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from . import _torch, marking
from .errors import CaptureError

_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


@dataclass
class Called:
    """Calls of one module instance during one run of the loss."""

    module: nn.Module
    depth: int
    where: list[str] = field(default_factory=list)
    parents: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{type(self.module).__name__} ({len(self.where)} calls, first at {self.where[0]})"


def discover(loss_fn: Callable, args: tuple, kwargs: dict, time: str | int | None = None) -> tuple[nn.Module, ...]:
    """The modules whose calls are the timesteps: the outermost ones called several times with gradient.

    Several are several networks (two experts, say), each with groups of its own, if each takes a time. Returns
    none where the run without data cannot tell (the capture then looks at the graph). Raises CaptureError for
    candidates of which some take no time.
    """
    try:
        called, marked = _watch(loss_fn, args, kwargs)
    except Exception:
        return ()
    if marked:
        return ()
    repeated = {k: c for k, c in called.items() if len(c.where) > 1}
    outer = [c for c in repeated.values() if not c.parents & repeated.keys()]
    if len(outer) > 1 and not all(marking.takes_time(c.module, time) for c in outer):
        raise CaptureError(
            f"{len(outer)} modules are called several times with gradient in this loss: "
            f"{'; '.join(map(str, outer))}. Not all of them take a time by name ({', '.join(marking.TIME_NAMES)}), so "
            "it is not clear which are velocities. Say so with velocity=... (one, or a list of several), or call "
            "each through jagg_fx.velocity(net, z, t)."
        )
    return tuple(c.module for c in outer)


def _watch(loss_fn: Callable, args: tuple, kwargs: dict) -> tuple[dict[int, Called], bool]:
    called: dict[int, Called] = {}
    stack: list[int] = []
    known: dict[Any, Any] = {}
    numbers: dict[Any, tuple] = {}  # buffers of one entry: without data they are still changed in place
    original, thread = nn.Module.__call__, threading.get_ident()

    def call(module: nn.Module, *inputs: Any, **named: Any) -> Any:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.numel() == 1 and (module, name) not in numbers:
                with _torch.real_tensors():
                    numbers[module, name] = (buffer, buffer.detach().clone())
        trains = any(p.requires_grad for p in module.parameters()) if threading.get_ident() == thread else False
        if not trains:
            return original(module, *inputs, **named)
        # A call like an earlier one is not run again: its output looks the same.
        key = (id(module), torch.is_grad_enabled(), repr(pytree.tree_map(_look, (inputs, named))))
        stack.append(id(module))
        try:
            output = _again(known[key]) if key in known else original(module, *inputs, **named)
        finally:
            stack.pop()
        known.setdefault(key, output)
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in _tensors(output)):
            entry = called.setdefault(id(module), Called(module, len(stack)))
            entry.where.append(user_line())
            entry.parents.update(stack)
        return output

    seen, put_backs = marking.count_marks(), _put_backs(loss_fn, args, kwargs)
    with (
        contextlib.ExitStack() as undo,
        torch.random.fork_rng(devices=[]),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        undo.callback(setattr, nn.Module, "__call__", original)
        nn.Module.__call__ = call  # type: ignore[method-assign, assignment]
        undo.callback(_restore, numbers)
        for put_back in put_backs:
            undo.callback(put_back)
        loss_fn(*args, **kwargs)
    return called, marking.count_marks() > seen


def _restore(numbers: dict[Any, tuple]) -> None:
    with _torch.real_tensors(), torch.no_grad():
        for buffer, before in numbers.values():
            buffer.copy_(before)


_HOLDERS = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.Counter)


def _put_backs(loss_fn: Callable, args: tuple, kwargs: dict) -> list[Callable[[], None]]:
    """What undoes the run's changes of the loss's own state: a log that it appends to, a count of its calls.

    Looks, not deep, at the variables that the loss closes over or reads from its module, at its object, and at its
    arguments.
    """
    found: list[Callable[[], None]] = []
    seen: dict[int, Any] = {}

    def visit(x: Any, depth: int) -> None:
        if id(x) in seen or depth > 3 or isinstance(x, (type, types.ModuleType)):
            return
        seen[id(x)] = x
        inner: list[Any] = []
        if isinstance(x, torch.Tensor):
            if x.numel() == 1 and not x.is_inference():  # without data it is still changed in place
                found.append(functools.partial(_number, x, x._version, x.detach().clone()))
        elif isinstance(x, functools.partial):
            inner = [x.func, x.args, x.keywords]
        elif isinstance(x, types.MethodType):
            inner = [x.__func__, x.__self__]
        elif isinstance(x, types.FunctionType):
            for cell in x.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    inner.append(cell.cell_contents)
                    found.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
            for name in x.__code__.co_names:
                if name in x.__globals__:
                    inner.append(x.__globals__[name])
                    found.append(functools.partial(operator.setitem, x.__globals__, name, x.__globals__[name]))
        elif type(x) in _HOLDERS:
            inner = list(x.values() if isinstance(x, dict) else x)
            found.append(functools.partial(_refill, x, x.copy()))
        elif isinstance(x, tuple):
            inner = list(x)
        elif isinstance(getattr(x, "__dict__", None), dict):
            visit(x.__dict__, depth)
        for y in inner:
            visit(y, depth + 1)

    for x in (loss_fn, *args, *kwargs.values()):
        visit(x, 0)
    return found


def _refill(holder: Any, before: Any) -> None:
    if isinstance(holder, dict):
        same = [*map(id, holder)] == [*map(id, before)] and all(holder[k] is before[k] for k in before)
    else:
        same = [*map(id, holder)] == [*map(id, before)]
    if not same:
        holder.clear()
        holder.extend(before) if isinstance(holder, list) else holder.update(before)


def _number(x: torch.Tensor, version: int, before: torch.Tensor) -> None:
    if x._version != version:
        with _torch.real_tensors(), torch.no_grad():
            x.copy_(before)


def _look(x: Any) -> Any:
    return (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x


def _again(output: Any) -> Any:
    """An output of the same shapes, without the history of the first."""

    def fresh(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    if isinstance(output, (torch.Tensor, list, tuple, dict)):
        return pytree.tree_map(fresh, output)
    other = copy.copy(output)
    for name, x in vars(output).items() if hasattr(output, "__dict__") else ():
        object.__setattr__(other, name, fresh(x))
    return other


def _tensors(tree: Any) -> list[Any]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (list, tuple, dict)):
        return pytree.tree_leaves(tree)
    return list(vars(tree).values()) if hasattr(tree, "__dict__") else []


def user_line() -> str:
    """File, line and text of the innermost frame that is neither ours nor torch's."""
    for frame in reversed(traceback.extract_stack(sys._getframe(1))):
        if not frame.filename.startswith((_OURS, _TORCH)):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "an unknown line"
