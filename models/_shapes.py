"""Shape and dtype conventions that every file of this package shares."""

from __future__ import annotations

import torch
from torch import Tensor


def per_row(value: Tensor, like: Tensor, name: str = "sigma") -> Tensor:
    """`value` shaped to broadcast against `like`.

    Args:
        value: shape () for the whole batch, or (B,) for one value per row.
        like: shape (B, ...).
        name: what to call `value` in an error message.

    Raises:
        ValueError: `value` has two or more dimensions.
    """
    if value.dim() == 0:
        return value
    if value.dim() == 1:
        return value.reshape(-1, *([1] * (like.dim() - 1)))
    raise ValueError(
        f"{name} has shape {tuple(value.shape)}, but a time is one number for the whole batch, shape (), "
        f"or one per row, shape (B,): pass {name}.reshape(-1) or index it first."
    )


def latent_mean(x: Tensor) -> Tensor:
    """Mean over every dimension but the first: (B, ...) -> (B,)."""
    return x.flatten(1).mean(1)


def at_least_fp32(x: Tensor) -> Tensor:
    """fp16 and bf16 become fp32; fp32 and fp64 stay.

    The log-probability divides a small residual by a small std: flow_grpo does this part in fp32 for the same
    reason (`sde_step_with_logprob`).
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
