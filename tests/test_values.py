"""Only gradients change: loss and aux are those of the untransformed function."""

from __future__ import annotations

import pytest
import torch

import jagg_fx

from .helpers import EAGER, check, run, wanted
from .losses import STYLES, Case, coupled, grpo_case, quadratic, simple_case


def with_aux(velocity, zs, ts, targets):
    """Aux as trainers log it: nested, with and without a path to the parameters, and not only tensors."""
    vs = [velocity(zs[k], ts[k]) for k in range(zs.shape[0])]
    errors = torch.stack([((v - u) ** 2).mean() for v, u in zip(vs, targets, strict=True)])
    loss = errors.mean()
    aux = {
        "errors": errors.detach(),
        "with a graph": errors.max(),
        "velocities": [vs[0].detach(), vs[-1].detach()],
        "nested": {"norm": torch.linalg.vector_norm(vs[1].detach()), "row": (ts, targets[0, 0])},
        "steps": zs.shape[0],
        "whole": torch.arange(3),
    }
    return loss, aux


def compare(got, want) -> None:
    flat_got, spec_got = torch.utils._pytree.tree_flatten(got)
    flat_want, spec_want = torch.utils._pytree.tree_flatten(want)
    assert spec_got == spec_want
    for g, w in zip(flat_got, flat_want, strict=True):
        if isinstance(w, torch.Tensor):
            assert g.dtype == w.dtype
            torch.testing.assert_close(g.detach(), w.detach(), rtol=1e-13, atol=1e-14)
        else:
            assert g == w


def aux_case() -> Case:
    plain = simple_case(quadratic, T=6, noise=0.5)
    return Case(plain.net, with_aux, plain.args, has_aux=True)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("make", [lambda: simple_case(coupled, T=6), lambda: grpo_case(T=5, beta=0.04)])
def test_loss(make, style: str) -> None:
    case = make()
    subject = case.trainable() if style == "params" else case.net
    want = case.loss(style)(subject, *case.args)
    got = jagg_fx.transform(case.loss(style), W=4, gate=None, **EAGER)(subject, *case.args)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("entry", ["backward", "grad_and_value"])
def test_aux(entry: str, style: str) -> None:
    case = aux_case()
    got = run(case, style, entry, W=4, gate=None)
    want = wanted(case, W=4)
    check(got, want, 1e-10, 1e-12)
    compare(got.aux, want.aux)


def test_aux_through_torch_func() -> None:
    """torch.func itself takes nothing but tensors there."""

    def core(*args):
        loss, aux = with_aux(*args)
        return loss, {k: v for k, v in aux.items() if k != "steps"}

    plain = aux_case()
    case = Case(plain.net, core, plain.args, has_aux=True)
    got = run(case, "params", "func", W=4, gate=None)
    want = wanted(case, W=4)
    check(got, want, 1e-10, 1e-12)
    compare(got.aux, want.aux)


def test_aux_with_gates_shut() -> None:
    case = aux_case()
    got = run(case, W=4, tau=1.5)
    compare(got.aux, wanted(case, W=4).aux)


def test_aux_through_a_backend() -> None:
    """Without has_aux: the compiled function returns what it returns."""
    case = aux_case()
    got = run(case, "params", "backend", W=4, gate=None)
    want = wanted(case, W=4)
    check(got, want, 1e-10, 1e-12)
    compare(got.aux, want.aux)


def test_no_grad_gives_the_loss() -> None:
    case = simple_case(quadratic, T=4)
    params = case.trainable()
    step = jagg_fx.transform(case.loss("params"), W=4, **EAGER)
    with torch.no_grad():
        loss = step(params, *case.args)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, case.loss("params")(params, *case.args).detach(), rtol=1e-13, atol=0)


def test_inputs_are_left_alone() -> None:
    case = simple_case(coupled, T=5)
    params = case.trainable()
    before = [x.clone() for x in (*params.values(), *case.args)]
    step = jagg_fx.transform(case.loss("params"), W=4, **EAGER)
    step.grad_and_value(params, *case.args)
    assert all(p.grad is None for p in params.values())  # as torch.func: no side effect
    for x, y in zip(before, (*params.values(), *case.args), strict=True):
        assert torch.equal(x, y)
