"""What `bench.step` measures on: a DiT of a named size, one stored batch of it, and the exact gradient."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from jagg_fx.models import DiT, FlowSDE, add_lora, group_advantages, grpo_loss, make_grpo_loss, rollout, uniform_times
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SAMPLER = FlowSDE(0.7)

CLIP = 0.2
"""Wide, so that a rounded log-probability clips no row: rounding should look like rounding."""

CLASSES = {64: 1000}
"""Of ImageNet-64; every other size has the 10 of CIFAR-10."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Checkpointed(nn.Module):
    """A block that keeps nothing but its inputs, and is computed again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        return checkpoint(self.block, x, cond, use_reentrant=False)


def checkpointed(net: nn.Module) -> nn.Module:
    """The network with each of its blocks checkpointed; it shares parameters and buffers with `net`."""
    shared = {id(x): x for x in chain(net.parameters(), net.buffers())}
    twin = copy.deepcopy(net, shared)
    twin.blocks = nn.ModuleList(Checkpointed(block) for block in twin.blocks)
    return twin


@dataclass
class Problem:
    """One network and one batch, the same for every contender.

    Attributes:
        net: as the options say: with adapters, or with checkpointed blocks.
        batch: states, sigmas, old log-probabilities, advantages, classes.
        velocities: those of the rollout, one for each step.
    """

    net: nn.Module
    batch: tuple[Any, ...]
    velocities: list[Tensor]

    @property
    def T(self) -> int:
        return len(self.velocities)

    @property
    def device(self) -> torch.device:
        return self.batch[0].device

    def loss(self, net: nn.Module, *batch: Any) -> Tensor:
        """The loss of all steps."""
        return make_grpo_loss(SAMPLER, CLIP)(net, *batch)

    def term(self, net: Any, step: int, kept: int) -> Tensor:
        """The part of one step, of a loss that is the mean over `kept` of them."""
        return make_grpo_loss(SAMPLER, CLIP, steps=[step])(net, *self.batch) / kept

    def head(self, velocities: Sequence[Tensor]) -> Tensor:
        """The loss of known velocities."""
        given: Iterator[Tensor] = iter(velocities)
        return grpo_loss(lambda *_: next(given), *self.batch, sampler=SAMPLER, clip_range=CLIP)

    def call(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the network is called with at one step."""
        states, sigmas, _, _, y = self.batch
        return states[step], sigmas[step], y

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.net.parameters() if p.requires_grad]

    def clear(self) -> None:
        for p in self.trained:
            p.grad = None

    def reference(self) -> list[Tensor]:
        """The exact gradient, by eager autograd in fp32."""
        net: Any = self.net
        batch = self.batch
        if any(p.dtype != torch.float32 for p in net.parameters()):
            net, batch = copy.deepcopy(net).float(), (batch[0].float(), *batch[1:])
        loss = self.loss(net, *batch)
        return list(torch.autograd.grad(loss, [p for p in net.parameters() if p.requires_grad]))

    def error(self, reference: Sequence[Tensor]) -> tuple[float, float]:
        """Of what is in `.grad`: |gradient - exact| / |exact|, and the cosine between the two."""
        inner = difference = size = want = 0.0
        for p, exact in zip(self.trained, reference, strict=True):
            got = torch.zeros_like(exact) if p.grad is None else p.grad.to(exact.dtype)
            difference += torch.linalg.vector_norm(got - exact).item() ** 2
            inner += torch.sum(got * exact).item()
            size += torch.linalg.vector_norm(got).item() ** 2
            want += torch.linalg.vector_norm(exact).item() ** 2
        return (difference / want) ** 0.5, inner / (size * want) ** 0.5 if size else 0.0


def make(options: argparse.Namespace) -> Problem:
    """A new network with an on-policy batch of its own; the same for the same options.

    Raises:
        ValueError: sizes that do not fit.
    """
    torch.manual_seed(0)
    dtype, device = DTYPES[options.dtype], torch.device(options.device)
    classes = CLASSES.get(options.image, 10)
    net: nn.Module = DiT.from_size(options.size, options.image, 3, options.patch, classes)
    if options.lora:
        add_lora(net, options.lora)
    # What starts at zero hides the gradient of everything before it.
    for p in net.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.02)
    net.to(device, dtype)
    generator = torch.Generator(device).manual_seed(1)
    noise = torch.randn(options.batch, 3, options.image, options.image, generator=generator, device=device)
    y = torch.randint(classes, (1,), generator=generator, device=device).expand(options.batch).contiguous()
    rewards = torch.randn(options.batch, generator=generator, device=device)
    sigmas = uniform_times(options.T, device=device)
    path = rollout(net, noise.to(dtype), sigmas, y, sampler=SAMPLER, generator=generator, keep_velocities=True)
    assert path.velocities is not None
    if options.checkpoint:
        net = checkpointed(net)
    # One sample has nothing to be compared with.
    advantages = group_advantages(rewards, options.batch) if options.batch > 1 else torch.ones_like(rewards)
    batch = (path.states, path.sigmas, path.log_probs, advantages, y)
    return Problem(net, batch, [v.clone() for v in path.velocities])
