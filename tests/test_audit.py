"""step.audit, step.stats, the picture, and copies of a step."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call

import jagg_fx
from jagg_fx.stats import as_dict

EAGER = {"compiler": "eager"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.body = nn.Linear(1, 16), nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 4))

    def forward(self, z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        hidden = self.body[0](z) + self.time(t.expand(z.shape[0]).unsqueeze(-1))
        return self.body[2](self.body[1](hidden))


def loss_fn(net: nn.Module, zs: torch.Tensor, ts: torch.Tensor) -> torch.Tensor:
    return sum(((net(zs[k], ts[k]) - zs[k]) ** 2).mean() for k in range(zs.shape[0]))  # type: ignore[return-value]


def example(T: int = 6) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Net().double(), torch.randn(T, 3, 4).double(), torch.linspace(0.9, 0.1, T).double()


def flat(grads) -> torch.Tensor:
    return torch.cat([g.flatten() for g in grads])


def test_audit_equals_the_difference_of_the_two_gradients() -> None:
    args = example()
    step = jagg_fx.transform(loss_fn, W=4, gate=None, **EAGER)
    found = step.audit(*args)
    estimate = flat(step.grad_and_value(*args)[0].values())
    exact = flat(torch.autograd.grad(loss_fn(*args), list(args[0].parameters())))
    assert found.relative_error == pytest.approx(((estimate - exact).norm() / exact.norm()).item(), rel=1e-9)
    assert found.cosine == pytest.approx(torch.cosine_similarity(estimate, exact, 0).item(), rel=1e-9)


def test_audit_by_group_and_parameter() -> None:
    net, zs, ts = example()
    found = jagg_fx.transform(loss_fn, W=4, tau=0.5, **EAGER).audit(net, zs, ts)
    assert [g.calls for g in found.groups] == [(0, 1, 2, 3), (4, 5)]
    first, last = found.groups
    assert first.relative_error > 1e-3
    assert (last.relative_error, last.gate, last.open) == (0.0, (), None)
    assert first.open == (min(first.gate) >= 0.5)
    exact = flat(torch.autograd.grad(loss_fn(net, zs, ts), list(net.parameters())))
    part = flat(torch.autograd.grad(loss_fn(net, zs[:4], ts[:4]), list(net.parameters())))
    assert first.share == pytest.approx((part.norm() / exact.norm()).item(), rel=1e-9)
    assert set(found.parameters) == {n for n, _ in net.named_parameters()}
    assert sum(share for _, share in found.parameters.values()) == pytest.approx(1)
    assert "group" in str(found)
    assert "time.weight" in str(found)


def test_audit_tells_how_large_a_tau_of_the_head_gate_stands_for_a_tolerance() -> None:
    net, zs, ts = example(T=16)
    found = jagg_fx.transform(loss_fn, W=4, gate="head", **EAGER).audit(net, zs, ts)
    ratios = sorted(g.relative_error / max(g.gate) for g in found.groups)
    assert found.ratio == pytest.approx((ratios[1] + ratios[2]) / 2)
    assert f"tau = tol / {found.ratio:.3g}" in str(found)
    assert "error of the last layer" in str(found)
    worst = max(g.relative_error for g in found.groups)
    opened = jagg_fx.transform(loss_fn, W=4, gate="head", tau=2 * worst / ratios[0], **EAGER).audit(net, zs, ts)
    shut = jagg_fx.transform(loss_fn, W=4, gate="head", tau=worst / ratios[-1] / 100, **EAGER).audit(net, zs, ts)
    assert ([g.open for g in opened.groups], [g.open for g in shut.groups]) == ([True] * 4, [False] * 4)
    cosine = jagg_fx.transform(loss_fn, W=4, **EAGER).audit(net, zs, ts)
    assert cosine.ratio is None
    assert "smallest cosine" in str(cosine)


def test_audit_changes_nothing_and_takes_both_styles() -> None:
    net, zs, ts = example()
    before = {k: v.clone() for k, v in net.state_dict().items()}

    def functional(params, zs, ts):
        return loss_fn(lambda z, t: functional_call(net, params, (z, t)), zs, ts)

    step = jagg_fx.transform(functional, W=4, **EAGER)
    step.grad_and_value(dict(net.named_parameters()), zs, ts)
    gates = as_dict(step.stats)
    a = step.audit(dict(net.named_parameters()), zs, ts)
    b = step.audit({k: v.detach() for k, v in net.named_parameters()}, zs, ts)
    c = jagg_fx.transform(loss_fn, W=4, **EAGER).audit(net, zs, ts)
    assert a.relative_error == pytest.approx(b.relative_error) == pytest.approx(c.relative_error)
    assert as_dict(step.stats) == gates
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_audit_of_an_exact_estimator_is_zero() -> None:
    found = jagg_fx.transform(loss_fn, W=4, estimator="exact", **EAGER).audit(*example())
    assert found.relative_error == 0.0
    assert found.cosine == pytest.approx(1)


def test_stats_tell_open_from_shut() -> None:
    net, zs, ts = example(8)
    step = jagg_fx.transform(loss_fn, W=4, tau=2.0, **EAGER)
    assert "no approximated group" in repr(step.stats)
    step(net, zs, ts).backward()
    assert step.stats.fallback_share == 1.0
    assert [(g.calls, g.open) for g in step.stats.groups] == [((0, 1, 2, 3), False), ((4, 5, 6, 7), False)]
    assert all(-1 <= c <= 1 for g in step.stats.groups for c in g.cosines.values())
    assert sorted(step.stats.groups[1].cosines) == [5, 6]
    assert "100% fell back" in repr(step.stats)
    always = jagg_fx.transform(loss_fn, W=4, tau=-2.0, **EAGER)
    always(net, zs, ts)
    assert always.stats.fallback_share == 0.0
    with torch.no_grad():  # no gradient, no gate: the last values stay
        step(net, zs, ts)
    assert step.stats.fallback_share == 1.0


def test_the_cosine_is_that_of_the_method() -> None:
    net, zs, ts = example(4)
    step = jagg_fx.transform(loss_fn, W=4, **EAGER)
    step(net, zs, ts)
    v = [net(zs[k], ts[k]) for k in range(4)]
    for k, found in step.stats.groups[0].cosines.items():
        lam = (ts[k] - ts[0]) / (ts[3] - ts[0])
        guess = (1 - lam) * v[0] + lam * v[3]
        want = (v[k] * guess).sum() / (v[k].norm() * guess.norm() + 1e-8)
        assert math.isclose(found, want.item(), rel_tol=1e-6)


def test_the_picture_shows_the_method(tmp_path) -> None:
    draw = pytest.importorskip("jagg_fx.draw", reason="the picture needs matplotlib")
    report = jagg_fx.explain(loss_fn, *example(8), W=4, gate=None)
    before, after = (draw.condensed(report, x) for x in (False, True))

    def kinds(graph, kind):
        return sum(d["kind"] == kind for _, d in graph.nodes(data=True))

    assert (kinds(before, "backward"), kinds(after, "backward")) == (8, 4)
    assert (kinds(before, "slim"), kinds(after, "slim")) == (0, 4)
    assert after.in_degree("b0") == 3  # its own cotangent and two of the pruned steps
    assert before.in_degree("b0") == 1
    draw.draw(report, tmp_path / "graph.png")
    assert (tmp_path / "graph.png").stat().st_size > 10_000


def test_a_step_can_be_copied_and_pickled() -> None:
    args = example()
    step = jagg_fx.transform(loss_fn, W=4, gate=None, **EAGER)
    want = flat(step.grad_and_value(*args)[0].values())
    for other in (copy.deepcopy(step), copy.copy(step), pickle.loads(pickle.dumps(step))):
        assert other.options == step.options
        torch.testing.assert_close(flat(other.grad_and_value(*args)[0].values()), want)
