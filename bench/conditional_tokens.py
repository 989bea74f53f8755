"""Where plain JAGG loses, and which estimator does not: conditional multi-token diffusion with a tiny MLP.

    python -m bench.conditional_tokens                  about 25 minutes on one core; goes on where it was stopped
    python -m bench.conditional_tokens --help           every option

After the public benchmark that found plain JAGG 2.6 % worse than exact in 8 of 8 pairs: 8 tokens of 4 dimensions,
4 classes of 2 modes, a velocity MLP of 2 x 64 SiLU units on the flattened tokens, t and the class; flow matching, a
group being W times on one path z_t = (1 - t) x + t eps inside a span of t; Adam, paired seeds, the learning rate of
every arm chosen of three on validation data; test MSE on held-out data, of an average of the weights.

Arms that looked best, and ideas that came after looking, are judged on fresh seeds and data only, at the learning
rates that were chosen before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jagg_fx.models import MLPVelocity
from torch import Tensor

from bench.conditional_arms import ARMS, Arm
from bench.conditional_report import draw, markdown
from bench.conditional_study import BATCH, LRS, STAGES, STEPS, Results, jobs
from bench.demo_progress import bar
from bench.runs import Adam, Gradient, Nets

TOKENS, DIMS, CLASSES, MODES, HIDDEN = 8, 4, 4, 2, 64
NOISE = 0.12
"""Std within a mode, for a test MSE near that of the public benchmark, .32."""
TRAIN, VALIDATE, TEST = 2048, 1024, 2048
AVERAGE = 3
"""Of the polynomial-decay average of the weights (Shamir and Zhang 2013, arXiv 1212.1824): over about the last
quarter of the steps, whatever their number."""


class Data(NamedTuple):
    """Of all seeds: x (S, N, D) and classes y (S, N)."""

    x: Tensor
    y: Tensor

    def part(self, start: int, size: int) -> Data:
        return Data(self.x[:, start : start + size], self.y[:, start : start + size])


def draw_data(seeds: Sequence[int]) -> Data:
    """Every seed has modes of its own: a point of all tokens for each mode of each class, and noise around it."""
    xs, ys = [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        modes = torch.randn(CLASSES, MODES, TOKENS * DIMS, generator=generator)
        size = TRAIN + VALIDATE + TEST
        y = torch.randint(CLASSES, (size,), generator=generator)
        mode = torch.randint(MODES, (size,), generator=generator)
        xs.append(modes[y, mode] + NOISE * torch.randn(size, TOKENS * DIMS, generator=generator))
        ys.append(y)
    return Data(torch.stack(xs), torch.stack(ys))


def draw_nets(seeds: Sequence[int], embedding: str) -> Nets:
    nets = []
    for seed in seeds:
        torch.manual_seed(seed)
        nets.append(MLPVelocity(TOKENS * DIMS, HIDDEN, 2, CLASSES, embedding))
    return Nets(nets)


def states(x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    return (1 - t[..., None]) * x + t[..., None] * noise


class Held:
    """Validation and test: one time each, distributed as in training, so that it is the loss that is trained."""

    def __init__(self, nets: Nets, data: Data, W: int, span: float, copies: int) -> None:
        generator = torch.Generator().manual_seed(7)
        noise = torch.randn(data.x.shape, generator=generator)
        step = torch.randint(W, data.y.shape, generator=generator)
        t = (1 - span) * torch.rand(data.y.shape, generator=generator) + span * step / (W - 1)
        self.features = nets.features(states(data.x, noise, t), t, data.y)
        self.target, self.copies = noise - data.x, copies

    @torch.no_grad()
    def mse(self, nets: Nets) -> tuple[Tensor, Tensor]:
        """Validation and test, (learning rates, seeds) each."""
        seeds = len(self.target)
        squared = torch.stack(
            [
                (Nets.velocity(nets, self.features, [w[i : i + seeds] for w in nets.weights]) - self.target) ** 2
                for i in range(0, seeds * self.copies, seeds)
            ]
        ).mean(-1)
        return squared[:, :, :VALIDATE].mean(-1), squared[:, :, VALIDATE:].mean(-1)


def readings(arm: Arm, W: int, steps: int) -> dict[str, int]:
    """After how many steps an arm is read: at equal steps, and where it has cost what endpoints have at `steps`."""
    found = {"steps": steps}
    if not arm.scheduled:
        ends = ARMS["endpoints"]
        found["backwards"] = round(steps * ends.backwards(W) / arm.backwards(W))
        found["cost"] = round(steps * ends.cost(W) / arm.cost(W))
    return found


def train(
    arm: Arm, W: int, span: float, seeds: Sequence[int], lrs: Sequence[float], steps: int, embedding: str = "scalar"
) -> dict[str, Any]:
    """All seeds and learning rates at once: {reading: {"steps", "validate", "test"}}, (learning rates, seeds)."""
    data = draw_data(seeds)
    training = data.part(0, TRAIN)
    start = draw_nets(seeds, embedding)
    copies, count = len(lrs), len(seeds)
    held = Held(start, data.part(TRAIN, VALIDATE + TEST), W, span, copies)
    nets = start.repeat(copies)
    mean = nets.copy()
    adam = Adam(nets.weights, torch.tensor(lrs).repeat_interleave(count))
    gradient = Gradient(arm.make(W, steps), W)
    generator = torch.Generator().manual_seed(seeds[0])
    of_seed = torch.arange(count)[:, None]
    lam = [k / (W - 1) for k in range(W)]
    at = readings(arm, W, steps)
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def features(x: Tensor, noise: Tensor, y: Tensor, first: Tensor, positions: Sequence[float]) -> Tensor:
        t = first[:, None] + span * torch.tensor(positions)[:, None]
        z = states(x[:, None], noise[:, None], t)
        return start.features(z, t, y[:, None]).repeat(copies, 1, 1, 1)

    for step in range(1, max(at.values()) + 1):
        rows = torch.randint(TRAIN, (count, BATCH), generator=generator)
        x, y = training.x[of_seed, rows], training.y[of_seed, rows]
        noise = torch.randn(x.shape, generator=generator)
        first = (1 - span) * torch.rand(rows.shape, generator=generator)
        target = (noise - x)[:, None].repeat(copies, 1, 1, 1)
        gradients, _ = gradient(
            nets,
            features(x, noise, y, first, lam),
            lam,
            lambda v, target=target: ((v - target) ** 2).mean((1, 2, 3)),
            partial(features, x, noise, y, first),
        )
        adam.step(gradients)
        for average, weight in zip(mean.weights, nets.weights, strict=True):
            average.lerp_(weight, (1 + AVERAGE) / (step + AVERAGE))
        if step in at.values():
            found[step] = held.mse(mean)
    return {
        reading: {"steps": step, "validate": found[step][0].tolist(), "test": found[step][1].tolist()}
        for reading, step in at.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is not in the JSON yet, then writes the tables and the picture."""
    p = argparse.ArgumentParser(prog="python -m bench.conditional_tokens", description=__doc__.split("\n\n")[0])
    p.add_argument("--pairs", type=int, default=8, help="paired seeds")
    p.add_argument("--fresh", type=int, default=24, help="pairs of the fresh seeds")
    p.add_argument("--steps", type=int, default=STEPS, help="optimiser steps")
    p.add_argument("--minutes", type=float, default=float("inf"), help="start no training after that long")
    p.add_argument("--threads", type=int, default=1, help="threads of torch")
    p.add_argument("--out", type=Path, default=Path("docs/bench"), help="folder of the results")
    p.add_argument("--only-write", action="store_true", help="train nothing")
    options = p.parse_args(argv)
    if options.pairs < 2 or options.fresh < 2:
        p.error("a comparison needs at least two pairs")
    torch.set_num_threads(options.threads)
    settings = {
        "pairs": options.pairs,
        "fresh": options.fresh,
        "steps": options.steps,
        "batch": BATCH,
        "lrs": list(LRS),
    }
    results = Results(options.out / "conditional_tokens.json", settings)
    missing = [] if options.only_write else [job for job in jobs() if not results.has(job)]
    began = time.perf_counter()
    with bar("conditional tokens", len(missing)) as progress:
        for job in missing:
            if time.perf_counter() - began > 60 * options.minutes:
                break
            progress.set_postfix_str(job.key, refresh=False)
            start = STAGES[job.stage]
            if job.stage == "first":
                seeds, lrs = range(options.pairs), LRS
            else:
                seeds, lrs = range(start, start + options.fresh), (results.lr(job),)
            began_job = time.perf_counter()
            result = train(ARMS[job.arm], job.W, job.span, seeds, lrs, options.steps, job.embedding)
            results.add(job, result | {"seconds": time.perf_counter() - began_job})
            progress.update()
    (options.out / "conditional_tokens.md").write_text(markdown(results), encoding="utf-8")
    draw(results, options.out / "conditional_tokens.png")


if __name__ == "__main__":
    main()
