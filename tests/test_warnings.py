"""Warnings where the transform cannot help, and none where it can."""

from __future__ import annotations

import linecache
import warnings

import pytest
import torch

import jagg_fx

from .losses import MLP


def loss_fn(net, zs, ts):
    return sum((net(zs[k], ts[k]) ** 2).mean() for k in range(len(ts)))


def batch(T: int, span: float = 0.5, unit: float = 1.0):
    torch.manual_seed(0)
    ts = torch.linspace(0.9, 0.9 - span, T, dtype=torch.float64) * unit
    return MLP(4).double(), torch.randn(T, 2, 4, dtype=torch.float64), ts


def said(T: int, W: int, steps: int = 1, span: float = 0.5, unit: float = 1.0, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = jagg_fx.transform(loss_fn, W=W, compiler="eager", **{"gate": None, **options})
        for _ in range(steps):
            step(*batch(T, span, unit)).backward()
    return [str(w.message) for w in caught if issubclass(w.category, jagg_fx.JaggWarning)]


@pytest.mark.parametrize("W", [2, 3])
def test_small_windows_are_told_at_transform(W: int) -> None:
    with pytest.warns(jagg_fx.JaggWarning, match=f"W={W}"):
        jagg_fx.transform(loss_fn, W=W)


UNUSED = {
    "tau= without a gate": ({"gate": None, "tau": 0.9}, r"tau=0\.9 is not used: gate=None"),
    "tau= with an estimator without one": ({"estimator": "debiased", "tau": 0.9}, r"tau=0\.9 is not used: .*debiased"),
    "gate= with an estimator without one": ({"estimator": "subset", "gate": "cosine", "tau": 0.9}, r"gate='cosine' is"),
    "mode= without Inductor": ({"compiler": "eager", "mode": "max-autotune"}, r"mode= and options= are not used"),
}


@pytest.mark.parametrize("make", [lambda **o: jagg_fx.transform(loss_fn, **o), jagg_fx.backend])
@pytest.mark.parametrize("name", UNUSED)
def test_an_option_without_effect_is_told(name: str, make) -> None:
    options, match = UNUSED[name]
    with pytest.warns(jagg_fx.JaggWarning, match=match) as caught:
        make(**options)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "options", [{"gate": None}, {"estimator": "debiased", "gate": None}, {"tau": 0.9}, {"seed": 1}]
)
def test_options_with_an_effect_are_not_told(options: dict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jagg_fx.transform(loss_fn, **options)


def test_nothing_to_say() -> None:
    assert said(8, 4, steps=3) == []


@pytest.mark.parametrize(("T", "what"), [(2, "nothing is saved"), (3, "at most 1.29x")])
def test_few_timesteps(T: int, what: str) -> None:
    (text,) = said(T, 4, span=0.3)
    assert what in text


@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_wide_spans_are_told_once(unit: float) -> None:
    (text,) = said(4, 4, steps=3, span=0.8, unit=unit)
    assert "spans" in text
    assert "quadratic" in text
    assert said(8, 4, steps=1, span=0.8, unit=unit) == []


def test_shut_gates_are_told_once() -> None:
    texts = said(4, 4, steps=70, span=0.3, gate="cosine", tau=2.0)
    assert len(texts) == 1
    assert "shut" in texts[0]
    assert "gate=None" in texts[0]
    assert said(4, 4, steps=40, span=0.3, gate="cosine", tau=-2.0) == []


def test_estimators_made_for_wide_groups_are_not_warned_of() -> None:
    assert said(8, 4, span=0.8, estimator="knots") == []


def test_a_condition_taken_for_the_time_is_told() -> None:
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.out = torch.nn.Linear(4, 4)

        def forward(self, x, cond, tt):
            return self.out(torch.tanh(x * cond + tt))

    net, zs, ts = Net().double(), torch.randn(4, 2, 4, dtype=torch.float64), torch.linspace(0.9, 0.1, 4).double()
    cond = torch.randn(2, 1, dtype=torch.float64)
    step = jagg_fx.transform(lambda n: sum(n(zs[k], cond, ts[k]).sum() for k in range(4)), W=4, compiler="eager")
    with pytest.warns(jagg_fx.JaggWarning, match="time="):
        step(net).backward()


def deeper(call, depth: int):
    return deeper(call, depth - 1) if depth else call()


@pytest.mark.parametrize("kind", ["transform", "few timesteps", "wide", "shut", "func"])
def test_a_warning_points_to_the_line_of_the_user(kind: str) -> None:
    """The file is that of the caller, from however deep in the library or in torch the warning comes."""
    net, zs, ts = batch(2 if kind == "few timesteps" else 4, 0.8 if kind in ("wide", "func") else 0.3)

    def functional(params, zs, ts):
        return loss_fn(lambda *a: torch.func.functional_call(net, params, a), zs, ts)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if kind == "transform":
            deeper(lambda: jagg_fx.transform(loss_fn, W=2), 3)
        elif kind == "func":
            step = jagg_fx.transform(functional, W=4, compiler="eager", gate=None)
            deeper(lambda: torch.func.grad(step)(dict(net.named_parameters()), zs, ts), 3)
        else:
            gate = {"gate": "cosine", "tau": 2.0} if kind == "shut" else {"gate": None}
            step = jagg_fx.transform(loss_fn, W=4, compiler="eager", **gate)
            for _ in range(4 if kind == "shut" else 1):
                deeper(lambda: step(net, zs, ts), 3)
    (ours,) = [w for w in caught if issubclass(w.category, jagg_fx.JaggWarning)]
    assert ours.filename == __file__
    assert "deeper(lambda" in linecache.getline(__file__, ours.lineno)  # the call itself
