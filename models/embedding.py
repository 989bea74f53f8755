"""Embeddings of time and place that have no parameters."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._shapes import at_least_fp32

TIME_SCALE = 1000.0
"""Sinusoidal embeddings are made for timesteps 0..1000; the velocities here take sigma in [0, 1]."""

MAX_PERIOD = 10_000.0
"""Longest period of a sinusoidal embedding (Vaswani et al. 2017, section 3.5)."""


def _waves(position: Tensor, dim: int) -> Tensor:
    half = dim // 2
    index = torch.arange(half, dtype=position.dtype, device=position.device)
    angle = position.unsqueeze(-1) * torch.exp(-math.log(MAX_PERIOD) / half * index)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def sinusoidal_embedding(t: Tensor, dim: int, scale: float = TIME_SCALE) -> Tensor:
    """Sinusoidal embedding of a time.

    `[cos(scale t w_k), sin(scale t w_k)]`, `w_k = 10000^(-k / (dim / 2))`, k = 0 .. dim/2 - 1.
    Source: Vaswani et al. 2017 (arXiv 1706.03762) section 3.5, in the order of DiT's `TimestepEmbedder`
    (Peebles and Xie 2022, arXiv 2212.09748).

    Args:
        t: any shape, any floating dtype, sigma in [0, 1].
        dim: size of the embedding, even.
        scale: what t is multiplied by first.

    Returns:
        t.shape + (dim,), in the dtype of t but never below fp32.

    Raises:
        ValueError: `dim` is odd or not positive.
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"dim is {dim}, but half of it are cosines and half sines: pass an even number >= 2.")
    return _waves(scale * at_least_fp32(t), dim)


def grid_embedding(height: int, width: int, dim: int) -> Tensor:
    """Fixed embedding of the places of an image: half of `dim` tells the row, half the column.

    Source: the 2-D sine-cosine embedding of MAE and DiT (arXiv 2111.06377, 2212.09748).

    Returns:
        (height * width, dim) in fp32, rows first.

    Raises:
        ValueError: `dim` is not a positive multiple of 4.
    """
    if dim < 4 or dim % 4:
        raise ValueError(f"dim is {dim}, but rows and columns take a half each: pass a multiple of 4.")
    row = _waves(torch.arange(height, dtype=torch.float32), dim // 2)
    column = _waves(torch.arange(width, dtype=torch.float32), dim // 2)
    row = row[:, None].expand(height, width, -1)
    column = column[None].expand(height, width, -1)
    return torch.cat([row, column], dim=-1).reshape(height * width, dim)
