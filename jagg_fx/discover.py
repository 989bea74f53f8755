"""Find the velocity of a loss before it is captured: run it once on tensors without data, and watch the modules.

The run costs no arithmetic and no memory for activations. It tells which module is called several times with
gradient, from which lines.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from . import marking
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


def discover(loss_fn: Callable, args: tuple, kwargs: dict) -> nn.Module | None:
    """The module whose calls are the timesteps: the outermost one called several times with gradient.

    Returns None where the run without data cannot tell (the capture then looks at the graph). Raises
    CaptureError for two candidates, for one call, and for none.
    """
    try:
        called, marked = _watch(loss_fn, args, kwargs)
    except Exception:
        return None
    if marked:
        return None
    repeated = {k: c for k, c in called.items() if len(c.where) > 1}
    outer = [c for c in repeated.values() if not c.parents & repeated.keys()]
    if len(outer) == 1:
        return outer[0].module
    if len(outer) > 1:
        raise CaptureError(
            f"{len(outer)} modules are called several times with gradient in this loss: "
            f"{'; '.join(map(str, outer))}. Groups are made of the calls of one velocity. Say which one it is with "
            "velocity=..., or call it through jagg_fx.velocity(net, z, t)."
        )
    return None


def _watch(loss_fn: Callable, args: tuple, kwargs: dict) -> tuple[dict[int, Called], bool]:
    called: dict[int, Called] = {}
    stack: list[int] = []

    def before(module: nn.Module, inputs: Any) -> None:
        stack.append(id(module))

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        stack.pop()
        trains = any(isinstance(x, torch.Tensor) and x.requires_grad for x in _tensors(output))
        if trains and any(p.requires_grad for p in module.parameters()):
            entry = called.setdefault(id(module), Called(module, len(stack)))
            entry.where.append(user_line())
            entry.parents.update(stack)

    seen = marking.count_marks()
    with (
        contextlib.ExitStack() as hooks,
        torch.random.fork_rng(devices=[]),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        hooks.callback(nn.modules.module.register_module_forward_pre_hook(before).remove)
        hooks.callback(nn.modules.module.register_module_forward_hook(after).remove)
        loss_fn(*args, **kwargs)
    return called, marking.count_marks() > seen


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
