"""Time grids, sampler steps with their log-probabilities, and rollouts that store a trajectory.

`z` is a stored state, `v = velocity(z, sigma)`, sigma falls from 1 (noise) to 0 (data), and
`dt = sigma_next - sigma < 0`. Every step is Gaussian, `z_next ~ N(mean, std^2)`, its mean affine in v.

Sigmas are tensors in [0, 1], shape () for the whole batch or (B,) for one per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ._shapes import at_least_fp32, latent_mean, per_row
from .flow import predict_data, predict_noise


class Step(NamedTuple):
    """One step of a sampler: mean (B, ...), and std, broadcastable against it; both at least fp32."""

    mean: Tensor
    std: Tensor


class Sampler(Protocol):
    """What `rollout` and the GRPO loss need of a sampler."""

    @property
    def stochastic(self) -> bool:
        """False where a step adds no noise and so has no log-probability."""

    def step(self, v: Tensor, z: Tensor, sigma: Tensor, sigma_next: Tensor) -> Step:
        """Mean and std of the next state; v, z (B, ...), sigmas () or (B,)."""

    def log_prob(self, z_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Log-probability of the stored next state, mean over the latent dimensions: (B,)."""


# Time grids


def shift_times(sigmas: Tensor, shift: float) -> Tensor:
    """`shift sigma / (1 + (shift - 1) sigma)`: more steps at high noise when shift > 1.

    Source: Esser et al. 2024 (SD3, arXiv 2403.03206), eq. 23. Keeps 0 and 1, any shape.

    Raises:
        ValueError: `shift` is not positive.
    """
    if not shift > 0:
        raise ValueError(f"shift is {shift}, but must be positive (1 changes nothing).")
    # In this form 1 stays exactly 1, which FlowSDE tells from the rest.
    return shift * sigmas / (shift * sigmas + (1 - sigmas))


def uniform_times(steps: int, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """steps + 1 equally spaced sigmas from 1 down to 0.

    Raises:
        ValueError: fewer than one step.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}, but a trajectory has at least one step.")
    return torch.linspace(1, 0, steps + 1, dtype=dtype, device=device)


def shifted_times(steps: int, shift: float, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """`uniform_times`, then `shift_times`: steps + 1 sigmas from 1 down to 0."""
    return shift_times(uniform_times(steps, dtype=dtype, device=device), shift)


# Log-probabilities


def gaussian_log_prob(z_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of `N(mean, std^2)` at z_next, **mean** over the latent dimensions.

    Source: flow_grpo `sde_step_with_logprob`; the mean, not the sum, keeps the ratio near 1 whatever the size
    of the image, and is why clip ranges are as small as 1e-5.

    Args:
        z_next, mean: (B, ...).
        std: broadcastable against them, > 0.

    Returns:
        (B,), at least fp32.
    """
    z_next, mean, std = at_least_fp32(z_next), at_least_fp32(mean), at_least_fp32(std)
    return latent_mean(-((z_next - mean) ** 2) / (2 * std**2) - std.log() - math.log(math.sqrt(2 * math.pi)))


def squared_log_prob(z_next: Tensor, mean: Tensor) -> Tensor:
    """`-(z_next - mean)^2`, mean over the latent dimensions: a log-density without its scale and normaliser.

    Finite where std = 0. Source: flow_grpo `sde_step_with_logprob`, sde_type "cps".

    Returns:
        (B,), at least fp32.
    """
    return latent_mean(-((at_least_fp32(z_next) - at_least_fp32(mean)) ** 2))


# Steps


def _sde_step(v: Tensor, z: Tensor, sigma: Tensor, sigma_next: Tensor, s: Tensor) -> Step:
    """Euler-Maruyama step of the reverse SDE that keeps the marginals of the flow.

    `mean = z (1 + s^2 dt / (2 sigma)) + v (1 + s^2 (1 - sigma) / (2 sigma)) dt`, `std = s sqrt(-dt)`.
    Source: Liu et al. 2025 (Flow-GRPO, arXiv 2505.05470), with sigma for t and s for its noise level.
    """
    sigma, sigma_next, s = per_row(sigma, z), per_row(sigma_next, z), per_row(s, z)
    dt = sigma_next - sigma
    pull = s**2 / (2 * sigma)
    return Step(z * (1 + pull * dt) + v * (1 + pull * (1 - sigma)) * dt, s * (-dt).sqrt())


def _prepare(v: Tensor, z: Tensor, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return at_least_fp32(v), at_least_fp32(z), at_least_fp32(sigma), at_least_fp32(sigma_next)


def _check_eta(eta: float, highest: float = math.inf) -> None:
    if not 0 < eta <= highest:
        room = "positive" if math.isinf(highest) else f"in (0, {highest:g}]"
        raise ValueError(f"eta is {eta}, but must be {room}: without noise a step has no log-probability (ODE).")


@dataclass(frozen=True)
class ODE:
    """Euler step of the flow itself: `mean = z + v dt`, `std = 0`.

    Source: Liu et al. 2022 (arXiv 2209.03003).
    """

    stochastic = False

    def step(self, v: Tensor, z: Tensor, sigma: Tensor, sigma_next: Tensor) -> Step:
        """Mean and std (zero) of the next state; v, z (B, ...), sigmas () or (B,)."""
        v, z, sigma, sigma_next = _prepare(v, z, sigma, sigma_next)
        dt = per_row(sigma_next - sigma, z)
        return Step(z + v * dt, torch.zeros_like(dt))

    def log_prob(self, z_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """A step without noise has no density.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "an ODE step adds no noise, so its next state has no log-probability: "
            "use FlowSDE, DanceSDE or CPS for the steps that are trained."
        )


@dataclass(frozen=True)
class FlowSDE:
    """Flow-SDE: `s = eta sqrt(sigma / (1 - sigma))`.

    `mean = z (1 + s^2 dt / (2 sigma)) + v (1 + s^2 (1 - sigma) / (2 sigma)) dt`, `std = s sqrt(-dt)`.
    At sigma = 1 the next grid value stands in for sigma in `1 - sigma`, which would be zero.
    Source: flow_grpo `sde_step_with_logprob`; Liu et al. 2025 (arXiv 2505.05470).

    Args:
        eta: noise level, > 0; .7 in flow_grpo.

    Raises:
        ValueError: eta is not positive.
    """

    eta: float = 0.7
    stochastic = True

    def __post_init__(self) -> None:
        _check_eta(self.eta)

    def step(self, v: Tensor, z: Tensor, sigma: Tensor, sigma_next: Tensor) -> Step:
        """Mean and std of the next state; v, z (B, ...), sigmas () or (B,), 0 <= sigma_next < sigma <= 1."""
        v, z, sigma, sigma_next = _prepare(v, z, sigma, sigma_next)
        s = self.eta * (sigma / (1 - torch.where(sigma == 1, sigma_next, sigma))).sqrt()
        return _sde_step(v, z, sigma, sigma_next, s)

    def log_prob(self, z_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """`gaussian_log_prob`: (B,)."""
        return gaussian_log_prob(z_next, mean, std)


@dataclass(frozen=True)
class DanceSDE:
    """Dance-SDE: the mean of Flow-SDE with a constant `s = eta`, `std = eta sqrt(-dt)`.

    Source: DanceGRPO `flux_step`; Xue et al. 2025 (arXiv 2505.07818).

    Args:
        eta: noise level, > 0; .3 in DanceGRPO.

    Raises:
        ValueError: eta is not positive.
    """

    eta: float = 0.3
    stochastic = True

    def __post_init__(self) -> None:
        _check_eta(self.eta)

    def step(self, v: Tensor, z: Tensor, sigma: Tensor, sigma_next: Tensor) -> Step:
        """Mean and std of the next state; v, z (B, ...), sigmas () or (B,), 0 <= sigma_next < sigma <= 1."""
        v, z, sigma, sigma_next = _prepare(v, z, sigma, sigma_next)
        return _sde_step(v, z, sigma, sigma_next, torch.full_like(sigma, self.eta))

    def log_prob(self, z_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """`gaussian_log_prob`: (B,)."""
        return gaussian_log_prob(z_next, mean, std)


@dataclass(frozen=True)
class CPS:
    """Coefficient-preserving sampling: a share of the predicted noise is replaced by fresh noise.

    `mean = x0 (1 - sigma_next) + x1 sqrt(sigma_next^2 - std^2)`, `std = sigma_next sin(eta pi / 2)`,
    with the predicted data `x0 = z - sigma v` and noise `x1 = z + (1 - sigma) v`.
    std does not shrink with the step, so many steps with a large eta narrow the samples.
    At the last step std = 0: the log-probability is `squared_log_prob`, which stays finite.
    Source: Wang and Yu 2025 (arXiv 2509.05952); flow_grpo `sde_step_with_logprob`, sde_type "cps".

    Args:
        eta: noise level in (0, 1]; at 1 all noise is fresh.

    Raises:
        ValueError: eta is outside (0, 1].
    """

    eta: float = 0.7
    stochastic = True

    def __post_init__(self) -> None:
        _check_eta(self.eta, 1.0)

    def step(self, v: Tensor, z: Tensor, sigma: Tensor, sigma_next: Tensor) -> Step:
        """Mean and std of the next state; v, z (B, ...), sigmas () or (B,), 0 <= sigma_next < sigma <= 1."""
        v, z, sigma, sigma_next = _prepare(v, z, sigma, sigma_next)
        x0, x1 = predict_data(v, z, sigma), predict_noise(v, z, sigma)
        sigma_next = per_row(sigma_next, z)
        std = sigma_next * math.sin(self.eta * math.pi / 2)
        # Rounding at eta = 1 must not put a negative number under the root.
        kept = (sigma_next**2 - std**2).clamp(min=0).sqrt()
        return Step(x0 * (1 - sigma_next) + x1 * kept, std)

    def log_prob(self, z_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """`squared_log_prob`, whatever std: (B,)."""
        return squared_log_prob(z_next, mean)


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "flow-sde": FlowSDE,
    "dance-sde": DanceSDE,
    "cps": CPS,
    "ode": ODE,
}
"""Samplers by name; call one with its eta (ODE takes none)."""


# Rollouts


class Trajectory(NamedTuple):
    """A stored trajectory of T steps. Data: nothing in it carries a gradient.

    Attributes:
        states: z_0 (noise) .. z_T (sample), (T + 1, B, ...).
        sigmas: (T + 1,) or (T + 1, B).
        log_probs: of z_1 .. z_T under the velocity that drew them, (T, B); None for the ODE.
        velocities: at z_0 .. z_{T-1}, (T, B, ...); None unless asked for.
    """

    states: Tensor
    sigmas: Tensor
    log_probs: Tensor | None
    velocities: Tensor | None

    @property
    def samples(self) -> Tensor:
        """The last state, (B, ...)."""
        return self.states[-1]


@torch.no_grad()
def rollout(
    velocity: Callable[..., Tensor],
    noise: Tensor,
    sigmas: Tensor,
    *cond: Any,
    sampler: Sampler,
    generator: torch.Generator | None = None,
    progress: Callable[[int], None] | None = None,
    keep_velocities: bool = False,
) -> Trajectory:
    """Sample a trajectory and store it.

    The stored states keep the dtype of `noise`; log-probabilities are those of the stored (rounded) states.

    Args:
        velocity: a network or function, called as `velocity(z, sigma, *cond)`, sigma () or (B,).
        noise: the first state, (B, ...).
        sigmas: falling from noise to data, (T + 1,) or (T + 1, B).
        cond: handed on to every call.
        sampler: an object as in `SAMPLERS`.
        generator: where the noise of the steps comes from; needed unless the sampler is deterministic.
        progress: called after every step with the number of steps done.
        keep_velocities: store the velocities too.

    Raises:
        ValueError: no generator for a stochastic sampler, or fewer than two sigmas.
    """
    if sampler.stochastic and generator is None:
        raise ValueError(
            f"{sampler} draws noise, but no generator was given: pass generator=torch.Generator()"
            ".manual_seed(...), so that the same trajectory can be drawn again."
        )
    if sigmas.dim() not in (1, 2) or sigmas.shape[0] < 2:
        raise ValueError(f"sigmas has shape {tuple(sigmas.shape)}, but must be (T + 1,) or (T + 1, B), T >= 1.")
    states, log_probs, velocities = [noise], [], []
    for done, (sigma, sigma_next) in enumerate(pairwise(sigmas), start=1):
        z = states[-1]
        v = velocity(z, sigma, *cond)
        mean, std = sampler.step(v, z, sigma, sigma_next)
        if sampler.stochastic:
            fresh = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
            states.append((mean + std * fresh).to(noise.dtype))
            log_probs.append(sampler.log_prob(states[-1], mean, std))
        else:
            states.append(mean.to(noise.dtype))
        if keep_velocities:
            velocities.append(v)
        if progress is not None:
            progress(done)
    return Trajectory(
        torch.stack(states),
        sigmas,
        torch.stack(log_probs) if log_probs else None,
        torch.stack(velocities) if velocities else None,
    )
