"""The velocity for which the Jacobian interpolation is exact."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ._shapes import per_row


class AffineVelocity(nn.Module):
    """`v(z, t) = A z + b t + c` with A, b and c trained.

    dv/dtheta is affine in (z, t). So where the states lie on a line in t, the Jacobian of any step is the
    linear interpolation of those of two others, and a method that interpolates Jacobians makes no error.

    Args:
        shape: of one latent; an int means a vector. A acts on the flattened latent.

    Raises:
        ValueError: an entry of `shape` is not positive.
    """

    def __init__(self, shape: int | Sequence[int]) -> None:
        super().__init__()
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"shape is {shape}, but every dimension of a latent must be at least 1.")
        dim = math.prod(self.shape)
        self.A = nn.Parameter(torch.randn(dim, dim) / math.sqrt(dim))
        self.b = nn.Parameter(torch.randn(dim))
        self.c = nn.Parameter(torch.randn(dim))

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        """Velocity of the states z at time t.

        Args:
            z: (B, *shape).
            t: sigma in [0, 1], shape () or (B,).

        Returns:
            (B, *shape).

        Raises:
            ValueError: a wrong shape.
        """
        if tuple(z.shape[1:]) != self.shape:
            raise ValueError(f"z has shape {tuple(z.shape)}, but this velocity takes (B, {self.shape}).")
        flat = z.flatten(1)
        return (flat @ self.A.mT + self.b * per_row(t, flat, "t") + self.c).reshape(z.shape)
