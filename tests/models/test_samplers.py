"""Sampler steps against numpy, log-probabilities against torch.distributions, and what a rollout stores."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jagg_fx.models import (
    CPS,
    ODE,
    SAMPLERS,
    AffineVelocity,
    DanceSDE,
    FlowSDE,
    gaussian_log_prob,
    rollout,
    shift_times,
    shifted_times,
    squared_log_prob,
    uniform_times,
)

STOCHASTIC = [FlowSDE(0.7), DanceSDE(0.3), CPS(0.5)]
EVERY = [*STOCHASTIC, ODE()]


def reference_step(sampler, v, z, sigma, sigma_next):
    """The formulas of the trainers, one number at a time."""
    dt = sigma_next - sigma
    if isinstance(sampler, ODE):
        return z + v * dt, 0.0
    if isinstance(sampler, CPS):
        std = sigma_next * math.sin(sampler.eta * math.pi / 2)
        x0, x1 = z - sigma * v, z + (1 - sigma) * v
        return x0 * (1 - sigma_next) + x1 * math.sqrt(max(sigma_next**2 - std**2, 0)), std
    s = sampler.eta
    if isinstance(sampler, FlowSDE):
        s *= math.sqrt(sigma / (1 - (sigma_next if sigma == 1 else sigma)))
    mean = z * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, s * math.sqrt(-dt)


def latents(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("sampler", EVERY, ids=str)
@given(
    sigmas=st.lists(st.one_of(st.just(1.0), st.floats(0.05, 0.98)), min_size=2, max_size=2),
    share=st.floats(0, 0.95),
)
@settings(deadline=None, max_examples=40)
def test_step_is_the_trainers_formula(sampler, sigmas, share):
    sigma = np.array(sigmas)
    sigma_next = sigma * share
    v, z = latents(2, 3, seed=1), latents(2, 3, seed=2)
    mean, std = sampler.step(v, z, torch.from_numpy(sigma), torch.from_numpy(sigma_next))
    for i in range(2):
        want = reference_step(sampler, v[i].numpy(), z[i].numpy(), sigma[i], sigma_next[i])
        np.testing.assert_allclose(mean[i].numpy(), want[0], atol=1e-11, rtol=1e-11)
        np.testing.assert_allclose(std.expand(2, 1)[i].item(), want[1], atol=1e-13)
        alone = sampler.step(v[i : i + 1], z[i : i + 1], torch.tensor(sigma[i]), torch.tensor(sigma_next[i]))
        torch.testing.assert_close(alone.mean[0], mean[i], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("sampler", EVERY, ids=str)
@given(a=st.floats(-3, 3))
@settings(deadline=None, max_examples=15)
def test_mean_is_affine_in_v(sampler, a):
    z, v1, v2 = latents(2, 3, seed=1), latents(2, 3, seed=2), latents(2, 3, seed=3)
    sigmas = torch.tensor(0.6).double(), torch.tensor(0.5).double()
    mixed = sampler.step(a * v1 + (1 - a) * v2, z, *sigmas).mean
    want = a * sampler.step(v1, z, *sigmas).mean + (1 - a) * sampler.step(v2, z, *sigmas).mean
    torch.testing.assert_close(mixed, want, atol=1e-12, rtol=1e-12)


def gaussian_velocity(z, t, mean, var):
    """`E[noise - x | z_t]` where x ~ N(mean, var): the velocity that moves N(0, 1) to N(mean, var)."""
    residual = (z - (1 - t) * mean) / ((1 - t) ** 2 * var + t**2)
    return t * residual - (mean + (1 - t) * var * residual)


@pytest.mark.parametrize("sampler", [FlowSDE(0.7), DanceSDE(0.3), CPS(0.02), ODE()], ids=str)
def test_every_sampler_reaches_the_data(sampler):
    """Each step is affine in z, so mean and variance are carried along exactly."""
    mean, var = 1.5, 0.25
    m, s2 = torch.zeros(1, 1).double(), torch.ones(1, 1).double()
    times = uniform_times(1000, dtype=torch.float64)
    for sigma, sigma_next in itertools.pairwise(times):
        at0, std = sampler.step(gaussian_velocity(0 * m, sigma, mean, var), 0 * m, sigma, sigma_next)
        one = 0 * m + 1
        at1, _ = sampler.step(gaussian_velocity(one, sigma, mean, var), one, sigma, sigma_next)
        m, s2 = at0 + (at1 - at0) * m, (at1 - at0) ** 2 * s2 + std**2
    assert m.item() == pytest.approx(mean, abs=5e-3)
    assert s2.item() == pytest.approx(var, abs=5e-3)


@given(eta=st.floats(0.01, 1), sigma_next=st.floats(0, 1))
@settings(deadline=None, max_examples=50)
def test_cps_keeps_the_amount_of_noise(eta, sigma_next):
    one, zero = torch.ones(1, 1).double(), torch.zeros(1, 1).double()
    sigmas = torch.tensor(1.0).double(), torch.tensor(sigma_next, dtype=torch.float64)
    # With v = noise - x and sigma = 1: x0 = z - v, x1 = z; z = 1 and v = 1 leave the noise alone.
    mean, std = CPS(eta).step(one, one, *sigmas)
    assert (mean**2 + std**2).item() == pytest.approx(sigma_next**2, abs=1e-12)
    mean, _ = CPS(eta).step(-one, zero, *sigmas)
    assert mean.item() == pytest.approx(1 - sigma_next, abs=1e-12)


def test_fully_fresh_noise_does_not_round_to_nan():
    sigmas = torch.linspace(0.01, 1, 100)
    mean, _ = CPS(1.0).step(torch.ones(100, 1), torch.ones(100, 1), torch.ones(100), sigmas)
    assert mean.isfinite().all()


def test_gaussian_log_prob_is_the_mean_over_latents():
    z, mean = latents(3, 2, 4, seed=1), latents(3, 2, 4, seed=2)
    std = torch.tensor([0.1, 1.0, 2.0]).double().reshape(3, 1, 1)
    want = torch.distributions.Normal(mean, std.expand_as(mean)).log_prob(z).mean((1, 2))
    torch.testing.assert_close(gaussian_log_prob(z, mean, std), want, atol=1e-12, rtol=1e-12)
    want = torch.distributions.Normal(mean, 0.3).log_prob(z).mean((1, 2))
    torch.testing.assert_close(gaussian_log_prob(z, mean, torch.tensor(0.3).double()), want)


def test_squared_log_prob():
    z, mean = latents(3, 4, seed=1), latents(3, 4, seed=2)
    want = -((z.numpy() - mean.numpy()) ** 2).sum(1) / 4
    np.testing.assert_allclose(squared_log_prob(z, mean).numpy(), want, atol=1e-15)


def test_which_log_prob_a_sampler_takes():
    z, mean, std = latents(2, 3, seed=1), latents(2, 3, seed=2), torch.tensor(0.5).double()
    for sampler in (FlowSDE(), DanceSDE()):
        torch.testing.assert_close(sampler.log_prob(z, mean, std), gaussian_log_prob(z, mean, std))
    zero = torch.tensor(0.0).double()
    torch.testing.assert_close(CPS().log_prob(z, mean, zero), squared_log_prob(z, mean))


def test_half_precision_is_computed_in_fp32():
    z, v = latents(2, 3, seed=1).bfloat16(), latents(2, 3, seed=2).bfloat16()
    sigmas = torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(0.25, dtype=torch.bfloat16)
    for sampler in EVERY:
        half, full = (
            sampler.step(v, z, *sigmas),
            sampler.step(v.float(), z.float(), *(s.float() for s in sigmas)),
        )
        torch.testing.assert_close(half.mean, full.mean)
        torch.testing.assert_close(half.std, full.std)


@given(steps=st.integers(1, 40), shift=st.floats(0.2, 8))
@settings(deadline=None, max_examples=40)
def test_time_grids(steps, shift):
    uniform = uniform_times(steps, dtype=torch.float64)
    np.testing.assert_allclose(uniform.numpy(), 1 - np.arange(steps + 1) / steps, atol=1e-15)
    shifted = shifted_times(steps, shift, dtype=torch.float64)
    want = [shift * s / (1 + (shift - 1) * s) for s in uniform.tolist()]
    np.testing.assert_allclose(shifted.numpy(), want, atol=1e-14)
    assert shifted[0] == 1
    assert shifted[-1] == 0
    assert (shifted.diff() < 0).all()
    back = shift_times(shifted, 1 / shift)
    np.testing.assert_allclose(back.numpy(), uniform.numpy(), atol=1e-13)


def draw(sampler, sigmas, **kwargs):
    torch.manual_seed(0)
    net = AffineVelocity(3).double()
    if sampler.stochastic:
        kwargs["generator"] = torch.Generator().manual_seed(5)
    return net, rollout(net, latents(4, 3), sigmas, sampler=sampler, **kwargs)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("sampler", STOCHASTIC, ids=str)
def test_rollout_stores_what_it_drew(sampler, per_row):
    sigmas = uniform_times(6, dtype=torch.float64)
    if per_row:
        sigmas = torch.stack([shift_times(sigmas, s) for s in (1, 2, 3, 4)], 1)
    net, got = draw(sampler, sigmas, keep_velocities=True)
    assert got.states.shape == (7, 4, 3)
    assert got.log_probs.shape == (6, 4)
    assert not any(x.requires_grad for x in got)
    torch.testing.assert_close(got.states[0], latents(4, 3))
    torch.testing.assert_close(got.samples, got.states[6])
    generator = torch.Generator().manual_seed(5)
    for i in range(6):
        v = net(got.states[i], sigmas[i]).detach()
        torch.testing.assert_close(got.velocities[i], v)
        fresh = torch.randn(4, 3, generator=generator, dtype=torch.float64).numpy()
        for b in range(4):
            pair = (sigmas[i, b], sigmas[i + 1, b]) if per_row else (sigmas[i], sigmas[i + 1])
            mean, std = reference_step(sampler, v[b].numpy(), got.states[i, b].numpy(), *(s.item() for s in pair))
            np.testing.assert_allclose(got.states[i + 1, b].numpy(), mean + std * fresh[b], atol=1e-12)
            if isinstance(sampler, CPS):
                log_prob = -((std * fresh[b]) ** 2).mean()
            else:
                log_prob = np.mean(-(fresh[b] ** 2) / 2 - np.log(std * np.sqrt(2 * np.pi)))
            assert got.log_probs[i, b].item() == pytest.approx(log_prob, abs=1e-10)


def test_rollouts_repeat_and_tell_progress():
    seen = []
    _, first = draw(FlowSDE(), uniform_times(4, dtype=torch.float64), progress=seen.append)
    _, second = draw(FlowSDE(), uniform_times(4, dtype=torch.float64))
    assert seen == [1, 2, 3, 4]
    assert torch.equal(first.states, second.states)
    assert first.velocities is None


def test_last_steps_stay_finite():
    for sampler in STOCHASTIC:
        _, got = draw(sampler, uniform_times(3, dtype=torch.float64))
        assert got.states.isfinite().all()
        assert got.log_probs.isfinite().all()
    _, cps = draw(CPS(), uniform_times(3, dtype=torch.float64))
    assert (cps.log_probs[-1] == 0).all()


def test_ode_rollout():
    net, got = draw(ODE(), uniform_times(5, dtype=torch.float64))
    z = latents(4, 3)
    for i in range(5):
        z = z - net(z, torch.tensor(1 - i / 5).double()).detach() / 5
    torch.testing.assert_close(got.samples, z)
    assert got.log_probs is None


def test_states_keep_their_dtype():
    got = rollout(
        lambda z, t: z,
        torch.randn(2, 3).bfloat16(),
        uniform_times(3),
        sampler=DanceSDE(),
        generator=torch.Generator(),
    )
    assert got.states.dtype == torch.bfloat16
    mean, std = DanceSDE().step(got.states[1], got.states[1], torch.tensor(2 / 3), torch.tensor(1 / 3))
    torch.testing.assert_close(got.log_probs[1], gaussian_log_prob(got.states[2], mean, std), atol=1e-5, rtol=1e-5)


def test_steps_compile_as_one_graph():
    z, v = latents(2, 3, seed=1), latents(2, 3, seed=2)
    sigma, sigma_next = torch.tensor([1.0, 0.5]).double(), torch.tensor([0.9, 0.2]).double()

    def every(v, z, sigma, sigma_next):
        out = []
        for sampler in STOCHASTIC:
            mean, std = sampler.step(v, z, sigma, sigma_next)
            out.append(sampler.log_prob(z, mean, std))
        return torch.stack(out)

    compiled = torch.compile(every, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(v, z, sigma, sigma_next), every(v, z, sigma, sigma_next))


def test_names():
    assert {name: type(make()).__name__ for name, make in SAMPLERS.items()} == {
        "flow-sde": "FlowSDE",
        "dance-sde": "DanceSDE",
        "cps": "CPS",
        "ode": "ODE",
    }


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: FlowSDE(0), "positive"),
        (lambda: DanceSDE(-1.0), "positive"),
        (lambda: CPS(1.5), r"\(0, 1\]"),
        (lambda: FlowSDE(float("nan")), "positive"),
        (lambda: ODE().log_prob(*latents(3, 2, 2)), "no log-probability"),
        (lambda: uniform_times(0), "at least one step"),
        (lambda: shifted_times(3, 0.0), "positive"),
        (lambda: rollout(None, torch.zeros(1, 1), uniform_times(2), sampler=FlowSDE()), "no generator"),
        (lambda: rollout(None, torch.zeros(1, 1), torch.ones(1), sampler=ODE()), r"T \+ 1"),
    ],
)
def test_wrong_input(make_it, message):
    with pytest.raises(ValueError, match=message):
        make_it()
