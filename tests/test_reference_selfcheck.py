"""The reference is right where the answer is known without it.  Needs no library."""

from __future__ import annotations

import math

import pytest
import torch

from .losses import (
    MLP,
    Affine,
    Case,
    Conv,
    Returns,
    Tied,
    coupled,
    frozen_first,
    grid,
    grpo_case,
    line_states,
    linear,
    lora,
    net_style,
    params_style,
    quadratic,
    read,
    simple_case,
)
from .reference import eager, group_indices, group_matrix, reference, relative_error


def _both(case: Case, **options):
    want, loss, _ = eager(case.core, case.function, case.trainable(), case.args)
    got = reference(case.core, case.function, case.trainable(), case.args, **options)
    assert torch.equal(got.loss, loss)
    return got, want


CASES = {
    "linear": lambda: simple_case(linear, noise=0.5),
    "quadratic": lambda: simple_case(quadratic, noise=0.5),
    "coupled": lambda: simple_case(coupled, noise=0.5),
    "grpo": lambda: grpo_case(),
    "grpo, KL on v": lambda: grpo_case(beta=0.04, kl="velocity"),
    "tied": lambda: simple_case(quadratic, net=Tied(4)),
    "frozen": lambda: simple_case(quadratic, net=frozen_first(4)),
    "lora": lambda: simple_case(quadratic, net=lora(4)),
}


@pytest.mark.parametrize("options", [{"W": 1}, {"W": 2}, {"estimator": "exact"}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_exact_settings_equal_autograd(name: str, options: dict) -> None:
    got, want = _both(CASES[name](), **options)
    assert relative_error(got.grads, want) < 1e-13
    assert {k for k, g in got.grads.items() if g is None} == {k for k, g in want.items() if g is None}


@pytest.mark.parametrize("name", CASES)
def test_gate_above_one_is_exact_and_below_minus_one_is_not(name: str) -> None:
    case = CASES[name]()
    shut, want = _both(case, W=4, gate="cosine", tau=1.1)
    assert relative_error(shut.grads, want) < 1e-13
    assert shut.open_share == 0
    open_, _ = _both(case, W=4, gate="cosine", tau=-1.1)
    plain, _ = _both(case, W=4)
    assert relative_error(open_.grads, plain.grads) == 0
    assert relative_error(open_.grads, want) > 1e-5


@pytest.mark.parametrize("T", [3, 7, 12])
@pytest.mark.parametrize("W", [3, 4, 8])
def test_affine_velocity_on_a_line_is_exact(T: int, W: int) -> None:
    torch.manual_seed(T)
    case = simple_case(coupled, net=Affine(4), T=T)
    got, want = _both(case, W=W)
    assert relative_error(got.grads, want) < 1e-13
    assert len(got.nodes) == sum(min(2, len(g)) for g in group_indices(T, W))


def test_affine_velocity_off_the_line_is_not_exact() -> None:
    got, want = _both(simple_case(quadratic, net=Affine(4), noise=1.0), W=4)
    assert relative_error(got.grads, want) > 1e-3


def test_slope_of_a_smooth_network_is_two() -> None:
    spans = [0.8, 0.4, 0.2, 0.1, 0.05]
    errors = []
    for span in spans:
        ts = grid(4, 0.5 + span / 2, 0.5 - span / 2)
        got, want = _both(simple_case(linear, ts=ts, net=MLP(4), seed=3), W=4)
        errors.append(relative_error(got.grads, want))
    x = torch.tensor(spans, dtype=torch.float64).log()
    y = torch.tensor(errors, dtype=torch.float64).log()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    assert 1.7 < slope < 2.1, (slope, errors)


def test_groups_are_consecutive_and_the_last_is_ragged() -> None:
    assert group_indices(9, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert group_indices(3, 8) == [[0, 1, 2]]
    assert group_indices(4, 1) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("weights", ["time", "index"])
def test_weights_of_every_step_sum_to_one(weights: str) -> None:
    times = torch.rand(5, 3, dtype=torch.float64).sort(0).values
    for n in range(1, 6):
        C = group_matrix(times[:n], weights)
        torch.testing.assert_close(C.sum(0), torch.ones(n, 3, dtype=torch.float64))


def test_lambda_depends_on_ratios_of_differences_only() -> None:
    times = torch.rand(5, 2, dtype=torch.float64).sort(0).values
    C = group_matrix(times, "time")
    torch.testing.assert_close(group_matrix(1000 * times, "time"), C)
    torch.testing.assert_close(group_matrix(3.0 - times, "time"), C)
    torch.testing.assert_close(group_matrix(times.flip(0), "time"), C.flip(0, 1))


def test_rows_without_a_lambda_are_exact_alone_or_with_their_group() -> None:
    times = torch.tensor([[0.1, 0.5], [0.2, 0.6], [0.3, 0.7], [0.4, 0.5]], dtype=torch.float64)
    C = group_matrix(times, "time")
    assert torch.equal(C[:, :, 1], torch.eye(4, dtype=torch.float64))
    assert not torch.equal(C[:, :, 0], torch.eye(4, dtype=torch.float64))
    assert torch.equal(group_matrix(times, "time", "group"), torch.eye(4).double()[:, :, None].expand(4, 4, 2))


def test_per_row_times_equal_the_sum_over_rows() -> None:
    torch.manual_seed(0)
    batch, T = 3, 6
    ts = torch.rand(T, batch, dtype=torch.float64).sort(0).values
    case = simple_case(linear, ts=ts, batch=batch)
    got, _ = _both(case, W=3)
    total: dict = {}
    zs, ts, cs = case.args
    for r in range(batch):
        one = (zs[:, r : r + 1], ts[:, r : r + 1], cs[:, r : r + 1])
        part = reference(case.core, case.function, case.trainable(), one, W=3)
        total = {k: g + total.get(k, 0) for k, g in part.grads.items()}
    assert relative_error(got.grads, total) < 1e-13


def test_lanes_group_within_themselves_and_detached_calls_get_no_backward() -> None:
    def guided(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            cond = velocity(zs[k], ts[k])
            free = velocity(-zs[k], ts[k]).detach()
            total = total + ((free + 2 * (cond - free)) * cs[k]).sum()
        return total

    case = simple_case(guided, T=8)
    lanes, _ = _both(case, W=4, lanes=lambda k: k % 2)
    assert lanes.nodes == [0, 6, 8, 14]
    zs, ts, cs = case.args
    alone = reference(linear, case.function, case.trainable(), (zs, ts, 2 * cs), W=4)
    assert relative_error(lanes.grads, alone.grads) < 1e-13


def test_no_grad_calls_are_not_timesteps_and_direct_reads_of_parameters_count() -> None:
    case = simple_case(linear, T=4)
    params = case.trainable()

    def core(velocity, zs, ts, cs):
        with torch.no_grad():
            shift = velocity(zs[0], ts[0])
        return linear(velocity, zs + shift, ts, cs) + sum((p**2).sum() for p in params.values())

    got = reference(core, case.function, params, case.args, W=2)
    want, _, _ = eager(core, case.function, params, case.args)
    assert len(got.calls) == 4
    assert relative_error(got.grads, want) < 1e-13


@pytest.mark.parametrize("kind", ["sample", "namedtuple", "tuple", "dict"])
def test_wrapped_outputs(kind: str) -> None:
    def core(velocity, zs, ts, cs):
        return linear(lambda z, t: read(velocity(z, t), kind), zs, ts, cs)

    plain = simple_case(linear)
    case = Case(Returns(plain.net, kind), core, plain.args)
    got, _ = _both(case, W=4)
    want, _ = _both(plain, W=4)
    assert math.isclose(
        sum(float(g.sum()) for g in got.grads.values()), sum(float(g.sum()) for g in want.grads.values())
    )


def test_a_cotangent_that_is_not_finite_shuts_its_own_group_only() -> None:
    case = simple_case(linear, T=8, noise=0.0)
    zs, ts, cs = case.args
    cs = cs.clone()
    cs[7, 1, 0] = torch.inf
    got = reference(case.core, case.function, case.trainable(), (zs, ts, cs), W=4, gate="cosine", tau=-2.0)
    assert [g.open for g in got.groups] == [True, False]


def test_a_nan_velocity_never_opens_a_gate() -> None:
    case = simple_case(linear, T=4)
    zs, ts, cs = case.args
    zs = zs.clone()
    zs[1] = torch.nan
    got = reference(case.core, case.function, case.trainable(), (zs, ts, cs), W=4, gate="cosine", tau=-2.0)
    assert not got.groups[0].open


def test_both_styles_are_the_same_loss_and_networks_run() -> None:
    for net in (Affine(4), MLP(4), Tied(4), frozen_first(4), lora(4)):
        case = simple_case(quadratic, net=net)
        a = params_style(case.net, case.core)(case.trainable(), *case.args)
        b = net_style(case.core)(case.net, *case.args)
        assert torch.equal(a, b)
    conv = Conv().double()
    zs = line_states(grid(4), 2, 3, 4, 4)
    assert conv(zs[0], grid(4)[0]).is_contiguous(memory_format=torch.channels_last)
