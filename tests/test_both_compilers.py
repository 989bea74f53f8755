"""Every estimator with generated code: the gradient of the eager twin, which other tests compare with the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import jagg_fx
from jagg_fx.estimators import Alternating, Causal, Debiased, Knots

from .losses import MLP, quadratic, rough_states
from .reference import relative_error

ESTIMATORS = {
    "endpoints": "endpoints",
    "exact": "exact",
    "inner": "inner",
    "quadratic": "quadratic",
    "knots": Knots(3),
    "causal": Causal(1.0),
    "debiased, now and then": Debiased(0.5),
    "subset": "subset",
    "memory": "memory",
    "alternating": Alternating("inner", "quadratic", every=2),
}


def loss(net: nn.Module, zs: Tensor, ts: Tensor, targets: Tensor) -> Tensor:
    return quadratic(net, zs, ts, targets)


@pytest.mark.inductor
@pytest.mark.thorough
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_same_gradient_in_both_compilers(name: str) -> None:
    torch.manual_seed(0)
    net, ts = MLP(4), torch.linspace(0.9, 0.1, 6)
    zs = rough_states(ts.double(), 3, 4).float()
    args = net, zs, ts, torch.randn_like(zs)
    options = {"W": 6, "gate": None, "estimator": ESTIMATORS[name]}
    if name in ("debiased, now and then", "subset", "memory"):
        del options["gate"]  # they have none
    generated = jagg_fx.transform(loss, **options)
    twin = jagg_fx.transform(loss, **options, compiler="eager")
    for _ in range(3):  # estimators that alternate, or draw, differ from step to step
        want, value = twin.grad_and_value(*args)
        got, again = generated.grad_and_value(*args)
        assert relative_error(got, want) < 1e-5
        assert float(again) == pytest.approx(float(value), rel=1e-5)
