"""Settings that promise the exact gradient give that of ordinary autograd, for any network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from .helpers import check, exact, run
from .losses import MLP, STYLES, Case, Tied, coupled, frozen_first, grpo_case, lora, quadratic, simple_case

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


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["W=2, no gate", "tau above 1"])
def test_inductor(name: str) -> None:
    case = simple_case(quadratic, net=MLP(2, 4, depth=1), T=4, batch=2, dim=2, noise=1.0)
    torch.manual_seed(0)
    check(run(case, **EXACT[name], compiler="inductor"), exact(case), 1e-10, 1e-12)
