"""Rectified flow: from data x at t = 0 to noise at t = 1 along straight lines.

Source: Liu et al. 2022 (arXiv 2209.03003); Lipman et al. 2022 (arXiv 2210.02747). Time runs as in SD3 and
FLUX: `t` is sigma in [0, 1], 1 is noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._shapes import latent_mean, per_row


def interpolate(x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """`z_t = (1 - t) x + t noise`.

    Args:
        x, noise: (B, ...).
        t: sigma in [0, 1], shape () or (B,).

    Returns:
        (B, ...).

    Raises:
        ValueError: t has two or more dimensions.
    """
    t = per_row(t, x, "t")
    return (1 - t) * x + t * noise


def velocity_target(x: Tensor, noise: Tensor) -> Tensor:
    """`dz_t / dt = noise - x`, the same at every t: (B, ...)."""
    return noise - x


def predict_data(v: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """The x that a velocity points at from z_t: `x = z - t v`. t is sigma, shape () or (B,)."""
    return z - per_row(t, z, "t") * v


def predict_noise(v: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """The noise that a velocity points away to from z_t: `noise = z + (1 - t) v`. t is sigma, () or (B,)."""
    return z + (1 - per_row(t, z, "t")) * v


def flow_matching_loss(velocity: Callable[..., Tensor], x: Tensor, noise: Tensor, t: Tensor, *cond: Any) -> Tensor:
    """Mean squared error of `velocity(z_t, t, *cond)` against `noise - x`: one call.

    Args:
        velocity: a network or function.
        x, noise: (B, ...).
        t: sigma in [0, 1], shape () or (B,).
        cond: handed on to the velocity.

    Returns:
        A scalar, the mean over the batch and the latent dimensions.
    """
    return latent_mean((velocity(interpolate(x, noise, t), t, *cond) - velocity_target(x, noise)) ** 2).mean()


def flow_matching_path_loss(
    velocity: Callable[..., Tensor], x: Tensor, noise: Tensor, times: Tensor, *cond: Any
) -> Tensor:
    """Mean of `flow_matching_loss` over T times of the same pair (x, noise): T calls, the states on a line.

    Args:
        velocity: a network or function.
        x, noise: (B, ...).
        times: sigma in [0, 1], shape (T,) or (T, B).
        cond: handed on to every call.

    Returns:
        A scalar.
    """
    return torch.stack([flow_matching_loss(velocity, x, noise, t, *cond) for t in times.unbind(0)]).mean()
