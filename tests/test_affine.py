"""An affine velocity on states on a line: no approximation is left, whatever T and W."""

from __future__ import annotations

import os

import pytest
import torch

from .helpers import check, exact, run
from .losses import STYLES, Affine, Case, coupled, grid, linear, quadratic, simple_case

FULL = [(T, W) for T in range(2, 13) for W in range(2, 9)]
# one of each kind: whole groups, ragged ends of 1, 2 and 3, one group for all, W > T
SOME = [(8, 4), (9, 4), (7, 5), (11, 8), (3, 8), (12, 3)]
GRID = FULL if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz" else SOME


@pytest.mark.parametrize(("T", "W"), GRID)
def test_fp64_equals_autograd(T: int, W: int) -> None:
    case = simple_case(coupled, net=Affine(4), T=T, seed=T)
    check(run(case, STYLES[T % 2], W=W, gate=None), exact(case), 1e-12)


@pytest.mark.parametrize(("T", "W"), [(8, 4), (11, 8)])
def test_fp32_equals_autograd(T: int, W: int) -> None:
    case = simple_case(quadratic, net=Affine(4), T=T, dtype=torch.float32)
    check(run(case, STYLES[T % 2], W=W, gate=None), exact(case), 5e-7)


def test_uneven_times_need_weights_by_time() -> None:
    """lambda follows t, not the count of steps: by index the affine case is no longer exact."""
    ts = torch.tensor([0.9, 0.85, 0.3, 0.25, 0.2, 0.05], dtype=torch.float64)
    case = simple_case(linear, net=Affine(4), ts=ts)
    want = exact(case)
    check(run(case, W=6, gate=None), want, 1e-12)
    with pytest.raises(AssertionError, match="relative gradient error"):
        check(run(case, W=6, gate=None, weights="index"), want, 1e-2, 1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_one_step_serves_batches_with_other_times(style: str) -> None:
    """Times are data: the same step is right for the next batch's grid."""
    import jagg_fx

    first = simple_case(quadratic, net=Affine(4), T=5)
    step = jagg_fx.transform(first.loss(style), W=5, gate=None, compiler="eager")
    for ts in (grid(5), grid(5, 0.3, 0.05), grid(5).flip(0), torch.rand(5).double().sort().values):
        batch = simple_case(quadratic, net=first.net, ts=ts, seed=7)
        case = Case(first.net, quadratic, batch.args)
        subject = case.trainable() if style == "params" else case.net
        grads, loss = step.grad_and_value(subject, *case.args)
        want = exact(case)
        torch.testing.assert_close(loss.detach(), want.loss, rtol=1e-13, atol=0)
        for name, g in want.grads.items():
            torch.testing.assert_close(grads[name], g, rtol=1e-11, atol=1e-12)


@pytest.mark.inductor
def test_inductor() -> None:
    case = simple_case(linear, net=Affine(2), T=5, batch=2, dim=2)
    check(run(case, W=5, gate=None, compiler="inductor"), exact(case), 1e-12)
