"""Diffusion transformer (DiT) with adaLN-zero blocks.

Source: Peebles and Xie 2022, "Scalable Diffusion Models with Transformers", arXiv 2212.09748, section 3.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from .embedding import grid_embedding, sinusoidal_embedding

FREQUENCIES = 256
"""Size of the sinusoidal time embedding in front of the time MLP, as in DiT."""

MLP_RATIO = 4
"""Hidden width of a block's MLP over its width, as in DiT."""


class DiTSize(NamedTuple):
    """Width of a token, number of blocks, attention heads."""

    width: int
    depth: int
    heads: int


DIT_SIZES: dict[str, DiTSize] = {
    "tiny": DiTSize(64, 2, 4),  # 0.2M
    "mini": DiTSize(128, 4, 4),  # 1.3M
    "small": DiTSize(384, 12, 6),  # 33M: DiT-S
    "base": DiTSize(768, 12, 12),  # 130M: DiT-B
    "300M": DiTSize(1024, 16, 16),  # 305M
}
"""Named sizes; the comment is the number of parameters for small images."""


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)


class DiTBlock(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the condition; the identity when new."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = _norm(width), _norm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, MLP_RATIO * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(MLP_RATIO * width, width),
        )
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def attention(self, x: Tensor) -> Tensor:
        """(B, N, width) -> (B, N, width)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        """x (B, N, width), cond (B, width) or (1, width) -> (B, N, width)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(cond)).chunk(6, dim=-1)
        x = x + gate1.unsqueeze(1) * self.attention(_modulate(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(_modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    """Class-conditional diffusion transformer as a velocity.

    New, it returns zero everywhere (the last layer starts at zero, as in DiT).

    Args:
        image_size: height and width in pixels, one int or (H, W); multiples of `patch_size`.
        channels: of the image.
        patch_size: side of the square that becomes one token.
        width, depth, heads: of a token, number of blocks, attention heads.
        classes: number of classes; one more row, `null_class`, means "no class". None: no class condition.

    Raises:
        ValueError: sizes that do not divide.
    """

    def __init__(
        self,
        image_size: int | tuple[int, int],
        channels: int,
        patch_size: int,
        width: int,
        depth: int,
        heads: int,
        classes: int | None = None,
    ) -> None:
        super().__init__()
        height, columns = (image_size, image_size) if isinstance(image_size, int) else image_size
        if height % patch_size or columns % patch_size:
            raise ValueError(
                f"an image of {height}x{columns} cannot be cut into patches of {patch_size}x{patch_size}: "
                "choose a patch_size that divides both sides."
            )
        if width % heads or width % 4:
            raise ValueError(f"width is {width}, but must be a multiple of heads={heads} and of 4.")
        self.shape = (channels, height, columns)
        self.patch_size, self.classes = patch_size, classes
        self.patch_in = nn.Linear(channels * patch_size**2, width)
        self.time = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.label = None if classes is None else nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.norm = _norm(width)
        self.modulation = nn.Linear(width, 2 * width)
        self.patch_out = nn.Linear(width, channels * patch_size**2)
        self.place: Tensor
        places = grid_embedding(height // patch_size, columns // patch_size, width)
        self.register_buffer("place", places, persistent=False)
        for layer in (self.modulation, self.patch_out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        if self.label is not None:
            nn.init.normal_(self.label.weight, std=0.02)

    @classmethod
    def from_size(
        cls,
        name: str,
        image_size: int | tuple[int, int],
        channels: int,
        patch_size: int,
        classes: int | None = None,
    ) -> DiT:
        """A DiT of one of the `DIT_SIZES`.

        Raises:
            ValueError: an unknown name, or sizes that do not divide.
        """
        if name not in DIT_SIZES:
            raise ValueError(f"there is no DiT size {name!r}: choose one of {', '.join(DIT_SIZES)}.")
        return cls(image_size, channels, patch_size, *DIT_SIZES[name], classes=classes)

    @property
    def null_class(self) -> int:
        """The class that means "no class", for classifier-free guidance.

        Raises:
            ValueError: the network was built without classes.
        """
        if self.classes is None:
            raise ValueError("a DiT built with classes=None has no null class: build it with classes=...")
        return self.classes

    def patchify(self, z: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, tokens, C p p), tokens row by row."""
        p = self.patch_size
        z = z.unflatten(3, (-1, p)).unflatten(2, (-1, p))
        return z.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """The inverse of `patchify`."""
        channels, height, width = self.shape
        p = self.patch_size
        tokens = tokens.unflatten(1, (height // p, width // p)).unflatten(3, (channels, p, p))
        return tokens.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)

    def forward(self, z: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        """Velocity of the images z at time t.

        Args:
            z: (B, C, H, W), in the dtype of the parameters.
            t: sigma in [0, 1], shape () or (B,), any floating dtype.
            y: classes, int64 (B,); `null_class`, or y=None, is "no class".

        Returns:
            (B, C, H, W).

        Raises:
            ValueError: a wrong shape, or a class for a network without classes.
        """
        if tuple(z.shape[1:]) != self.shape:
            raise ValueError(f"z has shape {tuple(z.shape)}, but this DiT takes (B, *{self.shape}).")
        if t.dim() > 1:
            raise ValueError(f"t has shape {tuple(t.shape)}, but must be () or (B,).")
        cond = self.time(sinusoidal_embedding(t.reshape(-1), FREQUENCIES).to(z.dtype))
        if self.label is not None:
            cond = cond + (self.label.weight[self.classes] if y is None else self.label(y))
        elif y is not None:
            raise ValueError("y was given to a DiT built with classes=None: build it with classes=...")
        x = self.patch_in(self.patchify(z)) + self.place
        for block in self.blocks:
            x = block(x, cond)
        shift, scale = self.modulation(F.silu(cond)).chunk(2, dim=-1)
        return self.unpatchify(self.patch_out(_modulate(self.norm(x), shift, scale)))


def count_parameters(net: nn.Module) -> int:
    """Number of trained numbers in a network, shared ones counted once."""
    return sum(p.numel() for p in net.parameters() if p.requires_grad)
