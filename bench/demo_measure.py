"""How close a gradient is to the exact one, and how long it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jagg_fx.models import flow_matching_loss, make_grpo_loss
from torch import Tensor, nn

from bench.data import Images
from bench.demo_progress import bar
from bench.demo_train import gradient

Loss = Callable[..., Tensor]
Batch = tuple[Any, ...]


class Agreement(NamedTuple):
    """Of a gradient with the exact one: cosine, and |difference| / |exact|; means over batches."""

    cosine: float
    error: float


class RandomSteps:
    """The same loss on `kept` of the timesteps, drawn anew at every call: the cheap baseline."""

    def __init__(self, total: int, kept: int, seed: int, **options: Any) -> None:
        self.total, self.kept, self.options = total, kept, options
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, net: nn.Module, *batch: Any) -> Tensor:
        order = torch.randperm(self.total, generator=self.generator)[: self.kept]
        return make_grpo_loss(steps=sorted(order.tolist()), **self.options)(net, *batch)


def _flat(loss_fn: Loss, net: nn.Module, batch: Batch) -> Tensor:
    gradient(loss_fn, net, batch)
    return torch.cat([p.grad.flatten().double() for p in net.parameters() if p.grad is not None])


def agreement(
    exact: Loss, others: Mapping[str, Loss], net: nn.Module, batches: Sequence[Batch], title: str
) -> dict[str, Agreement]:
    """Each of `others` against `exact`, batch by batch."""
    found: dict[str, list[Agreement]] = {name: [] for name in others}
    with bar(title, len(batches)) as progress:
        for batch in batches:
            want = _flat(exact, net, batch)
            for name, loss_fn in others.items():
                got = _flat(loss_fn, net, batch)
                cosine = (got @ want / (got.norm() * want.norm())).item()
                found[name].append(Agreement(cosine, ((got - want).norm() / want.norm()).item()))
            progress.update()
    return {
        name: Agreement(statistics.fmean(a.cosine for a in all_), statistics.fmean(a.error for a in all_))
        for name, all_ in found.items()
    }


def best_threads(net: nn.Module, images: Images, batch: int, rounds: int = 5) -> int:
    """One thread, or as many as torch would take: whichever does a step of flow matching sooner.

    On cores that others use too, threads wait for each other, and two can take several times as long as one.
    """
    drawn = images.draw(batch, torch.Generator().manual_seed(0))
    default = torch.get_num_threads()
    seconds: dict[int, list[float]] = {n: [] for n in {default, 1}}
    for _ in range(rounds + 1):
        for threads, spent in seconds.items():
            torch.set_num_threads(threads)
            began = time.perf_counter()
            flow_matching_loss(net, drawn.pixels, drawn.pixels, torch.tensor(0.5), drawn.labels).backward()
            spent.append(time.perf_counter() - began)
    net.zero_grad(set_to_none=True)
    # The first round warms up.
    return min(seconds, key=lambda n: statistics.median(seconds[n][1:]))


def step_seconds(
    losses: Mapping[str, Loss], net: nn.Module, batch: Batch, rounds: int, title: str
) -> dict[str, list[float]]:
    """Seconds of loss and backward, the contenders in turn: a busy moment of the machine meets them all."""
    names = list(losses)
    for name in names:
        gradient(losses[name], net, batch)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with bar(title, rounds) as progress:
        for i in range(rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                began = time.perf_counter()
                gradient(losses[name], net, batch)
                seconds[name].append(time.perf_counter() - began)
            progress.update()
    return seconds
