"""The GRPO loss against numpy in float64, and the two forms in which users write it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jagg_fx.models import (
    CPS,
    DanceSDE,
    FlowSDE,
    MLPVelocity,
    clipped_ratio_loss,
    group_advantages,
    grpo_loss,
    kl_of_means,
    kl_of_velocities,
    make_functional_grpo_loss,
    make_grpo_loss,
    rollout,
    uniform_times,
)


@given(
    rewards=st.lists(st.floats(-10, 10), min_size=6, max_size=6),
    unbiased=st.booleans(),
    clamp=st.sampled_from([None, 0.5, 5.0]),
)
@settings(deadline=None, max_examples=50)
def test_advantages(rewards, unbiased, clamp):
    got = group_advantages(torch.tensor(rewards, dtype=torch.float64), 3, clamp=clamp, unbiased=unbiased).numpy()
    for g in (slice(0, 3), slice(3, 6)):
        group = np.array(rewards[g])
        want = (group - group.mean()) / (group.std(ddof=int(unbiased)) + 1e-4)
        want = want if clamp is None else np.clip(want, -clamp, clamp)
        np.testing.assert_allclose(got[g], want, atol=1e-9)


def test_equal_rewards_have_no_advantage():
    rewards = torch.linspace(0.01, 0.99, 50).repeat_interleave(7)
    assert (group_advantages(rewards, 7, eps=1e-12) == 0).all()


@given(
    log_ratio=st.floats(-0.5, 0.5),
    advantage=st.floats(-5, 5),
    clip=st.sampled_from([1e-4, 0.1, 0.2]),
)
@settings(deadline=None, max_examples=80)
def test_ratio_loss_and_its_gradient(log_ratio, advantage, clip):
    old = torch.tensor([-1.3], dtype=torch.float64)
    new = (old + log_ratio).requires_grad_()
    loss = clipped_ratio_loss(new, old, torch.tensor([advantage], dtype=torch.float64), clip)
    ratio = np.exp((new - old).item())
    sides = -advantage * ratio, -advantage * np.clip(ratio, 1 - clip, 1 + clip)
    assert loss.item() == pytest.approx(max(sides), abs=1e-14)
    loss.sum().backward()
    held = (ratio > 1 + clip and advantage > 0) or (ratio < 1 - clip and advantage < 0)
    assert new.grad.item() == pytest.approx(0 if held else -advantage * ratio, abs=1e-12)


def test_ties_are_those_of_eager_max():
    old, advantages = torch.zeros(4).double(), torch.tensor([1.0, -2.0, 0.0, 3.0]).double()
    new = torch.tensor([0.0, 0.0, 0.3, 0.001]).double()
    grads = []
    for form in (torch.maximum, torch.max):
        x = new.clone().requires_grad_()
        r = (x - old).exp()
        form(-advantages * r, -advantages * r.clamp(0.99, 1.01)).sum().backward()
        grads.append(x.grad)
    x = new.clone().requires_grad_()
    clipped_ratio_loss(x, old, advantages, 0.01).sum().backward()
    assert torch.equal(x.grad, grads[0])
    assert torch.equal(x.grad, grads[1])


def test_kl_forms():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3, 2, 2, generator=generator).double()
    std = torch.tensor([0.5, 1.0, 2.0]).double().reshape(3, 1, 1)
    normal = torch.distributions.Normal
    want = torch.distributions.kl_divergence(normal(a, std.expand_as(a)), normal(b, std.expand_as(b)))
    torch.testing.assert_close(kl_of_means(a, b, std), want.mean((1, 2)))
    np.testing.assert_allclose(kl_of_velocities(a, b).numpy(), ((a - b).numpy() ** 2).reshape(3, -1).mean(1))


def batch(sampler, T=4, B=6):
    torch.manual_seed(0)
    net = MLPVelocity(3, hidden=8, classes=2).double()
    y = torch.tensor([0, 1, 0, 1, 0, 1])
    noise = torch.randn(B, 3, dtype=torch.float64)
    trajectory = rollout(
        net,
        noise,
        uniform_times(T, dtype=torch.float64),
        y,
        sampler=sampler,
        generator=torch.Generator().manual_seed(1),
        keep_velocities=True,
    )
    advantages = group_advantages(torch.randn(B, dtype=torch.float64), 3)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.05 * torch.randn(p.shape, dtype=p.dtype))
    return net, trajectory, advantages, y


def reference_loss(net, trajectory, advantages, y, sampler, clip, kl, beta, steps):
    """Numbers only: velocities from the network, all else in numpy."""
    s, z, total = trajectory.sigmas.numpy(), trajectory.states.numpy(), 0.0
    for i in steps:
        v = net(trajectory.states[i], trajectory.sigmas[i], y).detach().numpy()
        ref, dt = trajectory.velocities[i].numpy(), s[i + 1] - s[i]
        if isinstance(sampler, CPS):
            std = s[i + 1] * np.sin(sampler.eta * np.pi / 2)
            kept = np.sqrt(s[i + 1] ** 2 - std**2)

            def mean_of(v, i=i, kept=kept):
                return (z[i] - s[i] * v) * (1 - s[i + 1]) + (z[i] + (1 - s[i]) * v) * kept

            log_prob = -((z[i + 1] - mean_of(v)) ** 2).mean(1)
        else:
            n = sampler.eta
            if isinstance(sampler, FlowSDE):
                n = n * np.sqrt(s[i] / (1 - (s[i + 1] if s[i] == 1 else s[i])))
            std = n * np.sqrt(-dt)

            def mean_of(v, i=i, n=n, dt=dt):
                return z[i] + (v + n**2 / (2 * s[i]) * (z[i] + (1 - s[i]) * v)) * dt

            residual = (z[i + 1] - mean_of(v)) / std
            log_prob = (-(residual**2) / 2 - np.log(std) - np.log(2 * np.pi) / 2).mean(1)
        ratio = np.exp(log_prob - trajectory.log_probs[i].numpy())
        a = advantages.numpy()
        loss = np.maximum(-a * ratio, -a * np.clip(ratio, 1 - clip, 1 + clip))
        if kl == "mean":
            loss = loss + beta * ((mean_of(v) - mean_of(ref)) ** 2 / (2 * std**2)).mean(1)
        if kl == "velocity":
            loss = loss + beta * ((v - ref) ** 2).mean(1)
        total += loss.mean() / len(steps)
    return total


@pytest.mark.parametrize("steps", [None, (2, 0)])
@pytest.mark.parametrize("kl", [None, "mean", "velocity"])
@pytest.mark.parametrize("sampler", [FlowSDE(0.7), DanceSDE(0.5), CPS(0.6)], ids=str)
def test_loss_against_numpy(sampler, kl, steps):
    if kl == "mean" and isinstance(sampler, CPS) and steps is None:
        pytest.skip("the KL of the means divides by std, which CPS makes zero at the last step")
    net, trajectory, advantages, y = batch(sampler)
    states, sigmas, log_probs, velocities = trajectory
    cond = (y,) if kl is None else (velocities, y)
    loss_fn = make_grpo_loss(sampler, 0.02, kl=kl, beta=0.3, steps=steps)
    got = loss_fn(net, states, sigmas, log_probs, advantages, *cond).item()
    want = reference_loss(net, trajectory, advantages, y, sampler, 0.02, kl, 0.3, steps or range(4))
    assert got == pytest.approx(want, rel=1e-11)


@pytest.mark.parametrize("sampler", [FlowSDE(), DanceSDE(), CPS()], ids=str)
def test_an_unchanged_network_has_ratio_one(sampler):
    net, trajectory, advantages, y = batch(sampler)
    replay = rollout(
        net,
        trajectory.states[0],
        trajectory.sigmas,
        y,
        sampler=sampler,
        generator=torch.Generator().manual_seed(1),
    )
    loss_fn = make_grpo_loss(sampler, 1e-5)
    loss = loss_fn(net, replay.states, replay.sigmas, replay.log_probs, advantages, y)
    assert loss.item() == pytest.approx(-advantages.mean().item(), abs=1e-12)


def test_both_forms_give_the_same_gradient():
    net, (states, sigmas, log_probs, reference), advantages, y = batch(FlowSDE())
    args = states, sigmas, log_probs, advantages, reference, y
    loss = make_grpo_loss(FlowSDE(), 0.05, kl="velocity", beta=0.1)(net, *args)
    loss.backward()
    functional = make_functional_grpo_loss(net, FlowSDE(), 0.05, kl="velocity", beta=0.1)
    params = {name: p.detach() for name, p in net.named_parameters()}
    grads, value = torch.func.grad_and_value(functional)(params, *args)
    assert value.item() == pytest.approx(loss.item(), rel=1e-12)
    for name, p in net.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, atol=1e-12, rtol=1e-9)


def test_velocity_is_called_once_per_step_on_the_stored_states():
    net, (states, sigmas, log_probs, _), advantages, y = batch(CPS())
    seen = []

    def velocity(z, t, y):
        seen.append((z, t))
        return net(z, t, y)

    grpo_loss(velocity, states, sigmas, log_probs, advantages, y, sampler=CPS(), clip_range=0.1)
    assert len(seen) == 4
    assert all(torch.equal(z, states[i]) and torch.equal(t, sigmas[i]) for i, (z, t) in enumerate(seen))


def test_loss_compiles_as_one_graph():
    net, (states, sigmas, log_probs, _), advantages, y = batch(FlowSDE())
    args = states, sigmas, log_probs, advantages, y
    for loss_fn, first in (
        (make_grpo_loss(FlowSDE(), 0.02), net),
        (make_functional_grpo_loss(net, FlowSDE(), 0.02), dict(net.named_parameters())),
    ):
        compiled = torch.compile(loss_fn, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(first, *args), loss_fn(first, *args))


def call(**changes):
    net, (states, sigmas, log_probs, _), advantages, y = batch(FlowSDE())
    args = {"states": states, "sigmas": sigmas, "old_log_probs": log_probs, "advantages": advantages}
    args.update(sampler=FlowSDE(), clip_range=0.1)
    args.update(changes)
    return grpo_loss(lambda z, t: net(z, t, y), **args)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: group_advantages(torch.zeros(5), 2), "multiple of group_size"),
        (lambda: group_advantages(torch.zeros(4), 1), "two samples"),
        (lambda: group_advantages(torch.zeros(4, 2), 2), r"must be \(B,\)"),
        (lambda: call(sigmas=torch.ones(4)), "must hold 5 entries"),
        (lambda: call(steps=()), "at least one step"),
        (lambda: call(kl="forward"), "must be None or one of"),
        (lambda: call(kl="mean"), "reference"),
    ],
)
def test_wrong_input(make_it, message):
    with pytest.raises(ValueError, match=message):
        make_it()
