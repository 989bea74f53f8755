"""Situations met in public trackers, C01 to C25: each kind gets the right gradient, or an error that helps.

A test is named after the situation.  "Right" is ordinary autograd where the answer must be exact, else
the independent implementation in ``tests/reference.py``.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import jagg_fx
from jagg_fx.backend import cache_key
from jagg_fx.options import check as check_options

from ..helpers import EAGER, Result, check, exact, run, wanted
from ..losses import (
    MLP,
    STYLES,
    Affine,
    Case,
    Conv,
    LoRALinear,
    Returns,
    Tied,
    clipped,
    coupled,
    embed,
    flow_sde,
    frozen_first,
    gaussian_logp,
    grid,
    grpo,
    grpo_case,
    line_states,
    linear,
    lora,
    quadratic,
    read,
    simple_case,
)
from ..reference import Reference, reference, relative_error
from ..test_graph import backwards, matmuls

D = torch.float64


def with_core(case: Case, core: Callable, *more) -> Case:
    return Case(case.net, core, (*case.args, *more))


def right_or_refused(case: Case, wants: list[Reference | Result], match: str, style="params", **options) -> str:
    """One of the right answers, or a JaggError with the essential word.  Says which."""
    try:
        got = run(case, style, **options)
    except jagg_fx.JaggError as e:
        text = str(e)
    else:
        text = ""
    if text:
        assert re.search(match, text), f"the error does not say {match}: {text}"
        return "refused"
    failures = []
    for want in wants:
        try:
            check(got, want, 1e-10, 1e-12)
            return "right"
        except AssertionError as e:
            failures.append(str(e))
    raise AssertionError(failures)


def refused(case: Case, match: str, style: str = "params", **options) -> str:
    with pytest.raises(jagg_fx.JaggError, match=match) as caught:
        run(case, style, **options)
    return str(caught.value)


# --------------------------------------------------------------------------------------------- C01 to C06


@pytest.mark.parametrize(("T", "W"), [(9, 4), (11, 4), (19, 4), (10, 4), (3, 4), (7, 5)])
def test_c01_ragged_last_group(T: int, W: int) -> None:
    case = simple_case(coupled, T=T, noise=0.5)
    check(run(case, STYLES[T % 2], W=W, gate=None), wanted(case, W=W), 1e-10, 1e-12)


def test_c01_a_lone_last_step_is_exact() -> None:
    """T=9, W=4: only the last step has a cotangent, so nothing is approximated."""
    case = simple_case(linear, T=9)
    zs, ts, cs = case.args
    cs = torch.cat([torch.zeros_like(cs[:8]), cs[8:]])
    case = Case(case.net, linear, (zs, ts, cs))
    check(run(case, W=4, gate=None), exact(case), 1e-10, 1e-12)


@pytest.mark.parametrize("T", [9, 11])
def test_c01_with_gates(T: int) -> None:
    case = simple_case(quadratic, T=T, noise=0.02)
    want = wanted(case, W=4, gate="cosine", tau=0.9)
    assert want.decisive(0.9, 1e-6)
    check(run(case, W=4, tau=0.9), want, 1e-10, 1e-12)


class Experts(nn.Module):
    """Own parameters per timestep and per row of the batch: shows what a bad value spreads to."""

    def __init__(self, steps: int, batch: int, dim: int):
        super().__init__()
        self.steps = steps
        self.per_step = nn.Parameter(torch.randn(steps, dim))
        self.per_row = nn.Parameter(torch.randn(batch, dim))

    def forward(self, z, t):
        bucket = (t * self.steps).long().reshape(1)  # times are (k + 1/2) / steps
        return torch.tanh(z) * self.per_step[bucket] + self.per_row * z


def experts_case(bad: float, T: int = 8) -> Case:
    ts = ((torch.arange(T, dtype=D) + 0.5) / T).flip(0)
    case = simple_case(linear, net=Experts(T, 3, 4), ts=ts)
    zs, ts, cs = case.args
    cs = cs.clone()
    cs[T - 1, 1, 2] = bad
    return Case(case.net, linear, (zs, ts, cs))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_c02_a_bad_cotangent_stays_in_its_group_and_row(bad: float) -> None:
    case = experts_case(bad)
    want, eager = wanted(case, W=4, gate="cosine", tau=-2.0), exact(case)
    assert [g.open for g in want.groups] == [True, False]
    got = run(case, W=4, tau=-2.0)
    for name, g in got.grads.items():
        assert torch.equal(g.isfinite(), eager.grads[name].isfinite()), name
        finite = g.isfinite()
        torch.testing.assert_close(g[finite], want.grads[name][finite], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_c02_without_a_gate_the_other_groups_are_not_poisoned(bad: float) -> None:
    case = experts_case(bad)
    got, want = run(case, W=4, gate=None), wanted(case, W=4)
    for name, g in got.grads.items():
        finite = g.isfinite()
        assert torch.equal(finite, want.grads[name].isfinite()), name
        torch.testing.assert_close(g[finite], want.grads[name][finite], rtol=1e-10, atol=1e-12)
    # falling times: the last group of calls trains experts 0 to 3; the last call has no part in its first end
    assert got.grads["per_step"][1:].isfinite().all()
    assert not got.grads["per_row"][1].isfinite().all()  # nor is the bad value hidden


@pytest.mark.parametrize("gate", ["cosine", "cosine-mean"])
@pytest.mark.parametrize("where", ["interior", "endpoint"])
def test_c02_a_nan_velocity_never_opens_a_gate(gate: str, where: str) -> None:
    """The loss masks the bad row, so its gradient is finite; its velocity is not."""
    step = {"interior": 1, "endpoint": 3}[where]

    def masked(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            v = velocity(zs[k], ts[k])
            total = total + torch.where(v.isfinite(), v * cs[k], torch.zeros_like(v)).sum()
        return total

    class Overflow(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.shift = MLP(4), nn.Parameter(torch.zeros(4))

        def forward(self, z, t):
            return self.net(torch.tanh(z), t) + self.shift + (z - z)  # inf - inf

    case = simple_case(masked, net=Overflow(), T=4)
    zs, ts, cs = case.args
    zs = zs.clone()
    zs[step, 0, 0] = math.inf
    case = Case(case.net, masked, (zs, ts, cs))
    want = wanted(case, W=4, gate=gate, tau=-2.0)
    assert not want.groups[0].open
    assert relative_error(want.grads, exact(case).grads) < 1e-12
    check(run(case, W=4, gate=gate, tau=-2.0), exact(case), 1e-10, 1e-12)


def test_c02_the_last_step_of_a_sampler() -> None:
    """A noise of 0 at sigma_next = 0 makes a log-density of inf - inf there; earlier groups are finite."""

    def core(velocity, traj, sigmas, old, adv):
        total = traj.new_zeros(())
        for k in range(8):
            dt = sigmas[k + 1] - sigmas[k]
            mean = traj[k] + velocity(traj[k], sigmas[k]) * dt
            std = 0.3 * sigmas[k + 1]
            logp = gaussian_logp(traj[k + 1], mean, std)
            total = total + clipped(torch.exp(logp - old[k]), adv, 0.2) / 8
        return total

    ts = ((torch.arange(8, dtype=D) + 0.5) / 8).flip(0)
    sigmas = torch.cat([ts, torch.zeros(1, dtype=D)])
    torch.manual_seed(0)
    traj = torch.randn(9, 3, 4, dtype=D)
    old = torch.randn(8, 3, dtype=D)
    case = Case(Experts(8, 3, 4).double(), core, (traj, sigmas, old, torch.randn(3, dtype=D)))
    got, eager = run(case, W=4, tau=1.5), exact(case)
    for name, g in got.grads.items():
        assert torch.equal(g.isfinite(), eager.grads[name].isfinite())
    torch.testing.assert_close(got.grads["per_step"][4:], eager.grads["per_step"][4:], rtol=1e-10, atol=1e-12)


EQUAL = {
    "all equal": torch.full((4,), 0.5, dtype=D),
    "endpoints equal": torch.tensor([0.5, 0.6, 0.7, 0.5], dtype=D),
    "first group of two": torch.tensor([0.5, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1], dtype=D),
    "one row": torch.tensor([[0.9, 0.5], [0.8, 0.5], [0.7, 0.5], [0.6, 0.5]], dtype=D),
    "one row, second group": torch.stack([grid(8), torch.tensor([0.9, 0.8, 0.7, 0.6, *[0.5] * 4], dtype=D)], dim=1),
}


@pytest.mark.parametrize("gate", [None, "cosine"])
@pytest.mark.parametrize("name", EQUAL)
def test_c03_equal_endpoint_times(name: str, gate: str | None) -> None:
    ts = EQUAL[name]
    case = simple_case(quadratic, ts=ts, batch=2, noise=0.3)
    wants = [wanted(case, W=4, degenerate=d) for d in ("row", "group")]
    if gate:
        wants += [wanted(case, W=4, gate=gate, tau=-2.0)]
    right_or_refused(case, wants, r"(?i)time.*equal|equal.*time|same time", W=4, gate=gate, tau=-2.0)


def test_c03_an_interior_time_equals_an_endpoint() -> None:
    """lambda is 0 or 1 there.  It may as well be a sign of two lanes: refusing it, or exact, is as right."""
    ts = torch.tensor([0.9, 0.9, 0.5, 0.1, 0.1], dtype=D)
    case = simple_case(quadratic, ts=ts, noise=0.3)
    right_or_refused(case, [wanted(case, W=5), exact(case)], r"(?i)time|lane", W=5, gate=None)


@pytest.mark.parametrize("gate", [None, "cosine"])
def test_c03_times_out_of_order(gate: str | None) -> None:
    """An interior time outside of the endpoints has no lambda in [0, 1]: exact, or refused."""
    case = simple_case(quadratic, ts=torch.tensor([0.8, 0.9, 0.2, 0.4], dtype=D), noise=0.3)
    right_or_refused(case, [exact(case)], r"(?i)order|outside|between", W=4, gate=gate, tau=-2.0)


CLIPS = {
    "max": lambda r, a: torch.max(-a * r, -a * torch.clamp(r, 0.8, 1.2)),
    "maximum": lambda r, a: torch.maximum(-a * r, -a * torch.clamp(r, 0.8, 1.2)),
    "minus min": lambda r, a: -torch.min(a * r, a * torch.clamp(r, 0.8, 1.2)),
    "tiny clip": lambda r, a: torch.max(-a * r, -a * torch.clamp(r, 1 - 1e-5, 1 + 1e-5)),
}


@pytest.mark.parametrize("name", CLIPS)
def test_c04_ratio_of_exactly_one(name: str) -> None:
    """The first step after a rollout: both arguments of max tie, and the cotangent is still -A in total."""

    def core(velocity, zs, ts, adv):
        total = zs.new_zeros(())
        for k in range(4):
            logp = velocity(zs[k], ts[k]).mean(1)
            total = total + CLIPS[name](torch.exp(logp - logp.detach()), adv).sum()
        return total

    plain = simple_case(linear, T=4, noise=0.3)
    adv = torch.tensor([1.0, -2.0, 0.5], dtype=D)
    case = Case(plain.net, core, (*plain.args[:2], adv))
    check(run(case, W=2), exact(case), 1e-10, 1e-12)
    want = wanted(case, W=4)
    for g in want.cotangents:
        torch.testing.assert_close(g.sum(1), -adv)
    check(run(case, W=4, gate=None), want, 1e-10, 1e-12)


def test_c04_old_log_probs_of_the_same_weights() -> None:
    case = grpo_case(T=4, drift=0.0)
    check(run(case, W=2), exact(case), 1e-10, 1e-12)
    check(run(case, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


def test_c05_units_and_direction_of_time_do_not_matter() -> None:
    """sigma, 1000 sigma, int64 timesteps, and the whole trajectory backwards: one gradient."""
    steps = torch.tensor([950, 900, 720, 400, 301, 17])
    zs = line_states(steps / 1000, 3, 4).double() + 0.1 * torch.randn(6, 3, 4, dtype=D)
    targets = torch.randn(6, 3, 4, dtype=D)
    results = {}
    for kind, scale, ts in [
        ("sigma", 1.0, steps.double() / 1000),
        ("1000 sigma", 1000.0, steps.double()),
        ("int64", 1000.0, steps),
        ("int32", 1000.0, steps.int()),
    ]:
        torch.manual_seed(0)
        net = MLP(4, scale=scale).double()
        for direction in ("falling", "rising") if kind in ("sigma", "int64") else ("falling",):
            order = slice(None) if direction == "falling" else torch.arange(5, -1, -1)
            case = Case(net, quadratic, (zs[order], ts[order], targets[order]))
            torch._dynamo.reset()
            results[kind, direction] = run(case, W=3, gate=None)
    first = results["sigma", "falling"]
    torch.manual_seed(0)
    case = Case(MLP(4).double(), quadratic, (zs, steps.double() / 1000, targets))
    check(first, wanted(case, W=3), 1e-10, 1e-12)
    for key, got in results.items():
        assert relative_error(got.grads, first.grads) < 1e-10, key


def test_c05_int64_times_per_row() -> None:
    ts = torch.tensor([[900, 850, 990], [700, 600, 980], [650, 30, 100], [200, 10, 50]])
    torch.manual_seed(0)
    zs, targets = torch.randn(2, 4, 3, 4, dtype=D)
    case = Case(MLP(4, scale=1000.0).double(), quadratic, (zs, ts, targets))
    check(run(case, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


def test_c05_a_gate_does_not_see_the_unit() -> None:
    steps = torch.tensor([950, 900, 720, 655])
    for scale, ts in ((1.0, steps.double() / 1000), (1000.0, steps)):
        torch.manual_seed(0)
        zs, targets = line_states(steps / 1000, 3, 4).double(), torch.randn(4, 3, 4, dtype=D)
        case = Case(MLP(4, scale=scale).double(), quadratic, (zs, ts, targets))
        c = min(wanted(case, W=4, gate="cosine").groups[0].cosines)
        for tau in (c - 1e-6, c + 1e-6):
            torch._dynamo.reset()
            check(run(case, W=4, tau=tau), wanted(case, W=4, gate="cosine", tau=tau), 1e-10, 1e-12)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("core", [coupled, linear])
def test_c06_other_times_in_every_row(style: str, core: Callable) -> None:
    g = torch.Generator().manual_seed(1)
    ts = torch.rand(8, 3, generator=g, dtype=D).sort(0, descending=True).values
    ts[:, 1] = ts[:, 1].flip(0)  # one row rises where the others fall
    case = simple_case(core, ts=ts, noise=0.3)
    check(run(case, style, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


def test_c06_with_gates() -> None:
    g = torch.Generator().manual_seed(1)
    ts = 0.5 + 0.02 * torch.rand(8, 3, generator=g, dtype=D).sort(0, descending=True).values
    case = simple_case(quadratic, ts=ts)
    want = wanted(case, W=4, gate="cosine")
    assert want.open_share == 1
    assert want.decisive(0.995, 1e-6)
    check(run(case, W=4), want, 1e-10, 1e-12)


def test_c06_rows_in_random_order() -> None:
    """ddpo-pytorch shuffles the timesteps of each sample: no group of a row need be in order."""
    g = torch.Generator().manual_seed(1)
    ts = torch.rand(8, 3, generator=g, dtype=D)
    case = simple_case(quadratic, ts=ts, noise=0.3)
    wants = [wanted(case, W=4, degenerate=d) for d in ("row", "group")]
    right_or_refused(case, wants, r"(?i)order|outside|between", W=4, gate=None)


# --------------------------------------------------------------------------------------------- C07 to C12


def guided(detach: str) -> Callable:
    """Classifier-free guidance by two calls per timestep."""

    def core(velocity, zs, ts, cs, cond):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            v = velocity(zs[k] + cond, ts[k])
            if detach == "no_grad":
                with torch.no_grad():
                    free = velocity(zs[k], ts[k])
            else:
                free = velocity(zs[k], ts[k])
            if detach == "detach":
                free = free.detach()
            total = total + ((free + 3.0 * (v - free) - cs[k]) ** 2).mean()
        return total

    return core


def guided_case(detach: str, T: int = 6, net: nn.Module | None = None) -> Case:
    plain = simple_case(quadratic, T=T, noise=0.3, net=net)
    torch.manual_seed(3)
    return with_core(plain, guided(detach), torch.randn(4, dtype=D))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("detach", ["detach", "no_grad", "neither"])
def test_c07_guidance_by_two_calls(detach: str, style: str) -> None:
    case = guided_case(detach)
    lanes = None if detach == "no_grad" else lambda k: k % 2
    check(run(case, style, W=3, gate=None), wanted(case, W=3, lanes=lanes), 1e-10, 1e-12)


@pytest.mark.parametrize("detach", ["detach", "no_grad"])
def test_c07_the_detached_lane_gets_no_backward(detach: str) -> None:
    """One matrix: a product per forward call, one more per backward call (see test_graph)."""
    case = guided_case(detach, T=8, net=Affine(4))
    step = jagg_fx.transform(case.loss("net"), W=4, gate=None, **EAGER)
    step.grad_and_value(case.net, *case.args)
    assert matmuls(lambda: step.grad_and_value(case.net, *case.args)) == 16 + backwards(8, 4)


@pytest.mark.parametrize("how", ["clone", "other tensor", "Python number"])
def test_c07_equal_times_in_other_tensors(how: str) -> None:
    """The second lane's times are equal in value only: its own lane, or exact, or refused, but never mixed."""

    def core(velocity, zs, ts, cs, more):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            t, again = ts[k], ts[k].clone() if how == "clone" else more[k]
            if how == "Python number":
                t, again = (torch.tensor(0.9 - 0.1 * k, dtype=D) for _ in range(2))
            v, free = velocity(zs[k], t), velocity(-zs[k], again)
            total = total + ((free + 3.0 * (v - free) - cs[k]) ** 2).mean()
        return total

    plain = simple_case(quadratic, T=6, noise=0.3)
    case = with_core(plain, core, plain.args[1].clone())
    wants = [wanted(case, W=3, lanes=lambda k: k % 2), exact(case)]
    right_or_refused(case, wants, r"(?i)time|lane", "net", W=3, gate=None)


@pytest.mark.parametrize("options", [{"gate": None}, {"tau": -2.0}], ids=str)
def test_c07_each_call_makes_its_own_time(options: dict) -> None:
    """One time per row, expanded anew for each call: equal by how it is computed."""

    def core(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            v = velocity(zs[k], 1000 * ts[k].expand(3))
            free = velocity(-zs[k], 1000 * ts[k].expand(3)).detach()
            total = total + ((free + 3.0 * (v - free) - cs[k]) ** 2).mean()
        return total

    case = simple_case(core, net=MLP(4, scale=1000.0), T=6, noise=0.3)
    gate = {"gate": "cosine", **options} if "tau" in options else {}
    check(run(case, "net", W=3, **options), wanted(case, W=3, lanes=lambda k: k % 2, **gate), 1e-10, 1e-12)


def test_c07_the_detached_lane_first() -> None:
    def core(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            free = velocity(-zs[k], ts[k]).detach()
            total = total + ((velocity(zs[k], ts[k]) + free - cs[k]) ** 2).mean()
        return total

    case = simple_case(core, T=5, noise=0.3)
    check(run(case, W=4, gate=None), wanted(case, W=4, lanes=lambda k: k % 2), 1e-10, 1e-12)


def test_c07_three_lanes() -> None:
    """Condition, negative prompt, and none."""

    def core(velocity, zs, ts, cs, conds):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            a, b, c = (velocity(zs[k] + conds[i], ts[k]) for i in range(3))
            total = total + ((c + 2 * (a - c) - b - cs[k]) ** 2).mean()
        return total

    plain = simple_case(quadratic, T=5, noise=0.3)
    case = with_core(plain, core, torch.randn(3, 4, dtype=D))
    check(run(case, W=4, gate=None), wanted(case, W=4, lanes=lambda k: k % 3), 1e-10, 1e-12)


def test_c07_with_gates_per_lane() -> None:
    """The first lane is smooth (open), the second is rough (shut)."""

    def core(velocity, zs, ts, cs, rough):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            v, free = velocity(zs[k], ts[k]), velocity(rough[k], ts[k])
            total = total + ((free + 3.0 * (v - free) - cs[k]) ** 2).mean()
        return total

    plain = simple_case(quadratic, ts=grid(4, 0.6, 0.58))
    torch.manual_seed(0)
    case = with_core(plain, core, 3 * torch.randn(4, 3, 4, dtype=D))
    want = wanted(case, W=4, gate="cosine", lanes=lambda k: k % 2)
    assert [g.open for g in want.groups] == [True, False]
    assert want.decisive(0.995, 1e-4)
    check(run(case, W=4), want, 1e-10, 1e-12)


def test_c07_doubled_batch_with_one_half_detached() -> None:
    def core(velocity, zs, ts, cs, cond):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            both = velocity(torch.cat([zs[k] + cond, zs[k]]), ts[k])
            v, free = both.chunk(2)
            free = free.detach()
            total = total + ((free + 3.0 * (v - free) - cs[k]) ** 2).mean()
        return total

    plain = simple_case(quadratic, T=6, noise=0.3)
    case = with_core(plain, core, torch.randn(4, dtype=D))
    check(run(case, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


@pytest.mark.parametrize("how", ["before", "after", "all first", "set_grad_enabled"])
def test_c08_reference_calls_under_no_grad(how: str) -> None:
    """A KL term against the same network (adapters off, or a snapshot)."""

    def core(velocity, zs, ts, cs):
        total, refs = zs.new_zeros(()), []
        steps = range(zs.shape[0])
        if how == "all first":
            with torch.no_grad():
                refs = [velocity(zs[k] * 0.9, ts[k]) for k in steps]
        for k in steps:
            if how == "before":
                with torch.no_grad():
                    ref = velocity(zs[k] * 0.9, ts[k])
            elif how == "set_grad_enabled":
                with torch.set_grad_enabled(False):
                    ref = velocity(zs[k] * 0.9, ts[k])
            v = velocity(zs[k], ts[k])
            if how == "after":
                with torch.no_grad():
                    ref = velocity(zs[k] * 0.9, ts[k])
            if how == "all first":
                ref = refs[k]
            total = total + (v * cs[k]).sum() + ((v - ref) ** 2).mean()
        return total

    case = simple_case(core, T=5, noise=0.3)
    check(run(case, STYLES[len(how) % 2], W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


def test_c08_a_frozen_reference_network() -> None:
    """Another network, without parameters that train: no timestep either, with or without no_grad."""
    torch.manual_seed(9)
    other = MLP(4).double().requires_grad_(False)

    def core(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            v = velocity(zs[k], ts[k])
            total = total + (v * cs[k]).sum() + ((v - other(zs[k], ts[k])) ** 2).mean()
        return total

    case = simple_case(core, T=5, noise=0.3)
    check(run(case, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


class Adapted(nn.Module):
    """An adapter with a switch, as peft's disable_adapter flips one."""

    def __init__(self):
        super().__init__()
        self.net, self.adapter, self.on = MLP(4).requires_grad_(False), nn.Linear(4, 4), True

    def forward(self, z, t):
        v = self.net(z, t)
        return v + self.adapter(torch.tanh(v)) if self.on else v


@pytest.mark.parametrize("style", STYLES)
def test_c08_adapters_switched_off_for_the_reference(style: str) -> None:
    net = Adapted()

    def core(velocity, zs, ts, cs):
        owner = velocity if isinstance(velocity, Adapted) else net
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            v = velocity(zs[k], ts[k])
            owner.on = False
            with torch.no_grad():
                ref = velocity(zs[k], ts[k])
            owner.on = True
            total = total + ((v - cs[k]) ** 2).mean() + 0.1 * ((v - ref) ** 2).mean()
        return total

    case = simple_case(core, net=net, T=5, noise=0.3)
    check(run(case, style, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)
    assert net.on


def test_c08_reference_parameters_through_functional_call() -> None:
    plain = simple_case(quadratic, T=5, noise=0.3)
    ref_params = {k: p.detach() + 0.1 for k, p in plain.net.named_parameters()}

    def loss_fn(params, ref_params, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            with torch.no_grad():
                ref = functional_call(plain.net, ref_params, (zs[k], ts[k]))
            v = functional_call(plain.net, params, (zs[k], ts[k]))
            total = total + ((v - cs[k]) ** 2).mean() + 0.1 * ((v - ref) ** 2).mean()
        return total

    def core(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            with torch.no_grad():
                ref = functional_call(plain.net, ref_params, (zs[k], ts[k]))
            v = velocity(zs[k], ts[k])
            total = total + ((v - cs[k]) ** 2).mean() + 0.1 * ((v - ref) ** 2).mean()
        return total

    want = wanted(with_core(plain, core), W=4)
    step = jagg_fx.transform(loss_fn, W=4, gate=None, **EAGER)
    grads, _ = step.grad_and_value(plain.trainable(), ref_params, *plain.args)
    assert relative_error(grads, want.grads) < 1e-10


@pytest.mark.parametrize("kl", ["velocity", "mean"])
@pytest.mark.parametrize("style", STYLES)
def test_c09_the_whole_cotangent(kl: str, style: str) -> None:
    """v is read through the log-prob and by the KL: both parts are merged."""
    case = grpo_case(T=6, beta=0.5, kl=kl)
    without = wanted(Case(case.net, grpo(), case.args), W=4)
    want = wanted(case, W=4)
    assert relative_error(want.grads, without.grads) > 1e-2
    check(run(case, style, W=4, gate=None), want, 1e-10, 1e-12)


def test_c09_velocities_kept_for_a_term_at_the_end() -> None:
    def core(velocity, zs, ts, cs):
        vs = [velocity(zs[k], ts[k]) for k in range(zs.shape[0])]
        stacked = torch.stack(vs)
        fit = ((stacked - cs) ** 2).mean()
        return fit + 0.1 * stacked.norm(dim=2).mean() + (vs[2] * vs[0]).mean() + stacked[:, 0].std()

    case = simple_case(core, T=6, noise=0.3)
    check(run(case, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


def breaking(kind: str) -> Callable:
    def core(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(4):
            v = velocity(zs[k], ts[k])
            weight = 1.0
            if kind == "nonzero":
                weight = 1.0 + (ts == ts[k]).nonzero().item()
            elif kind == "item":
                weight = ts[k].item()
            elif kind == "float":
                weight = math.sqrt(float(ts[k]))
            elif kind == "branch":
                if ts[k] > 0.5:
                    weight = 2.0
            elif kind == "tolist":
                weight = ts.tolist()[k]
            elif kind == "mask":
                v = v[v.sum(1) > 0]
                total = total + (v**2).sum()
                continue
            total = total + weight * (v * cs[k]).sum()
        return total

    return core


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", ["nonzero", "item", "float", "branch", "tolist", "mask"])
def test_c10_reads_of_values(kind: str, style: str) -> None:
    """`(timesteps == t).nonzero().item()`, as schedulers look their index up, and all else that makes a
    Python value or a shape of data: an error with the line and what to do, or right for every batch."""
    first = simple_case(breaking(kind), T=4, noise=0.3)
    step = jagg_fx.transform(first.loss(style), W=4, gate=None, **EAGER)
    for ts in (grid(4), grid(4, 0.7, 0.05), grid(4, 0.3, 0.2)):
        zs, _, cs = first.args
        case = Case(first.net, first.core, (zs + ts.mean(), ts, cs))
        subject = case.trainable() if style == "params" else case.net
        try:
            grads, _ = step.grad_and_value(subject, *case.args)
        except jagg_fx.JaggError as e:
            text = str(e)
            break
        assert relative_error(grads, wanted(case, W=4).grads) < 1e-10
    else:
        return
    assert re.search(r"test_cases\.py\D+\d+", text), text  # where
    assert re.search(r"outside|before|pass", text), text  # and the cure


def test_c10_print_in_the_loss() -> None:
    def core(velocity, zs, ts, cs):
        print("loss is computed")
        return linear(velocity, zs, ts, cs)

    case = simple_case(core, T=4, noise=0.3)
    right_or_refused(case, [wanted(case, W=4)], r"(?i)print", W=4, gate=None)


class TwoSlots(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.net, self.gate = MLP(dim), nn.Linear(dim, dim)

    def forward(self, z, context, t):
        return self.net(z, t) * torch.sigmoid(self.gate(context))


@pytest.mark.parametrize("style", STYLES)
def test_c11_one_tensor_in_two_slots(style: str) -> None:
    def core(velocity, zs, ts, cs):
        return sum((velocity(z, z, t) * c).sum() for z, t, c in zip(zs, ts, cs, strict=True))

    case = simple_case(core, net=TwoSlots(4), T=5, noise=0.3)
    check(run(case, style, W=4, gate=None), wanted(case, W=4, time=2), 1e-10, 1e-12)
    torch._dynamo.reset()
    check(run(case, style, W=4, tau=1.5), exact(case), 1e-10, 1e-12)


def test_c11_slots_shared_in_other_ways() -> None:
    """The same inputs, read first in the same places, but wired otherwise: one body cannot serve both."""

    class ThreeSlots(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = TwoSlots(4)

        def forward(self, z, a, b, t):
            return self.net(z + torch.sin(a), b, t)

    def core(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k, (z, t, c) in enumerate(zip(zs, ts, cs, strict=True)):
            total = total + (velocity(z, c, z if k % 2 else c, t) * c).sum()
        return total

    case = simple_case(core, net=ThreeSlots(), T=6, noise=0.3)
    wants = [wanted(case, W=3, time=3, lanes=lanes) for lanes in (None, lambda k: k % 2)]
    right_or_refused(case, wants, r"(?i)slot|argument|input", W=3, gate=None)


def test_c11_the_state_is_a_condition_of_some_calls_only() -> None:
    """Slots shared in some calls and not in others: still one network."""

    def core(velocity, zs, ts, cs):
        return sum((velocity(zs[k], zs[k - k % 2], ts[k]) * cs[k]).sum() for k in range(zs.shape[0]))

    case = simple_case(core, net=TwoSlots(4), T=6, noise=0.3)
    check(run(case, W=4, gate=None), wanted(case, W=4, time=2), 1e-10, 1e-12)


def test_c11_the_first_frame_is_a_condition_of_all_calls() -> None:
    """net(z0, z0), then net(z_k, z0): W consecutive steps all the same, or the first call a group of its own."""

    def core(velocity, zs, ts, cs):
        first, total = zs[0], zs.new_zeros(())
        for k in range(zs.shape[0]):
            total = total + (velocity(zs[k] if k else first, first, ts[k]) * cs[k]).sum()
        return total

    case = simple_case(core, net=TwoSlots(4), T=8, noise=0.3)
    apart = wanted(case, W=4, time=2, lanes=lambda k: int(k == 0))
    right_or_refused(case, [wanted(case, W=4, time=2), apart], r"(?i)slot|argument|input", W=4, gate=None)


def test_c11_one_state_for_all_calls() -> None:
    """The same tensor at every timestep; also the very same call twice."""

    def core(velocity, z, ts, cs):
        return sum((velocity(z, ts[k]) * cs[k]).sum() for k in range(4))

    plain = simple_case(linear, T=4)
    zs, ts, cs = plain.args
    case = Case(plain.net, core, (zs[0], ts, cs))
    check(run(case, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)
    twice = Case(plain.net, core, (zs[0], ts[[0, 1, 1, 3]].contiguous(), cs))
    torch._dynamo.reset()
    right_or_refused(twice, [wanted(twice, W=4), exact(twice)], r"(?i)time|lane", W=4, gate=None)


def test_c11_time_and_state_are_one_tensor() -> None:
    """net(z, z): the network of one-dimensional states reads its own time."""

    class OneSlot(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = MLP(1)

        def forward(self, z, t):
            return self.net(z, t)

    def core(velocity, zs, cs):
        return sum((velocity(zs[k], zs[k]) * cs[k]).sum() for k in range(4))

    torch.manual_seed(0)
    ts = torch.rand(4, 3, 1, dtype=D).sort(0).values
    case = Case(OneSlot().double(), core, (ts, torch.randn(4, 3, 1, dtype=D)))
    check(run(case, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


@pytest.mark.parametrize("gate", [None, "cosine"])
@pytest.mark.parametrize("how", ["arguments", "inside", "strided", "unbind"])
def test_c12_overlapping_views_of_one_buffer(how: str, gate: str | None) -> None:
    """Both gate branches read the views; they may not be passed as operands that alias."""

    def loss(velocity, now, after, ts):
        total = ts.new_zeros(())
        for k in range(5):
            total = total + ((velocity(now[k], ts[k]) + after[k]) ** 2).mean()
        return total

    def core(velocity, *args):
        if how in ("arguments", "strided"):
            return loss(velocity, *args)
        traj, ts = args
        if how == "unbind":
            parts = traj.unbind(0)
            return loss(velocity, parts[:-1], parts[1:], ts)
        return loss(velocity, traj[:-1], traj[1:], ts)

    torch.manual_seed(0)
    traj = torch.randn(6, 3, 4, dtype=D)
    views = {"arguments": (traj[:-1], traj[1:]), "inside": (traj,), "unbind": (traj,)}
    wide = torch.randn(3, 6, 8, dtype=D)
    views["strided"] = (wide.transpose(0, 1)[:-1, :, ::2], wide.transpose(0, 1)[1:, :, ::2])
    case = Case(MLP(4).double(), core, (*views[how], grid(5)))
    if gate is None:
        check(run(case, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)
    else:
        check(run(case, W=4, tau=1.5), exact(case), 1e-10, 1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_c12_velocities_written_into_one_buffer(style: str) -> None:
    def core(velocity, zs, ts, cs):
        buffer = torch.zeros_like(zs)
        for k in range(zs.shape[0]):
            buffer[k] = velocity(zs[k], ts[k])
        return ((buffer[:-1] - buffer[1:] - cs[1:]) ** 2).mean()

    case = simple_case(core, T=6, noise=0.3)
    check(run(case, style, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


# --------------------------------------------------------------------------------------------- C13 to C18


class Partly(nn.Module):
    """A parameter that nothing reads, and a frozen one in the middle."""

    def __init__(self):
        super().__init__()
        self.net, self.unused, self.middle = MLP(4), nn.Linear(2, 2), nn.Parameter(torch.randn(4))
        self.middle.requires_grad_(False)

    def forward(self, z, t):
        return self.net(z * self.middle, t)


class TiedAdapters(nn.Module):
    """Frozen ends, and one LoRA layer, its base and its adapter, used twice under two names."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(7, 16).requires_grad_(False), nn.Linear(16, 4).requires_grad_(False)
        self.first, self.second = LoRALinear(nn.Linear(16, 16)), LoRALinear(nn.Linear(16, 16))
        self.second.down, self.second.up = self.first.down, self.first.up
        self.second.base.weight = self.first.base.weight

    def forward(self, z, t):
        h = torch.tanh(self.into(torch.cat([z, embed(t, z)], dim=1)))
        return self.out(torch.tanh(self.second(torch.tanh(self.first(h)))))


NETS = {
    "tied": lambda: Tied(4),
    "frozen": lambda: frozen_first(4),
    "lora": lambda: lora(4),
    "partly": Partly,
    "tied lora": TiedAdapters,
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", NETS)
def test_c13_tied_frozen_adapted(name: str, style: str) -> None:
    torch.manual_seed(0)
    case = simple_case(coupled, net=NETS[name](), T=5, noise=0.3)
    want = wanted(case, W=4)
    entry = "backward" if style == "net" else "grad_and_value"
    got = run(case, style, entry, W=4, gate=None)
    check(got, want, 1e-10, 1e-12)
    if style == "net":
        none = {k for k, g in exact(case).grads.items() if g is None}
        frozen = {k for k, p in case.net.named_parameters() if not p.requires_grad}
        assert {k for k, g in got.grads.items() if g is None} == none | frozen


@pytest.mark.parametrize("name", ["tied", "lora", "tied lora"])
def test_c13_with_a_shut_gate(name: str) -> None:
    case = simple_case(coupled, net=NETS[name](), T=4, noise=0.3)
    check(run(case, "net", W=4, tau=1.5), exact(case), 1e-10, 1e-12)


def test_c13_frozen_parameters_among_the_params() -> None:
    """functional_call with the whole state: only some of its tensors require grad."""
    case = simple_case(coupled, net=frozen_first(4), T=5, noise=0.3)
    params = {k: p.detach().clone().requires_grad_(p.requires_grad) for k, p in case.net.named_parameters()}
    jagg_fx.transform(case.loss("params"), W=4, gate=None, **EAGER)(params, *case.args).backward()
    assert params["layers.0.weight"].grad is None
    assert relative_error({k: p.grad for k, p in params.items()}, wanted(case, W=4).grads) < 1e-10


def test_c13_a_tied_weight_under_both_names() -> None:
    """As named_parameters(remove_duplicate=False) gives it: one leaf, named twice."""
    case = simple_case(coupled, net=Tied(4), T=5, noise=0.3)
    leaf: dict = {}
    named = case.net.named_parameters(remove_duplicate=False)
    params = {k: leaf.setdefault(id(p), p.detach().clone().requires_grad_()) for k, p in named}
    jagg_fx.transform(case.loss("params"), W=4, gate=None, **EAGER)(params, *case.args).backward()
    want = wanted(case, W=4).grads
    assert relative_error({k: params[k].grad for k in want}, want) < 1e-10


def test_c13_what_trains_changes_between_steps() -> None:
    case = simple_case(quadratic, T=5, noise=0.3)
    step = jagg_fx.transform(case.loss("net"), W=4, gate=None, **EAGER)
    for frozen in ([], ["layers.0"], ["layers", "out.bias"], []):
        for name, p in case.net.named_parameters():
            p.requires_grad_(not name.startswith(tuple(frozen)))
        grads, _ = step.grad_and_value(case.net, *case.args)
        want = wanted(case, W=4).grads
        assert {k for k, g in grads.items() if g is not None} == want.keys()
        assert relative_error(grads, want) < 1e-10, frozen


class Counter(nn.Module):
    """A buffer that counts its calls: a state by any other name."""

    def __init__(self):
        super().__init__()
        self.net = MLP(4)
        self.register_buffer("calls", torch.zeros((), dtype=D))

    def forward(self, z, t):
        self.calls += 1
        return self.net(z, t)


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = MLP(4)
        self.register_buffer("mean", torch.zeros(4, dtype=D))

    def forward(self, z, t):
        self.mean.mul_(0.9).add_(0.1 * z.mean(0))
        return self.net(z - self.mean, t)


class InPlaceInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = MLP(4)

    def forward(self, z, t):
        return self.net(z.mul_(0.5), t)


def batch_norm() -> nn.Module:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.norm = MLP(4), nn.BatchNorm1d(4)

        def forward(self, z, t):
            return self.norm(self.net(z, t))

    return Net()


MUTATING = {
    "BatchNorm": batch_norm,
    "counter": Counter,
    "running mean": RunningMean,
    "in place": InPlaceInput,
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", MUTATING)
def test_c14_mutated_state_is_refused(name: str, style: str) -> None:
    case = simple_case(quadratic, net=MUTATING[name](), T=4)
    text = refused(case, r"is changed in place|changes its running statistics", style, W=4)  # our words, not torch's
    assert re.search(r"\.py:\d+", text), text


@pytest.mark.parametrize("name", ["running mean", "in place", "counter", "BatchNorm"])
def test_c14_a_refused_call_has_not_run(name: str) -> None:
    """No half of a step is left behind in the buffers or in the data."""
    case = simple_case(quadratic, net=MUTATING[name](), T=4)
    before = copy.deepcopy((case.net.state_dict(), case.args))
    step = jagg_fx.transform(case.loss("net"), W=4, **EAGER)
    with pytest.raises(jagg_fx.JaggError):
        step(case.net, *case.args)
    for k, x in case.net.state_dict().items():
        assert torch.equal(x, before[0][k]), k
    assert torch.equal(case.args[0], before[1][0])


def test_c08_inference_mode_is_refused_and_left() -> None:
    """Tensors of inference mode cannot meet a gradient; and no global mode stays on after the refusal."""

    def core(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(3):
            with torch.inference_mode():
                r = velocity(zs[k] * 0.9, ts[k])
            total = total + ((velocity(zs[k], ts[k]) - r) ** 2).mean()
        return total

    refused(simple_case(core, T=3), r"inference_mode \(before .*\.py:\d+.*no_grad", W=4)
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("kind", ["no running statistics", "eval"])
def test_c14_norms_that_change_nothing_pass(kind: str) -> None:
    net = batch_norm()
    net.norm = nn.BatchNorm1d(4, track_running_stats=kind == "eval").train(kind != "eval")
    case = simple_case(quadratic, net=net, T=5, noise=0.3)
    check(run(case, "net", W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


def test_c14_inside_a_checkpoint() -> None:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = batch_norm()

        def forward(self, z, t):
            return checkpoint(self.net, z, t, use_reentrant=False)

    refused(simple_case(quadratic, net=Net(), T=4), r"(?i)buffer|mutat|running", "net", W=4)


def random_net(kind: str) -> nn.Module:
    class Net(nn.Module):
        """Linear in its weight, so loss = <weight, gradient> if and only if one mask served both passes."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=D))
            self.drop = nn.Dropout(0.0 if kind == "p = 0" else 0.5)

        def forward(self, z, t):
            h = (z + t) @ self.weight
            if kind in ("module", "p = 0"):
                return self.drop(h)
            if kind == "function":
                return nn.functional.dropout(h, 0.5)
            if kind == "rand":
                return h * torch.rand_like(h)
            if kind == "bernoulli":
                return h * torch.bernoulli(torch.full_like(h, 0.5))
            if kind == "in a checkpoint":
                return checkpoint(lambda x: nn.functional.dropout(x, 0.5), h, use_reentrant=False)
            if kind == "gumbel":
                return h * nn.functional.gumbel_softmax(h.detach())
            if kind.endswith("_"):
                noise = torch.empty_like(h)
                return h * (noise.geometric_(0.5) if kind == "geometric_" else getattr(noise, kind)())
            return h

    return Net()


_FILLED = ["uniform_", "gumbel"]
_FILLED += [
    pytest.param(kind, marks=pytest.mark.thorough) for kind in ("exponential_", "cauchy_", "log_normal_", "geometric_")
]


@pytest.mark.parametrize(
    "kind",
    ["module", "function", "rand", "bernoulli", "in a checkpoint", "normal_", *_FILLED],
)
@pytest.mark.parametrize("options", [{"W": 4, "tau": 1.5}], ids=str)
def test_c15_randomness_is_refused_or_replayed(kind: str, options: dict) -> None:
    case = simple_case(linear, net=random_net(kind), T=4)
    try:
        got = run(case, "net", **options)
    except jagg_fx.JaggError as e:
        text = str(e).lower()
    else:
        text = ""
    if text:
        assert any(word in text for word in ("dropout", "random", "rng")), text
    else:
        assert math.isclose(
            float(got.loss), float((got.grads["weight"] * case.net.weight.detach()).sum()), rel_tol=1e-9
        )


def test_c15_dropout_of_zero_and_eval_mode_pass() -> None:
    case = simple_case(linear, net=random_net("p = 0"), T=4)
    check(run(case, "net", W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)
    case = simple_case(linear, net=random_net("module").eval(), T=4)
    torch._dynamo.reset()
    check(run(case, "net", W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


CACHE_SCRIPT = """
import json, sys
import torch
import jagg_fx
from tests.helpers import run, exact, wanted
from tests.losses import Affine, linear, simple_case
from tests.reference import relative_error

case = simple_case(linear, net=Affine(2), T=3, batch=2, dim=2, noise=1.0)
for options in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    plain = {k: v for k, v in options.items() if k in ("W", "estimator", "weights")}
    if options.get("gate", "cosine") is not None:
        plain.update(gate="cosine", tau=options["tau"])
    want = wanted(case, **plain)
    got = run(case, **options, compiler="inductor")
    error, apart = relative_error(got.grads, want.grads), relative_error(want.grads, exact(case).grads)
    print(json.dumps([options, error, apart]))
"""


@pytest.mark.inductor
def test_c16_warm_compile_cache(tmp_path: Path) -> None:
    """Two processes, one cache on disk: never the gradient of another W, tau or estimator."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    env["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "1"
    first = [{"W": 1, "gate": None}, {"W": 3, "tau": -2.0}]
    second = [{"W": 3, "gate": None}, {"W": 3, "tau": 2.0}, {"W": 3, "gate": None, "estimator": "exact"}]
    apart = []
    for options in (first, second):
        done = subprocess.run(
            [sys.executable, "-c", CACHE_SCRIPT, json.dumps(options)],
            env=env,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        assert len(lines) == len(options)
        for used, error, from_exact in lines:
            assert error < 1e-10, used
            apart.append(from_exact > 1e-3)
    assert apart == [False, True, True, False, False]  # the settings can be told apart at all


def test_c16_the_cache_is_told_every_setting() -> None:
    """What changes a graph changes the key under which compiled code is kept."""
    settings = [{}, {"W": 5}, {"tau": 0.9}, {"gate": None}, {"gate": "cosine-mean"}, {"weights": "index"}]
    settings += [{"estimator": "exact"}]
    keys = [cache_key(check_options(**s).plan) for s in settings]
    assert len(set(keys)) == len(settings)
    assert keys[0] == cache_key(check_options(compiler="eager", time=1).plan)


@pytest.mark.parametrize("kind", ["list", "closure", "numpy", "float"])
def test_c17_advantages_made_inside_the_loss(kind: str) -> None:
    """Python values become tensors in the loss: those of the second call are used in the second call."""
    numpy = pytest.importorskip("numpy")
    plain = simple_case(linear, T=4, noise=0.3)
    held = [0.0, 0.0, 0.0]

    def core(velocity, zs, ts, rewards):
        if kind == "closure":
            adv = torch.tensor(held, dtype=D)
        elif kind == "numpy":
            adv = torch.as_tensor(rewards)
        elif kind == "float":
            adv = torch.ones(3, dtype=D) * rewards
        else:
            r = torch.tensor(rewards, dtype=D)
            adv = (r - r.mean()) / r.std()
        return sum((velocity(zs[k], ts[k]).mean(1) * adv).sum() for k in range(4))

    step = None
    for values in ([1.0, 2.0, 4.0], [0.5, -3.0, 0.1], [1.0, 1.5, 9.0]):
        held[:] = values
        rewards = {"numpy": numpy.array(values), "float": values[1]}.get(kind, list(values))
        case = Case(plain.net, core, (*plain.args[:2], rewards))
        step = step or jagg_fx.transform(case.loss("params"), W=4, gate=None, **EAGER)
        grads, _ = step.grad_and_value(case.trainable(), *case.args)
        assert relative_error(grads, wanted(case, W=4).grads) < 1e-10, values


def test_c17_a_new_list_at_every_step() -> None:
    """More lists than torch captures one function by itself."""

    def core(velocity, zs, ts, rewards):
        adv = torch.tensor(rewards, dtype=D)
        return sum((velocity(zs[k], ts[k]).mean(1) * adv).sum() for k in range(3))

    plain = simple_case(linear, net=Affine(2), T=3, batch=2, dim=2, noise=1.0)
    params = plain.trainable()
    step = jagg_fx.transform(Case(plain.net, core, ()).loss("params"), W=3, gate=None, **EAGER)
    for i in range(10):
        case = Case(plain.net, core, (*plain.args[:2], [0.1 * i, 1.0 - 0.3 * i]))
        grads, _ = step.grad_and_value(params, *case.args)
        assert relative_error(grads, wanted(case, W=3).grads) < 1e-10, i


@pytest.mark.parametrize("options", [{"gate": None}, {"tau": 1.5}, {"tau": -2.0}], ids=str)
@pytest.mark.parametrize("after_a_step", [False, True])
def test_c18_two_backwards_with_retain_graph(after_a_step: bool, options: dict) -> None:
    """Also when the backward was compiled by a step that kept nothing."""
    case = grpo_case(T=5)
    step = jagg_fx.transform(case.loss("params"), W=4, **EAGER, **options)
    if after_a_step:
        step(case.trainable(), *case.args).backward()
    params = case.trainable()
    loss = step(params, *case.args)
    loss.backward(retain_graph=True)
    first = {k: p.grad.clone() for k, p in params.items()}
    for p in params.values():
        p.grad = None
    loss.backward()
    for k, p in params.items():
        assert torch.equal(p.grad, first[k])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# --------------------------------------------------------------------------------------------- C19 to C25


def conv_case(core: Callable, **kwargs) -> Case:
    torch.manual_seed(0)
    ts = grid(5)
    zs = line_states(ts, 2, 3, 4, 4)
    targets = torch.randn_like(zs)
    zs = torch.stack([z.contiguous(memory_format=torch.channels_last) for z in zs])
    return Case(Conv().double(), core, (zs, ts, targets), **kwargs)


@pytest.mark.parametrize("options", [{"gate": None}, {"tau": 1.5}], ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_c19_channels_last(style: str, options: dict) -> None:
    case = conv_case(quadratic)
    want = exact(case) if "tau" in options else wanted(case, W=4)
    got = run(case, style, "backward", W=4, **options)
    check(got, want, 1e-10, 1e-12)
    eager_net = copy.deepcopy(case.net)
    quadratic(eager_net, *case.args).backward()
    for name, p in eager_net.named_parameters():
        assert got.grads[name].stride() == p.grad.stride(), name


def test_c19_weights_with_one_channel() -> None:
    """A dimension of size one may have any stride, and kernels of float64 convolutions look at it."""
    torch.manual_seed(0)
    net = Conv(1, 2).double()
    net.first.weight.requires_grad_(False)
    net.time.weight.requires_grad_(False)  # with these trained torch takes another kernel
    zs, ts = torch.randn(4, 2, 1, 3, 3, dtype=D), torch.linspace(0.9, 0.1, 4, dtype=D)

    def core(velocity, zs, ts):
        return sum((velocity(zs[k], ts[k]) ** 2).mean() for k in range(4))

    case = Case(net, core, (zs, ts))
    check(run(case, "params", W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


def test_c19_the_loss_sees_the_strides_of_the_network() -> None:
    """A view that only channels-last memory allows."""

    def core(velocity, zs, ts, targets):
        total = zs.new_zeros(())
        for k in range(5):
            v = velocity(zs[k].contiguous(memory_format=torch.channels_last), ts[k])
            flat = v.permute(0, 2, 3, 1).view(2, -1)
            total = total + (flat * targets[k].permute(0, 2, 3, 1).reshape(2, -1)).sin().sum()
        return total

    case = conv_case(core)
    check(run(case, "net", W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


def bf16_case(where: str) -> Case:
    def core(velocity, zs, ts, targets):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            if where == "inside":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    v = velocity(zs[k], ts[k])
            elif where == "weights":
                v = velocity(zs[k].bfloat16(), ts[k])
            else:
                v = velocity(zs[k], ts[k])
            assert v.dtype == torch.bfloat16
            total = total + ((v.float() - targets[k]) ** 2).mean()
        return total

    case = simple_case(quadratic, T=8, noise=0.3, dtype=torch.float32)
    if where == "weights":
        case.net.bfloat16()
    return Case(case.net, core, case.args)


@pytest.mark.parametrize("W", [2, 8])
@pytest.mark.parametrize("where", ["inside", "around", "weights"])
def test_c20_bf16_velocity_fp32_head(where: str, W: int) -> None:
    """At W=2 as eager autograd; at W=8 as the reference, whose cotangents are summed in fp32."""
    case = bf16_case(where)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "around"):
        want = exact(case) if W == 2 else wanted(case, W=W)
        got = run(case, "net", W=W, gate=None)
    check(got, want, 1e-2, 1e-2)


def test_c20_cotangents_are_summed_in_fp32() -> None:
    """256 + 6 interior parts of 1 that add up to 3: in bf16, whose next number is 258, they would all vanish."""

    class Bias(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

        def forward(self, z, t):
            return z * t.to(z.dtype) + self.bias

    def core(velocity, zs, ts, cs):
        return sum((velocity(zs[k], ts[k]).float() * cs[k]).sum() for k in range(8))

    cs = torch.ones(8, 1, 1)
    cs[0] = 256.0
    case = Case(Bias(), core, (torch.zeros(8, 1, 1, dtype=torch.bfloat16), grid(8, dtype=torch.float32), cs))
    want = wanted(case, W=8)
    assert abs(float(want.grads["bias"]) - 263) <= 1
    check(run(case, "net", W=8, gate=None), want, 4e-3)


def test_c20_step_called_with_and_without_autocast() -> None:
    """The context of each call counts, not that of the first."""

    def core(velocity, zs, ts, targets):
        return sum(((velocity(zs[k], ts[k]).float() - targets[k]) ** 2).mean() for k in range(4))

    plain = simple_case(quadratic, T=4, noise=0.3, dtype=torch.float32)
    case = with_core(plain, core)
    step = jagg_fx.transform(case.loss("net"), W=2, **EAGER)
    want = exact(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = exact(case)
        grads, _ = step.grad_and_value(case.net, *case.args)
    assert relative_error(grads, low.grads) < 1e-2
    grads, _ = step.grad_and_value(case.net, *case.args)
    assert relative_error(low.grads, want.grads) > 1e-4  # else the next line says nothing
    assert relative_error(grads, want.grads) < 1e-5


def test_c20_shut_gate_recomputes_in_the_same_precision() -> None:
    case = bf16_case("inside")
    check(run(case, "net", W=4, tau=1.5), exact(case), 1e-2, 1e-2)


@pytest.mark.parametrize("gate", ["cosine", "cosine-mean", None])
def test_c21_every_row_clipped(gate: str | None) -> None:
    """All cotangents are zero: a zero gradient, no 0/0."""
    case = grpo_case(T=4)
    traj, sigmas, old, adv, v_ref = case.args
    old = old - 5 * adv.sign()  # ratio far above 1 where A > 0, far below where A < 0
    case = Case(case.net, case.core, (traj, sigmas, old, adv, v_ref))
    assert all(not g.any() for g in wanted(case, W=4).cotangents)
    step = jagg_fx.transform(case.loss("net"), W=4, gate=gate, **EAGER)
    grads, _ = step.grad_and_value(case.net, *case.args)
    assert all(g is not None and not g.any() for g in grads.values())  # a NaN counts as any
    assert all(math.isfinite(c) for g in step.stats.groups for c in g.cosines.values())


@pytest.mark.parametrize("gate", ["cosine", "cosine-mean"])
def test_c21_zero_velocities(gate: str) -> None:
    """A zero-initialised output layer: the cosine is 0/0, so the gate shuts, and the gradient is exact."""
    net = MLP(4)
    nn.init.zeros_(net.out.weight)
    nn.init.zeros_(net.out.bias)
    case = simple_case(quadratic, net=net, T=4, noise=0.3)
    step = jagg_fx.transform(case.loss("net"), W=4, gate=gate, **EAGER)
    grads, _ = step.grad_and_value(case.net, *case.args)
    assert relative_error(grads, exact(case).grads) < 1e-10
    (group,) = step.stats.groups
    assert not group.open
    assert all(math.isfinite(c) for c in group.cosines.values())


def test_c21_some_rows_clipped() -> None:
    case = grpo_case(T=4, clip=1e-4, batch=6)
    want = wanted(case, W=4)
    zero = [int((g.abs().sum(1) == 0).sum()) for g in want.cotangents]
    assert 0 < sum(zero) < 24
    check(run(case, W=4, gate=None), want, 1e-10, 1e-12)


class Checkpointed(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.net, self.out = MLP(dim), nn.Linear(dim, dim)

    def forward(self, z, t):
        return self.out(checkpoint(self.net, z, t, use_reentrant=False))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("options", [{"gate": None}, {"tau": 1.5}], ids=str)
def test_c22_checkpoint_inside_the_network(options: dict, style: str) -> None:
    case = simple_case(coupled, net=Checkpointed(4), T=5, noise=0.3)
    want = exact(case) if "tau" in options else wanted(case, W=4)
    check(run(case, style, W=4, **options), want, 1e-10, 1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_c22_checkpoint_around_the_call(style: str) -> None:
    def core(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            v = checkpoint(velocity, zs[k], ts[k], use_reentrant=False)
            total = total + ((v - cs[k]) ** 2).mean()
        return total / zs.shape[0]

    plain = simple_case(quadratic, T=5, noise=0.3)
    check(run(with_core(plain, core), style, W=4, gate=None), wanted(plain, W=4), 1e-10, 1e-12)


def test_c22_a_reentrant_checkpoint_around_the_call_is_refused() -> None:
    def core(velocity, zs, ts, cs):
        return sum(
            (
                ((checkpoint(velocity, z, t, use_reentrant=True) - c) ** 2).mean()
                for z, t, c in zip(zs, ts, cs, strict=True)
            ),
            zs.new_zeros(()),
        )

    with pytest.raises(jagg_fx.RefusedError, match="use_reentrant=False"):
        run(with_core(simple_case(quadratic, T=4), core), W=4, gate=None)


def test_c22_checkpoint_around_a_whole_step() -> None:
    """The velocity and its loss term are one operation of the graph: split, or refused."""

    def core(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):

            def term(z, t, c=cs[k]):
                return ((velocity(z, t) - c) ** 2).mean()

            total = total + checkpoint(term, zs[k], ts[k], use_reentrant=False)
        return total / zs.shape[0]

    plain = simple_case(quadratic, T=5, noise=0.3)
    right_or_refused(with_core(plain, core), [wanted(plain, W=4)], r"(?i)checkpoint|operator", W=4, gate=None)


def test_c22_a_checkpoint_around_two_calls() -> None:
    def core(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):

            def guided(z, t):
                return 3 * velocity(z, t) - 2 * velocity(-z, t)

            total = total + ((checkpoint(guided, zs[k], ts[k], use_reentrant=False) - cs[k]) ** 2).mean()
        return total

    refused(simple_case(core, T=5), r"holds 2 calls", W=4)


@pytest.mark.parametrize(
    ("kind", "style"),
    [("sample", "net"), ("sample", "params"), ("namedtuple", "net"), ("tuple", "params"), ("dict", "net")],
)
def test_c23_wrapped_outputs(kind: str, style: str) -> None:
    def core(velocity, zs, ts, cs):
        return quadratic(lambda z, t: read(velocity(z, t), kind), zs, ts, cs)

    plain = simple_case(quadratic, T=5, noise=0.3)
    case = Case(Returns(plain.net, kind), core, plain.args)
    check(run(case, style, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


class Output(OrderedDict):
    """A dict whose entries are attributes too, as model outputs are."""

    @property
    def sample(self):
        return self["sample"]


@pytest.mark.parametrize("style", STYLES)
def test_c23_a_dict_with_attributes(style: str) -> None:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = MLP(4)

        def forward(self, z, t):
            return Output(sample=self.net(z, t))

    def core(velocity, zs, ts, cs):
        return quadratic(lambda z, t: velocity(z, t).sample, zs, ts, cs)

    case = simple_case(core, net=Net(), T=5, noise=0.3)
    check(run(case, style, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


def test_c23_return_dict_false() -> None:
    """As diffusers calls: a keyword chooses the tuple."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = MLP(4)

        def forward(self, hidden_states, timestep, return_dict=True):
            v = self.net(hidden_states, timestep)
            return {"sample": v} if return_dict else (v,)

    def core(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            v = velocity(hidden_states=zs[k], timestep=ts[k], return_dict=False)[0]
            total = total + ((v - cs[k]) ** 2).mean()
        return total

    case = simple_case(core, net=Net(), T=5, noise=0.3)
    check(run(case, W=4, gate=None), wanted(case, W=4, time="timestep"), 1e-10, 1e-12)


@pytest.mark.parametrize("kind", ["state", "state, late", "time", "condition"])
@pytest.mark.parametrize("style", STYLES)
def test_c24_a_true_chain(kind: str, style: str) -> None:
    def core(velocity, zs, ts, cs):
        z, t, total = zs[0], ts[0], zs.new_zeros(())
        for k in range(zs.shape[0]):
            v = velocity(z, t)
            total = total + (v * cs[k]).sum()
            if k + 1 == zs.shape[0]:
                break
            z, t = zs[k + 1], ts[k + 1]
            if kind == "state" or (kind == "state, late" and k == 4):
                z = z + 0.1 * v
            elif kind == "time":
                t = t + 0.01 * torch.tanh(v.mean())
            elif kind == "condition":
                z = z / (1 + v.norm(dim=1, keepdim=True))
        return total

    text = refused(simple_case(core, T=6), r"detach", style, W=4)
    # the two steps, counted from 0 or from 1
    pairs = {("4", "5"), ("5", "6")} if kind == "state, late" else {("0", "1"), ("1", "2")}
    numbers = set(re.findall(r"\d+", text))
    assert any(a in numbers and b in numbers for a, b in pairs), text


@pytest.mark.parametrize("how", ["detach", "no_grad"])
def test_c24_a_rollout_inside_the_loss_is_fine_when_detached(how: str) -> None:
    def core(velocity, zs, ts, cs):
        z, total = zs[0], zs.new_zeros(())
        for k in range(zs.shape[0]):
            v = velocity(z, ts[k])
            total = total + ((v - cs[k]) ** 2).mean()
            if how == "detach":
                z = z - 0.1 * v.detach()
            else:
                with torch.no_grad():
                    z = z - 0.1 * v
        return total

    case = simple_case(core, T=5, noise=0.3)
    check(run(case, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


@pytest.mark.parametrize("options", [{"gate": None}, {"tau": 1.5}], ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_c25_old_log_probs_require_grad(style: str, options: dict) -> None:
    """They get a gradient of their own, as in eager autograd, and change nothing else. So do advantages."""
    case = grpo_case(T=4)
    traj, sigmas, old, adv, v_ref = case.args
    old, adv = old.clone().requires_grad_(), adv.clone().requires_grad_()
    case = Case(case.net, case.core, (traj, sigmas, old, adv, v_ref))
    want_old, want_adv = torch.autograd.grad(case.core(case.net, *case.args), [old, adv])
    got = run(case, style, "backward", W=4, **options)
    check(got, exact(case) if "tau" in options else wanted(case, W=4), 1e-10, 1e-12)
    torch.testing.assert_close(old.grad, want_old, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(adv.grad, want_adv, rtol=1e-10, atol=1e-12)


def test_c25_old_log_probs_with_a_graph_of_their_own() -> None:
    """A rollout that forgot no_grad: backward goes into it, as in eager autograd."""
    case = grpo_case(T=4)
    traj, sigmas, old, adv, v_ref = case.args
    shift = torch.zeros((), dtype=D, requires_grad=True)
    args = (traj, sigmas, old + shift, adv, v_ref)
    want_case = Case(case.net, case.core, (traj, sigmas, old, adv, v_ref))
    params = case.trainable()
    jagg_fx.transform(case.loss("params"), W=4, gate=None, **EAGER)(params, *args).backward()
    assert relative_error({k: p.grad for k, p in params.items()}, wanted(want_case, W=4).grads) < 1e-10
    (want,) = torch.autograd.grad(case.core(case.net, traj, sigmas, old + shift, adv, v_ref), [shift])
    torch.testing.assert_close(shift.grad, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("detached", [True, False])
def test_c25_old_is_the_new(detached: bool) -> None:
    """ratio = exp(logp - logp): without the detach the gradient is zero, and stays zero."""

    def core(velocity, traj, sigmas, old, adv, v_ref):
        total = traj.new_zeros(())
        for k in range(4):
            v = velocity(traj[k], sigmas[k])
            mean, std = flow_sde(v, traj[k], sigmas[k], sigmas[k + 1], 0.7)
            logp = gaussian_logp(traj[k + 1], mean, std)
            ratio = torch.exp(logp - (logp.detach() if detached else logp))
            total = total + clipped(ratio, adv, 0.2)
        return total

    plain = grpo_case(T=4)
    case = Case(plain.net, core, plain.args)
    got = run(case, W=4, gate=None)
    if detached:
        check(got, wanted(case, W=4), 1e-10, 1e-12)
    else:
        assert all(float(g.abs().max()) < 1e-12 for g in got.grads.values())


def test_c25_one_tensor_given_twice() -> None:
    """Old and reference values passed as one tensor."""

    def core(velocity, zs, ts, a, b):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            v = velocity(zs[k], ts[k])
            total = total + ((v - a[k]) ** 2).mean() + (v * b[k]).sum()
        return total

    plain = simple_case(quadratic, T=5, noise=0.3)
    zs, ts, a = plain.args
    case = Case(plain.net, core, (zs, ts, a, a))
    want = reference(core, case.function, case.trainable(), case.args, W=4)
    check(run(case, W=4, gate=None), want, 1e-10, 1e-12)
