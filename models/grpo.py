"""The GRPO loss of flow models: advantages within a group, clipped ratios, KL, and losses in users' form.

Source: Shao et al. 2024 (GRPO, arXiv 2402.03300); for flows Liu et al. 2025 (Flow-GRPO, arXiv 2505.05470) and
Xue et al. 2025 (DanceGRPO, arXiv 2505.07818). A group here is a group of *samples* of one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._shapes import latent_mean
from .samplers import Sampler, Step

KL_KINDS = ("mean", "velocity")


def group_advantages(
    rewards: Tensor, group_size: int, *, clamp: float | None = 5.0, eps: float = 1e-4, unbiased: bool = False
) -> Tensor:
    """`(R_i - mean R) / (std R + eps)` within each group of consecutive rows.

    flow_grpo takes the std over the population and eps = 1e-4, DanceGRPO the unbiased one and 1e-8; both
    clamp to +-5. A group of equal rewards gets zeros.

    Args:
        rewards: (B,), B = groups * group_size, the samples of one prompt side by side.
        group_size: at least 2.
        clamp: largest absolute value; None for no limit.

    Returns:
        (B,).

    Raises:
        ValueError: `rewards` is not (B,), or group_size below 2 or not a divisor of B.
    """
    if rewards.dim() != 1 or group_size < 2 or rewards.shape[0] % group_size:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)} and group_size is {group_size}: rewards must be (B,), "
            "with B a multiple of group_size, and a group needs two samples to be compared."
        )
    groups = rewards.reshape(-1, group_size)
    # Equal rewards must give zeros: their mean rounds, and eps may be smaller than the rounding.
    groups = groups - groups[:, :1]
    std = groups.std(1, keepdim=True, correction=int(unbiased))
    advantages = ((groups - groups.mean(1, keepdim=True)) / (std + eps)).reshape(-1)
    return advantages if clamp is None else advantages.clamp(-clamp, clamp)


def clipped_ratio_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """`max(-A r, -A clamp(r, 1 - c, 1 + c))`, `r = exp(log_prob - old_log_prob)`.

    Where the two sides are equal (always so inside the clip range) each takes half of the gradient, as
    `torch.maximum` does. Source: Schulman et al. 2017 (PPO, arXiv 1707.06347), eq. 7.

    Args:
        log_prob, old_log_prob: (B,).
        advantages: (B,).
        clip_range: c; 1e-5 .. 5e-3 for mean log-probabilities.

    Returns:
        (B,).
    """
    ratio = (log_prob - old_log_prob).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))


def kl_of_means(mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
    """`(mean - reference_mean)^2 / (2 std^2)`, mean over the latent dimensions: (B,).

    The KL of two Gaussians of the same std. Source: Flow-GRPO (arXiv 2505.05470). std must be > 0.
    """
    return latent_mean((mean - reference_mean) ** 2 / (2 * std**2))


def kl_of_velocities(v: Tensor, reference_v: Tensor) -> Tensor:
    """`(v - reference_v)^2`, mean over the latent dimensions: (B,).

    The KL of the means up to a weight per step.
    """
    return latent_mean((v - reference_v) ** 2)


def grpo_loss(
    velocity: Callable[..., Tensor],
    states: Tensor,
    sigmas: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *cond: Any,
    sampler: Sampler,
    clip_range: float,
    kl: str | None = None,
    beta: float = 0.0,
    reference: Tensor | None = None,
    steps: Sequence[int] | None = None,
) -> Tensor:
    """`mean over steps, mean over rows of clipped_ratio_loss [+ beta KL]`.

    Calls `velocity(z_t, sigma_t, *cond)` once per step in a plain loop; the states are data.

    Args:
        velocity: a network or function.
        states: (T + 1, B, ...), as in `Trajectory`.
        sigmas: (T + 1,) or (T + 1, B).
        old_log_probs: (T, B).
        advantages: (B,).
        cond: handed on to every call.
        sampler: the one that drew the states.
        clip_range: c of `clipped_ratio_loss`.
        kl: None, "mean" (`kl_of_means`) or "velocity" (`kl_of_velocities`).
        beta: weight of the KL.
        reference: velocities of the reference network at the states, (T, B, ...); needed with kl.
        steps: which steps enter the loss; None for all.

    Returns:
        A scalar, at least fp32.

    Raises:
        ValueError: unequal lengths, no steps, an unknown kl, or kl without a reference.
    """
    total = old_log_probs.shape[0]
    if states.shape[0] != total + 1 or sigmas.shape[0] != total + 1:
        raise ValueError(
            f"old_log_probs tells of {total} steps, so states and sigmas must hold {total + 1} entries, "
            f"but hold {states.shape[0]} and {sigmas.shape[0]}."
        )
    chosen = range(total) if steps is None else steps
    if not chosen:
        raise ValueError("steps is empty: name at least one step, or pass None for all.")
    if kl is not None and kl not in KL_KINDS:
        raise ValueError(f"kl is {kl!r}, but must be None or one of {KL_KINDS}.")
    if kl is not None and reference is None:
        raise ValueError(f"kl={kl!r} compares with a reference network: pass its velocities as reference.")
    losses = []
    for i in chosen:
        z, sigma, sigma_next = states[i], sigmas[i], sigmas[i + 1]
        v = velocity(z, sigma, *cond)
        mean, std = sampler.step(v, z, sigma, sigma_next)
        log_prob = sampler.log_prob(states[i + 1], mean, std)
        loss = clipped_ratio_loss(log_prob, old_log_probs[i], advantages, clip_range)
        if kl is not None and reference is not None:
            loss = loss + beta * _kl(kl, v, reference[i], Step(mean, std), z, sigma, sigma_next, sampler)
        losses.append(loss.mean())
    return torch.stack(losses).mean()


def _kl(
    kind: str,
    v: Tensor,
    reference: Tensor,
    step: Step,
    z: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sampler: Sampler,
) -> Tensor:
    if kind == "velocity":
        return kl_of_velocities(v, reference)
    return kl_of_means(step.mean, sampler.step(reference, z, sigma, sigma_next).mean, step.std)


def make_grpo_loss(
    sampler: Sampler,
    clip_range: float,
    *,
    kl: str | None = None,
    beta: float = 0.0,
    steps: Sequence[int] | None = None,
) -> Callable[..., Tensor]:
    """`loss_fn(net, states, sigmas, old_log_probs, advantages, *cond)`, as trainers write it.

    With `kl`, the velocities of the reference network come right after the advantages:
    `loss_fn(net, states, sigmas, old_log_probs, advantages, reference, *cond)`.
    Arguments, result and errors: `grpo_loss`.
    """

    def loss_fn(
        net: Callable[..., Tensor],
        states: Tensor,
        sigmas: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        *cond: Any,
    ) -> Tensor:
        reference = None
        if kl is not None:
            reference, *cond = cond  # type: ignore[assignment]
        return grpo_loss(
            net,
            states,
            sigmas,
            old_log_probs,
            advantages,
            *cond,
            sampler=sampler,
            clip_range=clip_range,
            kl=kl,
            beta=beta,
            reference=reference,
            steps=steps,
        )

    return loss_fn


def make_functional_grpo_loss(
    net: nn.Module,
    sampler: Sampler,
    clip_range: float,
    *,
    kl: str | None = None,
    beta: float = 0.0,
    steps: Sequence[int] | None = None,
) -> Callable[..., Tensor]:
    """`loss_fn(params, states, sigmas, old_log_probs, advantages, *cond)`, for torch.func.

    `params` maps parameter names of `net` to tensors; the network's own values are not read.
    Arguments, result and errors: `make_grpo_loss`.
    """
    loss_of_net = make_grpo_loss(sampler, clip_range, kl=kl, beta=beta, steps=steps)

    def loss_fn(params: Mapping[str, Tensor], *batch: Any) -> Tensor:
        def velocity(z: Tensor, t: Tensor, *cond: Any) -> Tensor:
            return torch.func.functional_call(net, dict(params), (z, t, *cond))

        return loss_of_net(velocity, *batch)

    return loss_fn
