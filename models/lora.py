"""Low-rank adapters on the linear layers of a frozen network, in a few lines: `peft` is not needed for it.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

from torch import Tensor, nn


class LoRALinear(nn.Module):
    """`base(x) + scale up(down(x))`; the layer it was made of when new, since `up` starts at zero.

    Args:
        base: its weights are frozen.
        rank: of the product that is trained.
        alpha: scale = alpha / rank.

    Raises:
        ValueError: rank below 1.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank is {rank}, but must be at least 1.")
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, base.out_features, bias=False, **like)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.base(x) + self.scale * self.up(self.down(x))


def add_lora(net: nn.Module, rank: int, alpha: float | None = None) -> nn.Module:
    """Freezes `net` and puts an adapter on each of its linear layers, in place; returns it.

    Args:
        alpha: as in `LoRALinear`; the rank by default, so a scale of 1.
    """
    net.requires_grad_(False)
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, LoRALinear(child, rank, rank if alpha is None else alpha))
    return net
