"""The state of the `memory` estimator: a running estimate of the bias of endpoints, one tensor a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import OptionError
from .estimators import Memory


class BiasMemory:
    """b, the running mean of measured corrections c, and how much of it is signal.

        m <- beta m + (1 - beta) c,  b = m / (1 - beta^count)     (as Adam starts: b is a mean from the first c on)
        alpha = mean <c, b before c> / mean <b before c, b before c>, running means with the same decay

    `value` is what to add to an endpoint gradient: b, or with `shrink` clamp(alpha, 0, 1) b. alpha is the slope of the
    regression of the next correction on b: with b = signal + noise it tends to signal^2 / (signal^2 + noise^2), the
    scale with the least mean square error. Nothing is added before `least` measurements with shrink (alpha would be
    a guess), before the first without.

    A correction that is not finite (a step that a gradient scaler skips) leaves b as it is. Everything stays on the
    device of the corrections: only `counters` waits for it.
    """

    def __init__(self, beta: float = 0.95, shrink: bool = True, least: int = 4) -> None:
        Memory(beta=beta, shrink=shrink)  # raises for values that cannot be taken
        self.beta, self.shrink, self.least = beta, shrink, least
        self.measured = 0
        self._mean: list[Tensor] = []
        self._cb = self._bb = self._last = torch.zeros(())

    def update(self, c: Sequence[Tensor]) -> None:
        """Takes in a fresh correction: one tensor a parameter, always in the same order. Kept in fp32 or fp64."""
        wide = [x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in c]
        if self.measured == 0:
            self._mean = [torch.zeros_like(x) for x in wide]
            self._cb, self._bb = (torch.zeros((), device=wide[0].device) for _ in range(2))
        self._check(wide)
        before = self._unshrunk()
        size = _dot(wide, wide)
        finite = size.isfinite()
        wide = [torch.where(finite, x, b) for x, b in zip(wide, before, strict=True)]
        if self.measured:
            for name, dot in (("_cb", _dot(wide, before)), ("_bb", _dot(before, before))):
                mean = getattr(self, name)
                setattr(self, name, torch.where(finite, self.beta * mean + (1 - self.beta) * dot, mean))
        self._mean = [self.beta * m + (1 - self.beta) * x for m, x in zip(self._mean, wide, strict=True)]
        self._last = size.sqrt()
        self.measured += 1

    def value(self) -> list[Tensor] | None:
        """What to add to the gradient of endpoints, in the order of the corrections. None: nothing yet."""
        if self.measured < (self.least if self.shrink else 1):
            return None
        b = self._unshrunk()
        if not self.shrink:
            return b
        alpha = self.slope.clamp(0, 1)
        return [alpha.to(x.dtype) * x for x in b]

    @property
    def slope(self) -> Tensor:
        """alpha, a scalar on the device: near 1 where b is signal, near 0 where it is noise. 0 where b is 0."""
        return torch.where(self._bb > 0, self._cb / self._bb, torch.zeros_like(self._bb))

    def counters(self) -> dict[str, float]:
        """Measurements, slope, norm of b before shrinking, norm of the last correction. Waits for the device."""
        b = self._unshrunk()
        norm = _dot(b, b).sqrt().item() if b else 0.0
        return {"measured": self.measured, "slope": self.slope.item(), "norm": norm, "last": self._last.item()}

    def state_dict(self) -> dict[str, Any]:
        tensors = {"cb": self._cb, "bb": self._bb, "last": self._last}
        mean = [m.clone() for m in self._mean]
        return {"measured": self.measured, "mean": mean, **{k: v.clone() for k, v in tensors.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = {"measured", "mean", "cb", "bb", "last"} - state.keys()
        if missing:
            raise OptionError(f"This is no state of a BiasMemory: {', '.join(sorted(missing))} is missing.")
        self.measured = state["measured"]
        self._mean = [m.clone() for m in state["mean"]]
        self._cb, self._bb, self._last = (state[k].clone() for k in ("cb", "bb", "last"))

    def _unshrunk(self) -> list[Tensor]:
        scale = 1 / (1 - self.beta**self.measured) if self.measured else 1.0
        return [m * scale for m in self._mean]

    def _check(self, c: Sequence[Tensor]) -> None:
        found, want = [tuple(x.shape) for x in c], [tuple(m.shape) for m in self._mean]
        if found != want:
            raise OptionError(
                f"A correction with tensors of shapes {found} does not fit the memory's {want}. Use one memory for "
                "one list of parameters, in one order."
            )
        if c and c[0].device != self._cb.device:  # a state that was loaded from another device
            self._mean = [m.to(x.device) for m, x in zip(self._mean, c, strict=True)]
            self._cb, self._bb = self._cb.to(c[0].device), self._bb.to(c[0].device)


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack([(x * y).sum().double() for x, y in zip(a, b, strict=True)]).sum()


class Remembered(torch.autograd.Function):
    """The loss as it is; its backward adds g times the bias to the gradient of each parameter, for a tangent g.

    So loss scaling, accumulation and hooks on parameters see one gradient. A bias of None adds nothing.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, bias: Sequence[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.bias = [None if b is None else b.to(p.dtype) for b, p in zip(bias, parameters, strict=True)]
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return (g, None, *(None if b is None else b * g.to(b.dtype) for b in ctx.bias))
