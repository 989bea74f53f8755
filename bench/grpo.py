"""On-policy GRPO of a flow model on real images, with every estimator, in paired seeds.

    python -m bench.grpo              about 25 minutes on one core; goes on where it was stopped
    python -m bench.grpo --help       every option

A class-conditional velocity MLP is pretrained on scikit-learn's digits by flow matching and stopped early, as in
`bench.demo`: the reward is the probability that one classifier gives to the requested class, and a judge of another
kind, trained on other images, takes no part. From there it is post-trained on Flow-SDE trajectories, one optimiser
step a rollout, for all seeds and learning rates of an arm at once (`bench.runs`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import torch
from jagg_fx.models import (
    FlowSDE,
    MLPVelocity,
    clipped_ratio_loss,
    count_parameters,
    group_advantages,
    rollout,
    uniform_times,
)
from torch import Tensor, nn

from bench import data
from bench.demo_progress import bar
from bench.demo_train import (
    EVAL_SEED,
    Task,
    accuracy,
    judge_classifier,
    pretrain,
    reward_classifier,
    train_classifier,
)
from bench.grpo_report import draw, markdown
from bench.grpo_study import ARMS, CURVE_EVERY, ETA, GROUP, SAMPLES, Arm, Results, jobs
from bench.runs import Adam, Gradient, Nets, cosine, exact_gradient, relative_error
from jagg_fx.estimators import Exact

HIDDEN, DEPTH = 96, 2
CLASSIFIER_STEPS = 600
START_REWARD = 0.5
CLIP = 1e-3
BETAS = (0.9, 0.99)
STEPS, SEEDS = 60, 8
LRS = (5e-4, 1e-3, 2e-3)
CHECK_EVERY = 20


# Setting


class Flat(nn.Module):
    """A velocity of vectors as one of images."""

    def __init__(self, net: MLPVelocity) -> None:
        super().__init__()
        self.net = net

    def forward(self, z: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return self.net(z.flatten(1), t, y).reshape(z.shape)


class Setting(NamedTuple):
    """What all arms start from.

    Attributes:
        images: all real images.
        reward, judge: classifiers.
        net: pretrained.
        notes: for people.
    """

    images: data.Images
    reward: nn.Module
    judge: nn.Module
    net: MLPVelocity
    notes: list[str]


def prepare() -> Setting:
    """Classifiers and pretraining, as in the demo."""
    images = data.load_digits()
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    fifth = len(images) // 5
    training, test = images[: 4 * fifth], images[4 * fifth :]
    torch.manual_seed(0)
    reward, judge = (make(images.shape, images.classes) for make in (reward_classifier, judge_classifier))
    for i, (net, title) in enumerate([(reward, "reward classifier"), (judge, "judge classifier")]):
        part = training[2 * i * fifth : 2 * (i + 1) * fifth]
        train_classifier(net, part, CLASSIFIER_STEPS, 128, i, title)
        net.requires_grad_(False)
    torch.manual_seed(0)
    velocity = MLPVelocity(images.pixels[0].numel(), HIDDEN, DEPTH, images.classes, "sinusoidal")
    task = Task(images.shape, images.classes, reward, judge, FlowSDE(ETA), uniform_times(16), 128, GROUP)
    flat = Flat(velocity)
    steps = pretrain(
        flat,
        training,
        task,
        stop_at=START_REWARD,
        steps=6000,
        batch=128,
        seed=0,
        eval_samples=500,  # type: ignore[arg-type]
    )
    score = task.score(flat, SAMPLES)
    notes = [
        f"velocity: MLP of {DEPTH} x {HIDDEN}, sinusoidal time, {count_parameters(velocity):,} parameters, "
        f"{steps} steps of flow matching; reward {score.reward:.3f}, judge {score.judge:.3f} before post-training",
        f"held-out images: reward classifier {accuracy(reward, test):.1%}, judge {accuracy(judge, test):.1%}",
    ]
    return Setting(images, reward, judge, velocity, notes)


def features_of(judge: nn.Module, pixels: Tensor) -> Tensor:
    """What the judge's last layer reads."""
    with torch.no_grad():
        return judge[:-1](pixels)  # type: ignore[index]


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """Squared Frechet distance of two Gaussians with the moments of samples (N, F).

    The trace of the root of A B is that of the root of (root A) B (root A), which is symmetric, so that features that
    are always zero do no harm.
    """
    mean, first, second = a.mean(0) - b.mean(0), np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    values, vectors = scipy.linalg.eigh(first)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    cross = np.sqrt(scipy.linalg.eigvalsh(root @ second @ root).clip(0)).sum()
    return float(mean @ mean + np.trace(first) + np.trace(second) - 2 * cross)


# Training


def policy_head(states: Tensor, sigmas: Tensor, old: Tensor, advantages: Tensor) -> Callable[[Tensor], Tensor]:
    """The GRPO loss of every run from its velocities (R, T, B, D): that of `jagg_fx.models.grpo_loss`.

    states (R, T + 1, B, D), sigmas (T + 1,), old (R, T, B), advantages (R, B).
    """
    runs, steps, rows = old.shape
    sampler, flat = FlowSDE(ETA), (runs * steps * rows, states.shape[-1])
    z, z_next = states[:, :-1].reshape(flat), states[:, 1:].reshape(flat)
    sigma, sigma_next = (
        s.expand(runs, -1)[:, :, None].expand(old.shape).reshape(-1) for s in (sigmas[:-1], sigmas[1:])
    )
    weight = advantages[:, None].expand(old.shape).reshape(-1)

    def head(v: Tensor) -> Tensor:
        step = sampler.step(v.reshape(flat), z, sigma, sigma_next)
        log_prob = sampler.log_prob(z_next, step.mean, step.std)
        return clipped_ratio_loss(log_prob, old.reshape(-1), weight, CLIP).reshape(old.shape).mean((1, 2))

    return head


class Rollouts:
    """On-policy trajectories of all runs."""

    def __init__(self, setting: Setting, T: int) -> None:
        self.setting, self.sigmas = setting, uniform_times(T)
        self.sampler = FlowSDE(ETA)

    def draw(self, nets: Nets, y: Tensor, generator: torch.Generator, noise: Tensor | None = None) -> Any:
        """The trajectory, rows of all runs after one another; y (R, B)."""
        runs, rows = y.shape
        dim = self.setting.net.dim

        def velocity(z: Tensor, sigma: Tensor) -> Tensor:
            features = nets.features(z.reshape(runs, rows, dim), sigma, y)
            return nets.velocity(features).reshape(-1, dim)

        noise = torch.randn(runs * rows, dim, generator=generator) if noise is None else noise
        return rollout(velocity, noise, self.sigmas, sampler=self.sampler, generator=generator)

    @torch.no_grad()
    def rewards(self, samples: Tensor, y: Tensor) -> Tensor:
        """(R, B) from samples (R B, D)."""
        return self.setting.reward(samples).softmax(1).gather(1, y.reshape(-1, 1)).reshape(y.shape)

    def score(self, nets: Nets, samples: int) -> tuple[Tensor, Tensor]:
        """Held-out reward of every run (R,), and the samples (R, samples, D): the same noise for all runs."""
        generator = torch.Generator().manual_seed(EVAL_SEED)
        found = []
        for i in range(nets.runs):
            one = nets.copy()
            one.weights = [w[i : i + 1] for w in nets.weights]
            generator.manual_seed(EVAL_SEED)
            y = (torch.arange(samples) % self.setting.images.classes)[None]
            found.append(self.draw(one, y, generator).samples)
        x = torch.stack(found)
        y = (torch.arange(samples) % self.setting.images.classes).expand(nets.runs, -1)
        return self.rewards(x.flatten(0, 1), y).mean(1), x


def train(
    arm: Arm, setting: Setting, T: int, batch: int, lrs: Sequence[float], steps: int, seeds: int
) -> dict[str, Any]:
    """All seeds and learning rates of an arm; lists are (learning rates, seeds) unless said otherwise."""
    copies, classes = len(lrs), setting.images.classes
    runs = copies * seeds
    nets = Nets([setting.net] * runs)
    rollouts = Rollouts(setting, T)
    rates = torch.tensor(lrs).repeat_interleave(seeds) * arm.lr_factor
    adam = Adam(nets.weights, rates, BETAS)
    gradient = Gradient(arm.estimator, arm.W)
    generator = torch.Generator().manual_seed(0)
    times = rollouts.sigmas[:-1].tolist()
    curve, batch_rewards, seconds = [], [], []
    checks: list[dict[str, Any]] = []

    def shaped(x: Tensor) -> list[list[float]]:
        return x.reshape(copies, seeds).tolist()

    for step in range(steps + 1):
        if isinstance(arm.estimator, Exact) and step % CURVE_EVERY == 0 and step < steps:
            curve.append({"step": step, "reward": shaped(rollouts.score(nets, SAMPLES)[0])})
        if step == steps:
            break
        prompts = torch.randint(classes, (seeds, batch // GROUP), generator=generator)
        y = prompts.repeat_interleave(GROUP, 1).repeat(copies, 1)
        # The same noise for the copies of a seed; the noise of the steps differs, but not between arms.
        noise = torch.randn(seeds, batch, setting.net.dim, generator=generator).repeat(copies, 1, 1).flatten(0, 1)
        path = rollouts.draw(nets, y, generator, noise)
        rewards = rollouts.rewards(path.samples, y)
        advantages = group_advantages(rewards.flatten(), GROUP).reshape(runs, batch)
        states = path.states.reshape(T + 1, runs, batch, -1).transpose(0, 1)
        old = path.log_probs.reshape(T, runs, batch).transpose(0, 1)
        began = time.perf_counter()
        head = policy_head(states, path.sigmas, old, advantages)
        features = nets.features(states[:, :-1], path.sigmas[:-1, None], y[:, None])
        found, _ = gradient(nets, features, times, head)
        seconds.append(time.perf_counter() - began)
        if step % CHECK_EVERY == 0 and not isinstance(arm.estimator, Exact):
            want, _ = exact_gradient(nets, features, head)
            agreement = {"cosine": shaped(cosine(found, want)), "error": shaped(relative_error(found, want))}
            checks.append({"step": step} | agreement)
        adam.step(found)
        batch_rewards.append(rewards.mean(1))
    reward, x = rollouts.score(nets, SAMPLES)
    curve.append({"step": steps, "reward": shaped(reward)})
    y = torch.arange(SAMPLES) % classes
    images = x.reshape(runs, SAMPLES, *setting.images.shape)
    real = features_of(setting.judge, setting.images.pixels).numpy()
    judged, distance = [], []
    for own in images:
        with torch.no_grad():
            judged.append((setting.judge(own).argmax(1) == y).float().mean())
        finite = bool(own.isfinite().all())
        distance.append(frechet(features_of(setting.judge, own).numpy(), real) if finite else float("nan"))
    return {
        "reward": shaped(reward),
        "judge": shaped(torch.stack(judged)),
        "frechet": shaped(torch.tensor(distance)),
        "curve": curve,
        # (steps, learning rates): the mean over seeds
        "batch_reward": [r.reshape(copies, seeds).mean(1).tolist() for r in batch_rewards],
        "mean_batch_reward": shaped(torch.stack(batch_rewards).mean(0)),
        "agreement": checks,
        "gradient_seconds": statistics.median(seconds),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is not in the JSON yet, then writes the tables and the picture."""
    p = argparse.ArgumentParser(prog="python -m bench.grpo", description=__doc__.split("\n\n")[0])
    p.add_argument("--steps", type=int, default=STEPS, help="optimiser steps")
    p.add_argument("--seeds", type=int, default=SEEDS, help="paired seeds")
    p.add_argument("--lrs", type=float, nargs="+", default=list(LRS), help="learning rates")
    p.add_argument("--minutes", type=float, default=float("inf"), help="start no arm after that long")
    p.add_argument("--threads", type=int, default=1, help="threads of torch")
    p.add_argument("--out", type=Path, default=Path("docs/bench"), help="folder of the results")
    p.add_argument("--only-write", action="store_true", help="train nothing")
    options = p.parse_args(argv)
    torch.set_num_threads(options.threads)
    settings = {"steps": options.steps, "seeds": options.seeds, "lrs": options.lrs, "hidden": HIDDEN, "depth": DEPTH}
    results = Results(options.out / "grpo.json", settings)
    missing = [] if options.only_write else [job for job in jobs() if results.of(job) is None]
    if missing:
        began = time.perf_counter()
        setting = prepare()
        results.content["notes"] = setting.notes
        with bar("GRPO", len(missing)) as progress:
            for job in missing:
                if time.perf_counter() - began > 60 * options.minutes:
                    break
                progress.set_postfix_str(job.key, refresh=False)
                arm = ARMS[job.arm]
                results.add(job, train(arm, setting, job.T, job.batch, options.lrs, options.steps, options.seeds))
                progress.update()
    (options.out / "grpo.md").write_text(markdown(results), encoding="utf-8")
    draw(results, options.out / "grpo.png")


if __name__ == "__main__":
    main()
