"""Every estimator through the graph, against plain autograd given the same draws; and what an estimator promises."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import jagg_fx
from jagg_fx.estimators import (
    Alternating,
    Causal,
    Correction,
    Debiased,
    Endpoints,
    Estimator,
    Inner,
    Knots,
    Memory,
    Quadratic,
    Schedule,
    Subset,
)

from .helpers import EAGER
from .losses import MLP, Affine
from .reference import relative_error

D = torch.float64
OWN = {**EAGER, "gate": None}

pytestmark = pytest.mark.filterwarnings("ignore::jagg_fx.JaggWarning")  # wide groups, groups that save nothing


# ------------------------------------------------------------------------------------------ the reference


def head(vs: Sequence[Tensor], cs: Sequence[Tensor]) -> Tensor:
    """The cotangent of a call depends on the velocities of all, also of those of other rows."""
    own = sum((v * v * c).sum() for v, c in zip(vs, cs, strict=True)) / len(vs)
    return own + 0.05 * (sum(vs) ** 2).sum() + 0.02 * sum(v.mean() for v in vs) ** 3


def loss(net: Callable, zs: Tensor, ts: Tensor, cs: Tensor) -> Tensor:
    return head([net(zs[k], ts[k]) for k in range(len(ts))], cs)


def estimate(
    net: nn.Module,
    zs: Tensor,
    ts: Tensor,
    cs: Tensor,
    estimator: Estimator,
    W: int = 4,
    u: Tensor | None = None,
    lanes: Sequence[int] | None = None,
    weights: str = "time",
) -> dict[str, Tensor]:
    """sum over nodes j of J_j^T sum over k of C[j, k] g_k, group by group of every lane, in the order of the calls."""
    leaves = [net(z, t).detach().requires_grad_() for z, t in zip(zs, ts, strict=True)]
    g = torch.autograd.grad(head(leaves, cs), leaves)
    named = dict(net.named_parameters())
    total = {n: torch.zeros_like(p) for n, p in named.items()}
    rest = [] if u is None else list(u)
    lanes = [0] * len(ts) if lanes is None else lanes
    for lane in dict.fromkeys(lanes):
        members = [k for k in range(len(ts)) if lanes[k] == lane]
        size = len(members) if estimator.whole else W
        for start in range(0, len(members), size):
            group = members[start : start + size]
            for node, merged in _group(estimator, group, ts, g, rest, weights):
                z, t = (_of(x[group], node) for x in (zs, ts))
                grads = torch.autograd.grad(net(z, t), list(named.values()), merged)
                for n, x in zip(named, grads, strict=True):
                    total[n] += x
    assert not rest, "draws were left over"
    return total


def _group(estimator: Estimator, group: list[int], ts: Tensor, g: Sequence[Tensor], rest: list, weights: str):
    n = len(group)
    t = ts[group].double()
    lam: list[Any] = [0.0, *((t[k] - t[0]) / (t[-1] - t[0]) for k in range(1, n - 1)), 1.0][:n]
    if weights == "index":
        lam = [k / max(n - 1, 1) for k in range(n)]
    numbers = [rest.pop(0) for _ in range(estimator.drawn(n))]
    rows = t.shape[1] if t.dim() > 1 else None
    picks = estimator.picks(lam, [x[:rows] if rows else x[0] for x in numbers])
    C = estimator.weights(lam, picks)
    nodes = [*estimator.nodes(n), *picks]
    assert len(C) == len(nodes)
    for node, row in zip(nodes, C, strict=True):
        merged = torch.zeros_like(g[0])
        for weight, k in zip(row, group, strict=True):
            merged = merged + torch.as_tensor(weight, dtype=D).reshape(-1, 1) * g[k]
        yield node, merged


def _of(values: Tensor, node: int | Tensor) -> Tensor:
    """The value of a step; of a drawn one row by row."""
    if isinstance(node, int) or node.dim() == 0:
        return values[int(node)]
    return torch.stack([values[int(k), row] for row, k in enumerate(node)])


def batch(T: int = 8, rows: int = 3, per_row: bool = False, seed: int = 1, dim: int = 4):
    """States off the line, uneven falling times."""
    g = torch.Generator().manual_seed(seed)
    steps = 0.05 + torch.rand(T, rows if per_row else 1, generator=g, dtype=D)
    ts = 0.95 - 0.9 * (steps.cumsum(0) - steps[0]) / steps.sum(0)
    x, eps, noise = (torch.randn(*s, rows, dim, generator=g, dtype=D) for s in ((1,), (1,), (T,)))
    zs = (1 - ts[..., None]) * x + ts[..., None] * eps + 0.3 * noise
    return zs, ts if per_row else ts.squeeze(1), torch.randn(T, rows, dim, generator=g, dtype=D)


def mlp(seed: int = 0) -> MLP:
    torch.manual_seed(seed)
    return MLP(4, 8, 1).double()


def drawn(step: Any, number: int, lanes: Sequence[int], W: int, rows: int) -> tuple[Estimator, Tensor | None]:
    """The variant of a step and its uniforms, asked of the clock when the step is over. lanes: calls of each lane."""
    clock, family = step.backend.clock, step.options.plan.estimator
    now, clock.step = clock.step, number
    variant = family.variants()[clock.variant(family)]
    count = 0
    for n in lanes:
        size = n if variant.whole else W
        count += sum(variant.drawn(min(size, n - start)) for start in range(0, n, size))
    u = clock.uniforms(torch.empty(count, rows, dtype=D)) if count else None
    clock.step = now
    return variant, u


def agree(
    estimator: Any,
    T: int = 8,
    W: int = 4,
    rows: int = 3,
    per_row: bool = False,
    steps: int = 2,
    seed: int = 1,
    **options,
) -> list[float]:
    """Some steps are those of the reference. Returns their errors against exact."""
    net, errors = mlp(), []
    step = jagg_fx.transform(loss, W=W, estimator=estimator, **{**OWN, **options})
    for number in range(steps):
        args = batch(T, rows, per_row, seed + number)
        got, value = step.grad_and_value(net, *args)
        assert step.backend.clock.step == number + 1
        variant, u = drawn(step, number, [T], W, rows if per_row else 1)
        want = estimate(net, *args, variant, W, u, weights=options.get("weights", "time"))
        assert relative_error(got, want) < 1e-9, (estimator, number)
        torch.testing.assert_close(value, loss(net, *args).detach(), rtol=1e-11, atol=1e-11)
        errors.append(relative_error(got, exact(net, *args)))
    return errors


def exact(net: nn.Module, *args: Tensor) -> dict[str, Tensor]:
    net = copy.deepcopy(net)
    loss(net, *args).backward()
    return {n: p.grad for n, p in net.named_parameters()}


def gradient(step: Any, net: nn.Module, *args: Tensor) -> dict[str, Tensor]:
    return step.grad_and_value(net, *args)[0]


# ------------------------------------------------------------------------------------ through the graph

FAMILIES = [
    *(Debiased(), Debiased(0.5), Subset(), Subset(1), Subset(3)),
    *(Knots(), Knots(2), Knots(3, 1), Causal(), Causal(1), Causal(1.5, 3, last=False)),
    *(
        Inner(),
        Alternating("inner", "quadratic"),
        Quadratic(),
        Correction(),
        Schedule(((1, "endpoints"), (2, "knots"), (None, "debiased"))),
    ),
]


@pytest.mark.parametrize(
    ("estimator", "per_row"),
    [*((e, True) for e in FAMILIES), *((e, False) for e in (Debiased(0.5), Subset(), Knots(), Causal(), Quadratic()))],
    ids=repr,
)
def test_the_gradient_is_that_of_the_reference(estimator: Estimator, per_row: bool) -> None:
    """W=4 at T=9: a last group of one step."""
    steps = 3 if len(estimator.variants()) > 1 else 2
    errors = agree(estimator, T=9, per_row=per_row, steps=steps)
    assert min(errors) > 1e-4  # nothing went exact


@pytest.mark.parametrize(
    ("estimator", "T", "W"),
    [("debiased", 13, 5), ("debiased", 7, 3), ("subset", 10, 5), ("subset", 8, 8), ("quadratic", 13, 5)],
)
def test_windows(estimator: str, T: int, W: int) -> None:
    agree(estimator, T, W, per_row=T != 8)


@pytest.mark.parametrize(("estimator", "T", "W"), [(Correction(), 7, 4), (Debiased(0.5), 6, 3)], ids=repr)
def test_a_drawn_step_in_a_group_of_three(estimator: Estimator, T: int, W: int) -> None:
    """All steps have a backward, and none its own cotangent alone."""
    agree(estimator, T, W, steps=4)


@pytest.mark.parametrize("estimator", [Debiased(), Correction()], ids=repr)
def test_weights_by_index_of_drawn_steps(estimator: Estimator) -> None:
    agree(estimator, T=9, per_row=True, weights="index")


@pytest.mark.thorough
@given(
    st.sampled_from(FAMILIES),
    st.integers(2, 11),
    st.sampled_from([3, 4, 5, 8]),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(["time", "index"]),
    st.integers(0, 1000),
)
@example(Subset(3), 11, 5, 5, True, "index", 7)
@example(Debiased(), 6, 4, 1, True, "time", 3)
@example(Quadratic(), 7, 5, 2, False, "index", 4)
def test_any_shape(estimator: Estimator, T: int, W: int, rows: int, per_row: bool, weights: str, seed: int) -> None:
    torch._dynamo.reset()
    agree(estimator, T, W, rows, per_row, seed=seed, weights=weights)


@pytest.mark.thorough
@pytest.mark.parametrize("per_row", [False, True], ids=["scalar", "per row"])
@pytest.mark.parametrize("estimator", ["debiased", "subset", "knots", "causal"])
def test_two_lanes(estimator: str, per_row: bool) -> None:
    """Guidance: two calls a timestep, with draws of their own in each lane."""
    net = mlp()
    zs, ts, cs = batch(12, per_row=per_row)
    ts = ts[:6]

    def guided(net, zs, ts, cs):
        vs = []
        for k in range(6):
            vs += [net(zs[2 * k], ts[k]), net(zs[2 * k + 1], ts[k])]
        return head(vs, cs)

    step = jagg_fx.transform(guided, W=4, estimator=estimator, **OWN)
    for number in range(2):
        got = gradient(step, net, zs, ts, cs)
        variant, u = drawn(step, number, [6, 6], 4, 3 if per_row else 1)
        want = estimate(net, zs, ts.repeat_interleave(2, 0), cs, variant, 4, u, lanes=[0, 1] * 6)
        assert relative_error(got, want) < 1e-9


def test_quadratic_takes_its_two_sides_in_turn() -> None:
    net, args = mlp(), batch(8)
    step = jagg_fx.transform(loss, W=4, estimator="quadratic", **OWN)
    first, second, third = (gradient(step, net, *args) for _ in range(3))
    assert relative_error(first, third) < 1e-12
    left, right = (estimate(net, *args, v) for v in Quadratic().variants())
    assert relative_error(left, right) > 1e-3
    assert relative_error(first, left) < 1e-10
    assert relative_error(second, right) < 1e-10


def test_a_schedule_changes_over_at_its_step() -> None:
    net, args = mlp(), batch(8)
    step = jagg_fx.transform(loss, W=4, estimator=Schedule(((2, "endpoints"), (None, "knots"))), **OWN)
    got = [gradient(step, net, *args) for _ in range(4)]
    ends, knots = estimate(net, *args, Endpoints()), estimate(net, *args, Knots())
    for g, want in zip(got, [ends, ends, knots, knots], strict=True):
        assert relative_error(g, want) < 1e-10


def test_a_schedule_leaves_an_exact_stage() -> None:
    net, args = mlp(), batch(8)
    step = jagg_fx.transform(loss, W=4, estimator=Schedule(((1, "exact"), (None, "knots"))), **OWN)
    assert relative_error(gradient(step, net, *args), exact(net, *args)) < 1e-10
    assert relative_error(gradient(step, net, *args), estimate(net, *args, Knots())) < 1e-10


# ------------------------------------------------------------------------------------------ where exact


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("estimator", "W"),
    [
        *(("debiased", W) for W in (1, 2)),
        *((e, 2) for e in (Debiased(0.5), Memory(every=2))),
        *(("quadratic", W) for W in (2, 3)),
        *((e, 4) for e in (Knots(1), Causal(1.5, 1), Subset(4))),
    ],
    ids=repr,
)
def test_exact_for_any_network(estimator: Any, W: int) -> None:
    net = mlp()
    step = jagg_fx.transform(loss, W=W, estimator=estimator, **OWN)
    for number in range(3):
        args = batch(6, per_row=True, seed=number)
        assert relative_error(gradient(step, net, *args), exact(net, *args)) < 1e-9


@pytest.mark.thorough
@pytest.mark.parametrize(
    "estimator",
    ["endpoints", "debiased", Debiased(0.5), Causal(1), "knots", Knots(4, 2), "quadratic", Memory(2, 0.5, False)],
    ids=repr,
)
def test_exact_for_affine_networks(estimator: Any) -> None:
    """Whatever is drawn. With a memory: what it has measured is nothing."""
    torch.manual_seed(0)
    net = Affine(4).double()
    zs, ts, cs = batch(9, per_row=True)
    ends = torch.randn(2, 3, 4, dtype=D)
    zs = (1 - ts).reshape(9, -1, 1) * ends[0] + ts.reshape(9, -1, 1) * ends[1]
    step = jagg_fx.transform(loss, W=5, estimator=estimator, **OWN)
    want = exact(net, zs, ts, cs)
    for _ in range(5):
        assert relative_error(gradient(step, net, zs, ts, cs), want) < 1e-10


@pytest.mark.parametrize("estimator", [Causal(1.5), "subset"], ids=repr)
def test_the_others_are_not_exact_for_affine_networks(estimator: Any) -> None:
    torch.manual_seed(0)
    net, (_, ts, cs) = Affine(4).double(), batch(9)
    ends = torch.randn(2, 3, 4, dtype=D)
    zs = (1 - ts).reshape(9, 1, 1) * ends[0] + ts.reshape(9, 1, 1) * ends[1]
    step = jagg_fx.transform(loss, W=5, estimator=estimator, **OWN)
    assert relative_error(gradient(step, net, zs, ts, cs), exact(net, zs, ts, cs)) > 1e-3


# ------------------------------------------------------------------------------------------ the draws


@pytest.mark.thorough
@pytest.mark.parametrize("per_row", [False, True], ids=["scalar", "per row"])
@pytest.mark.parametrize("estimator", [Debiased(), Debiased(0.5), Subset(2)], ids=repr)
def test_unbiased(estimator: Estimator, per_row: bool) -> None:
    """The mean over many steps is exact up to its own standard error, where endpoints are not."""
    net, args, n = mlp(), batch(8, per_row=per_row), 300
    step = jagg_fx.transform(loss, W=4, estimator=estimator, **OWN)
    got = [torch.cat([g.flatten() for g in gradient(step, net, *args).values()]) for _ in range(n)]
    want = torch.cat([g.flatten() for g in exact(net, *args).values()])
    sample = torch.stack(got)
    error = (sample.mean(0) - want).norm()
    deviation = (sample.var(0).sum() / n).sqrt()
    assert 0 < deviation < 0.1 * want.norm()
    assert error < 2.5 * deviation


def test_draws_are_new_at_each_step() -> None:
    net, args = mlp(), batch(8, per_row=True)

    def steps(seed: int, n: int = 4) -> list[dict]:
        step = jagg_fx.transform(loss, W=4, estimator="debiased", seed=seed, **OWN)
        return [gradient(step, net, *args) for _ in range(n)]

    first, again, other = steps(0), steps(0), steps(1)
    for i, a in enumerate(first):
        assert relative_error(a, again[i]) == 0
        assert relative_error(a, other[i]) > 1e-4
        for b in first[:i]:
            assert relative_error(a, b) > 1e-4


def test_draws_do_not_touch_the_generators_of_torch() -> None:
    net, args = mlp(), batch(8)
    step = jagg_fx.transform(loss, W=4, estimator="debiased", **OWN)
    gradient(step, net, *args)
    state = torch.get_rng_state()
    gradient(step, net, *args)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_are_drawn_apart() -> None:
    """Uniforms of a step: in [0, 1), one in each of as many equal cells as there are rows, in random order."""
    step = jagg_fx.transform(loss, W=4, estimator="debiased", **OWN)
    clock, seen = step.backend.clock, []
    for clock.step in range(40):
        u = clock.uniforms(torch.empty(3, 5))
        assert u.shape == (3, 5)
        assert bool(((u >= 0) & (u < 1)).all())
        cells = (u * 5).long()
        assert torch.equal(cells.sort(1).values, torch.arange(5).expand(3, 5))
        assert not torch.equal(u[0], u[1])
        seen.append(u[0, 0])
    values = torch.stack(seen)
    assert len(values.unique()) == 40
    assert abs(float(values.mean()) - 0.5) < 0.15


def test_a_state_goes_on_with_the_draws() -> None:
    net, args = mlp(), batch(8)

    def new():
        return jagg_fx.transform(loss, W=4, estimator=Debiased(0.5), seed=3, **OWN)

    step = new()
    whole = [gradient(step, net, *args) for _ in range(6)]
    part = new()
    for _ in range(3):
        gradient(part, net, *args)
    other = new()
    other.load_state_dict(part.state_dict())
    for want in whole[3:]:
        assert relative_error(gradient(other, net, *args), want) == 0


@torch.no_grad()
def test_a_step_without_gradient_draws_nothing() -> None:
    net, args = mlp(), batch(8)
    step = jagg_fx.transform(loss, W=4, estimator="debiased", **OWN)
    torch.testing.assert_close(step(net, *args), loss(net, *args))
    assert step.backend.clock.step == 0


# ------------------------------------------------------------------------------------------------ the work


@pytest.mark.parametrize(
    ("estimator", "T", "W", "backwards"),
    [
        *(("debiased", 8, 4, 6), ("debiased", 9, 4, 7), ("debiased", 6, 4, 5), ("debiased", 16, 8, 6)),
        *(("subset", 8, 4, 4), (Subset(1), 8, 4, 2), (Subset(3), 9, 4, 7)),
        *(("knots", 16, 4, 6), (Knots(5), 16, 4, 4), (Knots(3, 1), 8, 4, 4)),
        *((Causal(), 8, 4, 5), (Causal(1.5, 2, last=False), 9, 4, 5), ("quadratic", 8, 4, 6), (Correction(), 8, 4, 6)),
        (Correction(), 6, 4, 3),
    ],
    ids=repr,
)
def test_backwards_that_are_left(estimator: Any, T: int, W: int, backwards: int) -> None:
    report = jagg_fx.explain(loss, mlp(), *batch(T), W=W, estimator=estimator, **OWN)
    before, after = report.sides
    assert (before.forward_calls, before.backward_calls) == (T, T)
    assert (after.forward_calls, after.backward_calls) == (T, backwards)


@pytest.mark.inductor
def test_inductor() -> None:
    agree("debiased", T=5, per_row=True, compiler="inductor")
