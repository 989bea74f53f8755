"""A step with memory: endpoints plus the running mean of what was measured, in every training loop. Regular audits."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import jagg_fx
from jagg_fx.estimators import Correction, Debiased, Memory

from .losses import MLP
from .reference import relative_error
from .test_drawn import OWN, batch, exact, gradient, head, loss, mlp

pytestmark = pytest.mark.filterwarnings("ignore::jagg_fx.JaggWarning")  # wide groups
Grads = dict[str, Tensor]


def corrections(loss_fn: Any, net: Any, batches: list, steps: list[int], seed: int = 0) -> list[Grads]:
    """What each of these optimiser steps measures, by the estimator alone."""
    step, found = jagg_fx.transform(loss_fn, W=4, estimator=Correction(), seed=seed, **OWN), []
    for number in steps:
        step.backend.clock.step = number
        found.append(gradient(step, net, *batches[number]))
    return found


def bias(cs: list[Grads], beta: float, shrink: bool) -> Grads:
    """b after these measurements, by its formula."""
    names = list(cs[0])
    flat = [torch.cat([c[n].flatten() for n in names]) for c in cs]
    b, cb, bb = torch.zeros_like(flat[0]), 0.0, 0.0
    for i, c in enumerate(flat):
        if i:
            cb, bb = beta * cb + (1 - beta) * float(c @ b), beta * bb + (1 - beta) * float(b @ b)
        b = sum((1 - beta) * beta ** (i - j) * flat[j] for j in range(i + 1)) / (1 - beta ** (i + 1))
    if shrink:
        b = (min(1.0, max(0.0, cb / bb)) if len(flat) >= 4 else 0.0) * b
    parts = iter(b.split([cs[0][n].numel() for n in names]))
    return {n: next(parts).reshape(cs[0][n].shape) for n in names}


def plus(a: Grads, b: Grads) -> Grads:
    return {n: a[n] + b[n] for n in a}


def times(a: Grads, x: float) -> Grads:
    return {n: x * v for n, v in a.items()}


def ends(loss_fn: Any, net: Any, *args: Any) -> Grads:
    return gradient(jagg_fx.transform(loss_fn, W=4, **OWN), net, *args)


def grads(net: nn.Module) -> dict[str, Tensor | None]:
    return {n: p.grad for n, p in net.named_parameters()}


@pytest.mark.parametrize("estimator", [Memory(1, 0.7), Memory(2, 0.6, shrink=False), "memory"], ids=repr)
def test_endpoints_plus_the_memory(estimator: Any) -> None:
    """At each of nine steps, on other batches with other weights."""
    net, batches = mlp(), [batch(8, seed=i) for i in range(9)]
    step = jagg_fx.transform(loss, W=4, estimator=estimator, seed=5, **OWN)
    plain = jagg_fx.transform(loss, W=4, **OWN)
    measure = jagg_fx.transform(loss, W=4, estimator=Correction(), seed=5, **OWN)
    known, cs, differ = step.options.plan.estimator, [], 0.0
    for number, args in enumerate(batches):
        if number % known.every == 0:
            measure.backend.clock.step = number
            cs.append(gradient(measure, net, *args))
        got, value = step.grad_and_value(net, *args)
        without = gradient(plain, net, *args)
        assert relative_error(got, plus(without, bias(cs, known.beta, known.shrink))) < 1e-9
        torch.testing.assert_close(value, loss(net, *args).detach())
        assert step.backend.clock.step == number + 1
        differ = max(differ, relative_error(got, without))
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.97)
    assert step.memory.measured == len(cs)
    assert (differ > 1e-3) == (estimator != "memory")  # which has measured once: no guess of the slope yet


@pytest.fixture
def told() -> tuple[Any, nn.Module, tuple, Grads]:
    """A memory with a few measurements, not due for a while; and the gradient of its next steps."""
    net, args = mlp(), batch(8)
    step = jagg_fx.transform(loss, W=4, estimator=Memory(100, 0.5, shrink=False), **OWN)
    gradient(step, net, *args)
    b = bias(corrections(loss, net, [args], [0]), 0.5, False)
    without = ends(loss, net, *args)
    assert relative_error(without, plus(without, b)) > 1e-3
    return step, net, args, plus(without, b)


def test_an_audit_takes_the_bias_in(told: tuple) -> None:
    """Of the whole, and of each parameter; also the regular audits, of the step that they belong to."""
    step, net, args, want = told
    true = exact(net, *args)
    audit = step.audit(net, *args)
    assert audit.relative_error == pytest.approx(relative_error(want, true), rel=1e-9)
    for name, (error, _) in audit.parameters.items():
        assert error == pytest.approx(float((want[name] - true[name]).norm() / true[name].norm()), rel=1e-6)
    assert step.memory.measured == 1
    assert step.backend.clock.step == 1

    regular = jagg_fx.transform(loss, W=4, estimator=Memory(1, 0.5, shrink=False), audit_every=1, **OWN)
    got = gradient(regular, net, *args)  # measures, and adds at once what it measured
    assert regular.stats.audits[-1][1].relative_error == pytest.approx(relative_error(got, true), rel=1e-9)


def test_in_a_training_loop(told: tuple) -> None:
    """Scaling, accumulation, clipping, hooks: of the sum of both parts."""
    step, net, args, want = told
    (1000 * step(net, *args)).backward()
    assert relative_error(grads(net), times(want, 1000)) < 1e-9
    net.zero_grad()

    (step(net, *args) / 2).backward()
    (step(net, *args) / 4).backward()
    assert relative_error(grads(net), times(want, 0.75)) < 1e-9
    net.zero_grad()

    (step(net, *args) + step(net, *args)).backward()
    assert relative_error(grads(net), times(want, 2)) < 1e-9
    net.zero_grad()

    norm = torch.cat([g.flatten() for g in want.values()]).norm()
    step(net, *args).backward()
    torch.testing.assert_close(nn.utils.clip_grad_norm_(net.parameters(), 0.01), norm)
    assert relative_error(grads(net), times(want, 0.01 / float(norm))) < 1e-4
    net.zero_grad()

    seen: list[tuple[str, Tensor]] = []
    hooks = [p.register_hook(lambda g, n=n: seen.append((n, g.clone()))) for n, p in net.named_parameters()]
    step(net, *args).backward()
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(want)  # one gradient each
    assert relative_error(dict(seen), want) < 1e-9


@pytest.mark.thorough
def test_with_a_grad_scaler(told: tuple) -> None:
    step, net, args, want = told
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=1)
    for _ in range(2):
        optimiser.zero_grad()
        with torch.no_grad():
            for n, p in net.named_parameters():
                p.copy_(before[n])
        scaler.scale(step(net, *args)).backward()
        scaler.unscale_(optimiser)
        scaler.step(optimiser)
        scaler.update()
        assert relative_error(grads(net), want) < 1e-6
    assert scaler.get_scale() == 2048.0
    assert relative_error({n: before[n] - p for n, p in net.named_parameters()}, times(want, 0.1)) < 1e-6


def test_an_overflow_leaves_the_memory_as_it_is() -> None:
    net, args = mlp(), batch(8)
    step = jagg_fx.transform(loss, W=4, estimator=Memory(1, 0.5, shrink=False), **OWN)
    gradient(step, net, *args)
    (float("inf") * step(net, *args)).backward()  # a loss scale that is too large
    broken = (args[0], args[1], args[2] * float("inf"))
    gradient(step, net, *broken)
    b = step.memory.value()
    assert all(bool(x.isfinite().all()) for x in b)
    assert all(bool(g.isfinite().all()) for g in gradient(step, net, *args).values())


def test_aux_and_entries() -> None:
    """The same gradient from a dict of parameters, from torch.func.grad and from backward, with aux."""

    def with_aux(params, net, zs, ts, cs):
        vs = [functional_call(net, params, (zs[k], ts[k])) for k in range(len(ts))]
        return head(vs, cs), {"last": vs[-1]}

    def whole(net, *args):
        return loss(net, *args)

    net, args = mlp(), batch(8)
    params = {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()}
    b = bias(corrections(whole, net, [args], [0]), 0.5, False)
    want = plus(ends(whole, net, *args), b)

    def new():
        return jagg_fx.transform(with_aux, W=4, estimator=Memory(50, 0.5, False), has_aux=True, **OWN)

    step = new()
    got, (value, aux) = step.grad_and_value(params, net, *args)
    assert relative_error(got, want) < 1e-9
    torch.testing.assert_close(value, loss(net, *args).detach())
    torch.testing.assert_close(aux["last"], net(args[0][-1], args[1][-1]).detach())

    got, aux = torch.func.grad(step, has_aux=True)(params, net, *args)
    assert relative_error(got, want) < 1e-9
    torch.testing.assert_close(aux["last"].detach(), net(args[0][-1], args[1][-1]).detach())
    value, aux = step(params, net, *args)
    value.backward()
    assert relative_error({n: p.grad for n, p in params.items()}, want) < 1e-9

    first = torch.func.grad(new(), has_aux=True)(params, net, *args)[0]  # measures under torch.func too
    assert relative_error(first, want) < 1e-9


class Spare(nn.Module):
    """One layer is frozen, one is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP(4, 8, 2)
        self.net.layers[0].requires_grad_(False)
        self.unread = nn.Linear(4, 4)

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        return self.net(z, t)


def test_frozen_and_unread_parameters_keep_none() -> None:
    torch.manual_seed(0)
    net, args = Spare().double(), batch(8)
    step = jagg_fx.transform(loss, W=4, estimator=Memory(2, 0.5, False), **OWN)
    plain = ends(loss, net, *args)
    none = {n for n, g in plain.items() if g is None}
    assert none == {"net.layers.0.weight", "net.layers.0.bias", "unread.weight", "unread.bias"}
    for _ in range(3):
        net.zero_grad()
        step(net, *args).backward()
        assert {n for n, g in grads(net).items() if g is None} == none


def test_unread_parameters_keep_none_after_a_restart() -> None:
    torch.manual_seed(0)
    net, args = Spare().double(), batch(8)
    step, other = (jagg_fx.transform(loss, W=4, estimator=Memory(3, 0.5, False), **OWN) for _ in range(2))
    step(net, *args).backward()
    none = {n for n, g in grads(net).items() if g is None}
    other.load_state_dict(step.state_dict())
    net.zero_grad()
    other(net, *args).backward()
    assert {n for n, g in grads(net).items() if g is None} == none


def test_a_loss_that_reads_the_parameters_besides() -> None:
    """Weight decay in the loss is not a part of the bias."""

    def decayed(net, zs, ts, cs):
        return loss(net, zs, ts, cs) + 0.5 * sum((p**2).sum() for p in net.parameters())

    net, args = mlp(), batch(8)
    step = jagg_fx.transform(decayed, W=4, estimator=Memory(1, 0.5, False), **OWN)
    want = plus(ends(decayed, net, *args), bias(corrections(loss, net, [args], [0]), 0.5, False))
    assert relative_error(gradient(step, net, *args), want) < 1e-9


@pytest.mark.thorough
@pytest.mark.parametrize("T", [6, 9])
def test_ragged_groups_have_no_bias(T: int) -> None:
    net, args = mlp(), batch(T)
    step = jagg_fx.transform(loss, W=4, estimator=Memory(1, 0.5, False), **OWN)
    want = plus(ends(loss, net, *args), bias(corrections(loss, net, [args], [0]), 0.5, False))
    assert relative_error(gradient(step, net, *args), want) < 1e-9


@pytest.mark.thorough
@pytest.mark.parametrize("W", [3, 4])
def test_the_memory_brings_endpoints_nearer_to_exact(W: int) -> None:
    """T=7: with W=4 the last group has three steps."""
    net, args = mlp(), batch(7)
    step = jagg_fx.transform(loss, W=W, estimator=Memory(1, 0.95, False), **OWN)
    for _ in range(60):
        got = gradient(step, net, *args)
    want = exact(net, *args)
    without = gradient(jagg_fx.transform(loss, W=W, **OWN), net, *args)
    assert relative_error(got, want) < 0.5 * relative_error(without, want)


def test_state_round_trip() -> None:
    net, args = mlp(), batch(8)

    def new():
        return jagg_fx.transform(loss, W=4, estimator=Memory(2, 0.5), **OWN)

    step, other = new(), new()
    for _ in range(9):
        gradient(step, net, *args)
    file = io.BytesIO()
    torch.save(step.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert other.memory.measured == 5
    for _ in range(3):
        assert relative_error(gradient(other, net, *args), gradient(step, net, *args)) == 0
    assert other.memory.counters() == step.memory.counters()


def test_without_gradient_nothing_goes_on() -> None:
    net, args = mlp(), batch(8)
    step = jagg_fx.transform(loss, W=4, estimator=Memory(1, 0.5, False), audit_every=1, **OWN)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(step(net, *args), loss(net, *args))
    assert step.backend.clock.step == 0
    assert step.memory.measured == 0
    assert not step.stats.audits


def test_grad_and_value_leaves_grad_as_it_is(told: tuple) -> None:
    step, net, args, want = told
    for p in net.parameters():
        p.grad = torch.full_like(p, 7.0)
    assert relative_error(gradient(step, net, *args), want) < 1e-9
    assert all(bool((p.grad == 7).all()) for p in net.parameters())


# ------------------------------------------------------------------------------------------------ audits


def run(estimator: Any, audit_every: int | None, loss_fn: Any = loss, n: int = 7) -> tuple[Any, list[Grads], Tensor]:
    torch.manual_seed(0)
    net = mlp()
    torch.manual_seed(1)
    step = jagg_fx.transform(loss_fn, W=4, estimator=estimator, audit_every=audit_every, **OWN)
    found = []
    for i in range(n):
        net.zero_grad()
        value = step(net, *batch(8, seed=i))
        assert all(p.grad is None for p in net.parameters())
        value.backward()
        found.append(grads(net))
    return step, found, torch.get_rng_state()


@pytest.mark.thorough
@pytest.mark.parametrize("estimator", ["endpoints", "debiased", Debiased(0.5), Memory(2, 0.5, False)], ids=repr)
def test_audits_at_their_steps(estimator: Any) -> None:
    audited, with_, after = run(estimator, 3)
    plain, without, state = run(estimator, None)
    assert [n for n, _ in audited.stats.audits] == [0, 3, 6]
    assert not plain.stats.audits
    for a, b in zip(with_, without, strict=True):
        assert relative_error(a, b) == 0
    assert torch.equal(after, state)
    assert str(audited.stats).count("audit of step") == 3


@pytest.mark.parametrize("estimator", ["endpoints", "knots"])
def test_an_audit_has_the_error_of_its_step(estimator: str) -> None:
    audited, found, _ = run(estimator, 3)
    for number, audit in audited.stats.audits:
        want = relative_error(found[number], exact(mlp(), *batch(8, seed=number)))
        assert audit.relative_error == pytest.approx(want, rel=1e-6)
        assert want > 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize("estimator", ["debiased", "subset", "quadratic", Debiased(0.5)], ids=repr)
def test_an_audit_has_the_draw_of_its_step(estimator: Any) -> None:
    audited, found, _ = run(estimator, 3)
    for number, audit in audited.stats.audits:
        want = relative_error(found[number], exact(mlp(), *batch(8, seed=number)))
        assert audit.relative_error == pytest.approx(want, rel=1e-6)


def noisy(net, zs, ts, cs):
    return loss(net, zs + 0.1 * torch.randn_like(zs), ts, cs)


@pytest.mark.parametrize("estimator", ["endpoints", Memory(3, 0.5, False)], ids=repr)
def test_a_loss_with_noise_goes_on_with_the_same_noise(estimator: Any) -> None:
    """An audit runs the loss again: the generator is as if it had not."""
    _, with_, after = run(estimator, 2, noisy, 4)
    _, without, state = run(estimator, None, noisy, 4)
    assert torch.equal(after, state)
    for a, b in zip(with_, without, strict=True):
        assert relative_error(a, b) == 0


def test_a_measurement_takes_no_numbers_from_the_generator() -> None:
    """The second pass over the loss sees the noise of the first, and the next step the noise that it would have."""
    _, _, after = run(Memory(1, 0.5, False), None, noisy, 3)
    _, _, state = run("endpoints", None, noisy, 3)
    assert torch.equal(after, state)


def test_a_copy_of_the_network_is_audited_by_its_own_weights() -> None:
    step = jagg_fx.transform(loss, W=4, audit_every=2, **OWN)
    net, args = mlp(), batch(8)
    gradient(step, net, *args)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    gradient(step, net, *args)
    got = gradient(step, other, *args)
    error = step.stats.audits[-1][1].relative_error
    assert error == pytest.approx(relative_error(got, exact(other, *args)), rel=1e-6)
