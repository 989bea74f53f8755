"""A small velocity for vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._shapes import per_row
from .embedding import sinusoidal_embedding

TIME_EMBEDDINGS = ("scalar", "sinusoidal")


class MLPVelocity(nn.Module):
    """SiLU network on `[z, embedding of t]`, the class added to the first hidden layer.

    Args:
        dim: of one latent vector.
        hidden: width of the hidden layers.
        depth: number of hidden layers.
        classes: number of classes; one more row is kept for "no class". None: no class condition.
        time_embedding: "scalar" appends t itself, "sinusoidal" appends `sinusoidal_embedding(t, hidden)`.

    Raises:
        ValueError: a size below 1, or an unknown time embedding.
    """

    def __init__(
        self,
        dim: int,
        hidden: int = 64,
        depth: int = 2,
        classes: int | None = None,
        time_embedding: str = "scalar",
    ) -> None:
        super().__init__()
        if min(dim, hidden, depth) < 1:
            raise ValueError(f"dim, hidden and depth are {dim}, {hidden}, {depth}: all must be at least 1.")
        if time_embedding not in TIME_EMBEDDINGS:
            raise ValueError(f"time_embedding is {time_embedding!r}, but must be one of {TIME_EMBEDDINGS}.")
        self.dim, self.hidden, self.classes, self.time_embedding = dim, hidden, classes, time_embedding
        time_dim = 1 if time_embedding == "scalar" else hidden
        self.first = nn.Linear(dim + time_dim, hidden)
        self.middle = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth - 1))
        self.last = nn.Linear(hidden, dim)
        self.label = None if classes is None else nn.Embedding(classes + 1, hidden)

    def forward(self, z: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        """Velocity of the states z at time t.

        Args:
            z: (B, dim).
            t: sigma in [0, 1], shape () or (B,).
            y: classes, int64 (B,); `classes` itself, or y=None, is "no class".

        Returns:
            (B, dim).

        Raises:
            ValueError: a wrong shape, or a class for a network without classes.
        """
        if z.dim() != 2 or z.shape[1] != self.dim:
            raise ValueError(f"z has shape {tuple(z.shape)}, but this velocity takes (B, {self.dim}).")
        time = per_row(t, z, "t").reshape(-1, 1)
        if self.time_embedding == "sinusoidal":
            time = sinusoidal_embedding(time.squeeze(1), self.hidden)
        time = time.to(z.dtype)
        h = self.first(torch.cat([z, time.expand(z.shape[0], -1)], dim=1))
        if self.label is not None:
            h = h + (self.label.weight[self.classes] if y is None else self.label(y))
        elif y is not None:
            raise ValueError("y was given to a velocity built with classes=None: build it with classes=...")
        for layer in self.middle:
            h = layer(F.silu(h))
        return self.last(F.silu(h))
