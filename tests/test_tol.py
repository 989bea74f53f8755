"""tol=: which backwards run, the gradient they give, and what keeps the prediction honest.

The choice is computed a second time here, in plain autograd and fp64, by trying one price after the other.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections import deque
from itertools import pairwise

import pytest
import torch
from jagg_fx.passes.verify import _outputs_are_apart, verify
from torch import Tensor

import jagg_fx
from jagg_fx import _torch
from jagg_fx.control import Ratio

from .helpers import EAGER, check, run, wanted
from .losses import MLP, Case, Squashed, grid, grpo_case, linear, quadratic, simple_case
from .reference import relative_error

D = torch.float64
WIDE, MIXED, NONE = 5.0, 0.3, 1e-4  # limits of the predicted error: everything merged, some of it, nothing


def made(case: Case, limit: float = WIDE, **options):
    """A step whose predicted error may be `limit`, whatever its tol."""
    step = jagg_fx.transform(case.loss("net"), **{"tol": 0.5, "audit_every": None, **EAGER, **options})
    allow(step, limit)
    return step


def allow(step, limit: float) -> None:
    step.backend.ratio.measured = deque(
        [step.options.plan.tol / (2 * limit)], maxlen=19
    )  # one measurement counts twice


def gradient(step, case: Case) -> dict[str, Tensor]:
    return step.grad_and_value(case.net, *case.args)[0]


def ran(step) -> set[int]:
    return {c for choice in step.stats.choices for c in choice.runs}


# --------------------------------------------------------------------------- the same, in plain autograd


def halves(a: int, b: int) -> list[tuple[int, int]]:
    """Everything that a to b can be cut into, itself first."""
    middle = (a + b) // 2
    return [(a, b), *halves(a, middle), *halves(middle, b)] if b - a > 1 else []


def matrix(kept: set[int]):
    """C of linear interpolation between the kept steps, from the times (n, rows)."""

    def of(times: Tensor) -> Tensor:
        n, rows = times.shape
        C = torch.zeros(n, n, rows, dtype=D)
        for k in range(n):
            a, b = max(j for j in kept if j <= k), min(j for j in kept if j >= k)
            mu = (times[k] - times[a]) / (times[b] - times[a]) if a != b else torch.zeros(rows, dtype=D)
            C[a, k] += 1 - mu
            C[b, k] += mu
        return C

    return of


def estimate(case: Case, kept: set[int]):
    return wanted(case, matrix=matrix(kept))


def head(case: Case, W: int) -> tuple[list[tuple[int, int]], list[Tensor], Tensor]:
    """Of every span its error in the last layer's weight, and that weight's gradient."""
    found = wanted(case, W=1)
    calls, g, h = found.calls, found.cotangents, []
    hook = case.net.out.register_forward_pre_hook(lambda module, args: h.append(args[0].detach()))
    with torch.no_grad():
        for c in calls:
            case.net(*c.args)
    hook.remove()
    ends = sorted({*range(0, len(calls), W), len(calls) - 1})
    cut = [s for a, b in pairwise(ends) for s in halves(a, b)]
    errors = []
    for a, b in cut:
        error = torch.zeros_like(case.net.out.weight)
        for k in range(a + 1, b):
            t = [calls[j].time.reshape(-1, 1) for j in (a, k, b)]
            mu = (t[1] - t[0]) / (t[2] - t[0])
            error = error + g[k].T @ (h[k] - (1 - mu) * h[a] - mu * h[b])
        errors.append(error.detach())
    return cut, errors, sum(x.T @ y for x, y in zip(g, h, strict=True))


def choice(case: Case, W: int, limit: float) -> tuple[set[int], float]:
    """The steps that run, and the predicted error."""
    cut, errors, whole = head(case, W)
    n = len(case.args[1])
    price = {s: float(e.square().sum()) / (s[1] - s[0] - 1) for s, e in zip(cut, errors, strict=True)}
    best: tuple[set[int], float] = (set(range(n)), 0.0)
    for p in sorted(price.values()):
        merged = [s for s in cut if price[s] <= p]
        merged = [s for s in merged if not any(o != s and o[0] <= s[0] and s[1] <= o[1] for o in merged)]
        chosen = [e for s, e in zip(cut, errors, strict=True) if s in merged]
        predicted = max(float(sum(chosen).norm()), math.sqrt(sum(float(e.square().sum()) for e in chosen)))
        predicted /= float(whole.norm())
        kept = set(range(n)) - {k for a, b in merged for k in range(a + 1, b)}
        if predicted <= limit and len(kept) < len(best[0]):
            best = kept, predicted
    return best


# ------------------------------------------------------------------------------------------ the gradient


@pytest.mark.parametrize("T", [9, *(pytest.param(T, marks=pytest.mark.thorough) for T in (11, 19))])
def test_every_outcome_of_one_compiled_graph(T: int) -> None:
    case = simple_case(quadratic, T=T, noise=0.3)
    built: list[str] = []
    step = made(case)
    step.backend._watch = lambda name, joint: built.append(name)
    outcomes = set()
    for limit in (WIDE, MIXED, MIXED / 3, NONE):
        allow(step, limit)
        got = gradient(step, case)
        kept, predicted = choice(case, 8, limit)
        assert ran(step) == kept
        assert step.stats.predicted == pytest.approx(predicted, rel=1e-5, abs=1e-9)
        assert relative_error(got, estimate(case, kept).grads) < 1e-12
        outcomes.add(len(kept))
    assert min(outcomes) == len({*range(0, T, 8), T - 1})  # the regions whole
    assert max(outcomes) == T  # exact
    assert len(outcomes) > 2
    assert built.count("slim") == 1


def test_each_half_by_itself() -> None:
    """States are off the line in the second half alone: only that one is halved on."""
    ts = grid(9)
    case = simple_case(quadratic, ts=ts, noise=0.0)
    zs = case.args[0].clone()
    zs[5:8] += 2 * torch.randn(zs[5:8].shape, dtype=D)
    case = Case(case.net, case.core, (zs, *case.args[1:]))
    step = made(case, 0.05)
    got = gradient(step, case)
    assert ran(step) & {1, 2, 3} == set()
    assert ran(step) > {0, 4, 8}
    check(run_of(got, case, step), estimate(case, ran(step)), 1e-12)
    (found,) = step.stats.choices
    assert (0, 4) in [m[:2] for m in found.merged]
    assert (0, 8) in [m[:2] for m in found.rejected]
    text = repr(step.stats)
    assert "calls 0-8: 0-4 as one (" in text
    assert "too wide: 0-8 (" in text


def run_of(grads, case: Case, step):
    from .helpers import Result

    return Result(grads, step(case.net, *case.args).detach())


def test_values_are_the_errors_of_the_last_layer() -> None:
    case = simple_case(quadratic, T=11, noise=0.3)
    step = made(case, NONE)
    gradient(step, case)
    cut, errors, whole = head(case, 8)
    want = {s: float(e.norm() / whole.norm()) for s, e in zip(cut, errors, strict=True)}
    got = {(a, b): x for found in step.stats.choices for a, b, x in found.rejected}
    assert got == pytest.approx(want, rel=1e-5)  # a table of floats


@pytest.mark.parametrize("W", [4, *(pytest.param(W, marks=pytest.mark.thorough) for W in (2, 16))])
def test_W_is_the_widest_span(W: int) -> None:
    case = simple_case(quadratic, T=11, noise=0.1)
    step = made(case, WIDE, W=W)
    got = gradient(step, case)
    assert ran(step) == {*range(0, 11, W), 10}
    assert relative_error(got, estimate(case, ran(step)).grads) < 1e-12


def test_times_per_row() -> None:
    ts = grid(9)[:, None] - 0.02 * torch.rand(9, 3, dtype=D)
    case = simple_case(quadratic, ts=ts, noise=0.3)
    step = made(case, MIXED / 3)
    got = gradient(step, case)
    kept, _ = choice(case, 8, MIXED / 3)
    assert ran(step) == kept
    assert 2 < len(kept) < 9
    assert relative_error(got, estimate(case, kept).grads) < 1e-12


@pytest.mark.parametrize("options", [{"weights": "index"}, {"order": "time"}])
def test_other_weights_and_orders(options: dict) -> None:
    case = simple_case(quadratic, T=9, noise=0.3)
    want = case
    if "order" in options:
        zs, ts, us = case.args
        shuffled = torch.randperm(9)
        case = Case(case.net, case.core, (zs[shuffled], ts[shuffled], us[shuffled]))
    step = made(case, MIXED, **options)
    got = gradient(step, case)
    kept, _ = choice(want, 8, MIXED)  # even times: index and time agree
    assert ran(step) == kept
    assert relative_error(got, estimate(want, kept).grads) < 1e-12


def test_policy_gradients_through_every_entry() -> None:
    case = grpo_case(T=9)
    for entry in ("backward", "func"):
        kept, _ = choice(case, 8, 0.2 / Ratio.FIRST)
        assert 2 < len(kept) < 9
        check(run(case, "params", entry, tol=0.2, audit_every=None), estimate(case, kept), 1e-10, 1e-12)


def test_in_a_compile_pipeline() -> None:
    case = simple_case(quadratic, T=9, noise=0.3)
    kept, _ = choice(case, 8, 0.3 / Ratio.FIRST)
    assert 2 < len(kept) < 9
    check(run(case, "net", "backend", tol=0.3), estimate(case, kept), 1e-12)


def test_two_lanes_share_one_tolerance() -> None:
    def guided(velocity, zs, ts, us):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            t = ts[k]
            total = total + ((1.5 * velocity(zs[k], t) - 0.5 * velocity(zs[k] + 1, t) - us[k]) ** 2).mean()
        return total

    case = simple_case(guided, T=9, noise=0.3)
    step = made(case, WIDE)
    got = gradient(step, case)
    assert ran(step) == {0, 1, 16, 17}
    merged = wanted(case, lanes=lambda k: k % 2, matrix=matrix({0, 8}))
    assert relative_error(got, merged.grads) < 1e-12
    allow(step, 0.1)
    gradient(step, case)
    errors = [x for found in step.stats.choices for *_, x in found.merged]
    assert math.sqrt(sum(x**2 for x in errors)) <= step.stats.predicted * (1 + 1e-5) <= 0.1 * (1 + 1e-5)


# ------------------------------------------------------------------------------------------------- safety


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_cotangent_that_is_not_finite_runs_every_backward(bad: float) -> None:
    case = simple_case(linear, T=9, noise=0.1)
    directions = case.args[2].clone()
    directions[3, 0, 1] = bad
    case = Case(case.net, case.core, (*case.args[:2], directions))
    step = made(case, WIDE)
    got = gradient(step, case)
    assert ran(step) == set(range(9))
    want = wanted(case, W=1).grads
    for name, g in got.items():
        torch.testing.assert_close(g, want[name], equal_nan=True, rtol=1e-10, atol=1e-12)


def test_an_infinite_tangent_runs_every_backward() -> None:
    """The choice is made at the tangent 1; a scaler that overflows is seen in the backward."""
    case = simple_case(linear, T=9, noise=0.1)
    step = made(case, WIDE)
    step(case.net, *case.args).backward(torch.tensor(float("inf"), dtype=D))
    got = {n: p.grad.clone() for n, p in case.net.named_parameters()}
    case.net.zero_grad()
    case.core(case.net, *case.args).backward(torch.tensor(float("inf"), dtype=D))
    for name, p in case.net.named_parameters():
        torch.testing.assert_close(got[name], p.grad, equal_nan=True)


def test_times_out_of_order_run_every_backward() -> None:
    ts = grid(9).clone()
    ts[3], ts[4] = ts[4].clone(), ts[3].clone()
    case = simple_case(quadratic, ts=ts, noise=0.1)
    step = made(case, WIDE)
    got = gradient(step, case)
    assert ran(step) == set(range(9))
    assert relative_error(got, wanted(case, W=1).grads) < 1e-12


def test_small_gradients_do_not_vanish_in_the_choice() -> None:
    case = simple_case(quadratic, T=9, noise=0.3, dtype=torch.float32)
    loss_fn = case.loss("net")
    step = jagg_fx.transform(lambda *a: 1e-25 * loss_fn(*a), tol=0.5, audit_every=None, **EAGER)
    allow(step, NONE)
    step(case.net, *case.args)
    assert ran(step) == set(range(9))
    assert step.stats.predicted == 0


def test_a_network_without_a_last_layer_is_refused() -> None:
    with pytest.raises(jagg_fx.RefusedError, match=r"last layer.*tanh"):
        run(simple_case(quadratic, net=Squashed(4), T=9), "net", tol=0.1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tol": 0}, "between 0 and 1"),
        ({"tol": 1.0}, "between 0 and 1"),
        ({"tol": True}, "between 0 and 1"),
        ({"tol": "0.1"}, "between 0 and 1"),
        ({"tol": float("nan")}, "between 0 and 1"),
        ({"tol": 0.1, "gate": "head"}, "gate='head' has no meaning"),
        ({"tol": 0.1, "gate": None}, "gate=None has no meaning"),
        ({"tol": 0.1, "tau": 0.5}, "tau=0.5 has no meaning"),
        ({"tol": 0.1, "estimator": "debiased"}, "estimator='debiased' has no meaning"),
        ({"tol": 0.1, "W": 0}, "at least one step"),
        ({"tol": 0.1, "W": 2.0}, "must be an int"),
    ],
)
def test_options_that_cannot_be_taken(options: dict, match: str) -> None:
    with pytest.raises(jagg_fx.OptionError, match=match):
        jagg_fx.transform(quadratic, **options)


def test_defaults() -> None:
    plain, tight = (jagg_fx.transform(quadratic, **o).options for o in ({}, {"tol": 0.1}))
    assert (plain.plan.W, plain.plan.tol, plain.audit_every) == (4, None, None)
    assert (tight.plan.W, tight.plan.tol, tight.audit_every) == (8, 0.1, 100)
    assert jagg_fx.transform(quadratic, 4, tol=0.1).options.plan.W == 4
    assert jagg_fx.transform(quadratic, tol=0.1, audit_every=None).options.audit_every is None


def test_a_tolerance_that_saves_nothing_is_said() -> None:
    case = simple_case(quadratic, T=9, noise=1.0)
    step = made(case, 1e-9)
    step(case.net, *case.args)
    with pytest.warns(jagg_fx.JaggWarning, match=r"100% of the backwards ran"):
        step(case.net, *case.args)


# ------------------------------------------------------------------------------------------------ audits


def test_audits_measure_what_the_step_did_and_set_the_limit() -> None:
    case = simple_case(quadratic, T=9, noise=0.3)
    step = jagg_fx.transform(case.loss("net"), tol=0.3, audit_every=6, **EAGER)
    assert step.backend.ratio.value == Ratio.FIRST
    for k in range(8):
        limit = step.backend.ratio.limit(0.3)
        got = gradient(step, case)
        error = relative_error(got, wanted(case, W=1).grads)
        assert ran(step) == choice(case, 8, limit)[0]
        if k in (0, 1, 2, 4, 6):  # the first ones at powers of two, then every 6th
            at, audit = step.stats.audits[-1]
            assert at == k
            assert audit.relative_error == pytest.approx(error, rel=1e-6)
            assert audit.predicted == pytest.approx(step.stats.predicted, rel=1e-5)
            assert step.backend.ratio.measured[-1] == pytest.approx(error / audit.predicted)
    assert len(step.stats.audits) == 5
    assert "last layer" in str(audit)


def test_state_and_copies() -> None:
    case = simple_case(quadratic, T=9, noise=0.3)
    step = made(case, MIXED)
    want = gradient(step, case)
    state = copy.deepcopy(step.state_dict())
    other = pickle.loads(pickle.dumps(step)) if _picklable(step) else copy.copy(step)
    assert other.options == step.options
    assert other.backend.ratio.value == Ratio.FIRST
    for _ in range(2):  # a state takes the place of what was measured before
        other.load_state_dict(state)
        assert other.backend.ratio.measured == step.backend.ratio.measured
    assert relative_error(gradient(other, case), want) < 1e-12
    with pytest.raises(jagg_fx.OptionError, match="no state of a step"):
        jagg_fx.transform(quadratic).load_state_dict(state)


def _picklable(step) -> bool:
    try:
        pickle.dumps(step)
    except (AttributeError, pickle.PicklingError):  # the loss is a closure
        return False
    return True


# ------------------------------------------------------------------------------------------- Inductor, verifier


@pytest.mark.inductor
def test_under_inductor() -> None:
    case = simple_case(quadratic, net=MLP(4), T=9, noise=0.3)
    step = made(case, compiler="inductor")
    for limit in (WIDE, MIXED, NONE):
        allow(step, limit)
        got = gradient(step, case)
        kept, _ = choice(case, 8, limit)
        assert ran(step) == kept
        assert relative_error(got, estimate(case, kept).grads) < 1e-10


# ----------------------------------------------------------------------------------------- broken rewrites


class _Enough(Exception):
    pass


def _swap_flags(joint) -> None:
    a, b = list(joint.runs)[:2]
    joint.runs[a], joint.runs[b] = joint.runs[b], joint.runs[a]


def _steps(joint):
    return [m for n, m in joint.gm.named_children() if n.startswith("jagg_step")]


def _ones(joint) -> None:
    (cond,) = _steps(joint)[0].graph.find_nodes(op="call_function", target=_torch.cond)
    skip = getattr(_steps(joint)[0], cond.args[2].target)
    next(n for n in skip.graph.nodes if n.op == "call_function").update_arg(1, 1.0)


def _twice(joint) -> None:
    (cond,) = _steps(joint)[0].graph.find_nodes(op="call_function", target=_torch.cond)
    branch = getattr(_steps(joint)[0], cond.args[1].target)
    node = next(n for n in branch.graph.nodes if n.target is _torch.invoke_subgraph)
    with branch.graph.inserting_after(node):
        branch.graph.node_copy(node, lambda n: n)


def _forgotten(joint) -> None:
    joint.runs[max(joint.runs) + 100] = joint.runs[min(joint.runs)]


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (_swap_flags, "another call's flag"),
        (_ones, "else than zeros"),
        (_twice, "not run one"),
        (_forgotten, "no branch"),
    ],
)
def test_the_verifier_catches_a_broken_skip(broken, what: str) -> None:
    case = simple_case(quadratic, T=4)
    step = made(case)
    found: list[str] = []

    def watch(name: str, joint) -> None:
        if name == "branch":
            broken(joint)
            try:
                verify(joint, name)
            except jagg_fx.VerifyError as error:
                found.append(str(error))
            raise _Enough

    step.backend._watch = watch
    with pytest.raises(Exception, match=r"."):
        step(case.net, *case.args)
    assert len(found) == 1
    assert what in found[0]


def test_no_value_of_a_call_is_returned_twice() -> None:
    """The input of the last layer is read by the choice and saved for the backward: one buffer, or Inductor writes
    over it."""
    case = simple_case(quadratic, T=4)
    step = made(case)
    found: dict[str, str | None] = {}
    step.backend._watch = lambda name, joint: found.update({name: _outputs_are_apart(joint)})
    step(case.net, *case.args)
    assert "twice" in str(found["prune"])
    assert found["slim"] is None


def test_explain_shows_the_fewest_backwards() -> None:
    case = simple_case(quadratic, T=4)
    report = jagg_fx.explain(case.loss("net"), case.net, *case.args, tol=0.1)
    assert [s.backward_calls for s in report.sides] == [4, 2]
    assert "predicted error would pass tol=0.1" in str(report)
