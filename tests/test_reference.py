"""The estimator equals an independent implementation of the method, gate by gate and row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from .helpers import check, exact, run, wanted
from .losses import (
    MLP,
    STYLES,
    Case,
    Conv,
    NamedTime,
    Tied,
    coupled,
    frozen_first,
    grid,
    grpo_case,
    line_states,
    linear,
    lora,
    quadratic,
    rough_states,
    simple_case,
)
from .reference import relative_error

CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: simple_case(linear, T=8, noise=0.5),
    "quadratic": lambda: simple_case(quadratic, T=8, noise=0.5),
    "coupled": lambda: simple_case(coupled, T=8, noise=0.5),
    "grpo": lambda: grpo_case(T=8),
    "grpo, KL on means": lambda: grpo_case(T=6, beta=0.04),
    "tied": lambda: simple_case(quadratic, net=Tied(4), T=4),
    "frozen": lambda: simple_case(coupled, net=frozen_first(4), T=6),
    "lora": lambda: grpo_case(T=4, net=lora(4)),
}


@pytest.mark.parametrize("name", CASES)
def test_endpoints(name: str) -> None:
    case = CASES[name]()
    want = wanted(case, W=4)
    # else the estimate is not told from the exact gradient
    assert relative_error(want.grads, exact(case).grads) > 1e-6
    check(run(case, STYLES[len(name) % 2], W=4, gate=None), want, 1e-10, 1e-12)


@pytest.mark.parametrize("W", [3, 5, 8])
def test_other_windows(W: int) -> None:
    case = simple_case(coupled, T=8, noise=0.5)
    check(run(case, "net", W=W, gate=None), wanted(case, W=W), 1e-10, 1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_weights_by_index(style: str) -> None:
    ts = torch.tensor([0.95, 0.9, 0.5, 0.45, 0.4, 0.1, 0.05], dtype=torch.float64)
    case = simple_case(quadratic, ts=ts)
    want = wanted(case, W=4, weights="index")
    assert relative_error(want.grads, wanted(case, W=4).grads) > 1e-4
    check(run(case, style, W=4, gate=None, weights="index"), want, 1e-10, 1e-12)


def half_rough(core: Callable = quadratic) -> Case:
    """First group on a line and narrow (its gate opens), second group rough (its gate shuts)."""
    case = simple_case(core, ts=torch.cat([grid(4, 0.9, 0.88), grid(4, 0.4, 0.1)]))
    zs, ts, third = case.args
    zs = torch.cat([zs[:4], rough_states(ts[4:], 3, 4, seed=5, noise=2.0)])
    return Case(case.net, core, (zs, ts, third))


@pytest.mark.parametrize("gate", ["cosine", "cosine-mean"])
@pytest.mark.parametrize("style", STYLES)
def test_the_gate_is_asked_per_group(gate: str, style: str) -> None:
    case = half_rough()
    want = wanted(case, W=4, gate=gate, tau=0.995)
    assert [g.open for g in want.groups] == [True, False]
    assert want.decisive(0.995, 1e-3)
    check(run(case, style, W=4, gate=gate), want, 1e-10, 1e-12)


def test_min_and_mean_differ_where_one_step_is_an_outlier() -> None:
    case = simple_case(quadratic, ts=grid(6, 0.6, 0.58))
    zs, ts, third = case.args
    zs = zs.clone()
    zs[2] += 0.7 * torch.randn(zs[2].shape, dtype=zs.dtype, generator=torch.Generator().manual_seed(1))
    case = Case(case.net, quadratic, (zs, ts, third))
    cosines = wanted(case, W=6, gate="cosine").groups[0].cosines
    low, mean_inside = min(cosines), sum(cosines[1:-1]) / 4
    tau = (low + mean_inside) / 2  # the mean over all steps is higher still: open either way it is read
    for gate, opened in (("cosine", False), ("cosine-mean", True)):
        want = wanted(case, W=6, gate=gate, tau=tau)
        assert want.groups[0].open == opened
        check(run(case, W=6, gate=gate, tau=tau), want, 1e-10, 1e-12)


def test_tau_decides() -> None:
    """The same batch on both sides of its own cosine."""
    case = simple_case(quadratic, T=4, noise=0.3)
    c = min(wanted(case, W=4, gate="cosine").groups[0].cosines)
    for tau in (c - 1e-6, c + 1e-6):
        want = wanted(case, W=4, gate="cosine", tau=tau)
        assert want.groups[0].open == (tau < c)
        check(run(case, W=4, gate="cosine", tau=tau), want, 1e-10, 1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_times_per_row(style: str) -> None:
    g = torch.Generator().manual_seed(3)
    ts = torch.rand(6, 3, generator=g, dtype=torch.float64).sort(0, descending=True).values
    case = simple_case(coupled, ts=ts, noise=0.3)
    check(run(case, style, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


@pytest.mark.parametrize("shape", ["(1,)", "(B,)", "(B, 1)"])
def test_shapes_of_a_time(shape: str) -> None:
    """A time as trainers pass it: one number, or expanded over the batch."""
    case = simple_case(coupled, T=5)
    zs, ts, third = case.args
    ts = {"(1,)": ts[:, None], "(B,)": ts[:, None].expand(5, 3), "(B, 1)": ts[:, None, None].expand(5, 3, 1)}[shape]
    case = Case(case.net, coupled, (zs, ts.contiguous(), third))
    check(run(case, "net", W=5, gate=None), wanted(case, W=5), 1e-10, 1e-12)


def test_expanded_inside_the_loss() -> None:
    def core(velocity, zs, ts, targets):
        losses = []
        for k in range(zs.shape[0]):
            t = ts[k].expand(zs.shape[1])
            losses.append(((velocity(zs[k], t) - targets[k]) ** 2).mean())
        return sum(losses)

    case = simple_case(core, T=5, noise=0.3)
    check(run(case, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


@pytest.mark.parametrize("call", ["positional", "keyword"])
def test_the_argument_named_timestep_is_the_time(call: str) -> None:
    """It is the third here, and the second is a condition that differs between rows."""

    def core(velocity, zs, ts, cond, targets):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            if call == "keyword":
                v = velocity(zs[k], encoder_hidden_states=cond, timestep=ts[k])
            else:
                v = velocity(zs[k], cond, ts[k])
            total = total + ((v - targets[k]) ** 2).mean()
        return total

    plain = simple_case(quadratic, T=5)
    torch.manual_seed(1)
    zs, ts, targets = plain.args
    case = Case(NamedTime(4).double(), core, (zs, ts, torch.randn(3, 4, dtype=torch.float64), targets))
    want = wanted(case, W=4, time="timestep" if call == "keyword" else 2)
    check(run(case, STYLES[call == "keyword"], W=4, gate=None), want, 1e-10, 1e-12)


@pytest.mark.parametrize("time", [2, "when"])
def test_time_option(time: int | str) -> None:
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = MLP(4)

        def forward(self, z, other, when):
            return self.net(z * other, when)

    def core(velocity, zs, ts, others, targets):
        return sum(((velocity(zs[k], others[k], ts[k]) - targets[k]) ** 2).mean() for k in range(zs.shape[0]))

    plain = simple_case(quadratic, T=4)
    torch.manual_seed(1)
    zs, ts, targets = plain.args
    others = torch.rand(4, 3, 1, dtype=torch.float64)
    case = Case(Odd().double(), core, (zs, ts, others, targets))
    check(run(case, W=4, gate=None, time=time), wanted(case, W=4, time=2), 1e-10, 1e-12)


class Uses(torch.nn.Module):
    """One matrix, used in one of the ways networks use theirs; time enters additively."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.w, self.u = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.g = torch.nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, z, t):
        if self.how == "state @ w":
            return torch.tanh(z @ self.u + t)
        z = z + t
        if self.how == "z @ w":
            return torch.tanh(z @ self.u) @ self.w
        if self.how == "z @ w.t()":
            return torch.tanh(z @ self.u.t()) @ self.w.t()
        if self.how == "einsum":
            return torch.tanh(torch.einsum("bi,oi->bo", z, self.u)) * self.w.diagonal()
        if self.how == "slices":
            a, b, c = self.g.unbind(0)
            return torch.tanh(z @ a) @ b + c[0]
        if self.how == "weight norm":
            return torch.tanh(torch.nn.functional.linear(z, self.u / self.u.norm(dim=1, keepdim=True)))
        if self.how == "product of weights":
            return torch.tanh(z @ (self.u @ self.w))
        if self.how == "gathered":
            return torch.tanh(z) * torch.nn.functional.embedding(torch.tensor([1]), self.w)
        raise ValueError(self.how)


@pytest.mark.parametrize("options", [{"gate": None}, {"tau": 1.5}], ids=str)
@pytest.mark.parametrize(
    "how",
    ["state @ w", "z @ w", "z @ w.t()", "einsum", "slices", "weight norm", "product of weights", "gathered"],
)
def test_ways_of_using_a_weight(how: str, options: dict) -> None:
    """What is kept of a weight for the backward differs: itself, a view of it, a value made of weights alone."""
    case = simple_case(coupled, net=Uses(how), T=4, noise=0.3)
    want = exact(case) if "tau" in options else wanted(case, W=4)
    check(run(case, "net", W=4, **options), want, 1e-10, 1e-12)


def test_images() -> None:
    torch.manual_seed(0)
    ts = grid(5)
    zs = line_states(ts, 2, 3, 4, 4)
    case = Case(Conv().double(), quadratic, (zs, ts, torch.randn_like(zs)))
    check(run(case, "net", W=5, gate=None), wanted(case, W=5), 1e-10, 1e-12)


@pytest.mark.inductor
def test_inductor() -> None:
    case = simple_case(coupled, net=MLP(2, 4, depth=1), T=6, batch=2, dim=2, noise=0.3)
    check(run(case, "net", W=4, gate=None, compiler="inductor"), wanted(case, W=4), 1e-10, 1e-12)
