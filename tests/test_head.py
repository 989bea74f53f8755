"""gate="head": its value is the error of the last layer's weight gradient, and it decides like any gate."""

from __future__ import annotations

import pytest
import torch
from jagg_fx.models import DiT
from torch import nn

import jagg_fx

from .helpers import check, run, wanted
from .losses import MLP, Case, Conv, Squashed, quadratic, simple_case

D = torch.float64


class Tailed(nn.Module):
    """Views, a residual and a scale after the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, z, t):
        h = torch.tanh(self.inner(z) + t.reshape(-1, 1))
        v, _ = self.out(h).chunk(2, dim=-1)
        return z + 0.5 * v


def case_of(name: str, T: int = 4, rows: bool = False) -> tuple[Case, str]:
    """A case, and the name of the weight of its last layer."""
    torch.manual_seed(0)
    net, weight, shape = {
        "mlp": lambda: (MLP(4), "out.weight", (4,)),
        "conv": lambda: (Conv(2, 3), "last.weight", (2, 4, 4)),
        "tailed": lambda: (Tailed(), "out.weight", (4,)),
        "dit": lambda: (DiT(8, 1, 4, 16, 1, 2), None, (1, 8, 8)),
    }[name]()
    net = net.double()
    for p in net.parameters():  # a DiT starts at zero
        nn.init.normal_(p, std=0.3)
    weight = weight or [n for n, p in net.named_parameters() if p.ndim == 2][-1]
    ts = torch.linspace(0.9, 0.2, T, dtype=D)
    ts = ts[:, None] - 0.01 * torch.arange(3) if rows else ts
    zs, cs = torch.randn(T, 3, *shape, dtype=D), torch.randn(T, 3, *shape, dtype=D)
    return Case(net, quadratic, (zs, ts, cs)), weight


def discrepancies(case: Case, scale: float = 1.0, **options) -> list[float]:
    loss_fn = case.loss("net")
    step = jagg_fx.transform(lambda *a: scale * loss_fn(*a), gate="head", compiler="eager", **options)
    step(case.net, *case.args).backward()
    case.net.zero_grad()
    return [next(iter(g.cosines.values())) for g in step.stats.groups]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("mlp", False),
        ("mlp", True),
        ("conv", False),
        ("conv", True),
        ("tailed", False),
        ("tailed", True),
        ("dit", False),
    ],
)
def test_it_is_the_error_of_the_last_weight(name: str, rows: bool) -> None:
    case, weight = case_of(name, rows=rows)
    got, exact = (wanted(case, W=W).grads[weight] for W in (4, 1))
    error = float((got - exact).norm() / exact.norm())
    assert error > 1e-3
    for scale in (1.0, -300.0):
        (found,) = discrepancies(case, scale, W=4)
        assert abs(found - error) < 1e-6 * error  # a table of floats


@pytest.mark.parametrize(("tau", "is_open"), [(1e-6, False), (10.0, True)])
@pytest.mark.parametrize("style", ["params", "net"])
def test_open_and_shut(tau: float, is_open: bool, style: str) -> None:
    case = simple_case(quadratic, T=6, noise=0.3)
    got = run(case, style, W=4, gate="head", tau=tau)
    check(got, wanted(case, W=4 if is_open else 1), 1e-10, 1e-12)


def test_tau_has_its_own_default() -> None:
    case = simple_case(quadratic, T=4, noise=0.0)
    step = jagg_fx.transform(case.loss("net"), W=4, gate="head", compiler="eager")
    assert step.options.plan.tau == 0.1
    assert jagg_fx.transform(case.loss("net"), W=4).options.plan.tau == 0.995
    step(case.net, *case.args)
    (group,) = step.stats.groups
    assert group.open == (next(iter(group.cosines.values())) <= 0.1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_cotangent_that_is_not_finite_shuts_it(bad: float) -> None:
    case = simple_case(quadratic, T=4, noise=0.1)
    zs, ts, cs = case.args
    cs = cs.clone()
    cs[1, 0] = bad
    step = jagg_fx.transform(case.loss("net"), W=4, gate="head", tau=10.0, compiler="eager")
    step(case.net, zs, ts, cs)
    assert [g.open for g in step.stats.groups] == [False]


def test_a_velocity_whose_last_layer_cannot_be_told_is_refused() -> None:
    case = simple_case(quadratic, net=Squashed(4), T=4)
    with pytest.raises(jagg_fx.RefusedError, match=r"last layer.*tanh"):
        run(case, "net", W=4, gate="head")
    with pytest.raises(jagg_fx.RefusedError, match="last layer"):
        run(case, "params", W=4, gate="head")


def test_in_a_compile_pipeline() -> None:
    case = simple_case(quadratic, T=6, noise=0.3)
    check(run(case, "net", "backend", W=4, gate="head", tau=10.0), wanted(case, W=4), 1e-10, 1e-12)


@pytest.mark.inductor
@pytest.mark.parametrize("tau", [1e9, -1.0], ids=["open", "shut"])
def test_generated_code_keeps_the_hidden_state_apart(tau: float) -> None:
    """The last layer's input is read by the gate and by the backward: it must not be written over for one of them."""
    torch.manual_seed(0)
    net, T = MLP(4), 4
    args = torch.randn(T, 3, 4), torch.linspace(0.9, 0.2, T), torch.randn(T, 3, 4)

    def loss_fn(net, zs, ts, cs):
        return quadratic(net, zs, ts, cs)

    want, _ = jagg_fx.transform(loss_fn, gate="head", tau=tau, compiler="eager").grad_and_value(net, *args)
    got, _ = jagg_fx.transform(loss_fn, gate="head", tau=tau).grad_and_value(net, *args)
    for name, w in want.items():
        assert (got[name] - w).norm() <= 1e-5 * w.norm(), name
