"""A step under the transforms of torch.func: one level of grad, and nothing else."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import _torch
from .errors import RefusedError

if TYPE_CHECKING:
    from .transform import Step


def detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def call(step: Step, transforms: list[str], args: tuple, kwargs: dict) -> Any:
    """Under torch.func.grad: a compiled function would run uncompiled there, with the exact gradient."""
    if transforms != ["Grad"]:
        raise RefusedError(
            f"A transformed step was called under torch.func transforms {transforms}. Its gradient is estimated, so "
            "only one level of torch.func.grad (or grad_and_value, vjp) has a meaning: no vmap over a step, no "
            "forward mode, no second derivative. Use step.grad_and_value, or loop over the batch."
        )
    leaves, spec = pytree.tree_flatten((args, kwargs))
    trained = [i for i, x in enumerate(leaves) if _torch.needs_functorch_grad(x)]
    if not trained:
        return step._run(args, kwargs)
    box = types.SimpleNamespace()  # not a pytree: autograd.Function hands it through as it is
    flat = _Estimated.apply(step, spec, trained, box, *leaves)
    return pytree.tree_unflatten(list(flat), box.out)


class _Estimated(torch.autograd.Function):
    """The step as one differentiable operation, for torch.func: gradients are computed with the loss."""

    @staticmethod
    def forward(step: Step, spec: Any, trained: list[int], box: Any, *leaves: Any) -> Any:
        fresh = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        for i in trained:
            fresh[i].requires_grad_()
        args, kwargs = pytree.tree_unflatten(fresh, spec)
        with torch.enable_grad(), _torch.outside_functorch():
            out = step._run(args, kwargs)
            loss = out[0] if step.options.has_aux else out
            found = torch.autograd.grad(loss, [fresh[i] for i in trained], allow_unused=True)
        outs, box.out = pytree.tree_flatten(out)
        box.gradients = [torch.zeros_like(fresh[i]) if g is None else g for g, i in zip(found, trained, strict=False)]
        return tuple(detached(x) for x in outs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, _, ctx.trained, box, *leaves = inputs
        ctx.leaves = len(leaves)
        ctx.gradients = box.gradients
        ctx.mark_non_differentiable(*(x for x in output[1:] if isinstance(x, Tensor)))

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        grads: list[Any] = [None] * ctx.leaves
        for i, x in zip(ctx.trained, ctx.gradients, strict=True):
            grads[i] = (x * g).to(x.dtype)
        return (None, None, None, None, *grads)
