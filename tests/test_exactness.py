"""Settings that promise the exact gradient give that of ordinary autograd, for any network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import jagg_fx

from .helpers import check, exact, run
from .losses import MLP, STYLES, Case, Tied, coupled, frozen_first, grpo_case, lora, quadratic, simple_case
from .reference import relative_error

EXACT = {
    "W=1": {"W": 1},
    "W=2": {"W": 2},
    "exact": {"estimator": "exact", "W": 4},
    "tau above 1": {"W": 4, "tau": 1.5},
    "mean gate, tau above 1": {"W": 4, "tau": 1.5, "gate": "cosine-mean"},
    "W=1, no gate": {"W": 1, "gate": None},
    "W=2, no gate": {"W": 2, "gate": None},
}
CASES: dict[str, Callable[[], Case]] = {
    "coupled": lambda: simple_case(coupled, T=5, noise=1.0),
    "grpo": lambda: grpo_case(T=6, beta=0.04),
    "tied": lambda: simple_case(quadratic, net=Tied(4), T=4, noise=1.0),
    "frozen": lambda: simple_case(quadratic, net=frozen_first(4), T=4, noise=1.0),
    "lora": lambda: grpo_case(T=4, net=lora(4)),
}


@pytest.mark.parametrize(("name", "style"), [(name, STYLES[i % 2]) for i, name in enumerate(EXACT)])
def test_any_setting(name: str, style: str) -> None:
    case = CASES["coupled"]()
    check(run(case, style, **EXACT[name]), exact(case), 1e-10, 1e-12)


@pytest.mark.parametrize("name", ["W=2", "tau above 1"])
@pytest.mark.parametrize("kind", [k for k in CASES if k != "coupled"])
def test_any_network(kind: str, name: str) -> None:
    case = CASES[kind]()
    check(run(case, STYLES[len(kind) % 2], **EXACT[name]), exact(case), 1e-10, 1e-12)


def test_fp32_shut_gate() -> None:
    case = simple_case(coupled, T=6, noise=1.0, dtype=torch.float32)
    check(run(case, W=3, tau=1.5), exact(case), 1e-5)


def test_a_deep_network_and_a_wide_window() -> None:
    case = simple_case(coupled, net=MLP(3, 8, depth=6), T=9, dim=3, noise=1.0)
    check(run(case, W=8, tau=1.5), exact(case), 1e-10, 1e-12)


@pytest.mark.parametrize("name", ["W=1, no gate", "tau above 1"])
def test_a_gradient_that_is_a_part_of_another(name: str) -> None:
    """Where a weight is the sum of two parameters, one sum of gradients is a term of a second."""
    case = simple_case(quadratic, net=MLP(4, 8, depth=3), T=4, noise=1.0)
    params = case.trainable()

    def loss(params: dict[str, Tensor], *args: Tensor) -> Tensor:
        both = params["layers.2.weight"] + params["layers.1.weight"]
        return case.loss("params")({**params, "layers.2.weight": both}, *args)

    want = torch.autograd.grad(loss(params, *case.args), [*params.values()])
    got, _ = jagg_fx.transform(loss, compiler="eager", **EXACT[name]).grad_and_value(params, *case.args)
    assert relative_error(got, dict(zip(params, want, strict=True))) < 1e-12


def mixed_layouts(velocity: Callable, zs: Tensor, ts: Tensor, targets: Tensor) -> Tensor:
    """The cotangent of some calls is one number expanded, that of others lies in memory."""
    vs = [velocity(z, t) for z, t in zip(zs, ts, strict=True)]
    return sum((v.sum() if k % 3 != 1 else ((v - targets[k]) ** 2).mean() for k, v in enumerate(vs)), zs.new_zeros(()))


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["W=1, no gate", "tau above 1"])
def test_cotangents_that_lie_differently_in_memory(name: str) -> None:
    case = simple_case(mixed_layouts, net=MLP(2, 4, depth=1), T=4, batch=2, dim=2, noise=1.0)
    check(run(case, **EXACT[name], compiler="inductor"), exact(case), 1e-10, 1e-12)


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["W=2, no gate", "tau above 1"])
def test_inductor(name: str) -> None:
    case = simple_case(quadratic, net=MLP(2, 4, depth=1), T=4, batch=2, dim=2, noise=1.0)
    torch.manual_seed(0)
    check(run(case, **EXACT[name], compiler="inductor"), exact(case), 1e-10, 1e-12)
