"""Several networks in one loss: each has its own groups; a network without gradient has none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import jagg_fx

from .helpers import relative_error
from .losses import MLP

D = torch.float64
STYLES = ["module", "params"]


class Experts(nn.Module):
    """Two networks, of one class or of two, switched by the time."""

    def __init__(self, same: bool = True) -> None:
        super().__init__()
        self.high = MLP(4)
        self.low = MLP(4) if same else nn.Sequential()
        if not same:
            self.low = Other()

    def forward(self, z, t, k, switch):
        return (self.high if k < switch else self.low)(z, t)


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 7), nn.Linear(7, 4)

    def forward(self, z, t):
        return self.b(torch.sin(self.a(z) + t))


def batch(T: int = 8):
    torch.manual_seed(1)
    ts = torch.linspace(0.95, 0.1, T, dtype=D)
    x, eps = torch.randn(3, 4, dtype=D), torch.randn(3, 4, dtype=D)
    zs = torch.stack([(1 - t) * x + t * eps for t in ts]) + 0.2 * torch.randn(T, 3, 4, dtype=D)
    return zs, ts, torch.randn(T, 3, 4, dtype=D)


def expert_of(k: int, switch: int, T: int) -> str:
    return "high" if k < switch else "low"


def estimate(nets: Experts, zs, ts, cs, which, W: int) -> dict:
    """Endpoints within each network, by plain autograd on leaf velocities."""
    T = len(ts)
    vs = [getattr(nets, which[k])(zs[k], ts[k]) for k in range(T)]
    leaves = [v.detach().requires_grad_() for v in vs]
    g = torch.autograd.grad(loss_of(leaves, cs), leaves)
    total: dict = {n: torch.zeros_like(p) for n, p in nets.named_parameters()}
    for name in ("high", "low"):
        mine = [k for k in range(T) if which[k] == name]
        for i in range(0, len(mine), W):
            group = mine[i : i + W]
            a, b = group[0], group[-1]
            merged = {a: torch.zeros_like(g[0]), b: torch.zeros_like(g[0])}
            for k in group:
                if len(group) <= 2:
                    merged[k] = g[k]
                    continue
                lam = (ts[k] - ts[a]) / (ts[b] - ts[a])
                merged[a] = merged[a] + (1 - lam) * g[k]
                merged[b] = merged[b] + lam * g[k]
            for node, cotangent in merged.items():
                named = {n: p for n, p in nets.named_parameters() if n.startswith(name)}
                grads = torch.autograd.grad(vs[node], list(named.values()), cotangent, retain_graph=True)
                for n, x in zip(named, grads, strict=True):
                    total[n] = total[n] + x
    return total


def loss_of(vs, cs):
    return sum((v * v * c).sum() for v, c in zip(vs, cs, strict=True)) / len(vs) + sum((v).sum() for v in vs) ** 2


def make(nets: Experts, style: str, which):
    def loss_fn(subject, zs, ts, cs):
        vs = []
        for k in range(len(ts)):
            name = which[k]
            if style == "params":
                inner = {n.split(".", 1)[1]: p for n, p in subject.items() if n.startswith(name)}
                vs.append(functional_call(getattr(nets, name), inner, (zs[k], ts[k])))
            else:
                vs.append(getattr(subject, name)(zs[k], ts[k]))
        return loss_of(vs, cs)

    return loss_fn


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("pattern", ["switched", "interleaved"])
def test_two_experts_have_their_own_groups(same: bool, style: str, pattern: str) -> None:
    torch.manual_seed(0)
    nets = Experts(same).double()
    zs, ts, cs = batch()
    which = ["high" if (k < 5 if pattern == "switched" else k % 2 == 0) else "low" for k in range(8)]
    subject = dict(nets.named_parameters()) if style == "params" else nets
    step = jagg_fx.transform(make(nets, style, which), W=4, gate=None, compiler="eager")
    grads, _ = step.grad_and_value(subject, zs, ts, cs)
    wants = estimate(nets, zs, ts, cs, which, 4)
    assert relative_error(grads, wants) < 1e-10
    exact = estimate(nets, zs, ts, cs, which, 1)
    assert relative_error(wants, exact) > 1e-5


def test_two_experts_in_a_compile_pipeline() -> None:
    torch.manual_seed(0)
    nets = Experts(True).double()
    zs, ts, cs = batch()
    which = ["high" if k < 5 else "low" for k in range(8)]
    backend = jagg_fx.backend(W=4, gate=None, compiler="eager")
    torch.compile(make(nets, "module", which), backend=backend, fullgraph=True)(nets, zs, ts, cs).backward()
    grads = {n: p.grad for n, p in nets.named_parameters()}
    assert relative_error(grads, estimate(nets, zs, ts, cs, which, 4)) < 1e-10


def test_velocity_takes_a_list() -> None:
    torch.manual_seed(0)
    nets = Experts(True).double()
    zs, ts, cs = batch()
    which = ["high" if k < 5 else "low" for k in range(8)]
    loss_fn = make(nets, "module", which)
    step = jagg_fx.transform(loss_fn, W=4, gate=None, compiler="eager", velocity=[nets.high, nets.low])
    grads, _ = step.grad_and_value(nets, zs, ts, cs)
    assert relative_error(grads, estimate(nets, zs, ts, cs, which, 4)) < 1e-10
    with pytest.raises(ValueError, match="velocity"):
        jagg_fx.transform(loss_fn, velocity=[])


@pytest.mark.parametrize("how", ["no_grad", "frozen"])
def test_a_reference_network_has_no_groups(how: str) -> None:
    torch.manual_seed(0)
    nets = Experts(True).double()
    reference = copy.deepcopy(nets.high)
    if how == "frozen":
        reference.requires_grad_(False)
    zs, ts, cs = batch()

    def loss_fn(net, zs, ts, cs):
        vs = []
        for k in range(len(ts)):
            with torch.set_grad_enabled(how == "frozen"):
                r = reference(zs[k], ts[k])
            vs.append(net(zs[k], ts[k]) - 0.5 * r)
        return loss_of(vs, cs)

    report = jagg_fx.explain(loss_fn, nets.high, zs, ts, cs, W=4, gate=None)
    assert [g.calls for g in report.groups] == [(0, 1, 2, 3), (4, 5, 6, 7)]
