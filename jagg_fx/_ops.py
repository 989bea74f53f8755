"""The operators that carry what we know of a call through the graph. No user sees one: passes remove them all.

`begin` and `end` bracket a velocity call in the captured forward graph. `call` and its derivative `cotangent`
stand on both sides of the joint graph at each call's velocity, with the call's number and time. `gates` holds
the place of the gates' values among the outputs, and brings the limit of error control in. `checked` raises where
weights cannot be used, `fresh` where a velocity that the caller handed in is not what the network returns. `unstack`
and its derivative `restack` take apart what one call returned for many timesteps. `scaled` marks where a gradient that
was computed with the loss meets the tangent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import StaleError, TimesError

_define = torch.library.custom_op


@_define("jagg_fx::begin", mutates_args=())
def begin(t: Tensor, site: str) -> None:
    pass


@begin.register_fake
def _(t: Tensor, site: str) -> None:
    pass


@_define("jagg_fx::end", mutates_args=())
def end(t: Tensor) -> None:
    pass


@end.register_fake
def _(t: Tensor) -> None:
    pass


@_define("jagg_fx::call", mutates_args=())
def call(
    v: Tensor, t: Tensor, index: int, site: str, where: str, lane: int, hidden: Tensor | None, given: Tensor | None
) -> Tensor:
    return v.clone()


@call.register_fake
def _(
    v: Tensor, t: Tensor, index: int, site: str, where: str, lane: int, hidden: Tensor | None, given: Tensor | None
) -> Tensor:
    return torch.empty_like(v)


@_define("jagg_fx::cotangent", mutates_args=())
def cotangent(g: Tensor, index: int) -> Tensor:
    return g.clone()


@cotangent.register_fake
def _(g: Tensor, index: int) -> Tensor:
    return torch.empty_like(g)


def _setup(ctx, inputs, output):
    ctx.index = inputs[2]


def _backward(ctx, g):
    return torch.ops.jagg_fx.cotangent(g, ctx.index), None, None, None, None, None, None, None


call.register_autograd(_backward, setup_context=_setup)


@_define("jagg_fx::gates", mutates_args=())
def gates(v: Tensor, calls: int, limit: Tensor | None) -> Tensor:
    return torch.full((5, calls), float("nan"), device=v.device)


@gates.register_fake
def _(v: Tensor, calls: int, limit: Tensor | None) -> Tensor:
    return torch.empty((5, calls), device=v.device)


def _demand(good: Tensor, error: type[Exception], what: str) -> None:
    """An error if not good; on CUDA a device-side assertion, so that the host waits for nothing."""
    if good.device.type == "cpu":
        if not good:
            raise error(what)
    else:
        torch._assert_async(good, what)


@_define("jagg_fx::checked", mutates_args=())
def checked(lam: Tensor, good: Tensor, what: str) -> Tensor:
    """lam as it is, or an error if it is not good."""
    _demand(good, TimesError, what)
    return lam.clone()


@checked.register_fake
def _(lam: Tensor, good: Tensor, what: str) -> Tensor:
    return torch.empty_like(lam)


@_define("jagg_fx::fresh", mutates_args=())
def fresh(v: Tensor, given: Tensor, tolerance: float, what: str) -> Tensor:
    """v as it is, or an error if |given - v| > tolerance |v|."""
    wide = v.double()
    _demand((given.double() - wide).square().sum() <= tolerance**2 * wide.square().sum(), StaleError, what)
    return v.clone()


@fresh.register_fake
def _(v: Tensor, given: Tensor, tolerance: float, what: str) -> Tensor:
    return torch.empty_like(v)


@_define("jagg_fx::scaled", mutates_args=())
def scaled(gradient: Tensor, tangent: Tensor) -> Tensor:
    return gradient * tangent


@scaled.register_fake
def _(gradient: Tensor, tangent: Tensor) -> Tensor:
    return torch.empty_like(gradient)


@_define("jagg_fx::unstack", mutates_args=())
def unstack(x: Tensor, parts: int) -> list[Tensor]:
    return [part.clone() for part in x.unbind(0)]


@unstack.register_fake
def _(x: Tensor, parts: int) -> list[Tensor]:
    return [torch.empty_like(part) for part in x.unbind(0)]


@_define("jagg_fx::restack", mutates_args=())
def restack(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts)


@restack.register_fake
def _(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts)


def _unstack_setup(ctx, inputs, output):
    ctx.like = inputs[0].shape[1:], inputs[0].dtype, inputs[0].device


def _unstack_backward(ctx, parts):
    shape, dtype, device = ctx.like
    parts = [torch.zeros(shape, dtype=dtype, device=device) if g is None else g for g in parts]
    return torch.ops.jagg_fx.restack(parts), None


unstack.register_autograd(_unstack_backward, setup_context=_unstack_setup)
