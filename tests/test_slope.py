"""The error of the estimate falls with the square of the span of a group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import jagg_fx

from .losses import MLP, grid, linear, quadratic, simple_case
from .reference import eager, relative_error

SPANS = [0.8, 0.4, 0.2, 0.1, 0.05]


@pytest.mark.parametrize(("core", "style"), [(linear, "params"), (quadratic, "net")])
def test_slope_is_two(core: Callable, style: str) -> None:
    net = MLP(4)
    errors, step = [], None
    for span in SPANS:
        case = simple_case(core, net=net, ts=grid(4, 0.5 + span / 2, 0.5 - span / 2), seed=3)
        if step is None:
            step = jagg_fx.transform(case.loss(style), W=4, gate=None, compiler="eager")
        subject = case.trainable() if style == "params" else case.net
        grads, _ = step.grad_and_value(subject, *case.args)
        want, _, _ = eager(case.core, case.function, case.trainable(), case.args)
        errors.append(relative_error(grads, want))
    x = torch.tensor(SPANS, dtype=torch.float64).log()
    y = torch.tensor(errors, dtype=torch.float64).log()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    assert 1.7 <= slope <= 2.1, (slope, errors)
